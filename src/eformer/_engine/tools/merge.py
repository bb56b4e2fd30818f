"""Merge checkpoints: weighted sums of their leaves, or a LoRA added to its base. No jax."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from eformer._engine.formats.find import reading, reread_all
from eformer._engine.formats.model_config import model_config
from eformer._engine.formats.model_rules import ModelRules, model_rules
from eformer._engine.formats.quantized import dtype_of_dequant
from eformer._engine.formats.run_steps import Step, steps
from eformer._engine.record.dtypes import dtype_from_name, floating_dtype, is_floating
from eformer._engine.record.lazy_arrays import stored_leaves
from eformer._engine.record.merge_weights import Weights, weights_of, weights_of_ema
from eformer._engine.record.merged_arrays import WeightedSum
from eformer._engine.record.names import names_below, resolve
from eformer._engine.record.text import count, few, shortened
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tools.convert import convert_opened, left_out_of, require_numbers
from eformer._engine.tools.convert_parts import How
from eformer._engine.tools.lora import add_lora, lora_settings
from eformer._engine.tools.view import View
from eformer.errors import MismatchError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import ExitStack

    import numpy as np

    from eformer._engine.formats.found import Found
    from eformer._engine.record.origin import Origin
    from eformer._engine.record.planned import LazyArray
    from eformer._engine.record.rename import RenameRules
    from eformer._engine.tasks.progress import Progress
    from eformer._engine.tools.conversion import Conversion, TargetFormat

Source = str | os.PathLike[str] | Step
Sources = Source | Sequence[Source] | Mapping[str, float]

_MOST_SHOWN = 200  # characters of the paths in the result


@uninterrupted
def merge(
    sources: Sources,
    destination: str | os.PathLike[str],
    *,
    weights: Weights = "mean",
    ema: float | None = None,
    last: int | None = None,
    lora: str | os.PathLike[str] | None = None,
    lora_config: Mapping[str, Any] | None = None,
    rename: RenameRules | None = None,
    prefix: str | None = None,
    root: str | None = None,
    keys: str | Iterable[str] | None = None,
    to: TargetFormat | None = None,
    like: str | os.PathLike[str] | None = None,
    dtype: Any = None,
    max_shard_bytes: int | None = None,
    memory: int | None = None,
    dry_run: bool = False,
    allow_missing: bool = False,
    progress: Progress = None,
    dequant: Any = None,
    part: str | None = None,
    commit: bool = False,
) -> Conversion:
    """Write weighted sums of the leaves of `sources` as a new checkpoint at `destination`.

    The new checkpoint appears as with `convert`: complete or not at all, in bounded memory, of any target format. A
    leaf is the sum of its values, each times its weight, divided by the sum of the weights; in float32, in float64 for
    float64, added in the order of the sources, and rounded once to the dtype of the last source. Integers, booleans,
    keys and plain values are those of the last source; the notes name them. One error lists all leaves that are missing
    or have different shapes. The origin of the result records all sources with their weights.

    sources          paths of checkpoints, the oldest first, or steps of a run, or a dict of paths and weights; with
                     `last` a run; with `lora` the base
    weights          "mean"; "wsm", also called "1-sqrt", or "cosine": the schedule of decay that the sum imitates, see
                     `docs/guides/merging.md`; or numbers, or a dict by path
    ema              the decay of an exponential moving average over the sources, instead of `weights`
    last             number of steps of the run at `sources` to merge, the newest
    lora             an adapter of PEFT, or a checkpoint with LoRA leaves, to add to the weights of one source
    lora_config      settings of adapter_config.json for `lora`, such as {"lora_alpha": 32}; they override its own
    rename           rules that give the leaves of `lora` the names of PEFT; see `docs/guides/renaming.md`
    prefix           merge this tree alone, and store it without a prefix; None merges all trees
    root             name of a subtree, such as "params", to merge as the whole checkpoint
    keys             names of leaves or subtrees to merge, or patterns such as "params.*"
    to               the target format, see `convert`; may be left out if the suffix of the destination names it
    like             for to="hf": the model of Hugging Face that the result resembles, see `export`
    dtype            write floating leaves in this dtype
    max_shard_bytes  maximum size of one safetensors file
    memory           maximum memory of the program in bytes, see `convert`
    dry_run          plan and check the merge, but write nothing
    allow_missing    merge even if some files that may hold leaves are not read; the notes list them
    progress         True for a progress bar, or a function of the bytes done and the total
    dequant          a floating dtype, such as "bf16", for the weights of a quantised model, see `convert`
    part             for independent jobs: "7/64" writes part 7 of 64, see `convert`
    commit           for independent jobs: makes the destination from all parts, see `convert`

    Example:

        >>> plan = checkpoint.merge("run", "merged", last=3, weights="wsm", to="safetensors", dry_run=True)
        >>> plan.notes
        ('from the last source alone: step',)
    """
    arguments = {name: value for name, value in locals().items() if name not in ("sources", "destination")}
    how = How.of(part=arguments.pop("part"), commit=arguments.pop("commit"))
    return merge_in(how, sources, destination, **arguments)


@uninterrupted
def merge_in(
    how: How,
    sources: Sources,
    destination: str | os.PathLike[str],
    *,
    weights: Weights = "mean",
    ema: float | None = None,
    last: int | None = None,
    lora: str | os.PathLike[str] | None = None,
    lora_config: Mapping[str, Any] | None = None,
    rename: RenameRules | None = None,
    **arguments: Any,
) -> Conversion:
    """Merge by all processes of a crew, in parts, or alone. The other arguments are those of `merge`."""
    paths, by_path = _paths_of(sources, last)
    _check(paths, by_path, weights=weights, ema=ema, last=last, lora=lora, config=lora_config, rename=rename)
    prefix, root, keys, dtype = (arguments.get(name) for name in ("prefix", "root", "keys", "dtype"))
    chosen = _Chosen(
        prefix, root, None if keys is None else (keys,) if isinstance(keys, str) else tuple(keys)
    )
    result = None if dtype is None else dtype_from_name(floating_dtype(dtype))
    plan: _Average | _Lora
    if lora is None:
        numbers = (
            weights_of_ema(ema, len(paths)) if ema is not None else weights_of(by_path or weights, paths)
        )
        rule = f"ema {ema:g}" if ema is not None else weights if isinstance(weights, str) else "weighted"
        plan = _Average(chosen, result, numbers, "weighted" if by_path else rule)
    else:
        paths = [*paths, os.fspath(lora)]
        plan = _Lora(chosen, result, lora_config, rename)
    dequant = dtype_of_dequant(arguments.get("dequant"))
    opening = partial(_open, paths, plan, dequant, bool(arguments.get("allow_missing")))
    source = shortened(", ".join(paths), _MOST_SHOWN)
    return convert_opened(opening, source, destination, how=how, **arguments)


# ------------------------------------------------------------------------------------------- arguments


def _paths_of(sources: Sources, last: int | None) -> tuple[list[str], Mapping[str, float]]:
    """Return the paths of the checkpoints, and their weights if the caller gave them by path."""
    if isinstance(sources, Mapping):
        return [os.fspath(path) for path in sources], {os.fspath(p): weight for p, weight in sources.items()}
    given = [sources] if isinstance(sources, (str, os.PathLike, Step)) else list(sources)
    paths = [source.path if isinstance(source, Step) else os.fspath(source) for source in given]
    if last is None:
        return paths, {}
    if len(paths) != 1 or last < 1:
        raise ValueError(
            f"last={last}: expected a positive number, and a single run, found {len(paths)} sources"
        )
    found = steps(paths[0])
    if len(found) < last:
        raise NotFoundError(f"{paths[0]} has {count(len(found), 'step')}, expected at least last={last}")
    return [step.path for step in found[-last:]], {}


def _check(
    paths: Sequence[str],
    by_path: Mapping[str, float],
    *,
    weights: Weights,
    ema: float | None,
    last: int | None,
    lora: Any,
    config: Any,
    rename: Any,
) -> None:
    """Raise ValueError for arguments that exclude each other."""
    has_weights = weights != "mean"
    if has_weights + (ema is not None) + bool(by_path) > 1:
        raise ValueError("weights=, ema= and a dict of sources exclude each other; pass one")
    if lora is None:
        if config is not None or rename is not None:
            raise ValueError("lora_config= and rename= are for lora=")
        if last is None and len(paths) < 2:
            raise ValueError(
                f"a merge has several sources, found {len(paths)}; pass more, last=N for the steps of a run, or lora="
            )
    elif len(paths) != 1 or has_weights or ema is not None or by_path:
        raise ValueError(
            f"lora= adds to the weights of one source, found {len(paths)}; merge the sources first, without weights= "
            "and ema= in this call"
        )


# --------------------------------------------------------------------------------------------- opening


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The leaves to merge: of one tree or of all, below a root, and by keys."""

    prefix: str | None
    root: str | None
    keys: Sequence[str] | None

    def names(self, names: Iterable[str]) -> set[str]:
        """Return the names among these that are chosen."""
        whole = list(names)
        below = {name: name for name in whole} if self.root is None else names_below(whole, self.root)
        if self.keys is None:
            return set(below)
        found, _ = resolve(self.keys, list(below.values()))
        return {name for name, inner in below.items() if inner in found}


