"""Convert a checkpoint to another format, other names or another dtype, in bounded memory. No jax."""

from __future__ import annotations

import math
import os
import re
import shutil
import tempfile
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from eformer._engine.formats.dense import refuse_raw
from eformer._engine.formats.find import look_at
from eformer._engine.formats.model_config import given_config, model_config
from eformer._engine.formats.model_rules import ModelRules, model_rules
from eformer._engine.formats.others.peft import CONFIG, WEIGHTS, with_config
from eformer._engine.formats.quantized import dtype_of_dequant
from eformer._engine.formats.run_steps import path_of_step
from eformer._engine.formats.safetensors.names import SUFFIX, refuse_other_suffix
from eformer._engine.processes.hosts import Hosts
from eformer._engine.record.dequantized import undequantized
from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.lazy_arrays import StoredLeaf, decoded_together, stored_leaves
from eformer._engine.record.merged_arrays import WeightedSum
from eformer._engine.record.options import SaveOptions
from eformer._engine.record.origin import config_in
from eformer._engine.record.text import count, few, size
from eformer._engine.saving.commit import new_entry
from eformer._engine.saving.in_parts import SaveOfParts
from eformer._engine.saving.save import ALIASES, Save, complete
from eformer._engine.saving.staging import Staging
from eformer._engine.stores.base import publish
from eformer._engine.stores.durable import make_directories, replacing
from eformer._engine.stores.hub import HubRepository, is_hub_url, refuse_to_write
from eformer._engine.stores.local import LocalStore, appearing, on_disk
from eformer._engine.stores.locate import store_at
from eformer._engine.tasks.deadline import clearing_up
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tasks.memory import resident_bytes
from eformer._engine.tasks.pool import default_threads, gc_paused
from eformer._engine.tasks.progress import SILENT, metered
from eformer._engine.tasks.turns import turns
from eformer._engine.tools import sequential_writers
from eformer._engine.tools.adapter import plan_adapter
from eformer._engine.tools.config_edits import with_settings, without_dtype
from eformer._engine.tools.conversion import (
    Conversion,
    ConvertedTree,
    LeafChoice,
    TargetFormat,
    plan_tree,
    summarize,
)
from eformer._engine.tools.convert_parts import (
    DividedWork,
    How,
    alone_for_all,
    commit_parts,
    convert_part,
    convert_to_bucket,
    convert_together,
)
from eformer._engine.tools.export_plan import ExportWish, plan_model
from eformer._engine.tools.model_files import ModelDirectory, open_model
from eformer._engine.tools.orbax_writer import plan_orbax, write_checkpoint_metadata, write_tree
from eformer._engine.tools.source_date import recorded_now
from eformer._engine.tools.view import View
from eformer._version import __version__
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import numpy as np

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.model_config import ModelConfig
    from eformer._engine.formats.run_steps import StepChoice
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.record.planned import Source
    from eformer._engine.record.rename import RenameRules
    from eformer._engine.stores.base import Store
    from eformer._engine.tasks.progress import Meter, Progress
    from eformer._engine.tools.export_plan import ModelFiles

_DEFAULT_MEMORY = 2 * 10**9  # bytes, beside the memory that the program already takes
_RESERVE = 64 * 2**20  # bytes: threads, buffers of the system's libraries, Python's allocator
_LEAST = 64 * 2**20
_PER_LEAF = {"zarr": 3500}  # bytes, for a leaf's plan and record; measured with 100,000 leaves
_PER_LEAF_ELSE = 1500
_DECODING = 3.3  # times a chunk: as stored, decoded, and copied to its place, with some margin
_SMALL = 2**16
_CHUNK = 4 * 2**20  # bytes of a file to read and upload at a time


