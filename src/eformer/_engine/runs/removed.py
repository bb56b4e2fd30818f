"""Remember the metrics of removed steps, so that the curves of a page begin where the run began. No jax.

The file is a convenience: it is replaced whole, its size is bounded, and a failure to write it is logged. A removal
never fails because of it.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.record.names import is_text
from eformer._engine.record.values import MALFORMED_JSON, json_decoder
from eformer._engine.stores.base import read_whole, update_file
from eformer.errors import EformerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from eformer._engine.formats.run_steps import Step
    from eformer._engine.stores.base import Store

logger = logging.getLogger("eformer")

REMOVED_FILE = "removed-steps.jsonl"  # in the directory of a run
_MOST_BYTES = 2**18  # beyond it, half of the remembered steps are forgotten

Metrics = dict[str, float | None]  # None stands for a number that is not finite


class _Line(msgspec.Struct, frozen=True):
    step: int
    metrics: Metrics


def remember_metrics(store: Store, doomed: Iterable[Step]) -> None:
    """Write down the metrics of steps that are about to be removed. Log a failure, and do not raise it."""
    new = dict(_metrics_of(doomed))

    def added(data: bytes | None) -> bytes | None:
        known = _parsed(data)
        return None if new.items() <= known.items() else _bounded(known | new)

    if new:
        _update(store, added)


def forget_metrics_after(store: Store, step: int | None) -> None:
    """Forget the removed steps that the run has left behind; all for None, which stands for a run that starts anew."""
    if any(step is None or number > step for number in removed_metrics(store)):
        _update(store, lambda data: _bounded(_until(_parsed(data), step)))


def _update(store: Store, change: Callable[[bytes | None], bytes | None]) -> None:
    try:
        update_file(store, REMOVED_FILE, change)
    except (EformerError, OSError, ValueError) as error:
        logger.warning("%s: the metrics of removed steps could not be written: %s", store.url, error)


def removed_metrics(store: Store) -> dict[int, Metrics]:
    """Return the metrics of the removed steps that are remembered, by number; none if the file cannot be read."""
    try:
        return _parsed(read_whole(store, REMOVED_FILE)[0])
    except (EformerError, OSError):
        return {}


def _metrics_of(doomed: Iterable[Step]) -> Iterator[tuple[int, Metrics]]:
    """Yield the metrics of the steps that have any. A name that is no valid text has no place in the file."""
    for step in doomed:
        with suppress(EformerError, OSError):
            found = {name: value for name, value in step.metrics.items() if is_text(name)}
            if found:
                yield step.number, {name: one if math.isfinite(one) else None for name, one in found.items()}


def _parsed(data: bytes | None) -> dict[int, Metrics]:
    found = {}
    for line in (data or b"").splitlines():
        with suppress(*MALFORMED_JSON):
            one = json_decoder(_Line).decode(line)
            found[one.step] = one.metrics
    return found


def _until(known: dict[int, Metrics], step: int | None) -> dict[int, Metrics]:
    return {number: metrics for number, metrics in known.items() if step is not None and number <= step}


def _bounded(known: dict[int, Metrics]) -> bytes:
    lines = {number: msgspec.json.encode(_Line(number, known[number])) + b"\n" for number in sorted(known)}
    while sum(map(len, lines.values())) > _MOST_BYTES and len(lines) > 1:
        lines = {number: lines[number] for number in _thinned([*lines])}
    return b"".join(lines.values())


def _thinned(numbers: Sequence[int]) -> Iterable[int]:
    """Return at most half of the numbers, evenly spread: a part that was thinned before loses no more than the rest.
    The last stays, and of four or more the first."""
    if len(numbers) < 4:
        return numbers[-1:]
    first, last, gaps = numbers[0], numbers[-1], len(numbers) // 2 - 1
    wanted = (first + (last - first) * n // gaps for n in range(gaps + 1))
    return dict.fromkeys(numbers[bisect_left(numbers, number)] for number in wanted)
