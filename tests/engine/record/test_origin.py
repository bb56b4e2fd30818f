"""The origin of a tree: recorded, shown, carried on, and never in the way."""

import json

import numpy as np
import pytest

from eformer import __version__, checkpoint
from eformer._engine.record.origin import (
    MOST_BYTES,
    book_in,
    checked_origin,
    config_in,
    new_origin,
    origin_text,
    parent_lines,
    parent_of,
    trimmed_config,
)
from eformer.checkpoint import convert, inspect, load, save

TREE = {"w": np.ones((2, 3))}
ORIGIN = {"rules": {"book": "qwen3/maxtext", "version": 1, "config": {"num_hidden_layers": 3}}}


@pytest.mark.parametrize("form", ["safetensors", "zarr"])
def test_a_save_records_the_origin(tmp_path, form):
    save(TREE, tmp_path / "a", format=form, origin=ORIGIN)
    assert inspect(tmp_path / "a").trees[""].origin == ORIGIN


def test_a_save_in_the_background_and_a_single_file_record_it_too(tmp_path):
    checkpoint.save_async(TREE, tmp_path / "a", origin=ORIGIN).result()
    save(TREE, tmp_path / "b.safetensors", origin=ORIGIN)
    for name in ("a", "b.safetensors"):
        assert inspect(tmp_path / name).trees[""].origin == ORIGIN


def test_without_an_origin_the_manifest_has_no_field_for_it(tmp_path):
    save(TREE, tmp_path / "a")
    assert "origin" not in json.loads((tmp_path / "a" / "manifest.json").read_text())["trees"][""]
    assert inspect(tmp_path / "a").trees[""].origin is None


def test_a_load_reports_the_checkpoint_and_the_rules_that_it_has_recorded(tmp_path):
    save(TREE, tmp_path / "a", origin=ORIGIN)
    _, report = load(tmp_path / "a", return_report=True)
    found = inspect(tmp_path / "a")
    parent = {"path": str(tmp_path / "a"), "save_id": found.trees[""].save_id, "digest": found.digest}
    assert report.origin["rules"] == ORIGIN["rules"]
    assert report.origin["parents"] == [parent]
    assert report.origin["tool"] == "load"


def test_the_report_of_a_load_is_the_origin_of_a_save(tmp_path):
    save(TREE, tmp_path / "a", origin=ORIGIN)
    tree, report = load(tmp_path / "a", return_report=True)
    save(tree, tmp_path / "b", origin=report.origin)
    assert inspect(tmp_path / "b").trees[""].origin == report.origin


def test_rules_of_a_load_end_the_recorded_ones(tmp_path):
    save(TREE, tmp_path / "a", origin=ORIGIN)
    _, report = load(tmp_path / "a", rename={"w": "x"}, return_report=True)
    assert "rules" not in report.origin


def test_a_conversion_keeps_the_rules_and_names_its_source(tmp_path):
    save(TREE, tmp_path / "a", origin=ORIGIN)
    convert(tmp_path / "a", tmp_path / "b", to="zarr")
    found = inspect(tmp_path / "b").trees[""].origin
    assert found["rules"] == ORIGIN["rules"]
    assert found["parents"][0]["digest"] == inspect(tmp_path / "a").digest
    assert found["tool"] == "convert"


def test_several_checkpoints_are_several_parents(tmp_path):
    save({"a": np.ones(2)}, tmp_path / "a")
    save({"b": np.ones(2)}, tmp_path / "b")
    _, report = load([tmp_path / "a", tmp_path / "b"], return_report=True)
    assert [one["path"] for one in report.origin["parents"]] == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_inspect_shows_it(tmp_path):
    save(TREE, tmp_path / "a", origin=new_origin("load", [parent_of("hf://org/x", "", "")], ORIGIN["rules"]))
    assert f"origin      load, eformer {__version__}, rules qwen3/maxtext 1\n" in str(inspect(tmp_path / "a"))
    assert "parent      hf://org/x\n" in str(inspect(tmp_path / "a"))


def test_an_origin_is_a_short_json_object(tmp_path):
    with pytest.raises(ValueError, match=r"origin= is not a JSON object"):
        save(TREE, tmp_path / "a", origin={"a": object()})
    with pytest.raises(ValueError, match=r"origin= has 17,\d+ bytes as JSON, expected at most 16,384"):
        save(TREE, tmp_path / "a", origin={"a": "x" * 17_000})
    assert not (tmp_path / "a").exists()


