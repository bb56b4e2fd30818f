"""What can go wrong, as a tree. Every error is also the builtin that people already catch.

EformerError
├── FormatError      (ValueError)   these bytes are not what their format says
│   └── CorruptionError             these bytes are not what was saved
├── NotFoundError    (FileNotFound- there is no checkpoint at this path
│                     Error)
├── MismatchError    (ValueError)   the data and the target disagree; lists every disagreement
├── StructureError   (ValueError)   a tree's structure cannot be recorded or rebuilt
├── LeafError        (TypeError,    a leaf cannot be stored, because of its type
│                     ValueError)   or of its value
└── ProcessError     (RuntimeError) another process failed, or does something else
    └── ProcessTimeoutError         ... or did not come in time; also a TimeoutError
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


_MOST_SHOWN = 50


class EformerError(Exception):
    """The root of all errors that eformer raises on its own account."""


class FormatError(EformerError, ValueError):
    """These bytes are not what their format says."""


class CorruptionError(FormatError):
    """These bytes are not what was saved: they changed, or are missing."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes that are not what was saved, or are not there. `leaf` is empty for bytes that belong to none."""

    leaf: str
    file: str
    start: int
    stop: int
    problem: str

    def __str__(self) -> str:
        where = f"bytes {self.start} to {self.stop} of {self.file}"
        return f"leaf {self.leaf!r}: {where} {self.problem}" if self.leaf else f"{where} {self.problem}"


class NotFoundError(EformerError, FileNotFoundError):
    """There is no checkpoint at this path."""


class MismatchError(EformerError, ValueError):
    """The data and the target disagree; `problems` holds one line for each disagreement."""

    def __init__(self, problems: Sequence[str], context: str = "") -> None:
        super().__init__(tuple(problems), context)  # as arguments, so that the error survives being pickled
        self.problems = tuple(problems)
        self.context = context

    def __str__(self) -> str:
        head = f"{self.context}: " if self.context else ""
        if len(self.problems) == 1:
            return head + self.problems[0]
        lines = [f"{head}{len(self.problems)} mismatches", *self.problems[:_MOST_SHOWN]]
        if len(self.problems) > _MOST_SHOWN:
            lines.append(f"... and {len(self.problems) - _MOST_SHOWN} more, in .problems")
        return "\n  ".join(lines)


class StructureError(EformerError, ValueError):
    """A tree's structure cannot be recorded or rebuilt."""


class LeafError(EformerError, TypeError, ValueError):
    """A leaf cannot be stored, because of its type or of its value."""


class ProcessError(EformerError, RuntimeError):
    """Of several processes that work together, another one failed or does something else."""


class ProcessTimeoutError(ProcessError, TimeoutError):
    """Of several processes that work together, another one did not come in time."""
