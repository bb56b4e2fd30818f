"""Files of `torch.save`: a zip archive, or before PyTorch 1.6 a stream, with a pickle and the storages of its tensors.

The pickle is read as data, so nothing in it is executed, and PyTorch is not needed. A model of Hugging Face is one such
file, `pytorch_model.bin`, or several shards with an index.

Tests: tests/compat/test_torch.py, tests/compat/test_torch_hostile.py.
"""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

from eformer._engine.formats.found import Foreign, Found, Place, foreign_found
from eformer._engine.formats.left_out import left_out
from eformer._engine.formats.nested_names import nest, split_spelled, tree_of_paths
from eformer._engine.formats.others.flax import flatten_message
from eformer._engine.formats.others.single_file import ArrayInFile, SingleFile, describe_file, read_file
from eformer._engine.formats.others.torch_pickles import OtherTensor, Pickled, Storage, TorchTensor, unpickle
from eformer._engine.formats.others.zip_members import IS_ENCRYPTED, Span, find_damages, locate_members
from eformer._engine.formats.pickles import PickledObject
from eformer._engine.formats.quantized import quantization_of
from eformer._engine.formats.safetensors.read import weight_map
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.manifest import LeafEntry, TreeEntry, foreign_tree
from eformer._engine.record.names import BARE_LEAF, split_name, unescape
from eformer._engine.record.text import few
from eformer._engine.record.values import is_recorded, locating, value_to_json
from eformer._engine.stores.virtual_files import ChainedFiles, ReadInto
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.stores.base import Files, Store

FORMAT = "PyTorch"

_PICKLE = "/data.pkl"
_USUAL_PICKLE, _MAX_PICKLE = 2**20, 2**28  # bytes
_MAX_EXPANSION = 1040  # views may use elements several times; this is also the limit for compressed files
_PROTOCOL = 1001
_MAGIC = 0x1950A86A20F9469CFC6C  # the first value of a stream
_STREAM = re.compile(  # the pickle of `_MAGIC`, of any protocol
    rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a" + re.escape(_MAGIC.to_bytes(10, "little")), re.DOTALL
)
_STREAM_NBYTES = 23
# The members of an archive beside its storages.
_MEMBERS = (
    "data.pkl", "version", "byteorder", ".data/serialization_id", ".format_version", ".storage_alignment",
)  # fmt: skip
# Members of other archives of PyTorch and of unfinished archives as well.
_MARKS = ("/byteorder", "/.data/serialization_id")

MODEL = "pytorch_model.bin"
INDEX = f"{MODEL}.index.json"


def in_archive(file: SingleFile, first: bytes) -> Found | None:
    """Find the tree of a zip archive that contains a pickle of PyTorch."""
    if not first.startswith(b"PK\x03\x04"):
        return None
    opened = open_archive(file)
    return _describe(file, opened.tree, opened.places, opened.unknown) if opened else None


class Archive(Struct, frozen=True):
    """The contents of an archive: the value of its pickle, the storages by key, and the names of other members."""

    tree: Any
    places: dict[str, Span]
    unknown: list[str]


def open_archive(file: SingleFile) -> Archive | None:
    """Read the pickle of an archive, and locate its storages. Return None if it is not an archive of PyTorch."""
    members = {info.filename: (info, offset) for info, offset in locate_members(file)}
    pickles = [name for name in members if name.endswith(_PICKLE)]
    if not pickles and any(name.endswith(_MARKS) for name in members):
        raise FormatError(
            f"{file.path} is an archive of PyTorch without {_PICKLE[1:]}: a save that did not finish, or a program of "
            "torch.export; save its state_dict() with torch.save or safetensors instead"
        )
    if not pickles:
        return None
    if len(pickles) > 1:
        raise FormatError(f"{file.path} has several pickles of PyTorch: {few(pickles)}")
    root = pickles[0].removesuffix(_PICKLE)
    if f"{root}/constants.pkl" in members:
        raise FormatError(
            f"{file.path} is a program of TorchScript; save its state_dict() with torch.save or safetensors instead"
        )
    if any(info.compress_type or info.flag_bits & IS_ENCRYPTED for info, _ in members.values()):
        raise FormatError(f"{file.path} is a compressed archive, which PyTorch does not write; save it again")
    places = {name: Span(offset, info.file_size, info.CRC) for name, (info, offset) in members.items()}
    _require_little_endian(file, places.get(f"{root}/byteorder"))
    pickled = places[pickles[0]]
    tree = _unpickle(file, pickled.offset, pickled.nbytes).value
    data, known = f"{root}/data/", {f"{root}/{name}" for name in _MEMBERS}
    return Archive(
        tree,
        {name.removeprefix(data): place for name, place in places.items() if name.startswith(data)},
        [name for name in members if name not in known and not name.startswith(data)],
    )


