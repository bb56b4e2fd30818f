"""Describe a saved tree as the documented `CheckpointMetadata`."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import jax
import msgspec

from eformer._engine.record.names import readable
from eformer._engine.record.values import MALFORMED_JSON

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eformer._engine.record.manifest import TreeEntry


@dataclass
class CheckpointMetadata:
    """Describe when and by what a checkpoint was saved, and what it contains. Fields that are None are filled in.

    version             the version of eFormer that documents these fields
    timestamp           when it was saved
    checksum            SHA-256 by key, if validation is on
    array_metadata      shape and dtype by key
    framework_version   the version of jax
    custom_metadata     the `metadata` of the save
    """

    version: str = "0.0.90"
    timestamp: str | None = None
    checksum: dict[str, str] | None = None
    array_metadata: dict[str, dict[str, Any]] | None = None
    framework_version: str | None = None
    custom_metadata: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.timestamp is None:
            self.timestamp = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        if self.framework_version is None:
            self.framework_version = jax.__version__
        self.checksum = {} if self.checksum is None else self.checksum
        self.array_metadata = {} if self.array_metadata is None else self.array_metadata
        self.custom_metadata = {} if self.custom_metadata is None else self.custom_metadata

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CheckpointMetadata:
        """Create an instance from `data`, a dict of its fields. Unknown fields are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


def metadata_of(tree: TreeEntry) -> CheckpointMetadata:
    """Return the metadata of a tree, saved by eformer or by another program."""
    keys = _keys_of(tree.leaves)
    arrays = {
        keys[name]: {"dtype": entry.logical_dtype, "shape": list(entry.logical_shape)}
        for name, entry in tree.leaves.items()
    }
    if not tree.has_digests:
        return _foreign_metadata(tree.metadata, arrays)
    return CheckpointMetadata(
        timestamp=tree.saved_at,
        checksum={keys[name]: sha256 for name, sha256 in checksums_of(tree).items()},
        array_metadata=arrays,
        framework_version=tree.written_by.rpartition("jax ")[2],
        custom_metadata=tree.metadata,
    )


def _keys_of(names: Iterable[str]) -> dict[str, str]:
    """Map names to dotted keys; a name whose dotted key would be ambiguous maps to itself."""
    keys = {name: readable(name) for name in names}
    count = Counter(keys.values())
    return {name: key if count[key] == 1 else name for name, key in keys.items()}


def checksums_of(tree: TreeEntry) -> dict[str, str]:
    """Return the recorded SHA-256 of each leaf, by name."""
    if tree.has_digests:
        return {name: entry.sha256 for name, entry in tree.leaves.items() if entry.sha256}
    recorded = _foreign_metadata(tree.metadata, {}).checksum or {}
    return {name: recorded[key] for name, key in _keys_of(tree.leaves).items() if key in recorded}


def _foreign_metadata(found: dict[str, Any], arrays: dict[str, dict[str, Any]]) -> CheckpointMetadata:
    """Parse the metadata of the original eFormer, or take all of it for the user's."""
    if "timestamp" not in found or "custom_metadata" not in found:
        return CheckpointMetadata(
            timestamp="", array_metadata=arrays, framework_version="", custom_metadata=found
        )
    record = {name: _decoded(value) if name not in _TEXT else value for name, value in found.items()}
    for name, kind in (("checksum", dict), ("custom_metadata", dict), ("framework_version", str)):
        if not isinstance(record.get(name), kind):
            record[name] = kind()
    return CheckpointMetadata.from_dict(record | {"array_metadata": arrays})


_TEXT = ("version", "timestamp")


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except MALFORMED_JSON:
        return value
