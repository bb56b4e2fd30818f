"""A checkpoint in another format, under other names, as another dtype: leaf by leaf, in little memory. Needs no jax."""

from __future__ import annotations

import datetime as dt
import os
import re
import secrets
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

import eformer
from eformer.checkpoint._deferred import Stored, stored_in
from eformer.checkpoint._formats import streams
from eformer.checkpoint._formats._names import SUFFIX
from eformer.checkpoint._formats._nested import nested, parts_of_name
from eformer.checkpoint._formats._writing import itemsize_of
from eformer.checkpoint._formats.find import find
from eformer.checkpoint._hosts import Alone
from eformer.checkpoint._job import Job
from eformer.checkpoint._leaf import Region, name_to_path, split_name
from eformer.checkpoint._manifest import UNREADABLE, TreeEntry
from eformer.checkpoint._ndarray import floating_dtype, is_floating
from eformer.checkpoint._options import SaveOptions
from eformer.checkpoint._pending import turns
from eformer.checkpoint._pieces import PIECE_BYTES
from eformer.checkpoint._pool import default_threads
from eformer.checkpoint._progress import metered
from eformer.checkpoint._rename import Renamed, Rule, apply, origins, parse_rules
from eformer.checkpoint._source import Source, Staging
from eformer.checkpoint._store.local import (
    list_names,
    local_path,
    make_directories,
    put,
    replacing,
    sync_directory,
)
from eformer.checkpoint._store.many import ScratchTree, sweep_unpublished
from eformer.checkpoint._text import shortened, size
from eformer.checkpoint._value import value_from_json
from eformer.checkpoint._view import View
from eformer.checkpoint._view import open as open_view
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer.checkpoint._progress import Meter, Progress
    from eformer.checkpoint._source import Deferred

To = Literal["safetensors", "tensorstore", "msgpack", "npz"]

