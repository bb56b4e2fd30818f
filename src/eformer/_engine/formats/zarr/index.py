"""Read and write `tensorstore_index.json`: the directories of arrays and, for checkpoints by eformer, the manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.digests import check_own_digest, has_own_digest, stamp_digest
from eformer._engine.record.manifest import Manifest
from eformer._engine.record.names import is_inside
from eformer._engine.record.values import parse_json
from eformer._engine.stores.base import read_whole
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from eformer._engine.stores.base import Store, Version

INDEX = "tensorstore_index.json"
FORMAT = "tensorstore"
VERSION = "2.0"


class Listed(msgspec.Struct, frozen=True, gc=False):
    """An array as the index lists it, for readers that do not know the manifest."""

    path: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The arrays that were saved without a prefix, those of each prefix, and the manifest of the trees by eformer.

    If eformer wrote the file, `digest` is that of the whole file, and its first field.
    """

    digest: str = Manifest(format=FORMAT).digest
    format: str = FORMAT
    version: Any = VERSION
    prefixes: dict[str, list[Listed]] = msgspec.field(default_factory=dict)
    arrays: list[Listed] | msgspec.UnsetType = msgspec.UNSET
    eformer: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def is_ours(self) -> bool:
        return bytes(self.eformer) != b"null"

    def listed(self) -> dict[str, list[Listed]]:
        """Return the arrays by prefix, "" for those without one."""
        unprefixed = {"": self.arrays} if isinstance(self.arrays, list) else {}
        return unprefixed | self.prefixes

    def manifest(self, origin: str) -> Manifest:
        if not self.is_ours:
            return Manifest(format=FORMAT)
        return msgspec.structs.replace(Manifest.parse(bytes(self.eformer), origin), digest=self.digest)

    def with_tree(self, prefix: str, listed: list[Listed], manifest: Manifest) -> Index:
        others = {p: arrays for p, arrays in self.prefixes.items() if p != prefix}
        return Index(
            prefixes=others | ({prefix: listed} if prefix else {}),
            arrays=self.arrays if prefix else listed,
            eformer=msgspec.Raw(msgspec.json.encode(manifest)),
        )

    def to_json(self) -> bytes:
        return stamp_digest(msgspec.json.encode(self))


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
