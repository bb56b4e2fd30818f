"""Describe a saved tree by shapes and dtypes, without reading data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from eformer._engine.formats.find import look_at
from eformer._engine.loading.select import key_dtype
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.manifest import UNREADABLE, parse_structure
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.trees.unflatten import unflatten
from eformer.errors import StructureError

if TYPE_CHECKING:
    import os

    from eformer._engine.record.manifest import LeafEntry, TreeEntry


@uninterrupted
def abstract(path: str | os.PathLike[str], *, prefix: str | None = None) -> Any:
    """Return the tree saved at `path` with a `ShapeDtypeStruct` in the place of every array. Reads no data.

    The structure is the one that `load` without `like` returns, and plain values are themselves. Shardings are not
    part of it: they belong to the mesh of the save. `prefix` chooses the tree, if there are several.

    Example:
        >>> checkpoint.abstract("run/step-100")["params"]["w"]
        ShapeDtypeStruct(shape=(8, 4), dtype=float32)
    """
    return look_at(path, lambda found: _described(found.listed(prefix)))


def _described(tree: TreeEntry) -> Any:
    structure = parse_structure(tree.structure)
    if isinstance(structure, dict) and UNREADABLE in structure:
        raise StructureError(structure[UNREADABLE])
    return unflatten(structure, {name: _struct(leaf) for name, leaf in tree.leaves.items()} | tree.values)


_ShapeDtypeStruct: Any = jax.ShapeDtypeStruct  # its constructor has no types


def _struct(leaf: LeafEntry) -> Any:
    dtype = key_dtype(leaf.key) if leaf.key else dtype_from_name(leaf.dtype)
    return _ShapeDtypeStruct(leaf.logical_shape, dtype, weak_type=leaf.home == "weak")
