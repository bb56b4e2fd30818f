"""Quantised models of other programs load, open and convert as numbers, by every method that can be read."""

import json
import pickle
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer.checkpoint import convert, load
from eformer.errors import CorruptionError, FormatError, QuantizedError

F8, E8, BF = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NORM = {"norm.weight": np.ones(3, np.float32)}
SAMPLES = Path(__file__).parents[2] / "compat"
RNG = np.random.default_rng(5)


def f8(*shape):
    return RNG.standard_normal(shape).astype(F8)


def f32(*shape):
    return RNG.random(shape, np.float32) + np.float32(0.1)


def exponents(*shape):
    return RNG.integers(110, 130, shape, dtype=np.uint8)


def nibbles(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def spread(scales, shape, *block):
    for axis, size in enumerate(block):
        scales = np.repeat(scales, size, axis)
    return scales[tuple(slice(size) for size in shape)].astype(np.float32)


def fp4(packed):
    packed = packed.view(np.uint8)
    return FP4[np.stack([packed & 15, packed >> 4], -1)].reshape(*packed.shape[:-1], -1)


def power(scales):
    return np.ldexp(np.float32(1), scales.view(np.uint8).astype(int) - 127)


def words(numbers, bits):
    """Pack signed integers into words, the first in the lowest bits."""
    fields = (numbers + 2 ** (bits - 1)).astype(np.uint32).reshape(len(numbers), -1, 32 // bits)
    return (
        (fields << (np.arange(32 // bits) * bits).astype(np.uint32)).sum(-1, dtype=np.uint32).view(np.int32)
    )


def group(bits, size=None, **more):
    weights = {"num_bits": bits, "group_size": size, "type": "int", "symmetric": True, **more}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {"weights": weights}}}  # fmt: skip


def fp8_blocks():
    q, s = f8(300, 200), f32(3, 2)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"a.weight": q, "a.weight_scale_inv": s}, config, q.astype("f4") * spread(s, q.shape, 128, 128)


def fp8_small_blocks():
    q, s = f8(70, 50), f32(2, 2).astype(BF)
    config = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    return {"a.weight": q, "a.weight_scale_inv": s}, config, q.astype("f4") * spread(s, q.shape, 64, 32)


def fp8_tensor():
    q, s = f8(30, 20), np.array(0.25, np.float32)
    return {"a.weight": q, "a.weight_scale_inv": s}, {"quant_method": "fp8"}, q.astype("f4") * s


def fp8_experts():
    q, s = f8(2, 130, 140), f32(2, 2, 2)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"a.weight": q, "a.weight_scale_inv": s}, config, q.astype("f4") * spread(s, q.shape, 1, 128, 128)


def fbgemm():
    q, s = f8(30, 20), f32(30, 1)
    return {"a.weight": q, "a.weight_scale": s}, {"quant_method": "fbgemm_fp8"}, q.astype("f4") * s


def rows_without_an_axis():
    q, s = f8(30, 20), f32(30)
    return {"a.weight": q, "a.weight_scale": s}, None, q.astype("f4") * s[:, None]


def compressed_float():
    q, s = f8(30, 20), f32(1)
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return {"a.weight": q, "a.weight_scale": s, "a.input_scale": f32(1)}, config, q.astype("f4") * s


def compressed_blocks():
    q, s = f8(130, 140), f32(2, 2)
    weights = {"num_bits": 8, "type": "float", "block_structure": [128, 128]}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}
    return {"a.weight": q, "a.weight_scale": s}, config, q.astype("f4") * spread(s, q.shape, 128, 128)


def modelopt():
    q, s = f8(30, 20), np.array(0.5, np.float32)
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    return {"a.weight": q, "a.weight_scale": s, "a.input_scale": f32(1)}, config, q.astype("f4") * s


def mxfp8():
    q, s = f8(30, 64), exponents(30, 2)
    config = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
    return {"a.weight": q, "a.weight_scale_inv": s}, config, q.astype("f4") * spread(power(s), q.shape, 1, 32)


def deepseek():
    q, s = f8(130, 140), exponents(2, 2).view(E8)
    return {"a.weight": q, "a.scale": s}, None, q.astype("f4") * spread(power(s), q.shape, 128, 128)


