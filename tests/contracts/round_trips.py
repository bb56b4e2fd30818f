"""Every tree, leaf and dtype comes back as it was; what cannot be stored is refused."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.base import Contract
from eformer import checkpoint
from eformer.checkpoint import load, save
from eformer.errors import LeafError, NotFoundError
from support.meshes import layouts, meshes
from support.states import model
from support.thorough import IS_THOROUGH
from support.trees import DTYPES, Layer, Moments, Pair, any_trees, arrays, assert_same, scalars

JAX_DTYPES = [
    jnp.bool_, jnp.int4, jnp.uint4, jnp.int2, jnp.uint2, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32,
    jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3b11fnuz,
    jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz, jnp.float8_e3m4, jnp.float8_e4m3, jnp.float8_e8m0fnu, jnp.float4_e2m1fn,
]  # fmt: skip


INHERITED = [
    HealthCheck.differing_executors,
    HealthCheck.too_slow,
]  # each layout runs the property on its own
EXAMPLES = settings.default.max_examples // (2 if IS_THOROUGH else 4)  # there are more than ten layouts


class RoundTrips(Contract):
    """What is saved is what is loaded."""

    # --------------------------------------------------------------------------------------- round trips

    def test_a_training_state_comes_back_as_it_was(self, path):
        assert save(model(), path) == str(path)
        assert_same(load(path), model())

    def test_numpy_arrays_of_every_dtype_come_back_as_numpy_arrays(self, path):
        tree = {}
        for dtype in DTYPES:
            bits = np.random.default_rng(0).integers(0, 2, (33, 7, dtype.itemsize), np.uint8)
            tree[str(dtype)] = {
                "a": bits.view(dtype)[..., 0],
                "empty": np.zeros((0, 3), dtype),
                "single": bits.view(dtype)[0, 0],
            }
        save(tree, path)
        assert_same(load(path), tree)

    def test_jax_arrays_of_every_dtype_come_back_as_jax_arrays(self, path):
        tree = {}
        for dtype in map(np.dtype, JAX_DTYPES):
            host = np.random.default_rng(0).integers(0, 2, (33, 7)).astype(dtype)
            arrays = {"a": host, "empty": np.zeros((0, 3), dtype), "single": host[0, 0]}
            tree[dtype.name] = {name: jnp.asarray(array) for name, array in arrays.items()}
        save(tree, path)
        assert_same(load(path), tree)

    def test_arrays_of_every_layout_and_byte_order_come_back_with_their_values(self, path):
        a = np.arange(2 * 300, dtype=np.float32).reshape(20, 30)
        views = {"t": a.T, "f": np.asfortranarray(a), "strided": a[::3, ::2], "reversed": a[::-1], "big": a.astype(">f4"),
                 "broadcast": np.broadcast_to(a[0], (40, 30)), "block": a[3:5, 7:9]}  # fmt: skip
        save(views, path)
        loaded = load(path)
        for name, view in views.items():
            np.testing.assert_array_equal(loaded[name], view)
            assert loaded[name].dtype == np.float32

    def test_weakly_typed_arrays_come_back_weakly_typed(self, path, mapping):
        tree = {
            "rate": jnp.asarray(0.1),
            "step": jnp.asarray(3),
            "phase": jnp.asarray(1j),
            "rows": jax.device_put(jnp.full((8, 2), 0.1), layouts()["rows"]),
            "strong": jnp.float32(0.1),
            "key": jax.random.key(0),
        }
        save(tree, path)
        for loaded in (
            load(path),
            load(path, mesh=meshes()[0]),
            load(path, **mapping),
            load(path, options={"batch": 1}),
        ):
            assert_same(loaded, tree)
            weak = {name for name, leaf in loaded.items() if getattr(leaf, "weak_type", False)}
            assert weak == {"rate", "step", "phase", "rows"}
        on_mesh = load(path, mesh=meshes()[0])
        assert on_mesh["rows"].aval == tree["rows"].aval
        assert on_mesh["rows"].sharding == layouts()["rows"]

    def test_a_cast_makes_weakly_typed_arrays_strong(self, path):
        save({"rate": jnp.asarray(0.5), "step": jnp.asarray(3)}, path)
        assert {n: leaf.weak_type for n, leaf in load(path, dtype="bf16").items()} == {
            "rate": False,
            "step": True,
        }
        save({"rate": jnp.asarray(0.5)}, path, options=dataclasses.replace(self.options, dtype="bf16"))
        assert not load(path)["rate"].weak_type

    def test_a_resumed_step_is_neither_compiled_again_nor_promoted(self, path):
        compiled = []

        @jax.jit
        def step(state):
            compiled.append(state)
            return state | {"w": state["w"] * state["rate"], "count": state["count"] + 1}

        start = {"w": jnp.ones(8, jnp.bfloat16), "rate": jnp.asarray(0.5), "count": jnp.asarray(0)}
        state = step(start)
        save(state, path)
        for resumed in (load(path), load(path, like=start), load(path, like=jax.eval_shape(lambda: start))):
            assert jax.tree.map(jax.typeof, resumed) == jax.tree.map(jax.typeof, state)
            assert step(resumed)["w"].dtype == jnp.bfloat16
        assert len(compiled) == 1

    def test_with_like_arrays_are_as_weakly_typed_as_its_own(self, path):
        save(
            {"strong": jnp.float32(0.5), "weak": jnp.asarray(0.5), "plain": 0.5, "same": jnp.asarray(0.5)},
            path,
        )
        like = {"strong": jnp.asarray(0.0), "weak": jnp.float32(0), "plain": jnp.asarray(0.0)}
        like["same"] = layouts()["replicated"]
        loaded = load(path, like=like)
        assert {name: leaf.weak_type for name, leaf in loaded.items()} == {
            "strong": True,
            "weak": False,
            "plain": True,
            "same": True,
        }

    def test_typed_keys_continue_the_same_stream(self, path):
        keys = {"one": jax.random.key(7), "many": jax.random.split(jax.random.key(1), (2, 4)),
                "other": jax.random.key(3, impl="rbg")}  # fmt: skip
        save(keys, path)
        loaded = load(path)
        assert_same(loaded, keys)
        assert jax.random.normal(loaded["one"]) == jax.random.normal(keys["one"])

    @given(tree=any_trees)
    @settings(max_examples=EXAMPLES, suppress_health_check=INHERITED)
    def test_every_tree_of_containers_comes_back(self, tmp_path_factory, tree):
        checkpoint.register_node(Moments)
        path = self.place(tmp_path_factory.mktemp("tree"))
        try:
            save(tree, path)
        except ValueError as error:  # JAX itself cannot sort some dicts
            assert "sort the keys" in str(error)  # noqa: PT017
            return
        treedef = jax.tree.structure(tree)
        loaded = load(path, like=tree)
        assert jax.tree.structure(loaded) == treedef
        assert jax.tree.leaves(loaded) == jax.tree.leaves(tree)

    @given(leaves=st.lists(arrays() | scalars, max_size=6))
    @settings(max_examples=EXAMPLES, suppress_health_check=INHERITED)
    def test_every_leaf_comes_back_bit_for_bit(self, tmp_path_factory, leaves):
        path = self.place(tmp_path_factory.mktemp("leaves"))
        save(leaves, path)
        assert_same(
            load(path),
            [np.ascontiguousarray(x).reshape(x.shape) if isinstance(x, np.ndarray) else x for x in leaves],
        )

    def test_names_that_read_alike_do_not_meet(self, path):
        tree = {
            "a.b": np.ones(2),
            "a": {"b": np.zeros(3)},
            "c": collections.OrderedDict([(1, np.ones(1)), ("1", np.zeros(1))]),
        }
        save(tree, path)
        assert_same(load(path), tree)

    def test_containers_of_every_kind_come_back(self, path):
        checkpoint.register_node(Moments)
        tree = {
                "l": [], "t": (), "d": {}, "none": None, "layer": Layer(jnp.ones(3), None, "static"),
                "pair": Pair(np.ones(2), 3, "tag"), "m": Moments(1, (2.5, True)), "s": {"x": np.float32(2), "b": b"raw"}}  # fmt: skip
        save(tree, path)
        assert_same(load(path), tree)

    @pytest.mark.parametrize("tree", [{}, None, [], 3, "text", np.arange(3), {"a": None}], ids=repr)
    def test_the_smallest_trees_come_back(self, path, tree):
        save(tree, path)
        assert_same(load(path), tree)

    def test_metadata_comes_back(self, path):
        metadata = {"step": 7, "config": {"lr": 1e-3, "layers": (1, 2)}, "note": "é", "none": None}
        save(model(), path, metadata=metadata)
        assert checkpoint.inspect(path).trees[""].metadata == metadata
        with pytest.raises(LeafError, match=r"'f'.*function"):
            save(model(), path, metadata={"f": lambda: 0})

    def test_a_leaf_may_be_called_anything(self, path):
        tree = {
            "data_offsets": np.ones(3),
            "__metadata__": np.zeros(2),
            "dtype": 3,
            "digest": "x",
            "manifest": np.ones(1),
        }
        for _ in range(2):
            save(tree, path)
            assert_same(load(path), tree)

    # ------------------------------------------------------------------------------------------ refusals

    def test_a_leaf_that_cannot_be_stored_is_named_and_nothing_is_written(self, path):
        save(model(), path)
        for leaf, message in [(object(), "builtins.object"), (np.array(["a"]), "<U1"), (np.array([{}]), "object"),
                              (np.ma.masked_array([1], [True]), "mask")]:  # fmt: skip
            with pytest.raises(LeafError, match=f"(?s)'layers.0'.*{message}"):
                save({"layers": [leaf]}, path)
        assert_same(load(path), model())

    def test_a_traced_or_deleted_array_is_named(self, path):
        with pytest.raises(LeafError, match=r"'w'.*traced"):
            jax.jit(lambda x: save({"w": x}, path))(jnp.ones(3))
        gone = jnp.ones(3)
        jax.jit(lambda x: x + 1, donate_argnums=0)(gone)
        with pytest.raises(LeafError, match=r"leaf 'w': the array was deleted, probably donated"):
            save({"w": gone}, path)
        key = jax.random.key(0)
        key.delete()
        with pytest.raises(LeafError, match=r"leaves 'k'; 'w': the arrays were deleted, probably donated"):
            checkpoint.save_async({"w": gone, "k": key, "x": jnp.ones(3)}, path)

    def test_nothing_at_the_path_is_file_not_found(self, path):
        with pytest.raises(FileNotFoundError, match="no checkpoint at"):
            load(path)
        self.make_surroundings(path)
        with pytest.raises(NotFoundError):
            checkpoint.verify(path)

    def test_an_address_is_not_taken_for_a_path(self):
        for call in (lambda: save({}, "ftp://host/x"), lambda: load("ipfs://x")):
            with pytest.raises(ValueError, match="is a URL of an unknown kind"):
                call()

    def test_prefixes_and_paths_that_cannot_be_are_refused_at_once(self, path):
        for prefix in ("x" * 300, "\ud800"):
            with pytest.raises(ValueError, match="prefix="):
                save({}, path, prefix=prefix)
        with pytest.raises(TypeError, match="a prefix is text"):
            save({}, path, prefix=0)
        for call in (lambda: save({}, ""), lambda: load("")):
            with pytest.raises(ValueError, match="path is empty"):
                call()
        assert not self.exists(path)
