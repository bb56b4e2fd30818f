"""The arguments of saves and restores, and the handlers that take them.

Tests: tests/compat_orbax/test_handlers.py.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from eformer.compat.orbax._alike import is_of_orbax, name_in
from eformer.compat.orbax._composite import CheckpointArgs
from eformer.compat.orbax._composite import CompositeArgs as Composite
from eformer.compat.orbax.metadata import TreeMetadata

T = TypeVar("T")

_OF_SAVE: dict[type, Any] = {}
_OF_RESTORE: dict[type, Any] = {}

TYPES: dict[str, Any] = {}
"""The classes of handlers by the names that are recorded in a step."""

ITEM_KEYWORD = "Make sure to specify kwarg name `args=` when providing arguments of this kind."


@dataclass
class StandardSave(CheckpointArgs):
    """Save a tree of arrays and numbers."""

    item: Any
    save_args: Any = None
    custom_metadata: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.item, TreeMetadata):
            raise ValueError("Cannot save TreeMetadata.")


@dataclass
class StandardRestore(CheckpointArgs):
    """Restore a tree of arrays and numbers like `item`: its structure, shapes, dtypes and shardings."""

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.item, TreeMetadata):
            self.item = self.item.tree


@dataclass
class PyTreeSave(CheckpointArgs):
    """Save a tree of any leaves."""

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.item, TreeMetadata):
            raise ValueError("Cannot save TreeMetadata.")


@dataclass
class PyTreeRestore(CheckpointArgs):
    """Restore a tree in the structure of `item`, each leaf by its `RestoreArgs`."""

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False

    def __post_init__(self) -> None:
        for name in ("item", "restore_args"):
            if isinstance(given := getattr(self, name), TreeMetadata):
                setattr(self, name, given.tree)


@dataclass
class JsonSave(CheckpointArgs):
    """Save a value as JSON."""

    item: Any


@dataclass
class JsonRestore(CheckpointArgs):
    """Restore JSON."""

    item: Any = None


@dataclass
class ArraySave(CheckpointArgs):
    """Save an array or a number."""

    item: Any
    save_args: Any = None


@dataclass
class ArrayRestore(CheckpointArgs):
    """Restore an array or a number."""

    item: Any = None
    restore_args: Any = None


@dataclass
class JaxRandomKeySave(CheckpointArgs):
    """Save a PRNG key of JAX, typed or not."""

    item: Any
    save_args: Any = None


@dataclass
class JaxRandomKeyRestore(CheckpointArgs):
    """Restore a PRNG key of JAX."""

    restore_args: Any = None


@dataclass
class NumpyRandomKeySave(CheckpointArgs):
    """Save the state of numpy's random numbers: the legacy tuple, or a dict."""

    item: Any


@dataclass
class NumpyRandomKeyRestore(CheckpointArgs):
    """Restore the state of numpy's random numbers."""


@dataclass
class ProtoSave(CheckpointArgs):
    """Protocol buffers are not supported."""

    item: Any

    def __post_init__(self) -> None:
        raise NotImplementedError(_NO_PROTO)


@dataclass
class ProtoRestore(CheckpointArgs):
    """Protocol buffers are not supported."""

    item: Any = None

    def __post_init__(self) -> None:
        raise NotImplementedError(_NO_PROTO)


_NO_PROTO = "protocol buffers are not supported; save json_format.MessageToDict(message) by args.JsonSave"

_OURS = {
    f"{kind.__name__}Args": kind
    for kind in (
        *(
            StandardSave,
            StandardRestore,
            PyTreeSave,
            PyTreeRestore,
            JsonSave,
            JsonRestore,
            ArraySave,
            ArrayRestore,
        ),
        *(JaxRandomKeySave, JaxRandomKeyRestore, NumpyRandomKeySave, NumpyRandomKeyRestore),
    )
}


def as_ours(args: Any) -> Any:
    """Return arguments of Orbax's own as ours; others unchanged."""
    if isinstance(args, Composite):
        return Composite(**{name: as_ours(one) for name, one in args.items()})
    if (name := name_in(type(args), _OURS)) is None:
        return args
    kind = _OURS[name]
    return kind(**{one.name: getattr(args, one.name) for one in fields(kind) if hasattr(args, one.name)})


