"""Files of other programs that are cut, changed or hostile are an error, and do no other harm."""

import pickle
import struct

import msgpack
import numpy as np
import pytest

from eformer import checkpoint
from eformer.errors import EformerError
from support.faults import STRIDE
from support.samples import write


def look(path, like=None):
    """Do everything that can be done with a file. Return the text of eformer's error, if one is raised."""
    try:
        checkpoint.verify(path)
        with checkpoint.open(path) as view:
            for name in view:
                leaf = view[name]
                assert not hasattr(leaf, "entry") or np.asarray(leaf).shape == leaf.shape
        checkpoint.load(path, like=like)
    except EformerError as error:
        return str(error)
    return ""


@pytest.mark.sample(3)
def test_no_truncation_gets_through(sample):
    """A file without names that is cut between two arrays is only found out by the expected tree."""
    whole, cut = sample.read_bytes(), sample.parent / "cut"
    like = write.model() if sample.suffix == ".eqx" else None
    for length in range(0, len(whole), 7):
        cut.write_bytes(whole[:length])
        assert look(cut, like), length


@pytest.mark.sample(3)
def test_no_flipped_bit_does_more_than_raise(sample):
    whole = sample.read_bytes()
    path = sample.parent / "flipped"
    for at in range(0, len(whole), STRIDE):  # every byte by `make faults`
        for mask in (0x01, 0x80, 0xFF):
            data = bytearray(whole)
            data[at] ^= mask
            path.write_bytes(data)
            look(path)


def packed(shape, dtype, data):
    return msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb((shape, dtype, data)))})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80\x80", b"\x81", b"\xdf\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\x81\xa1a" * 300 + b"\xc0",
        b"\x91" * 100_000, b"\x82\xa1a\x01\xa1a\x02", packed([2**40, 2**40], "float32", b""), packed([-1], "int8", b""),
        packed([1], "datetime64[0s]", bytes(8)), packed([1], "object", bytes(8)), packed([0] * 65, "int8", b""),
        packed([1], "key<fry>", bytes(4)), packed([], "key<threefry2x32>", bytes(4)), packed([1], "float32", bytes(5)),
        msgpack.packb({"__msgpack_chunked_array__": True, "shape": {"0": 2**62}, "chunks": {}}),
        msgpack.packb({"__msgpack_chunked_array__": True, "shape": {"0": 1}, "chunks": {"0": 1}}),
    ],
)  # fmt: skip
def test_hostile_msgpack_is_an_error(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    assert look(tmp_path / "x")


def test_deep_msgpack_is_listed_as_far_as_our_trees_go(tmp_path):
    for depth, is_fine in ((200, True), (600, False)):
        (tmp_path / "x").write_bytes(b"\x81\xa1a" * depth + b"\x01")
        assert (look(tmp_path / "x") == "") is is_fine


def npy(text, data=b""):
    header = text.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    "data",
    [
        b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff", b"\x93NUMPY\x09\x00\x02\x00{}", npy("{}"), npy("[" * 9000), npy("x" * 99),
        npy("{'descr': '<M8[0s]', 'fortran_order': False, 'shape': (1,)}", bytes(8)), npy("9" * 9000),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (4611686018427387904, 4)}", bytes(8)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 4611686018427387903, 9)}"),
        npy("{'descr': '<f8', 'fortran_order': 1, 'shape': (1,)}", bytes(8)), npy("{'descr': 'f8,f8', 'fortran_order': True, 'shape': ()}"),
        npy("{'descr': '<f8', 'fortran_order': True, 'shape': (True,)}", bytes(8)), npy("{'descr': '<f0', 'fortran_order': True, 'shape': (3,)}"),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", pickle.dumps(print)), npy("{'descr': 3, 'fortran_order': True, 'shape': ()}"),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}"), npy("{'descr': '\\d', 'fortran_order': False, 'shape': ()}"),
        b"{}\n", b'{"a": \n\x93NUMPY', b"[" * 9999 + b"\n\x93NUMPY",
    ],
)  # fmt: skip
def test_hostile_arrays_are_an_error(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    assert str(tmp_path / "x") in look(tmp_path / "x")