def deepseek_fp4():
    q, s = nibbles(30, 32).view(np.int8), exponents(30, 2).view(E8)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return {"a.weight": q, "a.scale": s}, config, fp4(q) * spread(power(s), (30, 64), 1, 32)


def mistral():
    q, s = f8(30, 20), np.array(0.5, np.float32)
    leaves = {"a.weight": q, "a.qscale_weight": s, "a.qscale_act": np.array(1, np.float32)}
    return leaves, {"quant_method": "fp8_e4m3"}, q.astype("f4") * s


def nvfp4_modelopt():
    q, s, whole = nibbles(30, 32), f32(30, 4).astype(F8), np.array(0.3, np.float32)
    leaves = {"a.weight": q, "a.weight_scale": s, "a.weight_scale_2": whole, "a.input_scale": f32(1)}
    scales = spread(s.astype("f4") * whole, (30, 64), 1, 16)
    return leaves, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, fp4(q) * scales


def nvfp4_compressed():
    q, s, whole = nibbles(30, 32), f32(30, 4).astype(F8), np.array([300], np.float32)
    leaves = {"a.weight_packed": q, "a.weight_scale": s, "a.weight_global_scale": whole}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    return leaves, config, fp4(q) * spread(s.astype("f4") / whole, (30, 64), 1, 16)


def mxfp4_compressed():
    q, s = nibbles(30, 32), exponents(30, 2)
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    return {"a.weight_packed": q, "a.weight_scale": s}, config, fp4(q) * spread(power(s), (30, 64), 1, 32)


def int4_groups():
    numbers, s = RNG.integers(-8, 8, (6, 64)), f32(6, 2).astype(BF)
    shape = np.array([6, 64])
    leaves = {"a.weight_packed": words(numbers, 4), "a.weight_scale": s, "a.weight_shape": shape}
    return leaves, group(4, 32), numbers.astype("f4") * spread(s, (6, 64), 1, 32)


def int4_rows_with_padding():
    numbers, s = RNG.integers(-8, 8, (6, 16)), f32(6, 1)
    leaves = {"a.weight_packed": words(numbers, 4), "a.weight_scale": s, "a.weight_shape": np.array([6, 13])}
    return leaves, group(4), numbers[:, :13].astype("f4") * s


def int8_words():
    numbers, s = RNG.integers(-128, 128, (6, 64)), f32(1)
    leaves = {"a.weight_packed": words(numbers, 8), "a.weight_scale": s, "a.weight_shape": np.array([6, 64])}
    return leaves, group(8), numbers.astype("f4") * s


METHODS = [
    fp8_blocks, fp8_small_blocks, fp8_tensor, fp8_experts, fbgemm, rows_without_an_axis, compressed_float,
    compressed_blocks, modelopt, mxfp8, deepseek, deepseek_fp4, mistral, nvfp4_modelopt, nvfp4_compressed,
    mxfp4_compressed, int4_groups, int4_rows_with_padding, int8_words,
]  # fmt: skip
MARKS = {
    "fp8_blocks": "fp8·128x128", "fp8_tensor": "fp8", "fbgemm": "fp8·row", "mxfp8": "fp8·1x32",
    "deepseek_fp4": "mxfp4·1x32", "nvfp4_modelopt": "nvfp4·1x16", "int4_groups": "int4·1x32",
}  # fmt: skip


def model(folder, leaves, config=None):
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file({name: np.ascontiguousarray(leaf) for name, leaf in leaves.items()}, folder / "m.safetensors")  # fmt: skip
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}").tolist()


