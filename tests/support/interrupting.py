"""Press Ctrl-C at every line of a call, then save and load.

    python -W ignore -m support.interrupting FOLDER CALL STRIDE FIRST

Tests call `main` in a process of its own. A trace hook sends a real SIGINT at the first visit of a line or function, of eformer or of the modules of Python that
wait and lock. STRIDE and FIRST choose among these sites. Every other site gets a second SIGINT a few events later. A
call that hangs tells where it stands and ends the program.
"""

from __future__ import annotations

import concurrent.futures._base
import contextlib
import faulthandler
import gc
import importlib
import os
import queue
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import eformer
from eformer import checkpoint
from eformer.pytree import save_to_file
from eformer.serialization import AsyncCheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

PATIENCE = 60.0  # seconds for a call, which needs a hundredth of one
OURS = str(Path(eformer.__file__).parent)
WAITING = {module.__file__ for module in (threading, contextlib, queue, concurrent.futures._base)}
FINEST = str(Path(OURS, "_engine", "tasks", "interrupts.py"))  # is interrupted at every instruction

Site = tuple[str, str, int]


class Interrupts:
    """A trace hook that lists the sites of a call, or sends SIGINT at one of them."""

    def __init__(self, target: Site | None = None, again: int = 0) -> None:
        self.target, self.again = target, again
        self.sites: dict[Site, None] = {}
        self.sent: list[Site] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if (not name.startswith(OURS) and name not in WAITING) or is_finalizer(frame):
            return None
        frame.f_trace_opcodes = name == FINEST
        if event in ("call", "line", "opcode"):
            at = frame.f_lasti if event == "opcode" else frame.f_lineno
            self.visit((name, f"{event} {frame.f_code.co_qualname}", at))
        return self

    def visit(self, site: Site) -> None:
        if self.target is None:
            self.sites[site] = None
        elif self.target == site:
            self.target = ("", "", self.again)
            self.sent.append(site)
            signal.raise_signal(signal.SIGINT)
        elif self.target[0] == "":  # the second one
            left = self.target[2] - 1
            self.target = ("", "", left)
            if left == 0:
                self.sent.append(site)
                signal.raise_signal(signal.SIGINT)

    def during(self, call: Callable[[], object]) -> str:
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return "interrupted"
        finally:
            sys.settrace(None)
        return "returned"


def pressed_at(function: Any, call: Callable[[], object]) -> None:
    """Call something, and press Ctrl-C when it calls a function."""

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is function.__code__:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)

    sys.settrace(hook)
    try:
        call()
    finally:
        sys.settrace(None)


