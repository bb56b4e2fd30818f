"""The description of an array of zarr v2, `.zarray`, which any program may have written."""

from __future__ import annotations

import itertools
import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.manifest import Coding, Count
from eformer._engine.record.values import parse_json
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

ZARRAY = ".zarray"
ZARR_JSON = "zarr.json"  # of zarr 3
MOST_ZARRAY = 2**20  # bytes

_few = msgspec.Meta(max_length=32)  # axes: the limit of TensorStore
Shape = Annotated[tuple[Count, ...], _few]
ChunkShape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=1)], ...], _few]
_MOST_NBYTES = 2**62  # of an array, and of a chunk

_NUMPY = re.compile(r"(?P<order>[<>|])(?P<kind>b(?=1$)|[iufc])(?P<size>\d{1,2})")
_KINDS = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}

_COMPRESSORS = ("", "blosc", "bz2", "gzip", "zlib", "zstd")
_INDEX = re.compile(r"0|[1-9][0-9]{0,18}")


class ZArray(msgspec.Struct, frozen=True):
    """The contents of a `.zarray`. `eformer` is the id of the save that wrote it; other programs ignore this field.

    Arrays of other programs may have dtypes, compressors and filters that eformer does not read. Even then their chunks
    can be recognised, so the description is parsed first and refused later.
    """

    shape: Shape
    chunks: ChunkShape
    dtype: str | list[Any] = ""  # a list has the fields of a structured dtype
    order: Literal["C", "F"] = "C"
    compressor: dict[str, Any] | None = None
    filters: list[Any] | None = None
    zarr_format: Literal[2] = 2
    dimension_separator: Literal[".", "/"] = "."
    eformer: str = ""

    def __post_init__(self) -> None:
        chunk_counts(self.shape, self.chunks)

    @property
    def counts(self) -> tuple[int, ...]:
        return chunk_counts(self.shape, self.chunks)

    def is_chunk(self, numbers: Sequence[str]) -> bool:
        """Tell whether these numbers from the name of a file belong to a chunk."""
        return is_index(numbers, self.counts or (1,))

    @property
    def name_of_dtype(self) -> str:
        """Return the name of its dtype in eformer."""
        match = _NUMPY.fullmatch(str(self.dtype))
        if not match:
            return str(self.dtype)
        bits = "" if match["kind"] == "b" else str(8 * int(match["size"]))
        return _KINDS[match["kind"]] + bits

    @property
    def is_big_endian(self) -> bool:
        return str(self.dtype).startswith(">")

    @property
    def codec(self) -> str:
        """Return the name of the compressor, or ""."""
        return str((self.compressor or {}).get("id", ""))

    def nbytes_of(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * dtype_from_name(self.name_of_dtype).itemsize

    @property
    def chunk_nbytes(self) -> int:
        return self.nbytes_of(self.chunks)

    def coding(self, box: tuple[int, ...], raw: str) -> Coding | None:
        """Return how to decode a chunk into a box; None if the chunk begins with the bytes of the box as they are."""
        is_odd = (self.order != "C" and len(self.shape) > 1) or self.is_big_endian or bool(self.filters)
        if is_odd or self.codec not in ("", "zstd"):
            return Coding("zarr", self.chunks, raw)
        if self.codec or not _is_prefix(box, self.chunks):
            return Coding(self.codec, self.chunks)
        return None

    def require_readable(self, origin: str) -> None:
        """Refuse an array that is impossible, or that eformer does not decode although it is not damaged."""
        try:
            largest = max(
                self.nbytes_of(tuple(max(1, n) for n in sizes)) for sizes in (self.shape, self.chunks)
            )
        except FormatError as error:
            raise FormatError(f"{origin}: {error}") from error
        if largest >= _MOST_NBYTES:
            raise FormatError(
                f"{origin} does not describe a valid array: shape {list(self.shape)}, chunks {list(self.chunks)}"
            )
        if self.filters or self.codec not in _COMPRESSORS:
            how = f"compressed by {self.codec[:40]!r}"
            if self.filters:
                names = [item.get("id") if isinstance(item, dict) else item for item in self.filters[:8]]
                how = f"changed by the filters {str(names)[:200]}"
            raise FormatError(
                f"{origin} describes an array that is {how}, which eformer does not decode. It is not damaged: write "
                f"it again without filters, for example with zstd. Known are {', '.join(filter(None, _COMPRESSORS))}"
            )


def parse_zarray(data: bytes | str, origin: str) -> ZArray:
    """Parse a `.zarray` by any program. Refuse a description that does not tell which files are chunks."""
    return parse_json(data, ZArray, f"{origin} does not describe an array of zarr v2")


def chunk_counts(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """Return the number of chunks along each axis. Raise FormatError if the chunks have another number of axes."""
    if len(shape) != len(chunks):
        raise FormatError(f"chunks of {len(chunks)} axes do not fit a shape of {len(shape)}")
    return tuple(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))


def is_index(numbers: Sequence[str], counts: Sequence[int]) -> bool:
    """Tell whether each axis has one number, written as in the name of a chunk, and less than its count."""
    return len(numbers) == len(counts) and all(
        _INDEX.fullmatch(number) and int(number) < count
        for number, count in zip(numbers, counts, strict=True)
    )


def _is_prefix(box: tuple[int, ...], chunk: tuple[int, ...]) -> bool:
    """Tell whether the bytes of a box at the origin of a chunk are the beginning of the chunk."""
    inner = itertools.dropwhile(lambda pair: pair[0] == 1, zip(box, chunk, strict=True))
    return all(a == b for a, b in itertools.islice(inner, 1, None))
