"""Write OCDBT databases by the format's description, without TensorStore: hostile ones."""

import os
import struct

import zstandard

from fuzz.crc import crc32c

MANIFEST, NODE = b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"
_FILE = b"d/x"


def varint(number):
    found = b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def sealed(kind, body):
    """A node or a manifest: its body compressed by zstd, its length and its checksum."""
    compressed = zstandard.ZstdCompressor().compress(body)
    data = kind + struct.pack("<Q", 4 + 8 + 2 + len(compressed) + 4) + b"\0\1" + compressed
    return data + struct.pack("<I", crc32c(data))


def write_bomb(directory, files, *, height=0, file=_FILE):
    """Replace a database by one whose root has a table of so many files without names."""
    node = sealed(NODE, bytes([height]) + varint(files) + bytes(3 * files))
    write_root(directory, node, file=file)


def write_root(directory, data, *, offset=0, name_length=None, nbytes=None, file=_FILE):
    """Replace a database by one whose root begins at the offset of a file of these bytes."""
    config = bytes(16) + b"\0" + varint(100) + varint(2**23) + b"\4\0"
    table = b"\1" + varint(len(file) if name_length is None else name_length) + b"\0" + file
    place = varint(offset) + varint(len(data) if nbytes is None else nbytes)
    version = b"\1" + b"\1" + b"\0" + b"\0" + place + bytes(3) + bytes(8) + b"\0"
    (directory / os.fsdecode(file)).write_bytes(data)
    (directory / "manifest.ocdbt").write_bytes(sealed(MANIFEST, config + table + version))


def inner_node(references):
    """A node above others, which are in the same file at these offsets, of these lengths: at most 128."""
    count = len(references)
    table = b"\1" + varint(len(_FILE)) + b"\0" + _FILE
    keys = bytes(max(0, count - 1)) + b"\1" * count + bytes(count) + bytes(range(count))
    places = [varint(number) for column in zip(*references, strict=True) for number in column]
    return sealed(
        NODE, b"\1" + table + varint(count) + keys + bytes(count) + b"".join(places) + bytes(3 * count)
    )


def nested_nodes(depth):
    """Nodes above others, each of which is in the key of the one around it, not compressed."""
    table = b"\1" + varint(len(_FILE)) + b"\0" + _FILE
    node = b""
    for number in range(depth, 0, -1):
        length = bytes(len(node) >> shift & 127 | (128 if shift < 28 else 0) for shift in range(0, 35, 7))
        start = b"\0\0" + b"\1" + table + b"\1" + length + b"\0"
        body = start + node + b"\0" + varint((12 + len(start)) * number) + varint(len(node)) + bytes(3)
        node = NODE + struct.pack("<Q", 12 + len(body) + 4) + body
        node += struct.pack("<I", crc32c(node))
    return node
