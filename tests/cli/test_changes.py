"""The commands diff, convert, prune, demo and completion."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from eformer import checkpoint, demo
from eformer.checkpoint import load, save, verify
from eformer.cli.commands import main
from support import lora
from support.commands import EFORMER, run
from support.programs import on_terminal

COMPAT = Path(__file__).parents[1] / "compat"


@pytest.fixture
def model(tmp_path):
    layers = [{"w": np.full((8, 4), i, np.float32), "b": np.zeros(4, np.float32)} for i in range(3)]
    save({"layers": layers, "step": 7}, tmp_path / "model", metadata={"run": "a1"})
    return tmp_path / "model"


def changed_copy(model):
    tree = load(model)
    tree["layers"][1]["w"][0, 0] += 2
    tree["new"] = tree.pop("step")
    save(tree, model.with_name("other"), format="tensorstore")
    return model.with_name("other")


# ------------------------------------------------------------------------------------------------ diff


def test_diff_of_the_same_ends_well(model):
    run("convert", model, model.with_name("t"), "--to", "tensorstore")
    shown = run("diff", model, model.with_name("t")).stdout
    assert shown.endswith("the same, 7 unchanged\n")


def test_diff_shows_the_differences(model):
    shown = run("diff", model, changed_copy(model), code=1).stdout
    assert "different, 1 added, 1 removed, 1 changed, 5 unchanged" in shown
    assert "- step: 7\n+ new: 7\n" in shown
    assert (
        "~ layers.1.w: float32[8, 4]: largest difference 2, mean 0.0625, in 3.125% of the elements" in shown
    )


def test_diff_for_programs(model):
    found = json.loads(run("diff", model, changed_copy(model), "--json", code=1).stdout)
    assert (found["added"], found["removed"], found["same"]) == ({"new": "7"}, {"step": "7"}, False)
    assert found["changed"] == [
        {
            "name": "layers.1.w",
            "before": "float32[8, 4]",
            "after": "float32[8, 4]",
            "largest": 2.0,
            "mean": 0.0625,
            "share": 0.03125,
            "became_nan": 0,
            "became_inf": 0,
        }
    ]


def test_diff_shows_a_leaf_that_became_nan_first_and_in_red(model):
    tree = load(model)
    tree["layers"][0]["b"] += 1
    tree["layers"][2]["w"][0, :2] = np.nan
    save(tree, model.with_name("other"))
    shown = on_terminal("diff", model, model.with_name("other"))[0]
    loud, calm = (next(line for line in shown.splitlines() if name in line) for name in ("2.w", "0.b"))
    assert shown.index(loud) < shown.index(calm)
    assert "\x1b[31m\x1b[1m~ layers.2.w: became NaN in 2 elements" in loud
    assert "\x1b[33m~ layers.0.b" in calm


def test_diff_may_be_silent(model):
    assert run("diff", "-q", model, changed_copy(model), code=1).stdout == ""


def test_diff_that_cannot_be_made_is_another_code(model):
    done = run("diff", model, model / "nothing", "--json", code=2)
    assert "no checkpoint at" in done.stderr
    assert "no checkpoint at" in json.loads(done.stdout)["error"]


# ---------------------------------------------------------------------------------------------- convert


def test_convert_prints_a_summary(model, tmp_path):
    done = run("convert", model, tmp_path / "hf", "--to", "safetensors", "--dtype", "bf16")
    assert done.stdout == f"{model} -> {tmp_path / 'hf'} (safetensors): 7 leaves, 216 B\n"
    assert load(tmp_path / "hf")["layers"][2]["w"].dtype.name == "bfloat16"
    assert verify(tmp_path / "hf").ok


def test_convert_draws_a_bar_on_a_terminal(model, tmp_path):
    shown, code = on_terminal("convert", model, tmp_path / "new.npz")
    assert code == 0
    assert "converting" in shown
    assert "432 B of 432 B, " in shown
    assert "! npz has checksums but no digests" in shown


def test_convert_with_rules_from_a_file(model, tmp_path):
    rules = tmp_path / "rules.txt"
    rules.write_text(
        "# ours to theirs\nlayers\\.(\\d+)\\.w -> h.\\1.weight | transpose\nlayer.* -> \nstop -> x\n"
    )
    plan = run("convert", model, tmp_path / "hf.safetensors", "--rename", rules, "--dry-run").stdout
    assert "  layers.0.w -> h.0.weight: float32[4, 8] (transpose)\n" in plan
    assert "! matches no leaf: line 4, stop (nearest is 'step')\n" in plan
    assert "! no rule matches, name kept: step (nearest is line 4, stop)\n" in plan
    assert not (tmp_path / "hf.safetensors").exists()
    run("convert", model, tmp_path / "hf.safetensors", "--rename", rules)
    found = safetensors.numpy.load_file(tmp_path / "hf.safetensors")
    assert sorted(found) == ["h.0.weight", "h.1.weight", "h.2.weight"]
    np.testing.assert_array_equal(found["h.2.weight"], np.full((4, 8), 2))


def test_convert_for_programs(model, tmp_path):
    arguments = ["--to", "safetensors", "--max-shard-size", "200", "--memory", "1GiB", "--json"]
    done = json.loads(run("convert", model, tmp_path / "new", *arguments).stdout)
    assert done["nbytes"] == 432
    assert done["leaves"][""][0] == {
        "name": "layers.0.b",
        "what": "float32[4]",
        "nbytes": 16,
        "origins": ["layers.0.b"],
        "how": "",
    }
    assert len(list((tmp_path / "new").glob("model-*.safetensors"))) == 3


@pytest.mark.parametrize(
    ("arguments", "problem", "code"),
    [
        (["--to", "hdf5"], "is not one of", 2),
        (["--memory", "much"], "'much' is not a size; write 500MB, 2GB or 1.5GiB", 2),
        (["--memory", "1MB"], "error: --memory 1 MB is not enough: 6 arrays and the program", 1),
        (["--dtype", "int3"], "error: 'int3' is not a floating dtype", 1),
        (["--rename", "nothing.txt"], "'nothing.txt' does not exist", 2),
        (["--prefix", "ema"], "has no prefix 'ema'", 1),
    ],
)
def test_convert_refuses_in_one_line(model, tmp_path, arguments, problem, code):
    done = run("convert", model, tmp_path / "new", "--to", "safetensors", *arguments, code=code)
    assert problem in done.stderr
    assert not (tmp_path / "new").exists()


def test_convert_to_an_adapter_of_peft(tmp_path):
    save(lora.state(), tmp_path / "lora")
    (tmp_path / "more.json").write_text('{"lora_alpha": 8, "task_type": "CAUSAL_LM"}')
    settings = ["--config", tmp_path / "more.json", "--config", "lora_alpha=4", "--config", "revision=main"]
    shown = run("convert", tmp_path / "lora", tmp_path / "adapter", "--to", "peft", *settings).stdout
    assert "! adapter_config.json has r=2, lora_alpha=4, target_modules=['q_proj']\n" in shown
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["task_type"], config["revision"]) == (4, "CAUSAL_LM", "main")
    shown = run("inspect", tmp_path / "adapter").stdout
    assert "PEFT adapter" in shown
    assert "adapter_config.lora_alpha = 4" in shown


@pytest.mark.parametrize(
    ("settings", "problem", "code"),
    [
        (
            [],
            "lora_alpha is unknown, and does not follow from the leaves; pass it with --config, such as lora_alpha=32",
            1,
        ),
        (["--config", "absent.json"], "--config absent.json is neither NAME=VALUE nor a JSON file", 2),
        (["--config", "lora_alpha"], "--config lora_alpha is neither NAME=VALUE nor a JSON file", 2),
    ],
)
def test_convert_to_an_adapter_refuses_in_one_line(tmp_path, settings, problem, code):
    save(lora.state(), tmp_path / "lora")
    done = run("convert", tmp_path / "lora", tmp_path / "adapter", "--to", "peft", *settings, code=code)
    assert problem in done.stderr
    assert not (tmp_path / "adapter").exists()


def test_convert_stops_at_damage(model, tmp_path):
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\xff")
    done = run("convert", model, tmp_path / "new", "--to", "tensorstore", code=1)
    assert "error: leaf 'layers" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_ctrl_c_on_a_terminal_leaves_nothing(tmp_path):
    save({"w": np.zeros((40, 10**6))}, tmp_path / "old")
    master, slave = pty.openpty()
    command = [EFORMER, "convert", str(tmp_path / "old"), str(tmp_path / "new"), "--to", "safetensors"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    seen = b""
    while b"converting" not in seen:
        seen += os.read(master, 4096)
    process.send_signal(signal.SIGINT)
    code = process.wait(60)
    os.close(master)
    assert sorted(os.listdir(tmp_path)) == (["old"] if code else ["new", "old"])  # it may have been too late


def test_nothing_but_demo_needs_jax(model, tmp_path):
    save({"w": 1}, tmp_path / "run" / "step-1")
    commands = (
        ["inspect", model],
        ["ls", model],
        ["verify", model],
        ["diff", model, model],
        ["convert", model, tmp_path / "new", "--to", "tensorstore"],
        ["convert", model, tmp_path / "new.msgpack"],
        ["convert", COMPAT / "files" / "flax.msgpack", tmp_path / "new.safetensors"],
        ["prune", tmp_path / "run", "--keep", "1", "-y"],
    )
    code = "import sys, json; from eformer.cli.commands import main\nfor words in json.loads(sys.argv[1]):\n"
    code += " main(words, standalone_mode=False)\n assert 'jax' not in sys.modules, words"
    given = json.dumps([[str(word) for word in words] for words in commands])
    done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------- prune and others


@pytest.fixture
def steps(tmp_path):
    for step in (9, 10, 11):
        save({"w": np.ones(10)}, tmp_path / "run" / f"step-{step}")
    (tmp_path / "run" / "step-12").mkdir()
    return tmp_path / "run"


def test_prune_prints_its_plan(steps):
    done = run("prune", steps, "--keep", 2, "--yes", "--check")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["keep    step-10", "keep    step-11"]
    assert lines[2].startswith("leave   step-12: it is not a complete checkpoint: ")
    assert lines[3] == "remove  step-9"
    assert lines[4].startswith("removed 1 checkpoint, ")
    assert sorted(os.listdir(steps)) == ["step-10", "step-11", "step-12"]


def test_prune_says_how_many_bytes_are_freed(steps):
    assert run("prune", steps, "--keep", 2, "--yes").stdout.endswith(" B freed\n")
    place = steps / "step-12"
    os.rmdir(place)
    save({"w": np.ones(10)}, place, options={"reuse": steps / "step-11"})
    said = run("prune", steps, "--keep", 1, "--yes").stdout.splitlines()[-1]
    assert re.fullmatch(r"removed 2 checkpoints, .* of .* freed: checkpoints that stay share the rest", said)
    assert json.loads(run("prune", steps, "--keep", 1, "--yes", "--json").stdout)["freed"] == 0


def test_prune_lists_other_files_before_it_asks(steps):
    (steps / "step-9" / "notes.txt").write_text("x")
    done = subprocess.run(
        [EFORMER, "prune", str(steps), "--keep", "2"], input="n\n", capture_output=True, text=True
    )
    assert (
        "remove  step-9\n        with notes.txt, which does not belong to it\nRemove 1 checkpoint"
        in done.stdout
    )
    found = json.loads(run("prune", steps, "--keep", 2, "--dry-run", "--json").stdout)
    assert found["other_files"] == {"step-9": ["notes.txt"]}


def test_prune_lists_scores_whose_checkpoint_has_gone(steps):
    (steps / "step-8.scores.json").write_text('{"digest": "0f", "metrics": {"loss": 1.0}}')
    assert (
        "remove  step-8.scores.json: its checkpoint has gone"
        in run("prune", steps, "--keep", 2, "--dry-run").stdout
    )
    found = json.loads(run("prune", steps, "--keep", 2, "--yes", "--json").stdout)
    assert found["scores"] == ["step-8.scores.json"]
    assert not (steps / "step-8.scores.json").exists()


def test_prune_takes_a_pattern_of_names(steps):
    for number in (1, 2):
        save({"w": 1}, steps / f"ema-{number}")
    done = json.loads(run("prune", steps, "--keep", 1, "--pattern", "ema-*", "--yes", "--json").stdout)
    assert (done["removed"], done["kept"]) == (["ema-1"], ["ema-2"])
    assert (steps / "step-9").exists()
    assert "expected a name with one *" in run("prune", steps, "--keep", 1, "--pattern", "ema", code=1).stderr


def test_prune_asks_first(steps):
    done = subprocess.run(
        [EFORMER, "prune", str(steps), "--keep", "1"], input="n\n", capture_output=True, text=True
    )
    assert "Remove 2 checkpoints" in done.stdout
    assert done.returncode == 1
    assert len(os.listdir(steps)) == 4
    assert run("prune", steps, "--keep", 1, "--dry-run").stdout.count("remove ") == 2
    assert len(os.listdir(steps)) == 4


def test_prune_names_yes_where_nobody_answers(steps):
    done = subprocess.run(
        [EFORMER, "prune", str(steps), "--keep", "1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.stderr.endswith(
        "error: standard input has no answer: add --yes to delete without a question\n"
    )
    assert (done.returncode, len(os.listdir(steps))) == (2, 4)


def test_prune_says_that_it_removes_nothing(steps):
    assert run("prune", steps, "--keep", 3, "--yes").stdout.splitlines()[-1] == "no checkpoint to remove"


@pytest.mark.thorough
def test_demo_keeps_its_files_in_the_given_directory(tmp_path):
    shown = run("demo", tmp_path / "d").stdout
    words = " ".join(shown.split())
    for part in (
        "8 virtual devices",
        "on a 2x4 mesh",
        "20 of 20 leaves equal bit for bit",
        "under other names: params.layers.0.kernel -> model.layers.0.weight",
        "missing leaf 'params.layers.0.kernal' (nearest is 'params.layers.0.kernel')",
        "verify  leaf 'params.embedding': bytes",
        f"eformer diff {tmp_path}/d/step-100 {tmp_path}/d/step-200",
        "5 leaves changed",
        "never killed: 2 of 2 leaves equal bit for bit",
        "step-120: model.safetensors is 228 bytes long, expected 456",
    ):
        assert " ".join(part.split()) in words
    assert checkpoint.verify(tmp_path / "d" / "step-100").ok
    assert "1 damaged" in run("verify", tmp_path / "d" / "damaged", code=1).stdout
    assert re.search(r"killed in step 1\d\d, resumed from step (100|1[1-9]0),", words)
    sound = [step for step in checkpoint.steps(tmp_path / "d" / "run") if step.number != 120]
    assert [step.number for step in sound] == [n for n in range(10, 201, 10) if n != 120]
    assert all(step.metrics.keys() == {"loss", "eval.loss"} for step in sound)
    assert "already exists" in run("demo", tmp_path / "d", code=1).stderr


def test_lines_of_the_demo_break_between_words(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    text = f"restore {'long/' * 12}model.safetensors from a copy, or load an older one\n  float32[1024, 1024]"
    demo.tell("load", text)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert " ".join(" ".join(lines).split()) == f"load {' '.join(text.split())}"


def test_completion_completes(tmp_path):
    script = tmp_path / "complete.sh"
    script.write_text(run("completion", "bash").stdout)
    asked = (
        f"PATH={Path(EFORMER).parent}:$PATH; source {script}; COMP_WORDS=(eformer conv); COMP_CWORD=1; "
        "_eformer_completion eformer; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True)
    assert done.stdout.strip() == "convert", done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_for_other_shells(shell):
    assert "_EFORMER_COMPLETE" in run("completion", shell).stdout


@pytest.mark.parametrize(
    "command", ["inspect", "ls", "verify", "diff", "convert", "prune", "steps", "demo", "completion"]
)
def test_every_command_has_help_with_an_example(command):
    shown = run(command, "--help").stdout
    assert f"eformer {command} " in shown.replace("Usage: ", "").replace(f"eformer {command} [OPTIONS]", "")
    assert f"eformer {command}" in run("--help").stdout or command == "completion"


def test_a_pipe_that_is_closed_ends_it_quietly(tmp_path):
    save({f"l{i}": np.ones(2) for i in range(4_000)}, tmp_path / "many")
    for command in (
        f"diff {tmp_path}/many {tmp_path}/many",
        f"inspect {tmp_path}/many --json",
    ):
        done = subprocess.run(f"{EFORMER} {command} | head -1", shell=True, capture_output=True, text=True)
        assert done.stderr == "", command


def test_streams_that_are_closed_do_no_harm(model, tmp_path):
    command = f"{EFORMER} convert {model} {tmp_path}/new --to safetensors 2>&-"
    assert subprocess.run(command, shell=True).returncode == 0
    assert verify(tmp_path / "new").ok


@pytest.mark.thorough
def test_names_that_a_terminal_has_no_letters_for_are_spelled(tmp_path):
    save({"w\u00e9": np.ones(2)}, tmp_path / "c")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for command in ("ls", "inspect"):
        assert "w\\xe9" in run(command, tmp_path / "c", **plain).stdout


@pytest.mark.sample(2)
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_diff_exits_with_130(tmp_path, kill):
    save({"w": np.zeros((60, 10**6))}, tmp_path / "c")
    process = subprocess.Popen(
        [EFORMER, "diff", str(tmp_path / "c"), str(tmp_path / "c")], stderr=subprocess.PIPE
    )
    time.sleep(0.4)  # by then it is under way, or has not begun: both end alike
    process.send_signal(kill)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (130, 0, -kill), said
    assert process.returncode != 130 or b"interrupted" in said


_INTERRUPTED_IMPORT = """
import signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "numpy":
            try:
                signal.raise_signal(signal.{kill})
            except KeyboardInterrupt:
                raise ImportError("the extension module forgets what has happened") from None

