"""Structure files of the original package run nothing, whatever is in them, and invalid files are refused."""

import base64
import collections
import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.formats.zarr.original_structure import parse_original_structure
from eformer._engine.trees.unflatten import unflatten
from eformer.errors import FormatError, StructureError
from support.original import BASIC, DATA, STRUCTURES, Module, Struct, as_original, encoded, one, with_renamed
from support.trees import Layer, Moments, Pair, Unregistered

pytestmark = pytest.mark.usefixtures("trusted")


# --------------------------------------------------------------------------------------------- attacks


class Calls:
    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def with_value(data):
    return as_original(0, nonarray_payload={"0": encoded(data)})


def with_treedef(data):
    return as_original(0, treedef_b64=encoded(data))


def refused(data, match=""):
    with pytest.raises(FormatError, match=r"^a/b_structure.json") as caught:
        parse_original_structure(data, "a/b_structure.json")
    assert type(caught.value) is FormatError
    caught.match(match)


ATTACKS = {
    "(posix|nt):system": lambda marker: (os.system, (f"touch {marker}",)),
    "subprocess:Popen": lambda marker: (subprocess.Popen, (["touch", str(marker)],)),
    "builtins:exec": lambda marker: (exec, (f"open({str(marker)!r}, 'w')",)),
    "builtins:eval": lambda marker: (eval, (f"open({str(marker)!r}, 'w')",)),
    "_?io:open": lambda marker: (open, (str(marker), "w")),
    "builtins:getattr": lambda marker: (getattr, (marker, "touch")),
    r"pathlib\S*:Path.touch": lambda marker: (Path.touch, (marker,)),
    "functools:partial": lambda marker: (functools.partial, (os.system,)),
}


def planted(call, place):
    pickled = pickle.dumps(Calls(*call), 4)
    match place:
        case "value":
            return with_value(pickled)
        case "inside a value":
            return with_value(pickle.dumps([{"a": Calls(*call)}], 4))
        case "treedef":
            return with_treedef(pickled)
        case "static field":
            return as_original(Struct(1, Calls(*call)))
        case "auxiliary data":
            return as_original(Pair(1, 2, [Calls(*call)]))
        case "factory":
            return as_original(collections.defaultdict(call[0], a=1))
        case "key":
            return as_original({Calls(*call): 1})


