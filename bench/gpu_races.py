"""Loads onto an accelerator, and saves from it, beside threads that compute: every leaf is compared, bit for bit.

    python bench/gpu_races.py [--shapes 2 33 262 1000] [--loads 75] [--saves 20] [--damaged 10] [--threads 4] [--busy 2]
                              [--gigabytes 7] [--dir /dev/shm/races] [--out bench/results/gpu_races.md]

A program that reads an array before all of its bytes have arrived computes with other bytes, and nothing says so. It
happens only while several threads use the device, so several threads load the same checkpoint at once here, others
multiply and transfer, and digests are not checked (`verify=False`): the check would repeat the transfer. Then some
loads have a transfer that the program damages, and digests are checked: each must be reported and repeated. The program
prints a line for each shape and ends with 1 if a leaf was wrong.
"""

from __future__ import annotations

import argparse
import datetime as dt
import itertools
import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gpu_shapes

SHAPES = {"0": (16, 16), "2": (1024, 1024), "33": (2048, 8064), "262": (4096, 32000), "1000": (131072, 4096)}


def trees_of(shape: tuple[int, ...], nbytes: float) -> dict[str, Any]:
    count = 3000 if shape == SHAPES["0"] else max(1, int(nbytes // (2 * shape[0] * shape[1])))
    return gpu_shapes.tree_of([shape] * count)


def differing(loaded: dict[str, Any], tree: dict[str, Any]) -> list[str]:
    """The names of leaves whose bits differ, compared on the device."""
    import jax

    same = _same(jax)
    found = {name: same(loaded[name], tree[name]) for name in tree}
    return [name for name, is_same in found.items() if not bool(is_same)]


def _same(jax: Any, known: list[Any] = []) -> Any:  # noqa: B006  compiled once
    if not known:
        bits = lambda array: jax.lax.bitcast_convert_type(array, jax.numpy.uint16)  # noqa: E731
        known.append(jax.jit(lambda a, b: (bits(a) == bits(b)).all()))
    return known[0]


def compute(stop: threading.Event) -> None:
    import jax
    import numpy as np

    matrix, memory = jax.numpy.ones((4096, 4096)), np.ones(2**22, np.uint8)
    while not stop.is_set():
        product, there = matrix @ matrix, jax.device_put(memory)
        (there + 1).block_until_ready()
        product.block_until_ready()


def beside(work: Any, threads: int, busy: int) -> float:
    """Call `work` in several threads, beside others that compute. Return the seconds that it took."""
    stop = threading.Event()
    others = [threading.Thread(target=compute, args=(stop,)) for _ in range(busy)]
    workers = [threading.Thread(target=work) for _ in range(threads)]
    began = time.perf_counter()
    for thread in [*others, *workers]:
        thread.start()
    for thread in workers:
        thread.join()
    took = time.perf_counter() - began
    stop.set()
    for thread in others:
        thread.join()
    return took


def tell(line: str, args: argparse.Namespace) -> None:
    print(line, flush=True)
    args.lines.append(line)


def race_loads(kind: str, args: argparse.Namespace) -> int:
    import jax

    from eformer.checkpoint import load, save

    tree = trees_of(SHAPES[kind], args.gigabytes * 1e9)
    path = args.dir / "loads"
    save(tree, path)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    numbers, wrong = itertools.count(), []

    def work() -> None:
        while next(numbers) < args.loads:
            wrong.extend([names] if (names := differing(load(path, like=like, verify=False), tree)) else [])

    took = beside(work, args.threads, args.busy)
    shutil.rmtree(path)
    nbytes = sum(leaf.nbytes for leaf in tree.values())
    tell(
        f"{len(tree)} leaves of {kind} MB: {args.loads} loads, {args.threads} at a time, {args.busy} threads "
        f"compute beside: {len(wrong)} wrong {[names[:3] for names in wrong[:3]]}, {took:.0f} s, "
        f"{args.loads * nbytes / took / 1e9:.1f} GB/s",
        args,
    )
    return len(wrong)


def damage(kind: str, args: argparse.Namespace) -> int:
    """Flip a bit of one transfer in each load: the digests on the device must find it, and the load repeat it."""
    import jax

    from eformer._engine.loading.pinned_stream import before_transfer
    from eformer._engine.trees import device_digests
    from eformer.checkpoint import load, save

    device_digests.ENABLED = True
    tree, path, said = trees_of(SHAPES[kind], 1e9), args.dir / "damaged", Said()
    save(tree, path)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    for _ in range(3):  # until the programs are compiled
        jax.block_until_ready(load(path, like=like))
        time.sleep(3)
    logging.getLogger("eformer").addHandler(said)
    wrong = 0
    for number in range(args.damaged):
        flips = itertools.count()

        def flip(memory: Any, at: int = number, flips: Any = flips) -> None:
            if next(flips) == 0:
                memory[(at * 7919) % (len(memory) // 2)] ^= 1 << at % 8

        token = before_transfer.set(flip)
        wrong += bool(differing(load(path, like=like), tree))
        before_transfer.reset(token)
    logging.getLogger("eformer").removeHandler(said)
    shutil.rmtree(path)
    tell(
        f"{len(tree)} leaves of {kind} MB: {args.damaged} loads with a damaged transfer, {said.count} "
        f"reported, {wrong} wrong",
        args,
    )
    return wrong + (said.count != args.damaged)


class Said(logging.Handler):
    """Count the reports of transfers that were repeated."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "the transfer is repeated" in record.getMessage()


def race_saves(kind: str, args: argparse.Namespace) -> int:
    """Save in the background and donate the arrays at once; load the checkpoint and compare."""
    import jax

    from eformer.checkpoint import load, save_async

    change = jax.jit(
        lambda tree: jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jax.numpy.uint16) ^ 0xFFFF, tree),
        donate_argnums=0,
    )
    tree = trees_of(SHAPES[kind], 1e9)
    numbers, wrong = itertools.count(), []

    def work() -> None:
        while (number := next(numbers)) < args.saves:
            path = args.dir / f"save-{number}"
            mine = jax.tree.map(lambda x: x.copy(), tree)
            saved = save_async(mine, path)
            change(mine)
            saved.result()
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
            wrong.extend([names] if (names := differing(load(path, like=like), tree)) else [])
            shutil.rmtree(path)

    took = beside(work, args.threads, args.busy)
    tell(f"{len(tree)} leaves of {kind} MB: {args.saves} saves, {len(wrong)} wrong, {took:.0f} s", args)
    return len(wrong)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="*", default=["2", "33", "262", "1000"], choices=SHAPES)
    parser.add_argument("--loads", type=int, default=75, help="of each shape")
    parser.add_argument("--saves", type=int, default=20, help="of each shape")
    parser.add_argument("--damaged", type=int, default=10, help="loads of each shape with a damaged transfer")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=7.0)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm/races"))
    parser.add_argument("--out", type=Path, help="write a page of the results here")
    args = parser.parse_args(arguments)
    args.lines = []
    shutil.rmtree(args.dir, ignore_errors=True)
    args.dir.mkdir(parents=True)
    wrong = 0
    for kind in args.shapes:
        wrong += race_loads(kind, args) if args.loads else 0
        wrong += race_saves(kind, args) if args.saves else 0
        wrong += damage(kind, args) if args.damaged else 0
    shutil.rmtree(args.dir)
    if args.out:
        args.out.write_text(page(args))
    return 1 if wrong else 0


def page(args: argparse.Namespace) -> str:
    import jax
    import numpy as np

    return (
        f"# Loads and saves beside threads that compute: {jax.devices()[0].device_kind}\n\n"
        f"{dt.date.today()}. {os.cpu_count()} cores, jax {jax.__version__}, numpy {np.__version__}. "
        "`python bench/gpu_races.py`. Every leaf is compared on the device, bit for bit.\n\n"
        + "".join(f"- {line}\n" for line in args.lines)
    )


if __name__ == "__main__":
    sys.exit(main())
