"""Convert objects to nested dicts ("state dicts") and back, by type: builtin, registered, or a node to JAX."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.numpy import issubdtype
from jax.tree_util import Partial

from eformer._engine.record.names import with_nearest
from eformer._engine.trees.nodes import class_name, is_namedtuple, is_node, take_apart
from eformer.errors import MismatchError, StructureError

if TYPE_CHECKING:
    from collections.abc import Iterator

ToState = Callable[[Any], Any]
FromState = Callable[[Any, Any], Any]

_registered: dict[type, tuple[ToState, FromState]] = {}

# The path that from_state_dict has reached. A context variable, so that each thread has its own.
_path: ContextVar[tuple[str, ...]] = ContextVar("path", default=())


def register_serialization_state(
    ty: type, ty_to_state_dict: ToState, ty_from_state_dict: FromState, override: bool = False
) -> None:
    """Convert objects of exactly the type `ty` by two functions.

    ty                   the type
    ty_to_state_dict     function of an object that returns its state dict
    ty_from_state_dict   function of an object and a state dict that returns a new object
    override             replace the functions that the type has already; without it they are a ValueError
    """
    if not override and (ty in _registered or ty in (dict, list, tuple, Partial)):
        raise ValueError(f'a serialization handler for "{ty.__name__}" is already registered')
    _registered[ty] = (ty_to_state_dict, ty_from_state_dict)


def is_serializable(target: Any) -> bool:
    """Tell whether `to_state_dict` takes `target`, an object or a type, apart."""
    kind = target if isinstance(target, type) else type(target)
    return kind in _registered or (is_node(kind) and kind is not type(None))


def current_path() -> str:
    """Return the path that `from_state_dict` has reached, joined by slashes; empty outside of it."""
    return "/".join(_path.get())


# ------------------------------------------------------------------------------------------ to a state dict


def to_state_dict(target: Any) -> Any:
    """Convert `target` to nested dicts with string keys. Objects that are not containers are returned unchanged."""
    try:
        return _to_state(target, (".",))
    except RecursionError as error:
        raise StructureError("the tree is nested too deeply, or contains itself") from error


def _to_state(target: Any, path: tuple[str, ...]) -> Any:
    kind = type(target)
    if kind in _registered:
        return _require_string_keys(_registered[kind][0](target), kind)
    if target is None or not is_node(kind):
        return target
    parts = _parts(target, path)
    return {key: _to_state(parts.children[key], (*path, key)) for key in parts.order}


def _require_string_keys(state: Any, kind: type) -> Any:
    if isinstance(state, dict):
        for key in state:
            if not isinstance(key, str):
                raise TypeError(
                    f"A state dict must only have string keys; {class_name(kind)}'s handler gave {key!r}."
                )
    return state


@dataclass(frozen=True, slots=True)
class _Parts:
    """A container's children in the order in which `rebuild` takes them, and the order in which they are written."""

    children: dict[str, Any]
    order: list[str]
    rebuild: Callable[[list[Any]], Any]


def _parts(node: Any, path: tuple[str, ...]) -> _Parts:
    try:
        return _take_parts(node)
    except StructureError as error:
        raise StructureError(f"{'/'.join(path)}: {error}") from error


def _take_parts(node: Any) -> _Parts:
    kind = type(node)
    if kind in _BUILTIN:
        return _BUILTIN[kind](node)
    if is_namedtuple(kind):
        return _named(node, node._fields, node, lambda children: kind(*children))
    try:
        level = take_apart(node)
    except (TypeError, ValueError) as error:  # keys that cannot be sorted
        raise StructureError(f"JAX cannot take this {kind.__name__} apart: {error}") from error
    # JAX returns the children of a mapping sorted; users and flax expect them in the mapping's own order.
    order = list(node) if isinstance(node, Mapping) and set(node) == set(level.keys) else level.keys
    return _named(node, level.keys, level.children, level.rebuild, order)


def _named(node: Any, keys: Any, children: Any, rebuild: Any, order: Any = None) -> _Parts:
    named = {str(key): child for key, child in zip(keys, children, strict=True)}
    if len(named) < len(keys):
        raise StructureError(
            f"the keys of this {type(node).__name__} do not have a unique string representation: {list(keys)}"
        )
    return _Parts(named, [str(key) for key in (keys if order is None else order)], rebuild)


def _dict_parts(node: dict[Any, Any]) -> _Parts:
    def rebuild(children: list[Any]) -> Any:
        pairs = zip(node, children, strict=True)
        return (
            defaultdict(node.default_factory, pairs) if isinstance(node, defaultdict) else type(node)(pairs)
        )

    return _named(node, list(node), node.values(), rebuild)


def _partial_parts(node: Any) -> _Parts:
    def rebuild(children: list[Any]) -> Any:
        args, keywords = children
        return Partial(node.func, *args, **keywords)  # type: ignore[no-untyped-call]

    return _Parts({"args": node.args, "keywords": node.keywords}, ["args", "keywords"], rebuild)


