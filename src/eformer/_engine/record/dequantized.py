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
from eformer._engine.record.dtypes import dtype_from_name, name_of_dtype, unpack_nibbles
from eformer._engine.record.lazy_arrays import StoredLeaf, stored_leaves
from eformer._engine.record.planned import LazyArray
from eformer.errors import QuantizedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Array = np.ndarray[Any, Any]
Codes = Literal["float8", "fp4", "int4", "int8"]

EXPONENTS = ("uint8", "float8_e8m0fnu")  # dtypes of scales that are powers of two, stored with 127 added
GROUP_BYTES = 16  # of the last axis of a leaf that is stored in groups

_PER_ELEMENT: dict[Codes, int] = {"float8": 1, "fp4": 2, "int4": 8, "int8": 4}
_NO_NUMBER = 255  # as an exponent
_CHUNK = 2**16  # bytes at a time, so that their indexes stay in the processor's cache
_MANY = 2**11  # bytes with one scale, from which a table of their products is worth its time
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
        weight: LazyArray,
        scales: LazyArray,
        blocks: Blocks,
        dtype: str,
        whole: LazyArray | None = None,
    ) -> None:
        self.dense_name = ""
        self.weight, self.scales, self.whole, self.blocks = weight, scales, whole, blocks
        self.inners: Sequence[LazyArray] = [weight, scales, *([] if whole is None else [whole])]
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
        stored, first = self._stored(box)
        numbers = _multiply(stored, first, box, blocks, self._scales(box), self.dtype)
        return numbers.swapaxes(-1, -2) if blocks.is_transposed else numbers

    def _stored(self, box: Box) -> tuple[Array, int]:
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
        dtype = name_of_dtype(self.scales.dtype)
        if dtype in EXPONENTS:
            self._require_numbers(found.view(np.uint8), part)
        whole = None if self.whole is None else self.whole.read(Box.whole(self.whole.shape))
        factor = 1.0 if whole is None else float(whole.astype(np.float32).reshape(()))
        return _Scales(found.reshape(wanted.shape), dtype, factor, self.blocks.divides)

    def _require_numbers(self, exponents: Array, box: Box) -> None:
        """Refuse the exponent that stands for no number."""
        bad = np.argwhere(exponents == _NO_NUMBER)
        if len(bad):
            index = [int(at) + start for at, start in zip(bad[0], box.start, strict=True)]
            name = stored_leaves(self.scales)[0].name
            raise QuantizedError(
                f"leaf {name!r}: the scale at {index} is 255, which is no number; restore the file from its origin, or "
                "pass dequant=False for the stored leaves"
            )

    def forget(self) -> None:
        for inner in self.inners:
            inner.forget()


def dequantized_in(array: LazyArray) -> list[Dequantized]:
    """List the quantised weights behind an array."""
    if isinstance(array, Dequantized):
        return [array]
    return [found for inner in array.inners for found in dequantized_in(inner)]


def undequantized(array: LazyArray) -> list[StoredLeaf]:
    """List the stored leaves behind an array that are no part of a quantised weight."""
    if isinstance(array, StoredLeaf):
        return [array]
    if isinstance(array, Dequantized):
        return []
    return list(dict.fromkeys(leaf for inner in array.inners for leaf in undequantized(inner)))


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
    """Return the numbers of every byte: one, or two of 4 bits, the lower half first."""
    every = np.arange(256, dtype=np.uint8)
    if codes == "float8":
        numbers = every.view(dtype).astype(np.float32)
    elif codes == "fp4":
        numbers = unpack_nibbles(every).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    else:
        fields = unpack_nibbles(every) if codes == "int4" else every
        numbers = fields.astype(np.float32) - np.float32(8 if codes == "int4" else 128)
    return np.asarray(numbers.reshape(256, -1))


# ------------------------------------------------------------------------------------------- products


