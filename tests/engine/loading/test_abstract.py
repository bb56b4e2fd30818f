"""The shapes and dtypes of a saved tree, in its structure."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

from eformer.checkpoint import abstract, load, save
from eformer.errors import StructureError
from support.trees import assert_same


@pytest.fixture(scope="module")
def whole():
    return {
        "params": {"w": jnp.ones((4, 2), jnp.bfloat16), "b": np.zeros(3, np.int64)},
        "opt": optax.adam(1e-3).init({"w": jnp.ones((4, 2))}),
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
        "step": 7,
        "none": None,
        "run": "a",
    }


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
def test_it_is_the_tree_with_a_struct_for_every_array(tmp_path, kind, whole):
    save(whole, tmp_path, format=kind)
    found = abstract(tmp_path)
    assert jax.tree.structure(found) == jax.tree.structure(whole)
    for struct, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        if isinstance(leaf, (jax.Array, np.ndarray)):
            assert isinstance(struct, jax.ShapeDtypeStruct)
            assert (struct.shape, struct.dtype) == (leaf.shape, leaf.dtype)
        else:
            assert struct == leaf


def test_no_data_is_read(tmp_path):
    save({"w": jnp.ones((4, 2))}, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.unlink()
    assert abstract(tmp_path)["w"].shape == (4, 2)


def test_a_load_takes_it_as_like(tmp_path, whole):
    state = {name: whole[name] for name in ("keys", "none", "opt", "run", "step")}  # as `like` is ordered
    save(state, tmp_path)
    assert_same(load(tmp_path, like=abstract(tmp_path)), state)


def test_prefixes_and_files_of_other_programs(tmp_path):
    save({"w": jnp.ones(3)}, tmp_path / "x", prefix="a")
    save({"w": jnp.ones(4)}, tmp_path / "x", prefix="b")
    assert abstract(tmp_path / "x", prefix="b")["w"].shape == (4,)
    with pytest.raises(ValueError, match=r"pass prefix=, one of \['a', 'b'\]"):
        abstract(tmp_path / "x")
    safetensors.numpy.save_file({"a.w": np.ones((2, 3))}, tmp_path / "y.safetensors")
    assert abstract(tmp_path / "y.safetensors")["a"]["w"].dtype == np.float64


def test_a_file_without_names_has_no_structure(tmp_path):
    with (tmp_path / "x.eqx").open("wb") as file:
        np.save(file, np.ones(3))
        np.save(file, np.ones(4))
    with pytest.raises(StructureError, match="like"):
        abstract(tmp_path / "x.eqx")
