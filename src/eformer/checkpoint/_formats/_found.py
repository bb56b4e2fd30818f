"""A checkpoint that was found: its manifest, and where its files are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eformer.checkpoint._leaf import with_nearest
from eformer.checkpoint._store.files import Files, LocalFiles
from eformer.checkpoint._store.ocdbt import DatabaseFiles

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from eformer.checkpoint._manifest import Manifest, TreeEntry


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint: the directory that its files are in, and its manifest.

    `only` is the tree that the path led to. `stamps` tell the files that were looked at from later ones of the same
    name; those that a manifest names are never replaced.
    """

    path: Path
    directory: Path
    manifest: Manifest
    trees: Mapping[str, TreeEntry]
    only: str | None = None
    stamps: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def tree(self, prefix: str | None) -> TreeEntry:
        """The tree of that prefix; if none is said, the one that was saved without, or the only one."""
        available = sorted(self.trees)
        if prefix is None:
            prefix = self.only
        if prefix is None and "" not in self.trees:
            if len(available) > 1:
                raise ValueError(f"{self.path} holds several trees; pass prefix=, one of {available}")
            prefix = next(iter(available), None)
        prefix = prefix or ""
        if prefix not in self.trees:
            hint = next(with_nearest([prefix], available))[1]
            raise ValueError(f"{self.path} has no prefix {prefix!r}{hint}; available are {available}")
        return self.trees[prefix]

    def files(self, tree: TreeEntry) -> Files:
        """What to read the tree's bytes from. The caller closes it."""
        if tree.is_database:
            return DatabaseFiles(self.directory / tree.root, [file.name for file in tree.files])
        names = [tree.path_of(number) for number in range(len(tree.files))]
        return LocalFiles(self.directory, names, self.stamps)
