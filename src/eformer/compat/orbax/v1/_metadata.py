"""Metadata objects of the newer generation.

Tests: tests/compat_orbax/test_v1.py.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

import numpy as np

from eformer.compat.orbax._stored import StoredLeaf, describe

PyTreeMetadata = Any


@dataclass(frozen=True)
class ArrayMetadata:
    """An array of JAX in a checkpoint."""

    shape: tuple[int, ...]
    dtype: Any
    sharding_metadata: Any = None
    storage_metadata: Any = None


@dataclass(frozen=True)
class NumpyMetadata:
    """An array of numpy in a checkpoint."""

    shape: tuple[int, ...]
    dtype: Any
    storage_metadata: Any = None


class CheckpointMetadata:
    """A checkpoint or a step: its path, its tree or its checkpointables, and the caller's metadata."""

    def __init__(
        self,
        path: Any = None,
        *,
        metadata: Any = None,
        init_timestamp_nsecs: int | None = None,
        commit_timestamp_nsecs: int | None = None,
        custom_metadata: Any = None,
        **more: Any,
    ) -> None:
        self.path, self.metadata, self.custom_metadata = path, metadata, custom_metadata
        self.init_timestamp_nsecs, self.commit_timestamp_nsecs = init_timestamp_nsecs, commit_timestamp_nsecs
        vars(self).update(more)

    @property
    def commit_timestamp(self) -> dt.datetime | None:
        """When the save was committed."""
        at = self.commit_timestamp_nsecs
        return None if at is None else dt.datetime.fromtimestamp(at / 1e9, dt.UTC)

    @property
    def init_timestamp(self) -> dt.datetime | None:
        """When the save began."""
        at = self.init_timestamp_nsecs
        return None if at is None else dt.datetime.fromtimestamp(at / 1e9, dt.UTC)

    @property
    def time(self) -> dt.datetime | None:
        """When the save was committed."""
        return self.commit_timestamp

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
        )


def tree_metadata(directory: Any) -> Any:
    """Return the tree in a directory with the metadata of each leaf."""
    return _described(describe(directory).tree)


def _described(node: Any) -> Any:
    if type(node) is dict:
        return {key: _described(child) for key, child in node.items()}
    if type(node) is list:
        return [_described(child) for child in node]
    return _leaf(node) if isinstance(node, StoredLeaf) else node


def _leaf(leaf: StoredLeaf) -> Any:
    if leaf.kind == "jax":
        return ArrayMetadata(leaf.shape, leaf.dtype, leaf.sharding)
    if leaf.kind == "numpy":
        return NumpyMetadata(leaf.shape, leaf.dtype)
    if leaf.kind == "scalar":
        return leaf.dtype.type(0).item() if isinstance(leaf.dtype, np.dtype) else 0
    return "string"
