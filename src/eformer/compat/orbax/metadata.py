"""Metadata objects of both generations: of leaves, of trees, of steps and of roots. They read no leaves.

Tests: tests/compat_orbax/test_metadata.py.
"""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np

from eformer._engine.record.indexes import ORBAX_CHECKPOINT
from eformer.compat.orbax._alike import Alike, on_disk

ROOT_FILE, ROOT_DIRECTORY = "_ROOT_METADATA", "metadata"

# ------------------------------------------------------------------------------------------------ leaves


@dataclass
class Metadata(Alike):
    """A leaf in a checkpoint: its name, and the directory of its tree."""

    alike = ("Metadata",)

    name: str
    directory: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metadata)


@dataclass(frozen=True)
class StorageMetadata:
    """How an array is stored: the shape of its chunks."""

    chunk_shape: Any
    write_shape: Any = None
    zarr_metadata: Any = field(default=None, compare=False, repr=False)


@dataclass(eq=False)
class ArrayMetadata(Metadata):
    """An array: its shape, dtype and sharding."""

    alike = ("ArrayMetadata",)

    shape: tuple[int, ...]
    sharding: Any
    dtype: Any
    storage: Any = None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ArrayMetadata)
            and (self.shape, self.dtype) == (other.shape, other.dtype)
            and self.sharding == other.sharding
        )


@dataclass(eq=False)
class ScalarMetadata(ArrayMetadata):
    """A plain number."""

    alike = ("ScalarMetadata",)

    shape: tuple[int, ...] = ()
    sharding: Any = None
    dtype: Any = None
    storage: Any = None


@dataclass(eq=False)
class StringMetadata(Metadata):
    """A text."""

    alike = ("StringMetadata",)


class ShardingMetadata:
    """How an array was sharded, without devices."""

    def to_jax_sharding(self) -> Any:
        """Return the sharding over the devices of this program. Raise ValueError if it has too few."""
        raise NotImplementedError


@dataclass(eq=True)
class NamedShardingMetadata(ShardingMetadata):
    """A `NamedSharding`: the sizes of its mesh, the names of its axes, and its specification."""

    shape: Any
    axis_names: Any
    partition_spec: Any
    axis_types: Any = None
    device_mesh: Any = None
    memory_kind: Any = None

    def to_jax_sharding(self) -> Any:
        """Return the sharding over the first devices of this program. Raise ValueError if it has too few."""
        sizes = tuple(int(size) for size in self.shape)
        devices, count = jax.devices(), int(np.prod(sizes, dtype=np.int64))
        if count > len(devices):
            raise ValueError(
                f"the array was saved on a mesh of {dict(zip(self.axis_names, sizes, strict=True))}, which has {count} "
                f"devices, and this program has {len(devices)}"
            )
        mesh = jax.sharding.Mesh(np.array(devices[:count]).reshape(sizes), tuple(self.axis_names))
        spec = jax.sharding.PartitionSpec(
            *(tuple(one) if isinstance(one, list) else one for one in self.partition_spec)
        )
        return jax.sharding.NamedSharding(mesh, spec, memory_kind=self.memory_kind)


@dataclass(eq=True)
class SingleDeviceShardingMetadata(ShardingMetadata):
    """The sharding of an array on one device."""

    device_str: str = ""

    def to_jax_sharding(self) -> Any:
        """Return the sharding on the device of that name, or on the default device."""
        devices = jax.devices()
        device = next((one for one in devices if str(one) == self.device_str), devices[0])
        return jax.sharding.SingleDeviceSharding(device)


# ------------------------------------------------------------------------------------------------- trees


