"""Tell the files of an array's chunks by their names, whichever version of zarr describes the array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.zarr.attributes import convert_lenient, parse_lenient
from eformer._engine.record.zarray import ZARRAY, ChunkShape, Shape, chunk_counts, is_index, parse_zarray
from eformer._engine.stores.base import read_whole
from eformer.errors import FormatError

if TYPE_CHECKING:
    from eformer._engine.stores.base import Store

ZARR_JSON = "zarr.json"


class _Grid(msgspec.Struct):
    chunk_shape: ChunkShape


class _ChunkGrid(msgspec.Struct):
    configuration: _Grid


class _Encoding(msgspec.Struct):
    name: str = "default"
    configuration: dict[str, Any] = {}


class _Zarr3(msgspec.Struct):
    shape: Shape
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
        return is_index(numbers, self.counts)


def chunk_names(store: Store, path: str) -> ChunkNames | None:
    """Read the names of the chunks of the array in a directory; None if there is none, or one whose description makes
    no sense."""
    for name, parse in ((ZARRAY, _of_zarr2), (ZARR_JSON, _of_zarr3)):
        where = f"{path}/{name}" if path else name
        try:
            return parse(read_whole(store, where)[0], store.path_to(where))
        except FileNotFoundError:
            continue
        except (FormatError, OSError):
            return None
    return None


def _of_zarr2(data: bytes, origin: str) -> ChunkNames:
    array = parse_zarray(data, origin)
    return ChunkNames(array.counts, array.dimension_separator)


def _of_zarr3(data: bytes, origin: str) -> ChunkNames:
    array = convert_lenient(parse_lenient(data, origin), _Zarr3)
    counts = chunk_counts(array.shape, array.chunk_grid.configuration.chunk_shape)
    encoding = array.chunk_key_encoding
    is_default = encoding.name == "default"
    separator = encoding.configuration.get("separator") or ("/" if is_default else ".")
    return ChunkNames(counts, str(separator), "c" if is_default else "")
