"""The directory of a conversion that several processes or jobs write in parts, beside its destination.

    .NAME.parts/
        plan              the digest of the conversion, and the number of parts
        lock              held by all writers together, and by the commit alone
        part-7.lock       held by the writer of part 7
        part-7            its receipt, once its bytes are on stable storage
        0/data/           the files of the first tree, to which all parts write

A reader never looks there. The commit links the files into a new directory, which then gets its name; until then a part
can be written again.

Tests: tests/engine/tools/test_parts.py, tests/multihost/test_conversions.py.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from eformer._engine.stores.directory import Directory, try_lock, unlock
from eformer._engine.stores.durable import make_directories, replacing
from eformer._engine.stores.journal import DATA
from eformer._engine.stores.new_files import NewFile, NewFiles
from eformer.errors import ProcessError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_PLAN, _LOCK = "plan", "lock"


class PartsPlan(Struct, frozen=True):
    """The conversion that a directory of parts belongs to, and the number of its parts and trees."""

    digest: str
    parts: int
    trees: int


class Parts:
    """The parts of one new checkpoint at `where`."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.path = where.parent / f".{where.name}.parts"

    # -------------------------------------------------------------------------------------------- plan

    def plan(self) -> PartsPlan | None:
        """Return the plan of the parts that were begun; None without any."""
        try:
            return msgspec.json.decode((self.path / _PLAN).read_bytes(), type=PartsPlan)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise ValueError(f"{self.path / _PLAN} is damaged: {error}; remove {self.path}") from error

    def begin(self, plan: PartsPlan) -> None:
        """Make the directory. Raise ValueError if it belongs to another conversion."""
        if there := self.plan():
            self.require(plan, there)
            return
        for number in range(plan.trees):
            make_directories(self.path / str(number) / DATA)
        (self.path / _LOCK).touch()
        with replacing(self.path / _PLAN) as file:
            file.write(msgspec.json.encode(plan))

    def require(self, plan: PartsPlan, there: PartsPlan) -> None:
        if there == plan:
            return
        state = "belongs to another conversion" if there.digest != plan.digest else f"has {there.parts} parts"
        raise ValueError(
            f"{self.path} {state}, expected {plan.parts} parts of this one: call all parts with the same arguments, or "
            "remove the directory"
        )

    def begin_again(self, plan: PartsPlan) -> None:
        """Make the directory, in place of another conversion that nobody writes to any more."""
        if (there := self.plan()) is not None and there != plan:
            with self.locked(alone=True):
                self.remove()
        self.begin(plan)

    def remove(self) -> None:
        """Remove everything, the plan first: without it, the rest is no part."""
        (self.path / _PLAN).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    # ------------------------------------------------------------------------------------------- locks

    @contextmanager
    def locked(self, *, alone: bool = False) -> Iterator[None]:
        """Hold the lock of all parts, shared or alone. Raise ProcessError if another command holds it."""
        with self._lock(_LOCK, f"the parts of {self.where} are in use by another command", shared=not alone):
            yield

    @contextmanager
    def writing(self, number: int) -> Iterator[None]:
        """Hold the lock of a part. Raise ProcessError if another command writes it."""
        with self._lock(
            f"part-{number}.lock", f"part {number} of {self.where} is being written by another command"
        ):
            yield

    @contextmanager
    def _lock(self, name: str, problem: str, *, shared: bool = False) -> Iterator[None]:
        descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                if shared:
                    _lock_shared(descriptor)
                else:
                    try_lock(descriptor)
            except BlockingIOError as error:
                raise ProcessError(f"{problem}; wait for it, or end it") from error
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise
            yield
            unlock(descriptor)
        finally:
            os.close(descriptor)

    # ---------------------------------------------------------------------------------------- receipts

    def receipt(self, number: int) -> bytes | None:
        """Return the receipt of a part; None if it is not written."""
        try:
            return (self.path / f"part-{number}").read_bytes()
        except FileNotFoundError:
            return None

    def put_receipt(self, number: int, data: bytes) -> None:
        with replacing(self.path / f"part-{number}") as file:
            file.write(data)

    def forget(self, number: int) -> None:
        (self.path / f"part-{number}").unlink(missing_ok=True)

    # ------------------------------------------------------------------------------------------- files

    def upload(self, tree: int) -> PartFiles:
        """Return the files of a tree, to be written by several processes together."""
        return PartFiles(self.path, str(tree))

    def files(self, tree: int) -> Path:
        return self.path / str(tree) / DATA


def _lock_shared(descriptor: int) -> None:
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


class PartFiles(NewFiles):
    """Files to which several processes write, each its ranges."""

    def require_room(self, nbytes: int) -> None:
        """Do nothing: the bytes of a file belong to several parts."""

    def create(self, name: str, nbytes: int) -> NewFile:
        self.file_type = _SharedFile
        return super().create(name, nbytes)

    def put(self, files: Sequence[tuple[str, bytes]]) -> None:
        for name, _ in files:  # of an earlier try
            with suppress(FileNotFoundError):
                (self._directory / self.token / DATA / name).unlink()
        super().put(files)


class _SharedFile(NewFile):
    """A file that several processes open. It has its length from the first one on."""

    def _create(self, folder: Directory, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, flags, 0o666, dir_fd=folder.descriptor)


def written(path: Path, data: Any) -> None:
    """Write bytes at the beginning of a file that exists, and sync them."""
    with path.open("r+b") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
