"""The arithmetic of chunks: nothing here touches a disk."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.formats.zarr.layout import chunk_shape, chunks_of, count_chunks
from eformer._engine.record.pieces import is_tiling

# Long axes, or many of them: both would be millions of elements, and as many chunks.
shapes = (st.lists(st.integers(1, 12), max_size=2) | st.lists(st.integers(1, 4), max_size=4)).map(tuple)


@st.composite
def sharded(draw):
    """A shape, and a shard that divides it."""
    shard = draw(shapes)
    most = 4 if len(shard) <= 2 else 2
    shape = tuple(size * draw(st.integers(1, most)) for size in shard)
    return shape, shard


@given(sharded(), st.sampled_from([1, 2, 4, 8]), st.integers(1, 600))
def test_chunks_tile_the_array_and_none_reaches_over_the_end_of_a_shard(given, itemsize, limit):
    shape, shard = given
    chunk = chunk_shape(shape, shard, itemsize, limit)
    boxes = [box for _, box in chunks_of(shape, chunk)]
    assert is_tiling(boxes, shape)
    assert len(boxes) == count_chunks(shape, chunk)
    for box in boxes:
        for a, b, s, n in zip(box.start, box.stop, shard, shape, strict=True):
            assert s == n or a // s == (b - 1) // s


@given(sharded(), st.integers(1, 600))
def test_a_chunk_is_within_the_limit_unless_one_element_is_not(given, limit):
    shape, shard = given
    chunk = chunk_shape(shape, shard, 4, limit)
    assert math.prod(chunk) * 4 <= max(limit, 4)


@given(sharded(), st.integers(4, 600))
def test_padding_of_a_chunk_follows_all_elements(given, limit):
    shape, shard = given
    chunk = chunk_shape(shape, shard, 4, limit)
    for _, box in chunks_of(shape, chunk):
        marked = np.zeros(chunk, bool)
        marked[tuple(slice(n) for n in box.shape)] = True
        flat = marked.reshape(-1)
        assert flat[: box.size].all()
        assert not flat[box.size :].any()


def test_chunks_are_as_equal_as_can_be():
    assert chunk_shape((1000, 4), (1000, 4), 1, 4 * 999) == (500, 4)


@pytest.mark.parametrize(("shape", "names"), [((), ["0"]), ((3,), ["0", "1"]), ((3, 2), ["0.0", "1.0"])])
def test_chunks_are_named_by_their_place(shape, names):
    assert [name for name, _ in chunks_of(shape, (2, 2)[: len(shape)])] == names
