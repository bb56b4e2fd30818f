"""Quantised models of other programs are refused, by load and convert alone, and no other model is."""

import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from eformer import checkpoint
from eformer.checkpoint import convert, load, save
from eformer.errors import EformerError, QuantizedError
from eformer.serialization import AsyncCheckpointManager
from support import programs

SAMPLES = Path(__file__).parents[2] / "compat"
F8 = ml_dtypes.float8_e4m3fn
NORM = {"norm.weight": np.ones(4, np.float32)}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def block(dtype=F8, *shape):
    return np.ones(shape or (2, 4), dtype)


LAYOUTS = {  # by the names of a method: its leaves, and the configuration that declares it
    "fp8": ({"a.weight": block(), "a.weight_scale_inv": block(np.float32, 1, 1)}, FP8),
    "experts": ({"a.up": block(), "a.up_scale_inv": block(np.float32, 1, 1)}, FP8),
    "deepseek": ({"a.weight": block(np.int8), "a.scale": block(ml_dtypes.float8_e8m0fnu)}, {"quant_method": "fp8"}),
    "mxfp4": ({"a_blocks": block(np.uint8), "a_scales": block(np.uint8)}, {"quant_method": "mxfp4"}),
    "packed": (
        {"a.weight_packed": block(np.int32), "a.weight_scale": block(np.float32), "a.weight_shape": block(np.int64)},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ),
    "gptq": ({"a.qweight": block(np.int32), "a.scales": block(np.float16)}, {"quant_method": "gptq", "bits": 4}),
    "bitsandbytes": (
        {"a.weight": block(np.uint8), "a.weight.absmax": block(np.float32)},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "int8": ({"a.weight": block(np.int8), "a.scales": block(np.float32)}, {"quant_method": "int8"}),
    "int8 experts": ({"a.w1": block(np.int8), "a.w1_scale": block(np.float32)}, {"quant_method": "int8"}),
    "bitsandbytes in bf16": (
        {"a.weight": block(ml_dtypes.bfloat16), "a.weight.absmax": block(np.uint8), "a.weight.quant_map": block(np.float32)},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
    ),
    "bitsandbytes in f32": (
        {"a.weight": block(np.float32), "a.weight.quant_state.bitsandbytes__nf4": block(np.uint8)},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "modelopt experts": ({"a.up": block(), "a.up_weight_scale": block(), "a.up_weight_scale_2": block(np.float32)}, FP8),
    "llama experts": ({"a.up": block(), "a.up.weight_scale": block(np.float32)}, FP8),
    "mistral": ({"a.weight": block(), "a.qscale_weight": block(np.float32)}, {"qformat_weight": "fp8_e4m3"}),
    "torchao": (
        {"a._weight_qdata": block(np.int8), "a._weight_scale": block(np.float32)},
        {"quant_method": "torchao"},
    ),
    "exl2": (
        {"a.q_weight": block(np.int32), "a.q_scale": block(np.int32), "a.q_scale_max": block(np.float16)},
        {"quant_method": "exl2"},
    ),
    "nunchaku": ({"a.qweight": block(np.int8), "a.wscales": block(np.float32)}, {"method": "svdquant"}),
    "mlx": ({"a.weight": block(np.uint32), "a.scales": block(np.float16)}, {"bits": 4, "group_size": 64}),
}  # fmt: skip


def model(folder, leaves, config=None, name="config.json"):
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(leaves, folder / "model.safetensors")
    if config is not None:
        (folder / name).write_text(json.dumps(config))
    return folder


@pytest.fixture
def fp8(tmp_path):
    leaves, config = LAYOUTS["fp8"]
    return model(tmp_path / "fp8", {**leaves, **NORM}, {"quantization_config": config})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_refused_with_and_without_a_configuration(tmp_path, layout):
    leaves, config = LAYOUTS[layout]
    for given in (None, {"quantization_config": config}, {"text_config": {"quantization_config": config}}):
        path = model(tmp_path / "model", {**leaves, **NORM}, given)
        with pytest.raises(QuantizedError, match=r"is quantised: .* weight.*\(a.*Read raw, .*dequant=False"):
            load(path)
        assert load(path, dequant=False)["norm"]["weight"].shape == (4,)


def test_the_error_names_the_method_the_leaves_and_the_way_out(fp8):
    with pytest.raises(QuantizedError) as caught:
        load(fp8)
    assert str(caught.value) == (
        f"{fp8} is quantised: fp8 in blocks of 128 x 128 (config.json), 1 weight with a scale (a.weight: "
        "float8_e4m3fn[2, 4], scales float32[1, 1] in a.weight_scale_inv). Read raw, the weights would be wrong. Pass "
        'dequant="bf16" for the weights as numbers, or dequant=False (checkpoint.load, checkpoint.convert) for the '
        "stored leaves"
    )
    assert isinstance(caught.value, EformerError)
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("config", "how"),
    [
        ({"quant_method": "awq", "w_bit": 4}, "awq of 4 bits"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors as float-quantized"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes of 8 bits"),
        ({"bits": "4", "quant_method": None, "weight_block_size": 128}, "an unnamed method"),
    ],
)  # fmt: skip
def test_the_configuration_says_how(tmp_path, config, how):
    path = model(tmp_path / "model", {"a.codes": block(np.int16)}, {"quantization_config": config})
    with pytest.raises(QuantizedError, match=rf"is quantised: {how} \(config.json\)"):
        load(path)


@pytest.mark.parametrize("keys", [["llm_config"], ["thinker_config", "text_config"]])
def test_declarations_count_in_nested_configurations(tmp_path, keys):
    config = {"quantization_config": FP8}
    for key in reversed(keys):
        config = {key: config, "vision_config": {"depth": 3}}
    path = model(tmp_path / "model", {"a.weight": block()}, config)
    with pytest.raises(QuantizedError, match="is quantised: fp8"):
        load(path)


def test_the_configuration_of_modelopt_counts(tmp_path):
    config = {"quantization": {"quant_algo": "FP8"}}
    path = model(tmp_path / "model", {"a.weight": block()}, config, "hf_quant_config.json")
    with pytest.raises(QuantizedError, match=r"is quantised: FP8 \(hf_quant_config.json\)"):
        load(path)


EXPERTS = {"a.up": block(np.uint8), "a.up_weight_scale": block(), "a.up_weight_scale_2": block(np.float32)}


@pytest.mark.parametrize(
    "leaves", [EXPERTS, {"a.up": block(np.uint8), "a.up_scales": block(np.uint8)}], ids=["nvfp4", "mxfp4"]
)
def test_declared_experts_of_bytes_are_refused_and_their_scales_are_not(tmp_path, leaves):
    path = model(
        tmp_path / "model", {**leaves, **NORM}, {"quantization_config": {"quant_method": "modelopt"}}
    )
    for arguments in ({}, {"keys": "a.up"}, {"rename": {".*_scale(s|_2)?": None}}):
        with pytest.raises(
            QuantizedError, match=r", 1 weight with a scale \(a\.up: uint8\[2, 4\], scales \w+\[2, 4\] in"
        ):
            load(path, **arguments)
    assert load(path, keys="*_scale*")


@pytest.mark.parametrize(
    ("method", "name", "dtype"),
    [("marlin", "a.B", np.int32), ("vptq", "a.indices", np.int32), ("spqr", "a.dense_weights", np.int64),
     ("quip", "a.Qidxs", np.int64), ("gptq", "a.qweight", np.int64), ("new", "a.bits", np.uint8)],
)  # fmt: skip
def test_integers_of_a_declared_method_that_is_not_known_are_refused(tmp_path, method, name, dtype):
    leaves = {name: block(dtype), "a.perm_idx": block(np.int32), "a.steps": np.array(3), **NORM}
    path = model(tmp_path / "model", leaves, {"quantization_config": {"quant_method": method}})
    with pytest.raises(
        QuantizedError,
        match=rf"quantised: {method} \(config.json\), 1 weight \({name}: .*{method} cannot be dequantised",
    ):
        load(path)
    assert load(path, keys="norm")


@pytest.mark.parametrize(
    "config",
    [
        {"quantization": {"num_codebooks": 8}},
        {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
        {"quantization_config": {"load_in_4bit": False, "load_in_8bit": False}},
    ],
)
def test_a_configuration_without_a_method_declares_nothing(tmp_path, config):
    path = model(tmp_path / "model", {"codes": block(np.int8), "a.weight": block(np.uint8)}, config)
    assert load(path)


def test_the_configuration_of_mistral_counts(tmp_path):
    config = {"quantization": {"qformat_weight": "fp8_e4m3"}}
    path = model(tmp_path / "model", {"a.weight": block()}, config, "params.json")
    with pytest.raises(QuantizedError, match=r"is quantised: fp8_e4m3 \(params.json\)"):
        load(path)


@pytest.mark.parametrize(("text", "is_read"), [('{"quant_method": "fp8"}', True), ("{", False)])
def test_a_declaration_in_the_header_counts(tmp_path, text, is_read):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a.weight": block()}, path, {"quantization_config": text})
    if not is_read:
        assert load(path)
        return
    with pytest.raises(QuantizedError, match=r"is quantised: fp8 \(header\)"):
        load(path)


@pytest.mark.parametrize("config", [None, {"quantization_config": FP8}])
def test_a_weight_without_scales_is_refused_beside_weights_with_scales(tmp_path, config):
    leaves = {**LAYOUTS["fp8"][0], "b.weight": block(), "b.table": block(np.float32)}
    path = model(tmp_path / "model", leaves, config)
    with pytest.raises(QuantizedError, match=r"b.weight: float8_e4m3fn\[2, 4\], whose scales are missing"):
        load(path, keys="b")
    assert load(path, keys="b.table")


def test_scales_may_lie_in_another_file_of_the_directory(tmp_path):
    weight, scale = {"a.weight": block()}, {"a.weight_scale_inv": block(np.float32, 1, 1)}
    safetensors.numpy.save_file(weight, tmp_path / "weights.safetensors")
    safetensors.numpy.save_file(scale, tmp_path / "scales.safetensors")
    with pytest.raises(QuantizedError, match=r"scales float32\[1, 1\] in a.weight_scale_inv"):
        load(tmp_path, prefix="weights")
    assert load(tmp_path, prefix="scales")


@pytest.mark.parametrize(
    "leaves",
    [
        {"a.weight": block()},  # a plain cast
        {"a.weight": block(np.float32), "a.weight_scale": block(np.float32)},
        {"image": block(np.uint8), "image_scale": block(np.float32)},
        {"a.weight": block(np.int32), "a.scale": block(np.float32)},
        {"wave": block(np.int16), "wave_scale": block(np.float32)},
        {"ids": block(np.int64)},
    ],
)
def test_numbers_without_scales_are_no_quantised_model(tmp_path, leaves):
    path = model(tmp_path / "model", leaves, {"model_type": "llama", "quantization_config": {}})
    assert load(path)


def test_a_dense_model_with_an_old_declaration_loads(tmp_path):
    path = model(tmp_path / "model", NORM, {"quantization_config": FP8})
    assert load(path)["norm"]["weight"].shape == (4,)


def test_masks_and_indexes_of_a_dense_model_with_an_old_declaration_load(tmp_path):
    buffers = {"attn.bias": block(np.uint8), "rel_index": block(np.int32)}
    path = model(tmp_path / "model", {**buffers, **NORM}, {"quantization_config": FP8})
    assert load(path)["attn"]["bias"].dtype == np.uint8
    assert list(load(path, keys="rel_index")) == ["rel_index"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("up_proj", F8), ("up_proj", np.int8), ("a.weight", np.uint8), ("a.q_weight", np.int32)],
)
def test_a_declaration_counts_for_weights_whose_scales_are_elsewhere(tmp_path, name, dtype):
    path = model(tmp_path / "model", {name: block(dtype)}, {"quantization_config": FP8})
    with pytest.raises(QuantizedError, match=rf", 1 weight \({name}: "):
        load(path)


def test_checkpoints_of_eformer_are_loaded_as_they_were_saved(tmp_path):
    leaves, config = LAYOUTS["fp8"]
    for path in (tmp_path / "directory", tmp_path / "one.safetensors"):
        save(leaves, path)
    (tmp_path / "directory" / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert load(tmp_path / "directory").keys() == load(tmp_path / "one.safetensors").keys() == leaves.keys()


def test_selections_without_quantised_leaves_load(fp8):
    assert list(load(fp8, keys="norm")) == ["norm.weight"]
    assert load(fp8, root="norm")["weight"].shape == (4,)
    assert load(fp8, keys="*_scale_inv")["a.weight_scale_inv"].shape == (1, 1)
    assert load(fp8, rename={"a.weight.*": None})["norm"]["weight"].shape == (4,)
    like = {"norm": {"weight": jnp.zeros(4)}}
    assert load(fp8, like=like, partial=True)["norm"]["weight"].sum() == 4


def test_quantised_leaves_are_found_under_other_names_and_in_other_forms(fp8):
    renamed = {"a.weight": "kernel | transpose", "a.weight_scale_inv": None}
    for arguments in (
        {"rename": renamed},
        {"root": "a"},
        {"keys": "a.weight"},
        {"mmap": True},
        {"dtype": "bf16"},
    ):
        with pytest.raises(QuantizedError, match=r"a\.weight: float8_e4m3fn"):
            load(fp8, **arguments)


@pytest.mark.parametrize("partial", [False, True])
def test_a_like_of_the_dense_model_is_told_that_the_checkpoint_is_quantised(tmp_path, partial):
    path = model(tmp_path / "model", {**LAYOUTS["mxfp4"][0], **NORM})
    with pytest.raises(QuantizedError, match="a_blocks: uint8"):
        load(path, like={"a": jnp.zeros((4, 4)), "norm": {"weight": jnp.zeros(4)}}, partial=partial)


DENSE = {"a": jnp.zeros((4, 4)), "norm.weight": jnp.zeros(4)}


@pytest.mark.parametrize(
    "arguments",
    [
        {"like": {"m.a": DENSE["a"], "m.norm.weight": DENSE["norm.weight"]}},
        {"like": DENSE, "root": "m"},
        {"like": {"w": DENSE["a"], "n": DENSE["norm.weight"]}, "rename": {"m.a": "w", "m.norm.weight": "n"}},
    ],
    ids=["flat", "root", "rename"],
)
def test_a_partial_load_never_keeps_arrays_in_the_place_of_quantised_ones(tmp_path, arguments):
    leaves = {**LAYOUTS["mxfp4"][0], **NORM}
    path = model(tmp_path / "model", {f"m.{name}": leaf for name, leaf in leaves.items()})
    with pytest.raises(QuantizedError, match=r"m\.a_blocks: uint8"):
        load(path, partial=True, **arguments)
    assert load(path, partial=True, dequant=False, **arguments)


def test_a_partial_load_keeps_other_arrays_beside_quantised_leaves(tmp_path):
    path = model(tmp_path / "model", {**LAYOUTS["mxfp4"][0], **NORM})
    like = {"norm": {"weight": jnp.zeros(4)}, "head": jnp.full(2, 3)}
    loaded = load(path, like=like, partial=True)
    assert (loaded["norm"]["weight"].sum(), loaded["head"].sum()) == (4, 6)
    dropped = load(path, like=like, partial=True, rename={"a_blocks": None})
    assert dropped["norm"]["weight"].sum() == 4


def test_a_partial_load_takes_dense_weights_from_another_checkpoint(tmp_path):
    path = model(tmp_path / "model", {**LAYOUTS["mxfp4"][0], **NORM})
    save({"a": jnp.ones((4, 4))}, tmp_path / "dense")
    loaded = load([path, tmp_path / "dense"], like=DENSE, partial=True)
    assert (loaded["a"].sum(), loaded["norm.weight"].sum()) == (16, 4)


def test_the_doors_without_dequant_name_the_calls_that_have_it(fp8):
    mesh = jax.make_mesh((1,), ("x",))
    with pytest.raises(QuantizedError, match=r"dequant=False \(checkpoint.load, checkpoint.convert\)"):
        AsyncCheckpointManager().load(fp8, mesh)


def test_looking_never_fails_and_shows_stored_elements(fp8):
    with checkpoint.open(fp8) as view:
        assert view["a.weight"][:].dtype == F8
    assert checkpoint.inspect(fp8).trees[""].leaves["a.weight"].dtype == "float8_e4m3fn"
    assert checkpoint.verify(fp8).ok
    assert checkpoint.diff(fp8, fp8).same


def test_convert_refuses_unless_the_stored_leaves_are_asked_for(fp8, tmp_path):
    with pytest.raises(QuantizedError, match="fp8 in blocks of 128 x 128"):
        convert(fp8, tmp_path / "new", to="safetensors")
    convert(fp8, tmp_path / "norms", to="safetensors", rename={"a.*": None})
    convert(fp8, tmp_path / "new", to="safetensors", dequant=False)
    assert load(tmp_path / "new")["a"]["weight"].dtype == F8


@pytest.mark.parametrize("value", ["int8", True, 3])
def test_other_values_of_dequant_are_refused(fp8, tmp_path, value):
    calls = (
        lambda **more: load(fp8, **more),
        lambda **more: checkpoint.open(fp8, **more),
        lambda **more: convert(fp8, tmp_path / "x.npz", **more),
    )
    for call in calls:
        with pytest.raises(ValueError, match="floating dtype"):
            call(dequant=value)


def test_a_file_finds_the_configuration_beside_it_or_beside_the_link_to_it(tmp_path):
    path = model(tmp_path / "blobs", {"a.codes": block(np.int16)})
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(path / "model.safetensors")
    assert load(snapshot / "model.safetensors")
    (snapshot / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    with pytest.raises(QuantizedError, match="is quantised: fp8"):
        load(snapshot / "model.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_link_to_a_file_finds_the_configuration_beside_the_file(tmp_path, name):
    path = model(tmp_path / "model", {"a.codes": block(np.int16)}, {"quantization_config": FP8})
    shutil.copy(SAMPLES / "torch" / "kinds.pt", path / "pytorch_model.bin")
    links = tmp_path / "links"
    links.mkdir()
    (links / "config.json").write_text("{}")  # that of a link comes first, and says nothing
    (links / name).symlink_to(path / name)
    with pytest.raises(QuantizedError, match="is quantised: fp8"):
        load(links / name)


@pytest.mark.parametrize("text", ["{", "[]", '{"quantization_config": 3, "text_config": "x"}'])
def test_a_configuration_that_makes_no_sense_stops_no_load(tmp_path, text, caplog):
    path = model(tmp_path / "model", {"a.weight": block()})
    (path / "config.json").write_text(text)
    assert load(path)
    assert ("eformer cannot tell whether it declares the model as quantised" in caplog.text) == (
        text[1:2] != '"'
    )


@pytest.mark.parametrize("text", ["{", '{"a": ' * 10**5], ids=["cut", "deep"])
def test_scales_tell_where_the_configuration_cannot_be_read(tmp_path, text, caplog):
    path = model(tmp_path / "model", LAYOUTS["mlx"][0])
    (path / "config.json").write_text(text)
    with pytest.raises(QuantizedError, match="weights of few bits beside their scales"):
        load(path)
    assert "config.json is not a configuration" in caplog.text


@pytest.mark.parametrize(
    "start", ["\ufeff{", '{"limit": [0.0, Infinity], ', '{"x": NaN, ', '{"most": 1e999, ']
)
def test_a_configuration_is_read_as_python_reads_it(tmp_path, start):
    path = model(tmp_path / "model", {"a.weight": block()})
    (path / "config.json").write_text(f'{start}"quantization_config": {json.dumps(FP8)}}}', "utf-8")
    with pytest.raises(QuantizedError, match="is quantised: fp8"):
        load(path)


AS_USER = """
import os, sys
from eformer.checkpoint import load
load(sys.argv[1])  # all imports
os.chmod(sys.argv[1] + "/config.json", 0)
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
assert load(sys.argv[1])
"""


def test_a_configuration_that_may_not_be_read_stops_no_load():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = model(Path(folder) / "model", {"a.weight": block()}, {})
        (path / "model.safetensors").chmod(0o644)
        done = programs.run(AS_USER, path)
    assert done.returncode == 0, done.stderr
    assert "eformer cannot tell whether it declares the model as quantised" in done.stderr


def test_files_of_pytorch_are_refused_by_their_configuration(tmp_path):
    for file in ("pytorch_model.bin", "pytorch_model-00001-of-00002.bin"):
        shutil.copy(SAMPLES / "torch" / "kinds.pt", tmp_path / file)
    paths = [tmp_path, *tmp_path.iterdir()]
    assert all(map(load, paths))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    for path in paths:
        with pytest.raises(QuantizedError, match=r"gptq \(config.json\)"):
            load(path)


@pytest.mark.parametrize("sample", ["fp8.pt", "distributed_fp8"])
def test_files_of_pytorch_are_refused_by_their_scales(tmp_path, sample):
    path = SAMPLES / "torch" / sample
    for call in (load, lambda path: convert(path, tmp_path / "new", to="safetensors")):
        with pytest.raises(
            QuantizedError, match=r"model\.a\.weight: float8_e4m3fn.* in model\.a\.weight_scale_inv"
        ):
            call(path)
    assert load(path, dequant=False)["model"]["a"]["weight"].dtype == F8


@pytest.mark.parametrize(
    ("leaves", "config"),
    [
        ({"m.tokens_per_expert": np.arange(4)}, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        ({"m._extra_state": np.zeros(8, np.uint8)}, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        ({"m.codes": np.ones((64, 64), np.int64)}, {"num_codebooks": 8, "mode": "rvq"}),
        ({"m.table": np.ones((64, 64), np.int64)}, {"bits": 16}),
        ({"m.table": np.ones((64, 64), np.int64)}, {"quant_method": "none"}),
        ({"m.table": np.ones((64, 64), np.int64)}, {"quant_method": "modelopt", "quant_algo": None}),
    ],
)
def test_tables_and_counters_of_a_dense_model_are_no_packed_weights(tmp_path, leaves, config):
    weights = {"m.q.weight": np.ones((64, 64), np.float32)}
    path = model(tmp_path / "model", {**weights, **leaves}, {"quantization_config": config})
    assert load(path)["m"]["q"]["weight"].shape == (64, 64)
