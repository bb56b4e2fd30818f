"""Commits without a format: the files to publish, the index to swap, and the moment to die."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from eformer._engine.stores.base import Change, NoIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from msgspec import UnsetType

    from eformer._engine.record.manifest import CommitLog, Manifest
    from eformer._engine.stores.base import Replaced, Store, Upload, Version

SAVE = "0123456789abcdef"


class DiedError(BaseException):
    """The process dies here."""


@dataclass(frozen=True)
class _Index:
    version: Version | None
    manifest: Manifest | None
    save_ids: Container[str] | None

    def has_committed(self, save_id: str) -> bool:
        return False


@dataclass
class One:
    """A commit of an upload. `before` and `after` are the manifests of the indexes, `save_ids` the saves that the index
    names, `index` returns the next one."""

    moves: Mapping[str, str] = field(default_factory=dict)
    save_id: str = SAVE
    name: str = "index"
    index: Callable[[CommitLog | UnsetType], bytes] | None = None
    replaced: Sequence[Replaced] = ()
    before: Manifest | None = None
    after: Manifest | None = None
    save_ids: Container[str] | None = ()
    sweeps: bool = False
    dies: bool = False
    while_committing: Callable[[Store], object] = lambda _: None

    def read(self, store: Store) -> _Index:
        index = NoIndex()
        with suppress(FileNotFoundError):
            index = NoIndex(store.read(self.name, 0, 0)[1].version)
        return _Index(index.version, self.before, self.save_ids)

    def change(self, index: _Index, store: Store) -> Change:
        def tidy(store: Store, _: Upload) -> None:
            self.while_committing(store)

        return Change(self.moves, self.die if self.dies else self.index, self.after, self.replaced, tidy=tidy)

    def die(self, _: CommitLog | UnsetType) -> bytes:
        raise DiedError

    def may_be_committed(self) -> bool:
        return self.dies  # the dead withdraw nothing


def die_before_the_swap(upload: Upload, moves: Mapping[str, str], **how: object) -> None:
    """Publish the files, and die before the index is swapped. The upload is left as it is."""
    with suppress(DiedError):
        upload.commit(One(moves, dies=True, **how))
