"""Loads onto an accelerator with `like` that has shardings, for trees of four shapes, beside a plain program.

`bench/gpu.py` runs them, each in a fresh process (`--only shapes`: these alone), and writes gpu_shapes.md.

The plain program has twelve threads, each with two slots of 64 MiB of page-locked memory that it reads into and puts on
the device from, in turns. It checks nothing, does not join the parts of large leaves, and keeps its slots from one load
to the next. Every load begins in the page cache and ends when all arrays are on the device. What was loaded is compared
there once, bit for bit.
"""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 2**20
SLOT, READ, THREADS, ROUNDS = 64 * MIB, 16 * MIB, 12, 5
PREFIX = "shape: "

SHAPES = {
    "33 MB": [(2048, 8064)],
    "90 and 262 MB": [(11008, 4096), (4096, 32000)],
    "1 GB": [(131072, 4096)],
    "2 MB": [(1024, 1024)],
}
CELLS = [PREFIX + name for name in SHAPES]

MANY = 500  # leaves; with more, a save may take longer to return
BARS = [  # of 7.4 GB on an H200, for every shape
    ("load, of plain", ">=", 0.8),
    ("load, no digests, of plain", ">=", 0.85),
    ("first save_async, ms", "<=", 150.0),
]
SAVE_ASYNC = {False: 10.0, True: 25.0}  # ms, whether there are many leaves


class Plain:
    """The plain program."""

    def __init__(self, device: Any) -> None:
        import jax

        from eformer._engine.loading.fetch import aligned

        self.device, self.place = device, jax.sharding.SingleDeviceSharding(device)
        self.slots = [aligned(SLOT) for _ in range(2 * THREADS)]
        for slot in self.slots:
            slot[:] = 0
            device.client.dma_map(slot.__array_interface__["data"][0], slot.nbytes)

    def close(self) -> None:
        """Unlock the memory: what is allocated at the same addresses later would not be copied from itself."""
        for slot in self.slots:
            self.device.client.dma_unmap(slot.__array_interface__["data"][0])

    def load(self, path: Path, leaves: list[tuple[int, tuple[int, ...], int]]) -> list[Any]:
        """Load leaves of bfloat16, given as (offset, shape, bytes) in the order of the file."""
        import jax

        from eformer._engine.loading import device_put

        descriptor, arrays = os.open(path, os.O_RDONLY), []
        jobs, lock, put = iter(_jobs(leaves)), threading.Lock(), device_put._batched_device_put()

        def work(number: int) -> None:
            pending: list[list[Any]] = [[], []]
            turn = 0
            while True:
                with lock:
                    job = next(jobs, None)
                if job is None:
                    break
                memory = self.slots[2 * number + turn]
                jax.block_until_ready(pending[turn])
                start, nbytes = job[0][0], sum(leaf[2] for leaf in job)
                for at in range(0, nbytes, READ):
                    os.preadv(descriptor, [memoryview(memory)[at : min(at + READ, nbytes)]], start + at)
                pending[turn] = []
                for offset, shape, _ in job:
                    part = np.ndarray(shape, jax.numpy.bfloat16, memory, offset - start)
                    part.flags.writeable = False
                    aval = jax.core.ShapedArray(shape, jax.numpy.bfloat16)
                    pending[turn].append(put(aval, self.place, [part], [self.device], True))
                arrays.extend(pending[turn])
                turn = 1 - turn
            jax.block_until_ready(pending)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.close(descriptor)
        return arrays