@pytest.mark.parametrize("method", METHODS)
def test_a_weight_of_every_method_is_its_number_times_its_scale_rounded_once(tmp_path, method):
    leaves, config, expected = method()
    path = model(tmp_path / "model", {**leaves, **NORM}, config)
    loaded, report = load(path, dequant="bf16", return_report=True)
    assert list(loaded) == ["a", "norm"]
    assert list(loaded["a"]) == ["weight"]
    assert bits(loaded["a"]["weight"]) == bits(expected.astype(BF))
    assert (report.dequantized, report.dequant) == (("a.weight",), ("bfloat16",))
    assert report.left_out == tuple(name for name in leaves if "input_scale" in name or "qscale_act" in name)
    with checkpoint.open(path, dequant="f32") as view:
        assert set(view) == {"a.weight", "norm.weight"}
        assert bits(view["a.weight"][3:5, 1:-1]) == bits(expected[3:5, 1:-1])
    convert(path, tmp_path / "new", to="safetensors", dequant="float16")
    assert bits(load(tmp_path / "new")["a"]["weight"]) == bits(expected.astype(np.float16))


@pytest.mark.parametrize("method", METHODS)
def test_inspect_marks_quantised_leaves(tmp_path, method):
    leaves, config, _ = method()
    path = model(tmp_path, {**leaves, **NORM}, config)
    found = checkpoint.inspect(path)
    ((name, mark),) = found.quantized[""].items()
    assert name in leaves
    assert mark == MARKS.get(method.__name__, mark)
    assert mark in str(found)


def experts():
    q, s = nibbles(2, 6, 3, 16), exponents(2, 6, 3)
    dense = (fp4(q) * power(s)[..., None]).reshape(2, 6, 96).swapaxes(1, 2)
    leaves = {"e.up_blocks": q, "e.up_scales": s, "e.up_bias": np.ones((2, 6), BF), **NORM}
    return leaves, {"quant_method": "mxfp4"}, dense


def test_experts_of_mxfp4_are_dense_leaves_with_inputs_before_outputs(tmp_path):
    leaves, config, expected = experts()
    loaded = load(model(tmp_path, leaves, config), dequant="bf16")
    assert list(loaded["e"]) == ["up", "up_bias"]
    assert bits(loaded["e"]["up"]) == bits(expected.astype(BF))


def test_experts_as_openai_publishes_them_are_recognised_and_stay_in_stored_order(tmp_path):
    leaves, _, expected = experts()
    names = {"e.up_blocks": "block.0.mlp1_weight.blocks", "e.up_scales": "block.0.mlp1_weight.scales"}
    path = model(tmp_path, {names.get(name, name): leaf for name, leaf in leaves.items()})
    with pytest.raises(QuantizedError, match=r"block.0.mlp1_weight.blocks: uint8\["):
        load(path)
    assert checkpoint.inspect(path).quantized == {"": {"block.0.mlp1_weight.blocks": "mxfp4·1x32"}}
    loaded = load(path, dequant="bf16")["block"]["0"]["mlp1_weight"]
    assert bits(loaded) == bits(expected.swapaxes(1, 2).astype(BF))


# ------------------------------------------------------------------------------------------ defaults


def test_a_like_with_the_dense_names_is_loaded_in_its_dtypes(tmp_path):
    leaves, config, expected = experts()
    path = model(tmp_path, leaves, config)
    for dtype in ("bfloat16", "float32"):
        like = {"e": {"up": jnp.zeros((2, 96, 6), dtype), "up_bias": jnp.zeros((2, 6), BF)}, "norm": {"weight": jnp.zeros(3)}}  # fmt: skip
        loaded, report = load(path, like=like, return_report=True)
        assert bits(loaded["e"]["up"]) == bits(expected.astype(dtype))
        assert report.dequant == (dtype,)
        assert f"1 of them dequantised to {dtype} (e.up)" in str(report)


def test_rules_and_root_apply_to_dense_names_before_the_default_is_chosen(tmp_path):
    leaves, config, expected = fp8_blocks()
    path = model(tmp_path, {f"m.{name}": leaf for name, leaf in {**leaves, **NORM}.items()}, config)
    like = {"kernel": jnp.zeros((200, 300), BF), "scale": jnp.zeros(3)}
    rules = {"a.weight": "kernel | transpose", "norm.weight": "scale"}
    loaded = load(path, like=like, root="m", rename=rules)
    assert bits(loaded["kernel"]) == bits(expected.T.astype(BF))


