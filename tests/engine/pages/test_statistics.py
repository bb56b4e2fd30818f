"""Statistics of arrays that are read box by box, against numpy in double precision."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.pages import statistics
from eformer._engine.pages.statistics import Collector
from support.trees import DTYPES, arrays


def collected(array, cuts=()):
    """The statistics of an array that comes in boxes."""
    collector = Collector(array.dtype)
    for box in np.split(np.ascontiguousarray(array).reshape(-1), sorted(cuts)):
        collector.add(box)
    return collector.result()


def doubles(array):
    with np.errstate(all="ignore"):
        if "complex" in array.dtype.name:
            return np.abs(array.astype(np.complex128)).reshape(-1)
        return array.astype(np.float64).reshape(-1)


@given(arrays(), st.lists(st.integers(0, 64), max_size=3))
def test_statistics_are_those_of_numpy_whatever_the_boxes(array, cuts):
    found, wide = collected(array, cuts), doubles(array)
    assert found.size == array.size
    assert found.nans == np.isnan(wide).sum()
    assert found.positive_infinities == (wide == np.inf).sum()
    assert found.negative_infinities == (wide == -np.inf).sum()
    assert found.zeros == (wide == 0).sum()
    finite = wide[np.isfinite(wide)]
    if not finite.size:
        assert (found.least, found.greatest, found.mean, found.std, found.histogram) == (None,) * 5
        return
    assert (float(found.least), float(found.greatest)) == (finite.min(), finite.max())
    size = np.abs(finite).max()
    if size < 1e150:
        assert math.isclose(found.mean, finite.mean(), rel_tol=1e-9, abs_tol=1e-12 * size)
        assert math.isclose(found.std, finite.std(), rel_tol=1e-6, abs_tol=1e-9 * size)


def test_a_signalling_nan_is_counted_without_a_warning():
    assert collected(np.array([0x7F81, 0], "u2").view(ml_dtypes.bfloat16)).nans == 1


@given(arrays(), st.lists(st.integers(0, 64), max_size=3))
def test_a_histogram_counts_every_finite_element(array, cuts):
    found = collected(array, cuts)
    if found.histogram:
        counted = sum(found.histogram.counts) + found.histogram.below + found.histogram.above
        special = found.nans + found.positive_infinities + found.negative_infinities
        assert counted == found.size - special - (found.zeros if found.histogram.is_log else 0)
        assert len(found.histogram.counts) <= statistics.BINS


@pytest.mark.parametrize("dtype", [np.dtype("f4"), np.dtype("f8"), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_a_histogram_is_nearly_that_of_numpy(dtype):
    array = np.random.default_rng(0).standard_normal(200_000).astype(dtype)
    found = collected(array, [7, 70_000]).histogram
    expected, _ = np.histogram(array.astype("f8"), len(found.counts), (found.low, found.high))
    if dtype.itemsize > 2:  # by buckets of 1/128
        assert np.abs(np.cumsum(found.counts) - np.cumsum(expected)).max() < 0.01 * array.size
    else:
        assert list(found.counts) == list(expected)


def test_large_arrays_are_counted_like_small_ones():
    array = np.random.default_rng(0).standard_normal(300_000).astype("f4")
    whole, parts = collected(array), collected(array, range(0, 300_000, 1_000))
    assert whole.histogram == parts.histogram
    assert math.isclose(whole.std, array.astype("f8").std(), rel_tol=1e-12)


def test_scales_around_one_have_a_fine_histogram():
    array = (1 + 1e-3 * np.random.default_rng(0).standard_normal(10_000)).astype("f4")
    found = collected(array, [100]).histogram
    assert sum(count > 0 for count in found.counts) > 30


def test_elements_far_from_all_others_are_counted_outside():
    array = np.r_[np.random.default_rng(0).standard_normal(100_000), 1e6, -1e5, -1e5].astype("f4")
    found = collected(array)
    assert (found.histogram.below, found.histogram.above) == (2, 1)
    assert found.greatest == 1e6
    assert -10 < found.histogram.low < found.histogram.high < 10


def test_positive_elements_of_many_magnitudes_have_a_logarithmic_axis():
    array = (10.0 ** np.random.default_rng(0).uniform(-12, -2, 10_000)).astype("f4")
    found = collected(np.r_[array, np.zeros(5, "f4")])
    assert found.histogram.is_log
    assert found.zeros == 5
    assert min(found.histogram.counts[1:-1]) > 100


def test_few_whole_numbers_have_a_bin_each():
    found = collected(np.array([1000, 1001, 1001, 1003], "i8")).histogram
    assert (found.low, found.high, found.counts) == (999.5, 1003.5, (1, 2, 0, 1))


def test_whole_numbers_have_exact_ends():
    found = collected(np.array([-(2**63), 5, 2**63 - 1], "i8"))
    assert (found.least, found.greatest) == (-(2**63), 2**63 - 1)


def test_numbers_beyond_single_precision_are_counted():
    found = collected(np.array([-1e300, 1e300, 1e-300, 0.0], "f8"))
    assert (found.least, found.greatest, found.zeros) == (-1e300, 1e300, 1)
    assert sum(found.histogram.counts) == 4


def test_every_dtype_that_can_be_stored_has_statistics():
    assert all(statistics.has_statistics(dtype) for dtype in DTYPES)
    assert not statistics.has_statistics(np.dtype("datetime64[s]"))
