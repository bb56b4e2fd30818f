"""Statistics of an array that is read box by box, once: range, moments, special values and a histogram. Pure.

Elements are counted by their 16 leading bits as a float32: 128 buckets for each power of two and sign. The counts do
not depend on the boxes, need no range in advance, and are fine enough for a histogram on a linear or a logarithmic
axis. Elements that lie close together and far from zero, such as scales around 1, are counted by their distance from
the mean of the first elements. For dtypes of at most 16 bits, the number of each bit pattern gives all statistics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

BINS = 40
_CHUNK = 2**16  # elements that are widened together: they stay in the cache
_FEW = 2**13  # elements that are cheaper to sort than to count
_NARROW = 8.0  # a mean of more than so many deviations counts as far from zero
_BEYOND = 10.0  # a range is clipped if it is so many times as wide as the range of 99.8 % of the elements
_DECADES = 1000.0  # positive elements get a logarithmic axis if the middle 96 % span more than this


@dataclass(frozen=True, slots=True)
class Histogram:
    """Count elements in bins of equal width between `low` and `high`; on a logarithmic axis, of equal ratio.

    below, above   the number of finite elements outside of the bins; on a logarithmic axis zeros are not counted
    """

    low: float
    high: float
    counts: tuple[int, ...]
    is_log: bool = False
    below: int = 0
    above: int = 0


@dataclass(frozen=True, slots=True)
class Statistics:
    """Describe the elements of an array. `least` to `std` are of finite elements alone; None without finite elements.

    of_magnitudes   whether the statistics are of absolute values, as for complex numbers
    """

    size: int
    least: float | int | None = None
    greatest: float | int | None = None
    mean: float | None = None
    std: float | None = None
    zeros: int = 0
    nans: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    histogram: Histogram | None = None
    of_magnitudes: bool = False


def has_statistics(dtype: np.dtype[Any]) -> bool:
    """Tell whether elements of this dtype are numbers."""
    return dtype.kind not in "mMSUOT"


class Collector:
    """Collect the statistics of an array, box by box, in any order and from one thread at a time."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._counts: _PatternCounts | _WideCounts
        is_narrow = dtype.itemsize <= 2 and "complex" not in dtype.name
        self._counts = _PatternCounts(dtype) if is_narrow else _WideCounts(dtype)

    def add(self, box: Array) -> None:
        row = np.ascontiguousarray(box).reshape(-1)
        for start in range(0, row.size, _CHUNK):
            self._counts.add(row[start : start + _CHUNK])

    def result(self) -> Statistics:
        return self._counts.result()


class _Tally:
    """Count whole numbers of at most 16 bits: a few in a list, many in a table."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.dense: Array | None = None
        self.few: list[Array] = []

    def add(self, keys: Array) -> None:
        if self.dense is None and sum(map(len, self.few)) + len(keys) <= _FEW:
            self.few.append(keys.copy())
            return
        if self.dense is None:
            self.dense = np.zeros(2 ** (8 * self.dtype.itemsize), np.int64)
        self.dense += np.bincount(keys, minlength=len(self.dense))

    def counts(self) -> tuple[Array, Array]:
        """Return the distinct numbers, and the count of each."""
        row = np.concatenate([np.empty(0, self.dtype), *self.few])
        if self.dense is None:
            keys, counts = np.unique(row, return_counts=True)
            return keys, counts
        self.few = []
        self.add(row)
        (found,) = self.dense.nonzero()
        return found.astype(self.dtype), self.dense[found]


# -------------------------------------------------------------------------------------------- narrow


class _PatternCounts:
    """Count every bit pattern of a dtype that has at most 16 bits."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.tally = _Tally(np.dtype(f"u{dtype.itemsize}"))

    def add(self, row: Array) -> None:
        self.tally.add(row.view(self.tally.dtype))

    def result(self) -> Statistics:
        patterns, counts = self.tally.counts()
        values = _as_doubles(patterns.view(self.dtype))
        finite = np.isfinite(values)
        points, weights = values[finite], counts[finite]
        moments = _Moments()
        moments.add_counted(points, weights)
        return _statistics(
            self.dtype,
            moments,
            (points, weights),
            size=int(counts.sum()),
            zeros=int(weights[points == 0].sum()),
            nans=int(counts[np.isnan(values)].sum()),
            positive_infinities=int(counts[values == np.inf].sum()),
            negative_infinities=int(counts[values == -np.inf].sum()),
        )


