"""Find the leaves that an earlier checkpoint already holds, and link its files instead of writing them."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.formats.find import find
from eformer._engine.formats.safetensors.header import open_header
from eformer._engine.formats.safetensors.layout import plan_extents
from eformer._engine.formats.safetensors.names import PRIVATE, box_name, own_name, save_of, tensor_names
from eformer._engine.record.boxes import Box
from eformer._engine.record.digests import DIGEST_DIGITS, xxh3_128
from eformer._engine.record.names import readable
from eformer._engine.record.text import few
from eformer._engine.saving.recheck import GONE, find_damaged, places_of
from eformer._engine.saving.staging import released
from eformer._engine.saving.write import digests_of
from eformer._engine.tasks.pool import run_all
from eformer.errors import CorruptionError, FormatError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from eformer._engine.record.manifest import DataFile, Extent, LeafEntry, TreeEntry
    from eformer._engine.record.planned import PlannedExtent, PlannedFile, Source
    from eformer._engine.saving.staging import Staging
    from eformer._engine.stores.base import Entry, Store, Upload

logger = logging.getLogger("eformer")

_MOST_KEPT = 64  # files, the largest: the leaves of smaller ones are written into one file again
_MOST_GROUPS = 16


class Earlier:
    """An earlier tree: its store, its record, and the store of the save that links its files."""

    def __init__(self, store: Store, tree: TreeEntry, to: Store) -> None:
        self.store, self.tree, self.to = store, tree, to

    def unchanged(
        self, leaves: Mapping[str, Sequence[PlannedExtent]], staging: Staging, threads: int
    ) -> dict[str, list[Extent]]:
        """Find the leaves that have not changed since, with the recorded extent of each of their boxes."""
        found = {name: extents for name, planned in leaves.items() if (extents := self._alike(name, planned))}
        same: dict[str, list[Extent]] = {}

        def compare(name: str) -> None:
            pairs = zip(leaves[name], found[name], strict=True)
            if all(_is_same(planned, extent, self.tree.block, staging) for planned, extent in pairs):
                same[name] = found[name]

        run_all([partial(compare, name) for name in found], threads)
        return same

    def _alike(self, name: str, planned: Sequence[PlannedExtent]) -> list[Extent] | None:
        """Return the recorded extents of the same boxes, if each planned extent has one."""
        entry = self.tree.leaves.get(name)
        if entry is None or not planned:
            return None
        if (entry.dtype, entry.shape) != (planned[0].source.dtype, planned[0].source.shape):
            return None
        there = {entry.region_of(extent): extent for extent in entry.extents if not extent.coding}
        extents = [
            extent for one in planned if (extent := there.get(one.box)) and not (one.is_packed or one.coding)
        ]
        return extents if len(extents) == len(planned) else None


def _is_same(planned: PlannedExtent, extent: Extent, block: int, staging: Staging) -> bool:
    """Tell whether every digest is the same. Stop at the first that differs: mostly that of the first piece."""
    if planned.nbytes != extent.nbytes or len(extent.digests) != DIGEST_DIGITS * len(planned.digests):
        return False
    for number, digest in enumerate(digests_of(planned, block, staging)):
        if digest != extent.digests[DIGEST_DIGITS * number : DIGEST_DIGITS * (number + 1)]:
            return False
        planned.digests[number] = digest
    return True


def find_earlier(path: str, prefix: str, kind: str, block: int, *, to: Store) -> Earlier | None:
    """Find the tree of a prefix at `path`, if a save to the store `to` can link its files."""
    try:
        found = find(path)
        tree = found.tree(prefix if prefix in found.trees else None)
        usable = found.manifest.format == kind and found.path == found.store.url and not tree.is_database
        if usable and tree.has_digests and tree.block == block and tree.leaves:
            return Earlier(found.store, tree, to)
        logger.info("reuse: nothing reusable in %s; writing all leaves", path)
    except NotFoundError:  # this save is the first
        pass
    except (OSError, ValueError, CorruptionError, FormatError) as error:
        logger.warning("reuse: cannot read %s; writing all leaves: %s", path, error)
    return None


# ---------------------------------------------------------------------------------------- whole files


@dataclass(slots=True)
class Kept:
    """Files of an earlier checkpoint that this one shares, and the leaves in them."""

    files: list[DataFile] = field(default_factory=list)
    leaves: dict[str, tuple[Source, list[Extent]]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for _, extents in self.leaves.values() for extent in extents)

    def entries(self, first: int, sha256: Mapping[str, str]) -> dict[str, LeafEntry]:
        """Record the leaves, if the files are numbered from `first` on."""
        return {
            name: source.entry(
                tuple(msgspec.structs.replace(e, file=first + e.file) for e in extents), sha256.get(name)
            )
            for name, (source, extents) in self.leaves.items()
        }


def keep_files(
    earlier: Earlier,
    sources: Sequence[Source],
    upload: Upload,
    staging: Staging,
    threads: int,
    barred: Container[str] = (),
    *,
    whole: bool = False,
) -> tuple[Kept, list[list[Source]]]:
    """Link the safetensors files that hold unchanged leaves. Return them and the leaves to write, in two groups:
    unchanged and changed leaves, so that the next save can link the files of the unchanged group whole.

    A file is linked if at least half of it is still needed, its tensors have the names that this save would give them,
    and its bytes are sound. Leaves that left the tree stay in the file. Other programs would load them, so such a file
    is hidden from them; with `whole` it is not linked. Names and save ids that are `barred` are not used again.
    """
    kept, tree = Kept(), earlier.tree
    tensors = tensor_names(source.name for source in sources)
    planned = {source.name: list(plan_extents(source, tree.block)) for source in sources}
    same = earlier.unchanged(planned, staging, threads)
    files = _linkable_files(earlier, same, tensors, barred, whole=whole)
    unfit = _unfit(earlier, {number: entry for number, (entry, _) in files.items()}, same, threads)
    numbers: dict[int, int] = {}
    for number, (entry, name) in files.items():
        if number not in unfit and upload.link(name, earlier.store, entry):
            numbers[number] = len(kept.files)
            kept.files.append(msgspec.structs.replace(tree.files[number], name=name))
    for source in sources:
        extents = same.get(source.name, [])
        if extents and all(extent.file in numbers for extent in extents):
            numbered = [msgspec.structs.replace(extent, file=numbers[extent.file]) for extent in extents]
            kept.leaves[source.name] = (released(source), numbered)
    left = [source for source in sources if source.name not in kept.leaves]
    return kept, [[s for s in left if s.name in same], [s for s in left if s.name not in same]]


def _linkable_files(
    earlier: Earlier,
    same: Mapping[str, Sequence[Extent]],
    tensors: Mapping[str, str],
    barred: Container[str],
    *,
    whole: bool,
) -> dict[int, tuple[Entry, str]]:
    """Choose files that hold the unchanged leaves, the largest first. Return the entry and the new name of each."""
    needed, called = Counter[int](), defaultdict[int, set[str]](set)
    for leaf, extents in same.items():
        for extent in extents:
            needed[extent.file] += extent.nbytes
            called[extent.file].add(box_name(tensors[leaf], Box(*extent.region) if extent.region else None))
    found = {}
    for number, nbytes in needed.most_common(_MOST_KEPT):
        file = earlier.tree.files[number]
        if 2 * nbytes < file.nbytes - file.header_nbytes:
            continue
        if linkable := _look(earlier, file, called[number], barred, whole=whole):
            found[number] = linkable
    return found


def _look(
    earlier: Earlier, file: DataFile, tensors: set[str], barred: Container[str], *, whole: bool
) -> tuple[Entry, str] | None:
    """Look at a file that holds these tensors, and name it; None if it cannot be linked. With `whole`, it must hold
    nothing else."""
    try:
        header, entry = earlier.store.read(file.name, 0, file.header_nbytes)
        digest, is_of_save = xxh3_128(header), bool(file.header) and entry.nbytes == file.nbytes
        if is_of_save and digest != file.header:
            problem = f"bytes 0 to {file.header_nbytes}, the header, have the digest {digest}, expected {file.header}"
            _log_damage(earlier, entry, problem)
            return None
        opened = open_header(earlier.store, file.name)
        save_id = save_of(opened.metadata)
        if not save_id:
            raise FormatError("its header does not name the save that wrote it")
        if not is_of_save:
            raise FormatError("it is not the file that was written")
        if other := tensors - opened.tensors.keys():
            raise FormatError(f"it has another name for the tensor {min(other)!r}")
    except (OSError, FormatError) as error:
        logger.warning("reuse: cannot link %s, writing it again: %s", earlier.store.path_to(file.name), error)
        return None
    has_more = bool(opened.tensors.keys() - tensors)
    name = own_name(file.name, save_id, is_private=has_more or (file.name.endswith(PRIVATE) and not whole))
    is_barred = save_id in barred or name in barred
    return None if is_barred or (whole and has_more) else (entry, name)


def _unfit(
    earlier: Earlier,
    entries: Mapping[int, Entry],
    leaves: Mapping[str, Sequence[Extent]],
    threads: int,
) -> Container[int]:
    """Check files that are about to be linked. Return the damaged files, and log each."""
    damages = find_damaged(earlier.store, earlier.tree, entries, leaves, threads)
    for number, problem in damages.items():
        if problem == GONE:
            path = earlier.store.path_to(entries[number].name)
            logger.warning("reuse: cannot link %s, writing it again: it was removed", path)
        else:
            _log_damage(earlier, entries[number], problem)
    return damages


def _log_damage(earlier: Earlier, entry: Entry, problem: str) -> None:
    """Log the damage of a file, and the checkpoints that share it. Leave out the checkpoint that this save replaces."""
    places = places_of(earlier.store, entry, but=earlier.to)
    logger.error(
        "reuse: %s is damaged, and its leaves are written anew: %s%s",
        earlier.store.path_to(entry.name),
        problem,
        f". Checkpoints with the same file are damaged, too: {few(places)}. Remove them, or restore the file from a "
        "copy"
        if places
        else "",
    )


def apart(sources: Sequence[Source]) -> list[list[Source]]:
    """Group leaves by the outermost part of their names: such a group is likely to change, or to stay, as a whole.

    Return one group instead of very many.
    """
    groups: dict[str, list[Source]] = {}
    for source in sources:
        outermost, dot, _ = readable(source.name).partition(".")
        groups.setdefault(outermost if dot else "", []).append(source)
    return list(groups.values()) if len(groups) <= _MOST_GROUPS else [list(sources)]


# ------------------------------------------------------------------------------------------- chunks


def keep_chunks(
    earlier: Earlier, files: Sequence[PlannedFile], upload: Upload, staging: Staging, threads: int
) -> int:
    """Link the planned chunks that an earlier checkpoint has as files. Return the number of bytes that are not written.

    The files that describe arrays are written anew, because they name the save of an array.
    """
    chunks: dict[str, list[PlannedFile]] = {}
    for file in files:
        for planned_extent in file.extents:
            chunks.setdefault(planned_extent.source.name, []).append(file)
    planned = {name: [file.extents[0] for file in some] for name, some in chunks.items()}
    same = earlier.unchanged(planned, staging, threads)
    entries = {e.file: entry for extents in same.values() for e in extents if (entry := _chunk(earlier, e))}
    unfit = _unfit(earlier, entries, same, threads)
    nbytes = 0
    for name, extents in same.items():
        for file, extent in zip(chunks[name], extents, strict=True):
            entry = entries.get(extent.file)
            if entry is None or entry.nbytes != file.nbytes or extent.file in unfit:
                continue
            file.is_there = upload.link(file.name, earlier.store, entry)
            if not file.is_there:
                return nbytes  # the file system has no links: the next chunk would fail as well
            nbytes += extent.nbytes
            file.extents[0].source = released(file.extents[0].source)
    return nbytes


def _chunk(earlier: Earlier, extent: Extent) -> Entry | None:
    """Look at the file of a chunk; None if it cannot be linked."""
    path = earlier.tree.path_of(extent.file)
    try:
        _, entry = earlier.store.read(path, 0, 0)
        if entry.nbytes != earlier.tree.files[extent.file].nbytes:
            raise FormatError(
                f"it is {entry.nbytes} bytes long, expected {earlier.tree.files[extent.file].nbytes}"
            )
    except (OSError, FormatError) as error:
        logger.warning("reuse: cannot link %s, writing it again: %s", earlier.store.path_to(path), error)
        return None
    return entry