def is_stream(file: SingleFile) -> bool:
    """Tell whether a file is a stream of PyTorch."""
    return _STREAM.match(file.read(0, _STREAM_NBYTES)) is not None


def in_stream(file: SingleFile, first: bytes) -> Found | None:
    """Find the tree of a file by PyTorch before version 1.6: several pickles, then the storages."""
    if not first.startswith(b"\x80") or not is_stream(file):
        return None
    at = 0
    pickles: list[Pickled] = []
    # A magic number, a version, facts of the machine, the tree, and the keys of its storages.
    for _ in range(5):
        pickles.append(_unpickle(file, at, file.nbytes - at))
        at += pickles[-1].nbytes
    magic, protocol, facts, tree, keys = (pickled.value for pickled in pickles)
    if magic != _MAGIC or protocol != _PROTOCOL or not isinstance(facts, dict) or not isinstance(keys, list):
        raise FormatError(
            f"{file.path} begins like a stream of PyTorch, but does not continue as one; restore it from a copy"
        )
    if facts.get("little_endian") is not True:
        raise FormatError(f"{file.path} was written on a big-endian machine, which is not supported")
    places, end = _places_in_stream(file, at, keys, pickles[3].storages)
    rest = file.nbytes - end
    return _describe(
        file,
        tree,
        places,
        [f"{rest} bytes after the tree, perhaps of another torch.save"] if rest > 0 else [],
    )


def _places_in_stream(
    file: SingleFile, at: int, keys: list[Any], storages: Mapping[str, Storage]
) -> tuple[dict[str, Span], int]:
    """Return the place of each storage, and the end of the last storage."""
    places = {}
    for key in keys:
        size = file.read(at, 8)
        storage = storages.get(key) if isinstance(key, str) else None
        if len(size) < 8 or storage is None or storage.size != struct.unpack("<q", size)[0]:
            raise FormatError(
                f"{file.path}: the storage {str(key)[:40]!r} is missing, or has another length than its tensors need; "
                "restore the file from a copy"
            )
        places[key] = Span(at + 8, storage.nbytes)
        at += 8 + storage.nbytes
    return places, at


def _unpickle(file: SingleFile, offset: int, nbytes: int) -> Pickled:
    """Read the pickle at an offset. A stream does not have its length, and most pickles are short: try the usual
    length first."""
    if nbytes > _USUAL_PICKLE:
        with suppress(FormatError):
            return unpickle(file.read(offset, _USUAL_PICKLE))
    with locating(f"{file.path} is a file of PyTorch that cannot be read"):
        return unpickle(file.read(offset, min(nbytes, _MAX_PICKLE)))


def _require_little_endian(file: SingleFile, place: Span | None) -> None:
    order = file.read(place.offset, min(place.nbytes, 16)) if place else b"little"
    if order != b"little":
        raise FormatError(
            f"{file.path} has the byte order {order!r}; only files of little-endian machines are supported"
        )


# --------------------------------------------------------------------------------------------- leaves


def _describe(file: SingleFile, tree: Any, places: Mapping[str, Span], unknown: Sequence[str]) -> Found:
    """Describe the tensors and plain values of a pickle.

    Objects of other classes and `unknown` parts of the file are listed as left out. Tensors of kinds that eformer does
    not store are refused.
    """
    objects: dict[str, Any] = {}
    nested = without_objects(tree, objects)
    refused = {name: found.kind for name, found in objects.items() if isinstance(found, OtherTensor)}
    if nested is _LEFT_OUT:
        held = refused.get(BARE_LEAF) or f"an object of the class {describe_object(objects[BARE_LEAF])}"
        raise FormatError(
            f"{file.path} holds {held}, which eformer does not make; save its state_dict() instead, or to_dense() or "
            "dequantize() of a tensor"
        )
    structure, leaves = flatten_message(nested)
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, TorchTensor)}
    _require_bounded(file, tensors)
    arrays = _arrays(file, tensors, places)
    users = {tensor.storage.key: name for name, tensor in reversed(tensors.items())}
    checked = {users[key]: place for key, place in places.items() if key in users and place.crc is not None}
    unread = [f"{name} ({describe_object(found)})" for name, found in objects.items() if name not in refused]
    unread += [f"storage {key} (no tensor uses it)" for key in places if key not in users]
    return describe_file(
        file,
        FORMAT,
        arrays,
        structure,
        values={name: value_to_json(leaf) for name, leaf in leaves.items() if name not in tensors},
        foreign=Foreign(
            find_damages=partial(find_damages, file.store, file.name, checked) if checked else None,
            find_left_out=lambda: (*unread, *unknown),
            refused=refused,
        ),
    )


