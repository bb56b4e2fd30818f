"""Remove arrays that a save has put in place or replaced.

A journal names the arrays, but is not trusted, because any user who can write a journal could name any path. A file is
removed only if it is part of an array or a database with the mark of that save. Arrays without a mark were written by
other programs, or saved to look like theirs; they must be exactly the files that the journal describes. Links are not
followed, other checkpoints are not entered, and all other files stay. By a journal of another user, only files of that
user are removed.

Tests: tests/engine/stores/test_links_journals.py, tests/engine/stores/test_links_indexes.py,
tests/engine/formats/test_zarr.py.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.record.names import is_inside
from eformer._engine.record.zarray import MOST_ZARRAY, ZARRAY, ZArray, parse_zarray
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from eformer._engine.stores.base import Kind
    from eformer._engine.stores.directory import Directory

logger = logging.getLogger("eformer")

DATABASE_MARK = ".eformer"  # the file of a database that names its save

PROCESS_RECORD = re.compile(r"\.eformer-\d+")  # in an array that several processes wrote
_DATABASE_MANIFEST = "manifest.ocdbt"
# A database that several processes wrote has branches. The manifest of a branch is removed when it is joined.
_DATABASE_PART = re.compile(r"manifest\.ocdbt|(process-\d+/)?(d/([0-9a-f]{32})?)?")

# Files at the top of another checkpoint. A directory of leaves has no such files, because its names have no dots.
_OTHERS = {"tensorstore_index.json", "_METADATA", "_CHECKPOINT_METADATA"}
_ELSE = {*_OTHERS, ZARRAY, DATABASE_MARK, _DATABASE_MANIFEST}  # also marks of another array or database

_MOST_MARK = 2**10  # bytes


class Described(msgspec.Struct, frozen=True, array_like=True):
    """The path and the identity of the file that describes an array without a mark."""

    path: str
    inode: int
    modified: int  # the time, in nanoseconds

    @classmethod
    def at(cls, directory: Directory, name: str, path: str) -> Described | None:
        """Describe a file that is, or will be, at `path`. Return None for anything but a regular file."""
        status = directory.status(name)
        if status is None or not stat.S_ISREG(status.st_mode):
            return None
        return cls(path, status.st_ino, status.st_mtime_ns)


class Moved(msgspec.Struct, frozen=True, array_like=True):
    """A directory that a save has put in place or is about to remove, and the mark of the save that wrote its arrays.

    If the arrays have no mark, `described` identifies them.
    """

    name: str
    inode: int
    mark: str
    described: tuple[Described, ...] = ()


def remove_moved(directory: Directory, moved: Moved, user: int | None = None) -> None:
    """Remove the arrays, and the directories that are empty without them. With a `user`, remove only files of that
    user.

    The files that identify the arrays are removed last, so that an interrupted removal can be repeated.
    """
    if not is_inside(moved.name) or "/" in moved.name or not directory.has_directory(moved.name):
        return
    try:
        top = directory.enter(moved.name)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        logger.warning("%s was not removed: it is a mount point", directory.path / moved.name)
        return
    with top:
        if os.fstat(top.descriptor).st_ino != moved.inode:
            return
        _Removal(moved, user).remove(top, moved.name)
    directory.remove_if_empty(moved.name)


class _Removal:
    """The removal of the arrays and databases of one save: arrays with its mark or, without a mark, the described
    arrays."""

    def __init__(self, moved: Moved, user: int | None) -> None:
        self._mark, self._user = moved.mark, user
        self._described = set(moved.described)
        self._paths = sorted(described.path for described in moved.described)

    def remove(self, folder: Directory, path: str, depth: int = 0) -> None:
        """Remove the arrays in and below a directory, and empty directories, which an interrupted removal may have
        left."""
        kinds = folder.kinds()
        if not _OTHERS.isdisjoint(kinds):
            logger.warning("%s was not removed: it is another checkpoint", folder.path)
            return
        if self._remove_here(folder, path, kinds) and self._mark:
            return
        for name, kind in kinds.items():
            inner = f"{path}/{name}"
            if kind == "directory" and self._is_wanted_below(inner) and folder.has_directory(name):
                with folder.enter(name, depth) as below:
                    self.remove(below, inner, depth + 1)
                folder.remove_if_empty(name)

    def _is_wanted_below(self, path: str) -> bool:
        first = bisect_left(self._paths, f"{path}/")
        return bool(self._mark) or any(one.startswith(f"{path}/") for one in self._paths[first : first + 1])

    def _remove_here(self, folder: Directory, path: str, kinds: Mapping[str, Kind]) -> bool:
        """Return whether the directory itself is an array or a database of this save. Remove it if the file
        that describes it is meant."""
        if _mark_of_database(folder, kinds) == self._mark:
            if self._is_meant(folder, path, DATABASE_MARK):
                _remove_database(folder, kinds)
            return True
        if (array := read_array(folder, kinds)) is None or array.eformer != self._mark:
            return False
        if self._is_meant(folder, path, ZARRAY):
            _remove_array(folder, array, kinds)
        return True

    def _is_meant(self, folder: Directory, path: str, name: str) -> bool:
        """Tell whether the file that describes an array belongs to the user, if one is given, and without a mark is
        the described file."""
        status = folder.status(name)
        if self._user is not None and (status is None or status.st_uid != self._user):
            return False
        return bool(self._mark) or Described.at(folder, name, f"{path}/{name}") in self._described


# -------------------------------------------------------------------------------------------- arrays


def read_array(folder: Directory, kinds: Mapping[str, Kind]) -> ZArray | None:
    """Read the description of an array by any program. Return None if the directory is not an array."""
    if kinds.get(ZARRAY) != "file":
        return None
    try:
        return parse_zarray(folder.read(ZARRAY, MOST_ZARRAY)[0], ZARRAY)
    except (FileNotFoundError, FormatError):
        return None


def _remove_array(folder: Directory, array: ZArray, kinds: Mapping[str, Kind]) -> None:
    is_nested = array.dimension_separator == "/"

    def is_part(path: str) -> bool:
        names = path.split("/")
        if not names[-1]:  # a directory of chunks
            return is_nested and names[-2].isdecimal() and len(names) <= len(array.shape)
        is_chunk = array.is_chunk(names if is_nested else path.split("."))
        return is_chunk or PROCESS_RECORD.fullmatch(path) is not None

    _remove_parts(folder, kinds, is_part)
    folder.unlink(ZARRAY)


def _mark_of_database(folder: Directory, kinds: Mapping[str, Kind]) -> str | None:
    if kinds.get(DATABASE_MARK) != "file" or ZARRAY in kinds:
        return None
    try:
        return folder.read(DATABASE_MARK, _MOST_MARK)[0].decode(errors="replace")
    except (FileNotFoundError, FormatError):
        return None


def _remove_database(folder: Directory, kinds: Mapping[str, Kind]) -> None:
    _remove_parts(folder, kinds, lambda path: _DATABASE_PART.fullmatch(path) is not None)
    folder.unlink(DATABASE_MARK)


def _remove_parts(
    folder: Directory, kinds: Mapping[str, Kind], is_part: Callable[[str], bool], outer: str = ""
) -> None:
    """Remove the files of an array or a database, and directories that are empty without them. The path of a directory
    ends with a slash."""
    for name, kind in kinds.items():
        if kind == "file" and is_part(outer + name):
            folder.unlink(name)
        elif kind == "directory" and is_part(inner := f"{outer}{name}/"):
            with folder.enter(name) as below:
                inside = below.kinds()
                if _ELSE.isdisjoint(inside):
                    _remove_parts(below, inside, is_part, inner)
            folder.remove_if_empty(name)
