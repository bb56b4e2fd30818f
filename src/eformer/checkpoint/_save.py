"""Saving a tree: snapshot, write, commit."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import secrets
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import msgspec

import eformer
from eformer.checkpoint import _hosts
from eformer.checkpoint._arrays import Source, Staging, snapshot
from eformer.checkpoint._codec import sha256_of, xxh3_128
from eformer.checkpoint._commit import Pending, Turn, commit, turns
from eformer.checkpoint._formats import _sealing as sealing
from eformer.checkpoint._formats import safetensors, tensorstore
from eformer.checkpoint._formats._names import SUFFIX, base_name, marks
from eformer.checkpoint._formats._writing import is_all_here, sha256_parts
from eformer.checkpoint._formats.find import FOREIGN, find
from eformer.checkpoint._manifest import (
    DataFile,
    LeafEntry,
    Manifest,
    Receipt,
    TreeEntry,
    encode_leaves,
    seal,
)
from eformer.checkpoint._ndarray import floating_dtype
from eformer.checkpoint._options import SaveOptions
from eformer.checkpoint._pieces import PIECE_BYTES
from eformer.checkpoint._pool import default_threads, run_all, uncollected
from eformer.checkpoint._store.local import (
    Scratch,
    local_path,
    make_directories,
    rename,
    scratch_for,
    sweep,
    sync_directory,
)
from eformer.checkpoint._tree import flatten
from eformer.checkpoint._value import is_recorded, value_to_json
from eformer.errors import FormatError, LeafError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from eformer.checkpoint._hosts import Hosts

Format = Literal["safetensors", "tensorstore"]

_DEFAULT = SaveOptions()

# File systems allow names of 255 bytes; the rest is for the number of a shard, the save and the suffix.
_MAX_PREFIX_BYTES = 180


def save(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    format: Format = "safetensors",  # noqa: A002
    metadata: Mapping[str, Any] | None = None,
    options: SaveOptions = _DEFAULT,
) -> str:
    """The tree is at `path`, whole and on stable storage, when this returns; else what was there before still is.

    `path` is a directory, which holds one tree for each `prefix`, or one file if it ends in ".safetensors". The format
    "tensorstore" writes zarr arrays. Returns the path as text. `metadata` is a dict of plain values that `inspect`
    gives back. Nobody may write to the tree's numpy arrays meanwhile; for that there is `save_async`, which copies
    them.
    """
    start(tree, path, prefix=prefix, format=format, metadata=metadata, options=options).carry_out()
    return os.fspath(path)


def save_async(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    format: Format = "safetensors",  # noqa: A002
    metadata: Mapping[str, Any] | None = None,
    options: SaveOptions = _DEFAULT,
) -> Pending:
    """Like `save`, but returns as soon as the caller may donate or change every array of the tree."""
    job = start(tree, path, prefix=prefix, format=format, metadata=metadata, options=options, detach=True)
    pending = Pending(os.fspath(path))
    job.run_in_background(pending)
    return pending


def start(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    format: Format = "safetensors",  # noqa: A002
    metadata: Mapping[str, Any] | None = None,
    options: SaveOptions = _DEFAULT,
    detach: bool = False,
    write_index: bool = True,
) -> Job:
    """A save that only has to be carried out; with `detach` it needs nothing of the caller's any more.

    Without an index arrays lie there as if somebody else had written them.
    """
    if not write_index and format != "tensorstore":
        raise ValueError(f"write_index=False is for the format 'tensorstore'; {format} needs its manifest")
    job = _prepare(tree, path, prefix, format, metadata, options, _hosts.current(), detach=detach)
    job.write_index = write_index
    return job


def _prepare(
    tree: Any,
    path: str | os.PathLike[str],
    prefix: str | None,
    format: Format,  # noqa: A002
    metadata: Mapping[str, Any] | None,
    options: SaveOptions,
    hosts: Hosts,
    *,
    detach: bool,
) -> Job:
    """All that looks at the caller's objects; afterwards the save depends on none of them."""
    _check_format(format, options)
    where = local_path(path).absolute()  # whatever the current directory is later
    _check_prefix(prefix)
    if options.dtype is not None:
        options = dataclasses.replace(options, dtype=floating_dtype(options.dtype))
    recorded = _metadata_to_json(metadata)
    with uncollected():
        leaves, structure = flatten(tree)
        sources, values = snapshot(leaves, options, hosts, detach=detach)
    entry = TreeEntry(
        save_id=secrets.token_hex(8),
        saved_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        written_by=f"eformer {eformer.__version__}, jax {jax.__version__}",
        block=PIECE_BYTES,
        files=(),
        raw_metadata=recorded,
        raw_values=values,
        structure=msgspec.Raw(msgspec.json.encode(structure)),
    )
    return Job(where, prefix or "", format, sources, entry, options, hosts, turns.take(where, hosts.index))


