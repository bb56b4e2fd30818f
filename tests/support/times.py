"""Print the processor seconds of every test file: python -m pytest -p support.times -n 2

A file costs the time of its tests and their fixtures, and of the processes that they have waited for. Forks of
`support.forkserver` count in none; "all" is the time of a worker, with its start and the collection.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

_SECONDS: Counter[str] = Counter()
_TESTS: Counter[str] = Counter()


def spent() -> float:
    """Return the processor seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


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
