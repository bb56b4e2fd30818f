"""Saving a tree: what the caller has is taken, and a `Job` does the rest."""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jax
import msgspec

from eformer._engine.formats.safetensors.names import SUFFIX, base_name
from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.dtypes import floating_dtype
from eformer._engine.record.manifest import TreeEntry
from eformer._engine.record.options import SaveOptions
from eformer._engine.record.pieces import PIECE_BYTES
from eformer._engine.record.values import is_recorded, value_to_json
from eformer._engine.saving.pending import Pending, turns
from eformer._engine.saving.run import Format, Job
from eformer._engine.saving.snapshot import snapshot
from eformer._engine.stores.local import local_path
from eformer._engine.tasks.pool import gc_paused
from eformer._engine.trees.flatten import flatten
from eformer._version import __version__
from eformer.errors import LeafError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.tasks.progress import Progress

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
    progress: Progress = None,
) -> str:
    """The tree is at `path`, whole and on stable storage, when this returns; else what was there before still is.

    `path` is a directory, which holds one tree for each `prefix`, or one file if it ends in ".safetensors". The format
    "tensorstore" writes zarr arrays. Returns the path as text. `metadata` is a dict of plain values that `inspect`
    gives back. Nobody may write to the tree's numpy arrays meanwhile; for that there is `save_async`, which copies
    them.

    `progress` is True for a bar on standard error, or is called with the bytes of leaves that were written and with all
    there are, some times a second, from any thread. What it raises, is an error of the save.

    Of several processes all make this call, with the same tree and a directory that all see. Each writes its own part
    of arrays that lie on devices of several; what each has for itself (numpy arrays, arrays of its own devices,
    metadata) is stored as the first process has it.
    """
    job = start(tree, path, prefix=prefix, format=format, metadata=metadata, options=options)
    job.progress = progress
    job.carry_out()
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
    first: Callable[[Any], Any] | None = None,
) -> Job:
    """A save that only has to be carried out; with `detach` it needs nothing of the caller's any more.

    Without an index arrays lie there as if somebody else had written them. `first` is called on the tree: an error of
    it is one of the save, of which other processes hear.
    """
    hosts = _hosts.current("saves", options.processes, options.timeout)
    try:
        if not write_index and format != "tensorstore":
            raise ValueError(
                f"write_index=False is for the format 'tensorstore'; {format} needs its manifest"
            )
        tree = first(tree) if first else tree
        job = _prepare(tree, path, prefix, format, metadata, options, hosts, detach=detach)
    except BaseException as error:
        hosts.fail(error)
        raise
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
    if hosts.count > 1 and format == "safetensors" and where.suffix == SUFFIX and not where.is_dir():
        raise ValueError(f"{where}: several processes save to a directory, not to one file")
    _check_prefix(prefix)
    options = _with_checked_reuse(options, where, format)
    if options.dtype is not None:
        options = dataclasses.replace(options, dtype=floating_dtype(options.dtype))
    recorded = _metadata_to_json(metadata)
    with gc_paused():
        leaves, structure = flatten(tree)
        sources, values, shared = snapshot(leaves, options, hosts, detach=detach)
    entry = TreeEntry(
        save_id=secrets.token_hex(8),
        saved_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        written_by=f"eformer {__version__}, jax {jax.__version__}",
        block=PIECE_BYTES,
        files=(),
        raw_metadata=recorded,
        raw_values=values,
        structure=msgspec.Raw(msgspec.json.encode(structure)),
    )
    host = hosts.name(hosts.index)
    place = where if isinstance(options.reuse, bool) else Path(options.reuse)
    before = turns.last(place, host) if options.reuse else None
    turn = turns.take(where, host)
    return Job(where, prefix or "", format, sources, entry, options, hosts, turn, shared, before)


def _check_format(format: str, options: SaveOptions) -> None:  # noqa: A002
    if format not in get_args(Format):
        raise ValueError(f"unknown format {format!r}; this version writes {get_args(Format)}")
    if format != "tensorstore":
        for name in ("max_chunk_bytes", "compression", "ocdbt"):
            if getattr(options, name):
                raise ValueError(
                    f"SaveOptions.{name} is for the format 'tensorstore'; {format} has no such thing"
                )


def _with_checked_reuse(options: SaveOptions, where: Path, format: str) -> SaveOptions:  # noqa: A002
    """Refuses what is not there, or cannot be done: better now than after a day of writing everything."""
    if options.reuse is False:
        return options
    if format == "safetensors" and where.suffix == SUFFIX and not where.is_dir():
        raise ValueError(f"SaveOptions.reuse is for directories; {where} is one file")
    if options.ocdbt or options.compression:
        raise ValueError("SaveOptions.reuse is for arrays as they are, without ocdbt and compression")
    if isinstance(options.reuse, bool):
        return options
    place = local_path(options.reuse).absolute()
    if not place.exists() and not turns.are_awaited(place):
        raise NotFoundError(f"there is nothing at {place}, whose leaves SaveOptions.reuse wants to use again")
    return dataclasses.replace(options, reuse=place)


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
