"""The parts of near steps: where they lie, and a store that reads a part from this host or from another one.

A near step has one part for each process that saved it. The process that saved it, its owner, has the part in its near
directory; copies of it may be in the near directories of other hosts. After a restart, processes may have other numbers
and other directories, so each process tells the parts that it finds, and reads a part wherever it is.

Tests: tests/engine/runs/test_near_parts.py, tests/multihost/test_near_copies.py.
"""

from __future__ import annotations

from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec

from eformer._engine.processes.lines import DoorAddress, Line, dial
from eformer._engine.record.digests import check_own_digest
from eformer._engine.record.indexes import MANIFEST
from eformer._engine.record.manifest import Manifest
from eformer._engine.stores.listed import ListedStore, Listing
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.locate import STORES
from eformer._engine.stores.virtual_files import UnchangingFiles
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.pool import default_threads
from eformer.errors import CorruptionError, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from eformer._engine.stores.base import Store, Version

SCHEME = "near-step"

BLOCK_BYTES = 2**20  # of a message on a line
MOST_REQUEST = 2**12
_ASKED_AHEAD = 16  # ranges of a file
_MOST_ANSWER = 2**22  # bytes of a list of files
MOST_MANIFEST = 2**28

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class NearStep(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A step: its number, and the epoch in which it was saved to the near tier; "" for a step of the run itself."""

    number: _Number
    epoch: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")] = ""


class NearPart(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The part of a near step that the process `owner` of `count` has saved."""

    step: NearStep
    owner: _Number
    count: _Number


# ----------------------------------------------------------------------------------- where they are


class Held(msgspec.Struct):
    """The message of a process that begins: its host, its door if it has one, and the whole parts that it finds."""

    host: str
    door: DoorAddress | None
    parts: list[NearPart]


class StepParts(msgspec.Struct):
    """A near step, and the processes that find each of its parts."""

    step: NearStep
    holders: list[list[int]]

    @property
    def count(self) -> int:
        return len(self.holders)


class Where(msgspec.Struct):
    """The answer to all processes: the number of each process's host, its door, and the near steps of the run."""

    hosts: list[int] = []
    doors: list[DoorAddress | None] = []
    steps: list[StepParts] = []

    def of(self, step: NearStep) -> StepParts:
        return next((one for one in self.steps if one.step == step), StepParts(step, []))

    def can_read(self, process: int, holders: Sequence[int]) -> bool:
        """Tell whether a process finds a part itself, or can ask a process that does."""
        return process in holders or any(self.doors[holder] for holder in holders)

    def has_own(self, process: int, parts: StepParts) -> bool:
        """Tell whether a process can read its own part of a step."""
        return parts.count == len(self.hosts) and self.can_read(process, parts.holders[process])

    def has_all(self, process: int, parts: StepParts) -> bool:
        return all(self.can_read(process, holders) for holders in parts.holders)

    def is_usable(self, parts: StepParts) -> bool:
        """Tell whether every process can read its own part of a step, or every process all parts."""
        everyone = range(len(self.hosts))
        return all(self.has_own(one, parts) for one in everyone) or all(
            self.has_all(one, parts) for one in everyone
        )


def where_parts_are(held: Sequence[Held], is_of_run: Callable[[NearStep], bool]) -> Where:
    """Return the places of the near steps of the run that all processes can read."""
    names = list(dict.fromkeys(one.host for one in held))
    found: dict[NearStep, dict[int, list[list[int]]]] = {}
    for process, one in enumerate(held):
        for part in one.parts:
            if is_of_run(part.step) and part.owner < part.count <= _MOST_PROCESSES:
                counts = found.setdefault(part.step, {})
                counts.setdefault(part.count, [[] for _ in range(part.count)])[part.owner].append(process)
    where = Where([names.index(one.host) for one in held], [one.door for one in held])
    steps = [StepParts(step, holders) for step, counts in found.items() for holders in counts.values()]
    where.steps = sorted(filter(where.is_usable, steps), key=lambda one: one.step)
    return where


_MOST_PROCESSES = 2**20


def holders_of_copies(hosts: Sequence[int], copies: int) -> list[list[int]]:
    """Return, for each process, the processes that hold copies of its parts: each on another host, because the
    processes of one host are lost together. If all processes are on one host, these are the next ones.

    Hosts form a ring, and the processes of a host are spread over the processes of the next hosts.
    """
    members: dict[int, list[int]] = {}
    for process, host in enumerate(hosts):
        members.setdefault(host, []).append(process)
    ring = list(members.values()) if len(members) > 1 else [[process] for process in range(len(hosts))]
    distances = range(1, min(copies, len(ring) - 1) + 1)
    found: dict[int, list[int]] = {}
    for at, own in enumerate(ring):
        others = [ring[(at + distance) % len(ring)] for distance in distances]
        for place, process in enumerate(own):
            found[process] = [other[place % len(other)] for other in others]
    return [found[process] for process in range(len(hosts))]


# ------------------------------------------------------------------------------- asking another process


class Newest(msgspec.Struct, frozen=True, tag="newest"):
    """Ask for the newest part that the other process has saved; wait a while for one after the step `after`."""

    after: NearStep


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Ask for the files of a part, by number: their names and lengths. They stay readable until the next part."""

    part: NearPart


class ReadRange(msgspec.Struct, frozen=True, tag="read"):
    """Ask for a range of a file."""

    file: _Number
    offset: _Number
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_BYTES)]


Request = Newest | Open | ReadRange
read_request = msgspec.msgpack.Decoder(Request).decode
_read_files = msgspec.msgpack.Decoder(list[tuple[str, _Number]]).decode

GIVEN, GONE, ENDED = b"\0", b"\1", b"\2"  # the first byte of an answer that is no range of a file


class EndedError(Exception):
    """The other process has ended its run."""


def ask(line: Line, request: Newest | Open, seconds: float) -> bytes:
    """Return the answer. Raise FileNotFoundError if the other process does not have the part any more."""
    line.send(msgspec.msgpack.encode(request))
    answer = line.receive(_MOST_ANSWER, seconds)
    if answer[:1] == ENDED:
        raise EndedError
    if answer[:1] != GIVEN:
        raise FileNotFoundError(f"{line.peer} does not have {request} any more")
    return answer[1:]


class RemoteFiles:
    """The files of a part that another process has, by name."""

    def __init__(self, line: Line, part: NearPart, seconds: float) -> None:
        self._line, self._lock = line, Lock()
        try:
            listed = _read_files(ask(line, Open(part), seconds))
        except msgspec.MsgspecError as error:
            raise OSError(f"{line.peer} sends no list of files: {error}") from error
        self._numbers = {name: number for number, (name, _) in enumerate(listed)}
        self.sizes = dict(listed)

    def read_into(self, name: str, memory: memoryview, offset: int) -> int:
        """Fill `memory` from an offset on. Return the number of bytes, which is smaller only at the end of the file."""
        if (number := self._numbers.get(name)) is None:
            raise FileNotFoundError(f"{self._line.peer} does not have the file {name[:200]!r}")
        starts = range(0, len(memory), BLOCK_BYTES)
        done = 0
        with self._lock:
            for first in range(0, len(starts), _ASKED_AHEAD):  # so that neither process waits for the other
                some = starts[first : first + _ASKED_AHEAD]
                for start in some:
                    nbytes = min(BLOCK_BYTES, len(memory) - start)
                    self._line.send(msgspec.msgpack.encode(ReadRange(number, offset + start, nbytes)))
                for start in some:
                    done += self._line.receive_into(memory[start : start + BLOCK_BYTES])
        return done


# ------------------------------------------------------------------------------------- sources of a part


class PartSource(Protocol):
    """A place from which the files of a part are read."""

    def sizes(self) -> Mapping[str, int]:
        """Return the lengths of the files, by name."""

    def read_into(self, name: str, memory: memoryview, offset: int) -> int: ...

    def close(self) -> None: ...


class Here:
    """A part in the near directory of this process."""

    def __init__(self, path: str) -> None:
        self._store = LocalStore(path)

    def sizes(self) -> Mapping[str, int]:
        return self._store.sizes("")

    def read_into(self, name: str, memory: memoryview, offset: int) -> int:
        with closing(self._store.open([name])) as files:
            return files.read_into(0, memory, offset)

    def close(self) -> None:
        """Do nothing: every read opens its file."""


class There:
    """A part that another process finds. The line is opened at the first read, and again after `close`."""

    def __init__(self, address: DoorAddress, part: NearPart) -> None:
        self._address, self._part = address, part
        self._lock = Lock()
        self._line: Line | None = None
        self._files: RemoteFiles | None = None

    def sizes(self) -> Mapping[str, int]:
        return self._opened().sizes

    def read_into(self, name: str, memory: memoryview, offset: int) -> int:
        for is_last in (False, True):  # an idle line may have been closed
            try:
                return self._opened().read_into(name, memory, offset)
            except OSError:
                self.close()  # part of an answer may be on its way
                if is_last:
                    raise
        raise AssertionError

    def close(self) -> None:
        with self._lock:
            if self._line is not None:
                self._line.close()
            self._line = self._files = None

    def _opened(self) -> RemoteFiles:
        with self._lock:
            if self._files is None:
                self._line = dial(self._address, _SECONDS_TO_OPEN)
                self._files = RemoteFiles(self._line, self._part, _SECONDS_TO_OPEN)
            return self._files


_SECONDS_TO_OPEN = 30.0


class _NearStore(ListedStore):
    """A read-only store of files of a near step, whose lengths are known."""

    read_threads = default_threads()
    read_bytes = LocalStore.read_bytes
    refusal = "near steps are read-only"

    def __init__(self, url: str, sizes: Mapping[str, int]) -> None:
        self._top, self._listing = url, Listing(sizes)
        self._enter("")

    def _enter(self, path: str) -> None:
        self._path, self.url = path, f"{self._top}/{path}" if path else self._top

    @property
    def listing(self) -> Listing:
        return self._listing

    @property
    def key(self) -> str:
        return self.url

    def path_to(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _version(self, path: str) -> Version:
        return ""


class PartStore(_NearStore):
    """A part of a near step, read from the first of several sources that has its bytes undamaged."""

    def __init__(self, url: str, sources: Sequence[PartSource]) -> None:
        self._sources, self.source, problems = sources, 0, []
        for self.source, source in enumerate(sources):
            try:
                self.manifest = _manifest_of(source, source.sizes())
                break
            except (OSError, FormatError) as error:
                problems.append(str(error))
            finally:  # for now: a process may need the manifests of many parts, and the bytes of few
                source.close()
        else:
            raise CorruptionError(f"{url} cannot be read: {'; '.join(problems) or 'no process holds it'}")
        trees = Manifest.from_json(self.manifest, f"{url}/{MANIFEST}").trees
        if "" not in trees:
            raise FormatError(
                f"{url} is not a part of a near step: its manifest has the trees {sorted(trees)}"
            )
        self.tree = trees[""]
        sizes = {self.tree.path_of(number): file.nbytes for number, file in enumerate(self.tree.files)}
        super().__init__(url, {**sizes, MANIFEST: len(self.manifest)})

    def source_after(self, number: int) -> int:
        """Return the number of the next source that has the same part; the same number if there is none."""
        for following in range(number + 1, len(self._sources)):
            source = self._sources[following]
            with suppress(OSError, FormatError):
                if _manifest_of(source, source.sizes()) == self.manifest:
                    return following
        return number

    def read_from(self, number: int, name: str, memory: memoryview, offset: int) -> int:
        return self._sources[number].read_into(name, memory, offset)

    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> _PartFiles:
        return _PartFiles(self, [(name, self._listing.sizes[name]) for name in names])

    def close(self) -> None:
        for source in self._sources:
            source.close()


def _manifest_of(source: PartSource, sizes: Mapping[str, int]) -> bytes:
    nbytes = sizes.get(MANIFEST, 0)
    if not 0 < nbytes <= MOST_MANIFEST:
        raise FormatError(f"its manifest has {nbytes} bytes")
    memory = bytearray(nbytes)
    if source.read_into(MANIFEST, memoryview(memory), 0) != nbytes:
        raise CorruptionError("its manifest was cut short")
    check_own_digest(bytes(memory), "its manifest")
    return bytes(memory)


class _PartFiles(UnchangingFiles):
    """Files of a part by number. A file is read from its first source; after an error, and if a digest does not match,
    from the next one."""

    def __init__(self, store: PartStore, files: Sequence[tuple[str, int]]) -> None:
        self._store, self._files = store, files
        self._used = [store.source] * len(files)
        self._lock = Lock()

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        while True:
            used = self._used[number]
            try:
                return self._store.read_from(used, self._files[number][0], memory, offset)
            except (OSError, FormatError):
                if self._after(number, used) == used:
                    raise

    def nbytes(self, number: int) -> int:
        return self._files[number][1]

    def forget(self, number: int, offset: int, nbytes: int) -> bool:
        """ReadRange the file from the next source from now on. Return False if it has always had one source."""
        return self._after(number, self._used[number]) != self._store.source

    def _after(self, number: int, used: int) -> int:
        """Leave a source of a file, unless another thread has left it, and return the one that is used now."""
        with self._lock:
            if self._used[number] == used:
                self._used[number] = self._store.source_after(used)
            return self._used[number]


# ------------------------------------------------------------------------------------ one path for all


_readable: dict[str, Store] = {}
STORES[SCHEME] = _readable.__getitem__


@contextmanager
def found_by_url(store: PartStore | JoinedStore) -> Iterator[str]:
    """Let loads find a store by its URL during the block, and close it afterwards."""
    _readable[store.url] = store
    try:
        yield store.url
    finally:
        with suppress(KeyError):
            del _readable[store.url]
        store.close()


class JoinedStore(_NearStore):
    """All parts of a near step as one checkpoint. The files of part 3 are in the directory `3`."""

    def __init__(self, url: str, parts: Sequence[PartStore], manifest: bytes) -> None:
        self._parts, self._manifest = parts, manifest
        inner = (
            (f"{number}/{name}", nbytes)
            for number, part in enumerate(parts)
            for name, nbytes in part.listing.sizes.items()
        )
        super().__init__(url, {**dict(inner), MANIFEST: len(manifest)})

    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> _JoinedFiles:
        return _JoinedFiles(self._parts, self._manifest, names)

    def close(self) -> None:
        for part in self._parts:
            part.close()


class _JoinedFiles(UnchangingFiles):
    """Files of several parts by number."""

    def __init__(self, parts: Sequence[PartStore], manifest: bytes, names: Iterable[str]) -> None:
        self._manifest = manifest
        split = [name.partition("/") for name in names]
        self._files = [parts[int(part)].open([name]) if slash else None for part, slash, name in split]

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        if files := self._files[number]:
            return files.read_into(0, memory, offset)
        some = self._manifest[offset : offset + len(memory)]
        memory[: len(some)] = some
        return len(some)

    def nbytes(self, number: int) -> int:
        files = self._files[number]
        return files.nbytes(0) if files else len(self._manifest)

    def forget(self, number: int, offset: int, nbytes: int) -> bool:
        files = self._files[number]
        return files is not None and files.forget(0, offset, nbytes)
