"""Every process finds its part of the bytes alone, and all parts are the whole."""

import pytest

from eformer._engine.record.division import ALL, WHOLE, ByteLine, Portion, parse_part, spans

EXTENTS = [(file, 100 + 1000 * n, 1000) for file in range(3) for n in range(7)]
PIECES = [(file, start + 250 * n) for file, start, _ in EXTENTS for n in range(4)]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 21, 84, 200])
def test_each_piece_is_in_one_part(count):
    lines = [ByteLine(EXTENTS[:10]), ByteLine(EXTENTS[10:])]
    found = []
    for number in range(count):
        for line, span in zip(lines, spans(lines, Portion(number, count)), strict=True):
            found += [
                p
                for p in PIECES
                if p in span and any(e[0] == p[0] and 0 <= p[1] - e[1] < e[2] for e in line.extents)
            ]
    assert sorted(found) == sorted(PIECES)


def test_parts_differ_by_a_piece_at_most():
    line = ByteLine(EXTENTS)
    sizes = [sum(p in spans([line], Portion(n, 5))[0] for p in PIECES) for n in range(5)]
    assert max(sizes) - min(sizes) <= 1


def test_the_header_of_a_file_belongs_to_one_part():
    parts = [spans([ByteLine(EXTENTS)], Portion(n, 4))[0] for n in range(4)]
    assert [sum((file, 0) in span for span in parts) for file in range(3)] == [1, 1, 1]


def test_nothing_can_be_divided():
    assert spans([], Portion(1, 2)) == []
    assert [(0, 0) in spans([ByteLine([])], Portion(n, 3))[0] for n in range(3)] == [True, False, False]
    assert [(0, 0) in spans([ByteLine([]), ByteLine(EXTENTS)], Portion(n, 3))[0] for n in range(3)] == [
        True,
        False,
        False,
    ]
    assert spans([ByteLine([])], WHOLE) == [ALL]


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "1/0", "a/b", "1/2/3"])
def test_parts_are_numbered_from_zero(text):
    with pytest.raises(ValueError, match="expected I/N with I from 0 to N-1"):
        parse_part(text)
