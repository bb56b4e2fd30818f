"""An input of the fuzzer: the files of a small checkpoint, kept as one zip file."""

from __future__ import annotations

import io
import shutil
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

HERE = b"@PLACE@"  # in a file: the path of the directory that the case is in
DATABASE = "!"  # root!key is a key of the OCDBT database in the directory `root`


@dataclass
class Case:
    """Files by their paths. `target` is the one that is given to the readers; "" for the directory of all."""

    files: dict[str, bytes]
    target: str = ""

    def copy(self) -> Case:
        return Case(dict(self.files), self.target)

    def packed(self) -> bytes:
        """Return a zip file, equal for equal cases. Its comment is the target."""
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in sorted(self.files.items()):
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
            archive.comment = self.target.encode()
        return data.getvalue()

    @classmethod
    def unpacked(cls, data: bytes) -> Case:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return cls({name: archive.read(name) for name in archive.namelist()}, archive.comment.decode())

    @classmethod
    def of_directory(cls, path: Path, target: str = "") -> Case:
        found = [one for one in sorted(path.rglob("*")) if one.is_file()]
        return cls({str(one.relative_to(path)): one.read_bytes() for one in found}, target)


class Place:
    """A directory that holds one case at a time. Only files that differ from the case before are written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clear()

    def clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        self._there: dict[str, bytes] = {}
        self._has_database = False

    def put(self, case: Case) -> str:
        """Write the case, and return the path that is given to the readers."""
        has_database = any(DATABASE in name for name in case.files)
        if has_database or self._has_database or not self._there.keys() <= case.files.keys():
            self.clear()
        self._has_database = has_database
        databases: dict[str, dict[str, bytes]] = {}
        for name, data in case.files.items():
            root, is_key, key = name.partition(DATABASE)
            if is_key:
                databases.setdefault(root, {})[key] = data
            elif self._there.get(name) != data:
                self._write(name, data)
        for root, keys in databases.items():
            write_database(self.root / root, keys)
        self._there = dict(case.files)
        return str(self.root / case.target)

    def _write(self, name: str, data: bytes) -> None:
        path = self.root / name
        data = data.replace(HERE, str(self.root).encode())
        try:
            path.write_bytes(data)
        except FileNotFoundError:
            path.parent.mkdir(parents=True)
            path.write_bytes(data)


class Bucket:
    """A place in a bucket in memory that holds one case at a time."""

    url = "memory://fuzz/case"

    def clear(self) -> None:
        store = self._store()
        store.objects.delete([found.key for found in store.objects.list("fuzz/")])

    def put(self, case: Case) -> str:
        self.clear()
        store = self._store()
        store.objects.put_all([(store.key_of(name), data) for name, data in case.files.items()])
        return f"{self.url}/{case.target}".rstrip("/")

    def get(self) -> Case:
        store = self._store()
        start = store.key_of("x")[:-1]
        keys = [found.key for found in store.objects.list(start)]
        return Case({key.removeprefix(start): bytes(store.objects.read(key)[0]) for key in keys})

    def _store(self) -> Any:
        from eformer._engine.stores.locate import store_at

        return store_at(self.url)


def write_database(directory: Path, keys: dict[str, bytes]) -> None:
    """Write an OCDBT database in one transaction."""
    import tensorstore as ts

    base = {"driver": "file", "path": f"{directory}/"}
    spec = {"driver": "ocdbt", "base": base, "config": {"compression": None}}
    store = ts.KvStore.open(spec, context=ts.Context({"file_io_sync": False})).result()
    with ts.Transaction() as transaction:
        for key, data in keys.items():
            store.with_transaction(transaction)[key] = data


def read_database(directory: Path) -> dict[str, bytes]:
    import tensorstore as ts

    base = {"driver": "file", "path": f"{directory}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    return {key.decode(): bytes(store[key]) for key in store.list().result()}


def with_open_databases(case: Case, directory: Path) -> Case:
    """Return the case with the keys of its databases instead of their files."""
    roots = [name.rpartition("/")[0] for name in case.files if name.rpartition("/")[2] == "manifest.ocdbt"]
    roots = [root for root in roots if "ocdbt.process_" not in root]  # the one above has all of their keys
    files = dict(case.files)
    for root in roots:
        inner = f"{root}/" if root else ""
        for name in case.files:
            if name.startswith((f"{inner}d/", f"{inner}manifest.ocdbt", f"{inner}ocdbt.process_")):
                files.pop(name, None)
        files |= {f"{root}{DATABASE}{key}": data for key, data in read_database(directory / root).items()}
    return Case(files, case.target)
