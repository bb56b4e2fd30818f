"""Load, open, convert and resume by rules that name axes."""

import json
import logging
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_dtypes import bfloat16

from eformer._engine.record.lazy_arrays import StoredLeaf
from eformer.checkpoint import Run, convert, load, save
from eformer.checkpoint import open as open_view
from eformer.errors import MismatchError
from support.lazy import numbers

H, K, D, F, V = 4, 2, 6, 5, 7
CONFIG = {"model_type": "llama", "heads": H, "torch_dtype": "bfloat16", "vocab": V}
MODEL = {
    **{f"m.{i}.q": numbers(H * K, D, dtype=bfloat16) + i for i in range(3)},
    **{f"m.{i}.e.{e}.{n}": numbers(F, D, dtype=bfloat16) + e for i in range(3) for e in (0, 1) for n in ("up", "down")},
    "embed": numbers(V, D, dtype=bfloat16),
    "norm": numbers(D, dtype=bfloat16),
}  # fmt: skip
RULES = """
h = heads
m.{l}.q [(h k) d] <-> layers.{l}.q [d h k]
m.{l}.e.{e}.{c=up|down} [o i] <-> layers.{l}.{c=wi|wo} [e i o]
embed [v d] <-> table [d v]
norm <-> scale | add 1
--- scanned
layers.{l}.{*q} [...] <-> layers.{*q} [l ...]
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "hf").mkdir()
    safetensors.numpy.save_file(MODEL, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "hf"


def counting(monkeypatch):
    """Count the elements that are read from stored leaves."""
    counted, read = [], StoredLeaf.read

    def count(leaf, box):
        counted.append(box.size)
        return read(leaf, box)

    monkeypatch.setattr(StoredLeaf, "read", count)
    return counted


def test_numbers_come_from_the_config_beside_the_weights(model):
    tree = load(model, rename=RULES)
    queries = np.stack([MODEL[f"m.{i}.q"].T.reshape(D, H, K) for i in range(3)])
    np.testing.assert_array_equal(tree["layers"]["q"], queries)
    assert (tree["scale"].dtype, tree["table"].dtype) == (np.float32, bfloat16)
    np.testing.assert_array_equal(tree["layers"]["wi"][2, 1], MODEL["m.2.e.1.up"].T)


@pytest.mark.parametrize("as_path", [False, True])
def test_config_is_a_dict_or_a_path(model, tmp_path, as_path):
    (model / "config.json").rename(tmp_path / "other.json")
    config = tmp_path / "other.json" if as_path else CONFIG
    assert load(model, rename=RULES, config=config)["layers"]["q"].shape == (3, D, H, K)
    with pytest.raises(
        MismatchError, match=r"\(h k\) of 8 cannot be divided, because neither h nor k is known"
    ):
        load(model, rename=RULES)
    with pytest.raises(FileNotFoundError, match=r"there is no config\.json"):
        load(model, rename=RULES, config=tmp_path)


def test_config_is_for_rules(model):
    for call in (load, open_view):
        with pytest.raises(ValueError, match="config= is for the rules of rename=, or of back=True"):
            call(model, config=CONFIG)


def test_like_gives_the_sizes_the_dtype_and_the_places(model, caplog):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    place = NamedSharding(mesh, P(None, None, "x"))
    like = {
        "layers": {
            "q": jax.ShapeDtypeStruct((3, D, H, K), bfloat16),
            "wi": jax.ShapeDtypeStruct((3, 2, D, F), bfloat16),
            "wo": jax.ShapeDtypeStruct((3, 2, D, F), bfloat16),
        },
        "table": jax.ShapeDtypeStruct((D, V), bfloat16),
        "scale": jax.ShapeDtypeStruct((D,), bfloat16),
    }
    like["layers"]["q"] = jax.ShapeDtypeStruct((3, D, H, K), bfloat16, sharding=place)
    with caplog.at_level(logging.WARNING):
        tree = load(model, rename=RULES.replace("h = heads", ""), like=like)
    assert tree["layers"]["q"].sharding == place
    np.testing.assert_array_equal(tree["scale"], (MODEL["norm"].astype(np.float32) + 1).astype(bfloat16))
    assert "scale: computed in float32, stored as bfloat16; the way back is not exact" in caplog.text


def test_the_way_there_and_back_gives_the_same_bits(model, tmp_path):
    done = convert(model, tmp_path / "mine", to="safetensors", rename=RULES)
    assert "[o i] to [e i o], [...] to [l ...]" in str(done)
    convert(tmp_path / "mine", tmp_path / "back", to="zarr", rename=RULES, back=True, config=model)
    with open_view(tmp_path / "back") as back:
        assert sorted(back) == sorted(MODEL)
        for name, array in MODEL.items():
            assert back[name].dtype == bfloat16
            np.testing.assert_array_equal(back[name][...], array)
    tree = load(tmp_path / "mine", rename=RULES, back=True, config=CONFIG)
    np.testing.assert_array_equal(tree["m"]["1"]["q"], MODEL["m.1.q"])


def test_a_conversion_notes_values_that_are_rounded(model, tmp_path):
    done = convert(model, tmp_path / "mine", to="safetensors", rename=RULES, dtype="bf16", dry_run=True)
    assert "scale: computed in float32, stored as bfloat16; the way back is not exact" in done.notes


def test_a_cast_of_a_rule_wins_over_dtype(model, tmp_path):
    rules = "norm <-> norm | cast f32\nm.{l}.{*q} ->"
    assert {name: leaf.dtype for name, leaf in load(model, rename=rules, dtype="float16").items()} == {
        "norm": np.float32,
        "embed": np.float16,
    }
    convert(model, tmp_path / "x.safetensors", rename=rules, dtype="f16")
    assert open_view(tmp_path / "x.safetensors")["norm"].dtype == np.float32


def test_a_view_reads_the_boxes_of_renamed_leaves(model, monkeypatch):
    with open_view(model, rename=RULES) as view:
        again = pickle.loads(pickle.dumps(view))
        counted = counting(monkeypatch)
        found = view["layers.q"][1, :, 2]
        assert sum(counted) == K * D
        np.testing.assert_array_equal(found, MODEL["m.1.q"].T.reshape(D, H, K)[:, 2])
        np.testing.assert_array_equal(again["layers.wo"][2, 0], MODEL["m.2.e.0.down"].T)
        assert sorted(view) == ["layers.q", "layers.wi", "layers.wo", "scale", "table"]
        again.close()
    assert sorted(open_view(model, rename="h = heads\n{*p} [v d] <-> {*p} [v d]\nnorm ->")) == sorted(
        set(MODEL) - {"norm"}
    )


def test_a_run_resumes_by_rules(tmp_path):
    with Run(tmp_path / "run") as run:
        run.save(1, {"q": numbers(D, H, K), "step": 3})
    with Run(tmp_path / "run") as run:
        resumed = run.resume(rename="h = 4\na [(h k) d] <-> q [d h k]", back=True, config=CONFIG)
    np.testing.assert_array_equal(resumed.tree["a"], numbers(D, H, K).transpose(1, 2, 0).reshape(H * K, D))
    assert resumed.tree["step"] == 3


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(model, tmp_path):
    save({"table": numbers(V, D), "head": numbers(D, V)}, tmp_path / "tree")
    rules = "embed [v d] <-> table [v d]\nhead or embed [v d] <-> head [d v]"
    tied = {"tie_word_embeddings": True}
    for call in (load, open_view):
        with pytest.raises(MismatchError, match="head is not the embedding"):
            call(tmp_path / "tree", rename=rules, back=True, config=tied)
    with pytest.raises(MismatchError, match="head is not the embedding"):
        convert(tmp_path / "tree", tmp_path / "new.npz", rename=rules, back=True, config=tied)
    assert sorted(load(tmp_path / "tree", rename=rules, back=True, config={})) == ["embed", "head"]


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(None, None, "x"), P()])
def test_experts_of_all_layers_are_read_once_for_all_devices(tmp_path, monkeypatch, spec):
    leaves = {
        f"m.{i}.e.{e}.{n}": np.full((8, 3), 64 * i + e, np.int16)
        for i in range(48)
        for e in range(64)
        for n in ("w1", "w3")
    }
    safetensors.numpy.save_file(leaves, tmp_path / "moe.safetensors")
    mesh = jax.make_mesh((8,), ("x",))
    rules = "m.{l}.e.{e}.{c=w1|w3} [o i] <-> {c=wi_0|wi_1} [e l o i]"
    counted = counting(monkeypatch)
    tree = load(tmp_path / "moe.safetensors", rename=rules, shardings=NamedSharding(mesh, spec))
    assert sum(counted) == sum(array.size for array in leaves.values())
    np.testing.assert_array_equal(
        np.asarray(tree["wi_1"])[:, :, 0, 0], np.arange(64)[:, None] + 64 * np.arange(48)
    )


@pytest.mark.parametrize("scanned", ["", "\n---\nl.{l}.{*q} [...] <-> {*q} [l ...]"])
def test_interleaved_projections_are_read_once_if_both_are_wanted(tmp_path, monkeypatch, scanned):
    leaves = {f"m.{i}": numbers(2, 3, 8) + 100 * i for i in range(4)}
    safetensors.numpy.save_file(leaves, tmp_path / "a.safetensors")
    rules = "m.{l} [e d (f c)] <-> l.{l}.wi_{c=0|1} [e d f]" + scanned
    counted = counting(monkeypatch)
    both = jax.tree.leaves(load(tmp_path / "a.safetensors", rename=rules))
    assert sum(counted) == 4 * 2 * 3 * 8
    assert sum(float(leaf.sum()) for leaf in both) == sum(float(a.sum()) for a in leaves.values())
    counted.clear()
    load(tmp_path / "a.safetensors", rename=rules, keys="*wi_1")
    assert sum(counted) == 4 * 2 * 3 * 8


def test_rules_apply_to_each_checkpoint_of_a_list(model, tmp_path):
    safetensors.numpy.save_file({"m.0.lora": numbers(3, 2)}, tmp_path / "lora.safetensors")
    tree = load(
        [model, tmp_path / "lora.safetensors"], rename="m.0.lora [a b] <-> lora [b a]", keys=["lora", "norm"]
    )
    assert {name: leaf.shape for name, leaf in tree.items()} == {"lora": (2, 3), "norm": (D,)}


def test_values_that_a_rule_makes_need_no_source(model):
    like = {
        "ones": jax.ShapeDtypeStruct((D,), jnp.bfloat16),
        "norm": jax.ShapeDtypeStruct((D,), jnp.bfloat16),
    }
    tree = load(model, rename="<-> ones [d] | fill 1\nm.{*q} ->\nembed ->", like=like)
    np.testing.assert_array_equal(tree["ones"], np.ones(D))
