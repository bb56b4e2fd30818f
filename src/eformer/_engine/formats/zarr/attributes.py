"""Read what zarr-python writes beside chunks: attributes of groups and arrays, and how the chunks of these are named.

It is JSON, in which Python also writes NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.values import parse_lenient, value_to_json
from eformer._engine.record.zarray import ZARRAY, ChunkShape, Shape, chunk_counts, is_index, parse_zarray
from eformer._engine.stores.base import Store, read_whole
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ZATTRS = ".zattrs"  # of zarr 2
ZARR_JSON = "zarr.json"


def to_metadata(attributes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return attributes as metadata of the tree: those of the root by their names, those of a path under `PATH/`."""
    below = {f"{path}/": value_to_json(dict(found)) for path, found in attributes.items() if path and found}
    return below | {name: value_to_json(value) for name, value in attributes.get("", {}).items()}


def read_attributes(store: Store, arrays: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read the attributes of arrays of zarr 2, given by path, and of the groups that they are in."""
    found = {}
    for path in sorted({path for array in arrays for path in _upwards(array)}):
        name = f"{path}/{ZATTRS}" if path else ZATTRS
        if store.exists(name):
            problem = f"{store.path_to(name)} does not hold attributes"
            found[path] = parse_lenient(read_whole(store, name)[0], dict[str, Any], problem)
    return found


def _upwards(path: str) -> Iterable[str]:
    """Return a path and those above it, up to the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""


# ------------------------------------ names of chunks, whichever version of zarr describes the array


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
    array = parse_lenient(data, _Zarr3, origin)
    counts = chunk_counts(array.shape, array.chunk_grid.configuration.chunk_shape)
    encoding = array.chunk_key_encoding
    is_default = encoding.name == "default"
    separator = encoding.configuration.get("separator") or ("/" if is_default else ".")
    return ChunkNames(counts, str(separator), "c" if is_default else "")
