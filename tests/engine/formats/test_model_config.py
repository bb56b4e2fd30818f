"""config.json beside the weights of a model is read as Python reads it."""

import pytest

from eformer._engine.formats.model_config import model_config
from eformer._engine.stores.locate import store_at
from eformer.errors import FormatError


def test_a_directory_without_a_configuration_has_an_empty_one(tmp_path):
    assert model_config(store_at(tmp_path)) == {}


def test_infinity_is_read_as_python_writes_it(tmp_path):
    (tmp_path / "config.json").write_text('{"limit": Infinity, "head_dim": 64}')
    assert model_config(store_at(tmp_path)) == {"limit": float("inf"), "head_dim": 64}


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_file_that_is_no_configuration_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"config\.json is not a configuration"):
        model_config(store_at(tmp_path))
