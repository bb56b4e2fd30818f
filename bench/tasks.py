"""What is measured in one cell: a task of one system with one tree, in a process of its own."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import limits
import numpy as np
import workloads
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from measuring import (
    CacheError,
    Measured,
    deferred,
    drop,
    files_in,
    is_equal,
    measure,
    resident,
    settle,
    sync_all,
    tries,
    warm,
)
from systems import SYSTEMS, System, first_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plan import Cell

DEVICES = 8
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """All that a task has to know."""

    cell: Cell
    system: System
    shapes: Any
    values: Any
    """The numpy arrays that everything is compared with; they take no memory of their own."""

    @property
    def path(self) -> Path:
        return Path(self.cell.directory) / "checkpoint"

    @property
    def room(self) -> int:
        return 2 * self.cell.nbytes + 2**28

    def tree(self) -> Any:
        make = workloads.copied if self.cell.is_numpy else workloads.on_devices
        return self.system.own(make(self.values))

    def load(self) -> Any:
        tree = self.system.load(self.path)
        # To ask each of many numpy arrays whether it is ready would take a tenth of what its load may take.
        return tree if self.cell.is_numpy else jax.block_until_ready(tree)


def bench_of(cell: Cell) -> Bench:
    shapes = onto_place(cell, workloads.TREES[cell.tree](cell.size))
    values = workloads.read_values(shapes, Path(cell.values))
    rehearse(cell)
    return Bench(cell, SYSTEMS[cell.kind](shapes), shapes, values)


def rehearse(cell: Cell) -> None:
    """All is imported, and what happens only at a first call has happened: with a few small leaves."""
    shapes = onto_place(cell, workloads.rehearsal())
    values = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), shapes)
    system, path = SYSTEMS[cell.kind](shapes), Path(cell.directory) / "rehearsal"
    tree = system.own(values if cell.is_numpy else workloads.on_devices(values))
    if cell.task in ("async", "loop"):
        system.start(tree, path)()
    elif cell.task in ("reshard", "rows"):
        system.save(workloads.on_devices(values, shardings_of(shapes, places()["rows"])), path)
    else:
        system.save(tree, path)
    if cell.task == "reshard":
        for name in RESHARDED:
            place = places()[name]
            jax.block_until_ready(system.reshard(path, with_shardings(shapes, place)))
    elif cell.task in ("rows", "one leaf"):
        system.checkpoint.open(path)["half"][:8]
    else:
        jax.block_until_ready(system.load(path))


# --------------------------------------------------------------------------------------- saves and loads


def roundtrip(bench: Bench) -> Answer:
    """Durable saves, warm loads and cold loads; every bit is compared."""
    saved = fastest(bench, partial(save_durably, bench, bench.tree()), "save")
    return merged({"values": saved}, loads(bench))


def load_only(bench: Bench) -> Answer:
    bench.system.save(bench.tree(), bench.path)
    return loads(bench)


def fastest(bench: Bench, attempt: Callable[[], dict[str, Any]], what: str) -> dict[str, Any]:
    """The fastest of a few tries, but the most memory that any of them took."""
    tried = tries(bench.cell.tries, attempt, lambda values: values[what])
    memory = {name: max(values[name] for values in tried) for name in tried[0] if name.endswith("memory")}
    return min(tried, key=lambda values: values[what]) | memory


def save_durably(bench: Bench, tree: Any) -> dict[str, Any]:
    remove(bench.path)
    settle(bench.room)
    saved = measure(lambda: bench.system.save(tree, bench.path))
    values = {"save": saved.seconds, **grown("save memory", saved, 0)}
    if not bench.system.syncs:
        synced = measure(lambda: sync_all(bench.path))
        values |= {"save": saved.seconds + synced.seconds, "save, not synced": saved.seconds}
    return values | {"disk bytes": sum(file.stat().st_size for file in files_in(bench.path))}


def loads(bench: Bench) -> Answer:
    first = {"first load": measure(bench.load).seconds} if bench.system.compiles else {}
    values = first | fastest(bench, partial(warm_load, bench), "load")
    if not bench.cell.is_cold:
        return {"values": values}
    try:
        return {"values": values | fastest(bench, partial(cold_load, bench), "cold load")}
    except CacheError as error:
        return {"values": values, "skipped": f"cold load: {error}"}


def warm_load(bench: Bench) -> dict[str, Any]:
    warm(bench.path, bench.room)
    loaded, values = timed_load(bench, "load")
    return values | grown("load memory", loaded, bench.cell.nbytes)


def cold_load(bench: Bench) -> dict[str, Any]:
    settle(bench.room)
    drop(bench.path)
    return timed_load(bench, "cold load")[1]


def timed_load(bench: Bench, what: str) -> tuple[Measured, dict[str, float]]:
    """Until the arrays are ready and every page has been touched, and until the call came back."""
    loaded = measure(bench.load)
    later = deferred(piece for leaf in jax.tree.leaves(loaded.value) for _, piece in pieces(leaf))
    require_equal(bench, loaded.value)
    require_placed(bench, loaded.value)
    return loaded, {what: loaded.seconds + later, f"{what}, returned": loaded.seconds}


def grown(name: str, measured: Measured, state: int) -> dict[str, int]:
    """Memory beyond the state, where the kernel tells."""
    return {} if measured.grown is None else {name: measured.grown - state}


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_equal(bench: Bench, loaded: Any, expected: Any = None) -> None:
    expected = bench.system.own(bench.values if expected is None else expected)
    if (found := jax.tree.structure(loaded)) != jax.tree.structure(expected):
        raise AssertionError(f"another structure came back: {str(found)[:200]}")
    kind = np.ndarray if bench.cell.is_numpy else jax.Array
    for found, saved in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert isinstance(found, kind), f"a {type(found)} came back"
        assert (found.dtype, found.shape) == (saved.dtype, saved.shape), "another shape or dtype came back"
        for index, piece in pieces(found):
            assert is_equal(piece, saved[index]), "other values came back"


def require_placed(bench: Bench, loaded: Any) -> None:
    if bench.system.shardings is not None:
        pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(bench.system.shardings), strict=True)
        assert all(array.sharding == wanted for array, wanted in pairs), (
            "it is on other devices than asked for"
        )


def pieces(array: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """What each device holds of it."""
    if isinstance(array, np.ndarray) or len(array.addressable_shards) == 1:
        yield ..., np.asarray(array)
    else:
        yield from ((shard.index, np.asarray(shard.data)) for shard in array.addressable_shards)


def save_async(bench: Bench) -> Answer:
    """How long the caller waits, and how long it takes until all is on stable storage."""
    return {"values": fastest(bench, partial(save_in_background, bench, bench.tree()), "blocked")}


def save_in_background(bench: Bench, tree: Any) -> dict[str, Any]:
    remove(bench.path)
    settle(bench.room)
    start = time.perf_counter()
    wait = bench.system.start(tree, bench.path)
    blocked = time.perf_counter() - start
    wait()
    if not bench.system.syncs:
        sync_all(bench.path)
    values = {"blocked": blocked, "save": time.perf_counter() - start}
    require_equal(bench, bench.load())
    return values


def one_leaf(bench: Bench) -> Answer:
    """One leaf of many, by its name, from a checkpoint that nobody has opened yet."""
    bench.system.save(bench.tree(), bench.path)
    block = len(bench.values["blocks"]) * 2 // 3
    warm(bench.path, 0)
    found = measure(lambda: bench.system.checkpoint.open(bench.path)[f"blocks.{block}.mlp.up"][...])
    assert is_equal(np.asarray(found.value), bench.values["blocks"][block]["mlp"]["up"])
    return {"values": {"open": found.seconds}}


# ------------------------------------------------------------------------------------------ resharding


def reshard(bench: Bench) -> Answer:
    """Saved by rows of eight devices; loaded by rows, by columns, two by four, and onto one device."""
    save_by_rows(bench)
    answer: Answer = {"values": {}}
    for name in RESHARDED:
        wanted = with_shardings(bench.shapes, places()[name])
        warm(bench.path, bench.room)
        loaded = measure(
            lambda wanted=wanted: jax.block_until_ready(bench.system.reshard(bench.path, wanted))
        )
        later = deferred(piece for leaf in jax.tree.leaves(loaded.value) for _, piece in pieces(leaf))
        require_equal(bench, loaded.value)
        found = {f"load, {name}": loaded.seconds + later}
        if loaded.read is not None:
            found[f"read, {name}"] = loaded.read / bench.cell.nbytes
        answer["values"] |= found
        del loaded
    return answer


def some_rows(bench: Bench) -> Answer:
    """What one of eight processes would read: an eighth of the rows of every leaf."""
    save_by_rows(bench)
    names, _ = jax.tree.flatten_with_path(bench.values)
    needed = 0
    warm(bench.path, 0)

    def read() -> list[np.ndarray]:
        with bench.system.checkpoint.open(bench.path) as view:
            return [
                view[jax.tree_util.keystr(path, simple=True, separator=".")][third(a)] for path, a in names
            ]

    def third(array: np.ndarray) -> slice:
        rows = len(array) // DEVICES
        return slice(2 * rows, 3 * rows)

    found = measure(read)
    for (_, saved), rows in zip(names, found.value, strict=True):
        assert is_equal(np.asarray(rows), saved[third(saved)]), "other rows came back"
        needed += rows.nbytes
    read_share = {} if found.read is None else {"read, an eighth": found.read / needed}
    return {"values": {"an eighth": found.seconds} | read_share}


def save_by_rows(bench: Bench) -> None:
    shardings = shardings_of(bench.shapes, places()["rows"])
    bench.system.save(workloads.on_devices(bench.values, shardings), bench.path)


Place = Callable[[tuple[int, ...]], jax.sharding.Sharding]
"""Where a leaf of that shape goes."""


def shardings_of(shapes: Any, place: Place) -> Any:
    return jax.tree.map(lambda s: place(s.shape), shapes)


def with_shardings(shapes: Any, place: Place) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place(s.shape)), shapes)


def onto_place(cell: Cell, shapes: Any) -> Any:
    """The shapes with the shardings that the cell loads onto, if it says which."""
    return with_shardings(shapes, places()[cell.place]) if cell.place else shapes


RESHARDED = ("rows", "columns", "2x4", "one device")


def places() -> dict[str, Place]:
    devices = np.array(jax.devices()[:DEVICES])
    line, grid = Mesh(devices, ("x",)), Mesh(devices.reshape(2, DEVICES // 2), ("x", "y"))

    def by(mesh: Mesh, matrix: P, vector: P) -> Place:
        return lambda shape: NamedSharding(mesh, matrix if len(shape) == 2 else vector)

    return {
        "rows": by(line, P("x"), P("x")),
        "columns": by(line, P(None, "x"), P()),
        "2x4": by(grid, P("x", "y"), P("x")),
        "replicas": by(line, P(), P()),
        "one device": lambda shape: first_device(),
    }


# ------------------------------------------------------------------------------------------ many saves


def frozen(bench: Bench) -> Answer:
    """Saves in a row, of which only the small part is another each time: those after the first."""
    base = workloads.on_devices(bench.values["base"])
    seconds, written, path = [], [], bench.path
    for number in range(bench.cell.saves):
        changed = jax.tree.map(lambda a, n=number: a + np.asarray(n, a.dtype), bench.values["trainable"])
        tree = bench.system.own({"base": base, "trainable": workloads.on_devices(changed)})
        if not bench.cell.is_ours:  # we replace what we find, as a run that keeps one checkpoint does
            path = bench.path.with_name(f"checkpoint-{number}")
        settle(bench.room)
        saved = measure(lambda tree=tree, path=path: bench.system.save(tree, path))
        seconds.append(
            saved.seconds + (0 if bench.system.syncs else measure(lambda p=path: sync_all(p)).seconds)
        )
        written.append(saved.written)
    loaded = jax.block_until_ready(bench.system.load(path))
    require_equal(bench, loaded, {"base": bench.values["base"], "trainable": changed})
    values = {"save": float(np.median(seconds[1:]))}
    if None not in written:
        values["written"] = float(np.median(written[1:]))
        trained = workloads.nbytes_of(bench.shapes["trainable"])
        values["written for each trained byte"] = values["written"] / trained
    return {"values": values, "all": {"seconds": seconds, "written": written}}


def soak(bench: Bench) -> Answer:
    """Resident memory after each of many saves, and its slope without the first fifth."""
    tree, sizes, previous = bench.tree(), [], None
    for number in range(bench.cell.saves):
        path = bench.path.with_name(f"checkpoint-{number}")
        bench.system.save(tree, path)
        if previous:
            shutil.rmtree(previous)
        previous = path
        gc.collect()
        sizes.append(resident("VmRSS") / 1e6)
    later = sizes[len(sizes) // 5 :]
    slope = float(np.polyfit(np.arange(len(later)), later, 1)[0])
    return {"values": {"MB a save": slope, "MB in all": sizes[-1] - sizes[0]}, "all": {"resident MB": sizes}}


BATCH, EVERY = 64, 5


def loop(bench: Bench) -> Answer:
    """The steps of a training whose state is donated, with a save every few steps, beside steps without."""
    layers = jax.tree.leaves(bench.values)
    state = {"w": workloads.on_devices(layers), "m": workloads.on_devices([np.zeros_like(w) for w in layers])}
    saver = Saver(bench, state)
    batch = jnp.ones((BATCH, layers[0].shape[0]), jnp.float32)
    step = jax.jit(train_step, donate_argnums=0)
    state, _ = run_steps(step, state, batch, 3)
    settle(bench.room)

    state, before = run_steps(step, state, batch, bench.cell.steps)
    state, during = run_steps(step, state, batch, bench.cell.steps, saver.after_step)
    saver.wait()
    state, after = run_steps(step, state, batch, bench.cell.steps)
    saver.require_equal()
    return {
        "values": {"step": float(np.median(before + after)), **inflation(during, before + after)},
        "all": {"before": before, "during": during, "after": after},
    }


def inflation(steps: list[float], alone: list[float]) -> dict[str, float]:
    """By how many per cent steps take longer than others: in the middle, at worst, and on average."""
    kinds = {"p50": np.median, "p99": lambda seconds: np.percentile(seconds, 99), "mean": np.mean}
    return {name: 100 * float(of(steps) / of(alone) - 1) for name, of in kinds.items()}


def train_step(state: dict, batch: jax.Array) -> dict:
    def loss(weights: list[jax.Array]) -> jax.Array:
        x = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x * x).mean()

    gradients = jax.grad(loss)(state["w"])
    moments = [0.9 * m + g for m, g in zip(state["m"], gradients, strict=True)]
    return {"w": [w - 1e-3 * m for w, m in zip(state["w"], moments, strict=True)], "m": moments}


def run_steps(
    step: Callable[..., Any],
    state: Any,
    batch: Any,
    number: int,
    after_step: Callable[[int, Any], float] = lambda number, state: 0.0,
) -> tuple[Any, list[float]]:
    """The state afterwards, and the seconds of every step, with what was called after it."""
    seconds = []
    for i in range(number):
        start = time.perf_counter()
        state = jax.block_until_ready(step(state, batch))
        unmeasured = after_step(i, state)
        seconds.append(time.perf_counter() - start - unmeasured)
    return state, seconds


class Saver:
    """Saves every few steps, each time into a new directory, and keeps a copy of what was saved last."""

    def __init__(self, bench: Bench, state: Any) -> None:
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)
        self.system = SYSTEMS[bench.cell.kind](shapes)
        self.path, self.wait, self.copy = bench.path, lambda: None, None
        # After the last save there are steps that use the memory again which was donated to them.
        self.last = (bench.cell.steps // EVERY - 1) * EVERY

    def after_step(self, number: int, state: Any) -> float:
        """Begins a save if it is time; the seconds that were spent on something else."""
        count, unmeasured = number + 1, 0.0
        if count % EVERY or count > self.last:
            return unmeasured
        if count == self.last:
            copied = measure(lambda: jax.tree.map(np.array, state))
            self.copy, unmeasured = copied.value, copied.seconds
        self.wait()
        self.path = self.path.with_name(f"checkpoint-{count}")
        self.wait = self.system.start(state, self.path)
        return unmeasured

    def require_equal(self) -> None:
        loaded = self.system.load(self.path)
        for found, saved in zip(jax.tree.leaves(loaded), jax.tree.leaves(self.copy), strict=True):
            assert is_equal(np.asarray(found), saved), (
                "what came back is not what was there before it was donated"
            )


# ------------------------------------------------------------------------------------------------ all


def floors(cell: Cell) -> Answer:
    values = workloads.read_values(workloads.TREES[cell.tree](cell.size), Path(cell.values))
    return limits.floors(workloads.on_devices(values), jax.tree.leaves(values), first_device())


def merged(first: Answer, second: Answer) -> Answer:
    return {**first, **second, "values": first["values"] | second["values"]}


TASKS: dict[str, Callable[[Bench], Answer]] = {
    "roundtrip": roundtrip,
    "load": load_only,
    "async": save_async,
    "one leaf": one_leaf,
    "reshard": reshard,
    "rows": some_rows,
    "frozen": frozen,
    "soak": soak,
    "loop": loop,
}
