"""Export trees and checkpoints as models that transformers opens."""

import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from eformer._engine.stores.locate import store_at
from eformer.checkpoint import convert, export, inspect, load, save, verify
from eformer.errors import MismatchError, NotFoundError, QuantizedError
from support.models import CONFIG, ROWS, weights, write_model
from support.safetensors_files import assert_equal, read_by_index, tensors_in

pytestmark = pytest.mark.usefixtures("trusted")

WRITTEN = ["README.md", "config.json", "manifest.json"]
COPIED = [
    "LICENSE",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture
def like(tmp_path):
    return write_model(tmp_path / "like")


@pytest.fixture
def tree():
    """The weights in float32, as jax arrays."""
    return {name: jnp.asarray(array, jnp.float32) for name, array in weights().items()}


def config_of(path):
    return json.loads((path / "config.json").read_text())


# ------------------------------------------------------------------------------------------ the directory


def test_a_tree_becomes_a_model_with_the_files_and_the_dtypes_of_like(tree, like, tmp_path):
    export(tree, tmp_path / "new", like=like)
    assert sorted(os.listdir(tmp_path / "new")) == sorted([*WRITTEN, *COPIED, "model.safetensors"])
    assert_equal(tensors_in(tmp_path / "new"), weights())
    for name in COPIED:
        assert (tmp_path / "new" / name).read_bytes() == (like / name).read_bytes()


def test_the_result_loads_with_equal_bits_and_has_digests(tree, like, tmp_path):
    export(tree, tmp_path / "new", like=like)
    found = load(tmp_path / "new", keys=list(weights()))
    assert_equal(found, weights())
    assert verify(tmp_path / "new").has_digests
    assert verify(tmp_path / "new").ok


def test_shards_have_an_index_in_the_order_of_transformers(tree, like, tmp_path):
    export(tree, tmp_path / "new", like=like, max_shard_size=200)
    assert_equal(read_by_index(tmp_path / "new"), weights())
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == sorted(weights())
    assert index["metadata"]["total_parameters"] == sum(array.size for array in weights().values())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in weights().values())
    assert "model-00001-of-00003.safetensors" in index["weight_map"].values()


def test_layers_are_in_natural_order(tree, like, tmp_path):
    done = export(tree, tmp_path / "new", like=like, dry_run=True)
    layers = [leaf.name.split(".")[2] for leaf in done.leaves[""] if ".layers." in leaf.name]
    assert layers == [str(number) for number in range(12)]
    assert not (tmp_path / "new").exists()


def test_every_file_says_that_it_is_of_pytorch(tree, like, tmp_path):
    export(tree, tmp_path / "new", like=like)
    with safetensors.safe_open(tmp_path / "new" / "model.safetensors", "np") as file:
        assert file.metadata()["format"] == "pt"


def test_weights_of_other_programs_and_hidden_files_stay_behind(tree, like, tmp_path):
    for name in (
        "pytorch_model.bin",
        "flax_model.msgpack",
        "model.gguf",
        "hf_quant_config.json",
        ".gitattributes",
    ):
        (like / name).write_text("{}")
    (like / ".cache").mkdir()
    (like / "original").mkdir()
    export(tree, tmp_path / "new", like=like)
    assert sorted(os.listdir(tmp_path / "new")) == sorted([*WRITTEN, *COPIED, "model.safetensors"])


def test_code_that_the_configuration_names_is_copied_with_its_imports(tree, tmp_path):
    auto = {"AutoModelForCausalLM": "modeling_x.Model", "AutoTokenizer": ["other/model--tok_x.Slow", None]}
    like = write_model(
        tmp_path / "like",
        config=CONFIG | {"auto_map": auto},
        modeling_x__py="from .layers_x import Layer\nraise SystemExit\n",
        layers_x__py="",
        unused__py="",
    )
    export(tree, tmp_path / "new", like=like)
    assert {name for name in os.listdir(tmp_path / "new") if name.endswith(".py")} == {
        "modeling_x.py",
        "layers_x.py",
    }


def test_further_templates_are_copied(tree, like, tmp_path):
    (like / "additional_chat_templates").mkdir()
    (like / "additional_chat_templates" / "tool.jinja").write_text("tool")
    export(tree, tmp_path / "new", like=like)
    assert (tmp_path / "new" / "additional_chat_templates" / "tool.jinja").read_text() == "tool"


