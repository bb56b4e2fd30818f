"""Decisions about bytes: files, owners, reads."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.formats.safetensors.layout import group_by_file
from eformer._engine.loading.read_plan import READ_BYTES, Want, packed_nbytes, plan_reads
from eformer._engine.record.boxes import Box
from eformer._engine.record.manifest import DataFile, Extent, LeafEntry, TreeEntry
from eformer._engine.record.pieces import count_pieces
from eformer._engine.saving.snapshot import choose_writers

BLOCK = 64
HEADER = 100  # bytes, of every file


def tree(*sizes):
    files = tuple(DataFile(f"f{i}", HEADER + n, HEADER) for i, n in enumerate(sizes))
    return TreeEntry(save_id="", saved_at="", written_by="", block=BLOCK, files=files)


def entry(shape, file=0, offset=0, dtype="int8", region=None):
    box = Box(*region).shape if region else shape
    itemsize = np.dtype(dtype).itemsize
    digests = "".join(f"{i:032d}" for i in range(count_pieces(box, itemsize, BLOCK)))
    return LeafEntry(dtype, shape, (Extent(file, offset, math.prod(box) * itemsize, digests, region),))


def test_small_neighbours_are_read_together_and_strangers_apart():
    wants = [Want(str(i), entry((10,), offset=o), "int8") for i, o in enumerate([0, 10, 30, 20, 90])]
    reads = plan_reads(wants, tree(100))
    assert [(r.offset, r.nbytes, [p.want for p in r.pieces]) for r in reads] == [
        (100, 40, [0, 1, 3, 2]),
        (190, 10, [4]),
    ]


def test_no_read_is_larger_than_it_should_be():
    shape = (3 * READ_BYTES // BLOCK, BLOCK)
    reads = plan_reads([Want("w", entry(shape), "int8")], tree(math.prod(shape)))
    assert [read.nbytes for read in reads] == [READ_BYTES] * 3


def test_files_are_not_mixed():
    wants = [Want("a", entry((10,), file=1), "int8"), Want("b", entry((10,)), "int8")]
    assert [(read.file, len(read.pieces)) for read in plan_reads(wants, tree(10, 10))] == [(0, 1), (1, 1)]


@given(shape=st.tuples(st.integers(1, 20), st.integers(1, 20)), data=st.data())
def test_a_box_is_covered_by_the_pieces_that_touch_it_and_no_others(shape, data):
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True))
    wanted = Box(start, stop)
    reads = plan_reads(
        [Want("w", entry(shape, dtype="int32"), "int32", [wanted])], tree(math.prod(shape) * 4)
    )
    numbers = np.arange(math.prod(shape)).reshape(shape)
    covered = np.zeros(shape, bool)
    for read in reads:
        for piece in read.pieces:
            if piece.at >= 0:  # it goes there as it is
                first, at, count = (piece.offset - HEADER) // 4, piece.at // 4, piece.nbytes // 4
                stored = np.arange(first, first + count)
                np.testing.assert_array_equal(numbers[wanted.slices].ravel()[at : at + count], stored)
                covered.reshape(-1)[stored] = True
                continue
            box = piece.box or Box.whole(shape)
            assert box.overlap(wanted)
            covered[box.slices] = True
            assert piece.nbytes == box.size * 4
    assert covered[wanted.slices].all()


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([64, 100])), min_size=1, max_size=6),
    read_bytes=st.integers(1, 2000),
    start=st.integers(0, 100),
)
def test_neighbours_that_are_packed_are_read_together_into_their_places(shapes, read_bytes, start):
    """Every read fills memory in which the arrays lie one after the other, each aligned."""
    places, offset, wants = [0], start * 64, []
    for shape in shapes:
        wants.append(Want("w", entry(shape, offset=offset), "int8"))
        offset += math.prod(shape)
        places.append(places[-1] + packed_nbytes(math.prod(shape)))
    reads = plan_reads(wants, tree(offset), read_bytes, is_packed=True)
    assert sum(read.nbytes for read in reads) == sum(map(math.prod, shapes))
    for read in reads:
        direct = [piece for piece in read.pieces if piece.at >= 0]
        assert direct in ([], list(read.pieces))
        for piece in direct:
            first = direct[0]
            before = places[piece.want] + piece.at - (places[first.want] + first.at)
            assert before == piece.offset - first.offset


def test_a_box_that_is_not_the_first_in_memory_is_not_read_behind_its_neighbour():
    """Whoever wrote the file may have put the second box of a leaf first."""
    halves = [Box((0, 0), (4, 64)), Box((4, 0), (8, 64))]
    wants = [
        Want("a", entry((4, 64)), "int8"),
        Want("b", entry((8, 64), offset=256, region=((4, 0), (8, 64))), "int8", halves),
    ]
    reads = plan_reads(wants, tree(512), 512, is_packed=True)
    assert [{(piece.want, piece.target) for piece in read.pieces} for read in reads] == [{(0, 0)}, {(1, 1)}]


def test_parts_of_a_leaf_that_nobody_wants_are_not_read():
    parts = LeafEntry(
        "int8", (4, 4), tuple(Extent(i, 0, 8, "0" * 32, ((2 * i, 0), (2 * i + 2, 4))) for i in (0, 1))
    )
    reads = plan_reads([Want("w", parts, "int8", [Box((3, 0), (4, 4))])], tree(8, 8))
    assert [read.file for read in reads] == [1]


def test_an_empty_leaf_is_not_read():
    assert plan_reads([Want("w", entry((0, 3)), "int8")], tree(0)) == []


def test_bytes_are_spread_evenly_over_those_who_hold_them():
    written = np.zeros(3, np.int64)
    holders = [(10, [0, 1, 2]), (10, [0, 1, 2]), (30, [0]), (10, [0, 1, 2]), (5, [2])]
    chosen = choose_writers([(nbytes, np.array(who)) for nbytes, who in holders], written)
    assert chosen == [0, 1, 0, 2, 2]
    assert written.tolist() == [40, 10, 15]


def test_a_header_never_grows_beyond_what_readers_allow(monkeypatch):
    monkeypatch.setattr("eformer._engine.formats.safetensors.layout.MAX_HEADER_BYTES", 1000)
    files = group_by_file({f"m.{i}": 1 for i in range(20)}, 10**9)
    assert [len(names) for names in files] == [6, 6, 6, 2]
    files = group_by_file({f"m.{i}": 1 for i in range(20)}, 10**9, has_record=True)
    assert [len(names) for names in files] == [2] * 10
