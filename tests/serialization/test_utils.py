"""The documented helpers: names, sizes, layouts, gathering and resharding."""

import logging
from pathlib import Path, PurePosixPath

import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer.checkpoint import SaveOptions
from eformer.serialization import utils


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))


# --------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/x/model.safetensors", "/x/model"),
        ("/x/model.safetensors.index.json", "/x/model"),
        ("/x/model-00001-of-00004.safetensors", "/x/model"),
        ("/x/model-00001-of-00004", "/x/model"),
        ("/x/model-100000-of-100001.safetensors", "/x/model"),
        ("/x/model", "/x/model"),
        ("/x/model.0123456789abcdef.safetensors", "/x/model"),
        ("/x/model-00001-of-00004.0123456789abcdef.safetensors", "/x/model"),
        ("/x/model-1-of-4.safetensors", "/x/model-1-of-4"),
        ("gs://bucket/model.safetensors", "gs://bucket/model"),
        (Path("/x/model.safetensors"), "/x/model"),
        (PurePosixPath("m.safetensors"), "m"),
    ],
)
def test_the_base_of_a_path_is_common_to_its_files(path, base):
    assert utils.derive_base_prefix_from_path(path) == base


def test_file_names_are_those_of_hugging_face():
    assert utils.shard_filename("/checkpoints/model", 1, 4) == "/checkpoints/model-00001-of-00004.safetensors"
    assert utils.index_filename("/checkpoints/model") == "/checkpoints/model.safetensors.index.json"
    assert utils.index_filename(Path("m")) == "m.safetensors.index.json"
    for index, total in [(0, 4), (5, 4), (-1, 1), (0, 0)]:
        with pytest.raises(ValueError, match=f"shard {index} of {total}"):
            utils.shard_filename("m", index, total)


@given(base=st.text(min_size=1), total=st.integers(1, 10**6), data=st.data())
def test_the_base_comes_back_out_of_every_name(base, total, data):
    index = data.draw(st.integers(1, total))
    assert utils.derive_base_prefix_from_path(utils.shard_filename(base, index, total)) == base
    assert utils.derive_base_prefix_from_path(utils.index_filename(base)) == base


def test_paths_in_buckets_are_recognized():
    assert utils.is_gcs_path("gs://my-bucket/checkpoint")
    assert not any(
        map(utils.is_gcs_path, ["/local/path", "s3://b/x", "GS://b", None, b"gs://b", Path("gs://b")])
    )
    assert utils.parse_gcs_path("gs://bucket/a/b") == ("bucket", "a/b")
    assert utils.parse_gcs_path("gs://bucket") == utils.parse_gcs_path("gs://bucket/") == ("bucket", "")
    for path in ("/x", "gs://", "gs:///x", "bucket/x"):
        with pytest.raises(ValueError, match="Invalid GCS path"):
            utils.parse_gcs_path(path)


# --------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("array", "nbytes"),
    [
        (jnp.ones((3, 4), jnp.bfloat16), 24),
        (np.ones((3, 4), np.float32)[:, ::2], 24),
        (jnp.ones(5, jnp.int4), 5),
        (jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32), 4 * 10**12),
        (jax.random.key(0), 8),
        (jax.random.split(jax.random.key(0), 3), 24),
        (np.float32(1), 4),
        (3, 8),
        ([1.0, 2.0], 16),
        (jnp.zeros((0, 5)), 0),
    ],
    ids=str,
)
def test_sizes_are_known_without_looking_at_values(array, nbytes):
    assert utils.estimate_array_nbytes(array) == nbytes


def test_only_arrays_and_numbers_have_a_size():
    for thing in (None, "text", object()):
        with pytest.raises(TypeError, match=type(thing).__name__):
            utils.estimate_array_nbytes(thing)


sizes = st.dictionaries(st.text("ab.", min_size=1, max_size=6), st.integers(0, 100), max_size=20)


@given(state=sizes.map(lambda s: {k: np.zeros(n, np.int8) for k, n in s.items()}), limit=st.integers(1, 150))
def test_every_grouping_holds_all_keys_once_within_the_limit(state, limit):
    for group in (utils.group_keys_by_shard_size, utils.optimize_shard_layout):
        groups = group(state, limit)
        assert sorted(key for keys in groups for key in keys) == sorted(state)
        for keys in groups:
            assert keys
            assert len(keys) == 1 or sum(state[key].nbytes for key in keys) <= limit


def test_groups_keep_the_order_and_modules_stay_together():
    state = {f"{layer}.{name}": np.zeros(10, np.int8) for layer in "ab" for name in ("w", "b")}
    mixed = {key: state[key] for key in ("a.w", "b.w", "a.b", "b.b")}
    assert utils.group_keys_by_shard_size(mixed, 20) == [["a.w", "b.w"], ["a.b", "b.b"]]
    assert utils.optimize_shard_layout(mixed, 20) == [["a.w", "a.b"], ["b.w", "b.b"]]
    assert utils.optimize_shard_layout(mixed, 30) == [["a.w", "a.b"], ["b.w", "b.b"]]
    assert utils.group_keys_by_shard_size({}, 1) == utils.optimize_shard_layout({}, 1) == []


