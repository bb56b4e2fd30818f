"""The weights of a merge: rules, numbers, moving averages, and refusals."""

import math

import numpy as np
import pytest

from eformer._engine.record.merge_weights import weights_of, weights_of_ema

PATHS = ["a", "b", "c", "d"]


def test_the_mean_has_equal_weights():
    assert weights_of("mean", PATHS) == [1.0] * 4


def test_wsm_lets_updates_count_as_the_schedule_one_minus_sqrt():
    weights = weights_of("wsm", PATHS)
    counts = [sum(weights[i:]) for i in range(4)]  # of the update before each checkpoint
    np.testing.assert_allclose(counts, [1 - math.sqrt(i / 4) for i in range(4)], atol=1e-15)
    assert weights_of("1-sqrt", PATHS) == weights


def test_cosine_lets_updates_count_as_the_cosine():
    weights = weights_of("cosine", PATHS)
    counts = [sum(weights[i:]) for i in range(4)]
    np.testing.assert_allclose(counts, [(1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)], atol=1e-15)


def test_a_moving_average_is_the_recursion():
    average, numbers = 5.0, [5.0, 7.0, 1.0, 4.0]
    for number in numbers[1:]:
        average = 0.9 * average + 0.1 * number
    weights = weights_of_ema(0.9, 4)
    assert math.isclose(sum(w * x for w, x in zip(weights, numbers, strict=True)), average)
    assert weights_of_ema(0.0, 3) == [0.0, 0.0, 1.0]


def test_numbers_stay_as_they_are_and_a_dict_names_paths():
    assert weights_of([2, 1, 0, -1], PATHS) == [2.0, 1.0, 0.0, -1.0]
    assert weights_of({"b": 3, "a": 1}, ["a", "b"]) == [1.0, 3.0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("median", "weights='median': expected 'mean', 'wsm', '1-sqrt', 'cosine', a list of numbers"),
        ([1, 2], "weights= has 2 numbers, expected 4, one for each checkpoint: a, b, c, d"),
        ([1, 1, -1, -1], "add up to zero"),
        ([0, 0, 0, 0], "add up to zero"),
        ([1, 1, 1, math.nan], "every weight must be a finite number"),
        ({"a": 1, "e": 2}, r"without a weight \['b', 'c', 'd'\], unknown \['e'\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        weights_of(weights, PATHS)


@pytest.mark.parametrize("decay", [-0.1, 1.0, math.nan])
def test_a_decay_outside_of_its_range_is_refused(decay):
    with pytest.raises(ValueError, match="expected a number from 0 to less than 1"):
        weights_of_ema(decay, 3)
