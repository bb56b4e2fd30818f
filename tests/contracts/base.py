"""How a layout is saved and where, and what the tests of its contract do to it behind the program's back."""

from __future__ import annotations

import pytest

from eformer._engine.stores.local_upload import LocalUpload
from eformer.checkpoint import SaveOptions, save, save_async
from support.damage import change


class Contract:
    """A layout on a disk says where it is saved and what its data file is. Another store overrides more of this."""

    # How every tree is saved, unless a test says something else.
    format = "safetensors"
    options = SaveOptions()
    # The store, and what can fail in the middle of a save: while data is written, and right before the commit.
    upload = LocalUpload
    steps = ("put", "create"), ("sync",), ("_publish",)

    @pytest.fixture(autouse=True)
    def saved_so(self, monkeypatch):
        for function in (save, save_async):
            defaults = {**function.__kwdefaults__, "format": self.format, "options": self.options}
            monkeypatch.setattr(function, "__kwdefaults__", defaults)

    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch):
        """So that small arrays have many digests, and reads begin and end inside of them."""
        monkeypatch.setattr("eformer._engine.saving.commit.PIECE_BYTES", 256)

    @pytest.fixture
    def path(self, tmp_path):
        """Where to save; what is around it is there only if `make_surroundings` has made it."""
        return self.place(tmp_path / "inner")

    @pytest.fixture
    def mapping(self):
        """The arguments of a load that maps what can be mapped."""
        return {"mmap": True}

    # ------------------------------------------------------------------------------------------ store

    def place(self, folder):
        """A path to save to, which no other folder leads to."""
        raise NotImplementedError

    def make_surroundings(self, path):
        path.parent.mkdir(exist_ok=True)

    def exists(self, path):
        return path.exists()

    def listing(self, path):
        """The sorted names of everything around the checkpoint and in it."""
        return sorted(path.parent.rglob("*"))

    # ----------------------------------------------------------------------------------------- damage

    def data_file(self, path):
        """The file that most data is in, which `damage` can change."""
        raise NotImplementedError

    def damage(self, file, how):
        """Changes the bytes of a file, which `how` gets as a bytearray: in place, or to those that it returns."""
        change(file, how)

    def name_in_errors(self, file):
        return file.name

    def position_in_errors(self, at):
        return at
