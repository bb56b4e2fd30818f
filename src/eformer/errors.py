"""What can go wrong, as a tree. Every error is also the builtin that people already catch.

EformerError
├── FormatError      (ValueError)   these bytes are not what their format says
├── MismatchError    (ValueError)   the data and the target disagree; lists every disagreement
├── StructureError   (ValueError)   a tree's structure cannot be recorded or rebuilt
└── LeafError        (TypeError,    a leaf cannot be stored, because of its type
                      ValueError)   or of its value
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


_MOST_SHOWN = 50


class EformerError(Exception):
    """The root of all errors that eformer raises on its own account."""


class FormatError(EformerError, ValueError):
    """These bytes are not what their format says."""


class MismatchError(EformerError, ValueError):
    """The data and the target disagree; `problems` holds one line for each disagreement."""

    def __init__(self, problems: Sequence[str], *, context: str = "") -> None:
        self.problems = tuple(problems)
        head = f"{context}: " if context else ""
        shown = self.problems[:_MOST_SHOWN]
        if len(self.problems) > len(shown):
            shown += (f"... and {len(self.problems) - len(shown)} more, in .problems",)
        one = len(self.problems) == 1
        super().__init__(
            head + shown[0] if one else "\n  ".join([f"{head}{len(self.problems)} mismatches", *shown])
        )


class StructureError(EformerError, ValueError):
    """A tree's structure cannot be recorded or rebuilt."""


class LeafError(EformerError, TypeError, ValueError):
    """A leaf cannot be stored, because of its type or of its value."""
