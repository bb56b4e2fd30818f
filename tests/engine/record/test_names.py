import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.boxes import Box
from eformer._engine.record.names import (
    BARE_LEAF,
    escape,
    escape_siblings,
    join_name,
    name_to_path,
    path_to_name,
    readable,
    readable_names,
    resolve,
    split_name,
    unescape,
    with_nearest,
)
from eformer.errors import FormatError
from support.trees import HOSTILE, keys

paths = st.lists(keys, max_size=5)


def name_of(path):
    return join_name(map(escape, path))


@given(paths)
def test_a_name_gives_back_its_path(path):
    assert [unescape(part) for part in split_name(name_of(path))] == path


@given(paths, paths)
def test_different_paths_have_different_names_and_files(a, b):
    if a != b:
        assert name_of(a) != name_of(b)
        assert name_to_path(name_of(a)) != name_to_path(name_of(b))


siblings = st.lists(
    keys | st.integers(-3, 3) | st.booleans() | st.none() | st.tuples(st.integers(0, 1)), max_size=8
)


@given(siblings)
def test_siblings_have_different_parts_that_lead_back_to_their_texts(some):
    parts = escape_siblings(some)
    assert len(set(parts)) == len(parts)
    assert [unescape(part) for part in parts] == [str(key) for key in some]
    assert all(name_to_path(part) for part in parts)


@given(siblings.map(lambda some: list(dict.fromkeys(some))), st.randoms())
def test_which_sibling_has_which_part_does_not_depend_on_their_order(some, random):
    parts = dict(zip(some, escape_siblings(some), strict=True))
    random.shuffle(some)
    assert dict(zip(some, escape_siblings(some), strict=True)) == parts


def test_siblings_that_read_the_same_get_their_types():
    assert escape_siblings([1, "1", "2"]) == ["1%+int", "1", "2"]
    assert escape_siblings(["a", "a", "a"]) == ["a", "a%#1", "a%#2"]
    odd = type("1", (), {"__str__": lambda self: "a"})
    dotted = type("a.b/c", (), {"__str__": lambda self: "a"})
    assert escape_siblings(["a", "a", odd(), dotted()]) == ["a", "a%#1", "a%+1", "a%+a_b_c"]


@given(paths)
def test_no_component_leaves_its_directory_or_outgrows_a_file_system(path):
    components = name_to_path(name_of(path))
    assert components
    for component in components:
        assert component not in ("", ".", "..")
        assert not set(component) & set("/\\.\0\n\x1f\x7f")
        assert len(component.encode()) <= 255
    assert path_to_name(components) == name_of(path)


@pytest.mark.parametrize("key", HOSTILE, ids=repr)
def test_every_hostile_key_is_a_real_directory_of_its_own(tmp_path, key):
    directory = tmp_path.joinpath(*name_to_path(name_of(["a", key, "b"])))
    directory.mkdir(parents=True)
    assert tmp_path in Path(os.path.realpath(directory)).parents
    relative = directory.relative_to(tmp_path).parts
    assert [unescape(p) for p in split_name(path_to_name(relative))] == ["a", key, "b"]


def test_ordinary_names_stay_as_people_know_them():
    assert name_of(["model", "layers", "0", "self_attn", "q_proj.weight"]) == (
        "model.layers.0.self_attn.q_proj%2Eweight"
    )
    assert name_of([]) == BARE_LEAF
    assert name_of([""]) != BARE_LEAF


@pytest.mark.parametrize(
    "path", [(), ("..", "etc"), ("a", ""), ("a.b",), ("a/b",), ("x" * 300,), ("a%-",), ("a%-", "b")], ids=repr
)
def test_a_path_that_no_leaf_has_is_refused(path):
    with pytest.raises(FormatError, match=r"is not the path of a leaf|cannot be part"):
        path_to_name(path)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a..b",
        "../x",
        "a/b",
        "a\\b",
        "a\0",
        "a.%zz",
        "%2e",
        "%41",
        "a.%",
        "%+1",
        "%#1",
        "a%#0",
        "a%#1%+x",
        "a\x7f",
        "a\n",
        "%-",
    ],
)
def test_a_name_that_no_tree_has_is_refused_before_it_is_a_path(name):
    with pytest.raises(FormatError, match="cannot be part of a leaf's name"):
        name_to_path(name)


# ------------------------------------------------------------------------------------------- spellings


trees = st.lists(st.lists(keys | st.sampled_from(["a", "b", "a.b"]), max_size=3).map(name_of), unique=True)


@given(trees)
def test_readable_names_are_plain_and_no_two_are_alike(names):
    spelled = readable_names(names)
    assert list(spelled) == names
    assert len(set(spelled.values())) == len(names)
    for name, text in spelled.items():
        assert text == name or (text == readable(name) and text.isprintable() and "%" not in text)


def test_readable_names_have_no_escapes_where_nothing_else_reads_the_same():
    assert readable_names(["a%2Eb", "a.b", "x%2Ey", "%", "50%25", "%_", "n%0A"]) == {
        "a%2Eb": "a%2Eb",
        "a.b": "a.b",
        "x%2Ey": "x.y",
        "%": "%",
        "50%25": "50%25",
        "%_": "%_",
        "n%0A": "n%0A",
    }


@given(trees)
def test_either_spelling_finds_its_leaf_and_the_escaped_one_always_does(names):
    for name, text in readable_names(names).items():
        assert resolve([name], names) == ({name: None}, [])
        assert resolve([text], names) == ({name: None}, [])


