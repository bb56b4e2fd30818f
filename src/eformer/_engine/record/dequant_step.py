"""Compute numbers from quantised elements by a rule, whose axes tell which elements share a scale: `(h k/128)`.

A group such as `(h k)` is divided into its axes first, so that blocks may end with each head.

Tests: tests/engine/record/test_dequant_step.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eformer._engine.record.axes import Layout, all_names, lattice, size_of
from eformer._engine.record.dequantized import Blocks, Dequantized
from eformer._engine.record.lazy_arrays import Rearranged, SourceBlock
from eformer._engine.record.notation import ONE
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.record.axes import Sizes
    from eformer._engine.record.notation import Axis, ScalesPattern
    from eformer._engine.record.planned import LazyArray


def digits_of(axes: Sequence[Axis]) -> tuple[str, ...]:
    """Return the axes in the axes of an array, in order."""
    return tuple(name for axis in axes for name in all_names(axis))


def dequantized_by(
    scales: ScalesPattern, name: str, array: LazyArray, axes: Sequence[Axis], sizes: Sizes, found: LazyArray
) -> Dequantized:
    """Return the numbers of an array with these axes, as float32. The result has an axis for each of `digits_of(axes)`.

    Raise FormatError if the scales `found` do not fit.
    """
    digits = digits_of(axes)
    _require_codes(scales, name, array, digits)
    shared = dict.fromkeys(digits_of(scales.leaf.axes or ()), 1) | dict(scales.shared)
    shape = tuple(sizes[digit] for digit in digits)
    blocks = Blocks("float8", shape, tuple(max(1, shared.get(d, sizes[d])) for d in digits))
    _require_grid(scales, name, array, sizes, found)
    counts = dict(zip(digits, blocks.grid, strict=True))
    weight = _divided(array, axes, digits, sizes)
    grid = _divided(found, scales.leaf.axes or (), [d if d in shared else ONE for d in digits], counts)
    numbers = Dequantized(weight, grid, blocks, "float32")
    numbers.dense_name, numbers.is_changed = name, True
    return numbers


def _divided(
    array: LazyArray, axes: Sequence[Axis], to: Sequence[Axis], sizes: Mapping[str, int]
) -> LazyArray:
    """Return an array with other axes of the same elements."""
    layout = Layout(tuple(lattice(a, 0, sizes) for a in axes), tuple(lattice(a, 0, sizes) for a in to))
    part = SourceBlock(layout, {(): array})
    return array if part.is_all else Rearranged([part], [size_of(axis, sizes) for axis in to])


def _require_codes(scales: ScalesPattern, name: str, array: LazyArray, digits: Sequence[str]) -> None:
    dtype = array.dtype
    if dtype.itemsize > 1 or not (dtype.name.startswith("float8") or dtype.name == "int8") or not digits:
        found = f"{dtype}{list(array.shape)}"
        raise FormatError(
            f"`dequant {scales}` needs float8 or int8 elements with an axis, and {name} is {found}; pass dequant=False"
        )


def _require_grid(scales: ScalesPattern, name: str, array: LazyArray, sizes: Sizes, found: LazyArray) -> None:
    shared = dict(scales.shared)
    counts = {axis: -(-size // shared.get(axis, 1)) for axis, size in sizes.items()}
    wanted = tuple(size_of(axis, counts) for axis in scales.leaf.axes or ())
    if found.shape != wanted:
        raise FormatError(
            f"the scales {list(found.shape)} do not fit {name} {list(array.shape)}: {scales} is {list(wanted)}"
        )
