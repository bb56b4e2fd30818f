"""Functions of the newer generation: save and load a tree, or several objects by name.

Tests: tests/compat_orbax/test_v1.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from eformer._engine.formats.others.orbax_metadata import JSON_FILE
from eformer._engine.record.indexes import MANIFEST, ORBAX_TREE
from eformer.compat.orbax import args as args_lib
from eformer.compat.orbax import future as future_lib
from eformer.compat.orbax._alike import on_disk, to_path
from eformer.compat.orbax._composite import CheckpointArgs, CompositeArgs
from eformer.compat.orbax._restore import Wish
from eformer.compat.orbax._rules import restore_like, restore_pytree
from eformer.compat.orbax._saving import Saving, wait_for
from eformer.compat.orbax._stored import describe
from eformer.compat.orbax.handlers import (
    AsyncCheckpointHandler,
    CompositeCheckpointHandler,
    PyTreeCheckpointHandler,
    items_in,
    restore_by,
)
from eformer.compat.orbax.metadata import read_step
from eformer.compat.orbax.v1._context import Context, current
from eformer.compat.orbax.v1._metadata import ArrayMetadata, CheckpointMetadata, NumpyMetadata, tree_metadata
from eformer.compat.orbax.v1.errors import InvalidLayoutError, NoEntryError
from eformer.errors import EformerError

STATE, AUTO, METRICS = "state", "AUTO", "metrics"
_FIRST = (STATE, "pytree")
_LEAVES = (jax.Array, np.ndarray, np.number, bool, int, float, str)


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that writes its own files: `save` and `load` are coroutines that return awaitables."""

    async def save(self, directory: Any) -> Any:
        """Take what is to be saved, and return an awaitable of the rest."""

    async def load(self, directory: Any) -> Any:
        """Return an awaitable that takes the state from the directory."""


class _Created:
    """A directory that exists: `await_creation` returns it. It is also a path."""

    def __init__(self, path: Any) -> None:
        self.path = path

    async def await_creation(self) -> Any:
        """Return the path."""
        return self.path

    def __truediv__(self, name: str) -> Any:
        return self.path / name

    def __fspath__(self) -> str:
        return str(self.path)


class _StatefulHandler(AsyncCheckpointHandler):
    """Saves and loads objects that write their own files."""

    async def async_save(self, directory: Any, *given: Any, **named: Any) -> Any:
        rest = await named["args"].item.save(_Created(directory))
        return [future_lib.CommitFuture(_awaited(rest))] if rest is not None else []

    def restore(self, directory: Any, *given: Any, **named: Any) -> Any:
        return load_stateful(named["args"].item, directory)


async def _awaited(rest: Any) -> Any:
    return await rest


def load_stateful(item: Any, directory: Any) -> Any:
    """Let an object take its state from a directory."""

    async def load() -> None:
        rest = await item.load(to_path(directory))
        if rest is not None:
            await rest

    future_lib.run(load())
    return item


class _StatefulSave(CheckpointArgs):
    def __init__(self, item: Any = None) -> None:
        self.item = item


args_lib.register_with_handler(_StatefulHandler, for_save=True, for_restore=True)(_StatefulSave)


