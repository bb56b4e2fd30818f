"""The commit of a save on this machine: its new files are moved into place, and the index is swapped under a lock.

Before whole directories are moved, a journal in the scratch directory lists them. If this process dies, a later save
finishes or undoes the save by it.

Tests: tests/engine/stores/test_local.py, tests/engine/saving/test_held_promises.py, tests/faults/test_kills.py.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from eformer._engine.stores.base import tidy_up
from eformer._engine.stores.directory import Directory, set_mode
from eformer._engine.stores.durable import replaceable_mode, replacing_in
from eformer._engine.stores.journal import DATA, JOURNAL, make_journal, settle, sweep_dead
from eformer._engine.stores.new_files import NewFiles, sync_file, write_new

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from eformer._engine.stores.base import Change, Commit, Version
    from eformer._engine.stores.journal import Journal


class LocalUpload(NewFiles):
    """New files in a scratch directory. The process that made it commits them."""

    def announce(self) -> None:
        self.around.sync()

    def is_published(self, name: str, final: str) -> bool:
        new, there = self.data.status(name), self.place.status(final)
        return new is not None and there is not None and os.path.samestat(new, there)

    # ------------------------------------------------------------------------------------- publish

    def commit(self, commit: Commit) -> None:
        from eformer._engine.stores.local import LocalStore  # late: a store makes uploads

        with self.exclusive():
            store = LocalStore(self.place.where)
            index = commit.read(store)
            if commit.sweeps:
                self._sweep(index.save_ids)
            self._published: list[str] = []
            try:
                change = commit.change(index, store)
                self._publish(change, commit.save_id)
                if change.index:
                    self.swap(commit.name, change.index(UNSET), index.version)
                else:
                    self._forget_journal()
            except BaseException:
                # The sync may fail after the index is in place, so the index decides.
                if not commit.may_be_committed():
                    self._withdraw()
                raise
            tidy_up(change, store, self, self._finish)

    def _sweep(self, committed: Container[str] | None) -> None:
        """Remove the remains of dead writers. The index names the saves in `committed`; None if that is not known."""
        if self.is_new:
            sweep_dead(self.around, but=self.token)
            return
        sweep_dead(self.place, committed, but=self.token)
        # Also remains of saves that died while they were making the place.
        with suppress(OSError), Directory.open(self._directory.parent) as around:
            sweep_dead(around)

    def _publish(self, change: Change, save_id: str) -> None:
        """Give new files and directories their final names."""
        moves, replaced = change.moves, change.replaced
        directories = {name for name in moves if not name or self.data.has_directory(name)}
        # A new place needs no journal: its contents are invisible until the end.
        if (directories or replaced) and not self.is_new:
            moved = {name: moves[name] for name in directories}
            self._write_journal(
                make_journal(save_id, self.place, self.data, moved, replaced, change.unmarked)
            )
        if "" in moves:
            self.data.sync()
        for name, final in moves.items():
            if name not in directories:
                self._move_file(name, final)
            elif name:
                self.data.rename(name, self.place, final)
            else:
                self.top.rename(DATA, self.place, final)
        if moves:
            self.place.sync()

    def _write_journal(self, journal: Journal) -> None:
        write_new(self.top, JOURNAL, msgspec.json.encode(journal))
        sync_file(self.top, JOURNAL)
        self.top.sync()
        self.place.sync()  # the journal survives a crash only if its directory does
        self.journal = journal

    def _forget_journal(self) -> None:
        """Complete a save without an index. With the journal, which no index contradicts, a later save would undo it:
        so a power cut must not bring the journal back."""
        if self.journal:
            self.top.unlink(JOURNAL)
            self.top.sync()

    def _move_file(self, name: str, final: str) -> None:
        """Give a file its final name. A linked file that already has that name stays, because the rename does nothing
        then."""
        mode, status = replaceable_mode(self.place, final), self.data.status(name)
        # A file with more links belongs to another checkpoint, too, and keeps its permissions.
        if mode is not None and status and status.st_nlink == 1:
            set_mode(self.data, name, mode)
        if self.place.status(final) is None:  # a replaced file cannot be put back by removing the new one
            self._published.append(final)
        self.data.rename(name, self.place, final)

    def swap(self, name: str, data: bytes, expected: Version | None) -> None:
        with replacing_in(self.place, name) as file:  # under the lock it has the expected version
            file.write(data)

    def _withdraw(self) -> None:
        """Remove the published files: the save has failed before its commit."""
        self.remove(self._published)
        if self.journal:
            settle(self.place, self.journal, None)
        self.journal = None

    def _finish(self, change: Change) -> None:
        """Remove the replaced files: the save is committed."""
        if self.journal:
            settle(self.place, self.journal, {self.journal.save_id})
        self.journal = None

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.place.unlink(name)
