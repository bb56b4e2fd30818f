"""`| dequant NAME [AXES]`: numbers from quantised elements, whose blocks follow the axes of a rule."""

import itertools
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from eformer import checkpoint
from eformer._engine.record.boxes import Box
from eformer._engine.record.rename import rules_from
from eformer.errors import FormatError, MismatchError, QuantizedError
from support.lazy import applied, in_memory

H, K, D = 3, 192, 200  # heads of one block and a half: each head has two rows of scales
F8 = ml_dtypes.float8_e4m3fn
RULE = "h = 3\n{*p}.kv.weight [(h k) d] -> {*p}.kv [d h k] | dequant {*p}.kv.scale [(h k/128) d/128]"


def codes(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(F8)


def scales(*shape):
    return np.random.default_rng(2).uniform(0.5, 2, shape).astype(np.float32)


def per_head(q, s):
    grid = s.reshape(H, 2, 2).repeat(128, 1)[:, :K].repeat(128, 2)[..., :D]
    return (q.astype(np.float32).reshape(H, K, D) * grid).transpose(2, 0, 1)


@pytest.fixture
def model(tmp_path):
    leaves = {
        "m.kv.weight": codes(H * K, D),
        "m.kv.scale": scales(2 * H, 2),
        "m.norm": np.ones(3, np.float32),
    }
    (tmp_path / "fp8").mkdir()
    safetensors.numpy.save_file(leaves, tmp_path / "fp8" / "model.safetensors")
    (tmp_path / "fp8" / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "fp8"}})
    )
    return tmp_path / "fp8"


EXPECTED = per_head(codes(H * K, D), scales(2 * H, 2))


def test_each_head_has_blocks_of_its_own(model):
    tree, report = checkpoint.load(model, rename=RULE, return_report=True)
    np.testing.assert_array_equal(tree["m"]["kv"], EXPECTED)
    assert sorted(tree["m"]) == ["kv", "norm"]  # the scales belong to the weight
    assert "1 of them dequantised to float32 (m.kv)" in str(report)


def test_the_numbers_are_rounded_once_to_the_dtype_of_like_or_of_a_cast(model, tmp_path):
    like = {"m": {"kv": jnp.zeros((D, H, K), jnp.bfloat16), "norm": jnp.zeros(3)}}
    tree = checkpoint.load(model, rename=RULE, like=like)
    np.testing.assert_array_equal(tree["m"]["kv"], EXPECTED.astype(ml_dtypes.bfloat16))
    done = checkpoint.convert(model, tmp_path / "new", to="zarr", rename=f"{RULE} | scale 2 | cast bf16")
    assert (
        "dequant {*p}.kv.scale [(h k/128) d/128], scale 2, cast bfloat16, dequantised from float8_e4m3fn"
        in str(done)
    )
    np.testing.assert_array_equal(
        checkpoint.load(tmp_path / "new")["m"]["kv"], (2 * EXPECTED).astype(ml_dtypes.bfloat16)
    )


def test_other_quantised_weights_are_numbers_by_their_names(model):
    other = {"m.up.weight": codes(4, 4), "m.up.weight_scale_inv": scales(1, 1)}
    leaves = checkpoint.load(model, dequant=False)
    flat = {"m.kv.weight": leaves["m"]["kv"]["weight"], "m.kv.scale": leaves["m"]["kv"]["scale"], **other}
    safetensors.numpy.save_file(
        {name: np.asarray(leaf) for name, leaf in flat.items()}, model / "model.safetensors"
    )
    with pytest.raises(QuantizedError, match=r"m\.up\.weight"):
        checkpoint.load(model, rename=RULE)
    tree = checkpoint.load(model, rename=RULE, keys="m.kv")
    np.testing.assert_array_equal(tree["m.kv"], EXPECTED)


