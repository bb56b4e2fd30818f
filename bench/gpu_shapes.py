"""Loads onto an accelerator with `like` that has shardings, for trees of four shapes, beside a plain program.

    python bench/gpu_shapes.py [--gigabytes 7.4] [--dir /dev/shm] [--out bench/results]

The plain program has twelve threads, each with two slots of 64 MiB of page-locked memory that it reads into and puts on
the device from, in turns. It checks nothing, does not join the parts of large leaves, and keeps its slots from one load
to the next. Every load begins in the page cache and ends when all arrays are on the device. What was loaded is compared
there once, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20
SLOT, READ, THREADS, ROUNDS = 64 * MIB, 16 * MIB, 12, 5

SHAPES = {
    "33 MB": [(2048, 8064)],
    "90 and 262 MB": [(11008, 4096), (4096, 32000)],
    "1 GB": [(131072, 4096)],
    "2 MB": [(1024, 1024)],
}


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


def measure(name: str, shapes: list[tuple[int, ...]], where: Path, plain: Plain | None) -> str:
    import jax

    from eformer.checkpoint import SaveOptions, inspect, load, save_async

    bits = {
        shape: jax.jit(
            lambda key, shape=shape: jax.lax.bitcast_convert_type(
                jax.random.bits(key, shape, jax.numpy.uint16), jax.numpy.bfloat16
            )
        )
        for shape in set(shapes)
    }
    tree = {f"leaf_{number}": bits[shape](jax.random.key(number)) for number, shape in enumerate(shapes)}
    jax.block_until_ready(tree)
    nbytes = sum(leaf.nbytes for leaf in tree.values())
    options, returns = SaveOptions(max_shard_bytes=10**12), []
    for number in range(4):
        began = time.perf_counter()
        saved = save_async(tree, where, options=options)
        returns.append((time.perf_counter() - began) * 1e3)
        saved.result()
        time.sleep(3 if number == 0 else 0.5)  # programs are compiled in the background
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)
    began = time.perf_counter()
    loaded = jax.block_until_ready(load(where, like=like))
    first = nbytes / 1e9 / (time.perf_counter() - began)
    for leaf in tree:
        same = jax.lax.bitcast_convert_type(loaded[leaf], jax.numpy.uint16) == jax.lax.bitcast_convert_type(
            tree[leaf], jax.numpy.uint16
        )
        assert bool(same.all()), leaf
    del tree, loaded
    entry = inspect(where).trees[""]
    (file,) = entry.files
    leaves = sorted(
        (file.header_nbytes + leaf.extents[0].offset, leaf.shape, leaf.extents[0].nbytes)
        for leaf in entry.leaves.values()
    )
    alone = max(rates(lambda: plain.load(where / file.name, leaves), nbytes)) if plain else float("nan")
    checked = max(rates(lambda: load(where, like=like), nbytes))
    unchecked = max(rates(lambda: load(where, like=like, verify=False), nbytes))
    shutil.rmtree(where)
    return (
        f"| {len(shapes)} of {name} | {alone:.1f} | {checked:.1f} | {checked / alone:.2f} | {unchecked:.1f} | "
        f"{unchecked / alone:.2f} | {first:.1f} | {returns[0]:.0f} | {min(returns[1:]):.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=7.4)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path, help="a directory for gpu_shapes.md")
    arguments = parser.parse_args()
    import jax

    device = jax.devices()[0]
    plain = None if device.platform == "cpu" else Plain(device)
    lines = [
        f"# Shapes of trees: {device.device_kind}",
        "",
        f"{arguments.gigabytes} GB of bfloat16, jax {jax.__version__}, {os.cpu_count()} cores, "
        f"`python bench/gpu_shapes.py --gigabytes {arguments.gigabytes}`. Loads are GB/s, the fastest of {ROUNDS}; the "
        "first load of a process is checked, and compiles. `save_async` is the milliseconds until it returns.",
        "",
        "| leaves | plain program | load | of plain | load, no digests | of plain | first load | first save_async | "
        "save_async |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(dir=arguments.dir) as place:
        for name, kinds in SHAPES.items():
            nbytes = sum(2 * a * b for a, b in kinds)
            shapes = kinds * max(1, round(arguments.gigabytes * 1e9 / nbytes))
            lines.append(measure(name, shapes, Path(place) / "tree", plain))
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "gpu_shapes.md").write_text(text)


if __name__ == "__main__":
    main()
