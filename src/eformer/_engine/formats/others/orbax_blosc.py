"""Look at chunks that blosc compressed before TensorStore does: it allocates what they claim, and a failed allocation
in it ends the process. All other codecs it decodes to the length of the chunk, and no further."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.formats.codecs import BLOSC_HEADER, require_blosc
from eformer._engine.formats.zarr.zarray import chunks_in
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from eformer._engine.record.regions import Region

_AFTER_BLOSC = {"crc32c"}  # codecs that leave the header of blosc where it is


class BloscChunks(Struct, frozen=True):
    """The chunks of an array that blosc compressed, in `store` under names that begin and are joined in this way."""

    store: Any
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    nbytes: int
    start: str
    separator: str

    def require_claims(self, box: Region) -> None:
        """Refuse a box with a chunk that claims to be larger than it can be. Missing chunks are left to TensorStore."""
        for name, _ in chunks_in(box, self.shape, self.chunk):
            key = self.start + name.replace(".", self.separator) if self.shape else self.start or "0"
            found = self.store.read(key, byte_range=slice(0, BLOSC_HEADER)).result()
            if found.state == "value":
                require_blosc(bytes(found.value), self.nbytes)


def blosc_chunks(path: str, array: Any, chunk: tuple[int, ...], itemsize: int) -> BloscChunks | None:
    """Return the chunks of an array of TensorStore if blosc compressed them, else None."""
    codec = array.codec.to_json()
    if "blosc" not in str(codec):
        return None
    metadata = array.spec().to_json()["metadata"]
    if codec["driver"] == "zarr":
        start, separator = "", metadata.get("dimension_separator") or "."
    else:
        _require_plain(path, codec["codecs"])
        start, separator = _key_encoding(metadata["chunk_key_encoding"])
        start += separator if start and array.rank else ""
    nbytes = itemsize * math.prod(chunk)
    return BloscChunks(array.kvstore, tuple(array.shape), chunk, nbytes, start, separator)


def _require_plain(path: str, codecs: list[Mapping[str, Any]]) -> None:
    """Refuse blosc inside of shards or of another compressor, where its header cannot be found."""
    names = [codec["name"] for codec in codecs]
    if "blosc" not in names or not _AFTER_BLOSC.issuperset(names[names.index("blosc") + 1 :]):
        raise FormatError(f"leaf {path!r}: blosc inside of {', '.join(names)} is not supported")


def _key_encoding(encoding: Mapping[str, Any]) -> tuple[str, str]:
    is_v2 = encoding["name"] == "v2"
    separator = encoding.get("configuration", {}).get("separator", "." if is_v2 else "/")
    return "" if is_v2 else "c", separator
