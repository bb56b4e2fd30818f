"""Let a new file or directory of this machine appear under its name when it is complete."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from eformer._engine.stores.directory import Directory
from eformer._engine.stores.journal import sweep
from eformer._engine.stores.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a path for a new file or directory, which is at `path` when the block ends well and gone when it does
    not."""
    with Directory.open(path.parent) as place:
        sweep(place)  # remains of others that died
    with Scratch(path.parent) as scratch:
        data, place, name = scratch.data, scratch.place, path.name
        yield data.own_path / name
        data.put(name, place, name)
        try:
            place.sync()
        except OSError:  # it may not survive a crash, so it is not to be seen
            if place.has_directory(name):
                place.rename(name, data, name)
            else:
                place.unlink(name)
            raise
