"""Handlers: they save and restore one kind of item, or several items by name.

Tests: tests/compat_orbax/test_handlers.py.
"""

from __future__ import annotations

import inspect
import json
import numbers
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eformer import checkpoint
from eformer._engine.stores.durable import replacing
from eformer.compat.orbax import args as args_lib
from eformer.compat.orbax import future as future_lib
from eformer.compat.orbax._alike import Alike, on_disk, to_path
from eformer.compat.orbax._composite import CheckpointArgs, Composite, CompositeArgs
from eformer.compat.orbax._restore import Wish, read, wish_of
from eformer.compat.orbax._rules import restore_pytree, restore_standard
from eformer.compat.orbax._stored import CUSTOM, describe, tree_metadata
from eformer.compat.orbax.args import register_with_handler, typestr_of
from eformer.compat.orbax.metadata import StepMetadata, read_step
from eformer.compat.orbax.options import MultiprocessingOptions, processes_of, save_options
from eformer.compat.orbax.tree import plain, str_keypath

SAVE_OPTIONS: ContextVar[checkpoint.SaveOptions | None] = ContextVar("SAVE_OPTIONS", default=None)
"""The options of the save under way, for handlers that eformer makes itself."""

_JSON = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"
_STANDARD = (int, float, np.number, np.ndarray, jax.Array)


class CheckpointHandler(Alike):
    """Save and restore one item in a directory. Subclass it for items of your own; every process calls it."""

    alike: tuple[str, ...] = ("CheckpointHandler",)

    @abstractmethod
    def save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save the item into the directory, which exists."""

    @abstractmethod
    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Restore the item from the directory."""

    def metadata(self, directory: Any) -> Any:
        """Describe the item without reading it."""
        return None

    def finalize(self, directory: Any) -> None:
        """Complete the item, before its step appears. One process calls it, when all have saved."""

    def close(self) -> None:
        """Release what the handler holds."""

    @classmethod
    def typestr(cls) -> str:
        """Return the name of the class that a step records."""
        return f"{cls.__module__}.{cls.__qualname__}"


class AsyncCheckpointHandler(CheckpointHandler):
    """A handler that goes on in the background."""

    alike: tuple[str, ...] = ("AsyncCheckpointHandler",)

    @abstractmethod
    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Take what is to be saved, and return futures of the rest, with `result()`."""

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Save, and wait for the end."""
        for each in future_lib.run(self.async_save(directory, *args, **kwargs)) or ():
            each.result()