for _name, _kind in _OURS.items():  # Orbax's own names of these classes
    _kind.__name__ = _kind.__qualname__ = _name
    globals()[_name] = _kind


# ---------------------------------------------------------------------------------------- the registry


def register_with_handler(
    handler_cls: Any, for_save: bool = False, for_restore: bool = False
) -> Callable[[type[T]], type[T]]:
    """Return a decorator that registers arguments with the class of the handler that takes them."""
    if not for_save and not for_restore:
        raise ValueError("`for_save` and `for_restore` cannot both be False.")

    def register(kind: type[T]) -> type[T]:
        if not issubclass(kind, CheckpointArgs):
            raise TypeError(f"{kind} must subclass `CheckpointArgs` in order to be registered.")
        if for_save:
            _OF_SAVE[kind] = handler_cls
        if for_restore:
            _OF_RESTORE[kind] = handler_cls
        TYPES[typestr_of(handler_cls)] = handler_cls
        return kind

    return register


def typestr_of(handler: Any) -> str:
    """Return the name by which a step records the class of a handler."""
    kind = handler if inspect.isclass(handler) else type(handler)
    if callable(given := getattr(handler, "typestr", None)):
        try:
            return str(given())
        except (TypeError, NotImplementedError, AttributeError):
            pass  # not a classmethod
    return f"{kind.__module__}.{kind.__qualname__}"


def get_registered_handler_cls(arg: Any) -> Any:
    """Return the class of the handler that takes these arguments."""
    kind = arg if inspect.isclass(arg) else type(arg)
    if not issubclass(kind, CheckpointArgs):
        raise TypeError(f"{kind} must be a subclass of `CheckpointArgs`.")
    for known in (_OF_SAVE, _OF_RESTORE):
        if kind in known:
            return known[kind]
    if (name := name_in(kind, _OURS)) is not None:
        return get_registered_handler_cls(_OURS[name])
    if (theirs := _registry_of_orbax(kind)) is not None:
        return theirs.get_registered_handler_cls(kind)
    raise ValueError(
        f"Unable to find registered `CheckpointHandler` for {kind}. Use `register_with_handler`."
    )


def get_registered_args_cls(handler: Any) -> tuple[Any, Any]:
    """Return the classes of the arguments of a handler, for saves and for restores."""
    kind = handler if inspect.isclass(handler) else type(handler)
    for base in kind.__mro__:
        save = next((one for one, taken in _OF_SAVE.items() if taken is base), None)
        restore = next((one for one, taken in _OF_RESTORE.items() if taken is base), None)
        if save is not None and restore is not None:
            return save, restore
    if (name := name_in(kind, TYPES_BY_CLASS)) is not None:
        return get_registered_args_cls(TYPES_BY_CLASS[name])
    if (theirs := _registry_of_orbax(None)) is not None and theirs.has_registered_args(handler):
        return theirs.get_registered_args_cls(handler)  # type: ignore[no-any-return]
    raise ValueError(
        f"Unable to find registered `CheckpointArgs` for {handler}. Use `register_with_handler`."
    )


def has_registered_args(handler: Any) -> bool:
    """Tell whether arguments are registered for a handler."""
    try:
        get_registered_args_cls(handler)
    except ValueError:
        return False
    return True


TYPES_BY_CLASS: dict[str, Any] = {}
"""Our handlers by the names of their classes, which are the names of Orbax's classes."""


def _registry_of_orbax(kind: Any) -> Any:
    """Return Orbax's own registry, if the program has imported it, and the class is based on Orbax's."""
    theirs = sys.modules.get("orbax.checkpoint._src.handlers.standard_checkpoint_handler")
    if theirs is None or (kind is not None and not any(is_of_orbax(base) for base in kind.__mro__)):
        return None
    return sys.modules.get("orbax.checkpoint.checkpoint_args")


def handler_type(typestr: Any) -> Any:
    """Return the class of a handler by its recorded name, of ours or of Orbax; None if it is not known here."""
    if typestr in TYPES:
        return TYPES[typestr]
    name = str(typestr).rpartition(".")[2]
    is_known = str(typestr).startswith(("orbax.", "eformer."))
    return TYPES_BY_CLASS.get(name) if is_known else None
