"""Where a manager puts what it loads: by the mesh, by shardings and by rules."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from support.backends import Backend, Compressed, OneFile, Safetensors, TensorStore
from support.meshes import grid, line, on, tall
from support.states import state
from support.trees import assert_same


class Shardings(Backend):
    """Which devices an array is on, and how it is cut."""

    def test_loaded_arrays_are_on_the_mesh(self, manager, path):
        manager.save({"w": jnp.ones((8, 4)), "n": jnp.int32(3)}, path)
        loaded, _ = manager.load(path, line())
        assert loaded["w"].sharding == loaded["n"].sharding == on(line())

    def test_without_a_mesh_arrays_are_on_the_default_device(self, manager, path):
        manager.save({"w": jnp.ones((8, 4))}, path)
        for loaded in (manager.load(path, None)[0], manager.load_tree_parallel(path)[0]):
            assert loaded["w"].devices() == {jax.devices()[0]}

    def test_arrays_lie_as_they_were_saved_if_the_mesh_has_their_axes(self, manager, path):
        manager.save({"w": jax.device_put(jnp.ones((8, 8)), on(grid(), "data", "model"))}, path)
        for mesh in (grid(), tall()):
            assert manager.load(path, mesh)[0]["w"].sharding == on(mesh, "data", "model")
        assert manager.load(path, line())[0]["w"].sharding == on(line())

    def test_on_a_mesh_of_several_axes_somebody_has_to_say(self, manager, path):
        manager.save({"a": {"w": jnp.ones((8, 8))}, "s": jnp.float32(1), "n": np.ones(3)}, path, prefix="m")
        with pytest.raises(ValueError, match=r"'a\.w'.*partition_rules.*shardings"):
            manager.load(path, grid())
        loaded, _ = manager.load_pytree(path, grid(), prefix="m")
        assert loaded["a"]["w"].sharding == on(grid())

    def test_numpy_arrays_go_to_the_mesh_too(self, manager, path):
        tree = {"n": np.arange(8, dtype=np.float32), "s": np.array(3, np.int32), "step": 3}
        manager.save(tree, path, prefix="m")
        loaded, _ = manager.load(path, line())
        assert loaded["n"].sharding == loaded["s"].sharding == on(line())
        np.testing.assert_array_equal(loaded["n"], tree["n"])
        assert loaded["step"] == 3
        with pytest.raises(ValueError, match=r"'n'.*partition_rules= or shardings="):
            manager.load(path, grid())
        for template in (None, tree):
            found, _ = manager.load_pytree(path, grid(), prefix="m", template=template)
            assert found["n"].sharding == on(grid())

    def test_numpy_arrays_that_jax_would_cut_stay_numpy_on_a_mesh_with_a_warning(self, manager, path, caplog):
        manager.save({"wide": np.array([2**40]), "w": jnp.ones(8)}, path)
        loaded, _ = manager.load(path, line())
        assert_same(loaded["wide"], np.array([2**40]))
        assert loaded["w"].sharding == on(line())
        assert "1 leaves are returned as numpy arrays" in caplog.text

    def test_the_mesh_of_set_mesh_is_the_default(self, manager, path):
        rows = jax.device_put(jnp.ones((8, 4)), on(grid(), "data"))
        manager.save({"rows": rows, "n": np.ones(8, np.float32)}, path, prefix="m")
        rules = [("rows", P("model"))]
        with jax.set_mesh(grid()):
            for loaded in (
                manager.load(path, None)[0],
                manager.load_tree_parallel(path)[0],
                manager.load_pytree(path, None, prefix="m")[0],
            ):
                assert loaded["rows"].sharding == on(grid(), "data")
                assert loaded["n"].sharding == on(grid())
            ruled, _ = manager.load(path, None, partition_rules=rules)
        assert ruled["rows"].sharding == on(grid(), "model")

    def test_rules_that_match_no_leaf_are_named_in_one_warning(self, manager, path, caplog):
        manager.save({"a": {"kernel": jnp.ones(8)}}, path)
        manager.load(path, line(), partition_rules=[("kernal", P("model")), ("a/kernel", P()), ("bias", P())])
        assert [record.getMessage() for record in caplog.records] == [
            "partition_rules= that match no leaf: 'kernal'; 'bias'; they are searched for in names such as 'a/kernel'"
        ]

    @pytest.mark.parametrize("nested", [False, True])
    def test_shardings_are_flat_or_nested_and_of_every_kind(self, manager, path, nested):
        manager.save(
            {"a": {"w": jnp.ones((8, 8)), "v": jnp.ones(8), "u": jnp.arange(8)}, "b": jnp.ones(8)}, path
        )
        said = {"w": on(line(), None, "model"), "v": P("model"), "u": partial(jnp.multiply, 2)}
        shardings = {"a": said} if nested else {f"a.{key}": value for key, value in said.items()}
        loaded, _ = manager.load(path, line(), shardings)
        assert loaded["a"]["w"].sharding == on(line(), None, "model")
        assert loaded["a"]["v"].sharding == on(line(), "model")
        np.testing.assert_array_equal(loaded["a"]["u"], 2 * np.arange(8))
        assert loaded["b"].sharding == on(line())

    def test_one_sharding_may_be_for_all(self, manager, path):
        manager.save({"a": jnp.ones(8), "b": {"c": jnp.ones((8, 2))}}, path)
        for sharding in (on(grid(), "model"), P("model")):
            loaded, _ = manager.load(path, grid(), sharding)
            assert loaded["a"].sharding == loaded["b"]["c"].sharding == on(grid(), "model")
        assert isinstance(manager.load(path, line(), np.asarray)[0]["b"]["c"], np.ndarray)

    def test_what_needs_a_mesh_says_so(self, manager, path):
        manager.save({"w": jnp.ones(8)}, path)
        for call in (
            lambda: manager.load(path, None, {"w": P("model")}),
            lambda: manager.load(path, None, partition_rules=[("w", P("model"))]),
            lambda: manager.load_tree_parallel(path, {"w": P("model")}),
        ):
            with pytest.raises(ValueError, match=r"need.* a mesh"):
                call()

    def test_lists_have_shardings_by_position(self, manager, path):
        manager.save([jnp.ones(8), (jnp.ones(8), jnp.ones(8))], path)
        rows = on(line(), "model")
        for shardings in ({"0": rows, "1.1": rows}, [rows, (None, rows)]):
            loaded, _ = manager.load(path, line(), shardings)
            assert loaded[0].sharding == loaded[1][1].sharding == rows
            assert loaded[1][0].sharding == on(line())

    def test_a_leaf_without_sharding_is_a_key_error_if_that_is_not_allowed(self, manager, path):
        manager.save({"a": jnp.ones(8), "b": {"c": jnp.ones(8)}, "n": 3}, path)
        rows = on(line(), "model")
        with pytest.raises(KeyError, match=r"'b\.c'"):
            manager.load(path, line(), {"a": rows}, mismatch_allowed=False)
        with pytest.raises(KeyError, match=r"'b\.c'"):
            manager.load_tree_parallel(path, {"a": np.asarray}, mismatch_allowed=False)
        loaded, _ = manager.load(path, line(), {"a": rows, "b": {"c": rows}}, mismatch_allowed=False)
        assert loaded["b"]["c"].sharding == rows
        assert manager.load(path, line(), {"a": rows})[0]["a"].sharding == rows

    def test_a_sharding_of_no_leaf_or_of_no_kind_is_named(self, manager, path):
        manager.save({"kernel": jnp.ones(8)}, path)
        with pytest.raises(ValueError, match=r"'kernels'.*nearest is 'kernel'"):
            manager.load(path, line(), {"kernels": P("model")})
        with pytest.raises(ValueError, match=r"'kernel': 3 is not a Sharding, PartitionSpec or callable"):
            manager.load(path, line(), {"kernel": 3})

    def test_the_example_of_the_documents_works_on_any_tree(self, manager, path):
        manager.save(state() | {"n": np.ones(3, np.float32), "list": [jnp.ones((16, 4))]}, path)
        rules = [(".*kernel", P("model", None))]
        loaded, _ = manager.load(path, grid(), partition_rules=rules)
        assert loaded["block"]["kernel"].sharding == on(grid(), "model", None)
        for leaf in (
            loaded["block"]["bias"],
            loaded["mask"],
            loaded["step"],
            loaded["list"][0],
            loaded["rng"],
        ):
            assert leaf.sharding == on(grid())
        assert loaded["name"] == "run 0"

    def test_the_first_rule_that_is_found_in_the_path_wins(self, manager, path):
        tree = {
            "block": {"kernel": jnp.ones((8, 8)), "out": {"kernel": jnp.ones((8, 8))}},
            "kernel": jnp.ones((8, 8)),
        }
        manager.save(tree, path, prefix="m")
        rules = (("^block/kernel$", P("data")), ("block/.*kernel", P(None, "model")), ("m/|[.]", P("model")))
        for loaded, _ in (
            manager.load(path, grid(), partition_rules=rules),
            manager.load_pytree(path, grid(), prefix="m", partition_rules=list(rules)),
        ):
            assert loaded["block"]["kernel"].sharding == on(grid(), "data")
            assert loaded["block"]["out"]["kernel"].sharding == on(grid(), None, "model")
            assert loaded["kernel"].sharding == on(grid())

    def test_scalars_are_replicated_whatever_the_rule(self, manager, path):
        manager.save({"step": jnp.int32(3), "w": jnp.ones(8)}, path)
        loaded, _ = manager.load(path, grid(), partition_rules=[(".*", P("model"))])
        assert loaded["step"].sharding == on(grid())
        assert loaded["w"].sharding == on(grid(), "model")

    def test_shardings_win_over_rules(self, manager, path):
        manager.save({"a": jnp.ones(8), "b": jnp.ones(8)}, path)
        rules = [(".*", P("model"))]
        loaded, _ = manager.load(path, grid(), {"a": P("data")}, partition_rules=rules)
        assert loaded["a"].sharding == on(grid(), "data")
        assert loaded["b"].sharding == on(grid(), "model")

    def test_specs_that_do_not_fit_are_listed_at_once(self, manager, path):
        manager.save(
            {"odd": jnp.ones(7), "flat": jnp.ones(8), "x": {"axis": jnp.ones(8)}, "fine": jnp.ones(8)}, path
        )
        rules = [
            ("odd", P("model")),
            ("flat", P("data", "model")),
            ("axis", P("stage")),
            ("fine", P("model")),
        ]
        with pytest.raises(ValueError, match="3 mismatches") as error:
            manager.load(path, grid(), partition_rules=rules)
        for name in ("'odd'", "'flat'", "'x.axis'"):
            assert name in str(error.value)
        assert "'fine'" not in str(error.value)

    def test_a_rule_that_is_no_pattern_is_named(self, manager, path):
        manager.save({"w": jnp.ones(8)}, path)
        with pytest.raises(ValueError, match=r"'\(' is not a regular expression"):
            manager.load(path, grid(), partition_rules=[("(", P())])

    @pytest.mark.parametrize("after", [line, grid, tall])
    @pytest.mark.parametrize("before", ["rows", "columns", "2x4", "replicated", "one device"])
    def test_what_was_saved_on_one_mesh_loads_on_others(self, manager, path, before, after):
        saved = {
            "rows": on(line(), "model"),
            "columns": on(line(), None, "model"),
            "2x4": on(grid(), "data", "model"),
            "replicated": on(grid()),
            "one device": SingleDeviceSharding(jax.devices()[3]),
        }[before]
        array = np.arange(16 * 24, dtype=np.float32).reshape(16, 24)
        manager.save({"w": jax.device_put(array, saved)}, path)
        for spec in (P("model"), P(None, "model"), P()):
            loaded = manager.load(path, after(), partition_rules=[("w", spec)])[0]["w"]
            assert loaded.sharding == NamedSharding(after(), spec)
            for shard in loaded.addressable_shards:
                np.testing.assert_array_equal(shard.data, array[shard.index])

    def test_a_parallel_load_takes_functions_and_shardings(self, manager, path):
        manager.save({"a": jnp.ones(8), "b": {"c": jnp.ones(8)}, "d": jnp.arange(3)}, path)
        loaded, _ = manager.load_tree_parallel(path, {"a": np.asarray, "b": {"c": on(line(), "model")}})
        assert isinstance(loaded["a"], np.ndarray)
        assert loaded["b"]["c"].sharding == on(line(), "model")
        np.testing.assert_array_equal(loaded["d"], np.arange(3))

    def test_the_shardings_of_a_load_may_name_the_prefix(self, manager, path):
        manager.save({"a": {"w": jnp.ones(8)}}, path, prefix="m")
        rows = on(line(), "model")
        for shardings in ({"m.a.w": rows}, {"m": {"a": {"w": rows}}}):
            assert manager.load(path, line(), shardings, prefix="m")[0]["a"]["w"].sharding == rows


class TestTensorStore(TensorStore, Shardings):
    pass


@pytest.mark.sample(5)
class TestCompressed(Compressed, Shardings):
    pass


@pytest.mark.sample(3)
class TestSafetensors(Safetensors, Shardings):
    pass


@pytest.mark.sample(5)
class TestOneFile(OneFile, Shardings):
    pass