def test_a_snapshot_of_the_cache_of_the_hub_is_a_like(tree, like, tmp_path):
    cache = tmp_path / "models--org--tiny"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(like.iterdir()):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    export(tree, tmp_path / "new", like=snapshot)
    assert {*COPIED} < {*os.listdir(tmp_path / "new")}
    assert "base_model: org/tiny\n" in (tmp_path / "new" / "README.md").read_text()


# ------------------------------------------------------------------------------------------------ sources


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_arrays_on_several_devices_are_exported(like, tmp_path, spec):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    tree = {
        name: jax.device_put(array, NamedSharding(mesh, spec if array.ndim == 2 else P()))
        for name, array in weights().items()
    }
    export(tree, tmp_path / "new", like=like)
    assert_equal(tensors_in(tmp_path / "new"), weights())


def test_a_step_of_a_run_is_exported(tree, like, tmp_path):
    with checkpoint.Run(tmp_path / "run", every=1) as run:
        for step in (1, 2):
            changed = {name: array * step for name, array in tree.items()}
            run.after(step, {"params": changed, "opt": jnp.zeros(3)})
    export(tmp_path / "run", tmp_path / "new", like=like, root="params", step=1)
    assert_equal(tensors_in(tmp_path / "new"), weights())


def test_rules_give_the_leaves_their_names(like, tmp_path):
    layers = np.stack([np.full((4, 4), n) for n in range(12)]).astype(np.float32)
    tree = {"embed": weights()["model.embed_tokens.weight"], "norm": np.ones(4, np.float32), "mlp": layers}
    back = [
        "embed -> model.embed_tokens.weight",
        "norm -> model.norm.weight",
        "mlp -> model.layers.{}.mlp.weight | unstack",
    ]
    tied = CONFIG | {"tie_word_embeddings": True}
    like = write_model(tmp_path / "tied", weights(head=False), tied)
    export(tree, tmp_path / "new", like=like, rename=back)
    assert_equal(tensors_in(tmp_path / "new"), weights(head=False))


def test_the_state_of_a_step_is_not_published(tree, like, tmp_path):
    save({"params": tree}, tmp_path / "step", metadata={"secret": "plan"})
    export(tmp_path / "step", tmp_path / "new", like=like, root="params")
    (new,) = inspect(tmp_path / "new").trees.values()
    assert new.metadata == {}
    assert new.origin["parents"] == [
        {"save_id": inspect(tmp_path / "step").trees[""].save_id, "digest": inspect(tmp_path / "step").digest}
    ]
    for file in (tmp_path / "new").iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()


def test_a_tree_whose_arrays_lie_in_other_processes_is_refused(tree, like, tmp_path, monkeypatch):
    monkeypatch.setattr(type(tree["model.norm.weight"]), "is_fully_addressable", False)
    with pytest.raises(ValueError, match="save the tree from all processes, and export the path"):
        export(tree, tmp_path / "new", like=like)


# ------------------------------------------------------------------------------------------ configuration


def test_the_dtype_is_that_of_the_weights(tree, like, tmp_path):
    export(tree, tmp_path / "new", like=like, dtype="fp16")
    assert config_of(tmp_path / "new") == CONFIG | {"dtype": "float16"}
    assert tensors_in(tmp_path / "new")["model.norm.weight"].dtype == np.float16


def test_each_tensor_has_the_dtype_that_it_has_in_like(tree, tmp_path):
    theirs = weights()
    theirs["model.norm.weight"] = theirs["model.norm.weight"].astype(np.float32)
    export(tree, tmp_path / "new", like=write_model(tmp_path / "like", theirs))
    found = {name: array.dtype for name, array in tensors_in(tmp_path / "new").items()}
    assert found == {name: array.dtype for name, array in theirs.items()}


def test_without_weights_in_like_the_configuration_has_the_dtype(tree, tmp_path):
    like = write_model(tmp_path / "like", {}, CONFIG | {"dtype": "float16"})
    done = export(tree, tmp_path / "new", like=like)
    assert tensors_in(tmp_path / "new")["model.norm.weight"].dtype == np.float16
    assert "names and shapes are not compared: like has no weights" in done.notes


def test_settings_of_the_caller_come_last(tree, tmp_path):
    like = write_model(tmp_path / "like", config=CONFIG | {"rope": {"a": 1, "b": 2}})
    export(tree, tmp_path / "new", like=like, config={"rope": {"b": 3}, "x": "y"})
    assert config_of(tmp_path / "new") == CONFIG | {"rope": {"a": 1, "b": 3}, "x": "y"}


