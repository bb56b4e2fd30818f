"""Hold a step of a run, so that it can be read even if it is removed meanwhile. No jax."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from eformer._engine.stores.base import Entry
from eformer._engine.stores.locate import store_at
from eformer.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eformer._engine.stores.base import Store

_MOST_DEPTH = 64  # of directories in a step


@contextmanager
def held(path: str) -> Iterator[str]:
    """Yield a path by which the step at `path` can be read however often the run is pruned meanwhile.

    The files are linked, not copied, into a hidden directory of the run, which is removed at the end. If this process
    dies, the next save there removes it.
    """
    store, name = store_at(path).parent()
    upload = store.begin()
    try:
        for file in _files(store, name, _MOST_DEPTH):
            entry = store.read(file, 0, 0)[1]
            if not upload.link(file, store, Entry(file, entry.nbytes, entry.version)):
                raise NotFoundError(f"{path} cannot be held: {file} cannot be linked")
        place = store.local_path()
        if place is None:
            raise NotFoundError(f"{path} cannot be held: {store.url} has no links")
        yield str(place / upload.token / "data" / name)
    finally:
        upload.close()


def _files(store: Store, below: str, depth: int) -> list[str]:
    """List the files of a directory, and of those in it."""
    found: list[str] = []
    for name, kind in store.kinds(below).items():
        path = f"{below}/{name}"
        if kind == "file":
            found.append(path)
        elif kind == "directory" and depth and not name.startswith("."):
            found += _files(store, path, depth - 1)
    return found
