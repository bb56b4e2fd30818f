"""Paths in the style of pathlib: on this machine, or in a bucket of Google Cloud Storage."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from operator import truediv
from pathlib import PosixPath, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeAlias

from eformer._engine.stores.durable import replacing
from eformer._engine.stores.urls import path_of_file_url
from eformer._engine.tasks.interrupts import uninterrupted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import ReadableBuffer

    from eformer._engine.stores.objects import Object, Objects

__all__ = ["GCSPath", "LocalPath", "MLUtilPath", "PathStat", "ePath", "ePathLike"]

# One slash is enough: pathlib turns gs://bucket into gs:/bucket. At least two letters: C:/ is a drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_GCS_ADDRESS = re.compile(r"gs://([^/]+)/*(.*)", re.DOTALL)

# The facts that os.stat_result has by number, too.
_NUMBERED = ("mode", "ino", "dev", "nlink", "uid", "gid", "size", "atime", "mtime", "ctime")
_STAT_NAMES = [name.removeprefix("st_") for name in dir(os.stat_result) if name.startswith("st_")]


class MLUtilPath:
    """Create paths from text: `ePath(path)`. `ePath` is the instance. Annotations name the class, or `ePathLike`, which
    is any class of paths.

    Example:

        >>> ePath("gs://bucket/run")
        GCSPath('gs://bucket/run')
        >>> ePath("file:///tmp/run")
        LocalPath('/tmp/run')
    """

    def __call__(self, path: str | os.PathLike[str] | GCSPath) -> LocalPath | GCSPath:
        """Return a GCSPath for gs://bucket/name, and a LocalPath for a path or a file:/// URL.

        A GCSPath or LocalPath is returned unchanged.
        """
        if isinstance(path, (LocalPath, GCSPath)):
            return path
        text = os.fspath(path)
        if not text:
            raise ValueError("the path is empty")
        scheme = _SCHEME.match(text)
        if scheme is None:
            return LocalPath(text)
        if scheme[1] == "gs":
            return GCSPath(text)
        if scheme[1] == "file":
            return LocalPath(path_of_file_url(text))
        raise ValueError(
            f"{text!r}: unknown scheme {scheme[1]!r}, only gs:// and file:// are supported; "
            "use LocalPath for a local directory of this name"
        )


ePath = MLUtilPath()  # noqa: N816  the documented name


class PathStat(dict[str, Any]):
    """Size, times and mode of a path, by key, and by the attributes and numbers of `os.stat_result`.

    Example:

        >>> found = ePath(".").stat()
        >>> found.get("mtime", 0) == found["mtime"] == found.st_mtime and found[6] == found.st_size
        True
    """

    def __missing__(self, key: object) -> int:
        if isinstance(key, int) and key in range(len(_NUMBERED)):
            return int(self[_NUMBERED[key]])  # whole seconds, as `os.stat_result` has them by number
        raise KeyError(key)

    def __getattr__(self, name: str) -> Any:
        key = name.removeprefix("st_")
        if key == name or key not in self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self[key]


class LocalPath(PosixPath):
    """A pathlib path whose `write_bytes` and `write_text` create parent directories, and are atomic and durable.

    Example:

        >>> LocalPath("notes/today.txt").write_text("hello")
        5
    """

    def stat(self, *, follow_symlinks: bool = True) -> PathStat:  # type: ignore[override]
        """Return the facts of `os.stat`, also by the keys size, mtime, ctime, atime, mode, uid and gid.

        A link has the facts of its target; with follow_symlinks=False, its own facts.
        """
        found = super().stat(follow_symlinks=follow_symlinks)
        return PathStat({name: getattr(found, f"st_{name}") for name in _STAT_NAMES})

    @uninterrupted
    def write_bytes(self, data: ReadableBuffer) -> int:
        with replacing(self) as file:
            return file.write(data)

    @uninterrupted
    def write_text(
        self, data: str, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> int:
        with replacing(self) as file, io.TextIOWrapper(file, encoding, errors, newline) as text:
            return text.write(data)


@dataclass(frozen=True, order=True, slots=True, init=False, repr=False)
class GCSPath:
    """A name in a bucket: gs://bucket/name. It is not an os.PathLike, so that nothing mistakes it for a local file.

    Joining and splitting names needs no network. Reading and writing uses the credentials that saves to gs:// use, and
    raises OSError if the service refuses. Buckets have objects but no directories: a directory exists as long as an
    object is below it, and testing for it lists these objects. It has no `rename`, because objects cannot be renamed
    atomically. `path` is text or another GCSPath.

    Example:

        >>> GCSPath("gs://bucket/run") / "step-100"
        GCSPath('gs://bucket/run/step-100')
    """

    bucket: str
    _key: PurePosixPath

    def __init__(self, path: str | GCSPath) -> None:
        address = _GCS_ADDRESS.fullmatch(str(path))
        if address is None:
            raise ValueError(f"{path!r} is not a name in a bucket: expected gs://bucket/name, as text")
        bucket, key = address[1], PurePosixPath(address[2])
        if ".." in (bucket, *key.parts):
            raise ValueError(f"{path!r} contains '..', which has no meaning in a bucket")
        object.__setattr__(self, "bucket", bucket)  # the class is frozen
        object.__setattr__(self, "_key", key)

    # ----------------------------------------------------------------------------------------- names

    def __str__(self) -> str:
        return "gs://" + "/".join((self.bucket, *self._key.parts))

    def __repr__(self) -> str:
        return f"GCSPath({str(self)!r})"

    def as_posix(self) -> str:
        return str(self)

    def __truediv__(self, name: str | os.PathLike[str]) -> GCSPath:
        text = os.fspath(name)
        if text.startswith("/") or _SCHEME.match(text):
            raise ValueError(f"{text!r} is not a name below {self}")
        return GCSPath(f"{self}/{text}")

    def joinpath(self, *names: str | os.PathLike[str]) -> GCSPath:
        return reduce(truediv, names, self)

    @property
    def anchor(self) -> str:
        return f"gs://{self.bucket}/"

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.anchor, *self._key.parts)

    @property
    def parent(self) -> GCSPath:
        return GCSPath(self.anchor + str(self._key.parent))

    @property
    def name(self) -> str:
        return self._key.name

    @property
    def stem(self) -> str:
        return self._key.stem

    @property
    def suffix(self) -> str:
        return self._key.suffix

    def with_name(self, name: str) -> GCSPath:
        return GCSPath(self.anchor + str(self._key.with_name(name)))

    def with_suffix(self, suffix: str) -> GCSPath:
        return GCSPath(self.anchor + str(self._key.with_suffix(suffix)))

    def relative_to(self, other: str | GCSPath) -> PurePosixPath:
        """Return the part of the name after `other`, as a plain name."""
        base = GCSPath(other)
        if self.bucket != base.bucket:
            raise ValueError(f"{self} is not below {base}")
        return self._key.relative_to(base._key)

    # --------------------------------------------------------------------------------------- objects

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return bool(self._object) and self._objects().find(self._object) is not None

    def is_dir(self) -> bool:
        return any(self._objects().children(self._object))

    def stat(self) -> PathStat:
        """Return size, mtime and mode of an object; of a directory, the sum of the sizes and the newest time below."""
        found = self._objects().find(self._object) if self._object else None
        objects = [found] if found else self._objects_below()
        if not objects:
            raise self._not_found()
        newest = max(each.modified for each in objects).timestamp()
        size, mode = sum(each.nbytes for each in objects), stat.S_IFREG if found else stat.S_IFDIR
        return PathStat(size=size, mtime=newest, ctime=newest, atime=newest, mode=mode)

    def iterdir(self) -> Iterator[GCSPath]:
        """Iterate over the objects and directories directly below, in order."""
        return self.glob("*")

    def glob(self, pattern: str) -> Iterator[GCSPath]:
        """Iterate over the objects below that match the pattern and their directories, in order."""
        if not pattern or pattern != pattern.strip("/"):
            raise ValueError(f"Unacceptable pattern: {pattern!r}; expected one like '**/*.json'")
        names = sorted(
            _with_directories([found.key.removeprefix(self._prefix) for found in self._objects_below()])
        )
        wanted = PurePosixPath(pattern).parts
        return iter([self.joinpath(*name) for name in names if _matches(name, wanted)])

    def read_bytes(self) -> bytes:
        try:
            return bytes(self._objects().read(self._object)[0])
        except FileNotFoundError:
            raise self._not_found() from None

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def write_bytes(self, data: ReadableBuffer) -> int:
        content = bytes(memoryview(data))  # bytes(3) would be three zeros
        self._objects().put(self._object, content)
        return len(content)

    def write_text(self, data: str, encoding: str = "utf-8", errors: str = "strict") -> int:
        self.write_bytes(data.encode(encoding, errors))
        return len(data)

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok and not self.is_file():
            raise self._not_found()
        self._objects().delete([self._object])

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing, or raise if the path exists: the first object below it makes it a directory."""
        if not exist_ok and self.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))

    @property
    def _object(self) -> str:
        return "/".join(self._key.parts)

    def _objects_below(self) -> list[Object]:
        return list(self._objects().list(self._prefix))

    @property
    def _prefix(self) -> str:
        return f"{self._object}/" if self._object else ""

    def _not_found(self) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, "No such object", str(self))

    def _objects(self) -> Objects:
        from eformer._engine.stores.clouds import objects_at  # late: names do not need obstore
        from eformer._engine.stores.urls import Address

        return objects_at(Address("gcs", f"gs://{self.bucket}", self.bucket, ""), str(self))


ePathLike: TypeAlias = GCSPath | LocalPath | MLUtilPath  # noqa: N816, PYI042  the documented name


def _with_directories(keys: list[str]) -> set[tuple[str, ...]]:
    """Return the parts of every key and of every directory above it. A key that ends in / is a directory."""
    names = [tuple(key.removesuffix("/").split("/")) for key in keys]
    plain = [name for name in names if not {"", ".", ".."} & set(name)]  # paths drop empty parts and dots
    return {name[:length] for name in plain for length in range(len(name) + 1)}


def _matches(name: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return _matches(name, pattern[1:]) or (bool(name) and _matches(name[1:], pattern))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])
