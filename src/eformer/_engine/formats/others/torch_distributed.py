"""Directories of `torch.distributed.checkpoint`: `.metadata`, a pickle, and files of many small archives of PyTorch.

Tests: tests/compat/test_torch.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.formats.found import Foreign, Found, Place, foreign_found
from eformer._engine.formats.left_out import left_out
from eformer._engine.formats.nested_names import tree_of_paths
from eformer._engine.formats.others.flax import flatten_message
from eformer._engine.formats.others.single_file import SingleFile, open_single_file
from eformer._engine.formats.others.torch import (
    TensorView,
    describe_object,
    open_archive,
    start_of,
    without_objects,
)
from eformer._engine.formats.others.torch_pickles import TorchTensor, unpickle
from eformer._engine.formats.pickles import PickledDict, PickledObject
from eformer._engine.formats.quantized import quantization_of
from eformer._engine.record.manifest import (
    Coding,
    DataFile,
    Extent,
    LeafEntry,
    TreeEntry,
    foreign_tree,
)
from eformer._engine.record.text import few
from eformer._engine.record.values import locating, value_to_json
from eformer._engine.stores.base import read_whole
from eformer._engine.stores.virtual_files import VirtualFile, VirtualFiles
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.stores.base import Store

FORMAT = "PyTorch, distributed"
METADATA, SUFFIX = ".metadata", ".distcp"

_Counts = tuple[int, ...]


class _Stored(Struct, frozen=True):
    """The place of an item: an archive of its own inside a file."""

    file: str
    offset: int
    nbytes: int


class _Tensor(Struct, frozen=True):
    """A tensor and its saved boxes, each as the offsets where it begins and its shape."""

    name: str
    shape: _Counts
    chunks: list[tuple[_Counts, _Counts]]


class _Value(Struct, frozen=True):
    name: str


def by_metadata(place: Place) -> Found | None:
    """Find the checkpoint of a directory that `torch.distributed.checkpoint` wrote."""
    files = [name for name in place.names if name.endswith(SUFFIX)]
    if METADATA not in place.names or not files:
        return None
    store = place.store
    data, entry = read_whole(store, METADATA)
    with locating(store.path_to(METADATA)):
        items, paths, stored = _parse(data)
        if lost := {where.file for where in stored.values()} - set(place.names):
            raise CorruptionError(f"it names files that are missing: {few(sorted(lost))}; copy them there")
        return _describe(store, items, paths, stored, {METADATA: entry.version})


def refuse_unfinished(place: Place) -> None:
    """Refuse a directory without the file that `torch.distributed.checkpoint` writes last."""
    if METADATA not in place.names and any(name.endswith(SUFFIX) for name in place.names):
        raise CorruptionError(
            f"{place.store.url} has files of torch.distributed.checkpoint, but no {METADATA}, which is written last: "
            "the save did not finish, or the file was not copied"
        )


# ------------------------------------------------------------------------------------------ metadata


def _parse(data: bytes) -> tuple[list[_Tensor | _Value], dict[str, Any], dict[Any, _Stored]]:
    """Return the items, the paths of their names in the tree, and the places of their chunks."""
    fields = _fields_of(unpickle(data).value, "Metadata")
    items = [_item(name, item) for name, item in _pairs(fields.get("state_dict_metadata"))]
    paths = _dict(fields.get("planner_data") or PickledDict())
    stored = {}
    for index, found in _pairs(fields.get("storage_data")):
        at = _fields_of(index, "MetadataIndex")
        info = _fields_of(found, "_StorageInfo")
        if info.get("transform_descriptors"):
            raise FormatError(
                f"{at.get('fqn')!r:.200} is compressed or otherwise transformed, which is not supported"
            )
        where = _Stored(
            _text(info.get("relative_path")), _count(info.get("offset")), _count(info.get("length"))
        )
        offset = at.get("offset")
        stored[_text(at.get("fqn")), None if offset is None else _counts(offset)] = where
    return items, paths, stored


def _item(name: Any, item: Any) -> _Tensor | _Value:
    if isinstance(item, PickledObject) and item.made_by.name == "BytesStorageMetadata":
        return _Value(_text(name))
    fields = _fields_of(item, "TensorStorageMetadata")
    chunks = [_fields_of(chunk, "ChunkStorageMetadata") for chunk in fields.get("chunks") or ()]
    boxes = [(_counts(chunk.get("offsets")), _counts(chunk.get("sizes"))) for chunk in chunks]
    return _Tensor(_text(name), _counts(fields.get("size")), boxes)


def _fields_of(found: Any, name: str) -> dict[Any, Any]:
    """Return the fields of an object of this class of PyTorch, from its state."""
    if not isinstance(found, PickledObject) or found.made_by.name != name:
        raise FormatError(f"expected a {name} of PyTorch, found {_described(found)}")
    return _dict(found.state)


def _dict(found: Any) -> dict[Any, Any]:
    try:
        return dict(_pairs(found))
    except TypeError as error:  # a key is a list, or another dict
        raise FormatError("a dict has keys that no dict can have") from error


def _pairs(found: Any) -> list[tuple[Any, Any]]:
    if isinstance(found, dict):
        return list(found.items())
    if type(found) is not PickledDict or len(found) % 2:
        raise FormatError(f"expected a dict, found {_described(found)}")
    return list(zip(found[::2], found[1::2], strict=True))


def _described(found: Any) -> str:
    return str(found)[:40] if type(found) is int else f"a value of the class {describe_object(found)[:80]}"


def _text(found: Any) -> str:
    if type(found) is not str:
        raise FormatError(f"expected a text, found {_described(found)}")
    return found


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 2**62:
        raise FormatError(f"expected a number of bytes or elements, found {_described(found)}")
    return found


def _counts(found: Any) -> _Counts:
    if type(found) is not tuple:
        raise FormatError(f"expected a shape, found {_described(found)}")
    return tuple(map(_count, found))


# --------------------------------------------------------------------------------------------- leaves


def _describe(
    store: Store,
    items: Sequence[_Tensor | _Value],
    paths: Mapping[str, Any],
    stored: Mapping[Any, _Stored],
    versions: dict[str, Any],
) -> Found:
    names = sorted({where.file for where in stored.values()})
    objects: dict[str, Any] = {}
    with ExitStack() as stack:
        files = {name: stack.enter_context(open_single_file(store, name)) for name in names}
        reader = _Reader(files, names, stored)
        tree = tree_of_paths((path, reader.value(item)) for path, item in _paths(items, paths))
        structure, leaves = flatten_message(without_objects(tree, objects, tensor=_Tensor))
        entries = {name: reader.leaf(item) for name, item in leaves.items() if isinstance(item, _Tensor)}
        versions |= {name: file.version for name, file in files.items()}
        lengths = [DataFile(name, file.nbytes) for name, file in files.items()]
    virtual = reader.virtual
    described = foreign_tree(
        files=(*lengths, *(DataFile(f"{names[file]}/{part.name}", part.nbytes) for file, part in virtual)),
        values={name: value_to_json(leaf) for name, leaf in leaves.items() if name not in entries},
        structure=structure,
        leaves=entries,
    )
    described.check_leaves()
    unused = [*(f"{name} ({describe_object(found)})" for name, found in objects.items()), *reader.unused()]

    def open_files(_: TreeEntry) -> VirtualFiles:
        return VirtualFiles(store.open(names, {name: versions[name] for name in names}), virtual, len(names))

    foreign = Foreign(
        open_files,
        find_left_out=lambda: (*left_out(store, {METADATA, *names}), *unused),
        find_quantized=partial(quantization_of, store),
    )
    return foreign_found(store.url, store, FORMAT, {"": described}, versions, foreign)


def _paths(items: Sequence[_Tensor | _Value], paths: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the items with their paths in the saved tree."""
    for item in items:
        path = paths.get(item.name, (item.name,))
        if type(path) is not tuple or not path or not all(type(key) in (str, int) for key in path):
            raise FormatError(f"{item.name[:200]!r} has an invalid path")
        yield path, item


