import numpy as np
import pytest
from hypothesis import given

from eformer._engine.record import dtypes as _ndarray
from eformer._engine.record.dtypes import dtype_from_name, from_raw, name_of_dtype, raw_pieces
from eformer.errors import FormatError, LeafError
from support.trees import DTYPES, arrays, bits


def raw(array):
    return b"".join(raw_pieces(array))


@given(arrays())
def test_any_array_comes_back_from_its_bytes(array):
    again = from_raw(memoryview(raw(array)), name_of_dtype(array.dtype), array.shape)
    assert bits(again) == bits(array)


@given(arrays([d for d in DTYPES if d.kind in "iufc"]))
def test_big_endian_arrays_become_little_endian(array):
    assert raw(array.astype(array.dtype.newbyteorder(">"))) == raw(array)


def test_a_straight_array_is_handed_out_where_it_lies():
    array = np.arange(10_000.0)
    (piece,) = raw_pieces(array)
    assert np.shares_memory(np.frombuffer(piece, np.uint8), array)


@pytest.mark.parametrize("limit", [8, 24, 100, 10_000])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(60).reshape(3, 4, 5).T,
        np.arange(60).reshape(3, 20)[:, ::3],
        np.arange(10)[::-1],
        np.broadcast_to(np.arange(3), (4, 3)),
        np.arange(24, dtype=">i4").reshape(2, 3, 4),
        np.zeros((0, 5)).T,
    ],
)
def test_pieces_of_any_size_are_the_same_bytes(monkeypatch, array, limit):
    monkeypatch.setattr(_ndarray, "_COPIED_BYTES", limit)
    monkeypatch.setattr(_ndarray, "_SMALL", 0)
    assert raw(array) == array.astype(array.dtype.newbyteorder("<")).tobytes()
    assert all(len(piece) <= limit for piece in raw_pieces(array))


@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype("M8[ns]"), np.dtype("m8[25s]"), np.dtype("M8")], ids=str)
def test_every_dtype_has_a_name_that_leads_back(dtype):
    assert dtype_from_name(name_of_dtype(dtype)) == dtype


@pytest.mark.parametrize("dtype", ["U4", "S4", "O", "i4,f4", "V8", np.dtypes.StringDType()], ids=str)
def test_dtypes_that_could_not_be_read_back_are_refused(dtype):
    with pytest.raises(LeafError, match="cannot be stored"):
        name_of_dtype(np.dtype(dtype))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "object",
        "O",
        "str32",
        "float31",
        "f4",
        ">f4",
        "i4,f4",
        "(2,)f4",
        "M8[ns]",
        "datetime64[zz]",
        "datetime64[0s]",
        "timedelta64[00ns]",
        "x" * 99,
    ],
)
def test_unknown_dtype_names_never_reach_numpy(name):
    with pytest.raises(FormatError, match="unknown dtype"):
        dtype_from_name(name)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3,), r"float32\[3\] takes 12 bytes, found 8"),
        ((-2,), "negative dimension"),
        ((-1, -2), "negative dimension"),
        ((2**62, 2**62), "takes"),
        ((1,) * 70 + (2,), "maximum supported dimension"),
    ],
)
def test_a_shape_that_does_not_fit_the_bytes_is_refused(shape, message):
    with pytest.raises(FormatError, match=message):
        from_raw(memoryview(bytes(8)), "float32", shape)


def test_sizes_that_overflow_beside_a_zero_are_refused():
    with pytest.raises(FormatError):
        from_raw(memoryview(b""), "float32", (0, 2**62))
