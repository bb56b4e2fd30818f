"""The configuration of a model is edited where its settings are, and nowhere else."""

from eformer._engine.tools.config_edits import (
    dtype_in,
    for_export,
    setting,
    with_setting,
    with_settings,
    without_dtype,
)

NESTED = {
    "model_type": "gemma3",
    "text_config": {"vocab_size": 5, "dtype": "float32"},
    "vision_config": {"n": 1},
}


def test_a_setting_is_found_in_the_text_model():
    assert setting(NESTED, "vocab_size") == 5
    assert setting({"vocab_size": 3, **NESTED}, "vocab_size") == 3
    assert setting(NESTED, "none") is None


def test_a_setting_is_set_where_it_is():
    assert with_setting(NESTED, "vocab_size", 6)["text_config"] == {"vocab_size": 6, "dtype": "float32"}
    assert "vocab_size" not in with_setting(NESTED, "vocab_size", 6)
    both = with_setting({"vocab_size": 5, **NESTED}, "vocab_size", 6)
    assert both["vocab_size"] == both["text_config"]["vocab_size"] == 6


def test_a_new_setting_is_one_of_the_text_model():
    assert with_setting(NESTED, "tie_word_embeddings", True)["text_config"]["tie_word_embeddings"] is True
    assert with_setting({"a": 1}, "tie_word_embeddings", True) == {"a": 1, "tie_word_embeddings": True}


def test_settings_of_the_caller_are_merged_into_objects():
    assert with_settings({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 5}, "d": {"e": 1}}) == {
        "a": {"b": 5, "c": 2},
        "d": {"e": 1},
    }


def test_quantisation_goes_and_the_dtype_is_set_wherever_it_was():
    config = {
        "torch_dtype": "float32",
        "quantization_config": {"bits": 4},
        "compression_config": {},
        **NESTED,
    }
    assert for_export(config | {"text_config": {"dtype": "x", "quantization_config": {}}}, "bfloat16") == {
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "model_type": "gemma3",
        "text_config": {"dtype": "bfloat16"},
        "vision_config": {"n": 1},
    }


def test_the_dtype_is_found_under_both_names_and_in_the_text_model():
    assert dtype_in({"torch_dtype": "torch.bfloat16"}) == "bfloat16"
    assert dtype_in(NESTED) == "float32"
    assert dtype_in({}) is None
    assert dtype_in({"dtype": "banana"}) is dtype_in({"dtype": "int8"}) is dtype_in({"dtype": ["x"]}) is None
    assert dtype_in(without_dtype({"dtype": "float16", **NESTED})) is None


def test_nothing_is_changed_in_place():
    before = repr(NESTED)
    with_setting(NESTED, "vocab_size", 6)
    for_export(NESTED, "bfloat16")
    with_settings(NESTED, {"text_config": {"vocab_size": 9}})
    assert repr(NESTED) == before
