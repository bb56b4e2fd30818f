"""Quantised weights become the same numbers box by box as a plain computation gives for the whole weight."""

from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eformer._engine.record import dequantized
from eformer._engine.record.boxes import Box
from eformer._engine.record.dequantized import Blocks, Dequantized
from eformer._engine.record.lazy_arrays import StoredLeaf
from eformer._engine.record.manifest import LeafEntry
from eformer.errors import QuantizedError

F8, E5, E8 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


class Arrays:
    """Reads boxes of arrays in memory, and counts the elements that it has read of each."""

    def __init__(self, **arrays):
        self.arrays, self.counts = arrays, dict.fromkeys(arrays, 0)

    def read(self, name, entry, box, threads=None):
        self.counts[name] += box.size
        return self.arrays[name][box.slices]

    def leaf(self, name):
        array = self.arrays[name]
        return StoredLeaf(self, name, LeafEntry(array.dtype.name, array.shape, ()))

    def weight(self, blocks, dtype):
        whole = self.leaf("whole") if "whole" in self.arrays else None
        return Dequantized(self.leaf("q"), self.leaf("s"), blocks, dtype, whole)


def random(rng, shape, dtype):
    """Return random bits, without the exponent that is no number."""
    itemsize = np.dtype(dtype).itemsize
    if itemsize == 1 or np.issubdtype(dtype, np.integer):
        array = rng.integers(0, 256, (*shape, itemsize), dtype=np.uint8)
        array[array == 255] = 0
        return array.view(dtype).reshape(shape)
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def numbers(q, blocks):
    """Return the numbers of stored elements as float32, the plain way."""
    if blocks.is_grouped:
        q = q.reshape(*q.shape[:-2], -1)
    if blocks.codes == "float8":
        return q.astype(np.float32)
    if blocks.codes == "fp4":
        q = q.view(np.uint8)
        pairs = np.stack([q % 16, q // 16], axis=-1)
        return np.array(FP4, np.float32)[pairs].reshape(*q.shape[:-1], -1)
    bits = 4 if blocks.codes == "int4" else 8
    words = q.view(np.uint32).astype(np.int64)
    fields = [(words // 2 ** (bits * n)) % 2**bits - 2 ** (bits - 1) for n in range(32 // bits)]
    return np.stack(fields, axis=-1).reshape(*q.shape[:-1], -1).astype(np.float32)


@np.errstate(all="ignore")
def plain(arrays, blocks, dtype):
    """Compute the whole weight: number times scale in float32, rounded once."""
    s = arrays["s"]
    if s.dtype in (np.uint8, E8):
        s = np.ldexp(np.float32(1), s.view(np.uint8).astype(int) - 127)
    s = s.astype(np.float32).reshape(blocks.grid)
    if "whole" in arrays:
        whole = arrays["whole"].reshape(())
        s = s / whole if blocks.divides else s * whole
    for axis, size in enumerate(blocks.block):
        s = np.repeat(s, size, axis)
    q = numbers(arrays["q"], blocks)
    fits = tuple(slice(size) for size in blocks.shape)
    found = (q[fits] * s[fits]).astype(dtype)
    return found.swapaxes(-1, -2) if blocks.is_transposed else found


def same(one, other):
    """Tell whether arrays have equal bits, except for the payload of numbers that are NaN."""
    one, other = (np.ascontiguousarray(array) for array in (one, other))
    is_nan = np.isnan(one.astype(np.float32))
    word = f"u{one.dtype.itemsize}"
    bits = (one.view(word) == other.view(word)) | (is_nan & np.isnan(other.astype(np.float32)))
    return one.shape == other.shape and one.dtype == other.dtype and bool(bits.all())


sizes = st.integers(1, 70)


@st.composite
def blocks_of(draw):
    """Draw the codes, the shape and the blocks of a weight."""
    codes = draw(st.sampled_from(["float8", "fp4", "int4", "int8"]))
    per_element = {"float8": 1, "fp4": 2, "int4": 8, "int8": 4}[codes]
    rows, columns = draw(sizes), draw(sizes)
    columns = columns if codes in ("int4", "int8") else -(-columns // per_element) * per_element
    around = draw(st.sampled_from([(), (3,), (2, 2)]))
    height = draw(st.sampled_from([1, 16, rows]))
    width = draw(st.sampled_from([8, 16, 32, max(1, columns)]))
    lead = draw(st.sampled_from([1, "whole"]))
    block = (*(1 if lead == 1 else n for n in around), height, width)
    if codes == "fp4" and draw(st.booleans()) and width == 32 and height == 1:
        groups = -(-columns // 32)
        shape = (*around, rows, 32 * groups)
        return Blocks(
            codes, shape, (*(1 for _ in around), 1, 32), is_grouped=True, is_transposed=draw(st.booleans())
        )
    return Blocks(codes, (*around, rows, columns), block, divides=draw(st.booleans()))  # fmt: skip


@st.composite
def weights(draw):
    """Draw a quantised weight: its blocks and its leaves."""
    blocks, rng = draw(blocks_of()), np.random.default_rng(draw(st.integers(0, 2**32)))
    stored = {"float8": [F8, E5], "fp4": [np.uint8, np.int8], "int4": [np.int32], "int8": [np.int32]}[
        blocks.codes
    ]
    columns = -(-blocks.shape[-1] // blocks.per_element)
    shape = (*blocks.shape[:-1], columns // 16, 16) if blocks.is_grouped else (*blocks.shape[:-1], columns)
    arrays = {"q": random(rng, shape, draw(st.sampled_from(stored)))}
    scale = draw(st.sampled_from([np.float32, ml_dtypes.bfloat16, np.uint8, E8, F8]))
    arrays["s"] = random(rng, blocks.grid, scale)
    if draw(st.booleans()):
        arrays["whole"] = np.array([rng.random() + 0.1], np.float32)
    return blocks, arrays


@settings(max_examples=200, deadline=None)
@given(
    weights(),
    st.sampled_from(["bfloat16", "float32", "float16", "float64"]),
    st.sampled_from([1, 100, 2**16]),
    st.sampled_from([1, 2**11]),
    st.data(),
)
def test_every_box_has_the_numbers_of_the_plain_computation(weight, dtype, chunk, many, data):
    blocks, arrays = weight
    expected = plain(arrays, blocks, dtype)
    array = Arrays(**arrays).weight(blocks, dtype)
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in array.shape]
    box = Box(tuple(low for low, _ in ends), tuple(high for _, high in ends))
    with patch.multiple(dequantized, _CHUNK=chunk, _MANY=many):
        assert same(array.read(Box.whole(array.shape)), expected)
        assert same(array.read(box), expected[box.slices])


def test_ragged_edges_have_blocks_of_their_own():
    blocks = Blocks("float8", (576, 200), (128, 128))
    assert blocks.grid == (5, 2)
    arrays = {"q": np.ones((576, 200), F8), "s": np.arange(10, dtype=np.float32).reshape(5, 2)}
    found = Arrays(**arrays).weight(blocks, "float32").read(Box((511, 127), (513, 129)))
    assert found.tolist() == [[6, 7], [8, 9]]


def test_the_product_is_rounded_once():
    arrays = {"q": np.array([[1.125]], F8), "s": np.array([[1.00390625 + 2**-20]], np.float32)}
    (found,) = Arrays(**arrays).weight(Blocks("float8", (1, 1), (1, 1)), "bfloat16").read(Box((0, 0), (1, 1)))
    assert found == np.float32(1.125 * (1.00390625 + 2**-20)).astype(ml_dtypes.bfloat16)


def test_a_box_reads_its_bytes_and_its_scales_alone():
    blocks = Blocks("float8", (1024, 512), (128, 128))
    arrays = Arrays(q=np.ones((1024, 512), F8), s=np.ones((8, 4), np.float32))
    arrays.weight(blocks, "bfloat16").read(Box((120, 130), (130, 140)))
    assert arrays.counts == {"q": 100, "s": 2}


def test_a_box_of_fp4_reads_whole_bytes():
    blocks = Blocks("fp4", (8, 64), (1, 32))
    arrays = Arrays(q=np.zeros((8, 32), np.uint8), s=np.zeros((8, 2), np.uint8))
    assert arrays.weight(blocks, "bfloat16").read(Box((2, 5), (3, 8))).shape == (1, 3)
    assert arrays.counts == {"q": 2, "s": 1}


def test_the_first_number_of_a_byte_is_in_its_lower_half():
    arrays = Arrays(q=np.array([[0x7A]], np.uint8), s=np.array([[128]], np.uint8))
    found = arrays.weight(Blocks("fp4", (1, 2), (1, 32)), "bfloat16").read(Box((0, 0), (1, 2)))
    assert found.tolist() == [[-2, 12]]


def test_grouped_experts_come_with_their_inputs_before_their_outputs():
    blocks = Blocks("fp4", (2, 3, 64), (1, 1, 32), is_grouped=True, is_transposed=True)
    arrays = Arrays(q=np.zeros((2, 3, 2, 16), np.uint8), s=np.full((2, 3, 2), 127, np.uint8))
    weight = arrays.weight(blocks, "bfloat16")
    assert (weight.shape, weight.slow_axis, weight.in_order) == ((2, 64, 3), 0, False)
    assert weight.read(Box((1, 10, 0), (2, 20, 2))).shape == (1, 10, 2)
    assert arrays.counts == {"q": 32, "s": 2}


@pytest.mark.parametrize("dtype", [np.uint8, E8])
def test_an_exponent_that_is_no_number_is_named_with_its_place(dtype):
    scales = np.full((4, 2), 127, np.uint8)
    scales[3, 1] = 255
    arrays = Arrays(q=np.zeros((4, 32), np.uint8), s=scales.view(dtype))
    weight = arrays.weight(Blocks("fp4", (4, 64), (1, 32)), "bfloat16")
    assert weight.read(Box((0, 0), (3, 64))).shape == (3, 64)
    with pytest.raises(QuantizedError, match=r"leaf 's': the scale at \[3, 1\] is 255, which is no number"):
        weight.read(Box((2, 0), (4, 64)))


def test_a_nan_stays_a_nan_and_a_sum_that_is_too_large_becomes_infinite():
    q = np.array([[0x7F, 0x7E]], np.uint8).view(F8)
    weight = Arrays(q=q, s=np.array([[1e38]], np.float32)).weight(Blocks("float8", (1, 2), (1, 2)), "float16")
    assert np.array_equal(weight.read(Box((0, 0), (1, 2))), [[np.nan, np.inf]], equal_nan=True)


def test_a_cast_gives_the_same_products_in_another_dtype():
    arrays = Arrays(q=np.array([[1.125]], F8), s=np.array([[1 + 2**-20]], np.float32))
    weight = arrays.weight(Blocks("float8", (1, 1), (1, 1)), "bfloat16")
    weight.dense_name = "dense"
    assert weight.cast("float32").dense_name == "dense"
    assert weight.cast("float32").read(Box((0, 0), (1, 1))) == np.float32(1.125) * np.float32(1 + 2**-20)


def test_a_weight_with_one_axis_has_one_scale():
    arrays = Arrays(q=np.arange(1, 5).astype(F8), s=np.array(2, np.float32))
    weight = arrays.weight(Blocks("float8", (4,), (4,)), "float32")
    assert weight.read(Box((1,), (3,))).tolist() == [4, 6]
