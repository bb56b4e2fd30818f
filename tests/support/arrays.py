"""Write and read zarr arrays by TensorStore alone, as other programs do, and read the index of a directory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import tensorstore

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

INDEX = "tensorstore_index.json"


def write_array(path: Path, array: np.ndarray, **metadata: Any) -> None:
    described = {"shape": list(array.shape), "dtype": "<f4", **metadata}
    spec = {"driver": "zarr", "kvstore": f"file://{path}", "metadata": described}
    tensorstore.open(spec, create=True).result().write(array).result()


def opened(path: Path) -> tensorstore.TensorStore:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
    return tensorstore.open(spec, open=True, read=True).result()


def index_of(path: Path) -> dict[str, Any]:
    return json.loads((path / INDEX).read_text())