PLACES = ["value", "inside a value", "treedef", "static field", "auxiliary data", "factory", "key"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_call_is_refused_by_name_and_never_made(name, place, tmp_path):
    marker = tmp_path / "marker"
    data = planted(ATTACKS[name](marker), place)
    refused(data, rf"it holds {name}, .*; pass template= \(a tree of the same structure\)")
    assert not marker.exists()


def test_a_module_that_a_tree_names_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "planted_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    data = with_renamed(Unregistered(1), b"support.trees", b"planted_module")
    assert parse_original_structure(data, "x").document["namedtuple"] == "planted_module:Unregistered"
    assert "planted_module" not in sys.modules


OPCODES = {
    "GLOBAL os system": b"cos\nsystem\n.",
    "INST os system": b"(ios\nsystem\n.",
    "OBJ": b"(o.",
    "PERSID 1": b"P1\n.",
    "BINPERSID": b"K\x01Q.",
    "EXT1 1": b"\x82\x01.",
    "EXT4 1": b"\x84\x01\x00\x00\x00.",
    "NEWOBJ_EX": b"\x8c\x01a\x8c\x01b\x93)}\x92.",
    "PUT": b"K\x01p0\n.",
    "LONG_BINPUT 2147483647": b"K\x01r\xff\xff\xff\x7f.",
    "BYTEARRAY8": b"\x96" + bytes(8) + b".",
    "NEXT_BUFFER": b"\x97.",
    "DUP": b"K\x012.",
}


@pytest.mark.parametrize("name", OPCODES)
@pytest.mark.parametrize("place", [with_value, with_treedef])
def test_an_opcode_that_plain_values_do_not_need_is_refused(name, place):
    refused(
        place(b"\x80\x04" + OPCODES[name]), f"the opcode {name}, which neither trees nor plain values need"
    )


A, B = b"\x8c\x01a", b"\x8c\x01b"
GLOBAL = A + B + b"\x93"
MADE = GLOBAL + b")\x81"


MALFORMED = {
    b"": "pickle exhausted before seeing STOP",
    b"S'\\q'\n.": "the opcode STRING|invalid escape sequence",
    b".": "not hold exactly one value",
    b"K\x01K\x02.": "not hold exactly one value",
    b"K\x01.K\x01.": "not hold exactly one value",
    b"K\x01(.": "not hold exactly one value",
    b"\x85.": "takes more than it has",
    b"(\x85.": "takes more than it has",
    b"t.": "IndexError",
    b"h\x00.": "KeyError",
    b"K\x01K\x02a.": "adds items to a value that cannot have them",
    b"]K\x02(K\x03u.": "adds items to a value that cannot have them",
    b"K\x01)R.": "calls something that is not a class",
    b"]}b.": "gives a state to a value that cannot have one",
    b"K\x01K\x02\x93.": "by a name that is not text",
    b"}(K\x01u.": "ValueError",
    b"}(]K\x01u.": "unhashable",
    GLOBAL + b".": "it holds a:b, which is not a plain value",
    GLOBAL + b"K\x01R.": "calls something that is not a class",
    MADE + b".": "it holds a:b, which is not a plain value",
    MADE + b")\x81.": "calls something that is not a class",
    MADE + b"K\x01a.": "adds items to a value that cannot have them",
    MADE + b"}b}b.": "gives a state to a value that cannot have one",
    MADE + MADE + b"b.": "it holds a:b, which is not a plain value",
    b"\x8c\x08builtins\x8c\x07complex\x93\x8c\x01x\x85R.": "complex",
    b"\x8c\x0cnumpy._core.\x8c\x01y\x93.": "it holds numpy._core.:y",
    b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.": "ValueError",
    b"\x8b\xff\xff\xff\xff.": "ValueError",
}


@pytest.mark.parametrize("data", MALFORMED)
def test_a_malformed_value_is_refused(data):
    refused(with_value(data), MALFORMED[data])


def doubled(times, inner=b")"):
    """Return a nest of tuples that doubles in size with each level."""
    return inner + b"\x94" + b"".join(b"h" + bytes([i]) + b"\x86\x94" for i in range(times))


LONG = (2**18).to_bytes(4, "little") + b"x" * 2**18


BOMBS = {
    "an exponential tuple": doubled(60) + b".",
    "its hash": b"(" + doubled(60) + b"\x91.",
    "a long text again and again": b"(X" + LONG + b"\x94" + b"h\x00" * 2**16 + b"t.",
    "a list in itself": b"]\x94h\x00a.",
    "a tuple in its own list": b"]\x94h\x00\x85a.",
    "a dict in itself": b"}\x94K\x01h\x00s.",
    "a deep list": b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
    "a deep tuple": b")" + b"\x85" * 10**5 + b".",
    "a deep key": b"}" + b")" + b"\x85" * 10**5 + b"Ns.",
    "a large frame": b"\x80\x04\x95" + b"\xff" * 8 + doubled(40) + b".",
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BOMBS)
def test_a_value_larger_than_its_pickle_is_refused(name):
    refused(with_value(BOMBS[name]), "far larger than its pickle, nested too deep, or contains itself")


def treedef(nodes, key="state", registry=b"\x8c\x12jax._src.tree_util\x8c\x10default_registry\x93"):
    head = b"\x80\x04\x8c\x12jaxlib._jax.pytree\x8c\x09PyTreeDef\x93)\x81" + registry
    pickled = head + pickle.dumps(nodes, 4)[2:-1] + b"\x86b."
    return as_original(0, treedef_b64=encoded(pickled), leaf_keys_full=[key])


LEAF = (0, 0, None, None, 1, 1)


HUGE = functools.reduce(
    lambda inner, _: (inner, inner), range(60), ()
)  # in memory and in a pickle it is small


BROKEN_TREES = [
    ("holds 0 trees", []),
    ("holds 2 trees", [LEAF, LEAF]),
    ("the tree has 2 leaves, leaf_keys_full has 1", [LEAF, LEAF, (2, 2, None, None, 2, 3)]),
    ("the tree has 0 leaves, leaf_keys_full has 1", [(1, 0, None, None, 0, 1)]),
    ("a node needs 2 children, but 1 come before it", [LEAF, (2, 2, None, None, 1, 2)]),
    ("a node needs -1 children", [LEAF, (2, -1, None, None, 1, 2)]),
    ("a node needs 99999999999 children", [LEAF, (2, 99999999999, None, None, 1, 2)]),
    ("claims 10000000000 leaves, but has 1", [LEAF, (2, 1, None, None, 10**10, 2)]),
    ("a leaf has children", [LEAF, (0, 1, None, None, 1, 2)]),
    ("1 children has 0 keys", [LEAF, (1, 1, None, None, 1, 2)]),
    ("1 children has 2 keys", [LEAF, (5, 1, ["a", "b"], None, 1, 2)]),
    ("one key twice", [LEAF, (5, 1, ["a", "a"], None, 1, 2)]),
    ("unknown kind 8", [LEAF, (8, 1, None, None, 1, 2)]),
    ("values of other types in place of its numbers", [LEAF, (HUGE, 1, None, None, 1, 2)]),
    ("values of other types in place of its numbers", [LEAF, (2, HUGE, None, None, 1, 2)]),
    ("values of other types in place of its numbers", [LEAF, (2, 1, None, None, HUGE, 2)]),
    ("far larger than its pickle", [LEAF, (5, 1, HUGE, None, 1, 2)]),
    ("far larger than its pickle", [(6, 0, HUGE, Pair, 0, 1), LEAF, (5, 2, ["a", "b"], None, 1, 3)]),
    ("a node has no class", [LEAF, (3, 1, HUGE, HUGE, 1, 2)]),
    ("unhashable", [LEAF, (5, 1, [["a"]], None, 1, 2)]),
    ("a node has no class", [LEAF, (3, 1, "optax:X", None, 1, 2)]),
    ("a node has no class", [LEAF, (6, 1, None, "optax:X", 1, 2)]),
    ("not enough values to unpack", [LEAF, (2, 1)]),
    ("cannot unpack", [1]),
    ("nested more than 250 deep", [LEAF, *((4, 1, None, None, 1, i + 2) for i in range(251))]),
    ("'state' where the tree has 'state.a'", [LEAF, (5, 1, ["a"], None, 1, 2)]),
    ("holds no list", None),
]


@pytest.mark.parametrize(("problem", "nodes"), BROKEN_TREES)
def test_a_broken_tree_is_refused(problem, nodes):
    refused(treedef(nodes), problem)


def test_a_registry_must_be_one_of_jax():
    refused(treedef([LEAF], registry=GLOBAL), "it holds a:b, which")


def test_other_objects_than_a_treedef_are_refused():
    refused(with_treedef(pickle.dumps([1], 4)), "treedef_b64 holds no tree definition")
    refused(with_treedef(b"\x80\x04" + MADE + b"."), "it holds a:b, which is not a plain value")


def test_data_that_many_nodes_share_is_not_copied_for_each_without_end():
    shared = (6, 0, list(range(10**4)), Pair, 0, 1)
    root = (4, 10**4 + 1, None, None, 1, 10**4 + 2)
    refused(treedef([*[shared] * 10**4, LEAF, root], key="state.10000"), "far larger than its pickle")


# ------------------------------------------------------------------------------------- everything else


GOOD = {"a": one(), "b": [one(), 1], "c": None}


CHANGES = {
    "format": ("other", "Invalid enum value 'other'"),
    "prefix": (None, "Expected `str`, got `null`"),
    "treedef_b64": ("gAR", "Incorrect padding"),
    "leaf_keys_full": (["state.a"], "leaf_keys_full has 1 entries, arr_mask has 4"),
    "arr_mask": ([True, True, True, True], "array_keys are not the leaf_keys_full of the arrays in arr_mask"),
    "array_keys": (
        ["state.b.0", "state.a"],
        "array_keys are not the leaf_keys_full of the arrays in arr_mask",
    ),
    "array_relpaths": (["state/a"], "array_keys has 2 entries, array_relpaths 1"),
    "nonarray_payload": ({"2": "gAROLg=="}, "does not have exactly the leaves that are not arrays"),
    "extras": ([], "Expected `object`, got `array`"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_wrong_field_is_refused(field):
    value, problem = CHANGES[field]
    refused(as_original(GOOD, **{field: value}), problem)
    document = json.loads(as_original(GOOD))
    del document[field]
    if field != "extras":
        refused(json.dumps(document).encode(), f"missing required field `{field}`")


@pytest.mark.parametrize("path", ["/etc/passwd", "../a", "a/../../b", ".", "", "a//b", "a\\b", "C:/a", "a\0"])
def test_a_path_out_of_the_checkpoint_is_refused(path):
    refused(as_original(one(), array_relpaths=[path]), "does not lead into the checkpoint")


def test_leaves_that_the_original_overwrote_are_refused():
    refused(as_original({"a.b": one(), "a": {"b": one()}}), "one was overwritten when they were saved")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (["state.mu.1", "state.nu"], "has 'state.mu.1' where the tree has 'state.mu.0'"),
        (["other.mu.0", "state.nu"], "has 'other.mu.0' where the tree has a leaf below 'state.'"),
        (["state.mu.0", "state.mu"], "two children have the same name, below 'state.'"),
    ],
)
def test_keys_that_do_not_fit_the_tree_are_refused(keys, problem):
    refused(as_original(Moments([1], 2), leaf_keys_full=keys), problem)


def test_fields_that_the_class_no_longer_has_are_kept_and_said():
    data = as_original(Moments(1, 2), leaf_keys_full=["state.old", "state.nu"])
    with pytest.raises(StructureError, match=r"saved with fields \('old', 'nu'\), it now has \('mu', 'nu'\)"):
        unflatten(parse_original_structure(data, "x").document, {"old": 1, "nu": 2})


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 10**5, b'{"a":' * 10**5, b"9" * 10**4]
)
def test_other_json_than_an_object_is_refused(data):
    refused(data)


