"""The commit of a save on this machine: its new files are moved into place, and the index is swapped under a lock.

Before whole directories are moved, a journal in the scratch directory says which, so that whoever comes later can
finish or undo the save.
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
from eformer._engine.stores.journal import DATA, JOURNAL, carry_out, make_journal, sweep
from eformer._engine.stores.new_files import NewFiles, sync_file, write_new
from eformer._engine.stores.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from pathlib import Path

    from eformer._engine.stores.base import Change, Commit, Version
    from eformer._engine.stores.journal import Journal


class LocalUpload(NewFiles):
    """New files in a scratch directory. The process that made it commits them."""

    def __init__(self, directory: Path, token: str = "", *, is_first: bool = False) -> None:
        self._scratch = Scratch(directory, token, is_first=is_first)
        super().__init__(self._scratch.data, self._scratch.place)
        self.token, self._directory = self._scratch.token, directory
        self._published: list[str] = []
        self._journal: Journal | None = None  # of directories that are moved

    def announce(self) -> None:
        self._scratch.around.sync()

    def is_published(self, name: str, final: str) -> bool:
        new, there = self.data.status(name), self.place.status(final)
        return new is not None and there is not None and os.path.samestat(new, there)

    # ------------------------------------------------------------------------------------- publish

    def commit(self, commit: Commit) -> None:
        from eformer._engine.stores.local import LocalStore  # late: a store makes uploads

        with self._scratch.exclusive():
            self.place = self._scratch.place
            store = LocalStore(self._scratch.place_path)
            index = commit.read(store)
            if commit.sweeps:
                self._sweep(index.save_ids)
            try:
                change = commit.change(index, store)
                self._publish(change, commit.save_id)
                if change.index:
                    self.swap(commit.name, change.index(UNSET), index.version)
            except BaseException:
                if not commit.is_done():  # a sync may fail after the index is in place
                    self._withdraw()
                raise
            tidy_up(change, store, self, self._finish)

    def _sweep(self, committed: Container[str] | None) -> None:
        """Remove the remains of writers that died, while the index names the saves in `committed`; None if that is not
        known."""
        if not self._scratch.is_new:
            sweep(self.place, committed)
        with suppress(OSError), Directory.open(self._directory.parent) as around:  # saves that made the place
            sweep(around)

    def _publish(self, change: Change, save_id: str) -> None:
        """Give new files and directories their final names."""
        moves, replaced = change.moves, change.replaced
        directories = {
            name: final for name, final in moves.items() if not name or self.data.has_directory(name)
        }
        if (directories or replaced) and not self._scratch.is_new:  # nobody sees what is in a new place
            self._write_journal(
                make_journal(save_id, self.place, self.data, directories, replaced, change.unmarked)
            )
        if "" in moves:
            self.data.sync()
        for name, final in moves.items():
            if name in directories:
                source = self.data if name else self._scratch.folder
                source.rename(name or DATA, self.place, final)
            elif not self.is_published(name, final):
                self._move_file(name, final)
        if moves:
            self.place.sync()

    def _write_journal(self, journal: Journal) -> None:
        folder = self._scratch.folder
        write_new(folder, JOURNAL, msgspec.json.encode(journal))
        sync_file(folder, JOURNAL)
        folder.sync()
        self.place.sync()  # the journal is only there if the directory that it is in is
        self._journal = journal

    def _move_file(self, name: str, final: str) -> None:
        mode, status = replaceable_mode(self.place, final), self.data.status(name)
        if mode is not None and status and status.st_nlink == 1:  # else another checkpoint has the file, too
            set_mode(self.data, name, mode)
        if self.place.status(final) is None:  # what is replaced is not ours to withdraw
            self._published.append(final)
        self.data.rename(name, self.place, final)

    def swap(self, name: str, data: bytes, expected: Version | None) -> None:
        with replacing_in(self.place, name) as file:  # the lock makes sure that it is the one expected
            file.write(data)

    def _withdraw(self) -> None:
        """Remove what was published: the save has failed before its commit."""
        self.remove(self._published)
        if self._journal:
            carry_out(self.place, self._journal, None)
        self._journal = None

    def _finish(self, change: Change) -> None:
        """Remove what was replaced: the save is committed."""
        if self._journal:
            carry_out(self.place, self._journal, {self._journal.save_id})
        self._journal = None

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self.place.unlink(name)

    def close(self) -> None:
        try:
            if not self._journal:  # else the next save needs it
                self._scratch.remove()
        finally:
            self.abandon()

    def abandon(self) -> None:
        super().abandon()
        self._scratch.abandon()
