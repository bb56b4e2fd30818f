"""Copies of near steps on other hosts: each process lets others read its parts, and copies the parts of some.

    <near>/process-1/of-process-0/<epoch>/step-510      the copy of a part of process 0, which process 1 has made

A process that holds copies asks the owner for its newest part, and copies that: a slow process leaves steps out and
keeps nobody waiting. All of this happens in background threads. An error costs the copy, is logged, and the copying
goes on. What comes over the network is checked before it gets its name: names, lengths, digests.

Tests: tests/engine/runs/test_copies.py, tests/multihost/test_near_copies.py.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.loading.fetch import check_pieces, raise_damage
from eformer._engine.loading.read_plan import Want
from eformer._engine.processes.hosts import own_address
from eformer._engine.processes.lines import SECONDS, Door, DoorAddress, Line, dial
from eformer._engine.record.digests import check_own_digest
from eformer._engine.record.indexes import MANIFEST
from eformer._engine.record.manifest import Manifest, TreeEntry
from eformer._engine.record.step_names import step_name
from eformer._engine.record.text import size
from eformer._engine.runs.near_parts import (
    ENDED,
    GIVEN,
    GONE,
    MOST_MANIFEST,
    MOST_REQUEST,
    EndedError,
    NearPart,
    NearStep,
    Newest,
    Open,
    RemoteFiles,
    ask,
    holders_of_copies,
    read_request,
)
from eformer._engine.stores.directory import Closing, Directory, open_beneath, own_path, read_into
from eformer._engine.stores.durable import make_directories, write_all
from eformer._engine.stores.local import LocalStore, appearing
from eformer._engine.stores.new_files import require_room
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from eformer._engine.runs.near_parts import Request, Where

logger = logging.getLogger("eformer")

_WAIT = 10.0  # seconds that the owner waits for a newer part, before it answers that there is none
_PAUSE = 5.0  # seconds until a process is asked again after an error
_BEHIND = 3  # copies, one after the other, during each of which a newer part was saved
_COPIED_TOGETHER = 8 * 2**20  # bytes
_MOST_FILES = 2**14  # of a part
_THREADS = 2  # that check a copy
_NONE_YET = NearStep(0)  # before all steps

_read_part = msgspec.msgpack.Decoder(NearPart | None).decode


# ------------------------------------------------------------------------------------------- the owner


class Shelf:
    """The parts that this process finds in its near directory and lets other processes read."""

    def __init__(self, near: Path) -> None:
        self._near = near
        self._places: dict[NearPart, str] = {}
        self._newest: NearPart | None = None
        self._news = threading.Condition()
        self._ended = threading.Event()

    def put(self, part: NearPart, place: str, *, is_new: bool = False) -> None:
        """Let other processes read a part, at a path below the near directory. `is_new` tells the processes that wait
        for one."""
        with self._news:
            self._places[part] = place
            if is_new:
                self._newest = part
                self._news.notify_all()

    def clear(self) -> None:
        """Forget all parts: an epoch begins, and no process reads earlier parts."""
        with self._news:
            self._places, self._newest = {}, None

    def close(self) -> None:
        with self._news:
            self._ended.set()
            self._news.notify_all()

    def serve(self, line: Line) -> None:
        """Answer the requests of another process until it closes the line."""
        with ExitStack() as opened:
            files: list[int] = []
            while not self._ended.is_set():
                request: Request = read_request(line.receive(MOST_REQUEST, 4 * SECONDS))
                if isinstance(request, Newest):
                    found = self._newer(request.after)
                    line.send(ENDED if self._ended.is_set() else GIVEN + msgspec.msgpack.encode(found))
                elif isinstance(request, Open):
                    opened.close()
                    files = self._open(request.part, line, opened)
                else:
                    memory = memoryview(bytearray(request.nbytes))
                    line.send(memory[: read_into(files[request.file], memory, request.offset)])

    def _newer(self, after: NearStep) -> NearPart | None:
        """Wait for a part that is newer than a step; None if none comes for a while."""

        def is_there() -> bool:
            return self._ended.is_set() or (self._newest is not None and self._newest.step > after)

        with self._news:
            return self._newest if self._news.wait_for(is_there, _WAIT) else None

    def _open(self, part: NearPart, line: Line, opened: ExitStack) -> list[int]:
        """Open all files of a part, so that they can be read even after the part is removed. Send their names."""
        try:
            place = self._places[part]
            with Directory.open(self._near) as near, near.enter(place) as folder:
                names = [name for name, kind in folder.kinds().items() if kind == "file"][:_MOST_FILES]
                files = [
                    opened.enter_context(
                        Closing(open_beneath(folder.descriptor, folder.where, name, through_links=False))
                    )
                    for name in names
                ]
        except (KeyError, OSError, FormatError):
            line.send(GONE)
            return []
        sizes = [os.fstat(file).st_size for file in files]
        line.send(GIVEN + msgspec.msgpack.encode(list(zip(names, sizes, strict=True))))
        return files


# ------------------------------------------------------------------------------------------- the holder


class Follower:
    """Copies the parts of another process, the owner, to the near directory of this process, in a thread.

    `place` is where the copies of this owner lie, below the near directory; `make_room` removes old copies there, and
    `on_copied` hears of each new one.
    """

    def __init__(
        self,
        owner: int,
        address: DoorAddress,
        near: Path,
        place: str,
        make_room: Callable[[], None],
        on_copied: Callable[[NearPart, str], None],
    ) -> None:
        self._owner, self._address = owner, address
        self._near, self._place = near, place
        self._make_room, self._on_copied = make_room, on_copied
        self._is_closed = threading.Event()
        self._line: Line | None = None
        self._is_failing = self._has_copied = self._has_warned = False
        self._behind = 0
        self._thread = threading.Thread(target=self._run, name="eformer-copies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop copying, and leave nothing unfinished behind."""
        self._is_closed.set()
        if line := self._line:
            line.close()
        self._thread.join(SECONDS)

    def _run(self) -> None:
        newest = _NONE_YET
        while not self._is_closed.is_set():
            try:
                with closing(dial(self._address)) as self._line:
                    while not self._is_closed.is_set():
                        newest = self._copy_after(newest, self._line)
            except EndedError:
                return
            except Exception as error:  # noqa: BLE001  it costs the copy, never the run
                self._log_failure(error)
                self._is_closed.wait(_PAUSE)

    def _copy_after(self, newest: NearStep, line: Line) -> NearStep:
        """Wait for a part of a later step, and copy it. Return the newest step that needs no copy any more."""
        began = time.monotonic()
        part: NearPart | None = _read_part(ask(line, Newest(newest), _WAIT + SECONDS))
        waited = time.monotonic() - began
        if part is None:
            return newest
        if part.owner != self._owner or part.step <= newest or not part.step.epoch:
            raise FormatError(f"process {self._owner} offers a part that it cannot have: {part}")
        with suppress(FileNotFoundError):  # removed since: a newer one is there soon
            nbytes = self.copy(part, RemoteFiles(line, part, SECONDS))
            self._log_success(nbytes)
            self._note_pace(waited, time.monotonic() - began - waited, nbytes)
        return part.step

    def _note_pace(self, waited: float, took: float, nbytes: int) -> None:
        """Warn once if the next part is always there before a copy is made: then no step has all parts on hosts that
        remain."""
        self._behind = self._behind + 1 if waited < took / 100 else 0
        if self._behind == _BEHIND and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s: process %d saves near steps faster than they are copied (%s in %.1f s): if its host is lost, the "
                "run may have to go back to one of its own steps. Save near steps less often",
                self._near / self._place,
                self._owner,
                size(nbytes),
                took,
            )

    def copy(self, part: NearPart, files: RemoteFiles) -> int:
        """Copy a part, and return its length. It appears whole, once all digests match."""
        manifest, tree = _manifest_of(part, files)
        nbytes = len(manifest) + sum(file.nbytes for file in tree.files)
        self._make_room()
        make_directories(self._near)
        name, epoch = step_name(part.step.number), f"{self._place}/{part.step.epoch}"
        with Directory.open(self._near) as near, _made(near, epoch) as folder:
            require_room(folder, nbytes, "a copy of a part", str(folder.path))
            with appearing(own_path(folder) / name) as scratch:
                scratch.mkdir()
                for file in tree.files:
                    self._fetch(files, file.name, file.nbytes, scratch)
                _check(tree, scratch)
                (scratch / MANIFEST).write_bytes(manifest)
        self._on_copied(part, f"{epoch}/{name}")
        return nbytes

    def _fetch(self, files: RemoteFiles, name: str, nbytes: int, folder: Path) -> None:
        memory = memoryview(bytearray(min(nbytes, _COPIED_TOGETHER)))
        with Directory.open(folder) as directory, Closing(directory.create(name)) as file:
            for offset in range(0, nbytes, _COPIED_TOGETHER):
                if self._is_closed.is_set():
                    raise InterruptedError("the run has ended")
                block = memory[: min(_COPIED_TOGETHER, nbytes - offset)]
                if files.read_into(name, block, offset) < len(block):
                    raise OSError(f"{name} was cut short")
                write_all(file, block, offset)

    def _log_success(self, nbytes: int) -> None:
        if not self._has_copied or self._is_failing:
            where = self._near / self._place
            logger.info(
                "%s: near steps of process %d are copied here, %s each", where, self._owner, size(nbytes)
            )
        self._has_copied, self._is_failing = True, False

    def _log_failure(self, error: Exception) -> None:
        if not self._is_failing and not self._is_closed.is_set():
            where = self._near / self._place
            logger.warning(
                "%s: near steps of process %d are not copied here at present: %s", where, self._owner, error
            )
        self._is_failing = True


