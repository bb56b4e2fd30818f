"""Checkpoints that Orbax 0.2.7 to 0.12.8, flax over it, and T5X wrote load equal to what Orbax itself restored."""

import base64
import hashlib
import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

from eformer import checkpoint

ARCHIVE = Path(__file__).parent / "orbax-old" / "samples.tar.xz"
T5X = "t5x-like-checkpoint_1000"
_MOST_INLINE = 20_000


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """The unpacked samples: checkpoints, and `expected.json` with what Orbax restored from each."""
    directory = tmp_path_factory.mktemp("orbax-old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


def _names():
    with tarfile.open(ARCHIVE) as archive:
        member = next(m for m in archive if m.name.endswith("expected.json"))
        return json.load(archive.extractfile(member))


EXPECTED = _names()


def leaves_of(tree, path=""):
    """Every leaf, None and empty container by its path, as `expected.json` has them."""
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
        return ["key", str(jax.random.key_impl(leaf)), list(leaf.shape), base64.b64encode(data).decode()]
    data = np.ascontiguousarray(np.asarray(leaf)).tobytes()
    data = hashlib.sha256(data).digest() if len(data) > _MOST_INLINE else data
    return ["array", leaf.dtype.name, list(leaf.shape), base64.b64encode(data).decode()]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_loads_equal_to_what_orbax_restored(samples, name):
    for item, leaves in EXPECTED[name].items():
        tree = checkpoint.load(samples / name, prefix=item or None)
        assert {path: described(leaf) for path, leaf in leaves_of(tree).items()} == leaves
