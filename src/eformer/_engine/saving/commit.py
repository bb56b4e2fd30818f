"""Commit a save: files under their final names, then the index, then remove what it does not name any more.

Every step leaves the place with one whole checkpoint.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.record.signature import signature_name
from eformer._engine.saving.record import recorded_tree, recorded_tree_of_several
from eformer._engine.stores.base import SwapError
from eformer._engine.tasks import interrupts
from eformer.errors import FormatError

if TYPE_CHECKING:
    from eformer._engine.formats.write_format import Commit, Index
    from eformer._engine.record.manifest import Receipt, TreeEntry
    from eformer._engine.saving.agreement import Team
    from eformer._engine.stores.base import Store, Upload

logger = logging.getLogger("eformer")


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
    with upload.exclusive():
        _tidy_up(team, *_commit(team, tree, upload), upload)
    upload.close()


def _commit(team: Team, tree: TreeEntry, upload: Upload) -> tuple[Commit, bool]:
    """Publish the files and swap the index; again, if another save has swapped it first.

    Tell, too, whether something may have been there before.
    """
    store, fmt, planned = upload.place_of(team.save.store), team.format, None
    try:
        while True:
            index = fmt.read_index(store)
            if planned and index.has_committed(
                tree.save_id
            ):  # the answer was lost, and another save has come since
                return planned, True
            planned = _publish(team, tree, upload, index)
            if planned.index is None:
                return planned, True
            with suppress(SwapError):
                upload.swap(fmt.index_name, planned.index, index.version)
                return planned, index.version is not None
    except BaseException:
        if not team.is_committed():  # a sync may fail after the index is in place
            upload.withdraw()
        raise


def _publish(team: Team, tree: TreeEntry, upload: Upload, index: Index) -> Commit:
    """Give the files their final names, and make the index that will name them."""
    interrupts.check()
    if team.save.fence:
        team.save.fence()
    upload.sweep(index.save_ids)
    planned = index.commit(tree, upload.place_of(team.save.store), upload)
    upload.publish(planned.moves, planned.replaced, save_id=tree.save_id, unmarked=planned.unmarked)
    return planned


def _tidy_up(team: Team, done: Commit, is_replaced: bool, upload: Upload) -> None:
    """Remove what is not needed any more. The checkpoint is safe by now: what cannot be removed is left to the next
    save."""
    try:
        upload.finish()
        place = upload.place_of(team.save.store)
        if done.tidy:
            done.tidy(place, upload)
        if is_replaced:
            _remove_signature(team.save.file, place, upload)
    except (OSError, FormatError, SwapError) as error:
        logger.warning("%s is saved, but could not be tidied up: %s", team.save.store.url, error)


def _remove_signature(file: str, place: Store, upload: Upload) -> None:
    """Remove the signature of the checkpoint that was replaced. Until then it says that this one was altered."""
    name = signature_name(file)
    if place.is_file(name):
        upload.remove([name])