MEMORY = 2 * 10**9
_RESERVE = 64 * 2**20  # bytes: threads, buffers of the system's libraries, what Python keeps
_LEAST = 64 * 2**20
_PER_LEAF = {"tensorstore": 3500}  # bytes, for what is known of it and recorded; measured by bench/cli.py
_PER_LEAF_ELSE = 1500
_SMALL = 2**16
_MOST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Planned:
    """A leaf of the new checkpoint: what it is, and which leaves it is made of."""

    name: str
    what: str
    nbytes: int
    origins: tuple[str, ...]
    how: str = ""

    def __str__(self) -> str:
        made_of = self.origins[0] if len(self.origins) == 1 else f"{self.origins[0]} ... {self.origins[-1]}"
        arrow = "" if self.origins == (self.name,) else f"{made_of} -> "
        colon = "" if self.what.startswith("=") else ":"
        return f"{arrow}{self.name}{colon} {self.what}{f' ({self.how})' if self.how else ''}"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What `convert` did, or would do. `notes` say what a reader of the result will miss, or could wonder about."""

    source: str
    destination: str
    to: str
    leaves: dict[str, tuple[Planned, ...]]
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaves in self.leaves.values() for leaf in leaves)

    def __str__(self) -> str:
        number = sum(map(len, self.leaves.values()))
        leaves = f"{number:,} {'leaf' if number == 1 else 'leaves'}"
        head = f"{self.source} -> {self.destination} ({self.to}): {leaves}, {size(self.nbytes)}"
        lines = [
            f"  {f'[{prefix}] ' if prefix else ''}{leaf}"
            for prefix, leaves in self.leaves.items()
            for leaf in leaves
        ]
        return "\n".join([head, *lines, *(f"! {note}" for note in self.notes)])


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: To | None = None,
    prefix: str | None = None,
    rename: str | os.PathLike[str] | Sequence[str] | None = None,
    dtype: Any = None,
    max_shard_bytes: int | None = None,
    memory: int = MEMORY,
    dry_run: bool = False,
    progress: Progress = None,
) -> Conversion:
    """The checkpoint at `source`, whoever wrote it, is at `destination` in the format `to`, whole; or nothing is there.

    The program takes at most `memory` bytes meanwhile, however large a leaf is. What is read is checked against its
    digests. `to` may be left out where the destination's suffix says it. A tree that is asked for by its `prefix` is
    stored without one; else all trees are converted, and keep theirs. `rename` is a file of rules, or the rules: see
    `docs/guides/renaming.md`. `dtype` casts floating leaves. With `dry_run` nothing is written.
    """
    where = local_path(destination).absolute()
    form = _format(where, to)
    rules = _rules(rename)
    with ExitStack() as stack:
        trees = _open(source, prefix, stack)
        made = {name: _made(view, rules, dtype, form) for name, view in trees.items()}
        conversion = _planned(source, destination, form, made)
        _check(made, form, where, max_shard_bytes)
        if not dry_run:
            budget = _budget(memory, made, form)
            _require_room(where, conversion.nbytes)
            with metered(progress, conversion.nbytes, "converting") as meter:
                _write(where, form, made, budget, max_shard_bytes, meter)
    return conversion


# ------------------------------------------------------------------------------------------------ what


@dataclass(slots=True)
class _Made:
    """A tree of the new checkpoint."""

    view: View
    sources: list[Source]
    raw_values: dict[str, Any]
    structure: Any
    hows: dict[str, str] = field(default_factory=dict)
    old_names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def values(self) -> dict[str, Any]:
        return {name: value_from_json(value) for name, value in self.raw_values.items()}


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


def _made(view: View, rules: list[Rule] | None, dtype: Any, form: To) -> _Made:
    tree = view.tree
    cast = None if dtype is None else floating_dtype(dtype)
    arrays = {name: Stored(view, name, entry) for name, entry in tree.leaves.items()}
    values = tree.raw_values
    structure = msgspec.json.decode(tree.structure)
    if rules is None:
        sources = [_source(name, array, cast) for name, array in arrays.items()]
        made = _Made(view, sources, values, structure)
    else:
        made = _renamed(view, apply(rules, arrays, list(values)), values, cast)
    if isinstance(structure, dict) and UNREADABLE in structure and rules is None:
        made.structure = streams.names_as_structure([*arrays, *values])
        made.notes.append("the structure cannot be read, and is dicts by the names now")
    made.notes += _losses(made, form)
    return made


def _source(name: str, array: Deferred, cast: str | None) -> Source:
    (first, *_) = stored_in(array)
    entry, is_whole = first.entry, array is first
    whole = Region.whole(array.shape)
    dtype = cast if cast and is_floating(entry.dtype) else entry.dtype
    return Source(
        name,
        dtype,
        array.shape,
        entry.home,
        entry.key,
        entry.sharding if is_whole else None,  # it says what lay along which axis
        parts=((whole, array),),
        regions=(whole,),
    )


def _renamed(view: View, renamed: Renamed, values: dict[str, Any], cast: str | None) -> _Made:
    turned = [
        f"leaf {stored.name!r} holds PRNG keys, which cannot be turned around"
        for array in renamed.arrays.values()
        for stored in stored_in(array)
        if stored.entry.key and stored is not array
    ]
    if turned:
        raise MismatchError(turned, context="rename")
    names = [*renamed.arrays, *renamed.plain.values()]
    structure, final = nested({name: _parts(name) for name in names})
    made = _Made(
        view,
        [_source(final[name], array, cast) for name, array in renamed.arrays.items()],
        {final[new]: values[old] for old, new in renamed.plain.items()},
        structure,
        {final[name]: how for name, how in renamed.hows.items()},
        {final[new]: old for old, new in renamed.plain.items()},
    )
    made.notes += [f"matches no leaf: {rule}" for rule in renamed.idle]
    made.notes += [f"no rule, keeps its name: {name}" for name in renamed.kept]
    made.notes += [f"left out: {name}" for name in renamed.left_out]
    return made


def _parts(name: str) -> tuple[str, ...]:
    """Of a name as ours are, or as somebody has written it into a rule."""
    try:
        name_to_path(name)
    except FormatError:
        return parts_of_name(name)
    return split_name(name)


def _losses(made: _Made, form: To) -> Iterator[str]:
    """What the format has no place for."""
    if form in ("npz", "msgpack"):
        if made.view.metadata:
            yield f"{form} has no place for the metadata: {', '.join(sorted(made.view.metadata))[:200]}"
        if keys := [source.name for source in made.sources if source.key]:
            yield f"{form} has no PRNG keys: {', '.join(keys)[:200]} are numbers, for jax.random.wrap_key_data"
    if form == "npz":
        yield "npz has no digests, only checksums, which not all programs compare"
        if '"list"' in (text := msgspec.json.encode(made.structure).decode()) or '"tuple"' in text:
            yield "npz has names alone: lists and tuples come back as dicts"
        if made.raw_values:
            yield "npz has arrays alone: plain numbers and texts are arrays without axes"
        if dotted := streams.dotted(made.sources, made.raw_values):
            yield f"npz has names alone: the dots in {', '.join(dotted)[:200]} come back as dicts inside of dicts"
        if any(source.dtype == "bfloat16" for source in made.sources):
            yield "numpy.load has no bfloat16, and gives V2: .view(ml_dtypes.bfloat16) of it is what was saved"
    if form == "msgpack":
        yield "msgpack has no digests: what happens to the file later, nobody notices"
        yield "as flax has it, all containers are dicts: flax.serialization.from_bytes(tree, ...) makes the tree again"
    if not made.view.has_names:
        yield "the source has no names: its leaves are called by their numbers"
    if not made.view.tree.save_id:
        yield "the source has no digests: that it could be read is all that is known of it"


def _planned(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    form: To,
    made: Mapping[str, _Made],
) -> Conversion:
    leaves = {
        prefix: (*(_leaf_of(one, s) for s in one.sources), *_values_of(one)) for prefix, one in made.items()
    }
    notes = dict.fromkeys(
        f"[{prefix}] {note}" if prefix else note for prefix, one in made.items() for note in one.notes
    )
    return Conversion(os.fspath(source), os.fspath(destination), form, leaves, tuple(notes))


def _leaf_of(made: _Made, source: Source) -> Planned:
    ((_, array),) = source.parts
    nbytes = itemsize_of(source) * Region.whole(source.shape).size
    (first, *_) = stored_in(array)
    hows = [made.hows.get(source.name, "")]
    if first.entry.dtype != source.dtype:
        hows.append(f"from {first.entry.dtype}")
    what = f"{source.dtype}{list(source.shape)}"
    return Planned(source.name, what, nbytes, tuple(origins(array)), ", ".join(filter(None, hows)))


def _values_of(made: _Made) -> Iterator[Planned]:
    for name, value in made.values.items():
        yield Planned(name, f"= {shortened(repr(value), _MOST_SHOWN)}", 0, (made.old_names.get(name, name),))


# ------------------------------------------------------------------------------------------- beforehand


def _check(made: Mapping[str, _Made], form: To, where: Path, max_shard_bytes: int | None) -> None:
    """Refuses what cannot be done, before anything is written."""
    if os.path.lexists(where) and not (where.is_dir() and not list_names(where)):
        raise FileExistsError(f"{where} is there; a conversion makes a new checkpoint: choose another path")
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


def _budget(memory: int, made: Mapping[str, _Made], form: To) -> int:
    """Bytes for elements on their way, beside what the program takes anyway; leaves that lie encoded are read by as
    many threads as there is room for."""
    leaves = sum(len(one.sources) for one in made.values())
    taken = _resident() + _RESERVE + _PER_LEAF.get(form, _PER_LEAF_ELSE) * leaves
    stored = [leaf for one in made.values() for s in one.sources for _, a in s.parts for leaf in stored_in(a)]
    largest = max((leaf.decoded_nbytes for leaf in stored), default=0)
    least = taken + max(_LEAST, 4 * largest)
    if memory < least:
        why = f", and a chunk of {size(largest)} has to be decoded as a whole" if largest else ""
        raise ValueError(
            f"memory={size(memory)}: for {leaves:,} leaves the program itself takes {size(taken)}{why}; it needs at "
            f"least {size(least)}"
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


def _require_room(where: Path, nbytes: int) -> None:
    there = next(parent for parent in where.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise OSError(f"{where} would take {size(nbytes)}, and {there} has {size(free)} left")


# ----------------------------------------------------------------------------------------------- writing


def _write(
    where: Path, form: To, made: Mapping[str, _Made], budget: int, max_shard_bytes: int | None, meter: Meter
) -> None:
    options = SaveOptions(staging_bytes=budget)
    if max_shard_bytes is not None:
        options = SaveOptions(staging_bytes=budget, max_shard_bytes=max_shard_bytes)
    with _appearing(where) as path:
        for prefix, one in made.items():
            sources, one.sources = _with_small_ones(one, budget // 4), []  # who writes them lets go of them
            if form in ("npz", "msgpack"):
                _write_stream(path, form, one, sources, Staging(budget), meter)
            else:
                _job(path, prefix, form, one, sources, options, meter).carry_out()


def _with_small_ones(made: _Made, room: int) -> list[Source]:
    """The sources, with small leaves read already, as many as there is room for: one by one would take longer."""
    chosen: list[str] = []
    for source in made.sources:
        ((_, array),) = source.parts
        if isinstance(array, Stored) and 0 < array.entry.nbytes <= _SMALL < room and not array.decoded_nbytes:
            room -= array.entry.nbytes
            chosen.append(array.name)
    arrays = made.view.read_all(chosen)
    sources = []
    for source in made.sources:
        ((_, array),) = source.parts
        if isinstance(array, Stored) and array.name in arrays:
            source = msgspec.structs.replace(source, whole=arrays[array.name], parts=(), regions=())
        sources.append(source)
    return sources


def _write_stream(
    path: Path, form: To, made: _Made, sources: list[Source], staging: Staging, meter: Meter
) -> None:
    with replacing(path) as file:
        if form == "npz":
            streams.write_npz(file, sources, made.values, staging, meter)
        else:
            streams.write_msgpack(file, made.structure, sources, made.values, staging, meter)


def _job(
    path: Path,
    prefix: str,
    form: Any,
    made: _Made,
    sources: list[Source],
    options: SaveOptions,
    meter: Meter,
) -> Job:
    hosts, before = Alone(), made.view.tree
    tree = TreeEntry(
        save_id=secrets.token_hex(8),
        saved_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        written_by=f"eformer {eformer.__version__}, converted from what {_first_writer(made.view)} wrote",
        block=PIECE_BYTES,
        files=(),
        raw_metadata=before.raw_metadata,
        raw_values=made.raw_values,
        structure=msgspec.Raw(msgspec.json.encode(made.structure)),
    )
    turn = turns.take(path, hosts.name(0))
    return Job(path, prefix, form, sources, tree, options, hosts, turn, meter=meter)


def _first_writer(view: View) -> str:
    """Of a checkpoint that may have been converted before."""
    writer = view.tree.written_by
    return re.sub(r".*converted from what (.*) wrote", r"\1", writer) if writer else view.format


@contextmanager
def _appearing(where: Path) -> Iterator[Path]:
    """A path for a new file or directory, which is at `where` when the block ends well, and gone when it does not."""
    make_directories(where.parent)
    sweep_unpublished(where.parent)  # away with what conversions that died have left
    scratch = ScratchTree(where.parent)
    try:
        path = scratch.data / where.name
        yield path
        put(path, where)
    finally:
        scratch.discard()
    sync_directory(where.parent)
