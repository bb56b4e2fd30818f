"""How a run learns that the job is told to end: in one process, with JAX's service and without."""

import logging
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.runs import signals as signals_module
from eformer._engine.runs.retention import steady_clock
from eformer.checkpoint import Run
from support import programs
from support.interrupting import pressed_at

TREE = {"w": np.ones(2)}


@pytest.fixture
def several(monkeypatch):
    """One of several processes, without the service."""
    monkeypatch.setattr(signals_module._hosts, "is_alone", lambda: False)


def test_several_processes_without_the_service_refuse_named_signals(several):
    with pytest.raises(ValueError, match=r"signals= of several processes need JAX's preemption service"):
        signals_module.Signals([signal.SIGUSR1]).install()


def test_several_processes_without_the_service_warn_if_no_signal_is_named(several, caplog):
    before = signal.getsignal(signal.SIGTERM)
    told = signals_module.Signals(None)
    told.install()
    assert "no signals: several processes need JAX's preemption service, which is off" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before
    assert not told.reached()


@pytest.mark.parametrize("function", [steady_clock, signal._int_to_enum])
def test_a_run_that_ctrl_c_keeps_from_being_made_handles_no_signals(tmp_path, function):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        pressed_at(function, lambda: Run(tmp_path))
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_that_cannot_handle_one_signal_handles_no_other(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="Invalid argument"):
        Run(tmp_path, signals=[signal.SIGTERM, signal.SIGKILL])
    assert signal.getsignal(signal.SIGTERM) == before


def in_thread(work):
    outcome = []

    def play():
        try:
            outcome.append(work())
        except ValueError as error:
            outcome.append(error)

    thread = threading.Thread(target=play)
    thread.start()
    thread.join()
    return outcome[0]


def test_a_run_that_is_not_made_in_the_main_thread_works_without_signals(tmp_path, caplog):
    def work():
        with Run(tmp_path, every=1) as run:
            run.after(1, TREE)
        return run.step

    assert in_thread(work) == 1
    assert "a Run that is not made in the main thread cannot handle them" in caplog.text
    assert [step.number for step in checkpoint.steps(tmp_path)] == [1]


def test_named_signals_need_the_main_thread(tmp_path):
    error = in_thread(lambda: Run(tmp_path, signals=[signal.SIGUSR1]))
    assert "signals= need the main thread" in str(error)


def test_a_signal_that_is_sent_twice_at_once_is_one_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(signals_module, "_ONE_SIGNAL", 60)  # a busy machine may take its time between the two
    with Run(tmp_path) as run:
        for _ in range(2):  # as `timeout` does, to the program and to its group
            os.kill(os.getpid(), signal.SIGTERM)
        run.after(1, TREE)
        assert run.stopping
    assert [step.number for step in checkpoint.steps(tmp_path)] == [1]


def test_the_first_signal_is_logged_once_even_if_runs_are_nested(tmp_path, caplog):
    logged = threading.Event()
    caplog.handler.addFilter(lambda _: logged.set() or True)
    with Run(tmp_path / "outer") as outer, Run(tmp_path / "inner") as inner:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (outer.should_stop(), inner.should_stop(), logged.wait(20)) == (True, True, True)
    caplog.handler.filters.clear()
    assert caplog.messages == [
        "SIGTERM: the run saves at the next step and stops; a second SIGTERM does not wait for it"
    ]


def test_a_loop_that_goes_on_after_a_signal_saves_by_its_rules_again(tmp_path):
    with Run(tmp_path, every=5) as run:
        os.kill(os.getpid(), signal.SIGTERM)
        for step in range(2, 7):
            run.after(step, TREE)
    assert [step.number for step in checkpoint.steps(tmp_path)] == [2, 5]


def test_a_run_inside_of_another_tells_both(tmp_path):
    with Run(tmp_path / "outer") as outer, Run(tmp_path / "inner") as inner:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (outer.should_stop(), inner.should_stop()) == (True, True)


# ------------------------------------------------------------------------------------- other programs

_START = """
import os, signal, sys, time
import jax, numpy as np
from eformer.checkpoint import Run
def initialize():
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 1, 0)
def tell(*signals):
    for one in signals:
        os.kill(os.getpid(), one)
def loop(run, first=1):
    for step in range(first, first + 1000):
        run.after(step, {"w": np.ones(2)})
        if run.stopping:
            print("stopped", step)
            return
        time.sleep(0.01)
seen = []
"""

# JAX looks once a second, so the run stops some steps after the signal.
PROGRAMS = {
    "late": """
with Run(sys.argv[1]) as run:
    run._on_saved = lambda step: (time.sleep(0.2), tell(signal.SIGTERM), time.sleep(0.2))
    run.save(1, {"w": np.ones(2)})
print("goes on")
""",
    "service": "initialize()\nwith Run(sys.argv[1]) as run:\n    tell(signal.SIGTERM)\n    loop(run)",
    "service, USR1": """
initialize()
with Run(sys.argv[1], signals=[signal.SIGUSR1]) as run:
    tell(signal.SIGUSR1)
    loop(run)
""",
    "service, two runs": """
initialize()
with Run(sys.argv[1] + "-first") as run:
    for step in range(1, 500):
        run.after(step, {})
tell(signal.SIGTERM)
time.sleep(2.5)
with Run(sys.argv[1]) as run:
    loop(run)
""",
    "service off": """
jax.config.update("jax_enable_preemption_service", False)
initialize()
with Run(sys.argv[1], signals=[signal.SIGTERM]) as run:
    tell(signal.SIGTERM)
    loop(run)
""",
    "handler before": """
signal.signal(signal.SIGTERM, lambda *_: seen.append("called"))
initialize()
with Run(sys.argv[1]) as run:
    tell(signal.SIGTERM)
    loop(run)
print("handler", seen)
""",
    "handler after": """
initialize()
signal.signal(signal.SIGTERM, lambda *_: seen.append("called"))
with Run(sys.argv[1]) as run:
    tell(signal.SIGTERM)
    run.save(1, {"w": np.ones(2)})
print("handler", seen)
""",
}
QUICK = ("late", "service, two runs")
is_thorough = os.environ.get("EFORMER_FAULTS_STRIDE") == "1"


