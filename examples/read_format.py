"""Read a checkpoint by the specification in docs/format alone, without eformer: every leaf, every digest checked.

python examples/read_format.py ./checkpoint
"""

import json
import math
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  gives numpy bfloat16 and others by name
import numpy as np
import xxhash
import zstandard


def read(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays of each tree by name. Raise ValueError for damage, and for what this reader does not know."""
    manifest = _manifest(path)
    if manifest["version"] > 1:
        raise ValueError(f"{path}: version {manifest['version']} is newer than this reader")
    return {prefix: _tree(path, tree) for prefix, tree in manifest["trees"].items()}


def _manifest(path: Path) -> dict:
    if path.is_file():
        length = int.from_bytes(path.read_bytes()[:8], "little")
        header = path.read_bytes()[: 8 + length]
        _check_own_digest(header)
        return json.loads(json.loads(header[8:])["__metadata__"]["manifest"])
    index = next(
        file for name in ("manifest.json", "tensorstore_index.json") if (file := path / name).exists()
    )
    _check_own_digest(index.read_bytes())
    document = json.loads(index.read_bytes())
    return document.get("eformer", document)


def _check_own_digest(data: bytes) -> None:
    start = data.index(b'"digest":"') + len(b'"digest":"')
    _check(data[:start] + b"0" * 32 + data[start + 32 :], data[start : start + 32].decode())


def _check(data: bytes, digest: str) -> None:
    if xxhash.xxh3_128_hexdigest(data) != digest:
        raise ValueError(f"{len(data)} bytes do not match their digest {digest}")


def _tree(path: Path, tree: dict) -> dict[str, np.ndarray]:
    if "parts" in tree or tree.get("ocdbt"):
        raise ValueError("process records and databases are left to you")
    files = [_data_of(path, tree, file) for file in tree["files"]]
    return {name: _leaf(entry, files, tree["block"]) for name, entry in tree["leaves"].items()}


def _data_of(path: Path, tree: dict, file: dict) -> bytes:
    """Return what follows the header of a file."""
    if path.is_file():
        return path.read_bytes()[-file["nbytes"] :]
    data = (path / tree.get("root", "") / file["name"]).read_bytes()
    if len(data) != file["nbytes"]:
        raise ValueError(f"{file['name']} has {len(data)} bytes, expected {file['nbytes']}")
    header_nbytes = file.get("header_nbytes", 0)
    if header_nbytes:
        _check(data[:header_nbytes], file["header"])
    return data[header_nbytes:]


def _leaf(entry: list, files: list[bytes], block: int) -> np.ndarray:
    dtype, shape, extents = entry[:3]
    array = np.empty(shape, dtype)
    for number, offset, nbytes, digests, box, coding in (
        extent + [None] * (6 - len(extent)) for extent in extents
    ):
        start, stop = box or ([0] * len(shape), shape)
        inner = [b - a for a, b in zip(start, stop, strict=True)]
        data = files[number][offset : offset + nbytes]
        at = 0
        for count, size in enumerate([nbytes] if coding else _piece_sizes(inner, array.itemsize, block)):
            _check(data[at : at + size], digests[32 * count : 32 * count + 32])
            at += size
        array[tuple(map(slice, start, stop))] = _elements(data, array.dtype, inner, coding)
    return array


def _elements(data: bytes, dtype: np.dtype, shape: list[int], coding: list | None) -> np.ndarray:
    if coding is None:
        return np.frombuffer(data, dtype).reshape(shape)
    codec, chunk, *_ = coding
    if codec != "zstd":
        raise ValueError(f"unknown codec {codec}")
    whole = zstandard.ZstdDecompressor().decompress(data, dtype.itemsize * math.prod(chunk))
    return np.frombuffer(whole, dtype).reshape(chunk)[tuple(map(slice, shape))]


def _piece_sizes(shape: list[int], itemsize: int, block: int) -> list[int]:
    whole = row = itemsize * math.prod(shape)
    if whole <= block:
        return [whole] if whole else []
    for axis, size in enumerate(shape):
        row //= size
        if row <= block:
            rows = block // row
            full, rest = divmod(size, rows)
            return math.prod(shape[:axis]) * ([rows * row] * full + [rest * row] * bool(rest))
    raise ValueError("an element is larger than a piece")


if __name__ == "__main__":
    for prefix, leaves in read(Path(sys.argv[1])).items():
        for name, array in leaves.items():
            print(prefix, name, f"{array.dtype}{list(array.shape)}")
