"""Write checkpoints that Orbax reads: a directory of zarr arrays for each tree, and files that describe them.

This is the layout of Orbax without OCDBT: `_METADATA` has the keys and kinds of the leaves, each array is a directory
named after its keys, texts are in `_strings.json`, and `array_metadatas` names the generators of PRNG keys.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eformer._engine.formats.others.orbax_metadata import ARRAY_METADATAS, STRINGS
from eformer._engine.formats.zarr.layout import chunk_shape, chunks_of, is_known_to_tensorstore, zarray
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.indexes import ORBAX_CHECKPOINT, ORBAX_TREE
from eformer._engine.record.zarray import ZARRAY
from eformer._engine.stores.durable import replacing
from eformer._engine.tools.sequential_writers import children_of, elements_in_order
from eformer._engine.tools.source_date import recorded_now
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from eformer._engine.record.planned import Source
    from eformer._engine.saving.staging import Staging
    from eformer._engine.tasks.progress import Meter

_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_COMMITTED = "commit_success.txt"  # Orbax takes a checkpoint in a bucket without this file for unfinished
_INDEX, _KEY = 1, 2  # kinds of keys
_CHUNK_BYTES = 2**26
_MAX_NAME = 255  # bytes
_RESERVED = (
    *(ORBAX_TREE, ORBAX_CHECKPOINT, STRINGS, ARRAY_METADATAS, _COMMITTED),
    *("_sharding", "checkpoint"),
)
_EMPTY = {"list": "List", "tuple": "Tuple", "namedtuple": "NamedTuple"}


@dataclass(frozen=True, slots=True)
class OrbaxLeaf:
    """A leaf with its keys and their kinds. It is an array, a plain value, or of another `kind` without content."""

    keys: tuple[tuple[str, int], ...]
    kind: str
    source: Source | None = None
    value: Any = None

    @property
    def path(self) -> str:
        return ".".join(key for key, _ in self.keys)

    @property
    def has_content(self) -> bool:
        return self.source is not None or self.kind in ("scalar", "string")


def plan_orbax(structure: Any, sources: Sequence[Source], values: Mapping[str, Any]) -> list[OrbaxLeaf]:
    """List the leaves as Orbax stores them. Raise a MismatchError that names all leaves that Orbax cannot store."""
    leaves = list(_leaves(structure, (), {source.name: source for source in sources}, values))
    problems = [problem for leaf in leaves if (problem := _problem_of(leaf))]
    problems += _clashes(leaves)
    if leaves and not leaves[0].keys:
        problems = ["the tree is a single leaf, or empty: Orbax stores dicts and lists"]
    if problems:
        raise MismatchError(
            problems, context="Orbax cannot store these; rename them, or convert to safetensors"
        )
    return leaves


def _leaves(
    node: Any,
    keys: tuple[tuple[str, int], ...],
    sources: Mapping[str, Source],
    values: Mapping[str, Any],
) -> Iterator[OrbaxLeaf]:
    if isinstance(node, str):
        yield _leaf(node, keys, sources, values)
    elif node is None:
        yield OrbaxLeaf(keys, "None")
    elif not (children := children_of(node)):
        yield OrbaxLeaf(keys, next((kind for name, kind in _EMPTY.items() if name in node), "Dict"))
    else:
        kind = _INDEX if {"list", "tuple"} & node.keys() else _KEY
        for key, child in children:
            yield from _leaves(child, (*keys, (key, kind)), sources, values)


def _leaf(
    name: str, keys: tuple[tuple[str, int], ...], sources: Mapping[str, Source], values: Mapping[str, Any]
) -> OrbaxLeaf:
    """Describe an array or a plain value. By default Orbax restores arrays as numpy arrays, which need no devices; PRNG
    keys as arrays of JAX."""
    if name in sources:
        return OrbaxLeaf(keys, "jax.Array" if sources[name].key else "np.ndarray", sources[name])
    if name not in values:  # a function, which is left to the code
        return OrbaxLeaf(keys, "None")
    value = values[name]
    if isinstance(value, str):
        return OrbaxLeaf(keys, "string", value=value)
    return OrbaxLeaf(keys, "None" if value is None else "scalar", value=value)


def _problem_of(leaf: OrbaxLeaf) -> str | None:
    if leaf.source is not None and not is_known_to_tensorstore(leaf.source.dtype):
        return f"leaf {leaf.path!r} is {leaf.source.dtype}"
    if leaf.kind == "scalar":
        is_number = isinstance(leaf.value, (bool, int, float, np.generic))
        if not is_number or not is_known_to_tensorstore(np.asarray(leaf.value).dtype.name):
            return f"leaf {leaf.path!r} is a plain {type(leaf.value).__name__}"
    if leaf.source is None and leaf.kind != "scalar":
        return None  # it has no directory
    parts = leaf.path.split("/")
    if any(part in ("", ".", "..") or len(part.encode()) > _MAX_NAME or "\0" in part for part in parts):
        return f"leaf {leaf.path[:300]!r} cannot be the name of a directory"
    if parts[0] in _RESERVED:
        return f"leaf {leaf.path!r} has the name of a file of Orbax"
    return None


def _clashes(leaves: Sequence[OrbaxLeaf]) -> Iterator[str]:
    """Yield a problem for leaves that Orbax could not tell apart, and for an array inside the directory of another."""
    stored = [leaf.path for leaf in leaves if leaf.has_content]
    taken = set(stored)
    keys = [str(tuple(key for key, _ in leaf.keys)) for leaf in leaves]
    for name, count in Counter(stored).items():
        if count > 1:
            yield f"{count} leaves would have the name {name!r}: Orbax joins keys by dots"
    for name, count in Counter(keys).items():
        if count > 1:
            yield f"{count} leaves have the keys {name}, such as 1 and '1': the keys of Orbax are texts"
    for path in stored:
        if inside := {str(parent) for parent in PurePosixPath(path).parents} & taken:
            yield f"leaf {path!r} would lie inside of the leaf {min(inside)!r}"


# --------------------------------------------------------------------------------------------- writing


def write_tree(directory: Path, leaves: Sequence[OrbaxLeaf], staging: Staging, meter: Meter) -> None:
    """Write the arrays of a tree, and then the files that describe them."""
    for leaf in leaves:
        if leaf.source is not None:
            _write_array(directory / leaf.path, leaf.source, staging, meter)
        elif leaf.kind == "scalar":
            _write_scalar(directory / leaf.path, np.asarray(leaf.value))
    texts = {leaf.path: leaf.value for leaf in leaves if leaf.kind == "string"}
    if texts:
        _write_json(directory / STRINGS, texts)
    if keys := [_generator_of(leaf) for leaf in leaves if leaf.source is not None and leaf.source.key]:
        _write_json(directory / ARRAY_METADATAS / "process_0", {"array_metadatas": keys})
    described = {
        "tree_metadata": {str(tuple(key for key, _ in leaf.keys)): _describe(leaf) for leaf in leaves},
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    _write_json(directory / ORBAX_TREE, described)


def write_checkpoint_metadata(directory: Path, prefixes: Sequence[str]) -> None:
    """Write the files that make a directory a checkpoint: of one tree without a prefix, or an item for each prefix."""
    now = int(recorded_now().timestamp() * 1e9)
    handlers: Any = _HANDLER if list(prefixes) == [""] else dict.fromkeys(prefixes, _HANDLER)
    described = {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    _write_json(directory / ORBAX_CHECKPOINT, described)
    with replacing(directory / _COMMITTED) as file:
        file.write(b"converted by eformer")


def _describe(leaf: OrbaxLeaf) -> dict[str, Any]:
    value: dict[str, Any] = {"value_type": leaf.kind, "skip_deserialize": not leaf.has_content}
    if leaf.kind == "jax.Array" and leaf.source is not None:
        value["write_shape"] = leaf.source.shape
    return {
        "key_metadata": [{"key": key, "key_type": kind} for key, kind in leaf.keys],
        "value_metadata": value,
    }


def _generator_of(leaf: OrbaxLeaf) -> dict[str, Any]:
    assert leaf.source is not None
    shapes = dict.fromkeys(("write_shape", "chunk_shape"), leaf.source.shape)
    generator = {"random_key_impl": leaf.source.key}
    return {"array_metadata": {"param_name": leaf.path, **shapes, "ext_metadata": generator}}


def _write_array(directory: Path, source: Source, staging: Staging, meter: Meter) -> None:
    """Write an array in chunks of whole rows, so that its elements are written in their order."""
    itemsize = dtype_from_name(source.dtype).itemsize
    chunk = chunk_shape(source.shape, source.shape, itemsize, _CHUNK_BYTES)
    _write(directory / ZARRAY, zarray(source.dtype, source.shape, chunk, None))
    chunk_nbytes = itemsize * int(np.prod(chunk, dtype=np.int64))
    data = _Stream(elements_in_order(source, staging, meter))
    for name, box in chunks_of(source.shape, chunk):
        with replacing(directory / name) as file:
            for piece in data.take(itemsize * box.size):
                file.write(piece)
            file.truncate(chunk_nbytes)  # the padding follows the elements
    data.finish()


def _write_scalar(directory: Path, value: np.ndarray[Any, Any]) -> None:
    _write(directory / ZARRAY, zarray(value.dtype.name, (), (), None))
    _write(directory / "0", value.tobytes())


def _write_json(path: Path, document: Any) -> None:
    _write(path, msgspec.json.encode(document))


def _write(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


class _Stream:
    """The elements of a leaf in order, taken in other portions than they arrive in."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def take(self, nbytes: int) -> Iterator[memoryview]:
        while nbytes:
            while not self._rest:
                self._rest = next(self._pieces)
            piece, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            nbytes -= len(piece)
            yield piece

    def finish(self) -> None:
        """Run the source to its end, so that it drops the leaf."""
        for _ in self._pieces:
            pass
