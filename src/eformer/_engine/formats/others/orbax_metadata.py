"""Parse and check the JSON files of an Orbax checkpoint.

_CHECKPOINT_METADATA         of a checkpoint: the time of the save, the handlers that wrote it, the user's metadata
_METADATA                    of a tree: the keys and the kind of every leaf
_sharding                    the shardings of its arrays
_strings.json                the leaves that are texts
array_metadatas/process_N    the generators of its PRNG keys

Tests: tests/compat/test_orbax_old.py, tests/compat/test_orbax.py.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from eformer._engine.formats.nested_names import SequenceIndex, tree_of_paths
from eformer._engine.formats.others.flax import flatten_message
from eformer._engine.record.indexes import ORBAX_CHECKPOINT, ORBAX_TREE
from eformer._engine.record.manifest import RecordedSharding
from eformer._engine.record.names import escape, join_name
from eformer._engine.record.values import MALFORMED_JSON, json_decoder, locating, parse_json, parse_lenient
from eformer._engine.stores.base import read_whole
from eformer._engine.stores.local import LocalStore
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

logger = logging.getLogger("eformer")

SHARDINGS = "_sharding"
STRINGS = "_strings.json"
ARRAY_METADATAS = "array_metadatas"
TREE_METADATA = "tree_metadata"  # the structure as text, by 0.3.0; the msgpack file has it as well

JSON_FILE = "metadata"  # of an item that is JSON
COMMITTED = "commit_success.txt"  # an empty file that marks a finished item

_BEGINNING = 64  # bytes

# Kinds of leaves that are empty containers, of which Orbax stores no bytes.
EMPTY_CONTAINERS: dict[str, Any] = {"None": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": ()}

T = TypeVar("T")

# ------------------------------------------------------------------------------------------- a checkpoint


class CheckpointMetadata(msgspec.Struct):
    """The fields of `_CHECKPOINT_METADATA` that eformer uses."""

    commit_timestamp_nsecs: int | None = None
    custom_metadata: dict[str, Any] | None = None
    raw_item_handlers: Any = msgspec.field(name="item_handlers", default=None)

    @property
    def item_handlers(self) -> dict[str, Any]:
        """Return the handler that wrote each item, by the item's name. Empty without items, or if the file does not
        record handlers."""
        return self.raw_item_handlers if isinstance(self.raw_item_handlers, dict) else {}

    @property
    def handler(self) -> str | None:
        """Return the handler that wrote a checkpoint without items; None if the file does not record it."""
        return self.raw_item_handlers if isinstance(self.raw_item_handlers, str) else None

    @property
    def saved_at(self) -> str:
        """Return the time of the save in ISO format; "" if it is missing or out of range."""
        with suppress(OverflowError, OSError, TypeError, ValueError):
            return dt.datetime.fromtimestamp(self.commit_timestamp_nsecs // 10**9, dt.UTC).isoformat()  # type: ignore[operator]
        return ""


def read_checkpoint_metadata(directory: Path) -> CheckpointMetadata:
    """Read `_CHECKPOINT_METADATA`. If the file is missing, all fields are empty."""
    return _read_optional(directory, ORBAX_CHECKPOINT, CheckpointMetadata) or CheckpointMetadata()


# --------------------------------------------------------------------------------------------- a tree


class KeyMetadata(msgspec.Struct):
    """A step on the way from the root to a leaf."""

    key: str
    key_type: int = 2

    @property
    def is_index(self) -> bool:
        """Tell whether the key is an index into a sequence."""
        return self.key_type == 1


class ValueMetadata(msgspec.Struct):
    """The kind of a leaf: "jax.Array", "np.ndarray", "scalar", "string", or an empty container."""

    value_type: str = "jax.Array"
    skip_deserialize: bool = False


class LeafMetadata(msgspec.Struct):
    """The entry of a leaf in `_METADATA`."""

    key_metadata: list[KeyMetadata]
    value_metadata: ValueMetadata

    @property
    def stored_name(self) -> str:
        """Return the name under which Orbax stores the leaf: its keys, joined by dots and not escaped."""
        return ".".join(key.key for key in self.key_metadata)

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(SequenceIndex(key.key) if key.is_index else key.key for key in self.key_metadata)

    @property
    def name(self) -> str:
        """Return the name of the leaf in eformer: its keys, escaped and joined by dots."""
        return join_name(escape(key.key) for key in self.key_metadata)


class TreeMetadata(msgspec.Struct):
    """The fields of `_METADATA` that eformer uses."""

    tree_metadata: dict[str, LeafMetadata]
    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    store_array_data_equal_to_fill_value: bool = False
    custom_metadata: Any = None

    @property
    def leaves(self) -> list[LeafMetadata]:
        return list(self.tree_metadata.values())


def metadata_of_single_array(name: str) -> TreeMetadata:
    """Make the metadata of a tree that has one array and no `_METADATA`."""
    return TreeMetadata({name: LeafMetadata([KeyMetadata(name)], ValueMetadata())})


def read_tree_metadata(directory: Path) -> TreeMetadata | None:
    """Read `_METADATA`. Return None if the file is missing."""
    return _read_optional(directory, ORBAX_TREE, TreeMetadata)


def read_strings(directory: Path) -> dict[str, str]:
    """Read the leaves that are texts, by stored name."""
    return _read_optional(directory, STRINGS, dict[str, str]) or {}


class _Sharding(msgspec.Struct):
    sharding_type: str = ""
    shape: list[int] = []
    axis_names: list[str] = []
    partition_spec: list[str | list[str] | None] = []


def read_shardings(directory: Path) -> dict[str, RecordedSharding]:
    """Read the shardings of arrays, by stored name.

    Shardings and files that cannot be parsed are skipped: an array can be loaded under any sharding. Orbax 0.4.1 does
    not encode the names, so a name with a slash makes an object in place of the text of a sharding.
    """
    found: dict[str, RecordedSharding] = {}
    for name, text in _sharding_texts(directory).items():
        with suppress(*MALFORMED_JSON, ValueError, TypeError):
            sharding = json_decoder(_Sharding).decode(text)
            if sharding.sharding_type == "NamedSharding":
                spec = tuple(
                    tuple(axis) if isinstance(axis, list) else axis for axis in sharding.partition_spec
                )
                mesh = dict(zip(sharding.axis_names, sharding.shape, strict=True))
                found[base64.b64decode(name, validate=True).decode()] = RecordedSharding(spec, mesh)
    return found


def _sharding_texts(directory: Path) -> dict[str, Any]:
    try:
        return _read_optional(directory, SHARDINGS, dict[str, Any]) or {}
    except (FormatError, OSError) as error:
        logger.warning("%s; the arrays are read without their recorded shardings", error)
        return {}


class _ArrayMetadata(msgspec.Struct):
    param_name: str
    ext_metadata: dict[str, Any] | None = None


class _ArrayEntry(msgspec.Struct):
    array_metadata: _ArrayMetadata


class _ArrayMetadatas(msgspec.Struct):
    array_metadatas: list[_ArrayEntry]


def read_key_generators(directory: Path) -> dict[str, str]:
    """Read the generators of the PRNG keys, by stored name."""
    found: dict[str, str] = {}
    is_there = (directory / ARRAY_METADATAS).is_dir()
    for name in LocalStore(directory).kinds(ARRAY_METADATAS) if is_there else []:
        for entry in _read(directory, f"{ARRAY_METADATAS}/{name}", _ArrayMetadatas).array_metadatas:
            generator = (entry.array_metadata.ext_metadata or {}).get("random_key_impl")
            if isinstance(generator, str):
                found[entry.array_metadata.param_name] = generator
    return found


# ----------------------------------------------------------------------------------- items that are JSON


def read_json_item(directory: Path, item: str = "") -> Any:
    """Read the JSON in the only file of an item. The item is a directory in the checkpoint, or "" for the checkpoint's
    own directory."""
    store = LocalStore(directory)
    (name,) = (name for name in store.kinds(item) if name not in (COMMITTED, ORBAX_CHECKPOINT))
    file = f"{item}/{name}" if item else name
    if store.read(file, 0, _BEGINNING)[0].lstrip()[:1] not in (b"{", b"["):
        raise ValueError(f"{directory / file} is not a document")
    return json.loads(read_whole(store, file)[0])


def read_is_typed(directory: Path, item: str) -> bool:
    """Read from the JSON item beside a PRNG key whether the key is typed."""
    try:
        return bool(read_json_item(directory, item)["typed"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise FormatError(
            f"{directory / item} does not record whether the PRNG key is typed: {error}"
        ) from error


# ------------------------------------------------------------------------------------------------ files


def _read(directory: Path, name: str, kind: type[T]) -> T:
    problem = f"{directory / name} is damaged, or was written by an unknown version of Orbax"
    data, _ = read_whole(LocalStore(directory), name)
    try:
        return parse_json(data, kind, problem)
    except FormatError:  # the user's metadata may contain NaN, which is not JSON
        if name != ORBAX_CHECKPOINT:
            raise
        return parse_lenient(data, kind, problem)


def _read_optional(directory: Path, name: str, kind: type[T]) -> T | None:
    try:
        return _read(directory, name, kind)
    except FileNotFoundError:
        return None


# ----------------------------------------------- the structure of a tree, from the keys of its leaves


def build_structure(leaves: Sequence[LeafMetadata], origin: str) -> Any:
    """Build the structure of dicts and lists that holds these leaves.

    Orbax does not record tuples, namedtuples and classes, so they come back as lists and dicts. Leaves that do not form
    a tree raise a FormatError that names `origin`.
    """
    paths = [(leaf.path, EMPTY_CONTAINERS.get(leaf.value_metadata.value_type, leaf.name)) for leaf in leaves]
    with locating(origin):
        tree = paths[0][1] if len(paths) == 1 and not paths[0][0] else tree_of_paths(paths)
        return flatten_message(tree)[0]
