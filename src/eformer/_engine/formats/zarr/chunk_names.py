"""Tell the files of an array's chunks by their names, whichever version of zarr describes the array."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.zarr.attributes import convert_lenient, parse_lenient
from eformer._engine.formats.zarr.zarray import ZARRAY
from eformer._engine.stores.base import read_whole
from eformer.errors import FormatError

if TYPE_CHECKING:
    from eformer._engine.stores.base import Store

ZARR_JSON = "zarr.json"

_INDEX = r"(?:0|[1-9]\d{0,18})"


class _Grid(msgspec.Struct):
    chunk_shape: list[int]


class _ChunkGrid(msgspec.Struct):
    configuration: _Grid


class _Encoding(msgspec.Struct):
    name: str = "default"
    configuration: dict[str, Any] = {}


class _Zarr2(msgspec.Struct):
    shape: list[int]
    chunks: list[int]
    dimension_separator: str = "."


class _Zarr3(msgspec.Struct):
    shape: list[int]
    chunk_grid: _ChunkGrid
    chunk_key_encoding: _Encoding = msgspec.field(default_factory=_Encoding)


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """The names of an array's chunks: `first`, then as many numbers as it has axes, each less than that of `counts`."""

    counts: tuple[int, ...]
    separator: str
    first: str = ""

    def has(self, name: str) -> bool:
        """Tell whether a path in the array's directory is that of a chunk."""
        if not self.counts:
            return name == (self.first or "0")
        numbers = name.split(self.separator)
        if self.first and numbers.pop(0) != self.first:
            return False
        return len(numbers) == len(self.counts) and all(
            re.fullmatch(_INDEX, number) and int(number) < count
            for number, count in zip(numbers, self.counts, strict=True)
        )


def chunk_names(store: Store, path: str) -> ChunkNames | None:
    """Read the names of the chunks of the array in a directory; None if there is none, or one whose description makes
    no sense."""
    for name, parse in ((ZARRAY, _of_zarr2), (ZARR_JSON, _of_zarr3)):
        where = f"{path}/{name}" if path else name
        try:
            return parse(parse_lenient(read_whole(store, where)[0], store.path_to(where)))
        except FileNotFoundError:
            continue
        except (FormatError, OSError):
            return None
    return None


def _of_zarr2(document: Any) -> ChunkNames:
    array = convert_lenient(document, _Zarr2)
    return ChunkNames(_counts(array.shape, array.chunks), array.dimension_separator or ".")


def _of_zarr3(document: Any) -> ChunkNames:
    array = convert_lenient(document, _Zarr3)
    counts = _counts(array.shape, array.chunk_grid.configuration.chunk_shape)
    encoding = array.chunk_key_encoding
    is_default = encoding.name == "default"
    separator = encoding.configuration.get("separator") or ("/" if is_default else ".")
    return ChunkNames(counts, str(separator), "c" if is_default else "")


def _counts(shape: list[int], chunk: list[int]) -> tuple[int, ...]:
    if len(shape) != len(chunk) or any(size < 1 for size in chunk):
        raise FormatError("chunks that do not fit the shape")
    return tuple(-(-size // part) for size, part in zip(shape, chunk, strict=True))
