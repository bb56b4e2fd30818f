"""The index of a checkpoint: the file that a commit replaces, which names the trees.

The index of safetensors files is a manifest. The index of zarr arrays lists the directories of arrays, for readers that
do not know manifests; if eformer wrote the checkpoint, the manifest is in it.

Tests: tests/faults/test_bucket_removal.py, tests/engine/stores/test_bucket.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.digests import stamp_digest
from eformer._engine.record.manifest import Manifest
from eformer._engine.record.values import parse_json
from eformer.errors import EformerError

if TYPE_CHECKING:
    from eformer._engine.record.manifest import CommitLog

MANIFEST = "manifest.json"
SAFETENSORS = "safetensors"
MEMORY = "tree in memory"  # a tree of the caller, which is read like a checkpoint
INDEX = "tensorstore_index.json"
FORMAT = "tensorstore"
VERSION = "2.0"

# Files that mark the checkpoints of other programs.
ORBAX_TREE = "_METADATA"
ORBAX_CHECKPOINT = "_CHECKPOINT_METADATA"
PEFT_CONFIG = "adapter_config.json"


class Listed(msgspec.Struct, frozen=True, gc=False):
    """An array as the index lists it, for readers that do not know the manifest."""

    path: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """The arrays without a prefix, the arrays of each prefix, and the manifest of the trees by eformer.

    `digest` comes first. If eformer wrote the file, it is the digest of the whole file.
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
        """Return the arrays by prefix; arrays without a prefix are under ""."""
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


# ------------------------------------------------------------------------------------- of either format

INDEXES = (INDEX, MANIFEST)
"""The names of all indexes, in the order in which readers look for them."""

MOST_EMPTY = 8192  # bytes of an index without trees


def manifest_in(name: str, data: bytes) -> Manifest | None:
    """Return the manifest in an index; None if the index cannot be read."""
    try:
        if name == MANIFEST:
            return Manifest.from_json(data, name)
        return parse_json(data, Index, name).manifest(name)
    except EformerError:
        return None


def empty_index(name: str, log: CommitLog) -> bytes:
    """Return an index without trees, which says that the checkpoint was removed."""
    if name == MANIFEST:
        return Manifest(format=SAFETENSORS, log=log).to_json()
    manifest = Manifest(format=FORMAT, log=log)
    return Index(eformer=msgspec.Raw(msgspec.json.encode(manifest))).to_json()
