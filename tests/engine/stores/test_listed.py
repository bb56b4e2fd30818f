"""A directory of which all files are known by name: looked at without a request, read within its bounds."""

import pytest

from eformer._engine.stores.base import Entry
from eformer._engine.stores.listed import ListedStore, Listing
from eformer._engine.stores.virtual_files import UnchangingFiles
from eformer.errors import FormatError

FILES = {"b/c/x": b"xx", "b.txt": b"", "a": bytes(range(10)), "b/y": b"y"}


class OneFile(UnchangingFiles):
    def __init__(self, data):
        self.data = data

    def read_into(self, number, memory, offset):
        found = self.data[offset : offset + len(memory)]
        memory[: len(found)] = found
        return len(found)


class Dictionary(ListedStore):
    listing = Listing({path: len(data) for path, data in FILES.items()})

    def __init__(self):
        self._enter("")

    def _enter(self, path):
        self._path, self.url = path, f"dict://{path}"

    def path_to(self, name):
        return f"{self.url}/{name}"

    def open(self, names, versions=None):
        return OneFile(FILES[self.inside(names[0])])

    def _version(self, path):
        return path.upper()


def test_a_level_is_listed_in_order_of_names():
    assert list(Dictionary().kinds().items()) == [("a", "file"), ("b", "directory"), ("b.txt", "file")]
    assert Dictionary().kinds("b") == Dictionary().at("b").kinds() == {"c": "directory", "y": "file"}
    with pytest.raises(FileNotFoundError, match="no files are in dict:///c"):
        Dictionary().kinds("c")


def test_lengths_are_listed_down_to_a_depth():
    assert Dictionary().sizes("") == {"a": 10, "b.txt": 0}
    assert Dictionary().sizes("b", 2) == {"c/x": 2, "y": 1}


def test_a_directory_is_left_the_way_it_was_entered():
    inner = Dictionary().at("b").at("c")
    assert (inner.kind("x"), inner.kind("y"), inner.parent()[0].kind("c")) == ("file", None, "directory")
    assert inner.parent()[1] == "c"


@pytest.mark.parametrize(("start", "nbytes"), [(0, None), (3, 4), (8, 100), (10, None), (12, 3), (0, 0)])
def test_a_range_is_read_to_the_end_of_the_file_at_most(start, nbytes):
    stop = None if nbytes is None else start + nbytes
    assert Dictionary().read("a", start, nbytes) == (FILES["a"][start:stop], Entry("a", 10, "A"))


def test_names_of_other_files_are_refused():
    with pytest.raises(FormatError, match="is not the name of a file in dict://b"):
        Dictionary().at("b").read("../a")
    with pytest.raises(FileNotFoundError, match="dict://b/a does not exist"):
        Dictionary().at("b").read("a")
