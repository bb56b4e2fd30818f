"""The documented functions for trees of arrays: names, zarr arrays under one index, and those of other writers."""

import asyncio
import gc
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer.paths import LocalPath
from eformer.serialization.async_manager import AsyncCheckpointManager
from eformer.serialization.serialization import (
    is_array_like,
    join_key,
    leaf_key_paths,
    tree_deserialize_leaves,
    tree_serialize_leaves,
)
from support.trees import HOSTILE, Layer, Moments, Pair, assert_same

INDEX = "tensorstore_index.json"


@pytest.fixture(autouse=True, scope="module")
def _trusted():
    checkpoint.register_node(Moments)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "inner" / "checkpoint"


def line():
    return Mesh(np.array(jax.devices()), ("model",))


def grid():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def on(mesh, *spec):
    return NamedSharding(mesh, P(*spec))


def tree_of_all_kinds():
    return {
        "bits": {
            "four": jnp.ones(5, jnp.int4),
            "odd": jnp.ones(3, jnp.uint4),
            "eight": jnp.ones(3, jnp.float8_e5m2),
        },
        "empty": {"array": jnp.zeros((0, 2)), "dict": {}, "list": [], "none": None},
        "kernel": jnp.arange(64.0).reshape(8, 8),
        "list": [jnp.ones(2, jnp.bfloat16), (jnp.int32(3), 5)],
        "moments": Moments(jnp.ones(3, bool), "text"),
        "numpy": np.arange(20)[::3],
        "rng": jax.random.key(3),
        "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), on(grid(), "data", "model")),
    }


# ---------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("thing", "is_array"),
    [
        (jnp.ones(3), True),
        (np.ones(3), True),
        (np.float32(1), True),
        (jax.ShapeDtypeStruct((3,), jnp.float32), True),
        (jax.random.key(0), True),
        (SimpleNamespace(shape=(), dtype="x"), True),
        (SimpleNamespace(shape=()), False),
        (SimpleNamespace(dtype="x"), False),
        (3, False),
        (0.5, False),
        ([1, 2], False),
        (None, False),
        ("text", False),
    ],
    ids=repr,
)
def test_an_array_is_what_has_a_shape_and_a_dtype(thing, is_array):
    assert is_array_like(thing) is is_array


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a": 1, "b": [2, {"c": 3}]}, {"a": "a", "b": ["b.0", {"c": "b.1.c"}]}),
        ((1, (2,)), ("0", ("1.0",))),
        (Moments(1, {"x": 2}), Moments("mu", {"x": "nu.x"})),
        (Layer(1, None, "kept"), Layer("weight", None, "kept")),
        ({0: 1, 1: {2: 3}}, {0: "0", 1: {2: "1.2"}}),
        ({(1, 2): 3}, {(1, 2): "(1, 2)"}),
        ({"a.b": 1, "a": {"b": 2}}, {"a.b": "a.b", "a": {"b": "a.b"}}),
        ({"": 1}, {"": ""}),
        ({"x": {"": 2}}, {"x": {"": "x."}}),
        ({"a": None}, {"a": None}),
        (1, ""),
        ({}, {}),
        ([], []),
        (None, None),
    ],
    ids=str,
)
def test_every_leaf_is_replaced_by_its_path(tree, paths):
    assert leaf_key_paths(tree) == leaf_key_paths(tree, "") == leaf_key_paths(tree, None) == paths


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        ({"a": 1, "b": [2, {"c": 3}]}, {"a": "root.a", "b": ["root.b.0", {"c": "root.b.1.c"}]}),
        (1, "root"),
        ({"": 1}, {"": "root"}),
        ({}, {}),
    ],
    ids=str,
)
def test_a_prefix_stands_before_every_path(tree, paths):
    assert leaf_key_paths(tree, "root") == leaf_key_paths(tree, prefix="root") == paths


def test_is_leaf_decides_where_a_path_ends():
    assert leaf_key_paths({"a": None}, is_leaf=lambda x: x is None) == {"a": "a"}
    assert leaf_key_paths({"a": [1, 2]}, "p", is_leaf=lambda x: isinstance(x, list)) == {"a": "p.a"}


