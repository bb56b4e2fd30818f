"""Compute the weight of each checkpoint in a merge: of an average, of a schedule of decay, of an EMA. Pure.

A run with a constant learning rate whose last n checkpoints are averaged acts like a run that decays its learning rate
over these steps. The update between checkpoint i-1 and checkpoint i counts f(i/n) in the average, if checkpoint j of
0 ... n-1 has the weight f(j/n) - f((j+1)/n). Here f falls from f(0) = 1 to f(1) = 0 and is the schedule to imitate. The
average of equal weights is the linear schedule. This is warmup-stable-merge, arXiv 2507.17634, theorem 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable

WeightRule = Literal["mean", "wsm", "1-sqrt", "cosine"]
Weights = WeightRule | Sequence[float] | Mapping[str, float]

_DECAYS: dict[str, Callable[[float], float]] = {
    "wsm": lambda part: 1 - math.sqrt(part),
    "1-sqrt": lambda part: 1 - math.sqrt(part),
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
}


def weights_of(given: Weights, paths: Sequence[str]) -> list[float]:
    """Return the weight of each checkpoint, in their order, the oldest first.

    The weights of a caller stay as they are: a merge divides by their sum. Raise ValueError for weights that do not fit
    the checkpoints, or whose sum is zero.
    """
    if isinstance(given, str):
        return _by_rule(given, len(paths))
    weights = _by_path(given, paths) if isinstance(given, Mapping) else [float(weight) for weight in given]
    if len(weights) != len(paths):
        raise ValueError(
            f"weights= has {len(weights)} numbers, expected {len(paths)}, one for each checkpoint: {', '.join(paths)}"
        )
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"weights={weights}: every weight must be a finite number")
    if abs(math.fsum(weights)) < 1e-6 * max(map(abs, weights), default=0) or not any(weights):
        raise ValueError(
            f"weights={weights} add up to zero, and a merge divides by their sum; choose others, such as [1, 1, -1]"
        )
    return weights


def weights_of_ema(decay: float, number: int) -> list[float]:
    """Return the weights of an exponential moving average that starts at the first of several checkpoints."""
    if not 0 <= decay < 1:
        raise ValueError(f"ema={decay}: expected a number from 0 to less than 1, such as 0.9")
    first = decay ** (number - 1)
    return [first, *((1 - decay) * decay ** (number - 1 - j) for j in range(1, number))]


def _by_rule(rule: str, number: int) -> list[float]:
    if rule == "mean":
        return [1.0] * number
    if rule not in _DECAYS:
        known = ", ".join(map(repr, get_args(WeightRule)))
        raise ValueError(f"weights={rule!r}: expected {known}, a list of numbers, or a dict by path")
    share = [_DECAYS[rule](j / number) for j in range(number)]
    return [now - after for now, after in zip(share, [*share[1:], 0.0], strict=True)]


def _by_path(given: Mapping[str, float], paths: Sequence[str]) -> list[float]:
    by_path = {str(path): float(weight) for path, weight in given.items()}
    if set(by_path) != set(paths) or len(by_path) != len(paths):
        missing, unknown = sorted(set(paths) - set(by_path)), sorted(set(by_path) - set(paths))
        raise ValueError(
            f"weights= does not name the checkpoints: without a weight {missing}, unknown {unknown}; expected the "
            f"keys {list(paths)}"
        )
    return [by_path[path] for path in paths]
