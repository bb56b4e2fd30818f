"""Ctrl-C at any line of a call: afterwards a newer tree is saved and loaded, nothing hangs, and nothing is left open.

EFORMER_INTERRUPTS says how many lines apart: 151, or 4 by `make faults`. With 1 it takes half an hour.
"""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from support.interrupting import PATIENCE, Calls

TESTS = Path(__file__).parent.parent
IS_THOROUGH = os.environ.get("EFORMER_SAMPLE") == "1" or os.environ.get("EFORMER_FAULTS_STRIDE") == "1"
STRIDE = int(os.environ.get("EFORMER_INTERRUPTS", "4" if IS_THOROUGH else "151"))
CALLS = [
    name
    for name in vars(Calls)
    if name[0] != "_" and name not in ("path", "number", "tree", "check", "check_run")
]


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_gives_everything_back(place, name):
    first = zlib.crc32(name.encode()) % STRIDE
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "support.interrupting",
        str(place),
        name,
        str(STRIDE),
        str(first),
    ]
    told = subprocess.run(
        command, cwd=TESTS, capture_output=True, text=True, timeout=30 * PATIENCE, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr[-5000:]
    assert f"{name}: " in told.stdout
