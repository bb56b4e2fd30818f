"""The rules that gave a tree its names are recorded, and give the way back without arguments."""

import pickle
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest

from eformer import checkpoint
from eformer.checkpoint import convert, diff, export, inspect, load, save
from eformer.errors import NotFoundError
from support.safetensors_files import tensors_in

MODELS = Path(__file__).parents[2] / "rules" / "models"
QWEN = MODELS / "qwen3"
BOOK = "qwen3/maxtext"


@pytest.fixture
def ours(tmp_path):
    """A model in the layout of MaxText."""
    convert(QWEN, tmp_path / "ours", to="safetensors", rename=BOOK)
    return tmp_path / "ours"


def origin_of(path):
    (tree,) = inspect(path).trees.values()
    return tree.origin


def test_a_conversion_by_a_book_records_book_and_configuration(ours):
    rules = origin_of(ours)["rules"]
    assert (rules["book"], rules["layout"], rules["version"]) == (BOOK, "maxtext", 1)
    assert len(rules["sha256"]) == 64
    assert rules["config"]["model_type"] == "qwen3"
    assert rules["config"]["num_hidden_layers"] > 1


def test_a_layout_alone_takes_the_family_from_the_configuration(tmp_path):
    convert(QWEN, tmp_path / "new", to="safetensors", rename="maxtext")
    assert origin_of(tmp_path / "new")["rules"]["book"] == BOOK


def test_back_needs_no_arguments(ours, tmp_path):
    convert(ours, tmp_path / "theirs", to="safetensors", back=True)
    assert diff(QWEN, tmp_path / "theirs").same
    assert "rules" not in origin_of(tmp_path / "theirs")


@pytest.mark.parametrize("model", ["llama-tied", "qwen3_moe", "gemma3", "gpt_oss", "deepseek_v3"])
def test_an_export_reads_the_recorded_rules_backwards(tmp_path, model):
    convert(MODELS / model, tmp_path / "ours", to="safetensors", rename="maxtext")
    export(tmp_path / "ours", tmp_path / "hf", like=MODELS / model)
    assert diff(MODELS / model, tmp_path / "hf").same


def test_a_tree_goes_back_by_the_rules_of_its_origin_or_of_the_caller(ours, tmp_path):
    tree, report = load(ours, return_report=True)
    export(tree, tmp_path / "a", like=QWEN, origin=report.origin)
    export(tree, tmp_path / "b", like=QWEN, rename=BOOK)
    assert diff(QWEN, tmp_path / "a").same
    assert diff(QWEN, tmp_path / "b").same


def test_a_run_keeps_the_rules_for_its_last_step(ours, tmp_path):
    tree, report = load(ours, return_report=True)
    with checkpoint.Run(tmp_path / "run", every=1, origin=report.origin) as run:
        run.after(1, {"params": tree, "opt": np.zeros(3)})
    export(tmp_path / "run", tmp_path / "hf", like=QWEN, root="params")
    assert diff(QWEN, tmp_path / "hf").same
    assert "rules qwen3/maxtext, version 1, read backwards" in (tmp_path / "hf" / "README.md").read_text()


def test_without_like_the_recorded_configuration_is_used(ours, tmp_path):
    export(ours, tmp_path / "hf")
    assert diff(QWEN, tmp_path / "hf").same
    assert load(tmp_path / "hf", keys="model.norm.weight")


def test_an_export_casts_once(tmp_path):
    bits = np.array([1 + 2**-20], np.float32)  # nothing of bfloat16
    save({"norm": bits}, tmp_path / "a")
    rules = ["model.norm.weight <-> norm"]
    config = {"model_type": "x", "dtype": "bfloat16"}
    export(tmp_path / "a", tmp_path / "hf", rename=rules, config=config, dtype="float32")
    np.testing.assert_array_equal(tensors_in(tmp_path / "hf")["model.norm.weight"], bits)


def test_another_layout_than_the_recorded_one_is_an_error_that_names_both(ours, tmp_path):
    problem = r"has the layout of the rules 'qwen3/maxtext', and rename= with 'qwen3/maxtext-unscanned' would"
    with pytest.raises(ValueError, match=problem):
        convert(ours, tmp_path / "new", to="safetensors", rename="qwen3/maxtext-unscanned", back=True)
    with pytest.raises(ValueError, match=problem):
        export(ours, tmp_path / "new", like=QWEN, rename="qwen3/maxtext-unscanned")


def test_back_without_rules_is_an_error(tmp_path):
    save({"a": np.ones(2)}, tmp_path / "a")
    with pytest.raises(ValueError, match=r"a has no recorded rules .* rename=\"llama/maxtext\""):
        convert(tmp_path / "a", tmp_path / "b", to="safetensors", back=True)


def test_an_unknown_book_names_books_near_by(tmp_path):
    with pytest.raises(
        NotFoundError, match=r"no rules for the layout 'maxtxt' of 'qwen3', which has .*maxtext"
    ):
        convert(QWEN, tmp_path / "b", to="safetensors", rename="qwen3/maxtxt")


