"""Models on the Hugging Face Hub, read through huggingface_hub: hf://org/model[@revision][/directory].

A store asks for the commit of the revision once and reads only that commit, so it never mixes two. Headers and a few
rows are read by ranged requests. Files that are needed as a whole come through the Hub's own cache, which other
programs share.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

from eformer._engine.stores.listed import ListedStore, Listing
from eformer._engine.stores.local_files import LocalFiles
from eformer._engine.stores.virtual_files import UnchangingFiles
from eformer._engine.tasks.extras import import_extra
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.interrupts import let_through
from eformer.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np

    from eformer._engine.stores.base import Version

_URL = re.compile(
    r"hf://(?P<model>[^/@]+/[^/@]+)(@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(/(?P<path>.*))?"
)

# A file is downloaded as a whole if half of it is asked for, or an eighth of a large file, or this much in one read.
_SMALL_FILE = 16 * 2**20
_LARGE_READ = 32 * 2**20
_TIMEOUT = 60.0  # seconds without an answer

_QUERY = re.compile(r"\?[^\s\"'<>]*")  # the query of a URL, which may carry a signature


def is_hub_url(path: str) -> bool:
    return path.startswith("hf://")


def hub_at(url: str) -> HubStore:
    """Return the store of a model, or of a directory of it."""
    found = _URL.fullmatch(url)
    if found is None or found["model"].startswith(("datasets/", "spaces/")):
        raise ValueError(
            f"{url!r} is not a model of the Hugging Face Hub: expected hf://org/model[@revision][/directory]"
        )
    revision = found["revision"]
    return HubStore(_Model(found["model"], revision and unquote(revision)), found["path"] or "")


_OLD_WEIGHTS = (
    *(
        "*.safetensors",
        "*.safetensors.index.json",
        "*.bin",
        "*.bin.index.json",
        "*.pt",
        "*.pth",
        "*.h5",
        "*.msgpack",
    ),
    *("*.gguf", "*.onnx", "hf_quant_config.json"),
)


class HubRepository:
    """A model on the Hub that is written by one commit, with the token of `hf auth login` or HF_TOKEN."""

    def __init__(self, model: str, revision: str | None) -> None:
        self._model = _Model(model, revision)
        self.name, self.revision = model, revision

    @classmethod
    def of(cls, url: str) -> HubRepository:
        """Return the repository of a URL. Raise ValueError for a directory in it."""
        store = hub_at(url)
        found = _URL.fullmatch(url)
        assert found
        if (found["path"] or "").strip("/"):
            raise ValueError(
                f"{url!r} is a directory of a model; expected hf://org/model[@revision], to which a whole model goes"
            )
        return cls(store.model, found["revision"] and unquote(found["revision"]))

    def create(self) -> None:
        """Create the model and the branch if they do not exist. Raise PermissionError without the right to do so."""
        api = _library().HfApi()
        with self._model.explained("create it", ""):
            api.create_repo(self.name, exist_ok=True)
            if self.revision and not self.revision.startswith("refs/"):
                api.create_branch(self.name, branch=self.revision, exist_ok=True)

    def upload(self, folder: Path) -> None:
        """Upload a directory by one commit, which removes the weights that the model had before."""
        api = _library().HfApi()
        with self._model.explained("upload it", ""):
            api.upload_folder(
                repo_id=self.name,
                folder_path=folder,
                revision=self.revision,
                commit_message="Upload a model exported by eformer",
                delete_patterns=list(_OLD_WEIGHTS),
            )


def refuse_to_write(url: str) -> NoReturn:
    """Raise the error for any operation that would change a model."""
    raise io.UnsupportedOperation(_refusal(url))


def _refusal(url: str) -> str:
    return (
        f"{url}: models of the Hugging Face Hub can only be read, or written by checkpoint.export; save to a "
        "directory, and upload it by `hf upload`"
    )


def _library(part: str = "") -> Any:
    return import_extra(f"huggingface_hub{part}", "hf", "hf:// needs")


# --------------------------------------------------------------------------------------------- requests


class _Model:
    """The files of one commit of a model."""

    def __init__(self, name: str, revision: str | None) -> None:
        self.name, self._revision = name, revision
        self._commit: str | None = None
        self._listing: Listing | None = None
        self.versions: dict[str, Version] = {}
        self._lock = Lock()

    @property
    def url(self) -> str:
        """Return a URL with the commit, or with the given revision until the commit is known."""
        revision = self._commit or self._revision
        return f"hf://{self.name}@{revision}" if revision else f"hf://{self.name}"

    @property
    def listing(self) -> Listing:
        """Return the files of the commit. The first call, from any thread, finds the commit of the revision."""
        with self._lock:
            if self._listing is None:
                api = _library().HfApi()
                if self._commit is None:
                    with self.explained("look it up", ""):
                        info = api.model_info(self.name, revision=self._revision, timeout=_TIMEOUT)
                    self._commit = str(info.sha)
                with self.explained("list its files", ""):
                    found = api.list_repo_tree(self.name, recursive=True, revision=self._commit)
                    # Directories have no size.
                    files = {entry.path: entry for entry in found if hasattr(entry, "size")}
                self.versions = {path: f.lfs.sha256 if f.lfs else f.blob_id for path, f in files.items()}
                self._listing = Listing({path: file.size for path, file in files.items()})
            return self._listing

    def fetch(self, name: str, start: int, nbytes: int) -> bytes:
        """Read a range of a file by a request of its own."""
        utils = _library(".utils")
        url = _library().hf_hub_url(self.name, name, revision=self._commit)
        headers = {
            **utils.build_hf_headers(),
            "Range": f"bytes={start}-{start + nbytes - 1}",
            "Accept-Encoding": "identity",
        }
        with (
            self.explained("read it", name),
            utils.http_stream_backoff("GET", url, headers=headers, timeout=_TIMEOUT) as answer,
        ):
            utils.hf_raise_for_status(answer)
            return _first_of(answer.iter_bytes(), 0 if answer.status_code == 206 else start, nbytes)

    def downloaded(self, name: str) -> Path | None:
        """Return the path of a file in the Hub's cache; None if the cache lacks it."""
        found = _library().try_to_load_from_cache(self.name, name, revision=self._commit)
        return Path(os.path.realpath(found)) if isinstance(found, str) else None

    def download(self, name: str) -> Path:
        """Download a file into the Hub's cache, and return its path."""
        with self.explained("download it", name):
            download = partial(_library().hf_hub_download, self.name, name, revision=self._commit)
            return Path(os.path.realpath(let_through(download)))

    @contextmanager
    def explained(self, operation: str, name: str) -> Iterator[None]:
        """Turn errors of huggingface_hub into built-in errors that name the model and show no secret."""
        errors = _library(".errors")
        where = f"{self.url}/{name}" if name else self.url
        login = "if it is private or gated, ask for access, and log in by `hf auth login` or set HF_TOKEN"
        try:
            yield
        except errors.GatedRepoError:
            raise PermissionError(f"{where}: the Hub refuses to {operation}; {login}") from None
        except errors.RepositoryNotFoundError:
            raise NotFoundError(f"{where}: the Hub has no such model; {login}") from None
        except errors.RevisionNotFoundError:
            raise NotFoundError(f"{where}: the model has no such revision") from None
        except errors.EntryNotFoundError:
            raise FileNotFoundError(f"{where} does not exist") from None
        except errors.OfflineModeIsEnabled:
            raise OSError(
                f"{where}: HF_HUB_OFFLINE is set; unset it, or load the directory that `hf download` has made"
            ) from None
        except (OSError, errors.HTTPError) as error:
            text = _QUERY.sub("?...", str(error))
            raise OSError(f"{where}: the request to {operation} on the Hub failed: {text}") from None


