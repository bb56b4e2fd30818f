"""The record of a checkpoint: its trees, their leaves, and where the bytes of each leaf are.

A manifest is JSON with a digest of itself, so that a flipped bit in a name, a shape or an offset is an error, never a
different tree. `docs/format/manifest.md` describes it field by field.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Raw, Struct, field

from eformer._engine.record.boxes import Box
from eformer._engine.record.check import check_leaf, check_tree, is_plain
from eformer._engine.record.digests import NO_DIGEST, check_own_digest, stamp_digest, xxh3_64_number
from eformer._engine.record.display import Shown, TreeSummary
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.fingerprints import fingerprint_of_value, recorded_fingerprint
from eformer._engine.record.lazy import lazy_property
from eformer._engine.record.names import Spellings, ambiguous, with_nearest
from eformer._engine.record.origin import origin_text, parent_lines
from eformer._engine.record.outline import LeafLine
from eformer._engine.record.owners import Owners  # noqa: TC001  msgspec evaluates it
from eformer._engine.record.pieces import PIECE_BYTES
from eformer._engine.record.text import printable, shortened
from eformer._engine.record.values import MALFORMED_JSON, json_decoder, parse_json, value_from_json
from eformer.errors import FormatError, VersionError

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

VERSION = 1
UNREADABLE = "unreadable"  # the key in place of a structure that cannot be read; its value is the reason

_INVALID_LEAVES = "the manifest's list of leaves is invalid"
_MOST_SHOWN = 60  # characters of a plain value


Count = Annotated[int, msgspec.Meta(ge=0)]  # checked by the JSON parser


class DataFile(Struct, frozen=True, gc=False, omit_defaults=True):
    """A file that holds leaves. `header` is the digest of its first `header_nbytes`, which belong to no leaf."""

    name: str
    nbytes: int
    header_nbytes: int = 0
    header: str = ""


class Coding(Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """How an encoded chunk becomes an array: `codec` decodes it to this `shape`, and the extent is its first corner.

    The codecs are "zstd", "" for plain bytes, and "zarr" for every other codec that TensorStore decodes, from the
    array's metadata in `detail`.
    """

    codec: str
    shape: tuple[Count, ...]
    detail: str = ""


class Extent(Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """A range of bytes in a file that holds one box of a leaf. `digests` concatenates the digests of its pieces.

    `offset` counts from the end of the file's header. `region` is None for the whole leaf. Files of other programs
    have no digests.
    """

    file: Count
    offset: Count
    nbytes: Count
    digests: str
    region: tuple[tuple[Count, ...], tuple[Count, ...]] | None = None
    coding: Coding | None = None


class RecordedSharding(Struct, frozen=True, omit_defaults=True):
    """How an array was sharded: the mesh axes that split each axis of the array, and the sizes of the mesh.

    `memory_kind` is the kind of device memory; None for the default. The mesh of a single device is empty.
    """

    spec: tuple[str | tuple[str, ...] | None, ...]
    mesh: dict[str, int]
    memory_kind: str | None = None


class LeafEntry(Struct, frozen=True, array_like=True, gc=False, omit_defaults=True):
    """The description of one array, and the extents that hold its bytes.

    home       the kind of saved array: "numpy", "jax", or "weak" for a weakly typed jax.Array
    key        the generator of a typed PRNG key, which is stored as its key data
    sharding   how a jax.Array was sharded
    sha256     the SHA-256 of all elements, if the save recorded it
    own_fingerprint
               the fingerprint, if the save recorded it because the digests of the extents do not give it
    """

    dtype: str
    shape: tuple[Count, ...]
    extents: tuple[Extent, ...]
    home: str = "jax"
    key: str | None = None
    sharding: RecordedSharding | None = None
    sha256: str | None = None
    own_fingerprint: str | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes on disk."""
        return sum(extent.nbytes for extent in self.extents)

    @property
    def logical_dtype(self) -> str:
        return f"key<{self.key}>" if self.key else self.dtype

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Return the shape for the user, without the axis of a PRNG key's data."""
        return self.shape[:-1] if self.key else self.shape

    @property
    def described(self) -> str:
        return f"{self.logical_dtype}{list(self.logical_shape)}"

    def region_of(self, extent: Extent) -> Box:
        return _region(extent.region) if extent.region else Box.whole(self.shape)


