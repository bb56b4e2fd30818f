"""Describe what is in the samples of a release, the same way when they are written and when they are read."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eformer._engine.trees.flatten import flatten


def described(tree: Any) -> dict[str, Any]:
    """Describe every leaf of a tree down to its bits, and the structure."""
    leaves, structure = flatten(tree)
    arrays = {name: leaf for name, leaf in leaves.items() if hasattr(leaf, "dtype")}
    return {
        "structure": structure,
        "leaves": {name: _described(leaf) for name, leaf in arrays.items()},
        "values": {name: repr(leaf) for name, leaf in leaves.items() if name not in arrays},
    }


def _described(leaf: Any) -> list[Any]:
    kind = "scalar" if isinstance(leaf, np.generic) else "numpy"
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        kind, leaf = str(leaf.dtype), jax.random.key_data(leaf)
    elif isinstance(leaf, jax.Array):
        kind = "weak" if leaf.weak_type else "jax"
    array = np.asarray(leaf)
    return [kind, str(array.dtype), list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]


class Data:
    """Batches, of which the position is saved."""

    def __init__(self) -> None:
        self.taken = 0

    def get_state(self) -> dict[str, Any]:
        return {"taken": self.taken, "order": np.arange(self.taken)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.taken = int(state["taken"])