def test_a_node_without_keys_has_paths_by_position():
    paths = leaf_key_paths(Pair(1, {"q": 2}, "tag"))
    assert (paths.left, paths.right, paths.tag) == ("0", {"q": "1.q"}, "tag")


def test_the_state_of_an_optimizer_has_readable_paths():
    names = leaf_key_paths(optax.adam(1e-3).init({"w": jnp.ones(2)}))
    assert jax.tree.leaves(names) == ["0.count", "0.mu.w", "0.nu.w"]


def test_keys_that_cannot_be_sorted_are_refused():
    with pytest.raises(ValueError, match="sorting"):
        leaf_key_paths({0: 1, "a": 2})


@pytest.mark.parametrize(
    ("prefix", "key", "joined"),
    [("p", "k", "p.k"), ("", "k", "k"), (None, "k", "k"), ("p", "", "p"), ("p", None, "p"), (None, None, "")],
)
def test_keys_are_joined_by_a_dot_if_there_are_two(prefix, key, joined):
    assert join_key(prefix, key) == joined


# ----------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("prefix", [None, "model"])
def test_a_tree_comes_back_as_it_was(path, prefix):
    assert tree_serialize_leaves(path, tree_of_all_kinds(), prefix=prefix) is None
    for said in {prefix, None}:
        assert_same(tree_deserialize_leaves(path, line(), prefix=said), tree_of_all_kinds())


@pytest.mark.parametrize(
    "tree", [{}, None, [], jnp.arange(3), 5, {"a": 1}, Layer(jnp.ones(2), 1, "n")], ids=str
)
def test_the_smallest_trees_come_back(path, tree):
    tree_serialize_leaves(path, tree)
    assert_same(tree_deserialize_leaves(path, line()), tree)


@pytest.mark.parametrize("kind", [str, Path, LocalPath])
def test_directories_are_of_every_kind(path, kind):
    tree_serialize_leaves(kind(str(path)), {"w": jnp.ones(2)})
    assert_same(tree_deserialize_leaves(kind(str(path)), line()), {"w": jnp.ones(2)})


def test_hostile_keys_stay_inside(path):
    tree = {key: jnp.full(2, i) for i, key in enumerate(HOSTILE)} | {"a": {"b": jnp.ones(1)}}
    tree_serialize_leaves(path, tree)
    assert_same(tree_deserialize_leaves(path, line()), tree)
    assert [p for p in path.parent.parent.rglob("*") if path not in (p, *p.parents)] == [path.parent]


def test_a_tree_of_another_kind_takes_the_place_of_the_one_before(path):
    for tree in (
        {"w": jnp.ones((8, 8))},
        {"w": jnp.ones(3, jnp.int8)},
        {"w": {"x": jnp.ones(1)}},
        {},
        [jnp.ones(2)],
    ):
        tree_serialize_leaves(path, tree, prefix="m")
        assert_same(tree_deserialize_leaves(path, line()), tree)
    assert len(list(path.rglob(".zarray"))) == 1


def test_a_leaf_that_cannot_be_stored_is_named_and_nothing_is_lost(path):
    tree_serialize_leaves(path, {"w": jnp.ones(2)})
    for leaf in (object(), np.array(["text"]), jax.ShapeDtypeStruct((2,), jnp.float32)):
        with pytest.raises((TypeError, ValueError), match=r"'a\.bad'"):
            tree_serialize_leaves(path, {"a": {"bad": leaf}})
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones(2)})


def test_several_threads_may_save_to_one_directory(path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: tree_serialize_leaves(path, {"w": jnp.full(9, i)}, prefix=f"p{i}"), range(8)))
    for i in range(8):
        assert_same(tree_deserialize_leaves(path, line(), prefix=f"p{i}"), {"w": jnp.full(9, i)})


# ---------------------------------------------------------------------------------------------- index


def index_of(path):
    return json.loads((path / INDEX).read_text())