def _jobs(leaves: list[tuple[int, tuple[int, ...], int]]) -> list[list[tuple[int, tuple[int, ...], int]]]:
    """Group small leaves, and cut large ones, so that each job fits into a slot."""
    jobs: list[list[Any]] = [[]]
    for offset, shape, nbytes in leaves:
        if nbytes > SLOT:
            row = nbytes // shape[0]
            rows = -(-shape[0] // -(-nbytes // SLOT))
            for start in range(0, shape[0], rows):
                count = min(rows, shape[0] - start)
                jobs.append([(offset + start * row, (count, *shape[1:]), count * row)])
        elif jobs[-1] and offset + nbytes - jobs[-1][0][0] > SLOT:
            jobs.append([(offset, shape, nbytes)])
        else:
            jobs[-1].append((offset, shape, nbytes))
    return [job for job in jobs if job]


def rates(load: Callable[[], Any], nbytes: int) -> list[float]:
    """Return the gigabytes a second of several loads."""
    import jax

    found = []
    for _ in range(ROUNDS):
        gc.collect()
        began = time.perf_counter()
        loaded = jax.block_until_ready(load())
        found.append(nbytes / 1e9 / (time.perf_counter() - began))
        del loaded
    return found


def shapes_of(name: str, nbytes: int) -> list[tuple[int, ...]]:
    """As many leaves of the shape as have about so many bytes; one of each kind, with fewer rows, if that is less."""
    kinds, once = SHAPES[name], sum(2 * a * b for a, b in SHAPES[name])
    if once > nbytes:
        return [(max(1, a * nbytes // once), b) for a, b in kinds]
    return [*kinds] * round(nbytes / once)


def tree_of(shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    import jax

    bits = {
        shape: jax.jit(
            lambda key, shape=shape: jax.lax.bitcast_convert_type(
                jax.random.bits(key, shape, jax.numpy.uint16), jax.numpy.bfloat16
            )
        )
        for shape in set(shapes)
    }
    tree = {f"leaf_{number}": bits[shape](jax.random.key(number)) for number, shape in enumerate(shapes)}
    return jax.block_until_ready(tree)


def measured(cell: str, nbytes: int, where: Path) -> dict[str, Any]:
    """Save a tree of one shape in the background, and load it; this process has loaded nothing before."""
    import jax
    from systems import placed

    from eformer.checkpoint import load

    tree = tree_of(shapes_of(cell.removeprefix(PREFIX), nbytes))
    nbytes, leaves = sum(leaf.nbytes for leaf in tree.values()), len(tree)
    returns = returns_of(tree, where)
    like = placed(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree))
    began = time.perf_counter()
    loaded = jax.block_until_ready(load(where, like=like))
    first = nbytes / 1e9 / (time.perf_counter() - began)
    require_equal(loaded, tree)
    del tree, loaded
    found = {
        "leaves": leaves,
        "bytes": nbytes,
        "plain program": plain_rates(where, nbytes),
        "load": rates(lambda: load(where, like=like), nbytes),
        "load, no digests": rates(lambda: load(where, like=like, verify=False), nbytes),
        "first load": first,
        "save_async returns, ms": returns,
    }
    shutil.rmtree(where)
    return found


def returns_of(tree: Any, where: Path) -> list[float]:
    """Milliseconds until `save_async` returns; the first is for a tree that was never saved before."""
    from eformer.checkpoint import SaveOptions, save_async

    options, returns = SaveOptions(max_shard_bytes=10**12), []
    for number in range(4):
        began = time.perf_counter()
        saved = save_async(tree, where, options=options)
        returns.append((time.perf_counter() - began) * 1e3)
        saved.result()
        time.sleep(3 if number == 0 else 0.5)  # programs are compiled in the background
    return returns


def require_equal(loaded: dict[str, Any], tree: dict[str, Any]) -> None:
    import jax

    def bits(array: Any) -> Any:
        return jax.lax.bitcast_convert_type(array, jax.numpy.uint16)

    for leaf, saved in tree.items():
        assert bool((bits(loaded[leaf]) == bits(saved)).all()), leaf


def plain_rates(where: Path, nbytes: int) -> list[float]:
    """Return nothing for the CPU, whose memory needs no copies."""
    import jax

    from eformer.checkpoint import inspect

    device = jax.devices()[0]
    if device.platform == "cpu":
        return []
    entry = inspect(where).trees[""]
    (file,) = entry.files
    leaves = sorted(
        (file.header_nbytes + leaf.extents[0].offset, leaf.shape, leaf.extents[0].nbytes)
        for leaf in entry.leaves.values()
    )
    plain = Plain(device)
    try:
        return rates(lambda: plain.load(where / file.name, leaves), nbytes)
    finally:
        plain.close()


# -------------------------------------------------------------------------------------------- report


COLUMNS = (
    "plain program", "load", "load, of plain", "load, no digests", "load, no digests, of plain", "first load",
    "first save_async, ms", "save_async, ms",
)  # fmt: skip


def summary(cells: list[dict[str, Any]]) -> dict[str, float]:
    """The fastest loads and calls of a shape, over all of its processes."""
    found = {
        what: max(rate for cell in cells for rate in cell[what])
        for what in ("plain program", "load", "load, no digests")
        if cells[0][what]
    }
    for what in ("load", "load, no digests"):
        if "plain program" in found:
            found[f"{what}, of plain"] = found[what] / found["plain program"]
    found["first load"] = max(cell["first load"] for cell in cells)
    found["first save_async, ms"] = min(cell["save_async returns, ms"][0] for cell in cells)
    found["save_async, ms"] = min(ms for cell in cells for ms in cell["save_async returns, ms"][1:])
    return found


def markdown(facts: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    versions, of_shapes = facts["versions"]["own"], {}
    for cell in cells:
        of_shapes.setdefault(cell["system"].removeprefix(PREFIX), []).append(cell)
    lines = [
        f"# Shapes of trees: {facts['device']}",
        "",
        f"{facts['bytes'] / 1e9:.1f} GB of bfloat16, jax {versions['jax']}, {facts['machine']['cores']} cores, "
        f"`{facts['command']}`. Loads are GB/s, the fastest of {ROUNDS}; the first load of a process is checked, and "
        "compiles. `save_async` is the milliseconds until it returns.",
        "",
        f"| leaves | {' | '.join(COLUMNS)} | missed |",
        "| --- " * (len(COLUMNS) + 2) + "|",
    ]
    for name, found in of_shapes.items():
        good = [cell for cell in found if "error" not in cell]
        if good:
            lines.append(row_of(name, good[0]["leaves"], summary(good)))
    errors = [f"- {cell['system']}: {cell['error']}" for cell in cells if "error" in cell]
    return "\n".join([*lines, *(["", *errors] if errors else [])]) + "\n"


def row_of(name: str, leaves: int, values: dict[str, float]) -> str:
    shown = [
        f"{values[column]:.{2 if 'of plain' in column else 1}f}" if column in values else ""
        for column in COLUMNS
    ]
    return f"| {leaves} of {name} | {' | '.join(shown)} | {'; '.join(missed(leaves, values))} |"


def missed(leaves: int, values: dict[str, float]) -> list[str]:
    """The bars that are not reached."""
    bars = [*BARS, ("save_async, ms", "<=", SAVE_ASYNC[leaves > MANY])]
    return [
        f"{what} {sign} {goal:g}"
        for what, sign, goal in bars
        if what in values and not (values[what] >= goal if sign == ">=" else values[what] <= goal)
    ]
