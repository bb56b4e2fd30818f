"""Ctrl-C is held back inside a call, and handed on where nothing is lost."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress

import pytest

from eformer._engine.tasks import interrupts
from eformer._engine.tasks.interrupts import check, held_back, let_through, uninterrupted
from eformer._engine.tasks.pool import run_all
from support import programs


def press():
    signal.raise_signal(signal.SIGINT)


@uninterrupted
def run(*calls):
    for call in calls:
        call()


@pytest.fixture(autouse=True)
def default_handler():
    """Every test begins with the handler of Python, and leaves it in place."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_is_raised_when_the_block_has_ended():
    done = []
    with pytest.raises(KeyboardInterrupt):
        run(press, lambda: done.append("the rest"))
    assert done == ["the rest"]


def test_it_is_raised_at_a_check():
    with pytest.raises(KeyboardInterrupt):
        run(press, check, lambda: pytest.fail("the check has passed"))


def test_a_second_one_does_not_interrupt_the_clearing_up():
    cleared = []

    @uninterrupted
    def work():
        try:
            run(press, check)
        finally:
            run(press, check, lambda: cleared.append(True))

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleared
    run(check)  # neither of them is left for the next block


def test_it_is_raised_at_the_end_of_the_outermost_block():
    done = []
    with pytest.raises(KeyboardInterrupt):
        run(lambda: run(press), lambda: done.append("the rest"))
    assert done


def test_a_call_inside_a_function_of_the_caller_holds_it_back_again():
    done = []

    def function():
        run(press, lambda: done.append("the rest of the call"))
        done.append("the rest of the function")

    with pytest.raises(KeyboardInterrupt):
        run(lambda: let_through(function))
    assert done == ["the rest of the call"]


@pytest.mark.parametrize("inner", [run, let_through], ids=["call", "wait"])
def test_after_a_call_or_a_wait_inside_it_a_function_of_the_caller_is_interrupted_at_once(inner):
    done = []

    def function():
        inner(lambda: None)
        press()
        done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        run(lambda: let_through(function))
    assert done == []


def test_one_that_a_function_of_the_caller_has_caught_does_not_hide_the_next():
    def function():
        with suppress(KeyboardInterrupt):
            press()

    done = []
    with pytest.raises(KeyboardInterrupt):
        run(lambda: let_through(function), press, check, lambda: done.append("the rest"))
    assert done == []


def test_a_block_inside_a_function_of_the_caller_that_loses_its_result_is_told():
    told = []

    def function():
        with held_back() as block:
            block.otherwise = lambda: told.append(True)
            press()

    with pytest.raises(KeyboardInterrupt):
        run(lambda: let_through(function))
    assert told == [True]


@pytest.mark.parametrize(("work", "told"), [(press, [1]), (lambda: 1 / 0, []), (check, [])])
def test_a_block_that_loses_its_result_is_told(work, told):
    found = []
    with suppress(KeyboardInterrupt, ZeroDivisionError), held_back() as block:
        block.otherwise = lambda: found.append(1)
        work()
    assert found == told


def test_a_handler_of_the_program_is_called_and_may_return():
    calls = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    try:
        with held_back():
            for _ in range(2):
                press()
                assert len(calls) == _
                check()
            press()
        assert len(calls) == 3
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_was_set_meanwhile_stays_and_one_that_was_kept_is_passed_by():
    with held_back():
        kept = signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, kept)
    with pytest.raises(KeyboardInterrupt):
        press()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_back():
            press()
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_is_held_back_if_it_means_the_same():
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        done = []
        with pytest.raises(KeyboardInterrupt):
            run(lambda: signal.raise_signal(signal.SIGTERM), lambda: done.append("the rest"))
        assert done == ["the rest"]
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_of_a_program_is_not_held_back():
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(1))
    try:
        with held_back():
            signal.raise_signal(signal.SIGTERM)
            assert calls == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_hold_nothing_back():
    def in_a_thread():
        with held_back():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    run_all([in_a_thread] * 8, 4)


FORK = """
import os, signal, sys, threading
from eformer._engine.tasks.interrupts import held_back

def fork():
    if not (child := os.fork()):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            os._exit(7)
        os._exit(1)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

signal.signal(signal.SIGINT, signal.default_int_handler)
statuses = []
with held_back():
    fork()
    (thread := threading.Thread(target=fork)).start()
    thread.join()
assert statuses == [7, 7], statuses
"""


def test_a_process_that_is_forked_inside_a_block_is_interrupted_at_once():
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, timeout=60, check=False
    )
    assert told.returncode == 0, told.stderr.decode()


@pytest.mark.parametrize("wait", [threading.Event().wait, lambda _=None: interrupts.result_of(Future())])
def test_a_wait_for_ever_is_interrupted(wait):
    with pytest.raises(KeyboardInterrupt):
        run(press, lambda: interrupts.wait_until(wait))


def test_a_wait_ends_with_its_time_or_when_there_is_something():
    event, late = threading.Event(), Future()
    late.set_result("there")
    with held_back():
        assert not interrupts.wait_until(event.wait, 0.1)
        event.set()
        assert interrupts.wait_until(event.wait)
        assert interrupts.result_of(late, 1) == "there"
        with pytest.raises(TimeoutError):
            interrupts.result_of(Future(), 0.1)


def test_tasks_that_have_not_begun_are_left_out():
    done = []

    def tasks():
        yield press
        yield from [lambda: done.append(1)] * 1000

    with pytest.raises(KeyboardInterrupt), held_back():
        run_all(tasks(), 1)
    assert not done


FUNCTIONS = {
    "callback": "checkpoint.load('there', callback=never)",
    "state": "checkpoint.Run('run').save(1, lambda: never())",
    "data": "checkpoint.Run('run').save(1, {'w': np.ones(9)}, data=Data())",
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_of_the_caller_that_never_ends_is_interrupted(tmp_path, function):
    program = f"""if True:
        import os, signal, threading
        import numpy as np
        from eformer import checkpoint
        checkpoint.save({{"w": np.ones(9)}}, "there")
        def never(*_):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            threading.Event().wait(300)
        class Data:
            get_state = set_state = never
        try:
            {FUNCTIONS[function]}
        except KeyboardInterrupt:
            checkpoint.save({{"w": np.zeros(9)}}, "there", overwrite=True)
            print(checkpoint.load("there")["w"].sum())
    """
    done = programs.run(program, cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("0.0\n", 0), done.stderr
