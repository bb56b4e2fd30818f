"""The checksums of OCDBT files, given anew: a node with a wrong one is refused before anything in it is read."""

from __future__ import annotations

import struct

_MAGICS = (
    b"\x0c\xdb\x3a\x2a",
    b"\x0c\xdb\x20\xde",
    b"\x0c\xdb\x1b\x1b",
)  # manifest, node of the tree, node of versions
_LEAST = 4 + 8 + 2 + 4


def _table() -> list[int]:
    found = []
    for number in range(256):
        for _ in range(8):
            number = (number >> 1) ^ (0x82F63B78 if number & 1 else 0)
        found.append(number)
    return found


_TABLE = _table()


def crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 255] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def resealed(data: bytes) -> bytes:
    """Return the file with the right length in its manifest, and right checksums in all of its nodes."""
    if data[:4] == _MAGICS[0] and len(data) > _LEAST:
        data = data[:4] + struct.pack("<Q", len(data)) + data[12:]
    for magic in _MAGICS:
        at = data.find(magic)
        while 0 <= at <= len(data) - _LEAST:
            (length,) = struct.unpack("<Q", data[at + 4 : at + 12])
            stop = at + length
            if length >= _LEAST and stop <= len(data):
                data = data[: stop - 4] + struct.pack("<I", crc32c(data[at : stop - 4])) + data[stop:]
            at = data.find(magic, at + 4)
    return data
