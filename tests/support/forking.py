"""Fork again and again while other threads save, load and look at checkpoints.

    python -W ignore -m support.forking FOLDER FORKS

Every child saves and loads checkpoints of its own. One that takes too long tells where it stands, and is killed.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import numpy as np

from eformer import checkpoint
from eformer._engine.processes import hosts
from eformer.checkpoint import inspect, load, save, save_async, verify, wait

PATIENCE = 60.0  # seconds for a child, which needs a tenth of one
FORMATS = ("safetensors", "tensorstore")


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def use(place: Path, leaves: int) -> None:
    """Save and read in as many ways as there are locks on the way."""
    tree = {f"layer-{number}": np.full(3, number) for number in range(leaves)}
    for kind in FORMATS:
        path = place / kind
        save(tree, path, format=kind)
        assert load(path)["layer-1"].tolist() == [1, 1, 1]
        with checkpoint.open(path) as view:
            assert view["layer-1"][0] == 1
        assert inspect(path).trees[""].leaves["layer-1"].shape == (3,)
        assert verify(path).ok
    save_async(tree, place / "later").result()


def use_for_ever(place: Path, leaves: int, errors: list[BaseException]) -> None:
    try:
        while True:
            use(place, leaves)
    except BaseException as error:
        errors.append(error)
        raise


def child(place: Path) -> None:
    """Do in a forked process what its parent's threads were doing."""
    status = 1
    try:
        assert gc.isenabled()
        use(place, 2)
        wait()
        status = 0
    except BaseException as error:  # noqa: BLE001  the parent sees the status
        tell(repr(error))
    finally:
        os._exit(status)


def ended(process: int) -> bool:
    """Wait for a child. Kill it and return False if it hangs or fails."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return status == 0
        time.sleep(0.002)
    os.kill(process, signal.SIGUSR1)
    time.sleep(1)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False


def main(folder: str, forks: int) -> NoReturn:
    """Fork so often, and end this process with the status: its threads are in the middle of something."""
    # Else a backend of JAX would start, and those do not survive a fork.
    hosts.current = lambda *_, **__: hosts.Hosts()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    place, errors, bad = Path(folder), list[BaseException](), 0
    use(
        place / "first", 3
    )  # so that everything is imported: Python's own locks of imports do not survive a fork
    for number, leaves in enumerate((4, 2000)):
        arguments = (place / f"thread-{number}", leaves, errors)
        threading.Thread(target=use_for_ever, args=arguments, daemon=True).start()
    for number in range(forks):
        process = os.fork()
        if process == 0:
            child(place / "child")
        if not ended(process):
            bad += 1
            tell(f"fork {number} hung or failed")
        if number % 1000 == 999:
            tell(f"{number + 1} forks, {bad} bad")
    tell(f"{forks} forks, {bad} bad, errors in the parent: {errors}")
    os._exit(1 if bad or errors else 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
