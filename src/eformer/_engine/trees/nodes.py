"""One level of a pytree, as JAX sees it; nested dicts by path; leaves that are code; trusted classes by name.

Tests: tests/engine/trees/test_flatten.py, tests/models/test_equinox.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import types
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from eformer._engine.record.text import few
from eformer.errors import StructureError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Packages whose node classes a checkpoint may name without the caller having imported them. Only the package
# itself is imported, never a module of the checkpoint's choice.
TRUSTED_PACKAGES = frozenset({"jax", "optax", "flax", "equinox", "chex"})

BUILTIN_NODES = frozenset({dict, list, tuple, OrderedDict, defaultdict, type(None)})

_registered: dict[str, type] = {}


def is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_node(kind: type) -> bool:
    """Tell whether objects of this type are containers to JAX. None is a container without children."""
    return jax.tree_util.is_tree_node(kind)


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """A node taken apart: its children, the keys that lead to them, and JAX's definition to rebuild it."""

    keys: tuple[Any, ...]
    children: tuple[Any, ...]
    treedef: jax.tree_util.PyTreeDef

    def rebuild(self, children: Sequence[Any]) -> Any:
        return jax.tree_util.tree_unflatten(self.treedef, children)

    @property
    def aux(self) -> Any:
        data = self.treedef.node_data()
        return None if data is None else data[1]


def take_apart(node: Any) -> Level:
    """Take a node apart by one level. Its type must be a container to JAX."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    keys = tuple(plain_key(path[0]) for path, _ in pairs)
    return Level(keys, tuple(child for _, child in pairs), treedef)


def plain_key(entry: Any) -> Any:
    """Return the key of a step in a JAX key path: a dict's key, an index, or the name of an attribute."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return jax.tree_util.keystr((entry,), simple=True)


# ---------------------------------------------------------------------------------------- by path