def _manifest_of(part: NearPart, files: RemoteFiles) -> tuple[bytes, TreeEntry]:
    """Read and check the manifest of a part: its own digest, and the names and lengths of its files."""
    origin = f"the manifest of step {part.step.number} of process {part.owner}"
    nbytes = files.sizes.get(MANIFEST, 0)
    if nbytes > MOST_MANIFEST:
        raise FormatError(f"{origin} has {nbytes} bytes, expected at most {MOST_MANIFEST}")
    memory = bytearray(nbytes)
    if MANIFEST not in files.sizes or files.read_into(MANIFEST, memoryview(memory), 0) != nbytes:
        raise FileNotFoundError(f"{origin} is gone")
    check_own_digest(bytes(memory), origin)
    trees = Manifest.from_json(bytes(memory), origin).trees
    tree = trees.get("")
    if tree is None or len(trees) > 1 or tree.root or tree.is_database or tree.wholeness:
        raise FormatError(f"{origin} describes no part of a near step")
    for file in tree.files:
        if (
            "/" in file.name
            or file.name.startswith(".")
            or files.sizes.get(file.name) != file.nbytes
            or file.name == MANIFEST
        ):
            raise FormatError(f"{origin} names the file {file.name[:200]!r}, which the process does not have")
    return bytes(memory), tree


