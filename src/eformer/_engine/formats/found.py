"""Describe a checkpoint that was found: its manifest and its files.

Tests: tests/engine/formats/test_left_out.py, tests/engine/formats/test_safetensors_others.py,
tests/engine/stores/test_bucket.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eformer._engine.record.manifest import Manifest, TreeEntry
from eformer._engine.record.names import with_nearest
from eformer._engine.stores.directory import directory_inside
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.local_copy import copy_of
from eformer._engine.stores.ocdbt import DatabaseFiles
from eformer.errors import Damage, NotFoundError

if TYPE_CHECKING:
    from eformer._engine.formats.others.single_file import SingleFile
    from eformer._engine.formats.quantized import Quantization
    from eformer._engine.record.signature import Verifier
    from eformer._engine.stores.base import Files, Kind, Store, Version

    Describe = Callable[[], TreeEntry]


class Trees(Mapping[str, "TreeEntry"]):
    """Trees by prefix. Trees of other programs are described on first use, so a damaged tree does not affect the rest.

    Directories in `also` can be loaded as prefixes, but were not saved under one; they are not counted or listed.
    `listed` describes trees without extents, if the records of several processes hold the extents.
    """

    def __init__(
        self,
        whole: Mapping[str, TreeEntry],
        others: Mapping[str, Describe],
        also: Mapping[str, Describe],
        listed: Mapping[str, Describe] | None = None,
    ) -> None:
        self.also = tuple(also)
        self._known, self._describe, self._listed = dict(whole), {**also, **others}, listed or {}
        self._prefixes = [*whole, *others]

    def __getitem__(self, prefix: str) -> TreeEntry:
        if prefix not in self._known:
            self._known[prefix] = self._describe[prefix]()
        return self._known[prefix]

    def listed(self, prefix: str) -> TreeEntry:
        """Return the tree, perhaps without extents."""
        is_known = prefix in self._known or prefix not in self._listed
        return self[prefix] if is_known else self._listed[prefix]()

    def __contains__(self, prefix: object) -> bool:
        return prefix in self._known or prefix in self._describe

    def __iter__(self) -> Iterator[str]:
        return iter(self._prefixes)

    def __len__(self) -> int:
        return len(self._prefixes)


@dataclass(frozen=True, slots=True)
class Foreign:
    """Facts of a checkpoint that only the reader of another program's format knows.

    open_files      opens the bytes of trees whose extents are not in files
    has_names       False for a file that stores arrays without names; its leaves are named by number
    find_damages    checks checksums that cannot be checked by reading a piece of a file
    find_left_out   lists the files that are not read and may hold leaves
    refused         leaves of kinds that eformer does not store, each with its kind
    find_quantized  describes the quantised leaves of a tree; None for a tree without such leaves
    of_handlers     directories of items that a handler of the caller wrote: only the handler reads their files
    is_costly       True if asking for a tree copies all files to this machine
    """

    open_files: Callable[[TreeEntry], Files] | None = None
    has_names: bool = True
    find_damages: Callable[[], Iterator[Damage]] | None = None
    find_left_out: Callable[[], tuple[str, ...]] = tuple
    refused: Mapping[str, str] = field(default_factory=dict)
    of_handlers: tuple[str, ...] = ()
    find_quantized: Callable[[TreeEntry], Quantization | None] | None = None
    is_costly: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was found: the store of its files, and its manifest.

    path            the path that leads to it again
    trees           the trees of the manifest or of another program, by prefix
    only            the prefix of the tree that the path led to
    versions        the versions of files that were read, to detect a newer file of the same name. A manifest's files
                    need none, because they are never replaced
    foreign         facts that only the reader of another program's format knows
    check_beside    checks files of eformer that hold no leaves: Hugging Face indexes, and marks
    signed_by       the public key whose owner has signed every byte that is read; None without `signed_by=`
    """

    path: str
    store: Store
    manifest: Manifest
    trees: Mapping[str, TreeEntry]
    only: str | None = None
    versions: Mapping[str, Version] = field(default_factory=dict)
    foreign: Foreign = Foreign()
    check_beside: Callable[[], list[Damage]] = list
    signed_by: Verifier | None = None

    def tree(self, prefix: str | None) -> TreeEntry:
        """Return the tree of a prefix; by default the tree that was saved without a prefix, or the only tree."""
        return self.trees[self._known(prefix)]

    def listed(self, prefix: str | None) -> TreeEntry:
        """Return the tree of a prefix, without extents if several processes wrote it: their records are not read."""
        known = self._known(prefix)
        return self.trees.listed(known) if isinstance(self.trees, Trees) else self.trees[known]

    def _known(self, prefix: str | None) -> str:
        """Return the prefix of an existing tree, or raise an error that lists the prefixes."""
        available = sorted(self.trees)
        if not available:
            raise NotFoundError(f"{self.path} holds no trees")
        if prefix is None:
            prefix = self.only
        if prefix is None and "" not in self.trees:
            if len(available) > 1:
                raise ValueError(f"{self.path} holds several trees; pass prefix=, one of {available}")
            prefix = next(iter(available), None)
        prefix = prefix or ""
        if prefix not in self.trees:
            available += self.trees.also if isinstance(self.trees, Trees) else ()
            hint = next(with_nearest([prefix], available))[1]
            raise ValueError(f"{self.path} has no prefix {prefix!r}{hint}; available prefixes: {available}")
        return prefix

    def left_out(self, prefix: str | None = None) -> tuple[str, ...]:
        """List the files and directories that are not read and may hold leaves, and refused leaves.

        With a prefix, list only the paths of that tree.
        """
        foreign = self.foreign
        found = (*foreign.find_left_out(), *(f"{name} ({kind})" for name, kind in foreign.refused.items()))
        root = self.listed(prefix).root if prefix is not None else ""
        return tuple(path for path in found if path.startswith(f"{root}/")) if root else found

    def files(self, tree: TreeEntry) -> Files:
        """Open the files that hold the bytes of a tree. The caller closes them."""
        if self.foreign.open_files:
            return self.foreign.open_files(tree)
        return files_of(self.store, tree, self.versions)


