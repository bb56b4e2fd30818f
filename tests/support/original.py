"""Write structure files of any tree as the original package (eformer 0.0.101) did, and list samples of its own."""

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import equinox as eqx
import flax
import jax
import numpy as np

from eformer.serialization._keys import is_array_like

DATA = Path(__file__).parents[1] / "compat" / "data"
STRUCTURES = sorted(str(path.relative_to(DATA)) for path in DATA.rglob("*_structure.json"))
BASIC = "pytree_basic/state_structure.json"


@flax.struct.dataclass
class Struct:
    weight: Any
    note: Any = flax.struct.field(pytree_node=False)
    size: Any = flax.struct.field(pytree_node=False, default=3)
    rest: Any = None


class Module(eqx.Module):
    weight: Any
    note: Any = eqx.field(static=True)
    rest: Any


def one():
    return np.float32(1)


def encoded(data):
    return base64.b64encode(data).decode()


def is_none(leaf):
    return leaf is None


def as_original(tree, prefix="state", **changes):
    """Return the file that save_pytree of the original package would have written."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in pairs]
    keys = [f"{prefix}.{path}" if path else prefix for path in paths]
    mask = [is_array_like(leaf) for _, leaf in pairs]
    arrays = [key for key, is_array in zip(keys, mask, strict=True) if is_array]
    payload = {str(i): encoded(pickle.dumps(leaf, 4)) for i, (_, leaf) in enumerate(pairs) if not mask[i]}
    document = {
        "format": "pytree-structure",
        "version": "0.0.101",
        "backend": "tensorstore",
        "prefix": prefix,
        "treedef_b64": encoded(pickle.dumps(treedef, 4)),
        "leaf_keys_full": keys,
        "arr_mask": mask,
        "array_keys": arrays,
        "array_relpaths": [key.replace(".", "/") for key in arrays],
        "nonarray_payload": payload,
        "safetensors_file": None,
        "extras": {},
    }
    return json.dumps(document | changes).encode()


def with_renamed(tree, old, new):
    """Return the file of a tree whose treedef refers to another module."""
    pickled = pickle.dumps(jax.tree.structure(tree), 4)
    assert (parts := pickled.count(bytes([len(old)]) + old)) == 1, parts
    return as_original(
        tree, treedef_b64=encoded(pickled.replace(bytes([len(old)]) + old, bytes([len(new)]) + new))
    )
