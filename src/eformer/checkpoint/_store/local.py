"""Files of this machine, written whole and durably or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# What a directory that cannot be synced answers: some network file systems, and Windows.
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM}


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path` when the block ends well, and goes away when it does not.

    Afterwards the bytes and the name are on stable storage. Parents are created. A link stays a link: what it
    points to is replaced. Permissions of a file that was there are kept.
    """
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file():  # a directory, a pipe, /dev/null: not ours to replace
        raise OSError(errno.EINVAL, "Not a regular file", str(final))
    _make_directories(final.parent)
    scratch = final.with_name(f".eformer-{secrets.token_hex(8)}.tmp")
    try:
        with scratch.open("xb") as file:
            if final.exists():
                scratch.chmod(final.stat().st_mode & 0o7777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(final)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    sync_directory(final.parent)


def _make_directories(path: Path) -> None:
    """Like mkdir -p, and durable: a new directory is only there after a crash if its parent was synced."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in _NO_DIRECTORY_SYNC:
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)
