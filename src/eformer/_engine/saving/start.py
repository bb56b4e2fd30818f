"""`save` and `save_async`: check the arguments, take the leaves from the caller, and complete the save."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, get_args

import jax

from eformer._engine.formats.safetensors.names import SUFFIX, base_name, refuse_other_suffix
from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.dtypes import floating_dtype
from eformer._engine.record.options import SaveOptions, options_from
from eformer._engine.record.origin import checked_origin
from eformer._engine.saving.commit import new_entry
from eformer._engine.saving.pending import Pending, run_in_background
from eformer._engine.saving.save import ALIASES, Format, Kind, Save, complete, store_options_of
from eformer._engine.saving.several import SaveOfSeveral
from eformer._engine.saving.snapshot import metadata_to_json, snapshot
from eformer._engine.saving.source_digests import SourceDigests
from eformer._engine.stores.local import resolved
from eformer._engine.stores.locate import absolute, locate, store_at
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.deadline import within
from eformer._engine.tasks.interrupts import held_back
from eformer._engine.tasks.pool import gc_paused
from eformer._engine.tasks.turns import turns
from eformer._engine.trees import device_digests, devices
from eformer._engine.trees.flatten import flatten
from eformer._version import __version__
from eformer.errors import NotFoundError

if TYPE_CHECKING:
    import threading
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
    options: SaveOptions | Mapping[str, Any] = _DEFAULT,
    overwrite: bool = False,
    origin: Mapping[str, Any] | None = None,
    progress: Progress = None,
) -> str:
    """Save `tree` to `path`, atomically and durably.

    After an error the path holds the previous checkpoint or, if only the last sync failed, the whole new one.

    tree        any pytree. Do not write to its numpy arrays meanwhile; `save_async` copies them
    path        a directory, which holds one tree for each prefix, or one file if it ends in ".safetensors". It may
                begin with "~", and be a file:// URL or the URL of a bucket, such as s3://, gs:// or az://
    prefix      the name of the tree in the directory
    format      "safetensors", or "zarr" for a zarr array of each leaf; "tensorstore" is another name of "zarr"
    metadata    a dict of plain values, which `inspect` returns; arrays without axes become plain numbers
    options     a `SaveOptions`, or a dict of its fields
    overwrite   replace a ".safetensors" file that another program wrote. Checkpoints of eformer are replaced without
                this; files of other programs in a directory never are
    origin      where the tree comes from: `LoadReport.origin` of the load that it began with, or a dict of plain
                values. `inspect` shows it, and `export` and `convert(back=True)` take rules and configuration from it
    progress    True for a bar on standard error; or a function of the bytes of leaves that are written and of their
                total, called several times a second from any thread. If it raises, the save fails with that error

    Several processes all make this call, with the same tree and a directory that all of them see. Each process writes
    its own boxes of arrays that lie on devices of several. Arrays and metadata that each process has for itself (numpy
    arrays, arrays on its own devices) are stored as the first process has them.

    Returns the path as text.

    Example:
        >>> checkpoint.save({"params": params, "step": 100}, "run/step-100")
        'run/step-100'
    """
    refuse_swapped(tree, path, "save(tree, path)")
    options = options_from(options, SaveOptions)
    with held_back(), within(options.timeout, f"SaveOptions(timeout={options.timeout})"):
        save = start(
            tree,
            path,
            prefix=prefix,
            format=format,
            metadata=metadata,
            options=options,
            overwrite=overwrite,
            origin=origin,
        )
        complete(save, progress)
    return os.fspath(path)


def save_async(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    prefix: str | None = None,
    format: Format = "safetensors",  # noqa: A002
    metadata: Mapping[str, Any] | None = None,
    options: SaveOptions | Mapping[str, Any] = _DEFAULT,
    overwrite: bool = False,
    origin: Mapping[str, Any] | None = None,
) -> Pending:
    """Save like `save`, but return as soon as the caller may donate or change every array of the tree.

    The arguments are those of `save`. Saves to one path are committed in the order of the calls. `Pending.result`
    waits for the save and raises its error; the program does not end before the save has finished.

    Example:
        >>> pending = checkpoint.save_async(state, "run/step-200")
        >>> state = train_step(state, batch)
        >>> pending.result()
        'run/step-200'
    """
    refuse_swapped(tree, path, "save_async(tree, path)")
    options = options_from(options, SaveOptions)
    with held_back() as block:
        pending = Pending(os.fspath(path))
        block.otherwise = pending.give_up  # after a Ctrl-C the caller has no handle of the save
        save = start(
            tree,
            path,
            prefix=prefix,
            format=format,
            metadata=metadata,
            options=options,
            overwrite=overwrite,
            origin=origin,
            detach=True,
        )
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
    overwrite: bool = False,
    origin: Mapping[str, Any] | None = None,
    detach: bool = False,
    write_index: bool = True,
    first: Callable[[Any], Any] | None = None,
    hosts: Hosts | None = None,
) -> Save:
    """Take the arrays from the caller, and return a save that can be completed.

    With `detach`, it no longer needs the caller's arrays. Without an index, the arrays are written as if by another
    program. `first` is called on the tree: if it raises, the save fails with that error in every process. `hosts` are
    the processes that save together; by default `SaveOptions.processes`.
    """
    hosts = hosts or _hosts.current("saves", options.processes, options.timeout)
    with _hosts.told_to_all(hosts), store_options_of(options, path):
        form = _checked_format(format, options, write_index=write_index)
        tree = first(tree) if first else tree
        store, file = _place_of(path, form)
        if hosts.count > 1 and file:
            raise ValueError(f"{store.path_to(file)}: several processes save to a directory, not to one file")
        if prefix is not None:
            _check_prefix(prefix)
        if options.dtype is not None or options.reuse is not None:
            options = _resolved(options, store, file)
        recorded = metadata_to_json(metadata) if metadata else {}
        came_from = checked_origin(origin)
        with gc_paused():
            leaves, structure = flatten(tree)
            sources, values, compared = snapshot(leaves, options, hosts, detach=detach)
        entry = new_entry(
            f"eformer {__version__}, jax {jax.__version__}", structure, recorded, values, came_from
        )
        process = hosts.name(hosts.number)
        interrupts.check()  # the last moment at which no other save waits for this one
        before = _saves_to_await(options.reuse, store, process) if options.reuse else ()
        turn = turns.take(store.at(file).key if file else store.key, process, in_background=detach)
        kind = SaveOfSeveral if hosts.count > 1 else Save
        return kind(
            store,
            file,
            prefix or "",
            form,
            sources,
            entry,
            options,
            hosts,
            turn,
            compared,
            before,
            has_index=write_index,
            overwrite=overwrite,
            at_source=SourceDigests if device_digests.ENABLED and devices.has_accelerator() else None,
        )


def _place_of(path: str | os.PathLike[str], form: Kind) -> tuple[Store, str]:
    """Return the directory to save to, and the name of a single file or ""."""
    place = absolute(path)
    if (
        "." not in place.rstrip("/").rpartition("/")[2]
    ):  # a directory: a bucket need not be asked, which takes time
        return store_at(place), ""
    store, name = locate(place)
    refuse_other_suffix(name, form)
    if form == "safetensors" and name.endswith(SUFFIX) and name != SUFFIX:
        return resolved(store)[0], name
    return store.at(name) if name else store, ""


def refuse_swapped(tree: Any, path: Any, call: str) -> None:
    """Raise TypeError if the tree and the path are swapped. Text is a valid tree if the path is a path."""
    if isinstance(tree, (str, os.PathLike)) and not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{call}: the arguments are swapped; the path is {tree!r}")


def _checked_format(format: Format, options: SaveOptions, *, write_index: bool) -> Kind:  # noqa: A002
    """Return the format under its own name. Refuse an unknown one, and options that it does not have."""
    form = ALIASES.get(format, format)
    if form not in get_args(Kind):
        raise ValueError(f"unknown format {format!r}; expected safetensors or zarr")
    if form == "zarr":
        return "zarr"
    if not write_index:
        raise ValueError("write_index=False is for the format zarr; safetensors files need their manifest")
    for name in ("max_chunk_bytes", "compression", "ocdbt"):
        if getattr(options, name):
            raise ValueError(
                f"SaveOptions.{name} is for the format zarr; safetensors files have no such option"
            )
    return "safetensors"


def _resolved(options: SaveOptions, store: Store, file: str) -> SaveOptions:
    """Return the options with the absolute path of `reuse` and the dtype by name. Fail early if `reuse` names no
    checkpoint or does not apply."""
    if options.dtype is not None:
        options = dataclasses.replace(options, dtype=floating_dtype(options.dtype))
    if options.reuse is None or options.reuse is False:
        return options
    if file:
        raise ValueError(f"SaveOptions.reuse is for directories; {store.path_to(file)} is one file")
    if options.reuse is True:
        return options
    place = absolute(options.reuse)
    earlier, name = locate(place)
    is_there = not name or earlier.exists(name)
    if not is_there and not turns.are_awaited(store_at(place).key):
        raise NotFoundError(f"SaveOptions.reuse: no checkpoint at {place}")
    return dataclasses.replace(options, reuse=place)


def _saves_to_await(
    reuse: str | os.PathLike[str] | bool, store: Store, process: str
) -> list[threading.Event]:
    """Return the saves under way to the checkpoint that `reuse` names."""
    return turns.under_way(store.key if reuse is True else store_at(reuse or "").key, process)


def _check_prefix(prefix: str) -> None:
    """Refuse a prefix that cannot be part of a file name."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix={prefix!r}: a prefix is text")
    try:
        nbytes = len(base_name(prefix).encode())
        prefix.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prefix={prefix!r} is no text that can be stored: {error}") from error
    if nbytes > _MAX_PREFIX_BYTES:
        raise ValueError(f"prefix={prefix[:40]!r}... is too long: {nbytes} bytes in a file name")
