"""Compress with gzip: the same bytes for the same input."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]  # Python 3.12


# --------------------------------------------------------------------------------------------- gzip


def gzip_compress(data: Buffer) -> bytes:
    """Equal input gives equal output: the header holds neither time nor name."""
    return zlib.compress(data, level=6, wbits=16 + zlib.MAX_WBITS)


def gzip_decompress(data: bytes) -> bytes:
    if not data:
        raise FormatError("not gzip: no bytes at all")
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"not gzip, or damaged: {error}") from error
