"""Transformations of trees by rules of Orbax: rename leaves, compute them, or keep the caller's.

Tests: tests/compat_orbax/test_restore.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from eformer.compat.orbax.tree import from_flat_dict, intersect_trees, merge_trees, to_flat_dict

__all__ = ["RestoreTransform", "Transform", "apply_transformations", "intersect_trees", "merge_trees"]


@dataclass
class Transform:
    """Where a leaf of the new tree comes from.

    original_key     its name in the old tree, with "/" between levels; may refer to groups of the pattern
    use_fallback     take the leaf of the fallback tree
    value_fn         a function of the old value
    multi_value_fn   a function of the new name and the whole old tree
    """

    original_key: Any = None
    use_fallback: bool = False
    value_fn: Callable[..., Any] | None = None
    multi_value_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        others = [self.original_key is not None, self.value_fn is not None]
        assert not (self.use_fallback and (any(others) or self.multi_value_fn is not None))
        assert not (self.multi_value_fn is not None and any(others))


@dataclass
class RestoreTransform(Transform):
    """A transformation at a restore: its functions also get the `RestoreArgs`.

    multi_value_fn_input_args   the leaves of the checkpoint that `multi_value_fn` needs, with their `RestoreArgs`
    """

    multi_value_fn_input_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.multi_value_fn_input_args is not None:
            assert self.multi_value_fn is not None


def apply_transformations(
    original_tree: Any, transformations: Any, new_tree: Any, default_to_original: bool | None = True
) -> Any:
    """Return `new_tree` with its leaves from `original_tree`, by the transformation whose pattern matches their names.

    Leaves without a transformation come from `original_tree` if it has them, or, without `default_to_original`, stay.
    """
    if not jax.tree.leaves(new_tree) and not new_tree:
        return {}
    old, new = to_flat_dict(original_tree, sep="/"), to_flat_dict(new_tree, sep="/")
    rules = to_flat_dict(transformations, sep="/")
    for name in new:
        matching = [
            (match, rule) for pattern, rule in rules.items() if (match := re.fullmatch(pattern, name))
        ]
        for match, rule in matching:
            new[name] = _transformed(name, match, rule, old, new[name], original_tree, default_to_original)
        if not matching and default_to_original and name in old:
            new[name] = old[name]
    return from_flat_dict(new, target=new_tree, sep="/")


def _transformed(
    name: str, match: re.Match[str], rule: Any, old: Mapping[str, Any], current: Any, tree: Any, default: Any
) -> Any:
    if rule.use_fallback:
        if default:
            return current
        if name not in old:
            raise ValueError(f"{name} not found in origin tree (`use_fallback` requested).")
        return old[name]
    if rule.multi_value_fn is not None:
        return rule.multi_value_fn(name, tree)
    source = name if rule.original_key is None else match.expand(rule.original_key)
    if source not in old:
        raise ValueError(f'Transformation key "{source}" not found in origin tree.')
    return old[source] if rule.value_fn is None else rule.value_fn(old[source])
