"""Reports of checkpoints: what the page shows, that it is small and safe, and what is read for it."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eformer import checkpoint
from eformer._engine.pages import page
from eformer._engine.pages.contents import page_contents
from eformer._engine.pages.reading import measure
from eformer._engine.stores import local_files
from eformer.checkpoint import SaveOptions
from support.columns import numbers_of, statistics_of
from support.damage import flip
from support.trees import HOSTILE

COMPAT = Path(__file__).parents[2] / "compat"


@pytest.fixture
def tree():
    rng = np.random.default_rng(0)
    layer = {"attn": {"w": rng.standard_normal((8, 8)).astype("f4")}, "norm": {"scale": np.ones(8, "f4")}}
    return {"layers": {str(n): layer for n in range(4)}, "embed": np.arange(12, dtype="i4"), "step": 7}


def leaves(found):
    return numbers_of(found.data["leaves"])


def statistics(found, path):
    return statistics_of(found.data["leaves"], path)


def test_a_report_has_the_leaves_with_their_statistics(tmp_path, tree):
    checkpoint.save(tree, tmp_path / "a", metadata={"lr": 0.1})
    found = checkpoint.report(tmp_path / "a")
    summary = found.data["summary"]
    assert (summary["leaves"], summary["values"], summary["params"]) == (10, 1, 4 * 72 + 12)
    assert summary["metadata"] == {"lr": "0.1"}
    assert summary["verification"]["state"] == "verified"
    assert statistics(found, "embed") == {"min": 0, "max": 11, "mean": 5.5, "std": 3.4521}
    assert len(leaves(found)) == 10


def test_the_page_is_one_file_that_may_load_nothing(tmp_path, tree):
    checkpoint.save(tree, tmp_path / "a")
    text = checkpoint.report(tmp_path / "a").html
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)\s*=\s*[\"']?\s*(https?:)?//", text)
    assert "innerHTML" not in text
    assert "eval(" not in text
    embedded = re.search(r'id="data">(.*?)</script>', text)[1]
    assert json.loads(embedded)["summary"]["title"] == "a"


def test_hostile_names_stay_data(tmp_path):
    names = [
        *HOSTILE,
        "</script><script>alert(1)</script>",
        "<!--",
        "\u2028",
        "\x1b[31m",
        "\u202eabc",
        "\"'&",
    ]
    checkpoint.save(
        {name: {"w": np.ones(2), "v": name} for name in names}, tmp_path / "a", metadata={"<b>": "</script>"}
    )
    text = checkpoint.report(tmp_path / "a").html
    embedded = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert not set("<>&\u2028\u2029") & set(embedded)
    assert text.count("<script") == 2
    assert json.loads(embedded)["summary"]["leaves"] == 2 * len(set(names))
    text.encode()  # without lone surrogates


def test_a_leaf_with_values_and_changes_takes_less_than_two_hundred_bytes(tmp_path):
    rng = np.random.default_rng(0)

    def layers(scale):
        return {
            f"{n}": {
                f"{m}_proj": {k: scale * rng.standard_normal(24).astype("f4") for k in ("kernel", "bias")}
                for m in "qkvod"
            }
            for n in range(200)
        }

    checkpoint.save({"model": {"layers": layers(1)}}, tmp_path / "a")
    checkpoint.save({"model": {"layers": layers(0.02)}}, tmp_path / "b")
    found = checkpoint.report(tmp_path / "b", tmp_path / "a")
    assert found.data["summary"]["leaves"] == 2_000
    assert found.data["against"]["counts"] == {"changed": 2_000, "removed": 0}
    checkpoint.save({"w": np.ones(3)}, tmp_path / "c")
    without_leaves = len(checkpoint.report(tmp_path / "c").html.encode())
    assert len(found.html.encode()) < without_leaves + 2_000 * 200


def test_without_values_no_data_are_read(tmp_path, tree, monkeypatch):
    checkpoint.save(tree, tmp_path / "a")
    read = []
    monkeypatch.setattr(local_files.LocalFiles, "read_into", lambda *arguments: read.append(arguments))
    found = checkpoint.report(tmp_path / "a", values=False)
    assert read == []
    assert found.data["leaves"]["statistics"] is None
    assert found.data["summary"]["verification"]["state"] == "unchecked"


def test_damage_is_shown_and_the_other_leaves_are_measured(tmp_path, tree):
    checkpoint.save(tree | {"last": np.full(100, 3, "f4")}, tmp_path / "a")
    (file,) = [path for path in (tmp_path / "a").iterdir() if path.name != "manifest.json"]
    position = file.read_bytes().index(np.full(100, 3, "f4").tobytes())
    flip(file, position)
    found = checkpoint.report(tmp_path / "a")
    assert found.data["summary"]["verification"]["damaged"] == ["last"]
    ((number, (problem, is_damaged)),) = found.data["leaves"]["problems"].items()
    assert (number, is_damaged) == (leaves(found)["last"], 1)
    assert "digest" in problem
    assert statistics(found, "embed")["max"] == 11


def test_nan_and_infinite_elements_are_counted(tmp_path):
    checkpoint.save(
        {"a": np.array([np.nan, 1, np.inf], "f4"), "b": np.zeros(3), "c": np.ones(2)}, tmp_path / "a"
    )
    found = checkpoint.report(tmp_path / "a")
    assert found.data["summary"]["health"] == {"nan": 1, "inf": 1, "zero": 1}


def test_shardings_are_as_they_were_recorded(tmp_path):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    array = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec(None, ("data", "model"))))
    checkpoint.save({"w": array}, tmp_path / "a")
    (sharding,) = checkpoint.report(tmp_path / "a").data["leaves"]["shardings"]
    assert sharding == {"spec": [[], ["data", "model"]], "mesh": [["data", 2], ["model", 4]]}


def test_several_trees_are_in_one_report(tmp_path, tree):
    checkpoint.save(tree, tmp_path / "a", prefix="model")
    checkpoint.save({"m": np.ones(3)}, tmp_path / "a", prefix="opt")
    found = checkpoint.report(tmp_path / "a")
    assert {"%@model.embed", "%@opt.m"} <= set(leaves(found))
    assert set(leaves(checkpoint.report(tmp_path / "a", prefix="opt"))) == {"m"}


# ------------------------------------------------------------------------------------------- against


def test_changes_are_relative_to_the_other_checkpoint(tmp_path):
    before = {
        "w": np.full(4, 2.0),
        "same": np.ones(3),
        "shape": np.ones(3),
        "gone": np.ones(1),
        "n": 1,
        "zero": np.zeros(2),
    }
    after = {
        "w": np.full(4, 3.0),
        "same": np.ones(3),
        "shape": np.ones(4),
        "new": np.ones(1),
        "n": 2,
        "zero": np.ones(2),
    }
    checkpoint.save(before, tmp_path / "a")
    checkpoint.save(after, tmp_path / "b")
    found = checkpoint.report(tmp_path / "b", tmp_path / "a")
    against = found.data["against"]
    assert against["counts"] == {"changed": 4, "same": 1, "added": 1, "removed": 1}
    assert [leaf["path"] for leaf in against["removed"]] == ["gone"]
    largest = {one["path"]: one for one in against["largest"]}
    assert largest["w"]["relative"] == 0.5
    assert largest["zero"]["from_zero"]
    assert largest["shape"]["what"] == "float64[3] → float64[4]"


def test_leaves_with_equal_digests_are_not_read_from_the_other(tmp_path, tree):
    checkpoint.save(tree, tmp_path / "a")
    checkpoint.save(tree | {"step": 8}, tmp_path / "b")
    with page_contents(tmp_path / "b") as contents, page_contents(tmp_path / "a") as other:
        other.views[""].close()  # reading would raise
        found = measure(contents, other)
    assert {one.change.status for one in found.values()} == {"same"}


def test_without_values_changes_are_known_as_far_as_digests_tell(tmp_path):
    checkpoint.save({"a": np.ones(3), "b": np.ones(3)}, tmp_path / "a")
    checkpoint.save({"a": np.ones(3), "b": np.zeros(3)}, tmp_path / "b")
    found = checkpoint.report(tmp_path / "b", tmp_path / "a", values=False)
    assert found.data["against"]["counts"] == {"same": 1, "unknown": 1, "removed": 0}


def test_a_checkpoint_is_compared_with_one_of_another_format_and_dtype(tmp_path):
    tree = {"w": np.arange(6, dtype="f4").reshape(2, 3)}
    checkpoint.save(tree, tmp_path / "a", format="tensorstore", options=SaveOptions(compression="zstd"))
    checkpoint.convert(tmp_path / "a", tmp_path / "b", to="safetensors", dtype="bf16")
    (change,) = checkpoint.report(tmp_path / "b", tmp_path / "a").data["against"]["largest"]
    assert change["what"] == "float32[2, 3] → bfloat16[2, 3]"
    assert change["relative"] == 0  # 0 to 5 are the same numbers in bfloat16


def test_changes_beyond_all_numbers_are_still_shown(tmp_path):
    checkpoint.save({"w": np.array([-1.7e308, 1.0, np.nan]), "n": np.array([np.nan])}, tmp_path / "a")
    checkpoint.save({"w": np.array([1.7e308, np.inf, np.nan]), "n": np.array([np.nan])}, tmp_path / "b")
    found = checkpoint.report(tmp_path / "b", tmp_path / "a")
    assert found.data["against"]["counts"] == {"changed": 1, "same": 1, "removed": 0, "became": 1}
    assert found.data["against"]["largest"][0]["unlike"] == 1
    page.embedded_json(found.data)


def test_a_checkpoint_in_a_bucket_has_a_report():
    checkpoint.save({"w": np.ones(3)}, "memory://reports/run/step-1")
    assert checkpoint.report("memory://reports/run/step-1").data["summary"]["title"] == "step-1"
    assert checkpoint.report("memory://reports/run").data["kind"] == "run"


def test_the_heat_map_has_modules_by_layers(tmp_path):
    def model(scale):
        return {
            "opt_state": {"0": {"mu": {"layers": {str(n): {"w": np.full(9, scale)} for n in range(3)}}}},
            "params": {
                "layers": {str(n): {"w": np.full(9, 1 + n * scale), "b": np.ones(2)} for n in range(3)},
                "head": np.ones(2),
            },
        }

    checkpoint.save(model(0.0), tmp_path / "a")
    checkpoint.save(model(0.5), tmp_path / "b")
    first, *others = checkpoint.report(tmp_path / "b", tmp_path / "a").data["against"]["heatmaps"]
    assert (first["before"], first["after"], first["columns"]) == ("params.layers.", "", ["0", "1", "2"])
    assert sorted(first["rows"]) == ["b", "w"]
    assert {(first["rows"][r], c): value for r, c, value in first["cells"]}["w", 2] == 1.0
    assert [other["stack"] for other in others] == ["opt_state.0.mu.layers.*", ""]


def _layers(layers, **leaves):
    return {"layers": {str(n): {"w": np.full(9, 1.0 + n), "b": np.ones(2)} for n in range(layers)}} | leaves


def test_leaves_that_became_nan_or_infinite_are_first_in_every_list(tmp_path):
    before, after = (
        _layers(3, opt_state={"0": {"mu": np.ones(3)}}, head=np.ones(2), other=np.zeros(2)) for _ in "ab"
    )
    after["layers"]["1"]["w"][:2] = np.nan
    after["opt_state"]["0"]["mu"][0] = -np.inf
    after["other"] += 1  # from zero: the strongest change otherwise
    checkpoint.save(before, tmp_path / "a")
    checkpoint.save(after | {"loss": float("nan")}, tmp_path / "b")
    against = checkpoint.report(tmp_path / "b", tmp_path / "a").data["against"]
    assert against["counts"]["became"] == 2
    assert {one["path"]: (one.get("became_nan"), one.get("became_inf")) for one in against["became"]} == {
        "layers.1.w": (2, None),
        "opt_state.0.mu": (None, 1),
    }
    assert [one["path"] for one in against["largest"]] == ["layers.1.w", "other"]
    assert [one["path"] for one in against["state"]] == ["opt_state.0.mu"]


def test_the_heat_map_marks_a_leaf_that_became_nan_and_never_paints_a_change_as_none(tmp_path):
    before, after = _layers(3), _layers(3)
    after["layers"]["1"]["b"][:] = np.nan
    after["layers"]["2"]["w"][:] = np.nextafter(3.0, 4.0)
    before["layers"]["0"]["w"][0], after["layers"]["0"]["w"][0] = 0.0, -0.0
    before["layers"]["2"]["b"][0] = np.nan
    checkpoint.save(before, tmp_path / "a")
    checkpoint.save(after, tmp_path / "b")
    (found,) = checkpoint.report(tmp_path / "b", tmp_path / "a").data["against"]["heatmaps"]
    cells = {(found["rows"][r], c): rest for r, c, *rest in found["cells"]}
    assert cells["b", 1] == [None, "became NaN in 2 elements", 1]
    assert cells["w", 0] == [None, "changed in its bits alone"]
    assert cells["b", 2] == [None, "other NaN or Inf"]
    assert 0 < cells["w", 2][0] < 1e-15
    assert cells["b", 0] == [0.0]
    assert (found["became"], found["rows"][0]) == (1, "b")


def test_a_heat_map_of_many_modules_shows_those_that_became_nan_and_counts_the_rest(tmp_path):
    names = [one + other for one in "abcdefghi" for other in "abcdefghijk"]

    def model(last):
        return {"layers": {str(n): dict.fromkeys(names, np.ones(1)) | {"z": last} for n in range(3)}}

    checkpoint.save(model(np.ones(1)), tmp_path / "a")
    checkpoint.save(model(np.array([np.inf])), tmp_path / "b")
    (found,) = checkpoint.report(tmp_path / "b", tmp_path / "a").data["against"]["heatmaps"]
    assert (found["rows"][0], len(found["rows"]), found["more_rows"]) == ("z", 80, 20)


# ------------------------------------------------------------------------------------ other programs

SAMPLES = [
    *("orbax/v0_plain", "orbax/v1", "orbax-old", "torch/weights.pt", "torch/training.pt", "gguf/plain.gguf"),
    *("files/flax.msgpack", "data/single.safetensors", "data/sharded", "data/ts_dtypes", "zarr"),
]


def _checkpoints(sample):
    """The checkpoints at a sample; some are directories of several."""
    where = COMPAT / sample
    if sample in ("orbax-old", "zarr"):
        return sorted(path for path in where.iterdir() if path.is_dir())[:2]
    return [where]


@pytest.mark.parametrize("sample", SAMPLES)
def test_checkpoints_of_other_programs_have_reports(sample):
    for path in _checkpoints(sample):
        expected = checkpoint.inspect(path)
        found = checkpoint.report(path)
        number = sum(len(tree.leaves) + len(tree.raw_values) for tree in expected.trees.values())
        assert found.data["summary"]["leaves"] == number > 0
        assert found.data["summary"]["verification"]["state"] in ("read", "verified")
        page.page(found.data)


# -------------------------------------------------------------------------------------------- memory

_UNDER_A_LIMIT = """
import resource, sys, threading
from eformer._engine.pages.report import report
path, other, memory = sys.argv[1:]
threading.stack_size(2**18)  # what threads may use as stacks counts, whether they do or not
resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
found = report(path, other, memory=int(memory))
assert found.data["summary"]["verification"]["state"] == "verified"
assert "jax" not in sys.modules
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(1024 * int(peak))
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA covers all memory on Linux alone")
def test_a_report_stays_within_its_memory(tmp_path):
    rng = np.random.default_rng(0)
    for name in "ab":
        block = rng.integers(0, 2**16, (4500, 4500), np.uint16).view("f2")
        checkpoint.save({"w": block.astype("f4"), "small": [block[:300] for _ in range(3)]}, tmp_path / name)
    memory = 240_000_000
    command = [sys.executable, "-c", _UNDER_A_LIMIT, tmp_path / "b", tmp_path / "a", memory]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= memory


