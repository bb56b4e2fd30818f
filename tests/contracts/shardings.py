"""Arrays lie where a load says: on any mesh, by any sharding, whatever they were saved on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from contracts.base import Contract
from eformer.checkpoint import load, save
from eformer.errors import MismatchError
from support.meshes import layouts, meshes
from support.trees import assert_same


class Shardings(Contract):
    """Where the arrays lie that are loaded."""

    @pytest.mark.parametrize("after", layouts(), ids=str)
    @pytest.mark.parametrize("before", layouts(), ids=str)
    def test_any_sharding_loads_under_any_other(self, path, before, after):
        array = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
        save({"w": jax.device_put(array, layouts()[before])}, path)
        loaded = load(path, shardings={"w": layouts()[after]})["w"]
        assert loaded.sharding == layouts()[after]
        for shard in loaded.addressable_shards:
            np.testing.assert_array_equal(shard.data, array[shard.index])

    def test_without_a_word_arrays_lie_on_the_default_device(self, path):
        save({"w": jax.device_put(jnp.ones((8, 8)), layouts()["2x4"])}, path)
        loaded = load(path)["w"]
        assert loaded.devices() == {jax.devices()[0]}
        assert not loaded.committed

    def test_with_a_mesh_arrays_lie_as_they_were_saved(self, path):
        tree = {
            name: jax.device_put(jnp.ones((8, 8)), s)
            for name, s in layouts().items()
            if name in ("2x4", "rows by both")
        }
        tree["keys"] = jax.device_put(jax.random.split(jax.random.key(0), 8), layouts()["rows by both"])
        save(tree, path)
        loaded = load(path, mesh=meshes()[2])
        for name, array in tree.items():
            assert loaded[name].sharding == NamedSharding(meshes()[2], array.sharding.spec)
        assert_same(loaded["keys"], tree["keys"])

    def test_on_a_mesh_of_one_axis_the_rest_is_replicated(self, path):
        save({"w": jnp.ones((8, 8)), "n": np.ones(3)}, path)
        loaded = load(path, mesh=meshes()[0])
        assert loaded["w"].sharding == NamedSharding(meshes()[0], P())
        assert isinstance(loaded["n"], np.ndarray)

    def test_on_a_mesh_of_several_axes_somebody_has_to_say(self, path):
        save({"w": jnp.ones((8, 8)), "s": jnp.float32(1)}, path)
        with pytest.raises(ValueError, match=r"'w'.*no sharding is given.*rules= or shardings="):
            load(path, mesh=meshes()[1])

    def test_rules_are_searched_in_names_joined_by_slashes(self, path):
        tree = {"block": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}, "step": jnp.int32(3)}
        save(tree, path)
        loaded = load(path, mesh=meshes()[1], rules=[("block/kernel", P("x", "y")), ("nothing", P("y"))])
        assert loaded["block"]["kernel"].sharding == NamedSharding(meshes()[1], P("x", "y"))
        assert loaded["block"]["bias"].sharding == NamedSharding(meshes()[1], P())
        assert loaded["step"].sharding == NamedSharding(meshes()[1], P())

    def test_specs_that_do_not_fit_are_reported_at_once(self, path):
        save({"odd": jnp.ones(7), "flat": jnp.ones(8), "fine": jnp.ones((8, 8))}, path)
        rules = [("odd", P("x")), ("flat", P("x", "y")), ("fine", P("z"))]
        with pytest.raises(MismatchError) as error:
            load(path, mesh=meshes()[1], rules=rules)
        assert sorted(problem.split()[1] for problem in error.value.problems) == ["'fine'", "'flat'", "'odd'"]
        with pytest.raises(ValueError, match="need a mesh"):
            load(path, rules=rules)
        with pytest.raises(ValueError, match="not a regular expression"):
            load(path, mesh=meshes()[1], rules=[("(", P())])

    def test_shardings_name_some_leaves_nested_or_flat_and_call_functions(self, path):
        tree = {"a": {"w": jnp.ones((8, 8)), "v": jnp.ones(8)}, "b": [jnp.ones(8)]}
        save(tree, path)
        rows = layouts()["rows"]
        for shardings in ({"a.w": rows, "a.v": np.asarray}, {"a": {"w": rows, "v": np.asarray}}):
            loaded = load(path, shardings=shardings)
            assert loaded["a"]["w"].sharding == rows
            assert isinstance(loaded["a"]["v"], np.ndarray)
            assert loaded["b"][0].devices() == {jax.devices()[0]}
        assert load(path, mesh=meshes()[0], shardings={"b.0": P("x")})["b"][0].sharding == rows
        with pytest.raises(MismatchError, match=r"'a.q'.*nearest is 'a.[wv]'"):
            load(path, shardings={"a.q": rows})
        with pytest.raises(MismatchError, match=r"'a.w'.*not a Sharding"):
            load(path, shardings={"a.w": 3})

    def test_shardings_of_leaves_that_are_left_out_do_not_matter(self, path):
        save({"a": jnp.ones(8), "b": jnp.ones(8), "n": 3}, path)
        rows = layouts()["rows"]
        assert list(load(path, keys="a", shardings={"a": rows, "b": rows})) == ["a"]
        with pytest.raises(MismatchError, match=r"'n', which is not an array"):
            load(path, shardings={"n": rows})

    def test_an_error_of_the_callers_function_is_the_callers_to_see(self, path):
        save({"a": jnp.ones(8)}, path)

        def broken(x):
            raise FileNotFoundError("mine")

        with pytest.raises(FileNotFoundError, match=r"^mine$"):
            load(path, shardings={"a": broken})

    def test_axes_named_twice_and_things_that_are_no_spec_are_reported_by_leaf(self, path):
        save({"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}, path)
        with pytest.raises(MismatchError) as error:
            load(path, mesh=meshes()[0], rules=[("a", P("x", "x")), ("b", "x")])
        assert len(error.value.problems) == 2

    def test_keys_lie_in_pinned_memory_too(self, path):
        save({"k": jax.random.split(jax.random.key(0), 8)}, path)
        pinned = layouts()["rows"].with_memory_kind("pinned_host")
        assert load(path, shardings=pinned)["k"].sharding.memory_kind == "pinned_host"

    def test_one_sharding_for_all(self, path):
        save({"a": jnp.ones(8), "b": np.ones((8, 2))}, path)
        loaded = load(path, shardings=layouts()["rows"], dtype="f32")
        assert all(leaf.sharding == layouts()["rows"] for leaf in loaded.values())

    def test_an_array_loads_into_pinned_memory(self, path):
        save({"a": jnp.arange(64.0)}, path)
        pinned = layouts()["rows"].with_memory_kind("pinned_host")
        loaded = load(path, shardings=pinned)["a"]
        assert loaded.sharding == pinned
        np.testing.assert_array_equal(loaded, np.arange(64.0))

    def test_loaded_arrays_can_be_donated_and_changed(self, path):
        save({"j": jnp.arange(3000.0), "n": np.arange(3000.0)}, path)
        loaded = load(path)
        bumped = jax.jit(lambda x: x + 1, donate_argnums=0)(loaded["j"])
        loaded["n"] += 1
        np.testing.assert_array_equal(bumped, np.arange(3000.0) + 1)
        assert_same(load(path)["n"], np.arange(3000.0))
