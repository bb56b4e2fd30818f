"""Follow a run from another job: wait for its steps, and score them. No jax."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.run_steps import Scores, found_of, score_name, step_at, steps_if_there
from eformer._engine.record.policies import metric_from
from eformer._engine.stores.base import update_file
from eformer._engine.stores.locate import store_at
from eformer._engine.tasks.interrupts import uninterrupted
from eformer.errors import EformerError, VersionError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from eformer._engine.formats.run_steps import Step

logger = logging.getLogger("eformer")


def follow(
    path: str | os.PathLike[str],
    *,
    after: int | None = None,
    poll: float = 10.0,
    timeout: float | None = None,
) -> Iterator[Step]:
    """Yield every step of a run as it appears, whole, in the order of the numbers.

    after     begin after this step; None begins with the first step of the run
    poll      seconds between two listings of the run
    timeout   end if no new step has appeared for so many seconds; None never ends

    Hold a step while you use it, because the run may remove it. Steps that are saved again after the run was rewound
    are not yielded again. A damaged step is logged and left out. A step of a newer version raises VersionError.

    Example:

        >>> for step in checkpoint.follow("run"):
        ...     with step.hold() as path:
        ...         checkpoint.score("run", step.number, {"eval.loss": evaluate(path)})
    """
    last = -1 if after is None else after
    since, told = time.monotonic(), set[str]()
    while True:
        for step in _newer(path, last):
            problem = _problem(step)  # read now: the step may have gone while the caller used the last one
            if problem is None:
                yield step
                last, since = step.number, time.monotonic()
            elif step.path not in told and step.number in {there.number for there in _newer(path, last)}:
                logger.warning("step %d is left out: %s", step.number, problem)
                told.add(step.path)
        if timeout is not None and time.monotonic() - since >= timeout:
            return
        left = poll if timeout is None else since + timeout - time.monotonic()
        time.sleep(max(0.0, min(poll, left)))


def _problem(step: Step) -> str | None:
    """Return why a step is damaged, or None if it is whole. Raise VersionError for a step of a newer version."""
    try:
        found_of(step)
    except VersionError:
        raise
    except (EformerError, OSError):  # `problem` describes it
        pass
    return step.problem()


def _newer(path: str | os.PathLike[str], last: int) -> list[Step]:
    return [
        step for step in steps_if_there(path) if step.number > last
    ]  # an empty list: the run has not begun


@uninterrupted
def score(path: str | os.PathLike[str], step: int, metrics: Mapping[str, Any]) -> None:
    """Add metrics to a step, in a small file beside it. The step itself does not change.

    `Step.metrics` includes the scores, and rules such as `Keep(best=3, by="eval.loss")` use them. A later score of the
    same name replaces the earlier score.

    path      the run
    step      the number of the step
    metrics   numbers by name

    Example:

        >>> checkpoint.score("run", 300, {"eval.loss": 0.25})
    """
    store = store_at(path)
    found = step_at(path, step)
    numbers = {name: metric_from(name, value) for name, value in metrics.items()}

    def added(data: bytes | None) -> bytes:
        both = {**(found.scores_in(data) if data else {}), **numbers}
        # Rules ignore NaN and infinity, and JSON has no numbers for them.
        finite = {name: value for name, value in both.items() if math.isfinite(value)}
        return msgspec.json.encode(Scores(found_of(found).manifest.digest, finite))

    update_file(store, score_name(found.name), added)
