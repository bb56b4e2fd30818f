"""Read `tensorstore_index.json`, by eformer or by another program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eformer._engine.record.digests import check_own_digest, has_own_digest
from eformer._engine.record.indexes import FORMAT, INDEX, Index
from eformer._engine.record.names import is_inside
from eformer._engine.record.values import parse_json
from eformer._engine.stores.base import read_whole
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from eformer._engine.stores.base import Store, Version


def read_index(store: Store) -> tuple[Index | None, Version | None]:
    """Read the index of a directory, by any program, and its version; None if it has none."""
    origin = store.path_to(INDEX)
    try:
        data, entry = read_whole(store, INDEX)
    except FileNotFoundError:
        return None, None
    if has_own_digest(data):
        check_own_digest(data, origin)
    index = parse_json(data, Index, f"{origin} is not an index of arrays")
    _check(index, origin, has_digest=has_own_digest(data))
    return index, entry.version


def _check(index: Index, origin: str, *, has_digest: bool) -> None:
    if index.format != FORMAT:
        raise FormatError(f"{origin}: Unsupported index format: {index.format[:40]!r}, expected {FORMAT!r}")
    if index.is_ours and not has_digest:
        raise CorruptionError(
            f"{origin} contains a manifest, but its beginning is damaged; restore the file from a copy"
        )
    if "" in index.prefixes:
        raise FormatError(f"{origin} has an empty prefix")
    for prefix, arrays in index.listed().items():
        paths = [array.path for array in arrays]
        for path in paths:  # also in an index by eformer: a digest is not a signature
            if not is_inside(path):
                raise FormatError(
                    f"{origin}: {path[:200]!r}, listed under {prefix!r}, leads out of the directory"
                )
        if len(set(paths)) < len(paths):
            raise FormatError(f"{origin} lists an array of {prefix!r} twice")
