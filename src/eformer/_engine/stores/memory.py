"""Checkpoints in the memory of this process, by URLs such as memory://bucket/run/step-100.

It behaves like a bucket: objects are immutable and have no directories, nothing can be renamed or locked, and an object
is replaced only on the condition that it is still the one that was read. For tests, and as an example of a store.
"""

from __future__ import annotations

import secrets
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.names import is_inside
from eformer._engine.record.values import json_decoder
from eformer._engine.stores.base import Entry, Replaced, SwapError
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from eformer._engine.stores.base import Kind, Store, Version

SCHEME = "memory://"

_UPLOADS = ".eformer-uploads/"


class _Object(msgspec.Struct, frozen=True):
    data: bytes
    version: Version


class _Bucket:
    """Objects by key, and the uploads whose writers are alive."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, _Object] = {}
        self.alive: set[str] = set()

    def put(self, key: str, data: bytes) -> None:
        with self.lock:
            self.objects[key] = _Object(data, secrets.token_hex(8))

    def get(self, key: str) -> _Object:
        with self.lock:
            found = self.objects.get(key)
        if found is None:
            raise FileNotFoundError(f"{SCHEME}{key} does not exist")
        return found

    def below(self, prefix: str) -> dict[str, _Object]:
        with self.lock:
            return {key: found for key, found in self.objects.items() if key.startswith(prefix)}

    def remove(self, keys: Iterable[str]) -> None:
        with self.lock:
            for key in keys:
                self.objects.pop(key, None)

    def remove_below(self, prefix: str) -> None:
        self.remove(self.below(prefix))


_bucket = _Bucket()


class MemoryStore:
    """All objects whose keys begin with a path."""

    can_rename = False

    def __init__(self, path: str) -> None:
        self._path = path.removeprefix(SCHEME).strip("/")

    @property
    def url(self) -> str:
        return SCHEME + self._path

    @property
    def key(self) -> str:
        return self.url

    def path_to(self, name: str) -> str:
        return f"{self.url}/{name}"

    def parent(self) -> tuple[MemoryStore, str]:
        """Return the store around this one, and the last part of the path."""
        outer, _, name = self._path.rpartition("/")
        return MemoryStore(outer), name

    def at(self, below: str) -> MemoryStore:
        return MemoryStore(f"{self._path}/{below}")

    def real(self) -> MemoryStore:
        return self

    def resolve(self, name: str) -> tuple[MemoryStore, str]:
        return self, name

    def local_path(self, name: str = "") -> None:
        """Nothing of it is in a file."""

    # ---------------------------------------------------------------------------------------- look

    def kinds(self, below: str = "") -> dict[str, Kind]:
        start = self._key(below) + "/" if below else self._path + "/"
        kinds: dict[str, Kind] = {}
        for key in _bucket.below(start):
            name, slash, _ = key.removeprefix(start).partition("/")
            kinds[name] = "directory" if slash else "file"
        if not kinds:
            raise FileNotFoundError(f"there are no objects below {SCHEME}{start}")
        return dict(sorted(kinds.items()))

    def sizes(self, below: str, depth: int = 1) -> dict[str, int]:
        start = self._key(below) + "/"
        found = {key.removeprefix(start): len(found.data) for key, found in _bucket.below(start).items()}
        return {name: nbytes for name, nbytes in found.items() if name.count("/") < depth}

    def is_there(self) -> bool:
        return bool(_bucket.below(f"{self._path}/"))

    def kind(self, name: str) -> Kind | None:
        if self.exists(name):
            return "file"
        return "directory" if _bucket.below(f"{self._path}/{name}/") else None

    def exists(self, name: str) -> bool:
        with _bucket.lock:
            return f"{self._path}/{name}" in _bucket.objects

    def has_unfinished(self) -> bool:
        return bool(_bucket.below(f"{self._path}/{_UPLOADS}"))

    # ---------------------------------------------------------------------------------------- read

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> tuple[bytes, Entry]:
        found = _bucket.get(self._key(name))
        stop = len(found.data) if nbytes is None else start + nbytes
        return found.data[start:stop], Entry(name, len(found.data), found.version)

    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> _MemoryFiles:
        return _MemoryFiles(names, [self._key(name) for name in names], versions or {})

    def _key(self, name: str) -> str:
        if not is_inside(name):
            raise FormatError(f"{name[:200]!r} is not the name of a file in {self.url}")
        return f"{self._path}/{name}"

    # --------------------------------------------------------------------------------------- write

    def make(self) -> None:
        """A prefix is there as soon as an object is."""

    def check_replaceable(self, name: str) -> None:
        """An object can always be replaced."""

    def begin(self, root: str = "", token: str = "") -> MemoryUpload:
        return MemoryUpload(self._path, root, token)


class _MemoryFiles:
    """Objects by number. Those that are held stay readable, whoever removes them."""

    def __init__(self, names: Sequence[str], keys: Sequence[str], versions: Mapping[str, Version]) -> None:
        self._names, self._keys, self._versions = names, keys, versions
        self._held: dict[int, _Object] = {}

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        data = self._get(number).data[offset : offset + len(memory)]
        memory[: len(data)] = data
        return len(data)

    def nbytes(self, number: int) -> int:
        return len(self._get(number).data)

    def map(self, number: int) -> None:
        """Objects are not in files."""

    def hold(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._held[number] = self._get(number)

    def rewritten(self) -> None:
        """Objects are replaced as a whole."""

    def close(self) -> None:
        self._held.clear()

    def _get(self, number: int) -> _Object:
        if number in self._held:
            return self._held[number]
        found, name = _bucket.get(self._keys[number]), self._names[number]
        if name in self._versions and self._versions[name] != found.version:
            raise FileNotFoundError(f"{SCHEME}{self._keys[number]} was replaced")
        return found


# --------------------------------------------------------------------------------------------- writing


class _Lease(msgspec.Struct):
    """What an upload has published and replaces, for whoever has to finish or undo it."""

    save_id: str
    new: list[str]
    old: list[Replaced]


class MemoryUpload:
    """New objects, which appear under their final names when they are published."""

    takes_whole_files = False

    def __init__(self, path: str, root: str, token: str = "") -> None:
        self.token = token or secrets.token_hex(8)
        self._path = path
        self._start = f"{path}/{root}/" if root else f"{path}/"
        self._new: dict[str, bytes | bytearray] = {}
        self._lease: _Lease | None = None
        _bucket.alive.add(self.token)

    @property
    def _lease_key(self) -> str:
        return f"{self._path}/{_UPLOADS}{self.token}"

    def announce(self) -> None:
        """Nobody else could join."""

    def expect(self, nbytes: int) -> None:
        """Memory has no caches to spare."""

    def create(self, name: str, nbytes: int) -> _Sink:
        self._new[name] = memory = bytearray(nbytes)
        return _Sink(memory)

    def put(self, files: Sequence[tuple[str, bytes]]) -> None:
        self._new.update(files)

    def link(self, name: str, source: Store, entry: Entry) -> bool:
        """Name the object again if it has its final name already; else copy it, as a server would."""
        if not isinstance(source, MemoryStore):
            return False
        try:
            data, now = source.read(entry.name)
        except FileNotFoundError:
            return False
        if now.version != entry.version:
            return False
        if source.path_to(entry.name) != SCHEME + self._start + name:
            self._new[name] = data
        return True

    def sync(self) -> None:
        """Memory is as stable as it gets."""

    def names(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._new})

    def is_published(self, name: str, final: str) -> bool:
        """A name is never used for another object."""
        return name == final and name not in self._new

    def place_of(self, store: Store) -> Store:
        return store

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sweep(self, committed: Container[str] | None) -> None:
        for key, found in _bucket.below(f"{self._path}/{_UPLOADS}").items():
            if key.removeprefix(f"{self._path}/{_UPLOADS}") not in _bucket.alive:
                lease = json_decoder(_Lease).decode(found.data)
                if committed is not None:
                    if lease.save_id in committed:
                        self._remove_replaced(lease)
                    else:
                        _bucket.remove(lease.new)
                    _bucket.remove([key])

    def publish(
        self,
        moves: Mapping[str, str],
        replaced: Sequence[Replaced] = (),
        *,
        save_id: str,
        unmarked: Sequence[str] | None = None,
    ) -> None:
        for name, final in moves.items():
            if (self._start + name).rstrip("/") != f"{self._path}/{final}":
                raise AssertionError(f"objects cannot be renamed: {name!r} to {final!r}")
        self._lease = _Lease(save_id, [self._start + name for name in self._new], list(replaced))
        _bucket.put(self._lease_key, msgspec.json.encode(self._lease))
        for name, data in self._new.items():
            _bucket.put(self._start + name, bytes(data))

    def withdraw(self) -> None:
        if self._lease:
            _bucket.remove(self._lease.new)

    def swap(self, name: str, data: bytes, expected: Version | None) -> None:
        key = f"{self._path}/{name}"
        with _bucket.lock:
            now = _bucket.objects.get(key)
            if (now.version if now else None) != expected:
                raise SwapError(f"{SCHEME}{key} is not the one that was read")
            _bucket.objects[key] = _Object(data, secrets.token_hex(8))

    def remove(self, names: Iterable[str]) -> None:
        _bucket.remove(f"{self._path}/{name}" for name in names)

    def read(self, name: str, most: int) -> bytes:
        return _bucket.get(f"{self._path}/{name}").data[:most]

    def finish(self) -> None:
        if self._lease:
            self._remove_replaced(self._lease)

    def _remove_replaced(self, lease: _Lease) -> None:
        for replaced in lease.old:
            for path in [replaced.name] if replaced.mark else [path for path, _ in replaced.arrays]:
                _bucket.remove_below(f"{self._path}/{path}/")

    def close(self) -> None:
        self._new.clear()
        _bucket.remove([self._lease_key])
        self.abandon()

    def abandon(self) -> None:
        """Let go of the upload as a process does that dies."""
        _bucket.alive.discard(self.token)


class _Sink:
    def __init__(self, memory: bytearray) -> None:
        self._memory = memory

    def write(self, data: Any, offset: int) -> None:
        self._memory[offset : offset + len(data)] = memoryview(data)

    def close(self) -> None:
        """Nothing is open."""
