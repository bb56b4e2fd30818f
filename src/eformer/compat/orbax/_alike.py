"""Take objects of Orbax as well as our own: flax, grain and Keras make them, and pass them through the caller's code.

Tests: tests/compat_orbax/test_handlers.py.
"""

from __future__ import annotations

import os
from abc import ABCMeta
from pathlib import Path
from typing import Any

LIBRARY = "orbax"


def is_of_orbax(kind: type) -> bool:
    """Tell whether a class is Orbax's own."""
    return kind.__module__.partition(".")[0] == LIBRARY


class Alike(metaclass=ABCMeta):
    """The base of classes that count objects of Orbax as their own: of the classes that `alike` names."""

    alike: tuple[str, ...] = ()

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        names = cls.__dict__.get("alike", ())
        if names and any(base.__name__ in names and is_of_orbax(base) for base in other.__mro__):
            return True
        return NotImplemented


def name_in(kind: type, names: Any) -> str | None:
    """Return the first name in the order of a class's bases that is among `names`, if the class is Orbax's own."""
    return next(
        (base.__name__ for base in kind.__mro__ if base.__name__ in names and is_of_orbax(base)), None
    )


def to_path(path: Any) -> Any:
    """Return a path as callers of Orbax expect it: an `epath.Path` if `etils` is installed, else a `pathlib.Path`.

    Raise NotImplementedError for a bucket.
    """
    text = os.fspath(path)
    if "://" in text:
        if not text.startswith("file://"):
            raise NotImplementedError(
                f"{text} is in a bucket, which this door cannot write; save there with checkpoint.save or "
                "checkpoint.Run, or write to a disk and copy the steps"
            )
        text = text.removeprefix("file://")
    try:
        from etils import epath  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return Path(text)
    return epath.Path(text)


def on_disk(path: Any) -> Path:
    """Return the absolute path of a directory on this machine."""
    return Path(os.path.abspath(os.fspath(to_path(path))))  # noqa: PTH100  not resolved: the caller's links stay