def without_objects(node: Any, objects: dict[str, Any], name: str = "", *, tensor: type = TorchTensor) -> Any:
    """Return the tree without objects and unknown tensors, which are added to `objects` by name, and with nested dicts
    for the dotted names of tensors. `tensor` is the class of known tensors.

    An object in a dict is left out; in a list it becomes None.
    """

    def inner(child: Any, key: Any) -> Any:
        return without_objects(child, objects, f"{name}.{key}" if name else str(key), tensor=tensor)

    if isinstance(node, dict):
        inside = {key: inner(child, key) for key, child in node.items()}
        kept = {key: child for key, child in inside.items() if child is not _LEFT_OUT}
        return _split_names(kept) if kept and all(isinstance(c, tensor) for c in kept.values()) else kept
    if isinstance(node, (list, tuple)):
        items = (inner(child, number) for number, child in enumerate(node))
        return type(node)(None if item is _LEFT_OUT else item for item in items)
    if node is None or isinstance(node, tensor) or _is_plain(node):
        return node
    objects[name or BARE_LEAF] = node
    return _LEFT_OUT


_LEFT_OUT = object()


def describe_object(found: Any) -> str:
    """Name the class of an object that is left out."""
    return str(found.made_by) if isinstance(found, PickledObject) else type(found).__name__


def _is_plain(node: Any) -> bool:
    return not isinstance(node, (PickledObject, OtherTensor, Storage, TorchTensor)) and is_recorded(
        value_to_json(node)
    )


def _split_names(tensors: dict[Any, Any]) -> dict[Any, Any]:
    """Return a state dict as nested dicts, split at the dots of its names, as for safetensors files of the model."""
    if not all(type(name) is str and all(name.split(".")) for name in tensors):
        return tensors
    try:
        return dict(tree_of_paths((name.split("."), tensor) for name, tensor in tensors.items()))
    except FormatError:  # both "a" and "a.b" are tensors
        return tensors


def _require_bounded(file: SingleFile, tensors: Mapping[str, TorchTensor]) -> None:
    """Refuse tensors that together are far larger than the file: views of a few elements could fill the memory."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total > file.nbytes * _MAX_EXPANSION:
        raise FormatError(
            f"{file.path} has {file.nbytes} bytes, but its tensors use them again and again, for {total} bytes"
        )


def _arrays(
    file: SingleFile, tensors: Mapping[str, TorchTensor], places: Mapping[str, Span]
) -> dict[str, ArrayInFile]:
    """Describe the arrays. A tensor with unusual strides, or that shares elements, becomes a virtual file."""
    starts = {name: start_of(file, name, tensor, places) for name, tensor in tensors.items()}
    plain, end = set(), 0
    for name in sorted(tensors, key=lambda name: starts[name]):
        if tensors[name].is_by_rows and starts[name] >= end:
            plain.add(name)
            end = starts[name] + tensors[name].nbytes
    arrays = {}
    for name, tensor in tensors.items():
        array = ArrayInFile(tensor.dtype, tensor.shape, tensor.nbytes, starts[name])
        if name not in plain:
            view = TensorView(name, starts[name], tensor)
            array = replace(array, offset=0, virtual_file=view, is_encoded=True)
        arrays[name] = array
    return arrays


def start_of(file: SingleFile, name: str, tensor: TorchTensor, places: Mapping[str, Span]) -> int:
    """Return the offset of a tensor's first element in the file; 0 for a tensor without elements."""
    if not tensor.size:
        return 0
    place = places.get(tensor.storage.key)
    if place is None or place.nbytes != tensor.storage.nbytes:
        found = (
            "is missing" if place is None else f"has {place.nbytes} bytes, expected {tensor.storage.nbytes}"
        )
        raise FormatError(
            f"{file.path}: leaf {name[:200]!r}: its storage {tensor.storage.key[:40]!r} {found}"
        )
    return place.offset + tensor.offset * tensor.itemsize


