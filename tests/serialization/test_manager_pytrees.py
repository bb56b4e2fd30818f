"""Pytrees by their prefix: extras, shardings that name it, and templates."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from support.backends import Backend, Compressed, OneFile, Safetensors, TensorStore
from support.meshes import grid, line, on
from support.states import state
from support.trees import assert_same


class Pytrees(Backend):
    """What save_pytree saves, and load_pytree puts into a template."""

    @pytest.mark.parametrize("prefix", ["", None, 3, ["model"]], ids=repr)
    def test_a_pytree_needs_a_prefix(self, manager, path, prefix):
        with pytest.raises(ValueError, match="non-empty string prefix is required"):
            manager.save_pytree(state(), path, prefix=prefix)
        assert not path.exists()
        manager.save_pytree(state(), path, prefix="model")
        with pytest.raises(ValueError, match="non-empty string prefix is required"):
            manager.load_pytree(path, line(), prefix=prefix)

    def test_extras_come_back_as_metadata(self, manager, path):
        manager.save_pytree(state(), path, line(), prefix="model", extras={"step": 3, "who": ("me", None)})
        _, metadata = manager.load_pytree(path, line(), prefix="model")
        assert metadata["custom_metadata"] == {"step": 3, "who": ("me", None)}
        assert manager.load(path, line())[1] == metadata

    def test_offloading_is_what_a_pytree_does_unless_told(self, manager, path):
        for offload in ({}, {"cpu_offload": False}):
            manager.save_pytree(state(), path, prefix="model", **offload)
            assert_same(manager.load_pytree(path, line(), prefix="model")[0], state())

    def test_the_shardings_of_a_pytree_may_name_the_prefix(self, manager, path):
        manager.save_pytree({"a": {"w": jnp.ones(8)}, "b": jnp.ones(8)}, path, prefix="m")
        rows = on(line(), "model")
        for shardings in (
            {"a.w": rows, "b": np.asarray},
            {"m.a.w": rows, "m.b": np.asarray},
            {"m": {"a": {"w": rows}, "b": np.asarray}},
            {"a": {"w": rows}, "b": np.asarray},
        ):
            loaded, _ = manager.load_pytree(path, line(), prefix="m", shardings=shardings)
            assert loaded["a"]["w"].sharding == rows
            assert isinstance(loaded["b"], np.ndarray)

    def test_a_key_that_is_called_like_the_prefix_is_no_prefix(self, manager, path):
        manager.save_pytree({"model": {"w": jnp.ones(8)}}, path, prefix="model")
        rows = on(line(), "model")
        for shardings in ({"model": {"w": rows}}, {"model.w": rows}, {"model.model.w": rows}):
            loaded, _ = manager.load_pytree(path, line(), prefix="model", shardings=shardings)
            assert loaded["model"]["w"].sharding == rows

    def test_a_template_gives_the_structure_and_the_shardings(self, manager, path):
        manager.save_pytree({"a": jnp.arange(64.0).reshape(8, 8), "b": [jnp.ones(3), 5]}, path, prefix="m")
        template = {
            "a": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=on(grid(), "data", "model")),
            "b": (jnp.zeros(3), 0),
        }
        loaded, _ = manager.load_pytree(path, grid(), prefix="m", template=template)
        assert loaded["a"].sharding == on(grid(), "data", "model")
        assert loaded["b"][0].sharding == on(grid())
        np.testing.assert_array_equal(loaded["a"], np.arange(64.0).reshape(8, 8))
        assert type(loaded["b"]) is tuple

    def test_values_come_from_the_checkpoint_and_never_from_the_template(self, manager, path):
        tree = {"key": jax.random.key(1), "n": np.arange(2), "name": "saved", "step": 5, "w": jnp.arange(3.0)}
        manager.save_pytree(tree, path, prefix="m")
        template = {
            "w": jnp.zeros(3),
            "n": np.zeros(2, int),
            "step": 7,
            "name": "other",
            "key": jax.random.key(9),
        }
        for strict in (True, False):
            loaded, _ = manager.load_pytree(path, None, prefix="m", template=template, strict_shapes=strict)
            assert_same(loaded, tree)

    def test_arguments_win_over_the_template(self, manager, path):
        manager.save_pytree({"a": jnp.ones(8), "b": jnp.ones(8)}, path, prefix="m")
        template = {
            name: jax.ShapeDtypeStruct((8,), jnp.float32, sharding=on(grid(), "data")) for name in ("a", "b")
        }
        loaded, _ = manager.load_pytree(
            path, grid(), prefix="m", template=template, shardings={"a": P("model")}
        )
        assert loaded["a"].sharding == on(grid(), "model")
        assert loaded["b"].sharding == on(grid(), "data")

    @pytest.mark.parametrize("strict", [True, False])
    def test_every_difference_to_the_template_is_in_one_error(self, manager, path, strict):
        tree = {
            "shape": jnp.ones((2, 3)),
            "dtype": jnp.ones(3),
            "kind": 3,
            "gone": jnp.ones(1),
            "same": jnp.ones(2),
        }
        manager.save_pytree(tree, path, prefix="m")
        template = {"shape": jnp.ones((3, 3)), "dtype": jnp.ones(3, jnp.int32), "kind": jnp.ones(1), "new": 1}
        with pytest.raises(ValueError, match="6 mismatches") as error:
            manager.load_pytree(
                path, line(), prefix="m", template=template | {"same": jnp.ones(2)} | {"more": jnp.ones(1)},
                strict_shapes=strict,
            )  # fmt: skip
        for name in ("shape", "dtype", "kind", "gone", "new", "more"):
            assert repr(name) in str(error.value)
        assert "'same'" not in str(error.value)

    def test_a_template_is_compared_with_what_the_dtype_makes(self, manager, path):
        manager.save_pytree({"w": jnp.ones(3), "i": jnp.arange(3)}, path, prefix="m")
        template = {"i": jnp.arange(3), "w": jnp.ones(3, jnp.bfloat16)}
        with pytest.raises(
            ValueError, match=r"'w': expected bfloat16\[3\], found float32\[3\]; dtype=.like. casts it"
        ):
            manager.load_pytree(path, line(), prefix="m", template=template)
        for dtype in ("bf16", "like"):
            loaded, _ = manager.load_pytree(path, line(), prefix="m", template=template, dtype=dtype)
            assert_same(loaded, template)

    def test_the_dtypes_of_a_template_need_one(self, manager, path):
        manager.save_pytree({"w": jnp.ones(3)}, path, prefix="m")
        with pytest.raises(ValueError, match='dtype="like" needs template=, which gives the structure'):
            manager.load_pytree(path, line(), prefix="m", dtype="like")
        for load in (manager.load, manager.load_tree_parallel):  # these have no template
            with pytest.raises(ValueError, match="'like' is not a floating dtype; known dtypes: "):
                load(path, None, dtype="like")

    def test_a_leaf_of_as_many_elements_is_reshaped_if_shapes_are_not_strict(self, manager, path, caplog):
        tree = {
            "w": jnp.arange(16.0).reshape(2, 8),
            "n": np.arange(6),
            "one": jnp.ones((1, 3)),
            "s": jnp.float32(2),
        }
        manager.save_pytree(tree, path, prefix="m")
        template = {
            "w": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=on(line(), "model")),
            "n": np.zeros((2, 3), int),
            "one": jnp.zeros(3),
            "s": jnp.zeros(1),
        }
        with pytest.raises(ValueError, match="4 mismatches"):
            manager.load_pytree(path, line(), prefix="m", template=template)
        loaded, _ = manager.load_pytree(path, line(), prefix="m", template=template, strict_shapes=False)
        for name, leaf in tree.items():
            np.testing.assert_array_equal(loaded[name], np.reshape(leaf, template[name].shape))
        assert loaded["w"].sharding == on(line(), "model")
        assert "leaf 'w' is reshaped from [2, 8] to [8, 2]" in caplog.text

    @pytest.mark.parametrize("shape", [(3,), (5, 6), (2, 1, 6), (6, 2)], ids=str)
    def test_a_leaf_of_another_size_is_an_error_also_if_shapes_are_not_strict(self, manager, path, shape):
        manager.save_pytree({"w": jnp.ones((2, 3))}, path, prefix="m")
        for template in ({"w": jnp.zeros(shape)}, {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}):
            with pytest.raises(ValueError, match=rf"'w': expected float32{re.escape(str(list(shape)))}"):
                manager.load_pytree(path, line(), prefix="m", template=template, strict_shapes=False)


class TestTensorStore(TensorStore, Pytrees):
    pass


@pytest.mark.sample(5)
class TestCompressed(Compressed, Pytrees):
    pass


@pytest.mark.sample(3)
class TestSafetensors(Safetensors, Pytrees):
    pass


@pytest.mark.sample(5)
class TestOneFile(OneFile, Pytrees):
    pass
