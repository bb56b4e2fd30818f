"""Quantised weights have the same bits as transformers and compressed-tensors give them."""

import json

import numpy as np
import pytest
import torch
from compressed_tensors import compressors
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from eformer.checkpoint import load

FLOATS = {torch.bfloat16: "bf16", torch.float32: "f32"}


def loaded(folder, leaves, config, dtype):
    save_file(leaves, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return load(folder, dequant=FLOATS[dtype])


def check(array, tensor):
    word = {2: (np.uint16, torch.uint16), 4: (np.uint32, torch.uint32)}[tensor.element_size()]
    np.testing.assert_array_equal(np.asarray(array).view(word[0]), tensor.contiguous().view(word[1]).numpy())


def fp8(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


def nibbles(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_fp8_blocks_are_those_of_transformers(tmp_path, dtype, scales):
    weight, scale = fp8(384, 256), torch.rand(3, 2).to(scales)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = loaded(tmp_path, {"a.weight": weight, "a.weight_scale_inv": scale}, config, dtype)
    check(found["a"]["weight"], Fp8Dequantize(None)._dequantize_one(weight, scale, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp4_of_deepseek_is_that_of_transformers(tmp_path, dtype):
    weight, scale = nibbles(64, 64).view(torch.int8), torch.randint(110, 130, (64, 4), dtype=torch.uint8)
    scale = scale.view(torch.float8_e8m0fnu)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = loaded(tmp_path, {"a.weight": weight, "a.scale": scale}, config, dtype)
    check(found["a"]["weight"], Fp8Dequantize(None)._dequantize_one(weight, scale, dtype))


def test_mxfp4_of_gpt_oss_is_that_of_transformers(tmp_path):
    blocks, scales = nibbles(3, 64, 4, 16), torch.randint(0, 250, (3, 64, 4), dtype=torch.uint8)
    leaves = {"e.up_proj_blocks": blocks, "e.up_proj_scales": scales}
    found = loaded(tmp_path, leaves, {"quant_method": "mxfp4"}, torch.bfloat16)
    check(found["e"]["up_proj"], convert_moe_packed_tensors(blocks, scales))


# --------------------------------------------------------------------------------- compressed-tensors


def scheme_of(**weights):
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def declared(layout, scheme):
    groups = {"group_0": {"weights": scheme.weights.model_dump(mode="json")}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


@pytest.mark.parametrize(
    ("name", "layout", "weights"),
    [
        ("NVFP4PackedCompressor", "nvfp4-pack-quantized",
         {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
        ("PackedQuantizationCompressor", "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("PackedQuantizationCompressor", "pack-quantized", {"num_bits": 8, "strategy": "channel"}),
    ],
    ids=["nvfp4", "int4", "int8"],
)  # fmt: skip
def test_weights_of_compressed_tensors_are_those_of_its_library(tmp_path, name, layout, weights):
    scheme = scheme_of(**weights)
    weight, groups = torch.randn(32, 64), 64 // weights.get("group_size", 64)
    state = {"weight": weight, "weight_scale": weight.abs().reshape(32, groups, -1).amax(-1) / 7}
    if "nvfp4" in layout:
        state["weight_global_scale"] = torch.tensor([300.0])
        state["weight_scale"] = (weight.abs().reshape(32, groups, -1).amax(-1) / 6 * 300).to(
            torch.float8_e4m3fn
        )
        state["weight_scale"] = state["weight_scale"].to(torch.float32)
    compressor = getattr(compressors, name)
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(packed, scheme)["weight"].to(torch.float32)
    leaves = {f"a.{name}": leaf.contiguous() for name, leaf in packed.items()}
    found = loaded(tmp_path, leaves, declared(layout, scheme), torch.float32)
    if "nvfp4" in layout:  # the library multiplies in bfloat16
        np.testing.assert_allclose(np.asarray(found["a"]["weight"]), expected.numpy(), rtol=2**-7)
    else:
        check(found["a"]["weight"], expected)