@lru_cache(2**14)  # leaves that are sharded alike have the same boxes
def _region(box: tuple[tuple[int, ...], tuple[int, ...]]) -> Box:
    return Box(*box)


class TreeEntry(Shown, Struct, frozen=True, kw_only=True, dict=True):
    """One saved tree: everything that one `save` call wrote.

    The files are in the directory `root` beside the manifest, or in the manifest's own directory; with `ocdbt` they are
    the keys of a database there. If several processes wrote the tree, the extents are in process records, in the
    headers of the files; `wholeness` says whether every leaf is "whole" in one file or some leaves are "torn". `owners`
    says which record has which leaves, so that a load reads only the records that it needs.
    """

    save_id: str
    saved_at: str
    written_by: str
    block: int
    files: tuple[DataFile, ...]
    wholeness: Literal["whole", "torn"] | msgspec.UnsetType = field(name="parts", default=msgspec.UNSET)
    owners: Owners | msgspec.UnsetType = field(name="holdings", default=msgspec.UNSET)
    raw_origin: dict[str, Any] | msgspec.UnsetType = field(name="origin", default=msgspec.UNSET)
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
    def origin(self) -> dict[str, Any] | None:
        """Return the recorded origin: the rules and the checkpoints that the tree was made by; None without one."""
        return self.raw_origin or None

    @property
    def has_digests(self) -> bool:
        """Tell whether eformer saved the tree, so that every byte of it can be checked."""
        return bool(self.save_id)

    @property
    def is_database(self) -> bool:
        return bool(self.ocdbt)

    def path_of(self, file: int) -> str:
        """Return the path of a file, relative to the manifest."""
        name = self.files[file].name
        return f"{self.root}/{name}" if self.root else name

    @property
    def metadata(self) -> dict[str, Any]:
        """Return the `metadata` argument of the save."""
        return {name: value_from_json(value) for name, value in self.raw_metadata.items()}

    @property
    def values(self) -> dict[str, Any]:
        """Return the leaves that are plain values: numbers, strings, bytes."""
        return {name: value_from_json(value) for name, value in self.raw_values.items()}

    @lazy_property
    def leaves(self) -> dict[str, LeafEntry]:
        """Return the leaves that are arrays, by name, in the tree's order. Lookups take escaped and readable names."""
        entries = _ByName(self.listed_leaves())
        rooms = [file.nbytes - file.header_nbytes for file in self.files]
        for name, entry in entries.items():
            if len(entry.extents) != 1 or not is_plain(entry, entry.extents[0], rooms, self.block):
                check_leaf(name, entry, self)
        return entries

    @lazy_property
    def fingerprints(self) -> dict[str, str | None]:
        """Return the fingerprint of each leaf by name, as `fingerprint` computes it; None where the record lacks it."""
        found = {name: recorded_fingerprint(entry, self.block) for name, entry in self.leaves.items()}
        return found | {name: fingerprint_of_value(value) for name, value in self.raw_values.items()}

    def listed_leaves(self) -> dict[str, LeafEntry]:
        """Return the listed leaves, unchecked. In a tree by several processes they have no extents."""
        entries = parse_json(self.raw_leaves, dict[str, LeafEntry], _INVALID_LEAVES)
        if both := entries.keys() & self.raw_values.keys():
            raise FormatError(f"the manifest lists {sorted(both)[:3]} both as arrays and as plain values")
        return entries

    def check_leaves(self) -> None:
        """Parse and check every leaf. Raise a FormatError for the first impossible leaf."""
        _ = self.leaves

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.leaves.values())

    def lines(self, marks: Mapping[str, str] | None = None) -> list[LeafLine]:
        """Return one line for each leaf, for display. `marks` are texts to show beside some leaves."""
        marks = marks or {}
        arrays = [
            LeafLine(name, printable(f"{entry.described} {marks.get(name, '')}".rstrip()), entry.nbytes)
            for name, entry in self.leaves.items()
        ]
        return arrays + [LeafLine(name, value_text(value)) for name, value in self.raw_values.items()]

    def summary(self, prefix: str = "", marks: Mapping[str, str] | None = None) -> TreeSummary:
        """Summarize the tree for display, with `marks` beside some leaves. A damaged entry is in the summary; it does
        not raise."""
        try:
            entries, lines = self.leaves.values(), self.lines(marks)
        except FormatError as error:
            return TreeSummary(prefix, self.written_by, self.saved_at, problem=str(error))
        dtypes = Counter[str]()
        for entry in entries:
            dtypes[entry.logical_dtype] += entry.nbytes
        return TreeSummary(
            prefix=prefix,
            written_by=self.written_by,
            saved_at=self.saved_at,
            parameters=sum(math.prod(entry.logical_shape) for entry in entries),
            arrays=len(entries),
            nbytes=self.nbytes,
            dtypes=dict(dtypes.most_common()),
            lines=lines,
            origin=origin_text(self.origin) if self.origin else "",
            parents=[printable(line) for line in parent_lines(self.origin or {})],
        )

    def _shown(self) -> tuple[str, Sequence[TreeSummary], Sequence[str]]:
        return "tree", [self.summary()], ()


