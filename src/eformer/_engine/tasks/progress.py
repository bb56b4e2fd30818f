"""Report the progress of a long call to a callback, or to a bar on a terminal or in a notebook.

Errors of drawing a bar are ignored.
"""

from __future__ import annotations

import html
import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

from eformer._engine.record.text import size
from eformer._engine.tasks.interrupts import called

if TYPE_CHECKING:
    from collections.abc import Iterator

ProgressCallback = Callable[[int, int], None]

Progress = bool | ProgressCallback | None
"""True for a progress bar; or a function that is called several times a second with the bytes done and the total."""

_INTERVAL = 0.05  # seconds


class Meter:
    """Add up the bytes that several threads have finished, and report them.

    Reported numbers never decrease and never exceed the total, and the total is reported exactly once.
    """

    def __init__(self, total: int, callback: ProgressCallback | None) -> None:
        self._total, self._callback = total, callback
        self._done, self._is_ended = 0, False
        self._last = -math.inf  # not 0: the monotonic clock begins at zero when a machine boots
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self._callback is None:
            return
        with self._lock:
            self._done = min(self._done + nbytes, self._total)
            now = time.monotonic()
            if self._done == self._total or now - self._last >= _INTERVAL:
                self._last = now
                self._report(self._callback)

    def end(self) -> None:
        """Report the total, if it has not been reported."""
        if self._callback is None:
            return
        with self._lock:
            self._done = self._total
            self._report(self._callback)

    def _report(self, callback: ProgressCallback) -> None:
        if self._is_ended:
            return
        self._is_ended = self._done == self._total
        try:
            called(callback, self._done, self._total)
        except Exception as error:
            raise _CallbackError(error) from error


SILENT = Meter(0, None)
"""A meter that reports nothing."""


class _CallbackError(Exception):
    """Carries an exception of the callback to the caller, so that no handler in between takes it for an I/O error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the progress callback raised {error!r}")
        self.error = error


def is_wanted(progress: Progress) -> bool:
    """Tell whether to report progress. A callable counts even if it is falsy."""
    if progress is None or callable(progress):
        return progress is not None
    if type(progress).__name__ in ("bool", "bool_"):  # numpy's, too
        return bool(progress)
    raise TypeError(
        f"progress={progress!r}: expected True for a bar, or a function of the bytes done and the total"
    )


@contextmanager
def metered(progress: Progress, total: int, doing: str, *, of: str = "") -> Iterator[Meter]:
    """Yield a meter that reports to `progress`, and report the total on success. Raise errors of the callback.

    `of` names things that are counted in place of bytes, such as "steps"; a bar shows them.
    """
    if not is_wanted(progress):
        yield SILENT
        return
    bar: AbstractContextManager[ProgressCallback] = (
        nullcontext(progress) if callable(progress) else progress_bar(total, doing, of)
    )
    with bar as callback:
        meter = Meter(total, callback)
        try:
            yield meter
            meter.end()
        except _CallbackError as raised:
            raise raised.error from raised.error.__cause__


# ---------------------------------------------------------------------------------------------- bars


@contextmanager
def progress_bar(total: int, doing: str, of: str) -> Iterator[Callable[[int, int], None]]:
    """Draw a progress bar, and yield the function that updates it with the bytes done and the total."""
    bar: Any = None
    is_broken = False
    with suppress(Exception):
        bar = _Notebook(doing, of) if _is_notebook() else _Terminal(total, doing, of)

    def update(done: int, total: int) -> None:
        nonlocal is_broken
        try:
            if bar and not is_broken:
                bar.update(done, total)
        except Exception:  # noqa: BLE001  such as a terminal that was closed
            is_broken = True

    try:
        yield update
    finally:
        with suppress(Exception):
            if bar:
                bar.close()


def _is_notebook() -> bool:
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return bool(shell) and hasattr(shell, "kernel")


def _amount(done: int, total: int, began: float, of: str) -> str:
    """Return how much is done, and for bytes how fast."""
    if of:
        return f"{done:,} of {total:,} {of}"
    rate = done / max(time.monotonic() - began, 1e-6)
    return f"{size(done)} of {size(total)}, {size(rate)}/s"


class _Terminal:
    """A bar on standard error, so that piped output stays clean."""

    def __init__(self, total: int, doing: str, of: str) -> None:
        from rich.console import Console  # late: importing rich takes a while
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        class Quiet(Console):
            def on_broken_pipe(self) -> None:
                """Raise instead of ending the program, as rich would."""
                raise BrokenPipeError

        self._file, self._of, self._began = _unbuffered(sys.stderr), of, time.monotonic()
        left = TimeRemainingColumn(compact=True, elapsed_when_finished=True)
        # Redirect the output of the program only if it shares a terminal with the bar: a file gets it as it is.
        is_shared = sys.stdout is not None and sys.stdout.isatty()
        self._bars = Progress(
            *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), left),
            console=Quiet(file=self._file),
            redirect_stdout=is_shared,
            redirect_stderr=is_shared,
        )
        self._task = self._bars.add_task(doing, total=total, amount="")
        try:
            self._bars.start()
        except BaseException:
            self.close()
            raise

    def update(self, done: int, total: int) -> None:
        amount = _amount(done, total, self._began, self._of)
        self._bars.update(self._task, completed=done, total=total, amount=amount)

    def close(self) -> None:
        try:
            self._bars.stop()
        finally:
            if self._file is not sys.stderr:
                self._file.close()


def _unbuffered(stream: TextIO) -> TextIO:
    """Return a stream to the same file that buffers nothing.

    Text that could not be written would stay in the buffer of standard error, and make the program fail when it exits.
    """
    try:
        raw: Any = io.FileIO(os.dup(stream.fileno()), "w")
    except (OSError, AttributeError, ValueError):  # not a file, as in some notebooks
        return stream
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, write_through=True)


class _Notebook:
    """A bar of HTML below the cell. Needs only IPython, which a notebook has."""

    def __init__(self, doing: str, of: str) -> None:
        display = import_module("IPython.display")  # not a dependency
        self._html, self._doing, self._of, self._start = display.HTML, doing, of, time.monotonic()
        self._handle = display.display(self._html(self._text(0, 0)), display_id=True)

    def update(self, done: int, total: int) -> None:
        self._handle.update(self._html(self._text(done, total)))

    def close(self) -> None:
        """Leave the bar in the notebook."""

    def _text(self, done: int, total: int) -> str:
        took = max(time.monotonic() - self._start, 1e-6)
        left = f", {took * (total - done) / done:.0f} s left" if 0 < done < total else f", {took:.1f} s"
        style = "vertical-align: middle; width: 16em"
        bar = f'<progress value="{done}" max="{max(total, 1)}" style="{style}"></progress>'
        return f"{html.escape(self._doing)} {bar} {_amount(done, total, self._start, self._of)}{left}"
