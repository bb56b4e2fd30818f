"""The rules by which whole trees are restored: like a target, by arguments of each leaf, in part, or transformed.

Tests: tests/compat_orbax/test_restore.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer.compat.orbax._restore import Wish, read, wish_of
from eformer.compat.orbax._stored import StoredLeaf
from eformer.compat.orbax.metadata import (
    ArrayMetadata,
    Metadata,
    ScalarMetadata,
    StringMetadata,
    TreeMetadata,
)
from eformer.compat.orbax.transform_utils import Transform, apply_transformations
from eformer.compat.orbax.tree import Keys, is_empty_node, plain, rebuild, str_keypath, to_flat, to_flat_dict
from eformer.compat.orbax.type_handlers import ArrayRestoreArgs, RestoreArgs
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from eformer.compat.orbax._stored import Stored

_MOST = 20


def restore_standard(stored: Stored, args: Any) -> Any:
    """Restore a tree like the target: its structure, shapes, dtypes and shardings."""
    target = args.item
    if target is None:
        return _as_saved(stored, dict.fromkeys(stored.flat, Wish()), args.fallback_sharding)
    jax.tree_util.tree_map_with_path(_require_standard, target)
    flat = stored.flat
    wanted = to_flat(target)
    _require_same(stored, flat, wanted, target)
    wishes = {
        path: replace(_wish_of_leaf(leaf, flat[path]), strict=args.strict) for path, leaf in wanted.items()
    }
    found = read(stored, wishes, args.fallback_sharding)
    return rebuild(target, found)


def _require_standard(path: Any, leaf: Any) -> None:
    if isinstance(leaf, (int, float, np.ndarray, jax.Array, jax.ShapeDtypeStruct)):
        return
    raise ValueError(f"Unsupported type: {type(leaf)} for key: {str_keypath(path)}.")


def _wish_of_leaf(leaf: Any, stored: Any) -> Wish:
    """Return how a leaf of a target of `StandardRestore` is wanted: without a sharding, as it was saved."""
    if is_empty_node(leaf):
        return Wish()
    wish = wish_of(restore_args_of(leaf, getattr(leaf, "sharding", None)))
    if (
        isinstance(leaf, jax.ShapeDtypeStruct)
        and leaf.sharding is None
        and getattr(stored, "kind", "") == "jax"
    ):
        wish = replace(wish, kind="jax", shape=None if stored.key else tuple(leaf.shape))
    return wish


def restore_args_of(value: Any, sharding: Any, *, has_shape: bool = True, strict: bool = True) -> Any:
    """Return the `RestoreArgs` by which a leaf comes back like `value`."""
    if isinstance(value, (StringMetadata, str)):
        return RestoreArgs(restore_type=str)
    if value is ...:
        return RestoreArgs(restore_type=type(...))
    if isinstance(value, ScalarMetadata):
        return RestoreArgs(restore_type=_python_type(value.dtype), dtype=value.dtype)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, (jax.ShapeDtypeStruct, ArrayMetadata)) and sharding is None:
        return RestoreArgs(restore_type=np.ndarray, dtype=value.dtype)
    if isinstance(value, (jax.ShapeDtypeStruct, ArrayMetadata, jax.Array)):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        shape = tuple(value.shape) if has_shape and not is_key else None
        return ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=value.dtype, strict=strict)
    if isinstance(value, np.ndarray):
        return RestoreArgs(restore_type=np.ndarray, dtype=value.dtype)
    if isinstance(value, (int, float)):
        return RestoreArgs(restore_type=type(value))
    if isinstance(value, Metadata):
        raise ValueError(f"Unsupported value_metadata class: {type(value)}.")
    raise ValueError(f"Unsupported type: {type(value)}")


def _python_type(dtype: Any) -> Any:
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return bool
    return int if np.issubdtype(kind, np.integer) else float


# -------------------------------------------------------------------------------------------- PyTree


def restore_pytree(stored: Stored, args: Any) -> Any:
    """Restore a tree in the structure of the item, each leaf by its arguments."""
    if args.legacy_transform_fn is not None:
        raise NotImplementedError(
            "legacy_transform_fn is not supported; pass transforms=, or restore the whole tree and change it"
        )
    item = args.item.tree if isinstance(args.item, TreeMetadata) else args.item
    if args.transforms is not None:
        return _transformed(stored, item, args)
    if args.partial_restore:
        return _partial(stored, item, args)
    flat = stored.flat
    if item is not None:
        _require_same(stored, flat, to_flat(item), item)
    wishes = _wishes(stored, flat, args.restore_args, item)
    if item is None:
        return _as_saved(stored, wishes)
    placeholders = {path for path, leaf in to_flat(item).items() if leaf is ...}
    wishes |= dict.fromkeys(placeholders & wishes.keys(), Wish("placeholder"))
    return rebuild(item, read(stored, wishes))


def _wishes(stored: Stored, flat: Mapping[Keys, Any], restore_args: Any, item: Any) -> dict[Keys, Wish]:
    if restore_args is None:
        return dict.fromkeys(flat, Wish())
    if isinstance(restore_args, TreeMetadata):
        restore_args = restore_args.tree
    given = {path: args for path, args in to_flat(restore_args).items() if not _is_empty(args)}
    left = (
        {path for path, leaf in to_flat(item).items() if is_empty_node(leaf)} if item is not None else set()
    )
    leaves = {path for path, leaf in flat.items() if isinstance(leaf, StoredLeaf)} - left
    if missing := [path for path in leaves if path not in given]:
        raise MismatchError(
            _lines("`restore_args` lacks", missing),
            context=f"{stored.path}: restore_args and the checkpoint do not match",
        )
    return {path: wish_of(given.get(path)) for path in flat}


def _is_empty(args: Any) -> bool:
    return not hasattr(args, "restore_type") and is_empty_node(args)


def _partial(stored: Stored, item: Any, args: Any) -> Any:
    """Restore the leaves that the item and the checkpoint have. Others stay as the item has them."""
    if item is None:
        raise ValueError("`partial_restore=True` needs `item`, which names the leaves to restore")
    flat, wanted = stored.flat, to_flat(item)
    given = to_flat(args.restore_args) if args.restore_args is not None else {}
    _require_same_kinds(stored, item)
    wishes = {path: wish_of(given.get(path)) for path in wanted if path in flat}
    found = read(stored, wishes)
    return rebuild(item, {**wanted, **found})


def _as_saved(stored: Stored, wishes: Mapping[Keys, Wish], fallback: Any = None) -> Any:
    found = read(stored, wishes, fallback)
    return _filled(stored.tree, (), found)


def _filled(node: Any, path: Keys, found: Mapping[Keys, Any]) -> Any:
    if type(node) is dict and node:
        return {key: _filled(child, (*path, key), found) for key, child in node.items()}
    if type(node) is list and node:
        return [_filled(child, (*path, str(number)), found) for number, child in enumerate(node)]
    return found[path]


# --------------------------------------------------------------------------------------- transformations


def _transformed(stored: Stored, item: Any, args: Any) -> Any:
    if item is None:
        raise ValueError(
            "If providing `transforms`, must provide `item` matching structure of expected result."
        )
    flat, wanted = stored.flat, to_flat(item)
    if args.restore_args is None:
        raise ValueError(
            "If providing `transforms`, must provide `restore_args` matching structure of expected result."
        )
    given = to_flat(args.restore_args)
    rules = to_flat_dict(args.transforms)
    sources = {
        path: wish for path in flat if (wish := _wish_of_source(path, wanted, rules, given, args)) is not None
    }
    values = {**dict.fromkeys(flat), **read(stored, sources)}
    old = _filled(stored.tree, (), values)
    transforms = jax.tree.map(lambda rule: _with_args(rule, given), args.transforms)
    return apply_transformations(old, transforms, item, args.transforms_default_to_original)


def _wish_of_source(path: Keys, wanted: Any, rules: Any, given: Any, args: Any) -> Wish | None:
    """Return how a leaf of the checkpoint is wanted by the transformations; None if nothing needs it."""
    name = "/".join(path)
    for pattern, rule in rules.items():
        if rule.multi_value_fn is not None:
            if (inputs := getattr(rule, "multi_value_fn_input_args", None)) is None:
                raise ValueError(
                    "Must use RestoreTransform in order to use multi_value_fn during restore: "
                    "`multi_value_fn_input_args` names the leaves that it needs"
                )
            if (
                match := next((one for key, one in inputs.items() if re.fullmatch(key, name)), None)
            ) is not None:
                return wish_of(match)
        elif not rule.use_fallback:
            for target in wanted:
                if match := re.fullmatch("/".join(pattern), "/".join(target)):
                    source = (
                        "/".join(target) if rule.original_key is None else match.expand(rule.original_key)
                    )
                    if source == name:
                        return wish_of(given.get(target))
    if path not in wanted:
        return None
    is_fallback = any(
        rule.use_fallback and re.fullmatch("/".join(pattern), name) for pattern, rule in rules.items()
    )
    return wish_of(given.get(path)) if is_fallback != args.transforms_default_to_original else None


def _with_args(rule: Any, given: Mapping[Keys, Any]) -> Any:
    if rule.multi_value_fn is None:
        return rule
    by_name = {"/".join(path): args for path, args in given.items()}
    return Transform(multi_value_fn=lambda key, tree: rule.multi_value_fn(key, tree, by_name[key]))


# ------------------------------------------------------------------------------------------ structure


def _require_same(stored: Stored, flat: Mapping[Keys, Any], wanted: Mapping[Keys, Any], target: Any) -> None:
    """Raise one ValueError with every difference between the target and the checkpoint."""
    if problems := _differences(flat, wanted) or _other_containers(stored.tree, plain(target), ()):
        raise MismatchError(
            problems,
            context=f"{stored.path}: User-provided restore item and on-disk value metadata tree structures do not "
            "match",
            advice="PyTreeRestore(item, restore_args, partial_restore=True) restores the leaves that both have",
        )


def _require_same_kinds(stored: Stored, item: Any) -> None:
    """Raise TypeError if the item has a leaf where the checkpoint has a container, or the other way round."""
    if problems := _other_nodes(stored.tree, plain(item), ()):
        raise TypeError(f"{stored.path}: Type mismatch at key path: {'; '.join(problems)}")


def _other_nodes(node: Any, target: Any, path: Keys) -> list[str]:
    kinds = [type(one) if isinstance(one, (dict, list)) and one else None for one in (node, target)]
    if kinds[0] is not kinds[1]:
        names = [kind.__name__ if kind else "a leaf" for kind in kinds]
        return [f"{'.'.join(path)!r} is {names[1]} in the item, and {names[0]} in the checkpoint"]
    return [
        problem
        for key, one, other in _pairs(node, target)
        for problem in _other_nodes(one, other, (*path, key))
    ]


def _other_containers(node: Any, target: Any, path: Keys) -> list[str]:
    """List the places where one tree has a list and the other a dict."""
    kinds = {type(one) for one in (node, target) if isinstance(one, (dict, list)) and one}
    if len(kinds) > 1:
        return [
            f"{'.'.join(path)!r} is a {type(target).__name__} in the target, a {type(node).__name__} in the checkpoint"
        ]
    return [
        p for key, one, other in _pairs(node, target) for p in _other_containers(one, other, (*path, key))
    ]


def _pairs(node: Any, target: Any) -> list[tuple[str, Any, Any]]:
    """Return the children that two containers have alike, with their keys."""
    if isinstance(node, dict) and isinstance(target, dict):
        return [(key, child, target[key]) for key, child in node.items() if key in target]
    if isinstance(node, list) and isinstance(target, list):
        return [(str(number), *pair) for number, pair in enumerate(zip(node, target, strict=False))]
    return []


def _differences(flat: Mapping[Keys, Any], wanted: Mapping[Keys, Any]) -> list[str]:
    missing = [path for path in wanted if path not in flat]
    surplus = [path for path in flat if path not in wanted]
    return [*_lines("the checkpoint lacks", missing), *_lines("the target lacks", surplus)]


def _lines(problem: str, paths: list[Keys]) -> list[str]:
    shown = [f"{problem} {'.'.join(path)!r}" for path in paths[:_MOST]]
    return [*shown, f"{problem} {len(paths) - _MOST} more"] if len(paths) > _MOST else shown


def restore_like(
    stored: Stored, target: Any, wish: Callable[[Any], Wish], *, partial: bool = False, strict: bool = True
) -> Any:
    """Restore a tree like a target, whose leaves `wish` turns into wishes. With `partial`, leaves that one of
    both lacks stay as the target has them."""
    flat, wanted = stored.flat, to_flat(target)
    if partial:
        _require_same_kinds(stored, target)
    else:
        _require_same(stored, flat, wanted, target)
    there = {path: leaf for path, leaf in wanted.items() if path in flat}
    wishes = {
        p: Wish() if is_empty_node(leaf) else replace(wish(leaf), strict=strict) for p, leaf in there.items()
    }
    return rebuild(target, {**wanted, **read(stored, wishes)})
