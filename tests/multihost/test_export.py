"""Several processes export the state that they hold together: through the store, without a gather."""

import os

import pytest

from support.models import weights, write_model
from support.processes import Failed
from support.safetensors_files import assert_equal, tensors_in

pytestmark = pytest.mark.xdist_group("processes")


@pytest.mark.parametrize("spec", [("x", "y"), (None, "x")], ids=str)
def test_a_model_in_several_processes_becomes_one_directory(two, tmp_path, spec):
    like = write_model(tmp_path / "like")
    outcomes = two.run("export_sharded", tmp_path / "new", like, spec)
    assert not [o for o in outcomes if isinstance(o, Failed)], outcomes
    assert outcomes[0] == outcomes[1]
    assert sorted(outcomes[0][0]) == sorted(weights())
    assert_equal(tensors_in(tmp_path / "new"), weights())
    assert sorted(os.listdir(tmp_path)) == ["like", "new"]


def test_an_error_is_one_in_all_processes_and_leaves_nothing(two, tmp_path):
    like = write_model(tmp_path / "like", weights(layers=13))
    for outcome in two.run("export_sharded", tmp_path / "new", like, ("x",)):
        assert "model.layers.12.mlp.weight" in str(outcome)
    assert sorted(os.listdir(tmp_path)) == ["like"]
