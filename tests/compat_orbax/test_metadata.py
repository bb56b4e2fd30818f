"""Metadata objects serve programs for both generations of Orbax, and read no leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eformer.compat import orbax as ocp


@pytest.fixture
def found(tmp_path):
    ocp.PyTreeCheckpointer().save(
        tmp_path / "it",
        args=ocp.args.PyTreeSave(
            {"w": jnp.ones((2, 3)), "h": np.arange(2), "n": 3, "s": "x"}, custom_metadata={"c": 1}
        ),
    )
    return ocp.PyTreeCheckpointer().metadata(tmp_path / "it")


def test_leaves_have_kinds_shapes_and_dtypes(found):
    tree = found.item_metadata
    assert (tree["w"].shape, tree["w"].dtype) == ((2, 3), np.float32)
    assert isinstance(tree["w"], ocp.metadata.ArrayMetadata)
    assert isinstance(tree["n"], ocp.metadata.ScalarMetadata)
    assert isinstance(tree["s"], ocp.metadata.StringMetadata)
    assert tree["h"].sharding is None
    assert tree.custom_metadata == {"c": 1}
    assert "w" in tree
    assert tree.tree["w"] is tree["w"]


def test_older_programs_index_and_map_the_metadata_themselves(found):
    assert found["w"].shape == (2, 3)
    assert "n" in found
    shapes = jax.tree.map(lambda leaf: getattr(leaf, "shape", None), found)
    assert shapes["w"] == (2, 3)


def test_metadata_are_a_target(found, tmp_path):
    args = ocp.checkpoint_utils.construct_restore_args(found.item_metadata)
    back = ocp.PyTreeCheckpointer().restore(tmp_path / "it", args=ocp.args.PyTreeRestore(restore_args=args))
    assert back["w"].shape == (2, 3)
    assert back["n"] == 3


def test_a_path_without_a_tree_has_no_item_metadata(tmp_path):
    (tmp_path / "it").mkdir()
    assert ocp.PyTreeCheckpointer().metadata(tmp_path / "it").item_metadata is None
    with pytest.raises(ValueError, match="Step metadata not found"):
        ocp.metadata.get_step_metadata(tmp_path / "it")


def test_too_few_devices_are_an_error_of_the_sharding_alone():
    sharding = ocp.metadata.NamedShardingMetadata((1000,), ("x",), ("x",))
    with pytest.raises(ValueError, match="1000"):
        sharding.to_jax_sharding()