def test_a_recorded_configuration_is_enough(tree, tmp_path):
    save(tree, tmp_path / "step", origin={"rules": {"config": CONFIG}})
    export(tmp_path / "step", tmp_path / "new")
    assert config_of(tmp_path / "new") == CONFIG
    assert sorted(os.listdir(tmp_path / "new")) == sorted([*WRITTEN, "model.safetensors"])
    export(tree, tmp_path / "other", origin={"rules": {"config": CONFIG}}, card=False)
    assert not (tmp_path / "other" / "README.md").exists()


def test_weights_alone_are_refused(tree, tmp_path):
    with pytest.raises(ValueError, match=r"cannot open weights alone: .* Pass like= .*, or config="):
        export(tree, tmp_path / "new")


# --------------------------------------------------------------------------------------------- embeddings


def test_a_tied_head_is_not_written(tree, tmp_path):
    like = write_model(tmp_path / "like", weights(head=False), CONFIG | {"tie_word_embeddings": True})
    tree["lm_head.weight"] = tree["model.embed_tokens.weight"]
    export(tree, tmp_path / "new", like=like)
    assert_equal(tensors_in(tmp_path / "new"), weights(head=False))


def test_a_tied_head_that_differs_is_an_error(tree, tmp_path):
    like = write_model(tmp_path / "like", weights(head=False), CONFIG | {"tie_word_embeddings": True})
    problem = (
        r"lm_head.weight is not model.embed_tokens.weight \(max difference 1\).* tie_word_embeddings to false"
    )
    with pytest.raises(MismatchError, match=problem):
        export(tree, tmp_path / "new", like=like)
    export(tree, tmp_path / "new", like=like, config={"tie_word_embeddings": False})
    assert_equal(tensors_in(tmp_path / "new"), weights())


def test_a_head_that_like_stores_although_it_is_tied_may_be_missing(tree, tmp_path):
    like = write_model(tmp_path / "like", weights(), CONFIG | {"tie_word_embeddings": True})
    del tree["lm_head.weight"]
    export(tree, tmp_path / "new", like=like)
    assert config_of(tmp_path / "new")["tie_word_embeddings"] is True


@pytest.mark.parametrize("head", [True, False])
def test_without_like_the_tensors_say_whether_the_head_is_tied(tree, tmp_path, head):
    config = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"}
    if not head:
        del tree["lm_head.weight"]
    export(tree, tmp_path / "new", config=config)
    assert config_of(tmp_path / "new")["tie_word_embeddings"] is not head


def test_a_larger_vocabulary_needs_to_be_asked_for(tree, like, tmp_path):
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tree[name] = jnp.concatenate([tree[name], tree[name][:4]])
    with pytest.raises(MismatchError, match=rf"the shape \[16, 4\], and like has \[{ROWS}, 4\]"):
        export(tree, tmp_path / "new", like=like)
    export(tree, tmp_path / "new", like=like, config={"vocab_size": 16})
    assert config_of(tmp_path / "new")["vocab_size"] == 16


# ------------------------------------------------------------------------------------------------- checks


def test_all_differences_from_like_are_one_error(tree, like, tmp_path):
    changed = tree | {"model.normal.weight": jnp.ones(4), "model.norm.weight": jnp.ones(5)}
    changed["model.layers.0.mlp.weight"] = jnp.ones((4, 4), jnp.int32)
    del changed["model.layers.1.mlp.weight"]
    with pytest.raises(MismatchError) as caught:
        export(changed, tmp_path / "new", like=like)
    assert str(caught.value).split("\n  ") == [
        "cannot be exported as a model of Hugging Face: 4 mismatches",
        "leaf 'model.normal.weight' is not in like (nearest is 'model.norm.weight')",
        "leaf 'model.layers.1.mlp.weight' is in like and not in this tree",
        "leaf 'model.layers.0.mlp.weight' has the dtype int32, and like has bfloat16",
        "leaf 'model.norm.weight' has the shape [5], and like has [4]",
        "root=, keys= and rename= choose and name the leaves of the tree; fill_from_like=True takes leaves from like, "
        "allow_missing=True goes on without them",
    ]
    assert not (tmp_path / "new").exists()


def test_leaves_of_a_layer_are_one_line(tree, tmp_path):
    more = {f"model.layers.12.{name}.weight": np.ones(2, np.float32) for name in ("a", "b", "c")}
    like = write_model(tmp_path / "like", weights() | more)
    with pytest.raises(MismatchError, match=r"3 leaves of model.layers.12 are in like and not in this tree"):
        export(tree, tmp_path / "new", like=like)


