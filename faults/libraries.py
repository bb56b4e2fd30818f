"""eformer and its peers with the same tree, each used as its documents say."""

from __future__ import annotations

import functools
import importlib
import os
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from subjects import Subject, WrongError

if TYPE_CHECKING:
    from pathlib import Path

# Every library is imported when it is used, because no environment has them all.


@functools.cache
def flat_tree(generation: int) -> dict[str, Any]:
    """Return arrays of 66 kB by their keys. Those of two generations differ in all values and in nothing else."""
    rng = np.random.default_rng(generation)
    layers = {
        f"layers.{n}.{name}": rng.standard_normal(shape).astype(np.float32)
        for n in range(4)
        for name, shape in (("b", (64,)), ("w", (64, 64)))
    }
    return {**layers, "step": np.full(1, generation, np.int32)}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, name = key.split(".")
        functools.reduce(lambda at, parent: at.setdefault(parent, {}), parents, tree)[name] = value
    return tree


def flattened(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: np.asarray(tree)}
    found: dict[str, Any] = {}
    for key, child in tree.items():
        found |= flattened(child, f"{prefix}.{key}" if prefix else str(key))
    return found


def generation_of(flat: dict[str, Any]) -> int:
    """Return which generation it is, bit for bit."""
    found = int(flat["step"].reshape(-1)[0]) if "step" in flat and flat["step"].size else 0
    expected = flat_tree(found) if 0 < found < 100 else {}
    if flat.keys() != expected.keys():
        raise WrongError(f"other leaves, or other values of step: {found}")
    for key, array in expected.items():
        if (flat[key].dtype, flat[key].shape) != (array.dtype, array.shape):
            raise WrongError(f"{key}: {flat[key].dtype}{flat[key].shape}")
        if flat[key].tobytes() != array.tobytes():
            raise WrongError(f"{key}: other values than those of generation {found}")
    return found


class Library(Subject):
    modules: tuple[str, ...] = ()
    name = "checkpoint"

    def save(self, folder: Path, generation: int) -> None:
        self.save_tree(nested(flat_tree(generation)), folder / self.name, generation)

    def look(self, folder: Path) -> int:
        return generation_of(flattened(self.load_tree(folder / self.name)))

    def save_tree(self, tree: Any, path: Path, generation: int) -> None:
        raise NotImplementedError

    def load_tree(self, path: Path) -> Any:
        raise NotImplementedError


class Eformer(Library):
    title = "eformer"
    modules = ("eformer.checkpoint",)
    layout = "safetensors"

    def save_tree(self, tree: Any, path: Path, generation: int) -> None:
        from eformer import checkpoint

        checkpoint.save(tree, path, format=self.layout)

    def load_tree(self, path: Path) -> Any:
        from eformer import checkpoint

        return checkpoint.load(path)


class EformerZarr(Eformer):
    title = "eformer, zarr"
    layout = "tensorstore"


class WithoutSyncs(Eformer):
    """A control, which shows that power cuts are noticed: eformer without its syncs."""

    title = "control without syncs"

    def save_tree(self, tree: Any, path: Path, generation: int) -> None:
        with mock.patch.multiple(os, fsync=lambda fd: None, fdatasync=lambda fd: None):
            super().save_tree(tree, path, generation)


class WithoutDigests(Eformer):
    """A control, which shows that flipped bits are noticed: eformer without its digests."""

    title = "control without digests"

    def load_tree(self, path: Path) -> Any:
        from eformer import checkpoint

        return checkpoint.load(path, verify=False)


class OrbaxSteps(Library):
    """A CheckpointManager: every generation is a step, the last one is loaded; the old one is kept."""

    title = "Orbax, steps"
    environment = "peers"
    modules = ("orbax.checkpoint",)

    def save_tree(self, tree: Any, path: Path, generation: int) -> None:
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
            manager.save(generation, args=ocp.args.StandardSave(tree))
            manager.wait_until_finished()

    def load_tree(self, path: Path) -> Any:
        import orbax.checkpoint as ocp

        with ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
            return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore())


