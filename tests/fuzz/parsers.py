"""The parsers behind the doors, called with bytes in memory: ten times as many inputs a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.msgpack.reader import unpack_tree
from eformer._engine.formats.others import torch_distributed, zarr3
from eformer._engine.formats.others.npy import parse_npy_header
from eformer._engine.formats.others.orbax_metadata import CheckpointMetadata, TreeMetadata, build_structure
from eformer._engine.formats.others.single_file import SingleFile
from eformer._engine.formats.others.sniff import FILE_READERS
from eformer._engine.formats.run_steps import Scores
from eformer._engine.formats.safetensors.header import header_length, parse_header
from eformer._engine.formats.zarr.original_structure import parse_original_structure
from eformer._engine.record.indexes import Index
from eformer._engine.record.manifest import Manifest
from eformer._engine.record.manifest import parse_structure as parse_tree
from eformer._engine.record.owners import files_with
from eformer._engine.record.signature import signed_files
from eformer._engine.record.values import parse_json
from eformer._engine.record.zarray import parse_zarray
from eformer._engine.stores.journal import Journal
from eformer._engine.stores.keys import public_key
from eformer._engine.trees.unflatten import unflatten
from eformer.errors import EformerError
from support.keys import PUBLIC

if TYPE_CHECKING:
    from collections.abc import Callable

    from fuzz.cases import Case


def manifest(data: bytes) -> None:
    _use(Manifest.from_json(data, "x"))


def index(data: bytes) -> None:
    found = parse_json(data, Index, "x")
    found.listed()
    _use(found.manifest("x"))


def _use(found: Manifest) -> None:
    """Ask a manifest for everything, and build its trees."""
    for tree in found.trees.values():
        for work in (lambda tree=tree: tree.metadata, lambda tree=tree: _built(tree)):
            try:
                work()
            except EformerError:
                continue


def _built(tree: Any) -> Any:
    leaves = tree.listed_leaves()
    if tree.owners:
        files_with(tree.owners, len(leaves), [(number, None) for number in range(len(leaves))])
    return unflatten(parse_tree(tree.structure), leaves | tree.values)


def header(data: bytes) -> None:
    length = header_length(data, len(data), "x")
    found = parse_header(data[:length], len(data), "x")
    if "manifest" in found.metadata:
        _use(Manifest.parse(found.metadata["manifest"], "x"))


def npy(data: bytes) -> None:
    found = parse_npy_header(lambda nbytes: data[:nbytes])
    found.require_supported()


def orbax_tree(data: bytes) -> None:
    build_structure(parse_json(data, TreeMetadata, "x").leaves, "x")


def orbax_checkpoint(data: bytes) -> None:
    str(parse_json(data, CheckpointMetadata, "x").saved_at)


@dataclass(frozen=True)
class _Bytes:
    """A file in memory, as a store and its files."""

    data: bytes

    def path_to(self, name: str) -> str:
        return name

    def read_into(self, _: int, memory: memoryview, offset: int) -> int:
        found = self.data[offset : offset + len(memory)]
        memory[: len(found)] = found
        return len(found)


def single_file(data: bytes) -> None:
    """Find the checkpoint that a file is, as `sniff.in_other_file` does."""
    inside: Any = _Bytes(data)
    file = SingleFile(inside, "x", len(data), "", inside)
    for read in FILE_READERS:
        if found := read(file, data[:9]):
            _use(found.manifest)
            return


def torch_metadata(data: bytes) -> None:
    torch_distributed._parse(data)


def node(data: bytes) -> None:
    zarr3._require_known("x", parse_json(data, zarr3._Node, "x"))


_KEY = public_key(PUBLIC)

PARSERS: dict[str, Callable[[bytes], Any]] = {
    "manifest.json": manifest,
    "tensorstore_index.json": index,
    ".safetensors": header,
    ".msgpack": lambda data: (unpack_tree(data), single_file(data)),
    ".npy": lambda data: (npy(data), single_file(data)),
    **dict.fromkeys((".npz", ".eqx", ".pt", ".bin", ".gguf"), single_file),
    ".distcp": single_file,
    ".metadata": torch_metadata,
    "zarr.json": node,
    "journal.json": lambda data: parse_json(data, Journal, "x"),
    "eformer.sig": lambda data: signed_files(data, _KEY, "x"),
    ".zarray": lambda data: parse_zarray(data, "x").require_readable("x"),
    "_structure.json": lambda data: parse_original_structure(data, "x"),
    "_CHECKPOINT_METADATA": orbax_checkpoint,
    "_METADATA": orbax_tree,
    ".scores.json": lambda data: parse_json(data, Scores, "x"),
}


def parser_of(name: str) -> Callable[[bytes], Any] | None:
    return next((parse for end, parse in PARSERS.items() if name.endswith(end)), None)


def parse(case: Case) -> None:
    """Parse the files of a case."""
    for name, data in case.files.items():
        if found := parser_of(name):
            found(data)


def parsed_files(cases: list[Case]) -> list[Case]:
    """Return cases of one file each."""
    from fuzz.cases import Case

    small = {(name, data) for case in cases for name, data in case.files.items() if parser_of(name)}
    return [Case({name.rpartition("/")[2]: data}) for name, data in sorted(small)]
