"""Where each leaf of an Orbax tree is stored: in `_METADATA` and its companions, the msgpack file, or a zarr array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from eformer._engine.formats.markers import ORBAX_TREE
from eformer._engine.formats.others.orbax_aggregate import NAME as AGGREGATE
from eformer._engine.formats.others.orbax_aggregate import ExternalArray, PlainValue
from eformer._engine.formats.others.orbax_metadata import (
    STRINGS,
    read_key_generators,
    read_shardings,
    read_strings,
)
from eformer._engine.formats.others.orbax_structure import EMPTY_CONTAINERS
from eformer._engine.formats.others.single_file import ArrayInFile
from eformer._engine.record.text import few
from eformer._engine.record.values import value_to_json
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from eformer._engine.formats.others.orbax_aggregate import Aggregate
    from eformer._engine.formats.others.orbax_metadata import LeafMetadata, TreeMetadata
    from eformer._engine.record.manifest import RecordedSharding

Library = Literal["jax", "numpy"]


@dataclass(frozen=True, slots=True)
class AggregateArray:
    """An array in the msgpack file."""

    array: ArrayInFile
    library: Library


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """A zarr array, by its path in the directory or in the database.

    `key` names the generator of a PRNG key. `is_scalar` marks an array that holds a plain number. `shape` and `driver`
    are what T5X expects of the array.
    """

    path: str
    library: Library = "jax"
    key: str | None = None
    sharding: RecordedSharding | None = None
    is_scalar: bool = False
    shape: tuple[int, ...] | None = None
    driver: str | None = None


Leaf = PlainValue | AggregateArray | ZarrArray


def leaves_in_metadata(directory: Path, tree: TreeMetadata, aggregate: Aggregate | None) -> dict[str, Leaf]:
    """Locate every leaf that `_METADATA` lists, by name; refuse a msgpack file that lists others."""
    strings, shardings = read_strings(directory), read_shardings(directory)
    generators = read_key_generators(directory)

    def locate(leaf: LeafMetadata) -> Leaf:
        kind, stored = leaf.value_metadata.value_type, leaf.stored_name
        library: Library = "numpy" if kind == "np.ndarray" else "jax"
        listed = aggregate.leaves.get(leaf.name) if aggregate else None
        if isinstance(listed, ArrayInFile):
            return AggregateArray(listed, library)
        if isinstance(listed, PlainValue):
            return listed
        if leaf.value_metadata.skip_deserialize and not aggregate:
            raise CorruptionError(
                f"leaf {leaf.name[:200]!r} is in {directory / AGGREGATE}, which is missing or damaged"
            )
        if kind == "string":
            return PlainValue(value_to_json(_string(strings, stored, directory)))
        key, sharding = generators.get(stored), shardings.get(stored)
        return ZarrArray(stored, library, key, sharding, is_scalar=kind == "scalar")

    stored = [leaf for leaf in tree.leaves if leaf.value_metadata.value_type not in EMPTY_CONTAINERS]
    found = {leaf.name: locate(leaf) for leaf in stored}
    if aggregate:
        _require_same_leaves(directory, tree, aggregate, found)
    return found


def leaves_in_aggregate(directory: Path, aggregate: Aggregate) -> dict[str, Leaf]:
    """Locate every leaf that the msgpack file of `directory` holds or refers to, by name."""
    shardings = read_shardings(directory)

    def locate(leaf: ArrayInFile | PlainValue | ExternalArray) -> Leaf:
        if isinstance(leaf, ArrayInFile):
            return AggregateArray(leaf, "jax")
        if isinstance(leaf, PlainValue):
            return leaf
        return ZarrArray(leaf.path, sharding=shardings.get(leaf.path), shape=leaf.shape, driver=leaf.driver)

    return {name: locate(leaf) for name, leaf in aggregate.leaves.items()}


def _string(strings: Mapping[str, str], name: str, directory: Path) -> str:
    if name not in strings:
        raise CorruptionError(f"leaf {name!r} is a text, but {directory / STRINGS} does not have it")
    return strings[name]


def _require_same_leaves(
    directory: Path, tree: TreeMetadata, aggregate: Aggregate, found: Mapping[str, Leaf]
) -> None:
    external = {name: leaf.path for name, leaf in aggregate.leaves.items() if isinstance(leaf, ExternalArray)}
    stored = {leaf.name: leaf.stored_name for leaf in tree.leaves}
    # Orbax 0.5.4 to 0.5.20 names arrays for empty containers, of which it stores none.
    empty = stored.keys() - found.keys()
    problems = sorted(found.keys() ^ (aggregate.leaves.keys() - (empty & external.keys())))
    problems += [name for name, path in external.items() if path != stored.get(name, path)]
    if problems:
        raise FormatError(
            f"{directory}: {ORBAX_TREE} and the file {AGGREGATE!r} disagree about these leaves: "
            f"{few(problems)[:400]}"
        )
