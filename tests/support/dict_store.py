"""A store over a plain dict, as an example for new ones. It lives and dies with its process."""

import itertools
import threading

import numpy as np
from msgspec import UNSET

from eformer._engine.record.names import is_inside
from eformer._engine.stores.base import Entry, SwapError, tidy_up
from eformer.errors import FormatError

FILES = {}  # the bytes and the version of each file, by its whole name
LOCK = threading.RLock()
numbers = map(str, itertools.count())


class DictStore:
    """All files whose names begin with a path."""

    read_threads, read_bytes, most_path_bytes = 4, 2**20, 2**20

    def __init__(self, url):
        self.url = self.key = url.rstrip("/")

    def path_to(self, name):
        return f"{self.url}/{name}" if name else self.url

    def at(self, below):
        return DictStore(self.path_to(below))

    def parent(self):
        outer, _, name = self.url.rpartition("/")
        return DictStore(outer), name

    def sizes(self, below, depth=1):
        start = f"{self.path_to(below)}/"
        with LOCK:
            found = {
                name.removeprefix(start): len(FILES[name][0]) for name in FILES if name.startswith(start)
            }
        return {name: nbytes for name, nbytes in sorted(found.items()) if name.count("/") < depth}

    def kinds(self, below=""):
        paths = [path.partition("/") for path in self.sizes(below, depth=1000)]
        if not paths:
            raise FileNotFoundError(f"there is nothing in {self.path_to(below)}")
        return {name: "directory" if slash else "file" for name, slash, _ in paths}

    def kind(self, name):
        return "file" if self.exists(name) else "directory" if self.sizes(name, depth=1000) else None

    def exists(self, name):
        return self.path_to(name) in FILES

    is_file = exists

    def read(self, name, start=0, nbytes=None):
        if not is_inside(name):
            raise FormatError(f"{name!r} is not the name of a file in {self.url}")
        if not self.exists(name):
            raise FileNotFoundError(f"there is no {self.path_to(name)}")
        data, version = FILES[self.path_to(name)]
        return data[start : len(data) if nbytes is None else start + nbytes], Entry(name, len(data), version)

    def open(self, names, versions=None):
        return DictFiles(self, names, versions or {})

    def begin(self, root="", token="", *, save_id="", is_first=False):
        return DictUpload(self, f"{root}/" if root else "")


class DictFiles:
    """Files by number."""

    def __init__(self, store, names, versions):
        self.store, self.names, self.versions, self.held = store, names, versions, {}

    def map(self, number):
        if number not in self.held:
            data, entry = self.store.read(self.names[number])
            if self.versions.get(entry.name, entry.version) != entry.version:
                raise FileNotFoundError(f"{self.store.path_to(entry.name)} was replaced")
            return np.frombuffer(data, np.uint8)
        return self.held[number]

    def read_into(self, number, memory, offset):
        found = self.map(number)[offset : offset + len(memory)]
        memory[: len(found)] = found.data
        return len(found)

    def nbytes(self, number):
        return len(self.map(number))

    def hold(self, numbers):
        self.held |= {number: self.map(number) for number in numbers}

    def rewritten(self):
        """No file is ever written to in place."""

    def close(self):
        self.held.clear()


class DictUpload:
    """New files, which nobody sees before the commit."""

    token, takes, nbytes = "", "streams", 0

    def __init__(self, store, start):
        self.store, self.start, self.new = store, start, {}

    def announce(self):
        raise NotImplementedError("another process has another dict")

    def create(self, name, nbytes):
        return DictSink(self, name, nbytes)

    def stream(self, name, nbytes, chunks):
        self.put([(name, b"".join(chunks))])

    def put(self, files):
        self.new |= {self.start + name: data for name, data in files}

    def link(self, name, source, entry):
        if not isinstance(source, DictStore) or source.read(entry.name)[1] != entry:
            return False
        if source.path_to(entry.name) != self.store.path_to(
            self.start + name
        ):  # else it has its name already
            self.put([(name, source.read(entry.name)[0])])
        return True

    def sync(self):
        """Nothing is more durable than the dict."""

    def names(self):
        return sorted({name.removeprefix(self.start).partition("/")[0] for name in self.new})

    def is_published(self, name, final):
        return name == final and self.start + name not in self.new and self.store.exists(name)

    def commit(self, commit):
        with LOCK:
            index = commit.read(self.store)
            change = commit.change(index, self.store)
            data = change.index and change.index(UNSET)  # the last call that can fail
            FILES.update({self.store.path_to(name): (new, next(numbers)) for name, new in self.new.items()})
            if data is not None:
                self.swap(commit.name, data, index.version)
            tidy_up(change, self.store, self, lambda change: self.remove(change.gone(index)))

    def swap(self, name, data, expected):
        with LOCK:
            if FILES.get(self.store.path_to(name), (b"", None))[1] != expected:
                raise SwapError(f"{name} is not the one that was read")
            FILES[self.store.path_to(name)] = data, next(numbers)

    def remove(self, names):
        with LOCK:
            for name in names:
                for path in [name, *(f"{name}/{inner}" for inner in self.store.sizes(name, depth=1000))]:
                    FILES.pop(self.store.path_to(path), None)

    def close(self):
        self.new.clear()


class DictSink:
    """A new file that is written in any order."""

    def __init__(self, upload, name, nbytes):
        self.upload, self.name, self.data = upload, name, bytearray(nbytes)

    def write(self, data, offset):
        self.data[offset : offset + len(data)] = data

    def close(self):
        self.upload.put([(self.name, bytes(self.data))])
