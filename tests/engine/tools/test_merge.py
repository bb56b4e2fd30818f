"""Merges: sums equal to numpy bit for bit, of every format, with refusals that list all problems, and the lineage."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from eformer import __version__, checkpoint
from eformer._engine.record.boxes import Box
from eformer._engine.record.lazy_arrays import decoded_together
from eformer._engine.record.merged_arrays import LowRankUpdate, WeightedSum
from eformer._engine.record.planned import LazyArray
from eformer.checkpoint import convert, inspect, load, merge, save
from eformer.errors import CorruptionError, MismatchError, NotFoundError, QuantizedError

BF16 = ml_dtypes.bfloat16


def state(seed, dtype=BF16):
    rng = np.random.default_rng(seed)
    return {
        "params": {
            "w": rng.normal(size=(33, 17)).astype(dtype),
            "b": rng.normal(size=7).astype(np.float32),
            "d": rng.normal(size=(3, 2)),
            "h": rng.normal(size=(2, 3, 4)).astype(np.float16),
            "c": (rng.normal(size=4) + 1j).astype(np.complex64),
            "zero": np.zeros((0, 3), np.float32),
            "scalar": np.array(rng.normal(), np.float32),
        },
        "count": np.arange(seed, seed + 3),
        "done": np.array([seed > 1]),
        "step": seed,
        "name": f"step {seed}",
    }


def plain_sum(leaves, weights):
    """Add leaves up as a program without eformer does."""
    wide = np.result_type(np.float32, *leaves) if leaves[0].dtype != BF16 else np.dtype(np.float32)
    real = np.float64 if wide in (np.float64, np.complex128) else np.float32
    total, divisor = real(weights[0]) * leaves[0].astype(wide), real(weights[0])
    for leaf, weight in zip(leaves[1:], weights[1:], strict=True):
        total, divisor = total + real(weight) * leaf.astype(wide), divisor + real(weight)
    return (total / divisor).astype(leaves[0].dtype)


def assert_merged(merged, states, weights):
    for name, found in merged["params"].items():
        wanted = plain_sum([np.asarray(each["params"][name]) for each in states], weights)
        assert np.asarray(found).dtype == wanted.dtype, name
        assert np.asarray(found).tobytes() == wanted.tobytes(), name


@pytest.fixture
def run(tmp_path):
    for step in (1, 2, 3):
        save(state(step), tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def shares_of(rule):
    """Return the weights as they are defined, in double precision."""
    decay = {"wsm": lambda x: 1 - np.sqrt(x), "cosine": lambda x: (1 + np.cos(np.pi * x)) / 2}.get(rule)
    if decay:
        kept = [decay(j / 3) for j in range(3)]
        return [kept[0] - kept[1], kept[1] - kept[2], kept[2]]
    return {"mean": [1, 1, 1], "ema": [0.9**2, (1 - 0.9) * 0.9, 1 - 0.9], "numbers": [0.5, 2, -1]}[rule]


MERGES = {
    "mean": {"weights": "mean"},
    "wsm": {"weights": "wsm"},
    "cosine": {"weights": "cosine"},
    "ema": {"ema": 0.9},
    "numbers": {"weights": [0.5, 2, -1]},
}


@pytest.mark.parametrize("rule", MERGES)
@pytest.mark.parametrize("target", ["safetensors", "zarr", "orbax", "msgpack", "npz"])
def test_a_merge_equals_the_sums_of_numpy_bit_for_bit(run, tmp_path, rule, target):
    merge(run, tmp_path / "m", last=3, to=target, **MERGES[rule], keys="params" if target == "npz" else None)
    steps = [load(run / f"step-{step}") for step in (1, 2, 3)]
    with checkpoint.open(tmp_path / "m") as view:
        merged = {"params": {name: view[f"params.{name}"][...] for name in steps[0]["params"]}}
    assert_merged(merged, steps, shares_of(rule))


def test_integers_booleans_and_plain_values_are_those_of_the_last_source_and_named(run, tmp_path):
    done = merge(run, tmp_path / "m", last=2, to="safetensors")
    merged = load(tmp_path / "m")
    assert merged["count"].tolist() == [3, 4, 5]
    assert (merged["done"].tolist(), merged["step"], merged["name"]) == ([True], 3, "step 3")
    assert done.notes == ("from the last source alone: count; done; name; step",)


def test_the_result_shows_the_rule_and_has_the_structure_of_the_last_source(run, tmp_path):
    plan = merge(run, tmp_path / "m", last=2, to="zarr", dry_run=True)
    assert not (tmp_path / "m").exists()
    assert "  params.w: bfloat16[33, 17] (mean of 2)" in str(plan)


def test_checkpoints_of_several_formats_are_merged_by_a_dict(tmp_path):
    one, other = state(1), state(2)
    save(one, tmp_path / "a")
    save(other, tmp_path / "b", format="zarr")
    merge({tmp_path / "a": 0.25, tmp_path / "b": 0.75}, tmp_path / "m.safetensors")
    assert_merged(load(tmp_path / "m.safetensors"), [one, other], [0.25, 0.75])


def test_steps_of_a_run_are_sources(run, tmp_path):
    merge(checkpoint.steps(run)[-2:], tmp_path / "m", to="safetensors", root="params")
    assert_merged({"params": load(tmp_path / "m")}, [state(2), state(3)], [1, 1])


def test_keys_choose_leaves_and_other_leaves_need_not_fit(tmp_path):
    save({"a": np.ones(2), "b": np.ones(2)}, tmp_path / "a")
    save({"a": np.zeros(2), "b": np.ones(3)}, tmp_path / "b")
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", keys="a", to="safetensors")
    assert {name: leaf.tolist() for name, leaf in load(tmp_path / "m").items()} == {"a": [0.5, 0.5]}


def test_a_dtype_is_rounded_to_once(tmp_path):
    save({"w": np.float32([1.0])}, tmp_path / "a")
    save({"w": np.array([1 + 2**-7], BF16)}, tmp_path / "b")  # the mean is between two bfloat16
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", dtype="float32", to="safetensors")
    assert load(tmp_path / "m")["w"].tolist() == [1 + 2**-8]


def test_several_trees_are_merged_by_prefix(tmp_path):
    for name, value in (("a", 0.0), ("b", 1.0)):
        for prefix in ("model", "ema"):
            save({"w": np.full(2, value + (prefix == "ema"))}, tmp_path / name, prefix=prefix)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", to="safetensors")
    assert load(tmp_path / "m", prefix="model")["w"].tolist() == [0.5, 0.5]
    assert load(tmp_path / "m", prefix="ema")["w"].tolist() == [1.5, 1.5]


def test_infinities_and_nan_are_added_as_numpy_adds_them(tmp_path):
    save({"w": np.float32([np.inf, np.nan, 3e38])}, tmp_path / "a")
    save({"w": np.float32([-np.inf, 1, 3e38])}, tmp_path / "b")
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", to="safetensors")
    assert load(tmp_path / "m")["w"].astype(str).tolist() == ["nan", "nan", "inf"]


def test_negative_zeros_stay_negative(tmp_path):
    for name in "ab":
        save({"w": np.full(2, -0.0)}, tmp_path / name)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", to="safetensors")
    assert np.signbit(load(tmp_path / "m")["w"]).all()


def test_a_large_leaf_is_the_same_for_every_limit_of_memory(tmp_path):
    rng = np.random.default_rng(0)
    leaves = [rng.normal(size=(3000, 2000)).astype(np.float32) for _ in range(2)]
    for n, leaf in enumerate(leaves):
        save({"w": leaf}, tmp_path / str(n))
    merge([tmp_path / "0", tmp_path / "1"], tmp_path / "m", weights="wsm", to="safetensors")
    kept = 1 - np.sqrt(0.5)
    assert load(tmp_path / "m")["w"].tobytes() == plain_sum(leaves, [1 - kept, kept]).tobytes()


# ---------------------------------------------------------------------------------------------- errors


def test_one_error_lists_all_leaves_that_do_not_fit(tmp_path):
    save({"a": np.ones(2), "b": np.ones(2), "d": np.ones(2)}, tmp_path / "a")
    save({"a": np.ones(2), "b": np.ones(3), "c": np.ones(2), "d": np.ones(2, int)}, tmp_path / "b")
    save({"a": np.ones(2), "b": np.ones(2), "c": np.ones(2), "d": np.ones(2)}, tmp_path / "c")
    with pytest.raises(MismatchError, match="the checkpoints cannot be merged: 3 mismatches") as caught:
        merge([tmp_path / name for name in "abc"], tmp_path / "m", to="safetensors")
    assert caught.value.problems == (
        f"leaf 'c' is not in {tmp_path / 'a'}",
        f"leaf 'b' has the shape [3] in {tmp_path / 'b'}, and [2] in {tmp_path / 'c'}",
        f"leaf 'd' is int64 in {tmp_path / 'b'}, expected floating numbers",
    )
    assert not (tmp_path / "m").exists()


def test_a_leaf_that_only_an_earlier_source_has_is_an_error(tmp_path):
    save({"a": np.ones(2), "b": np.ones(2)}, tmp_path / "a")
    save({"a": np.ones(2)}, tmp_path / "b")
    with pytest.raises(MismatchError, match=r"leaf 'b' of .*a is not in .*b"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", to="safetensors")


def test_a_missing_tree_is_an_error(tmp_path):
    save({"w": np.ones(2)}, tmp_path / "a", prefix="model")
    save({"w": np.ones(2)}, tmp_path / "b", prefix="ema")
    with pytest.raises(MismatchError, match="a has no tree 'ema'"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", to="safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "wsm", "ema": 0.5}, "exclude each other"),
        ({"last": 9}, "has 3 steps, expected at least last=9"),
        ({"last": 0}, "last=0: expected a positive number"),
        ({}, "a merge has several sources, found 1"),
        ({"last": 2, "rename": {"a": "b"}}, "are for lora="),
        ({"lora": "x", "weights": "wsm"}, "lora= adds to the weights of one source"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(run, tmp_path, arguments, message):
    with pytest.raises((ValueError, NotFoundError), match=message):
        merge(run, tmp_path / "m", to="safetensors", **arguments)


def test_damage_in_an_earlier_source_is_an_error_and_nothing_appears(tmp_path):
    for name in "ab":
        save({"w": np.ones(10_000)}, tmp_path / name)
    with (tmp_path / "a" / "model.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(CorruptionError, match="leaf 'w': bytes"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", to="safetensors")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_quantised_source_among_others_is_refused(tmp_path):
    leaves = {"w.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn)}
    scale = {"w.weight_scale_inv": np.ones((1, 1), np.float32)}
    safetensors.numpy.save_file(leaves | scale, tmp_path / "a.safetensors")
    safetensors.numpy.save_file({"w.weight": np.ones((4, 4), np.float32)}, tmp_path / "b.safetensors")
    with pytest.raises(QuantizedError, match=r"w\.weight"):
        merge([tmp_path / f"{name}.safetensors" for name in "ab"], tmp_path / "m", to="safetensors")


def test_quantised_weights_are_merged_as_numbers_alone(tmp_path):
    for name, scale in (("a", 2), ("b", 4)):
        leaves = {
            "w.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn),
            "w.weight_scale_inv": np.full((1, 1), scale, np.float32),
        }
        safetensors.numpy.save_file(leaves, tmp_path / f"{name}.safetensors")
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    with pytest.raises(QuantizedError, match=r"w\.weight"):
        merge(paths, tmp_path / "m", to="safetensors")
    merge(paths, tmp_path / "m", to="safetensors", dequant="bf16")
    assert load(tmp_path / "m")["w"]["weight"].tolist() == [[3.0] * 4] * 4


# --------------------------------------------------------------------------------------------- lineage


@pytest.mark.parametrize("target", ["safetensors", "zarr"])
def test_a_merge_records_its_parents_with_weights(run, tmp_path, target):
    merge(run, tmp_path / "m", last=2, weights=[3, 1], to=target)
    origin = inspect(tmp_path / "m").trees[""].origin
    steps = [inspect(run / f"step-{step}") for step in (2, 3)]
    assert origin == {
        "parents": [
            {
                "path": str(run / f"step-{step}"),
                "save_id": found.trees[""].save_id,
                "digest": found.digest,
                "weight": weight,
            }
            for step, found, weight in zip((2, 3), steps, (3.0, 1.0), strict=True)
        ],
        "tool": "merge",
        "version": __version__,
    }
    digest = steps[0].digest
    shown = str(inspect(tmp_path / "m"))
    assert f"origin      merge, eformer {__version__}\n" in shown
    assert f"parent      {run}/step-2, weight 3, save {steps[0].trees[''].save_id}, digest {digest}" in shown


def test_a_conversion_of_a_merge_names_the_merge(run, tmp_path):
    merge(run, tmp_path / "m", last=2, to="safetensors")
    convert(tmp_path / "m", tmp_path / "c", to="zarr")
    tree = inspect(tmp_path / "c").trees[""]
    assert [parent["path"] for parent in tree.origin["parents"]] == [str(tmp_path / "m")]
    assert tree.origin["tool"] == "convert"
    assert "merged" not in tree.written_by


def test_a_report_shows_the_parents(run, tmp_path):
    merge(run, tmp_path / "m", last=2, to="safetensors")
    html = str(checkpoint.report(tmp_path / "m").html)
    assert "step-2, weight 1, save" in html


# ----------------------------------------------------------------------------------------------- arrays


class _Array(LazyArray):
    def __init__(self, array):
        self.array, self.shape, self.dtype, self.in_order = array, array.shape, array.dtype, True

    def read(self, box):
        return self.array[box.slices]

    def forget(self):
        pass


def test_a_large_box_is_read_in_small_ones():
    array, seen = _Array(np.ones((4096, 1024), np.float32)), []
    read = array.read
    array.read = lambda box: (seen.append(box.size), read(box))[1]
    whole = WeightedSum([array], [1], array.dtype, "").read(Box.whole(array.shape))
    assert (whole.min(), sum(seen), max(seen) * 4) == (1, 4096 * 1024, 8 * 2**20)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_box_of_a_sum_or_of_a_lora_is_the_box_of_the_whole(rows):
    rng = np.random.default_rng(3)
    a, b = (_Array(rng.normal(size=(64, 96)).astype(np.float32)) for _ in range(2))
    thin, wide = _Array(rng.normal(size=(64, 5)).astype(BF16)), _Array(rng.normal(size=(5, 96)).astype(BF16))
    for array in (
        WeightedSum([a, b], [0.3, 0.4], a.dtype, ""),
        LowRankUpdate(a, thin, wide, 0.7, np.dtype(BF16)),
    ):
        whole = array.read(Box.whole((64, 96)))
        box = Box((5, 3), (min(64, 5 + rows), 90))
        assert array.read(box).tobytes() == np.ascontiguousarray(whole[box.slices]).tobytes()


def test_a_merge_imports_no_jax(run, tmp_path):
    program = (
        "import sys; from eformer import checkpoint\n"
        f"checkpoint.merge({str(run)!r}, {str(tmp_path / 'm')!r}, last=2, to='safetensors')\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---------------------------------------------------------------------------------------------- memory

_UNDER_A_LIMIT = """
import resource, sys, threading
from eformer.checkpoint import merge
*sources, destination, to, memory = sys.argv[1:]
threading.stack_size(2**18)  # stacks of threads count, whether they are used or not
resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
merge(sources, destination, to=to, memory=int(memory))
(peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(1024 * int(peak))
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA covers all memory on Linux alone")
@pytest.mark.parametrize("target", ["safetensors", "zarr"])
def test_a_merge_stays_within_its_memory(tmp_path, target):
    """Three times 200 MB, of which one leaf has 160 MB."""
    rng = np.random.default_rng(0)
    block = rng.normal(size=(8000, 10_000)).astype(BF16)
    for n in range(3):
        save({"w": block[::-1] if n else block, "l": [block[:1000], block[1000:2000]]}, tmp_path / str(n))
    memory = 320_000_000
    words = [*(tmp_path / str(n) for n in range(3)), tmp_path / "m", target, memory]
    command = [sys.executable, "-c", _UNDER_A_LIMIT, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= memory
    with checkpoint.open(tmp_path / "m") as view:
        wanted = plain_sum([block[-1:], block[:1], block[:1]], [1, 1, 1])
        assert view["w"][-1:].tobytes() == wanted.tobytes()


def test_checkpoints_in_buckets_are_merged_in_a_bucket(tmp_path):
    bucket = f"memory://{tmp_path.name}"
    for step in (1, 2):
        save(state(step), f"{bucket}/run/step-{step}")
    merge(f"{bucket}/run", f"{bucket}/merged", last=2, to="zarr")
    assert_merged(load(f"{bucket}/merged"), [state(1), state(2)], [1, 1])
    parents = inspect(f"{bucket}/merged").trees[""].origin["parents"]
    assert [one["path"] for one in parents] == [f"{bucket}/run/step-{step}" for step in (1, 2)]


def test_a_merge_keeps_the_recorded_sharding_and_kind_of_the_last_source(tmp_path):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for step in (1, 2):
        save({"w": jax.device_put(jnp.full(4, float(step)), sharding)}, tmp_path / "run" / f"step-{step}")
    merge(tmp_path / "run", tmp_path / "m", last=2, to="safetensors")
    before, after = (inspect(tmp_path / path).trees[""].leaves["w"] for path in ("run/step-2", "m"))
    assert (after.sharding, after.home) == (before.sharding, before.home)
    assert isinstance(load(tmp_path / "m")["w"], jax.Array)


def test_the_chunks_of_all_sources_of_a_sum_are_in_memory_together(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros((8, 1000)))
    with checkpoint.open(tmp_path / "a.npz") as view:
        leaf = view.arrays["w"]
        both = WeightedSum([leaf, leaf, leaf], [1, 1, 1], leaf.dtype, "")
        assert (decoded_together(leaf), decoded_together(both)) == (64_000, 192_000)
        assert decoded_together(LowRankUpdate(both, leaf, leaf, 1, leaf.dtype)) == 192_000
