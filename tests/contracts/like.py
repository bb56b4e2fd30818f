"""A load compares with `like=`, takes leaves by `keys=` and casts by `dtype=`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from contracts.base import Contract
from eformer.checkpoint import load, save
from eformer.errors import MismatchError, StructureError
from support.meshes import layouts, meshes
from support.states import model
from support.trees import Moments, Unregistered, assert_same


def in_every_form(numbers):
    """Numbers as jax arrays, numpy arrays, scalars of numpy, and plain: all of the same values."""
    on_devices = jax.tree.map(jnp.asarray, numbers)
    on_host = jax.tree.map(np.asarray, on_devices)
    scalars = jax.tree.map(lambda array: array[()], on_host)
    return on_devices, on_host, scalars, jax.tree.map(lambda scalar: scalar.item(), scalars)


class Like(Contract):
    """What is loaded is what the caller describes, or an error that says all the differences."""

    # ---------------------------------------------------------------------------------------------- like

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

    def test_an_array_made_of_a_number_lies_where_it_is_said(self, path, mapping):
        save({"step": 7, "w": jnp.ones(8)}, path)
        _, wide, _ = meshes()
        like = {"step": jax.ShapeDtypeStruct((), jnp.int32), "w": jnp.ones(8)}
        everywhere = NamedSharding(wide, P())
        for said in (
            {"like": like, "mesh": wide, "shardings": {"w": P("x")}},
            {"like": like, "mesh": wide, "rules": [("w", P("x"))]},
            {"like": like, "shardings": {"step": everywhere}},
            {"like": like | {"step": jax.device_put(jnp.int32(0), everywhere)}},
            {"like": like, "mesh": wide, "shardings": {"w": P("x")}, **mapping},
        ):
            step = load(path, **said)["step"]
            assert (int(step), step.sharding) == (7, everywhere)
        seen = []
        load(
            path,
            like=like,
            options={"batch": 1},
            callback=lambda array, name: seen.append((name, array.dtype)) or array,
        )
        assert sorted(seen) == [("step", jnp.int32), ("w", jnp.float32)]

    def test_a_number_made_of_an_array_lies_nowhere(self, path, mapping):
        save({"step": jnp.int32(7), "w": jnp.ones(8)}, path)
        like = {"step": 0, "w": jnp.ones(8)}
        line, *_ = meshes()
        for said in (
            {},
            {"mesh": line},
            {"shardings": NamedSharding(line, P())},
            mapping,
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
            "leaf 'half': expected float32[], found the float16 1.0; dtype=\"like\" casts it",
            "leaf 'kind': expected float32[], found the int 3",
            "leaf 'long': expected float32[1], found the int 3",
            "leaf 'tenth': expected float32[], found the float 0.1, which float32 cannot hold exactly"
            '; dtype="like" casts it',
        ]
        some = {"half": float32, "tenth": np.float32(0)}
        cast = load(path, keys=list(some), like=some, dtype="float32")
        assert_same(cast, {"half": jnp.float32(1), "tenth": np.float32(0.1)})

    def test_a_cast_is_suggested_where_it_would_help(self, path):
        save({"w": jnp.ones(3)}, path)
        advice = r'expected bfloat16\[3\], found float32\[3\]; dtype="like" casts it'
        with pytest.raises(MismatchError, match=advice):
            load(path, like={"w": jnp.ones(3, jnp.bfloat16)})
        casts = r"expected bfloat16\[3\], found float32\[3\], which dtype= casts to float16; dtype=\"like\" casts it"
        with pytest.raises(MismatchError, match=casts):
            load(path, like={"w": jnp.ones(3, jnp.bfloat16)}, dtype="float16")

    def test_each_floating_leaf_is_cast_to_its_dtype_in_like(self, path):
        save({"half": np.float16(0.5), "n": 3, "norm": jnp.ones(2), "rate": 0.1, "w": jnp.arange(8.0)}, path)
        place = NamedSharding(meshes()[0], P("x"))
        like = {
            "half": np.float32(0),
            "n": 0,
            "norm": np.zeros(2, np.float64),
            "rate": jnp.float32(0),
            "w": jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=place),
        }
        w = jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), place)
        expected = {"half": np.float32(0.5), "n": 3, "norm": np.ones(2), "rate": jnp.float32(0.1), "w": w}
        assert_same(load(path, like=like, dtype="like"), expected)
        assert_same(load(path, like={**like, "z": 1}, dtype="like", partial=True), {**expected, "z": 1})

    def test_a_cast_to_the_dtypes_of_like_is_of_floats_alone(self, path):
        save({"w": jnp.ones(3), "n": jnp.int32(3)}, path)
        like = {"w": jnp.ones(3, jnp.int32), "n": jnp.float32(0)}
        with pytest.raises(MismatchError) as error:
            load(path, like=like, dtype="like")
        assert error.value.problems == (
            "leaf 'n': expected float32[], found int32[]",
            "leaf 'w': expected int32[3], found float32[3]",
        )

    def test_a_class_that_cannot_be_built_is_refused_before_data_is_read(self, path, monkeypatch):
        save(Unregistered(jnp.ones(3)), path)
        monkeypatch.setattr("eformer._engine.loading.read.prepare", None)
        with pytest.raises(StructureError, match=r"Unregistered.*like="):
            load(path)

    # ---------------------------------------------------------------------------------------------- keys

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

    # --------------------------------------------------------------------------------------------- dtype

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
