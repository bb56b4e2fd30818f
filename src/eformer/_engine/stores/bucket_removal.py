"""Remove checkpoints from a bucket, and the remains of dead saves in directories without a checkpoint.

A removal first replaces the index by an index without trees, on the condition that the old index has not changed. From
then on readers find no checkpoint, and the new index bars every save that would name removed objects. Only then the
objects are removed. If the process dies in between, the index without trees stays, and the next removal or save
continues from it.

The index itself is removed last. A deletion cannot have a condition, so a lease keeps saves from committing meanwhile.

Tests: tests/faults/test_bucket_removal.py, tests/engine/stores/test_bucket.py.
"""

from __future__ import annotations

import datetime as dt
import itertools
import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from eformer._engine.record.indexes import INDEX, INDEXES, MANIFEST, MOST_EMPTY, empty_index, manifest_in
from eformer._engine.record.manifest import CommitLog
from eformer._engine.stores import leases
from eformer._engine.stores.base import SwapError
from eformer._engine.stores.leases import LEASES, ids_in, is_late, kind_of, leased, name_of, next_log

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from eformer._engine.record.manifest import Manifest
    from eformer._engine.stores.base import Identity, Version
    from eformer._engine.stores.leases import Renewed
    from eformer._engine.stores.objects import Object, Objects

# Endings that `set_aside_in_bucket` gives to marks.
ASIDE = re.compile(r"[^/]+\.(?:damaged|old|rewound)(?:-\d+)?")
# Beginning of the name of the object that lists the data of a checkpoint that was put aside.
_CONTENTS = "contents"
_MOST_AGE = 300.0  # seconds since the lease was put; it is renewed every minute


def identity_in_bucket(objects: Objects, path: str) -> Identity:
    """Return the versions of the indexes of a directory, or the version of a file."""
    found = {name: one.version for name in INDEXES if (one := objects.find(f"{path}/{name}"))}
    if not found and (file := objects.find(path)):
        found = {"": file.version}
    return tuple(sorted(found.items()))


def remove_from_bucket(objects: Objects, path: str, identity: Identity | None) -> bool:
    """Remove all objects of a checkpoint. Return False if a reader holds it, or a save to it is under way."""

    def require_same(versions: Mapping[str, Version | None]) -> None:
        if identity not in (None, tuple(sorted(versions.items()))):
            raise ValueError(
                f"{objects.path_to(path)} has changed since its removal was planned, and was not removed"
            )

    if (file := objects.find(path)) is not None:
        require_same({"": file.version})
        objects.delete([path])
        return True
    with _claimed(objects, path) as claim:
        require_same({name: one.version for name, one in claim.there.items()})
        seen = claim.look()
        if not seen.data:
            raise FileNotFoundError(f"{objects.path_to(path)} holds no checkpoint")
        return not seen.is_held() and claim.remove_all(seen)


def sweep_bucket(objects: Objects, path: str) -> None:
    """Remove the objects of dead saves and the remains of dead removals. Leave a checkpoint alone: its next save does
    this."""
    now = dt.datetime.now(dt.UTC)
    if objects.is_unconditional:  # no save can be barred
        return
    if not _is_worth_a_look(Seen.among(path, now, objects.list(f"{path}/"))):
        return
    with _claimed(objects, path) as claim:
        seen = claim.look()
        if not seen.is_held() and not any(one.is_checkpoint for one in claim.there.values()):
            claim.sweep(seen)


def set_aside_in_bucket(objects: Objects, path: str, why: str, marks: Sequence[str]) -> str:
    """Give the marks of a checkpoint other names; its data stays where it is. Return the ending of these names.

    An object beside the marks lists the data, because a damaged mark may not name them, and the removal of a later
    checkpoint here has to leave them. A deletion has no condition, so saves are kept from committing meanwhile. If a
    save replaces a mark all the same, that mark stays.
    """
    with _claimed(objects, path) as claim:
        keys = [f"{path}/{mark}" for mark in marks]
        ending = _free_ending(objects, keys, why)
        directories, files = objects.children(path)
        names = [*directories, *(file.key.removeprefix(f"{path}/") for file in files)]
        objects.put(f"{path}/{_CONTENTS}.{ending}", "\n".join(names).encode())
        for key in keys:
            if found := objects.read_if_there(key):
                objects.put(f"{key}.{ending}", found[0])
                now = objects.find(key)
                if now is not None and now.version == found[1]:
                    claim.delete_unconditionally([key])
    return ending


def _free_ending(objects: Objects, keys: Sequence[str], why: str) -> str:
    """Return an ending with which none of these keys exists yet: an earlier step of this name may have been put
    aside."""
    endings = itertools.chain([why], (f"{why}-{number}" for number in itertools.count(2)))
    return next(one for one in endings if all(objects.find(f"{key}.{one}") is None for key in keys))


