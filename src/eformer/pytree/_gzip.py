"""Compress with gzip, deterministically."""

from __future__ import annotations

import gzip
import zlib
from typing import TYPE_CHECKING

from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined,unused-ignore]  # Python 3.12


def gzip_compress(data: Buffer) -> bytes:
    """Compress bytes. Equal input gives equal output, because the header has no time and no name."""
    return zlib.compress(data, level=6, wbits=16 + zlib.MAX_WBITS)


def gzip_decompress(data: bytes) -> bytes:
    """Decompress bytes. Raises a FormatError if they are not gzip, or damaged."""
    if not data:
        raise FormatError("not gzip: the input is empty")
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"not gzip, or damaged: {error}") from error