def test_too_little_memory_is_an_error_that_says_how_much(tmp_path, tree):
    checkpoint.save(tree, tmp_path / "a")
    with pytest.raises(ValueError, match=r"is not enough: the program itself takes .* allow at least"):
        checkpoint.report(tmp_path / "a", memory=10**6)


def test_a_chunk_that_does_not_fit_is_left_out_and_named(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", large=np.zeros((80, 10**6), np.uint8), small=np.ones(3))
    found = checkpoint.report(tmp_path / "a.npz", memory=None)
    assert found.data["summary"]["verification"]["state"] == "partly"
    ((_, (problem, is_damaged)),) = found.data["leaves"]["problems"].items()
    assert "80 MB when decoded" in problem
    assert not is_damaged


# --------------------------------------------------------------------------------------------- files


def test_a_report_is_replaced_and_another_file_is_not(tmp_path, tree):
    checkpoint.save(tree, tmp_path / "a")
    found = checkpoint.report(tmp_path / "a", values=False)
    assert found.save(tmp_path / "r.html") == os.fspath(tmp_path / "r.html")
    found.save(tmp_path / "r.html")
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    with pytest.raises(FileExistsError, match=r"mine\.html exists and is not a report"):
        found.save(tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"


def test_a_notebook_shows_it_in_a_sandboxed_frame(tmp_path, tree):
    checkpoint.save(tree, tmp_path / "a")
    found = checkpoint.report(tmp_path / "a", values=False)
    shown = found._repr_html_()
    assert 'sandbox="allow-scripts"' in shown
    assert html.unescape(re.search(r'srcdoc="([^"]*)"', shown)[1]) == found.html


@pytest.mark.parametrize("values", [True, False])
def test_a_file_that_is_missing_is_shown_and_the_leaves_of_other_files_are_measured(tmp_path, values):
    tree = {"a": np.ones(100, np.float32), "b": np.ones(100, np.float32)}
    checkpoint.save(tree, tmp_path / "saved", options=SaveOptions(max_shard_bytes=400))
    sorted((tmp_path / "saved").glob("*.safetensors"))[0].unlink()
    data = checkpoint.report(tmp_path / "saved", values=values).data
    assert "a file that is missing" in data["summary"]["notes"][0]
    assert data["summary"]["leaves"] == 2
    if values:
        assert data["summary"]["verification"]["text"].startswith("1 damaged array")