class AsyncResponse:
    """A call under way. `result` waits for it, and raises its error."""

    def __init__(self, call: Callable[[float | None], Any]) -> None:
        self._call = call

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return the result."""
        return self._call(timeout)

    def on_complete(self, callback: Callable[..., Any]) -> None:
        """Call a function when the call has ended."""
        future_lib.CommitFuture(self._then(callback))

    async def _then(self, callback: Callable[..., Any]) -> None:
        callback(self._call(None))


def response(saving: Saving, value: Any = None) -> AsyncResponse:
    """Return the response of a save."""

    def wait(timeout: float | None) -> Any:
        if not saving.done.wait(timeout):
            raise TimeoutError(f"the save to {saving.final} has not ended in {timeout} seconds")
        saving.result()
        return value

    return AsyncResponse(wait)


# ------------------------------------------------------------------------------------------------- save


def is_stateful(value: Any) -> bool:
    """Tell whether an object writes its own files."""
    return all(inspect.iscoroutinefunction(getattr(value, name, None)) for name in ("save", "load"))


def begin(
    path: Path,
    items: Mapping[str, Any],
    context: Context,
    *,
    overwrite: bool,
    custom_metadata: Any,
    metrics: Any = None,
    is_step: bool = False,
) -> Saving:
    """Begin to save several objects by name."""
    if not items:
        raise ValueError(
            f"`checkpointables` must be a dict of names and objects to save, but is empty: {items!r}"
        )
    if METRICS in items:
        raise ValueError(f"Provided reserved checkpointable keys: {{{METRICS!r}}}.")
    wait_for(path)
    if path.exists() and not overwrite:
        raise ValueError(f"Destination {path} already exists.")
    chosen = {name: _args_of(name, value) for name, value in items.items()}
    handler = CompositeCheckpointHandler()
    if metrics is not None:
        from eformer.compat.orbax.handlers import JsonCheckpointHandler

        handler = CompositeCheckpointHandler(
            **dict.fromkeys(chosen), **{METRICS: JsonCheckpointHandler(METRICS)}
        )
        chosen[METRICS] = args_lib.JsonSave(metrics)
    settings = replace(context.settings(), extra=()) if is_step else context.settings()
    saving = Saving(path, settings, force=overwrite)
    return saving.begin(handler, CompositeArgs(**chosen), custom_metadata)


def _args_of(name: str, value: Any) -> Any:
    if value is None:
        raise ValueError("checkpointable must not be None for saving.")
    if is_stateful(value):
        return _StatefulSave(value)
    for leaf in jax.tree.leaves(value):
        if not isinstance(leaf, _LEAVES):
            if leaf is value:
                raise NoEntryError(
                    f'Could not identify a valid handler for the checkpointable: "{name}" and checkpointable '
                    f"type={type(value)}. Give it coroutines save and load (StatefulCheckpointable)"
                )
            raise ValueError(
                f"Unsupported leaf type for saving: `{type(leaf)}`. Supported leaf types are: {_LEAVES}"
            )
    return args_lib.PyTreeSave(value)


def _require_tree(state: Any) -> None:
    if state is None:
        raise ValueError("checkpointable must not be None for saving.")
    for leaf in jax.tree.leaves(state):
        if not isinstance(leaf, _LEAVES):
            raise ValueError(
                f"Unsupported leaf type for saving: `{type(leaf)}`. Supported leaf types are: {_LEAVES}"
            )


def save(
    path: Any,
    state: Any,
    *,
    checkpointable_name: str = STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> None:
    """Save a tree to a path. Raise ValueError if the path exists, unless `overwrite`."""
    _require_tree(state)
    save_checkpointables(
        path, {checkpointable_name: state}, overwrite=overwrite, custom_metadata=custom_metadata
    )


def save_async(
    path: Any,
    state: Any,
    *,
    checkpointable_name: str = STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> AsyncResponse:
    """Save a tree to a path in the background."""
    _require_tree(state)
    items = {checkpointable_name: state}
    return save_checkpointables_async(path, items, overwrite=overwrite, custom_metadata=custom_metadata)


def save_checkpointables(
    path: Any, checkpointables: dict[str, Any], *, overwrite: bool = False, custom_metadata: Any = None
) -> None:
    """Save several objects by name to a path."""
    begin(
        on_disk(path), checkpointables, current(), overwrite=overwrite, custom_metadata=custom_metadata
    ).run()


def save_checkpointables_async(
    path: Any, checkpointables: dict[str, Any], *, overwrite: bool = False, custom_metadata: Any = None
) -> AsyncResponse:
    """Save several objects by name to a path in the background."""
    saving = begin(
        on_disk(path), checkpointables, current(), overwrite=overwrite, custom_metadata=custom_metadata
    )
    saving.run_in_background()
    return response(saving)


# ------------------------------------------------------------------------------------------------- load


def place_of(path: Any, name: str | None = AUTO) -> Path:
    """Return the directory of a tree: of the item of that name; by default of the first there is."""
    place = on_disk(path)
    wait_for(place)
    if not place.exists():
        raise InvalidLayoutError(
            f"Could not recognize the checkpoint at {place} as a valid Orbax checkpoint: it does not exist"
        )
    if place.is_file() or name is None:
        return place
    if name != AUTO:
        if not (place / name).is_dir():
            raise InvalidLayoutError(
                f"Failed to interpret path {place} as a V1 Orbax PyTree: it has no item {name!r}."
            )
        return place / name
    there = items_in(place)
    for candidate in (
        *(place / one for one in _FIRST if one in there),
        *(place / one for one in there),
        place,
    ):
        if _holds_tree(candidate):
            return candidate
    raise InvalidLayoutError(
        f"Failed to load checkpoint using AUTO resolution mode on path='{place}'. No valid PyTree checkpointable found."
    )


def _holds_tree(place: Path) -> bool:
    if (place / JSON_FILE).is_file() and not any((place / mark).is_file() for mark in (MANIFEST, ORBAX_TREE)):
        return False
    try:
        describe(place)
    except (EformerError, OSError):
        return False
    return True


def load(path: Any, abstract_state: Any = None, *, checkpointable_name: str | None = AUTO) -> Any:
    """Load a tree: as it was saved, or like `abstract_state`."""
    return load_tree(place_of(path, checkpointable_name), abstract_state, current())


def load_async(
    path: Any, abstract_state: Any = None, *, checkpointable_name: str | None = AUTO
) -> AsyncResponse:
    """Load a tree; `result` does so."""
    return AsyncResponse(lambda _: load(path, abstract_state, checkpointable_name=checkpointable_name))


def load_tree(place: Path, abstract: Any, context: Context) -> Any:
    """Load the tree of a directory."""
    stored = describe(place)
    if isinstance(abstract, CheckpointMetadata):
        abstract = abstract.metadata
    if abstract is None:
        return restore_pytree(stored, args_lib.PyTreeRestore())
    is_strict = not context.array.loading.enable_padding_and_truncation
    return restore_like(
        stored, abstract, _wish, partial=context.pytree.loading.partial_load, strict=is_strict
    )


def _wish(leaf: Any) -> Wish:
    """Return how a leaf of a target is wanted: a `ShapeDtypeStruct` stands for an array of JAX."""
    if leaf is ...:
        return Wish("placeholder")
    if isinstance(leaf, NumpyMetadata):
        return Wish("numpy", None, leaf.dtype)
    if isinstance(leaf, ArrayMetadata):
        sharding = leaf.sharding_metadata.to_jax_sharding() if leaf.sharding_metadata is not None else None
        return Wish("jax", None, leaf.dtype, sharding, tuple(leaf.shape))
    if isinstance(leaf, type):
        return _wish_of_type(leaf)
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or (
        hasattr(leaf, "shape") and hasattr(leaf, "sharding")
    ):
        is_key = bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
        shape, dtype = (None, None) if is_key else (tuple(leaf.shape), np.dtype(leaf.dtype))
        return Wish("jax", None, dtype, leaf.sharding, shape)
    if isinstance(leaf, (np.ndarray, np.generic)) and not isinstance(leaf, (int, float)):
        return Wish("numpy", None, leaf.dtype)
    if isinstance(leaf, str):
        return Wish("string")
    if isinstance(leaf, (bool, int, float)):
        return Wish("scalar", type(leaf))
    raise ValueError(f"Unsupported type: {type(leaf)}")


def _wish_of_type(kind: type) -> Wish:
    if issubclass(kind, (bool, int, float)):
        return Wish("scalar", kind)
    if issubclass(kind, str):
        return Wish("string")
    return Wish("jax" if issubclass(kind, jax.Array) else "numpy")


def load_checkpointables(path: Any, abstract_checkpointables: Any = None) -> dict[str, Any]:
    """Load several objects by name: all, or the ones that are asked for."""
    place = on_disk(path)
    wait_for(place)
    if not place.is_dir():
        raise InvalidLayoutError(
            f"Could not recognize the checkpoint at {place} as a valid Orbax checkpoint: it does not exist"
        )
    return load_items(place, abstract_checkpointables, current())


def load_items(place: Path, abstract: Any, context: Context) -> dict[str, Any]:
    """Load several objects of a directory by name."""
    if isinstance(abstract, CheckpointMetadata):
        abstract = abstract.metadata
    there = items_in(place)
    wanted = dict.fromkeys(name for name in there if name != METRICS) if abstract is None else dict(abstract)
    if missing := wanted.keys() - set(there):
        raise KeyError(
            f"Requested checkpointables: {sorted(missing)} for loading were not found in the checkpoint. Available "
            f"checkpointables: {there}"
        )
    recorded = read_step(place).item_handlers
    recorded = recorded if isinstance(recorded, dict) else {}
    return {
        name: _load_item(place / name, value, recorded.get(name), context) for name, value in wanted.items()
    }


def _load_item(place: Path, value: Any, handler: Any, context: Context) -> Any:
    if value is not None and is_stateful(value):
        return load_stateful(value, place)
    kind = args_lib.handler_type(handler)
    if kind is _StatefulHandler:
        raise ValueError("To restore a `StatefulCheckpointable`, you must pass an instance of the object.")
    if kind is not None and not issubclass(
        kind, (PyTreeCheckpointHandler, args_lib.TYPES_BY_CLASS["StandardCheckpointHandler"])
    ):
        return restore_by(kind(), place, args_lib.get_registered_args_cls(kind)[1]())
    return load_tree(place, value, context)


# --------------------------------------------------------------------------------------------- metadata


def metadata(path: Any, checkpointable_name: str | None = AUTO) -> CheckpointMetadata:
    """Describe a tree without reading its leaves."""
    place = place_of(path, checkpointable_name)
    return checkpoint_metadata(on_disk(path), tree_metadata(place))


def checkpoint_metadata(path: Path, described: Any, **more: Any) -> CheckpointMetadata:
    """Describe a checkpoint."""
    step = read_step(path)
    return CheckpointMetadata(
        to_path(path),
        metadata=described,
        init_timestamp_nsecs=step.init_timestamp_nsecs,
        commit_timestamp_nsecs=step.commit_timestamp_nsecs,
        custom_metadata=step.custom_metadata,
        **more,
    )


def items_metadata(path: Path) -> dict[str, Any]:
    """Describe the objects of a checkpoint by name; None for an object that is no tree."""
    return {name: tree_metadata(path / name) if _holds_tree(path / name) else None for name in items_in(path)}


def checkpointables_metadata(path: Any) -> CheckpointMetadata:
    """Describe several objects by name without reading their leaves."""
    place = place_of(path, None)
    found = items_metadata(place)
    found.pop(METRICS, None)
    return checkpoint_metadata(place, found)


def is_orbax_checkpoint(path: Any) -> bool:
    """Tell whether a path is a checkpoint that this module loads."""
    place = on_disk(path)
    if not place.is_dir():
        return False
    return any((place / name).is_file() for name in ("_CHECKPOINT_METADATA", "orbax.checkpoint", "_METADATA"))


def delete(path: Any, *, checkpointable_name: str | None = None, missing_ok: bool = False) -> bool:
    """Delete a checkpoint. Return False if it does not exist and `missing_ok`."""
    from eformer._engine.stores.checkpoints import remove_checkpoint
    from eformer._engine.stores.local import LocalStore

    place = on_disk(path) if checkpointable_name is None else on_disk(path) / checkpointable_name
    wait_for(on_disk(path))
    if not place.exists():
        if missing_ok:
            return False
        raise FileNotFoundError(f"Checkpoint does not exist: {place}.")
    remove_checkpoint(LocalStore(place.parent), place.name)
    return True


save_pytree, save_pytree_async, load_pytree, load_pytree_async, pytree_metadata = (
    save,
    save_async,
    load,
    load_async,
    metadata,
)
