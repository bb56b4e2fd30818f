"""Remove checkpoints from a bucket, and what dead saves have left where there is no checkpoint.

An index without trees replaces the one that is there, on the condition that it has not changed. From then on nobody
finds a checkpoint, and no save can commit that would name what is removed: the new index bars it. Only then objects are
removed. Whoever dies in between leaves that index, by which the next one goes on.

The index itself is removed last. That request cannot have a condition: a lease keeps saves from committing meanwhile.
"""

from __future__ import annotations

import datetime as dt
import re
import secrets
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from eformer._engine.record.indexes import INDEX, INDEXES, MANIFEST, MOST_EMPTY, empty_index, manifest_in
from eformer._engine.record.manifest import CommitLog
from eformer._engine.stores import leases
from eformer._engine.stores.base import SwapError
from eformer._engine.stores.leases import LEASES, ids_in, is_hold, is_save, name_of, still_dead
from eformer._engine.stores.swaps import read_if_there, swap_index
from eformer._engine.tasks.deadline import clearing_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from eformer._engine.record.manifest import Manifest
    from eformer._engine.stores.base import Identity, Version
    from eformer._engine.stores.leases import Renewed
    from eformer._engine.stores.objects import Object, Objects

ASIDE = re.compile(r"[^/]+\.(?:damaged|old|rewound)(?:-\d+)?")  # as `set_aside` names marks
_CONTENTS = "contents"  # begins the name of the object that lists the data of a checkpoint that was put aside
_MOST_AGE = 300.0  # seconds since the lease was put; it is renewed every minute


def identity_of(objects: Objects, path: str) -> Identity:
    """Return the versions of the indexes of a directory, or the version of a file."""
    versions = {name: objects.find(f"{path}/{name}") for name in INDEXES}
    found = {name: entry.version for name, entry in versions.items() if entry}
    if not found and (file := objects.find(path)):
        found = {"": file.version}
    return tuple(sorted(found.items()))


def remove(objects: Objects, path: str, identity: Identity | None) -> bool:
    """Remove all objects of a checkpoint. Return False if somebody holds it, or a save to it is under way."""
    if (file := objects.find(path)) is not None:
        _require(identity in (None, (("", file.version),)), objects, path)
        objects.delete([path])
        return True
    with _claimed(objects, path) as claim:
        there = claim.indexes_there()
        if identity is not None:
            _require(
                identity == tuple(sorted((name, one.version) for name, one in there.items())), objects, path
            )
        seen = claim.look()
        if not seen.data:
            raise FileNotFoundError(f"{objects.path_to(path)} holds no checkpoint")
        if seen.is_held():
            return False
        return claim.remove_all(seen, there)


def sweep(objects: Objects, path: str) -> None:
    """Remove the objects of dead saves, unless there is a checkpoint, whose next save does that; and what is left of a
    removal that died."""
    now = dt.datetime.now(dt.UTC)
    if objects.is_unconditional:  # nobody can be barred
        return
    if not _is_worth_a_look(Seen(path, now, tuple(objects.list(f"{path}/")))):
        return
    with _claimed(objects, path) as claim:
        there = claim.indexes_there()
        seen = claim.look()
        if not seen.is_held() and all(one.is_empty for one in there.values()):
            claim.sweep(seen, there)


def set_aside(objects: Objects, path: str, why: str, marks: Sequence[str]) -> str:
    """Give the marks of a checkpoint other names; its data stays where it is. Return the ending of these names.

    An object beside the marks lists the data: a damaged mark may not name them, and the removal of a later checkpoint
    here has to leave them. Saves are kept from committing meanwhile, since a deletion has no condition. A mark that one
    of them has replaced all the same stays.
    """
    with _kept_off(objects, path) as lease:
        keys = [f"{path}/{mark}" for mark in marks]
        ending = _free_ending(objects, keys, why)
        directories, files = objects.children(path)
        names = [*directories, *(file.key.removeprefix(f"{path}/") for file in files)]
        objects.put(f"{path}/{_CONTENTS}.{ending}", "\n".join(names).encode())
        for key in keys:
            if (found := read_if_there(objects, key)) is None:
                continue
            objects.put(f"{key}.{ending}", found[0])
            now = objects.find(key)
            if now is not None and now.version == found[1] and lease.age < _MOST_AGE:
                objects.delete([key])
    return ending