def test_the_layout_is_the_one_that_a_save_writes(tmp_path):
    state = {m: {n: np.ones(100 * (i + 1), np.int8) for n in "wb"} for i, m in enumerate("abcd")}
    state["e"] = {"f4": np.ones(800, jnp.float4_e2m1fn), "i4": jnp.ones(100, jnp.int4), "n": 3}
    checkpoint.save(state, tmp_path, options=SaveOptions(max_shard_bytes=500))
    written = [set(safetensors.safe_open(f, "np").keys()) for f in sorted(tmp_path.glob("*.safetensors"))]
    assert written == [set(group) for group in utils.optimize_shard_layout(state, 500)]
    assert len(written) > 2


def test_limits_must_be_positive():
    for call in (
        lambda n: utils.group_keys_by_shard_size({}, n),
        lambda n: utils.optimize_shard_layout({}, n),
        lambda n: utils.chunk_tensor_by_memory(jnp.ones(3), n),
        lambda n: utils.broadcast_tensor(jnp.ones(3), n),
    ):
        for limit in (0, -1):
            with pytest.raises(ValueError, match=f"positive, not {limit}"):
                call(limit)


def test_available_memory_is_that_of_this_machine():
    total = next(
        line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    assert 0 < utils.estimate_available_memory() < int(total.split()[1]) * 1024


# -------------------------------------------------------------------------------------------- states


def test_a_state_is_flattened_by_dots():
    state = {"a": {"b": 1, "c": [2, 3]}, "d": {}}
    assert utils.flatten_for_broadcast(state) == {"a.b": 1, "a.c.0": 2, "a.c.1": 3}
    assert utils.flatten_for_broadcast({"a.b": 1}) == {"a.b": 1}
    tuples = {("a", "b"): 1}
    assert utils.flatten_for_broadcast(tuples) is tuples


def test_keys_that_meet_are_refused():
    with pytest.raises(ValueError, match=r"same dotted key: 'a\.b'"):
        utils.flatten_for_broadcast({"a.b": 1, "a": {"b": 2}})


def test_gathering_everything_or_nothing():
    state = {"a": jnp.ones(3), "b": {"c": jnp.zeros(2)}}
    gathered = utils.apply_gather_functions(state, True, False, False)
    assert isinstance(gathered["b"]["c"], np.ndarray)
    assert utils.apply_gather_functions(state, False, False, False) is state
    assert utils.apply_gather_functions(state, {}, True, False)["a"] is state["a"]


@pytest.mark.parametrize(
    "functions", [{"a": lambda x: x + 1, "b.c": np.asarray}, {"a": lambda x: x + 1, "b": {"c": np.asarray}}]
)
def test_gather_functions_are_flat_or_nested(functions):
    gathered = utils.apply_gather_functions({"a": 1, "b": {"c": jnp.zeros(2)}}, functions, False, False)
    assert gathered["a"] == 2
    assert isinstance(gathered["b"]["c"], np.ndarray)


def test_a_leaf_without_gather_function_is_named_or_kept(caplog):
    state = {"kernel": 1, "bias": 2}
    with pytest.raises(KeyError, match=r"'bias', 'kernel' \(nearest is 'kernels'\)"):
        utils.apply_gather_functions(state, {"kernels": abs}, False, False)
    with caplog.at_level(logging.WARNING):
        assert utils.apply_gather_functions(state, {"kernel": float}, True, True) == {
            "bias": 2,
            "kernel": 1.0,
        }
    assert "no gather function for 1 leaves, the first is 'bias'" in caplog.text


def test_a_tensor_is_read_sharded_called_back_and_cast(tmp_path, mesh):
    safetensors.numpy.save_file(
        {"w": np.ones((8, 4), np.float32), "i": np.arange(4)}, tmp_path / "x.safetensors"
    )
    rows = NamedSharding(mesh, P("x"))
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as file:
        key, array, mismatch = utils.read_process_array(
            "w", {"w": rows}, False, file, callback=lambda x, key: x * len(key) * 2, dtype="bf16"
        )
        assert (key, array.dtype, mismatch) == ("w", jnp.bfloat16, 0)
        assert array.sharding.is_equivalent_to(rows, 2)
        assert float(array[0, 0]) == 2
        assert utils.read_process_array("w", {"v": np.asarray}, True, file)[2] == 1
        assert utils.read_process_array("w", None, False, file)[2] == 0
        with pytest.raises(KeyError, match=r"no shard function for 'w'"):
            utils.read_process_array("w", {"v": np.asarray}, False, file)
        assert utils.read_process_array("i", None, False, file, dtype="bf16")[1].dtype == np.int64
        with pytest.raises(ValueError, match="not a floating dtype"):
            utils.read_process_array("w", None, False, file, dtype="int32")
    with checkpoint.open(tmp_path / "x.safetensors") as view:
        assert isinstance(utils.read_process_array("w", None, False, view)[1], jax.Array)


@pytest.fixture
def waited(monkeypatch):
    """Yields the arrays that are waited for: this process has an accelerator."""
    found = []
    monkeypatch.setattr(jax.extend.backend, "backends", lambda: dict.fromkeys(["cpu", "cuda"]))
    monkeypatch.setattr(jax, "block_until_ready", found.append)
    return found


def test_no_program_runs_on_an_array_that_is_on_its_way(mesh, waited):
    rows, seen = NamedSharding(mesh, P("x")), []

    def see(x, *_):
        seen.append(any(x is each for each in waited))
        return x

    tensors = {"w": np.ones((8, 4), np.float32)}
    utils.read_process_array("w", {"w": see}, False, tensors, callback=see)
    utils.read_process_array("w", {"w": rows}, False, tensors, callback=see)
    assert seen == [True] * 3


@pytest.mark.parametrize(
    "call",
    [
        lambda x, mesh: utils.to_host(x, "bf16", mesh, False),
        lambda x, mesh: utils.reshard(x, NamedSharding(mesh, P("x"))),
        lambda x, mesh: utils.broadcast_tensor(x, 2**20, NamedSharding(mesh, P("x"))),
    ],
)
def test_numpy_arrays_are_waited_for_on_their_device_and_those_of_the_caller_are_not(mesh, waited, call):
    call(np.ones((8, 4), np.float32), mesh)
    assert len(waited) == 1
    call(waited[0], mesh)
    assert len(waited) == 1


def test_an_error_of_the_callers_function_is_not_swallowed():
    def broken(x):
        return {}["nothing"]

    with pytest.raises(KeyError, match="nothing"):
        utils.read_process_array("w", {"w": broken}, True, {"w": np.ones(3)})


# ------------------------------------------------------------------------------------------- arrays


@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    limit=st.integers(1, 100),
    dtype=st.sampled_from("bhf"),
)
def test_chunks_fit_the_limit_and_are_together_the_tensor(shape, limit, dtype):
    tensor = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    chunks = utils.chunk_tensor_by_memory(tensor, limit)
    for chunk in chunks:
        assert chunk.nbytes <= limit or chunk.ndim == 0 or len(chunk) == 1
    whole = np.concatenate(chunks) if tensor.ndim else chunks[0]
    np.testing.assert_array_equal(whole, tensor)
    assert whole.shape == shape