@uninterrupted
def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: TargetFormat | None = None,
    step: StepChoice = None,
    prefix: str | None = None,
    root: str | None = None,
    keys: str | Iterable[str] | None = None,
    rename: RenameRules | None = None,
    back: bool | None = None,
    like: str | os.PathLike[str] | None = None,
    dtype: Any = None,
    config: ModelConfig | None = None,
    max_shard_bytes: int | None = None,
    memory: int | None = None,
    dry_run: bool = False,
    allow_missing: bool = False,
    fill_from_like: bool = False,
    card: bool = True,
    progress: Progress = None,
    dequant: Any = None,
    part: str | None = None,
    commit: bool = False,
) -> Conversion:
    """Convert the checkpoint at `source`, of any format that `load` reads, to a new checkpoint at `destination`.

    The destination appears complete or not at all; in a bucket, this holds for each of several trees. If the source has
    digests, every byte that is read is checked. An error leaves the source untouched and the destination empty. On
    their way to a bucket, npz, msgpack, adapters and Orbax go through a temporary file.

    to               the target format: "safetensors", "zarr", "msgpack", "npz", "peft", "orbax" or "hf", a model that
                     transformers opens, see `export`; may be left out if the suffix of the destination names it
    step             of a run: the number of another step than the newest, or "best", see `load`
    prefix           convert this tree alone, and store it without a prefix; None converts all trees
    root             name of a subtree, such as "params", to convert as the whole checkpoint
    keys             names of leaves or subtrees to convert, or patterns such as "layers.*.bias"; after `rename`. With
                     `keys` or `rename`, the result is nested dicts by the names of the leaves
    rename           rules: the name of a shipped book, a file, their text, a dict {pattern: "new name | step"}, pairs
                     or lines; see `docs/guides/renaming.md`
    back             read the rules from right to left, such as from the layout of a JAX program to Hugging Face's:
                     `rename`, or the rules that the source has recorded
    like             the model of Hugging Face that the result resembles: for to="hf", see `export`, and for the shapes
                     and dtypes that rules give leaves on the way back
    dtype            cast floating leaves to this dtype
    config           config.json of the model for the rules, as a dict or a path; None for the recorded one, or the file
                     at `source`. For to="hf": settings on top of it. For to="peft": settings of adapter_config.json,
                     such as lora_alpha; see `docs/guides/peft.md`
    max_shard_bytes  maximum size of one safetensors file
    memory           maximum memory of the program in bytes, even for larger leaves; None for 2 GB more than the program
                     already takes, or more if a larger chunk must be decoded
    dry_run          plan and check the conversion, but write nothing
    allow_missing    convert even if some files that may hold leaves are not read; the notes list them. Without it, such
                     files are an error
    fill_from_like   for to="hf": take tensors that the source lacks from `like`
    card             for to="hf": write README.md
    progress         True for a progress bar, or a function of the bytes done and the total
    dequant          a floating dtype, such as "bf16": converts the weights of a quantised model to numbers of this
                     dtype, see `docs/guides/from-hugging-face.md`. False converts its leaves as they are stored. None
                     takes the dtype of the configuration if `rename` is a book, and otherwise raises a `QuantizedError`
    part             for independent jobs: "7/64" writes part 7 of 64, numbered from 0, to a hidden directory beside the
                     destination. A part that is complete is checked and not written again. See
                     `docs/guides/larger-than-a-machine.md`
    commit           for independent jobs: makes the destination from all parts, once they are written. Takes the same
                     arguments as the parts

    Example:

        >>> convert("run/step-100", "out", to="safetensors", dtype="bf16")
        >>> convert("run", "params.safetensors", step=100, root="params")
        >>> convert("model.msgpack", "model.safetensors", dry_run=True).notes
        ('the source has no digests: its bytes could be read, but not checked',)
    """
    arguments = {name: value for name, value in locals().items() if name not in ("source", "destination")}
    how = How.of(part=arguments.pop("part"), commit=arguments.pop("commit"))
    return convert_in(how, source, destination, **arguments)


@uninterrupted
def convert_in(
    how: How, source: str | os.PathLike[str], destination: str | os.PathLike[str], **arguments: Any
) -> Conversion:
    """Convert by all processes of a crew, in parts, or alone. The other arguments are those of `convert`."""
    step, prefix, dequant = (arguments.get(name) for name in ("step", "prefix", "dequant"))
    opening = partial(_open, source, step, prefix, dtype_of_dequant(dequant))
    return convert_opened(opening, source, destination, how=how, **arguments)


