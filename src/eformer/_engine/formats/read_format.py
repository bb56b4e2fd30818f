"""The seam between a place and the formats that can be read there.

A reader looks at a directory or at an open file. It returns a `Found` if the checkpoint is of its format, and None if
another reader should look. `find.py` and `others/sniff.py` ask them one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from eformer._engine.formats.found import Found
    from eformer._engine.formats.others.single_file import SingleFile
    from eformer._engine.stores.base import Store


class Place:
    """A directory that readers look at. It is listed once, when the first of them asks for its `names`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._names: list[str] | None = None

    @property
    def names(self) -> list[str]:
        if self._names is None:
            self._names = list(self.store.kinds())
        return self._names


class DirectoryReader(Protocol):
    """Reads the checkpoints of one format in directories."""

    def __call__(self, place: Place) -> Found | None: ...


class FileReader(Protocol):
    """Reads the checkpoints of one format that are one file, of which `first` are the first bytes."""

    def __call__(self, file: SingleFile, first: bytes, /) -> Found | None: ...