def foreign_found(
    path: str,
    store: Store,
    format_name: str,
    trees: Mapping[str, TreeEntry],
    versions: Mapping[str, Version],
    foreign: Foreign,
) -> Found:
    """Describe the trees of a checkpoint in a format of another program."""
    manifest = Manifest(format=format_name, trees=dict(trees))
    return Found(path, store, manifest, trees, versions=versions, foreign=foreign)


def files_of(store: Store, tree: TreeEntry, versions: Mapping[str, Version] | None = None) -> Files:
    """Open the files of a tree, or the keys of its database."""
    if tree.is_database:
        names, directory = [file.name for file in tree.files], on_disk(store)
        if directory is not None:
            return DatabaseFiles(directory_inside(directory, tree.root) if tree.root else directory, names)
        copy = copy_of(store, tree.root)  # TensorStore reads it by its path
        return DatabaseFiles(copy.path, names, copy)
    return store.open([tree.path_of(number) for number in range(len(tree.files))], versions)


# ------------------------------------------------------------------------------------------- readers
#
# A reader examines a directory or an open file. It returns a `Found` if the checkpoint is of its format, and None
# otherwise. `find.py` and `sniff.py` call the readers in order until one returns a `Found`.


@dataclass(slots=True)
class Place:
    """A directory that readers examine. It is listed once, when a reader first asks for its `names`."""

    store: Store
    _names: list[str] | None = None

    @property
    def names(self) -> list[str]:
        if self._names is None:
            self._names = list(self.store.kinds())
        return self._names

    def has(self, name: str) -> bool:
        """Tell whether the directory has a name, without listing it."""
        return self.store.exists(name) if self._names is None else name in self._names

    @property
    def is_there(self) -> bool:
        """Tell whether the place is an existing directory, or in a bucket the beginning of names."""
        if (directory := on_disk(self.store)) is not None:
            return directory.is_dir()
        try:
            return bool(self.names)
        except FileNotFoundError:
            return False


def kinds_if_there(store: Store) -> dict[str, Kind]:
    """List a directory; return an empty dict for a directory that does not exist."""
    try:
        return store.kinds()
    except (FileNotFoundError, NotADirectoryError):
        return {}


DirectoryReader = Callable[[Place], "Found | None"]
"""Reads the checkpoints of one format in directories."""

FileReader = Callable[["SingleFile", bytes], "Found | None"]
"""Reads the checkpoints of one format that are one file; the second argument is the first bytes of the file."""
