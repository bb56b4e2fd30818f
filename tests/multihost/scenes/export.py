"""Processes that export the state that they hold together."""

from __future__ import annotations

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer.checkpoint import export
from multihost.scenes.state import mesh, put
from support.models import weights

__all__ = ["export_sharded"]


def export_sharded(path, like, spec):
    """Exports a model whose matrices are sharded over all processes. Returns the names and the notes of the result."""
    parts = {
        name: put(array, NamedSharding(mesh(), P(*spec[: array.ndim]) if array.ndim == 2 else P()))
        for name, array in weights().items()
    }
    done = export(parts, path, like=like)
    return [leaf.name for leaf in done.leaves[""]], done.notes
