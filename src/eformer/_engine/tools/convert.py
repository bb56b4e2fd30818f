"""A checkpoint in another format, under other names, as another dtype: leaf by leaf, in little memory. Needs no jax."""

from __future__ import annotations

import math
import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from eformer._engine.formats.find import find
from eformer._engine.formats.safetensors.names import SUFFIX
from eformer._engine.processes.hosts import Alone
from eformer._engine.record.options import SaveOptions
from eformer._engine.record.text import count, few, size
from eformer._engine.saving.pending import turns
from eformer._engine.saving.record import new_tree
from eformer._engine.saving.run import Save, carry_out
from eformer._engine.saving.staging import Staging
from eformer._engine.stores.durable import make_directories, replacing
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_upload import appearing
from eformer._engine.stores.locate import local_path
from eformer._engine.tasks.pool import default_threads
from eformer._engine.tasks.progress import metered
from eformer._engine.tools import sequential_writers as streams
from eformer._engine.tools.conversion import Conversion, Made, To, made_of, planned
from eformer._engine.tools.lazy_arrays import StoredLeaf, stored_in
from eformer._engine.tools.rename import Rule, parse_rules
from eformer._engine.tools.view import View
from eformer._engine.tools.view import open as open_view
from eformer._version import __version__
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from eformer._engine.record.planned import Source
    from eformer._engine.tasks.progress import Meter, Progress

_ENOUGH = 2 * 10**9
_RESERVE = 64 * 2**20  # bytes: threads, buffers of the system's libraries, what Python keeps
_LEAST = 64 * 2**20
_PER_LEAF = {"tensorstore": 3500}  # bytes, for what is known of it and recorded; measured with 100,000
_PER_LEAF_ELSE = 1500
_DECODING = (
    3.3  # times a chunk: as it is stored, decoded, and where it goes; and something for what is made of it
)
_SMALL = 2**16


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: To | None = None,
    prefix: str | None = None,
    rename: str | os.PathLike[str] | Sequence[str] | None = None,
    dtype: Any = None,
    max_shard_bytes: int | None = None,
    memory: int | None = None,
    dry_run: bool = False,
    allow_missing: bool = False,
    progress: Progress = None,
) -> Conversion:
    """The checkpoint at `source`, whoever wrote it, is at `destination` in the format `to`, whole; or nothing is there.

    The program takes at most `memory` bytes meanwhile, however large a leaf is; None for 2 GB beside what it has, and
    more only where a larger chunk has to be decoded. What is read is checked against its digests.

    `to` may be left out where the destination's suffix says it. A tree that is asked for by its `prefix` is stored
    without one; else all trees are converted, and keep theirs. `rename` is a file of rules, or the rules: see
    `docs/guides/renaming.md`. `dtype` casts floating leaves. With `dry_run` nothing is written.

    Files of a source that are not read and may hold leaves are an error; with `allow_missing` they are left out, and
    the notes list them.
    """
    where = local_path(destination).absolute()
    if where.name in ("", ".."):
        raise ValueError(f"{os.fspath(destination)!r} names nothing that a conversion could make")
    form = _format(where, to)
    rules = _rules(rename)
    with ExitStack() as stack:
        trees = _open(source, prefix, stack)
        left_out = find(source).left_out(prefix)
        if left_out and not allow_missing:
            raise _missing(source, left_out)
        made = {name: made_of(view, rules, dtype, form) for name, view in trees.items()}
        conversion = planned(source, destination, form, made, left_out)
        _check(made, form, where, max_shard_bytes)
        budget = _budget(memory, made, form)
        if not dry_run:
            _require_place(where, conversion.nbytes)
            with metered(progress, conversion.nbytes, "converting") as meter:
                _write(where, form, made, budget, max_shard_bytes, meter)
    return conversion


# ------------------------------------------------------------------------------------------------ what


def _format(where: Path, to: To | None) -> To:
    by_suffix: dict[str, To] = {SUFFIX: "safetensors", ".npz": "npz", ".msgpack": "msgpack"}
    said = by_suffix.get(where.suffix)
    if to is None and said is None:
        raise ValueError(f"to which format? {where.name!r} does not say it; to= is one of {get_args(To)}")
    if to is not None and to not in get_args(To):
        raise ValueError(f"unknown format {to!r}; to= is one of {get_args(To)}")
    if to and said and to != said:
        raise ValueError(f"{where.name!r} would be taken for {said}, and to= says {to}; choose another name")
    form = to or said
    assert form
    return form


def _rules(rules: str | os.PathLike[str] | Sequence[str] | None) -> list[Rule] | None:
    if rules is None:
        return None
    if isinstance(rules, (str, os.PathLike)):
        try:
            return parse_rules(Path(rules).read_text(encoding="utf-8-sig"), os.fspath(rules))
        except UnicodeDecodeError as error:
            raise FormatError(f"{os.fspath(rules)} is no text, and so no file of rules: {error}") from error
    return parse_rules("\n".join(rules), "rename")


def _open(source: str | os.PathLike[str], prefix: str | None, stack: ExitStack) -> dict[str, View]:
    """The trees to convert, by the prefixes that they are to have."""
    found = {"": prefix} if prefix is not None else {name: name for name in find(source).trees}
    trees = {}
    for name, there in found.items():
        trees[name] = open_view(source, prefix=there)
        stack.callback(trees[name].close)
    return trees


