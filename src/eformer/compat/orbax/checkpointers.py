"""Checkpointers: save one path at a time, with a handler, in the foreground or in the background.

Tests: tests/compat_orbax/test_checkpointers.py.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any, Self

from eformer.compat.orbax import args as args_lib
from eformer.compat.orbax._alike import Alike, on_disk
from eformer.compat.orbax._composite import CheckpointArgs
from eformer.compat.orbax._saving import SaveSettings, Saving, wait_for
from eformer.compat.orbax.handlers import (
    CompositeCheckpointHandler,
    PyTreeCheckpointHandler,
    StandardCheckpointHandler,
    restore_by,
    wrapped,
)
from eformer.compat.orbax.metadata import StepMetadata, read_step
from eformer.compat.orbax.options import AsyncOptions, FileOptions, MultiprocessingOptions
from eformer.compat.orbax.step import is_path_finalized
from eformer.errors import EformerError


class AbstractCheckpointer(Alike):
    """The base of checkpointers."""

    alike = ("AbstractCheckpointer",)


class Checkpointer(AbstractCheckpointer):
    """Save to a path and restore from it with a handler. A save returns when the files are durable.

    A path that exists is refused, unless `force=True` replaces it, at once and whole.
    """

    alike = ("Checkpointer",)

    def __init__(
        self,
        handler: Any,
        *,
        multiprocessing_options: Any = None,
        file_options: Any = None,
        **ignored: Any,
    ) -> None:
        self._handler = _ours(handler)
        self._settings = SaveSettings(
            multiprocessing=multiprocessing_options or MultiprocessingOptions(),
            file=file_options or FileOptions(),
        )

    @property
    def handler(self) -> Any:
        """The handler of the items."""
        return self._handler

    def save(
        self, directory: Any, *args: Any, force: bool = False, custom_metadata: Any = None, **kwargs: Any
    ) -> None:
        """Save to a path. Raise ValueError if it exists, unless `force`."""
        kwargs.pop("save_context", None)
        self._begin(directory, args, kwargs, force=force, custom_metadata=custom_metadata).run()

    def _begin(self, directory: Any, args: Any, kwargs: Any, *, force: bool, custom_metadata: Any) -> Saving:
        path = on_disk(directory)
        wait_for(path)
        if path.exists() and not force:
            raise ValueError(f"Destination {directory} already exists. Pass force=True to replace it")
        given = arguments(self._handler, 0, args, kwargs)
        return Saving(path, self._settings, force=force).begin(self._handler, given, custom_metadata)

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Restore from a path. Raise FileNotFoundError if it does not exist."""
        path = on_disk(directory)
        wait_for(path)
        if not path.exists():
            raise FileNotFoundError(f"Checkpoint at {path} not found.")
        if not is_path_finalized(path):
            raise ValueError(f"Found incomplete checkpoint at {path}.")
        return restore_by(self._handler, path, arguments(self._handler, 1, args, kwargs))

    def metadata(self, directory: Any) -> StepMetadata:
        """Describe a checkpoint without reading its leaves. `item_metadata` is None without a tree."""
        wait_for(on_disk(directory))
        if isinstance(self._handler, CompositeCheckpointHandler):
            return self._handler.metadata(directory)  # type: ignore[no-any-return]
        step = read_step(directory)
        found = None
        with suppress(
            FileNotFoundError, NotImplementedError, ValueError, TypeError, AttributeError, EformerError
        ):
            found = self._handler.metadata(on_disk(directory))
        return replace(step, item_metadata=found)

    def close(self) -> None:
        """Close the handler."""
        if hasattr(self._handler, "close"):
            self._handler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ours(handler: Any) -> Any:
    """Return a handler of ours in the place of one that Orbax made of a kind that we have."""
    from eformer.compat.orbax._alike import is_of_orbax

    kind = type(handler)
    if is_of_orbax(kind) and (ours := args_lib.TYPES_BY_CLASS.get(kind.__name__)) is not None:
        return ours()
    return handler


def arguments(handler: Any, number: int, args: Any, kwargs: Any) -> Any:
    """Return the arguments of a save (0) or a restore (1): the first that is one, else one made of all."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, CheckpointArgs):
            return args_lib.as_ours(each)
    if not args_lib.has_registered_args(handler):
        return wrapped(*args, **kwargs)
    return args_lib.get_registered_args_cls(handler)[number](*args, **kwargs)


class PyTreeCheckpointer(Checkpointer):
    """Save trees of any leaves. Options of Orbax's files are ignored."""

    alike = ("PyTreeCheckpointer",)

    def __init__(self, *_: Any, multiprocessing_options: Any = None, **__: Any) -> None:
        super().__init__(PyTreeCheckpointHandler(), multiprocessing_options=multiprocessing_options)


class AsyncCheckpointer(Checkpointer):
    """Save in the background: `save` returns when the caller may change the arrays.

    An error is raised by the next save, by `wait_until_finished`, `check_for_errors` or `close`, once.
    """

    alike = ("AsyncCheckpointer",)

    def __init__(
        self,
        handler: Any,
        timeout_secs: int | None = None,
        *,
        async_options: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(handler, **options)
        chosen = async_options or AsyncOptions()
        if timeout_secs is not None:
            chosen = replace(chosen, timeout_secs=timeout_secs)
        self._settings.asynchronous = chosen
        self._saving: Saving | None = None
        self._reports = threading.Lock()

    def save(
        self, directory: Any, *args: Any, force: bool = False, custom_metadata: Any = None, **kwargs: Any
    ) -> None:
        """Begin to save to a path, after the save before has ended."""
        self.wait_until_finished()
        kwargs.pop("save_context", None)
        self._saving = self._begin(directory, args, kwargs, force=force, custom_metadata=custom_metadata)
        self._saving.run_in_background()

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Restore from a path, after the save before has ended."""
        self.wait_until_finished()
        return super().restore(directory, *args, **kwargs)

    def wait_until_finished(self) -> None:
        """Wait for the save, and raise its error, once."""
        saving = self._saving
        if saving is None:
            return
        saving.done.wait()
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raise the error of a save that has ended, once."""
        with self._reports:
            saving = self._saving
            if saving is None or not saving.done.is_set():
                return
            self._saving = None
        if saving.error is not None:
            raise saving.error

    def close(self) -> None:
        """Wait for the save, and close the handler."""
        try:
            self.wait_until_finished()
        finally:
            super().close()


class StandardCheckpointer(AsyncCheckpointer):
    """Save trees of arrays and numbers in the background."""

    alike = ("StandardCheckpointer",)

    def __init__(
        self,
        *,
        async_options: Any = None,
        multiprocessing_options: Any = None,
        file_options: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(
            StandardCheckpointHandler(),
            async_options=async_options,
            multiprocessing_options=multiprocessing_options,
            file_options=file_options,
        )

    def save(  # type: ignore[override]
        self,
        directory: Any,
        state: Any = None,
        *,
        save_args: Any = None,
        force: bool = False,
        custom_metadata: Any = None,
        args: Any = None,
    ) -> None:
        """Begin to save a tree to a path."""
        given = args or (
            state if isinstance(state, CheckpointArgs) else args_lib.StandardSave(state, save_args)
        )
        super().save(directory, args=given, force=force, custom_metadata=custom_metadata)

    def restore(self, directory: Any, target: Any = None, *, strict: bool = True) -> Any:  # type: ignore[override]
        """Restore a tree like `target`."""
        given = args_lib.StandardRestore(target, strict)
        return super().restore(directory, args=given)