@pytest.mark.parametrize("dtype", ["int8", F8])
def test_a_like_with_other_dtypes_or_names_is_no_default(tmp_path, dtype):
    leaves, config, _ = fp8_blocks()
    path = model(tmp_path, leaves, config)
    like = {"a": {"weight": jax.ShapeDtypeStruct((300, 200), dtype), "weight_scale_inv": jnp.zeros((3, 2))}}
    with pytest.raises(QuantizedError, match='Pass dequant="bf16"'):
        load(path, like=like if dtype == "int8" else {"b": jnp.zeros((300, 200))})


def test_a_like_that_lacks_a_weight_is_no_default(tmp_path):
    leaves, config, _ = fp8_blocks()
    path = model(tmp_path, {**leaves, "b.weight": f8(4, 4), "b.weight_scale_inv": f32(1, 1)}, config)
    with pytest.raises(QuantizedError, match='Pass dequant="bf16"'):
        load(path, like={"a": {"weight": jnp.zeros((300, 200), BF)}})


def test_a_partial_load_takes_the_weights_that_like_has(tmp_path):
    leaves, config, expected = fp8_blocks()
    path = model(tmp_path, {**leaves, "b.weight": f8(4, 4), "b.weight_scale_inv": f32(1, 1)}, config)
    like = {"a": {"weight": jnp.zeros((300, 200), BF)}, "head": jnp.ones(2)}
    loaded, report = load(path, like=like, partial=True, return_report=True)
    assert bits(loaded["a"]["weight"]) == bits(expected.astype(BF))
    assert (report.kept, report.left_out) == (("head",), ("b.weight",))


def test_a_load_with_like_and_the_stored_leaves_is_unchanged(tmp_path):
    leaves, config, _ = fp8_blocks()
    path = model(tmp_path, leaves, config)
    like = {"a": {"weight": jnp.zeros((300, 200), F8), "weight_scale_inv": jnp.zeros((3, 2))}}
    assert load(path, like=like, dequant=False)["a"]["weight"].dtype == F8


@pytest.mark.parametrize("named", ["float16", None, "float8_e4m3fn", 7])
def test_a_book_is_for_the_dense_model_so_weights_are_numbers_of_the_dtype_of_the_configuration(
    tmp_path, named
):
    leaves, config, expected = fp8_blocks()
    path = model(tmp_path / "fp8", {**leaves, **NORM}, config)
    settings = {
        "quantization_config": config,
        "model_type": "llama",
        **({} if named is None else {"torch_dtype": named}),
    }
    (path / "config.json").write_text(json.dumps(settings))
    dtype = "float16" if named == "float16" else "bfloat16"
    loaded, report = load(path, rename="flax", return_report=True)
    assert bits(loaded["a"]["kernel"]) == bits(expected.T.astype(dtype))
    assert str(report) == f"2 leaves loaded, 1 of them dequantised to {dtype} (a.kernel)"
    done = convert(path, tmp_path / "new", to="safetensors", rename="llama/flax")
    assert f"a.kernel: {dtype}[200, 300] ([out in] to [in out], dequantised from float8_e4m3fn)" in str(done)
    with checkpoint.open(path, rename="flax") as view:
        assert bits(view["a.kernel"][...]) == bits(load(tmp_path / "new")["a"]["kernel"])


def test_a_like_counts_before_the_book(tmp_path):
    leaves, config, expected = fp8_blocks()
    path = model(tmp_path, {**leaves, **NORM}, config)
    like = {"a": {"kernel": jnp.zeros((200, 300))}, "norm": {"scale": jnp.zeros(3)}}
    assert bits(load(path, rename="llama/flax", like=like)["a"]["kernel"]) == bits(expected.T)


def test_other_rules_and_the_way_back_are_no_default(tmp_path):
    leaves, config, _ = fp8_blocks()
    path = model(tmp_path / "fp8", {**leaves, **NORM}, config)
    for call in (load, lambda *args, **more: convert(*args, tmp_path / "new", to="zarr", **more)):
        for arguments in (
            {"rename": "a.weight [o i] <-> a.kernel [i o]"},
            {"rename": "llama/flax", "back": True},
        ):
            with pytest.raises(QuantizedError, match='Pass dequant="bf16"'):
                call(path, **arguments)