def _first_of(chunks: Iterable[bytes], skipped: int, nbytes: int) -> bytes:
    """Return the first bytes of an answer, and read no more of it, because a server may ignore ranges."""
    found = bytearray()
    for chunk in chunks:
        found += chunk[skipped:]
        skipped = max(0, skipped - len(chunk))
        if len(found) >= nbytes:
            break
    return bytes(found[:nbytes])


# ----------------------------------------------------------------------------------------------- store


class HubStore(ListedStore):
    """A directory of a model, at one commit."""

    read_bytes = 64 * 2**20  # a file of which so much is read is on this machine by then
    read_threads = 16

    def __init__(self, model: _Model, path: str) -> None:
        self._model = model
        self._enter(path)

    def _enter(self, path: str) -> None:
        model, self._path = self._model, path.strip("/")
        self.url = f"{model.url}/{self._path}" if self._path else model.url
        self.refusal = _refusal(self.url)

    @property
    def model(self) -> str:
        """Return the id of the model."""
        return self._model.name

    @property
    def listing(self) -> Listing:
        return self._model.listing

    @property
    def key(self) -> str:
        return self.url

    def path_to(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _version(self, path: str) -> Version:
        return self._model.versions[path]  # a digest of its content

    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> HubFiles:
        return HubFiles(_HubFile(self._model, self.inside(name)) for name in names)


class HubFiles(UnchangingFiles):
    """Files of one commit by number."""

    def __init__(self, files: Iterable[_HubFile]) -> None:
        self._files = list(files)

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        return self._files[number].read_into(memory, offset)

    def nbytes(self, number: int) -> int:
        return self._files[number].nbytes

    def map(self, number: int) -> np.ndarray[Any, Any] | None:
        return self._files[number].on_this_machine().map(0)

    def close(self) -> None:
        for file in self._files:
            file.close()


class _HubFile:
    """A file that is read by ranged requests, and downloaded once much of it is wanted."""

    def __init__(self, model: _Model, name: str) -> None:
        self._model, self._name, self.nbytes = model, name, model.listing.sizes[name]
        self._local: LocalFiles | None = None
        self._was_sought, self._asked = False, 0
        self._lock = Lock()

    def read_into(self, memory: memoryview, offset: int) -> int:
        wanted = max(0, min(len(memory), self.nbytes - offset))
        if not wanted:
            return 0
        local = self.on_this_machine() if self._is_worth_a_download(wanted) else self._local
        if local is not None:
            return local.read_into(0, memory, offset)
        data = self._model.fetch(self._name, offset, wanted)
        memory[: len(data)] = data
        return len(data)

    def _is_worth_a_download(self, wanted: int) -> bool:
        with self._lock:
            self._asked += wanted
            if not self._was_sought:
                self._was_sought = True
                if (path := self._model.downloaded(self._name)) is not None:
                    self._open(path)
        if self._local is not None:
            return False
        part = 2 if self.nbytes <= _SMALL_FILE else 8
        return wanted >= _LARGE_READ or self._asked * part >= self.nbytes

    def on_this_machine(self) -> LocalFiles:
        """Return the file in the Hub's cache, downloaded first if need be."""
        with self._lock:
            if self._local is None:
                self._open(self._model.download(self._name))
            assert self._local is not None
            return self._local

    def _open(self, path: Path) -> None:
        files = LocalFiles(path.parent, [path.name])
        if files.nbytes(0) != self.nbytes:
            raise OSError(f"{path} is {files.nbytes(0)} bytes long, and {self.nbytes} on the Hub; remove it")
        self._local = files

    def close(self) -> None:
        if self._local is not None:
            self._local.close()