def _free_ending(objects: Objects, keys: Sequence[str], why: str) -> str:
    """Return an ending by which no object has one of these keys: another step may have been put aside there before."""
    number, ending = 1, why
    while any(objects.find(f"{key}.{ending}") is not None for key in keys):
        number += 1
        ending = f"{why}-{number}"
    return ending


def _require(is_same: bool, objects: Objects, path: str) -> None:
    if not is_same:
        raise ValueError(
            f"{objects.path_to(path)} has changed since its removal was planned, and was not removed"
        )


def _is_worth_a_look(seen: Seen) -> bool:
    """Tell whether there may be something to sweep, by the clock of this machine, which does not decide anything."""
    names = {f"{seen.path}/{name}" for name in INDEXES}
    has_index = any(one.key in names for one in seen.data)
    is_old = any(seen.is_old(one.key) for one in seen.entries if one.key in names or one in seen.leases)
    is_more = len(seen.data) > 1 or any(map(seen.is_late, seen.leases))
    has_remains = bool(seen.of(seen.expired())) or (has_index and is_more)
    return not seen.is_held() and (is_old or has_remains)


# ------------------------------------------------------------------------------------------ what is there


class Seen(Struct, frozen=True):
    """The objects of a directory, and the time at which they were listed, or a little before."""

    path: str
    now: dt.datetime
    entries: tuple[Object, ...]

    @property
    def leases(self) -> list[Object]:
        return [entry for entry in self.entries if self._top(entry) == LEASES]

    @property
    def data(self) -> list[Object]:
        return [entry for entry in self.entries if self._top(entry) != LEASES]

    def _top(self, entry: Object) -> str:
        return entry.key.removeprefix(f"{self.path}/").partition("/")[0]

    def marks_aside(self) -> list[Object]:
        """Return the marks of checkpoints that were put aside here."""
        return [one for one in self.data if ASIDE.fullmatch(one.key.removeprefix(f"{self.path}/"))]

    def without(self, marks: Iterable[Object], saves: set[str]) -> Seen:
        """Leave out these marks, and the objects of these saves."""
        aside = {one.key for one in (*marks, *self.of(saves))}
        return structs.replace(self, entries=tuple(one for one in self.entries if one.key not in aside))

    def is_late(self, entry: Object) -> bool:
        return entry.modified < self.now - dt.timedelta(seconds=leases.LEASE)

    def is_held(self) -> bool:
        """Tell whether a reader holds the checkpoint, or a save is under way."""
        return any((is_hold(one) or is_save(one)) and not self.is_late(one) for one in self.leases)

    def expired(self) -> dict[str, Object]:
        """Return the leases of dead saves, by save."""
        return {name_of(one): one for one in self.leases if is_save(one) and self.is_late(one)}

    def is_old(self, key: str) -> bool:
        """Tell whether an object is so old that no save is alive that was there before it."""
        return any(one.key == key and one.modified < self.now - leases.DEAD_FOR for one in self.entries)

    def saves_in(self, entry: Object) -> set[str]:
        return ids_in({self._top(entry)})

    def saves(self) -> set[str]:
        """Return all saves that have objects here."""
        return ids_in(map(self._top, self.data))

    def saves_of(self, *, directories: bool) -> set[str]:
        """Return the saves whose objects are in directories of their own, or those whose objects are not."""
        return ids_in(
            self._top(one)
            for one in self.data
            if ("/" in one.key.removeprefix(f"{self.path}/")) is directories
        )

    def of(self, saves: Iterable[str]) -> list[Object]:
        wanted = set(saves)
        return [one for one in self.data if self.saves_in(one) & wanted]