def test_a_book_refuses_a_method_that_cannot_be_read(tmp_path):
    leaves = {"a.qweight": np.zeros((4, 4), np.int32), "a.qzeros": np.zeros((1, 1), np.int32), "a.scales": np.ones((1, 4), np.float16)}  # fmt: skip
    with pytest.raises(QuantizedError, match="awq cannot be dequantised here"):
        load(model(tmp_path, leaves, {"quant_method": "awq"}), rename="llama/flax")


# ---------------------------------------------------------------------------------- parts of a load


def test_shards_on_devices_are_parts_of_the_dense_weight(tmp_path):
    leaves, config, expected = fp8_blocks()
    more, _, dense = experts()
    path = model(tmp_path, {**leaves, **more}, config)
    mesh = jax.make_mesh((2, 2), ("x", "y"))
    rules = [("a/weight", P("x", "y")), ("e/up$", P(None, "y", "x"))]
    loaded = load(path, dequant="bf16", mesh=mesh, rules=rules)
    assert loaded["a"]["weight"].sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 2)
    assert bits(loaded["a"]["weight"]) == bits(expected.astype(BF))
    assert bits(loaded["e"]["up"]) == bits(dense.astype(BF))


def test_keys_choose_dense_names_and_dtype_casts_the_numbers(tmp_path):
    leaves, config, expected = fp8_blocks()
    path = model(tmp_path, {**leaves, **NORM}, config)
    found = load(path, dequant="bf16", keys="a", dtype="float32")
    assert list(found) == ["a.weight"]
    assert bits(found["a.weight"]) == bits(expected.astype(BF).astype(np.float32))


def test_rules_stack_dense_weights(tmp_path):
    layers = {f"l.{n}.weight": (f8(20, 30), f32(1, 1)) for n in range(3)}
    leaves = {name: q for name, (q, _) in layers.items()}
    leaves |= {f"{name}_scale_inv": s for name, (_, s) in layers.items()}
    path = model(tmp_path / "model", leaves, {"quant_method": "fp8"})
    rules = {r"l\.(\d)\.weight": r"l.weight | transpose | stack \1"}
    expected = np.stack([(q.astype("f4") * s).T.astype(BF) for q, s in layers.values()])
    assert bits(load(path, dequant="bf16", rename=rules)["l"]["weight"]) == bits(expected)
    convert(path, tmp_path / "new", to="safetensors", dequant="bf16", rename=rules)
    assert bits(load(tmp_path / "new")["l"]["weight"]) == bits(expected)


def test_scales_may_lie_in_another_file_with_an_index_or_without(tmp_path):
    leaves, config, expected = fp8_blocks()
    path = model(tmp_path, {"a.weight_scale_inv": leaves["a.weight_scale_inv"]}, config)
    safetensors.numpy.save_file({"a.weight": leaves["a.weight"]}, path / "weights.safetensors")
    assert bits(load(path, prefix="weights", dequant="bf16")["a"]["weight"]) == bits(expected.astype(BF))
    with checkpoint.open(path, prefix="weights", dequant="bf16") as view:
        assert bits(view["a.weight"][:]) == bits(expected.astype(BF))
    files = {"a.weight": "weights.safetensors", "a.weight_scale_inv": "m.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert bits(load(path, dequant="bf16")["a"]["weight"]) == bits(expected.astype(BF))


def test_files_of_pytorch_are_read_as_numbers():
    for sample in ("fp8.pt", "distributed_fp8"):
        loaded = load(SAMPLES / "torch" / sample, dequant="bf16")
        assert list(loaded["model"]["a"]) == ["weight"]
        raw = load(SAMPLES / "torch" / sample, dequant=False)["model"]["a"]
        assert bits(loaded["model"]["a"]["weight"]) == bits(raw["weight"].astype(BF))


def test_both_stored_leaves_are_checked_against_their_digests(tmp_path):
    leaves, config, expected = fp8_blocks()
    path = model(tmp_path / "model", leaves, config)
    for name in leaves:
        convert(path, tmp_path / name, to="safetensors", dequant=False)
        assert bits(load(tmp_path / name, dequant="bf16")["a"]["weight"]) == bits(expected.astype(BF))
        (file,) = (tmp_path / name).glob("*.safetensors")
        data, stored = bytearray(file.read_bytes()), leaves[name].tobytes()
        data[data.index(stored)] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptionError, match=rf"{name}\b"):
            load(tmp_path / name, dequant="bf16")


