"""The record of a checkpoint: which trees, which leaves, and which bytes of which file they are.

A manifest is JSON that carries a digest of itself, so that a flipped bit in a name, a shape or an offset is
an error and never another tree. `docs/format/safetensors.md` describes it field by field.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from eformer._engine.record.check import check_leaf, check_tree, is_plain
from eformer._engine.record.digests import NO_DIGEST, check_own_digest, stamp_digest, xxh3_64_number
from eformer._engine.record.display import About, as_html, as_text
from eformer._engine.record.outline import Line
from eformer._engine.record.pieces import PIECE_BYTES
from eformer._engine.record.regions import Region
from eformer._engine.record.text import printable, shortened
from eformer._engine.record.values import MALFORMED_JSON, value_from_json
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

VERSION = 1
UNREADABLE = "unreadable"  # in the place of a structure: why there is none

_MOST_SHOWN = 60  # characters of a plain value


Count = Annotated[int, msgspec.Meta(ge=0)]  # what is read is checked while it is parsed


class DataFile(Struct, frozen=True, gc=False, omit_defaults=True):
    """A file of leaves' bytes. `header` digests its first `header_nbytes`, which belong to no leaf."""

    name: str
    nbytes: int
    header_nbytes: int = 0
    header: str = ""


class Coding(Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """How bytes become an array: decoded by `codec` they have this `shape`, and what is stored is its first corner.

    The codecs are "zstd", "" for bytes as they are, and "zarr" for all else that TensorStore can decode when it
    is told the array's metadata, `detail`.
    """

    codec: str
    shape: tuple[Count, ...]
    detail: str = ""


class Extent(Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """These bytes of that file are this box of a leaf; `digests` holds those of its pieces, joined.

    `offset` counts from the end of the file's header. `region` is None for the whole leaf. A foreign file has
    no digests: its tree has no save_id.
    """

    file: Count
    offset: Count
    nbytes: Count
    digests: str
    region: tuple[tuple[Count, ...], tuple[Count, ...]] | None = None
    coding: Coding | None = None


class RecordedSharding(Struct, frozen=True):
    """How an array lay on its mesh: by which axes of the mesh each of its own was cut, and their sizes."""

    spec: tuple[str | tuple[str, ...] | None, ...]
    mesh: dict[str, int]


class LeafEntry(Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """What a leaf is and where its bytes are. `key` names the generator of a typed PRNG key, stored as its data.

    `home` tells a numpy array from a jax.Array, and `sharding` how the latter lay on its mesh. `sha256` is that of
    all of its elements, if the caller wanted it.
    """

    dtype: str
    shape: tuple[Count, ...]
    extents: tuple[Extent, ...]
    home: str = "jax"
    key: str | None = None
    sharding: RecordedSharding | None = None
    sha256: str | None = None

    @property
    def nbytes(self) -> int:
        """What it takes on the disk."""
        return sum(extent.nbytes for extent in self.extents)

    @property
    def logical_dtype(self) -> str:
        return f"key<{self.key}>" if self.key else self.dtype

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape the user sees: the numbers of a PRNG key are inside it, not beside it."""
        return self.shape[:-1] if self.key else self.shape

    @property
    def described(self) -> str:
        return f"{self.logical_dtype}{list(self.logical_shape)}"

    def region_of(self, extent: Extent) -> Region:
        return Region(*extent.region) if extent.region else Region.whole(self.shape)


class TreeEntry(Struct, frozen=True, kw_only=True, dict=True):
    """One saved tree: everything that one `save` call wrote.

    The files lie in `root`, a directory beside the manifest, or in the manifest's own; or they are the keys of an
    OCDBT database that lies there. If several processes wrote it, the headers of the files are `parts` of the record:
    they have the extents of the leaves, each of which is "whole" in one file, or they are "torn".
    """

    save_id: str
    saved_at: str
    written_by: str
    block: int
    files: tuple[DataFile, ...]
    parts: Literal["whole", "torn"] | msgspec.UnsetType = msgspec.UNSET
    raw_root: str | msgspec.UnsetType = field(name="root", default=msgspec.UNSET)
    ocdbt: bool | msgspec.UnsetType = msgspec.UNSET
    raw_metadata: dict[str, Any] = field(name="metadata", default_factory=dict)
    raw_values: dict[str, Any] = field(name="values", default_factory=dict)
    structure: Raw = Raw(b"null")
    raw_leaves: Raw = field(name="leaves", default=Raw(b"{}"))

    @property
    def root(self) -> str:
        return self.raw_root or ""

    @property
    def has_digests(self) -> bool:
        """Tell whether the tree was saved by eformer, so that every byte of it can be checked."""
        return bool(self.save_id)

    @property
    def is_database(self) -> bool:
        return bool(self.ocdbt)

    def path_of(self, file: int) -> str:
        """Where a file is, seen from the manifest."""
        name = self.files[file].name
        return f"{self.root}/{name}" if self.root else name

    @property
    def metadata(self) -> dict[str, Any]:
        """What the caller of `save` wanted to be remembered."""
        return {name: value_from_json(value) for name, value in self.raw_metadata.items()}

    @property
    def values(self) -> dict[str, Any]:
        """The leaves that are no arrays: numbers, text, bytes."""
        return {name: value_from_json(value) for name, value in self.raw_values.items()}

    @cached_property
    def leaves(self) -> dict[str, LeafEntry]:
        """All leaves that are arrays, by name, in the tree's order."""
        entries = _parsed(self.raw_leaves, _decode_leaves)
        if both := entries.keys() & self.raw_values.keys():
            raise FormatError(f"the manifest has {sorted(both)[:3]} as arrays and as plain values")
        rooms = [file.nbytes - file.header_nbytes for file in self.files]
        for name, entry in entries.items():
            if len(entry.extents) != 1 or not is_plain(entry, entry.extents[0], rooms, self.block):
                check_leaf(name, entry, self)
        return entries

    def check_leaves(self) -> None:
        """Parse and check every leaf; raise a FormatError for the first that makes no sense."""
        _ = self.leaves

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.leaves.values())

    def lines(self) -> list[Line]:
        """Every leaf as it is shown."""
        arrays = [Line(name, printable(e.described), e.nbytes) for name, e in self.leaves.items()]
        return arrays + [Line(name, _value_text(value)) for name, value in self.raw_values.items()]

    def about(self, prefix: str = "") -> About:
        """What is shown of it. Damage is told, and raises nothing."""
        try:
            entries, lines = self.leaves.values(), self.lines()
        except FormatError as error:
            return About(prefix, self.written_by, self.saved_at, problem=str(error))
        dtypes = Counter[str]()
        for entry in entries:
            dtypes[entry.logical_dtype] += entry.nbytes
        parameters = sum(math.prod(entry.logical_shape) for entry in entries)
        return About(
            prefix,
            self.written_by,
            self.saved_at,
            parameters,
            len(entries),
            self.nbytes,
            dict(dtypes.most_common()),
            lines,
        )

    def __repr__(self) -> str:
        return as_text("tree", [self.about()])

    def _repr_html_(self) -> str:
        return as_html("tree", [self.about()])


def foreign_tree(
    *,
    files: tuple[DataFile, ...],
    leaves: dict[str, LeafEntry],
    structure: Any,
    saved_at: str = "",
    written_by: str = "",
    root: str = "",
    metadata: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
) -> TreeEntry:
    """Describe a tree that another program wrote: it has no save id and no digests."""
    return TreeEntry(
        save_id="",
        saved_at=saved_at,
        written_by=written_by,
        block=PIECE_BYTES,
        files=files,
        raw_root=root or msgspec.UNSET,
        raw_metadata=dict(metadata or {}),
        raw_values=dict(values or {}),
        structure=Raw(msgspec.json.encode(structure)),
        raw_leaves=encode_leaves(leaves),
    )


def _value_text(value: Any) -> str:
    try:
        return printable(f"= {shortened(repr(value_from_json(value)), _MOST_SHOWN)}")
    except (ValueError, RecursionError) as error:  # not recorded; or a number with too many digits to print
        return printable(shortened(str(error), _MOST_SHOWN))


class Leaves(Mapping[str, LeafEntry]):
    """The leaves of a tree, each parsed and checked when asked for: to get one of 100,000 takes no more than one."""

    def __init__(self, tree: TreeEntry) -> None:
        self._tree = tree
        self._raw = _parsed(tree.raw_leaves, _decode_raw_leaves)

    def __getitem__(self, name: str) -> LeafEntry:
        entry = _parsed(self._raw[name], _decode_leaf)
        check_leaf(name, entry, self._tree)
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._raw

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)


def _parsed(raw: Raw, decode: Callable[[Raw], T]) -> T:
    try:
        return decode(raw)
    except MALFORMED_JSON as error:
        raise FormatError(f"the manifest's list of leaves makes no sense: {error}") from error


class Manifest(Struct, frozen=True, kw_only=True):
    """All that is known of a checkpoint without reading its data: its format, and its trees by prefix.

    The tree that was saved without a prefix is under "".
    """

    digest: str = NO_DIGEST
    format: str
    version: int = VERSION
    trees: dict[str, TreeEntry] = field(default_factory=dict)

    def __repr__(self) -> str:
        return as_text(self._title, self._about())

    def _repr_html_(self) -> str:
        return as_html(self._title, self._about())

    @property
    def _title(self) -> str:
        return f"checkpoint ({self.format})"

    def _about(self) -> list[About]:
        return [tree.about(prefix) for prefix, tree in self.trees.items()]

    def with_tree(self, prefix: str, tree: TreeEntry) -> Manifest:
        """The same manifest with one tree added or replaced; the others stay as they were."""
        return Manifest(format=self.format, trees={**self.trees, prefix: tree})

    def to_json(self) -> bytes:
        return stamp_digest(msgspec.json.encode(msgspec.structs.replace(self, digest=NO_DIGEST)))

    @classmethod
    def from_json(cls, data: bytes, origin: str) -> Manifest:
        """Refuses what is no manifest, is damaged, or was written by a later version, naming `origin`."""
        check_own_digest(data, origin)
        return cls.parse(data, origin)

    @classmethod
    def parse(cls, data: bytes | str, origin: str) -> Manifest:
        """For a manifest that lies in something sealed."""
        try:
            manifest = _decode_manifest(data)
            if manifest.version > VERSION:
                raise FormatError(
                    f"version {manifest.version}; this eformer reads up to {VERSION}, please upgrade"
                )
            for tree in manifest.trees.values():
                check_tree(tree)
        except (*MALFORMED_JSON, FormatError) as error:
            raise FormatError(f"{origin} is no manifest that can be read: {error}") from error
        return manifest


class Receipt(Struct):
    """What one process has written: complete, synced, and under names that nobody looks for yet.

    If it is one of several, the leaves are in its `ProcessRecord`; `weight` is that of all their elements that it has
    written, and tells whether all together have written every one once.
    """

    files: list[DataFile] = field(default_factory=list)
    leaves: dict[str, LeafEntry] = field(default_factory=dict)
    weight: int = 0
    is_torn: bool = False


# ----------------------------------------------------------------------------------------------- parts


class ProcessRecord(Struct, omit_defaults=True):
    """What one of several processes wrote into a file, or into `files` of its own: the boxes of leaves, and those
    SHA-256 that are wanted and it could compute."""

    extents: dict[str, tuple[Extent, ...]] = field(default_factory=dict)
    sha256: dict[str, str] = field(default_factory=dict)
    files: tuple[DataFile, ...] = ()

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str, origin: str) -> ProcessRecord:
        try:
            return _decode_process_record(data)
        except MALFORMED_JSON as error:
            raise FormatError(f"{origin} is no part of a manifest that can be read: {error}") from error


