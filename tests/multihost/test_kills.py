"""A process of several is killed while they save, at any time: the survivors end, and what was committed is whole.

EFORMER_KILLS says how many: 4, or 20 by `make faults`.
"""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eformer.checkpoint import load, save, verify
from multihost import scenes
from support.processes import Job

pytestmark = pytest.mark.xdist_group("processes")

KILLS = int(os.environ.get("EFORMER_KILLS", "4"))
HEARTBEAT = 6  # seconds after which JAX takes a process for dead
AT_ONCE = 4


def test_a_killed_process_leaves_a_whole_checkpoint_and_nobody_hangs(tmp_path):
    kinds = [
        (processes, rank, layout, how)
        for processes, ranks in ((2, (0, 1)), (4, (0, 1, 3)))
        for rank in ranks
        for layout in ("safetensors", "tensorstore")
        for how in ("sync", "async")
    ]
    chosen = random.Random(KILLS)
    cases = [(*kinds[number % len(kinds)], chosen.uniform(0, 0.3)) for number in range(KILLS)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda case: kill(tmp_path / str(case[0]), *case[1]), enumerate(cases)))
    assert len(outcomes) == KILLS
    assert any(left for left, _ in outcomes)  # else nobody was killed within a save
    assert max(took for _, took in outcomes) < HEARTBEAT + 5


def kill(folder: Path, processes: int, rank: int, layout: str, how: str, moment: float):
    """Kills one rank a moment after the first commit. Returns what a save left half-done, and how long others took."""
    folder.mkdir()
    path = folder / layout
    with Job(processes, 2, folder / "log", HEARTBEAT) as job:
        job.start("save_for_ever", path, how)
        wait_for_progress(path, job)
        time.sleep(moment)
        job.kill(rank)
        killed = time.monotonic()
        for survivor in set(range(processes)) - {rank}:
            left = HEARTBEAT + 5 - (time.monotonic() - killed)
            assert job.wait(survivor, left) is not None, f"rank {survivor} hangs:\n{job.told(survivor)}"
        took = time.monotonic() - killed
    noted = max(progress(path))
    assert verify(path).ok, str(verify(path))
    loaded = load(path)
    version = int(loaded["number"])
    scenes.check(loaded, version)
    assert noted <= version <= noted + 1
    left = [entry for entry in os.listdir(path) if entry.startswith(".")]
    save(scenes.tree(), path, **scenes.format_of(path))  # the next one cleans up
    assert not [entry for entry in os.listdir(path) if entry.startswith(".")]
    assert verify(path).ok
    return left, took


def wait_for_progress(path, job):
    deadline = time.monotonic() + 60
    while max(progress(path), default=0) < 1:
        assert time.monotonic() < deadline, "\n".join(job.told(rank) for rank in range(job.count))
        time.sleep(0.005)


def progress(path):
    """The last version that each rank knows to be committed."""
    lines = [file.read_text().splitlines() for file in path.parent.glob(f"{path.name}-progress-*")]
    return [int(noted[-1]) for noted in lines if noted]
