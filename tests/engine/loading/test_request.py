"""The arguments of a load as records."""

import pytest
from jax.sharding import PartitionSpec as P

from eformer._engine.loading.request import PlacementRequest, Request


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_without_arrays_is_refused(batch):
    with pytest.raises(ValueError, match=f"a batch of {batch} arrays: batch must be positive, or None"):
        Request(batch=batch)


def test_rules_that_come_one_by_one_can_be_read_again():
    request = PlacementRequest(rules=(rule for rule in [("w", P())]))
    assert [list(request.rules), list(request.rules)] == [[("w", P())]] * 2
    assert PlacementRequest().rules is None


def test_the_dtype_of_a_cast_is_called_by_its_name():
    assert Request(dtype="bf16").cast == "bfloat16"
    assert Request().cast is None
