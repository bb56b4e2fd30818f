"""Save checkpoints of every layout, and make the files that hostile links, journals and indexes could lead to."""

import os

import msgspec
import numpy as np
import pytest

from eformer.checkpoint import SaveOptions, save
from support.arrays import write_array

TREE = {"a": {"w": np.arange(6, dtype=np.float32)}, "b": np.ones((4, 3))}
NEXT = {"a": {"w": np.arange(9, dtype=np.float32)}, "b": np.zeros((4, 3))}
SCRATCH = ".eformer-0123456789abcdef.tmp"
HEX = "0123456789abcdef" * 2

LAYOUTS = {
    "safetensors": {},
    "safetensors, shards": {"options": SaveOptions(max_shard_bytes=64)},
    "safetensors, prefix": {"prefix": "m"},
    "arrays": {"format": "tensorstore"},
    "arrays, prefix": {"format": "tensorstore", "prefix": "m"},
    "arrays, compressed": {
        "format": "tensorstore",
        "prefix": "m",
        "options": SaveOptions(compression="zstd"),
    },
    "database": {"format": "tensorstore", "options": SaveOptions(ocdbt=True)},
    "database, prefix": {"format": "tensorstore", "prefix": "m", "options": SaveOptions(ocdbt=True)},
    "file": {"name": "run.safetensors"},
}
DIRECTORIES = pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "file"])


def save_as(layout, tree, folder):
    how = dict(LAYOUTS[layout])
    path = folder / how.pop("name", "run")
    save(tree, path, **how)
    return path


def contents(path):
    """Return the inode, the mode and the bytes of everything below a directory, by path."""
    found = {}
    for file in sorted(path.rglob("*")):
        status = os.lstat(file)
        data = file.read_bytes() if file.is_file() and not file.is_symlink() else None
        found[str(file.relative_to(path))] = (status.st_ino, status.st_mode, data)
    return found


def foreign_array(path):
    write_array(path, np.arange(10, dtype=np.float32), chunks=[5], compressor=None)


def scratch_in(path, journal):
    scratch = path / SCRATCH
    scratch.mkdir()
    (scratch / "journal.json").write_bytes(msgspec.json.encode(journal))
    return scratch


def inode(path):
    return os.lstat(path).st_ino
