"""Ctrl-C at any line of a call: afterwards a newer tree is saved and loaded, nothing hangs, and nothing is left open.

EFORMER_INTERRUPTS says how many lines apart: 151, or 4 by `make faults`. With 1 it takes half an hour.
"""

import os
import zlib

import pytest

from support import forkserver, interrupting
from support.interrupting import PATIENCE, Calls
from support.thorough import IS_THOROUGH

STRIDE = int(os.environ.get("EFORMER_INTERRUPTS", "4" if IS_THOROUGH else "151"))
CALLS = [
    name
    for name in vars(Calls)
    if name[0] != "_" and name not in ("path", "number", "tree", "check", "check_run")
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_gives_everything_back(place, name):
    first = zlib.crc32(name.encode()) % STRIDE
    told = forkserver.run(interrupting.main, str(place), name, STRIDE, first, limit=30 * PATIENCE)
    assert told.returncode == 0, told.stdout + told.stderr[-5000:]
    assert f"{name}: " in told.stdout
