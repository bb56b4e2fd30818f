"""A save of one or several items: everything goes into a scratch directory, which gets its name by one rename.

Each process begins its part in the caller's thread, which returns when arrays may be changed. The rest goes on in a
thread: it waits for all items, writes the last files, commits, and calls whatever follows.

Tests: tests/compat_orbax/test_checkpointers.py, tests/compat_orbax/test_manager.py, tests/multihost/test_orbax_door.py.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eformer._engine.formats.others.orbax_metadata import COMMITTED
from eformer._engine.processes import hosts
from eformer._engine.record.indexes import ORBAX_CHECKPOINT
from eformer._engine.stores.whole_directory import WholeDirectory
from eformer._engine.tasks.forks import Lock
from eformer.compat.orbax import handlers as handlers_lib
from eformer.compat.orbax._alike import to_path
from eformer.compat.orbax.args import typestr_of
from eformer.compat.orbax.handlers import SAVE_OPTIONS, CompositeCheckpointHandler
from eformer.compat.orbax.options import (
    AsyncOptions,
    FileOptions,
    MultiprocessingOptions,
    processes_of,
    save_options,
)


@dataclass
class SaveSettings:
    """The options of saves of one checkpointer."""

    asynchronous: Any = field(default_factory=AsyncOptions)
    multiprocessing: Any = field(default_factory=MultiprocessingOptions)
    file: Any = field(default_factory=FileOptions)
    extra: tuple[str, ...] = ()  # names of empty files in each new directory

    @property
    def processes(self) -> tuple[int, ...] | None:
        """The numbers of the processes that save together; None for all."""
        return processes_of(self.multiprocessing)

    @property
    def timeout(self) -> Any:
        """The seconds that a meeting may take."""
        return getattr(self.asynchronous, "timeout_secs", None)


_running: dict[str, Saving] = {}
_lock = Lock()


def wait_for(path: Path) -> None:
    """Wait for a save of this process to a path. Its error is raised elsewhere."""
    with _lock:
        saving = _running.get(str(path))
    if saving is not None and threading.current_thread() is not saving.thread:
        saving.done.wait()


class Saving:
    """A save under way. `result` waits, and raises its error."""

    def __init__(self, final: Path, settings: SaveSettings, *, force: bool) -> None:
        self.final, self._settings, self._force = final, settings, force
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.thread: threading.Thread | None = None
        self._begun = time.time_ns()
        self._directory: WholeDirectory | None = None

    # ---------------------------------------------------------------------------------------- begin

    def begin(self, handler: Any, args: Any, custom_metadata: Any) -> Saving:
        """Take what is to be saved; return when the caller may change it."""
        wait_for(self.final)
        self._handler, self._custom = handler, custom_metadata
        self._group = hosts.current("saves of a step", self._settings.processes, self._settings.timeout)
        token = SAVE_OPTIONS.set(save_options(self._settings.processes, self._settings.timeout))
        try:
            with hosts.told_to_all(self._group):
                self._open()
                self._parts = self._begin_parts(args)
        except BaseException:
            self._close()
            raise
        finally:
            SAVE_OPTIONS.reset(token)
        with _lock:
            _running[str(self.final)] = self
        return self

    def _open(self) -> None:
        """Make the scratch directory, or join the one that the first process has made."""
        made = WholeDirectory(self.final) if self._group.number == 0 else None
        self._directory = made
        token = self._group.meet(b"", lambda _: made.token.encode() if made else b"").decode()
        if self._directory is None:
            self._directory = WholeDirectory(self.final, token)
        if made and (mode := getattr(self._settings.file, "path_permission_mode", None)) is not None:
            made.path.chmod(mode)

    def _begin_parts(self, args: Any) -> list[tuple[str, Any, list[Any]]]:
        assert self._directory is not None
        if isinstance(self._handler, CompositeCheckpointHandler):
            return list(self._handler.started(self._directory.path, args))
        return [("", self._handler, handlers_lib.begin(self._handler, self._directory.path, args))]

    # --------------------------------------------------------------------------------------- finish

    def run(self, after: Callable[[], Any] | None = None) -> None:
        """Finish here. `after` is called when the step is in place."""
        try:
            self._finish()
            if after is not None:
                after()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._close()
            with _lock:
                if _running.get(str(self.final)) is self:
                    del _running[str(self.final)]
            self.done.set()

    def run_in_background(self, after: Callable[[], Any] | None = None) -> None:
        """Finish in a thread, which the program waits for at its end."""

        def work() -> None:
            with suppress(BaseException):  # `result` raises it
                self.run(after)

        self.thread = threading.Thread(target=work, name=f"save {self.final.name}")
        self.thread.start()

    def result(self) -> None:
        """Wait for the end, and raise the error of the save."""
        if threading.current_thread() is not self.thread:
            self.done.wait()
        if self.error is not None:
            raise self.error

    def _finish(self) -> None:
        assert self._directory is not None
        with hosts.told_to_all(self._group):
            handlers_lib.waited([each for _, _, several in self._parts for each in several])
            self._group.meet(b"", lambda _: b"")
            if self._group.number == 0:
                self._complete(self._directory)
            self._group.meet(b"", lambda _: b"")
        self._group.end()
        if callback := getattr(self._settings.asynchronous, "post_finalization_callback", None):
            callback()

    def _complete(self, directory: WholeDirectory) -> None:
        for name, handler, _ in self._parts:
            place = directory.path / name
            if hasattr(handler, "finalize"):
                handler.finalize(to_path(place))
            if name and (mode := getattr(self._settings.file, "path_permission_mode", None)) is not None:
                place.chmod(mode)
        for name in self._settings.extra:
            (directory.path / name).touch()
        (directory.path / COMMITTED).write_text("saved by eformer", "utf-8")
        (directory.path / ORBAX_CHECKPOINT).write_text(json.dumps(self._facts()), "utf-8")
        directory.commit(replace=self._force)

    def _facts(self) -> dict[str, Any]:
        names = {name: typestr_of(handler) for name, handler, _ in self._parts}
        return {
            "item_handlers": names.get("", names),
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": self._begun,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": self._custom or {},
        }

    def _close(self) -> None:
        if self._directory is not None:
            self._directory.close()
            self._directory = None