def test_missing_tensors_come_from_like_or_stay_missing(tree, like, tmp_path):
    del tree["model.layers.3.mlp.weight"]
    export(tree, tmp_path / "filled", like=like, fill_from_like=True)
    assert_equal(tensors_in(tmp_path / "filled"), weights())
    done = export(tree, tmp_path / "less", like=like, allow_missing=True)
    assert "model.layers.3.mlp.weight" not in tensors_in(tmp_path / "less")
    assert "in like, and not in this tree: model.layers.3.mlp.weight" in done.notes


def test_every_token_needs_a_row(tree, tmp_path):
    words = {"added_tokens": [{"id": 12}], "model": {"vocab": [["a", 0.1]]}}
    ids = {"pad_token_id": 40, "eos_token_id": [1, 50], "temperature": 99}
    like = write_model(
        tmp_path / "like", tokenizer__json=json.dumps(words), generation_config__json=json.dumps(ids)
    )
    with pytest.raises(MismatchError) as caught:
        export(tree, tmp_path / "new", like=like)
    assert caught.value.problems == (
        "model.embed_tokens.weight has 12 rows, and tokenizer.json has tokens up to 12; expected at least 13 rows",
        "pad_token_id in generation_config.json is 40, expected less than the 12 rows of model.embed_tokens.weight",
        "eos_token_id in generation_config.json is 50, expected less than the 12 rows of model.embed_tokens.weight",
    )


def test_code_that_the_configuration_names_must_be_there(tree, tmp_path):
    like = write_model(tmp_path / "like", config=CONFIG | {"auto_map": {"AutoModel": "modeling_x.Model"}})
    with pytest.raises(MismatchError, match=r"modeling_x.py is missing in .*like, and auto_map .* names it"):
        export(tree, tmp_path / "new", like=like)


def test_settings_that_are_not_json_are_refused(tree, like, tmp_path):
    with pytest.raises(ValueError, match="config= has values that are not JSON: Object of type set"):
        export(tree, tmp_path / "out", like=like, config={"x": {1}})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("module", ["../../secret", "/etc/passwd", "..", "a/b"])
def test_code_outside_of_the_directory_is_not_read(tree, tmp_path, module):
    like = write_model(tmp_path / "like", config=CONFIG | {"auto_map": {"AutoModel": f"{module}.Model"}})
    export(tree, tmp_path / "new", like=like)
    assert not [name for name in os.listdir(tmp_path / "new") if name.endswith(".py")]


def test_keys_of_random_generators_are_refused(tree, like, tmp_path):
    with pytest.raises(MismatchError, match="leaf 'rng' holds PRNG keys"):
        export(tree | {"rng": jax.random.key(0)}, tmp_path / "new", like=like)


def test_like_must_be_a_model(tree, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"has no config.json; pass the directory of a model"):
        export(tree, tmp_path / "new", like=tmp_path / "empty")
    with pytest.raises(NotFoundError, match=r"like=.*none' does not exist"):
        export(tree, tmp_path / "new", like=tmp_path / "none")


def test_arguments_of_an_export_are_refused_elsewhere(tree, like, tmp_path):
    save(tree, tmp_path / "step")
    with pytest.raises(ValueError, match=r"like= is for to='hf' and for rules"):
        convert(tmp_path / "step", tmp_path / "new", to="safetensors", like=like)
    with pytest.raises(ValueError, match=r"fill_from_like= and card= are for to='hf'"):
        convert(tmp_path / "step", tmp_path / "new", to="safetensors", card=False)
    with pytest.raises(ValueError, match=r"step=, prefix= and dequant= are for the path of a checkpoint"):
        export(tree, tmp_path / "new", like=like, step=3)
    with pytest.raises(ValueError, match=r"'5 bytes' is not a size"):
        export(tree, tmp_path / "new", like=like, max_shard_size="5 bytes")


# -------------------------------------------------------------------------------------------- destination


def test_a_directory_that_exists_is_refused(tree, like, tmp_path):
    export(tree, tmp_path / "new", like=like)
    before = {file: file.read_bytes() for file in (tmp_path / "new").iterdir()}
    with pytest.raises(FileExistsError, match="already exists"):
        export(tree, tmp_path / "new", like=like, max_shard_size=200)
    assert {file: file.read_bytes() for file in (tmp_path / "new").iterdir()} == before


