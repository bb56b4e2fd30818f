"""The names of steps, which contain their number, such as `step-100`. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StepNames:
    """The names that a program gives to steps: text that matches `before`, a number, and the text `after`.

    A number has at most 18 ASCII digits. Steps of flax may be fractions.
    """

    def __init__(self, before: str, after: str = "", *, fractions: bool = False) -> None:
        digits = "[0-9]{1,18}" + (r"(?:\.[0-9]{1,18})?" if fractions else "")
        self._pattern = re.compile(f"({before})({digits}){re.escape(after)}")

    @classmethod
    def like(cls, pattern: str) -> StepNames:
        """Return the names that match a pattern with one `*` for the number."""
        before, star, after = pattern.partition("*")
        if not star or "*" in after or "/" in pattern or not (before or after).strip():
            raise ValueError(
                f"pattern={pattern!r}: expected a name with one * in place of the number, such as 'ema-*'"
            )
        return cls(re.escape(before), after)

    def parse(self, name: str) -> tuple[str, float] | None:
        """Return the text before the number, and the number; None for any other name."""
        if (match := self._pattern.fullmatch(name)) is None:
            return None
        return match[1], float(match[2]) if "." in match[2] else int(match[2])

    def numbers(self, names: Iterable[str]) -> dict[str, float]:
        """Return the number of each name that is the name of a step."""
        return {name: parsed[1] for name in names if (parsed := self.parse(name))}


_BEFORE = "(?:(?:step|run|checkpoint|ckpt)[-_]?)?"

STEPS = StepNames(_BEFORE)
OF_ANY_PROGRAM = StepNames(_BEFORE, fractions=True)
OF_FLAX = StepNames("checkpoint_", fractions=True)
OF_ORBAX = StepNames("(?:.*_)?")

# A run and the documented Checkpointer begin the names of steps with these.
OF_RUN, OF_CHECKPOINTER = "step-", "run-"


def step_name(number: int) -> str:
    """Return the name that a run gives to a step."""
    return f"{OF_RUN}{number}"


def run_name(number: int) -> str:
    """Return the name that the documented `Checkpointer` gives to a step."""
    return f"{OF_CHECKPOINTER}{number}"


def step_number(name: str) -> int | None:
    """Return the number in the name of a step: step-100, step_100, run-100, 100; None for any other name."""
    parsed = STEPS.parse(name)
    return None if parsed is None else int(parsed[1])
