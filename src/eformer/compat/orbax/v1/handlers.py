"""Handlers of the newer generation. Objects that write their own files need none: see `StatefulCheckpointable`.

Tests: tests/compat_orbax/test_v1.py.
"""

from __future__ import annotations

from typing import Any

from eformer.compat.orbax.handlers import JsonCheckpointHandler as JsonHandler
from eformer.compat.orbax.handlers import PyTreeCheckpointHandler as PyTreeHandler
from eformer.compat.orbax.v1._functions import StatefulCheckpointable

__all__ = [
    "CheckpointableHandler",
    "JsonHandler",
    "PyTreeHandler",
    "StatefulCheckpointable",
    "register_handler",
]

_NO = (
    "handlers of the newer generation cannot be registered; give the object coroutines save and load "
    "(StatefulCheckpointable), or write a CheckpointHandler for a Composite"
)


class CheckpointableHandler:
    """The base of Orbax's handlers, which cannot be registered here."""


def register_handler(*_: Any, **__: Any) -> Any:
    """Raise NotImplementedError, which says how to do without."""
    raise NotImplementedError(_NO)


def local_registry(*_: Any, **__: Any) -> Any:
    """Raise NotImplementedError, which says how to do without."""
    raise NotImplementedError(_NO)


global_registry = local_registry
