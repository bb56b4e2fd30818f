"""Describe the backends of a manager: TensorStore, the same compressed, safetensors, and one file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eformer.serialization.async_manager import AsyncCheckpointManager
from support.damage import change

if TYPE_CHECKING:
    from pathlib import Path


class Backend:
    """A way to make a manager, the path that it saves to, and the files that it writes."""

    arguments: dict[str, Any] = {}
    name = "checkpoint"
    is_compressed = False

    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "inner" / self.name

    def make(self, **arguments: Any) -> AsyncCheckpointManager:
        return AsyncCheckpointManager(**{**self.arguments, **arguments})

    @pytest.fixture
    def manager(self):
        return self.make()

    def record_of(self, path: Path) -> Path:
        """Return the index or manifest of a checkpoint."""
        raise NotImplementedError

    def data_of(self, path: Path, key: str) -> Path:
        """Return the file that holds the bytes of an array without prefix."""
        raise NotImplementedError

    def damage(self, path: Path, key: str, value: Any) -> Path:
        """Flip a bit of an array; return the file."""

        def flip(data: bytearray) -> None:
            at = data.find(np.asarray(value).tobytes()) if not self.is_compressed else len(data) // 2
            assert at >= 0
            data[at] ^= 1

        file = self.data_of(path, key)
        change(file, flip)
        return file


class TensorStore(Backend):
    def record_of(self, path):
        return path / "tensorstore_index.json"

    def data_of(self, path, key):
        return path / key / "0"


class Compressed(TensorStore):
    arguments = {"enable_compression": True}
    is_compressed = True


class Safetensors(Backend):
    arguments = {"use_tensorstore": False}

    def record_of(self, path):
        return path / "manifest.json"

    def data_of(self, path, key):
        return path / "model.safetensors"


class OneFile(Backend):
    """A path that ends in .safetensors, which is one file even for a manager that uses TensorStore."""

    name = "checkpoint.safetensors"

    def record_of(self, path):
        return path

    def data_of(self, path, key):
        return path
