"""Make small training states, and list their leaves by key."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from support.meshes import grid, on
from support.trees import Moments


def model(seed: int = 0) -> dict[str, Any]:
    """Return parameters, the state of their optimizer, a key and plain values."""
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "embed": jax.random.normal(keys[0], (64, 16), jnp.bfloat16),
        "layers": [{"b": jnp.arange(24.0), "w": jax.random.normal(k, (16, 24))} for k in keys[1:3]],
    }
    return {
        "params": params,
        "optimizer": optax.adam(1e-3).init(params),
        "rng": keys[3],
        "step": seed,
        "name": "x",
    }


def state(seed: int = 0) -> dict[str, Any]:
    """Return floats of two widths, integers, booleans, a key and plain values; sorted, as JAX sorts dicts."""
    rng = np.random.default_rng(seed)
    return {
        "block": {
            "bias": jnp.arange(8, dtype=jnp.bfloat16),
            "kernel": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
        },
        "lr": 0.1,
        "mask": jnp.asarray([True, False]),
        "name": f"run {seed}",
        "rng": jax.random.key(seed),
        "step": jnp.int32(100_001 + seed),
    }


def tree_of_all_kinds() -> dict[str, Any]:
    """Return containers and leaves of every kind, among them an array on a mesh."""
    return {
        "bits": {
            "four": jnp.ones(5, jnp.int4),
            "odd": jnp.ones(3, jnp.uint4),
            "eight": jnp.ones(3, jnp.float8_e5m2),
        },
        "empty": {"array": jnp.zeros((0, 2)), "dict": {}, "list": [], "none": None},
        "kernel": jnp.arange(64.0).reshape(8, 8),
        "list": [jnp.ones(2, jnp.bfloat16), (jnp.int32(3), 5)],
        "moments": Moments(jnp.ones(3, bool), "text"),
        "numpy": np.arange(20)[::3],
        "rng": jax.random.key(3),
        "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), on(grid(), "data", "model")),
    }


def flat(tree: Any) -> dict[str, Any]:
    """Return the leaves by the keys that the documentation specifies."""
    keys = jax.tree_util.tree_leaves_with_path(tree)
    return {
        ".".join(jax.tree_util.keystr((entry,), simple=True) for entry in path): leaf for path, leaf in keys
    }


def arrays_of(tree: Any) -> dict[str, Any]:
    return {key: leaf for key, leaf in flat(tree).items() if hasattr(leaf, "dtype")}


def is_floating(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
