"""Boxes cut into pieces: they tile, they fit, they lie side by side."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.boxes import Box
from eformer._engine.record.pieces import (
    bounding,
    count_pieces,
    is_tiling,
    joined,
    merged,
    offset_within,
    piece_sizes,
    pieces,
    pieces_in,
    shifted,
)

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
limits = st.integers(1, 200)


@given(shape=shapes, itemsize=st.sampled_from([1, 2, 8]), limit=limits)
def test_pieces_are_the_bytes_of_the_box_one_after_another(shape, itemsize, limit):
    box = np.arange(math.prod(shape)).reshape(shape)
    found = pieces(shape, itemsize, limit)
    assert [i for piece in found for i in box[piece.slices].reshape(-1)] == list(range(box.size))
    assert all(piece.size * itemsize <= max(limit, itemsize) for piece in found)
    assert len(found) == count_pieces(shape, itemsize, limit)
    assert [piece.size * itemsize for piece in found] == list(piece_sizes(shape, itemsize, limit))


def test_a_large_box_has_about_as_many_pieces_as_it_has_limits():
    assert count_pieces((2**20, 2**20), 4, 2**20) == 2**22
    assert count_pieces((3, 2**21, 5), 1, 2**20) == 3 * 11
    assert count_pieces((0, 2**62), 4, 2**20) == 0
    assert len(pieces((1000, 1000), 4, 2**20)) == 4


@given(shape=shapes, limit=limits, larger=limits)
def test_joined_pieces_are_boxes_again(shape, limit, larger):
    small = pieces(shape, 1, limit)
    groups = list(joined(small, 1, larger))
    assert [piece for group in groups for piece in group] == small
    for group in groups:
        assert bounding(group).size == sum(piece.size for piece in group)
        assert len(group) == 1 or bounding(group).size <= larger


def test_rows_are_joined():
    assert len(list(joined(pieces((100, 10), 1, 10), 1, 500))) == 2


@st.composite
def box_in_box(draw):
    outer_shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    start = [draw(st.integers(0, n)) for n in outer_shape]
    stop = [draw(st.integers(a, n)) for a, n in zip(start, outer_shape, strict=True)]
    origin = tuple(draw(st.integers(0, 3)) for _ in outer_shape)
    outer = Box(origin, tuple(o + n for o, n in zip(origin, outer_shape, strict=True)))
    (inner,) = shifted([Box(tuple(start), tuple(stop))], origin)
    return inner, outer


@given(boxes=box_in_box())
def test_the_offset_of_a_run_is_where_its_bytes_are(boxes):
    inner, outer = boxes
    flat = np.arange(outer.size).reshape(outer.shape)[inner.inside(outer).slices].reshape(-1)
    offset = offset_within(inner, outer)
    is_run = list(flat) == list(range(flat[0], flat[0] + len(flat))) if len(flat) else True
    if offset is not None and len(flat):
        assert list(flat) == list(range(offset, offset + len(flat)))
    assert (offset is not None) or not is_run or not len(flat)


def test_a_box_outside_has_no_offset():
    assert offset_within(Box((0,), (3,)), Box((1,), (5,))) is None


def test_regions_that_fill_a_box_are_one():
    halves = [Box((0, 0), (2, 4)), Box((2, 0), (4, 4))]
    assert merged(halves) == [Box((0, 0), (4, 4))]
    corners = [Box((0, 0), (2, 2)), Box((2, 2), (4, 4))]
    assert merged(corners) == corners
    assert merged([]) == []


@given(shape=shapes, limit=limits, data=st.data())
def test_pieces_tile_and_no_longer_if_one_is_moved_doubled_or_left_out(shape, limit, data):
    boxes = data.draw(st.permutations(pieces(shape, 1, limit)))
    assert is_tiling(boxes, shape)
    if boxes:
        assert not is_tiling(boxes[1:], shape)
        assert not is_tiling([*boxes, boxes[0]], shape)
        assert len(boxes) == 1 or not is_tiling([*boxes[1:], boxes[1]], shape)


def test_boxes_that_do_not_form_a_grid_can_tile():
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 3)), ((2, 1), (3, 3)), ((1, 0), (3, 1)), ((1, 1), (2, 2))]
    boxes = [Box(*box) for box in pinwheel]
    assert is_tiling(boxes, (3, 3))
    assert not is_tiling([*boxes[:-1], Box((0, 1), (1, 2))], (3, 3))


@given(shape=shapes, limit=limits, data=st.data())
def test_the_pieces_in_a_region_are_those_that_touch_it(shape, limit, data):
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    stop = tuple(data.draw(st.integers(a, n)) for a, n in zip(start, shape, strict=True))
    region = Box(start, stop)
    expected = [
        (i, p)
        for i, p in enumerate(pieces(shape, 2, limit))
        if region.size and (not shape or p.overlap(region))
    ]
    assert list(pieces_in(region, shape, 2, limit)) == expected


def test_a_small_region_of_a_huge_box_takes_no_time():
    shape = (2**20, 2**20)  # four million pieces
    assert [n for n, _ in pieces_in(Box((7, 0), (8, 2)), shape, 4, 2**20)] == [28]


def test_bricks_are_compared_with_their_neighbours_only():
    bricks = [Box((y, x), (y + 1, x + 2)) for y in range(200) for x in range(y % 2, 200 - y % 2, 2)]
    ends = [Box((y, x), (y + 1, x + 1)) for y in range(1, 200, 2) for x in (0, 199)]
    assert is_tiling([*bricks, *ends], (200, 200))
    assert not is_tiling([*bricks, *ends[1:], Box((0, 0), (1, 1))], (200, 200))