@given(trees, trees)
def test_whatever_is_asked_for_leaves_are_found_in_order_or_a_problem_is(names, asked):
    found, problems = resolve(asked, names)
    assert list(found) == [name for name in names if name in found]
    for spelling in asked:
        alone, why = resolve([spelling], names)
        assert bool(alone) != bool(why)
        assert alone.keys() <= found.keys()
    assert bool(problems) == any(resolve([spelling], names)[1] for spelling in asked)


FLAT = ["model%2Eembed%2Eweight", "model%2Eh%2E0%2Ebias", "model%2Eh%2E0%2Eweight", "step"]
MIXED = ["a%2Eb%2Ec", "a%2Eb.c", "a.x"]


@pytest.mark.parametrize(
    ("names", "spelling", "expected"),
    [
        (FLAT, "model.embed.weight", FLAT[:1]),
        (FLAT, "model%2Eembed%2Eweight", FLAT[:1]),
        (FLAT, "model", FLAT[:3]),
        (FLAT, "model.h.0", FLAT[1:3]),
        (FLAT, "*.weight", [FLAT[0], FLAT[2]]),
        (FLAT, "model%2Eh*", FLAT[1:3]),
        (MIXED, "a%2Eb", ["a%2Eb.c"]),
        (MIXED, "a", ["a.x"]),  # the subtree of exactly that name
        (MIXED, "a.b", MIXED[:2]),
        (["a.b", "a%2Eb"], "a.b", ["a.b"]),
        (["w%5B0]", "w[0]"], "w[0]", ["w[0]"]),
    ],
)
def test_names_subtrees_and_patterns_are_taken_in_either_spelling(names, spelling, expected):
    assert resolve([spelling], names) == (dict.fromkeys(expected), [])


def test_every_problem_is_reported_with_what_could_be_meant():
    found, problems = resolve(["a.b.c", "a.x", "a.bb", "zzz"], MIXED)
    assert list(found) == ["a.x"]
    assert problems == [
        "'a.b.c' is ambiguous; write one of 'a%2Eb%2Ec', 'a%2Eb.c'",
        "no leaf is named 'a.bb', matches it or lies below it (nearest is 'a.b')",
        "no leaf is named 'zzz', matches it or lies below it",
    ]


def test_hints_are_few_and_cheap_however_many_names_there_are():
    names = [f"layer{i}.kernal" for i in range(20_000)]
    hints = list(with_nearest(names, (f"layer{i}.kernel" for i in range(20_000))))
    assert [name for name, _ in hints] == names
    assert 0 < sum(bool(hint) for _, hint in hints) < 20


def test_hints_point_at_the_nearest_name():
    hints = dict(with_nearest(["layers.0.kernal", "zzz"], ["layers.0.kernel", "layers.1.bias"]))
    assert hints == {"layers.0.kernal": " (nearest is 'layers.0.kernel')", "zzz": ""}


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("*.kernal", " (nearest is '*.kernel')"),
        ("layer.*.bais", " (nearest is 'layers.*.bias')"),
        ("*.zzz", ""),
        ("heads.*", " (nearest is 'head')"),  # a leaf, because no pattern would match
    ],
)
def test_a_pattern_that_finds_nothing_has_a_hint_with_the_nearest_words(pattern, hint):
    _, (problem,) = resolve([pattern], ["layers.0.kernel", "layers.1.bias", "head"])
    assert problem == f"no leaf is named {pattern!r}, matches it or lies below it{hint}"


# ------------------------------------------------------------------------------------------------ boxes


@st.composite
def regions(draw, rank):
    start = draw(st.lists(st.integers(0, 5), min_size=rank, max_size=rank))
    return Box(tuple(start), tuple(a + draw(st.integers(0, 4)) for a in start))


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(regions(rank), regions(rank))))
def test_overlap_is_the_set_of_shared_indices(pair):
    a, b = pair
    overlap = a.overlap(b)
    assert (_indices(overlap) if overlap else set()) == _indices(a) & _indices(b)
    assert overlap == b.overlap(a)


def _indices(region):
    return {tuple(np.add(i, region.start)) for i in np.ndindex(region.shape)}


@given(st.integers(0, 3).flatmap(lambda rank: st.tuples(regions(rank), regions(rank))))
def test_inside_says_where_a_box_lies_in_another(pair):
    outer, other = pair
    if box := outer.overlap(other):
        big = np.arange(outer.size).reshape(outer.shape)
        whole = np.full((10,) * len(outer.start), -1)
        whole[outer.slices] = big
        assert np.array_equal(big[box.inside(outer).slices], whole[box.slices])


def test_a_box_of_size_zero_overlaps_nothing_not_even_itself():
    empty = Box((0, 2), (4, 2))
    assert empty.size == 0
    assert empty.overlap(empty) is None
    assert Box.whole(()).overlap(Box.whole(())) == Box((), ())


@pytest.mark.parametrize(("start", "stop"), [((1,), (0,)), ((0,), (1, 1)), ((-1,), (1,))])
def test_invalid_boxes_are_refused(start, stop):
    with pytest.raises(ValueError, match="not a box"):
        Box(start, stop)


def test_inside_refuses_a_box_that_sticks_out():
    for outer in (Box((1,), (5,)), Box((0,), (2,))):
        with pytest.raises(ValueError, match="is not inside"):
            Box((0,), (3,)).inside(outer)


def test_boxes_of_different_rank_do_not_overlap():
    assert Box((0,), (3,)).overlap(Box((0, 0), (3, 3))) is None