class MergedView(View):
    """A tree of the last checkpoint of a merge, in which some arrays are computed from several checkpoints."""

    tool = "merge"
    merged: Mapping[str, LazyArray] = MappingProxyType({})
    origins: Sequence[Origin] = ()
    others: Sequence[View] = ()  # the views of the other checkpoints
    recipe: Any = None  # the numbers by which they are merged, as JSON

    @property
    def arrays(self) -> Mapping[str, LazyArray]:
        """Return the arrays of the merged tree by name."""
        return {**super().arrays, **self.merged}

    @property
    def identity(self) -> Any:
        """Return everything that the leaves depend on: the records of all checkpoints, and how they are merged."""
        return [super().identity, [view.identity for view in self.others], self.recipe]

    @property
    def parents(self) -> Sequence[Origin]:
        """Describe the checkpoints that are merged, in their order."""
        return self.origins


def _open(
    paths: Sequence[str], plan: _Average | _Lora, dequant: str | None, allow_missing: bool, stack: ExitStack
) -> tuple[Found, dict[str, View]]:
    """Open the trees of the merge, by the prefixes that they will have."""

    def opened(found: Sequence[Found]) -> tuple[Found, dict[str, View]]:
        for path, one in zip(paths, found, strict=True):
            with reading(one):
                left_out_of(one, plan.chosen.prefix, path, allow_missing=allow_missing)
        return plan.open(found, partial(_view, dequant=dequant, stack=stack))

    return reread_all(list(paths), opened)


