"""Eight virtual devices. Hypothesis: a quick run by default; HYPOTHESIS_PROFILE=thorough looks much longer."""

import gc
import itertools
import os
import re
import signal
import zlib

from support import loopback
from support.thorough import IS_THOROUGH

loopback.keep()  # before anything can ask for an address

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

collect_ignore = ["frameworks"]  # they need torch and more: `make frameworks` runs them

settings.register_profile(
    "quick", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow]
)
if not os.access(".", os.W_OK):  # a checkout of somebody else's: failures are not remembered
    settings.register_profile("quick", parent=settings.get_profile("quick"), database=None)
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

jax.config.update("jax_num_cpu_devices", 8)  # eight virtual devices, before any backend starts

# A shell lets what it starts in the background ignore Ctrl-C, and so would every process that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


_numbers = itertools.count()


@pytest.fixture
def tmp_path(request, tmp_path_factory):
    """A new directory. pytest's own fixture looks through the directories of all earlier tests for a free number."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    return tmp_path_factory.mktemp(f"{name}{next(_numbers)}", numbered=False)


def pytest_collection_modifyitems(config, items):
    """Run every n-th case of a test with the mark `sample(n)`; which ones depends on its class. Run none of `thorough`.

    Run all own tests of a class with the mark, and every n-th of the tests that it inherits. With EFORMER_SAMPLE=1, and
    in `make faults`, all of them run.
    """
    if IS_THOROUGH:
        return
    left_out = {item for item in items if item.get_closest_marker("thorough")}
    cases = {}
    for item in items:
        if (found := sampled(item)) and item not in left_out:
            name, stride = found
            cases.setdefault(name, (stride, []))[1].append(item)
    for name, (stride, found) in cases.items():
        first = zlib.crc32(name.encode()) % min(stride, len(found))
        left_out |= {*found} - {*found[first::stride]}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def sampled(item):
    """Return the name of the set of cases that a test is in, and the distance of those that run; None if all run."""
    for node, mark in item.iter_markers_with_node("sample"):
        if not isinstance(node, pytest.Class):
            return item.nodeid.partition("[")[0], mark.args[0]
        if item.originalname not in vars(item.cls):
            return node.nodeid, mark.args[0]
        return None
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give whole files to the workers: tests of one file use the same programs and fixtures."""
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid):
            group = super()._split_scope(nodeid)
            return group.partition("::")[0]

    return ByFile(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection():
    """Collect no garbage while tests are collected: hardly any of it is garbage."""
    gc.disable()


def pytest_collection_finish():
    """Freeze the thousands of collected tests, so that the garbage collector does not scan them each time."""
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def trusted():
    """Lets checkpoints build the namedtuples of the test trees."""
    from eformer.checkpoint import register_node
    from support.trees import Empty, Moments

    register_node(Moments)
    register_node(Empty)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail if anything has asked for an address other than loopback."""
    if asked := loopback.asked_for():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter:
            reporter.write_line(f"These tests left this machine, or tried to: {sorted(asked)}", red=True)
