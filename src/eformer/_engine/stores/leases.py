"""Tell living saves from dead saves in a bucket, and remove the objects of dead saves.

A save puts a lease before its first object, renews it every minute, and removes it at its end. A save is taken for dead
if its lease was not renewed for 15 minutes, by the clock of the server alone. A mistake may cost a save, never a
checkpoint: before an object is removed, the index says that its save is dead, and no commit of a dead save succeeds.

Data that a commit replaces gets a lease, too. A later save removes the data after that lease has run out, so readers
have time to finish.

Tests: tests/engine/stores/test_bucket.py, tests/faults/test_bucket_zombies.py, tests/faults/test_bucket_commits.py.
"""

from __future__ import annotations

import datetime as dt
import re
import secrets
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

from eformer._engine.record.manifest import CommitLog
from eformer._engine.stores.objects import is_thread_of_requests
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.deadline import clearing_up
from eformer.errors import LeaseLostError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from eformer._engine.record.manifest import Manifest
    from eformer._engine.stores.objects import Object, Objects

LEASES = ".eformer-leases"

LEASE = 900.0  # seconds
_HEARTBEAT = 60.0
# Seconds. An older save does not commit, because the index may have dropped it from its list of dead saves.
_MOST_AGE = 24 * 3600.0
DEAD_FOR = dt.timedelta(hours=48)  # twice as long as a save may take; after that it cannot commit
_DONE = 64  # saves that an index lists as committed; a save whose answer was lost looks for itself there

_PAUSE = 0.5  # seconds

_ID = re.compile(r"\.([0-9a-f]{16})(?![0-9a-f])")


class Renewed:
    """A lease: an object that a thread puts every minute, until it is stopped or its process dies."""

    def __init__(self, objects: Objects, key: str) -> None:
        self._objects, self.key = objects, key
        self._is_over, self._renewing = threading.Event(), threading.Lock()
        self._put_at = _now()

    def begin(self) -> None:
        self._put()
        threading.Thread(target=self._keep_renewing, name="eformer-lease", daemon=True).start()

    def renew(self) -> dt.datetime:
        """Put the lease now, and return the server's time."""
        self._put()
        return self._objects.head(self.key).modified

    def _keep_renewing(self) -> None:
        # `_renewing` is held during a put, so that `end` deletes the lease after the last put has arrived.
        while not self._is_over.wait(_HEARTBEAT):
            with self._renewing, suppress(OSError):  # the next try may succeed; else the lease runs out
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
        if is_thread_of_requests():  # it may not wait for a request; the lease runs out
            return
        with self._renewing:  # a renewal that is under way would arrive after the removal
            self._objects.delete([self.key])


class Leases:
    """The leases of a directory, seen from one save. The order of calls is `look`, `log`, `require`, `retire`, and
    `finish` once the index is in place.

    The lease of a save is named `<id>`. Data that a save replaces gets a lease `<old id>.<new id>`. Every lease has a
    name of its own, so a sweep only deletes leases that it has seen expire, never newer ones.
    """

    def __init__(self, objects: Objects, path: str, own: str) -> None:
        self._objects, self._path, self._own = objects, path, own
        self._began = _now()
        self.lease = Renewed(objects, self._key(own))
        self._now: dt.datetime | None = None  # of the server
        self._expired: dict[str, list[str]] = {}  # saves, and their leases
        self._replaced: set[str] = set()
        self._dead: set[str] = set()  # saves and names that the next index bars

    def _key(self, name: str) -> str:
        return f"{self._path}/{LEASES}/{name}"

    def look(self) -> None:
        """Find the expired saves: all leases of each have run out."""
        leases: dict[str, list[Object]] = {}
        for entry in self._list():
            if kind_of(entry) in ("save", "replaced"):
                leases.setdefault(name_of(entry).partition(".")[0], []).append(entry)
        leases.pop(self._own, None)
        # The server's time of the own lease, just put: clocks of other machines are not compared.
        self._now = now = self.lease.renew() if leases else None
        self._expired = {
            save_id: [entry.key for entry in entries]
            for save_id, entries in leases.items()
            if now and all(is_late(entry, now) for entry in entries)
        }

    def _list(self) -> list[Object]:
        """List the leases. Wait for a removal of the index to end or to expire, because its deletion has no condition
        and could hit the next index."""
        while True:
            entries = list(self._objects.list(self._key("")))
            removals = [entry for entry in entries if kind_of(entry) == "removal"]
            now = self.lease.renew() if removals else None
            if now is None or all(is_late(entry, now) for entry in removals):
                return entries
            time.sleep(_PAUSE)
            interrupts.check()

    def log(self, before: Manifest, after: Manifest) -> CommitLog:
        """Return the log for the next index: the saves that are done, and the dead saves and files.

        Raise LeaseLostError if this save is dead, or would name dead files.
        """
        said, was, named = before.log or CommitLog(), before.names(), after.names()
        self._refuse_dead(said, named - was)
        if self._objects.is_unconditional:  # the server cannot bar a save: only replaced data may go
            self._expired = {i: leases for i, leases in self._expired.items() if i in said.done}
        self._replaced = ids_in(was - named)
        # A save whose files the next index names is not barred as a whole, only by its other files, below.
        self._dead = set(self._expired) - ids_in(named)
        if partly := set(self._expired) - self._dead:
            files = map(name_of, self._objects.children(self._path)[1])
            self._dead |= {name for name in files if ids_in({name}) & partly and name not in named}
        return next_log(said, self._dead, self._now, done=(self._own, *said.done)[:_DONE])

    def _refuse_dead(self, said: CommitLog, new: set[str]) -> None:
        """Raise if the index bars this save or a file that it reuses, or may have barred this save so long ago that its
        log has dropped it."""
        if said.dead.keys() & {self._own, *new, *ids_in(new)} or _age(self._began) > _MOST_AGE:
            raise self._lost()

    def require(self, key: str) -> None:
        """Raise if an object is gone that another process or an earlier save has put."""
        if self._objects.find(key) is None:
            raise self._lost()

    def _lost(self) -> LeaseLostError:
        return LeaseLostError(
            f"{self._objects.path_to(self._path)}: this save took so long that another save has removed its files or "
            "files that it reuses; save again"
        )

    def retire(self) -> None:
        """Put leases for the replaced data, which stays until they run out."""
        for save_id in self._replaced:
            self._objects.put(self._key(f"{save_id}.{self._own}"), b"{}")

    def finish(self) -> None:
        """Remove dead objects, which the new index bars, and then the expired leases. In this order a sweep that dies
        in between leaves the leases, by which a later sweep finds the rest."""
        if self._expired:
            self._objects.delete(self._keys(self._dead))
            self._objects.delete(key for keys in self._expired.values() for key in keys)

    def remove_own(self) -> None:
        """Remove the objects of this save, which has failed."""
        self._objects.delete(self._keys({self._own}))

    def _keys(self, dead: set[str]) -> Iterator[str]:
        """List the objects of dead saves and dead names. The id of a save is in the name of an object or of its
        directory."""
        if not dead:
            return
        directories, files = self._objects.children(self._path)
        for name in directories:
            if ids_in({name}) & dead:
                yield from (found.key for found in self._objects.list(f"{self._path}/{name}/"))
        yield from (file.key for file in files if {name_of(file), *ids_in({name_of(file)})} & dead)