class TreeMetadata(Alike):
    """The metadata of a tree: a pytree of the metadata of its leaves, which can also be indexed like the tree."""

    alike = ("TreeMetadata", "_TreeMetadataImpl")

    def __init__(self, tree: Any, custom_metadata: Any = None) -> None:
        self._tree, self._custom_metadata = tree, custom_metadata

    @property
    def tree(self) -> Any:
        """The tree: dicts and lists with the metadata of leaves."""
        return self._tree

    @property
    def custom_metadata(self) -> Any:
        """The metadata that the caller saved with the tree."""
        return self._custom_metadata

    def __getitem__(self, key: Any) -> Any:
        return self._tree[key]

    def __contains__(self, key: object) -> bool:
        return key in self._tree

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the entry of a key."""
        return self._tree.get(key, default)

    def keys(self) -> KeysView[Any]:
        """Return the keys of the top of the tree."""
        return self._tree.keys()  # type: ignore[no-any-return]

    def values(self) -> ValuesView[Any]:
        """Return the entries of the top of the tree."""
        return self._tree.values()  # type: ignore[no-any-return]

    def items(self) -> ItemsView[Any, Any]:
        """Return the keys and entries of the top of the tree."""
        return self._tree.items()  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"TreeMetadata(tree={self._tree!r}, custom_metadata={self._custom_metadata!r})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, TreeMetadata)
            and self.tree == other.tree
            and self.custom_metadata == other.custom_metadata
        )

    __hash__ = None  # type: ignore[assignment]


def _children_with_keys(node: TreeMetadata) -> tuple[list[tuple[Any, Any]], Any]:
    tree = node.tree
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda each: each is not tree)
    return [(path[0], child) for path, child in pairs], (structure, _Frozen(node.custom_metadata))


def _flatten(node: TreeMetadata) -> tuple[list[Any], Any]:
    pairs, auxiliary = _children_with_keys(node)
    return [child for _, child in pairs], auxiliary


def _unflatten(auxiliary: Any, children: Any) -> TreeMetadata:
    structure, custom = auxiliary
    return TreeMetadata(jax.tree.unflatten(structure, list(children)), custom.value)


class _Frozen:
    """A value that a tree structure carries and compares, whatever it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and self.value == other.value

    def __hash__(self) -> int:
        return 0


jax.tree_util.register_pytree_with_keys(TreeMetadata, _children_with_keys, _unflatten, _flatten)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- steps and roots


class _Viewed(Mapping[str, Any]):
    """An object that is also a mapping over one of its attributes, as an older generation of Orbax had it."""

    def _view(self) -> Any:
        raise NotImplementedError

    def __getitem__(self, key: Any) -> Any:
        return self._view()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._view())

    def __len__(self) -> int:
        return len(self._view())

    def __bool__(self) -> bool:
        return True


@dataclass(eq=True)
class StepMetadata(_Viewed):
    """The metadata of a step: of its items, its metrics, and the caller's own.

    It is also a mapping and a pytree over `item_metadata`, which programs for older versions of Orbax use.
    """

    item_handlers: Any = None
    item_metadata: Any = None
    metrics: dict[str, Any] = field(default_factory=dict)
    performance_metrics: dict[str, Any] = field(default_factory=dict)
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, Any] = field(default_factory=dict)

    def _view(self) -> Any:
        return {} if self.item_metadata is None else self.item_metadata

    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=True)
class RootMetadata(_Viewed):
    """The metadata of a root: `metadata=` of the manager that made it. It is also a mapping over `custom_metadata`."""

    internal_metadata: Any = field(default_factory=dict)
    custom_metadata: Any = field(default_factory=dict)

    def _view(self) -> Any:
        return self.custom_metadata or {}

    __hash__ = None  # type: ignore[assignment]


def _flatten_step(step: StepMetadata) -> tuple[list[Any], Any]:
    rest = {one.name: getattr(step, one.name) for one in fields(step) if one.name != "item_metadata"}
    return [step.item_metadata], _Frozen(rest)


def _unflatten_step(rest: Any, children: Any) -> Any:
    """Return the mapped items: a program that maps metadata wants the tree."""
    return children[0]


jax.tree_util.register_pytree_node(StepMetadata, _flatten_step, _unflatten_step)


def read_json(path: Any) -> Any:
    """Read a JSON file; None if it does not exist."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_step(directory: Any) -> StepMetadata:
    """Read the facts of a step from its `_CHECKPOINT_METADATA`; without that file, all are empty."""
    found = read_json(on_disk(directory) / ORBAX_CHECKPOINT)
    found = found if isinstance(found, dict) else {}
    known = {one.name for one in fields(StepMetadata)} - {"item_metadata"}
    step = StepMetadata(
        **{name: value for name, value in found.items() if name in known and value is not None}
    )
    unknown = {name: value for name, value in found.items() if name not in known}
    return StepMetadata(**{**vars(step), "custom_metadata": {**unknown, **step.custom_metadata}})


def get_step_metadata(path: Any) -> StepMetadata:
    """Return the facts of a step. Raise ValueError without `_CHECKPOINT_METADATA`."""
    if not (file := on_disk(path) / ORBAX_CHECKPOINT).is_file():
        raise ValueError(f"Step metadata not found at {file}")
    return read_step(path)