def convert_opened(
    opening: Callable[[ExitStack], tuple[Found, dict[str, View]]],
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: TargetFormat | None = None,
    step: StepChoice = None,
    prefix: str | None = None,
    root: str | None = None,
    keys: str | Iterable[str] | None = None,
    rename: RenameRules | None = None,
    back: bool | None = None,
    like: str | os.PathLike[str] | None = None,
    dtype: Any = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int | None = None,
    memory: int | None = None,
    dry_run: bool = False,
    allow_missing: bool = False,
    fill_from_like: bool = False,
    card: bool = True,
    progress: Progress = None,
    dequant: Any = None,
    how: How = How(),  # noqa: B008  frozen
) -> Conversion:
    """Convert the trees that `opening` opens. The arguments are those of `convert`."""
    place = _place_of(destination)
    target = _target_format(place.name, to)
    has_rules = rename is not None or bool(back)
    _check_arguments(target, destination, has_rules=has_rules, config=config, like=like)
    if target != "hf" and (fill_from_like or not card):
        raise ValueError(f"fill_from_like= and card= are for to='hf', and the target is {target}")
    settings = None if config is None else given_config(config)
    names = None if keys is None else (keys,) if isinstance(keys, str) else tuple(keys)
    with ExitStack() as stack:
        found, views = opening(stack)
        left_out = left_out_of(found, prefix, source, allow_missing=allow_missing)
        model = None if like is None else open_model(like, stack)
        numbers = None if target == "peft" else settings
        settled = _settle_rules(rename, back, found, views, model, numbers, target)
        rules = settled.rules if settled else None
        if dequant is None and settled and found.foreign.find_quantized and settled.dtype_of_numbers:
            for view in views.values():
                view.read_as_numbers(settled.dtype_of_numbers)
        choice = LeafChoice(root, rules, names, *_facts_for_rules(settled, model, target))
        cast = None if target == "hf" else dtype  # an export gives each tensor the dtype that `like` has
        with gc_paused():
            trees = {name: plan_tree(view, choice, cast, target, settled) for name, view in views.items()}
        if dequant is not False:
            _require_numbers(found, trees.values())
        _check(trees, target, place.name, max_shard_bytes)
        if target == "peft":
            (tree,) = trees.values()
            plan_adapter(tree, settings or {}, rules)
        files = None
        if target == "hf":
            (tree,) = trees.values()
            files = plan_model(tree, ExportWish(model, settings, dtype, card, fill_from_like, allow_missing))
        conversion = summarize(source if step is None else found.path, destination, target, trees, left_out)
        budget = _budget(memory, trees, target)
        if not dry_run:
            work = _Work(place, target, trees, settled, budget, max_shard_bytes, files, conversion)
            _carry_out(work, how, progress)
    return conversion


# ------------------------------------------------------------------------------------------- arguments


def _check_arguments(
    target: TargetFormat, destination: str | os.PathLike[str], *, has_rules: bool, config: Any, like: Any
) -> None:
    """Raise ValueError for arguments that belong to another target."""
    if target == "hf":
        return
    if config is not None and target != "peft" and not has_rules:
        raise ValueError(f"config= is for to='peft', to='hf' and rules, and the target is {target}")
    if like is not None and not has_rules:
        raise ValueError(f"like= is for to='hf' and for rules, and the target is {target}")
    if is_hub_url(os.fspath(destination)):
        refuse_to_write(os.fspath(destination))


def _target_format(name: str, to: TargetFormat | None) -> TargetFormat:
    known = [word for word in get_args(TargetFormat) if word not in ALIASES]
    listed = f"{', '.join(known[:-1])} or {known[-1]}"
    by_suffix: dict[str, TargetFormat] = {SUFFIX: "safetensors", ".npz": "npz", ".msgpack": "msgpack"}
    named = by_suffix.get(PurePath(name).suffix)
    if to is None:
        if named is None:
            raise ValueError(f"no format given, and {name!r} does not name one; to= is one of {listed}")
        return named
    target = ALIASES.get(to, to)
    if target not in known:
        raise ValueError(f"unknown format {to!r}; expected {listed}")
    if named and target != named:
        raise ValueError(f"{name!r} has the suffix of {named}, but to= is {to!r}; choose another name")
    if not named:
        refuse_other_suffix(name, target)
    return target