def with_process_records(tree: TreeEntry, parts: Sequence[ProcessRecord]) -> TreeEntry:
    """The tree as if one process had written it. There is one part for each of its files."""
    entries = _parsed(tree.raw_leaves, _decode_leaves)
    extents: dict[str, list[Extent]] = {name: list(entry.extents) for name, entry in entries.items()}
    sha256: dict[str, str] = {}
    files = list(tree.files)
    for number, part in enumerate(parts):
        if unknown := part.extents.keys() - entries.keys():
            raise FormatError(
                f"{tree.files[number].name} has leaves that the manifest has not: {sorted(unknown)[:3]}"
            )
        first = len(files) if part.files else number
        for name, found in part.extents.items():
            extents[name] += [msgspec.structs.replace(extent, file=first + extent.file) for extent in found]
        files += part.files
        sha256 |= part.sha256
    whole = {
        name: msgspec.structs.replace(entry, extents=tuple(extents[name]), sha256=sha256.get(name))
        for name, entry in entries.items()
    }
    tree = msgspec.structs.replace(
        tree, files=tuple(files), parts=msgspec.UNSET, raw_leaves=encode_leaves(whole)
    )
    check_tree(tree)
    return tree


def weight_of(name: str, elements: int) -> int:
    """Weights add up: those of all boxes of a leaf to that of the leaf, and of no others, as good as never."""
    return elements * xxh3_64_number(name.encode(errors="surrogatepass")) % 2**64


_decode_manifest = msgspec.json.Decoder(Manifest).decode
_decode_process_record = msgspec.json.Decoder(ProcessRecord).decode
_decode_leaf = msgspec.json.Decoder(LeafEntry).decode
_decode_leaves = msgspec.json.Decoder(dict[str, LeafEntry]).decode
_decode_raw_leaves = msgspec.json.Decoder(dict[str, Raw]).decode


def encode_leaves(entries: dict[str, LeafEntry]) -> Raw:
    return Raw(msgspec.json.encode(entries))