def test_the_index_lists_the_arrays_of_every_prefix(path):
    tree_serialize_leaves(path, {"a": {"w": jnp.ones((2, 3), jnp.bfloat16)}, "n": 3}, prefix="model")
    assert index_of(path).items() >= {"format": "tensorstore", "version": "2.0"}.items()
    assert index_of(path)["prefixes"] == {
        "model": [{"path": "model/a/w", "shape": [2, 3], "dtype": "bfloat16"}]
    }
    assert "arrays" not in index_of(path)
    tree_serialize_leaves(path, [jnp.int32(1), np.zeros((0, 4))], prefix="opt")
    tree_serialize_leaves(path, {"raw": jnp.ones(4)})
    assert index_of(path)["prefixes"]["opt"] == [
        {"path": "opt/0", "shape": [], "dtype": "int32"},
        {"path": "opt/1", "shape": [0, 4], "dtype": "float64"},
    ]
    assert index_of(path)["arrays"] == [{"path": "raw", "shape": [4], "dtype": "float32"}]
    assert list(index_of(path)["prefixes"]) == ["model", "opt"]


def test_every_listed_array_is_there_and_others_can_read_it(path):
    tree = tree_of_all_kinds()
    tree_serialize_leaves(path, tree, prefix="model")
    names = {"kernel": tree["kernel"], "list/0": tree["list"][0], "list/1/0": tree["list"][1][0]}
    names |= {"moments/mu": tree["moments"].mu, "numpy": tree["numpy"], "sharded": tree["sharded"]}
    for name, array in names.items():
        found = opened(path / "model" / name)
        assert found.dtype.name == array.dtype.name
        np.testing.assert_array_equal(found.read().result(), array)
    for listed in index_of(path)["prefixes"]["model"]:
        assert (path / listed["path"] / ".zarray").is_file()


def test_after_a_second_save_the_index_leads_to_the_new_arrays(path):
    for shape in ((2,), (3, 3)):
        tree_serialize_leaves(path, {"w": jnp.ones(shape)}, prefix="model")
    (listed,) = index_of(path)["prefixes"]["model"]
    assert listed["shape"] == [3, 3]
    np.testing.assert_array_equal(opened(path / listed["path"]).read().result(), np.ones((3, 3)))


def opened(directory):
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(directory)}}
    return tensorstore.open(spec, open=True, read=True).result()


def test_a_prefix_is_asked_for_only_if_there_are_several(path):
    tree_serialize_leaves(path, {"w": jnp.zeros(2)}, prefix="model")
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.zeros(2)})
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, prefix="opt")
    with pytest.raises(ValueError, match=r"\['model', 'opt'\]"):
        tree_deserialize_leaves(path, line())
    with pytest.raises(ValueError, match=r"no prefix 'zzz'.*\['model', 'opt'\]"):
        tree_deserialize_leaves(path, line(), prefix="zzz")
    assert_same(tree_deserialize_leaves(path, line(), prefix="opt"), {"w": jnp.ones(2)})


def test_nothing_there_is_file_not_found(path):
    for prepare in (lambda: None, lambda: path.mkdir(parents=True), lambda: (path / "notes").write_text("x")):
        prepare()
        with pytest.raises(FileNotFoundError, match="checkpoint"):
            tree_deserialize_leaves(path, line())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "other", "arrays": []}', "Unsupported index format: 'other'"),
        ('{"format": "tensorstore", "arrays": [', "not an index of arrays"),
        (
            '{"format": "tensorstore", "arrays": [{"path": "../x", "shape": [], "dtype": "int8"}]}',
            r"'\.\./x'.*leads out",
        ),
        (
            '{"format": "tensorstore", "arrays": [{"path": "gone", "shape": [], "dtype": "int8"}]}',
            "gone.*is missing",
        ),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(path, text, message):
    path.mkdir(parents=True)
    (path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=message):
        tree_deserialize_leaves(path, line())


def test_without_an_index_arrays_are_discovered(path):
    tree = {"a": {"w": jnp.arange(6.0).reshape(2, 3)}, "b": jnp.int8(3), "list": [jnp.ones(2)]}
    tree_serialize_leaves(path, tree, write_index=False)
    assert not (path / INDEX).exists()
    assert_same(tree_deserialize_leaves(path, line()), tree | {"list": {"0": jnp.ones(2)}})
    assert_same(tree_deserialize_leaves(path, line(), prefix="a"), tree["a"])


