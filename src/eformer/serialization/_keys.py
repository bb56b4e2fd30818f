"""Name the leaves of a tree by their dotted paths, as the documented API does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from eformer._engine.trees.nodes import plain_key

if TYPE_CHECKING:
    from collections.abc import Callable


def is_array_like(x: Any) -> bool:
    """Tell whether `x` has both a shape and a dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def join_key(prefix: str | None, k: str | None) -> str:
    """Join `prefix` and `k` by a dot; leave out an empty one."""
    return ".".join(part for part in (prefix, k) if part)


def leaf_key_paths(
    pytree: Any, prefix: str | None = "", *, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Return a tree like `pytree` with the dotted path of each leaf in its place, for display.

    `prefix` comes before each path. `is_leaf` is passed to `jax.tree.flatten`.

    Paths are not escaped, unlike stored names: {"a.b": x, "a": {"b": y}} has the path "a.b" twice.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(pytree, is_leaf=is_leaf)
    paths = (".".join(str(plain_key(entry)) for entry in path) for path, _ in pairs)
    return jax.tree_util.tree_unflatten(treedef, [join_key(prefix, path) for path in paths])
