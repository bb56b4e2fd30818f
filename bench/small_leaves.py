"""Many small leaves: microseconds a leaf, of saves, and of loads onto shardings, beside safetensors and jax.

    python bench/small_leaves.py [--leaves 10000] [--out bench/results]

Leaves of 8 x 32, half of them bfloat16, on eight virtual devices of the CPU, in /dev/shm. Every save has fresh arrays:
JAX keeps what numpy has once seen of an array.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5


def tree_of(count: int) -> dict[str, dict[str, Any]]:
    import jax
    import numpy as np

    arrays = [
        np.full((8, 32), number, np.float32 if number % 2 else jax.numpy.bfloat16) for number in range(count)
    ]
    names = [(f"layer{number // 10}", f"w{number % 10}") for number in range(count)]
    tree: dict[str, dict[str, Any]] = {layer: {} for layer, _ in names}
    for (layer, name), array in zip(names, jax.device_put(arrays), strict=True):
        tree[layer][name] = array
    return jax.block_until_ready(tree)


def best(call: Callable[[Any], Any], count: int, make: Callable[[], Any] = lambda: None) -> str:
    """Return the fewest microseconds a leaf, by the clock and of CPU."""
    import jax

    seconds, used = [], []
    for _ in range(ROUNDS):
        made = make()
        gc.collect()
        began, before = time.perf_counter(), time.process_time()
        found = jax.block_until_ready(call(made))
        seconds.append(time.perf_counter() - began)
        used.append(time.process_time() - before)
        del found, made
    return f"{min(seconds) / count * 1e6:.1f} | {min(used) / count * 1e6:.1f}"


def run(count: int, folder: Path) -> list[str]:
    import jax
    import numpy as np
    import safetensors.flax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from eformer.checkpoint import load, save

    def flat(tree: Any) -> dict[str, Any]:
        return {f"{a}.{b}": leaf for a, layer in tree.items() for b, leaf in layer.items()}

    path, file, devices = folder / "tree", folder / "flat.safetensors", np.array(jax.devices())
    tree = tree_of(count)
    save(tree, path)
    save(jax.tree.map(np.asarray, tree), folder / "numpy")
    safetensors.flax.save_file(flat(tree), file)
    host = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    rows = {
        "save": best(lambda made: save(made, path), count, lambda: tree_of(count)),
        "safetensors.flax, save": best(
            lambda made: safetensors.flax.save_file(made, file), count, lambda: flat(tree_of(count))
        ),
        "load": best(lambda _: load(path), count),
        "load, numpy": best(lambda _: load(folder / "numpy"), count),
        "safetensors.flax, load": best(lambda _: safetensors.flax.load_file(file), count),
    }
    for name, number, spec in (
        ("one device", 1, PartitionSpec()),
        ("8 replicas", 8, PartitionSpec()),
        ("8 rows", 8, PartitionSpec("x")),
    ):
        mesh = Mesh(devices[:number], ("x",))
        place = NamedSharding(mesh, spec)
        like = jax.tree.map(
            lambda x, place=place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree
        )
        rows |= {
            f"load, `like` on {name}": best(lambda _, like=like: load(path, like=like), count),
            f"load, rules, {name}": best(
                lambda _, mesh=mesh, spec=spec: load(path, mesh=mesh, rules=[(".", spec)]), count
            ),
            f"load, `shardings=`, {name}": best(lambda _, place=place: load(path, shardings=place), count),
            f"`jax.device_put` of the list, {name}": best(
                lambda _, place=place: jax.device_put(host, [place] * count), count
            ),
        }
    return [f"| {name} | {found} |" for name, found in rows.items()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--leaves", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="a directory for small_leaves.md")
    arguments = parser.parse_args()
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=8")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        lines = run(arguments.leaves, Path(place))
    text = "\n".join(
        [
            "# Small leaves",
            "",
            f"{arguments.leaves:,} leaves, the best of {ROUNDS}, microseconds a leaf. `python bench/small_leaves.py`",
            "",
            "| | us | us of CPU |",
            "|---|---|---|",
            *lines,
            "",
        ]
    )
    print(text)
    if arguments.out:
        (arguments.out / "small_leaves.md").write_text(text)


if __name__ == "__main__":
    main()
