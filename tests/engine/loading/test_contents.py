"""What a load can choose from: below a root, renamed, and under the names of `like`."""

import msgspec
import numpy as np
import pytest

from eformer._engine.loading.contents import Contents, below, named_like, renamed
from eformer._engine.record.boxes import Box
from eformer._engine.record.manifest import Extent, LeafEntry
from eformer._engine.record.names import refuse_root
from eformer._engine.record.rename import rules_from
from eformer._engine.trees.flatten import flatten
from eformer.checkpoint import load, save
from eformer.errors import MismatchError
from support.trees import assert_same


def leaf(shape=(3, 2), dtype="float32", **more):
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return LeafEntry(dtype, shape, (Extent(0, 0, nbytes, ""),), **more)


def contents(*names, values=None):
    return Contents(dict.fromkeys(names, leaf()), values or {}, b'{"dict":{}}')


def of_tree(tree):
    leaves, structure = flatten(tree)
    return Contents(dict.fromkeys(leaves, leaf()), {}, msgspec.json.encode(structure))


class Reader:
    """Reads from memory in place of a checkpoint."""

    def __init__(self, arrays):
        self.arrays = arrays

    def read(self, name, entry, region, threads=None):
        return self.arrays[name][region.slices]


# ------------------------------------------------------------------------------------------------ root


def test_a_root_keeps_the_structure_below_it():
    tree = {"params": {"layers": [(1, 2), (3, 4)], "head": 5}, "step": 6}
    found = below(of_tree(tree), "params.layers")
    assert found.names == ["0.0", "0.1", "1.0", "1.1"]
    assert found.structure == {
        "list": [{"tuple": ["params.layers.0.0", "params.layers.0.1"]},
                 {"tuple": ["params.layers.1.0", "params.layers.1.1"]}]
    }  # fmt: skip
    assert found.stored_names["1.0"] == "params.layers.1.0"


def test_the_root_of_one_leaf_is_that_leaf():
    assert below(of_tree({"a": {"b": 1, "c": 2}}), "a.c").names == ["%"]


def test_a_root_among_the_keys_of_a_flat_dict_gives_nested_dicts():
    found = below(of_tree({"model.layers.0.w": 1, "model.layers.1.w": 2, "other": 3}), "model.layers")
    assert found.names == ["0.w", "1.w"]
    assert found.structure == {"dict": {"0": {"dict": {"w": "0.w"}}, "1": {"dict": {"w": "1.w"}}}}


def test_the_exact_name_of_a_root_wins():
    tree = {"a.b": {"x": 1, "y": 2}, "a": {"b": {"x": 3}}}
    assert below(of_tree(tree), "a.b").stored_names == {"x": "a.b.x"}
    assert below(of_tree(tree), "a%2Eb").stored_names == {"x": "a%2Eb.x", "y": "a%2Eb.y"}
    assert below(of_tree({"a.b": {"x": 1}, "c": 2}), "a.b").stored_names == {"x": "a%2Eb.x"}


def test_a_root_that_is_not_there_is_an_error_with_the_nearest_one():
    with pytest.raises(
        MismatchError,
        match=r"no leaf is named 'params.encode' or lies below it \(nearest is 'params.encoder'\)",
    ):
        refuse_root(["params.encoder.w", "params.encoder.b"], "params.encode")


@pytest.mark.parametrize("fmt", ["safetensors", "tensorstore"])
def test_a_subtree_loads_as_it_was_saved(tmp_path, fmt):
    tree = {"params": {"enc": [np.ones(3), (np.zeros(2), 7)], "dec": np.ones(1)}, "step": 3}
    save(tree, tmp_path / "x", format=fmt)
    assert_same(load(tmp_path / "x", root="params.enc"), tree["params"]["enc"])
    assert_same(load(tmp_path / "x", root="params.enc.1", like=(np.ones(2), 0)), (np.zeros(2), 7))
    assert_same(load(tmp_path / "x", root="step"), 3)
    save({"a": {"b": {"c": np.ones(1)}}}, tmp_path / "y", format=fmt)
    assert_same(load(tmp_path / "y", root="a"), {"b": {"c": np.ones(1)}})
    assert_same(load(tmp_path / "y", root="a.b"), {"c": np.ones(1)})
    assert_same(load(tmp_path / "y", root="a.b.c"), np.ones(1))
    assert_same(load(tmp_path / "x", root="params", keys="dec"), {"dec": np.ones(1)})


# ---------------------------------------------------------------------------------------------- rename


def test_leaves_that_are_only_renamed_keep_their_record():
    found, result = renamed(contents("a.w", "b"), rules_from({r"a\.(\w)": r"c.\1", "b": None}), Reader({}))
    assert (list(found.arrays), found.computed, result.left_out) == (["c.w"], {}, ["b"])
    assert found.arrays["c.w"] == leaf()
    assert found.structure == {"dict": {"c": {"dict": {"w": "c.w"}}}}


def test_transformed_leaves_are_computed_from_stored_ones():
    arrays = {f"layers.{n}": np.arange(6, dtype=np.float32).reshape(3, 2) + n for n in range(2)}
    rules = rules_from({r"layers\.(\d)": r"stacked | transpose | stack \1"})
    found, _ = renamed(contents(*arrays), rules, Reader(arrays))
    assert found.arrays["stacked"] == LeafEntry("float32", (2, 2, 3), ())
    whole = found.computed["stacked"].read(Box.whole((2, 2, 3)))
    np.testing.assert_array_equal(whole, np.stack([arrays["layers.0"].T, arrays["layers.1"].T]))


def test_plain_values_are_renamed_too():
    found, _ = renamed(contents("w", values={"n": 3}), rules_from({"n": "count", "w": "count.w"}), Reader({}))
    assert found.raw_values == {"count": 3}
    assert list(found.arrays) == ["count%2Ew"]  # a leaf cannot be a dict as well


# ------------------------------------------------------------------------------------- names of `like`


@pytest.mark.parametrize(
    ("stored", "like"),
    [("model.embed.weight", "model%2Eembed%2Eweight"), ("model%2Eembed%2Eweight", "model.embed.weight"),
     ("layers.0.kernel.value", "layers.0.kernel"), ("a%2Fb", "a%2Fb")],
)  # fmt: skip
def test_another_spelling_of_a_name_is_that_of_like(stored, like):
    assert named_like(contents(stored), {like: 0}).names == [like]


@pytest.mark.parametrize(
    ("stored", "like"),
    [(["a.b"], ["a.b", "a%2Eb"]), (["a.b", "a%2Eb"], ["a.b"]), (["w.value", "w"], ["w"]), (["w.value"], ["w.value", "v"])],
)  # fmt: skip
def test_a_name_that_like_has_already_stays(stored, like):
    assert named_like(contents(*stored), dict.fromkeys(like)).names == stored


def test_two_leaves_never_become_one():
    like = {"a.b": 0, "x.y": 0}
    assert named_like(contents("a.b.value", "a%2Eb", "x%2Ey"), like).names == ["a.b.value", "a%2Eb", "x.y"]
    assert named_like(contents("a.b", "a%2Eb"), {"a%2Eb.c": 0, "x": 0}).names == ["a.b", "a%2Eb"]
    assert named_like(contents("w.value", "w%2Evalue"), {"w": 0}).names == ["w.value", "w%2Evalue"]
