"""The documented functions for trees of arrays: what is saved, under which index, and where it is loaded."""

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eformer.paths import LocalPath
from eformer.serialization.serialization import tree_deserialize_leaves, tree_serialize_leaves
from support.arrays import INDEX, index_of, opened
from support.meshes import grid, line, on, tall
from support.states import tree_of_all_kinds
from support.trees import HOSTILE, Layer, assert_same

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


def test_numpy_arrays_go_to_the_mesh_too(path):
    tree_serialize_leaves(path, {"n": np.ones(8, np.float32), "wide": np.ones(8)})
    loaded = tree_deserialize_leaves(path, line())
    assert loaded["n"].sharding == on(line())
    assert_same(loaded["wide"], np.ones(8))
    assert tree_deserialize_leaves(path, grid(), shardings={"n": P("model")})["n"].sharding == on(
        grid(), "model"
    )
    with pytest.raises(ValueError, match=r"'n'.*partition_rules= or shardings="):
        tree_deserialize_leaves(path, grid())
    assert_same(tree_deserialize_leaves(path, None)["n"], np.ones(8, np.float32))


def test_the_mesh_of_set_mesh_is_the_default(path):
    tree_serialize_leaves(path, {"w": jnp.ones((8, 4))})
    with jax.set_mesh(grid()):
        loaded = tree_deserialize_leaves(path, None, partition_rules=[("w", P("model"))])
        plain = tree_deserialize_leaves(path, None)
    assert loaded["w"].sharding == on(grid(), "model")
    assert plain["w"].sharding == on(grid())


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


def test_a_directory_may_be_moved(path, tmp_path):
    tree_serialize_leaves(path, tree_of_all_kinds(), prefix="model")
    shutil.move(path, tmp_path / "elsewhere")
    assert_same(tree_deserialize_leaves(tmp_path / "elsewhere", line()), tree_of_all_kinds())


# ----------------------------------------------------------------------------------------------- index


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
    with pytest.raises(ValueError, match=rf"{INDEX} exists"):
        tree_serialize_leaves(path, {"w": jnp.ones(2)}, write_index=False)
    assert_same(tree_deserialize_leaves(path, line()), {"w": jnp.zeros(2)})


# ------------------------------------------------------------------------------------------- placement


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
    assert tree_deserialize_leaves(path, tall())["w"].sharding == on(tall(), "data", "model")


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


# ------------------------------------------------------------------------------------------ chunk size


def most_in_flight(path, **arguments):
    """How many arrays there are at once, if the callback keeps none of them."""
    before, seen = len(jax.live_arrays()), []
    tree_deserialize_leaves(
        path, line(), callback=lambda array, key: seen.append(len(jax.live_arrays()) - before), **arguments
    )
    assert len(seen) == 8
    return max(seen)


def test_the_chunk_size_bounds_how_many_arrays_are_in_flight(path):
    tree_serialize_leaves(path, {f"w{i}": jnp.ones(10) for i in range(8)})
    gc.collect()  # arrays of earlier tests do not go meanwhile
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