def played(name, path, free_port):
    program = programs.run(_START + PROGRAMS[name], path, free_port)
    return program.returncode, program.stdout, program.stderr


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("name", PROGRAMS if is_thorough else QUICK)
def test_a_program_is_told_to_end(tmp_path, free_port, name):
    path = tmp_path / "run"
    code, said, log = played(name, path, free_port)
    step = checkpoint.steps(path)[-1]
    assert checkpoint.verify(step.path).ok
    if (
        name == "late"
    ):  # it came after the last call: the save is finished, then the signal does what it always does
        assert (code, said, step.number) == (-signal.SIGTERM, "", 1), log
    elif name == "handler after":  # JAX does not hear of it
        assert (code, said, step.reason) == (0, "handler ['called']\n", "call"), log
        assert "SIGTERM has a handler in Python" in log
    else:
        assert code == 0, log
        assert said.startswith(f"stopped {step.number}\n"), said + log
        assert step.reason == "signal"
        assert ("SIGTERM has a handler in Python" in log) == (name == "handler before")
    if name in ("service, two runs", "service off"):
        assert step.number == 1


FORKED = """
import os, signal, time
from eformer.checkpoint import Run
with Run("outer"), Run("run"):
    began, begin = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begin, b"!")  # Python drops signals that come before
        time.sleep(20)
        os._exit(0)
    os.read(began, 1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_ends_at_a_signal_as_it_would_without_a_run(tmp_path):
    assert programs.run(FORKED, cwd=tmp_path).stdout == "-15\n"


HANGS = """
import signal, sys, threading
from eformer.checkpoint import Run
with Run("outer"), Run("run"):
    print("ready", flush=True)
    threading.Event().wait(100)
"""


def test_a_second_signal_ends_a_program_that_hangs(tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", HANGS], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout.readline() == "ready\n"
    program.terminate()
    assert program.stderr.readline().startswith("SIGTERM: the run saves at the next step")
    while program.poll() is None:  # signals that follow at once count as one
        program.terminate()
    program.stdout.close()
    assert program.stderr.read() == ""
    program.stderr.close()
    assert program.returncode == -signal.SIGTERM


HANDLED = """
import os, signal, time
from eformer.checkpoint import Run
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(time.monotonic()))
with Run("run") as run:
    while not seen or seen[-1] < seen[0] + 2:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
    print(run.should_stop())
"""


def test_a_second_signal_is_left_to_the_handler_that_was_there_before(tmp_path):
    assert programs.run(HANDLED, cwd=tmp_path).stdout == "True\n"


CLOSED = """
import os, signal
from eformer.checkpoint import Run
one, other = Run("one"), Run("other")
one.__exit__(None, None, None)
other.__exit__(None, None, None)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_runs_that_end_in_the_order_in_which_they_began_leave_no_handler(tmp_path):
    assert programs.run(CLOSED, cwd=tmp_path).returncode == -signal.SIGTERM


def test_the_last_save_is_made_even_if_the_one_before_has_failed(tmp_path, caplog):
    with Run(tmp_path, signals=[signal.SIGUSR1]) as run:
        run.save(1, TREE).result()
        run.save(2, TREE, metadata={"late": 1}, metrics={"x": Late()}).exception()
        os.kill(os.getpid(), signal.SIGUSR1)
        run.after(3, TREE)
        assert run.stopping
    assert [step.number for step in checkpoint.steps(tmp_path)] == [1, 3]
    assert "not now" in caplog.text


class Late:
    """A metric that cannot be fetched."""

    def __float__(self):
        raise ValueError("not now")


def test_a_run_can_be_closed_without_a_with_block(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    run = Run(tmp_path, every=1, signals=[signal.SIGUSR1])
    run.after(1, TREE)
    assert signal.getsignal(signal.SIGUSR1) != before
    run.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert [step.number for step in checkpoint.steps(tmp_path)] == [1]


def test_a_run_that_was_closed_logs_no_signal_any_more(tmp_path, caplog, monkeypatch):
    has_begun, may_go_on = threading.Event(), threading.Event()

    class Slow(logging.Filter):
        def filter(self, record):
            has_begun.set()
            return may_go_on.wait(10)

    caplog.handler.addFilter(slow := Slow())
    run = Run(tmp_path, signals=[signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    assert has_begun.wait(10)
    run.after(1, TREE)
    monkeypatch.setattr(signals_module, "_LOG_WITHIN", 10)
    threading.Timer(0.05, may_go_on.set).start()
    run.close()
    assert "SIGUSR1: the run saves at the next step" in caplog.text
    caplog.handler.removeFilter(slow)