class BoxedTree(TreeEntry, frozen=True, kw_only=True, dict=True):
    """A tree whose leaves may lack boxes. Its leaves are given, and not checked for gaps."""

    boxed: dict[str, LeafEntry]

    @property
    def leaves(self) -> dict[str, LeafEntry]:
        return self.boxed


def boxed_tree(tree: TreeEntry, leaves: dict[str, LeafEntry], **changes: Any) -> BoxedTree:
    """Return the tree with other leaves, which may lack boxes, and other `changes`."""
    fields = {name: getattr(tree, name) for name in TreeEntry.__struct_fields__}
    return BoxedTree(**fields | changes, boxed=leaves)


def with_entries(tree: TreeEntry, entries: Mapping[str, LeafEntry]) -> BoxedTree:
    """Return the tree with other leaves, for display: a leaf that is not stored counts with the bytes in memory."""
    sized = {
        name: entry if entry.extents else msgspec.structs.replace(entry, extents=(_in_memory(entry),))
        for name, entry in entries.items()
    }
    return boxed_tree(tree, sized)


def _in_memory(entry: LeafEntry) -> Extent:
    return Extent(0, 0, math.prod(entry.shape) * dtype_from_name(entry.dtype).itemsize, "")


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
    origin: Mapping[str, Any] | None = None,
) -> TreeEntry:
    """Describe a tree that another program wrote: it has no save id and no digests."""
    return TreeEntry(
        save_id="",
        saved_at=saved_at,
        written_by=written_by,
        block=PIECE_BYTES,
        files=files,
        raw_root=root or msgspec.UNSET,
        raw_origin=dict(origin) if origin else msgspec.UNSET,
        raw_metadata=dict(metadata or {}),
        raw_values=dict(values or {}),
        structure=Raw(msgspec.json.encode(structure)),
        raw_leaves=encode_leaves(leaves),
    )


def value_text(value: Any) -> str:
    """Return a plain value, given as JSON, for display."""
    try:
        return printable(f"= {shortened(repr(value_from_json(value)), _MOST_SHOWN)}")
    except (ValueError, RecursionError) as error:  # not recorded, or a number with too many digits to print
        return printable(shortened(str(error), _MOST_SHOWN))


class _ByName(dict[str, LeafEntry]):
    """A dict of leaves that also takes the readable spellings of their names."""

    @lazy_property
    def _spellings(self) -> Spellings:
        return Spellings(self)

    def __missing__(self, name: str) -> LeafEntry:
        spellings = self._spellings
        found = spellings.leaves(name)
        if len(found) == 1:
            return self[found[0]]
        hint = next(with_nearest([name], spellings.known()))[1]
        raise KeyError(ambiguous(name, found) if found else f"no leaf {name!r}{hint}")


class Leaves(Mapping[str, LeafEntry]):
    """Map names to leaves. Parse and check each leaf on access: reading one of 100,000 leaves parses that leaf only."""

    def __init__(self, tree: TreeEntry) -> None:
        self._tree = tree
        self._raw = parse_json(tree.raw_leaves, dict[str, Raw], _INVALID_LEAVES)

    def __getitem__(self, name: str) -> LeafEntry:
        entry = parse_json(self._raw[name], LeafEntry, _INVALID_LEAVES)
        check_leaf(name, entry, self._tree)
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._raw

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)


def parse_structure(raw: Raw | bytes) -> Any:
    """Parse the recorded structure of a tree."""
    try:
        return msgspec.json.decode(raw)
    except MALFORMED_JSON as error:
        raise FormatError(f"the manifest has an invalid structure: {error}") from error


