"""Copy a directory from a store to this machine, for libraries that read files by their paths.

Tests: tests/engine/stores/test_bucket.py.
"""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from eformer._engine.record.names import is_inside
from eformer._engine.record.text import count, size
from eformer._engine.tasks.pool import run_all
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from eformer._engine.stores.base import Files, Store

logger = logging.getLogger("eformer")

_MOST_DEPTH = 64
_MUCH = 2**30  # bytes; larger copies are logged as a warning


class LocalCopy:
    """A directory for temporary files, which is removed once no reference to this object is left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


def copy_of(store: Store, below: str = "") -> LocalCopy:
    """Copy the files of a directory of the store, several at a time. They are removed with the returned object.

    Raise OSError if the disk has too little room for them.
    """
    sizes = store.sizes(below, _MOST_DEPTH)
    url = store.path_to(below) if below else store.url
    if not sizes:
        raise FileNotFoundError(f"no files are in {url}")
    total, where = sum(sizes.values()), tempfile.gettempdir()
    if total > (free := shutil.disk_usage(where).free):
        raise OSError(
            errno.ENOSPC,
            f"{url} has to be copied to this machine to be read; that needs {size(total)}, and {size(free)} are free. "
            "Set TMPDIR to a directory with more room",
            where,
        )
    copy = LocalCopy(Path(tempfile.mkdtemp(prefix="eformer-copy-")))
    say = logger.warning if total >= _MUCH else logger.info
    say("%s is copied to %s to be read: %s, %s", url, copy.path, count(len(sizes), "file"), size(total))
    files = store.open([f"{below}/{name}" if below else name for name in sizes])
    try:
        run_all(_tasks(store, files, sizes, copy.path), store.read_threads)
    finally:
        files.close()
    return copy


def _tasks(store: Store, files: Files, sizes: dict[str, int], place: Path) -> Iterator[Callable[[], None]]:
    for number, (name, nbytes) in enumerate(sizes.items()):
        if not is_inside(name):
            raise FormatError(f"{name[:200]!r} is not the name of a file in {store.url}")
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        for start in range(0, nbytes, store.read_bytes):
            length = min(store.read_bytes, nbytes - start)
            yield partial(_copy, files, number, file, start, length)


def _copy(files: Files, number: int, file: Path, start: int, nbytes: int) -> None:
    memory = memoryview(bytearray(nbytes))
    if files.read_into(number, memory, start) != nbytes:
        raise FileNotFoundError(f"{file.name} was replaced while it was copied")
    with file.open("r+b") as copy:
        copy.seek(start)
        copy.write(memory)