def is_finalizer(frame: FrameType | None) -> bool:
    """Tell whether a frame belongs to a finalizer: Python drops all that is raised there."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def is_closing(site: Site) -> bool:
    """Tell whether a site is between a run that was made and its block, or where a run is closed. There, Python leaves
    the handler of the run in place."""
    return (
        site[1].split()[1].startswith(("Run.__enter__", "Run.__exit__", "Signals.close", "Signals._put_back"))
    )


@dataclass
class Calls:
    """The calls that are interrupted. Every one of them leaves the checkpoint at `path` whole."""

    path: Path
    number: float = 0.0

    def tree(self, number: float | None = None) -> dict[str, Any]:
        value = self.number if number is None else number
        large = np.full((300, 1000), value, np.float32)  # in several pieces
        return {
            "large": large,
            "small": {str(n): np.full(3, value) for n in range(4)},
            "jax": jax.numpy.full(5, value),
        }

    def save(self) -> None:
        checkpoint.save(self.tree(), self.path)

    def save_file(self) -> None:
        checkpoint.save(self.tree(), f"{self.path}.safetensors", progress=lambda *_: None)

    def save_arrays(self) -> None:
        checkpoint.save(self.tree(), f"{self.path}-arrays", format="tensorstore")

    def save_async(self) -> None:
        checkpoint.save_async(self.tree(), self.path)

    def save_msgpack(self) -> None:
        save_to_file(self.tree(), f"{self.path}.msgpack")

    def result(self) -> None:
        checkpoint.save_async(self.tree(), self.path).result(30)

    def wait(self) -> None:
        checkpoint.save_async(self.tree(), self.path)
        checkpoint.wait()

    def load(self) -> None:
        checkpoint.load(self.path)

    def load_like(self) -> None:
        checkpoint.load(self.path, like=self.tree(), rename=[("x", "y")], progress=lambda *_: None)

    def load_mapped(self) -> None:
        checkpoint.load(self.path, mmap=True)

    def load_after(self) -> None:
        checkpoint.save_async(self.tree(), self.path)
        checkpoint.load(self.path)

    def load_and_save(self) -> None:
        """Save in a function that a load calls."""

        def save(array: Any, name: str) -> Any:
            return array if name != "jax" else checkpoint.save_async(self.tree(), self.path) and array

        checkpoint.load(self.path, callback=save)

    def open(self) -> None:
        with checkpoint.open(self.path) as view:
            view["large"][10:20]

    def verify(self) -> None:
        checkpoint.inspect(self.path)
        checkpoint.verify(self.path)

    def run(self) -> None:
        with checkpoint.Run(f"{self.path}-run", every=1, keep=2) as run:
            run.resume()
            run.after(run.step + 1, self.tree())
            run.wait()
            run.save(run.step + 1, self.tree())

    def manager(self) -> None:
        manager = AsyncCheckpointManager(use_tensorstore=False)
        manager.save(self.tree(), self.path)
        manager.save_async(self.tree(), self.path)
        manager.load(self.path, None)
        manager.wait_until_finished()

    def check(self, number: float) -> None:
        """Save and load newer trees, and see that they are there and all else is as before."""
        for path in (self.path, f"{self.path}.safetensors", f"{self.path}-arrays"):
            if os.path.lexists(path):
                is_arrays = str(path).endswith("-arrays")
                checkpoint.save(self.tree(number), path, format="tensorstore" if is_arrays else "safetensors")
                checkpoint.wait()
                found = checkpoint.load(path)
                assert found["large"][7, 7] == found["small"]["3"][0] == found["jax"][0] == number, found
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert gc.isenabled()
        left = [
            name
            for name in os.listdir(self.path.parent) + os.listdir(self.path)
            if name.startswith(".eformer-")
        ]
        assert not left, left

    def check_run(self) -> None:
        """Resume the run that was interrupted, and go on with it."""
        with checkpoint.Run(f"{self.path}-run", every=1, keep=2) as run:
            found = run.resume()
            number = 0.0 if found is None else found.tree["small"]["0"][0]
            run.after(run.step + 1, self.tree(number + 0.5))
        last = checkpoint.load(f"{self.path}-run")
        assert last["large"][5, 5] == number + 0.5, last


def has_handlers() -> bool:
    """Tell whether anything handles SIGTERM or SIGHUP, and put the handlers of the system back."""
    found = [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)]
    return found != [signal.SIG_DFL] * 2


def own() -> tuple[list[str], list[str]]:
    """Return the descriptors of this process, and its threads, when all saves are over."""
    for thread in threading.enumerate():
        if thread.name.startswith("eformer-"):
            thread.join(1 if thread.daemon else PATIENCE)  # a run that is collected tells its threads to end
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    files = sorted(os.readlink(link) for link in links if os.path.lexists(link))
    return [name for name in files if name.startswith("/dev/shm")], sorted(
        t.name for t in threading.enumerate()
    )


def main(folder: str, name: str, stride: int, first: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    has_handlers()  # puts back SIGHUP, which nohup ignores
    calls = Calls(Path(folder, "checkpoint"))
    call = getattr(calls, name)
    for module in ("verify", "follow"):
        getattr(checkpoint, module)
    importlib.import_module("asyncio")
    checkpoint.save(calls.tree(), calls.path)
    for _ in range(2):  # twice: the first time imports and compiles
        call()
        calls.check(0.0)
        checkpoint.save(calls.tree(), calls.path)
    hook = Interrupts()
    assert hook.during(call) == "returned"
    before, outcomes = own(), dict.fromkeys(("interrupted", "returned"), 0)
    count, sites = len(hook.sites), list(hook.sites)[first::stride]
    for number, site in enumerate(sites):
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        os.write(2, f"{number}: {name} at {site}\n".encode())
        calls.number = 2.0 * number + 1
        again = 1 + 3 * (number // 2) % 61 if number % 2 else 0
        for _ in range(5):  # what threads do decides whether a call comes to some sites
            hook = Interrupts(site, again)
            outcome = hook.during(call)
            if hook.sent:
                break
        outcomes[outcome] += 1
        assert outcome == "interrupted" or not hook.sent, f"Ctrl-C was swallowed at {site}"
        assert not has_handlers() or any(is_closing(sent) for sent in hook.sent), site
        calls.check(2.0 * number + 2)
        if name == "run":
            calls.check_run()
        if own() != before:
            gc.collect()  # a view that was interrupted closes its files when it is collected
            assert own() == before, (site, own(), before)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(f"{name}: {len(sites)} of {count} sites, {outcomes['interrupted']} raised\n")
    assert outcomes["interrupted"] >= 0.9 * len(sites), outcomes  # a few lines run seldom


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
