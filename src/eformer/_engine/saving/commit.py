"""Begin the record of a save, and decide its commit, which the upload carries out. On a disk:

    lock the directory; read the index; remove the scratch directories of dead saves
    `_change`: call the fence, choose final names, make the next index
    rename the new files, sync the directory, replace the index            readers find the save from here on
    remove replaced directories, then `tidy`: files that the index no longer names, and the old signature

A new directory is made complete in the scratch directory, and its rename is the commit. A single file has no index: its
rename is the commit. A bucket has no lock: the index is read, changed and replaced on the condition that it has not
changed, again and again.
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
    from eformer._engine.formats.write_format import FormatIndex
    from eformer._engine.saving.save import Save
    from eformer._engine.stores.base import Change, Store, Upload


def new_entry(
    written_by: str,
    structure: Any,
    raw_metadata: dict[str, Any],
    raw_values: dict[str, Any],
    origin: dict[str, Any] | None = None,
) -> TreeEntry:
    """Begin the record of a save, with a new save id."""
    return TreeEntry(
        save_id=secrets.token_hex(8),
        saved_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        written_by=written_by,
        block=PIECE_BYTES,
        files=(),
        raw_origin=origin or msgspec.UNSET,
        raw_metadata=raw_metadata,
        raw_values=raw_values,
        structure=msgspec.Raw(msgspec.json.encode(structure)),
    )


def commit_of(save: Save, entry: TreeEntry) -> Commit:
    """Describe the commit of a tree: functions that the upload calls, and the name of the index."""
    fmt = save.format
    return Commit(
        fmt.read_index,
        partial(_change, save, entry),
        fmt.index_name,
        entry.save_id,
        sweeps=True,
        may_be_committed=partial(save_may_be_committed, save),
    )


def _change(save: Save, entry: TreeEntry, index: FormatIndex, store: Store) -> Change:
    interrupts.go_on_to_the_end()  # from here on `Pending.cancel` returns False
    # Here, not earlier: on a disk this runs under the lock, in a bucket again for each new index. A check before it
    # could be outdated, and a job that another job has replaced must not commit.
    if save.fence:
        save.fence()
    change = index.change_for(entry, store, save.upload)
    if change.index is not None and index.version is None:
        return change  # the first index here: nothing is replaced, and no signature can be out of date

    def tidy(store: Store, upload: Upload) -> None:
        if change.tidy:
            change.tidy(store, upload)
        _remove_signature(save.file, store, upload)

    return msgspec.structs.replace(change, tidy=tidy)


def save_may_be_committed(save: Save) -> bool:
    """Tell, after an error, whether readers find the save; True if the index cannot be read.

    The files of a save that may be committed must stay.
    """
    with clearing_up():  # the deadline of the save may be over
        return save.format.may_be_committed(save.store, save.entry.save_id)


def _remove_signature(file: str, place: Store, upload: Upload) -> None:
    """Remove the signature of the replaced checkpoint: by it, the new checkpoint would look altered."""
    name = signature_name(file)
    if place.is_file(name):
        upload.remove([name])