def _multiply(
    stored: Array, first: int, box: Box, blocks: Blocks, scales: _Scales, dtype: np.dtype[Any]
) -> Array:
    """Return the numbers of a box, whose axes are in stored order. `first` is the place of the first number in `stored`
    along the last axis."""
    numbers_of = _byte_numbers(blocks.codes, stored.dtype)
    codes, per_byte = stored.view(np.uint8), numbers_of.shape[1]
    height, width = (1, *blocks.block)[-2:]
    top, left = (0, *box.start)[-2:]
    *around, many, _ = (1, 1, *box.shape)
    spread = _each(scales.stored, box, blocks)
    grid = (1, 1, *spread.shape)
    grids = np.broadcast_to(spread.reshape(grid), (*grid[:2], *around[2:], *grid[-2:]))
    # Numbers around the box, which share a stored element with its first or last number, take the same scale.
    places = np.clip(np.arange(codes.shape[-1]) * per_byte + first, left, box.stop[-1] - 1)
    runs = _Runs.of(places // width - left // width)
    rows = np.arange(top, top + many) // height - top // height
    matrices = codes.reshape(-1, many, codes.shape[-1])
    numbers = _empty(
        (len(matrices), many, codes.shape[-1] * per_byte), dtype, is_transposed=blocks.is_transposed
    )
    for matrix, part, result in zip(matrices, grids.reshape(-1, *grid[-2:]), numbers, strict=True):
        _multiply_matrix(matrix, numbers_of, scales._replace(stored=part), rows, runs, blocks.codes, result)
    inside = numbers[..., left - first : left - first + box.shape[-1]]
    return inside.reshape(box.shape) if len(box.shape) != 3 else inside


def _each(scales: Array, box: Box, blocks: Blocks) -> Array:
    """Return the scales of each matrix of a box, if several matrices share one."""
    for axis, size in enumerate(blocks.block[:-2]):
        if size > 1 and scales.shape[axis] > 1:
            places = np.arange(box.start[axis], box.stop[axis]) // size
            scales = scales.take(places - places[0], axis)
    return scales


def _empty(shape: tuple[int, int, int], dtype: np.dtype[Any], *, is_transposed: bool) -> Array:
    """Return memory for matrices. Transposed, the columns of each lie together."""
    count, rows, columns = shape
    return np.empty((count, columns, rows), dtype).swapaxes(1, 2) if is_transposed else np.empty(shape, dtype)


class _Runs(NamedTuple):
    """Bytes of a row with one scale, run by run: the lengths of the first run, and of runs between it and the last."""

    head: int
    width: int

    @classmethod
    def of(cls, columns: Array) -> _Runs:
        """Find the runs of equal numbers, which begin at 0 and rise by one."""
        head, second = np.searchsorted(columns, (1, 2))
        return cls(int(head), max(1, int(second - head)))

    def spread(self, operation: np.ufunc, codes: Array, values: Array, out: Array) -> None:
        """Fill `out` with an operation of each column of `codes` and the column of `values` of its run."""
        head, width = self
        operation(codes[:, :head], values[:, :1], out=out[:, :head])
        whole = (codes.shape[1] - head) // width
        stop = head + whole * width
        if whole:
            shape = (-1, whole, width)
            middle = values[:, 1 : 1 + whole, None]
            parts = [array[:, head:stop].reshape(shape) for array in (codes, out)]
            operation(parts[0], middle, out=parts[1])
        if stop < codes.shape[1]:
            operation(codes[:, stop:], values[:, -1:], out=out[:, stop:])


def _multiply_matrix(
    codes: Array, numbers: Array, scales: _Scales, rows: Array, runs: _Runs, kind: Codes, result: Array
) -> None:
    """Fill `result` with the products of the rows of a matrix. `rows` numbers the scales of each row."""
    if scales.are_bytes and codes.size >= _CHUNK:
        table = _all_products(kind, numbers.tobytes(), *scales[1:], result.dtype)
        starts = scales.stored.view(np.uint8).astype(np.intp) * 256
        _look_up(codes, table, starts, rows, runs, result)
    elif codes.size // scales.stored.size >= _MANY:
        floats = scales.floats()
        step = max(1, _CHUNK * len(floats) // codes.size)  # rows of scales with one table
        for first in range(0, len(floats), step):
            some = slice(*np.searchsorted(rows, (first, first + step)))
            part = floats[first : first + step]
            table = _products(numbers, part.reshape(-1), result.dtype)
            starts = np.arange(part.size).reshape(part.shape) * 256
            _look_up(codes[some], table, starts, rows[some] - first, runs, result[some])
    else:
        _multiply_directly(codes, numbers, scales.floats(), rows, runs, result)


@lru_cache(8)
def _all_products(
    kind: Codes, numbers: bytes, scales: str, factor: float, divides: bool, dtype: np.dtype[Any]
) -> Array:
    """Return the products of every scale of one byte and every stored byte."""
    del kind
    of_bytes = np.frombuffer(numbers, np.float32).reshape(256, -1)
    return _products(of_bytes, _byte_scales(scales, factor, divides), dtype)


def _products(numbers: Array, scales: Array, dtype: np.dtype[Any]) -> Array:
    """Return the products of scales and the numbers of all bytes, as one word for each byte."""
    with np.errstate(all="ignore"):
        products = (numbers * scales[:, None, None]).astype(dtype)
    return products.reshape(-1).view(_WORDS[dtype.itemsize * numbers.shape[1]])


def _look_up(codes: Array, table: Array, starts: Array, rows: Array, runs: _Runs, result: Array) -> None:
    """Fill `result` from a table of products: a word for each byte, from the start of its scale."""
    index: Array = np.empty((_rows_at_once(codes), codes.shape[1]), np.intp)
    for some in _chunks(codes):
        part, into = codes[some], result[some]
        places = index[: len(part)]
        runs.spread(np.add, part, starts[rows[some]] if len(starts) > 1 else starts, places)
        if into.flags.c_contiguous:
            np.take(
                table, places, out=into.view(table.dtype), mode="clip"
            )  # other modes would copy the result
        else:
            into[...] = table.take(places, mode="clip").view(result.dtype)


def _multiply_directly(
    codes: Array, numbers: Array, scales: Array, rows: Array, runs: _Runs, result: Array
) -> None:
    """Fill `result` with the products of the rows of a matrix, without a table."""
    per_byte = numbers.shape[1]
    words = numbers.reshape(-1).view(_WORDS[4 * per_byte])
    in_numbers = _Runs(runs.head * per_byte, runs.width * per_byte)
    for some in _chunks(codes):
        floats = words.take(codes[some], mode="clip").view(np.float32)
        with np.errstate(all="ignore"):
            in_numbers.spread(np.multiply, floats, scales[rows[some]], floats)
            result[some] = floats.astype(result.dtype)


def _rows_at_once(codes: Array) -> int:
    return int(min(len(codes), max(1, _CHUNK // max(1, codes.shape[1]))))


def _chunks(codes: Array) -> Iterator[slice]:
    """Cut the rows of a matrix so that the indexes of a part stay in the processor's cache."""
    rows = _rows_at_once(codes)
    return (slice(start, start + rows) for start in range(0, len(codes), rows))
