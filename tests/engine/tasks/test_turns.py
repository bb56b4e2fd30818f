"""Saves to one place are committed in the order of their calls, whatever becomes of those between them."""

import signal
import sys
import threading
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from eformer._engine.saving.save import Save
from eformer._engine.stores.locate import store_at
from eformer._engine.tasks.deadline import within
from eformer._engine.tasks.turns import _Turns, turns
from eformer.checkpoint import load, save, save_async, verify, wait


def tree(number):
    return {"frozen": np.ones(9), "w": np.full(9, number)}


@contextmanager
def slow_save(path, monkeypatch):
    """Save 1.0 in the background during the block, and commit it only afterwards."""
    has_begun, is_over = threading.Event(), threading.Event()
    write = Save.write

    def write_late(*arguments):
        has_begun.set()
        is_over.wait(60)
        return write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Save, "write", write_late)
        save_async(tree(1.0), path)
        has_begun.wait(60)
    try:
        yield
    finally:
        is_over.set()


def failed_save(path):
    with pytest.raises(ZeroDivisionError):
        save(tree(2.0), path, progress=lambda *_: 1 / 0)


def test_a_save_that_fails_lets_no_later_one_overtake_an_earlier_one(tmp_path, monkeypatch):
    with slow_save(tmp_path, monkeypatch):
        failed_save(tmp_path)
        later = save_async(tree(3.0), tmp_path)
        with pytest.raises(TimeoutError):
            later.result(0.3)
    wait(60)
    assert load(tmp_path)["w"][0] == 3.0


def test_a_save_under_way_may_be_used_again_after_a_later_one_has_failed(tmp_path, monkeypatch):
    with slow_save(tmp_path / "a", monkeypatch):
        failed_save(tmp_path / "a")
        reusing = save_async(tree(3.0), tmp_path / "b", options={"reuse": tmp_path / "a"})
    reusing.result(60)
    assert verify(tmp_path / "b").ok
    assert load(tmp_path / "b")["w"][0] == 3.0


def test_a_turn_waits_for_every_one_before_it():
    queue = _Turns()
    first, second, third = (queue.take("there", "host") for _ in range(3))
    second.end()
    waiting = threading.Thread(target=third.wait)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert queue.are_awaited("there")
    first.end()
    waiting.join(60)
    third.end()
    assert not queue.are_awaited("there")


def test_a_turn_that_nobody_has_any_more_is_over():
    queue = _Turns()
    lost, later = queue.take("there", "host", in_background=True), queue.take("there", "host")
    del lost
    later.wait()
    assert not queue.has_background


def test_a_timer_that_raises_while_a_save_takes_its_turn_does_not_make_later_ones_hang(tmp_path):
    def alarm(*_):
        raise TimeoutError

    def hook(frame, event, _):
        if event == "return" and frame.f_code is _Turns.take.__code__:
            sys.settrace(None)
            signal.raise_signal(signal.SIGALRM)
        return hook

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        sys.settrace(hook)
        with suppress(TimeoutError):
            save_async(tree(1.0), tmp_path)
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGALRM, before)
    assert not turns.are_awaited(store_at(tmp_path).key)
    save(tree(2.0), tmp_path)
    assert load(tmp_path)["w"][0] == 2.0


def test_a_save_waits_for_an_earlier_one_no_longer_than_its_deadline():
    queue = _Turns()
    first, second = queue.take("place", ""), queue.take("place", "")
    with (
        within(0.05, "SaveOptions(timeout=0.05)"),
        pytest.raises(
            TimeoutError, match=r"SaveOptions\(timeout=0\.05\) is over, and an earlier save to the same place"
        ),
    ):
        second.wait()
    first.end()
    second.wait()
