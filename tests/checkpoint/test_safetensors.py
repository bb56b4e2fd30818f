"""The safetensors layouts: the contract, what other readers see, and what other writers wrote."""

import os

import pytest

from contracts.checkpoint import CheckpointContract
from eformer import checkpoint
from eformer.checkpoint import SaveOptions, save


class TestDirectory(CheckpointContract):
    def place(self, folder):
        return folder / "checkpoint"

    @pytest.fixture
    def path(self, tmp_path):
        return self.place(tmp_path / "inner")

    def data_file(self, path):
        (file,) = path.glob("*.safetensors")
        return file


class TestShardedDirectory(TestDirectory):
    """The same, over many files."""

    @pytest.fixture(autouse=True)
    def small_files(self, monkeypatch):
        monkeypatch.setattr(SaveOptions.__init__, "__defaults__", (2000, None, "auto", 2**30, None))
        monkeypatch.setattr("eformer.checkpoint._save._DEFAULT", SaveOptions())
        defaults = {**save.__kwdefaults__, "options": SaveOptions()}
        monkeypatch.setattr(save, "__kwdefaults__", defaults)
        monkeypatch.setattr(checkpoint.save_async, "__kwdefaults__", defaults)

    def data_file(self, path):
        return max(path.glob("*.safetensors"), key=os.path.getsize)


class TestOneFile(CheckpointContract):
    def place(self, folder):
        return folder / "checkpoint.safetensors"

    @pytest.fixture
    def path(self, tmp_path):
        return self.place(tmp_path / "inner")

    def data_file(self, path):
        return path