def _view(
    found: Found, prefix: str | None, *, stack: ExitStack, dequant: str | None, kind: type[View], **more: Any
) -> View:
    with reading(found):
        return stack.enter_context(kind(found, prefix, dequant=dequant, **more))


def _prefixes(found: Found, prefix: str | None) -> dict[str, str]:
    """Return the prefix of each tree in its checkpoint, by the prefix that it will have."""
    with reading(found):
        return {"": prefix} if prefix is not None else {name: name for name in found.trees}


def _is_summed(array: LazyArray) -> bool:
    """Tell whether an array is of numbers to average: integers are counters, seeds and tables."""
    return is_floating(array.dtype.name) or array.dtype.kind == "c"


def _dtype_for(array: LazyArray, dtype: np.dtype[Any] | None) -> np.dtype[Any]:
    return dtype if dtype is not None and is_floating(array.dtype.name) else array.dtype


@dataclass(frozen=True, slots=True)
class _Average:
    """A merge of checkpoints of the same leaves by weights."""

    chosen: _Chosen
    dtype: np.dtype[Any] | None
    weights: Sequence[float]
    rule: str

    def open(self, found: Sequence[Found], view: Callable[..., View]) -> tuple[Found, dict[str, View]]:
        problems, trees = list[str](), dict[str, View]()
        for new, old in _prefixes(found[-1], self.chosen.prefix).items():
            last = cast("MergedView", view(found[-1], old, kind=MergedView))
            trees[new] = last
            label = f"[{old}] " if old else ""
            if lacking := [
                one.path for one in found if old not in _prefixes(one, self.chosen.prefix).values()
            ]:
                problems += [f"{label}{path} has no tree {old!r}" for path in lacking]
                continue
            views = [*(view(one, old, kind=View) for one in found[:-1]), last]
            problems += [f"{label}{problem}" for problem in self.combine(found, views)]
        if problems:
            raise MismatchError(problems, "the checkpoints cannot be merged")
        return found[-1], trees

    def combine(self, found: Sequence[Found], views: Sequence[View]) -> Iterator[str]:
        """Let the last view have the sums. Yield a problem for each leaf that the checkpoints do not share."""
        *others, last = views
        assert isinstance(last, MergedView)
        arrays = [view.arrays for view in views]
        chosen = self.chosen.names([*arrays[-1], *last.raw_values])
        summed = {name for name in chosen if name in arrays[-1] and _is_summed(arrays[-1][name])}
        for one, view in zip(found, views, strict=True):
            require_numbers(one, view, summed)
        yield from self._differences(found, arrays, summed)
        last.others, last.recipe = others, self.weights
        how = f"{self.rule} of {len(views)}"
        last.merged = {
            name: WeightedSum(
                [each[name] for each in arrays], self.weights, _dtype_for(array, self.dtype), how
            )
            for name, array in arrays[-1].items()
            if name in summed and all(name in each and each[name].shape == array.shape for each in arrays)
        }
        kept = [name for name in (*arrays[-1], *last.raw_values) if name in chosen and name not in summed]
        last.notes = [f"from the last source alone: {few(kept)}"] if kept else []
        last.notes += [
            f"{one.path} has no digests: its bytes could be read, but not checked"
            for one, view in zip(found[:-1], views, strict=False)
            if not view.tree.has_digests
        ]
        last.origins = [
            {**view.as_parent, "weight": weight} for view, weight in zip(views, self.weights, strict=True)
        ]

    def _differences(
        self, found: Sequence[Found], arrays: Sequence[Mapping[str, LazyArray]], summed: set[str]
    ) -> Iterator[str]:
        last = arrays[-1]
        for one, each in zip(found[:-1], arrays, strict=False):
            for name in last:
                if name in summed and name not in each:
                    yield f"leaf {name!r} is not in {one.path}"
                elif name in summed and each[name].shape != last[name].shape:
                    shapes = f"{list(each[name].shape)} in {one.path}, and {list(last[name].shape)}"
                    yield f"leaf {name!r} has the shape {shapes} in {found[-1].path}"
                elif name in summed and not _is_summed(each[name]):
                    yield f"leaf {name!r} is {each[name].dtype.name} in {one.path}, expected floating numbers"
            more = self.chosen.names(name for name, array in each.items() if _is_summed(array)) - last.keys()
            for name in each:
                if name in more:
                    yield f"leaf {name!r} of {one.path} is not in {found[-1].path}"


