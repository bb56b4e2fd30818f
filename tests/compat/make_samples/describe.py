"""Describe the leaves of a tree as JSON, so that trees of different environments can be compared. Needs jax alone."""

import base64
import hashlib

import jax
import numpy as np

_MOST_INLINE = 20_000
_LONG_NAMES = {"fry": "threefry2x32"}  # of generators, which older versions of JAX call by a tag


def leaves_of(tree, path=""):
    """Every leaf, None and empty container by its path."""
    if isinstance(tree, (dict, list, tuple)) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, child in items for k, v in leaves_of(child, f"{path}/{key}").items()}
    return {path or ".": tree}


def described(leaf):
    if leaf is None:
        return ["none"]
    if isinstance(leaf, (dict, list, tuple)):
        return ["empty", type(leaf).__name__]
    if isinstance(leaf, (bool, int, float, complex, str)) and not isinstance(leaf, np.generic):
        return [type(leaf).__name__, str(leaf)]
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf)).tobytes()
        generator = _LONG_NAMES.get(str(jax.random.key_impl(leaf)), str(jax.random.key_impl(leaf)))
        return ["key", generator, list(leaf.shape), base64.b64encode(data).decode()]
    # The upper bits of an int4 are anything in versions of old.
    array = np.asarray(leaf).astype(np.int8) if leaf.dtype.name == "int4" else np.asarray(leaf)
    data = np.ascontiguousarray(array).tobytes()
    data = hashlib.sha256(data).digest() if len(data) > _MOST_INLINE else data
    return ["array", leaf.dtype.name, list(leaf.shape), base64.b64encode(data).decode()]


def described_leaves(tree):
    return {path: described(leaf) for path, leaf in leaves_of(tree).items()}