class CommitLog(Struct, frozen=True, omit_defaults=True):
    """The saves that an index in a bucket remembers, so that each save commits once or never.

    by      a value that differs in every version of the index, so that no two versions have the same bytes
    done    the last committed saves, the newest first
    dead    the saves that count as dead, with the time: they must not commit later. Also single removed files of other
            saves: no later version may name them
    gone    whether the whole checkpoint was removed, with everything in its directory
    """

    by: str = ""
    done: tuple[str, ...] = ()
    dead: dict[str, str] = field(default_factory=dict)
    gone: bool = False


class Manifest(Struct, frozen=True, kw_only=True):
    """The record of a checkpoint: its format, and its trees by prefix. A tree saved without a prefix is under ""."""

    digest: str = NO_DIGEST
    format: str
    version: int = VERSION
    log: CommitLog | msgspec.UnsetType = msgspec.UNSET
    trees: dict[str, TreeEntry] = field(default_factory=dict)

    @property
    def save_ids(self) -> set[str]:
        """The ids of the saves that wrote the trees."""
        return {tree.save_id for tree in self.trees.values()}

    def names(self) -> set[str]:
        """Return the entries of its directory that it names: the directories of trees, and files."""
        trees = self.trees.values()
        return {
            name
            for tree in trees
            for name in ([tree.root] if tree.root else [one.name for one in tree.files])
        }

    @property
    def barred(self) -> Container[str]:
        """The saves and files that no later version of the index may name."""
        return self.log.dead if self.log else ()

    @property
    def is_empty(self) -> bool:
        """Whether no checkpoint is here: it was removed, or a dead save was barred before the first commit."""
        return bool(self.log) and not self.trees

    def has_committed(self, save_id: str) -> bool:
        """Tell whether a save was committed, even if later saves have replaced its tree."""
        return save_id in self.save_ids or bool(self.log and save_id in self.log.done)

    def with_tree(self, prefix: str, tree: TreeEntry) -> Manifest:
        """Return a copy with one tree added or replaced."""
        return Manifest(format=self.format, trees={**self.trees, prefix: tree})

    def to_json(self) -> bytes:
        return stamp_digest(msgspec.json.encode(msgspec.structs.replace(self, digest=NO_DIGEST)))

    @classmethod
    def from_json(cls, data: bytes, origin: str) -> Manifest:
        """Parse a manifest and check its digest. Errors name `origin`."""
        check_own_digest(data, origin)
        return cls.parse(data, origin)

    @classmethod
    def parse(cls, data: bytes | str, origin: str) -> Manifest:
        """Parse a manifest inside a document whose digest has been checked."""
        try:
            manifest = json_decoder(Manifest).decode(data)
            for tree in manifest.trees.values():
                check_tree(tree)
        except (*MALFORMED_JSON, FormatError) as error:
            _refuse_newer(data, origin)  # a newer version may have other fields
            raise FormatError(f"{origin} is not a readable manifest: {error}") from error
        if manifest.version > VERSION:
            _refuse_newer(data, origin)
        return manifest


class _Head(Struct):
    """The fields that a manifest of every version has."""

    version: int


def _refuse_newer(data: bytes | str, origin: str) -> None:
    try:
        version = json_decoder(_Head).decode(data).version
    except MALFORMED_JSON:
        return
    if version > VERSION:
        raise VersionError(
            f"{origin} is not a readable manifest: version {version}; this eformer reads up to {VERSION}, upgrade it"
        )


class Receipt(Struct):
    """The receipt of one process: complete and synced files, under names that no manifest refers to yet.

    If several processes save together, the leaves are in a `ProcessRecord` instead, and the sum of `coverage` tells
    whether the processes have written every element exactly once. `owners` has the leaves of each file; None if the
    table would be too long. `own_metadata` has the metadata that each process adds.
    """

    files: list[DataFile] = field(default_factory=list)
    leaves: dict[str, LeafEntry] = field(default_factory=dict)
    coverage: int = 0
    is_torn: bool = False
    owners: Owners | None = None
    own_metadata: list[bytes] = field(default_factory=list)


def coverage_of(name: str, elements: int) -> int:
    """Return a number for a box of a leaf.

    The numbers of boxes sum to the number of the leaf only if the boxes cover it exactly once, apart from collisions of
    a 64-bit hash.
    """
    return elements * xxh3_64_number(name.encode(errors="surrogatepass")) % 2**64


def encode_leaves(entries: dict[str, LeafEntry]) -> Raw:
    return Raw(msgspec.json.encode(entries))
