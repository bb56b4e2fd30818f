"""The record gives the fingerprint of a leaf if its boxes are cut into the pieces of the whole leaf."""

import numpy as np
import pytest
import xxhash

from eformer._engine.record.fingerprints import recorded_fingerprint
from eformer._engine.record.manifest import Coding, Extent, LeafEntry
from eformer._engine.record.pieces import PIECE_BYTES

ROW = 1024  # float32 in a row; 256 rows in a piece


def extent(start, stop, columns=(0, ROW), coding=None, block=PIECE_BYTES):
    """Describe rows of the leaf of 1024 rows, with the digests of their pieces."""
    rows = np.arange(1024 * ROW, dtype=np.float32).reshape(1024, ROW)[start:stop, slice(*columns)]
    most = block // rows[0].nbytes
    digests = [xxhash.xxh3_128_hexdigest(rows[n : n + most].tobytes()) for n in range(0, len(rows), most)]
    region = ((start, columns[0]), (stop, columns[1]))
    return Extent(0, 0, rows.nbytes, "".join(digests), region, coding)


def fingerprint(*extents, block=PIECE_BYTES, own=None):
    return recorded_fingerprint(LeafEntry("float32", (1024, ROW), extents, own_fingerprint=own), block)


WHOLE = fingerprint(extent(0, 1024))


def test_boxes_of_whole_pieces_give_the_fingerprint_in_any_order():
    assert WHOLE
    assert fingerprint(extent(512, 1024), extent(0, 256), extent(256, 512)) == WHOLE


@pytest.mark.parametrize(
    "extents",
    [
        [extent(0, 100), extent(100, 1024)],
        [extent(0, 1024, (0, 512)), extent(0, 1024, (512, 1024))],
        [extent(0, 256)],
        [],
    ],
    ids=["rows", "columns", "gap", "none"],
)
def test_other_boxes_do_not(extents):
    assert fingerprint(*extents) is None


def test_compressed_bytes_do_not_unless_the_save_has_recorded_it():
    packed = extent(0, 1024, coding=Coding("zstd", (1024, ROW)))
    assert fingerprint(packed) is None
    assert fingerprint(packed, own="ab") == "ab"


def test_pieces_of_another_size_do_not():
    assert fingerprint(extent(0, 1024, block=2**22), block=2**22) is None