def test_rules_that_have_changed_since_are_a_note(ours, tmp_path):
    origin = origin_of(ours)
    origin["rules"]["sha256"], origin["rules"]["version"] = "0" * 64, 0
    tree = load(ours)
    save(tree, tmp_path / "a", origin=origin)
    done = convert(tmp_path / "a", tmp_path / "b", to="safetensors", back=True, dry_run=True)
    assert (
        "the rules qwen3/maxtext have changed since they gave the leaves their names: version 0, now 1"
        in done.notes
    )


def test_a_record_is_a_few_kilobytes(tmp_path):
    for model in MODELS.iterdir():
        convert(model, tmp_path / model.name, to="safetensors", rename="flax", dry_run=True)
        if model.name in ("gemma3", "qwen3_5_moe"):
            convert(model, tmp_path / model.name, to="safetensors", rename="flax")
            assert len(msgspec.json.encode(origin_of(tmp_path / model.name))) < 2**13


def test_a_single_file_goes_back_too(tmp_path):
    convert(QWEN, tmp_path / "ours.safetensors", rename=BOOK)
    convert(tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors", back=True)
    assert diff(QWEN, tmp_path / "theirs.safetensors").same


def test_a_load_by_a_book_reports_it(tmp_path):
    tree, report = load(QWEN, rename="maxtext", return_report=True)
    assert report.origin["rules"]["book"] == BOOK
    assert report.origin["parents"][0]["path"] == str(QWEN)
    save(tree, tmp_path / "ours", origin=report.origin)
    convert(tmp_path / "ours", tmp_path / "theirs", to="safetensors", back=True)
    assert diff(QWEN, tmp_path / "theirs").same


def test_a_load_reads_a_layout_backwards_by_its_recorded_configuration(ours):
    theirs = load(QWEN, keys="model.layers.0.mlp.up_proj.weight")
    (name,) = theirs
    found = load(ours, rename=BOOK, back=True)["model"]["layers"]["0"]["mlp"]["up_proj"]["weight"]
    np.testing.assert_array_equal(found, theirs[name])


def test_a_load_and_a_view_go_back_by_the_recorded_rules(ours, tmp_path):
    theirs = load(QWEN)
    tree, report = load(ours, back=True, return_report=True)
    jax.tree.map(np.testing.assert_array_equal, tree, theirs)
    assert "rules" not in report.origin
    with checkpoint.open(ours, back=True) as view:
        assert sorted(view) == sorted(checkpoint.open(QWEN))
        name = "model.layers.0.self_attn.q_proj.weight"
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(view))[name][...], view[name][...])


def test_the_subtree_of_a_step_goes_back_by_the_rules_that_the_run_has_recorded(ours, tmp_path):
    tree, report = load(ours, return_report=True)
    with checkpoint.Run(tmp_path / "run", every=1, origin=report.origin) as run:
        run.after(1, {"params": tree})
    back = load(tmp_path / "run", root="params", back=True)
    np.testing.assert_array_equal(back["lm_head"]["weight"], load(QWEN)["lm_head"]["weight"])


def test_several_checkpoints_go_back_together_if_they_have_recorded_the_same_rules(ours, tmp_path):
    convert(MODELS / "llama", tmp_path / "llama", to="safetensors", rename="maxtext")
    with pytest.raises(
        ValueError, match=r"ours of qwen3/maxtext and .*llama of llama/maxtext; load them one by one"
    ):
        load([ours, tmp_path / "llama"], back=True)


@pytest.mark.parametrize("call", [load, checkpoint.open])
def test_a_way_back_by_no_recorded_rules_is_an_error(call):
    with pytest.raises(ValueError, match=r"qwen3 has no recorded rules that back=True could read"):
        call(QWEN, back=True)


def test_a_load_of_another_layout_than_the_recorded_one_is_an_error_that_names_both(ours):
    with pytest.raises(
        ValueError, match=r"rules 'qwen3/maxtext', and rename= with 'qwen3/maxtext-unscanned'"
    ):
        load(ours, rename="maxtext-unscanned", back=True)


def test_on_the_way_back_each_leaf_gets_the_dtype_that_it_has_in_like(tmp_path):
    model = MODELS / "deepseek_v3"  # with biases of routers in float32
    convert(model, tmp_path / "ours", to="safetensors", rename="maxtext")
    convert(tmp_path / "ours", tmp_path / "theirs", to="safetensors", back=True, like=model)
    assert diff(model, tmp_path / "theirs").same


@pytest.mark.parametrize("book", ["{}", "a -> b", "../../secret/rules", "maxtext", "no/file"])
def test_a_recorded_name_is_a_shipped_book_and_never_a_file_or_rules(tmp_path, monkeypatch, book):
    (tmp_path / "no").mkdir()
    for name in ("rules", "no/file"):
        (tmp_path / name).write_text("a <-> secret")
    monkeypatch.chdir(tmp_path)
    book = book.format(tmp_path / "rules")
    save({"secret": np.zeros(3)}, tmp_path / "a", origin={"rules": {"book": book}})
    with pytest.raises(
        (ValueError, NotFoundError), match=r"has no recorded rules|no rule book 'no/file'"
    ) as caught:
        convert(tmp_path / "a", tmp_path / "b", to="safetensors", back=True)
    assert "a <-> secret" not in str(caught.value)
    assert not (tmp_path / "b").exists()
