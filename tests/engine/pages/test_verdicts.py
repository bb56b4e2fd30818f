"""`diff`, a report and the server give one verdict on each leaf."""

import json
import tempfile
import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eformer import checkpoint
from eformer._engine.pages.checkpoints import OpenCheckpoint
from eformer._engine.pages.contents import page_contents
from eformer._engine.pages.reading import measure
from eformer._engine.pages.report import changes_of
from support.columns import leaf_paths, verdicts_in

NAN = np.float32(np.nan)
OTHER_NAN = np.array([0x7FC00001], np.uint32).view(np.float32)[0]


def by_diff(before, after):
    found = checkpoint.diff(before, after)
    verdicts = {one.name: ("changed", one.became_nan, one.became_inf) for one in found.changed}
    return verdicts | dict.fromkeys(found.added, ("added", 0, 0))


def by_report(before, after):
    with page_contents(after) as contents, page_contents(before) as other:
        found = changes_of(contents, other, measure(contents, other))
    return {path: (one.status, one.became_nan, one.became_inf) for path, one in found.items()}


def _verdict(change):
    return change["status"], change.get("became_nan", 0), change.get("became_inf", 0)


def by_server(before, after):
    """Read every leaf; the panel of a leaf, the columns and the overview must say the same."""
    opened = OpenCheckpoint(str(after), threading.Semaphore(), str(before))
    try:
        paths = leaf_paths(json.loads(opened.columns().body))
        found = {path: _verdict(opened.leaf(path, lambda: False)["change"]) for path in paths}
        assert verdicts_in(json.loads(opened.columns().body)) == found
        counts = opened.changes()["counts"]
        assert counts.get("changed", 0) == sum(status == "changed" for status, _, _ in found.values())
        assert counts.get("became", 0) == sum(nan + inf > 0 for _, nan, inf in found.values())
        return found
    finally:
        opened.close()


def verdicts(before, after):
    """Return the verdict on each leaf that both checkpoints or the later one has."""
    found = by_report(before, after)
    assert by_server(before, after) == found
    assert by_diff(before, after) == {path: one for path, one in found.items() if one[0] != "same"}
    return found


def key(seed, kind="fry"):
    return jax.random.key(seed, impl={"fry": "threefry2x32", "rbg": "rbg"}[kind])


def four_bits(*values):
    return np.array(values, ml_dtypes.int4)


SAME, CHANGED = ("same", 0, 0), ("changed", 0, 0)
CASES = {
    "int64 beyond 2^53": (np.array([2**53]), np.array([2**53 + 1]), CHANGED),
    "uint64 at the end": (np.array([2**64 - 1], "u8"), np.array([2**64 - 2], "u8"), CHANGED),
    "zero and minus zero": (np.zeros(3), -np.zeros(3), CHANGED),
    "NaN of other bits": (np.array([NAN]), np.array([OTHER_NAN]), CHANGED),
    "the same NaN": (np.array([NAN, 1]), np.array([NAN, 1]), SAME),
    "became NaN": (np.ones(3), np.array([1, np.nan, np.nan]), ("changed", 2, 0)),
    "became infinite": (np.ones(3, "f2"), np.array([1, np.inf, -np.inf], "f2"), ("changed", 0, 2)),
    "NaN became infinite": (np.array([np.nan]), np.array([np.inf]), CHANGED),
    "became finite": (np.array([np.nan]), np.array([1.0]), CHANGED),
    "bool": (np.array([True, False]), np.array([True, True]), CHANGED),
    "complex": (np.array([1 + 2j]), np.array([1 - 2j]), CHANGED),
    "complex minus zero": (np.array([1 + 0j]), np.array([complex(1, -0.0)]), CHANGED),
    "complex became NaN": (np.array([1 + 2j]), np.array([complex(1, np.nan)]), ("changed", 1, 0)),
    "four bits": (four_bits(1, -1, 7), four_bits(1, -2, 7), CHANGED),
    "four bits, the same": (four_bits(1, -1, 7), four_bits(1, -1, 7), SAME),
    "bfloat16 minus zero": (np.zeros(2, ml_dtypes.bfloat16), -np.zeros(2, ml_dtypes.bfloat16), CHANGED),
    "times": (np.array([1], "M8[s]"), np.array([2], "M8[s]"), CHANGED),
    "PRNG key": (key(0), key(1), CHANGED),
    "PRNG key, the same": (key(1), key(1), SAME),
    "PRNG key of another generator": (key(0), key(0, "rbg"), CHANGED),
    "PRNG key became its data": (key(0), np.zeros(2, np.uint32), CHANGED),
    "dtype, equal values": (np.ones(3, "f4"), np.ones(3, "f8"), CHANGED),
    "dtype, overflow": (np.array([1e30], "f4"), np.array([np.inf], "f2"), ("changed", 0, 1)),
    "shape": (np.ones(3), np.ones((3, 1)), CHANGED),
    "no elements": (np.ones((0, 3)), np.ones((0, 3)), SAME),
    "plain and array": (1, np.array(1), CHANGED),
    "1 and its text": (1, "1", CHANGED),
    "1 and 1.0": (1, 1.0, CHANGED),
    "plain minus zero": (0.0, -0.0, CHANGED),
    "plain became NaN": (1.0, float("nan"), ("changed", 1, 0)),
    "plain became infinite": (1, float("inf"), ("changed", 0, 1)),
    "plain NaN": (float("nan"), float("nan"), SAME),
    "plain beyond 2^53": (2**53, 2**53 + 1, CHANGED),
    "long texts that differ in the middle": ("x" * 400, "x" * 200 + "y" + "x" * 199, CHANGED),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("layout", ["safetensors", "tensorstore"])
@pytest.mark.parametrize("case", CASES)
def test_diff_report_and_server_agree_on(case, layout, tmp_path):
    before, after, expected = CASES[case]
    checkpoint.save({"leaf": before, "beside": np.ones(2)}, tmp_path / "a", format=layout)
    checkpoint.save({"leaf": after, "beside": np.ones(2)}, tmp_path / "b")
    assert verdicts(tmp_path / "a", tmp_path / "b") == {"leaf": expected, "beside": SAME}


LEAVES = st.sampled_from([leaf for before, after, _ in CASES.values() for leaf in (before, after)])


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(LEAVES, LEAVES), min_size=1))
def test_diff_report_and_server_agree_on_any_two_trees(leaves):
    with tempfile.TemporaryDirectory() as place:
        before, after = Path(place) / "a", Path(place) / "b"
        checkpoint.save({name: one for name, (one, _) in leaves.items()}, before)
        checkpoint.save({name: other for name, (_, other) in leaves.items()}, after)
        assert set(verdicts(before, after)) == set(leaves)


