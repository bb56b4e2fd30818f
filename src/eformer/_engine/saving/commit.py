"""Commit a save: files under their final names, then the index, then remove what it does not name any more.

Every step leaves the place with one whole checkpoint.
"""

from __future__ import annotations

import datetime as dt
import math
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.holdings import holdings_of
from eformer._engine.record.manifest import LeafEntry, Receipt, TreeEntry, encode_leaves, weight_of
from eformer._engine.record.pieces import PIECE_BYTES
from eformer._engine.record.planned import data_files, leaf_entries, weight
from eformer._engine.record.signature import signature_name
from eformer._engine.stores.base import Commit
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.pool import gc_paused
from eformer.errors import ProcessError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.formats.write_format import Index, WriteFormat
    from eformer._engine.record.planned import PlannedFile
    from eformer._engine.saving.agreement import Team
    from eformer._engine.saving.reuse import Kept
    from eformer._engine.stores.base import Change, Store, Upload


def commit(team: Team, receipt: Receipt) -> None:
    """Make the tree, whose files are complete and synced, the checkpoint of its prefix."""
    tree = (
        recorded_tree_of_several(team.tree, receipt, team.leaves)
        if team.is_several
        else recorded_tree(team.tree, receipt)
    )
    if team.save.late:
        metadata = {**tree.raw_metadata, **team.save.late(receipt.parts)}
        tree = msgspec.structs.replace(tree, raw_metadata=metadata)
    upload = team.upload
    assert upload is not None
    team.save.turn.wait()
    fmt, change = team.format, partial(_change, team, tree, upload)
    upload.commit(
        Commit(fmt.read_index, change, fmt.index_name, tree.save_id, sweeps=True, is_done=team.is_committed)
    )
    upload.close()


def _change(team: Team, tree: TreeEntry, upload: Upload, index: Index, store: Store) -> Change:
    interrupts.check()
    if team.save.fence:  # not before it is known that the save is not committed yet
        team.save.fence()
    change = index.commit(tree, store, upload)
    is_replaced = change.index is None or index.version is not None

    def tidy(store: Store, upload: Upload) -> None:
        if change.tidy:
            change.tidy(store, upload)
        if is_replaced:
            _remove_signature(team.save.file, store, upload)

    return msgspec.structs.replace(change, tidy=tidy)


def _remove_signature(file: str, place: Store, upload: Upload) -> None:
    """Remove the signature of the checkpoint that was replaced. Until then it says that this one was altered."""
    name = signature_name(file)
    if place.is_file(name):
        upload.remove([name])


# --------------------------------------------------------------------------------------------- records


def new_tree(
    written_by: str, structure: Any, raw_metadata: dict[str, Any], raw_values: dict[str, Any]
) -> TreeEntry:
    """Begin the record of a save, under an id of its own."""
    return TreeEntry(
        save_id=secrets.token_hex(8),
        saved_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        written_by=written_by,
        block=PIECE_BYTES,
        files=(),
        raw_metadata=raw_metadata,
        raw_values=raw_values,
        structure=msgspec.Raw(msgspec.json.encode(structure)),
    )


def receipt_of_one(
    files: Sequence[PlannedFile],
    kept: Kept,
    leaves: Mapping[str, LeafEntry | None],
    sha256: Mapping[str, str],
) -> Receipt:
    """Record what the only process has written, and what it keeps of an earlier save.

    `leaves` gives the order, and the entries of leaves that no file may hold.
    """
    with gc_paused():
        found = leaf_entries(files, sha256)
        found |= kept.entries(len(files), sha256)
        entries = {
            name: found[name] if entry is None else found.get(name, entry) for name, entry in leaves.items()
        }
        return Receipt([*data_files(files), *kept.files], entries)


def receipt_of_several(
    files: Sequence[PlannedFile],
    fmt: WriteFormat,
    upload: Upload,
    sha256: Mapping[str, str],
    numbers: Mapping[str, int],
) -> Receipt:
    """Record what one of several processes has written. Its extents and digests lie with its own bytes: in the headers
    of its files, or in a file of their own. `numbers` are those of the leaves of the tree."""
    with gc_paused():
        whole = Receipt(weight=weight(files))
        if not fmt.keeps_records:
            return whole
        if fmt.header_needs_digests:
            whole.files = data_files(files)
            whole.holdings = holdings_of([[file] for file in files], numbers)
            whole.is_torn = any(extent.region for file in files for extent in file.extents)
            return whole
        whole.is_torn = True
        file = fmt.process_file(files, sha256)
        whole.holdings = holdings_of([files] if file else [], numbers)
        if file:
            upload.put([(file.name, file.header)])
            upload.sync()
            whole.files = data_files([file])
        return whole


def recorded_tree(tree: TreeEntry, receipt: Receipt) -> TreeEntry:
    """Return the tree that one process has written, as the manifest has it."""
    with gc_paused():
        leaves = encode_leaves(receipt.leaves)
    return msgspec.structs.replace(tree, files=tuple(receipt.files), raw_leaves=leaves)


def recorded_tree_of_several(tree: TreeEntry, receipt: Receipt, leaves: Mapping[str, LeafEntry]) -> TreeEntry:
    """Return the tree that several processes have written; refuse one that does not have every element once."""
    weights = (weight_of(name, math.prod(entry.shape)) for name, entry in leaves.items())
    if receipt.weight != sum(weights) % 2**64:
        raise ProcessError(
            "the processes have not written every element of every leaf once. Do they all see the same arrays on the "
            "same devices? A leaf may not be in one process's memory for one and on devices for another"
        )
    parts: Any = "torn" if receipt.is_torn else "whole"
    return msgspec.structs.replace(
        tree,
        files=tuple(receipt.files),
        parts=parts,
        holdings=receipt.holdings or msgspec.UNSET,
        raw_leaves=encode_leaves(dict(leaves)),
    )
