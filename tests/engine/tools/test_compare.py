"""Compare the elements of two leaves, and their records."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.values import value_to_json
from eformer._engine.tools.compare import Comparison, Plain, describe, plain_became, recorded_difference
from support.trees import DTYPES


def compared(before, after, dtype=None):
    return Comparison().add(np.array(before, dtype), np.array(after, dtype))


@st.composite
def pairs(draw):
    """Draw two arrays of one dtype and of any bits."""
    dtype = draw(st.sampled_from(DTYPES))
    bits = 255 if dtype.itemsize > 1 else 1 if dtype == np.bool_ else 2 ** _width(dtype) - 1
    size = draw(st.integers(0, 9)) * dtype.itemsize
    raw = [np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8) & bits for _ in range(2)]
    return raw[0].view(dtype), raw[1].view(dtype)


def _width(dtype):
    """The bits of a dtype, by the number in its name: int4, float8_e5m2."""
    return int("".join(c for c in dtype.name.split("_")[0] if c.isdigit()))


def _differing_bytes(one, other):
    return sum(a.tobytes() != b.tobytes() for a, b in zip(one, other, strict=True))


@given(pairs(), st.booleans(), st.integers(0, 9))
def test_any_two_different_bit_patterns_of_any_dtype_are_told_apart(pair, with_norm, cut):
    one, other = pair
    found = Comparison(with_norm=with_norm)
    found.add(one[:cut], other[:cut]).add(one[cut:], other[cut:])  # in any boxes
    assert found.differing == _differing_bytes(one, other)
    assert found.elements == len(one)
    with np.errstate(invalid="ignore"):
        wide = one.astype(np.complex128), other.astype(np.complex128)
    assert found.became == np.count_nonzero(np.isfinite(wide[0]) & ~np.isfinite(wide[1]))
    assert not with_norm or found.special_now == np.count_nonzero(~np.isfinite(wide[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_can_be_compared(dtype):
    one = np.array([1, 0, 1, 1], np.int8).astype(dtype)
    other = np.array([1, 0, 1, 0], np.int8).astype(dtype)
    assert compared(one, one).differing == 0
    if np.array_equal(one, other):  # a dtype without zero
        return
    found = compared(one, other)
    assert (found.differing, found.share) == (1, 0.25)
    assert not found.farthest <= 0  # float8_e8m0fnu has no zero: there it is NaN


def test_bits_decide_not_the_equality_of_floats():
    found = compared([0.0, np.nan, np.inf], [-0.0, np.nan, np.inf])
    assert (found.differing, found.farthest, found.became) == (1, 0.0, 0)


def test_between_two_dtypes_values_decide():
    found = compared(np.array([1.0, np.nan, np.inf, 1 / 3]), np.array([1, np.nan, np.inf, 1 / 3], "f4"))
    assert found.differing == 1
    assert 0 < found.farthest < 1e-7


def test_infinity_and_nan_are_not_hidden():
    assert compared([1.0], [np.inf]).farthest == compared([1.0], [np.inf]).mean == math.inf
    assert math.isnan(compared([1.0, 5.0], [np.nan, 6.0]).farthest)
    assert compared([1.0, 5.0], [np.nan, 6.0]).largest == 1.0


@pytest.mark.parametrize(
    ("before", "after"),
    [("i8", "i8"), ("u8", "u8"), ("i8", "u8"), ("u8", "i8"), ("f8", "i8"), ("u8", "f4"), ("i8", "c16")],
)
def test_large_integers_differ_by_one_between_all_dtypes_that_hold_them(before, after):
    found = compared(np.array([2**62, 5, 0], before), np.array([2**62, 6, 0], after))
    assert (found.differing, found.largest) == (1, 1.0)


def test_integers_beyond_doubles_differ_by_one_at_both_ends():
    assert compared([2**63 - 1, -(2**63)], [2**63 - 2, -(2**63) + 1], "i8").largest == 1.0
    assert compared([-(2**63)], [2**63 - 1], "i8").largest == 2.0**64
    assert compared(np.array([2**53 + 1]), np.array([2.0**53])).differing == 1
    assert compared(np.array([-5]), np.array([-5 + 2.0**-50])).differing == 1


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_the_relative_change_does_not_depend_on_the_scale(scale):
    found = compared(np.full(9, 2.0) * scale, np.full(9, 3.0) * scale)
    assert found.relative == pytest.approx(0.5)


def test_a_change_from_zero_is_infinite_and_one_beyond_doubles_is_none():
    assert compared([0.0], [1.0]).relative == math.inf
    assert compared([1.7e308], [-1.7e308]).relative is None
    assert compared([0.0], [-0.0]).relative == 0.0


def test_a_nan_that_stays_is_neither_a_change_nor_new():
    found = compared([np.nan, 1.0, np.inf], [np.nan, np.nan, 2.0])
    assert (found.became_nan, found.became_inf, found.healed, found.special_now) == (1, 0, 1, 2)


def plain(value):
    return Plain(value_to_json(value))


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [(1, 1, False), (1, 1.0, True), (1, "1", True), (0.0, -0.0, True), (math.nan, math.nan, False),
     (True, 1, True), (2**53, 2**53 + 1, True), ("x" * 300, "x" * 299 + "y", True), (None, None, False)],
)  # fmt: skip
def test_plain_values_are_compared_as_they_are_recorded(before, after, differs):
    assert recorded_difference(plain(before), plain(after)) is differs


@pytest.mark.parametrize(
    ("before", "after", "became"),
    [(1.0, math.nan, (1, 0)), (3, -math.inf, (0, 1)), (math.inf, math.nan, (0, 0)), ("x", math.nan, (0, 0)),
     (1j, complex(0, math.inf), (0, 1)), (np.float32(1), np.float32(np.nan), (1, 0)), (1.0, "nan", (0, 0))],
)  # fmt: skip
def test_a_plain_number_that_was_finite_may_become_nan_or_infinite(before, after, became):
    assert plain_became(plain(before), plain(after)) == became


def test_a_value_of_which_only_the_repr_was_recorded_is_described_and_compared():
    one, other = Plain({"opaque": "a:B 1"}), Plain({"opaque": "a:B 2"})
    assert recorded_difference(one, other)
    assert plain_became(one, other) == (0, 0)
    assert "was not recorded" in describe(one)
