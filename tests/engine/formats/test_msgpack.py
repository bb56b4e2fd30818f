"""The wire format: the written bytes, the read trees, and errors for damaged bytes."""

import contextlib
import io
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eformer._engine.formats.msgpack.reader import unpack_tree
from eformer._engine.formats.msgpack.writer import can_pack, pack_tree
from eformer.errors import FormatError, LeafError
from support import programs
from support.trees import Moments, assert_same, flax_trees, leaves

CHUNK = 2**30


def packed(tree, *, max_chunk=CHUNK, sort_keys=False):
    out = io.BytesIO()
    pack_tree(tree, out.write, max_chunk=max_chunk, sort_keys=sort_keys)
    return out.getvalue()


@contextlib.contextmanager
def at_most(nbytes):
    """The block takes no more memory than this."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < nbytes


def array_message(shape, dtype, data, code=1):
    """An extension of code `code` around any payload, well formed or not."""
    return msgpack.packb(msgpack.ExtType(code, msgpack.packb([shape, dtype, data])))


# ------------------------------------------------------------------------------------------ round trips

our_trees = st.recursive(
    leaves,
    lambda c: (
        st.lists(c, max_size=4)
        | st.lists(c, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(-(2**63), 2**64 - 1), c, max_size=4)
    ),
    max_leaves=12,
)


@given(our_trees, st.sampled_from([1, 7, 64, CHUNK]))
def test_any_tree_comes_back_bit_for_bit(tree, max_chunk):
    assert_same(unpack_tree(packed(tree, max_chunk=max_chunk)), tree)


@given(st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]), st.sampled_from([(), (3,), (2, 1), (0,)]))
@settings(max_examples=12)
def test_typed_keys_come_back(implementation, shape):
    key = jax.random.key(7, impl=implementation)
    key = jax.random.split(key, shape) if shape else key
    again = unpack_tree(packed({"k": key}))["k"]
    assert again.dtype == key.dtype
    assert again.shape == key.shape
    assert_same({"k": again}, {"k": key})


@pytest.mark.parametrize("code", ["f4", "i8", "u2", "c16", "f2"])
def test_big_endian_arrays_come_back_with_the_right_values(code):
    array = np.arange(5).astype(">" + code)
    again = unpack_tree(packed({"a": array, "s": array[1]}))
    assert again["a"].tolist() == array.tolist()
    assert again["s"] == array[1]


def test_keys_of_every_plain_type_come_back_as_they_were():
    tree = {
        "a": 1,
        2: 2,
        b"b": 3,
        None: 4,
        1.5: 5,
        -3: 6,
        True: 7,
        2j: 8,
        np.int32(9): 9,
        np.float16(0.5): 10,
    }
    assert_same(unpack_tree(packed(tree, sort_keys=True)), tree)


WRAPS = {"list": lambda t: [t], "tuple": lambda t: (t,), "dict": lambda t: {"a": t}}


def nested(wrap, depth, tree):
    for _ in range(depth):
        tree = wrap(tree)
    return tree


@pytest.mark.parametrize("inside", [5, list(range(1000, 31000))], ids=["small", "large"])
@pytest.mark.parametrize(("kind", "depth"), [("list", 900), ("dict", 900), ("tuple", 450)])
def test_deep_trees_come_back_whatever_the_callers_stack(kind, depth, inside):
    if inside != 5:
        depth -= 1  # the list itself is a level
    message = packed(nested(WRAPS[kind], depth, inside))

    def from_deep_down(frames):
        return unpack_tree(message) if frames == 0 else from_deep_down(frames - 1)

    again = from_deep_down(600)
    for _ in range(depth):
        assert type(again).__name__ == kind
        again = next(iter(again.values() if kind == "dict" else again))
    assert again == inside


@pytest.mark.parametrize(("kind", "depth"), [("list", 902), ("dict", 902), ("tuple", 452)])
def test_deeper_trees_are_refused(kind, depth):
    with pytest.raises(LeafError, match="nested more than 900 deep"):
        packed(nested(WRAPS[kind], depth, 5))


def test_a_tree_that_contains_itself_is_refused():
    loop = {}
    loop["a"] = loop
    with pytest.raises(LeafError, match="or contains itself"):
        packed(loop)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 31, 32, 255, 256, 65535, 65536, 65537])
def test_heads_have_the_lengths_that_msgpack_itself_gives_them(size):
    for tree in ([None] * size, dict.fromkeys(range(size)), "x" * size, b"x" * size, {"x" * size: b"y"}):
        assert packed(tree) == msgpack.packb(tree)
    array = np.zeros(size, np.uint8)
    payload = msgpack.packb([[size], "uint8", bytes(size)])
    assert packed(array) == msgpack.packb(msgpack.ExtType(1, payload))


# ---------------------------------------------------------------------------------- copies and lifetimes


def test_arrays_are_written_from_where_they_lie_and_read_where_they_came():
    array = np.arange(1000.0)
    pieces = []
    pack_tree({"a": array}, pieces.append, max_chunk=CHUNK, sort_keys=False)
    assert any(np.shares_memory(np.frombuffer(p, np.uint8), array) for p in pieces)
    message = packed({"a": array, "b": jnp.ones(3, jnp.bfloat16)})
    tree = unpack_tree(message)
    for leaf in tree.values():
        assert np.shares_memory(leaf, np.frombuffer(message, np.uint8))
        assert not leaf.flags.writeable


def test_a_mutable_buffer_is_copied_so_that_the_arrays_keep_their_values():
    for wrap in (bytearray, lambda b: memoryview(bytearray(b)), lambda b: np.frombuffer(b, np.uint8).copy()):
        buffer = wrap(packed({"a": np.arange(4)}))
        tree = unpack_tree(buffer)
        np.asarray(buffer)[:] = 255
        assert tree["a"].tolist() == [0, 1, 2, 3]
    readonly = memoryview(packed({"a": np.arange(4)}))
    assert np.shares_memory(unpack_tree(readonly)["a"], np.frombuffer(readonly, np.uint8))


JAX_DTYPES = [
    "bool",
    "int4",
    "int8",
    "uint16",
    "int32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
]


@pytest.mark.parametrize("name", JAX_DTYPES)
def test_views_at_odd_addresses_still_work_in_numpy_and_jax(name):
    array = np.ones(5, jnp.dtype(name))
    for shift in range(9):
        again = unpack_tree(packed({"x" * shift: array}))["x" * shift]
        assert (again + again == array + array).all()
        assert (np.asarray(jax.device_put(again)) == array).all()


def test_reading_and_writing_numpy_trees_does_not_import_jax():
    code = (
        "import sys, io, numpy as np; from eformer._engine.formats.msgpack.reader import unpack_tree; from eformer._engine.formats.msgpack.writer import pack_tree\n"
        "out = io.BytesIO(); pack_tree({'a': np.ones(3)}, out.write, max_chunk=9, sort_keys=True)\n"
        "assert unpack_tree(out.getvalue())['a'].sum() == 3; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------- refused trees


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.array(["ab"]), "dtype <U2 cannot be stored; store text as plain strings"),
        (np.str_("ab"), "dtype <U2 cannot be stored"),
        (np.array([b"ab"]), "cannot be stored"),
        (np.array([None]), "dtype object cannot be stored"),
        (np.zeros(2, "i4,f4"), "cannot be stored"),
        (np.ma.masked_array([1, 2], [True, False]), "mask of a masked array"),
        (object(), "can not serialize builtins.object"),
        (Moments(1, 2), "can not serialize support.trees.Moments.*to_bytes takes registered objects apart"),
        ({1, 2}, "can not serialize builtins.set"),
        (2**64, "18446744073709551616 cannot be stored"),
        (-(2**63) - 1, "cannot be stored"),
        ("\ud800", "cannot be stored"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "can not serialize"),
        ({(1, 2): 3}, "a key of type tuple cannot be stored"),
        ({"__msgpack_chunked_array__": True}, "is reserved in msgpack files"),
        ({"__msgpack_tuple__": []}, "is reserved in msgpack files"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_unreadable_trees_are_refused_with_the_place(leaf, message):
    with pytest.raises(LeafError, match=f"^layers/3/w.*{message}"):
        packed({"layers": [0, 1, 2, {"w": leaf}]})


def test_a_restored_scalar_is_of_the_class_that_its_dtype_is_known_by():
    for name in ("int8", "int16", "int32", "int64", "uint64", "float64", "complex128"):
        assert type(unpack_tree(packed(np.dtype(name).type(1)))) is getattr(np, name)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_arrays_of_other_classes_are_arrays():
    matrix = np.asmatrix(np.arange(12.0).reshape(3, 4))
    for array in (matrix, matrix[:, ::2], np.ma.masked_array([1.5, 2.5]), np.arange(6).view(np.recarray)):
        for max_chunk in (8, CHUNK):
            assert (
                unpack_tree(packed({"a": array}, max_chunk=max_chunk))["a"].tolist()
                == np.asarray(array).tolist()
            )


def test_a_traced_array_is_named():
    with pytest.raises(jax.errors.JAXTypeError) as caught:
        jax.jit(lambda x: packed({"layer": [x]}))(jnp.ones(2))
    assert "while serializing the leaf layer/0" in caught.value.__notes__


SHARDED = """
import gc, tracemalloc
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from eformer.pytree._serialization import from_bytes, to_bytes
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((4, 2), ("x", "y"))
host = np.arange(2**18, dtype=np.int32).reshape(512, 512) % 7
for spec in (P("x", "y"), P("y", "x"), P(None, "x"), P("x"), P()):
    for dtype in ("int32", "bfloat16", "int4"):
        first, array = (jax.device_put(host.astype(jnp.dtype(dtype)), NamedSharding(mesh, spec)) for _ in "12")
        to_bytes({"a": first})  # what JAX keeps from compiling is not at issue
        tracemalloc.start()
        message = to_bytes({"a": array})
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - len(message)
        tracemalloc.stop()
        assert (from_bytes({"a": array}, message)["a"] == host.astype(jnp.dtype(dtype))).all(), (spec, dtype)
        assert held < 2**16, (spec, dtype, held)
