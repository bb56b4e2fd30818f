"""Many small leaves: microseconds a leaf, of saves and loads, beside safetensors, jax, Orbax and bare files.

    python bench/small_leaves.py [--leaves 10000] [--many 100000] [--files DIRECTORY] [--out bench/results]

Leaves of 8 x 32, half of them bfloat16, on eight virtual devices of the CPU, in /dev/shm; zarr below `--files`, by
default the directory of temporary files, which should be on a file system with a journal. Every save goes to a new
place, as that of a step does, and has fresh arrays: JAX keeps what numpy has once seen of an array.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 5
FEW_ROUNDS = 3  # for what takes seconds
ORBAX_LEAVES = 2_000


@dataclass(frozen=True)
class Row:
    """A call, by the fewest seconds it took, by the clock and of CPU, and the most microseconds that are wanted."""

    name: str
    count: int
    seconds: float
    used: float
    bar: float | None = None
    ahead_of: str = ""

    @property
    def clock(self) -> float:
        return self.seconds / self.count * 1e6

    @property
    def processor(self) -> float:
        return self.used / self.count * 1e6

    def line(self, others: dict[str, Row]) -> str:
        bars = [f"{self.bar:g}"] if self.bar else []
        is_met = self.bar is None or self.clock <= self.bar
        if self.ahead_of:
            other = others[self.ahead_of]
            bars.append(f"ahead of {other.name} ({self.clock / other.clock:.2f} of its time)")
            is_met = is_met and self.clock < other.clock
        verdict = "" if not bars else "met" if is_met else "missed"
        return f"| {self.name} | {self.clock:.1f} | {self.processor:.1f} | {', '.join(bars)} | {verdict} |"


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


def flat(tree: Any) -> dict[str, Any]:
    return {f"{a}.{b}": leaf for a, layer in tree.items() for b, leaf in layer.items()}


def timed(
    name: str,
    count: int,
    call: Callable[[Any], Any],
    make: Callable[[], Any] = lambda: None,
    *,
    rounds: int = ROUNDS,
    bar: float | None = None,
    ahead_of: str = "",
) -> Row:
    """Call several times, each time with what `make` returns, and keep the fewest seconds."""
    import jax

    seconds, used = [], []
    for _ in range(rounds):
        made = make()
        gc.collect()
        began, before = time.perf_counter(), time.process_time()
        found = jax.block_until_ready(call(made))
        seconds.append(time.perf_counter() - began)
        used.append(time.process_time() - before)
        del found, made
    return Row(name, count, min(seconds), min(used), bar, ahead_of)


def saves_and_loads(count: int, folder: Path, rounds: int, bars: tuple[float, float]) -> Iterator[Row]:
    """Time what needs no mesh. `bars` are those of a save and of a load of numpy arrays."""
    import jax
    import numpy as np
    import safetensors.flax

    from eformer.checkpoint import load, save

    path, file, label = folder / "tree", folder / "flat.safetensors", f"{count:,} leaves"
    tree = tree_of(count)
    save(tree, path)
    save(jax.tree.map(np.asarray, tree), folder / "numpy")
    safetensors.flax.save_file(flat(tree), file)
    peer = f"safetensors.flax, save, {label}"

    def new() -> Path:
        shutil.rmtree(folder / "saved", ignore_errors=True)
        (folder / "saved").mkdir()
        return folder / "saved" / "tree.safetensors"

    yield timed(
        peer, count, lambda made: safetensors.flax.save_file(*made), lambda: (flat(tree_of(count)), new()),
        rounds=rounds,
    )  # fmt: skip
    yield timed(
        f"save, {label}", count, lambda made: save(*made), lambda: (tree_of(count), new().with_suffix("")),
        rounds=rounds, bar=bars[0], ahead_of=peer,
    )  # fmt: skip
    peer = f"safetensors.flax, load, {label}"
    yield timed(peer, count, lambda _: safetensors.flax.load_file(file), rounds=rounds)
    yield timed(f"load, {label}", count, lambda _: load(path), rounds=rounds, ahead_of=peer)
    yield timed(f"load, numpy, {label}", count, lambda _: load(folder / "numpy"), rounds=rounds, bar=bars[1])


def onto_shardings(count: int, folder: Path) -> Iterator[Row]:
    """Time loads onto shardings, in the ways that one can ask for them."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from eformer.checkpoint import load

    tree, path = tree_of(count), folder / "tree"
    host = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    for where, number, spec, bar in (
        ("one device", 1, PartitionSpec(), 20),
        ("8 replicas", 8, PartitionSpec(), 30),
        ("8 rows", 8, PartitionSpec("x"), 40),
    ):
        mesh = Mesh(np.array(jax.devices())[:number], ("x",))
        place = NamedSharding(mesh, spec)
        like = jax.tree.map(
            lambda x, place=place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree
        )
        ways: dict[str, dict[str, Any]] = {
            f"load, `like` on {where}": {"like": like},
            f"load, `like` on {where}, a sharding object for each leaf": {"like": of_its_own(like)},
            f"load, rules, {where}": {"mesh": mesh, "rules": [(".", spec)]},
            f"load, `shardings=`, {where}": {"shardings": place},
        }
        for name, arguments in ways.items():
            yield timed(name, count, lambda _, arguments=arguments: load(path, **arguments), bar=bar)
        yield timed(
            f"`jax.device_put` of the list, {where}", count,
            lambda _, place=place: jax.device_put(host, [place] * count),
        )  # fmt: skip


