"""Tasks on threads: all of them, bounded, and the first error stops the rest."""

import gc
import threading
import weakref

import pytest

from eformer._engine.tasks.pool import default_threads, gc_paused, run_all


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100])
def test_every_task_runs_once(count):
    done = []
    run_all((lambda i=i: done.append(i) for i in range(count)), 4)
    assert sorted(done) == list(range(count))


def test_tasks_run_at_the_same_time():
    barrier = threading.Barrier(4, timeout=30)
    run_all([barrier.wait] * 4, 4)


def test_a_task_is_made_when_a_thread_is_free_for_it():
    alive, most = set(), 0

    def tasks():
        nonlocal most
        for i in range(200):
            alive.add(i)
            most = max(most, len(alive))
            yield lambda i=i: alive.discard(i)

    run_all(tasks(), 3)
    assert most <= 4


def test_the_first_error_stops_the_rest_and_is_raised():
    done = []

    def tasks():
        for i in range(1000):
            yield (lambda: 1 / 0) if i == 5 else (lambda i=i: done.append(i))

    with pytest.raises(ZeroDivisionError):
        run_all(tasks(), 2)
    assert len(done) < 20
    assert not [thread for thread in threading.enumerate() if thread.name == "eformer-io"]


def test_an_error_in_the_making_of_tasks_is_raised():
    def tasks():
        yield lambda: None
        yield lambda: None
        yield lambda: None
        raise LookupError("no more")

    with pytest.raises(LookupError):
        run_all(tasks(), 3)


def test_there_is_always_a_thread():
    assert 1 <= default_threads() <= 16


def test_without_threads_to_be_had_the_caller_does_it_all(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    run_all([lambda i=i: done.append(i) for i in range(5)], 4)
    assert done == [0, 1, 2, 3, 4]


class Node:
    """One that only the collector can remove: it refers to itself."""

    def __init__(self):
        self.itself = self


class TestUncollected:
    def test_many_objects_are_not_looked_at_again_when_it_ends(self):
        collections = []

        def note(phase, info):
            if phase == "start":
                collections.append(info["generation"])

        gc.unfreeze()  # as in a program that has frozen nothing
        gc.collect()
        gc.callbacks.append(note)
        try:
            with gc_paused():
                kept = [[i] for i in range(50_000)]
            assert gc.isenabled()
            assert collections == []
        finally:
            gc.callbacks.remove(note)
            gc.freeze()
        assert len(kept) == 50_000

    def test_garbage_that_was_made_meanwhile_can_be_collected(self):
        with gc_paused():
            kept = [[i] for i in range(50_000)]
            garbage = weakref.ref(Node())
        gc.collect()
        assert garbage() is None
        assert len(kept) == 50_000

    def test_objects_that_the_caller_froze_stay_frozen(self):
        gc.freeze()
        try:
            frozen = gc.get_freeze_count()
            with gc_paused():
                kept = [[i] for i in range(50_000)]
            assert gc.get_freeze_count() >= frozen - 100  # some of them may have been freed
            assert len(kept) == 50_000
        finally:
            gc.unfreeze()

    def test_a_collector_that_rests_already_is_left_alone(self):
        gc.disable()
        try:
            with gc_paused():
                pass
            assert not gc.isenabled()
        finally:
            gc.enable()


@pytest.mark.parametrize("begins", [False, True])
def test_an_interrupt_while_a_thread_starts_is_raised(monkeypatch, begins):
    """The thread may or may not run by then; to join it is an error if it has not said so yet."""

    class Interrupted(threading.Thread):
        ident = 1

        def start(self):
            if begins:
                super().start()
            raise KeyboardInterrupt

    done = []
    monkeypatch.setattr("eformer._engine.tasks.pool.threading.Thread", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all([lambda i=i: done.append(i) for i in range(3)], 3)
    monkeypatch.undo()
    assert not [thread for thread in threading.enumerate() if thread.name == "eformer-io"]