def nested(flat: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return values by path in nested dicts. A value whose path is empty is the whole tree."""
    if list(flat) == [()]:
        return flat[()]
    tree: dict[Any, Any] = {}
    for (*path, last), value in flat.items():
        inner = tree
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return tree


def at(tree: Any, path: Sequence[Any]) -> Any:
    """Return the value in nested dicts at a path."""
    for key in path:
        tree = tree[key]
    return tree


def subtree(tree: Any, name: str) -> dict[Any, Any]:
    """Return nested dicts with only the part of a tree that has this dotted name, under the same name.

    Raise StructureError if the tree has no such part.
    """
    path, rest, node = list[Any](), name, tree
    while rest:
        children = _children(node)
        fitting = [key for key in children if f"{rest}.".startswith(f"{key}.")]
        if not fitting:
            where = f" at {'.'.join(map(str, path))!r}" if path else ""
            raise StructureError(f"the tree has no part {name!r}: it has {few([*map(str, children)])}{where}")
        key = max(fitting, key=lambda key: len(str(key)))
        path.append(key)
        node, rest = children[key], rest[len(str(key)) + 1 :]
    return nested({tuple(path): node})  # type: ignore[no-any-return]


def _children(node: Any) -> dict[Any, Any]:
    """Return the children of a node by key: the leaves of modules are not children, but their attributes are."""
    if isinstance(node, dict):
        return node
    if is_node(type(node)):
        level = take_apart(node)
        return dict(zip(level.keys, level.children, strict=True))
    return vars(node) if hasattr(node, "__dict__") else {}


# ------------------------------------------------------------------------------------------- code

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, np.ufunc, type, functools._lru_cache_wrapper)

# Leaves without a value: Equinox puts one in the place of a weight that is tied to another weight.
_PLACEHOLDERS = frozenset({("equinox.nn._shared", "SharedNode")})


def is_code(leaf: Any) -> bool:
    """Tell whether a leaf is a function, a class or a placeholder: the code has it, and no bytes are stored.

    Other callable objects, such as modules and bound methods, may hold arrays.
    """
    if hasattr(leaf, "dtype"):
        return False
    if isinstance(leaf, types.BuiltinFunctionType):
        return leaf.__self__ is None or isinstance(leaf.__self__, types.ModuleType)
    if isinstance(leaf, functools.partial):
        arguments = jax.tree.leaves((leaf.args, leaf.keywords))
        return is_code(leaf.func) and not any(hasattr(argument, "dtype") for argument in arguments)
    kind = type(leaf)
    is_of_jax = callable(leaf) and kind.__module__.partition(".")[0] in ("jax", "jaxlib")  # jit, custom_jvp
    return isinstance(leaf, _FUNCTIONS) or is_of_jax or (kind.__module__, kind.__qualname__) in _PLACEHOLDERS


# -------------------------------------------------------------------------------------------- classes


def class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def register_node(kind: type) -> type:
    """Allow checkpoints to rebuild the class `kind` by name, without `like`. The last class of a name counts.

    Example:

        >>> @checkpoint.register_node
        ... class Moments(NamedTuple):
        ...     mu: Any
        ...     nu: Any
    """
    if kind in BUILTIN_NODES or not is_node(kind):
        raise StructureError(
            f"{class_name(kind)} is not a pytree class: register it with jax.tree_util first"
        )
    _registered[class_name(kind)] = kind
    return kind


def resolve_class(name: str) -> type:
    """Return the node class called `name`, from one of three places; raise a StructureError for any other class.

    1. `register_node`. 2. The classes that the running program itself has registered with JAX, looked up in the
    modules that are imported. 3. The node classes of `TRUSTED_PACKAGES`, which are imported when needed.
    """
    kind = _registered.get(name) or _known_class(name)
    if kind is None:
        raise StructureError(
            f"the tree holds a {name[:200]}, which this program may not build from a name; pass like= with "
            "a tree of that structure, call eformer.checkpoint.register_node with the class first, or load a part "
            "below it, which needs no class, with root="
        )
    return kind


def _known_class(name: str) -> type | None:
    module, _, qualname = name.partition(":")
    package = module.partition(".")[0]
    trusted = package in TRUSTED_PACKAGES
    if trusted:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    kind = _look_up(sys.modules.get(module), qualname)
    if kind is None or kind in BUILTIN_NODES or not is_node(kind):
        return None
    return kind if trusted or not is_namedtuple(kind) else None


def _look_up(module: Any, qualname: str) -> type | None:
    found = module
    for part in qualname.split("."):
        # vars(), not getattr(): a checkpoint must not be able to run a lazy module or a property by naming it.
        if found is None or not hasattr(found, "__dict__"):
            return None
        found = vars(found).get(part)
    return found if isinstance(found, type) else None


def dataclass_level(kind: type, static: Mapping[str, Any], children: Mapping[str, Any]) -> Level:
    """Take apart an object with these fields, as the class itself does. The object is not used otherwise."""
    names = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted((static.keys() | children.keys()) - names):
        raise StructureError(f"{class_name(kind)} has no field {', '.join(unknown)}; it has {sorted(names)}")
    prototype: Any = object.__new__(kind)
    for name, value in (*static.items(), *children.items()):
        object.__setattr__(prototype, name, value)
    return take_apart(prototype)


def build_dataclass(kind: type, static: Mapping[str, Any], children: Mapping[str, Any]) -> Any:
    """Build a dataclass node from its static fields and its children, by the class's own unflatten function."""
    level = dataclass_level(kind, static, children)
    if set(level.keys) != children.keys():
        raise StructureError(
            f"{class_name(kind)} was saved with the children {list(children)}, it now has {list(level.keys)}"
        )
    return level.rebuild([children[key] for key in level.keys])


def build_node(kind: type, aux: Any, children: Sequence[Any]) -> Any:
    """Build any other node from its auxiliary data and its children, by the class's own unflatten function."""
    if hasattr(kind, "tree_unflatten"):
        node = kind.tree_unflatten(aux, tuple(children))
    elif kind in BUILTIN_NODES or is_namedtuple(kind) or dataclasses.is_dataclass(kind):
        # JAX builds these in native code, which does not check the number of children.
        raise StructureError(f"{class_name(kind)} cannot be built from auxiliary data")
    else:
        leaf = jax.tree_util.tree_structure(0)
        treedef = jax.tree_util.PyTreeDef.from_node_data_and_children(
            jax.tree_util.default_registry, (kind, aux), [leaf] * len(children)
        )
        node = jax.tree_util.tree_unflatten(treedef, children)
    if type(node) is not kind or len(take_apart(node).children) != len(children):
        raise StructureError(f"{class_name(kind)} does not rebuild the node that was saved")
    return node
