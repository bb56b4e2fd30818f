"""The msgpack file in which Orbax up to 0.5.20, flax on top of it, and T5X keep a tree.

It holds the structure and the small leaves. For every other leaf it names the array beside the file that holds it:

    {"step": 3, "w": "PLACEHOLDER://params.w"}                                      Orbax
    {"w": {"driver": "zarr", "kvstore": {"path": "target.w"}, "metadata": ...}}     T5X
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from eformer._engine.formats.others import flax
from eformer._engine.formats.others.flax import ArrayLocation, locate_arrays
from eformer._engine.formats.others.orbax_arrays import ZarrArray
from eformer._engine.formats.others.single_file import ArrayInFile, Window, open_single_file
from eformer._engine.stores.local import LocalStore
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from eformer._engine.stores.base import Store, Version

AGGREGATE = "checkpoint"

_PICKLE = 0x80  # the first byte of protocol 2 and above; in msgpack, an empty dict


@dataclass(frozen=True, slots=True)
class PlainValue:
    """A leaf that is a number, a text or another plain value, as JSON."""

    value: Any


# An array in the file, a plain value, or an array beside the file, of which T5X records the driver and the shape.
Leaf = ArrayInFile | PlainValue | ZarrArray


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The contents of the file: the structure as JSON, and the place of each leaf by name."""

    nbytes: int
    version: Version
    structure: Any
    leaves: Mapping[str, Leaf]


def is_aggregate(store: Store) -> bool:
    """Tell whether the directory has such a file: one of its name that begins like a tree in msgpack."""
    try:
        first, entry = store.read(AGGREGATE, 0, 32)
    except (OSError, FormatError):
        return False
    if not first or (first[0] == _PICKLE and entry.nbytes > 1):
        return False
    return first[0] in flax.BEGINNINGS or flax.ORBAX_ARRAY.encode() in first


def read_aggregate(directory: Path) -> Aggregate:
    """Read the structure, the plain values and the places of the arrays, without the arrays themselves."""
    with open_single_file(LocalStore(directory), AGGREGATE) as file:
        try:
            structure, leaves = flax.flatten_message(locate_arrays(Window(file)), is_leaf=flax.is_t5x_array)
            placed = {name: _place(leaf, name) for name, leaf in leaves.items()}
            arrays = {name: leaf for name, leaf in placed.items() if isinstance(leaf, ZarrArray)}
            _refuse_shared_arrays(arrays)
        except FormatError as error:
            raise FormatError(f"{file.path} cannot be read: {error}") from error
    return Aggregate(file.nbytes, file.version, structure, placed)


def _place(leaf: Any, name: str) -> Leaf:
    if isinstance(leaf, ArrayLocation):
        return flax.to_array_in_file(leaf, name)
    if isinstance(leaf, dict):
        return _parse_t5x_array(leaf, name)
    if isinstance(leaf, str) and leaf.startswith(flax.ORBAX_ARRAY):
        return ZarrArray(leaf.removeprefix(flax.ORBAX_ARRAY))
    return PlainValue(flax.plain_value_to_json(leaf, name))


class _KvStore(msgspec.Struct):
    path: str


class _ArrayMetadata(msgspec.Struct):
    shape: tuple[int, ...]


class _Transform(msgspec.Struct, forbid_unknown_fields=True):
    """The domain of a whole array. Other members mean a part of an array, or something else."""

    input_exclusive_max: list[int | tuple[int]] = []
    input_inclusive_min: list[int] = []


class _Spec(msgspec.Struct, forbid_unknown_fields=True):
    driver: Literal["zarr", "zarr3"]
    kvstore: _KvStore
    metadata: _ArrayMetadata
    dtype: str = ""
    path: str = ""
    transform: _Transform | None = None

    @property
    def is_whole(self) -> bool:
        """Tell whether the specification is of a whole array."""
        if self.transform is None:
            return True
        ends = [end[0] if isinstance(end, tuple) else end for end in self.transform.input_exclusive_max]
        return ends in ([], list(self.metadata.shape)) and not any(self.transform.input_inclusive_min)


def _parse_t5x_array(document: Mapping[Any, Any], name: str) -> ZarrArray:
    """Parse a TensorStore specification; refuse one of a part of an array, or with unknown members."""
    try:
        spec = msgspec.convert(document, _Spec)
    except msgspec.ValidationError as error:
        raise FormatError(
            f"leaf {name[:200]!r} is a specification for TensorStore with unknown members: {error}"
        ) from error
    if not spec.is_whole:
        raise FormatError(
            f"leaf {name[:200]!r} is a part of an array, which is not supported: {document['transform']!r:.200}"
        )
    path = "/".join(part.removesuffix("/") for part in (spec.kvstore.path, spec.path) if part)
    return ZarrArray(path, driver=spec.driver, shape=spec.metadata.shape)


def _refuse_shared_arrays(arrays: Mapping[str, ZarrArray]) -> None:
    leaf_of: dict[str, str] = {}
    for name, array in arrays.items():
        if (other := leaf_of.setdefault(array.path, name)) != name:
            raise FormatError(
                f"the leaves {other[:200]!r} and {name[:200]!r} are both the array {array.path[:200]!r}"
            )
