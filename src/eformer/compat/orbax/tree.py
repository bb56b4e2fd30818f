"""Trees as Orbax flattens them: into dicts and lists by the key paths of JAX.

Tests: tests/compat_orbax/test_trees.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import tree_util

PyTree = Any
JsonType = Any
Keys = tuple[str, ...]


def _key_name(key: Any) -> Any:
    match key:
        case tree_util.SequenceKey(idx=name) | tree_util.FlattenedIndexKey(key=name):
            return name
        case tree_util.DictKey(key=name):
            return str(name)
        case tree_util.GetAttrKey(name=name):
            return name
    raise ValueError(
        f"Unsupported KeyEntry: {type(key)}: {key!r}; register the node with JAX's own kinds of keys"
    )


def is_sequence_key(key: Any) -> bool:
    """Tell whether a key of a path stands for an element of a list."""
    return isinstance(key, (tree_util.SequenceKey, tree_util.FlattenedIndexKey))


def is_dict_key(key: Any) -> bool:
    """Tell whether a key of a path stands for an entry of a dict, or an attribute."""
    return isinstance(key, (tree_util.DictKey, tree_util.GetAttrKey))


def get_key_name(key: Any) -> Any:
    """Return the name of a key of a path: an index, or text."""
    return _key_name(key)


def str_keypath(path: Any) -> Keys:
    """Return the names in a path as texts."""
    return tuple(str(_key_name(key)) for key in path)


tuple_path_from_keypath = str_keypath


def _children(node: Any) -> list[tuple[Any, Any]]:
    """Return the children of a node with their paths; the node itself, with the path (), if it is a leaf."""
    return tree_util.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)[0]


def is_empty_node(node: Any) -> bool:
    """Tell whether a node has no children: None, {}, [], () and the like."""
    return not _children(node)


def is_empty_or_leaf(node: Any) -> bool:
    """Tell whether a node has no children, or is a leaf."""
    children = _children(node)
    return not children or children[0][0] == ()


def is_flat_dict(tree: Any) -> bool:
    """Tell whether a tree is a dict of leaves."""
    return isinstance(tree, dict) and all(tree_util.all_leaves([value]) for value in tree.values())


def plain(tree: Any) -> Any:
    """Return a tree of dicts and lists with the same leaves: lists for tuples, dicts for namedtuples and objects, keys
    as texts. Empty containers are kept; an empty object is None."""
    kind = type(tree)
    if kind is dict and tree:
        return {str(key): plain(value) for key, value in tree.items()}
    if kind in (list, tuple) and tree:
        return [plain(value) for value in tree]
    children = _children(tree)
    if not children:
        return _empty(tree)
    if children[0][0] == ():
        return tree
    if is_sequence_key(children[0][0][0]):
        return [plain(child) for _, child in children]
    return {str(_key_name(path[0])): plain(child) for path, child in children}


def _empty(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {}
    if type(node) in (list, tuple):
        return type(node)()
    return [] if isinstance(node, list) else None


def to_flat(tree: Any) -> dict[Keys, Any]:
    """Return the leaves and the empty containers of a tree by their paths of texts."""
    leaves, _ = tree_util.tree_flatten_with_path(tree, is_leaf=is_empty_node)
    return {str_keypath(path): leaf for path, leaf in leaves}


def to_nested(flat: Mapping[Keys, Any]) -> Any:
    """Return nested dicts by paths of texts."""
    if tuple(flat) == ((),):
        return flat[()]
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        inner = nested
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return nested


def rebuild(target: Any, values: Mapping[Keys, Any]) -> Any:
    """Return the target with its leaves replaced by the values of the same paths. Its empty containers stay."""

    def look_up(path: Any, leaf: Any) -> Any:
        return leaf if is_empty_node(leaf) else values[str_keypath(path)]

    return tree_util.tree_map_with_path(look_up, target, is_leaf=is_empty_node)


# ----------------------------------------------------------------------------------------- public in Orbax


def to_flat_dict(
    tree: Any,
    sep: str | None = None,
    keep_empty_nodes: bool = False,
    is_leaf: Callable[[Any], bool] | None = None,
) -> dict[Any, Any]:
    """Return the leaves of a tree by their paths, as tuples or as texts joined by `sep`."""
    stop = is_leaf or (is_empty_or_leaf if keep_empty_nodes else None)
    leaves, _ = tree_util.tree_flatten_with_path(tree, is_leaf=stop)
    flat = {str_keypath(path): leaf for path, leaf in leaves}
    return flat if sep is None else {sep.join(path): leaf for path, leaf in flat.items()}


def from_flat_dict(
    flat_dict: Any, target: Any = None, sep: str | None = None, *, inplace: bool = False
) -> Any:
    """Return the tree of a flat dict: nested dicts, or the structure of `target`."""
    take = flat_dict.pop if inplace else flat_dict.__getitem__
    if target is not None:
        names = to_flat_dict(target, sep=sep)
        return jax.tree.unflatten(jax.tree.structure(target), [take(name) for name in names])
    paths = {name: name if sep is None else tuple(name.split(sep)) for name in list(flat_dict)}
    return to_nested({path: take(name) for name, path in paths.items()})


def serialize_tree(tree: Any, keep_empty_nodes: bool = False) -> Any:
    """Return a tree of dicts and lists with the same leaves."""
    if not keep_empty_nodes:
        if not jax.tree.leaves(tree):
            raise ValueError(_EMPTY)
        return _without_empty(plain(tree))
    return plain(tree)


_NOTHING = object()
_EMPTY = "Unable to uniquely reconstruct tree from empty flattened list (it could be {} or [])."


def _without_empty(tree: Any) -> Any:
    """Drop empty containers, and containers of nothing else."""
    found = _dropped(tree)
    return {} if found is _NOTHING else found


def _dropped(tree: Any) -> Any:
    if type(tree) is dict:
        kept = {key: each for key, value in tree.items() if (each := _dropped(value)) is not _NOTHING}
        return kept or _NOTHING
    if type(tree) is list:
        inner = [each for value in tree if (each := _dropped(value)) is not _NOTHING]
        return inner or _NOTHING
    return _NOTHING if is_empty_node(tree) else tree


def deserialize_tree(serialized: Any, target: Any, keep_empty_nodes: bool = False) -> Any:
    """Return the leaves of a tree of dicts and lists in the structure of `target`."""

    def look_up(path: Any, _: Any) -> Any:
        found = serialized
        for key in path:
            name = _key_name(key)
            if isinstance(found, Mapping):
                found = found[name] if name in found else found[str(name)]
            elif isinstance(found, (list, tuple)) and not hasattr(found, "_fields"):
                found = found[int(name)]
            else:
                found = {_key_name(one[0]): child for one, child in _children(found)}[name]
        return found

    stop = is_empty_or_leaf if keep_empty_nodes else None
    return tree_util.tree_map_with_path(look_up, target, is_leaf=stop)


def from_flattened_with_keypath(flat_with_keys: list[tuple[Any, Any]]) -> Any:
    """Return the tree of dicts and lists of pairs of a path of JAX and a leaf."""
    if not flat_with_keys:
        raise ValueError(
            "Unable to uniquely reconstruct tree from empty flattened list (it could be {} or [])."
        )
    return _from_pairs([(list(path), leaf) for path, leaf in flat_with_keys])


def _from_pairs(pairs: list[tuple[list[Any], Any]]) -> Any:
    if not pairs[0][0]:
        return pairs[0][1]
    groups: dict[Any, list[tuple[list[Any], Any]]] = {}
    for path, leaf in pairs:
        groups.setdefault(_key_name(path[0]), []).append((path[1:], leaf))
    built = {name: _from_pairs(group) for name, group in groups.items()}
    return list(built.values()) if is_sequence_key(pairs[0][0][0]) else built


def get_param_names(item: Any, *, include_empty_nodes: bool = True) -> Any:
    """Return the tree with the name of each leaf in its place: its keys, joined by dots."""
    stop = is_empty_or_leaf if include_empty_nodes else None
    return tree_util.tree_map_with_path(lambda path, _: ".".join(str_keypath(path)), item, is_leaf=stop)


def to_shape_dtype_struct(
    x: Any, dtype: Any = None, scalar_dtype: Any = None, support_format: bool = False
) -> Any:
    """Return the shape, the dtype and the sharding of an array; a plain number stays."""
    if isinstance(x, (bool, int, float)):
        return scalar_dtype(x) if scalar_dtype is not None else x
    if not hasattr(x, "shape"):
        raise ValueError(
            f"Object does not have a `shape` property: {x}; map the leaves of a tree by jax.tree.map"
        )
    sharding = getattr(x, "sharding", None)
    if (convert := getattr(sharding, "to_jax_sharding", None)) is not None:
        sharding = convert()
    return jax.ShapeDtypeStruct(x.shape, x.dtype if dtype is None else dtype, sharding=sharding)


def merge_trees(*trees: Any, target: Any = None) -> Any:
    """Return one tree with the leaves of all; the last tree that has a leaf wins."""
    flat = {path: leaf for tree in trees for path, leaf in to_flat_dict(tree).items()}
    return from_flat_dict(flat, target=target)


def intersect_trees(*trees: Any, target: Any = None) -> Any:
    """Return the leaves of the last tree that all the trees have."""
    flat = [to_flat_dict(tree) for tree in trees]
    common = {path: leaf for path, leaf in flat[-1].items() if all(path in each for each in flat)}
    return from_flat_dict(common, target=target)
