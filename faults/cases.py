"""What one fault is, and the words that say what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# The old checkpoint is there, the new one, or an error says what is damaged.
OLD, NEW, REFUSED = "old", "new", "refused"
PASSED = "passed"  # of a file of tests
SOUND = (OLD, NEW, REFUSED, PASSED)

FAILURES = {
    "wrong": "a load gave values that were never saved",
    "lost": "a complete checkpoint cannot be loaded",
    "undone": "the checkpoint of a save that had returned is gone after a power cut; the checkpoint before it loads",
    "hung": "a process did not end in time",
    "crashed": "a process died by itself, or an error does not name the file",
    "litter": "the next save left a file behind, or failed",
    "failed": "a test failed",
}

VOID = "void"  # the fault did not happen, and is not counted: the save ended before
OVER = "over"  # there are no more cases of this kind and layout


@dataclass(frozen=True, slots=True)
class Case:
    """One fault: the same kind, layout and seed give the same fault again."""

    kind: str
    layout: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.layout}/{self.seed}"

    @classmethod
    def parse(cls, text: str) -> Case:
        kind, layout, seed = text.rsplit("/", 2) if text.count("/") == 2 else ("", "", "")
        if not seed.isdecimal():
            raise ValueError(f"{text!r}: expected KIND/LAYOUT/SEED, as failures print it")
        return cls(kind, layout, int(seed))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case. `count` is the number of faults or loads in it."""

    word: str
    note: str = ""
    count: int = 1

    @property
    def is_failure(self) -> bool:
        return self.word in FAILURES

    def as_json(self) -> dict[str, Any]:
        return {"word": self.word, "note": self.note, "count": self.count}


def spread(seed: int, count: int) -> int:
    """Return a number below `count` for each seed below it, each once, far from that of the seed before."""
    step = max(1, round(count * 0.618))
    while math.gcd(step, count) > 1:
        step += 1
    return seed * step % count
