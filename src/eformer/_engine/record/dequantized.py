"""Compute the numbers of quantised weights, box by box: each stored code times the scale of its block.

The product is a float32, which is rounded once, to the dtype of the result. Codes of 8 bits or less have at most 256
different products with one scale, so most numbers are looked up in tables of products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from eformer._engine.record.boxes import Box
from eformer._engine.record.dtypes import dtype_from_name, unpack_nibbles
from eformer._engine.record.planned import LazyArray
from eformer.errors import QuantizedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from eformer._engine.record.lazy_arrays import StoredLeaf

Array = np.ndarray[Any, Any]
Codes = Literal["float8", "fp4", "int4", "int8"]

EXPONENTS = ("uint8", "float8_e8m0fnu")  # dtypes of scales that are powers of two, stored with 127 added
GROUP_BYTES = 16  # of the last axis of a leaf that is stored in groups

_PER_ELEMENT: dict[Codes, int] = {"float8": 1, "fp4": 2, "int4": 8, "int8": 4}
_NO_NUMBER = 255  # as an exponent
_CHUNK = 2**16  # stored elements at a time, so that their indexes stay in the processor's cache
_MANY = 2**11  # elements with one scale, from which a table of their products is worth its time
_WORDS = {
    1: "uint8",
    2: "uint16",
    4: "uint32",
    8: "uint64",
    16: "complex128",
}  # dtypes that numpy copies fast


@dataclass(frozen=True, slots=True)
class Blocks:
    """How stored elements and scales become a weight.

    codes          the numbers that a stored element holds along the last axis
    shape          the shape of the weight, with its axes in stored order
    block          the numbers along each axis that share a scale
    is_grouped     the last axis of the stored leaf has the bytes of one scale, the axis before it counts the scales
    is_transposed  the last two axes of the weight change places
    divides        the scale of the whole weight divides the scales of the blocks; otherwise it multiplies them
    """

    codes: Codes
    shape: tuple[int, ...]
    block: tuple[int, ...]
    is_grouped: bool = False
    is_transposed: bool = False
    divides: bool = False

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the number of scales along each axis. The last block of an axis may be shorter."""
        return tuple(-(-size // block) for size, block in zip(self.shape, self.block, strict=True))

    @property
    def per_element(self) -> int:
        """Return how many numbers a stored element holds."""
        return _PER_ELEMENT[self.codes]

    def scales_of(self, box: Box) -> Box:
        """Return the box of the scales of a box of the weight."""
        start = tuple(first // size for first, size in zip(box.start, self.block, strict=True))
        stop = tuple(-(-last // size) for last, size in zip(box.stop, self.block, strict=True))
        return Box(start, stop)

    def exchanged(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return numbers of the axes in stored order for numbers in the order of the weight, or the reverse."""
        return (*numbers[:-2], numbers[-1], numbers[-2]) if self.is_transposed else numbers


class Dequantized(LazyArray):
    """A quantised weight as numbers of a dtype.

    `inners` are the leaves that it reads: the stored elements, their scales, and perhaps the scale of the whole weight.
    `dense_name` is its name in the dense model.
    """

    def __init__(
        self,
        weight: StoredLeaf,
        scales: StoredLeaf,
        blocks: Blocks,
        dtype: str,
        whole: StoredLeaf | None = None,
    ) -> None:
        self.dense_name = weight.name
        self.weight, self.scales, self.whole, self.blocks = weight, scales, whole, blocks
        self.inners: Sequence[StoredLeaf] = [weight, scales, *([] if whole is None else [whole])]
        self.shape, self.dtype = blocks.exchanged(blocks.shape), dtype_from_name(dtype)
        self.in_order = not blocks.is_transposed
        self.slow_axis = len(self.shape) - 1 if blocks.is_transposed and len(self.shape) == 2 else 0

    def cast(self, dtype: str) -> Dequantized:
        """Return the weight as numbers of another dtype."""
        other = Dequantized(self.weight, self.scales, self.blocks, dtype, self.whole)
        other.dense_name = self.dense_name
        return other

    def read(self, box: Box) -> Array:
        blocks, shape = self.blocks, box.shape
        if not box.size:
            return np.empty(shape, self.dtype)
        box = Box(blocks.exchanged(box.start), blocks.exchanged(box.stop))
        codes, first = self._codes(box)
        numbers = _multiply(codes, first, box, blocks, self._scales(box), self.dtype)
        return numbers.swapaxes(-1, -2) if blocks.is_transposed else numbers

    def _codes(self, box: Box) -> tuple[Array, int]:
        """Read the stored elements of a box. Return them, and the place of their first number along the last axis."""
        is_grouped = self.blocks.is_grouped
        unit = self.blocks.per_element * (GROUP_BYTES if is_grouped else 1)
        first, last = box.start[-1] // unit, -(-box.stop[-1] // unit)
        start, stop = (*box.start[:-1], first), (*box.stop[:-1], last)
        stored = self.weight.read(Box((*start, 0), (*stop, GROUP_BYTES)) if is_grouped else Box(start, stop))
        return np.ascontiguousarray(stored).reshape(*box.shape[:-1], -1), first * unit

    def _scales(self, box: Box) -> _Scales:
        """Read the scales of a box."""
        wanted, stored = self.blocks.scales_of(box), self.scales.shape
        axes = len(stored)
        part = Box(wanted.start[:axes], wanted.stop[:axes]) if math.prod(stored) > 1 else Box.whole(stored)
        found = self.scales.read(part)
        if self.scales.entry.dtype in EXPONENTS:
            self._require_numbers(found.view(np.uint8), part)
        whole = None if self.whole is None else self.whole.read(Box.whole(self.whole.shape))
        factor = 1.0 if whole is None else float(whole.astype(np.float32).reshape(()))
        return _Scales(found.reshape(wanted.shape), self.scales.entry.dtype, factor, self.blocks.divides)

    def _require_numbers(self, exponents: Array, box: Box) -> None:
        """Refuse the exponent that stands for no number."""
        bad = np.argwhere(exponents == _NO_NUMBER)
        if len(bad):
            index = [int(at) + start for at, start in zip(bad[0], box.start, strict=True)]
            raise QuantizedError(
                f"leaf {self.scales.name!r}: the scale at {index} is 255, which is no number; restore the file from "
                "its origin, or pass dequant=False for the stored leaves"
            )

    def forget(self) -> None:
        for inner in self.inners:
            inner.forget()


def dequantized_in(array: LazyArray) -> list[Dequantized]:
    """List the quantised weights behind an array."""
    if isinstance(array, Dequantized):
        return [array]
    return [found for inner in array.inners for found in dequantized_in(inner)]


class _Scales(NamedTuple):
    """Scales as they are stored, and the scale of the whole weight."""

    stored: Array
    dtype: str
    factor: float
    divides: bool

    @property
    def are_bytes(self) -> bool:
        return bool(self.stored.dtype.itemsize == 1)

    @property
    def values(self) -> Array:
        """Return the float32 of every byte, for scales of one byte."""
        return _byte_scales(self.dtype, self.factor, self.divides)

    def floats(self) -> Array:
        """Return the scales as float32."""
        if self.are_bytes:
            return self.values[self.stored.view(np.uint8)]
        return _combined(self.stored.astype(np.float32), self.factor, self.divides)


def _combined(scales: Array, factor: float, divides: bool) -> Array:
    with np.errstate(all="ignore"):
        combined: Array = scales / np.float32(factor) if divides else scales * np.float32(factor)
    return combined


@lru_cache(64)
def _byte_scales(dtype: str, factor: float, divides: bool) -> Array:
    every = np.arange(256, dtype=np.uint8)
    with np.errstate(all="ignore"):
        if dtype in EXPONENTS:
            return _combined(np.ldexp(np.float32(1), every.astype(np.int32) - 127), factor, divides)
        return _combined(every.view(dtype_from_name(dtype)).astype(np.float32), factor, divides)


@lru_cache(16)
def _byte_numbers(codes: Codes, dtype: np.dtype[Any]) -> Array:
    """Return the numbers of every byte: one of FP8, or two of FP4, the lower half first."""
    every = np.arange(256, dtype=np.uint8)
    is_fp4 = codes == "fp4"
    stored = unpack_nibbles(every).view(ml_dtypes.float4_e2m1fn) if is_fp4 else every.view(dtype)
    return np.asarray(stored, np.float32).reshape(256, -1)


# ------------------------------------------------------------------------------------------- products


def _multiply(
    codes: Array, first: int, box: Box, blocks: Blocks, scales: _Scales, dtype: np.dtype[Any]
) -> Array:
    """Return the numbers of a box. `first` is the place of the first number in `codes` along the last axis."""
    height, width = (1, *blocks.block)[-2:]
    top, left = (0, *box.start)[-2:]
    *around, many, _ = (1, 1, *box.shape)
    grid = (1, 1, *scales.stored.shape)
    grids = np.broadcast_to(scales.stored.reshape(grid), (*grid[:2], *around[2:], *grid[-2:]))
    # Numbers before the box, which share a stored element with its first number, take the same scale.
    places = np.maximum(np.arange(codes.shape[-1]) * blocks.per_element + first, left)
    columns, rows = places // width - left // width, np.arange(top, top + many) // height - top // height
    matrices = codes.reshape(-1, many, codes.shape[-1])
    numbers = np.empty((*matrices.shape, blocks.per_element), dtype)
    for matrix, stored, result in zip(matrices, grids.reshape(-1, *grid[-2:]), numbers, strict=True):
        _multiply_matrix(matrix, scales._replace(stored=stored), rows, columns, blocks, result)
    numbers = numbers.reshape(*box.shape[:-1], -1)
    return numbers[..., left - first : left - first + box.shape[-1]]


def _multiply_matrix(
    codes: Array, scales: _Scales, rows: Array, columns: Array, blocks: Blocks, result: Array
) -> None:
    """Fill `result` with the products of the rows of a matrix. `rows` and `columns` number the scales."""
    is_bytes = codes.dtype.itemsize == 1
    width = codes.shape[1] // scales.stored.shape[1]
    if is_bytes and scales.are_bytes and codes.size >= _CHUNK:
        table = _all_products(blocks.codes, codes.dtype, *scales[1:], result.dtype)
        _look_up(codes, table, scales.stored.view(np.uint8), rows, columns, result)
    elif is_bytes and width * len(rows) // (rows[-1] + 1) >= _MANY:
        numbers = _byte_numbers(blocks.codes, codes.dtype)
        for number, floats in enumerate(scales.floats()):
            some = slice(*np.searchsorted(rows, (number, number + 1)))
            table = _products(numbers, floats, result.dtype)
            tables = np.arange(len(floats))[None]
            _look_up(codes[some], table, tables, np.zeros_like(rows[some]), columns, result[some])
    else:
        _multiply_directly(codes, scales.floats(), rows, columns, blocks, result)


@lru_cache(8)
def _all_products(
    codes: Codes, of: np.dtype[Any], scales: str, factor: float, divides: bool, dtype: np.dtype[Any]
) -> Array:
    """Return the products of every scale of one byte and every stored byte."""
    return _products(_byte_numbers(codes, of), _byte_scales(scales, factor, divides), dtype)


def _products(numbers: Array, scales: Array, dtype: np.dtype[Any]) -> Array:
    """Return the products of scales and the numbers of all bytes, as one word for each byte."""
    with np.errstate(all="ignore"):
        products = (numbers * scales[:, None, None]).astype(dtype)
    return products.reshape(-1).view(_word(products))


def _word(numbers: Array) -> str:
    """Return the dtype that has the numbers of one stored element, which are on the last axis."""
    return _WORDS[numbers.dtype.itemsize * numbers.shape[-1]]


def _look_up(codes: Array, table: Array, scales: Array, rows: Array, columns: Array, result: Array) -> None:
    """Fill `result` from a table of products with 256 words for each scale."""
    codes = codes.view(np.uint8)
    starts = scales.astype(np.intp) * 256
    found = result.view(_word(result))[..., 0]
    is_one_row = len(starts) == 1
    before = starts[:, columns] if is_one_row else None
    for some in _chunks(codes):
        index = (starts[rows[some]][:, columns] if before is None else before) + codes[some]
        np.take(table, index, out=found[some], mode="clip")  # other modes would copy the result


def _multiply_directly(
    codes: Array, scales: Array, rows: Array, columns: Array, blocks: Blocks, result: Array
) -> None:
    for some in _chunks(codes):
        factors = scales[rows[some]][:, columns, None]
        with np.errstate(all="ignore"):
            result[some] = (_unpacked(codes[some], blocks) * factors).astype(result.dtype)


def _unpacked(codes: Array, blocks: Blocks) -> Array:
    """Return the numbers of stored elements as float32, with an axis for the numbers of one element."""
    if codes.dtype.itemsize == 1:
        return _byte_numbers(blocks.codes, codes.dtype)[codes.view(np.uint8)]
    bits = 32 // blocks.per_element
    shifts = np.arange(blocks.per_element, dtype=np.uint32) * np.uint32(bits)
    fields = (codes.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)
    return fields.astype(np.float32) - np.float32(2 ** (bits - 1))


def _chunks(codes: Array) -> Iterator[slice]:
    """Cut the rows of a matrix so that the indexes of a part stay in the processor's cache."""
    rows = max(1, _CHUNK // max(1, codes.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(codes), rows))
