"""Files that are read by number: those of a directory, or the keys of a database in one."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from eformer.checkpoint._store.local import open_inside, read_into, stamp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

# More are opened one by one: a process may have 1024 files open, and most of them are not ours.
_MOST_HELD = 256


class Files(Protocol):
    """What a checkpoint's bytes are read from, by any number of threads."""

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        """Fills `memory` from `offset` on; returns how many bytes there were, less only at the end."""

    def nbytes(self, number: int) -> int: ...

    def hold(self, numbers: Iterable[int]) -> None:
        """Keeps these as they are now, if they are not too many; else raises FileNotFoundError when one is gone."""

    def close(self) -> None: ...


class LocalFiles:
    """Files of a directory, by their names. `stamps` tell those that were looked at from later ones of that name."""

    def __init__(
        self, directory: Path, names: Sequence[str], stamps: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        self.directory, self.names, self.stamps = directory, names, stamps or {}
        self.held: dict[int, int] = {}

    def hold(self, numbers: Iterable[int]) -> None:
        wanted = sorted(set(numbers))
        if len(wanted) > _MOST_HELD:
            return
        try:
            for number in wanted:
                self.held[number] = self._open(number)
        except BaseException:
            self.close()
            raise

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        with self._descriptor(number) as descriptor:
            return read_into(descriptor, memory, offset)

    def nbytes(self, number: int) -> int:
        with self._descriptor(number) as descriptor:
            return os.fstat(descriptor).st_size

    def close(self) -> None:
        while self.held:
            os.close(self.held.popitem()[1])

    @contextmanager
    def _descriptor(self, number: int) -> Iterator[int]:
        held = self.held.get(number)
        if held is not None:
            yield held
            return
        descriptor = self._open(number)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, number: int) -> int:
        name = self.names[number]
        descriptor = open_inside(self.directory, name)
        if name in self.stamps and self.stamps[name] != stamp(descriptor):
            os.close(descriptor)
            raise FileNotFoundError(f"{self.directory / name} was replaced")
        return descriptor
