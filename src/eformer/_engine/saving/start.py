"""Save a tree: take the leaves from the caller, and carry out the save."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, get_args

import jax

from eformer._engine.formats.safetensors.names import SUFFIX, base_name, refuse_other_suffix
from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.dtypes import floating_dtype
from eformer._engine.record.options import SaveOptions, options_from
from eformer._engine.saving.commit import new_tree
from eformer._engine.saving.pending import Pending, run_in_background
from eformer._engine.saving.save import Format, Save, carry_out, store_options_of
from eformer._engine.saving.several import SaveOfSeveral
from eformer._engine.saving.snapshot import metadata_to_json, snapshot
from eformer._engine.stores.local import resolved
from eformer._engine.stores.locate import absolute, locate, store_at
from eformer._engine.tasks import interrupts
from eformer._engine.tasks.deadline import within
from eformer._engine.tasks.interrupts import held_back
from eformer._engine.tasks.pool import gc_paused
from eformer._engine.tasks.turns import turns
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
    progress: Progress = None,
) -> str:
    """Save `tree` to `path`, atomically and durably. On any error the previous checkpoint is left intact.

    tree        any pytree. Do not write to its numpy arrays meanwhile; `save_async` copies them
    path        a directory, which holds one tree for each prefix, or one file if it ends in ".safetensors". "~" and
                file:// URLs are understood, and those of buckets: s3://, gs://, az:// and others
    prefix      the name of the tree in the directory
    format      "safetensors", or "tensorstore" for zarr arrays
    metadata    a dict of plain values that `inspect` gives back; arrays without axes become plain numbers
    options     a `SaveOptions`, or a dict of its fields
    overwrite   replace a ".safetensors" file that another program wrote. Checkpoints of eformer are replaced without
                this; files of other programs in a directory never are
    progress    True for a bar on standard error; or a function that is called with the bytes of leaves written so far
                and in all, several times a second, from any thread. If it raises, the save fails with that error

    Several processes all make this call, with the same tree and a directory that all see. Each writes its own part of
    arrays that lie on devices of several. Arrays and metadata that each process has for itself (numpy arrays, arrays on
    its own devices) are stored as the first process has them.

    Returns the path as text.

    Example:
        >>> checkpoint.save({"params": params, "step": 100}, "run/step-100")
        'run/step-100'
    """
    refuse_swapped(tree, path, "save(tree, path)")
    options = options_from(options, SaveOptions)
    with held_back(), within(options.timeout, f"SaveOptions(timeout={options.timeout})"):
        save = start(
            tree, path, prefix=prefix, format=format, metadata=metadata, options=options, overwrite=overwrite
        )
        carry_out(save, progress)
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
    with held_back() as block:
        pending = Pending(os.fspath(path))
        block.otherwise = pending.give_up
        save = start(
            tree,
            path,
            prefix=prefix,
            format=format,
            metadata=metadata,
            options=options,
            overwrite=overwrite,
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
    options: SaveOptions | Mapping[str, Any] = _DEFAULT,
    overwrite: bool = False,
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
    options = options_from(options, SaveOptions)
    hosts = hosts or _hosts.current("saves", options.processes, options.timeout)
    with _hosts.told_to_all(hosts), store_options_of(options, path):
        _check_format(format, options, write_index=write_index)
        tree = first(tree) if first else tree
        store, file = place_of(path, format)
        if hosts.count > 1 and file:
            raise ValueError(f"{store.path_to(file)}: several processes save to a directory, not to one file")
        if prefix is not None:
            _check_prefix(prefix)
        if options.dtype is not None or options.reuse is not None:
            options = _resolved(options, store, file)
        recorded = metadata_to_json(metadata) if metadata else {}
        with gc_paused():
            leaves, structure = flatten(tree)
            sources, values, compared = snapshot(leaves, options, hosts, detach=detach)
        entry = new_tree(f"eformer {__version__}, jax {jax.__version__}", structure, recorded, values)
        host = hosts.name(hosts.index)
        interrupts.check()  # the last chance before others wait for this save
        before = _saves_to_await(options.reuse, store, host) if options.reuse else ()
        turn = turns.take(store.at(file).key if file else store.key, host, in_background=detach)
        kind = SaveOfSeveral if hosts.count > 1 else Save
        return kind(
            store,
            file,
            prefix or "",
            format,
            sources,
            entry,
            options,
            hosts,
            turn,
            compared,
            before,
            has_index=write_index,
            overwrite=overwrite,
        )


def place_of(path: str | os.PathLike[str], format: Format) -> tuple[Store, str]:  # noqa: A002
    """Return the directory to save to and ""; or the directory of a file, and its name."""
    store, name = locate(absolute(path))
    refuse_other_suffix(name, format)
    if format == "safetensors" and name.endswith(SUFFIX) and name != SUFFIX:
        return resolved(store)[0], name
    return store.at(name) if name else store, ""


def refuse_swapped(tree: Any, path: Any, call: str) -> None:
    """Refuse a path in the place of the tree. A tree that is text is one, as long as there is a path as well."""
    if isinstance(tree, (str, os.PathLike)) and not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{call}: the arguments are swapped; the path is {tree!r}")


def _check_format(format: str, options: SaveOptions, *, write_index: bool) -> None:  # noqa: A002
    if not write_index and format != "tensorstore":
        raise ValueError(f"write_index=False is for the format 'tensorstore'; {format} needs its manifest")
    if format not in get_args(Format):
        raise ValueError(f"unknown format {format!r}; this version writes {get_args(Format)}")
    if format != "tensorstore":
        for name in ("max_chunk_bytes", "compression", "ocdbt"):
            if getattr(options, name):
                raise ValueError(
                    f"SaveOptions.{name} is for the format 'tensorstore'; {format} has no such thing"
                )


def _resolved(options: SaveOptions, store: Store, file: str) -> SaveOptions:
    """Return the options with the whole path of `reuse` and a dtype by name. Fail early if `reuse` names no checkpoint
    or does not apply."""
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


def _saves_to_await(reuse: str | os.PathLike[str] | bool, store: Store, host: str) -> list[threading.Event]:
    """Return the saves under way to the place whose leaves this one may use again."""
    return turns.under_way(store.key if reuse is True else store_at(reuse or "").key, host)


def _check_prefix(prefix: str) -> None:
    """Files are named by it."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix={prefix!r}: a prefix is text")
    try:
        nbytes = len(base_name(prefix).encode())
        prefix.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"prefix={prefix!r} is no text that can be stored: {error}") from error
    if nbytes > _MAX_PREFIX_BYTES:
        raise ValueError(f"prefix={prefix[:40]!r}... is too long: {nbytes} bytes in a file name")