@dataclass(frozen=True, slots=True)
class _Lora:
    """A merge of a LoRA into its base: the first checkpoint is the base, the second the LoRA."""

    chosen: _Chosen
    dtype: np.dtype[Any] | None
    config: Mapping[str, Any] | None
    rename: RenameRules | None

    def open(self, found: Sequence[Found], view: Callable[..., View]) -> tuple[Found, dict[str, View]]:
        base, adapter = found
        prefixes = _prefixes(base, self.chosen.prefix)
        if len(prefixes) != 1:
            raise ValueError(
                f"a LoRA is added to one tree, and {base.path} has {sorted(prefixes)}; choose it by prefix="
            )
        ((new, old),) = prefixes.items()
        into = cast("MergedView", view(base, old, kind=MergedView))
        lora = view(adapter, None, kind=View, settled=self.rules(base, adapter))
        require_numbers(base, into, {leaf.name for a in into.arrays.values() for leaf in stored_leaves(a)})
        config = lora_settings(lora, self.config)
        added = add_lora(into.arrays, lora, config, partial(_dtype_for, dtype=self.dtype))
        into.merged, into.notes = added.arrays, added.notes
        into.others, into.recipe = [lora], config
        into.origins = [into.as_parent, {**lora.as_parent, "as": "lora"}]
        return base, {new: into}

    def rules(self, base: Found, adapter: Found) -> ModelRules | None:
        """Return the rules for the leaves of the LoRA, with the configuration of the base."""
        with reading(adapter):
            origin = adapter.tree(None).origin
        configs = [lambda: model_config(base.store)]
        return model_rules(self.rename, back=False, origin=origin, configs=configs, path=adapter.path)
