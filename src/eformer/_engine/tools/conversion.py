"""What a conversion makes of a checkpoint: leaves under their new names, and what the format has no place for. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from eformer._engine.formats.nested_names import nested, parts_of_name
from eformer._engine.record.dtypes import floating_dtype, is_floating
from eformer._engine.record.manifest import UNREADABLE
from eformer._engine.record.names import join_name, name_to_path, split_name
from eformer._engine.record.planned import Source
from eformer._engine.record.regions import Region
from eformer._engine.record.text import few, shortened, size
from eformer._engine.record.values import value_from_json
from eformer._engine.tools import sequential_writers as streams
from eformer._engine.tools.lazy_arrays import StoredLeaf, stored_in
from eformer._engine.tools.rename import Renamed, Rule, apply, origins
from eformer.errors import FormatError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.record.planned import LazyArray
    from eformer._engine.tools.view import View

To = Literal["safetensors", "tensorstore", "msgpack", "npz"]

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
    """What `convert` did, or would do. `notes` say what a reader of the result will miss, or could wonder about; `kept`
    are leaves that no rule matches, which keep their names."""

    source: str
    destination: str
    to: str
    leaves: dict[str, tuple[Planned, ...]]
    notes: tuple[str, ...]
    kept: tuple[str, ...] = ()

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
        lines += [f"! {note}" for note in self.notes]
        return "\n".join([head, *lines, *(f"! no rule, keeps its name: {name}" for name in self.kept)])


@dataclass(slots=True)
class Made:
    """A tree of the new checkpoint."""

    view: View
    sources: list[Source]
    raw_values: dict[str, Any]
    structure: Any
    hows: dict[str, str] = field(default_factory=dict)
    old_names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def values(self) -> dict[str, Any]:
        return {name: value_from_json(value) for name, value in self.raw_values.items()}


def made_of(view: View, rules: list[Rule] | None, dtype: Any, form: To) -> Made:
    tree = view.tree
    cast = None if dtype is None else floating_dtype(dtype)
    arrays = {name: StoredLeaf(view, name, entry) for name, entry in tree.leaves.items()}
    values = tree.raw_values
    structure = msgspec.json.decode(tree.structure)
    if rules is None:
        sources = [_source(name, array, cast) for name, array in arrays.items()]
        made = Made(view, sources, values, structure)
    else:
        made = _renamed(view, apply(rules, arrays, list(values)), values, cast)
    if isinstance(structure, dict) and UNREADABLE in structure and rules is None:
        made.structure = streams.names_as_structure([*arrays, *values])
        made.notes.append("the structure cannot be read, and is dicts by the names now")
    made.notes += _losses(made, form)
    return made


def _source(name: str, array: LazyArray, cast: str | None) -> Source:
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


def _renamed(view: View, renamed: Renamed, values: dict[str, Any], cast: str | None) -> Made:
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
    made = Made(
        view,
        [_source(final[name], array, cast) for name, array in renamed.arrays.items()],
        {final[new]: values[old] for old, new in renamed.plain.items()},
        structure,
        {final[name]: how for name, how in renamed.hows.items()},
        {final[new]: old for old, new in renamed.plain.items()},
    )
    made.kept = renamed.kept
    made.notes += [f"matches no leaf: {rule}" for rule in renamed.idle]
    made.notes += [f"left out: {name}" for name in renamed.left_out]
    made.notes += [
        f"{name} is called {final[name]}: a part of its name is a leaf, too"
        for name in names
        if final[name] != join_name(_parts(name))
    ]
    return made


def _parts(name: str) -> tuple[str, ...]:
    """Of a name as ours are, or as somebody has written it into a rule."""
    try:
        name_to_path(name)
    except FormatError:
        return parts_of_name(name)
    return split_name(name)


def _losses(made: Made, form: To) -> Iterator[str]:
    """What the format has no place for."""
    if form in ("npz", "msgpack"):
        if made.view.metadata:
            yield f"{form} has no place for the metadata: {', '.join(sorted(made.view.metadata))[:200]}"
        if keys := [source.name for source in made.sources if source.key]:
            yield f"{form} has no PRNG keys: {', '.join(keys)[:200]} are numbers, for jax.random.wrap_key_data"
    if form == "npz":
        yield "npz has no digests, only checksums, which not all programs compare"
        if streams.has_sequences(made.structure):
            yield "npz has names alone: lists and tuples come back as dicts"
        if made.raw_values:
            yield "npz has arrays alone: plain numbers and texts are arrays without axes"
        if renamed := streams.renamed(made.sources, made.raw_values):
            yield f"npz has names alone: these come back as others, for their dots or escapes: {few(renamed)}"
        if any(source.dtype == "bfloat16" for source in made.sources):
            yield "numpy.load has no bfloat16, and gives V2: .view(ml_dtypes.bfloat16) of it is what was saved"
    if form == "msgpack":
        yield "msgpack has no digests: what happens to the file later, nobody notices"
        yield "as flax has it, all containers are dicts: flax.serialization.from_bytes(tree, ...) makes the tree again"
    if not made.view.has_names:
        yield "the source has no names: its leaves are called by their numbers"
    if not made.view.tree.has_digests:
        yield "the source has no digests: that it could be read is all that is known of it"


def planned(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    form: To,
    made: Mapping[str, Made],
    left_out: Sequence[str] = (),
) -> Conversion:
    leaves = {
        prefix: (*(_leaf_of(one, s) for s in one.sources), *_values_of(one)) for prefix, one in made.items()
    }
    labels = {prefix: f"[{prefix}] " if prefix else "" for prefix in made}
    notes = dict.fromkeys(labels[prefix] + note for prefix, one in made.items() for note in one.notes)
    notes |= dict.fromkeys(f"left out: {path}, which is not read and may hold leaves" for path in left_out)
    kept = [labels[prefix] + name for prefix, one in made.items() for name in one.kept]
    return Conversion(os.fspath(source), os.fspath(destination), form, leaves, tuple(notes), tuple(kept))


def _leaf_of(made: Made, source: Source) -> Planned:
    ((_, array),) = source.parts
    nbytes = source.itemsize * Region.whole(source.shape).size
    (first, *_) = stored_in(array)
    hows = [made.hows.get(source.name, "")]
    if first.entry.dtype != source.dtype:
        hows.append(f"from {first.entry.dtype}")
    what = f"{source.dtype}{list(source.shape)}"
    return Planned(source.name, what, nbytes, tuple(origins(array)), ", ".join(filter(None, hows)))


def _values_of(made: Made) -> Iterator[Planned]:
    for name, value in made.values.items():
        yield Planned(name, f"= {shortened(repr(value), _MOST_SHOWN)}", 0, (made.old_names.get(name, name),))
