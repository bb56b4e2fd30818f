"""What an earlier checkpoint holds of a tree already, so that it need not be written again."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from eformer._engine.formats.find import find
from eformer._engine.record.digests import DIGEST_DIGITS
from eformer._engine.saving.write import digests_of
from eformer._engine.stores.local import logger, open_inside
from eformer._engine.tasks.pool import run_all
from eformer.errors import CorruptionError, FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from eformer._engine.record.manifest import Extent, TreeEntry
    from eformer._engine.saving.staging import Staging
    from eformer._engine.saving.write import Slot


class Earlier:
    """An earlier tree of ours: where it is, and what is recorded of it."""

    def __init__(self, directory: Path, tree: TreeEntry) -> None:
        self.directory, self.tree = directory, tree

    def path_of(self, file: int) -> Path:
        """Refuses what leads out of its directory: whoever wrote the manifest could have any file linked."""
        name = self.tree.path_of(file)
        os.close(open_inside(self.directory, name))
        return self.directory / name

    def unchanged(
        self, leaves: Mapping[str, Sequence[Slot]], staging: Staging, threads: int
    ) -> dict[str, list[Extent]]:
        """The leaves that it has as they are, with the extent of each of their slots."""
        found = {name: extents for name, slots in leaves.items() if (extents := self._alike(name, slots))}
        same: dict[str, list[Extent]] = {}

        def compare(name: str) -> None:
            if all(_is_same(*pair, self.tree.block, staging) for pair in _pairs(leaves[name], found[name])):
                same[name] = found[name]

        run_all([partial(compare, name) for name in found], threads)
        return same

    def _alike(self, name: str, slots: Sequence[Slot]) -> list[Extent] | None:
        """Extents that lie as the slots do, if there is one for each."""
        entry = self.tree.leaves.get(name)
        if (
            entry is None
            or not slots
            or (entry.dtype, entry.shape) != (slots[0].source.dtype, slots[0].source.shape)
        ):
            return None
        there = {entry.region_of(extent): extent for extent in entry.extents if not extent.coding}
        extents = [
            extent
            for slot in slots
            if (extent := there.get(slot.box)) and not (slot.is_packed or slot.coding)
        ]
        return extents if len(extents) == len(slots) else None


def _pairs(slots: Sequence[Slot], extents: Sequence[Extent]) -> list[tuple[Slot, Extent]]:
    return list(zip(slots, extents, strict=True))


def _is_same(slot: Slot, extent: Extent, block: int, staging: Staging) -> bool:
    """Whether every digest is the same. What has changed has mostly changed in its first piece."""
    if slot.nbytes != extent.nbytes or len(extent.digests) != DIGEST_DIGITS * len(slot.digests):
        return False
    for number, digest in enumerate(digests_of(slot, block, staging)):
        if digest != extent.digests[DIGEST_DIGITS * number : DIGEST_DIGITS * (number + 1)]:
            return False
        slot.digests[number] = digest
    return True


def earlier(path: Path, prefix: str, kind: str, block: int) -> Earlier | None:
    """The tree of that prefix at `path`, if bytes of it can be used again."""
    try:
        found = find(path)
        tree = found.tree(prefix if prefix in found.trees else None)
        usable = found.manifest.format == kind and found.directory == found.path and not tree.is_database
        if usable and tree.save_id and tree.block == block and tree.leaves:
            return Earlier(found.directory, tree)
        logger.info("%s has nothing that could be used again: everything is written", path)
    except NotFoundError:  # this save is the first
        pass
    except (OSError, ValueError, CorruptionError, FormatError) as error:
        logger.warning("%s cannot be used again, everything is written: %s", path, error)
    return None
