"""Arrays lie where a load says: on any mesh, by any sharding, whatever they were saved on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from contracts.base import Contract
from eformer.checkpoint import load, save
from eformer.errors import MismatchError
from support.meshes import layouts, meshes
from support.trees import assert_same


class Resharding(Contract):
    """Arrays of any sharding load under any other."""

    @pytest.mark.parametrize("after", layouts(), ids=str)
    @pytest.mark.parametrize("before", layouts(), ids=str)
    @pytest.mark.sample(5)
    def test_any_sharding_loads_under_any_other(self, path, before, after):
        array = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
        save({"w": jax.device_put(array, layouts()[before])}, path)
        loaded = load(path, shardings={"w": layouts()[after]})["w"]
        assert loaded.sharding == layouts()[after]
        for shard in loaded.addressable_shards:
            np.testing.assert_array_equal(shard.data, array[shard.index])


class Shardings(Contract):
    """Where the arrays of a load lie. No format decides this, so two layouts inherit the class."""

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

    def test_the_kind_of_memory_is_kept(self, path):
        pinned = layouts()["rows"].with_memory_kind("pinned_host")
        alone = SingleDeviceSharding(jax.devices()[3], memory_kind="pinned_host")
        tree = {"rows": jax.device_put(jnp.ones(8), pinned), "alone": jax.device_put(jnp.ones(8), alone)}
        save(tree | {"usual": jnp.ones(8)}, path)
        on_mesh = load(path, mesh=meshes()[0])
        assert on_mesh["rows"].sharding == pinned
        assert on_mesh["alone"].sharding == NamedSharding(meshes()[0], P(), memory_kind="pinned_host")
        usual = jnp.ones(8).sharding.memory_kind
        for loaded in (load(path), on_mesh):
            kinds = {name: leaf.sharding.memory_kind for name, leaf in loaded.items()}
            assert kinds == {"rows": "pinned_host", "alone": "pinned_host", "usual": usual}
            assert_same(np.asarray(loaded["rows"]), np.ones(8, np.float32))
        like = {"rows": jnp.ones(8), "alone": alone, "usual": pinned}
        for mesh in (None, meshes()[0]):
            loaded = load(path, like=like, mesh=mesh)
            kinds = {name: leaf.sharding.memory_kind for name, leaf in loaded.items()}
            assert kinds == {"rows": usual, "alone": "pinned_host", "usual": "pinned_host"}

    # -------------------------------------------------------------------------------------- jax.set_mesh

    @pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
    def test_the_mesh_of_set_mesh_is_the_default_mesh(self, path, kind):
        mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
        save({"a": {"w": jnp.ones((8, 8))}, "v": jnp.ones(8), "n": np.ones(8)}, path)
        with jax.set_mesh(mesh):
            ruled = load(path, rules=[("a/w", P("x", "y")), ("v", P("y"))])
            named = load(path, shardings={"a.w": P("x"), "v": np.asarray})
        assert ruled["a"]["w"].sharding == NamedSharding(mesh, P("x", "y"))
        assert ruled["v"].sharding == NamedSharding(mesh, P("y"))
        assert named["a"]["w"].sharding == NamedSharding(mesh, P("x"))
        assert isinstance(named["v"], np.ndarray)

    @pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
    def test_a_plain_load_inside_of_set_mesh_gives_what_was_saved_there(self, path, kind):
        mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
        one = jax.devices()[3]
        tree = {
            "w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("x", "y"))),
            "keys": jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("x"))),
            "elsewhere": jax.device_put(jnp.ones((8, 8)), layouts()["one device"]),
            "key": jax.device_put(jax.random.key(1), one),
            "small": jax.device_put(jnp.ones(8, jnp.int4), one),
            "n": np.ones(3),
            "step": 3,
        }
        with jax.set_mesh(mesh):
            save(tree, path)
            loaded = load(path)
            doubled = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree))(
                {name: loaded[name] for name in ("w", "elsewhere")}
            )
        assert_same(loaded, tree)
        for name in ("w", "keys"):
            assert loaded[name].sharding == tree[name].sharding
        for name in ("elsewhere", "key", "small"):
            assert loaded[name].sharding == NamedSharding(mesh, P())
        assert doubled["w"].sharding.is_equivalent_to(tree["w"].sharding, 2)

    def test_a_mesh_that_is_set_never_makes_a_plain_load_fail(self, path, caplog):
        with jax.enable_x64(True):
            save({"wide": jnp.arange(7), "odd": jax.device_put(jnp.ones(8), layouts()["rows"])}, path)
        mesh = Mesh(np.array(jax.devices()[:3]).reshape(3, 1), ("x", "other"))
        with jax.set_mesh(mesh):
            loaded = load(path, dtype="f32")
        assert_same(loaded["wide"], np.arange(7))
        assert "1 leaves are returned as numpy arrays" in caplog.text
        assert loaded["odd"].sharding == NamedSharding(mesh, P())

    def test_a_mesh_that_is_given_wins_over_that_of_set_mesh(self, path):
        save({"w": jax.device_put(jnp.ones((8, 8)), layouts()["rows"]), "k": jax.random.key(0)}, path)
        with jax.set_mesh(meshes()[1]):
            loaded = load(path, mesh=meshes()[2])
            alone = load(path, shardings=layouts()["one device"])
        assert loaded["w"].sharding == NamedSharding(meshes()[2], P("x"))
        assert {leaf.sharding for leaf in alone.values()} == {layouts()["one device"]}

    def test_shardings_on_an_abstract_mesh_lie_on_the_mesh_that_is_given_or_set(self, path):
        save({"w": jnp.ones((8, 8)), "b": jnp.ones(8)}, path)
        mesh = jax.make_mesh((2, 4), ("x", "y"))

        def init():
            return {"w": jnp.zeros((8, 8), out_sharding=P("x", "y")), "b": jnp.zeros(8, out_sharding=P("y"))}

        with jax.set_mesh(mesh):
            like = jax.eval_shape(init)
            loaded = load(path, like=like)
        for found in (loaded, load(path, like=like, mesh=mesh)):
            assert {name: leaf.sharding for name, leaf in found.items()} == {
                "w": NamedSharding(mesh, P("x", "y")),
                "b": NamedSharding(mesh, P("y")),
            }
        assert load(path, like=like, mesh=meshes()[2])["w"].sharding == NamedSharding(
            meshes()[2], P("x", "y")
        )
        with pytest.raises(MismatchError, match=r"pass mesh=, or use jax.set_mesh") as error:
            load(path, like=like)
        assert [problem.split()[1] for problem in error.value.problems] == ["'b'", "'w'"]

    def test_the_abstract_state_of_a_module_says_where_its_arrays_lie(self, path):
        partitioned = nnx.with_partitioning(nnx.initializers.ones_init(), ("x", "y"))
        mesh = jax.make_mesh((2, 4), ("x", "y"))

        def init():
            return nnx.state(nnx.Linear(8, 8, kernel_init=partitioned, rngs=nnx.Rngs(0)))

        with jax.set_mesh(mesh):
            save(init(), path)
            like = nnx.eval_shape(init)
            loaded = load(path, like=like)
        assert loaded["kernel"][...].sharding == NamedSharding(mesh, P("x", "y"))
        assert load(path, like=like, mesh=mesh)["bias"][...].sharding == NamedSharding(mesh, P(None))

    def test_rules_that_match_no_leaf_are_named_in_one_warning(self, path, caplog):
        save({"kernel": jnp.ones(8), "bias": jnp.ones(8), "step": 3}, path)
        rules = [("kernel", P("x")), ("bias", P()), ("step", P()), ("kernal", P("x")), ("^bia$", P())]
        load(path, mesh=meshes()[0], rules=rules, keys="kernel")
        assert [record.getMessage() for record in caplog.records] == [
            "rules= that match no leaf: 'kernal'; '^bia$'; they are searched for in names such as 'bias'"
        ]

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
