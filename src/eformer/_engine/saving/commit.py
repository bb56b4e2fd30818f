"""Commit a save: files under their final names, then the index, then remove what it does not name any more.

Every step leaves the place with one whole checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from eformer._engine.record.signature import signature_name
from eformer._engine.saving.record import recorded_tree, recorded_tree_of_several
from eformer._engine.tasks import interrupts

if TYPE_CHECKING:
    from eformer._engine.formats.write_format import Index
    from eformer._engine.record.manifest import Receipt, TreeEntry
    from eformer._engine.saving.agreement import Team
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
    upload.commit(_Commit(team, tree, upload))
    upload.close()


class _Commit(Struct, frozen=True):
    """The commit of a tree."""

    team: Team
    tree: TreeEntry
    upload: Upload
    sweeps: bool = True

    @property
    def name(self) -> str:
        return self.team.format.index_name

    @property
    def save_id(self) -> str:
        return self.tree.save_id

    def read(self, store: Store) -> Index:
        return self.team.format.read_index(store)

    def change(self, index: Index, store: Store) -> Change:
        interrupts.check()
        if self.team.save.fence:  # not before it is known that the save is not committed yet
            self.team.save.fence()
        change = index.commit(self.tree, store, self.upload)
        is_replaced = change.index is None or index.version is not None

        def tidy(store: Store, upload: Upload) -> None:
            if change.tidy:
                change.tidy(store, upload)
            if is_replaced:
                _remove_signature(self.team.save.file, store, upload)

        return msgspec.structs.replace(change, tidy=tidy)

    def is_done(self) -> bool:
        return self.team.is_committed()


def _remove_signature(file: str, place: Store, upload: Upload) -> None:
    """Remove the signature of the checkpoint that was replaced. Until then it says that this one was altered."""
    name = signature_name(file)
    if place.is_file(name):
        upload.remove([name])