def test_a_tree_beside_other_trees_is_compared_with_the_tree_of_its_prefix(tmp_path):
    checkpoint.save({"w": np.ones(3)}, tmp_path / "a", prefix="model")
    checkpoint.save({"w": np.ones(3)}, tmp_path / "b", prefix="model")
    checkpoint.save({"m": np.ones(3)}, tmp_path / "b", prefix="opt")
    assert checkpoint.diff(tmp_path / "a", tmp_path / "b").added == {"[opt] m": "float64[3]"}
    assert by_report(tmp_path / "a", tmp_path / "b") == {"%@model.w": SAME, "%@opt.m": ("added", 0, 0)}
    assert by_server(tmp_path / "a", tmp_path / "b") == by_report(tmp_path / "a", tmp_path / "b")


# ----------------------------------------------------------------------------------------- against numpy

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"]
WHOLE = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FEW_BITS = ["int4", "uint4", "bool"]
DTYPES = [*FLOATS, *WHOLE, *FEW_BITS, "complex64", "complex128"]
EDGES = [0.0, -0.0, 1.0, np.nan, np.inf, -np.inf, 1e-40, 3e38]
WHOLE_EDGES = [0, 1, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**64 - 1]


def elements(rng, dtype):
    """Return a few elements of any bits that a dtype has, with values at the edges."""
    if dtype.name in FEW_BITS:
        return rng.integers(0, 8, 6).astype(dtype)
    found = rng.integers(0, 256, 6 * dtype.itemsize, np.uint8).view(dtype)
    with np.errstate(all="ignore"):
        if dtype.name in WHOLE:
            found[:2] = rng.choice(np.array(WHOLE_EDGES, np.uint64), 2).view(np.int64).astype(dtype)
        else:
            found[:2] = rng.choice(EDGES, 2).astype(dtype)
    return found


def altered(rng, before):
    """Return the same elements, or others, or with another bit or sign, or in another dtype."""
    after, dtype = before.copy(), before.dtype
    match rng.choice(["same", "others", "bit", "sign", "dtype"]):
        case "others":
            after = elements(rng, dtype)
        case "bit" if dtype.name not in FEW_BITS:
            after.view(np.uint8)[rng.integers(after.nbytes)] ^= 1 << rng.integers(8)
        case "sign" if dtype.name in FLOATS or dtype.kind == "c":
            after[:3] = -after[:3]
        case "dtype":
            with np.errstate(all="ignore"):
                after = before.astype("complex128" if dtype.kind == "c" else rng.choice(["f8", "c16", "f2"]))
    return after


def by_numpy(before, after):
    """Bits decide within one dtype; another dtype is a change. Complex numbers hold all that is finite or not."""
    if before.dtype == after.dtype and before.tobytes() == after.tobytes():
        return SAME
    with np.errstate(all="ignore"):
        was, now = before.astype(np.complex128), after.astype(np.complex128)
    became = np.isfinite(was) & ~np.isfinite(now)
    return "changed", int(np.sum(became & np.isnan(now))), int(np.sum(became & ~np.isnan(now)))


@pytest.mark.parametrize("seed", range(2))
def test_diff_report_and_server_say_of_200_pairs_of_leaves_what_numpy_says(seed, tmp_path):
    rng = np.random.default_rng(seed)
    before = {f"leaf_{n}": elements(rng, np.dtype(DTYPES[n % len(DTYPES)])) for n in range(200)}
    after = {name: altered(rng, leaf) for name, leaf in before.items()}
    checkpoint.save(before, tmp_path / "a")
    checkpoint.save(after, tmp_path / "b", format="tensorstore")
    expected = {name: by_numpy(before[name], after[name]) for name in before}
    assert {status for status, *_ in expected.values()} == {"same", "changed"}
    assert verdicts(tmp_path / "a", tmp_path / "b") == expected
