"""Save a tree: take what the caller has, and carry out the save."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, get_args

import jax

from eformer._engine.formats.safetensors.names import SUFFIX, base_name
from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.dtypes import floating_dtype
from eformer._engine.record.options import SaveOptions
from eformer._engine.record.values import is_recorded, value_to_json
from eformer._engine.saving.pending import Pending, turns
from eformer._engine.saving.record import new_tree
from eformer._engine.saving.run import Format, Save, carry_out, run_in_background, told_to_all
from eformer._engine.saving.snapshot import snapshot
from eformer._engine.stores.locate import absolute, locate, store_at
from eformer._engine.tasks.pool import gc_paused
from eformer._engine.trees.flatten import flatten
from eformer._version import __version__
from eformer.errors import LeafError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.stores.base import Store
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
    """Save `tree` to `path`, atomically and durably. On any error the previous checkpoint is left intact.

    Args:
        tree: any pytree. Nobody may write to its numpy arrays meanwhile; `save_async` copies them.
        path: a directory, which holds one tree for each prefix, or one file if it ends in ".safetensors".
        prefix: the name of the tree in the directory.
        format: "safetensors", or "tensorstore" for zarr arrays.
        metadata: a dict of plain values that `inspect` gives back.
        options: see `SaveOptions`.
        progress: True for a bar on standard error; or a function that is called with the bytes of leaves written so
            far and in all, several times a second, from any thread. If it raises, the save fails with that error.

    Several processes all make this call, with the same tree and a directory that all see. Each writes its own part of
    arrays that lie on devices of several. Arrays and metadata that each process has for itself (numpy arrays, arrays on
    its own devices) are stored as the first process has them.

    Returns the path as text.

    Example:
        >>> checkpoint.save({"params": params, "step": 100}, "run/step-100")
        'run/step-100'
    """
    save = start(tree, path, prefix=prefix, format=format, metadata=metadata, options=options)
    carry_out(save, progress)
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
    """Save like `save`, but return as soon as the caller may donate or change every array of the tree.

    Example:
        >>> pending = checkpoint.save_async(state, "run/step-200")
        >>> state = train_step(state, batch)
        >>> pending.result()
        'run/step-200'
    """
    save = start(tree, path, prefix=prefix, format=format, metadata=metadata, options=options, detach=True)
    pending = Pending(os.fspath(path))
    run_in_background(save, pending)
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
    hosts: Hosts | None = None,
) -> Save:
    """Prepare a save that only has to be carried out; with `detach` it needs nothing of the caller's any more.

    Without an index, arrays lie there as if another program had written them. `first` is called on the tree: if it
    raises, the save fails with that error, and other processes hear of it. `hosts` are the processes that save
    together, if the caller knows better.
    """
    hosts = hosts or _hosts.current("saves", options.processes, options.timeout)
    with told_to_all(hosts):
        if not write_index and format != "tensorstore":
            raise ValueError(
                f"write_index=False is for the format 'tensorstore'; {format} needs its manifest"
            )
        tree = first(tree) if first else tree
        return _prepare(tree, path, prefix, format, metadata, options, hosts, detach, write_index)


def _prepare(
    tree: Any,
    path: str | os.PathLike[str],
    prefix: str | None,
    format: Format,  # noqa: A002
    metadata: Mapping[str, Any] | None,
    options: SaveOptions,
    hosts: Hosts,
    detach: bool,
    write_index: bool,
) -> Save:
    """Do all that looks at the caller's objects; afterwards the save depends on none of them."""
    _check_format(format, options)
    store, file = place_of(path, format)
    if hosts.count > 1 and file:
        raise ValueError(f"{store.path_to(file)}: several processes save to a directory, not to one file")
    _check_prefix(prefix)
    options = _with_checked_reuse(options, store, file)
    if options.dtype is not None:
        options = dataclasses.replace(options, dtype=floating_dtype(options.dtype))
    recorded = _metadata_to_json(metadata)
    with gc_paused():
        leaves, structure = flatten(tree)
        sources, values, compared = snapshot(leaves, options, hosts, detach=detach)
    entry = new_tree(f"eformer {__version__}, jax {jax.__version__}", structure, recorded, values)
    host = hosts.name(hosts.index)
    earlier = store.key if isinstance(options.reuse, bool) else store_at(options.reuse).key
    before = turns.last(earlier, host) if options.reuse else None
    turn = turns.take(store.at(file).key if file else store.key, host)
    return Save(
        store, file, prefix or "", format, sources, entry, options, hosts, turn, compared, before, write_index
    )


def place_of(path: str | os.PathLike[str], format: Format) -> tuple[Store, str]:  # noqa: A002
    """Return the directory to save to and ""; or the directory of a file, and its name."""
    store, name = locate(absolute(path))
    if format == "safetensors" and name.endswith(SUFFIX) and name != SUFFIX:
        return store.real(), name
    return store.at(name) if name else store, ""


def _check_format(format: str, options: SaveOptions) -> None:  # noqa: A002
    if format not in get_args(Format):
        raise ValueError(f"unknown format {format!r}; this version writes {get_args(Format)}")
    if format != "tensorstore":
        for name in ("max_chunk_bytes", "compression", "ocdbt"):
            if getattr(options, name):
                raise ValueError(
                    f"SaveOptions.{name} is for the format 'tensorstore'; {format} has no such thing"
                )


def _with_checked_reuse(options: SaveOptions, store: Store, file: str) -> SaveOptions:
    """Refuse what is not there, or cannot be done: better now than after a day of writing everything."""
    if options.reuse is False:
        return options
    if file:
        raise ValueError(f"SaveOptions.reuse is for directories; {store.path_to(file)} is one file")
    if options.ocdbt or options.compression:
        raise ValueError("SaveOptions.reuse is for arrays as they are, without ocdbt and compression")
    if isinstance(options.reuse, bool):
        return options
    place = absolute(options.reuse)
    earlier, name = locate(place)
    is_there = not name or earlier.exists(name)
    if not is_there and not turns.are_awaited(store_at(place).key):
        raise NotFoundError(f"SaveOptions.reuse: no checkpoint at {place}")
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
