"""Plan a conversion: the leaves under their new names, and the losses in the target format. Pure.

Tests: tests/engine/tools/test_convert.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from eformer._engine.formats.nested_names import nested_dicts, nested_spelled, split_spelled
from eformer._engine.record.boxes import Box
from eformer._engine.record.dequantized import dequantized_in
from eformer._engine.record.dtypes import floating_dtype, is_floating
from eformer._engine.record.indexes import MEMORY
from eformer._engine.record.lazy_arrays import entry_of, stored_leaves
from eformer._engine.record.manifest import UNREADABLE
from eformer._engine.record.names import join_name, names_below, refuse_root, resolve, split_name
from eformer._engine.record.origin import Origin, new_origin, rules_in
from eformer._engine.record.planned import Source
from eformer._engine.record.rename import RenamingRules, refuse_transformed_keys
from eformer._engine.record.structure import part_below, with_names
from eformer._engine.record.text import count, few, glance, shortened, size
from eformer._engine.record.values import LeftToCode, value_from_json
from eformer._engine.tools.sequential_writers import has_sequences, renamed_in_npz, require_structure
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from eformer._engine.formats.model_rules import ModelRules
    from eformer._engine.record.planned import LazyArray
    from eformer._engine.record.stages import Renamed
    from eformer._engine.tools.view import View

TargetFormat = Literal["safetensors", "zarr", "tensorstore", "msgpack", "npz", "peft", "orbax", "hf"]

_MOST_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ConvertedLeaf:
    """A leaf of the new checkpoint: its dtype and shape, or its value, and the leaves that it comes from."""

    name: str
    what: str
    nbytes: int
    origins: tuple[str, ...]
    how: str = ""

    def __str__(self) -> str:
        first, last = self.origins[0], self.origins[-1]
        source = first if len(self.origins) == 1 else f"{first} ... {last}"
        arrow = "" if self.origins == (self.name,) else f"{source} -> "
        colon = "" if self.what.startswith("=") else ":"
        return f"{arrow}{self.name}{colon} {self.what}{f' ({self.how})' if self.how else ''}"


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of `convert`, or with `dry_run` its plan. `print` shows it.

    leaves   the leaves of the result, by prefix
    notes    losses compared with the source, and possible surprises
    kept     names that no rule matches, which stay as they are

    Example:

        >>> plan = checkpoint.convert("run/step-100", "model.npz", dry_run=True)
        >>> plan.nbytes
        384
    """

    source: str
    destination: str
    to: str
    leaves: dict[str, tuple[ConvertedLeaf, ...]]
    notes: tuple[str, ...]
    kept: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves of the result."""
        return sum(leaf.nbytes for leaves in self.leaves.values() for leaf in leaves)

    def __repr__(self) -> str:
        return glance(str(self))

    def __str__(self) -> str:
        number = sum(map(len, self.leaves.values()))
        leaves = count(number, "leaf", "leaves")
        head = f"{self.source} -> {self.destination} ({self.to}): {leaves}, {size(self.nbytes)}"
        lines = [
            f"  {f'[{prefix}] ' if prefix else ''}{leaf}"
            for prefix, leaves in self.leaves.items()
            for leaf in leaves
        ]
        lines += [f"! {note}" for note in self.notes]
        return "\n".join([head, *lines, *(f"! no rule matches, name kept: {name}" for name in self.kept)])


@dataclass(slots=True)
class ConvertedTree:
    """One tree of the new checkpoint. `transforms` has the steps of the rules for each leaf, as text.

    `adapter_config` is the configuration beside the leaves of a PEFT adapter.
    """

    view: View
    sources: list[Source]
    raw_values: dict[str, Any]
    structure: Any
    transforms: dict[str, str] = field(default_factory=dict)
    old_names: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    adapter_config: dict[str, Any] | None = None
    origin: dict[str, Any] | None = None
    keeps_metadata: bool = True

    @property
    def values(self) -> dict[str, Any]:
        return {name: value_from_json(value) for name, value in self.raw_values.items()}


@dataclass(frozen=True, slots=True)
class LeafChoice:
    """The leaves to convert: below `root`, renamed by `rules`, and then those that `keys` name; None for all.

    `numbers`, `shapes` and `dtypes` are facts for the rules: the model's config.json, and the shapes and dtypes of new
    leaves that are known.
    """

    root: str | None = None
    rules: RenamingRules | None = None
    keys: Sequence[str] | None = None
    numbers: Mapping[str, Any] | None = None
    shapes: Mapping[str, tuple[int, ...]] | None = None
    dtypes: Mapping[str, str] | None = None

    @property
    def keeps_names(self) -> bool:
        return self.rules is None and self.keys is None


def plan_tree(
    view: View, choice: LeafChoice, dtype: Any, target: TargetFormat, settled: ModelRules | None = None
) -> ConvertedTree:
    """Plan the conversion of one tree: names, dtypes, structure, and notes on losses in the target format."""
    cast = None if dtype is None else floating_dtype(dtype)
    arrays, values = view.arrays, view.raw_values
    if choice.root is None and choice.keeps_names:
        sources = [source_of(name, array, cast) for name, array in arrays.items()]
        converted = ConvertedTree(view, sources, values, view.structure)
    else:
        converted = _select(view, arrays, choice, cast)
    if isinstance(converted.structure, dict) and UNREADABLE in converted.structure:
        converted.structure, _ = nested_dicts({name: split_name(name) for name in [*arrays, *values]})
        converted.notes.append("the structure cannot be read; the result is nested dicts by the names")
    if target in ("npz", "msgpack", "orbax"):
        names = [source.name for source in converted.sources]
        require_structure(converted.structure, [*names, *converted.raw_values])
        _leave_out_functions(converted, target)
    converted.notes += [f"left out: {name}, which scales activations" for name in view.scales_left_out]
    converted.notes += [*view.notes, *_losses(converted, target)]
    converted.origin = converted_origin(view, settled)
    converted.notes += settled.notes if settled else ()
    return converted


def converted_origin(view: View, settled: ModelRules | None) -> Origin:
    """Return the origin of a tree that is converted by these rules."""
    record = rules_in(view.tree.origin or {}) if settled is None else settled.record
    return new_origin(view.tool, view.parents, record)


def _select(
    view: View, arrays: Mapping[str, LazyArray], choice: LeafChoice, cast: str | None
) -> ConvertedTree:
    """Plan the conversion of some leaves, or of all under other names."""
    raw, root = view.raw_values, choice.root
    names = {name: name for name in (*arrays, *raw)} if root is None else names_below([*arrays, *raw], root)
    if not names and root is not None:
        refuse_root([*arrays, *raw], root)
    if choice.keeps_names and (part := part_below(view.structure, root or "", names)):
        return _part_tree(view, arrays, names, *part, cast)
    below = {names[name]: array for name, array in arrays.items() if name in names}
    values = {names[name]: value for name, value in raw.items() if name in names}
    renamed = (choice.rules or RenamingRules(())).apply(
        below, list(values), choice.numbers, choice.shapes, choice.dtypes
    )
    if choice.keys is not None:
        _keep_only(renamed, choice.keys)
    converted = _rename_tree(view, renamed, values, cast)
    whole = {new: old for old, new in names.items()}
    converted.old_names = {new: whole[old] for new, old in converted.old_names.items()}
    converted.kept = [] if choice.rules is None else converted.kept
    return converted


def _part_tree(
    view: View,
    arrays: Mapping[str, LazyArray],
    names: Collection[str],
    part: Any,
    depth: int,
    cast: str | None,
) -> ConvertedTree:
    """Plan the conversion of a subtree in its own structure."""
    new = {name: join_name(split_name(name)[depth:]) for name in names}
    return ConvertedTree(
        view,
        [source_of(new[name], array, cast) for name, array in arrays.items() if name in new],
        {new[name]: value for name, value in view.raw_values.items() if name in new},
        with_names(part, new),
        old_names={name: old for old, name in new.items()},
    )


def _keep_only(renamed: Renamed, keys: Sequence[str]) -> None:
    """Drop all leaves that `keys` do not name. Raise MismatchError for keys that find no leaf."""
    chosen, problems = resolve(keys, [*renamed.arrays, *renamed.plain.values()])
    if problems:
        raise MismatchError(problems, context="keys")
    renamed.arrays = {name: array for name, array in renamed.arrays.items() if name in chosen}
    renamed.plain = {old: new for old, new in renamed.plain.items() if new in chosen}


def _leave_out_functions(tree: ConvertedTree, target: TargetFormat) -> None:
    functions = [name for name, value in tree.values.items() if isinstance(value, LeftToCode)]
    tree.raw_values = {name: value for name, value in tree.raw_values.items() if name not in functions}
    if functions:
        tree.notes.append(f"{target} has no functions, which are left to the code: {few(functions)}")


def source_of(name: str, array: LazyArray, cast: str | None = None) -> Source:
    """Return a leaf to be written, under a name and perhaps cast to another floating dtype."""
    entry, is_whole = entry_of(array), array.entry is not None
    whole = Box.whole(array.shape)
    dtype = cast if cast and is_floating(entry.dtype) and not array.keeps_dtype else entry.dtype
    is_unchanged = is_whole and dtype == entry.dtype
    return Source(
        name,
        dtype,
        array.shape,
        "jax" if entry.home == "weak" and not is_unchanged else entry.home,
        entry.key,
        entry.sharding if is_whole else None,  # a sharding names axes, which a rule may have moved
        parts=((whole, array),),
        regions=(whole,),
    )


def _rename_tree(view: View, renamed: Renamed, values: dict[str, Any], cast: str | None) -> ConvertedTree:
    refuse_transformed_keys(renamed.arrays.values())
    renamed.require_tied()
    names = [*renamed.arrays, *renamed.plain.values()]
    structure, final = nested_spelled({name: name for name in names})
    converted = ConvertedTree(
        view,
        [source_of(final[name], array, cast) for name, array in renamed.arrays.items()],
        {final[new]: values[old] for old, new in renamed.plain.items()},
        structure,
        {final[name]: text for name, text in renamed.transforms.items() if name in final},
        {final[new]: old for old, new in renamed.plain.items()},
    )
    converted.kept = renamed.kept
    converted.notes += [f"matches no leaf: {rule}" for rule in renamed.unused_rules.values()]
    converted.notes += [f"left out: {name}" for name in renamed.left_out]
    converted.notes += [*renamed.notes, *_roundings(converted)]
    converted.notes += [
        f"{name} is stored as {final[name]}, because a part of its name is a leaf itself"
        for name in names
        if final[name] != join_name(split_spelled(name))
    ]
    return converted


def _roundings(tree: ConvertedTree) -> Iterator[str]:
    """Yield a note for leaves that rules compute in float32 and that are stored in fewer bits."""
    for source in tree.sources:
        ((_, array),) = source.parts
        if array.is_changed and array.dtype.itemsize > source.itemsize:
            yield f"{source.name}: computed in float32, stored as {source.dtype}; the way back is not exact"


def _losses(tree: ConvertedTree, target: TargetFormat) -> Iterator[str]:
    """Yield a note for everything that the target format cannot store."""
    if target in ("npz", "msgpack", "orbax"):
        if tree.view.metadata:
            yield f"{target} cannot store the metadata: {', '.join(sorted(tree.view.metadata))[:200]}"
        keys = [source.name for source in tree.sources if source.key]
        if keys and target != "orbax":
            yield f"{target} has no PRNG keys: {', '.join(keys)[:200]} become numbers, for jax.random.wrap_key_data"
    if target == "npz":
        yield from _npz_losses(tree)
    if target == "msgpack":
        yield "msgpack has no digests: later damage to the file goes unnoticed"
        yield "as in flax, all containers become dicts: flax.serialization.from_bytes(tree, ...) restores the tree"
    if target == "orbax":
        yield "the files of Orbax have no digests: later damage to them goes unnoticed"
        yield "Orbax returns numpy arrays and lists; a target tree restores jax arrays, tuples and classes"
    if not tree.view.has_names:
        yield "the source has no names: its leaves are named by their numbers"
    if not tree.view.tree.has_digests and tree.view.format != MEMORY:
        yield "the source has no digests: its bytes could be read, but not checked"


def _npz_losses(tree: ConvertedTree) -> Iterator[str]:
    yield "npz has checksums but no digests, and not every program compares the checksums"
    if has_sequences(tree.structure):
        yield "npz stores names only: lists and tuples come back as dicts"
    if tree.raw_values:
        yield "npz stores arrays only: plain numbers and strings become arrays without axes"
    if renamed := renamed_in_npz(tree.sources, tree.raw_values):
        yield f"npz stores names only: names with dots or escapes come back changed: {few(renamed)}"
    if any(source.dtype == "bfloat16" for source in tree.sources):
        yield "numpy.load reads bfloat16 as V2: use .view(ml_dtypes.bfloat16)"


def summarize(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    target: TargetFormat,
    trees: Mapping[str, ConvertedTree],
    left_out: Sequence[str] = (),
) -> Conversion:
    """Return the result of the conversion of these trees, for the caller."""
    leaves = {
        prefix: (*(_describe_array(tree, s) for s in tree.sources), *_describe_values(tree))
        for prefix, tree in trees.items()
    }
    labels = {prefix: f"[{prefix}] " if prefix else "" for prefix in trees}
    notes = dict.fromkeys(labels[prefix] + note for prefix, tree in trees.items() for note in tree.notes)
    notes |= dict.fromkeys(f"not read, may hold leaves: {path}" for path in left_out)
    kept = [labels[prefix] + name for prefix, tree in trees.items() for name in tree.kept]
    return Conversion(os.fspath(source), os.fspath(destination), target, leaves, tuple(notes), tuple(kept))


def _describe_array(tree: ConvertedTree, source: Source) -> ConvertedLeaf:
    ((_, array),) = source.parts
    nbytes = source.itemsize * Box.whole(source.shape).size
    stored = stored_leaves(array)
    changes = [array.how, tree.transforms.get(source.name, "")]
    if dequantized_in(array):
        changes.append(f"dequantised from {stored[0].entry.dtype}")
    elif stored and stored[0].entry.dtype != source.dtype:
        changes.append(f"from {stored[0].entry.dtype}")
    what, origins = (
        f"{source.dtype}{list(source.shape)}",
        tuple(dict.fromkeys(leaf.name for leaf in stored)) or (source.name,),
    )
    return ConvertedLeaf(source.name, what, nbytes, origins, ", ".join(filter(None, changes)))


def _describe_values(tree: ConvertedTree) -> Iterator[ConvertedLeaf]:
    for name, value in tree.values.items():
        what = f"= {shortened(repr(value), _MOST_SHOWN)}"
        yield ConvertedLeaf(name, what, 0, (tree.old_names.get(name, name),))