# ---------------------------------------------------------------------------------------------- wide


class _WideCounts:
    """Count elements of wider dtypes by their leading bits, and add up their moments."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.size = self.zeros = self.nans = self.above = self.below = 0
        self.moments = _Moments()
        self.centre: float | None = None
        self.tally = _Tally(np.dtype(np.uint16))

    def add(self, row: Array) -> None:
        self.size += len(row)
        wide = _as_doubles(row)
        finite = np.isfinite(wide) if self.dtype.kind not in "iu" else None
        if finite is not None and not finite.all():
            self.nans += int(np.count_nonzero(np.isnan(wide)))
            self.above += int(np.count_nonzero(wide == np.inf))
            self.below += int(np.count_nonzero(wide == -np.inf))
            row, wide = row[finite], wide[finite]
        if len(wide):
            self.zeros += len(wide) - int(np.count_nonzero(wide))
            ends = row if self.dtype.kind in "iu" else wide
            self.moments.add(wide, ends.min(), ends.max())
            if self.centre is None:
                self.centre = self.moments.far_centre()
            self.tally.add(_keys(wide - self.centre if self.centre else wide))

    def _points(self) -> tuple[Array, Array]:
        """Return the values that stand for the buckets, and the number of elements in each."""
        keys, counts = self.tally.counts()
        points = (keys.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        if self.dtype.kind not in "iu":  # the middle of the bucket; whole numbers are the edge itself
            points *= 1 + 2.0**-8
        points += self.centre or 0.0
        return np.clip(points, float(self.moments.least), float(self.moments.greatest)), counts

    def result(self) -> Statistics:
        return _statistics(
            self.dtype,
            self.moments,
            self._points(),
            size=self.size,
            zeros=self.zeros,
            nans=self.nans,
            positive_infinities=self.above,
            negative_infinities=self.below,
        )


def _as_doubles(row: Array) -> Array:
    """Return the elements in double precision, and complex numbers as absolute values."""
    with np.errstate(all="ignore"):
        if "complex" in row.dtype.name:  # also complex dtypes of ml_dtypes
            return np.abs(row.astype(np.complex128))
        doubles: Array = row.astype(np.float64)
        return doubles


_LARGEST = float(np.finfo(np.float32).max)


def _keys(wide: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        singles = wide.astype(np.float32)
    beyond = np.isinf(singles)
    if beyond.any():  # finite, but larger than any float32: the last bucket
        singles[beyond] = np.copysign(_LARGEST, singles[beyond])
    keys: Array = (singles.view(np.uint32) >> 16).astype(np.uint16)
    return keys


class _Moments:
    """Merge range, mean and variance of boxes, by the formula of Chan, Golub and LeVeque."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.least: Any = math.inf
        self.greatest: Any = -math.inf

    def add(self, wide: Array, least: Any, greatest: Any) -> None:
        scale = max(abs(float(least)), abs(float(greatest)))
        if scale > 1e150:  # squares would overflow
            with np.errstate(over="ignore", invalid="ignore"):
                mean = float((wide / len(wide)).sum())
                self._merge(len(wide), mean, math.inf, least, greatest)
            return
        mean = float(wide.mean())
        away = wide - mean
        away *= away  # a dot product would start the threads of a BLAS
        self._merge(len(wide), mean, float(away.sum()), least, greatest)

    def add_counted(self, points: Array, counts: Array) -> None:
        """Add elements, given as distinct values and their counts."""
        if len(points):
            number = int(counts.sum())
            mean = float((points * (counts / number)).sum())
            squares = float((counts * (points - mean) ** 2).sum())
            self._merge(number, mean, squares, points.min(), points.max())

    def _merge(self, count: int, mean: float, squares: float, least: Any, greatest: Any) -> None:
        total = self.count + count
        delta = mean - self.mean
        self.mean += delta * (count / total)
        self.squares += squares + delta * delta * (self.count * (count / total))
        self.count = total
        self.least, self.greatest = min(self.least, least), max(self.greatest, greatest)

    def far_centre(self) -> float:
        """Return the mean, rounded, if all elements are close to it and far from zero; else 0."""
        if not _NARROW * self.std < abs(self.mean) < 2.0**52:
            return 0.0
        return float(round(self.mean)) if abs(self.mean) >= 256 else float(np.float32(self.mean))

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count)


