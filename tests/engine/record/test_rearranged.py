"""Arrays whose elements lie elsewhere: every box of every rule, and the elements that it reads."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.boxes import Box
from eformer._engine.record.lazy_arrays import Shared, shared_in, stacked, transposed, unstacked
from support import drawn_rules
from support.lazy import InMemory, applied, arrays_of, in_memory, numbers, whole

WORDS = ["x", "yy", "z3"]


@st.composite
def sides(draw, axes):
    """Return how one side of a rule spells the axes: those in the name, and the groups in the brackets."""
    order = draw(st.permutations(axes))
    named = draw(st.integers(0, len(order)))
    rest = order[named:]
    cuts = sorted(draw(st.sets(st.integers(1, len(rest) - 1)))) if len(rest) > 1 else []
    groups = [rest[a:b] for a, b in itertools.pairwise([0, *cuts, len(rest)])] if rest else []
    return order[:named], groups, {axis: draw(st.booleans()) for axis in order[:named]}


def spelled(side, prefix, sizes):
    named, groups, has_words = side
    holes = [f"{{{a}={'|'.join(WORDS[: sizes[a]])}}}" if has_words[a] else f"{{{a}}}" for a in named]
    axes = " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)
    return f"{'.'.join([prefix, *holes])} [{axes}]"


def leaves_of(side, prefix, sizes, everything):
    """Cut an array with all axes, in the order of their names, into the leaves of a side."""
    named, groups, has_words = side
    axes = sorted(sizes)
    order = [axes.index(a) for a in (*named, *itertools.chain.from_iterable(groups))]
    shape = [math.prod(sizes[a] for a in group) for group in groups]
    cut = everything.transpose(order).reshape([*(sizes[a] for a in named), *shape])
    return {
        ".".join(
            [prefix, *(WORDS[i] if has_words[a] else str(i) for a, i in zip(named, index, strict=True))]
        ): cut[index]
        for index in itertools.product(*(range(sizes[a]) for a in named))
    }


@st.composite
def rules(draw):
    """Return a rule, its leaves on the left and its leaves on the right."""
    axes = list("abcde")[: draw(st.integers(1, 5))]
    sizes = {axis: draw(st.integers(1, 3)) for axis in axes}
    everything = numbers(*(sizes[a] for a in axes), dtype=np.int32)
    left, right = draw(sides(axes)), draw(sides(axes))
    lets = "".join(f"{axis} = {size}\n" for axis, size in sizes.items())
    rule = f"{lets}{spelled(left, 'old', sizes)} <-> {spelled(right, 'new', sizes)}"
    return rule, leaves_of(left, "old", sizes, everything), leaves_of(right, "new", sizes, everything)


@st.composite
def boxes(draw, shape):
    start = [draw(st.integers(0, size)) for size in shape]
    return Box(tuple(start), tuple(draw(st.integers(a, size)) for a, size in zip(start, shape, strict=True)))


def equal(found, expected):
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


@given(rules())
def test_any_rule_moves_each_element_to_its_place_and_back(drawn):
    rule, left, right = drawn
    there = arrays_of(applied(rule, left))
    equal(there, right)
    equal(arrays_of(applied(rule, there, back=True)), left)


@given(rules(), st.data())
def test_every_box_of_any_rule_is_a_slice_and_reads_at_most_twice_its_elements(drawn, data):
    rule, left, right = drawn
    name = data.draw(st.sampled_from(sorted(right)))
    found = applied(rule, left).arrays[name]
    box = data.draw(boxes(found.shape))
    np.testing.assert_array_equal(found.read(box), right[name][box.slices])
    sources = found.inners if not isinstance(found, InMemory) else [found]
    read = sum(source.elements_read for each in sources for source in (each.inners or [each]))
    assert read <= 2 * box.size


@given(drawn_rules.rules(), st.data())
def test_blocks_in_groups_and_names_move_as_numpy_moves_them(drawn, data):
    rule, left, right = drawn
    there = applied(rule, left)
    equal(arrays_of(there), right)
    equal(arrays_of(applied(rule, right, back=True)), left)
    name = data.draw(st.sampled_from(sorted(right)))
    box = data.draw(boxes(right[name].shape))
    np.testing.assert_array_equal(there.arrays[name].read(box), right[name][box.slices])


def test_the_first_block_of_a_plain_axis_is_not_the_whole_axis():
    rule = "n = 2\nr = 3\nx [n+r d] <-> y [n d], z [r d]"
    array = numbers(5, 2)
    equal(arrays_of(applied(rule, {"x": array})), {"y": array[:2], "z": array[2:]})


def concatenated(sizes):
    """Return a rule whose source has two blocks inside of a group, with its leaves on both sides."""
    h, n, r, d = sizes
    array = numbers(h * (n + r), d)
    split = array.reshape(h, n + r, d)
    rule = f"h = {h}\nn = {n}\na [(h n+r) d] <-> x [d (h n)], y [h r d]"
    return rule, {"a": array}, {"x": split[:, :n].reshape(h * n, d).T, "y": split[:, n:]}


@given(st.tuples(*[st.integers(1, 4)] * 4), st.data())
def test_every_box_of_blocks_inside_of_a_group(sizes, data):
    rule, left, right = concatenated(sizes)
    renamed = applied(rule, left)
    for name, expected in right.items():
        box = data.draw(boxes(expected.shape))
        np.testing.assert_array_equal(renamed.arrays[name].read(box), expected[box.slices])
    back = applied(rule, right, back=True).arrays["a"]
    box = data.draw(boxes(back.shape))
    np.testing.assert_array_equal(back.read(box), left["a"][box.slices])


@given(st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple), st.data())
def test_every_box_of_changed_and_padded_values(shape, data):
    array = numbers(*shape)
    axes = "abc"[: len(shape)]
    rule = f"x [{' '.join(axes)}] <-> y [{' '.join(axes[::-1])}] | pad a {shape[0] + 2} | scale 1 / 3 | add 1"
    found = applied(rule, {"x": array}).arrays["y"]
    padded = np.pad(array, [(0, 2), *[(0, 0)] * (len(shape) - 1)]).T
    expected = padded * np.float32(1 / 3) + np.float32(1)
    box = data.draw(boxes(found.shape))
    np.testing.assert_array_equal(found.read(box), expected[box.slices])


@pytest.mark.parametrize(
    ("rule", "name", "box", "factor"),
    [
        ("q.{l} [(h k) d] <-> q [d l h k]", "q", [(0, 8), (0, 3), (1, 2), (0, 4)], 1),  # by heads
        ("q.{l} [(h k) d] <-> q [d l h k]", "q", [(2, 4), (0, 3), (0, 4), (0, 4)], 1),  # by d
        ("q.{l} [(h k) d] <-> q [d l h k]", "q", [(0, 8), (1, 2), (0, 4), (0, 4)], 1),  # by layers
        ("q.{l} [(h k) d] <-> q [d l h k]", "q", [(0, 8), (0, 3), (0, 4), (0, 2)], 1.75),  # by half of a head
        ("q.{l} [(h k) d] <-> q [d l h k]", "q", [(0, 8), (0, 3), (0, 4), (1, 2)], 1),  # one row a head
        ("q.{l} [(f c) d] <-> x.{c=0|1}.{l} [d f]", "x.0.1", [(0, 8), (0, 8)], 2),  # interleaved
        ("q.{l} [(c f) d] <-> x.{c=0|1}.{l} [d f]", "x.0.1", [(0, 8), (0, 8)], 1),  # halves
        ("q.{l} [(h c j) d] <-> x.{c=0|1}.{l} [d h j]", "x.1.0", [(0, 8), (0, 4), (0, 2)], 2),
    ],
)
def test_a_shard_reads_few_elements_beside_its_own(rule, name, box, factor):
    leaves = in_memory({f"q.{n}": numbers(16, 8) for n in range(3)})
    rules_text = f"h = 4\nk = 4\n{rule}"
    from_leaves = applied(rules_text, {name: leaf.array for name, leaf in leaves.items()}).arrays[name]
    wanted = Box(*map(tuple, zip(*box, strict=True)))
    from_leaves.read(wanted)
    read = sum(s.elements_read for each in from_leaves.inners for s in (each.inners or [each]))
    assert read == factor * wanted.size


def test_a_stack_along_the_first_axis_is_in_order_and_is_read_in_its_slow_axis():
    arrays = [InMemory(numbers(4, 5)) for _ in range(3)]
    assert [(a.in_order, a.slow_axis) for a in (stacked(arrays, 0), stacked(arrays, 1))] == [
        (True, 0),
        (False, 1),
    ]
    assert [(a.in_order, a.slow_axis) for a in unstacked(transposed(arrays[0], (1, 0)), 0)[:1]] == [
        (False, 0)
    ]
    heads = applied(
        "k = 2\na [(h k) d] <-> b [d h k]\nc [(h k) d] <-> e [h k d]",
        {"a": numbers(4, 5), "c": numbers(4, 5)},
    )
    assert [(a.in_order, a.slow_axis) for a in heads.arrays.values()] == [(False, 1), (True, 0)]


def test_several_readers_of_a_shared_array_read_each_box_once():
    inner = InMemory(numbers(4, 6))
    shared, box = Shared(inner), Box((0, 0), (4, 6))
    shared.readers = 2
    for _ in range(2):
        np.testing.assert_array_equal(shared.read_for_all(box), inner.array)
    assert inner.elements_read == box.size
    shared.read_for_all(box)
    assert inner.elements_read == 2 * box.size


def test_only_arrays_whose_elements_alternate_are_shared():
    found = applied(
        "a [d (f c)] <-> a_{c=0|1} [d f]\nb [d (c f)] <-> b_{c=0|1} [d f]",
        {"a": numbers(2, 6), "b": numbers(2, 6)},
    )
    assert [len([*shared_in(array)]) for array in found.arrays.values()] == [1, 1, 0, 0]
    assert [len([*shared_in(whole_of)]) for whole_of in [stacked([*found.arrays.values()], 0)]] == [2]


def test_an_array_without_elements():
    found = applied(
        "a [(h k) d] <-> b [d h k]".replace("(h k) d", "(h k) d"),
        {"a": numbers(0, 3)},
        shapes={"b": (3, 2, 0)},
    )
    assert whole(found.arrays["b"]).shape == (3, 2, 0)