def test_reshard_reaches_the_target_or_raises(mesh):
    array = jnp.arange(64.0).reshape(8, 8)
    for spec in (P("x", "y"), P(None, "y"), P(), P(("x", "y"))):
        target = NamedSharding(mesh, spec)
        there = utils.reshard(array, target)
        assert there.sharding == target
        assert utils.reshard(there, NamedSharding(mesh, P("y"))).sharding.spec == P("y")
        np.testing.assert_array_equal(there, array)
    with pytest.raises(ValueError, match="divi"):
        utils.reshard(jnp.ones(7), NamedSharding(mesh, P("x")))
    with pytest.raises(ValueError, match="truncate int64 to 32 bits"):
        utils.reshard(np.array([2**40]), NamedSharding(mesh, P()))


def test_reshard_works_inside_of_jit(mesh):
    target = NamedSharding(mesh, P("y"))
    assert jax.jit(lambda x: utils.reshard(x * 2, target))(jnp.ones(8)).sharding.is_equivalent_to(target, 1)


def test_to_host_replicates_casts_and_offloads(mesh):
    array = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("x")))
    whole = utils.to_host(array, None, mesh, False)
    assert whole.sharding == NamedSharding(mesh, P())
    assert utils.to_host(array, "bf16", mesh, False).dtype == jnp.bfloat16
    assert utils.to_host(jnp.arange(8), jnp.bfloat16, mesh, False).dtype == jnp.int32
    assert utils.to_host(1.5, "float16", mesh, False).dtype == jnp.float16
    offloaded = utils.to_host(array, None, mesh, True)
    assert offloaded.sharding == SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    np.testing.assert_array_equal(offloaded, np.arange(8.0))


def test_broadcast_returns_a_jax_array_under_the_target(mesh):
    for tensor in (np.arange(8, dtype=np.float32), jnp.arange(8.0)):
        for limit in (1, 4, 10**6):
            there = utils.broadcast_tensor(tensor, limit, NamedSharding(mesh, P("y")))
            assert there.sharding == NamedSharding(mesh, P("y"))
            np.testing.assert_array_equal(utils.broadcast_tensor(tensor, limit), np.arange(8))
            assert isinstance(utils.broadcast_tensor(tensor, limit), jax.Array)