def _statistics(
    dtype: np.dtype[Any], moments: _Moments, points: tuple[Array, Array], **counts: Any
) -> Statistics:
    found = Statistics(**counts, of_magnitudes="complex" in dtype.name)
    if not moments.count:
        return found
    is_whole = dtype.kind in "iub" or dtype.name.startswith(("int", "uint"))
    number = int if is_whole else float
    return replace(
        found,
        least=number(moments.least),
        greatest=number(moments.greatest),
        mean=moments.mean,
        std=moments.std,
        histogram=_histogram(*_sorted(points, moments), is_whole=is_whole),
    )


# ----------------------------------------------------------------------------------------- histogram


def _sorted(points: tuple[Array, Array], moments: _Moments) -> tuple[Array, Array]:
    """Return the points in order, with the exact ends in place of the first and the last."""
    order = np.argsort(points[0], kind="stable")
    values, counts = points[0][order], points[1][order]
    if len(values) > 1:
        values[0], values[-1] = float(moments.least), float(moments.greatest)
    return values, counts


def _histogram(points: Array, counts: Array, *, is_whole: bool) -> Histogram:
    """Choose the axis by the distribution, and count."""
    least, greatest = float(points[0]), float(points[-1])
    if least == greatest:
        return Histogram(least, greatest, (int(counts.sum()),))
    if is_whole and greatest - least < BINS:
        bins = int(greatest - least) + 1
        return _counted(points, counts, least - 0.5, greatest + 0.5, bins)
    if least >= 0 and (found := _logarithmic(points, counts)):
        return found
    low, high = _central(points, counts)
    return _counted(points, counts, low, high, BINS)


def _counted(points: Array, counts: Array, low: float, high: float, bins: int) -> Histogram:
    inside = (points >= low) & (points <= high)
    # Halved, because the width of the whole range may overflow.
    places = (points[inside] / 2 - low / 2) / (high / 2 - low / 2)
    numbers = np.minimum((places * bins).astype(np.int64), bins - 1)
    found = np.bincount(numbers, counts[inside], minlength=bins)
    return Histogram(
        low,
        high,
        tuple(int(n) for n in found),
        below=int(counts[points < low].sum()),
        above=int(counts[points > high].sum()),
    )


def _logarithmic(points: Array, counts: Array) -> Histogram | None:
    """Count on a logarithmic axis; return None if most positive elements are of a similar size."""
    some = points > 0
    points, counts = points[some], counts[some]
    if not _quantile(points, counts, 0.98) / max(_quantile(points, counts, 0.02), 5e-324) > _DECADES:
        return None
    low, high = _quantile(points, counts, 0.001), float(points[-1])
    found = _counted(np.log2(points), counts, math.log2(low), math.log2(high), BINS)
    return Histogram(low, high, found.counts, True, found.below, found.above)


def _central(points: Array, counts: Array) -> tuple[float, float]:
    """Return the ends of the axis: the least and greatest element, unless a few elements are far from the rest."""
    low, high = _quantile(points, counts, 0.001), _quantile(points, counts, 0.999)
    width = high - low
    least, greatest = float(points[0]), float(points[-1])
    if not 0 < width < math.inf or not greatest - least > _BEYOND * width:
        return least, greatest
    return max(least, low - width / 2), min(greatest, high + width / 2)


def _quantile(points: Array, counts: Array, part: float) -> float:
    upto = np.cumsum(counts)
    return float(points[min(int(np.searchsorted(upto, part * upto[-1])), len(points) - 1)])