class _Reader:
    """A reader of the archives of chunks, which locate the elements."""

    def __init__(
        self, files: Mapping[str, SingleFile], names: Sequence[str], stored: Mapping[Any, _Stored]
    ) -> None:
        self.files, self.names, self.stored = files, names, stored
        self.virtual: list[tuple[int, VirtualFile]] = []
        self.used: set[Any] = set()
        self.unknown: list[str] = []

    def leaf(self, item: _Tensor) -> LeafEntry:
        found = [self.extent(item, start, shape) for start, shape in item.chunks]
        if not found:
            raise FormatError(f"leaf {item.name[:200]!r} has no chunks")
        dtypes = {dtype for dtype, _ in found}
        if len(dtypes) > 1:
            raise FormatError(f"leaf {item.name[:200]!r} has chunks of several dtypes: {sorted(dtypes)}")
        return LeafEntry(dtypes.pop(), item.shape, tuple(e for _, e in found if e), home="jax")

    def extent(self, item: _Tensor, start: _Counts, shape: _Counts) -> tuple[str, Extent | None]:
        """Return the dtype and the extent of a chunk. A chunk without elements has no extent."""
        number, part, tensor, places = self.open(item.name, start)
        if not isinstance(tensor, TorchTensor) or tensor.shape != shape or len(start) != len(item.shape):
            raise FormatError(
                f"leaf {item.name[:200]!r}: the chunk at {list(start)} is not a tensor {list(shape)}"
            )
        if not tensor.nbytes:
            return tensor.dtype, None
        stop = tuple(a + b for a, b in zip(start, shape, strict=True))
        box = None if shape == item.shape else (start, stop)
        offset = (part.start or 0) + start_of(part, item.name, tensor, places)
        if tensor.is_by_rows:
            return tensor.dtype, Extent(number, offset, tensor.nbytes, "", box)
        self.virtual.append((number, TensorView(f"{item.name}-{len(self.virtual)}", offset, tensor)))
        last = len(self.names) + len(self.virtual) - 1
        return tensor.dtype, Extent(last, 0, tensor.nbytes, "", box, Coding("", shape))

    def value(self, item: _Tensor | _Value) -> Any:
        """Return a saved value. A tensor is returned as its item, and described later."""
        return item if isinstance(item, _Tensor) else self.open(item.name, None)[2]

    def unused(self) -> Iterator[str]:
        """List the contents of the files beyond the items: archives that no item names, and bytes of no archive."""
        yield from self.unknown
        for fqn, start in self.stored.keys() - self.used:
            yield f"{fqn} at {start} (no item names it)"
        for name, file in self.files.items():
            nbytes = sum(where.nbytes for where in set(self.stored.values()) if where.file == name)
            if nbytes < file.nbytes:
                yield f"{file.nbytes - nbytes} bytes of {name} (no item has them)"

    def open(self, name: str, start: _Counts | None) -> tuple[int, SingleFile, Any, Any]:
        where = self.stored.get((name, start))
        if where is None:
            raise FormatError(
                f"leaf {name[:200]!r}: {METADATA} does not have the place of the chunk at {start}"
            )
        file = self.files[where.file]
        if where.offset + where.nbytes > file.nbytes:
            raise FormatError(f"leaf {name[:200]!r}: {file.path} ends before the chunk at {start}")
        part = file.part(where.offset, where.nbytes)
        opened = open_archive(part)
        if opened is None:
            raise FormatError(f"leaf {name[:200]!r}: {part.path} is not an archive of PyTorch")
        self.used.add((name, start))
        self.unknown += [f"{more} of {name}" for more in opened.unknown]
        return self.names.index(where.file), part, opened.tree, opened.places
