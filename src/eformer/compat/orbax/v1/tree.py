"""Trees of the newer generation.

Tests: tests/compat_orbax/test_v1.py.
"""

from __future__ import annotations

from typing import Any

from eformer.compat.orbax.tree import JsonType, PyTree, to_flat_dict
from eformer.compat.orbax.tree import merge_trees as _merged

__all__ = ["JsonType", "PyTree", "merge"]


def merge(*trees: Any, overwrite: bool = False) -> Any:
    """Return one tree with the leaves of all. Raise ValueError for a leaf that two have, unless `overwrite`."""
    seen: set[Any] = set()
    for tree in trees if not overwrite else ():
        names = set(to_flat_dict(tree))
        if common := sorted(seen & names):
            raise ValueError(f"Found common key paths when overwrite is False: {common}")
        seen |= names
    return _merged(*trees)