def test_without_an_index_a_prefix_is_a_directory(path):
    for i, prefix in enumerate(("model", "opt")):
        tree_serialize_leaves(path, {"x": {"w": jnp.full(2, i)}}, prefix=prefix, write_index=False)
    for i, prefix in enumerate(("model", "opt")):
        assert_same(tree_deserialize_leaves(path, line(), prefix=prefix), {"x": {"w": jnp.full(2, i)}})
        np.testing.assert_array_equal(opened(path / prefix / "x" / "w").read().result(), np.full(2, i))
    with pytest.raises(ValueError, match=r"'model', 'opt'"):
        tree_deserialize_leaves(path, line(), prefix="zzz")


@pytest.mark.parametrize("prefix", [None, "m"])
def test_arrays_without_an_index_are_never_those_of_an_older_save(path, prefix):
    tree_serialize_leaves(path, {"w": jnp.zeros(2)}, prefix=prefix, write_index=False)
    try:
        tree_serialize_leaves(path, {"w": jnp.ones(2)}, prefix=prefix, write_index=False)
    except (ValueError, FileExistsError):  # refusing is as good
        return
    assert_same(tree_deserialize_leaves(path, line(), prefix=prefix), {"w": jnp.ones(2)})


def test_an_index_that_lists_a_prefix_is_not_left_behind(path):
    tree_serialize_leaves(path, {"w": jnp.zeros(2)})
    with pytest.raises(ValueError, match=rf"{INDEX} is there"):
        tree_serialize_leaves(path, {"w": jnp.ones(2)}, write_index=False)
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.zeros(2)})


# --------------------------------------------------------------------------------------- other writers


def write(root, arrays, index=None, compressor="zstd"):
    """Arrays as the original writes them: by TensorStore, one directory each."""
    for name, array in arrays.items():
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(root / name)},
            "metadata": {"compressor": compressor and {"id": compressor, "level": 1}},
        }
        dtype = tensorstore.dtype(array.dtype.name)
        store = tensorstore.open(spec, create=True, dtype=dtype, shape=array.shape).result()
        store.write(array).result()
    if index is not None:
        (root / INDEX).write_text(json.dumps({"format": "tensorstore"} | index))


def listed(arrays):
    return [{"path": p, "shape": list(a.shape), "dtype": a.dtype.name} for p, a in arrays.items()]


ARRAYS = {
    "model/layers/0/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model/b": np.ones(3, jnp.bfloat16),
    "model/n": np.array(7, np.int32),
}
NESTED = {
    "b": jnp.ones(3, jnp.bfloat16),
    "layers": {"0": {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3)}},
    "n": jnp.int32(7),
}


@pytest.mark.parametrize("compressor", ["zstd", None])
def test_an_index_of_version_1_is_read(path, compressor):
    write(path, ARRAYS, {"version": "1.0", "arrays": listed(ARRAYS)}, compressor)
    assert_same(tree_deserialize_leaves(path, line()), {"model": NESTED})


def test_an_index_of_version_1_has_a_single_prefix(path):
    write(path, ARRAYS, {"version": "1.0", "arrays": listed(ARRAYS)})
    assert_same(tree_deserialize_leaves(path, line(), prefix="model"), NESTED)
    with pytest.raises(ValueError, match="no prefix 'opt'"):
        tree_deserialize_leaves(path, line(), prefix="opt")


