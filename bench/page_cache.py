"""Saves that stay in the page cache beside saves that pass it by, in turns; and linked files that are read again.

    python bench/page_cache.py [--rounds 6] [--only loop load linked] [--files DIRECTORY] [--out bench/results]

The training loop of `run.py --only "training loop"`, a load right after `save_async` of 1.1 GB, and a save that links
1.1 GB of frozen leaves. Ratios are medians of rounds, each of which has both ways side by side.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from measuring import settle
from tasks import BATCH, EVERY, run_steps, train_step

from eformer import checkpoint
from eformer._engine.saving import recheck
from eformer._engine.stores.local_upload import LocalUpload

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, LAYERS, STEPS = 2048, 10, 15
NBYTES = 1_100_000_000
HOW = (
    "Medians of {rounds} rounds, with both ways in turns in each; the least and the most in brackets. "
    "`python bench/page_cache.py --out bench/results`"
)
TITLES = {
    "load": "A load right after `save_async` of 1.1 GB",
    "linked": "A step that links 1.1 GB, with these files read again from the disk and trusted",
    "loop": "The training loop, in times of a step alone",
}
WAYS = {"in the page cache": False, "past it": True}

_passes_cache = LocalUpload.passes_cache


def choose(passes: bool) -> None:
    """Let saves that follow pass the page cache by, or stay in it."""

    LocalUpload.passes_cache = property(lambda _: passes)


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of a call by the clock, and of processor time."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - clock, time.process_time() - processor


def loop(place: Path, rounds: int) -> list[str]:
    weights = [jnp.full((WIDTH, WIDTH), 1e-3) for _ in range(LAYERS)]
    state, batch = (
        {"w": weights, "m": [jnp.zeros_like(w) for w in weights]},
        jnp.ones((BATCH, WIDTH), jnp.float32),
    )
    step = jax.jit(train_step, donate_argnums=0)
    state, _ = run_steps(step, state, batch, 3)
    found: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    used: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(rounds):
        for name in sorted(WAYS, reverse=bool(turn % 2)):
            choose(WAYS[name])
            settle(2 * 10**9)
            began = time.process_time()
            state, alone = run_steps(step, state, batch, STEPS)
            middle, pending = time.process_time(), []

            def save(number: int, state: Any, pending: list[Any] = pending) -> float:
                if number % EVERY == 0:
                    pending.append(checkpoint.save_async(state, place / f"loop-{number}"))
                return 0.0

            state, during = run_steps(step, state, batch, STEPS, save)
            for one in pending:
                one.result()
            extra = time.process_time() - middle - (middle - began)
            reference = statistics.median(alone)
            by_position = [
                statistics.median(during[(p + 1) % EVERY :: EVERY]) / reference for p in range(EVERY)
            ]
            p99 = float(np.percentile(during, 99)) / reference
            found[name].append(
                [
                    statistics.median(during) / reference,
                    statistics.mean(during) / statistics.mean(alone),
                    p99,
                    *by_position,
                ]
            )
            used[name].append(1000 * extra / len(pending))
            for path in place.glob("loop-*"):
                shutil.rmtree(path)
    names = ["p50", "mean", "p99", *(f"step {p + 1} after a save" for p in range(EVERY))]
    lines = [f"| | {' | '.join(names)} | processor time a save, ms |", "|---|" + "---|" * (len(names) + 1)]
    for name, rows in found.items():
        middle = [f"{statistics.median(column):.2f}" for column in zip(*rows, strict=True)]
        lines.append(f"| {name} | {' | '.join(middle)} | {statistics.median(used[name]):.0f} |")
    return lines


def warm_load(place: Path, rounds: int) -> list[str]:
    tree = {f"w{n}": jnp.full(NBYTES // 40, float(n), jnp.float32) for n in range(10)}
    jax.block_until_ready(tree)
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in WAYS}
    for turn in range(rounds):
        for name in sorted(WAYS, reverse=bool(turn % 2)):
            choose(WAYS[name])
            shutil.rmtree(place / "load", ignore_errors=True)
            settle(2 * NBYTES)
            saved = timed(lambda: checkpoint.save_async(tree, place / "load").result())
            loaded = timed(lambda: jax.block_until_ready(checkpoint.load(place / "load")))
            found[name].append((*saved, *loaded))
    lines = [
        "| | save, s | of a processor | load right after it, s | of a processor |",
        "|---|---|---|---|---|",
    ]
    for name, rows in found.items():
        lines.append(
            f"| {name} | "
            + " | ".join(
                f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in zip(*rows, strict=True)
            )
            + " |"
        )
    return lines


def linked(place: Path, rounds: int, kind: str, leaves: int) -> list[str]:
    """Save steps of which all but one leaf is linked, with its files read again and trusted."""
    LocalUpload.passes_cache = _passes_cache
    frozen = {f"w{n}": np.full(NBYTES // leaves // 4, n, np.float32) for n in range(leaves)}
    found: dict[str, list[tuple[float, float]]] = {"read again": [], "trusted": []}
    number = 0
    with checkpoint.Run(place / kind, format=kind, keep=2) as run:
        for turn in range(rounds + 2):
            for name in sorted(found, reverse=bool(turn % 2)):
                number += 1
                if name == "read again":
                    recheck._sound.clear()
                tree = {"frozen": frozen, "head": {"w": np.full(8, number)}}
                seconds = timed(lambda tree=tree, number=number: run.save(number, tree).result())
                if turn > 1:
                    found[name].append(seconds)
    shutil.rmtree(place / kind)
    return [
        f"| {kind}, {leaves:,} leaves, {name} | "
        + " | ".join(
            f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in zip(*rows, strict=True)
        )
        + " |"
        for name, rows in found.items()
    ]


def linked_steps(place: Path, rounds: int) -> list[str]:
    lines = ["| | save, s | of a processor |", "|---|---|---|"]
    return [*lines, *linked(place, rounds, "safetensors", 10), *linked(place, rounds, "tensorstore", 1000)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", nargs="*", choices=TITLES)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    parts = {"load": warm_load, "linked": linked_steps, "loop": loop}
    lines = ["# In the page cache and past it", "", HOW.format(rounds=given.rounds), ""]
    with tempfile.TemporaryDirectory(dir=given.files) as directory:
        for name in given.only or parts:
            lines += [f"## {TITLES[name]}", "", *parts[name](Path(directory), given.rounds), ""]
            print("\n".join(lines[-8:]), flush=True)
    if given.out:
        (given.out / "page_cache.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
