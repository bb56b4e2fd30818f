"""Checks of rules, by names and shapes alone: what fits, and every kind of misfit by its text."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from eformer import checkpoint
from eformer.errors import NotFoundError
from support.tiny_models import MODELS, config_of, leaves_of

LLAMA = MODELS / "llama"


def tree_of(found):
    """The new leaves as a tree of shapes."""
    tree = {}
    for name, shape in found.leaves.items():
        *levels, last = name.split(".")
        here = tree
        for level in levels:
            here = here.setdefault(level, {})
        here[last] = jax.ShapeDtypeStruct(shape, np.float32)
    return tree


def test_a_layout_fits_and_says_so():
    found = checkpoint.rules("maxtext").check(LLAMA)
    assert found.ok
    assert str(found) == f"llama/maxtext fits {LLAMA}: 30 leaves become 12, and all come back"
    assert found.leaves["params.decoder.layers.mlp.wi_0.kernel"] == (8, 3, 13)


def test_a_check_reads_no_data(tmp_path):
    data = (LLAMA / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    (tmp_path / "model.safetensors").write_bytes(data[:header] + bytes([255]) * (len(data) - header))
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    assert checkpoint.rules("tunix").check(tmp_path).ok


def test_like_is_compared_by_names_and_shapes(tmp_path):
    book = checkpoint.rules("llama/tunix")
    tree = tree_of(book.check(LLAMA))
    assert book.check(LLAMA, tree).ok
    tree["layers"]["0"]["attn"]["q_proj"]["w"] = jax.ShapeDtypeStruct((8, 6, 4), np.float32)
    tree["lm_haed"] = tree.pop("lm_head")
    found = book.check(LLAMA, tree)
    assert not found.ok
    assert found.missing == ("lm_haed.w (nearest is 'lm_head.w')",)
    assert found.unexpected == ("lm_head.w (nearest is 'lm_haed.w')",)
    assert found.wrong_shapes or found.errors
    assert "! missing, though like has it: lm_haed.w" in str(found)


def test_like_may_be_a_checkpoint(tmp_path):
    book = checkpoint.rules("llama/tunix")
    shapes = book.check(LLAMA).leaves
    checkpoint.save({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "mine")
    assert book.check(LLAMA, tmp_path / "mine").ok


def test_quantised_weights_are_checked_by_their_dense_names(tmp_path):
    leaves = leaves_of("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    leaves[name] = leaves[name].astype(ml_dtypes.float8_e4m3fn)
    leaves[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)
    save_file(leaves, tmp_path / "model.safetensors")
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama") | fp8))
    found = checkpoint.rules("maxtext").check(tmp_path)
    assert found.ok, str(found)
    assert found.number == 30


def test_leaves_that_no_rule_matches_are_listed():
    found = checkpoint.rules("gpt_oss/maxtext").check(MODELS / "qwen3_moe")
    assert not found.ok
    assert any(name.startswith("model.layers.0.mlp.gate.weight") for name in found.unmatched)
    assert "! no rule matches: model.layers.0.mlp.experts.0.down_proj.weight" in str(found)


def test_sizes_that_do_not_divide_are_an_error():
    found = checkpoint.rules("llama/maxtext").check(LLAMA, config=config_of("llama") | {"head_dim": 5})
    assert not found.ok
    assert any("self_attn.o_proj.weight are (h k), and h is 4" in problem for problem in found.errors)
    assert "! error: line " in str(found)


def test_leaves_that_do_not_come_back_are_listed():
    found = checkpoint.rules("old.{*q} <-> new.{*q}\nmodel.{*q} <-> new.{*q}\n{*q} <-> {*q}\n").check(LLAMA)
    assert not found.ok
    assert "model.norm.weight" in found.not_back
    assert "old.norm.weight, which is new" in found.not_back
    assert "! does not come back: model." in str(found)


def test_rules_of_one_way_are_an_error_once():
    found = checkpoint.rules("model.layers.{l}.{*q} -> layers.{l}.{*q}\n{*q} <-> {*q}\n").check(LLAMA)
    assert len(found.errors) == 1
    assert "on the way back: line 1 has -> and cannot be read from right to left" in found.errors[0]


def test_leaves_that_a_rule_drops_need_not_come_back(tmp_path):
    found = checkpoint.rules("lm_head.weight ->\n{*q} <-> {*q}\n").check(LLAMA)
    assert found.ok
    assert found.left_out == ("lm_head.weight",)
    assert "and come back but for 1 leaf left out: lm_head.weight" in str(found)


def test_rules_of_a_book_a_file_and_a_text_show_their_text(tmp_path):
    file = tmp_path / "my.rules"
    file.write_text("a <-> b\n")
    assert str(checkpoint.rules(file)) == str(checkpoint.rules("a <-> b\n")) == "a <-> b\n"
    assert str(checkpoint.rules("qwen3/maxtext")).startswith("# qwen3/maxtext, rules 1: ")


@pytest.mark.parametrize("name", ["qwen3/maxtxt", "nothing-like-it"])
def test_rules_that_are_neither_a_book_nor_a_file_are_an_error(name):
    with pytest.raises(NotFoundError, match="no rule"):
        checkpoint.rules(name)


def test_a_layout_without_a_family_has_no_text():
    with pytest.raises(NotFoundError, match="layout of several families"):
        str(checkpoint.rules("maxtext"))