def test_a_model_without_quantised_weights_is_unchanged(tmp_path):
    path = model(tmp_path, NORM)
    assert load(path, dequant="bf16")["norm"]["weight"].dtype == np.float32
    with checkpoint.open(path, dequant="bf16") as view:
        assert view["norm.weight"].dtype == np.float32


# -------------------------------------------------------------------------------------------- errors


REFUSED = {
    "awq": {"quant_method": "awq", "bits": 4},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "modelopt w4a16_awq": {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
    "compressed-tensors int-quantized": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "gptq, awq or nunchaku": None,
}


@pytest.mark.parametrize("method", REFUSED)
def test_methods_that_cannot_be_read_are_refused_by_name(tmp_path, method):
    leaves = {"a.qweight": np.ones((2, 4), np.int32), "a.scales": np.ones((2, 4), np.float16), **NORM}
    path = model(tmp_path / "model", leaves, REFUSED[method])
    text = f"{method} cannot be dequantised here; load the original model, or pass dequant=False"
    for call in (load, checkpoint.open, lambda path, **more: convert(path, tmp_path / "new.npz", **more)):
        with pytest.raises(QuantizedError, match=text):
            call(path, dequant="bf16")
    with pytest.raises(QuantizedError, match=text):
        load(path)
    assert list(load(path, dequant="bf16", keys="norm")) == ["norm.weight"]
    assert checkpoint.inspect(path).quantized[""]


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"format": "marlin-24"}, "marlin-24"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
        ({"format": "float-quantized", "transform_config": {"config_groups": {"R1": {}}}}, "float-quantized"),
    ],
)
def test_weights_that_need_more_than_their_scales_are_refused(tmp_path, config, method):
    path = model(tmp_path, fp8_tensor()[0], {"quant_method": "compressed-tensors"} | config)
    with pytest.raises(QuantizedError, match=f"compressed-tensors {method} cannot be dequantised here"):
        load(path, dequant="bf16")


