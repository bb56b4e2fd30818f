"""Saves from an accelerator and loads onto it, beside peers and beside what the machine can do.

    python bench/gpu.py [--gigabytes 7.4] [--dir DIRECTORY] [--rounds 2] [--out bench/results] [--name gpu]
                        [--only SYSTEM ...|shapes|race] [--shapes-dir /dev/shm] [--quick]

Runs alone, without a network: peers that cannot be imported are left out, which is said. Every system has a fresh
process in every round. A save goes to a new directory and ends when all is on stable storage; a load goes onto
shardings, begins in the page cache and ends when the arrays are on the device; what was loaded is compared there, bit
for bit. Then trees of four other shapes, once (gpu_shapes.py), which go to gpu_shapes.md. Without an accelerator all of
it runs on the CPU, which only shows that it runs; `--quick`, with a twentieth of the bytes, is for that.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_races
import gpu_shapes
import limits
import machine
import measuring

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
LIMITS = ("limit: write", "limit: load")
PEERS = ("orbax", "orbax, tuned", "jax", "safetensors, flax")
SYSTEMS = ("eformer", "eformer, no like", "eformer, no digests", "eformer, zarr", *PEERS)
SHAPES, RACE = "shapes", "race"
WIDTH = 2048
SLOT = 64 * 2**20
REPEATS = 4

BARS = [  # of a 7.4 GB tree on an H200
    ("eformer", "save_async returns, ms", "<=", 10.0),
    ("eformer", "load, GB/s", ">=", 20.0),
    ("eformer", "save, of the limit", ">=", 0.9),
    ("eformer", "memory after all saves, GB", "<=", 1.5),
    ("eformer", "memory of the last load, MB", "<=", 64.0),
]

# --------------------------------------------------------------------------------------------- cells


def shapes_of(nbytes: int) -> list[tuple[int, ...]]:
    """A language model of about so many bytes in bfloat16: 418 leaves for 7.4 GB."""
    w = WIDTH
    layer = [(w, w)] * 4 + [(w, 4 * w), (w, 4 * w), (4 * w, w), (w,)]
    vocabulary = [(64000, w)] * 2
    left = nbytes - sum(2 * a * b for a, b in vocabulary)
    layers = max(1, round(left / (2 * (16 * w * w + w))))
    return layer * layers + vocabulary


def tree_of(nbytes: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    shapes = shapes_of(nbytes)
    make = {
        shape: jax.jit(lambda key, shape=shape: jax.random.normal(key, shape, jnp.bfloat16))
        for shape in shapes
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    tree = {f"leaf_{n}": make[shape](key) for n, (shape, key) in enumerate(zip(shapes, keys, strict=True))}
    return jax.block_until_ready(tree)


def measured(name: str, nbytes: int, directory: Path) -> dict[str, Any]:
    if name == "limit: write":
        return limit_of_writing(nbytes, directory)
    if name == "limit: load":
        return limit_of_loading(nbytes, directory)
    if name in gpu_shapes.CELLS:
        return gpu_shapes.measured(name, nbytes, directory / "tree")
    return system(name, nbytes, directory)


def limit_of_writing(nbytes: int, directory: Path) -> dict[str, Any]:
    """The best of all ways of plain threads from host memory to stable storage."""
    data = limits.filled(nbytes)
    found: dict[str, float] = {}
    for mode in limits.MODES:
        for threads in (4, 8):
            try:
                found[f"{mode}, {threads} threads"] = limits.write_one(mode, directory, data, threads)
            except OSError as error:
                found.setdefault(f"{mode}: {error.strerror}", float("inf"))
    best = min(found, key=found.__getitem__)
    return {
        "save, s": [found[best]],
        "way": best,
        "ways": {k: v for k, v in found.items() if v < float("inf")},
    }


def limit_of_loading(nbytes: int, directory: Path) -> dict[str, Any]:
    """Threads that read into page-locked memory, from which the device copies; no leaves, no digests."""
    import jax

    path = directory / "plain"
    limits.write_one("written out", directory, limits.filled(nbytes), 4)
    device, seconds = jax.local_devices()[0], []
    for _ in range(REPEATS):
        measuring.read_once(path)
        seconds.append(load_plainly(path, nbytes, device))
    return {"load, s": seconds, "way": "16 MiB reads, one thread a core"}


def load_plainly(path: Path, nbytes: int, device: Any) -> float:
    import jax

    threads = os.cpu_count() or 2
    slots = [measuring.aligned(16 * 2**20) for _ in range(threads)]
    for slot in slots:
        slot[:: measuring.PAGE] = 0
        lock = getattr(device.client, "dma_map", None)
        if lock and device.platform != "cpu":
            lock(slot.ctypes.data, slot.nbytes)
    own = threading.local()
    free = list(slots)
    descriptor = os.open(path, os.O_RDONLY)

    def block(at: int) -> Any:
        if not hasattr(own, "slot"):
            own.slot = free.pop()
        data = own.slot[: min(own.slot.nbytes, nbytes - at)]
        os.preadv(descriptor, [data.data], at)
        return jax.device_put(data, device).block_until_ready()

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        arrays = list(pool.map(block, range(0, nbytes, 16 * 2**20)))
    seconds = time.perf_counter() - start
    os.close(descriptor)
    del arrays
    for slot in slots:
        if device.platform != "cpu" and hasattr(device.client, "dma_unmap"):
            device.client.dma_unmap(slot.ctypes.data)
    return seconds


def system(name: str, nbytes: int, directory: Path) -> dict[str, Any]:
    import jax
    from systems import SYSTEMS as ADAPTERS

    tree = tree_of(nbytes)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
    adapter = ADAPTERS[name](shapes)
    rehearse(ADAPTERS[name], directory)
    before = measuring.resident("VmRSS")
    answer: dict[str, Any] = {"leaves": len(tree), "bytes": sum(a.nbytes for a in tree.values())}
    if name in ("eformer", "eformer, zarr"):
        answer["save_async returns, ms"] = [1e3 * s for s in asynchronous(adapter, tree, directory)]
    path = directory / "a" / "checkpoint"
    answer["save, s"] = [save(adapter, adapter.own(tree), path) for _ in range(2)]
    answer["memory after all saves, GB"] = [(measuring.resident("VmRSS") - before) / 1e9]
    answer["load, s"], answer["memory of each load, MB"] = loads(adapter, adapter.own(tree), path)
    return answer


def rehearse(new: Callable[[Any], Any], directory: Path) -> None:
    """Imports and first calls are no part of what is measured."""
    import jax
    import jax.numpy as jnp

    tree = {"x": jnp.ones((64, 64), jnp.bfloat16)}
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
    adapter = new(shapes)
    save(adapter, adapter.own(tree), directory / "r" / "rehearsal")
    jax.block_until_ready(adapter.load(directory / "r" / "rehearsal"))


def asynchronous(adapter: Any, tree: Any, directory: Path) -> list[float]:
    """Seconds until `save_async` returns; right after it the next step gets the arrays as a gift. The first is for a
    tree that was never saved before."""
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda t: {k: v * jnp.bfloat16(0.5) for k, v in t.items()}, donate_argnums=0)
    copy = jax.jit(lambda t: {k: v + jnp.bfloat16(0) for k, v in t.items()})
    seconds, path = [], directory / "b" / "checkpoint"
    for _ in range(REPEATS):
        state = jax.block_until_ready(copy(tree))
        shutil.rmtree(path.parent, ignore_errors=True)
        start = time.perf_counter()
        wait = adapter.start(state, path)
        seconds.append(time.perf_counter() - start)
        jax.block_until_ready(step(state))
        wait()
        time.sleep(1)
    require_equal(adapter.load(path), tree)
    shutil.rmtree(path.parent)
    return seconds


def save(adapter: Any, tree: Any, path: Path) -> float:
    shutil.rmtree(path.parent, ignore_errors=True)
    path.parent.mkdir()
    os.sync()
    start = time.perf_counter()
    adapter.save(tree, path)
    if not adapter.syncs:
        measuring.sync_all(path)
    return time.perf_counter() - start


def loads(adapter: Any, tree: Any, path: Path) -> tuple[list[float], list[float]]:
    import jax

    seconds, grown = [], []
    for number in range(REPEATS):
        measuring.read_once(path)
        before = measuring.resident("VmRSS")
        start = time.perf_counter()
        loaded = jax.block_until_ready(adapter.load(path))
        seconds.append(time.perf_counter() - start)
        if number == 0:
            require_equal(loaded, tree)
        del loaded
        grown.append((measuring.resident("VmRSS") - before) / 1e6)
    return seconds, grown


def require_equal(loaded: Any, saved: Any) -> None:
    import jax
    import jax.numpy as jnp

    same = jax.jit(lambda a, b: (a.view(jnp.uint16) == b.view(jnp.uint16)).all())
    pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(saved), strict=True)
    assert all(bool(same(a, b)) for a, b in pairs), "other values came back"


# -------------------------------------------------------------------------------------------- report


def rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / 1e9


def summary(cells: list[dict[str, Any]], name: str, nbytes: int) -> dict[str, float]:
    """Medians over the rounds; a load that is the first of its process is told apart from the later ones."""
    of_it = [c for c in cells if c["system"] == name and "error" not in c]
    found: dict[str, float] = {}

    def take(key: str, values: list[float]) -> None:
        if values:
            found[key] = statistics.median(values)

    take("save, GB/s", [rate(nbytes, s) for c in of_it for s in c.get("save, s", [])])
    take("first load, GB/s", [rate(nbytes, c["load, s"][0]) for c in of_it if "load, s" in c])
    take("load, GB/s", [rate(nbytes, s) for c in of_it for s in c.get("load, s", [])[1:]])
    take(
        "first save_async returns, ms",
        [c["save_async returns, ms"][0] for c in of_it if "save_async returns, ms" in c],
    )
    take("save_async returns, ms", [ms for c in of_it for ms in c.get("save_async returns, ms", [])[2:]])
    take("memory after all saves, GB", [x for c in of_it for x in c.get("memory after all saves, GB", [])])
    take(
        "memory of the last load, MB",
        [c["memory of each load, MB"][-1] for c in of_it if "memory of each load, MB" in c],
    )
    return found


COLUMNS = (
    "save, GB/s", "save, of the limit", "load, GB/s", "load, of the limit", "first load, GB/s",
    "save_async returns, ms", "first save_async returns, ms",
    "memory after all saves, GB", "memory of the last load, MB",
)  # fmt: skip


def with_fractions(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    for values in found.values():
        for what, limit in (("save", LIMITS[0]), ("load", LIMITS[1])):
            top = found.get(limit, {}).get(f"{what}, GB/s")
            if top and f"{what}, GB/s" in values:
                values[f"{what}, of the limit"] = values[f"{what}, GB/s"] / top
    return found


def markdown(facts: dict[str, Any], found: dict[str, dict[str, float]], cells: list[dict[str, Any]]) -> str:
    machine, versions = facts["machine"], {**facts["versions"]["peers"], **facts["versions"]["own"]}
    lines = [f"# Accelerator: {facts['device']}", ""]
    lines += [
        f"{facts['date']}. {machine['cpu']}, {machine['cores']} cores, {machine['memory GB']} GB, Linux "
    ]
    lines[-1] += f"{machine['kernel']}, {machine['file system']} ({machine['mount options']})."
    lines += [
        "",
        ", ".join(f"{name} {version}" for name, version in versions.items() if version != "missing"),
        "",
    ]
    lines += [
        f"A tree of {facts['bytes'] / 1e9:.1f} GB, bfloat16, {facts['leaves']} leaves. `{facts['command']}`",
        "",
    ]
    lines += [f"| | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for name, values in found.items():
        shown = [f"{values[c]:.2f}" if c in values else "" for c in COLUMNS]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    lines += ["", "| bar | reached | goal | met |", "| --- | --- | --- | --- |"]
    for name, what, sign, goal in BARS:
        reached = found.get(name, {}).get(what)
        if reached is not None:
            is_met = reached >= goal if sign == ">=" else reached <= goal
            lines.append(
                f"| {name}: {what} | {reached:.2f} | {sign} {goal:g} | {'yes' if is_met else '**no**'} |"
            )
    notes = [f"- {c['system']}: {c.get('error') or c['way']}" for c in cells if "error" in c or "way" in c]
    return "\n".join([*lines, "", *dict.fromkeys(notes)]) + "\n"


def run_cell(name: str, nbytes: int, directory: Path) -> dict[str, Any]:
    place = Path(tempfile.mkdtemp(dir=directory))
    command = [sys.executable, __file__, "--cell", name, "--bytes", str(nbytes), "--dir", str(place)]
    print(name, file=sys.stderr, flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            return {"system": name, "error": last[:300]}
        return {"system": name, **json.loads(done.stdout.splitlines()[-1])}
    except subprocess.TimeoutExpired:
        return {"system": name, "error": "took more than 300 s"}
    finally:
        shutil.rmtree(place, ignore_errors=True)


def facts_of(directory: Path, nbytes: int, args: argparse.Namespace) -> dict[str, Any]:
    code = "import jax; d = jax.devices()[0]; print(d.device_kind)"
    kind = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split("\n")[0]
    described = machine.describe(directory, {"own": sys.executable})
    described["versions"] |= {"peers": machine.versions(sys.executable, *machine.PACKAGES["peers"])}
    size = ["--quick"] if args.quick else [f"--gigabytes {nbytes / 1e9:.1f} --rounds {args.rounds}"]
    only = [f"--only {' '.join(map(shlex.quote, args.only))}"] if args.only else []
    return {
        **described, "device": kind, "bytes": nbytes, "leaves": len(shapes_of(nbytes)),
        "command": " ".join(["python bench/gpu.py", *size, *only]),
    }  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=7.4)
    parser.add_argument("--dir", type=Path, default=HERE / ".scratch", help="on the disk to be measured")
    parser.add_argument(
        "--shapes-dir", type=Path, default=Path("/dev/shm"), help="in memory, for the four shapes"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--name", default="gpu")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        metavar="SYSTEM",
        help="'shapes' for the four shapes, 'race' for loads and saves beside threads that compute",
    )
    parser.add_argument("--quick", action="store_true", help="0.4 GB, one round")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.only) - {SHAPES, RACE, *LIMITS, *SYSTEMS}:
        parser.error(
            f"--only {', '.join(sorted(unknown))}: there are {', '.join((*LIMITS, *SYSTEMS, SHAPES, RACE))}"
        )
    if args.quick:
        args.gigabytes, args.rounds = 0.4, 1
    return args


def main() -> None:
    args = parse_arguments()
    if args.cell:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a library prints is no answer
        print(json.dumps(measured(args.cell, args.bytes, args.dir)), file=answers, flush=True)
        return

    for directory in (args.dir, args.out):
        directory.mkdir(parents=True, exist_ok=True)
    wanted = args.only or [*LIMITS, *SYSTEMS, SHAPES]
    if systems := [name for name in wanted if name not in (SHAPES, RACE)]:
        measure_systems(systems, args)
    if SHAPES in wanted:
        measure_shapes(args)
    if RACE in wanted:
        loads = ["--loads", "4", "--saves", "2", "--damaged", "2", "--gigabytes", "0.4"] if args.quick else []
        sys.exit(gpu_races.main(["--out", str(args.out / "gpu_races.md"), *loads]))


def measure_systems(systems: list[str], args: argparse.Namespace) -> None:
    nbytes = sum(2 * int(a) * int(b[0] if b else 1) for a, *b in shapes_of(int(args.gigabytes * 1e9)))
    cells: list[dict[str, Any]] = []
    for number in range(args.rounds):
        names = systems[number % len(systems) :] + systems[: number % len(systems)]
        cells += [{"round": number, **run_cell(name, nbytes, args.dir.resolve())} for name in names]
    found = with_fractions({name: summary(cells, name, nbytes) for name in systems})
    facts = facts_of(args.dir.resolve(), nbytes, args)
    text = markdown(facts, found, cells)
    (args.out / f"{args.name}.md").write_text(text)
    answer = {"facts": facts, "summary": found, "cells": cells}
    (args.out / f"{args.name}.json").write_text(json.dumps(answer, indent=1))
    print(text)


def measure_shapes(args: argparse.Namespace) -> None:
    nbytes, place = int(args.gigabytes * 1e9), args.shapes_dir.resolve()
    cells = [run_cell(name, nbytes, place) for name in gpu_shapes.CELLS]
    text = gpu_shapes.markdown(facts_of(place, nbytes, args), cells)
    (args.out / "gpu_shapes.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