def _open(
    source: str | os.PathLike[str],
    step: StepChoice,
    prefix: str | None,
    dequant: str | None,
    stack: ExitStack,
) -> tuple[Found, dict[str, View]]:
    """Open the trees to convert, by the prefixes that they will have."""

    def opened(found: Found) -> tuple[Found, dict[str, View]]:
        old_prefixes = {"": prefix} if prefix is not None else {name: name for name in found.trees}
        return found, {
            name: stack.enter_context(View(found, old, dequant=dequant)) for name, old in old_prefixes.items()
        }

    return look_at(source, opened, choose=partial(path_of_step, step=step))


# ------------------------------------------------------------------------------------------- planning


def _settle_rules(
    rename: RenameRules | None,
    back: bool | None,
    found: Found,
    views: Mapping[str, View],
    model: ModelDirectory | None,
    config: Mapping[str, Any] | None,
    target: TargetFormat,
) -> ModelRules | None:
    """Return the rules to apply, with the configuration of the model: of the caller, of `like`, recorded, or beside the
    source."""
    (view, *_) = views.values()
    origin = view.tree.origin
    beside = with_settings(model.config if model else config_in(origin or {}), config or {})
    configs = [lambda: beside, lambda: model_config(found.store)]
    is_back = bool(back) if target != "hf" else back
    return model_rules(rename, back=is_back, origin=origin, configs=configs, path=found.path)


def _facts_for_rules(
    settled: ModelRules | None, model: ModelDirectory | None, target: TargetFormat
) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, ...]], Mapping[str, str]]:
    """Return the numbers for rules, and shapes and dtypes of the leaves to be made as far as they are known."""
    leaves = model.leaves if model and settled else {}
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    config = settled.config if settled else {}
    if target == "hf":  # it casts once, from the values of the tree, and perhaps to a dtype of the caller
        return without_dtype(config), shapes, {}
    return config, shapes, {name: leaf.dtype for name, leaf in leaves.items()}


def _check(
    trees: Mapping[str, ConvertedTree], target: TargetFormat, name: str, max_shard_bytes: int | None
) -> None:
    """Raise if the conversion is impossible, before anything is written."""
    is_one_file = target in ("npz", "msgpack") or name.endswith(SUFFIX)
    if max_shard_bytes is not None and (is_one_file or target not in ("safetensors", "hf")):
        raise ValueError(
            f"max_shard_bytes={max_shard_bytes}: only a directory of safetensors files has shards"
        )
    if (is_one_file or target in ("peft", "hf")) and len(trees) != 1:
        kind = {"peft": "adapter", "hf": "model"}.get(target, "file")
        raise ValueError(
            f"one {kind} holds one tree, and the source has {sorted(trees)}; choose one with prefix="
        )
    for tree in trees.values():
        if target == "npz":
            sequential_writers.check_npz(tree.sources, tree.values)
        if target == "msgpack":
            sequential_writers.check_msgpack(tree.structure, tree.values)
        if target == "orbax":
            plan_orbax(tree.structure, tree.sources, tree.values)
    if target == "orbax":
        _check_items(trees)


def _check_items(trees: Mapping[str, ConvertedTree]) -> None:
    """Raise ValueError for prefixes that cannot be items of Orbax: an item is a directory in the checkpoint."""
    bad = [prefix for prefix in trees if "/" in prefix or prefix in (".", "..") or prefix.startswith("_")]
    if bad or ("" in trees and len(trees) > 1):
        raise ValueError(
            f"Orbax stores one tree, or items with plain names, and the source has {sorted(trees)}; choose one with "
            "prefix="
        )


def left_out_of(
    found: Found, prefix: str | None, source: str | os.PathLike[str], *, allow_missing: bool
) -> tuple[str, ...]:
    """Return the files that are not read and may hold leaves. Refuse them unless some may be missing."""
    left_out = found.left_out(prefix)
    if left_out and not allow_missing:
        number = count(len(left_out), "file")
        raise FormatError(
            f"{os.fspath(source)}: {number} would be lost, which may hold leaves: {few(left_out)}. Pass "
            "allow_missing=True to convert the rest"
        )
    return left_out


