"""Which leaves are loaded, and what they become."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from eformer._engine.loading.contents import Contents
from eformer._engine.loading.request import Request
from eformer._engine.loading.select import compare
from eformer._engine.record.manifest import Extent, LeafEntry
from eformer.errors import MismatchError


def leaf(shape=(3,), dtype="float32", **more):
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return LeafEntry(dtype, shape, (Extent(0, 0, nbytes, ""),), **more)


def tree(leaves, values=None):
    return Contents(leaves, values or {}, b"null")


def targets(leaves, like=None, values=None, **arguments):
    entry = tree(leaves, values)
    return compare(entry, entry.select(None), Request(like=like, **arguments), like).targets


# ---------------------------------------------------------------------------------------------- select


NAMES = ["a.w", "a.b", "ab.w", "step"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [(None, NAMES), (["step"], ["step"]), (["a"], ["a.w", "a.b"]), (["*.w"], ["a.w", "ab.w"]), ([], []),
     (["step", "a.b"], ["a.b", "step"])],
)  # fmt: skip
def test_keys_name_match_or_lie_above_leaves(keys, expected):
    entry = tree(dict.fromkeys(NAMES[:3], leaf()), {"step": 3})
    assert list(entry.select(keys)) == expected


def test_keys_are_taken_in_either_spelling():
    entry = tree({"h%2E0%2Ew": leaf(), "h%2E0%2Eb": leaf()}, {"h%2Estep": 3})
    for keys in (["h.0.w", "h.step"], ["h%2E0%2Ew", "h%2Estep"]):
        assert list(entry.select(keys)) == ["h%2E0%2Ew", "h%2Estep"]
    assert list(entry.select(["h.0"])) == ["h%2E0%2Ew", "h%2E0%2Eb"]


def test_a_key_that_means_two_leaves_is_refused_with_both():
    with pytest.raises(MismatchError, match=r"'a%2Eb%2Ec', 'a%2Eb.c'"):
        tree({"a%2Eb%2Ec": leaf(), "a%2Eb.c": leaf()}).select(["a.b.c"])


def test_all_unknown_keys_are_reported_with_the_nearest_name():
    with pytest.raises(MismatchError) as error:
        tree({"params.w": leaf()}).select(["param", "params.v"])
    assert error.value.problems == (
        "no leaf is named 'param', matches it or lies below it (nearest is 'params')",
        "no leaf is named 'params.v', matches it or lies below it (nearest is 'params.w')",
    )


# --------------------------------------------------------------------------------------------- targets


def test_without_like_a_leaf_becomes_what_it_was():
    jax_array, numpy_array = targets({"j": leaf(), "n": leaf(home="numpy")})
    assert (jax_array.as_numpy, numpy_array.as_numpy) == (False, True)
    assert (jax_array.dtype, jax_array.sharding, jax_array.shape) == ("float32", None, (3,))


def test_a_cast_is_for_floating_leaves():
    found = targets({"w": leaf(), "n": leaf(dtype="int32")}, dtype="bfloat16")
    assert [target.dtype for target in found] == ["bfloat16", "int32"]


def test_like_says_what_a_leaf_becomes_and_where():
    place = SingleDeviceSharding(jax.devices()[1])
    like = {
        "numpy": np.zeros(3, np.float32),
        "jax": jnp.zeros(3),
        "there": jax.device_put(jnp.zeros(3), jax.devices()[1]),
        "spec": P("x"),
        "number": 0.0,
    }
    leaves = {name: leaf(() if name == "number" else (3,), home="numpy") for name in like}
    found = {target.name: target for target in targets(leaves, like)}
    assert [found[name].as_numpy for name in like] == [True, False, False, False, True]
    assert [found[name].sharding for name in like] == [None, None, place, P("x"), None]
    assert [found[name].is_explicit for name in like] == [False, False, True, True, False]
    assert [found[name].like_scalar for name in like] == [None, None, None, None, 0.0]


def test_a_plain_number_becomes_the_array_that_like_has():
    (found,) = targets({}, {"step": jnp.int32(0)}, {"step": 3})
    assert (found.is_stored, found.as_numpy, found.dtype, found.arrays[0].item()) == (
        False,
        False,
        "int32",
        3,
    )


def test_a_leaf_of_as_many_elements_is_reshaped_if_that_is_asked_for(caplog):
    like = {"w": jnp.zeros((2, 3))}
    (found,) = targets({"w": leaf((3, 2))}, like, reshape=True)
    assert (found.shape, found.entry.shape) == ((2, 3), (3, 2))
    assert "leaf 'w' is reshaped from [3, 2] to [2, 3]" in caplog.text
    for shape in ((3, 2), (4,)):
        with pytest.raises(MismatchError, match=r"expected float32\[2, 3\], found"):
            targets({"w": leaf(shape)}, like, reshape=shape == (4,))


def test_every_mismatch_is_listed_and_the_callers_argument_is_named():
    like = {"w": jnp.zeros(4), "extra": 1, "s": P("x"), "n": 0.5}
    with pytest.raises(MismatchError, match="the checkpoint does not fit `template`") as error:
        targets({"w": leaf(), "old": leaf()}, like, {"s": 3, "n": 3}, like_name="template")
    assert error.value.problems == (
        "missing leaf 'extra': `template` has it, the checkpoint does not",
        "unexpected leaf 'old': the checkpoint has it, `template` does not",
        "leaf 'w': expected float32[4], found float32[3]",
        "leaf 's': expected an array, found the int 3; pass a ShapeDtypeStruct to give its dtype",
        "leaf 'n': expected a plain float such as 0.5, found the int 3",
    )


def test_keys_are_compared_by_the_name_that_jax_gives_their_dtype():
    entry = LeafEntry("uint32", (2,), (Extent(0, 0, 8, ""),), key="threefry2x32")
    (found,) = targets({"rng": entry}, {"rng": jax.random.key(0)})
    assert (found.shape, found.as_numpy) == ((), False)
    with pytest.raises(MismatchError, match=r"expected uint32\[2\], found key<fry>\[\]"):
        targets({"rng": entry}, {"rng": jnp.zeros(2, jnp.uint32)})