class _There(Struct, frozen=True):
    """An index as it was read."""

    data: bytes
    version: Version
    manifest: Manifest | None

    @property
    def is_empty(self) -> bool:
        return self.manifest is not None and self.manifest.is_empty

    @property
    def log(self) -> CommitLog:
        return (self.manifest.log or CommitLog()) if self.manifest else CommitLog()


class _Emptied(Struct, frozen=True):
    """The index that a removal has put, the version that it has replaced, and what that one said of saves."""

    data: bytes
    replaced: Version | None
    before: CommitLog


# --------------------------------------------------------------------------------------------- removals


@contextmanager
def _claimed(objects: Objects, path: str) -> Iterator[_Claim]:
    """Keep saves from committing, from now to the end."""
    with _kept_off(objects, path) as lease:
        yield _Claim(objects, path, lease)


@contextmanager
def _kept_off(objects: Objects, path: str) -> Iterator[Renewed]:
    """Do the same for somebody who needs no more than the lease."""
    objects.require_conditions(f"{path}/{LEASES}/{secrets.token_hex(8)}")
    lease = leases.removing(objects, path)
    lease.begin()
    try:
        yield lease
    finally:
        with suppress(OSError), clearing_up():  # else it runs out
            lease.end()


class _Claim:
    """The right to remove the index of a directory, which is good for a few minutes, and shared with other removals."""

    def __init__(self, objects: Objects, path: str, lease: Renewed) -> None:
        self._objects, self._path, self._lease = objects, path, lease

    def look(self) -> Seen:
        now = self._objects.head(self._lease.key).modified
        found = self._objects.list(f"{self._path}/")
        seen = Seen(self._path, now, tuple(entry for entry in found if entry.key != self._lease.key))
        return self._without_aside(seen)

    def _without_aside(self, seen: Seen) -> Seen:
        """Leave out checkpoints that were put aside here, which are no part of the one that is to be removed."""
        if not (marks := seen.marks_aside()):
            return seen
        texts = [found[0] for mark in marks if (found := read_if_there(self._objects, mark.key))]
        return seen.without(marks, ids_in(text.decode(errors="replace") for text in texts))

    def indexes_there(self) -> dict[str, _There]:
        names = INDEXES
        return {name: found for name in names if (found := self._read(name))}

    def _read(self, name: str) -> _There | None:
        found = read_if_there(self._objects, self._key(name))
        return _There(*found, manifest_in(name, found[0])) if found else None

    def _key(self, name: str) -> str:
        return f"{self._path}/{name}"

    # ------------------------------------------------------------------------------- a whole checkpoint

    def remove_all(self, seen: Seen, there: dict[str, _There]) -> bool:
        """Remove everything that was seen, and at last the index: if there are no dead saves, who may still wake up."""
        zombies = set(seen.expired())
        emptied: dict[str, _Emptied] = {}
        for name in self._to_empty(seen, there):
            done = self._empty(name, there.get(name), seen, seen.saves() | zombies, gone=True)
            if done is None:
                self._restore(emptied, there)
                return False
            emptied[name] = done
            zombies |= still_dead(done.before.dead, seen.now).keys()
        if self._is_held_now(seen):  # a reader has come before anybody could notice
            self._restore(emptied, there)
            return False
        kept = {self._key(name) for name in emptied}
        self._objects.delete(one.key for one in seen.data if one.key not in kept)
        self._remove_leases(seen)
        if not zombies:
            self._remove_indexes(emptied)
        return True

    def _is_held_now(self, seen: Seen) -> bool:
        entries = tuple(self._objects.list(f"{self._path}/{LEASES}/"))
        return structs.replace(seen, entries=entries).is_held()

    def _to_empty(self, seen: Seen, there: dict[str, _There]) -> set[str]:
        """Name the indexes that are there, and those by which dead saves would commit; at least the one that readers
        look at first: what another program wrote has none of ours."""
        dead = self._wanted_by(seen, set(seen.expired()))
        return {*there, *dead} or {INDEX}

    def _wanted_by(self, seen: Seen, saves: set[str]) -> set[str]:
        kinds = {INDEX: True, MANIFEST: False}
        return {name for name, directories in kinds.items() if seen.saves_of(directories=directories) & saves}

    def _empty(
        self, name: str, before: _There | None, seen: Seen, saves: Iterable[str], *, gone: bool
    ) -> _Emptied | None:
        """Replace an index by one without trees that bars saves. Return None if a save has committed meanwhile, or
        there are too many to bar."""
        while True:
            log = before.log if before else CommitLog()
            at = seen.now.isoformat(timespec="seconds")
            dead = still_dead(log.dead, seen.now) | dict.fromkeys(saves, at)
            barring = CommitLog(secrets.token_hex(8), log.done, dead, gone or log.gone)
            data = empty_index(name, barring)
            if len(data) > MOST_EMPTY:
                return None
            version = before.version if before else None
            try:
                swap_index(self._objects, self._key(name), data, version)
            except SwapError:
                before = self._read(name)
                if before and not before.is_empty:
                    return None
                continue
            return _Emptied(data, version, log)

    def _restore(self, emptied: Mapping[str, _Emptied], there: Mapping[str, _There]) -> None:
        """Put indexes back that this removal has replaced, and nobody else since or before: others may have removed
        what they name."""
        for name, done in emptied.items():
            now, before = self._read(name), there.get(name)
            is_own = before and done.replaced == before.version and now and now.data == done.data
            if before and now and is_own and not before.is_empty:
                with suppress(SwapError):
                    swap_index(self._objects, self._key(name), before.data, now.version)

    def _remove_leases(self, seen: Seen) -> None:
        self._objects.delete(one.key for one in seen.leases if seen.is_late(one) or "." in name_of(one))

    def _remove_indexes(self, names: Iterable[str]) -> None:
        if self._lease.age < _MOST_AGE:  # else saves may not wait for this any more
            self._objects.delete(map(self._key, names))

    # --------------------------------------------------------------------------------- what dead saves left

    def sweep(self, seen: Seen, there: Mapping[str, _There]) -> None:
        """Bar dead saves, remove their objects, and go on with a removal that died. Nothing is removed before the index
        is one of this sweep: until then another removal may still put the old one back."""
        expired = seen.expired()
        for name in [*there] or sorted(self._wanted_by(seen, set(expired)))[:1]:
            before = there.get(name)
            log = before.log if before else CommitLog()
            is_of_directories = name == INDEX
            dead = {*log.dead, *(seen.saves_of(directories=is_of_directories) & expired.keys())}
            doomed = self._doomed(name, seen, dead, is_gone=log.gone)
            if doomed and self._empty(name, before, seen, dead, gone=False) is None:
                return
            self._objects.delete(one.key for one in doomed)
            self._objects.delete(one.key for save_id, one in expired.items() if save_id in dead)
            if not doomed and seen.is_old(self._key(name)):  # nobody can be alive whom it bars
                self._remove_indexes([name])
        self._objects.delete(one.key for one in seen.leases if self._is_useless(one, seen))

    def _doomed(self, name: str, seen: Seen, dead: Iterable[str], *, is_gone: bool) -> list[Object]:
        """List the objects of dead saves; of a checkpoint that was removed, also those that are not of any save, except
        for newer ones, which another program has put there."""
        doomed = seen.of(dead)
        if is_gone:
            at = max((one.modified for one in seen.data if one.key == self._key(name)), default=None)
            if at is None:  # another removal has come to its end
                return []
            others = [one for one in seen.data if not seen.saves_in(one) and one.modified <= at]
            doomed += [one for one in others if one.key != self._key(name)]
        return doomed

    def _is_useless(self, lease: Object, seen: Seen) -> bool:
        if is_save(lease):
            return seen.is_old(lease.key) and not seen.of({name_of(lease)})
        return seen.is_late(lease)
