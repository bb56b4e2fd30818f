"""Tell living saves from dead ones in a bucket, and remove what the dead have left.

A save puts a lease before its first object, renews it, and removes it at its end. A lease that was not renewed for long
is that of a dead save, by the clock of the server alone. Being wrong about that may cost a save, never a checkpoint:
before an object is removed, the index says that its save is dead, and no commit of a dead save succeeds.

What a commit replaces gets a lease, too, so that readers can finish before it is removed by a later save.
"""

from __future__ import annotations

import datetime as dt
import re
import secrets
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from eformer._engine.record.manifest import CommitLog
from eformer._engine.stores.objects import is_thread_of_requests
from eformer._engine.tasks import interrupts
from eformer.errors import SupersededError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from eformer._engine.record.manifest import Manifest
    from eformer._engine.stores.objects import Object, Objects

LEASES = ".eformer-leases"

LEASE = 900.0  # seconds
_HEARTBEAT = 60.0
_MOST_AGE = 24 * 3600.0  # of a save
DEAD_FOR = dt.timedelta(hours=48)  # twice as long as a save may take: then nobody can commit it any more
_DONE = 64

_HOLD = "hold-"  # begins the name of a reader's lease
_REMOVAL = "removal-"  # and that of somebody who removes the index
_PAUSE = 0.5  # seconds

_ID = re.compile(r"\.([0-9a-f]{16})(?![0-9a-f])")


class Renewed:
    """An object that is put again and again, until it is stopped or its process dies."""

    def __init__(self, objects: Objects, key: str) -> None:
        self._objects, self.key = objects, key
        self._is_over, self._renewing = threading.Event(), threading.Lock()
        self._put_at = _now()

    def begin(self) -> None:
        self._put()
        threading.Thread(target=self._keep_renewing, name="eformer-lease", daemon=True).start()

    def renew(self) -> dt.datetime:
        """Return the server's time."""
        self._put()
        return self._objects.head(self.key).modified

    def _keep_renewing(self) -> None:
        while not self._is_over.wait(_HEARTBEAT):
            with self._renewing, suppress(OSError):  # the next one may succeed, or the lease runs out
                if not self._is_over.is_set():
                    self._put()

    def _put(self) -> None:
        now = _now()
        self._objects.put(self.key, b"{}")
        self._put_at = now

    @property
    def age(self) -> float:
        """How many seconds ago it was put, at most."""
        return _age(self._put_at)

    def stop(self) -> None:
        self._is_over.set()

    def end(self) -> None:
        self.stop()
        if is_thread_of_requests():  # it may not wait for anybody; the lease runs out
            return
        with self._renewing:  # a lease that is on its way would arrive after its removal
            self._objects.delete([self.key])


