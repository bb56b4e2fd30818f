"""Time and memory of the msgpack door: large arrays, many small leaves, and messages to be refused.

    python bench/msgpack_door.py [--gib 1] [--rounds 5] > bench/results/msgpack_door.md

All systems run interleaved in one process, so that a busy machine slows them alike; the best round counts.
"Extra" is the growth of resident memory at its peak, in multiples of the payload (Linux only, median round).
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import flax.serialization
import jax
import numpy as np

from eformer._engine.trees.flatten import flatten
from eformer._engine.trees.unflatten import unflatten
from eformer.pytree import _serialization as ours

LAYERS = 24


def make_tree(nbytes: int) -> dict:
    """A model's parameters: large matrices of bfloat16 and float32, and small biases."""
    random = np.random.default_rng(0)
    per_matrix = nbytes // (LAYERS * 4) // 2048 * 2048

    def matrix(name: str) -> jax.Array:
        dtype = jax.numpy.dtype(name)
        raw = random.integers(0, 2**16, per_matrix // 2, dtype=np.uint16)
        return jax.device_put(raw.view(dtype).reshape(-1, 2048 // dtype.itemsize))

    return {
        f"layer_{i}": {
            "attention": {"qkv": matrix("bfloat16"), "out": matrix("float32")},
            "mlp": [matrix("bfloat16"), matrix("bfloat16")],
            "bias": np.zeros(64, np.float32),
        }
        for i in range(LAYERS)
    }


def peak_since_reset() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(call) -> tuple[float, int]:
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    except OSError:
        before = None
    else:
        before = resident()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    extra = peak_since_reset() - before if before is not None else -1
    del result
    return seconds, extra


def refused(data: bytes) -> str:
    try:
        ours.msgpack_restore(data)
    except ValueError as error:
        return str(error)
    raise SystemExit("this should have been refused")


def small_leaves(rounds: int, count: int = 100_000) -> None:
    """Two small arrays in each of many dicts: what a leaf costs."""
    tree = {
        f"layer{i}": {"w": np.zeros(8, np.float32), "b": np.zeros(3, np.float32)} for i in range(count // 2)
    }
    message = ours.to_bytes(tree)
    leaves, structure = flatten(tree)
    cells = {
        "to_bytes": lambda: ours.to_bytes(tree),
        "flax to_bytes": lambda: flax.serialization.to_bytes(tree),
        "msgpack_restore": lambda: ours.msgpack_restore(message),
        "flax msgpack_restore": lambda: flax.serialization.msgpack_restore(message),
        "from_bytes": lambda: ours.from_bytes(tree, message),
        "flax from_bytes": lambda: flax.serialization.from_bytes(tree, message),
        "flatten": lambda: flatten(tree),
        "unflatten": lambda: unflatten(structure, leaves),
    }
    seconds = [{name: measure(call)[0] for name, call in cells.items()} for _ in range(rounds)]
    print(f"\n{count:,} leaves of 12 to 32 bytes:\n\n| what | µs a leaf |\n|---|---:|")
    for name in cells:
        print(f"| {name} | {min(r[name] for r in seconds) / count * 1e6:.2f} |")


def refusals() -> None:
    """Messages that are not what they say: how soon that is found, and in how much memory beyond them."""
    many, few = 2**26, 2**20
    nils = b"\x92\xdd" + many.to_bytes(4, "big") + b"\xc0" * many
    maps = b"\x92\xdd" + few.to_bytes(4, "big") + b"\x80" * few
    cells = {
        "64 MiB of nil, then cut": nils,
        "64 MiB of nil, then an unused tag": nils + b"\xc1",
        "a list of 2**32 - 1 in five bytes": b"\xdd\xff\xff\xff\xff",
        "a million levels": b"\x91" * 10**6,
        "1 Mi empty maps, then an unknown extension": maps + b"\xd4\x63x",
        "1 Mi empty maps, then a duplicate key": maps + b"\x82\xa1a\x01\xa1a\x02",
    }
    print("\n| refused | seconds | MiB beyond the input |\n|---|---:|---:|")
    for name, data in cells.items():
        seconds, extra = measure(lambda data=data: refused(data))
        print(f"| {name} | {seconds:.3f} | {extra / 2**20:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    tree = make_tree(int(args.gib * 2**30))
    payload = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    message = ours.to_bytes(tree)
    assert message == flax.serialization.to_bytes(tree), "the bytes differ from flax's"
    like = jax.eval_shape(lambda: tree)
    scratch = Path(tempfile.mkdtemp(dir=".")) / "state.msgpack"
    view = memoryview(message)

    def write_plain() -> None:
        with scratch.open("wb") as file:
            file.write(message)
            os.fsync(file.fileno())

    cells = {
        "one copy: bytes(memoryview)": lambda: bytes(view),
        "to_bytes": lambda: ours.to_bytes(tree),
        "msgpack_serialize": lambda: ours.msgpack_serialize(tree),
        "flax to_bytes": lambda: flax.serialization.to_bytes(tree),
        "msgpack_restore": lambda: ours.msgpack_restore(message),
        "from_bytes": lambda: ours.from_bytes(like, message),
        "flax msgpack_restore": lambda: flax.serialization.msgpack_restore(message),
        "one write + fsync": write_plain,
        "save_to_file": lambda: ours.save_to_file(tree, scratch),
        "load_from_file": lambda: ours.load_from_file(like, scratch),
    }
    rounds = [{name: measure(call) for name, call in cells.items()} for _ in range(args.rounds)]
    scratch.unlink()
    scratch.parent.rmdir()

    seconds = {name: min(r[name][0] for r in rounds) for name in cells}
    extra = {name: statistics.median(r[name][1] for r in rounds) / payload for name in cells}
    versions = f"Python {platform.python_version()}, jax {jax.__version__}, flax {flax.__version__}"
    leaves = len(jax.tree.leaves(tree))
    machine = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.0f}"
    print(f"# msgpack\n\n`python bench/msgpack_door.py`, {machine}, {versions}.")
    print(f"The best of {args.rounds} rounds; extra memory is that of the median round.\n")
    print(f"{payload / 2**30:.2f} GiB, {leaves} arrays:\n")
    print("| what | seconds | x one copy | extra memory, x payload |\n|---|---:|---:|---:|")
    for name in cells:
        ratio = seconds[name] / seconds["one copy: bytes(memoryview)"]
        print(f"| {name} | {seconds[name]:.4f} | {ratio:.3f} | {extra[name]:.2f} |")
    small_leaves(args.rounds)
    refusals()


if __name__ == "__main__":
    main()