def of_its_own(like: Any) -> Any:
    """Return the description with a sharding of its own for every leaf, equal to that of the others, as arrays have."""
    import jax
    from jax.sharding import NamedSharding, SingleDeviceSharding

    def own(leaf: Any) -> Any:
        place, (first, *more) = leaf.sharding, leaf.sharding.mesh.devices.flat
        sharding = NamedSharding(place.mesh, place.spec) if more else SingleDeviceSharding(first)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(own, like)


def zarr(count: int, folder: Path) -> Iterator[Row]:
    """Time a file for each leaf, beside files that a plain program creates and reads, and beside Orbax."""
    from eformer.checkpoint import load, save

    numbers = itertools.count()

    def new() -> (
        Path
    ):  # nothing is removed meanwhile: some file systems avoid inodes that were just freed, one by one
        os.sync()
        return folder / str(next(numbers))

    def saved(made: tuple[Path, Any]) -> None:
        save(made[1], made[0], format="tensorstore")

    bare, ours = folder / "bare", folder / "ours"
    yield timed(
        "zarr: bare files, create and sync", count, lambda path: create(path, count), new, rounds=FEW_ROUNDS
    )
    create(bare, count)
    yield timed("zarr: bare files, read", count, lambda _: read(bare, count))
    yield timed("zarr: save", count, saved, lambda: (new(), tree_of(count)), rounds=FEW_ROUNDS, bar=180)
    save(tree_of(count), ours, format="tensorstore")
    yield timed("zarr: load", count, lambda _: load(ours), bar=62)
    yield from orbax(min(count, ORBAX_LEAVES), new)


def create(path: Path, count: int) -> None:
    """Create as many directories with two files each as zarr arrays have, and wait until they are on the disk."""
    path.mkdir()
    for number in range(count):
        array = path / str(number)
        array.mkdir()
        (array / ".zarray").write_bytes(bytes(300))
        (array / "0.0").write_bytes(bytes(1024))
    os.sync()


def read(path: Path, count: int) -> list[bytes]:
    return [(path / str(number) / "0.0").read_bytes() for number in range(count)]


def orbax(count: int, new: Callable[[], Path]) -> Iterator[Row]:
    try:
        import orbax.checkpoint as ocp
    except ImportError:
        return
    options = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(options) as checkpointer:
        trees = []

        def made() -> Path:
            trees[:] = [tree_of(count)]
            return new()

        name = f"Orbax, zarr, {count:,} leaves"
        yield timed(f"{name}: save", count, lambda path: checkpointer.save(path, trees[0]), made, rounds=1)
        path = new()
        checkpointer.save(path, tree_of(count))
        yield timed(f"{name}: load", count, lambda _: checkpointer.restore(path), rounds=1)


def report(rows: list[Row], leaves: int) -> str:
    by_name = {row.name: row for row in rows}
    lines = [
        "# Small leaves",
        "",
        f"{leaves:,} leaves where the row does not say otherwise, the best of {ROUNDS} or {FEW_ROUNDS} (Orbax: one), "
        "microseconds a leaf. `python bench/small_leaves.py --out bench/results`",
        "",
        "| | us | us of CPU | bar | |",
        "|---|---|---|---|---|",
        *(row.line(by_name) for row in rows),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--leaves", type=int, default=10_000)
    parser.add_argument("--many", type=int, default=100_000, help="leaves of the large tree; 0 for none")
    parser.add_argument("--files", type=Path, help="a directory for zarr arrays")
    parser.add_argument("--out", type=Path, help="a directory for small_leaves.md")
    arguments = parser.parse_args()
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=8")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        rows += saves_and_loads(arguments.leaves, Path(place), ROUNDS, (10, 5))
        rows += onto_shardings(arguments.leaves, Path(place))
        if arguments.many:
            rows += saves_and_loads(arguments.many, Path(place), FEW_ROUNDS, (15, 5))
    with tempfile.TemporaryDirectory(dir=arguments.files) as place:
        rows += zarr(arguments.leaves, Path(place))
    text = report(rows, arguments.leaves)
    print(text)
    if arguments.out:
        (arguments.out / "small_leaves.md").write_text(text)


if __name__ == "__main__":
    main()
