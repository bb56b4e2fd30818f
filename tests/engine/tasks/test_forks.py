"""What threads share is free in a forked child, whichever thread of the parent held it."""

import functools
import importlib
import pkgutil
import subprocess
import sys
import threading

import eformer
from eformer._engine.tasks.forks import Lock

LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
ALLOWED = {
    "_decoders_lock",  # which every fork waits for, and releases in the child
    "SILENT._lock",  # of a meter that reports nothing, which never takes it
    "turns._lock",  # which is reset with all it guards
}


def shared():
    """Yield what modules of eformer hold, and what is held by their classes, and by objects of these."""
    for found in pkgutil.walk_packages(eformer.__path__, "eformer."):
        if not found.name.endswith("__main__") and found.name != "eformer.keras":  # which needs keras
            for name, value in list(vars(importlib.import_module(found.name)).items()):
                yield f"{found.name}.{name}", value
                kind = value if isinstance(value, type) else type(value)
                if kind is not Lock and kind.__module__.startswith("eformer"):
                    held = getattr(value, "__dict__", {})
                    yield from ((f"{found.name}.{name}.{key}", inner) for key, inner in list(held.items()))


def test_locks_of_modules_and_classes_are_renewed_in_children():
    plain = {name for name, value in shared() if isinstance(value, LOCKS) and not isinstance(value, Lock)}
    renewed = {name for name, value in shared() if isinstance(value, Lock)}
    assert [name for name in plain if not name.endswith(tuple(ALLOWED))] == []
    assert "eformer._engine.tasks.pool.Countdown._lock" in renewed
    assert "eformer._engine.stores.local_files._budget._lock" in renewed


def test_no_function_of_python_takes_or_releases_a_lock():
    lock, calls = Lock(), []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    with lock:  # a Ctrl-C inside a function of Python would leave it taken
        pass
    sys.setprofile(None)
    assert calls == []


def test_no_property_is_computed_under_a_lock_of_its_class():
    assert [name for name, value in shared() if isinstance(value, functools.cached_property)] == []


FORK = """
import gc, os, sys, threading
from pathlib import Path
from eformer._engine.record.values import json_decoder
from eformer._engine.saving.pending import Pending, wait
from eformer._engine.stores.local_files import LocalFiles
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.pool import gc_paused
from eformer._engine.tasks.turns import turns

is_held, for_ever = threading.Event(), threading.Event()
lock, files = Lock(), LocalFiles(Path("."), ["a"])
over, under_way = Pending("over"), Pending("under way")
over.start(lambda: None)
over.result()
under_way.start(lambda: for_ever.wait(600))

def hold():
    with gc_paused(), lock, files.opening, turns._lock, over._future._condition, under_way._future._condition:
        is_held.set()
        for_ever.wait(600)

threading.Thread(target=hold, daemon=True).start()
is_held.wait()
assert not gc.isenabled()
if os.fork() == 0:
    with lock, files.opening, turns._lock:
        assert gc.isenabled()
    wait()
    assert over.result() == "over"
    try:
        under_way.result()
    except RuntimeError as error:
        assert "the parent of this forked process saves to under way: wait in the parent" in str(error)
        os._exit(0)
    os._exit(1)
status = os.wait()[1]
for_ever.set()
sys.exit(status != 0)
"""


def test_a_child_waits_for_nothing_that_a_thread_of_its_parent_holds():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORK], check=True, timeout=60)


COLLECTOR_OFF = """
import gc, os, sys
from eformer._engine.tasks.pool import gc_paused
gc.disable()
with gc_paused():
    if os.fork() == 0:
        os._exit(gc.isenabled())
sys.exit(os.wait()[1] != 0)
"""


def test_a_collector_that_the_program_has_turned_off_stays_off_in_a_child():
    subprocess.run([sys.executable, "-W", "ignore", "-c", COLLECTOR_OFF], check=True, timeout=60)