@pytest.mark.parametrize("version", ["2.0", "0.0.101"])
def test_an_index_of_several_prefixes_is_read(path, version):
    more = {"opt/mu": np.zeros(2, np.float32)}
    prefixes = {"model": listed(ARRAYS), "opt": listed(more)}
    write(path, ARRAYS | more, {"version": version, "prefixes": prefixes})
    assert_same(tree_deserialize_leaves(path, line(), prefix="model"), NESTED)
    assert_same(tree_deserialize_leaves(path, line(), prefix="opt"), {"mu": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"\['model', 'opt'\]"):
        tree_deserialize_leaves(path, line())
    with pytest.raises(ValueError, match=r"no prefix 'zzz'.*\['model', 'opt'\]"):
        tree_deserialize_leaves(path, line(), prefix="zzz")


def test_one_prefix_of_others_need_not_be_said(path):
    write(path, ARRAYS, {"version": "2.0", "prefixes": {"model": listed(ARRAYS)}})
    assert_same(tree_deserialize_leaves(path, line()), NESTED)


def test_arrays_of_others_without_an_index_are_discovered(path):
    write(path, ARRAYS)
    assert_same(tree_deserialize_leaves(path, line()), {"model": NESTED})
    assert_same(tree_deserialize_leaves(path, line(), prefix="model"), NESTED)


def test_a_missing_chunk_of_others_is_not_taken_for_zeros(path):
    write(path, ARRAYS, {"version": "2.0", "prefixes": {"model": listed(ARRAYS)}})
    (path / "model" / "b" / "0").unlink()
    with pytest.raises(ValueError, match=r"'b'.*missing"):
        tree_deserialize_leaves(path, line())


def test_what_others_saved_stays_beside_what_we_save(path):
    raw = {"raw": np.ones(2, np.float32)}
    write(
        path, ARRAYS | raw, {"version": "1.0", "arrays": listed(raw), "prefixes": {"model": listed(ARRAYS)}}
    )
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, prefix="ours")
    assert_same(tree_deserialize_leaves(path, line(), prefix="model"), NESTED)
    assert_same(tree_deserialize_leaves(path, line(), prefix="ours"), {"w": jnp.ones(2)})
    assert_same(tree_deserialize_leaves(path, line()), {"raw": jnp.ones(2)})
    assert index_of(path)["prefixes"]["model"] == listed(ARRAYS)


def test_what_others_saved_is_laid_out_as_it_is_asked_for(path):
    arrays = {"kernel": np.arange(64, dtype=np.float32).reshape(8, 8), "bias": np.ones(8, np.float32)}
    write(path, arrays, {"version": "1.0", "arrays": listed(arrays)})
    with pytest.raises(ValueError, match=r"'kernel'.*partition_rules.*shardings"):
        tree_deserialize_leaves(path, grid())
    loaded = tree_deserialize_leaves(path, grid(), partition_rules=((".*kernel", P("data", "model")),))
    assert loaded["kernel"].sharding == on(grid(), "data", "model")
    np.testing.assert_array_equal(loaded["kernel"], arrays["kernel"])


@pytest.mark.parametrize("is_right", [True, False])
def test_the_metadata_of_the_original_is_read_and_its_checksums_are_checked(path, is_right):
    write(path, ARRAYS, {"version": "0.0.101", "prefixes": {"model": listed(ARRAYS)}})
    manager = AsyncCheckpointManager(enable_validation=True)
    checksum = manager.compute_checksum(ARRAYS["model/b"]) if is_right else "0" * 64
    record = {"version": "0.0.101", "timestamp": "t", "checksum": {"b": checksum}, "array_metadata": {}}
    record |= {"framework_version": None, "custom_metadata": {"step": 3}}
    (path / "checkpoint_metadata.json").write_text(json.dumps(record))
    if is_right:
        loaded, metadata = manager.load(path, line())
        assert_same(loaded, NESTED)
        assert (metadata["checksum"], metadata["custom_metadata"]) == ({"b": checksum}, {"step": 3})
    else:
        with pytest.raises(ValueError, match="validation failed: leaf 'b'"):
            manager.load(path, line())


# ------------------------------------------------------------------------------------------ placement


@pytest.fixture
def kernels(path):
    tree = {"a": {"kernel": jnp.arange(64.0).reshape(8, 8), "bias": jnp.ones(8)}, "step": jnp.int32(3)}
    tree_serialize_leaves(path, tree, prefix="m")
    return tree


def test_on_a_mesh_of_one_axis_everything_is_replicated(path, kernels):
    loaded = tree_deserialize_leaves(path, line())
    assert {leaf.sharding for leaf in jax.tree.leaves(loaded)} == {on(line())}


def test_on_a_mesh_of_several_axes_somebody_has_to_say(path, kernels):
    with pytest.raises(ValueError, match=r"(?s)'a\.bias'.*'a\.kernel'.*partition_rules.*shardings"):
        tree_deserialize_leaves(path, grid())


def test_arrays_lie_as_they_were_saved_if_the_mesh_has_their_axes(path):
    tree_serialize_leaves(path, {"w": jax.device_put(jnp.ones((8, 8)), on(grid(), "data", "model"))})
    turned = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    assert tree_deserialize_leaves(path, turned)["w"].sharding == on(turned, "data", "model")


