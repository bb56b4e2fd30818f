"""Turn leaf names and paths into the keys of the documented API: dotted, without escapes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import jax

from eformer._engine.record.names import readable
from eformer._engine.trees.nodes import plain_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def keys_of(names: Iterable[str]) -> dict[str, str]:
    """Map names to dotted keys; a name whose dotted key would be ambiguous maps to itself."""
    keys = {name: readable(name) for name in names}
    count = Counter(keys.values())
    return {name: key if count[key] == 1 else name for name, key in keys.items()}


def by_key(callback: Callable[[Any, str], Any] | None) -> Callable[[Any, str], Any] | None:
    """Wrap a callback that takes a dotted key, so that it can be called with a leaf's name."""
    return None if callback is None else lambda array, name: callback(array, readable(name))


def is_array_like(x: Any) -> bool:
    """Tell whether `x` has both a shape and a dtype."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def join_key(prefix: str | None, k: str | None) -> str:
    """Join `prefix` and `k` by a dot, or return the one that is not empty."""
    return ".".join(part for part in (prefix, k) if part)


def leaf_key_paths(
    pytree: Any, prefix: str | None = "", *, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Return a tree of the structure of `pytree` whose leaves are their own dotted paths, for display.

    `prefix` comes before each path. `is_leaf` is that of `jax.tree.flatten`.

    Unlike the names under which leaves are stored, the paths are not escaped: {"a.b": x, "a": {"b": y}} has the path
    "a.b" twice.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(pytree, is_leaf=is_leaf)
    paths = (".".join(str(plain_key(entry)) for entry in path) for path, _ in pairs)
    return jax.tree_util.tree_unflatten(treedef, [join_key(prefix, path) for path in paths])