def _missing(source: str | os.PathLike[str], left_out: Sequence[str]) -> FormatError:
    what = f"{count(len(left_out), 'file')} would be left out, and may hold leaves"
    return FormatError(
        f"{os.fspath(source)}: {what}: {few(left_out)}. Pass allow_missing=True to convert the rest"
    )


# ------------------------------------------------------------------------------------------- beforehand


def _check(made: Mapping[str, Made], form: To, where: Path, max_shard_bytes: int | None) -> None:
    """Refuses what cannot be done, before anything is written."""
    is_one_file = form in ("npz", "msgpack") or where.suffix == SUFFIX
    if max_shard_bytes is not None and (is_one_file or form != "safetensors"):
        raise ValueError(
            f"max_shard_bytes={max_shard_bytes}: only a directory of safetensors files has shards"
        )
    if is_one_file and len(made) != 1:
        raise ValueError(f"one file holds one tree, and there are {sorted(made)}; choose one with prefix=")
    for one in made.values():
        if form == "npz":
            streams.check_npz(one.sources, one.values)
        if form == "msgpack":
            streams.check_msgpack(one.structure, one.values)


def _budget(memory: int | None, made: Mapping[str, Made], form: To) -> int:
    """Bytes for elements on their way, beside what the program takes anyway; leaves that lie encoded are read by as
    many threads as there is room for."""
    leaves = sum(len(one.sources) for one in made.values())
    taken = _resident() + _RESERVE + _PER_LEAF.get(form, _PER_LEAF_ELSE) * leaves
    stored = [leaf for one in made.values() for s in one.sources for _, a in s.parts for leaf in stored_in(a)]
    largest = max((leaf.decoded_nbytes for leaf in stored), default=0)
    least = taken + max(_LEAST, math.ceil(_DECODING * largest))
    if memory is None:
        memory = max(taken + _ENOUGH, least)
    if memory < least:
        why = f", and a chunk of {size(largest)} has to be decoded as a whole" if largest else ""
        raise ValueError(
            f"memory={size(memory)}: the program itself takes {size(taken)}, the more the more leaves there are{why}; "
            f"it needs at least {size(least)}"
        )
    budget = (memory - taken) // 2
    for leaf in stored:
        if decoded := leaf.decoded_nbytes:
            leaf.threads = min(default_threads(), max(1, budget // (2 * decoded)))
    return budget


def _resident() -> int:
    """What the program takes now, in bytes."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def _require_place(where: Path, nbytes: int) -> None:
    is_empty = where.is_dir() and not where.is_symlink() and not where.is_mount() and not any(where.iterdir())
    if os.path.lexists(where) and not is_empty:
        raise FileExistsError(f"{where} is there; a conversion makes a new checkpoint: choose another path")
    there = next(parent for parent in where.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise OSError(f"{where} would take {size(nbytes)}, and {there} has {size(free)} left")


# ----------------------------------------------------------------------------------------------- writing


def _write(
    where: Path, form: To, made: Mapping[str, Made], budget: int, max_shard_bytes: int | None, meter: Meter
) -> None:
    options = SaveOptions(staging_bytes=budget)
    if max_shard_bytes is not None:
        options = SaveOptions(staging_bytes=budget, max_shard_bytes=max_shard_bytes)
    make_directories(where.parent)
    with appearing(where) as path:
        for prefix, one in made.items():
            one.sources = _with_small_ones(one, budget // 4)
            if form in ("npz", "msgpack"):
                _write_stream(path, form, one, Staging(budget), meter)
            else:
                carry_out(_save(path, prefix, form, one, options), meter=meter)


def _with_small_ones(made: Made, room: int) -> list[Source]:
    """The sources, with small leaves read already, as many as there is room for: one by one would take longer."""
    chosen: list[str] = []
    for source in made.sources:
        ((_, array),) = source.parts
        if (
            isinstance(array, StoredLeaf)
            and 0 < array.entry.nbytes <= _SMALL < room
            and not array.decoded_nbytes
        ):
            room -= array.entry.nbytes
            chosen.append(array.name)
    arrays = made.view.read_all(chosen)
    sources = []
    for source in made.sources:
        ((_, array),) = source.parts
        if isinstance(array, StoredLeaf) and array.name in arrays:
            source = msgspec.structs.replace(source, whole=arrays[array.name], parts=(), regions=())
        sources.append(source)
    return sources


def _write_stream(path: Path, form: To, made: Made, staging: Staging, meter: Meter) -> None:
    with replacing(path) as file:
        if form == "npz":
            streams.write_npz(file, made.sources, made.values, staging, meter)
        else:
            streams.write_msgpack(file, made.structure, made.sources, made.values, staging, meter)


def _save(path: Path, prefix: str, form: Any, made: Made, options: SaveOptions) -> Save:
    hosts, view = Alone(), made.view
    written_by = f"eformer {__version__}, converted from {_first_writer(view)}"
    tree = new_tree(written_by, made.structure, view.tree.raw_metadata, made.raw_values)
    store, file = (LocalStore(path.parent), path.name) if path.suffix == SUFFIX else (LocalStore(path), "")
    turn = turns.take(str(path), hosts.name(0))
    sources, made.sources = made.sources, []  # the save lets go of each leaf when it is written
    return Save(store, file, prefix, form, sources, tree, options, hosts, turn)


def _first_writer(view: View) -> str:
    """Of a checkpoint that may have been converted before."""
    writer = view.tree.written_by
    return re.sub(r".*converted from ", "", writer) if writer else view.format
