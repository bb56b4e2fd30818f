"""Contexts: options that hold for the calls of a block.

Tests: tests/compat_orbax/test_v1.py.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar, Token
from typing import Any, Self

from eformer.compat.orbax._saving import SaveSettings
from eformer.compat.orbax.v1 import options

_PARTS = {
    "pytree": options.PyTreeOptions,
    "array": options.ArrayOptions,
    "asynchronous": options.AsyncOptions,
    "multiprocessing": options.MultiprocessingOptions,
    "file": options.FileOptions,
    "checkpointables": options.CheckpointablesOptions,
    "pathways": options.PathwaysOptions,
    "deletion": options.DeletionOptions,
    "memory": options.MemoryOptions,
    "safetensors": options.SafetensorsOptions,
    "atomicity": options.AtomicityOptions,
}
_KEYWORDS = {f"{'async' if name == 'asynchronous' else name}_options": name for name in _PARTS}

MARK = "orbax.checkpoint"  # the empty file that marks saves of this generation


class Context:
    """Options for the calls of a block: `with Context() as context`. A context of a parent begins with a copy of its
    options."""

    pytree: Any
    array: Any
    asynchronous: Any
    multiprocessing: Any
    file: Any
    checkpointables: Any
    pathways: Any
    checkpoint_layout: Any

    def __init__(
        self, context: Context | None = None, *, checkpoint_layout: Any = None, **given: Any
    ) -> None:
        if unknown := given.keys() - _KEYWORDS.keys():
            raise TypeError(
                f"Context() got unexpected keyword arguments {sorted(unknown)}; known are {sorted(_KEYWORDS)}"
            )
        for name, kind in _PARTS.items():
            inherited = copy.copy(_parts_of(getattr(context, name))) if context is not None else kind()
            setattr(self, name, inherited)
        for keyword, value in given.items():
            if value is not None:
                setattr(self, _KEYWORDS[keyword], copy.copy(_parts_of(value)))
        layout = checkpoint_layout or (context.checkpoint_layout if context is not None else "ORBAX")
        self.checkpoint_layout = options.CheckpointLayout[layout] if isinstance(layout, str) else layout
        self._tokens: list[Token[Any]] = []

    @property
    def pathways_options(self) -> Any:
        """The options of Pathways, which have no effect."""
        return self.pathways

    def settings(self) -> SaveSettings:
        """Return the options of a save."""
        return SaveSettings(self.asynchronous, self.multiprocessing, self.file, (MARK,))

    def __enter__(self) -> Self:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._tokens.pop())


def _parts_of(value: Any) -> Any:
    """Return a copy that shares no options with the original."""
    return copy.deepcopy(value)


_current: ContextVar[Context | None] = ContextVar("_current", default=None)


def current(given: Context | None = None) -> Context:
    """Return the context of the block, or one with the defaults."""
    return given or _current.get() or Context()