def test_an_origin_that_eformer_makes_is_never_too_long():
    long = new_origin("load", [parent_of("x" * 9999, "", "")] * 99, {"config": {"a": "x" * 9000}})
    assert len(json.dumps(long)) < MOST_BYTES
    assert checked_origin(long) == long


def test_too_many_parents_leave_the_last_ones_and_a_number(tmp_path):
    parents = [parent_of(f"run/step-{n}", f"{n:032x}", "d" * 32) | {"weight": 0.01} for n in range(200)]
    made = new_origin("merge", parents)
    assert len(json.dumps(made, separators=(",", ":"))) <= MOST_BYTES
    assert made["parents"] == parents[made["left_out"] :]
    assert parent_lines(made)[0] == f"{made['left_out']} earlier parents, not recorded"


@pytest.mark.parametrize(
    "parent", [{"weight": 10**5000, "path": [1]}, {"weight": "x", "as": 3}, {"digest": {"a": 1}}, {}]
)
def test_odd_parents_of_other_programs_are_shown(parent):
    assert len(parent_lines({"parents": [parent, 7], "left_out": 10**5000})) == 1


@pytest.mark.parametrize(
    "origin", [{"rules": 3}, {"rules": {"book": 3, "config": []}}, {"parents": 4}, {"parents": [5]}]
)
def test_odd_origins_of_other_programs_are_shown_and_ignored(tmp_path, origin):
    save(TREE, tmp_path / "a", origin=origin)
    assert (book_in(origin), config_in(origin)) == ("", {})
    assert origin_text(origin)
    assert load(tmp_path / "a", return_report=True)[1].loaded == ("w",)


def test_a_configuration_keeps_numbers_and_short_lists():
    config = {
        "layers": 3,
        "types": ["full", "sliding"] * 30,
        "text_config": {"rope": {"theta": 1e6, "too": {"deep": {"a": 1}}}, "n": 2},
        "long": list(range(1000)),
        "mixed": [{"a": 1}],
        "id2label": {str(n): "x" for n in range(9)},
        "template": "x" * 1000,
        "none": None,
    }
    assert trimmed_config(config) == {
        "layers": 3,
        "types": ["full", "sliding"] * 30,
        "text_config": {"rope": {"theta": 1e6}, "n": 2},
    }


def test_a_long_configuration_loses_its_longest_entries():
    config = {"layers": 3} | {f"list{n}": [n] * 100 for n in range(99)}
    found = trimmed_config(config)
    assert found["layers"] == 3
    assert len(json.dumps(found)) < 2 * 2**13


def test_a_run_keeps_the_origin_of_the_step_that_it_goes_on_from(tmp_path):
    with checkpoint.Run(tmp_path / "run", every=1, origin=ORIGIN) as run:
        run.after(1, TREE)
    with checkpoint.Run(tmp_path / "run", every=1) as run:
        assert run.resume().report.origin["rules"] == ORIGIN["rules"]
        run.after(2, TREE)
    for step in (1, 2):
        assert inspect(tmp_path / "run", step=step).trees[""].origin == ORIGIN


def test_a_near_step_keeps_it_for_the_run(tmp_path):
    near = checkpoint.Near(tmp_path / "near", every=1)
    with checkpoint.Run(tmp_path / "run", near=near, origin=ORIGIN) as run:
        run.after(1, TREE)
    with checkpoint.Run(tmp_path / "run", every=2, near=near) as run:
        assert run.resume().step == 1
        run.after(2, TREE)
    assert inspect(tmp_path / "run", step=2).trees[""].origin == ORIGIN


def test_a_run_that_is_resumed_by_rules_drops_the_recorded_ones(tmp_path):
    with checkpoint.Run(tmp_path / "run", every=1, origin=ORIGIN) as run:
        run.after(1, TREE)
    with checkpoint.Run(tmp_path / "run", every=1) as run:
        run.resume(rename={"w": "x"})
        run.after(2, {"x": np.ones(3)})
    found = inspect(tmp_path / "run", step=2).trees[""].origin
    assert "rules" not in found
    assert found["parents"][0]["path"].endswith("step-1")
