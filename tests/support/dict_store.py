"""A store over a plain dict, as an example for new ones. It lives and dies with its process."""

import itertools
import threading

from msgspec import UNSET

from eformer._engine.stores.base import SwapError, tidy_up
from eformer._engine.stores.listed import ListedStore, Listing
from eformer._engine.stores.virtual_files import UnchangingFiles

FILES = {}  # the bytes and the version of each file, by its path from the top
LOCK = threading.RLock()
numbers = map(str, itertools.count())


class DictStore(ListedStore):
    """The files in and below one directory. `ListedStore` derives the rest from `listing`."""

    read_threads, read_bytes, most_path_bytes = 4, 2**20, 2**20

    def __init__(self, url):
        self._enter(url.removeprefix("dict://").strip("/"))

    def _enter(self, path):
        self._path, self.url = path, f"dict://{path}"
        self.key = self.url

    @property
    def listing(self):
        with LOCK:
            return Listing({path: len(data) for path, (data, _) in FILES.items()})

    def _version(self, path):
        return FILES[path][1]

    def path_to(self, name):
        return f"{self.url}/{name}"

    def read(self, *what):
        with LOCK:  # the bytes, their length and the version are of one moment
            return super().read(*what)

    def open(self, names, versions=None):
        return DictFiles(
            self, [self.inside(name) for name in names], [(versions or {}).get(n) for n in names]
        )

    def begin(self, root="", token="", *, save_id="", may_be_new=False):
        return DictUpload(self, f"{root}/" if root else "")

    def version(self, name):
        return FILES.get(self._inner(name), (b"", None))[1]

    def write(self, name, data):
        FILES[self._inner(name)] = data, next(numbers)


class DictFiles(UnchangingFiles):
    """Files by number."""

    def __init__(self, store, paths, versions):
        self.store, self.paths, self.versions, self.held = store, paths, versions, {}

    def data(self, number):
        if number in self.held:
            return self.held[number]
        data, version = FILES.get(self.paths[number], (b"", "gone"))
        if version == "gone" or self.versions[number] not in (None, version):
            raise FileNotFoundError(f"dict://{self.paths[number]} was removed or replaced")
        return data

    def hold(self, numbers):
        self.held |= {number: self.data(number) for number in numbers}

    def nbytes(self, number):
        return len(self.data(number))

    def read_into(self, number, memory, offset):
        found = self.data(number)[offset : offset + len(memory)]
        memory[: len(found)] = found
        return len(found)


class DictUpload:
    """New files, which nobody sees before the commit."""

    token, takes, nbytes = "", "streams", 0

    def __init__(self, store, start):
        self.store, self.start, self.new = store, start, {}

    def announce(self):
        raise NotImplementedError("another process has another dict")

    def require_room(self, nbytes):
        """A dict has room."""

    def create(self, name, nbytes):
        raise NotImplementedError("files are written from their beginning to their end; use stream")

    def stream(self, name, nbytes, chunks):
        self.put([(name, b"".join(chunks))])

    def put(self, files):
        self.new |= {self.start + name: data for name, data in files}

    def link(self, name, store, entry):
        if not isinstance(store, DictStore) or store.version(entry.name) != entry.version:
            return False
        if store.path_to(entry.name) != self.store.path_to(self.start + name):  # else it has its name already
            self.put([(name, store.read(entry.name)[0])])
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
            data = change.index and change.index(UNSET)  # nothing after it can fail
            for name, new in self.new.items():
                self.store.write(name, new)
            if data is not None:
                self.swap(commit.name, data, index.version)
            tidy_up(change, self.store, self, lambda change: self.remove(change.gone(index)))

    def swap(self, name, data, expected):
        with LOCK:
            if self.store.version(name) != expected:
                raise SwapError(f"{self.store.path_to(name)} has changed since it was read")
            self.store.write(name, data)

    def remove(self, names):
        """Remove files, and directories with all that is in them."""
        with LOCK:
            for name in names:
                for path in [name, *(f"{name}/{inner}" for inner in self.store.sizes(name, depth=1000))]:
                    FILES.pop(self.store._inner(path), None)

    def close(self):
        self.new.clear()