def test_rules_are_searched_for_in_the_path_without_the_prefix(path, kernels):
    rules = [("^a/kernel", P("data", "model")), (".*kernel", P()), ("m/a|[.]", P("model"))]
    loaded = tree_deserialize_leaves(path, grid(), partition_rules=rules)
    assert loaded["a"]["kernel"].sharding == on(grid(), "data", "model")
    assert loaded["a"]["bias"].sharding == loaded["step"].sharding == on(grid())
    assert_same(loaded, kernels)


def test_specs_that_do_not_fit_are_listed_at_once(path):
    tree_serialize_leaves(path, {"odd": jnp.ones(7), "flat": jnp.ones(8), "axis": jnp.ones(8)})
    rules = [("odd", P("model")), ("flat", P("data", "model")), ("axis", P("stage"))]
    with pytest.raises(ValueError, match=r"(?s)3 mismatches.*'axis'.*'flat'.*'odd'"):
        tree_deserialize_leaves(path, grid(), partition_rules=rules)


def test_shardings_are_flat_or_nested_with_or_without_the_prefix(path, kernels):
    rows = on(line(), "model")
    for shardings in (
        {"a.kernel": rows, "a.bias": P("model"), "step": np.asarray},
        {"m.a.kernel": rows, "m.a.bias": P("model"), "m.step": np.asarray},
        {"a": {"kernel": rows, "bias": P("model")}, "step": np.asarray},
        {"m": {"a": {"kernel": rows, "bias": P("model")}, "step": np.asarray}},
    ):
        loaded = tree_deserialize_leaves(path, line(), prefix="m", shardings=shardings)
        assert loaded["a"]["kernel"].sharding == loaded["a"]["bias"].sharding == rows
        assert isinstance(loaded["step"], np.ndarray)


def test_a_key_that_is_called_like_the_prefix_is_no_prefix(path):
    tree_serialize_leaves(path, {"m": {"w": jnp.ones(8)}}, prefix="m")
    rows = on(line(), "model")
    for shardings in ({"m": {"w": rows}}, {"m.w": rows}, {"m.m.w": rows}):
        loaded = tree_deserialize_leaves(path, line(), prefix="m", shardings=shardings)
        assert loaded["m"]["w"].sharding == rows


def test_shardings_win_over_rules_and_some_leaves_are_enough(path, kernels):
    loaded = tree_deserialize_leaves(
        path, grid(), shardings={"a.bias": P("data")}, partition_rules=[("a/", P("model"))]
    )
    assert loaded["a"]["bias"].sharding == on(grid(), "data")
    assert loaded["a"]["kernel"].sharding == on(grid(), "model")


def test_the_callback_replaces_arrays_by_their_key_without_the_prefix(path, kernels):
    loaded = tree_deserialize_leaves(path, line(), prefix="m", callback=lambda array, key: (key, array.shape))
    assert loaded["a"] == {"kernel": ("a.kernel", (8, 8)), "bias": ("a.bias", (8,))}
    assert loaded["step"] == ("step", ())


def test_an_error_of_the_callback_is_the_callers(path, kernels):
    with pytest.raises(ZeroDivisionError):
        tree_deserialize_leaves(path, line(), callback=lambda array, key: 1 / 0)


# ----------------------------------------------------------------------------------------- chunk size


def most_in_flight(path, **arguments):
    """How many arrays there are at once, if the callback keeps none of them."""
    gc.collect()  # arrays of earlier tests do not go meanwhile
    before, seen = len(jax.live_arrays()), []
    tree_deserialize_leaves(
        path, line(), callback=lambda array, key: seen.append(len(jax.live_arrays()) - before), **arguments
    )
    assert len(seen) == 8
    return max(seen)


def test_the_chunk_size_bounds_how_many_arrays_are_in_flight(path):
    tree_serialize_leaves(path, {f"w{i}": jnp.ones(10) for i in range(8)})
    for size in (1, 2, 3):
        assert most_in_flight(path, chunk_size=size) <= size
    assert most_in_flight(path) == most_in_flight(path, chunk_size=100) == 8


