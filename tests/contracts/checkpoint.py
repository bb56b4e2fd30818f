"""What every layout of every format does. A layout inherits the class and says where it is saved."""

from __future__ import annotations

import collections
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer.checkpoint import SaveOptions, load, save, save_async
from eformer.errors import CorruptionError, LeafError, MismatchError, NotFoundError, StructureError
from support.trees import (
    DTYPES,
    HOSTILE,
    Layer,
    Moments,
    Pair,
    Unregistered,
    any_trees,
    arrays,
    assert_same,
    scalars,
)

JAX_DTYPES = [
    jnp.bool_, jnp.int4, jnp.uint4, jnp.int2, jnp.uint2, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32,
    jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3b11fnuz,
    jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz, jnp.float8_e3m4, jnp.float8_e4m3, jnp.float8_e8m0fnu, jnp.float4_e2m1fn,
]  # fmt: skip


INHERITED = [
    HealthCheck.differing_executors,
    HealthCheck.too_slow,
]  # each layout runs the property on its own


def meshes():
    devices = np.array(jax.devices())
    return (
        Mesh(devices, ("x",)),
        Mesh(devices.reshape(2, 4), ("x", "y")),
        Mesh(devices.reshape(4, 2), ("x", "y")),
    )


def in_every_form(numbers):
    """Numbers as jax arrays, numpy arrays, scalars of numpy, and plain: all of the same values."""
    on_devices = jax.tree.map(jnp.asarray, numbers)
    on_host = jax.tree.map(np.asarray, on_devices)
    scalars = jax.tree.map(lambda array: array[()], on_host)
    return on_devices, on_host, scalars, jax.tree.map(lambda scalar: scalar.item(), scalars)


def layouts():
    line, wide, tall = meshes()
    return {
        "rows": NamedSharding(line, P("x")),
        "columns": NamedSharding(line, P(None, "x")),
        "2x4": NamedSharding(wide, P("x", "y")),
        "4x2 turned": NamedSharding(tall, P("y", "x")),
        "rows by both": NamedSharding(wide, P(("x", "y"))),
        "replicated": NamedSharding(line, P()),
        "one device": jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    }


def model(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "embed": jax.random.normal(keys[0], (64, 16), jnp.bfloat16),
        "layers": [{"b": jnp.arange(24.0), "w": jax.random.normal(k, (16, 24))} for k in keys[1:3]],
    }
    return {
        "params": params,
        "optimizer": optax.adam(1e-3).init(params),
        "rng": keys[3],
        "step": seed,
        "name": "x",
    }


