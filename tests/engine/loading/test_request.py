"""The arguments of a load as records."""

import pytest
from jax.sharding import PartitionSpec as P

from eformer._engine.loading.request import PlacementRequest, Request
from eformer.checkpoint import LoadOptions, load


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_without_arrays_is_refused(batch):
    with pytest.raises(
        ValueError, match=f"a batch of {batch} arrays: LoadOptions.batch must be positive, or None"
    ):
        LoadOptions(batch=batch)


def test_rules_that_come_one_by_one_can_be_read_again():
    request = PlacementRequest(rules=(rule for rule in [("w", P())]))
    assert [list(request.rules), list(request.rules)] == [[("w", P())]] * 2
    assert PlacementRequest().rules is None


def test_the_dtype_of_a_cast_is_called_by_its_name():
    assert Request(dtype="bf16").cast == "bfloat16"
    assert Request().cast is None


def test_an_unknown_option_of_a_load_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(TypeError, match=r"fields that LoadOptions lacks: 'batches' \(nearest is 'batch'\)"):
        load(tmp_path, options={"batches": 1})
    with pytest.raises(TypeError, match="must be LoadOptions or a dict of its fields, not 'fast'"):
        load(tmp_path, options="fast")
    with pytest.raises(ValueError, match=r"LoadOptions.timeout must be positive, not 0"):
        load(tmp_path, options={"timeout": 0})


@pytest.mark.parametrize("argument", ["like", "rules", "rename"])
def test_a_function_in_the_place_of_a_tree_or_of_rules_is_refused(tmp_path, argument):
    with pytest.raises(TypeError, match="is a function; "):
        load(tmp_path, **{argument: lambda name: name})
