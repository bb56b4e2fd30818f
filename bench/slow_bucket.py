"""What `Run.after` takes of the training thread, with a bucket that answers every request after 50 ms.

    python bench/slow_bucket.py [--steps 100] [--delay 0.05] [--out bench/results]

The server is the one of the tests, on loopback and in a process of its own. A step computes on all cores for about
20 ms, and every tenth step is saved; the run keeps 3. `save_async` to a disk and Orbax's manager on a disk stand beside
it: Orbax has no store that could ask this server.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from run import make_environment  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY, KEEP = 10, 3


def serve(answers: Any, delay: float) -> None:
    from support.object_server import serving

    with serving() as server:
        server.delay = delay
        answers.put(server.url)
        time.sleep(10**6)


def state(number: int) -> Any:
    return {
        "w": [jnp.full((256, 256), number + i, jnp.float32) for i in range(16)],
        "step": jnp.int32(number),
    }


def loop(after: Callable[[int, Any], object], steps: int, between_saves: float) -> dict[str, list[float]]:
    """Return the milliseconds of `after` at steps with and without a save. The first save, which compiles, is left
    out."""
    states = jax.block_until_ready([state(number) for number in range(4)])
    numbers = jnp.ones((700, 700))
    train = jax.jit(lambda w: w @ w * 1e-3 @ w)
    found: dict[str, list[float]] = {"save": [], "none": []}
    for step in range(1, steps + 1):
        if step % EVERY == 0:
            time.sleep(between_saves)
        train(numbers).block_until_ready()
        began = time.perf_counter()
        after(step, states[step % 4])
        if step > EVERY:
            found["none" if step % EVERY else "save"].append(1e3 * (time.perf_counter() - began))
    return found


def in_bucket(url: str, steps: int, wait: float) -> dict[str, list[float]]:
    from eformer import checkpoint
    from support.object_server import credentials

    options = {**credentials(), "endpoint": url, "allow_http": True, "virtual_hosted_style_request": False}
    arguments: dict[str, Any] = {"every": EVERY, "keep": KEEP, "options": {"store_options": options}}
    with checkpoint.Run("s3://bucket/run", signals=(), **arguments) as run:
        return loop(run.after, steps, wait)


def on_disk(folder: str, steps: int, wait: float) -> dict[str, list[float]]:
    from eformer import checkpoint

    with checkpoint.Run(f"{folder}/run", every=EVERY, keep=KEEP, signals=()) as run:
        return loop(run.after, steps, wait)


def by_save_async(folder: str, steps: int, wait: float) -> dict[str, list[float]]:
    from eformer import checkpoint

    def after(step: int, tree: Any) -> None:
        if step % EVERY == 0:
            checkpoint.save_async(tree, f"{folder}/step-{step}")

    return loop(after, steps, wait)


def by_orbax(folder: str, steps: int, wait: float) -> dict[str, list[float]]:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(save_interval_steps=EVERY, max_to_keep=KEEP)
    with ocp.CheckpointManager(f"{folder}/orbax", options=options) as manager:
        return loop(lambda step, tree: manager.save(step, args=ocp.args.StandardSave(tree)), steps, wait)


SYSTEMS = {"bucket": in_bucket, "disk": on_disk, "save_async": by_save_async, "orbax": by_orbax}
NAMES = {
    "bucket": "`Run`, in the bucket",
    "disk": "`Run`, on a disk",
    "save_async": "`save_async`, on a disk",
    "orbax": "Orbax `CheckpointManager`, on a disk",
}


def row(name: str, found: dict[str, list[float]]) -> str:
    def cells(kind: str) -> str:
        times = found[kind]
        most = statistics.quantiles(times, n=100, method="inclusive")[98]
        return f"{statistics.median(times):.3f} | {most:.3f} | {max(times):.3f}"

    return f"| {NAMES[name]} | {cells('none')} | {cells('save')} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--wait", type=float, default=2.5, help="seconds of the step before a save")
    parser.add_argument("--out", type=Path, help="a directory for slow_bucket.md")
    parser.add_argument("--system", choices=SYSTEMS, help="measure this one, in this process, and print JSON")
    parser.add_argument("--place", help="of that one")
    arguments = parser.parse_args()
    if arguments.system:
        place = arguments.place or tempfile.mkdtemp()
        print(json.dumps(SYSTEMS[arguments.system](place, arguments.steps, arguments.wait)))
        return
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    answers: Any = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(answers, arguments.delay), daemon=True)
    server.start()
    url = answers.get()
    lines = [
        "# What `Run.after` takes of the training thread",
        "",
        f"{dt.date.today()}, {os.cpu_count()} cores (load before: {os.getloadavg()[0]:.2f}), jax "
        f"{jax.__version__}. A bucket that answers after {1e3 * arguments.delay:.0f} ms, {arguments.steps} steps, a "
        f"save of 4 MB every {EVERY}, {KEEP} are kept. Milliseconds; the first save is left out. "
        "`python bench/slow_bucket.py`",
        "",
        "| | no save: p50 | p99 | most | save: p50 | p99 | most |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in SYSTEMS:
        python = make_environment("peers") if name == "orbax" else sys.executable
        command = [python, __file__, "--system", name, "--steps", str(arguments.steps)]
        with tempfile.TemporaryDirectory() as folder:
            place = url if name == "bucket" else folder
            wait = arguments.wait if name == "bucket" else 0.2
            command += ["--place", place, "--wait", str(wait)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        lines.append(row(name, json.loads(done.stdout.splitlines()[-1])))
        print(lines[-1], flush=True)
    server.terminate()
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "slow_bucket.md").write_text(text)


if __name__ == "__main__":
    main()