@pytest.mark.parametrize("size", [None, 1, 2, 100])
def test_the_chunk_size_does_not_change_the_tree(path, kernels, size):
    assert_same(tree_deserialize_leaves(path, line(), chunk_size=size), kernels)


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_size_that_is_none_is_refused(path, kernels, size):
    with pytest.raises(ValueError, match=f"a batch of {size} arrays"):
        tree_deserialize_leaves(path, line(), chunk_size=size)


# -------------------------------------------------------------------------------------------- commits


class Held(GlobalAsyncCheckpointManager):
    """JAX's manager, which commits when it is told to."""

    def __init__(self):
        super().__init__(timeout_secs=60)
        self.gate = threading.Event()
        self.before = lambda: None

    def serialize(self, arrays, tensorstore_specs, *, on_commit_callback):
        def commit():
            assert self.gate.wait(60)
            self.before()
            on_commit_callback()

        super().serialize(arrays, tensorstore_specs, on_commit_callback=commit)

    def commit(self):
        self.gate.set()
        self.wait_until_finished()


@pytest.fixture
def jax_manager():
    manager = GlobalAsyncCheckpointManager(60)
    yield manager
    manager.wait_until_finished()


@pytest.fixture
def held():
    manager = Held()
    yield manager
    with suppress(Exception):
        manager.commit()


def test_the_callback_runs_once_after_the_commit(path):
    seen = []
    tree_serialize_leaves(
        path, {"w": jnp.ones(2)}, commit_callback=lambda: seen.append(tree_deserialize_leaves(path, line()))
    )
    assert_same(seen, [{"w": jnp.ones(2)}])


def test_an_error_of_the_commit_callback_is_the_callers_and_the_tree_is_there(path):
    with pytest.raises(ZeroDivisionError):
        tree_serialize_leaves(path, {"w": jnp.ones(2)}, commit_callback=lambda: 1 / 0)
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones(2)})


@pytest.mark.parametrize("prefix", [None, "model"])
def test_the_manager_of_jax_writes_every_kind_of_tree(path, jax_manager, prefix):
    tree_serialize_leaves(path, tree_of_all_kinds(), jax_manager, prefix=prefix)
    assert_same(tree_deserialize_leaves(path, line(), jax_manager, prefix=prefix), tree_of_all_kinds())
    assert checkpoint.verify(path).ok


@pytest.mark.parametrize("tree", [{}, None, 3, jnp.arange(3), {"n": np.ones(2)}], ids=str)
def test_the_manager_of_jax_writes_the_smallest_trees(path, jax_manager, tree):
    tree_serialize_leaves(path, tree, jax_manager)
    assert_same(tree_deserialize_leaves(path, line(), jax_manager), tree)


def test_the_manager_of_ours_may_be_handed_over(path):
    manager = AsyncCheckpointManager().global_manager
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, manager, prefix="m")
    assert_same(tree_deserialize_leaves(path, line(), manager), {"w": jnp.ones(2)})


def test_the_index_appears_only_once_the_arrays_are_committed(path, held):
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, held)
    assert not (path / INDEX).exists()
    with pytest.raises(FileNotFoundError):
        tree_deserialize_leaves(path, line())
    held.commit()
    assert index_of(path)["arrays"] == [{"path": "w", "shape": [2], "dtype": "float32"}]
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones(2)})


def test_until_the_commit_the_tree_before_is_there(path, held):
    tree_serialize_leaves(path, {"w": jnp.zeros(2)})
    tree_serialize_leaves(path, {"w": jnp.ones((3, 3))}, held)
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.zeros(2)})
    held.commit()
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones((3, 3))})


def test_a_held_commit_holds_no_other_save(path, held):
    tree_serialize_leaves(path, {"w": jnp.zeros(2)}, held, prefix="slow")
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, prefix="quick")
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones(2)})
    held.commit()
    assert sorted(index_of(path)["prefixes"]) == ["quick", "slow"]


def test_the_callback_of_a_managed_save_runs_once_after_the_commit(path, held):
    seen = []
    tree_serialize_leaves(
        path, {"w": jnp.ones(2)}, held, commit_callback=lambda: seen.append((path / INDEX).exists())
    )
    assert seen == []
    held.commit()
    assert seen == [True]