@pytest.mark.parametrize(
    ("axes", "grid"),
    [
        ("[]", ()),
        ("[1 d]", (1, 4)),
        ("[(h k/2) d/3]", (6, 2)),
        ("[d/3 h]", (2, 3)),
        ("[h k/2]", (3, 2)),
        ("[(k/2 h) 1]", (6, 1)),
        ("[(h/2 k)]", (6,)),
    ],
)
def test_every_box_is_the_same_as_of_the_whole(axes, grid):
    q, s = codes(9, 4), scales(*grid)  # h = 3, k = 3, d = 4
    index = {
        "h": np.arange(3)[:, None, None],
        "k": np.arange(3)[None, :, None] // 2,
        "d": np.arange(4)[None, None] // 3,
    }
    index["d"] = index["d"] if "/3" in axes else np.arange(4)[None, None]
    places = {
        "[]": (),
        "[1 d]": (0, index["d"]),
        "[(h k/2) d/3]": (index["h"] * 2 + index["k"], index["d"]),
        "[d/3 h]": (index["d"], index["h"]),
        "[h k/2]": (index["h"], index["k"]),
        "[(k/2 h) 1]": (index["k"] * 3 + index["h"], 0),
        "[(h/2 k)]": (index["h"] // 2 * 3 + np.arange(3)[None, :, None],),
    }[axes]
    expected = q.astype(np.float32).reshape(3, 3, 4) * s[places]
    made = renamed({"w": q, "s": s}, f"h = 3\nw [(h k) d] -> w [h k d] | dequant s {axes}")["w"]
    for box in itertools.product(
        [(0, 3), (1, 3), (2, 3)], [(0, 3), (1, 2), (2, 3)], [(0, 4), (2, 4), (3, 4)]
    ):
        start, stop = zip(*box, strict=True)
        cut = tuple(slice(*part) for part in box)
        np.testing.assert_array_equal(made.read(Box(start, stop)), expected[cut])


def test_a_box_reads_the_scales_of_its_blocks_alone():
    arrays = in_memory({"w": codes(9, 4), "s": scales(6, 2)})
    made = rules_from("h = 3\nw [(h k) d] -> w [h k d] | dequant s [(h k/2) d/3]").apply(arrays).arrays["w"]
    made.read(Box((1, 0, 0), (2, 1, 3)))
    assert (arrays["w"].elements_read, arrays["s"].elements_read) == (3, 1)


def renamed(arrays, text):
    return applied(text, arrays).arrays


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("w [o i] -> w [o i] | scale 2 | dequant s [o]", "dequant is the first step, and stands once"),
        ("w.{l} -> {l} | dequant s []", "dequant needs one leaf on the left, with brackets and without +"),
        ("w [a+b], v [c] -> u [a], u2 [b], u3 [c] | dequant s []", "dequant needs one leaf on the left"),
        ("w [o i] -> w [i o] | dequant s [o x]", "dequant: x is no axis between the brackets of w [o i]"),
        ("w [o i] -> w [i o] | dequant s [o o/2]", "dequant: the scales have each axis once"),
        (
            "w [o i] -> w [i o] | dequant s [...]",
            "dequant: the scales have each axis once, and neither + nor ...",
        ),
        ("w [o i] -> w [i o] | dequant {*q} [o]", "dequant: {*q} has placeholders that w lacks"),
        ("w [o i] -> w [i o] | dequant s [o/0]", "unexpected '/'"),
        ("w [o i] -> w [i o] | dequant s", "unknown step 'dequant s'"),
    ],
)
def test_rules_that_can_fit_no_leaf_are_refused(rule, problem):
    with pytest.raises(FormatError) as error:
        rules_from(rule)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"s": scales(1, 2)}, "line 1: the scales [1, 2] do not fit w [6, 4]: s [o/4 i/3] is [2, 2]"),
        ({}, "line 1: w has no scales: s is missing"),
        (
            {"w": np.ones((6, 4), np.float32), "s": scales(2, 2)},
            "needs float8 or int8 elements with an axis, and w is float32[6, 4]",
        ),
    ],
)
def test_scales_that_do_not_fit_are_refused_before_anything_is_read(arrays, problem):
    with pytest.raises(MismatchError) as error:
        renamed({"w": codes(6, 4), **arrays}, "w [o i] -> w [i o] | dequant s [o/4 i/3]")
    assert problem in str(error.value)


def test_nothing_is_quantised_on_the_way_back():
    with pytest.raises(
        MismatchError, match="line 1 has dequant, and nothing is quantised on the way back; leave it"
    ):
        applied("w [o i] <-> v [i o] | dequant s [o]", {"v": np.ones((2, 3), np.float32)}, back=True)


def test_a_scale_that_is_no_number_is_named(tmp_path):
    leaves = {"w.weight": codes(4, 6), "w.scale": np.array([[127, 255]], np.uint8)}
    safetensors.numpy.save_file(leaves, tmp_path / "model.safetensors")
    rule = "{*p}.weight [o i] -> {*p} [i o] | dequant {*p}.scale [1 i/3]"
    with checkpoint.open(tmp_path, rename=rule) as view:
        assert view["w"][:3].shape == (3, 4)
        with pytest.raises(QuantizedError, match=r"leaf 'w\.scale': the scale at \[0, 1\] is 255"):
            view["w"][...]
