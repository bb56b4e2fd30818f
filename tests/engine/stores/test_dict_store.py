"""A store over a dict keeps every promise: the two protocols are all that a new store needs."""

import itertools
from pathlib import Path

import pytest

from contracts.checkpoint import DirectoryContract
from contracts.store import StoreContract
from eformer._engine.stores import locate
from support import dict_store
from support.dict_store import FILES, DictStore, DictUpload

numbers = itertools.count()


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(locate.STORES, "dict", DictStore)


@pytest.fixture
def url():
    return f"dict://test-{next(numbers)}/x"


class TestStore(StoreContract):
    """Of the store alone."""

    @pytest.fixture
    def store(self, url):
        return DictStore(url)


class InDict:
    """Where a layout is saved, and how its contract looks at it."""

    upload = DictUpload
    steps = ("put", "stream"), ("sync",), ("commit",)

    @pytest.fixture
    def path(self, url):
        return url

    @pytest.fixture
    def mapping(self):
        return {"mmap": True}

    def place(self, folder):
        return f"dict://{folder.name}-{next(numbers)}/x"

    def make_surroundings(self, path):
        pass

    def exists(self, path):
        return bool(self.listing(path))

    def listing(self, path):
        return sorted(DictStore(path).listing.below(f"{path.removeprefix('dict://')}/"))

    def data_file(self, path):
        found = {
            name: len(data) for name, (data, _) in FILES.items() if f"dict://{name}".startswith(f"{path}/")
        }
        return max((name for name in found if not name.endswith(".json")), key=found.__getitem__)

    def damage(self, file, how):
        data, version = FILES[file]
        changed = bytearray(data)
        FILES[file] = bytes(how(changed) or changed), version

    def name_in_errors(self, file):
        return file.rpartition("/")[2]


@pytest.mark.sample(5)
class TestDirectory(InDict, DirectoryContract):
    """Safetensors files in a dict."""


@pytest.mark.sample(5)
class TestArrays(InDict, DirectoryContract):
    """Zarr arrays in a dict."""

    format = "tensorstore"

    def name_in_errors(self, file):
        return "/".join(file.split("/")[-2:])


def test_it_is_short():
    """The page for contributors shows all of it."""
    assert len(Path(dict_store.__file__).read_text().splitlines()) < 150
