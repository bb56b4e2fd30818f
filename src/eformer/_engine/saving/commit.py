"""The record that a save begins with, and its commit: the index is swapped, and names the tree from then on.

Every step leaves the place with one whole checkpoint.
"""

from __future__ import annotations

import datetime as dt
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.manifest import TreeEntry
from eformer._engine.record.pieces import PIECE_BYTES
from eformer._engine.record.signature import signature_name
from eformer._engine.stores.base import Commit
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.deadline import clearing_up

if TYPE_CHECKING:
    from eformer._engine.formats.write_format import Index
    from eformer._engine.saving.save import Save
    from eformer._engine.stores.base import Change, Store, Upload


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


def commit_of(save: Save, tree: TreeEntry) -> Commit:
    """Return the commit of a tree, as an upload carries it out."""
    fmt = save.format
    return Commit(
        fmt.read_index,
        partial(_change, save, tree),
        fmt.index_name,
        tree.save_id,
        sweeps=True,
        is_done=partial(may_be_committed, save),
    )


def _change(save: Save, tree: TreeEntry, index: Index, store: Store) -> Change:
    interrupts.check()
    if save.fence:  # not before it is known that the save is not committed yet
        save.fence()
    change = index.commit(tree, store, save.upload)
    if change.index is not None and index.version is None:
        return change  # there was no checkpoint

    def tidy(store: Store, upload: Upload) -> None:
        if change.tidy:
            change.tidy(store, upload)
        _remove_signature(save.file, store, upload)

    return msgspec.structs.replace(change, tidy=tidy)


def may_be_committed(save: Save) -> bool:
    """Tell, after an error, whether the index names the save; True if that cannot be known."""
    with clearing_up():
        return save.format.is_committed(save.store, save.tree.save_id)


def _remove_signature(file: str, place: Store, upload: Upload) -> None:
    """Remove the signature of the checkpoint that was replaced. Until then it says that this one was altered."""
    name = signature_name(file)
    if place.is_file(name):
        upload.remove([name])
