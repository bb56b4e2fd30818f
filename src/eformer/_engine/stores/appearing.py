"""Let a new file or directory of this machine appear under its name when it is complete."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from eformer._engine.stores.directory import Directory
from eformer._engine.stores.journal import sweep
from eformer._engine.stores.local_upload import LocalUpload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield a path for a new file or directory, which is at `path` when the block ends well and gone when it does
    not."""
    with Directory.open(path.parent) as place:
        sweep(place)  # remains of others that died
    upload = LocalUpload(path.parent)
    try:
        yield upload.data.own_path / path.name
        upload.data.put(path.name, upload.place, path.name)
        try:
            upload.place.sync()
        except OSError:  # it may not survive a crash, so it is not to be seen
            upload.take_back(path.name)
            raise
    finally:
        upload.close()