class Leases:
    """The leases of a directory, seen from one save.

    The lease of a save is called by its id. That of what another save replaces is called by both ids: whoever removes
    one has seen it run out, and never removes one that is newer.
    """

    def __init__(self, objects: Objects, path: str, own: str) -> None:
        self._objects, self._path, self._own = objects, path, own
        self._began = _now()
        self._lease = Renewed(objects, self._key(own))
        self._now: dt.datetime | None = None  # of the server
        self._expired: dict[str, list[str]] = {}  # saves, and their leases
        self._replaced: set[str] = set()
        self._dead: set[str] = set()  # saves and names that the next index bars

    def _key(self, name: str) -> str:
        return f"{self._path}/{LEASES}/{name}"

    # ----------------------------------------------------------------------------------------- own

    def begin(self) -> None:
        self._lease.begin()

    def join(self) -> None:
        """Raise FileNotFoundError if the save is not there."""
        self._objects.head(self._lease.key)

    def stop(self) -> None:
        self._lease.stop()

    def end(self) -> None:
        self._lease.end()

    # -------------------------------------------------------------------------------------- commit

    def look(self) -> None:
        """Find the saves all of whose leases have run out."""
        leases: dict[str, list[Object]] = {}
        for entry in self._list():
            if not (is_hold(entry) or is_removal(entry)):
                leases.setdefault(name_of(entry).partition(".")[0], []).append(entry)
        self._expired, self._now = {}, None
        if leases.keys() - {self._own}:
            self._now = self._lease.renew()
            late = self._now - dt.timedelta(seconds=LEASE)
            self._expired = {
                save_id: [entry.key for entry in entries]
                for save_id, entries in leases.items()
                if save_id != self._own and all(entry.modified < late for entry in entries)
            }

    def _list(self) -> list[Object]:
        """List the leases. Whoever removes the index is waited for: the removal has no condition."""
        while True:
            entries = list(self._objects.list(f"{self._path}/{LEASES}/"))
            removals = [entry for entry in entries if is_removal(entry)]
            if not removals:
                return entries
            late = self._lease.renew() - dt.timedelta(seconds=LEASE)
            if all(entry.modified < late for entry in removals):
                return entries
            time.sleep(_PAUSE)
            interrupts.check()

    def log(self, before: Manifest, after: Manifest) -> CommitLog:
        """Return what the next index says of saves: which are done, and what is dead.

        Raise SupersededError if this save is dead, or would name something that is.
        """
        said, was, named = before.log or CommitLog(), set(_names(before)), set(_names(after))
        self._refuse_dead(said, named - was)
        if self._objects.is_unconditional:  # nobody can be barred: only what was replaced may go
            self._expired = {i: leases for i, leases in self._expired.items() if i in said.done}
        self._replaced = ids_in(was - named)
        self._dead = set(self._expired) - ids_in(named)
        if partly := set(self._expired) - self._dead:
            self._dead |= {name for name in self._files() if ids_in({name}) & partly and name not in named}
        dead = {**said.dead, **{name: self._time() for name in self._dead}}
        return CommitLog(secrets.token_hex(8), (self._own, *said.done)[:_DONE], self._still_dead(dead))

    def _refuse_dead(self, said: CommitLog, new: set[str]) -> None:
        """Raise if the index bars what this save would make it name, itself or what it has kept of others; or may have
        barred it so long ago that it does not say so any more."""
        if said.dead.keys() & {self._own, *new, *ids_in(new)} or _age(self._began) > _MOST_AGE:
            raise self.superseded()

    def superseded(self) -> SupersededError:
        return SupersededError(
            f"{self._objects.path_to(self._path)}: this save took so long that another one has removed its files, or "
            "those that it uses again; save again"
        )

    def _files(self) -> set[str]:
        return {found.key.rpartition("/")[2] for found in self._objects.children(self._path)[1]}

    def _time(self) -> str:
        assert self._now
        return self._now.isoformat(timespec="seconds")

    def _still_dead(self, dead: dict[str, str]) -> dict[str, str]:
        return dead if self._now is None else still_dead(dead, self._now)

    def retire(self) -> None:
        """Give what is replaced a lease, from which on it stays for a while."""
        for save_id in self._replaced:
            self._objects.put(self._key(f"{save_id}.{self._own}"), b"{}")

    def finish(self) -> None:
        """Remove what is dead, and then the leases that told so: the index has barred it."""
        if self._expired:
            self._objects.delete(self._keys(self._dead))
            self._objects.delete(key for keys in self._expired.values() for key in keys)

    def remove_own(self) -> None:
        """Remove the objects of this save, which will not be committed."""
        self._objects.delete(self._keys({self._own}))

    def _keys(self, dead: set[str]) -> Iterator[str]:
        """List the objects of these names, and those of these saves: the ids are in their names, or in those of the
        directories that they are in."""
        if not dead:
            return
        directories, objects = self._objects.children(self._path)
        for name in directories:
            if ids_in({name}) & dead:
                yield from (found.key for found in self._objects.list(f"{self._path}/{name}/"))
        for found in objects:
            name = found.key.rpartition("/")[2]
            if name in dead or ids_in({name}) & dead:
                yield found.key


def _names(manifest: Manifest) -> Iterator[str]:
    """List what a manifest names at the top of its directory: the directories of arrays, and files."""
    for tree in manifest.trees.values():
        if tree.root:
            yield tree.root
        else:
            yield from (file.name for file in tree.files)


def ids_in(names: Iterable[str]) -> set[str]:
    return {found for name in names for found in _ID.findall(name)}


def still_dead(dead: dict[str, str], now: dt.datetime) -> dict[str, str]:
    return {name: at for name, at in dead.items() if _is_recent(at, now)}


def _is_recent(at: str, now: dt.datetime) -> bool:
    """Tell whether a save was given up lately. One that was at a time that makes no sense stays barred."""
    try:
        return now - dt.datetime.fromisoformat(at) < DEAD_FOR
    except (ValueError, TypeError):
        return True


def _now() -> tuple[float, float]:
    """Return the time by two clocks: one stands still while the machine sleeps, the other can be set."""
    return time.monotonic(), time.time()


def _age(began: tuple[float, float]) -> float:
    return max(now - then for now, then in zip(_now(), began, strict=True))


# --------------------------------------------------------------------------------------------- holding


@contextmanager
def held(objects: Objects, path: str, url: str) -> Iterator[str]:
    """Keep a checkpoint from being removed."""
    lease = Renewed(objects, f"{path}/{LEASES}/{_HOLD}{secrets.token_hex(8)}")
    lease.begin()
    try:
        yield url
    finally:
        lease.end()


def removing(objects: Objects, path: str) -> Renewed:
    """Return a lease, not yet put, that keeps saves from committing while the index is removed."""
    return Renewed(objects, f"{path}/{LEASES}/{_REMOVAL}{secrets.token_hex(8)}")


def name_of(lease: Object) -> str:
    return lease.key.rpartition("/")[2]


def is_hold(lease: Object) -> bool:
    return name_of(lease).startswith(_HOLD)


def is_removal(lease: Object) -> bool:
    return name_of(lease).startswith(_REMOVAL)


def is_save(lease: Object) -> bool:
    """Tell whether this is the lease of a save, and not of what another one has replaced."""
    return not (is_hold(lease) or is_removal(lease) or "." in name_of(lease))
