"""The seam between a place and the formats that can be read there.

A reader looks at a directory or at an open file. It returns a `Found` if the checkpoint is of its format, and None if
another reader should look. `find.py` and `others/sniff.py` ask them one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from eformer._engine.stores.local import is_there, on_disk

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

    def has(self, name: str) -> bool:
        """Tell whether a name is there. The directory is not listed for it."""
        return self.store.exists(name) if self._names is None else name in self._names

    @property
    def is_there(self) -> bool:
        """Whether the place is a directory: one that exists, or a prefix that objects have."""
        if on_disk(self.store) is not None:
            return is_there(self.store)
        try:
            return bool(self.names)
        except FileNotFoundError:
            return False


class DirectoryReader(Protocol):
    """Reads the checkpoints of one format in directories."""

    def __call__(self, place: Place) -> Found | None: ...


class FileReader(Protocol):
    """Reads the checkpoints of one format that are one file, of which `first` are the first bytes."""

    def __call__(self, file: SingleFile, first: bytes, /) -> Found | None: ...
