"""Remember the metrics of removed steps, so that the curves of a page begin where the run began. No jax.

The file is a convenience: it is replaced whole, its size is bounded, and a failure to write it is logged.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.record.step_names import step_number
from eformer._engine.record.values import MALFORMED_JSON, json_decoder
from eformer._engine.runs.steps import Step
from eformer._engine.stores.base import read_whole, update_file
from eformer.errors import EformerError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eformer._engine.stores.base import Store

logger = logging.getLogger("eformer")

REMOVED_FILE = "removed-steps.jsonl"  # in the directory of a run
_MOST_BYTES = 2**18  # beyond it, every second of the remembered steps is forgotten

Metrics = dict[str, float | None]  # None stands for a number that is not finite


class _Line(msgspec.Struct, frozen=True):
    step: int
    metrics: Metrics


def remember_metrics(store: Store, names: Iterable[str]) -> None:
    """Write down the metrics of steps that are about to be removed. Log a failure, and do not raise it."""
    try:
        new = dict(_metrics_of(store, names))
        if not new.items() <= removed_metrics(store).items():
            update_file(store, REMOVED_FILE, lambda data: _bounded(_parsed(data) | new))
    except (EformerError, OSError) as error:
        logger.warning("%s: the metrics of removed steps could not be written: %s", store.url, error)


def forget_metrics_after(store: Store, step: int | None) -> None:
    """Forget the removed steps that the run has left behind; all for None, which stands for a run that starts anew."""
    with suppress(EformerError, OSError):
        known = removed_metrics(store)
        if any(step is None or number > step for number in known):
            update_file(store, REMOVED_FILE, lambda data: _bounded(_until(_parsed(data), step)))


def removed_metrics(store: Store) -> dict[int, Metrics]:
    """Return the metrics of the removed steps that are remembered, by number; none if the file cannot be read."""
    try:
        return _parsed(read_whole(store, REMOVED_FILE)[0])
    except (EformerError, OSError):
        return {}


def _metrics_of(store: Store, names: Iterable[str]) -> Iterable[tuple[int, Metrics]]:
    """Yield the metrics of the steps that have any."""
    for name in names:
        number = step_number(name)
        with suppress(EformerError, OSError):
            if number is not None and (found := Step(number, store.path_to(name)).metrics):
                yield number, {key: one if math.isfinite(one) else None for key, one in found.items()}


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
    lines = [msgspec.json.encode(_Line(*one)) for one in sorted(known.items())]
    while sum(map(len, lines)) > _MOST_BYTES and len(lines) > 1:
        lines = lines[::-2][::-1]  # the newest stays
    return b"".join(line + b"\n" for line in lines)