def _check_format(format: str, options: SaveOptions) -> None:  # noqa: A002
    if format not in get_args(Format):
        raise ValueError(f"unknown format {format!r}; this version writes {get_args(Format)}")
    if format != "tensorstore":
        for name in ("max_chunk_bytes", "compression", "ocdbt"):
            if getattr(options, name):
                raise ValueError(
                    f"SaveOptions.{name} is for the format 'tensorstore'; {format} has no such thing"
                )


def _check_prefix(prefix: str | None) -> None:
    """Files are named by it."""
    if prefix is not None and not isinstance(prefix, str):
        raise TypeError(f"prefix={prefix!r}: a prefix is text")
    try:
        nbytes = len(base_name(prefix or "").encode())
        (prefix or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prefix={prefix!r} is no text that can be stored: {error}") from error
    if nbytes > _MAX_PREFIX_BYTES:
        raise ValueError(
            f"prefix={prefix[:40] if prefix else prefix!r}... is too long: {nbytes} bytes in a file name"
        )


def _metadata_to_json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    recorded: dict[Any, Any] = {}
    for name, value in (metadata or {}).items():
        recorded[name] = value_to_json(value)
        if type(name) is not str or not is_recorded(recorded[name]):
            raise LeafError(f"metadata {name!r}: a {type(value).__name__} cannot be stored; use plain values")
    return recorded


@dataclasses.dataclass(slots=True)
class Job:
    """A save that no longer needs its caller."""

    path: Path
    prefix: str
    format: Format
    sources: list[Source]
    tree: TreeEntry
    options: SaveOptions
    hosts: Hosts
    turn: Turn
    names: Sequence[str] = ()
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    write_index: bool = True

    def carry_out(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.turn.end)
            if self.format == "tensorstore":
                self.into_arrays(stack)
            elif self.path.suffix == SUFFIX and not self.path.is_dir():
                self.into_file(stack)
            else:
                self.into_directory(stack)

    def run_in_background(self, pending: Pending, after: Callable[[], None] | None = None) -> None:
        """Carries it out in a thread of its own; `after` is called when it is committed."""

        def work() -> None:
            self.carry_out()
            if after:
                after()

        try:
            pending.start(work)
        except BaseException:  # no thread was to be had: nobody shall wait for this save
            self.turn.end()
            raise

    @property
    def threads(self) -> int:
        return self.options.threads or default_threads()

    def arranged(self, max_bytes: int) -> list[safetensors.File]:
        """The arrays by file. From here on only these hold them, and let go of what is written."""
        with uncollected():
            files = safetensors.arrange(self.sources, max_bytes, self.tree.block)
        self.names, self.sources = [source.name for source in self.sources], []
        return files

    def compute_checksums(self) -> None:
        """Of the leaves that this process has whole, if they are wanted."""
        if not self.options.checksums:
            return
        staging = Staging(self.options.staging_bytes)

        def compute(source: Source) -> None:
            self.checksums[source.name] = sha256_of(sha256_parts(source, staging))

        run_all([partial(compute, s) for s in self.sources if is_all_here(s)], self.threads)

    # --------------------------------------------------------------------------------------- arrays

    def into_arrays(self, stack: ExitStack) -> None:
        writer = self.arrays_writer()
        stack.callback(writer.close)
        commit(
            self.hosts, lambda: self.write_arrays(writer), lambda receipt: self.seal_arrays(writer, receipt)
        )

    def arrays_writer(self) -> tensorstore.ArraysWriter:
        return tensorstore.ArraysWriter(
            self.path,
            self.prefix,
            self.tree.save_id,
            self.options,
            block=self.tree.block,
            threads=self.threads,
            write_index=self.write_index,
        )

    def write_arrays(self, writer: tensorstore.ArraysWriter) -> Receipt:
        writer.write(self.prepare_arrays(writer))
        return writer.receipt()

    def prepare_arrays(self, writer: tensorstore.ArraysWriter) -> list[tensorstore.Array]:
        self.make_place(tensorstore.check_place)
        self.compute_checksums()
        sources, self.sources = self.sources, []
        self.names = [source.name for source in sources]
        return writer.prepare(sources)

    def seal_arrays(self, writer: tensorstore.ArraysWriter, receipt: Receipt) -> None:
        tree = self.with_leaves(receipt.leaves, receipt.files)
        self.turn.wait()
        writer.seal(tree)

    # ------------------------------------------------------------------------------------ directory

    def make_place(self, is_there: Callable[[Path], bool]) -> None:
        make_directories(self.path)
        if not is_there(self.path):
            sync_directory(self.path.parent)  # perhaps one that died has made it, and not got so far

    def into_directory(self, stack: ExitStack) -> None:
        commit(self.hosts, lambda: self.write(stack), self.seal_directory)

    def write(self, stack: ExitStack) -> Receipt:
        """The data of this process, complete and synced in scratch files that stay locked until all is over."""
        self.make_place(lambda path: sealing.check_place(path, self.prefix))
        self.compute_checksums()
        files = self.arranged(self.options.max_shard_bytes)
        for file in files:
            file.header = safetensors.header_of(file, marks(self.tree.save_id, base_name(self.prefix)))
            file.scratch = Scratch(self.path)
            stack.callback(file.scratch.discard)
        safetensors.write_data(files, self.tree.block, Staging(self.options.staging_bytes), self.threads)
        safetensors.write_headers(files, self.threads)
        written = [
            DataFile(safetensors.scratch_of(f).path.name, f.nbytes, len(f.header), xxh3_128(f.header))
            for f in files
        ]
        with uncollected():
            return Receipt(written, safetensors.entries(files))

    def seal_directory(self, receipt: Receipt) -> None:
        tree = self.with_leaves(receipt.leaves, receipt.files)
        self.turn.wait()
        sealing.seal(self.path, self.prefix, tree, [file.name for file in receipt.files])

    def with_leaves(self, leaves: Mapping[str, LeafEntry], files: list[DataFile]) -> TreeEntry:
        """In the order of the tree."""
        with uncollected():
            ordered = {name: leaves[name] for name in self.names}
            for name, sha256 in self.checksums.items():
                ordered[name] = msgspec.structs.replace(ordered[name], sha256=sha256)
        return msgspec.structs.replace(self.tree, files=tuple(files), raw_leaves=encode_leaves(ordered))

    # ------------------------------------------------------------------------------------- one file

    def into_file(self, stack: ExitStack) -> None:
        """One file that carries its own manifest. Digests have a fixed width, so its header's length is known
        before they are."""
        if self.hosts.count > 1:
            raise ValueError(f"{self.path}: several processes save to a directory, not to one file")
        final = Path(os.path.realpath(self.path))
        self.check_file(final)
        self.compute_checksums()
        file, *others = self.arranged(2**63) or [safetensors.File([])]
        if others:
            raise FormatError(f"{self.path}: so many leaves need more than one header; save to a directory")
        file.scratch = scratch_for(final)
        stack.callback(file.scratch.discard)
        file.header = self.header_with_manifest(file)
        safetensors.write_data([file], self.tree.block, Staging(self.options.staging_bytes), self.threads)
        file.header = seal(self.header_with_manifest(file))
        safetensors.write_headers([file], self.threads)
        self.turn.wait()
        rename(file.scratch.path, final)
        sync_directory(final.parent)
        sweep(final.parent)

    def header_with_manifest(self, file: safetensors.File) -> bytes:
        tree = self.with_leaves(safetensors.entries([file]), [DataFile("", file.data_nbytes)])
        manifest = Manifest(format=sealing.FORMAT).with_tree(self.prefix, tree)
        text = msgspec.json.encode(manifest).decode()
        return safetensors.header_of(file, {"digest": manifest.digest, "format": "pt", "manifest": text})

    def check_file(self, final: Path) -> None:
        """Refuses to replace a file of a checkpoint, or one that holds another tree than this save."""
        try:
            found = find(final)
        except (FileNotFoundError, FormatError):  # nothing, or nothing of ours: the caller has named it
            return
        if found.path != final:
            raise ValueError(
                f"{self.path} belongs to the checkpoint {found.path}; save there, or to another file"
            )
        others = set(found.trees) - {self.prefix}
        if others and found.manifest.format not in FOREIGN:
            raise ValueError(
                f"{self.path} holds the tree {sorted(others)}, and one file holds one tree; save to a directory "
                "to keep several"
            )
