"""Servers for the tests here. `make test` starts ministack alone, `make cloud` all of them."""

import itertools
import os

import pytest

from contracts.bucket import InBucket
from contracts.bucket_processes import BucketProcesses
from contracts.bucket_runs import BucketRuns
from contracts.bucket_tools import BucketCommands, BucketTools
from support.buckets import forget
from support.servers import CannotStartError, running
from support.thorough import IS_THOROUGH

IS_CLOUD = bool(os.environ.get("EFORMER_CLOUD"))
COULD_NOT = "could not start: "

# Installed with the other tools of the tests; the second one runs in `make faults` as well.
QUICK = {"test_ministack.py", *(["test_unquoted.py"] if IS_THOROUGH else [])}

# Of the contracts of a checkpoint, a run, the tools and jobs, `make test` runs every so many tests on a server, and in
# memory all of a checkpoint, a run and the tools.
STRIDE = 100
LONG = (InBucket, BucketRuns, BucketTools, BucketCommands, BucketProcesses)

numbers = itertools.count()


def pytest_ignore_collect(collection_path):
    if collection_path.name.startswith("test_") and collection_path.name not in QUICK and not IS_CLOUD:
        return True
    return None


def pytest_collection_modifyitems(config, items):
    """Keep the tests of a server in one worker, and take a sample of the contract of a checkpoint."""
    here = [item for item in items if hasattr(item, "module") and hasattr(item.module, "SERVER")]
    for item in here:
        item.add_marker(pytest.mark.xdist_group(item.module.SERVER))
    if not IS_CLOUD:
        long = [item for item in here if item.cls and issubclass(item.cls, LONG)]
        left_out = {item for number, item in enumerate(long) if number % STRIDE}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(scope="module")
def server(request):
    """The server of a module, with an empty bucket."""
    name = request.module.SERVER
    try:
        with running(name) as started:
            yield started
    except CannotStartError as error:
        if IS_CLOUD:
            pytest.skip(f"{name} {COULD_NOT}{error}")
        raise


@pytest.fixture
def url(server, monkeypatch):
    """A directory that nobody else uses, in the bucket of a server that the environment leads to."""
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)
    found = f"{server.url}/test-{next(numbers)}/x"
    yield found
    forget(found)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """Say in words which servers could not be started, after all else."""
    yield
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", [])]
    reasons = {
        reason.removeprefix("Skipped: ") for _, _, reason in filter(None, skipped) if COULD_NOT in reason
    }
    for reason in sorted(reasons):
        terminalreporter.write_line(f"Not tested: {reason}", yellow=True)
