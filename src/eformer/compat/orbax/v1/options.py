"""The options of a context, as plain objects that may be changed. Options of Orbax's files are kept and ignored.

Tests: tests/compat_orbax/test_v1.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from eformer.compat.orbax.options import (
    AsyncOptions,
    AtomicityMode,
    AtomicityOptions,
    MultiprocessingOptions,
)

__all__ = [
    "ArrayOptions",
    "AsyncOptions",
    "AtomicityMode",
    "AtomicityOptions",
    "CheckpointLayout",
    "CheckpointablesOptions",
    "DeletionOptions",
    "FileOptions",
    "MemoryOptions",
    "MultiprocessingOptions",
    "PathwaysOptions",
    "PyTreeOptions",
    "SafetensorsOptions",
]


class CheckpointLayout(Enum):
    """The layout of the files to load. eformer recognises both by itself."""

    ORBAX = "Orbax"
    SAFETENSORS = "SafeTensors"
    AUTO = "Auto"


class Bag:
    """Options by name, whatever their names are."""

    def __init__(self, **options: Any) -> None:
        vars(self).update(options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@dataclass
class FileOptions:
    """The permissions of new directories."""

    path_permission_mode: int | None = None
    path_class: Any = None
    skip_sync_file_validations: bool = False


@dataclass
class Loading:
    """`partial_load` restores the leaves of the target alone."""

    partial_load: bool = False


@dataclass
class PyTreeOptions:
    """Options of trees."""

    saving: Any = field(default_factory=Bag)
    loading: Any = field(default_factory=Loading)

    Loading = Loading
    Saving = Bag


@dataclass
class ArrayLoading:
    """`enable_padding_and_truncation` fills arrays of another shape with zeros, or cuts them."""

    enable_padding_and_truncation: bool = False
    raise_array_data_missing_error: bool = True
    use_load_and_broadcast: bool = False


@dataclass
class ArrayOptions:
    """Options of arrays."""

    saving: Any = field(default_factory=lambda: Bag(use_ocdbt=True, use_zarr3=True, use_compression=True))
    loading: Any = field(default_factory=ArrayLoading)

    Loading = ArrayLoading
    Saving = Bag


@dataclass
class CheckpointablesOptions:
    """The handlers of checkpointables."""

    registry: Any = None


@dataclass
class PathwaysOptions:
    """Accepted, and without effect."""

    checkpointing_impl: Any = None


class DeletionOptions(Bag):
    """Accepted, and without effect."""


class MemoryOptions(Bag):
    """Accepted, and without effect."""


class SafetensorsOptions(Bag):
    """Accepted, and without effect."""
