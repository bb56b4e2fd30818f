"""Print the processor seconds of every test file: python -m pytest -p support.times -n 2

A file costs the time of its tests and their fixtures, of the processes that they have waited for, and of the forks of
`support.forkserver`. "all" is the time of the workers, with their start and the collection.
"""

from __future__ import annotations

import os
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

_SECONDS: Counter[str] = Counter()
_TESTS: Counter[str] = Counter()


def spent() -> float:
    """Return the processor seconds of this process, of the processes that it has waited for, and of its forks."""
    return sum(os.times()[:4]) + _spent_by_forks()


def _spent_by_forks() -> float:
    """Return the processor seconds of the server of forks and of its forks, alive or not. Return 0 without /proc."""
    server = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009
    try:
        forks = Path(f"/proc/{server}/task/{server}/children").read_text("ascii").split()
    except OSError:
        return 0.0
    return sum(map(_spent_by, [str(server), *forks]))


def _spent_by(process: str) -> float:
    """Return the processor seconds of a process and of those that it has waited for; 0 if it has ended."""
    try:
        fields = Path("/proc", process, "stat").read_text("ascii").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    before, file = spent(), item.nodeid.partition("::")[0]
    outcome = yield
    _SECONDS[file] += spent() - before
    _TESTS[file] += 1
    return outcome


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """Send the times of a worker to the process that prints them."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["times"] = [{**_SECONDS, "all": spent()}, dict(_TESTS)]
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    seconds, tests = getattr(node, "workeroutput", {}).get("times", ({}, {}))
    _SECONDS.update(seconds)
    _TESTS.update(tests)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("processor seconds")
    for file, seconds in _SECONDS.most_common():
        terminalreporter.write_line(f"{seconds:8.1f} {_TESTS[file]:6} {file}")