class TensorView(Struct, frozen=True):
    """The elements of a tensor by rows, whatever its strides are. Every read makes the whole tensor."""

    name: str
    start: int
    tensor: TorchTensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read_into(self, read: ReadInto, memory: memoryview, offset: int) -> int:
        tensor = self.tensor
        data = bytearray(tensor.extent * tensor.itemsize)
        if read(memoryview(data), self.start) < len(data):
            raise CorruptionError(f"{self.name!r} was cut short")
        strides = [stride * tensor.itemsize for stride in tensor.strides]
        # Not as_strided: it finds a dtype by its letters, and numpy has no dtype for the letters of float8_e5m2.
        view: np.ndarray[Any, Any]
        view = np.ndarray(tensor.shape, dtype_from_name(tensor.dtype), data, strides=strides)
        view = np.conjugate(view) if tensor.is_conjugated else view
        view = np.negative(view) if tensor.is_negated else view
        found = np.ascontiguousarray(view).reshape(-1).view(np.uint8).data[offset : offset + len(memory)]
        memory[: len(found)] = found
        return len(found)


# ---------------------------------------------------------------------------- models of Hugging Face


def by_model_files(place: Place) -> Found | None:
    """Find the model of a directory in files of PyTorch."""
    store = place.store
    if INDEX in place.names:
        return _in_shards(store, place.names)
    if MODEL not in place.names:
        return None
    found = _open_shard(store, MODEL)
    return replace(found, path=store.url, foreign=_in_directory(found.foreign, store, {MODEL}))


def _in_directory(foreign: Foreign, store: Store, read: set[str]) -> Foreign:
    left, quantized = partial(left_out, store, read), partial(quantization_of, store)
    return replace(foreign, find_left_out=left, find_quantized=quantized)


def _open_shard(store: Store, name: str) -> Found:
    return read_file(store, name, "a file of torch.save", in_archive, in_stream)


def _in_shards(store: Store, there: Sequence[str]) -> Found:
    """Join the shards that an index lists. Each tensor must be in the file that the index names, and in no other."""
    weights, version = weight_map(store, INDEX)
    where = store.path_to(INDEX)
    names = sorted(set(weights.values()))
    if not names:
        raise FormatError(f"{where} lists no tensors")
    if lost := set(names) - set(there):
        raise CorruptionError(f"{where} names files that are missing: {few(sorted(lost))}; copy them there")
    shards = [_open_shard(store, name) for name in names]
    _require_listed(where, weights, names, shards)
    versions = {INDEX: version}
    for shard in shards:
        versions |= shard.versions
    tree = _joined_trees([shard.trees[""] for shard in shards])
    foreign = _in_directory(Foreign(lambda _: _chained(shards)), store, {INDEX, *names})
    return foreign_found(store.url, store, FORMAT, {"": tree}, versions, foreign)


def _require_listed(
    where: str, weights: Mapping[str, str], names: Sequence[str], shards: Sequence[Found]
) -> None:
    listed, there = set(weights.items()), set()
    for file, shard in zip(names, shards, strict=True):
        tree = shard.trees[""]
        if tree.raw_values or shard.left_out():
            more = few([*map(repr, tree.raw_values), *shard.left_out()])
            raise FormatError(f"{where}: {file} holds more than tensors; load it by its own name: {more}")
        there |= {(".".join(map(unescape, split_name(name))), file) for name in tree.leaves}
    if listed != there:
        wrong = few([f"{name!r} in {file}" for name, file in sorted(listed ^ there)])
        raise FormatError(f"{where} and the files do not agree on: {wrong}")


def _joined_trees(trees: Sequence[TreeEntry]) -> TreeEntry:
    """Return one tree with the leaves and files of all trees."""
    leaves: dict[str, LeafEntry] = {}
    files: list[Any] = []
    for tree in trees:
        for name, leaf in tree.leaves.items():
            extents = (msgspec.structs.replace(e, file=e.file + len(files)) for e in leaf.extents)
            leaves[name] = msgspec.structs.replace(leaf, extents=tuple(extents))
        files += tree.files
    structure, leaves = nest(leaves, split_spelled)
    return foreign_tree(files=tuple(files), structure=structure, leaves=leaves)


def _chained(shards: Sequence[Found]) -> Files:
    opened = [(shard.files(shard.trees[""]), len(shard.trees[""].files)) for shard in shards]
    return reduce(
        lambda first, then: (ChainedFiles(first[0], first[1], then[0]), first[1] + then[1]), opened
    )[0]
