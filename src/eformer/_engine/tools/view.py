"""Open a checkpoint as a mapping from names to leaves, and read only the indexed elements. No jax."""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from eformer._engine.formats.dense import DenseTree, dense_tree, marks_in, refuse_problems
from eformer._engine.formats.find import look_at, signer_of, was_replaced
from eformer._engine.formats.model_config import given_config, model_config
from eformer._engine.formats.model_rules import ModelRules, model_rules
from eformer._engine.formats.nested_names import nested_spelled
from eformer._engine.formats.quantized import dtype_of_dequant, quantization_of
from eformer._engine.formats.run_steps import path_of_step
from eformer._engine.loading.fetch import fetch
from eformer._engine.loading.read_plan import Want, plan_reads
from eformer._engine.record.boxes import Box
from eformer._engine.record.digests import NO_DIGEST
from eformer._engine.record.display import Shown
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.lazy import lazy_property
from eformer._engine.record.lazy_arrays import StoredLeaf, entry_of
from eformer._engine.record.manifest import Leaves, parse_structure, with_entries
from eformer._engine.record.names import Spellings, ambiguous, with_nearest
from eformer._engine.record.origin import Origin, config_in, parent_of
from eformer._engine.record.rename import refuse_transformed_keys, rules_from
from eformer._engine.record.values import value_from_json
from eformer._engine.stores.cache import caching
from eformer._engine.stores.keys import public_key
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tasks.pool import gc_paused
from eformer.errors import CorruptionError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Sequence

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.model_config import ModelConfig
    from eformer._engine.formats.quantized import Quantization
    from eformer._engine.formats.run_steps import StepChoice
    from eformer._engine.record.display import TreeSummary
    from eformer._engine.record.manifest import LeafEntry, TreeEntry
    from eformer._engine.record.planned import LazyArray
    from eformer._engine.record.rename import RenameRules, RenamingRules
    from eformer._engine.record.signature import Verifier
    from eformer._engine.stores.cache import Cached
    from eformer._engine.stores.keys import Key

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(Shown):
    """The facts about a checkpoint. `print` and notebooks show them as a folded tree.

    format      the name of the format, such as "safetensors"
    version     the version of the manifest
    trees       the trees by prefix; a tree that was saved without a prefix is under ""
    left_out    files in the directory that are not read and may hold leaves
    signed_by   the id of the key that has signed the checkpoint, as the signature claims: only `verify` checks it
    digest      the digest of the manifest, which differs after every save
    quantized   for each tree of another program, the quantised leaves with their methods, such as "fp8·128x128"

    Example:

        >>> found = checkpoint.inspect("run/step-100")
        >>> found.format, list(found.trees[""].leaves)
        ('safetensors', ['params.embedding', 'params.w'])
    """

    format: str
    version: int
    trees: dict[str, TreeEntry]
    left_out: tuple[str, ...] = ()
    signed_by: str | None = None
    digest: str = NO_DIGEST
    quantized: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the tree without a prefix, or of the only tree."""
        if "" not in self.trees and len(self.trees) != 1:
            raise ValueError(
                f"the checkpoint holds several trees; use .trees[prefix].metadata, prefix one of {sorted(self.trees)}"
            )
        prefix = "" if "" in self.trees else next(iter(self.trees))
        return self.trees[prefix].metadata

    def _shown(self) -> tuple[str, Sequence[TreeSummary], Sequence[str]]:
        trees = [tree.summary(prefix, self.quantized.get(prefix)) for prefix, tree in self.trees.items()]
        return f"checkpoint ({self.format})", trees, self.left_out


@uninterrupted
def inspect(path: str | os.PathLike[str], *, step: StepChoice = None) -> Inspection:
    """Read the record of the checkpoint at `path`: format, trees, leaves, shapes, dtypes, metadata. Reads no data.

    If `path` is a run, `step` chooses a step: a number, or "best". The default is the newest.

    Example:

        >>> record = inspect("run/step-100")
        >>> record.format, list(record.trees)
        ('safetensors', [''])
        >>> record.trees[""].leaves["params.w"].shape
        (8, 4)
    """
    return look_at(path, _inspected, choose=partial(path_of_step, step=step))


def _inspected(found: Found) -> Inspection:
    return Inspection(
        format=found.manifest.format,
        version=found.manifest.version,
        trees=dict(found.trees),
        left_out=found.left_out(),
        signed_by=signer_of(found),
        digest=found.manifest.digest,
        quantized={each: marks for each, tree in found.trees.items() if (marks := marks_in(found, tree))},
    )


@uninterrupted
def open(  # noqa: A001
    path: str | os.PathLike[str],
    *,
    step: StepChoice = None,
    prefix: str | None = None,
    cache: Cached = None,
    signed_by: Key | None = None,
    dequant: Any = None,
    rename: RenameRules | None = None,
    back: bool = False,
    config: ModelConfig | None = None,
) -> View:
    """Open one tree of the checkpoint at `path` as a mapping from names to leaves. Reads no data.

    Indexing a leaf reads the indexed elements and checks them against their digests. `prefix` selects one of several
    trees. Elements come as stored; with `dequant`, a floating dtype such as "bf16", the weights of a quantised model
    come as numbers, see `load`. Otherwise they lack their scales. `cache` keeps bytes from a bucket on the disk. With
    `signed_by`, a public key, bytes that its owner has not signed raise an error. Of a run, `step` is the number of
    another step than the newest, or "best". `rename` gives the leaves the names and the layout of rules; `back` reads
    these rules, or the recorded rules, from right to left; `config` is the model's config.json for them, see `load`.

    Example:

        >>> with open("run/step-100") as view:
        ...     rows = view["params.embedding"][10:20]  # reads these rows, and no more
        ...     step = view["step"]  # a plain value
        ...     params = view["params"]  # a subtree: a dict of its leaves by name
    """
    if rename is None and not back and config is not None:
        raise ValueError("config= is for the rules of rename=, or of back=True")
    dtype = dtype_of_dequant(dequant)
    wish = _Wish(
        dtype,
        is_stored=dequant is False,
        rules=None if rename is None else rules_from(rename),
        back=back,
        config=None if config is None else given_config(config),
    )
    signer = None if signed_by is None else public_key(signed_by)
    return _opened(path, prefix, cache, signer, step, wish)


@dataclass(frozen=True, slots=True)
class _Wish:
    """The form in which a caller wants the leaves. With `is_stored`, quantised leaves stay as they are stored."""

    dequant: str | None = None
    is_stored: bool = False
    rules: RenamingRules | None = None
    back: bool = False
    config: Mapping[str, Any] | None = None

    def settled(self, found: Found, tree: TreeEntry) -> ModelRules | None:
        """Return the rules for a tree, with the configuration of its model: of the caller, recorded, or beside it."""
        given, recorded = self.config, config_in(tree.origin or {})
        beside = [lambda: recorded, lambda: model_config(found.store)]
        configs = beside if given is None else [lambda: given]
        return model_rules(self.rules, back=self.back, origin=tree.origin, configs=configs, path=found.path)

    def dtype_of(self, found: Found, settled: ModelRules | None) -> str | None:
        """Return the dtype of quantised weights as numbers: by the caller, or by a book. None leaves them stored."""
        if self.is_stored or self.dequant or settled is None or found.foreign.find_quantized is None:
            return self.dequant
        return settled.dtype_of_numbers


class View(Shown, Mapping[str, Any]):
    """Map names to arrays that are read when they are indexed, and to plain values.

    A name may be escaped, as iteration yields it, or readable. The name of a subtree gives a dict of its leaves by
    their names.

    A view keeps up to 256 files of its checkpoint open, so it stays readable when a newer save replaces them. Close it,
    or use it as a context manager.

    Example:

        >>> with checkpoint.open("run/step-100") as view:
        ...     rows = view["params.embedding"][:2]
        >>> rows.shape
        (2, 2)
    """

    tool = "convert"  # which makes a new checkpoint of the view
    notes: Sequence[str] = ()  # for the result of that tool

    def __init__(
        self,
        found: Found,
        prefix: str | None,
        cache: Cached = None,
        *,
        holds: bool = True,
        dequant: str | None = None,
        settled: ModelRules | None = None,
    ) -> None:
        self._found, self._path, self._asked, self._prefix = found, found.path, prefix, prefix or ""
        self._tree = found.tree(prefix)
        self._entries: Mapping[str, LeafEntry] = Leaves(self._tree)
        self._cache, self._is_open = cache, True
        self._dequant, self._settled, self._others = dequant, settled, dict[int, View]()
        self._quantized: Quantization | None = None
        self._numbers: DenseTree | None = None
        self._files = found.files(self._tree)
        try:
            if holds:
                self._files.hold(
                    n for n, file in enumerate(self._tree.files) if file.nbytes > file.header_nbytes
                )
            if dequant is not None:
                self.read_as_numbers(dequant)
            if settled:
                self._rename(settled.rules, settled.config)
        except BaseException:
            self.close()
            raise

    def read_as_numbers(self, dtype: str) -> None:
        """Read quantised weights as numbers of a dtype from now on."""
        self._dequant = dtype
        find = self._found.foreign.find_quantized or partial(quantization_of, self._found.store)
        self._quantized = find(self._tree)
        if self._quantized is not None:
            self._numbers = dense_tree(self._quantized, dtype, self._reader_of)
            self._entries = {name: entry_of(array) for name, array in self._numbers.arrays.items()}

    def _rename(self, rules: RenamingRules, config: Mapping[str, Any]) -> None:
        """Show the leaves as rules make them."""
        with gc_paused():
            renamed = rules.apply(self.arrays, list(self.raw_values), config)
        refuse_transformed_keys(renamed.arrays.values())
        renamed.require_tied()
        structure, final = nested_spelled({name: name for name in (*renamed.arrays, *renamed.plain.values())})
        stored = {} if self._numbers is None else {new: old for old, new in self._numbers.values.items()}
        values = {stored.get(old, old): final[new] for old, new in renamed.plain.items()}
        arrays = {final[name]: array for name, array in renamed.arrays.items()}
        problems = {} if self._numbers is None else self._numbers.problems
        self._numbers = DenseTree(arrays, values, structure, problems=problems)
        self._entries = {name: entry_of(array) for name, array in arrays.items()}

    def _reader_of(self, tree: TreeEntry) -> View:
        """Return a view of a tree of the checkpoint, which may have the scales of this tree."""
        if tree is self._tree:
            return self
        if id(tree) not in self._others:
            prefix = next(prefix for prefix, other in self._found.trees.items() if other is tree)
            self._others[id(tree)] = View(self._found, prefix, self._cache)
        return self._others[id(tree)]

    def refuse_problems(self, names: Collection[str] | None = None) -> None:
        """Refuse quantised leaves that cannot be read as numbers; with `names`, only leaves of these stored names."""
        if self._quantized and self._numbers:
            problems = self._numbers.problems
            taken = {name: why for name, why in problems.items() if names is None or name in names}
            refuse_problems(self._quantized, self._path, taken)

    @property
    def has_numbers(self) -> bool:
        """Tell whether quantised weights are read as numbers, or would be if the tree had some."""
        return self._dequant is not None

    @property
    def arrays(self) -> Mapping[str, LazyArray]:
        """Return the arrays by name: as they are stored, or as numbers with `dequant`."""
        if self._numbers is not None:
            return self._numbers.arrays
        return {name: StoredLeaf(self, name, entry) for name, entry in self._tree.leaves.items()}

    @property
    def raw_values(self) -> dict[str, Any]:
        """Return the plain values by name, as JSON."""
        raw, numbers = self._tree.raw_values, self._numbers
        return raw if numbers is None else {numbers.values[n]: raw[n] for n in raw if n in numbers.values}

    @property
    def structure(self) -> Any:
        """Return the structure of the tree."""
        return parse_structure(self._tree.structure) if self._numbers is None else self._numbers.structure

    @property
    def scales_left_out(self) -> Sequence[str]:
        """List the leaves that a dense model does not have, without the scales of its weights."""
        return () if self._numbers is None else self._numbers.left_out

    def __getitem__(self, name: str) -> Any:
        if self._is_leaf(name):
            return self._leaf(name)
        leaves = self._spellings.leaves(name)
        if len(leaves) == 1:
            return self._leaf(leaves[0])
        if leaves:
            raise KeyError(f"{self._path}: {ambiguous(name, leaves)}")
        if below := self._spellings.below(name):
            return {leaf: self._leaf(leaf) for leaf in below}
        hint = next(with_nearest([name], self._spellings.known()))[1]
        raise KeyError(f"{self._path} has no leaf {name!r}{hint}")

    def _leaf(self, name: str) -> Any:
        if name in (raw := self.raw_values):
            return value_from_json(raw[name])
        return LeafView(self, name, self._entries[name])

    def _is_leaf(self, name: object) -> bool:
        return name in self._entries or name in self.raw_values

    @lazy_property
    def _spellings(self) -> Spellings:
        return Spellings(self)

    def __contains__(self, name: object) -> bool:
        return self._is_leaf(name) or (isinstance(name, str) and len(self._spellings.leaves(name)) == 1)

    def __iter__(self) -> Iterator[str]:
        yield from self._entries
        yield from self.raw_values

    def __len__(self) -> int:
        return len(self._entries) + len(self.raw_values)

    @property
    def tree(self) -> TreeEntry:
        """Return the tree's entry in the manifest."""
        return self._tree

    @property
    def as_parent(self) -> Origin:
        """Return the description of this checkpoint as the parent of another tree."""
        return parent_of(self._path, self._tree.save_id, self._found.manifest.digest)

    @property
    def identity(self) -> Any:
        """Return everything that the leaves depend on, for a digest: the record, and how it is read."""
        return [self.as_parent, self._tree.files, self._tree.raw_metadata, self._dequant, self._settled]

    @property
    def parents(self) -> Sequence[Origin]:
        """Describe the checkpoints that a conversion of this view is made from."""
        return [self.as_parent]

    @property
    def format(self) -> str:
        """The format of the checkpoint."""
        return self._found.manifest.format

    @property
    def has_names(self) -> bool:
        """Tell whether the file stores names. Without them, leaves are named by their numbers."""
        return self._found.foreign.has_names

    @lazy_property
    def left_out(self) -> tuple[str, ...]:
        """List the files of the checkpoint that are not read and may hold leaves."""
        return self._found.left_out(self._asked)

    @property
    def metadata(self) -> dict[str, Any]:
        """The `metadata` argument of the save."""
        return self._tree.metadata

    @uninterrupted
    def close(self) -> None:
        """Close the files. Later reads raise ValueError."""
        self._is_open = False
        self._files.close()
        for other in self._others.values():
            other.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if (
            getattr(self, "_files", None) and not is_finalizing()
        ):  # at its end the interpreter closes all files
            self.close()

    def __reduce__(self) -> Any:
        """Pickle as a path: the copy opens the files again, in this process or another."""
        signed_by = self._found.signed_by
        wish = _Wish(self._dequant, is_stored=self._dequant is None)
        if settled := self._settled:
            wish = replace(wish, rules=settled.rules, back=settled.rules.back, config=settled.config)
        return _opened, (self._path, self._asked, self._cache, signed_by, None, wish)

    def _shown(self) -> tuple[str, Sequence[TreeSummary], Sequence[str]]:
        tree = self._tree if self._numbers is None else with_entries(self._tree, self._entries)
        return f"{self._path} ({self.format})", [tree.summary(self._prefix)], self.left_out

    def read_box(self, name: str, box: Box) -> Array:
        """Read a box of a leaf under its name in this view."""
        array = None if self._numbers is None else self._numbers.arrays[name]
        return self.read(name, self._entries[name], box) if array is None else array.read(box)

    def read(self, name: str, entry: LeafEntry, box: Box, threads: int | None = None) -> Array:
        ((array,),) = self._fetch([Want(name, entry, entry.dtype, [box])], threads)
        return array

    def read_all(self, names: Sequence[str]) -> dict[str, Array]:
        """Read the stored arrays of these `names` together: for small arrays much faster than one by one."""
        wants = [Want(name, entry := self._tree.leaves[name], entry.dtype) for name in names]
        return {name: array for name, (array,) in zip(names, self._fetch(wants), strict=True)}

    @uninterrupted
    def _fetch(self, wants: Sequence[Want], threads: int | None = None) -> list[Sequence[Array]]:
        if not self._is_open:
            raise ValueError(f"the view of {self._path} is closed")
        try:
            store, tree = self._found.store, self._tree
            reads, threads = plan_reads(wants, tree, store.read_bytes), threads or store.read_threads
            arrays = fetch(reads, wants, tree, self._files, threads, path_to=store.path_to)
        except CorruptionError as error:
            if was_replaced(self._found):
                raise FileNotFoundError(
                    f"{self._path} was replaced by a newer save; open it again"
                ) from error
            raise
        if not self._tree.has_digests and (name := self._files.rewritten()):
            raise FileNotFoundError(
                f"{self._path}: {name} has been written to since it was opened; open it again"
            )
        return arrays


