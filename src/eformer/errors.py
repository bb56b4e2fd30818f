"""The error tree. Every error also inherits the builtin that callers already catch.

EformerError
├── FormatError      (ValueError)   bytes do not follow their format
│   ├── VersionError                a newer eformer wrote it
│   └── CorruptionError             bytes are not what was saved
├── SignatureError   (ValueError)   not signed, or not by the key that was given
│   └── AlteredError                files are not what was signed; also a CorruptionError
├── NotFoundError    (FileNotFound- no checkpoint at this path
│                     Error)
├── MismatchError    (ValueError)   the data and the target disagree; lists every difference
├── QuantizedError   (ValueError)   the weights are not numbers without their scales
├── StructureError   (ValueError)   a tree's structure cannot be recorded or rebuilt
├── LeafError        (TypeError,    a leaf cannot be stored, because of its type
│                     ValueError)   or its value
├── ProcessError     (RuntimeError) another process failed, or made a different call
│   └── ProcessTimeoutError         another process did not answer in time; also a TimeoutError
└── SupersededError  (RuntimeError) another job has become the writer of a run
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


_MOST_SHOWN = 50


class EformerError(Exception):
    """The base class of all errors that eformer raises itself."""


class FormatError(EformerError, ValueError):
    """The bytes do not follow their format."""


class VersionError(FormatError):
    """A newer eformer wrote it, in a format that this one does not know."""


class CorruptionError(FormatError):
    """The bytes are not what was saved: they changed, or are missing."""


class SignatureError(EformerError, ValueError):
    """A checkpoint is not signed, or not by the key that was given, or its signature cannot be read."""


class AlteredError(SignatureError, CorruptionError):
    """The files of a signed checkpoint are not those that were signed."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Describe a range of damaged or missing bytes.

    leaf      the name of the leaf; empty if the bytes belong to no leaf
    file      the path of the file in the checkpoint; empty if the checkpoint cannot be read at all
    start     the first damaged byte
    stop      the byte after the last; 0 if the problem concerns the file as a whole, such as its length
    problem   the reason, such as "are damaged: ..."
    """

    leaf: str
    file: str
    start: int
    stop: int
    problem: str

    def __str__(self) -> str:
        where = f"bytes {self.start} to {self.stop} of {self.file}" if self.stop else self.file
        text = f"{where} {self.problem}".lstrip()
        return f"leaf {self.leaf!r}: {text}" if self.leaf else text


class NotFoundError(EformerError, FileNotFoundError):
    """No checkpoint exists at this path."""


class MismatchError(EformerError, ValueError):
    """The data and the target disagree. `problems` has one line for each difference, `advice` says what would help."""

    def __init__(self, problems: Sequence[str], context: str = "", advice: str = "") -> None:
        # As arguments, so that the error survives being pickled.
        super().__init__(tuple(problems), context, advice)
        self.problems = tuple(problems)
        self.context = context
        self.advice = advice

    def __str__(self) -> str:
        head = f"{self.context}: " if self.context else ""
        if len(self.problems) == 1:
            return "\n  ".join(filter(None, (head + self.problems[0], self.advice)))
        lines = [f"{head}{len(self.problems)} mismatches", *self.problems[:_MOST_SHOWN]]
        if len(self.problems) > _MOST_SHOWN:
            lines.append(f"... and {len(self.problems) - _MOST_SHOWN} more, in .problems")
        if self.advice:
            lines.append(self.advice)
        return "\n  ".join(lines)


class QuantizedError(EformerError, ValueError):
    """The weights of a checkpoint are quantised: their elements are not numbers of the model without their scales."""


class StructureError(EformerError, ValueError):
    """A tree's structure cannot be recorded or rebuilt."""


class LeafError(EformerError, TypeError, ValueError):
    """A leaf cannot be stored, because of its type or its value."""


class ProcessError(EformerError, RuntimeError):
    """Another of the processes that work together failed, or made a different call."""


class ProcessTimeoutError(ProcessError, TimeoutError):
    """Another of the processes that work together did not answer in time."""


class SupersededError(EformerError, RuntimeError):
    """Another job has become the writer of a run; this one saves nothing any more."""
