"""The manifest: JSON in and out, with a digest, and checked before use."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.boxes import Box
from eformer._engine.record.check import check_leaf, is_plain
from eformer._engine.record.digests import check_own_digest, stamp_digest
from eformer._engine.record.dtypes import DTYPES
from eformer._engine.record.manifest import (
    DataFile,
    Extent,
    LeafEntry,
    Leaves,
    Manifest,
    RecordedSharding,
    TreeEntry,
    encode_leaves,
)
from eformer._engine.record.pieces import count_pieces
from eformer._engine.record.values import value_to_json
from eformer.errors import CorruptionError, FormatError
from support.trees import keys

DIGEST = "0123456789abcdef" * 2


def a_tree(leaves, **fields):
    files = (DataFile("f", 1064, 64, DIGEST),)
    fixed = {"save_id": "x", "saved_at": "", "written_by": "", "block": 256, "files": files}
    return TreeEntry(**fixed | fields, raw_leaves=encode_leaves(leaves))


def a_leaf(*extents, dtype="float32", shape=(4, 4), **fields):
    return LeafEntry(dtype, shape, extents or (Extent(0, 0, 64, DIGEST),), **fields)


names = keys.map(lambda key: key.encode("utf-8", "replace").decode())
leaves = st.builds(
    a_leaf,
    home=st.sampled_from(["jax", "numpy"]),
    key=st.none(),
    sharding=st.none() | st.just(RecordedSharding(("x", None, ("x", "y")), {"x": 2, "y": 4})),
)
trees = st.builds(
    a_tree,
    st.dictionaries(names, leaves, max_size=4),
    raw_metadata=st.dictionaries(names, st.integers().map(value_to_json), max_size=3),
    raw_values=st.dictionaries(names.map("value {}".format), st.floats().map(value_to_json), max_size=3),
)
manifests = st.builds(
    lambda t: Manifest(format="safetensors", trees=t), st.dictionaries(names, trees, max_size=3)
)


@given(manifest=manifests)
def test_a_manifest_comes_back_out_of_its_json(manifest):
    data = manifest.to_json()
    again = Manifest.from_json(data, "m")
    assert again.to_json() == data
    for prefix, tree in manifest.trees.items():
        assert again.trees[prefix].leaves == tree.leaves
        assert dict(Leaves(again.trees[prefix])) == tree.leaves
        assert again.trees[prefix].raw_values == tree.raw_values
        assert again.trees[prefix].metadata == tree.metadata


@given(manifest=manifests, data=st.data())
def test_no_flipped_bit_goes_unnoticed(manifest, data):
    good = manifest.to_json()
    bad = bytearray(good)
    bad[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(FormatError):
        Manifest.from_json(bytes(bad), "m")


@given(tree=trees, other=trees)
def test_adding_a_tree_leaves_the_others_as_they_were(tree, other):
    manifest = Manifest(format="f").with_tree("a", tree).with_tree("b", other).with_tree("b", tree)
    assert set(manifest.trees) == {"a", "b"}
    assert msgspec.json.encode(manifest.trees["a"]) == msgspec.json.encode(tree)


def test_a_wrong_digest_names_the_file_and_says_what_to_do():
    sealed = stamp_digest(b'{"digest":"' + b"0" * 32 + b'","x":1}')
    check_own_digest(sealed, "here")
    with pytest.raises(CorruptionError, match=r"here is damaged.*restore"):
        check_own_digest(sealed.replace(b"1", b"2"), "here")
    with pytest.raises(FormatError, match="here is not an eformer manifest"):
        check_own_digest(b"{}", "here")


def test_a_key_is_as_large_as_the_user_sees_it():
    leaf = a_leaf(dtype="uint32", shape=(3, 2), key="fry")
    assert (leaf.logical_dtype, leaf.logical_shape, leaf.nbytes) == ("key<fry>", (3,), 64)
    assert leaf.region_of(leaf.extents[0]) == Box((0, 0), (3, 2))


ROWS = ((0, 0), (2, 4))


@pytest.mark.parametrize(
    ("leaf", "problem"),
    [
        (a_leaf(dtype="pickle"), "unknown dtype"),
        (a_leaf(key="fry"), "cannot be PRNG keys"),
        (a_leaf(shape=(2**40, 2**40)), "larger than an array can be"),
        (a_leaf(shape=(2**20, 2**20)), "expected"),
        (a_leaf(Extent(0, 0, 4, DIGEST), shape=(1,) * 65), "larger than an array can be"),
        (a_leaf(Extent(1, 0, 64, DIGEST)), "file number 1, but there are 1 files"),
        (a_leaf(Extent(0, 990, 64, DIGEST)), "exceed file 'f'"),
        (a_leaf(Extent(0, 0, 60, DIGEST)), "60 bytes for float32"),
        (a_leaf(Extent(0, 0, 64, DIGEST[1:])), "31 digits"),
        (a_leaf(Extent(0, 0, 64, DIGEST * 2)), "64 digits"),
        (a_leaf(Extent(0, 0, 64, "")), "0 digits"),
        (a_leaf(Extent(0, 0, 32, DIGEST, ROWS)), "do not cover"),
        (a_leaf(Extent(0, 0, 128, DIGEST, ((0, 0), (8, 4)))), "outside shape"),
        (a_leaf(Extent(0, 0, 64, DIGEST, ((0,), (4,)))), ""),
        (a_leaf(Extent(0, 0, 64, DIGEST, ((3, 0), (2, 4)))), "not a box"),
        (a_leaf(Extent(0, 0, 32, DIGEST, ROWS), Extent(0, 32, 32, DIGEST, ROWS)), "overlap"),
        (LeafEntry("float32", (4, 4), ()), "do not cover"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(leaf, problem):
    tree = a_tree({"w": leaf})
    for look in (lambda: tree.leaves, lambda: Leaves(tree)["w"]):
        with pytest.raises(FormatError, match=f"leaf 'w' is invalid.*{problem}"):
            look()


def test_four_bit_numbers_share_a_byte():
    tree = a_tree({"w": a_leaf(Extent(0, 0, 8, DIGEST), dtype="float4_e2m1fn")})
    assert tree.leaves["w"].nbytes == 8


@pytest.mark.parametrize(
    "leaf",
    [
        a_leaf(shape=(-4, -4)),
        a_leaf(Extent(-1, 0, 64, DIGEST)),
        a_leaf(Extent(0, -8, 64, DIGEST)),
        a_leaf(Extent(0, 0, -64, DIGEST)),
        a_leaf(Extent(0, 0, 64, DIGEST, ((-4, 0), (0, 4)))),
    ],
)
def test_there_is_nothing_negative_in_an_entry(leaf):
    with pytest.raises(FormatError, match=r"list of leaves is invalid.*>= 0"):
        _ = a_tree({"w": leaf}).leaves


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"save_id": ""}, "invalid save id ''"),
        ({"block": 0}, "piece size 0"),
        ({"block": 2**50}, "piece size 1125899906842624"),
        ({"files": (DataFile("f", 10), DataFile("f", 10))}, "listed twice"),
        ({"files": (DataFile("f", 10, -8),)}, "header of -8"),
        ({"files": (DataFile("f", 10, 20),)}, "header of 20"),
    ],
)
def test_a_tree_that_contradicts_itself_is_refused(change, problem):
    tree = msgspec.structs.replace(a_tree({}), **change)
    with pytest.raises(FormatError, match=problem):
        Manifest.from_json(Manifest(format="f", trees={"": tree}).to_json(), "m")


def test_a_name_is_an_array_or_a_value_but_not_both():
    with pytest.raises(FormatError, match=r"\['w'\] both as arrays and as plain values"):
        _ = a_tree({"w": a_leaf()}, raw_values={"w": 1}).leaves


@pytest.mark.parametrize(
    "sharding",
    [{"spec": 5, "mesh": {}}, {"a": 1}, {"spec": [{}], "mesh": {}}, {"spec": [], "mesh": {"x": "y"}}, 3],
)
def test_malformed_shardings_are_refused(sharding):
    leaf = ["float32", [4, 4], [[0, 0, 64, DIGEST, None]], "jax", None, sharding]
    tree = msgspec.structs.replace(a_tree({}), raw_leaves=msgspec.Raw(msgspec.json.encode({"w": leaf})))
    with pytest.raises(FormatError, match="list of leaves is invalid"):
        _ = tree.leaves


@pytest.mark.parametrize(
    "data", [b'{"digest":"\xff', b"\xff" * 99, b'{"digest":"' + b"0" * 32 + b'","format":"\xff"}']
)
def test_invalid_text_is_refused(data):
    with pytest.raises(FormatError):
        Manifest.from_json(data, "m")
    with pytest.raises(FormatError):
        Manifest.parse(data, "m")


@given(
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple) | st.integers(60, 70).map(lambda n: (1,) * n),
    dtype=st.sampled_from(["float32", "bfloat16", "bool", "complex128", "int4", "float4_e2m1fn", "float31"]),
    off=st.tuples(*[st.sampled_from([0, 0, 0, 1, -1])] * 3),
    block=st.integers(1, 2000),
    key=st.sampled_from([None, None, None, "threefry2x32"]),
)
def test_what_is_quickly_found_valid_is_valid(shape, dtype, off, block, key):
    itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else 4
    nbytes = max(0, math.prod(shape) * itemsize + off[0])
    count = max(0, count_pieces(shape, itemsize, block) + off[1])
    extent = Extent(max(0, off[2]), max(0, 1000 - nbytes + off[2]), nbytes, DIGEST * count)
    entry, tree = a_leaf(extent, dtype=dtype, shape=shape, key=key), a_tree({}, block=block)
    if is_plain(entry, extent, [1000], block):
        check_leaf("w", entry, tree)


def test_a_manifest_names_directories_of_trees_and_the_files_of_trees_without_one():
    files = (DataFile("a.safetensors", 1), DataFile("b.safetensors", 1))
    beside = msgspec.structs.replace(a_tree({}), files=files)
    below = msgspec.structs.replace(beside, raw_root="tree.1")
    manifest = Manifest(format="x").with_tree("", beside)
    assert manifest.names() == {"a.safetensors", "b.safetensors"}
    assert manifest.with_tree("", below).names() == {"tree.1"}
    assert Manifest(format="x", trees={"": beside, "ema": below}).names() == {*manifest.names(), "tree.1"}