# ------------------------------------------------------------------------------------------------ dead


def ids_in(names: Iterable[str]) -> set[str]:
    return {found for name in names for found in _ID.findall(name)}


def next_log(
    said: CommitLog,
    dead: Iterable[str],
    now: dt.datetime | None,
    *,
    done: tuple[str, ...],
    gone: bool = False,
) -> CommitLog:
    """Return the log for the next index. It also bars the `dead`, and drops saves that were barred so long ago that
    they are over. Without the server's time (`now` is None), no save is added."""
    barred = said.dead
    if now is not None:
        barred = still_dead(said.dead, now) | dict.fromkeys(dead, now.isoformat(timespec="seconds"))
    return CommitLog(secrets.token_hex(8), done, barred, gone)


def still_dead(dead: dict[str, str], now: dt.datetime) -> dict[str, str]:
    return {name: at for name, at in dead.items() if _is_recent(at, now)}


def _is_recent(at: str, now: dt.datetime) -> bool:
    """Tell whether a save was barred in the last 48 hours. If the time cannot be parsed, it stays barred."""
    try:
        return now - dt.datetime.fromisoformat(at) < DEAD_FOR
    except (ValueError, TypeError):
        return True


def _now() -> tuple[float, float]:
    """Return the time by two clocks: the first stands still while the machine sleeps, the second can be set."""
    return time.monotonic(), time.time()


def _age(began: tuple[float, float]) -> float:
    return max(now - then for now, then in zip(_now(), began, strict=True))


# --------------------------------------------------------------------------------------------- leases


def require_conditions(objects: Objects, path: str) -> None:
    """Raise ValueError if the server does not honour conditions."""
    objects.require_conditions(f"{path}/{LEASES}/{secrets.token_hex(8)}")


@contextmanager
def leased(objects: Objects, path: str, kind: Literal["hold", "removal"]) -> Iterator[Renewed]:
    """Hold a lease that blocks the removal of a checkpoint ("hold"), or commits during a removal of the index
    ("removal")."""
    lease = Renewed(objects, f"{path}/{LEASES}/{kind}-{secrets.token_hex(8)}")
    lease.begin()
    try:
        yield lease
    finally:
        with suppress(OSError), clearing_up():  # the lease runs out by itself
            lease.end()


def name_of(entry: Object) -> str:
    return entry.key.rpartition("/")[2]


def is_late(lease: Object, now: dt.datetime) -> bool:
    """Tell whether a lease has run out."""
    return lease.modified < now - dt.timedelta(seconds=LEASE)


def kind_of(lease: Object) -> Literal["save", "replaced", "hold", "removal"]:
    """Return the kind of a lease: of a save, of replaced data, of a reader, or of a removal."""
    name = name_of(lease)
    if name.startswith("hold-"):
        return "hold"
    if name.startswith("removal-"):
        return "removal"
    return "replaced" if "." in name else "save"