class _OwnHandler(AsyncCheckpointHandler):
    """A handler of ours: `begin` saves by arguments of its kind."""

    def __init__(self, *_: Any, multiprocessing_options: Any = None, **__: Any) -> None:
        self._multiprocessing = multiprocessing_options or MultiprocessingOptions()

    def begin(self, directory: Path, args: Any) -> list[Any]:
        """Begin to save, and return futures of the rest."""
        raise NotImplementedError

    def read(self, directory: Any, args: Any) -> Any:
        """Restore by arguments of its kind."""
        raise NotImplementedError

    async def async_save(self, directory: Any, *given: Any, **named: Any) -> Any:
        """Take the item, and return futures of the rest."""
        return self.begin(on_disk(directory), self._arguments(0, given, named))

    def restore(self, directory: Any, *given: Any, **named: Any) -> Any:
        """Restore the item."""
        return self.read(directory, self._arguments(1, given, named))

    def _arguments(self, number: int, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        args = named.pop("args", None)
        if args is not None:
            return args_lib.as_ours(args)
        if given and isinstance(given[0], CheckpointArgs):
            raise ValueError(args_lib.ITEM_KEYWORD)
        return args_lib.get_registered_args_cls(self)[number](*given, **named)

    @property
    def _options(self) -> checkpoint.SaveOptions:
        return SAVE_OPTIONS.get() or save_options(processes_of(self._multiprocessing), None)

    @classmethod
    def typestr(cls) -> str:
        return f"eformer.compat.orbax.{cls.__name__}"


class _TreeHandler(_OwnHandler):
    """A handler of items that eformer saves as checkpoints."""

    def metadata(self, directory: Any) -> Any:
        """Describe the leaves of the tree."""
        return tree_metadata(to_path(directory))

    def _save(self, tree: Any, directory: Path, custom: Any = None) -> list[Any]:
        metadata = None if custom is None else {CUSTOM: json.dumps(custom)}
        return [checkpoint.save_async(tree, directory, metadata=metadata, options=self._options)]


def _cast(tree: Any, save_args: Any) -> Any:
    """Return the tree with the leaves cast that have a dtype in `save_args`, a tree of the same structure."""
    if save_args is None:
        return tree
    return jax.tree.map(lambda leaf, one: _cast_leaf(leaf, getattr(one, "dtype", None)), tree, save_args)


def _cast_leaf(leaf: Any, dtype: Any) -> Any:
    if dtype is None or isinstance(leaf, str):
        return leaf
    if isinstance(leaf, (bool, int, float)):
        return np.asarray(leaf).astype(dtype)[()]
    return leaf.astype(dtype)


class StandardCheckpointHandler(_TreeHandler):
    """Save trees of arrays and numbers."""

    alike = ("StandardCheckpointHandler",)

    def begin(self, directory: Path, args: Any) -> list[Any]:
        """Begin to save a tree. Raise ValueError for leaves that Orbax refuses, too."""
        item = args.item
        if item is None:
            raise ValueError("Must provide item to save.")
        if isinstance(item, (jax.Array, numbers.Number)):
            raise ValueError(
                "StandardCheckpointHandler / StandardSave does not support single arrays or scalars. Use "
                "ArrayCheckpointHandler / ArraySave"
            )
        _require_content(item)
        checked = jax.tree_util.tree_map_with_path(_standard_leaf, item)
        return self._save(plain(_cast(checked, args.save_args)), directory, args.custom_metadata)

    def read(self, directory: Any, args: Any) -> Any:
        """Restore a tree like the target."""
        return restore_standard(describe(directory), args)


def _require_content(item: Any) -> None:
    if not jax.tree.leaves(item) and not item:
        raise ValueError("Found empty item.")


def _standard_leaf(path: Any, leaf: Any) -> Any:
    if not isinstance(leaf, (np.ndarray, jax.Array)) and hasattr(leaf, "__array__"):
        leaf = np.asarray(leaf)
    if not isinstance(leaf, _STANDARD):
        raise ValueError(f"Unsupported type: {type(leaf)} for key: {str_keypath(path)}.")
    return leaf


class PyTreeCheckpointHandler(_TreeHandler):
    """Save trees of any leaves. Options of Orbax's files are ignored."""

    alike = ("PyTreeCheckpointHandler", "BasePyTreeCheckpointHandler")

    def begin(self, directory: Path, args: Any) -> list[Any]:
        """Begin to save a tree."""
        if args.item is None:
            raise ValueError("Found empty item.")
        _require_content(args.item)
        return self._save(plain(_cast(args.item, args.save_args)), directory, args.custom_metadata)

    def read(self, directory: Any, args: Any) -> Any:
        """Restore a tree by `RestoreArgs`."""
        return restore_pytree(describe(directory), args)


BasePyTreeCheckpointHandler = PyTreeCheckpointHandler


class ArrayCheckpointHandler(_TreeHandler):
    """Save an array or a number."""

    alike = ("ArrayCheckpointHandler",)

    def begin(self, directory: Path, args: Any) -> list[Any]:
        """Begin to save an array."""
        if not isinstance(args.item, (np.ndarray, jax.Array, bool, int, float, np.number)):
            raise TypeError(f"Unsupported type: {type(args.item)}.")
        return self._save(_cast_leaf(args.item, getattr(args.save_args, "dtype", None)), directory)

    def read(self, directory: Any, args: Any) -> Any:
        """Restore an array."""
        stored = describe(directory)
        wish = wish_of(args.restore_args)
        return next(iter(read(stored, dict.fromkeys(stored.flat, wish)).values()))

    def metadata(self, directory: Any) -> Any:
        """Return None, as Orbax does."""
        return None


class JsonCheckpointHandler(_OwnHandler):
    """Save a value as JSON, in the file that Orbax reads."""

    alike = ("JsonCheckpointHandler",)

    def __init__(self, filename: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._filename = filename or "metadata"

    def begin(self, directory: Path, args: Any) -> list[Any]:
        """Begin to save a value. A value that is no JSON raises TypeError in the background."""
        return [future_lib.CommitFuture(self._write(directory, args.item))]

    async def _write(self, directory: Path, item: Any) -> None:
        text = json.dumps(item)
        if is_primary(self._multiprocessing.primary_host):
            with replacing(directory / self._filename) as file:
                file.write(text.encode())

    def read(self, directory: Any, args: Any) -> Any:
        """Restore the value. Raise FileNotFoundError without the file."""
        file = on_disk(directory) / self._filename
        if not file.is_file():
            raise FileNotFoundError(f"File {file} not found.")
        return json.loads(file.read_text("utf-8"))

    @classmethod
    def typestr(cls) -> str:
        return _JSON  # so that Orbax finds it in a step


def is_primary(primary_host: int | None) -> bool:
    """Tell whether this process writes files that one process writes."""
    return primary_host is None or jax.process_index() == primary_host


class JaxRandomKeyCheckpointHandler(_TreeHandler):
    """Save a PRNG key of JAX, typed or not."""

    alike = ("JaxRandomKeyCheckpointHandler",)

    def begin(self, directory: Path, args: Any) -> list[Any]:
        """Begin to save a key."""
        if not isinstance(args.item, jax.Array):
            raise TypeError(f"Unsupported type: {type(args.item)}.")
        return self._save(args.item, directory)

    def read(self, directory: Any, args: Any) -> Any:
        """Restore a key as it was saved."""
        stored = describe(directory)
        wish = wish_of(args.restore_args) if args else Wish()
        return next(iter(read(stored, dict.fromkeys(stored.flat, replace(wish, dtype=None))).values()))


class NumpyRandomKeyCheckpointHandler(_TreeHandler):
    """Save the state of numpy's random numbers: the legacy tuple, or a dict."""

    alike = ("NumpyRandomKeyCheckpointHandler",)

    def begin(self, directory: Path, args: Any) -> list[Any]:
        """Begin to save a state."""
        if not isinstance(args.item, (tuple, dict)):
            raise TypeError(f"Unsupported type: {type(args.item)}.")
        return self._save(plain(args.item), directory)

    def read(self, directory: Any, args: Any) -> Any:
        """Restore a state."""
        found = restore_pytree(describe(directory), args_lib.PyTreeRestore())
        return tuple(found) if isinstance(found, list) else found


class ProtoCheckpointHandler(CheckpointHandler):
    """Protocol buffers are not supported."""

    def __init__(self, *_: Any, **__: Any) -> None:
        args_lib.ProtoSave(None)


# ------------------------------------------------------------------------------------------ registries


class _WrapperArgs(CheckpointArgs):
    """Arguments of handlers without registered arguments: they are passed on as they are."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given, self.named = given, named


class CheckpointHandlerRegistry(Alike):
    """Handlers by item and kind of arguments."""

    alike = ("CheckpointHandlerRegistry", "DefaultCheckpointHandlerRegistry")


class AlreadyExistsError(ValueError):
    """The registry has a handler for this item and these arguments."""


class NoEntryError(KeyError):
    """The registry has no handler for this item and these arguments."""


class DefaultCheckpointHandlerRegistry(CheckpointHandlerRegistry):
    """Handlers by item and kind of arguments; the item None stands for every item."""

    def __init__(self, other_registry: Any = None) -> None:
        self._registry: dict[tuple[str | None, Any], Any] = {}
        for (item, kind), handler in other_registry.get_all_entries().items() if other_registry else ():
            self.add(item, kind, handler)

    def add(self, item: str | None, args: Any, handler: Any = None) -> None:
        """Add a handler, or its class; None for the class that is registered for the arguments."""
        kind = args if inspect.isclass(args) else type(args)
        if self.has(item, kind):
            raise AlreadyExistsError(
                f"Entry for item={item} and args_type={kind} already exists in the registry."
            )
        if handler is None:
            try:
                handler = args_lib.get_registered_handler_cls(kind)
            except ValueError as error:
                raise ValueError(
                    f"Provided a `None` `CheckpointHandler` when registering item={item} and args_type={kind}, and no "
                    "handler is registered for these arguments; pass a handler"
                ) from error
        if inspect.isclass(handler):
            try:
                handler = handler()
            except TypeError as error:
                raise ValueError(
                    f"{handler} for item={item} is not default-constructible; pass an object"
                ) from error
        self._registry[item, kind] = handler

    def get(self, item: str | None, args: Any) -> Any:
        """Return the handler for an item and its arguments."""
        kind = args if inspect.isclass(args) else type(args)
        if not self.has(item, kind):
            raise NoEntryError(f"No entry for item={item} and args_ty={kind} in the registry.")
        return self._registry[item, kind]

    def has(self, item: str | None, args: Any) -> bool:
        """Tell whether there is a handler for an item and its arguments."""
        kind = args if inspect.isclass(args) else type(args)
        return (item, kind) in self._registry

    def get_all_entries(self) -> dict[tuple[str | None, Any], Any]:
        """Return all handlers by item and kind of arguments."""
        return self._registry

    def __repr__(self) -> str:
        return f"DefaultCheckpointHandlerRegistry({self._registry})"


def create_default_handler_registry(**items_to_handlers: Any) -> DefaultCheckpointHandlerRegistry:
    """Return a registry of handlers by item."""
    registry = DefaultCheckpointHandlerRegistry()
    for item, handler in items_to_handlers.items():
        _register(registry, item, handler)
    return registry


def _register(registry: DefaultCheckpointHandlerRegistry, item: str, handler: Any) -> None:
    for kind in dict.fromkeys(args_lib.get_registered_args_cls(handler)):
        registry.add(item, kind, handler)


# ---------------------------------------------------------------------------------------------- items


@dataclass
class CompositeOptions:
    """Options of a handler of several items."""

    multiprocessing_options: Any = field(default_factory=MultiprocessingOptions)
    temporary_path_class: Any = None
    file_options: Any = None
    atomicity_options: Any = None
    async_options: Any = None


class CompositeCheckpointHandler(AsyncCheckpointHandler):
    """Save and restore several items, each in a directory of its name, by a handler of its kind.

    The kind of an item is fixed by its handler, or by the arguments of its first use.
    """

    alike = ("CompositeCheckpointHandler",)

    def __init__(
        self,
        *item_names: str,
        composite_options: Any = None,
        handler_registry: Any = None,
        **items_and_handlers: Any,
    ) -> None:
        if handler_registry is not None and (item_names or items_and_handlers):
            other = "items_and_handlers" if items_and_handlers else "item_names"
            raise ValueError(
                f"Both `handler_registry` and `{other}` were provided. Please specify only one of the two."
            )
        self._registry = DefaultCheckpointHandlerRegistry(handler_registry)
        self._open: set[str] | None = None  # items whose kind is not fixed yet; None: any other item, too
        if item_names or items_and_handlers:
            self._open = {name for name in item_names if name not in items_and_handlers}
        for name, handler in items_and_handlers.items():
            self._add(name, handler)

    def _add(self, name: str, handler: Any) -> None:
        if handler is None:
            assert self._open is not None
            self._open.add(name)
        elif args_lib.has_registered_args(handler):
            _register(self._registry, name, handler)
        else:
            self._registry.add(name, _WrapperArgs, handler)

    @property
    def known(self) -> dict[str, Any]:
        """The handlers of items whose kind is fixed; None for items that are only named."""
        found: dict[str, Any] = dict.fromkeys(self._open or ())
        for (item, _), handler in self._registry.get_all_entries().items():
            if item is not None:
                found.setdefault(item, handler)
        return found

    def handler_for(self, item: str, args: Any) -> Any:
        """Return the handler of an item; fix its kind at the first use. Raise ValueError if another kind is fixed."""
        if args is None:
            if (handler := self.known.get(item)) is not None:
                return handler
            raise ValueError(
                f'Provided `None` for `CheckpointArgs`, and the `CheckpointHandler` for item "{item}" was not '
                "configured. Provide a `CheckpointArgs` subclass."
            )
        for name in (item, None):
            if self._registry.has(name, args):
                handler = self._registry.get(name, args)
                if name is None:
                    self._registry.add(item, args, handler)
                return handler
        if self.known.get(item) is None and (self._open is None or item in self._open):
            handler = args_lib.get_registered_handler_cls(args)()
            if self._open is not None:
                self._open.discard(item)
            _register(self._registry, item, handler)
            return handler
        raise ValueError(
            f'Item "{item}" and args "{args}" does not match with any registered handler! Registered handlers: '
            f"{self._registry.get_all_entries().items()}"
        )

    # ----------------------------------------------------------------------------------------- saves

    def started(self, directory: Path, args: Any) -> Iterator[tuple[str, Any, list[Any]]]:
        """Begin to save the items in the order of their names: yield the name, the handler and the futures of each."""
        args = args_lib.as_ours(args)
        _require_names(args)
        chosen = {name: self.handler_for(name, args[name]) for name in sorted(args)}
        for name, handler in chosen.items():
            yield name, handler, begin(handler, directory / name, args[name])

    async def async_save(self, directory: Any, *given: Any, **named: Any) -> Any:
        """Take the items, and return futures of the rest."""
        args = named.get("args", given[0] if given else None)
        return [each for _, _, several in self.started(on_disk(directory), args) for each in several]

    # -------------------------------------------------------------------------------------- restores

    def restore(self, directory: Any, *given: Any, **named: Any) -> Any:
        """Restore the items in `args`; without them, every item of a known kind."""
        path = on_disk(directory)
        args = args_lib.as_ours(named.get("args", given[0] if given else None))
        there = items_in(path)
        if args is None or not args:
            args = CompositeArgs(**self._default_args(path, there))
        found = {}
        _require_names(args)
        for name in sorted(args):
            if name not in there:
                raise KeyError(f'Item "{name}" was not found in the checkpoint. Available items: {there}')
            handler = self.handler_for(name, args[name])
            found[name] = restore_by(handler, path / name, args[name])
        return CompositeArgs(**found)

    def _default_args(self, path: Path, there: list[str]) -> dict[str, Any]:
        known, recorded = self.known, read_step(path).item_handlers
        recorded = recorded if isinstance(recorded, dict) else {}
        return {
            name: _default_restore(name, known[name] if name in known else _typed(name, recorded))
            for name in there
        }

    # -------------------------------------------------------------------------------------- metadata

    def metadata(self, directory: Any) -> Any:
        """Describe the step, and every item of a known kind."""
        path = on_disk(directory)
        if not path.is_dir():
            raise FileNotFoundError(f"Directory does not exist: {path}")
        step, known = read_step(path), self.known
        if isinstance(step.item_handlers, str):
            raise ValueError(
                f"StepMetadata.item_handlers must be a dict, but is {step.item_handlers!r}: {path} is "
                "a checkpoint without items"
            )
        recorded = dict(step.item_handlers or {})
        items = {}
        for name in items_in(path):
            handler = known.get(name) or args_lib.handler_type(recorded.get(name))
            recorded.setdefault(name, typestr_of(handler) if handler is not None else None)
            items[name] = _metadata_of(handler, path / name)
        return StepMetadata(**{**vars(step), "item_handlers": recorded, "item_metadata": Composite(**items)})

    def close(self) -> None:
        """Close the handlers of all items."""
        for handler in self.known.values():
            if handler is not None:
                handler.close()


def _require_names(names: Any) -> None:
    """Raise ValueError for a name of an item that is no name of a directory in the step."""
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name or name.startswith(".eformer-"):
            raise ValueError(
                f"the item {name!r} cannot be a directory of its step; expected a name without slashes"
            )


def items_in(path: Path) -> list[str]:
    """List the items of a step: its directories."""
    return sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))


def _typed(name: str, recorded: Mapping[str, Any]) -> Any:
    if (kind := args_lib.handler_type(recorded.get(name))) is None:
        raise ValueError(
            f'Item "{name}" was found in the checkpoint, but could not be restored. Please provide a '
            "`CheckpointHandlerRegistry`, or call `restore` with an appropriate `CheckpointArgs` subclass."
        )
    return kind


def _default_restore(name: str, handler: Any) -> Any:
    if handler is None:
        raise ValueError(
            f'Item with name: "{name}" had an undetermined `CheckpointHandler` when restoring. '
            "Please ensure the handler "
            "was specified during initialization, or use the appropriate `CheckpointArgs` subclass."
        )
    kind = (
        args_lib.get_registered_args_cls(handler)[1]
        if args_lib.has_registered_args(handler)
        else _WrapperArgs
    )
    try:
        return kind()
    except TypeError as error:
        raise ValueError(
            f'Attempted to construct default restoration arguments for item "{name}", but the `CheckpointArgs` '
            f"class of type {kind} is not default constructible. Original error: {error}."
        ) from error


def _metadata_of(handler: Any, path: Path) -> Any:
    if handler is None:
        return None
    try:
        made: Any = handler() if inspect.isclass(handler) else handler
        return made.metadata(to_path(path))
    except (FileNotFoundError, NotImplementedError, AttributeError):
        return None


def begin(handler: Any, directory: Path, args: Any) -> list[Any]:
    """Begin to save an item by its handler: of ours, of the caller, or of an older kind."""
    is_own = isinstance(handler, _OwnHandler) and _is_unchanged(type(handler))
    if is_own and isinstance(handler, _TreeHandler):
        return handler.begin(directory, args)  # which makes the directory itself
    if is_primary(0) or not directory.exists():
        directory.mkdir(parents=True, exist_ok=True)
    if is_own:
        return handler.begin(directory, args)  # type: ignore[no-any-return]
    place = to_path(directory)
    given, named = (args.given, args.named) if isinstance(args, _WrapperArgs) else ((), {"args": args})
    if hasattr(handler, "async_save") and not _has_own_save(type(handler)):
        return list(future_lib.run(handler.async_save(place, *given, **named)) or ())
    handler.save(place, *given, **named)
    return []


def _is_unchanged(kind: Any) -> bool:
    """Tell whether a class saves as ours do: a caller's subclass may not."""
    return kind.async_save is _OwnHandler.async_save and not _has_own_save(kind)


def _has_own_save(kind: Any) -> bool:
    """Tell whether a subclass of our handlers saves by a `save` of its own."""
    return issubclass(kind, _OwnHandler) and kind.save is not AsyncCheckpointHandler.save


def restore_by(handler: Any, directory: Any, args: Any) -> Any:
    """Restore an item by its handler."""
    place = to_path(directory)
    if isinstance(args, _WrapperArgs):
        return handler.restore(place, *args.given, **args.named)
    return handler.restore(place, args=args)


def wrapped(*given: Any, **named: Any) -> Any:
    """Return arguments for a handler without registered arguments."""
    return _WrapperArgs(*given, **named)


def waited(several: list[Any]) -> None:
    """Wait for all futures, and raise the first error."""
    errors = []
    for each in several:
        try:
            each.result()
        except BaseException as error:  # noqa: BLE001  all are waited for
            errors.append(error)
    if errors:
        raise errors[0]


def failed(error: BaseException) -> futures.Future[Any]:
    """Return a future that has failed."""
    found: futures.Future[Any] = futures.Future()
    found.set_exception(error)
    return found


_PAIRS = {
    StandardCheckpointHandler: (args_lib.StandardSave, args_lib.StandardRestore),
    PyTreeCheckpointHandler: (args_lib.PyTreeSave, args_lib.PyTreeRestore),
    JsonCheckpointHandler: (args_lib.JsonSave, args_lib.JsonRestore),
    ArrayCheckpointHandler: (args_lib.ArraySave, args_lib.ArrayRestore),
    JaxRandomKeyCheckpointHandler: (args_lib.JaxRandomKeySave, args_lib.JaxRandomKeyRestore),
    NumpyRandomKeyCheckpointHandler: (args_lib.NumpyRandomKeySave, args_lib.NumpyRandomKeyRestore),
    CompositeCheckpointHandler: (CompositeArgs, CompositeArgs),
}
_save: Any
_restore: Any
for _kind, (_save, _restore) in _PAIRS.items():
    register_with_handler(_kind, for_save=True)(_save)
    register_with_handler(_kind, for_restore=True)(_restore)
    args_lib.TYPES_BY_CLASS[_kind.__name__] = _kind

StandardSaveArgs, StandardRestoreArgs = args_lib.StandardSave, args_lib.StandardRestore
PyTreeSaveArgs, PyTreeRestoreArgs = args_lib.PyTreeSave, args_lib.PyTreeRestore
JsonSaveArgs, JsonRestoreArgs = args_lib.JsonSave, args_lib.JsonRestore
ArraySaveArgs, ArrayRestoreArgs = args_lib.ArraySave, args_lib.ArrayRestore
CompositeResults = CompositeArgs

__all__ = [name for name in dir() if not name.startswith("_")]