class CheckpointContract:
    @pytest.fixture
    def path(self, tmp_path):
        raise NotImplementedError

    # How every tree is saved, unless a test says something else.
    format = "safetensors"
    options = SaveOptions()
    # What can fail in the middle of a save: while data is written, and right before the commit.
    steps = ("write.xxh3_128", "safetensors_writer.write_headers")

    @pytest.fixture(autouse=True)
    def saved_so(self, monkeypatch):
        for function in (save, save_async):
            defaults = {**function.__kwdefaults__, "format": self.format, "options": self.options}
            monkeypatch.setattr(function, "__kwdefaults__", defaults)

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch):
        """So that small arrays have many digests, and reads begin and end inside of them."""
        monkeypatch.setattr("eformer._engine.saving.save.PIECE_BYTES", 256)

    # ------------------------------------------------------------------------------------ round trips

    def test_a_training_state_comes_back_as_it_was(self, path):
        assert save(model(), path) == str(path)
        assert_same(load(path), model())

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_numpy_arrays_of_every_dtype_come_back_as_numpy_arrays(self, path, dtype):
        rng = np.random.default_rng(0)
        bits = rng.integers(0, 2, (33, 7, dtype.itemsize), np.uint8)
        if dtype.kind == "b" or (dtype.name.startswith(("int1", "uint1")) and dtype.itemsize == 1):
            bits[...] &= 1
        tree = {
            "a": bits.view(dtype)[..., 0],
            "empty": np.zeros((0, 3), dtype),
            "single": bits.view(dtype)[0, 0],
        }
        save(tree, path)
        assert_same(load(path), tree)

    @pytest.mark.parametrize("dtype", JAX_DTYPES, ids=lambda d: np.dtype(d).name)
    def test_jax_arrays_of_every_dtype_come_back_as_jax_arrays(self, path, dtype):
        host = np.random.default_rng(0).integers(0, 2, (33, 7)).astype(np.dtype(dtype))
        tree = {"a": jnp.asarray(host), "empty": jnp.zeros((0, 3), dtype), "single": jnp.asarray(host[0, 0])}
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

    def test_typed_keys_continue_the_same_stream(self, path):
        keys = {"one": jax.random.key(7), "many": jax.random.split(jax.random.key(1), (2, 4)),
                "other": jax.random.key(3, impl="rbg")}  # fmt: skip
        save(keys, path)
        loaded = load(path)
        assert_same(loaded, keys)
        assert jax.random.normal(loaded["one"]) == jax.random.normal(keys["one"])

    @given(tree=any_trees)
    @settings(max_examples=25, suppress_health_check=INHERITED)
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
    @settings(max_examples=50, suppress_health_check=INHERITED)
    def test_every_leaf_comes_back_bit_for_bit(self, tmp_path_factory, leaves):
        path = self.place(tmp_path_factory.mktemp("leaves"))
        save(leaves, path)
        assert_same(
            load(path),
            [np.ascontiguousarray(x).reshape(x.shape) if isinstance(x, np.ndarray) else x for x in leaves],
        )

    def test_hostile_names_come_back_and_stay_inside(self, path):
        tree = {key: np.full(3, i) for i, key in enumerate(HOSTILE)}
        before = sorted(path.parent.parent.rglob("*"))
        save(tree, path)
        assert_same(load(path), tree)
        outside = {p for p in path.parent.parent.rglob("*") if path not in (p, *p.parents)}
        assert outside <= {*before, path.parent}

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

    # --------------------------------------------------------------------------------------- refusals

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
        gone.delete()
        with pytest.raises(RuntimeError) as error:
            save({"w": gone}, path)
        assert "'w'" in str(error.value.__notes__)

    def test_nothing_at_the_path_is_file_not_found(self, path):
        with pytest.raises(FileNotFoundError, match="nothing at"):
            load(path)
        path.parent.mkdir(exist_ok=True)
        with pytest.raises(NotFoundError):
            checkpoint.verify(path)

    def test_an_address_is_not_taken_for_a_path(self):
        for call in (lambda: save({}, "gs://bucket/x"), lambda: load("s3://bucket/x")):
            with pytest.raises(ValueError, match="no path of this machine"):
                call()

    # ------------------------------------------------------------------------------------------- like

    @pytest.mark.parametrize("describe", [lambda x: x, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)])
    def test_like_gives_the_structure(self, path, describe):
        tree = {
            "a": jnp.ones((3, 4)),
            "b": (jnp.zeros(2, jnp.int32), Moments(jnp.ones(1), 5)),
            "k": jax.random.key(0),
        }
        save(tree, path)
        like = jax.tree.map(lambda x: describe(x) if hasattr(x, "dtype") else x, tree)
        assert_same(load(path, like=like), tree)

    def test_like_takes_shardings(self, path):
        rows = layouts()["rows"]
        save({"w": jnp.arange(64.0).reshape(8, 8), "n": 3}, path)
        loaded = load(path, like={"w": rows, "n": 0})
        assert loaded["w"].sharding == rows
        np.testing.assert_array_equal(loaded["w"], np.arange(64.0).reshape(8, 8))

    def test_like_chooses_between_numpy_and_jax(self, path):
        save({"a": jnp.ones(3), "b": np.ones(3, np.float32)}, path)
        loaded = load(path, like={"a": np.zeros(3, np.float32), "b": jnp.zeros(3)})
        assert isinstance(loaded["a"], np.ndarray)
        assert isinstance(loaded["b"], jax.Array)

    def test_every_mismatch_is_reported_at_once_with_the_nearest_name(self, path):
        save(
            {
                "layers": {"w": jnp.ones((2, 3)), "b": jnp.ones(3), "n": 1, "k": jax.random.key(0)},
                "old": jnp.ones(1),
            },
            path,
        )
        like = {
            "layers": {
                "w": jnp.ones((3, 2)),
                "b": jnp.ones(3, jnp.int32),
                "n": jnp.ones(1),
                "k": jnp.ones(1),
            },
            "olds": 0,
        }
        with pytest.raises(MismatchError) as error:
            load(path, like=like)
        text = "\n".join(error.value.problems)
        assert len(error.value.problems) == 6
        for part in ["missing leaf 'olds' (nearest is 'old')", "unexpected leaf 'old'", "'layers.w': expected float32[3, 2], found float32[2, 3]",
                     "'layers.b': expected int32[3], found float32[3]", "'layers.n': expected float32[1], found the int 1",
                     "'layers.k': expected float32[1], found key<fry>[]"]:  # fmt: skip
            assert part in text

    def test_mismatches_are_found_before_data_is_read(self, path, monkeypatch):
        save(model(), path)
        monkeypatch.setattr("eformer._engine.loading.read.prepare", None)
        with pytest.raises(MismatchError):
            load(path, like={"a": 1})

    def test_plain_values_are_compared_by_kind(self, path):
        save({"n": 3, "t": "text", "yes": True}, path)
        assert load(path, like={"n": 0, "t": "", "yes": False}) == {"n": 3, "t": "text", "yes": True}
        with pytest.raises(MismatchError) as error:
            load(path, like={"n": 0.5, "t": 1, "yes": 1})
        assert list(error.value.problems) == [
            "leaf 'n': expected a plain float such as 0.5, found the int 3",
            "leaf 't': expected a plain int such as 1, found the str 'text'",
            "leaf 'yes': expected a plain int such as 1, found the bool True",
        ]

    def test_numbers_and_arrays_without_axes_are_what_like_has(self, path):
        numbers = in_every_form({"b": True, "c": 1 - 0.5j, "f": -0.5, "i": 7, "s": np.float32(0.1)})
        zeros = in_every_form({"b": False, "c": 0j, "f": 0.0, "i": 0, "s": np.float32(0)})
        for stored in numbers:
            save(stored, path)
            for like, expected in zip(zeros, numbers, strict=True):
                assert_same(load(path, like=like), expected)

    def test_an_array_made_of_a_number_lies_where_it_is_said(self, path):
        save({"step": 7, "w": jnp.ones(8)}, path)
        _, wide, _ = meshes()
        like = {"step": jax.ShapeDtypeStruct((), jnp.int32), "w": jnp.ones(8)}
        everywhere = NamedSharding(wide, P())
        for said in (
            {"like": like, "mesh": wide, "shardings": {"w": P("x")}},
            {"like": like, "mesh": wide, "rules": [("w", P("x"))]},
            {"like": like, "shardings": {"step": everywhere}},
            {"like": like | {"step": jax.device_put(jnp.int32(0), everywhere)}},
            {"like": like, "mesh": wide, "shardings": {"w": P("x")}, "mmap": True},
        ):
            step = load(path, **said)["step"]
            assert (int(step), step.sharding) == (7, everywhere)
        seen = []
        load(path, like=like, batch=1, callback=lambda array, name: seen.append((name, array.dtype)) or array)
        assert sorted(seen) == [("step", jnp.int32), ("w", jnp.float32)]

    def test_a_number_made_of_an_array_lies_nowhere(self, path):
        save({"step": jnp.int32(7), "w": jnp.ones(8)}, path)
        like = {"step": 0, "w": jnp.ones(8)}
        line, *_ = meshes()
        for said in (
            {},
            {"mesh": line},
            {"shardings": NamedSharding(line, P())},
            {"mmap": True},
            {"verify": False},
        ):
            assert type(load(path, like=like, **said)["step"]) is int

    def test_a_number_that_does_not_fit_is_shown_with_what_it_should_be(self, path):
        save(
            {
                "big": 2**31,
                "half": np.float16(1),
                "kind": 3,
                "long": 3,
                "tenth": 0.1,
                "array": jnp.float32(1),
            },
            path,
        )
        int32, float32 = jnp.int32(0), jnp.float32(0)
        like = {
            "big": int32,
            "half": float32,
            "kind": float32,
            "long": jnp.ones(1),
            "tenth": float32,
            "array": 1,
        }
        with pytest.raises(MismatchError) as error:
            load(path, like=like)
        assert sorted(error.value.problems) == [
            "leaf 'array': expected a plain int such as 1, found float32[]",
            "leaf 'big': expected int32[], found the int 2147483648, which int32 cannot hold exactly",
            "leaf 'half': expected float32[], found the float16 1.0; dtype= casts",
            "leaf 'kind': expected float32[], found the int 3",
            "leaf 'long': expected float32[1], found the int 3",
            "leaf 'tenth': expected float32[], found the float 0.1, which float32 cannot hold exactly; dtype= casts",
        ]
        some = {"half": float32, "tenth": np.float32(0)}
        cast = load(path, keys=list(some), like=some, dtype="float32")
        assert_same(cast, {"half": jnp.float32(1), "tenth": np.float32(0.1)})

    def test_a_cast_is_suggested_where_it_would_help(self, path):
        save({"w": jnp.ones(3)}, path)
        with pytest.raises(MismatchError, match=r"expected bfloat16\[3\], found float32\[3\]; dtype= casts"):
            load(path, like={"w": jnp.ones(3, jnp.bfloat16)})

    def test_a_class_that_cannot_be_built_is_refused_before_data_is_read(self, path, monkeypatch):
        save(Unregistered(jnp.ones(3)), path)
        monkeypatch.setattr("eformer._engine.loading.read.prepare", None)
        with pytest.raises(StructureError, match=r"Unregistered.*like="):
            load(path)

    # ------------------------------------------------------------------------------------------- keys

    def test_keys_select_leaves_subtrees_and_patterns(self, path):
        save(model(), path)
        assert list(load(path, keys="step")) == ["step"]
        assert list(load(path, keys=["params.layers"])) == [
            f"params.layers.{i}.{n}" for i in (0, 1) for n in ("b", "w")
        ]
        assert list(load(path, keys=["params.*.w", "name"])) == [
            "params.layers.0.w",
            "params.layers.1.w",
            "name",
        ]
        np.testing.assert_array_equal(
            load(path, keys="params.embed")["params.embed"], model()["params"]["embed"]
        )
        with pytest.raises(MismatchError, match=r"'param'.*nearest"):
            load(path, keys=["param"])

    def test_keys_may_come_one_by_one(self, path):
        save({"a": 1, "b": 2}, path)
        assert load(path, keys=(key for key in "ab")) == {"a": 1, "b": 2}

    def test_keys_narrow_what_like_is_compared_with(self, path):
        save(model(), path)
        assert_same(
            load(path, keys="params", like={"params": model()["params"]}), {"params": model()["params"]}
        )

    # ------------------------------------------------------------------------------------------ dtype

    @pytest.mark.parametrize("dtype", ["bf16", jnp.bfloat16, np.dtype("bfloat16"), "bfloat16"], ids=str)
    def test_dtype_casts_floating_leaves_only(self, path, dtype):
        tree = {
            "f": jnp.linspace(0, 1, 99),
            "i": jnp.arange(3),
            "b": jnp.ones(2, bool),
            "k": jax.random.key(0),
            "n": np.ones(3),
        }
        save(tree, path)
        loaded = load(path, dtype=dtype)
        expected = tree | {"f": tree["f"].astype(jnp.bfloat16), "n": tree["n"].astype(ml_dtypes.bfloat16)}
        assert_same(loaded, expected)

    def test_a_save_can_cast_too(self, path):
        tree = {
            "f": jnp.linspace(0, 1, 999),
            "i": jnp.arange(3),
            "s": jax.device_put(jnp.linspace(0, 1, 64), layouts()["rows"]),
        }
        save(tree, path, options=dataclasses.replace(self.options, dtype="bf16"))
        loaded = load(path)
        for name in "fs":
            np.testing.assert_array_equal(loaded[name], tree[name].astype(jnp.bfloat16))
        assert loaded["i"].dtype == jnp.int32

    def test_an_unknown_dtype_is_refused_with_the_known(self, path):
        save(model(), path)
        for dtype in ("int8", "nonsense", 3):
            with pytest.raises(ValueError, match=r"not a floating dtype.*bfloat16"):
                load(path, dtype=dtype)

    def test_like_is_compared_with_what_dtype_makes(self, path):
        save({"a": jnp.ones(3)}, path)
        assert load(path, dtype="bf16", like={"a": jnp.ones(3, jnp.bfloat16)})["a"].dtype == jnp.bfloat16

    def test_64_bit_leaves_never_narrow(self, path, caplog):
        with jax.enable_x64(True):
            wide = {"a": jnp.array([2**40 + 5]), "f": jnp.array([1e300])}
            save(wide, path)
        loaded = load(path)
        assert isinstance(loaded["a"], np.ndarray)
        assert loaded["a"][0] == 2**40 + 5
        assert loaded["f"][0] == 1e300
        assert "2 leaves are returned as numpy arrays" in caplog.text
        with pytest.raises(MismatchError, match="'a' is int64"):
            load(path, shardings=layouts()["replicated"])

    # -------------------------------------------------------------------------------------- shardings

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
        with pytest.raises(ValueError, match=r"'w'.*no sharding is said.*rules= or shardings="):
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
        with pytest.raises(ValueError, match="no regular expression"):
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
        with pytest.raises(MismatchError, match=r"'a.w'.*no Sharding"):
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

    # ------------------------------------------------------------------------------------ overwriting

    def test_a_save_replaces_the_one_before_whatever_its_shapes(self, path):
        for tree in (model(0), {"w": jnp.ones((7, 5))}, {"w": jnp.ones(3), "v": 1}, {}, model(1)):
            save(tree, path)
            assert_same(load(path), tree)
            assert checkpoint.verify(path).ok

    def test_a_failed_save_leaves_the_one_before(self, path, monkeypatch):
        save(model(0), path)
        files = sorted(path.parent.rglob("*"))
        for name in self.steps:
            with monkeypatch.context() as patch:
                patch.setattr(f"eformer._engine.saving.{name}", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    save(model(1), path)
            assert_same(load(path), model(0))
            assert sorted(path.parent.rglob("*")) == files

    # ------------------------------------------------------------------------------------------ async

    def test_after_save_async_returns_arrays_may_be_donated_deleted_and_changed(self, path):
        rows = layouts()["rows"]
        tree = {"donated": jnp.arange(5000.0), "deleted": jnp.arange(5000.0), "n": np.arange(5000.0), "list": [1, 2],
                "sharded": jax.device_put(jnp.arange(64.0), rows), "i4": jnp.ones(99, jnp.int4)}  # fmt: skip
        expected = jax.tree.map(lambda x: np.array(x) if hasattr(x, "dtype") else x, tree)
        pending = save_async(tree, path)
        jax.jit(lambda x: x * 0, donate_argnums=0)(tree["donated"])
        jax.jit(lambda x: x * 0, donate_argnums=0)(tree["sharded"])
        tree["deleted"].delete()
        tree["n"][:] = 0
        tree["list"].append(3)
        assert pending.result() == str(path)
        assert_same(jax.tree.map(lambda x: np.array(x) if hasattr(x, "dtype") else x, load(path)), expected)

    def test_saves_to_one_path_commit_in_the_order_they_were_called(self, path):
        pending = [save_async({"step": i, "w": np.full(100_000 if i % 2 else 3, i)}, path) for i in range(8)]
        assert pending[-1].result()
        assert load(path)["step"] == 7
        assert all(p.result() for p in pending)

    def test_a_relative_path_stays_where_it_was(self, path, monkeypatch):
        path.parent.mkdir(exist_ok=True)
        monkeypatch.chdir(path.parent)
        pending = save_async({"w": np.ones(100_000)}, path.name)
        monkeypatch.chdir("/")
        assert pending.result() == path.name
        assert load(path)["w"].shape == (100_000,)

    def test_prefixes_and_paths_that_cannot_be_are_refused_at_once(self, path):
        for prefix in ("x" * 300, "\ud800"):
            with pytest.raises(ValueError, match="prefix="):
                save({}, path, prefix=prefix)
        with pytest.raises(TypeError, match="a prefix is text"):
            save({}, path, prefix=0)
        for call in (lambda: save({}, ""), lambda: load("")):
            with pytest.raises(ValueError, match="path is empty"):
                call()
        assert not path.exists()

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

    # ------------------------------------------------------------------------------------- corruption

    def name_in_errors(self, file):
        return file.name

    def position_in_errors(self, at):
        return at

    def test_a_flipped_bit_in_the_data_is_found_and_named(self, path):
        save({"good": jnp.ones(96), "bad": jnp.arange(1000.0)}, path)
        file = self.data_file(path)
        data = bytearray(file.read_bytes())
        at = data.find(np.arange(700.0, 740.0, dtype=np.float32).tobytes())
        data[at] ^= 1
        file.write_bytes(data)
        for call in (lambda: load(path), lambda: load(path, shardings=layouts()["rows"]), lambda: load(path, keys="bad"),
                     lambda: checkpoint.open(path)["bad"][699:701]):  # fmt: skip
            with pytest.raises(
                CorruptionError,
                match=rf"'bad': bytes \d+ to \d+ of \S*{self.name_in_errors(file)} are damaged",
            ):
                call()
        np.testing.assert_array_equal(load(path, keys="good")["good"], np.ones(96))
        np.testing.assert_array_equal(checkpoint.open(path)["bad"][:100], np.arange(100.0))
        assert load(path, verify=False)["bad"].shape == (1000,)
        (damage,) = checkpoint.verify(path).damages
        assert damage.leaf == "bad"
        assert damage.start <= self.position_in_errors(at) < damage.stop

    def test_a_file_cut_short_is_found_and_named(self, path):
        save({"w": np.arange(1000.0)}, path)
        file = self.data_file(path)
        file.write_bytes(file.read_bytes()[:-8])
        with pytest.raises(CorruptionError, match=r"'w'.*cut short"):
            load(path)
        assert not checkpoint.verify(path).ok


class DirectoryContract(CheckpointContract):
    """What a directory does beyond one file: it holds a tree for each prefix."""

    def test_several_prefixes_live_in_one_directory(self, path):
        trees = {
            None: {"a": np.ones(3)},
            "model": {"w": jnp.ones((2, 3)), "n": 3},
            "opt": optax.adam(1.0).init({"w": jnp.ones(2)}),
            "odd/../name.x": {"w": np.zeros(2)},
            "odd%2F": {},
        }
        for prefix, tree in trees.items():
            save(tree, path, prefix=prefix, metadata={"of": str(prefix)})
        trees["opt"] = {"w": np.arange(5)}
        save(trees["opt"], path, prefix="opt", metadata={"of": "opt"})
        for prefix, tree in trees.items():
            assert_same(load(path, prefix=prefix), tree)
            assert checkpoint.inspect(path).trees[prefix or ""].metadata == {"of": str(prefix)}
        assert checkpoint.verify(path).ok

    def test_an_unknown_prefix_lists_the_known(self, path):
        for prefix in ("model", "opt"):
            save({"w": np.ones(1)}, path, prefix=prefix)
        expected = r"no prefix 'optt' \(nearest is 'opt'\); available are \['model', 'opt'\]"
        with pytest.raises(ValueError, match=expected):
            load(path, prefix="optt")
        with pytest.raises(ValueError, match=r"several trees; pass prefix=, one of \['model', 'opt'\]"):
            load(path)

    def test_the_only_prefix_need_not_be_said(self, path):
        save({"w": 1}, path, prefix="only")
        assert load(path) == {"w": 1}

    def test_a_prefix_may_be_called_like_a_leaf_and_a_leaf_like_a_file_of_the_format(self, path):
        tree = {
            name: np.full(2, i)
            for i, name in enumerate(["model", "tree", "0", "0.0", ".zarray", "data", "d"])
        }
        for prefix in (None, "model", "tree", "0", ".zarray", "manifest.json", "tensorstore_index.json"):
            for number in (1, 2):
                save(tree | {"n": number}, path, prefix=prefix)
                assert_same(load(path, prefix=prefix or ""), tree | {"n": number})

    def test_a_damaged_prefix_harms_no_other(self, path):
        save({"w": np.arange(1000.0)}, path, prefix="bad")
        file = self.data_file(path)
        save({"w": np.ones(3)}, path, prefix="good")
        file.write_bytes(file.read_bytes()[:-8])
        assert_same(load(path, prefix="good"), {"w": np.ones(3)})
        with pytest.raises(CorruptionError):
            load(path, prefix="bad")

    def test_concurrent_saves_of_different_prefixes_keep_all(self, path):
        def work(i):
            for n in range(5):
                save({"w": np.full(100, i + n)}, path, prefix=f"p{i}")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        for i in range(8):
            assert load(path, prefix=f"p{i}")["w"][0] == i + 4
        assert checkpoint.verify(path).ok

    def test_a_reader_always_sees_one_whole_checkpoint(self, path):
        save({f"w{i}": np.full(1000, 0) for i in range(20)}, path)

        def write():
            for n in range(1, 30):
                save({f"w{i}": np.full(1000, n) for i in range(20)}, path)

        with ThreadPoolExecutor(1) as pool:
            writer, seen = pool.submit(write), []
            while not writer.done():
                tree = load(path)
                values = {int(x) for leaf in tree.values() for x in (leaf.min(), leaf.max())}
                assert len(values) == 1
                seen += values
                assert checkpoint.verify(path).ok
        writer.result()
        assert seen == sorted(seen)
