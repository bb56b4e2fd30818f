"""Run a command in all processes that a launcher has started: one of them prints.

Tests: tests/multihost/test_crew.py.
"""

from __future__ import annotations

import io
import os
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from eformer.errors import ProcessError

if TYPE_CHECKING:
    from collections.abc import Callable

    from eformer._engine.processes.crew import Crew

F = TypeVar("F", bound="Callable[..., Any]")

_OPTIONS = (
    click.option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Divide the work among several processes: the address of process 0. Launchers such as srun need no "
        "option.",
    ),
    click.option(
        "--process",
        metavar="I/N",
        help="The number of this process, from 0, and the number of all. 0/1 ignores a launcher.",
    ),
)
_PARTS = (
    click.option(
        "--part",
        metavar="I/N",
        help="Write part I of N, from 0: for arrays of independent jobs, then --commit.",
    ),
    click.option("--commit", is_flag=True, help="Make DESTINATION from all parts that --part has written."),
)


class _State:
    """The processes of this command, once it runs in several."""

    crew: Crew | None = None
    is_waiting = False  # a thread of JAX still waits for the other processes


def by_all_processes(command: F) -> F:
    """Add the options of several processes to a command, which gets them as `crew`; None for a process alone."""

    @wraps(command)
    def run(*args: Any, coordinator: str | None, process: str | None, **given: Any) -> Any:
        from eformer._engine.processes.launch import crew_of  # late: `--help` should not wait for it

        try:
            crew = crew_of(coordinator, process)
        except ProcessError:
            _State.is_waiting = True
            raise
        if crew.count == 1:
            return command(*args, crew=None, **given)
        _State.crew = crew
        if not crew.is_first:
            sys.stdout = sys.stderr = io.StringIO()  # the first process prints
        try:
            return command(*args, crew=crew, **given)
        except Exception as error:
            crew.tell(error)
            raise

    for option in reversed(_OPTIONS):
        run = option(run)
    return run  # type: ignore[return-value]


def by_all_or_in_parts(command: F) -> F:
    """Add the options of several processes and of independent jobs to a command, which gets them as `how`."""

    @wraps(command)
    def run(*args: Any, crew: Crew | None, part: str | None, commit: bool, **given: Any) -> Any:
        from eformer._engine.tools.convert_parts import How  # late: `--help` should not wait for it

        return command(*args, how=How.of(crew, part, commit), **given)

    for option in reversed(_PARTS):
        run = option(run)
    return by_all_processes(run)  # type: ignore[return-value]


def is_said_elsewhere(error: Exception) -> bool:
    """Tell whether the first process prints this error."""
    from eformer._engine.processes.coordination import LostError

    crew = _State.crew
    if crew is None or crew.is_first:
        return False
    if isinstance(error, LostError):  # nobody else may be there to say it
        sys.stderr = sys.__stderr__
        return False
    return True


def leave_together(code: int) -> None:
    """End this process with the exit code of all; return if it is alone."""
    if _State.crew is None and not _State.is_waiting:
        return
    from eformer._engine.processes.crew import leave

    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if _State.crew is None:
        os._exit(code)
    leave(_State.crew, code)