def test_modelopt_may_declare_its_method_in_a_file_of_its_own(tmp_path):
    leaves, _, expected = modelopt()
    path = model(tmp_path, leaves | {"a.k_scale": f32(1), "a.v_scale": f32(1)})
    for algorithm, is_known in (("FP8", True), ("W4A8_AWQ", False)):
        declaration = {"quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}}
        (path / "hf_quant_config.json").write_text(json.dumps(declaration))
        if is_known:
            loaded, report = load(path, dequant="bf16", return_report=True)
            assert bits(loaded["a"]["weight"]) == bits(expected.astype(BF))
            assert set(report.left_out) == {"a.input_scale", "a.k_scale", "a.v_scale"}
        else:
            with pytest.raises(QuantizedError, match="w4a8_awq cannot be dequantised here"):
                load(path, dequant="bf16")


@pytest.mark.parametrize("more", ["weight_zero_point", "weight_g_idx"])
def test_integers_with_more_than_scales_are_refused(tmp_path, more):
    leaves, config, _ = int4_groups()
    path = model(tmp_path, {**leaves, f"a.{more}": np.zeros(4, np.int32)}, config)
    with pytest.raises(QuantizedError, match="compressed-tensors pack-quantized cannot be dequantised here"):
        load(path, dequant="bf16")


def test_missing_scales_are_named(tmp_path):
    leaves, config, _ = fp8_blocks()
    leaves |= {"b.weight": f8(4, 4)}
    path = model(tmp_path, leaves, config)
    text = r"b\.weight is float8_e4m3fn and b\.weight_scale_inv is missing \(1 others have theirs\)"
    for dequant in ("bf16", None):
        with pytest.raises(
            QuantizedError, match=text if dequant else r"b\.weight.* whose scales are missing"
        ):
            load(path, dequant=dequant)
    model(tmp_path, leaves, config | {"modules_to_not_convert": ["b"]})
    assert load(path, dequant="bf16")["b"]["weight"].dtype == F8


@pytest.mark.parametrize(
    ("scales", "block", "text"),
    [
        ((3, 2), [64, 128], r"a\.weight: scales \[3, 2\] do not fit \[300, 200\] in blocks of 64 x 128"),
        ((4, 2), None, r"scales \[4, 2\] do not fit \[300, 200\] in blocks of 128 x 128"),
        ((300, 1), None, r"scales \[300, 1\] do not fit \[300, 200\]"),
        ((1, 1), None, r"scales \[1, 1\] do not fit \[300, 200\]"),
        ((3, 2), [300, 200], r"scales \[3, 2\] do not fit \[300, 200\] in blocks of 300 x 200"),
    ],
)
def test_scales_that_do_not_fit_are_refused_and_no_quotient_is_guessed(tmp_path, scales, block, text):
    config = {"quant_method": "fp8"} | ({"weight_block_size": block} if block else {})
    leaves = {"a.weight": f8(300, 200), "a.weight_scale_inv": f32(*scales)}
    with pytest.raises(QuantizedError, match=text):
        load(model(tmp_path, leaves, config), dequant="bf16")


def test_a_weight_without_axes_is_refused(tmp_path):
    leaves = {"a.weight": np.zeros((), F8), "a.weight_scale_inv": np.ones((), np.float32)}
    safetensors.numpy.save_file(leaves, tmp_path / "m.safetensors")
    with pytest.raises(
        QuantizedError, match=r"a\.weight is float8_e4m3fn\[\] and has scales; expected a weight with axes"
    ):
        load(tmp_path, dequant="bf16")


@pytest.mark.parametrize("shape", [[6, 65], [6, 56], [7, 64], [-6, 64], [2**62, 64]])
def test_a_stored_shape_that_does_not_fit_is_refused(tmp_path, shape):
    leaves, config, _ = int4_groups()
    path = model(tmp_path, leaves | {"a.weight_shape": np.array(shape)}, config)
    with pytest.raises(
        FormatError, match=r"a\.weight is \[.*\] by its weight_shape, expected at most \[6, 64\]"
    ):
        load(path, dequant="bf16")


def test_a_dense_leaf_beside_its_quantised_form_is_refused(tmp_path):
    leaves, config, _ = experts()
    path = model(tmp_path, leaves | {"e.up": np.ones(2, np.float32)}, config)
    with pytest.raises(FormatError, match=r"leaf 'e\.up' is stored both as numbers and in quantised form"):
        load(path, dequant="bf16")


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": "128"},
        {
            "quant_method": "fp8",
            "config_groups": [1],
            "ignore": {"a": 1},
            "modules_to_not_convert": [3, None],
        },
        {"quant_method": "fp8", "config_groups": {"g": {"weights": {"block_structure": [True, 128]}}}},
        {"quant_method": ["fp8"], "format": {}},
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused_or_passed_over(tmp_path, config):
    leaves, _, expected = fp8_blocks()
    path = model(tmp_path, leaves, config)
    assert checkpoint.inspect(path).quantized
    if config["quant_method"] == ["fp8"]:
        with pytest.raises(QuantizedError, match="cannot be dequantised here"):
            load(path, dequant="bf16")
    else:
        assert bits(load(path, dequant="bf16")["a"]["weight"]) == bits(expected.astype(BF))


def test_a_view_of_numbers_shows_dense_leaves_and_can_be_pickled(tmp_path):
    leaves, config, expected = fp8_blocks()
    path = model(tmp_path, {**leaves, **NORM}, config)
    with checkpoint.open(path, dequant="bf16") as view, pickle.loads(pickle.dumps(view)) as copy:
        assert "bfloat16[300, 200]  120 kB" in str(view)
        assert bits(copy["a.weight"][...]) == bits(expected.astype(BF))
        assert (copy["a.weight"].nbytes, len(copy)) == (120_000, 2)
        assert list(copy["a"]) == ["a.weight"]
