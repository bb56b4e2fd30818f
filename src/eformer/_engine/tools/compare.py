"""Compare two leaves, for `diff`, reports and the server: all three must agree. No jax."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eformer._engine.record.manifest import LeafEntry
from eformer._engine.record.text import count
from eformer._engine.record.values import value_from_json

if TYPE_CHECKING:
    from typing import Self

Array = np.ndarray[Any, Any]

_CHUNK = 2**16  # elements to widen at a time: few enough to stay in the cache
_MOST_SHOWN = 60  # characters of a plain value
_HALF = 2**32


# ------------------------------------------------------------------------------------------- records


class Plain:
    """A plain value, compared as it is recorded: NaN equals NaN, and 1 does not equal 1.0."""

    def __init__(self, recorded: Any) -> None:
        self.recorded = msgspec.json.encode(recorded, order="sorted")
        self._document = recorded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and self.recorded == other.recorded

    def __hash__(self) -> int:
        return hash(self.recorded)

    @property
    def value(self) -> Any:
        return value_from_json(self._document)

    @property
    def text(self) -> str:
        try:
            return repr(self.value)
        except (
            ValueError,
            RecursionError,
        ) as error:  # only the repr was recorded, or the number has too many digits
            return str(error)


def describe(leaf: LeafEntry | Plain) -> str:
    """Return the dtype and the shape of an array, or a plain value, shortened."""
    if isinstance(leaf, LeafEntry):
        return leaf.described
    text = leaf.text
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def recorded_difference(
    before: LeafEntry | Plain, after: LeafEntry | Plain, *, have_digests: bool = False
) -> bool | None:
    """Tell from the records whether two leaves differ; None if their elements must be compared.

    With `have_digests`, leaves of one dtype with equal digests are the same.
    """
    if isinstance(before, Plain) or isinstance(after, Plain):
        return before != after
    if before.shape != after.shape or before.key != after.key:
        return True
    is_known = have_digests and before.dtype == after.dtype and _digests(before) == _digests(after)
    return False if is_known else None


def _digests(entry: LeafEntry) -> object:
    return sorted(
        (extent.region or ((), ()), extent.digests, repr(extent.coding)) for extent in entry.extents
    )


def plain_became(
    before: LeafEntry | Plain | np.generic, after: LeafEntry | Plain | np.generic
) -> tuple[int, int]:
    """Return (1, 0) if a finite number became NaN, (0, 1) if it became infinite, else (0, 0).

    A number is a plain value, or the element of an array without axes. The elements of a `LeafEntry` are unknown here.
    """
    was: Any
    now: Any
    try:
        was, now = (leaf.value if isinstance(leaf, Plain) else leaf for leaf in (before, after))
    except ValueError:  # only the repr was recorded
        return 0, 0
    if not isinstance(was, (int, float, complex, np.generic)) or _is_special(was) or not _is_special(now):
        return 0, 0
    return (1, 0) if np.isnan(now) else (0, 1)


def number(array: Array) -> np.generic:
    """Return the only element of an array, in a dtype of numpy that holds it exactly."""
    found: np.generic = _numbers(array.reshape(1))[0]
    return found


def _is_special(value: Any) -> bool:
    """Tell whether a plain value is a number that is NaN or infinite."""
    return isinstance(value, (float, complex, np.generic)) and not np.isfinite(value)


def became_text(nan: int, inf: int) -> str:
    """Return the text for the number of elements that became NaN or infinite; "" if none did."""
    parts = [f"{word} in {count(n, 'element')}" for word, n in (("NaN", nan), ("Inf", inf)) if n]
    return f"became {' and '.join(parts)}" if parts else ""


# ------------------------------------------------------------------------------------------ elements


@dataclass(slots=True)
class Comparison:
    """Add up how the elements of a leaf differ, box by box.

    with_norm              compute `norm` and `special`, too; without it, equal boxes only cost a comparison of bytes
    differing              elements that differ: in their bits if the dtypes are equal, else in their values
    became_nan, became_inf elements that were finite before, and now are NaN or infinite
    healed                 elements that were NaN or infinite before, and now are finite
    unlike                 elements that differ, and are NaN or infinite on at least one side
    total, largest, change the sum, the maximum and the Euclidean norm of the distances of finite elements
    beyond                 the largest distance of `unlike` elements: infinity or NaN; 0 without such elements
    norm, special          the norm of the finite elements before, and the number of NaN and infinite elements before
    """

    with_norm: bool = True
    elements: int = 0
    differing: int = 0
    became_nan: int = 0
    became_inf: int = 0
    healed: int = 0
    unlike: int = 0
    special: int = 0
    total: float = 0.0
    largest: float = 0.0
    beyond: float = 0.0
    change: float = 0.0
    norm: float = 0.0

    def add(self, before: Array, after: Array) -> Self:
        was, now = (np.ascontiguousarray(array).reshape(-1) for array in (before, after))
        with np.errstate(all="ignore"):
            for start in range(0, was.size, _CHUNK):
                self._add(was[start : start + _CHUNK], now[start : start + _CHUNK])
        return self

    def merge(self, other: Comparison) -> Self:
        """Add the comparison of other boxes of the same leaf."""
        sums = ("elements", "differing", "became_nan", "became_inf", "healed", "unlike", "special", "total")
        for name in sums:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)
        self.beyond = float(np.maximum(self.beyond, other.beyond))  # NaN stays NaN
        self.change, self.norm = math.hypot(self.change, other.change), math.hypot(self.norm, other.norm)
        return self

    @property
    def became(self) -> int:
        return self.became_nan + self.became_inf

    @property
    def special_now(self) -> int:
        """Count the elements that are NaN or infinite after the change. Needs `with_norm`."""
        return self.special + self.became - self.healed

    @property
    def farthest(self) -> float:
        """Return the largest distance of all elements: NaN or infinity if an element became so."""
        return float(np.maximum(self.largest, self.beyond))  # NaN stays NaN

    @property
    def mean(self) -> float:
        """Return the mean distance of all elements: NaN or infinity if an element became so."""
        return self.beyond or self.total / max(self.elements, 1)

    @property
    def share(self) -> float:
        return self.differing / max(self.elements, 1)

    @property
    def relative(self) -> float | None:
        """Return the norm of the change, divided by the norm before.

        Infinity if the norm before is zero; None if a norm is too large for a double.
        """
        if not self.change:
            return 0.0
        if not self.norm:
            return math.inf
        if math.inf in (self.change, self.norm):
            return None
        return min(max(self.change / self.norm, sys.float_info.min), sys.float_info.max)

    def _add(self, before: Array, after: Array) -> None:
        self.elements += before.size
        differs = _unequal(before, after)
        differing = int(np.count_nonzero(differs))
        if not differing and not self.with_norm:
            return
        was = _numbers(before)
        if self.with_norm:
            self._add_norm(was)
        if differing:
            self.differing += differing
            now = _numbers(after)
            # Equal elements add nothing. Selecting costs more than adding, unless most elements are equal.
            if differing < was.size // 8:
                was, now = was[differs], now[differs]
            self._add_changes(was, now)

    def _add_norm(self, was: Array) -> None:
        finite = np.isfinite(was)
        if not finite.all():
            self.special += int(np.count_nonzero(~finite))
            was = was[finite]
        self.norm = math.hypot(self.norm, _norm(was))

    def _add_changes(self, was: Array, now: Array) -> None:
        finite = np.isfinite(was) & np.isfinite(now)
        if not finite.all():
            self._add_special(was[~finite], now[~finite])
            was, now = was[finite], now[finite]
        if was.size:
            distances = _distances(was, now)
            self.total += float(distances.sum())
            self.largest = max(self.largest, float(distances.max()))
            self.change = math.hypot(self.change, _norm(distances))

    def _add_special(self, was: Array, now: Array) -> None:
        """Add elements of which at least one is NaN or infinite."""
        was_finite, is_nan = np.isfinite(was), np.isnan(now)
        self.became_nan += int(np.count_nonzero(was_finite & is_nan))
        self.became_inf += int(np.count_nonzero(was_finite & ~is_nan))
        self.healed += int(np.count_nonzero(np.isfinite(now)))
        unlike = (was != now) & ~(np.isnan(was) & is_nan)
        if unlike.any():
            self.unlike += int(np.count_nonzero(unlike))
            distances = np.abs(_floats(was[unlike]) - _floats(now[unlike]))
            self.beyond = float(np.maximum(self.beyond, distances.max()))  # NaN stays NaN


def _unequal(before: Array, after: Array) -> Array:
    """Mark the elements that differ: in their bits, or for two dtypes in their values."""
    if before.dtype == after.dtype:
        bits: Array = _bits(before) != _bits(after)
        return bits if bits.ndim == 1 else np.any(bits, axis=1)
    was, now = _numbers(before), _numbers(after)
    if _is_long(was) or _is_long(now):
        (high, low), (high_now, low_now) = _halves(was), _halves(now)
        halves: Array = (high != high_now) | (low != low_now)
        return halves
    values: Array = (was != now) & ~(np.isnan(was) & np.isnan(now))
    return values


def _bits(row: Array) -> Array:
    size = row.dtype.itemsize
    return row.view(f"u{size}") if size <= 8 else row.view(np.uint64).reshape(len(row), size // 8)


def _numbers(row: Array) -> Array:
    """Cast to a dtype that holds every value exactly. 64-bit integers stay, because a double cannot hold them."""
    if row.dtype.kind in "mM":
        return row.view(np.int64)
    if "complex" in row.dtype.name:  # the dtypes of ml_dtypes included
        return row.astype(
            np.promote_types(row.dtype, np.complex128) if row.dtype.kind == "c" else np.complex128
        )
    return row if row.dtype.itemsize >= 8 else row.astype(np.float64)


def _floats(numbers: Array) -> Array:
    return numbers.astype(np.float64) if _is_long(numbers) else numbers


def _is_long(numbers: Array) -> bool:
    return numbers.dtype.kind in "iu"


def _halves(numbers: Array) -> tuple[Array, Array]:
    """Split each number into a multiple of 2**32 and the rest, both as floats. Their sum is exact.

    Not every machine has a float that holds all 64-bit integers.
    """
    if numbers.dtype.kind == "c":
        numbers = np.where(numbers.imag == 0, numbers.real, np.nan).astype(np.float64)
    low = np.fmod(numbers, numbers.dtype.type(_HALF))
    return _floats(numbers - low), _floats(low)


def _distances(was: Array, now: Array) -> Array:
    """Return the absolute differences of finite numbers in double precision."""
    if not _is_long(was) and not _is_long(now):
        wide = np.promote_types(np.promote_types(was.dtype, now.dtype), np.float64)
        distances: Array = np.abs(was.astype(wide) - now.astype(wide)).astype(np.float64)
        return distances
    (high, low), (high_now, low_now) = _halves(was), _halves(now)
    exact: Array = np.abs((high - high_now) + (low - low_now)).astype(np.float64)
    return exact


def _norm(numbers: Array) -> float:
    """Return the Euclidean norm, also of numbers whose squares are too large or too small for a double."""
    wide = np.abs(numbers) if numbers.dtype.kind == "c" else numbers
    wide = wide.astype(np.float64, copy=False)
    squares = float(np.square(wide).sum())
    if 1e-280 < squares < math.inf:
        return math.sqrt(squares)
    top = float(np.abs(wide).max(initial=0.0))
    return top * math.sqrt(float(np.square(wide / top).sum())) if 0 < top < math.inf else top
