"""Compare two checkpoints."""

import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from eformer._engine.tools import diff as diff_module
from eformer.checkpoint import SaveOptions, diff, prune, save
from eformer.errors import CorruptionError


def compared(tmp_path, a, b, **options):
    save(a, tmp_path / "a")
    save(b, tmp_path / "b", **options)
    return diff(tmp_path / "a", tmp_path / "b")


def test_equal_trees_are_equal_in_any_format_and_sharding(tmp_path):
    mesh = jax.make_mesh((1,), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tree = {"w": jnp.arange(30.0).reshape(5, 6), "rng": jax.random.key(1), "step": 1, "n": np.full(3, np.nan)}
    options = SaveOptions(compression="zstd", max_chunk_bytes=32)
    found = compared(
        tmp_path,
        tree,
        tree | {"w": jax.device_put(tree["w"], rows)},
        format="tensorstore",
        options=options,
    )
    assert found.same
    assert (found.unchanged, found.notes) == (4, ())
    assert str(found).endswith("the same, 4 unchanged")


def test_leaves_are_added_removed_or_changed(tmp_path):
    a = {
        "both": np.ones((2, 2)),
        "old": np.zeros(3),
        "shape": np.ones(2),
        "kind": np.ones(2),
        "v": 1,
        "x": "t",
    }
    b = {"both": np.ones((2, 2)), "new": 5, "shape": np.ones(3), "kind": np.ones(2, "f4"), "v": 1.0, "x": "t"}
    found = compared(tmp_path, a, b)
    assert not found.same
    assert found.added == {"new": "5"}
    assert found.removed == {"old": "float64[3]"}
    assert [str(change) for change in found.changed] == [
        "kind: float64[2] -> float32[2]: largest difference 0, mean 0, in 0% of the elements",
        "shape: float64[2] -> float64[3]",
        "v: 1 -> 1.0",
    ]
    assert found.unchanged == 2


def test_differences_of_values_are_measured(tmp_path):
    a = np.zeros((100, 10), np.float32)
    b = a.copy()
    b[3, 3], b[50, :] = -4.0, 1.0
    (change,) = compared(tmp_path, {"w": a}, {"w": b}).changed
    assert (change.largest, change.mean, change.share) == (4.0, 14 / 1000, 11 / 1000)


def test_large_leaves_are_compared_box_by_box(tmp_path, monkeypatch):
    monkeypatch.setattr("eformer._engine.tools.diff._BOX_BYTES", 1000)
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 70, 30))
    found = compared(tmp_path, {"w": a, "v": a}, {"w": b, "v": a}, format="tensorstore")
    (change,) = found.changed
    assert change.largest == np.abs(a - b).max()
    assert change.mean == pytest.approx(np.abs(a - b).mean())
    assert change.share == 1.0


def test_containers_and_metadata_are_noted(tmp_path):
    save([np.ones(2)], tmp_path / "a", metadata={"run": 1})
    save({"0": np.ones(2)}, tmp_path / "b", metadata={"run": 2})
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.same
    assert found.notes == (
        "some containers are of different kinds, such as a list and a dict",
        "the metadata differs: run changed",
    )


def test_several_trees_are_compared_by_their_prefixes(tmp_path):
    for path, prefixes in (("a", ("model", "ema")), ("b", ("model", "opt"))):
        for prefix in prefixes:
            save({"w": np.ones(2)}, tmp_path / path, prefix=prefix)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert (found.removed, found.added) == ({"[ema] w": "float64[2]"}, {"[opt] w": "float64[2]"})
    assert diff(tmp_path / "a", tmp_path / "b", prefix="model").same


def test_damage_is_an_error_not_a_difference(tmp_path):
    save({"w": np.arange(1000)}, tmp_path / "a")
    save({"w": np.arange(1000)}, tmp_path / "b")
    with (tmp_path / "b" / "model.safetensors").open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\xff")
    with pytest.raises(CorruptionError, match="leaf 'w'"):
        diff(tmp_path / "a", tmp_path / "b")


def test_progress_is_reported_to_the_end(tmp_path):
    told = []
    save({"w": np.ones(100), "v": np.ones((3, 3), ml_dtypes.bfloat16)}, tmp_path / "a")
    diff(tmp_path / "a", tmp_path / "a", progress=lambda *said: told.append(said))
    assert told[-1] == (818, 818)


def test_a_plain_value_that_became_an_array_is_shown_with_its_value(tmp_path):
    (change,) = compared(tmp_path, {"step": 100}, {"step": np.array(100)}).changed
    assert str(change) == "step: 100 -> int64[] = 100"


@pytest.mark.parametrize(
    ("before", "after", "became"),
    [(1.0, np.float32(np.nan), (1, 0)), (np.array(2), np.inf, (0, 1)), (np.float32(np.nan), 1.0, (0, 0)),
     (3, np.array(-np.inf, ml_dtypes.bfloat16), (0, 1)), (1.0, np.array([np.nan]), (0, 0))],
)  # fmt: skip
def test_a_plain_number_and_an_array_without_axes_may_become_nan_as_each_other(
    tmp_path, before, after, became
):
    before, after = (np.asarray(x) if isinstance(x, np.generic) else x for x in (before, after))
    found = compared(tmp_path, {"a": 1, "loss": before}, {"a": 2, "loss": after})
    (change,) = (change for change in found.changed if change.name == "loss")
    assert (change.became_nan, change.became_inf) == became
    assert found.changed[0] == change or not any(became)


def test_leaves_that_became_nan_or_infinite_come_first_and_are_counted_in_the_headline(tmp_path):
    a = {"a": np.zeros(4), "b": np.zeros(4, "f4"), "gone": 1, "loss": 0.5}
    b = {"a": np.ones(4), "b": np.array([np.nan, np.nan, np.inf, 0], "f4"), "loss": float("nan")}
    found = compared(tmp_path, a, b)
    assert [(one.name, one.became_nan, one.became_inf) for one in found.changed] == [
        ("b", 2, 1), ("loss", 1, 0), ("a", 0, 0),
    ]  # fmt: skip
    headline, *lines = str(found).split("\n")
    assert headline.endswith("different, 2 became NaN or infinite, 1 removed, 3 changed")
    assert lines == [
        "~ b: became NaN in 2 elements and Inf in 1 element: float32[4]: largest difference nan, mean nan, "
        "in 75% of the elements",
        "~ loss: became NaN in 1 element: 0.5 -> nan",
        "- gone: 1",
        "~ a: float64[4]: largest difference 1, mean 1, in 100% of the elements",
    ]


def test_a_number_with_too_many_digits_to_print_is_compared(tmp_path):
    (change,) = compared(tmp_path, {"n": 10**5000}, {"n": 10**5000 + 1}).changed
    assert "Exceeds the limit" in change.before


def test_a_run_whose_newest_step_is_removed_meanwhile_is_compared_again(monkeypatch):
    monkeypatch.setattr(diff_module, "_BATCH", 1)
    run = f"memory://diff-{os.getpid()}/run"
    tree = {"a": np.ones(3), "b": np.ones(3)}
    save(tree, f"{run}/step-1")
    calls = []

    def replace(done, total):
        calls.append(done)
        if done == 24 and calls.count(24) == 1:  # the first leaf has been compared
            save(tree | {"c": np.ones(3)}, f"{run}/step-2")
            prune(run, keep=1)

    found = diff(run, run, progress=replace)
    assert (found.same, found.unchanged) == (True, 3)