def _require_numbers(found: Found, trees: Iterable[ConvertedTree]) -> None:
    """Refuse quantised leaves: without their scales they are not the numbers of the model."""
    for tree in trees:
        arrays = (array for source in tree.sources for _, array in source.parts)
        require_numbers(found, tree.view, {leaf.name for array in arrays for leaf in undequantized(array)})


def require_numbers(found: Found, view: View, taken: Collection[str]) -> None:
    """Refuse quantised leaves among the stored leaves of these names."""
    find_quantized = found.foreign.find_quantized
    if view.has_numbers:
        view.refuse_problems(taken)
    elif find_quantized and (quantization := find_quantized(view.tree)):
        refuse_raw(quantization, found.path, taken)


def _budget(memory: int | None, trees: Mapping[str, ConvertedTree], target: TargetFormat) -> int:
    """Compute how many bytes of elements may be in memory together, and set the threads that decode large chunks."""
    sources = [source for tree in trees.values() for source in tree.sources]
    taken = resident_bytes() + _RESERVE + _PER_LEAF.get(target, _PER_LEAF_ELSE) * len(sources)
    arrays = [array for source in sources for _, array in source.parts]
    largest = max(map(decoded_together, arrays), default=0)
    least = taken + max(_LEAST, math.ceil(_DECODING * largest))
    if memory is None:
        memory = max(taken + _DEFAULT_MEMORY, least)
    if memory < least:
        chunk = f", and a chunk of {size(largest)} has to be decoded whole" if largest else ""
        raise ValueError(
            f"memory={size(memory)} is not enough: {count(len(sources), 'array')} and the program itself take "
            f"{size(taken)}{chunk}; allow at least {size(least)}"
        )
    budget = (memory - taken) // 2
    for leaf in (leaf for array in arrays for leaf in stored_leaves(array)):
        if decoded := leaf.decoded_nbytes:
            leaf.threads = min(default_threads(), max(1, budget // (2 * decoded)))
    return budget


# ----------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class _Work:
    """A conversion that is planned."""

    place: _Destination | _HubDestination
    target: TargetFormat
    trees: Mapping[str, ConvertedTree]
    rules: ModelRules | None
    budget: int
    max_shard_bytes: int | None
    files: ModelFiles | None
    conversion: Conversion

    @property
    def options(self) -> SaveOptions:
        options = SaveOptions(staging_bytes=self.budget)
        if self.max_shard_bytes is None:
            return options
        return replace(options, max_shard_bytes=self.max_shard_bytes)

    @property
    def identity(self) -> str:
        """Return a text that is the same for the same conversion, by any process: the digest of all that it is made
        from."""
        read = [
            (
                prefix,
                tree.view.identity,
                (tree.raw_values, tree.structure, tree.origin, tree.adapter_config),
            )
            for prefix, tree in self.trees.items()
        ]
        made = [
            self.target,
            self.place.name,
            self.rules,
            self.max_shard_bytes,
            self.conversion.leaves,
            __version__,
        ]
        return xxh3_128(msgspec.json.encode([read, made], enc_hook=_as_json))


def _as_json(value: Any) -> str:
    """Return the pattern of a rule, which its `repr` would shorten, or the text of any other object."""
    return value.pattern if isinstance(value, re.Pattern) else repr(value)


def _carry_out(work: _Work, how: How, progress: Progress) -> None:
    where = work.place.where
    can_divide = work.target in ("safetensors", "zarr", "hf", "peft") and where is not None
    if (how.part or how.commit) and not can_divide:
        problem = "is on no file system that jobs share" if where is None else f"is one {work.target} file"
        raise ValueError(
            f"part= and commit= are for safetensors, zarr, peft and hf in a directory of a file system, and "
            f"{work.conversion.destination} {problem}; convert by one process, or by the processes of a launcher"
        )
    crew = how.crew
    is_bucket = (
        isinstance(work.place, _Destination) and where is None and not work.place.name.endswith(SUFFIX)
    )
    if crew is not None and is_bucket and work.target in ("safetensors", "zarr"):
        convert_to_bucket(_divided(work), crew, progress)
    elif crew is not None and not can_divide:
        doing = f"converts to {work.conversion.destination}"
        alone_for_all(partial(_convert_alone, work), crew, progress, doing)
    elif crew is not None:
        convert_together(_divided(work), crew, progress)
    elif how.part:
        convert_part(_divided(work), how.part, progress)
    elif how.commit:
        commit_parts(_divided(work))
    else:
        _convert_alone(work, progress)


def _convert_alone(work: _Work, progress: Progress) -> None:
    work.place.require_free(work.conversion.nbytes)
    with metered(progress, work.conversion.nbytes, "converting") as meter:
        _write(work, meter)


def _divided(work: _Work) -> DividedWork:
    """Return the conversion with a save for each tree, which is committed when all parts are there."""
    place = work.place
    assert isinstance(place, _Destination)
    saves: dict[str, SaveOfParts] = {}
    around = place.around if place.where is None else LocalStore(place.where.parent)
    for prefix, tree in work.trees.items():
        store, name = (around.at(place.name), WEIGHTS) if work.target == "peft" else (around, place.name)
        saves[prefix] = _save(work, store, name, prefix, tree, SaveOfParts)

    def planned_save(store: Store, name: str, prefix: str) -> SaveOfParts:
        save = saves[prefix]
        save.store = store if save.file else store.at(name)
        return save

    return DividedWork(
        place.where or work.conversion.destination,
        work.identity,
        list(saves.values()),
        work.budget,
        place.require_free,
        partial(_small_leaves_read, room=work.budget // 4),
        lambda: _write(work, SILENT, planned_save),
    )


def _write(
    work: _Work, meter: Meter, planned_save: Callable[[Store, str, str], SaveOfParts] | None = None
) -> None:
    """Write the destination; with `planned_save`, from parts that are written already."""
    place, target, budget = work.place, work.target, work.budget

    def save_of(store: Store, name: str, prefix: str) -> Save:
        if planned_save:
            return planned_save(store, name, prefix)
        return _save(work, store, name, prefix, work.trees[prefix])

    with place.creating(in_files=target not in ("safetensors", "zarr", "hf")) as (store, name):
        for prefix, tree in work.trees.items():
            if not planned_save:
                tree.sources = _with_small_leaves_read(tree, budget // 4)
            if target in ("npz", "msgpack"):
                _write_stream(_file(store, name), target, tree, Staging(budget), meter)
            elif target == "orbax":
                leaves = plan_orbax(tree.structure, tree.sources, tree.values)
                write_tree(_file(store, name) / prefix, leaves, Staging(budget), meter)
            elif target == "peft":
                _write_adapter(store.at(name), tree, save_of, meter)
            elif work.files:
                _write_model(store, name, save_of, meter, work.files)
            else:
                complete(save_of(store, name, prefix), meter=meter)
        if target == "orbax":
            write_checkpoint_metadata(_file(store, name), list(work.trees))


def _file(store: Store, name: str) -> Path:
    directory = on_disk(store)
    assert directory is not None
    return directory / name


def _with_small_leaves_read(tree: ConvertedTree, room: int) -> list[Source]:
    """Read small leaves ahead in one batch, as many as fit into `room`; return the sources with these in memory."""
    ready = _small_leaves_read(tree.sources, room)
    return [ready.get(source.name, source) for source in tree.sources]


def _small_leaves_read(sources: Iterable[Source], room: int) -> dict[str, Source]:
    """Read small leaves in one batch of each checkpoint, as many as fit into `room`; return their sources, with the
    leaves in memory."""
    chosen: list[tuple[Source, StoredLeaf | WeightedSum, list[StoredLeaf]]] = []
    for source in sources:
        ((_, array),) = source.parts or ((None, None),)
        if isinstance(array, (StoredLeaf, WeightedSum)) and (leaves := _small_leaves_of(array, room)):
            room -= sum(leaf.entry.nbytes for leaf in leaves)
            chosen.append((source, array, leaves))
    read = _read_together(leaf for _, _, leaves in chosen for leaf in leaves)
    return {
        source.name: msgspec.structs.replace(
            source, whole=_value_of(array, [read[leaf] for leaf in leaves]), parts=(), regions=()
        )
        for source, array, leaves in chosen
    }


def _small_leaves_of(array: StoredLeaf | WeightedSum, room: int) -> list[StoredLeaf]:
    """Return the stored leaves of a leaf, or of a sum, if all are small; otherwise an empty list."""
    inners = [array] if isinstance(array, StoredLeaf) else array.inners
    small = [leaf for leaf in inners if isinstance(leaf, StoredLeaf) and _is_small(leaf)]
    nbytes = sum(leaf.entry.nbytes for leaf in small)
    return small if len(small) == len(inners) and nbytes < room else []


def _is_small(leaf: StoredLeaf) -> bool:
    return isinstance(leaf.reader, View) and 0 < leaf.entry.nbytes <= _SMALL and not leaf.decoded_nbytes


def _read_together(leaves: Iterable[StoredLeaf]) -> dict[StoredLeaf, np.ndarray[Any, Any]]:
    """Read whole leaves, all of a checkpoint in one batch."""
    by_view: dict[int, tuple[View, list[StoredLeaf]]] = {}
    for leaf in leaves:
        assert isinstance(leaf.reader, View)
        by_view.setdefault(id(leaf.reader), (leaf.reader, []))[1].append(leaf)
    found: dict[StoredLeaf, np.ndarray[Any, Any]] = {}
    for view, together in by_view.values():
        arrays = view.read_all([leaf.name for leaf in together])
        found |= {leaf: arrays[leaf.name] for leaf in together}
    return found


def _value_of(
    array: StoredLeaf | WeightedSum, elements: Sequence[np.ndarray[Any, Any]]
) -> np.ndarray[Any, Any]:
    return elements[0] if isinstance(array, StoredLeaf) else array.sum_of(array.shape, elements)


def _write_stream(
    path: Path, target: TargetFormat, tree: ConvertedTree, staging: Staging, meter: Meter
) -> None:
    with replacing(path) as file:
        if target == "npz":
            sequential_writers.write_npz(file, tree.sources, tree.values, staging, meter)
        else:
            sequential_writers.write_msgpack(file, tree.structure, tree.sources, tree.values, staging, meter)


def _write_adapter(
    store: Store, tree: ConvertedTree, save_of: Callable[[Store, str, str], Save], meter: Meter
) -> None:
    complete(save_of(store, WEIGHTS, ""), meter=meter)
    with replacing(_file(store, CONFIG)) as file:
        file.write(msgspec.json.format(msgspec.json.encode(tree.adapter_config), indent=2))


def _write_model(
    around: Store, name: str, save_of: Callable[[Store, str, str], Save], meter: Meter, files: ModelFiles
) -> None:
    """Write the files of a model, then its weights and their index. In a bucket an error removes the files again."""
    inside = around.at(name)
    try:
        files.put(inside)
        complete(save_of(around, name, ""), meter=meter)
    except BaseException:
        if on_disk(inside) is None:
            with clearing_up():
                files.remove(inside)
        raise


SaveType = TypeVar("SaveType", bound=Save)


def _save(
    work: _Work,
    around: Store,
    name: str,
    prefix: str,
    converted: ConvertedTree,
    kind: type[SaveType] = Save,  # type: ignore[assignment]
) -> SaveType:
    hosts, view = Hosts(), converted.view
    # Name the program that first wrote the checkpoint, before any conversion.
    writer = re.sub(r".*(?:converted|merged) from ", "", view.tree.written_by) or view.format
    verb = "merged" if view.tool == "merge" else "converted"
    written_by = f"eformer {__version__}, {verb} from {writer}"
    metadata = view.tree.raw_metadata if converted.keeps_metadata else {}
    entry = new_entry(written_by, converted.structure, metadata, converted.raw_values, converted.origin)
    if converted.adapter_config:
        entry = with_config(entry, converted.adapter_config)
    entry = _reproducible(entry, work, prefix)
    store, file = (around, name) if name.endswith(SUFFIX) else (around.at(name), "")
    turn = turns.take(around.path_to(name), hosts.name(0))
    sources, converted.sources = (
        converted.sources,
        [],
    )  # so that the save can drop each leaf when it is written
    target: Any = work.target if work.target == "zarr" else "safetensors"
    return kind(store, file, prefix, target, sources, entry, work.options, hosts, turn)


def _reproducible(entry: TreeEntry, work: _Work, prefix: str) -> TreeEntry:
    """Give the tree the same save id in every run and every process, and the time of SOURCE_DATE_EPOCH, if that is set:
    then equal conversions have equal bytes.

    In a bucket the id stays random: objects of two conversions at the same time must not have the same names.
    """
    if work.place.where is not None:
        save_id = xxh3_128(f"{work.identity} {prefix}".encode())[: len(entry.save_id)]
        entry = msgspec.structs.replace(entry, save_id=save_id)
    return msgspec.structs.replace(entry, saved_at=recorded_now().isoformat(timespec="seconds"))


# ------------------------------------------------------------------------------------------- destination


def _place_of(path: str | os.PathLike[str]) -> _Destination | _HubDestination:
    return _HubDestination(os.fspath(path)) if is_hub_url(os.fspath(path)) else _Destination(path)


class _Destination:
    """The place of the new checkpoint, which must be free.

    On this machine a checkpoint appears as a whole, when it is complete. In a bucket the trees are committed in turn,
    each by its index, and other files are uploaded when they are complete.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        store = store_at(path)
        self.where = where.absolute() if (where := on_disk(store)) else None
        self._store = store if self.where is None else LocalStore(self.where)
        self.around, self.name = self._store.parent()
        if self.name in ("", ".."):
            raise ValueError(f"{os.fspath(path)!r} does not name a file or directory to create")

    def require_free(self, nbytes: int) -> None:
        """Raise if the destination exists, or if the disk has less space than `nbytes`."""
        where = self.where
        is_taken = self.around.kind(self.name) is not None if where is None else not _is_free(where)
        if is_taken:
            raise FileExistsError(
                f"{where or self._store.url} already exists; a conversion creates a new checkpoint: choose another path"
            )
        if where is not None:
            existing = next(parent for parent in where.parents if parent.exists())
            free = shutil.disk_usage(existing).free
            if nbytes > free:
                raise OSError(
                    f"not enough space for {where}: it takes {size(nbytes)}, {existing} has {size(free)} left"
                )

    @contextmanager
    def creating(self, *, in_files: bool) -> Iterator[tuple[Store, str]]:
        """Yield the store around the new checkpoint and the name that it gets there.

        With `in_files` the store is a directory of this machine, where any file can be written under that name.
        """
        if self.where is not None:
            make_directories(self.where.parent)
            with appearing(self.where) as path:
                yield LocalStore(path.parent), path.name
        elif in_files:
            with tempfile.TemporaryDirectory(prefix="eformer-convert-") as folder:
                yield LocalStore(Path(folder)), self.name
                _upload(Path(folder), self.around)
        else:
            yield self.around, self.name


class _HubDestination:
    """A model on the Hugging Face Hub. It is made in a temporary directory, and uploaded by one commit, which replaces
    the weights that the model had before."""

    where: Path | None = None

    def __init__(self, url: str) -> None:
        self._repository = HubRepository.of(url)
        self.name = "model"

    def require_free(self, nbytes: int) -> None:
        """Raise if the disk has less space than `nbytes`, or the token must not write to the model."""
        folder = tempfile.gettempdir()
        if nbytes > (free := shutil.disk_usage(folder).free):
            raise OSError(
                f"not enough space to make the model before its upload: it takes {size(nbytes)}, {folder} has "
                f"{size(free)} left; set TMPDIR to a larger disk"
            )
        self._repository.create()

    @contextmanager
    def creating(self, *, in_files: bool) -> Iterator[tuple[Store, str]]:
        """Yield a temporary directory, and upload it at the end of the block."""
        with tempfile.TemporaryDirectory(prefix="eformer-export-") as folder:
            yield LocalStore(Path(folder)), self.name
            self._repository.upload(Path(folder) / self.name)


def _is_free(where: Path) -> bool:
    """Tell whether a path does not exist, or is an empty directory that can be replaced."""
    if where.is_dir() and not where.is_symlink() and not where.is_mount():
        return not any(where.iterdir())
    return not os.path.lexists(where)


def _upload(folder: Path, store: Store) -> None:
    """Upload all files below a directory. They appear together."""
    files = {
        path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()
    }
    with closing(store.begin()) as upload:
        for name, path in files.items():
            upload.stream(name, path.stat().st_size, _chunks(path))
        upload.sync()
        publish(upload, files)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
