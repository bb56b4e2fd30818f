"""The systems that are compared, behind one interface: eformer and its peers, each as its documents show it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Every system is imported when it is made, because no environment has them all.


class System:
    """One way to save and load a tree whose `shapes` are known.

    First `own` gives the tree as the system takes it, outside of the timing. `save` returns when it has done what it
    does by itself, `load` gives back what `own` gave, as jax arrays on the shardings of the shapes, which need not be
    ready. `start` begins a save and returns what waits for its end; `reshard` loads onto the shardings of other
    `shapes`.
    """

    syncs = False  # whether all is on stable storage when `save` returns
    compiles = False  # whether `load` makes jax compile something for each shape that is new to the process

    def __init__(self, shapes: Any) -> None:
        self.shapes = placed(shapes)
        self.shardings = jax.tree.map(lambda shape: shape.sharding, self.own(self.shapes))

    def own(self, tree: Any) -> Any:
        return tree

    def save(self, tree: Any, path: Path) -> None:
        raise NotImplementedError

    def load(self, path: Path) -> Any:
        raise NotImplementedError

    def start(self, tree: Any, path: Path) -> Callable[[], Any]:
        raise NotImplementedError

    def reshard(self, path: Path, shapes: Any) -> Any:
        raise NotImplementedError

    def put(self, tree: Any) -> Any:
        """What is left to the user of a system that knows no shardings."""
        return jax.device_put(tree, self.shardings)


class Eformer(System):
    """Loads onto the shardings; without `like`, as it was saved."""

    syncs = True

    def __init__(
        self,
        shapes: Any,
        *,
        layout: str = "safetensors",
        reuse: bool = False,
        like: bool = True,
        **loading: Any,
    ) -> None:
        super().__init__(shapes)
        from eformer import checkpoint

        self.checkpoint, self.loading = checkpoint, loading
        self.like = self.shapes if like else None
        if not like:
            self.shardings = None
        options = checkpoint.SaveOptions(reuse=True) if reuse else checkpoint.SaveOptions()
        self.saving = {"format": layout, "options": options}

    def save(self, tree: Any, path: Path) -> None:
        self.checkpoint.save(tree, path, **self.saving)

    def load(self, path: Path) -> Any:
        return self.checkpoint.load(path, like=self.like, **self.loading)

    def start(self, tree: Any, path: Path) -> Callable[[], Any]:
        return self.checkpoint.save_async(tree, path, **self.saving).result

    def reshard(self, path: Path, shapes: Any) -> Any:
        return self.checkpoint.load(path, like=shapes, **self.loading)


class Orbax(System):
    """With the defaults of its StandardCheckpointer: OCDBT, zarr, zstd."""

    def __init__(self, shapes: Any) -> None:
        super().__init__(shapes)
        import orbax.checkpoint

        self.orbax = orbax.checkpoint
        self.checkpointer = self.new_checkpointer()

    def new_checkpointer(self) -> Any:
        return self.orbax.StandardCheckpointer()

    def save(self, tree: Any, path: Path) -> None:
        self.start(tree, path)()

    def load(self, path: Path) -> Any:
        return self.reshard(path, self.shapes)

    def start(self, tree: Any, path: Path) -> Callable[[], Any]:
        self.checkpointer.save(path, tree)
        return self.checkpointer.wait_until_finished

    def reshard(self, path: Path, shapes: Any) -> Any:
        return self.checkpointer.restore(path, shapes)


class TunedOrbax(Orbax):
    """In the setting that was quickest of those that it documents: OCDBT, zarr3, and nothing is compressed."""

    def new_checkpointer(self) -> Any:
        handler = self.orbax.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
        return self.orbax.AsyncCheckpointer(handler)

    def start(self, tree: Any, path: Path) -> Callable[[], Any]:
        self.checkpointer.save(path, args=self.orbax.args.PyTreeSave(tree))
        return self.checkpointer.wait_until_finished

    def reshard(self, path: Path, shapes: Any) -> Any:
        restore = self.orbax.checkpoint_utils.construct_restore_args(shapes)
        return self.checkpointer.restore(
            path, args=self.orbax.args.PyTreeRestore(shapes, restore_args=restore)
        )


class Jax(System):
    """jax.experimental.array_serialization."""

    def __init__(self, shapes: Any) -> None:
        super().__init__(shapes)
        from jax.experimental.array_serialization import pytree_serialization

        self.serialization = pytree_serialization

    def save(self, tree: Any, path: Path) -> None:
        self.serialization.save(tree, path)

    def load(self, path: Path) -> Any:
        return self.reshard(path, self.shapes)

    def reshard(self, path: Path, shapes: Any) -> Any:
        return self.serialization.load(path, shapes)


class Original(System):
    """eFormer 0.0.101, which knows dicts only."""

    def __init__(self, shapes: Any) -> None:
        super().__init__(shapes)
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
        return self.put(self.manager.load(str(path), self.mesh)[0])


class Safetensors(System):
    """A flat dict each way; to flatten the tree and to rebuild it is not counted."""

    def own(self, tree: Any) -> dict[str, Any]:
        leaves, _ = jax.tree.flatten_with_path(tree)
        return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


class SafetensorsNumpy(Safetensors):
    def __init__(self, shapes: Any) -> None:
        super().__init__(shapes)
        import safetensors.numpy

        self.numpy = safetensors.numpy

    def save(self, tree: dict[str, Any], path: Path) -> None:
        self.numpy.save_file({name: np.asarray(array) for name, array in tree.items()}, path)

    def load(self, path: Path) -> dict[str, Any]:
        return self.put(self.numpy.load_file(path))


class SafetensorsFlax(Safetensors):
    compiles = True

    def __init__(self, shapes: Any) -> None:
        super().__init__(shapes)
        import safetensors.flax

        self.flax = safetensors.flax

    def save(self, tree: dict[str, Any], path: Path) -> None:
        self.flax.save_file(dict(tree), path)  # a copy: it changes the dict it gets

    def load(self, path: Path) -> dict[str, Any]:
        return self.put(self.flax.load_file(path))


class Flax(System):
    """Its msgpack bytes, in one file."""

    def __init__(self, shapes: Any) -> None:
        super().__init__(shapes)
        import flax.serialization

        self.serialization = flax.serialization

    def save(self, tree: Any, path: Path) -> None:
        path.write_bytes(self.serialization.to_bytes(tree))

    def load(self, path: Path) -> Any:
        return self.put(self.serialization.from_bytes(self.shapes, path.read_bytes()))


class Equinox(System):
    compiles = True

    def __init__(self, shapes: Any) -> None:
        super().__init__(shapes)
        import equinox

        self.equinox = equinox

    def save(self, tree: Any, path: Path) -> None:
        self.equinox.tree_serialise_leaves(
            path.with_suffix(".eqx"), tree
        )  # it adds the suffix if there is none
        path.with_suffix(".eqx").rename(path)

    def load(self, path: Path) -> Any:
        with path.open("rb") as file:
            return self.put(self.equinox.tree_deserialise_leaves(file, self.shapes))


def first_device() -> jax.sharding.NamedSharding:
    """On a mesh, as the arrays of most programs are."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def placed(shapes: Any) -> Any:
    """The shapes with a sharding each: the first device, if not told."""
    here = first_device()
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=s.sharding or here), shapes)


SYSTEMS: dict[str, Callable[[Any], System]] = {
    "eformer": Eformer,
    "eformer, no like": functools.partial(Eformer, like=False),
    "eformer, no digests": functools.partial(Eformer, verify=False),
    "eformer, mapped": functools.partial(Eformer, mmap=True),
    "eformer, zarr": functools.partial(Eformer, layout="tensorstore"),
    "eformer, reuse": functools.partial(Eformer, reuse=True),
    "orbax": Orbax,
    "orbax, tuned": TunedOrbax,
    "jax": Jax,
    "original": Original,
    "safetensors, numpy": SafetensorsNumpy,
    "safetensors, flax": SafetensorsFlax,
    "flax msgpack": Flax,
    "equinox": Equinox,
}