class OrbaxForce(Library):
    """A StandardCheckpointer that saves to the same path with `force=True`."""

    title = "Orbax, force=True"
    environment = "peers"
    modules = ("orbax.checkpoint",)

    def save_tree(self, tree: Any, path: Path, generation: int) -> None:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, tree, force=True)
            checkpointer.wait_until_finished()

    def load_tree(self, path: Path) -> Any:
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path)


class Safetensors(Library):
    title = "safetensors"
    environment = "peers"
    modules = ("safetensors.numpy",)
    name = "model.safetensors"

    def save_tree(self, tree: Any, path: Path, generation: int) -> None:
        from safetensors.numpy import save_file

        save_file(flattened(tree), path)

    def load_tree(self, path: Path) -> Any:
        from safetensors.numpy import load_file

        return nested(load_file(path))


class Flax(Library):
    """Its msgpack bytes, written to one file as its guide shows."""

    title = "flax msgpack"
    environment = "peers"
    modules = ("flax.serialization",)
    name = "model.msgpack"

    def save_tree(self, tree: Any, path: Path, generation: int) -> None:
        from flax import serialization

        with open(path, "wb") as file:
            file.write(serialization.to_bytes(tree))

    def load_tree(self, path: Path) -> Any:
        from flax import serialization

        return serialization.msgpack_restore(path.read_bytes())


class OriginalSteps(Library):
    """eFormer 0.0.101: its Checkpointer, with a directory for each step; the last one is loaded."""

    title = "eFormer 0.0.101, steps"
    environment = "original"
    modules = ("eformer.serialization.checkpointer",)

    def checkpointer(self, path: Path) -> tuple[Any, Any]:
        import jax

        from eformer.serialization.checkpointer import Checkpointer

        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
        return Checkpointer(base_path=str(path), save_interval=None, step_policies=[]), mesh

    def save_tree(self, tree: Any, path: Path, generation: int) -> None:
        import jax

        checkpointer, mesh = self.checkpointer(path)
        arrays = jax.tree.map(jax.numpy.asarray, tree)
        checkpointer.save_pytree(arrays, "model", step=generation, mesh=mesh)
        checkpointer.wait_until_finished()

    def load_tree(self, path: Path) -> Any:
        checkpointer, mesh = self.checkpointer(path)
        return checkpointer.load_pytree(mesh=mesh, prefix="model", discover_latest=True)[0]


class OriginalPath(Library):
    """eFormer 0.0.101: its AsyncCheckpointManager, with the same path each time."""

    title = "eFormer 0.0.101, one path"
    environment = "original"
    modules = ("eformer.serialization.async_manager",)

    def manager(self) -> tuple[Any, Any]:
        import jax

        from eformer.serialization.async_manager import AsyncCheckpointManager

        return AsyncCheckpointManager(), jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))

    def save_tree(self, tree: Any, path: Path, generation: int) -> None:
        import jax

        manager, mesh = self.manager()
        manager.save(jax.tree.map(jax.numpy.asarray, tree), str(path), mesh=mesh)

    def load_tree(self, path: Path) -> Any:
        manager, mesh = self.manager()
        return manager.load(str(path), mesh)[0]


LIBRARIES: dict[str, type[Library]] = {
    kind.title: kind
    for kind in (
        Eformer,
        EformerZarr,
        OrbaxSteps,
        OrbaxForce,
        Safetensors,
        Flax,
        OriginalSteps,
        OriginalPath,
    )
}


# Only for `--repeat`: they are eformer, broken on purpose.
CONTROLS: dict[str, type[Library]] = {kind.title: kind for kind in (WithoutSyncs, WithoutDigests)}


def import_all(environment: str) -> None:
    """Import the libraries of an environment."""
    for library in LIBRARIES.values():
        if library.environment == environment:
            for module in library.modules:
                importlib.import_module(module)