# ------------------------------------------------------------------------------------------ what is there


class Seen(Struct, frozen=True):
    """The objects of a directory: leases, and data by their paths. `now` is the time of the listing, or a little
    before."""

    now: dt.datetime
    leases: list[Object]
    data: dict[str, Object]

    @classmethod
    def among(cls, path: str, now: dt.datetime, entries: Iterable[Object]) -> Seen:
        found = {entry.key.removeprefix(f"{path}/"): entry for entry in entries}
        leases = [one for inner, one in found.items() if _top(inner) == LEASES]
        return cls(now, leases, {inner: one for inner, one in found.items() if _top(inner) != LEASES})

    def is_held(self) -> bool:
        """Tell whether a reader holds the checkpoint, or a save is under way."""
        return any(kind_of(one) in ("hold", "save") and not is_late(one, self.now) for one in self.leases)

    def expired(self) -> dict[str, Object]:
        """Return the leases of dead saves, by save."""
        return {name_of(one): one for one in self.leases if kind_of(one) == "save" and is_late(one, self.now)}

    def is_old(self, entry: Object | None) -> bool:
        """Tell whether an object is so old that every save that is older is dead."""
        return entry is not None and entry.modified < self.now - leases.DEAD_FOR

    def is_useless(self, lease: Object) -> bool:
        """Tell whether a lease no longer protects anything."""
        if kind_of(lease) == "save":
            return self.is_old(lease) and not self.of({name_of(lease)})
        return is_late(lease, self.now)

    def wanted_by(self, saves: Iterable[str]) -> list[str]:
        """Name the indexes by which these saves would commit."""
        return [name for name in INDEXES if not self.saves(name).isdisjoint(saves)]

    def saves(self, *indexes: str) -> set[str]:
        """Return the saves whose objects have the layout of one of these indexes: a directory for each save, or not."""
        return ids_in(_top(inner) for inner in self.data if (INDEX if "/" in inner else MANIFEST) in indexes)

    def of(self, saves: Iterable[str]) -> list[Object]:
        """List the objects of these saves."""
        wanted = set(saves)
        return [one for inner, one in self.data.items() if ids_in({_top(inner)}) & wanted]

    def doomed(self, name: str, dead: Iterable[str], *, is_gone: bool) -> list[Object]:
        """List the objects of dead saves. For a removed checkpoint, include objects without a save, except newer
        objects, which another program has put there."""
        if not is_gone:
            return self.of(dead)
        if (index := self.data.get(name)) is None:  # another removal has finished
            return []
        others = [one for inner, one in self.data.items() if inner != name and not ids_in({_top(inner)})]
        return self.of(dead) + [one for one in others if one.modified <= index.modified]


def _top(inner: str) -> str:
    return inner.partition("/")[0]


def _is_worth_a_look(seen: Seen) -> bool:
    """Guess, by the clock of this machine, whether a sweep would find anything. The sweep itself uses the server's
    clock."""
    indexes = [seen.data[name] for name in INDEXES if name in seen.data]
    is_more = len(seen.data) > 1 or any(is_late(one, seen.now) for one in seen.leases)
    has_remains = bool(seen.of(seen.expired())) or (bool(indexes) and is_more)
    return not seen.is_held() and (any(map(seen.is_old, [*indexes, *seen.leases])) or has_remains)


class _There(Struct, frozen=True):
    """An index as it was read. Without a version, no index exists."""

    data: bytes = b""
    version: Version | None = None
    manifest: Manifest | None = None

    @property
    def is_checkpoint(self) -> bool:
        """Tell whether it names trees. An unreadable index counts, because it may."""
        return self.version is not None and not (self.manifest and self.manifest.is_empty)

    @property
    def log(self) -> CommitLog:
        return (self.manifest and self.manifest.log) or CommitLog()


# --------------------------------------------------------------------------------------------- removals


@contextmanager
def _claimed(objects: Objects, path: str) -> Iterator[_Claim]:
    """Keep saves from committing until the end of the block."""
    leases.require_conditions(objects, path)
    with leased(objects, path, "removal") as lease:
        yield _Claim(objects, path, lease)