def open_incomplete(path: str | os.PathLike[str], *, prefix: str | None = None) -> View:
    """Open a tree even if some of its files are missing: reading a leaf in them raises CorruptionError."""
    return look_at(path, lambda found: View(found, prefix, holds=False))


_AS_STORED = _Wish()


@uninterrupted
def _opened(
    path: str | os.PathLike[str],
    prefix: str | None,
    cache: Cached = None,
    signed_by: Verifier | None = None,
    step: StepChoice = None,
    wish: _Wish = _AS_STORED,
) -> View:
    def opened(found: Found) -> View:
        settled = wish.settled(found, found.tree(prefix))
        view = View(found, prefix, cache, dequant=wish.dtype_of(found, settled), settled=settled)
        try:
            view.refuse_problems()
        except BaseException:
            view.close()
            raise
        return view

    with caching(cache):
        return look_at(path, opened, signed_by, partial(path_of_step, step=step))


class LeafView:
    """One array of a checkpoint. Indexing reads the indexed elements and checks them."""

    def __init__(self, view: View, name: str, entry: LeafEntry) -> None:
        self._view, self.name, self.entry = view, name, entry
        self.shape = entry.shape
        self.dtype = dtype_from_name(entry.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return Box.whole(self.shape).size

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes if self.entry.extents else self.size * self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a leaf without axes")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Array:
        """Read as numpy indexes: integers, slices and an ellipsis."""
        box, rest = _box(index, self.shape)
        whole = self._view.read_box(self.name, box)
        array: Array = whole[rest]
        # A few rows must not keep the memory of the whole box.
        return array.copy() if 2 * array.size < whole.size else array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("copy=False is impossible: reading a leaf from disk always makes a copy")
        return np.asarray(self[...], dtype)

    def __repr__(self) -> str:
        return f"<leaf {self.name}: {self.entry.described}>"


def _box(index: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """Return the smallest box that contains the indexed elements, and the index inside that box."""
    parts = index if isinstance(index, tuple) else (index,)
    dots = [position for position, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    given = len(parts) - len(dots)
    if given > len(shape):
        raise IndexError(f"too many indices: the leaf has {len(shape)} axes, but {given} were indexed")
    at = dots[0] if dots else len(parts)
    every = (slice(None),) * (len(shape) - given)
    ranges = [*map(_range, (*parts[:at], *every, *parts[at + 1 :]), shape)]
    start, stop, rest = zip(*ranges, strict=True) if ranges else ((), (), ())
    return Box(start, stop), rest


def _range(part: Any, size: int) -> tuple[int, int, Any]:
    if not isinstance(part, slice):
        try:
            position = operator.index(part)
        except TypeError:
            raise IndexError(f"a leaf on disk is indexed by integers, slices and ..., not {part!r}") from None
        if not -size <= position < size:
            raise IndexError(f"index {position} is out of bounds for an axis of {size}")
        return position % size, position % size + 1, 0
    picked = builtins.range(size)[part]
    if not picked:
        return 0, 0, slice(None)
    low, high = min(picked[0], picked[-1]), max(picked[0], picked[-1])
    return low, high + 1, slice(picked[0] - low, None, picked.step)
