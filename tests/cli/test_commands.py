"""The command `eformer` as a program: its output and exit codes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from eformer import checkpoint
from support.commands import EFORMER, run
from support.damage import flip
from support.programs import on_terminal

ORBAX = Path(__file__).parents[1] / "compat" / "orbax"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "model"
    layers = [{"w": jnp.full((64, 64), i, jnp.bfloat16), "b": jnp.zeros(64)} for i in range(12)]
    checkpoint.save({"layers": layers, "step": 7, "embed": np.ones((100, 8))}, path, metadata={"run": "a1"})
    return path


def test_inspect_shows_the_format_and_the_tree(model):
    shown = run("inspect", model).stdout
    for part in (
        "safetensors",
        "25 arrays",
        "eformer",
        "run = 'a1'",
        "0-11",
        "×12",
        "bfloat16[64, 64]",
        "= 7",
    ):
        assert part in shown
    assert "\x1b" not in shown, "no colours where a program reads it"


def test_inspect_for_programs(model):
    facts = json.loads(run("inspect", model, "--json").stdout)
    tree = facts["trees"][""]
    assert (tree["arrays"], tree["values"], tree["digests"]) == (25, 1, True)
    assert tree["parameters"] == 12 * (64 * 64 + 64) + 800
    fingerprints = checkpoint.inspect(model).trees[""].fingerprints
    step = {"name": "step", "value": 7, "fingerprint": fingerprints["step"]}
    assert step in tree["leaves"]


def test_ls_has_one_line_a_leaf(model):
    lines = run("ls", model).stdout.splitlines()
    assert len(lines) == 26
    assert run("ls", model, "layers.*.b").stdout.count("float32[64]") == 12
    (leaf,) = json.loads(run("ls", model, "embed", "--json").stdout)
    assert leaf == {
        "name": "embed", "dtype": "float64", "shape": [100, 8], "bytes": 6400, "sharding": "one device",
        "fingerprint": checkpoint.inspect(model).trees[""].fingerprints["embed"],
    }  # fmt: skip


def test_ls_does_not_shorten_piped_output(tmp_path):
    name = "x" * 300
    checkpoint.save({name: np.ones(2)}, tmp_path / "c")
    assert name in run("ls", tmp_path / "c", COLUMNS="40").stdout


def test_narrow_terminals_are_not_overrun(model):
    shown, code = on_terminal("ls", model, columns=50)
    assert code == 0
    assert max(len(line.rstrip("\r")) for line in shown.split("\n")) <= 60


def test_terminals_have_colours_and_pipes_do_not(model):
    assert "\x1b[" in on_terminal("inspect", model)[0]
    assert "\x1b[" not in run("inspect", model).stdout


def test_verify_says_that_all_is_well(model):
    assert "every digest matches" in run("verify", model).stdout
    assert json.loads(run("verify", model, "--json").stdout)["ok"] is True
    assert run("verify", model, "--quiet").stdout == ""


def test_verify_shows_a_bar_on_a_terminal(model):
    shown, code = on_terminal("verify", model, columns=120)
    assert code == 0
    assert "verifying" in shown
    assert "100%" in shown or "kB" in shown


def test_verify_names_the_leaf_the_file_and_the_bytes(model, tmp_path):
    path = Path(shutil.copytree(model, tmp_path / "damaged"))
    flip(path / "model.safetensors", -10)
    shown = run("verify", path, code=1).stdout
    assert "1 damaged" in shown
    assert "leaf '" in shown
    assert "model.safetensors" in shown
    assert len(json.loads(run("verify", path, "--json", code=1).stdout)["damages"]) == 1
    assert run("verify", path, "-q", code=1).stdout == ""


@pytest.fixture
def steps(tmp_path):
    for number in (5, 10, 15):
        checkpoint.save({"w": np.full(100, number)}, tmp_path / "run" / f"step-{number}")
    return tmp_path / "run"


def test_verify_checks_every_step_of_a_run_or_one(steps):
    assert run("verify", steps).stdout.count("every digest matches") == 3
    os.truncate(steps / "step-15" / "model.safetensors", 100)
    shown = run("verify", steps, code=1).stdout
    assert f"{steps}/step-15: 2 damaged" in shown
    assert shown.count("every digest matches") == 2
    assert run("verify", steps, "--step", 10).stdout.startswith(f"{steps}/step-10: ")
    run("verify", steps, "--step", 15, code=1)
    assert "has no step 16" in run("verify", steps, "--step", 16, code=2).stderr
    found = json.loads(run("verify", steps, "--json", code=1).stdout)
    assert [step["ok"] for step in found["steps"]] == [True, True, False]


def test_verify_takes_several_paths(steps, model):
    assert run("verify", model, steps / "step-5").stdout.count("every digest matches") == 2
    done = run("verify", model, steps / "none", "--json", code=2)
    assert [found["ok"] for found in json.loads(done.stdout)] == [True, False]
    assert "no checkpoint at" in json.loads(done.stdout)[1]["error"]
    os.truncate(steps / "step-15" / "model.safetensors", 100)
    done = run("verify", steps / "none", steps / "step-15", model, code=1)
    assert "no checkpoint at" in done.stderr
    assert "every digest matches" in done.stdout


@pytest.mark.parametrize("command", ["inspect", "ls"])
def test_the_newest_step_is_shown_although_it_is_damaged(steps, command):
    os.truncate(steps / "step-15" / "model.safetensors", 100)
    done = run(command, steps, code=1)
    shown = " ".join((done.stdout + done.stderr).split())
    assert "int64[100]" in shown
    assert "the newest step, 15, is damaged: model.safetensors is 100 bytes long" in shown
    (steps / "step-15" / "manifest.json").write_bytes(b"{")
    assert f"the step before is {steps}/step-10" in run(command, steps, code=1).stderr


def test_verify_tells_nothing_there_from_damage(model, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("x")
    for name in ("missing", "missing/deep", "empty", "notes"):
        assert "no checkpoint" in run("verify", tmp_path / name, code=2).stderr
        assert "no checkpoint" in json.loads(run("verify", tmp_path / name, "--json", code=2).stdout)["error"]
    path = Path(shutil.copytree(model, tmp_path / "damaged"))
    (path / "model.safetensors").unlink()
    run("verify", path, code=1)
    (path / "manifest.json").write_text('{"digest":"')
    run("verify", path, code=1)
    run("verify", model, code=0)
    assert "2 if no checkpoint exists" in " ".join(run("verify", "--help").stdout.split())


def test_a_shard_shows_the_whole_model_with_layers_folded(tmp_path):
    parts = ("attn.q", "attn.k", "mlp.up", "norm")
    names = [f"layers.{i}.{part}" for i in range(12) for part in parts]
    shards = {"model-00001-of-00002.safetensors": names[:22], "model-00002-of-00002.safetensors": names[22:]}
    for shard, inside in shards.items():
        safetensors.numpy.save_file(
            {name: np.ones((2, 3), np.float32) for name in reversed(inside)}, tmp_path / shard
        )
    weight_map = {name: shard for shard, inside in shards.items() for name in inside}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for shard in shards:
        assert "0-11 ×12" in run("inspect", tmp_path / shard).stdout
        assert len(run("ls", tmp_path / shard).stdout.splitlines()) == len(names)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused = run("verify", tmp_path / "model-00001-of-00002.safetensors", code=1).stderr
    assert "missing: model-00002-of-00002.safetensors. Copy them" in refused


@pytest.mark.parametrize("layout", ["v0_standard", "v0_plain", "v0_zarr3", "v1", "manager"])
def test_checkpoints_of_orbax_are_shown(layout):
    shown = run("inspect", ORBAX / layout).stdout
    assert "orbax" in shown
    assert "bfloat16[6, 2]" in shown
    assert ("steps" in shown) == (layout == "manager")


def test_a_path_without_a_checkpoint_is_an_error_that_lists_its_files(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    error = run("inspect", tmp_path, code=1).stderr
    assert error.startswith("error: ")
    assert "notes.txt" in error
    assert "looked for" in error
    assert run("ls", tmp_path / "missing", code=1).stderr.count("\n") == 1


def test_debug_shows_the_traceback(tmp_path):
    done = subprocess.run([EFORMER, "--debug", "inspect", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_broken_tree_shows_the_others(tmp_path):
    checkpoint.save({"a": np.ones(3)}, tmp_path, prefix="good", format="tensorstore")
    index = json.loads((tmp_path / "tensorstore_index.json").read_text())
    index = {
        "format": "tensorstore",
        "version": "2.0",
        "prefixes": index["prefixes"] | {"bad": [{"path": "bad/a"}]},
    }
    shutil.rmtree(tmp_path / "good")
    (tmp_path / "tensorstore_index.json").write_text(json.dumps(index))
    shown = run("inspect", tmp_path, code=1).stdout
    assert "bad cannot be read" in shown


def test_names_cannot_command_the_terminal(tmp_path):
    tree = {"\x1b[31mred\x9b": np.ones(2), "[bold]x[/]": np.ones(2), "new\nline": 3, "[/foo]": "[/foo]"}
    checkpoint.save(tree, tmp_path / "c", metadata={"note": "[/foo]"})
    for command in ("inspect", "ls"):
        shown = run(command, tmp_path / "c").stdout
        assert "\x1b" not in shown
        assert "\x9b" not in shown
        assert "[bold]x[/]" in shown
        assert "new\nline" not in shown


@pytest.fixture(scope="module")
def dotted(tmp_path_factory):
    """A dict whose keys have dots."""
    path = tmp_path_factory.mktemp("cli") / "dotted"
    checkpoint.save({"h.0.w": np.ones(2), "h.0.b": np.ones(3), "h.1.w": np.ones(4), "step": 7}, path)
    return path


@pytest.mark.parametrize("name", ["h.0", "h.0.*", "h%2E0*"])
def test_names_are_taken_in_either_spelling_and_shown_as_people_write_them(dotted, name):
    listed = run("ls", dotted, name).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["h.0.b", "h.0.w"]
    assert [leaf["name"] for leaf in json.loads(run("ls", dotted, name, "--json").stdout)] == [
        "h%2E0%2Eb",
        "h%2E0%2Ew",
    ]
    shown = run("inspect", dotted, name).stdout
    assert "2 arrays, 5 parameters, 40 B" in shown
    assert "h.1.w" not in shown
    tree = json.loads(run("inspect", dotted, name, "--json").stdout)["trees"][""]
    assert [leaf["name"] for leaf in tree["leaves"]] == ["h%2E0%2Eb", "h%2E0%2Ew"]


@pytest.mark.parametrize("command", ["ls", "inspect"])
def test_a_name_that_finds_nothing_is_an_error_with_the_nearest(dotted, command):
    done = run(command, dotted, "h.2.w", code=1)
    assert done.stdout == ""
    assert re.search(r"no leaf is named 'h.2.w', .* \(nearest is 'h.[01].w'\)", done.stderr)
    assert "nearest" in json.loads(run(command, dotted, "h.2.w", "--json", code=1).stdout)["error"]


def test_a_name_need_only_be_in_one_of_several_trees(tmp_path):
    checkpoint.save({"w": np.ones(2)}, tmp_path / "c", prefix="model")
    checkpoint.save({"v": np.ones(2)}, tmp_path / "c", prefix="ema")
    assert run("ls", tmp_path / "c", "v").stdout.startswith("ema: v ")
    done = run("ls", tmp_path / "c", "vv", code=1)
    assert "ema: no leaf is named 'vv'" in done.stderr
    assert "model: no leaf is named 'vv'" in done.stderr


def test_a_tree_without_leaves_is_listed(tmp_path):
    checkpoint.save({}, tmp_path / "c")
    assert run("ls", tmp_path / "c").stdout == ""


def test_leaves_of_several_trees_are_listed_with_their_prefixes(tmp_path):
    for prefix in ("model", "ema"):
        checkpoint.save({"w": np.ones(2)}, tmp_path / "c", prefix=prefix)
    assert sorted(line.split()[0] for line in run("ls", tmp_path / "c").stdout.splitlines()) == [
        "ema:",
        "model:",
    ]


def test_json_is_strict(tmp_path):
    checkpoint.save({"a": float("inf"), "b": b"bytes", "c": 1j}, tmp_path / "c", metadata={"x": {(1, 2): 3}})
    for command in ("inspect", "ls"):
        shown = run(command, tmp_path / "c", "--json").stdout
        json.loads(shown, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_hidden_rows_are_counted(tmp_path):
    checkpoint.save({f"{c}{i}x": np.ones(i + 1) for c in "ab" for i in range(300)}, tmp_path / "c")
    shown = run("inspect", tmp_path / "c").stdout
    assert "and 200 more rows" in shown


def test_no_color_is_heeded(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    shown, code = on_terminal("inspect", tmp_path)
    assert code == 1
    assert "\x1b[31m" not in shown


def test_wrong_usage_is_exit_code_two():
    assert run("inspect", code=2).stderr
    assert run("nothing", code=2).stderr


@pytest.mark.parametrize("command", [[], ["inspect"], ["ls"], ["verify"]])
def test_help_has_examples(command):
    assert "eformer " in run(*command, "--help").stdout


def test_commands_start_without_jax(model):
    code = (
        "import sys; from eformer.cli.commands import main\n"
        f"main(['inspect', {str(model)!r}], standalone_mode=False)\n"
        f"main(['verify', {str(model)!r}], standalone_mode=False)\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_shardings_are_shown(tmp_path):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    checkpoint.save({"w": jax.device_put(np.ones((4, 2)), rows)}, tmp_path / "c")
    assert "P('x') on x=2: 1 array" in run("inspect", tmp_path / "c").stdout


def test_inspect_draws_a_picture_that_needs_nothing_from_elsewhere(model, tmp_path):
    run("inspect", model, "--svg", tmp_path / "model.svg")
    drawn = (tmp_path / "model.svg").read_text("utf-8")
    assert "bfloat16[64,&#160;64]" in drawn
    assert "url(http" not in drawn
    assert "@font-face" not in drawn


def test_a_terminal_without_letters_of_its_own_gets_others(model):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    shown = run("inspect", model, **plain).stdout
    assert shown.isascii()
    assert "x12" in shown
    assert " #########\n" in shown


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_sizes_stand_in_one_column_on_any_terminal(model, columns):
    shown, _ = on_terminal("inspect", model, columns=columns)
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", row).rstrip() for row in shown.splitlines()]
    tree = rows[rows.index("", 4) + 1 :]
    ends = {row.index(" kB" if " kB" in row else " B") for row in tree if " kB" in row or row.endswith(" B")}
    assert all(len(row) <= columns for row in tree)
    assert len(ends) <= 2  # kB and B, which are of two lengths


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "deep"
    layer = {"self_attn": {"q_proj": {"weight": jnp.zeros((2048, 16), jnp.bfloat16)}, "norm": np.ones(16)}}
    checkpoint.save({"model": {"layers": [layer] * 3, "embed": np.ones((1000, 16))}}, path)
    return path


@pytest.mark.parametrize(
    ("columns", "has_sizes", "has_bars"), [(40, False, False), (60, True, False), (80, True, True)]
)
def test_narrow_terminals_drop_the_bars_then_the_sizes_and_keep_the_shapes(
    deep, columns, has_sizes, has_bars
):
    shown, _ = on_terminal("inspect", deep, columns=columns)
    tree = [re.sub(r"\x1b\[[0-9;]*m", "", row).rstrip() for row in shown.splitlines()][-8:]
    assert all(len(row) <= columns for row in tree)
    assert any("bfloat16[2048, 16]" in row for row in tree)
    assert any("float64[1000, 16]" in row for row in tree)
    assert any(" kB" in row for row in tree) == has_sizes
    assert any("█" in row for row in tree) == has_bars


def test_output_that_nobody_reads_is_no_failure(model, tmp_path):
    checkpoint.save({f"a long name {i:060}": np.ones(1) for i in range(2000)}, tmp_path / "c")
    for command in ("ls", "inspect", "ls --json"):  # of which the first writes more than a pipe holds
        name, *options = command.split()
        line = f"set -o pipefail; {EFORMER} {name} {tmp_path / 'c'} {' '.join(options)} | head -1"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)


@pytest.mark.thorough
def test_the_exit_code_is_the_commands_own_when_nobody_reads(model, tmp_path):
    path = Path(shutil.copytree(model, tmp_path / "damaged"))
    flip(path / "model.safetensors", -10)
    for arguments, errors, code in (
        (["verify", model], subprocess.STDOUT, 0),
        (["verify", path], None, 1),
        (["verify", tmp_path / "missing"], subprocess.STDOUT, 2),
        (["--help"], None, 0),
    ):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([EFORMER, *map(str, arguments)], stdout=writer, stderr=errors, timeout=60)
        os.close(writer)
        assert done.returncode == code


def test_python_runs_the_package_like_the_command(model):
    done = subprocess.run([sys.executable, "-m", "eformer", "ls", model], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, run("ls", model).stdout)
    refused = subprocess.run([sys.executable, "-m", "eformer", "nothing"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "Usage: eformer " in refused.stderr


@pytest.mark.thorough
def test_a_closed_standard_output_is_no_error(model):
    for command in ("inspect", "ls", "verify"):
        done = subprocess.run(f"{EFORMER} {command} {model} >&-", shell=True, capture_output=True, text=True)
        assert "Traceback" not in done.stderr, done.stderr


def test_two_ways_to_show_it_are_one_too_many(model, tmp_path):
    assert "cannot be combined" in run("inspect", model, "--json", "--svg", tmp_path / "x.svg", code=2).stderr


def test_files_that_are_left_out_are_named(tmp_path):
    path = Path(shutil.copytree(ORBAX / "v1", tmp_path / "c"))
    (path / "data").mkdir()
    (path / "data" / "state").write_bytes(b"\0")
    assert "data/: not read, may hold leaves" in run("inspect", path).stdout
    assert json.loads(run("inspect", path, "--json").stdout)["left_out"] == ["data/"]
    assert "1 file not read, which may hold leaves: data/" in run("verify", path, code=1).stdout
    report = json.loads(run("verify", path, "--json", code=1).stdout)
    assert (report["ok"], report["left_out"], report["damages"]) == (False, ["data/"], [])


def test_a_conversion_of_a_quantised_model_that_cannot_be_read_needs_no_dequant(tmp_path):
    leaves = {"a.qweight": np.ones((2, 2), np.int32), "a.scales": np.ones(2, np.float16)}
    safetensors.numpy.save_file(leaves, tmp_path / "gptq.safetensors")
    refused = run("convert", tmp_path / "gptq.safetensors", tmp_path / "new", "--to", "safetensors", code=1)
    assert "gptq.safetensors is quantised" in refused.stderr
    assert "load the original model, or pass --no-dequant for the stored leaves" in refused.stderr
    run("convert", tmp_path / "gptq.safetensors", tmp_path / "new", "--to", "safetensors", "--no-dequant")
    assert "a.qweight" in run("ls", tmp_path / "new").stdout


def test_a_quantised_model_is_marked_and_converted_to_numbers(tmp_path):
    leaves = {
        "a.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn),
        "a.weight_scale_inv": np.full((1, 1), 3, np.float32),
    }
    path, new = tmp_path / "fp8.safetensors", tmp_path / "new"
    safetensors.numpy.save_file(leaves, path)
    refused = run("convert", path, new, "--to", "safetensors", code=1)
    assert (
        "Pass --dequant bf16 for the weights as numbers, or --no-dequant for the stored leaves"
        in refused.stderr
    )
    assert "float8_e4m3fn[4, 4] fp8" in run("inspect", path).stdout
    assert "float8_e4m3fn[4, 4] fp8" in run("ls", path).stdout
    listed = json.loads(run("ls", path, "--json").stdout)
    inspected = json.loads(run("inspect", path, "--json").stdout)["trees"][""]["leaves"]
    for found in (listed, inspected):
        assert {leaf["name"]: leaf.get("quantized") for leaf in found} == {
            "a.weight": "fp8",
            "a.weight_scale_inv": None,
        }
    done = run("convert", path, new, "--to", "safetensors", "--dequant", "bf16", "--dry-run")
    assert (
        "a.weight ... a.weight_scale_inv -> a.weight: bfloat16[4, 4] (dequantised from float8_e4m3fn)"
        in done.stdout
    )
    run("convert", path, new, "--to", "safetensors", "--dequant", "bf16")
    assert checkpoint.load(new)["a"]["weight"].tolist() == [[3] * 4] * 4
    both = run("convert", path, new, "--dequant", "bf16", "--no-dequant", code=2)
    assert "--dequant and --no-dequant exclude each other" in both.stderr


def test_a_conversion_that_leaves_files_out_needs_allow_missing(tmp_path):
    path = Path(shutil.copytree(ORBAX / "v1", tmp_path / "c"))
    (path / "more.bin").write_bytes(b"\0")
    for how in ([], ["--dry-run"]):
        refused = run("convert", path, tmp_path / "new", "--to", "safetensors", *how, code=1)
        assert "more.bin. Pass --allow-missing to convert the rest" in refused.stderr
    done = run("convert", path, tmp_path / "new", "--to", "safetensors", "--allow-missing")
    assert "not read, may hold leaves: more.bin" in done.stdout
    run("verify", tmp_path / "new")


def test_without_a_command_the_help_is_printed_once():
    done = run()
    assert done.stdout.count("Usage: ") == 1
    assert done.stderr == ""


def test_an_argument_with_choices_is_asked_for_in_one_line():
    last = run("completion", code=2).stderr.splitlines()[-1]
    assert last == "error: missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish"


def test_an_option_before_its_command_is_told_where_it_belongs():
    done = run("--store-option", "a=b", "ls", "x", code=2)
    assert "no such option '--store-option'; write it after the command" in done.stderr.replace(": -", " '-")
    assert "write it" not in run("--no-such-option", "ls", "x", code=2).stderr


MODELS = Path(__file__).parents[1] / "rules" / "models"


def test_rules_lists_families_and_prints_a_book():
    listed = run("rules").stdout
    assert "llama, mistral: flax, flax-scan, maxtext-unscanned, maxtext, tunix" in listed
    assert "any model: flax, flax-scan" in listed
    assert run("rules", "qwen3/tunix").stdout.startswith("# qwen3/tunix, rules 1: ")
    assert {"llama", "mistral"} <= {
        kind for family in json.loads(run("rules", "--json").stdout) for kind in family["model_types"]
    }


def test_rules_check_tells_by_its_exit_code_whether_rules_fit(tmp_path):
    llama = MODELS / "llama"
    assert "fits" in run("rules", "check", llama, "--rename", "maxtext").stdout
    run("convert", llama, tmp_path / "mine", "--to", "safetensors", "--rename", "tunix")
    run("rules", "check", llama, "--rename", "tunix", "--like", tmp_path / "mine")
    shown = run("rules", "check", llama, "--rename", "maxtext", "--like", tmp_path / "mine", code=1).stdout
    assert "! missing, though like has it: embedder.input_embedding" in shown
    facts = json.loads(run("rules", "check", llama, "--rename", "tunix", "--json").stdout)
    assert facts["ok"]
    assert facts["leaves"]["lm_head.w"] == [8, 37]


def test_rules_that_do_not_exist_are_an_error():
    assert "near are llama/maxtext" in run("rules", "lama/maxtext", code=2).stderr
    assert "for `eformer rules check SOURCE`" in run("rules", "llama/flax", "--like", "x", code=2).stderr
    assert "expected: eformer rules check SOURCE" in run("rules", "check", code=2).stderr