class _Claim:
    """The right to remove the index of a directory. It holds for a few minutes, and other removals may have it, too.

    there   the indexes, which are read before anything is listed: a save that commits later changes their versions
    """

    def __init__(self, objects: Objects, path: str, lease: Renewed) -> None:
        self._objects, self._path, self._lease = objects, path, lease
        self.there = {name: one for name in INDEXES if (one := self._read(name)).version is not None}
        self._emptied: dict[str, tuple[bytes, _There]] = {}  # by this removal: the new index, and the old one

    def look(self) -> Seen:
        """List the objects, without checkpoints that were put aside, which are not part of the checkpoint to remove."""
        now = self._objects.head(self._lease.key).modified
        entries = self._objects.list(f"{self._path}/")
        seen = Seen.among(self._path, now, (one for one in entries if one.key != self._lease.key))
        marks = [one.key for inner, one in seen.data.items() if ASIDE.fullmatch(inner)]
        texts = [found[0] for mark in marks if (found := self._objects.read_if_there(mark))]
        aside = seen.of(ids_in(text.decode(errors="replace") for text in texts))
        left_out = {*marks, *(one.key for one in aside)}
        data = {inner: one for inner, one in seen.data.items() if one.key not in left_out}
        return Seen(seen.now, seen.leases, data)

    def _read(self, name: str) -> _There:
        found = self._objects.read_if_there(self._key(name))
        return _There(*found, manifest_in(name, found[0])) if found else _There()

    def _key(self, name: str) -> str:
        return f"{self._path}/{name}"

    def delete_unconditionally(self, keys: Iterable[str]) -> None:
        """Delete objects that a save may replace, unless the lease is so old that saves may no longer wait for this
        claim."""
        if self._lease.age < _MOST_AGE:
            self._objects.delete(keys)

    # ------------------------------------------------------------------------------- a whole checkpoint

    def remove_all(self, seen: Seen) -> bool:
        """Remove all objects in `seen`, then the index. The index stays if dead saves exist, because one may still wake
        up."""
        zombies = set(seen.expired())
        # A checkpoint of another program has no index. It gets the index that readers look at first.
        names = {*self.there, *seen.wanted_by(zombies)} or {INDEX}
        for name in names:
            if not self._empty(name, seen, seen.saves(*INDEXES) | zombies, gone=True):
                break
            zombies |= leases.still_dead(self._emptied[name][1].log.dead, seen.now).keys()
        if len(self._emptied) < len(names) or self._is_held_now(seen):
            self._restore()
            return False
        self._objects.delete(one.key for inner, one in seen.data.items() if inner not in names)
        self._objects.delete(
            one.key for one in seen.leases if is_late(one, seen.now) or kind_of(one) == "replaced"
        )
        if not zombies:
            self.delete_unconditionally(map(self._key, names))
        return True

    def _is_held_now(self, seen: Seen) -> bool:
        """Tell whether a reader has put its lease since the first listing."""
        return Seen(seen.now, list(self._objects.list(self._key(f"{LEASES}/"))), {}).is_held()

    def _empty(self, name: str, seen: Seen, saves: Iterable[str], *, gone: bool = False) -> bool:
        """Replace an index by an index without trees that bars saves. Return False if a save has committed meanwhile,
        or if the index cannot bar so many saves."""
        before = self.there.get(name, _There())
        while True:
            log = before.log
            data = empty_index(name, next_log(log, saves, seen.now, done=log.done, gone=gone or log.gone))
            if len(data) > MOST_EMPTY:
                return False
            with suppress(SwapError):
                self._objects.swap(self._key(name), data, before.version)
                self._emptied[name] = data, before
                return True
            before = self._read(name)
            if before.is_checkpoint:
                return False

    def _restore(self) -> None:
        """Put indexes back that only this removal has replaced. After another removal the objects that they name may be
        gone."""
        for name, (data, before) in self._emptied.items():
            now = self._read(name)
            if now.data == data and before.is_checkpoint:
                with suppress(SwapError):
                    self._objects.swap(self._key(name), before.data, now.version)

    # --------------------------------------------------------------------------------- what dead saves left

    def sweep(self, seen: Seen) -> None:
        """Bar dead saves, remove their objects, and continue dead removals. Remove nothing before the index is one that
        this sweep has put: until then another removal may still put the old index back."""
        expired = seen.expired()
        for name in [*self.there] or sorted(seen.wanted_by(expired))[:1]:
            log = self.there.get(name, _There()).log
            dead = {*log.dead, *(seen.saves(name) & expired.keys())}
            doomed = seen.doomed(name, dead, is_gone=log.gone)
            if doomed and not self._empty(name, seen, dead):
                return
            self._objects.delete(one.key for one in doomed)
            self._objects.delete(one.key for save_id, one in expired.items() if save_id in dead)
            if not doomed and seen.is_old(seen.data.get(name)):  # every save that it bars is certainly over
                self.delete_unconditionally([self._key(name)])
        self._objects.delete(one.key for one in seen.leases if seen.is_useless(one))
