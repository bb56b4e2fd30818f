"""The error tree. Every error also inherits the built-in error that callers already catch.

EformerError
├── FormatError      (ValueError)   bytes do not follow their format
│   ├── VersionError                a newer eformer wrote it
│   └── CorruptionError             bytes differ from the saved ones
├── SignatureError   (ValueError)   not signed, or not by the given key
│   └── AlteredError                files differ from the signed ones; also a CorruptionError
├── NotFoundError    (FileNotFound- no checkpoint at this path
│                     Error)
├── MismatchError    (ValueError)   the data and the target disagree; lists every difference
├── QuantizedError   (ValueError)   the weights are meaningless without their scales
├── StructureError   (ValueError)   a tree's structure cannot be recorded or rebuilt
├── LeafError        (TypeError,    a leaf cannot be stored, because of its type
│                     ValueError)   or its value
├── TransferError    (OSError)      an array arrived damaged on a device, twice, or from it
├── ReplicaError     (RuntimeError) copies of one array, on several devices, differ
├── ProcessError     (RuntimeError) another process failed, or made a different call
│   └── ProcessTimeoutError         another process did not answer in time; also a TimeoutError
├── SaveRequestError (RuntimeError) a job that was asked for a save has not saved
├── SupersededError  (RuntimeError) another job has become the writer of a run
└── LeaseLostError   (RuntimeError) a save to a bucket took so long that another save removed its files

Tests: tests/engine/loading/test_partial.py, tests/engine/loading/test_fetch.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


_MOST_SHOWN = 50


class EformerError(Exception):
    """The base class of the errors of eformer."""


class FormatError(EformerError, ValueError):
    """The bytes do not follow their format."""


class VersionError(FormatError):
    """A newer eformer wrote the checkpoint, in a format that this version does not know."""


class CorruptionError(FormatError):
    """The bytes have changed since they were saved, or are missing."""


class SignatureError(EformerError, ValueError):
    """A checkpoint is not signed, is not signed by the given key, or its signature cannot be read."""


class AlteredError(SignatureError, CorruptionError):
    """The files of a checkpoint differ from the signed files."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Describe a range of damaged or missing bytes.

    leaf      the name of the leaf; empty if the bytes belong to no leaf
    file      the path of the file in the checkpoint; empty if the checkpoint cannot be read at all
    start     the first damaged byte
    stop      the byte after the last; 0 if the problem concerns the file as a whole, such as its length
    problem   a description of the damage

    Example:

        >>> for damage in checkpoint.verify("run/step-100").damages:
        ...     print(damage.leaf, damage.file, damage.start, damage.stop)
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
    """The data and the target disagree. `problems` has one line for each difference, and `advice` suggests a remedy."""

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
    """The weights of a checkpoint are quantised: without their scales they are not the numbers of the model."""


class StructureError(EformerError, ValueError):
    """A tree's structure cannot be recorded or rebuilt."""


class LeafError(EformerError, TypeError, ValueError):
    """A leaf cannot be stored, because of its type or its value."""


class TransferError(EformerError, OSError):
    """An array arrived damaged on a device, also when a load repeated the transfer, or arrived damaged in host memory.

    The checkpoint on the disk is undamaged.
    """


class ReplicaError(EformerError, RuntimeError):
    """Copies of one array on several devices differ, at step `step` of a run. `problems` has one line for each leaf,
    which names the processes."""

    def __init__(self, path: str, step: int, problems: Sequence[str]) -> None:
        # As arguments, so that the error survives being pickled.
        super().__init__(path, step, tuple(problems))
        self.path = path
        self.step = step
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [f"{self.path}: step {self.step}: copies of arrays differ", *self.problems[:_MOST_SHOWN]]
        return "\n  ".join(
            [*lines, "The step is not saved: check the devices named here, and resume the run"]
        )


class ProcessError(EformerError, RuntimeError):
    """Another process of the same save or load failed, or made a different call."""


class ProcessTimeoutError(ProcessError, TimeoutError):
    """Another process of the same save or load did not answer in time."""


class SaveRequestError(EformerError, RuntimeError):
    """The job that was asked for a save has not saved: the save failed, or another job writes the run."""


class SupersededError(EformerError, RuntimeError):
    """Another job has become the writer of a run; this job can no longer save to it."""


class LeaseLostError(EformerError, RuntimeError):
    """A save to a bucket took so long that another save has removed its files. Saving again is safe."""
