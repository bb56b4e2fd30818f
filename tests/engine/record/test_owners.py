"""The table that says which files have which leaves: it names every file that is needed, and few others."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.boxes import Box
from eformer._engine.record.owners import (
    OwnedLeaves,
    Owners,
    files_with,
    joined_owners,
    owners_of,
    pack_numbers,
    unpack_numbers,
)
from eformer._engine.record.planned import PlannedExtent, PlannedFile, Source
from eformer.errors import FormatError

SHAPE = (12, 6)
starts = st.tuples(st.integers(0, 11), st.integers(0, 5))
boxes = st.builds(
    lambda start, more: Box(start, tuple(min(a + b, n) for a, b, n in zip(start, more, SHAPE, strict=True))),
    starts,
    st.tuples(st.integers(1, 6), st.integers(1, 3)),
)


def file_of(contents):
    """Return a planned file with these boxes of leaves; None is a whole leaf."""
    extents = [
        PlannedExtent(Source(name, "float32", SHAPE), box, box.shape if box else SHAPE, 4, [])
        for name, found in contents.items()
        for box in found
    ]
    return PlannedFile("file", extents, 0)


@given(st.sets(st.integers(0, 999)))
def test_a_list_of_leaves_comes_back(numbers):
    assert unpack_numbers(pack_numbers(numbers), 1000).tolist() == sorted(numbers)


def test_lists_that_repeat_are_short():
    assert len(pack_numbers(range(100_000))) < 1000
    assert len(pack_numbers(n for n in range(100_000) if n % 20 in (3, 4, 11))) < 1000


@given(
    files=st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.lists(boxes, min_size=1, max_size=12) | st.just([None])),
        max_size=5,
    ),
    wanted=st.dictionaries(st.sampled_from("abcd"), st.lists(boxes, max_size=3) | st.none()),
)
def test_every_file_that_has_a_wanted_box_is_named(files, wanted):
    numbers = {name: number for number, name in enumerate("abcd")}
    table = joined_owners(owners_of([[file_of(contents)]], numbers) for contents in files)
    found = files_with(table, 4, [(numbers[name], regions) for name, regions in wanted.items()])
    for number, contents in enumerate(files):
        there = [
            (box or Box.whole(SHAPE), region)
            for name in contents.keys() & wanted.keys()
            for box in contents[name]
            for region in ([Box.whole(SHAPE)] if wanted[name] is None else wanted[name])
        ]
        if any(box.overlap(region) for box, region in there):
            assert number in found
        elif not contents.keys() & wanted.keys():
            assert number not in found


def test_of_leaves_that_are_cut_alike_only_the_holders_are_named():
    numbers = {name: number for number, name in enumerate("abcd")}
    tables = [
        owners_of([[file_of({name: [Box((3 * i, 0), (3 * i + 3, 6))] for name in "abc"})]], numbers)
        for i in range(4)
    ]
    table = joined_owners(tables)
    assert [len(table.leaves), [len(file) for file in table.files]] == [1, [1] * 4]
    assert files_with(table, 4, [(0, [Box((3, 0), (6, 2))])]) == [1]
    assert files_with(table, 4, [(0, [Box((5, 0), (7, 2))]), (2, [Box((0, 0), (1, 1))])]) == [0, 1, 2]
    assert files_with(table, 4, [(1, None)]) == [0, 1, 2, 3]
    assert files_with(table, 4, [(3, None)]) == []
    assert files_with(table, 4, []) == []


def test_leaves_that_are_cut_in_too_many_ways_have_no_table():
    contents = {str(n): [Box((n, 0), (n + 1, 6))] for n in range(3000)}
    assert owners_of([[file_of(contents)]], {name: int(name) for name in contents}) is None
    assert joined_owners([Owners(), None]) is None


@pytest.mark.parametrize(
    "table",
    [
        Owners((b"no zlib",), ((OwnedLeaves(0),),)),
        Owners((pack_numbers([4]),), ((OwnedLeaves(0),),)),  # there are four leaves
        Owners((pack_numbers(range(4))[:-3],), ((OwnedLeaves(0),),)),
        Owners((pack_numbers([0]),), ((OwnedLeaves(0, (((0,), (1,)),)),),)),
        Owners((pack_numbers([0]),), ((OwnedLeaves(0, (((0, 0), (1, 1)), ((0,), (1,)))),),)),
        Owners((pack_numbers([0]),), ((OwnedLeaves(0, (((0, 0), (2**70, 1)),)),),)),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(table):
    table = msgspec.json.decode(msgspec.json.encode(table), type=Owners)
    with pytest.raises(FormatError, match="the manifest"):
        files_with(table, 4, [(0, [Box((0, 0), (1, 1))])])