_BUILTIN: dict[type, Callable[[Any], _Parts]] = {
    dict: _dict_parts,
    OrderedDict: _dict_parts,
    defaultdict: _dict_parts,
    list: lambda node: _named(node, range(len(node)), node, list),
    tuple: lambda node: _named(node, range(len(node)), node, tuple),
    Partial: _partial_parts,
}


# ---------------------------------------------------------------------------------------- from a state dict


def from_state_dict(target: Any, state: Any, name: str = ".") -> Any:
    """Return a copy of `target` that holds the leaves of `state`; list every mismatch in one MismatchError.

    Only shapes and dtypes of the target's leaves matter. For a target of None the state is returned unchanged. `name`
    is the root of the paths in error messages.
    """
    problems: list[str] = []
    restored = _restore(target, state, (*_path.get(), str(name)), problems)
    if problems:
        raise MismatchError(problems, context="the state does not fit the target")
    return restored


def _restore(target: Any, state: Any, path: tuple[str, ...], problems: list[str]) -> Any:
    """Restore one node. A mismatch is added to `problems`, and the target is returned in its place."""
    kind = type(target)
    if kind in _registered:
        return _restore_registered(target, state, path, problems)
    if target is None:
        return state
    if is_node(kind):
        return _restore_node(target, state, path, problems)
    if problem := _leaf_problem(target, state):
        problems.append(f"{'/'.join(path)}: {problem}")
        return target
    return state


def _restore_registered(target: Any, state: Any, path: tuple[str, ...], problems: list[str]) -> Any:
    token = _path.set(path)
    try:
        return _registered[type(target)][1](target, state)
    except MismatchError as error:
        problems.extend(error.problems)
        return target
    finally:
        _path.reset(token)


def _restore_node(target: Any, state: Any, path: tuple[str, ...], problems: list[str]) -> Any:
    here = "/".join(path)
    if not isinstance(state, Mapping):
        problems.append(f"{here}: expected the state of a {type(target).__name__}, found {_describe(state)}")
        return target
    parts = _parts(target, path)
    state = _from_legacy_namedtuple(target, state)
    if state.keys() != parts.children.keys():
        problems += (f"{here}: {problem}" for problem in _key_problems(parts.order, state))
    children = [
        _restore(child, state[key], (*path, key), problems) if key in state else child
        for key, child in parts.children.items()
    ]
    try:
        return parts.rebuild(children)
    except Exception:
        if problems:  # a class that checks its fields met a mismatch that is about to be reported
            return target
        raise


def _key_problems(wanted: list[str], found: Mapping[Any, Any]) -> Iterator[str]:
    missing = [key for key in wanted if key not in found]
    for key, hint in with_nearest(missing, (key for key in found if isinstance(key, str))):
        yield f"missing key {key!r}{hint}"
    expected = set(wanted)
    for key in found:
        if key not in expected:
            yield f"unexpected key {key!r}"


def _from_legacy_namedtuple(target: Any, state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Convert the state of a namedtuple from {"name", "fields", "values"}, the form in old flax files."""
    legacy = state.keys() == {"name", "fields", "values"} and is_namedtuple(type(target))
    if not legacy or set(target._fields) == state.keys():
        return state
    fields, values = state["fields"], state["values"]
    if not isinstance(fields, dict) or not isinstance(values, dict) or fields.keys() != values.keys():
        return state
    return {str(field): values[index] for index, field in fields.items()}


def _leaf_problem(target: Any, state: Any) -> str | None:
    if not (hasattr(target, "shape") and hasattr(target, "dtype")):
        expects_value = isinstance(target, (bool, int, float, complex, str, bytes))
        fits = state is None or not (expects_value and is_node(type(state)))
    elif hasattr(state, "shape") and hasattr(state, "dtype"):
        same_dtype = state.dtype == target.dtype or _dtype_name(state) == _dtype_name(target)
        fits = same_dtype and tuple(state.shape) == tuple(target.shape)
    else:
        # A step counter saved before the first jitted step is a Python int, afterwards an array without axes.
        fits = tuple(target.shape) == () and _is_scalar_of(target.dtype, state)
    return None if fits else f"expected {_describe(target)}, found {_describe(state)}"


def _is_scalar_of(dtype: Any, value: Any) -> bool:
    kind = _SCALARS.get(type(value))
    if kind is None or not issubdtype(dtype, kind):
        return False
    return kind is not np.integer or _fits_integer(dtype, value)


def _fits_integer(dtype: Any, value: int) -> bool:
    limits: Any = jax.numpy.iinfo(dtype)  # type: ignore[no-untyped-call]
    return bool(limits.min <= value <= limits.max)


_SCALARS = {bool: np.bool_, int: np.integer, float: np.floating, complex: np.complexfloating}


def _dtype_name(leaf: Any) -> str:
    return getattr(leaf.dtype, "name", None) or str(leaf.dtype)  # a name does not depend on the byte order


def _describe(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{_dtype_name(leaf)}{list(leaf.shape)}"
    return f"a {type(leaf).__name__}" if is_node(type(leaf)) else f"{type(leaf).__name__} {repr(leaf)[:40]}"