def test_a_file_cut_off_anywhere_is_refused():
    data = (DATA / BASIC).read_bytes()
    for length in range(len(data)):
        refused(data[:length])


def parses_or_is_refused(data):
    try:
        parse_original_structure(data, "a/b_structure.json")
    except FormatError as error:
        problem = error
    else:
        return
    assert type(problem) is FormatError
    assert str(problem).startswith("a/b_structure.json")


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_treedef_cut_off_anywhere_is_refused(name):
    document = json.loads((DATA / name).read_text())
    pickled = base64.b64decode(document["treedef_b64"])
    for length in range(len(pickled)):
        refused(json.dumps(document | {"treedef_b64": encoded(pickled[:length])}).encode())


@pytest.mark.sample(4)
@pytest.mark.parametrize("flip", [1, 2, 4, 8, 16, 32, 64, 128, 255])
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_changed_byte_is_refused_or_makes_another_tree(name, flip):
    document = json.loads((DATA / name).read_text())
    pickled = base64.b64decode(document["treedef_b64"])
    for at in range(len(pickled)):
        changed = pickled[:at] + bytes([pickled[at] ^ flip]) + pickled[at + 1 :]
        parses_or_is_refused(json.dumps(document | {"treedef_b64": encoded(changed)}).encode())


places = st.sampled_from([with_value, with_treedef])