sys.meta_path.insert(0, Finder())
from eformer.cli.commands import main
main(["diff", "a", "b"])
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("kill", ["SIGINT", "SIGTERM"])
def test_an_interrupted_import_exits_with_130(kill):
    program = [sys.executable, "-c", _INTERRUPTED_IMPORT.format(kill=kill)]
    done = subprocess.run(program, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_help_lists_every_command_once_in_a_few_words():
    shown = run("--help").stdout
    for name, command in main.commands.items():
        text = command.get_short_help_str(limit=1000)
        assert len(text) <= 45
        assert len(re.findall(rf"^  {name} +{text}$", shown, re.MULTILINE)) == 1
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == ["Options", "Look", "Runs", "Change", "Other"]


def test_help_fits_eighty_columns():
    for command in ("", *main.commands):
        shown = run(*command.split(), "--help").stdout
        assert [line for line in shown.splitlines() if len(line) > 80] == [], command


def test_errors_of_usage_look_like_all_errors():
    assert run("nothing", code=2).stderr.endswith("\n\nerror: no such command 'nothing'\n")
    assert run("ls", code=2).stderr.endswith("\n\nerror: missing argument 'PATH'\n")


def test_the_help_of_a_program_without_arguments_is_no_error():
    done = run()
    shown = done.stdout
    assert done.stderr == ""
    assert shown.count("eformer [OPTIONS] COMMAND") == 1
    assert "\n  inspect  Show format" in shown


def test_help_shows_examples_as_they_are_typed():
    shown = run("convert", "--help").stdout
    assert "\n  eformer convert ./orbax/100 ./checkpoint --to zarr\n" in shown
    assert "\n  lm_head\\.weight ->\n" in shown
    assert "\\b" not in shown


def test_options_are_called_as_they_are_typed(model, tmp_path):
    assert "--to is one of" in run("convert", model, tmp_path / "new", code=1).stderr
    done = run("convert", model, tmp_path / "n.npz", "--max-shard-size", "5GB", code=1)
    assert done.stderr.startswith("error: --max-shard-size 5000000000: only a directory")


def test_many_notes_are_counted(tmp_path):
    save({f"l{i}": np.ones(2) for i in range(50)}, tmp_path / "many")
    (tmp_path / "rules").write_text("x -> y\n")
    shown = run(
        "convert", tmp_path / "many", tmp_path / "new", "--to", "npz", "--rename", tmp_path / "rules"
    ).stdout
    assert "! matches no leaf: line 1, x\n" in shown
    assert "! 50 names matched by no rule and kept\n" in shown


def test_prune_for_programs(steps):
    done = json.loads(run("prune", steps, "--keep", 1, "--json", "--yes").stdout)
    assert (done["removed"], done["kept"]) == (["step-10", "step-9"][::-1], ["step-11"])
    assert sorted(os.listdir(steps)) == ["step-11", "step-12"]


def test_prune_stops_at_a_damaged_checkpoint_that_would_stay(steps):
    with (steps / "step-11" / "model.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\xff")
    done = run("prune", steps, "--keep", 1, "--check", "--yes", "--json", code=1)
    assert "nothing was removed" in json.loads(done.stdout)["error"]
    assert len(os.listdir(steps)) == 4


def test_prune_for_programs_does_not_ask_and_does_not_guess(steps):
    assert "add --yes or --dry-run" in run("prune", steps, "--keep", 1, "--json", code=2).stderr
    assert len(os.listdir(steps)) == 4


def test_a_dry_run_may_be_made_where_something_is(model, tmp_path):
    (tmp_path / "new.npz").write_text("mine")
    run("convert", model, tmp_path / "new.npz", "--dry-run")
    assert "already exists" in run("convert", model, tmp_path / "new.npz", code=1).stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize("kept", [False, True])
def test_a_terminal_that_hangs_up_leaves_nothing_unless_nohup_was_said(tmp_path, kept):
    save({"w": np.zeros((20, 10**6))}, tmp_path / "old")
    ignore = "trap '' HUP; " if kept else ""
    command = f"{ignore}exec {EFORMER} convert {tmp_path}/old {tmp_path}/new --to npz --memory 200MB"
    process = subprocess.Popen(["bash", "-c", command], stderr=subprocess.PIPE, start_new_session=True)
    while not any(name.startswith(".eformer") for name in os.listdir(tmp_path)) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    there = sorted(os.listdir(tmp_path))
    assert there == (["old"] if process.returncode else ["new", "old"])  # it may have been too late
    assert process.returncode == 0 or not kept


# ---------------------------------------------------------------------------------------------- merge


def test_merge_prints_the_rule_and_the_leaves_of_the_last_source(tmp_path):
    for step in (1, 2, 3):
        checkpoint.save(
            {"w": np.full(2, float(step)), "n": np.array(step)}, tmp_path / "run" / f"step-{step}"
        )
    done = run("merge", tmp_path / "run", tmp_path / "m", "--last", 2, "--weights", "1,3", "--to", "zarr")
    assert "! from the last source alone: n" in done.stdout
    assert checkpoint.load(tmp_path / "m")["w"].tolist() == [2.75, 2.75]
    shown = run("inspect", tmp_path / "m").stdout
    assert "weight 3" in shown


def test_merge_prints_json_and_refuses_a_single_path(tmp_path):
    for name in "ab":
        checkpoint.save({"w": np.ones(2)}, tmp_path / name)
    words = [tmp_path / "a", tmp_path / "b", tmp_path / "m.safetensors", "--dry-run", "--json"]
    facts = json.loads(run("merge", *words).stdout)
    assert (facts["dry_run"], facts["leaves"][""][0]["how"]) == (True, "mean of 2")
    assert "expected: eformer merge SOURCE... DESTINATION" in run("merge", tmp_path / "a", code=2).stderr
    problem = run("merge", tmp_path / "a", tmp_path / "m", "--to", "zarr", code=1).stderr
    assert (
        "a merge has several sources, found 1; pass more, --last N for the steps of a run, or --lora"
        in problem
    )