_INTERRUPTED = """
import signal, sys, time
import ml_dtypes
import numpy as np
from eformer.checkpoint import export
signal.signal(signal.SIGINT, signal.default_int_handler)
def slowly(done, total):
    print(done, flush=True)
    time.sleep(0.2)
tree = {f"layers.{n}.weight": np.ones((256, 4096), np.float32) for n in range(16)}
export(tree, sys.argv[1], config={"model_type": "x"}, max_shard_size="5MB", progress=slowly)
"""


@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_export_leaves_nothing(tree, like, tmp_path, kill):
    command = [sys.executable, "-c", _INTERRUPTED, str(tmp_path / "new")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.send_signal(kill)
    process.communicate(timeout=60)
    assert process.returncode
    assert not (tmp_path / "new").exists()
    export(tree, tmp_path / "new", like=like)  # removes the remains of a killed export
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_an_export_to_a_bucket_has_every_file_and_the_index(tree, like, tmp_path):
    bucket = f"memory://exports/{tmp_path.name}"
    (like / "additional_chat_templates").mkdir()
    (like / "additional_chat_templates" / "tool.jinja").write_text("tool")
    export(tree, bucket, like=like, max_shard_size=200)
    assert_equal(load(bucket, keys=list(weights())), weights())
    there = set(store_at(bucket).kinds())
    assert {*WRITTEN, *COPIED, "additional_chat_templates", "model.safetensors.index.json"} < there
    assert store_at(bucket).read("LICENSE")[0] == b"free"
    export(bucket, tmp_path / "back", like=like)
    assert_equal(tensors_in(tmp_path / "back"), weights())
    with pytest.raises(FileExistsError, match="already exists"):
        export(tree, bucket, like=like)


def test_a_failed_export_to_a_bucket_leaves_nothing(tree, like, tmp_path):
    def fail(done, total):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        export(tree, f"memory://exports/{tmp_path.name}", like=like, progress=fail)
    with pytest.raises(FileNotFoundError):
        store_at(f"memory://exports/{tmp_path.name}").kinds()
    export(tree, f"memory://exports/{tmp_path.name}", like=like)


# --------------------------------------------------------------------------------------------------- card


def test_the_card_has_licence_and_origin(tree, like, tmp_path):
    save(tree, tmp_path / "run" / "step-7", origin={"rules": {"book": "llama/flax", "version": 1}})
    export(tmp_path / "run" / "step-7", tmp_path / "new", like=like)
    digest = inspect(tmp_path / "run" / "step-7").digest
    card = (tmp_path / "new" / "README.md").read_text()
    assert card.startswith(
        "---\nlicense: other\nlicense_name: tiny\npipeline_tag: text-generation\nlanguage:\n- en\n- fr\n"
        "library_name: transformers\n---\n"
    )
    assert f"from step-7, a checkpoint with the digest {digest}" in card
    assert "rules llama/flax, version 1" in card
    assert "Theirs" not in card


# ------------------------------------------------------------------------------------------ quantised weights


def fp8(path):
    """Write a model whose weights of layers are FP8 with scales."""
    tensors = {}
    for name, array in weights().items():
        if ".mlp." in name:
            tensors[name] = array.astype(ml_dtypes.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)
        else:
            tensors[name] = array
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return write_model(path, tensors, CONFIG | {"quantization_config": method})


def test_a_quantised_like_is_compared_as_numbers_and_the_result_is_dense(tree, tmp_path):
    export(tree, tmp_path / "new", like=fp8(tmp_path / "like"))
    assert_equal(tensors_in(tmp_path / "new"), weights())
    assert config_of(tmp_path / "new") == CONFIG


def test_a_quantised_model_is_exported_as_numbers_if_asked(tmp_path):
    source = fp8(tmp_path / "source")
    with pytest.raises(QuantizedError, match="fp8"):
        export(source, tmp_path / "new", like=source)
    export(source, tmp_path / "new", like=source, dequant="bf16")
    assert_equal(tensors_in(tmp_path / "new"), weights())


def test_missing_tensors_of_a_quantised_like_come_as_numbers(tree, tmp_path):
    del tree["model.layers.3.mlp.weight"]
    export(tree, tmp_path / "new", like=fp8(tmp_path / "like"), fill_from_like=True)
    assert_equal(tensors_in(tmp_path / "new"), weights())
