"""The msgpack file in which old versions of Orbax, flax over it and T5X keep a tree: the structure, small leaves, and
for each other leaf the array beside the file that holds it.

    {"step": 3, "w": "PLACEHOLDER://params.w"}                                      Orbax up to 0.5.20
    {"w": {"driver": "zarr", "kvstore": {"path": "target.w"}, "metadata": ...}}     T5X
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from eformer._engine.formats.msgpack.locations import Located, locate
from eformer._engine.formats.others import flax as msgpack
from eformer._engine.formats.others.single_file import SingleFile, StoredArray, Window
from eformer._engine.stores.inside import open_inside, version_of
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NAME = "checkpoint"

_PICKLE = 0x80  # of protocol 2 and above; alone, an empty dict


@dataclass(frozen=True, slots=True)
class Plain:
    """A number, a text or another plain value, as JSON."""

    value: Any


@dataclass(frozen=True, slots=True)
class Named:
    """An array beside the file. T5X says its driver and its shape, too."""

    path: str
    driver: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Aggregate:
    """What the file says: the structure as JSON, and of each leaf by its name where it is."""

    nbytes: int
    version: str
    structure: Any
    leaves: Mapping[str, StoredArray | Plain | Named]


def is_aggregate(directory: Path) -> bool:
    """Tell whether the directory has such a file: one of that name that begins like a tree in msgpack."""
    try:
        file = _opened(directory)
    except (OSError, FormatError):
        return False
    try:
        first = file.read(0, 32)
    finally:
        os.close(file.descriptor)
    if not first or (first[0] == _PICKLE and file.nbytes > 1):
        return False
    return first[0] in msgpack.BEGINNINGS or msgpack.ORBAX_ARRAY.encode() in first


def read_aggregate(directory: Path) -> Aggregate:
    """Read the structure, the plain values, and where the arrays lie. No array is read."""
    file = _opened(directory)
    try:
        structure, leaves = msgpack.flattened(locate(Window(file)), is_leaf=msgpack.is_t5x_array)
        found = {name: _found(leaf, name) for name, leaf in leaves.items()}
        _require_one_leaf_each({name: leaf for name, leaf in found.items() if isinstance(leaf, Named)})
    except FormatError as error:
        raise FormatError(f"{file.path} cannot be read: {error}") from error
    finally:
        os.close(file.descriptor)
    return Aggregate(file.nbytes, file.version, structure, found)


def _opened(directory: Path) -> SingleFile:
    descriptor = open_inside(directory, NAME)
    return SingleFile(
        directory / NAME, descriptor, os.fstat(descriptor).st_size, version_of(os.fstat(descriptor))
    )


def _found(leaf: Any, name: str) -> StoredArray | Plain | Named:
    if isinstance(leaf, Located):
        return msgpack.stored(leaf, name)
    if isinstance(leaf, dict):
        return _of_t5x(leaf, name)
    if isinstance(leaf, str) and leaf.startswith(msgpack.ORBAX_ARRAY):
        return Named(leaf.removeprefix(msgpack.ORBAX_ARRAY))
    return Plain(msgpack.recorded(leaf, name))


class _Place(msgspec.Struct):
    path: str


class _About(msgspec.Struct):
    shape: tuple[int, ...]


class _Transform(msgspec.Struct, forbid_unknown_fields=True):
    """The domain of an array; with more members than these it is of a part, or of something else."""

    input_exclusive_max: list[int | tuple[int]] = []
    input_inclusive_min: list[int] = []


class _Spec(msgspec.Struct, forbid_unknown_fields=True):
    driver: Literal["zarr", "zarr3"]
    kvstore: _Place
    metadata: _About
    dtype: str = ""
    path: str = ""
    transform: _Transform | None = None

    @property
    def is_whole(self) -> bool:
        if self.transform is None:
            return True
        ends = [end[0] if isinstance(end, tuple) else end for end in self.transform.input_exclusive_max]
        return ends in ([], list(self.metadata.shape)) and not any(self.transform.input_inclusive_min)


def _of_t5x(document: Mapping[Any, Any], name: str) -> Named:
    """Name the array of a specification for TensorStore; refuse one of a part, or with members that are not known."""
    try:
        spec = msgspec.convert(document, _Spec)
    except msgspec.ValidationError as error:
        raise FormatError(
            f"leaf {name[:200]!r} is a specification for TensorStore that is not known: {error}"
        ) from error
    if not spec.is_whole:
        raise FormatError(f"leaf {name[:200]!r} is a part of an array: {document['transform']!r:.200}")
    path = "/".join(part.removesuffix("/") for part in (spec.kvstore.path, spec.path) if part)
    return Named(path, spec.driver, spec.metadata.shape)


def _require_one_leaf_each(named: Mapping[str, Named]) -> None:
    seen: dict[str, str] = {}
    for name, array in named.items():
        if (other := seen.setdefault(array.path, name)) != name:
            raise FormatError(
                f"the leaves {other[:200]!r} and {name[:200]!r} are both the array {array.path[:200]!r}"
            )
