"""Finish or undo the saves of writers that died, on this machine.

Before an upload moves whole directories, it lists them in a journal in its scratch directory. The lock of that
directory tells a later save whether the writer is alive, and the index tells it whether the dead save was committed.

Tests: tests/engine/stores/test_links_journals.py, tests/engine/stores/test_neighbours.py, tests/faults/test_kills.py.
"""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.record.values import MALFORMED_JSON, json_decoder
from eformer._engine.record.zarray import ZARRAY
from eformer._engine.stores.directory import FILE, Closing, Directory, remove_opened, try_lock
from eformer._engine.stores.durable import SCRATCH
from eformer._engine.stores.removal import Described, Moved, read_array, remove_moved
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from eformer._engine.stores.base import Replaced

logger = logging.getLogger("eformer")

JOURNAL = "journal.json"
DATA = "data"
NEW = "new"
_OF_SCRATCH = {JOURNAL, DATA, NEW}
_MOST_JOURNAL = 2**27  # bytes


class Journal(msgspec.Struct, frozen=True):
    """The directories that a save moves into place, and the directories that it replaces, for a later save that has to
    finish or undo it."""

    save_id: str
    new: tuple[Moved, ...]
    old: tuple[Moved, ...]


def make_journal(
    save_id: str,
    place: Directory,
    data: Directory,
    moves: Mapping[str, str],
    replaced: Sequence[Replaced],
    unmarked: Sequence[str] | None,
) -> Journal:
    """Identify the directories of `data` that are about to be moved, and the directories of `place` that they
    replace."""
    mark = save_id if unmarked is None else ""
    new = tuple(_moved(data, name, final, mark, unmarked or ()) for name, final in moves.items())
    old = tuple(filter(None, (_replaced(place, one) for one in replaced)))
    return Journal(save_id, new, old)


def _moved(data: Directory, name: str, final: str, mark: str, unmarked: Sequence[str]) -> Moved:
    status = data.status(name) if name else os.fstat(data.descriptor)
    assert status is not None
    inner = [path for path in unmarked if not name or path.startswith(f"{name}/")]
    start = f"{final}/" if not name else ""
    described = (_described(data, path, start + path) for path in inner)
    return Moved(final, status.st_ino, mark, tuple(filter(None, described)))


def _replaced(place: Directory, replaced: Replaced) -> Moved | None:
    """Identify a directory that is replaced. In a directory of another program, identify only arrays that match the
    index."""
    try:
        with place.enter(replaced.name) as top:
            inode = os.fstat(top.descriptor).st_ino
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s is replaced, but not removed: %s", place.path / replaced.name, error.strerror)
        return None
    described = (
        _described(place, file := f"{path}/{ZARRAY}", file, shape) for path, shape in replaced.arrays
    )
    return Moved(replaced.name, inode, replaced.save_id, tuple(filter(None, described)))


def _described(
    directory: Directory, path: str, final: str, shape: Sequence[int] | None = None
) -> Described | None:
    """Identify the file that describes an array or a database. Return None if a link leads there, or the array has
    another shape."""
    outer, _, name = path.rpartition("/")
    try:
        with directory.enter(outer) if outer else nullcontext(directory) as folder:
            if shape is not None:
                array = read_array(folder, folder.kinds())
                if array is None or array.shape != tuple(shape):
                    return None
            return Described.at(folder, name, final)
    except OSError:
        return None


# --------------------------------------------------------------------------------------------- sweep


def sweep_dead(place: Directory, committed: Container[str] | None = None, *, but: str = "") -> None:
    """Remove the scratch files and directories of dead writers, except for `but`. Finish the saves in `committed`, and
    undo all other saves.

    Without `committed` no index tells which saves were committed. Then leave scratch directories with a journal.
    """
    with suppress(OSError):  # the directory cannot be listed
        for name, kind in place.kinds().items():
            if not SCRATCH.fullmatch(name) or name == but:
                continue
            if kind == "file":
                _remove_if_dead(place, name)
            elif kind == "directory":
                _sweep(place, name, committed)


def _remove_if_dead(place: Directory, name: str) -> None:
    """Remove a scratch file unless its writer is alive."""
    # An error means that its writer is alive and holds the lock, or has just removed it.
    with suppress(OSError), Closing(os.open(name, FILE, dir_fd=place.descriptor)) as descriptor:
        try_lock(descriptor)
        place.unlink(name)


def _sweep(place: Directory, name: str, committed: Container[str] | None) -> None:
    with suppress(OSError), place.enter(name) as scratch:  # fails if its writer has just removed it
        try_lock(scratch.descriptor)  # raises if the writer is alive
        if committed is None and scratch.status(JOURNAL):
            return
        if not is_scratch(scratch):
            logger.warning(
                "%s was not removed: it is named like the scratch directory of a save, but holds other files",
                scratch.path,
            )
            return
        journal, user = read_journal(scratch)
        settle(place, journal, committed, user)
        remove_opened(place, name, scratch)


def is_scratch(folder: Directory) -> bool:
    """Tell whether a directory has only entries that the scratch directory of a save may have, or links.

    The name alone does not tell. A user who may rename a directory, but not remove its contents, could otherwise let
    the next save remove them.
    """
    return all(kind == "other" or name in _OF_SCRATCH for name, kind in folder.kinds().items())


def read_journal(scratch: Directory) -> tuple[Journal | None, int | None]:
    """Read the journal. Return it, and the number of the user that wrote it; None for a trusted user (this one, or
    root)."""
    try:
        data, user = scratch.read(JOURNAL, _MOST_JOURNAL)
        return json_decoder(Journal).decode(data), None if user in (0, os.geteuid()) else user
    except (FileNotFoundError, FormatError, *MALFORMED_JSON):
        # The writer died before it wrote a journal, so it has moved nothing.
        return None, None


def settle(
    place: Directory,
    journal: Journal | None,
    committed: Container[str] | None,
    user: int | None = None,
) -> None:
    """Remove the replaced directories of a save in `committed`, or the new directories of any other save.

    Replaced directories with a mark are removed in either case, unless the index still names them. Without `committed`,
    remove only the new directories. With a `user`, who wrote the journal, remove only files of that user.
    """
    if journal is None:
        return
    if committed is None:
        doomed = journal.new
    elif journal.save_id in committed:
        doomed = journal.old
    else:
        doomed = (*journal.new, *(moved for moved in journal.old if moved.mark))
    for moved in doomed:
        if committed is None or moved.mark not in committed:  # the index decides, whatever the journal says
            remove_moved(place, moved, user)
