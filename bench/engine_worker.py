"""One system in a process of its own, for engine.py: takes commands on stdin, answers in JSON lines on stdout."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 4 * 2**20
PAGE = 4096
ALIGNMENT = 64  # at such addresses XLA takes host memory as it is

# --------------------------------------------------------------------------------------------- trees


def shaped(shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def llama(width: int) -> dict:
    """A language model of 93 leaves: 1.1 GB at a width of 2048."""
    square, wide, norm = shaped((width, width)), shaped((width, 2 * width)), shaped((width,))
    attention = {"q": square, "k": square, "v": square, "o": square}
    mlp = {"up": wide, "gate": wide, "down": shaped((2 * width, width))}
    layer = {"attention": attention, "mlp": mlp, "norms": [norm, norm]}
    vocabulary = shaped((32000, width))
    return {"embed": vocabulary, "layers": [layer] * 10, "norm": norm, "head": vocabulary}


def small(leaves: int) -> dict:
    """Leaves of 256 B to 16 KB, as many below 2 KB as above, and of any length: few keep the next one aligned."""
    nbytes = np.exp(np.random.default_rng(1).uniform(np.log(256), np.log(16384), leaves)).astype(int).tolist()
    leaf = (shaped((n // 4,), "float32") if i % 2 else shaped((n // 2,)) for i, n in enumerate(nbytes))

    def block() -> dict:
        attention = {name: next(leaf) for name in ("q", "k", "v", "o")}
        mlp = {name: next(leaf) for name in ("up", "gate", "down")}
        return {"attention": attention, "mlp": mlp, "norms": [next(leaf) for _ in range(3)]}

    return {"blocks": [block() for _ in range(leaves // 10)]}


TREES = {"llama": llama, "small": small, "small numpy": small}


def filled(shapes: Any, *, as_numpy: bool) -> Any:
    """Values as weights have them, N(0, 0.02): zeros would favour those that compress."""
    random = np.random.default_rng(0)

    def leaf(shape: jax.ShapeDtypeStruct) -> Any:
        values = (random.standard_normal(shape.shape, np.float32) * np.float32(0.02)).astype(shape.dtype)
        return values if as_numpy else jax.device_put(values)

    return jax.tree.map(leaf, shapes)


# ------------------------------------------------------------------------------------------- systems


class Eformer:
    syncs = True  # what was saved is durable when `save` returns

    def __init__(self, shapes: Any, *, digests: bool = True, ocdbt: bool = False, **arguments: Any) -> None:
        from eformer import checkpoint  # here, because the peers' environment does not have it
        from eformer.checkpoint._formats import _writing

        self.checkpoint, self.digests = checkpoint, digests
        self.arguments = {"options": checkpoint.SaveOptions(ocdbt=ocdbt), **arguments}
        if not digests:
            _writing.xxh3_128 = lambda data: _writing.NO_DIGEST

    def own(self, tree: Any) -> Any:
        """The tree as this system takes it, made outside of the timing."""
        return tree

    def save(self, tree: Any, path: Path) -> None:
        self.checkpoint.save(tree, path, **self.arguments)

    def load(self, path: Path) -> Any:
        return self.checkpoint.load(path, verify=self.digests)


class Plain:
    """The limit: the same bytes from one piece of memory to one file and back, by a few threads."""

    syncs = True

    def __init__(self, shapes: Any, *, threads: int) -> None:
        self.threads = threads

    def own(self, tree: Any) -> np.ndarray:
        return np.concatenate([bytes_of(leaf) for leaf in jax.tree.leaves(tree)])

    def save(self, arena: np.ndarray, path: Path) -> None:
        path.mkdir()
        descriptor = os.open(path / "data", os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, arena.nbytes)
        self.transfer(lambda at: os.pwrite(descriptor, arena[at : at + BLOCK].data, at), arena.nbytes)
        os.fdatasync(descriptor)
        os.close(descriptor)
        sync(path)

    def load(self, path: Path) -> np.ndarray:
        descriptor = os.open(path / "data", os.O_RDONLY)
        nbytes = os.fstat(descriptor).st_size
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
        arena = memory[-memory.ctypes.data % ALIGNMENT :][:nbytes]
        self.transfer(lambda at: os.preadv(descriptor, [arena[at : at + BLOCK].data], at), nbytes)
        os.close(descriptor)
        return arena

    def transfer(self, block_at: Callable[[int], int], nbytes: int) -> None:
        with ThreadPoolExecutor(self.threads) as pool:
            assert sum(pool.map(block_at, range(0, nbytes, BLOCK))) == nbytes


class BareFiles:
    """The limit of a directory for each leaf: the same files, made one after the other, and one sync of them all."""

    syncs = True

    def __init__(self, shapes: Any) -> None:
        pass

    def own(self, tree: Any) -> list[tuple[str, bytes]]:
        leaves, _ = jax.tree.flatten_with_path(tree)
        return [
            (jax.tree_util.keystr(path, simple=True, separator="/"), bytes_of(leaf).tobytes())
            for path, leaf in leaves
        ]

    def save(self, leaves: list[tuple[str, bytes]], path: Path) -> None:
        path.mkdir()
        descriptor = os.open(path, os.O_RDONLY)
        for name, data in leaves:
            os.makedirs(f"{path}/{name}")  # noqa: PTH103  what it costs is measured
            self.write(f"{path}/{name}/.zarray", bytes(180))
            self.write(f"{path}/{name}/0", data)
        self.write(f"{path}/index", bytes(250 * len(leaves)))  # what a list of them takes
        ctypes.CDLL(None).syncfs(descriptor)
        os.close(descriptor)

    def write(self, path: str, data: bytes) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.write(descriptor, data)
        os.close(descriptor)


class Original:
    """eFormer 0.0.101, in an environment of its own; it knows dicts only."""

    syncs = False

    def __init__(self, shapes: Any) -> None:
        from eformer.serialization.async_manager import AsyncCheckpointManager

        self.manager = AsyncCheckpointManager()
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))

    def own(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: self.own(child) for key, child in tree.items()}
        if isinstance(tree, list):
            return {str(key): self.own(child) for key, child in enumerate(tree)}
        return tree

    def save(self, tree: Any, path: Path) -> None:
        self.manager.save(tree, str(path), mesh=self.mesh)

    def load(self, path: Path) -> Any:
        return self.manager.load(str(path), self.mesh)[0]


class Orbax:
    syncs = False

    def __init__(self, shapes: Any) -> None:
        import orbax.checkpoint

        self.checkpointer, self.shapes = orbax.checkpoint.StandardCheckpointer(), shapes

    def own(self, tree: Any) -> Any:
        return tree

    def save(self, tree: Any, path: Path) -> None:
        self.checkpointer.save(path, tree)
        self.checkpointer.wait_until_finished()

    def load(self, path: Path) -> Any:
        return self.checkpointer.restore(path, self.shapes)  # quicker than without a target


class Safetensors:
    """A flat dict each way; to flatten the tree and to rebuild it is not counted."""

    syncs = False

    def __init__(self, shapes: Any) -> None:
        import safetensors.flax

        self.flax = safetensors.flax

    def own(self, tree: Any) -> dict[str, Any]:
        leaves, _ = jax.tree.flatten_with_path(tree)
        return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}

    def save(self, tensors: dict[str, Any], path: Path) -> None:
        path.mkdir()
        self.flax.save_file(dict(tensors), path / "model.safetensors")  # a copy: it changes the dict it gets

    def load(self, path: Path) -> dict[str, Any]:
        return self.flax.load_file(path / "model.safetensors")


SYSTEMS = {
    "eformer": Eformer,
    "eformer, no digests": functools.partial(Eformer, digests=False),
    "eformer, arrays": functools.partial(Eformer, format="tensorstore"),
    "eformer, database": functools.partial(Eformer, format="tensorstore", ocdbt=True),
    "bare files": BareFiles,
    "original": Original,
    "plain, 2 threads": functools.partial(Plain, threads=2),
    "plain, 4 threads": functools.partial(Plain, threads=4),
    "orbax": Orbax,
    "safetensors": Safetensors,
}

# ------------------------------------------------------------------------------------------ commands


class Worker:
    """Its public methods are the commands; they answer with what they measured, in seconds or bytes."""

    def __init__(self, system: str, tree: str, size: int, directory: Path) -> None:
        self._is_numpy = tree.endswith("numpy")
        self._shapes = TREES[tree](size)
        self._new_system = SYSTEMS[system]
        self._system = self._new_system(self._shapes)
        self._path = directory / system

    @functools.cached_property
    def _tree(self) -> Any:
        return self._system.own(filled(self._shapes, as_numpy=self._is_numpy))

    def build(self) -> dict:
        return {"leaves": len(jax.tree.leaves(self._tree))}

    def check(self) -> dict:
        """Saves, loads and compares every bit; afterwards all code is imported."""
        self.save()
        if not hasattr(self._system, "load"):
            return {}
        loaded = self._system.load(self._path)
        assert jax.tree.structure(loaded) == jax.tree.structure(self._tree), "another structure came back"
        for found, saved in zip(jax.tree.leaves(loaded), jax.tree.leaves(self._tree), strict=True):
            assert (type(found), found.dtype, found.shape) == (type(saved), saved.dtype, saved.shape)
            assert np.array_equal(bytes_of(found), bytes_of(saved)), "other values came back"
        return {}

    def save(self) -> dict[str, float]:
        tree = self._tree
        shutil.rmtree(self._path, ignore_errors=True)
        seconds, _ = self._timed(lambda: self._system.save(tree, self._path))
        if self._system.syncs:
            return {"save": seconds}
        start = time.perf_counter()
        sync_all(self._path)
        return {"save": seconds + time.perf_counter() - start, "save, not synced": seconds}

    def save_async(self) -> dict[str, float]:
        shutil.rmtree(self._path, ignore_errors=True)
        seconds, pending = self._timed(lambda: self._system.checkpoint.save_async(self._tree, self._path))
        pending.result()
        return {"save_async": seconds}

    def load(self) -> dict[str, float]:
        read_once(self._path)
        seconds, tree = self._timed(self._loaded)
        return {"load": seconds + deferred(tree)}

    def open_one(self) -> dict[str, float]:
        block = np.random.default_rng().integers(len(self._tree["blocks"]))
        read_once(self._path)
        seconds, array = self._timed(
            lambda: self._system.checkpoint.open(self._path)[f"blocks.{block}.mlp.up"][...]
        )
        assert np.array_equal(bytes_of(array), bytes_of(self._tree["blocks"][block]["mlp"]["up"]))
        return {"open_one": seconds}

    def save_memory(self) -> dict[str, int]:
        tree = self._tree
        self._rehearse()
        shutil.rmtree(self._path, ignore_errors=True)
        return {"save_memory": peak(lambda: self._system.save(tree, self._path))[0]}

    def load_memory(self) -> dict[str, int]:
        self._rehearse()
        nbytes, tree = peak(self._loaded)
        return {"load_memory": nbytes - sum(leaf.nbytes for leaf in jax.tree.leaves(tree))}

    def _timed(self, call: Callable[[], Any]) -> tuple[float, Any]:
        state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._shapes))
        return timed(call, 2 * state + 2**28)

    def _loaded(self) -> Any:
        tree = self._system.load(self._path)
        # To ask each of many numpy arrays whether it is ready would take a tenth of what its load may take.
        return tree if self._is_numpy else jax.block_until_ready(tree)

    def _rehearse(self) -> None:
        """Imports are no part of the memory of a save."""
        shapes, path = {"x": shaped((8, 8))}, self._path.with_name("rehearsal")
        system = self._new_system(shapes)
        shutil.rmtree(path, ignore_errors=True)
        system.save(system.own(filled(shapes, as_numpy=False)), path)
        system.load(path)


# ------------------------------------------------------------------------------------------- details


def timed(call: Callable[[], Any], room: int) -> tuple[float, Any]:
    settle(room)
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def peak(call: Callable[[], Any]) -> tuple[int, Any]:
    """By how much resident memory grew, at its highest."""
    settle()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    before = resident("VmRSS")
    result = call()
    return resident("VmHWM") - before, result


def resident(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def settle(room: int = 0) -> None:
    """Nothing that came before is left to be done or to be used again, and there are `room` bytes of free memory.

    Heap pages that the last load has left behind would make the next one quicker than any first load. And a virtual
    machine gives free memory back to its host after seconds; to get it again takes twenty times as long as a load.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    os.sync()
    np.empty(room, np.uint8)[::PAGE] = 0


def deferred(tree: Any) -> float:
    """Seconds that a load has left to whoever looks first: a look at a byte of every page, less a second look."""
    views = [bytes_of(leaf)[::PAGE] for leaf in jax.tree.leaves(tree)]
    looks = []
    for _ in range(2):
        start = time.perf_counter()
        for view in views:
            view.sum()
        looks.append(time.perf_counter() - start)
    return max(0.0, looks[0] - looks[1])


def bytes_of(array: Any) -> np.ndarray:
    return np.asarray(array).reshape(-1).view(np.uint8)


def read_once(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(BLOCK):
                    pass


def sync_all(path: Path) -> None:
    """Every file, every directory, and the name of the first of them."""
    for directory, _, files in os.walk(path, topdown=False):
        for name in (*files, "."):
            sync(Path(directory, name))
    sync(path.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def main() -> None:
    system, tree, size, directory = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    worker = Worker(system, tree, int(size), Path(directory))
    for command in sys.stdin:
        print(json.dumps(getattr(worker, command.strip())()), file=answers)


if __name__ == "__main__":
    main()
