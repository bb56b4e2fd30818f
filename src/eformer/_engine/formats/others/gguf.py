"""Files of llama.cpp and ggml, GGUF: metadata, then descriptions of tensors, then their bytes.

Tensors of plain numbers are leaves. Quantised tensors, which have many block formats, are listed and not loaded.

Tests: tests/compat/test_gguf.py.
"""

from __future__ import annotations

import io
import math
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from eformer._engine.formats.found import Foreign, Found
from eformer._engine.formats.nested_names import nest, parts_of_name
from eformer._engine.formats.others.single_file import ArrayInFile, SingleFile, describe_file
from eformer._engine.record.dtypes import MOST_AXES, dtype_from_name
from eformer._engine.record.values import locating, value_to_json
from eformer._engine.stores.virtual_files import BinaryFile
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FORMAT = "GGUF"
MAGIC = b"GGUF"

_DTYPES = {
    0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64", 28: "float64", 30: "bfloat16",
}  # fmt: skip
_QUANTISED = {
    2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
    14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_LEAST_NBYTES = {_TEXT: 8, _ARRAY: 12} | {kind: np.dtype(text).itemsize for kind, text in _NUMBERS.items()}

_VERSIONS = (2, 3)
_MAX_HEADER = 2**26  # bytes; the vocabulary of a large model takes about a tenth
_MAX_DEPTH = 8  # of arrays in arrays
_ALIGNMENT, _DEFAULT_ALIGNMENT = "general.alignment", 32
_SPLIT = "split.count"
_READ_AHEAD = 2**20  # bytes


class GgufTensor(Struct, frozen=True):
    """A tensor. `kind` is ggml's number of its type; `offset` counts from the beginning of the first tensor."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Return the length of a tensor of plain numbers in bytes."""
        return math.prod(self.shape) * dtype_from_name(_DTYPES[self.kind]).itemsize

    def in_file(self, start: int) -> ArrayInFile:
        """Describe a tensor of plain numbers in a file whose tensors begin at `start`."""
        offset = start + self.offset if self.nbytes else 0
        return ArrayInFile(_DTYPES[self.kind], self.shape, self.nbytes, offset)


def in_gguf(file: SingleFile, first: bytes) -> Found | None:
    """Find the tree of a GGUF file: nested dicts, split at the dots in the names of the tensors."""
    if not first.startswith(MAGIC):
        return None
    with locating(f"{file.path} is a GGUF file that cannot be read"):
        metadata, tensors, start = _read_header(_Header(file))
        end = _require_places(file, tensors, start)
    plain = [tensor for tensor in tensors if tensor.kind in _DTYPES]
    structure, arrays = nest({tensor.name: tensor.in_file(start) for tensor in plain}, parts_of_name)
    left_out = (*_other_files(metadata), *_bytes_after(file, end, _alignment(metadata)))
    return describe_file(
        file,
        FORMAT,
        arrays,
        structure,
        metadata={name: value_to_json(value) for name, value in metadata.items()},
        foreign=Foreign(
            refused={tensor.name: _kind_of(tensor) for tensor in tensors if tensor.kind not in _DTYPES},
            find_left_out=lambda: left_out,
        ),
    )


def _bytes_after(file: SingleFile, end: int | None, alignment: int) -> tuple[str, ...]:
    """Describe the bytes after the last tensor and its padding, if any."""
    rest = 0 if end is None else file.nbytes - -(-end // alignment) * alignment
    return (f"{rest} bytes after the last tensor",) if rest > 0 else ()


def _kind_of(tensor: GgufTensor) -> str:
    kind = _QUANTISED.get(tensor.kind, f"kind {tensor.kind} of ggml")
    return f"{kind}{list(tensor.shape)}"


def _other_files(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Describe the further files of a model that is split into several, if any."""
    count = metadata.get(_SPLIT, 1)
    is_split = isinstance(count, int) and count > 1
    return (f"{count - 1} further files of this model ({_SPLIT} is {count})",) if is_split else ()


# --------------------------------------------------------------------------------------------- header


class _Header:
    """The beginning of a file, read from one value to the next. A claimed length is checked against the file before
    memory is allocated for it."""

    def __init__(self, file: SingleFile) -> None:
        self._end = min(file.nbytes, _MAX_HEADER)
        self._ahead = io.BufferedReader(BinaryFile(file.read_into, self._end), _READ_AHEAD)
        self.at = self._ahead.seek(len(MAGIC))

    def take(self, nbytes: int) -> bytes:
        """Read the next bytes."""
        if nbytes > self._end - self.at:
            limit = f"allows {_MAX_HEADER}" if self._end == _MAX_HEADER else f"has {self._end}"
            raise FormatError(f"its header needs {nbytes} bytes at {self.at}, but {limit}")
        found = self._ahead.read(nbytes)
        if len(found) < nbytes:
            raise FormatError("it was cut short meanwhile")
        self.at += nbytes
        return found

    def number(self, code: str = "<Q") -> int:
        (found,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return int(found)

    def count(self, least_nbytes: int) -> int:
        """Read the number of the items that follow, each of which takes at least `least_nbytes`."""
        count = self.number()
        if count * least_nbytes > self._end - self.at:
            raise FormatError(f"it announces {count} items at {self.at}, which do not fit into its header")
        return count

    def text(self, errors: str = "strict") -> str:
        data = self.take(self.count(1))
        try:
            return data.decode(errors=errors)
        except UnicodeDecodeError as error:
            raise FormatError(f"the name {data[:200]!r} is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a value of metadata. Texts may be any bytes: some tokens of a vocabulary are not UTF-8."""
        if kind in _NUMBERS:
            return self._numbers(kind, 1)[0]
        if kind == _TEXT:
            return self.text("surrogateescape")
        if kind != _ARRAY:
            raise FormatError(f"its metadata has a value of the unknown type {kind}")
        if depth == _MAX_DEPTH:
            raise FormatError(f"its metadata has arrays nested more than {_MAX_DEPTH} deep")
        inner = self.number("<I")
        count = self.count(_LEAST_NBYTES.get(inner, 1))
        if inner in _NUMBERS:
            return self._numbers(inner, count)
        return [self.value(inner, depth + 1) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        data = self.take(count * dtype.itemsize)
        if kind == _BOOL and data.strip(b"\0\1"):
            raise FormatError("its metadata has a boolean that is neither 0 nor 1")
        return list(np.frombuffer(data, dtype).tolist())


def _read_header(header: _Header) -> tuple[dict[str, Any], list[GgufTensor], int]:
    """Read the metadata, the tensors, and the offset of the first tensor's bytes in the file."""
    _require_version(header.number("<I"))
    tensor_count, pair_count = header.count(24), header.count(13)
    pairs = [(header.text(), header.value(header.number("<I"))) for _ in range(pair_count)]
    _require_unique("keys", (name for name, _ in pairs))
    tensors = [_read_tensor(header) for _ in range(tensor_count)]
    _require_unique("tensors", (tensor.name for tensor in tensors))
    metadata = dict(pairs)
    alignment = _alignment(metadata)
    for tensor in tensors:
        if tensor.offset % alignment:
            raise FormatError(
                f"leaf {tensor.name[:200]!r} is at {tensor.offset}, not at a multiple of {alignment}"
            )
    return metadata, tensors, -(-header.at // alignment) * alignment


def _require_version(version: int) -> None:
    if not version & 0xFFFF:
        raise FormatError("it is big-endian, which is not supported")
    if version not in _VERSIONS:
        raise FormatError(
            f"it has version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} are supported"
        )


def _read_tensor(header: _Header) -> GgufTensor:
    name, axes = header.text(), header.number("<I")
    if axes > MOST_AXES:
        raise FormatError(f"leaf {name[:200]!r} has {axes} axes, more than {MOST_AXES}")
    shape = tuple(header.number() for _ in range(axes))
    return GgufTensor(name, shape[::-1], header.number("<I"), header.number())  # the fastest axis comes first


def _alignment(metadata: Mapping[str, Any]) -> int:
    found = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(found) is not int or found < 1 or found & (found - 1):
        raise FormatError(f"{_ALIGNMENT} is {str(found)[:40]}, not a power of two")
    return found


def _require_unique(kind: str, names: Iterable[str]) -> None:
    (name, number), *_ = [*Counter(names).most_common(1), ("", 0)]
    if number > 1:
        raise FormatError(f"it has two {kind} of the name {name[:200]!r}")


def _require_places(file: SingleFile, tensors: Iterable[GgufTensor], start: int) -> int | None:
    """Refuse tensors that overlap or end after the file. Return the end of the last tensor; None if it is quantised,
    because its length is not known."""
    end, is_known = 0, True
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        is_known = tensor.kind in _DTYPES
        nbytes = tensor.nbytes if tensor.kind in _DTYPES else 0
        if nbytes and tensor.offset < end:
            raise FormatError(f"leaf {tensor.name[:200]!r} overlaps another leaf")
        end = max(end, tensor.offset + nbytes)
        if start + end > file.nbytes and nbytes:
            raise FormatError(
                f"leaf {tensor.name[:200]!r} ends at {start + end}, but the file has {file.nbytes} bytes"
            )
    return start + end if is_known else None
