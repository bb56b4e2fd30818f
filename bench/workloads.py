"""The trees that are saved and loaded: their shapes, and values that are made once and then read from a file."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ALIGNMENT = 64  # at such addresses jax takes numpy's memory as it is
BESIDE = (
    32  # so values begin beside them: a tree has to lie in memory of its own, not in a file that is mapped
)
PAIRS = 40  # of small matrices beside a frozen base

Shape = jax.ShapeDtypeStruct


def shaped(shape: tuple[int, ...], dtype: str = "bfloat16") -> Shape:
    return Shape(shape, jnp.dtype(dtype))


def llama(width: int, dtype: str = "bfloat16") -> dict:
    """A language model of 93 leaves: 1.1 GB at a width of 2048."""
    square, wide, norm = (shaped(s, dtype) for s in ((width, width), (width, 2 * width), (width,)))
    attention = {"q": square, "k": square, "v": square, "o": square}
    mlp = {"up": wide, "gate": wide, "down": shaped((2 * width, width), dtype)}
    layer = {"attention": attention, "mlp": mlp, "norms": [norm, norm]}
    vocabulary = shaped((32000, width), dtype)
    return {"embed": vocabulary, "layers": [layer] * 10, "norm": norm, "head": vocabulary}


def training(width: int) -> dict:
    """Parameters, their fp32 originals and Adam's moments: 14 bytes a parameter, 2.9 GB at a width of 1152."""
    moments = {"mu": llama(width, "float32"), "nu": llama(width, "float32")}
    return {
        "params": llama(width),
        "master": llama(width, "float32"),
        "adam": moments,
        "step": shaped((), "int32"),
    }


def one_array(rows: int) -> dict:
    """2.1 GB of fp32 at 16,384 rows."""
    return {"x": shaped((rows, 32768), "float32")}


def small(leaves: int) -> dict:
    """Leaves of 256 B to 16 KB, as many below 2 KB as above, and of any length: few keep the next one aligned."""
    nbytes = np.exp(np.random.default_rng(1).uniform(np.log(256), np.log(16384), leaves)).astype(int).tolist()
    leaf = (shaped((n // 4,), "float32") if i % 2 else shaped((n // 2,)) for i, n in enumerate(nbytes))

    def block() -> dict:
        attention = {name: next(leaf) for name in ("q", "k", "v", "o")}
        mlp = {name: next(leaf) for name in ("up", "gate", "down")}
        return {"attention": attention, "mlp": mlp, "norms": [next(leaf) for _ in range(3)]}

    return {"blocks": [block() for _ in range(leaves // 10)]}


def even(leaves: int) -> dict:
    """Leaves of 8 x 32, which eight devices can share; half of them bf16."""
    kinds = shaped((8, 32)), shaped((8, 32), "float32")
    return {"blocks": [{f"w{i}": kinds[i % 2] for i in range(10)} for _ in range(leaves // 10)]}


def frozen(width: int) -> dict:
    """A model that stays as it is, and 21 MB beside it, at a width of 2048, that are trained."""
    pair = {"a": shaped((width, 64)), "b": shaped((64, width))}
    return {"base": llama(width), "trainable": [pair] * PAIRS}


def squares(number: int) -> dict:
    """Matrices of 4 MB each."""
    return {f"w{i}": shaped((1024, 1024), "float32") for i in range(number)}


def layers(width: int) -> dict:
    """The weights of ten layers: 168 MB at a width of 2048, and as much again for their moments."""
    return {"w": [shaped((width, width), "float32")] * 10}


def rehearsal() -> dict:
    """One leaf of each kind."""
    return {"matrix": shaped((1024, 1024), "float32"), "half": shaped((64, 64)), "vector": shaped((64,))}


TREES: dict[str, Callable[[int], dict]] = {
    "llama": llama,
    "training": training,
    "one array": one_array,
    "small": small,
    "even": even,
    "frozen": frozen,
    "squares": squares,
    "layers": layers,
}

# -------------------------------------------------------------------------------------------- values


def nbytes_of(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def offsets(leaves: list[Shape]) -> list[int]:
    """Where each leaf's values begin in the file, and where the file ends."""
    at = [BESIDE]
    for leaf in leaves:
        at.append(at[-1] + -(-nbytes_of(leaf) // ALIGNMENT) * ALIGNMENT)
    return at


def write_values(shapes: Any, path: Path) -> None:
    """Values as weights have them, N(0, 0.02), the same every time: zeros would favour those that compress."""
    leaves = jax.tree.leaves(shapes)
    starts = offsets(leaves)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.ftruncate(descriptor, starts[-1])

    def write(number: int) -> None:
        leaf, random = leaves[number], np.random.default_rng([0, number])
        values = np.asarray(random.standard_normal(leaf.shape, np.float32))
        values *= np.float32(0.02)
        data = memoryview(values.astype(leaf.dtype).reshape(-1).view(np.uint8))
        for at in range(0, len(data), 2**30):  # one call writes 2 GB at most
            os.pwrite(descriptor, data[at : at + 2**30], starts[number] + at)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write, range(len(leaves))))
    os.fsync(descriptor)  # or the first cell would wait for it
    os.close(descriptor)


def read_values(shapes: Any, path: Path) -> Any:
    """The tree as numpy arrays, which lie in the file and take no memory of their own."""
    leaves, structure = jax.tree.flatten(shapes)
    memory = np.asarray(np.memmap(path, np.uint8, mode="r"))
    arrays = [
        memory[at : at + nbytes_of(leaf)].view(leaf.dtype).reshape(leaf.shape)
        for at, leaf in zip(offsets(leaves)[:-1], leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def copied(values: Any) -> Any:
    """Numpy arrays that have memory of their own."""
    return jax.tree.map(np.array, values)


def on_devices(values: Any, shardings: Any = None) -> Any:
    """Jax arrays in memory that jax has allocated, as a computation would leave them."""
    return jax.block_until_ready(jax.device_put(values, shardings or jax.devices()[0]))