print("ok")
"""


def test_sharded_arrays_are_written_whole_and_leave_no_copy_behind():
    done = programs.run(SHARDED)
    assert done.stdout == "ok\n", done.stderr


def test_a_donated_array_is_named():
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(RuntimeError, match="deleted") as caught:
        packed({"layer": {"w": array}})
    assert caught.value.__notes__ == ["while serializing the leaf layer/w"]


def test_can_pack_agrees_with_pack():
    good = [
        1,
        None,
        "x",
        b"",
        1j,
        np.ones(2),
        np.float32(1),
        jnp.ones(2),
        jax.random.key(0),
        np.ones(1, ">f4"),
    ]
    bad = [object(), {1}, np.array(["a"]), jax.ShapeDtypeStruct((), jnp.int8), 2**64, len]
    assert all(map(can_pack, good))
    assert not any(map(can_pack, bad))


# ------------------------------------------------------------------------------------------ damaged bytes

F4 = bytes(8)
HOSTILE = {
    "nothing": (b"", "ends too early"),
    "unused tag": (b"\xc1", "0xc1"),
    "trailing": (b"\xc0\xc0", "1 bytes follow the end, at byte 1"),
    "list of 2**32-1": (b"\xdd\xff\xff\xff\xff", "a container of 4294967295 elements, but only 0 bytes"),
    "map of 2**32-1": (b"\xdf\xff\xff\xff\xff\xc0", "a container of 8589934590 elements"),
    "bytes of 4 GiB": (b"\xc6\xff\xff\xff\xff12", "4294967295 bytes announced, but only 2 left"),
    "text of 4 GiB": (b"\xdb\xff\xff\xff\xff12", "bytes announced"),
    "extension of 4 GiB": (b"\xc9\xff\xff\xff\xff\x0112", "bytes announced"),
    "half a number": (b"\xcb\0\0", "ends too early"),
    "no UTF-8": (b"\xa2\xff\xfe", "utf-8"),
    "a million deep": (b"\x91" * 10**6, "deep"),
    "5000 deep": (b"\x91" * 5000 + b"\xc0", "nested more than 900 deep"),
    "maps deep": (b"\x81\xa1a" * 5000 + b"\xc0", "nested more than 900 deep"),
    "duplicate key": (b"\x82\xa1a\x01\xa1a\x02", "duplicate key 'a'"),
    "duplicate by value": (b"\x82\x01\x01\xc3\x02", "duplicate key True"),
    "list as key": (b"\x81\x90\x01", "a list as the key of a map"),
    "array as key": (b"\x81" + array_message([2], "float32", F4) + b"\x01", "a ndarray as the key of a map"),
    "unknown extension": (msgpack.packb(msgpack.ExtType(99, b"x")), "unknown extension type 99"),
    "timestamp": (msgpack.packb(msgpack.Timestamp(1)), "unknown extension type -1"),
    "empty array payload": (msgpack.packb(msgpack.ExtType(1, b"")), "truncated"),
    "payload of two": (msgpack.packb(msgpack.ExtType(1, msgpack.packb([[2], "float32"]))), "length 3, got 2"),
    "payload a map": (msgpack.packb(msgpack.ExtType(1, b"\x80")), "Expected `array`, got `object`"),
    "payload too long": (msgpack.packb(msgpack.ExtType(1, msgpack.packb([[2], "float32", F4]) + b"\0")), "trailing characters"),
    "shape too large": (array_message([1000, 1000], "float32", F4), "takes 4000000 bytes, found 8"),
    "shape negative": (array_message([-1], "float32", F4), "Expected `int` >= 0"),
    "shape overflows": (array_message([2**62, 2**62], "float32", F4), "takes"),
    "shape overflows beside 0": (array_message([0, 2**62], "float32", b""), "too big|too large|[Mm]aximum"),
    "shape of floats": (array_message([2.0], "float32", F4), "Expected `int`, got `float`"),
    "shape of true": (array_message([True, 2], "float32", F4), "Expected `int`, got `bool`"),
    "shape no list": (array_message(2, "float32", F4), "Expected `array`, got `int`"),
    "100 axes": (array_message([1] * 99 + [2], "float32", F4), "length <= 64"),
    "dtype unknown": (array_message([2], "float31", F4), "unknown dtype 'float31'"),
    "dtype object": (array_message([1], "object", F4), "unknown dtype 'object'"),
    "dtype O": (array_message([1], "O", F4), "unknown dtype 'O'"),
    "dtype structured": (array_message([1], "i4,i4", F4), "unknown dtype"),
    "dtype str64": (array_message([1], "str64", F4), "unknown dtype"),
    "dtype bytes": (array_message([2], b"float32", F4), "Expected `str`, got `bytes`"),
    "dtype long": (array_message([2], "f" * 10**6, F4), "unknown dtype"),
    "data text": (array_message([2], "float32", "x" * 8), "Expected `bytes`, got `str`"),
    "data short": (array_message([2], "float32", F4[:7]), "takes 8 bytes, found 7"),
    "scalar with axes": (array_message([2], "float32", F4, code=3), "array with axes where a numpy scalar"),
    "scalar key": (array_message([2], "key<threefry2x32>", F4, code=3), "where a numpy scalar"),
    "key of no kind": (array_message([2], "key<nope>", F4), "not a PRNG key"),
    "key of wrong shape": (array_message([1, 1], "key<threefry2x32>", F4[:4]), "not a PRNG key"),
    "complex of one": (msgpack.packb(msgpack.ExtType(2, msgpack.packb([1.0]))), "length 2, got 1"),
    "complex of text": (msgpack.packb(msgpack.ExtType(2, msgpack.packb(["1", "2"]))), "Expected `float`, got `str`"),
    "complex empty": (msgpack.packb(msgpack.ExtType(2, b"")), "truncated"),
    "tuple of 1": (msgpack.packb({"__msgpack_tuple__": 1}), "needs one list"),
    "tuple and more": (msgpack.packb({"__msgpack_tuple__": [], "a": 1}), "needs one list"),
    "chunks missing": (msgpack.packb({"__msgpack_chunked_array__": True}), "needs a shape and chunks"),
    "chunks of text": (msgpack.packb({"__msgpack_chunked_array__": True, "shape": {"0": 1}, "chunks": {"0": "x"}}), "shape and chunks"),
    "chunks none": (msgpack.packb({"__msgpack_chunked_array__": True, "shape": {"0": 0}, "chunks": {}}), "shape and chunks"),
    "chunks misnumbered": (msgpack.packb({"__msgpack_chunked_array__": True, "shape": {"1": 0}, "chunks": {"0": 1}}), "shape and chunks"),
    "chunks and more": (msgpack.packb({"__msgpack_chunked_array__": True, "shape": {}, "chunks": {"0": 1}, "x": 1}), "nothing else"),
    "chunked shape of floats": (
        b"\x83\xb9__msgpack_chunked_array__\xc3\xa5shape" + msgpack.packb({"0": 2.0})
        + b"\xa6chunks\x81\xa10" + array_message([2], "float32", F4),
        "needs a shape and chunks",
    ),
    "chunks not flat": (
        b"\x83\xb9__msgpack_chunked_array__\xc3\xa5shape" + msgpack.packb({"0": 2})
        + b"\xa6chunks\x81\xa10" + array_message([1, 2], "float32", F4),
        "are not flat",
    ),
    "datetime of no unit": (array_message([1], "datetime64[\u0663s]", F4), "unknown dtype"),
    "datetime of nothing": (array_message([1], "datetime64[0s]", F4), "unknown dtype"),
    "datetime beyond": (array_message([1], "datetime64[9999999999s]", F4), "unknown dtype"),
    "chunked shape huge": (
        b"\x83\xb9__msgpack_chunked_array__\xc3\xa5shape" + msgpack.packb({"0": 2**40})
        + b"\xa6chunks\x81\xa10" + array_message([2], "float32", F4),
        "the chunks hold 2 elements",
    ),
    "chunks of two dtypes": (
        b"\x83\xb9__msgpack_chunked_array__\xc3\xa5shape" + msgpack.packb({"0": 3}) + b"\xa6chunks\x82\xa10"
        + array_message([2], "float32", F4) + b"\xa11" + array_message([1], "int64", F4),
        "not of one dtype",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_are_a_cheap_value_error_that_names_the_problem(data, message):
    with at_most(64 * 2**20), pytest.raises(ValueError, match=message):
        unpack_tree(data)


def test_the_error_says_where():
    data = msgpack.packb({"layers": [1, {"w": msgpack.ExtType(1, b"\x80")}]})
    with pytest.raises(
        FormatError,
        match=r"^msgpack, at byte 16 of 16, in 'layers/1/w': wrong payload of an extension: Expected `array`, got `object`",
    ):
        unpack_tree(data)


@pytest.mark.parametrize("tail", ["cut", "trailing", "deep", "unused tag"])
def test_a_large_broken_message_is_refused_before_anything_is_built_from_it(tail):
    count = 2**22
    many = b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count  # would take 256 MiB
    data = (
        b"\x92"
        + many
        + {"cut": b"", "trailing": b"\xc0\xc0", "deep": b"\x91" * 10**5, "unused tag": b"\xc1"}[tail]
    )
    message = (
        r"at byte \d+ of \d+, in .*(truncated|trailing|nested more than 900 deep|invalid opcode).*further on"
    )
    with at_most(16 * 2**20), pytest.raises(FormatError, match=message):
        unpack_tree(data)


def test_a_large_broken_message_of_few_values_is_explained():
    message = packed({"layers": [{"w": np.zeros(10**5)}, {"w": np.zeros(10**5)}]})
    with pytest.raises(FormatError, match=r"in 'layers/1/w': 800020 bytes announced, but only 799920 left"):
        unpack_tree(message[:-100])
    with pytest.raises(FormatError, match="3 bytes follow the end"):
        unpack_tree(message + b"abc")


SAMPLE = packed(
    {
        "a": {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [1, (2, "x")]},
        "c": 1j,
        "s": np.float16(2),
    }
    | {"k": jax.random.key(3), "big": np.arange(9)},
    max_chunk=40,
)


def test_every_truncation_is_noticed():
    for size in range(len(SAMPLE)):
        with pytest.raises(FormatError):
            unpack_tree(SAMPLE[:size])


def read_or_refuse(data):
    """Either a tree that can be written again, or a FormatError; anything else fails."""
    try:
        tree = unpack_tree(data)
    except FormatError:
        return
    assert_same(unpack_tree(packed(tree)), tree)


def test_every_changed_byte_is_read_or_refused_and_nothing_crashes():
    for position in range(len(SAMPLE)):
        for flip in (0x01, 0x10, 0x80, 0xFF):
            read_or_refuse(SAMPLE[:position] + bytes([SAMPLE[position] ^ flip]) + SAMPLE[position + 1 :])


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_random_bytes_are_read_or_refused(data):
    read_or_refuse(data)


@given(flax_trees, st.data())
@settings(max_examples=200)
def test_spliced_messages_are_read_or_refused(tree, data):
    message = packed(tree)
    cut = data.draw(st.integers(0, len(message)))
    resume = data.draw(st.integers(0, len(message)))
    read_or_refuse(message[:cut] + data.draw(st.binary(max_size=9)) + message[resume:])