def _check(tree: TreeEntry, folder: Path) -> None:
    """Raise CorruptionError if a byte of a leaf differs from its digest."""
    wants = [Want(name, entry, entry.dtype) for name, entry in tree.leaves.items()]
    with closing(LocalStore(folder).open([file.name for file in tree.files])) as files:

        def on_damage(damage: Any) -> None:
            raise_damage(str, damage)

        check_pieces(wants, tree, files, _THREADS, on_damage)


def _made(near: Directory, path: str) -> Directory:
    """Make directories below an open one, and enter them, through no link."""
    done = ""
    with ExitStack() as stack:
        folder = near
        for name in path.split("/"):
            with suppress(FileExistsError):
                folder.make(name, usable=True)
            done = f"{done}/{name}".strip("/")
            folder = stack.enter_context(folder.enter(name))
    return near.enter(done)


# ---------------------------------------------------------------------------------------- both together


class Exchange:
    """The exchange of parts with the other processes of the job: the shelf and the door of this process, and the copies
    that it makes. Raise OSError if no port can be opened."""

    def __init__(self, near: Path, places: Mapping[NearPart, str]) -> None:
        self._near, self.shelf = near, Shelf(near)
        for part, place in places.items():
            self.shelf.put(part, place)
        self._door = Door(own_address(), self.shelf.serve)
        self.address = self._door.address
        self._followers: list[Follower] = []

    def begin(self, where: Where, copies: int, own: str, make_room: Callable[[str], None]) -> None:
        """Begin to copy the parts of the processes that this process holds copies of, to the directory `own`."""
        self.shelf.clear()
        me = own.removeprefix("process-")
        for owner, holders in enumerate(holders_of_copies(where.hosts, copies)):
            if int(me) in holders and (address := where.doors[owner]):
                place = f"{own}/of-process-{owner}"
                room = functools.partial(make_room, place)
                self._followers.append(Follower(owner, address, self._near, place, room, self.shelf.put))

    def close(self) -> None:
        self.shelf.close()
        self._door.close()
        for follower in self._followers:
            follower.close()