def test_an_error_of_a_managed_commit_callback_surfaces_when_one_waits(path):
    manager = GlobalAsyncCheckpointManager(60)
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, manager, commit_callback=lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        manager.wait_until_finished()
    manager.wait_until_finished()
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones(2)})


def test_a_commit_that_fails_surfaces_when_one_waits_and_leaves_the_tree_before(path, held):
    tree_serialize_leaves(path, {"w": jnp.zeros(2)})
    seen = []
    tree_serialize_leaves(path, {"w": jnp.ones(64)}, held, commit_callback=lambda: seen.append(1))

    def cut_short():
        (chunk,) = (p for p in path.rglob("0") if p.stat().st_size == 256)
        chunk.write_bytes(b"cut short")

    held.before = cut_short
    with pytest.raises(ValueError, match="leaf 'w': TensorStore wrote 9 bytes"):
        held.commit()
    assert seen == []
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.zeros(2)})
    held.before = lambda: None
    tree_serialize_leaves(path, {"w": jnp.ones(3)}, held)
    held.commit()
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.ones(3)})


def test_an_error_of_the_save_before_leaves_nothing_behind(path):
    manager = GlobalAsyncCheckpointManager(60)
    tree_serialize_leaves(path / "first", {"w": jnp.ones(2)}, manager, commit_callback=lambda: 1 / 0)
    with suppress(
        ZeroDivisionError
    ):  # JAX's manager waits for what it is writing, and raises what that raised
        tree_serialize_leaves(path / "second", {"w": jnp.ones(2)}, manager)
        manager.wait_until_finished()
    second = path / "second"
    assert not second.exists() or not [p for p in second.iterdir() if p.name.startswith(".")]
    tree_serialize_leaves(second, {"w": jnp.ones(2)}, manager)
    assert_same(tree_deserialize_leaves(second, line(), manager), {"w": jnp.ones(2)})


def test_a_managed_save_may_leave_the_index_out(path, jax_manager):
    tree_serialize_leaves(path, {"a": {"w": jnp.ones(2)}}, jax_manager, prefix="m", write_index=False)
    jax_manager.wait_until_finished()
    assert not (path / INDEX).exists()
    assert_same(tree_deserialize_leaves(path, line(), prefix="m"), {"a": {"w": jnp.ones(2)}})


def test_after_a_managed_save_returns_arrays_may_be_donated_and_changed(path, held):
    tree = {"donated": jnp.arange(5000.0), "deleted": jnp.arange(5000), "numpy": np.arange(5000.0)}
    expected = jax.tree.map(np.array, tree)
    tree_serialize_leaves(path, tree, held)
    jax.jit(lambda x: x * 0, donate_argnums=0)(tree["donated"]).block_until_ready()
    tree["deleted"].delete()
    tree["numpy"][:] = 0
    held.commit()
    assert_same(jax.tree.map(np.array, tree_deserialize_leaves(path, line())), expected)


def test_a_managed_save_replaces_the_one_before(path, jax_manager):
    for tree in ({"w": jnp.ones((8, 8))}, {"w": jnp.ones(3, jnp.int8)}, {"v": jnp.ones((2, 2))}):
        tree_serialize_leaves(path, tree, jax_manager, prefix="m")
        assert_same(tree_deserialize_leaves(path, line(), jax_manager), tree)
    assert len(list(path.rglob(".zarray"))) == 1


def test_everything_works_in_a_running_event_loop(path, jax_manager):
    async def notebook():
        tree_serialize_leaves(path, {"w": jnp.ones(2)}, prefix="a")
        tree_serialize_leaves(path, {"w": jnp.zeros(2)}, jax_manager, prefix="b")
        jax_manager.wait_until_finished()
        return [tree_deserialize_leaves(path, line(), jax_manager, prefix=prefix) for prefix in "ab"]

    assert_same(asyncio.run(notebook()), [{"w": jnp.ones(2)}, {"w": jnp.zeros(2)}])


def test_a_directory_may_be_moved(path, tmp_path):
    tree_serialize_leaves(path, tree_of_all_kinds(), prefix="model")
    shutil.move(path, tmp_path / "elsewhere")
    assert_same(tree_deserialize_leaves(tmp_path / "elsewhere", line()), tree_of_all_kinds())