@given(st.binary(), places)
def test_any_pickle_is_refused_or_read(data, place):
    parses_or_is_refused(place(b"\x80\x04" + data + b"."))


known = [bytes([code]) for code in b"]})(aeuthsRbN\x85\x86\x87\x88\x93\x81\x94\x8f\x90\x91"]


programs = st.lists(st.sampled_from([*known, A, GLOBAL, MADE, b"K\x01", b"h\x00", b"h\x01"]), max_size=40)


@given(programs, places)
def test_any_program_of_known_opcodes_is_refused_or_read(program, place):
    parses_or_is_refused(place(b"".join(program) + b"."))


node_data = st.sampled_from(
    [None, (), [], ["a"], ["a", "b"], (list, ("a",)), ("a", "b"), Moments, optax.EmptyState]
)


node_classes = st.sampled_from(
    [None, Layer, Pair, Struct, Module, collections.OrderedDict, collections.defaultdict]
)


nodes = st.tuples(
    st.integers(0, 8), st.integers(0, 2), node_data, node_classes, st.integers(0, 2), st.just(1)
)


@given(
    st.lists(st.just(LEAF) | nodes, max_size=6), st.sampled_from(["state", "state.a", "state.0", "state.mu"])
)
def test_any_list_of_nodes_is_refused_or_read(nodes, key):
    parses_or_is_refused(treedef(nodes, key))


atoms = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


documents = st.recursive(
    atoms, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@given(st.sampled_from(sorted(CHANGES)), documents)
def test_any_field_is_refused_or_read(field, value):
    parses_or_is_refused(as_original(GOOD, **{field: value}))
