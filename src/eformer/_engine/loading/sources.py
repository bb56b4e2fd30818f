"""The rarely used parts of a load: leaves below a root, renamed, computed, quantised or without names, and several
checkpoints that are loaded as one.

Tests: tests/engine/loading/test_several.py, tests/engine/loading/test_partial.py,
tests/engine/loading/test_unnamed_leaves.py.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Sharding

from eformer._engine.formats.dense import dense_tree, refuse_problems, refuse_raw
from eformer._engine.formats.find import reading
from eformer._engine.formats.model_config import model_config
from eformer._engine.formats.model_rules import dtype_of_numbers, recorded_book, rules_for, rules_of_book
from eformer._engine.formats.process_records import ListedLeaf
from eformer._engine.formats.quantized import dense_name, dtype_of_dequant, quantization_of
from eformer._engine.loading.contents import (
    NO_FACTS,
    NOTHING,
    below,
    named_like,
    renamed,
    with_numbers,
)
from eformer._engine.loading.fetch import aligned, fetch
from eformer._engine.loading.read import nbytes_read, require_unchanged
from eformer._engine.loading.read_plan import Want, plan_reads
from eformer._engine.loading.rules import PartitionSpec
from eformer._engine.loading.select import floating_dtype_of, is_scalar, kind_of_dtype, kind_of_number
from eformer._engine.record.boxes import Box
from eformer._engine.record.dequantized import dequantized_in
from eformer._engine.record.digests import sha256_of
from eformer._engine.record.dtypes import dtype_from_name, is_floating, raw_pieces
from eformer._engine.record.lazy_arrays import Rearranged, shared_in, stored_leaves
from eformer._engine.record.names import BARE_LEAF, readable, refuse_root, resolve
from eformer._engine.record.origin import Origin, config_in, new_origin, parent_of, rules_in
from eformer._engine.record.pieces import bounding, pieces
from eformer._engine.record.stages import ModelFacts
from eformer._engine.record.text import few
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.pool import run_all
from eformer.errors import CorruptionError, FormatError, MismatchError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from eformer._engine.formats.dense import DenseTree
    from eformer._engine.formats.found import Found
    from eformer._engine.formats.process_records import ListedTree
    from eformer._engine.formats.quantized import Quantization
    from eformer._engine.loading.contents import Contents
    from eformer._engine.loading.request import Request
    from eformer._engine.loading.select import LeafTarget
    from eformer._engine.record.manifest import LeafEntry, TreeEntry
    from eformer._engine.record.planned import LazyArray
    from eformer._engine.record.rename import RenamingRules
    from eformer._engine.record.stages import Renamed
    from eformer._engine.stores.base import Files
    from eformer._engine.tasks.progress import Meter

Leaves = Mapping[str, Any]
Array = np.ndarray[Any, Any]

logger = logging.getLogger("eformer")

_SLICE_BYTES = 32 * 2**20  # bytes of a computed leaf to read at a time
_SHA256_BYTES = 16 * 2**20  # bytes to hash at a time
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct, Sharding, PartitionSpec)

_MERGE_FIRST = (
    "rules apply to each checkpoint of a list alone: to stack leaves of several, load them without the rule, save "
    "the result, and load the result with the rule"
)


@dataclass(slots=True)
class LoadSource:
    """A checkpoint to load from.

    entry      the record of its tree
    contents   its leaves, under the names that the load uses
    readers    read stored leaves for the leaves that rules and scales compute
    dropped    names of leaves that rules drop, or that a dense model does not have
    targets    the leaves that the load takes from this checkpoint
    quantized  how the tree is quantised; None if it is not, or before `look_for_quantized`
    numbers    the tree with its quantised weights as numbers, if the load reads it so
    facts      facts about the model, for the rules
    """

    found: Found
    entry: TreeEntry
    contents: Contents
    readers: Readers
    dropped: Sequence[str] = ()
    targets: list[LeafTarget] = field(default_factory=list)
    quantized: Quantization | None = None
    has_looked: bool = False
    numbers: DenseTree | None = None
    facts: ModelFacts = NO_FACTS

    def nbytes(self) -> int:
        """Return the number of bytes that the load reads."""
        computed = sum(
            array.dtype.itemsize * sum(box.size for box in _boxes(target))
            for target in self.targets
            if (array := self.contents.computed.get(target.name)) is not None
        )
        return nbytes_read(self.entry, self.targets) + computed

    def locate(self, entry: ListedTree) -> None:
        """Locate the boxes of the targets in a tree that several processes wrote, each with a record of its own."""
        listed = {t.entry.stored_name: t for t in self.targets if isinstance(t.entry, ListedLeaf)}
        with reading(self.found):
            self.entry = entry.locate({name: target.boxes for name, target in listed.items()})
        for name, target in listed.items():
            target.entry = self.entry.leaves[name]


def origin_of(sources: Sequence[LoadSource], rules: RenamingRules | None) -> Origin:
    """Return the origin of a tree that is loaded from these checkpoints."""
    parents = [
        parent_of(source.found.path, source.entry.save_id, source.found.manifest.digest) for source in sources
    ]
    first = sources[0]
    origin, config = first.entry.origin or {}, first.facts.config
    record = rules_in(origin) if rules is None else rules_for(rules, config, origin, first.found.path).record
    return new_origin("load", parents, record)


def refuse_kinds(found: Found, keys: Collection[str] | None) -> None:
    """Refuse to load leaves of kinds that eformer does not store, unless `keys` leave them out."""
    refused = found.foreign.refused
    asked = refused if keys is None else resolve(keys, refused)[0]
    if asked:
        leaves = few([f"leaf {name!r}: {refused[name]}" for name in asked])
        raise FormatError(
            f"{found.path} has leaves of kinds that eformer does not store: {leaves}. Load the other leaves with "
            "keys=, or with like= and partial=True; or write these as plain arrays first, such as the model before it "
            "was quantised, or dequantize() or to_dense() of tensors of PyTorch"
        )


# --------------------------------------------------------------------------------------- root and rename


def take_below(sources: Sequence[LoadSource], root: str) -> None:
    """Take the leaves below `root` of each checkpoint. Of several checkpoints, some may have no leaf there."""
    found = [below(source.contents, root) for source in sources]
    if not any(found):
        refuse_root(sources[0].contents.names, root)
    for source, contents in zip(sources, found, strict=True):
        source.contents = contents or NOTHING


def model_facts(
    source: LoadSource, rules: RenamingRules, request: Request, like: Leaves | None
) -> ModelFacts:
    """Return the facts that rules need: the recorded configuration or config.json, and the shapes and dtypes of the
    leaves of `like`. Refuse rules of another layout than the recorded one."""
    origin, config = source.entry.origin or {}, request.config
    if config is None:
        config = config_in(origin) or model_config(source.found.store)
    rules_for(rules, config, origin, source.found.path)
    leaves = {name: leaf for name, leaf in (like or {}).items() if hasattr(leaf, "shape")}
    found = ModelFacts(config)
    for name, leaf in leaves.items():
        for spelled in (name, readable(name), readable(name).removesuffix(".value")):
            found.shapes[spelled], found.dtypes[spelled] = tuple(leaf.shape), str(leaf.dtype)
    return found


def with_recorded_rules(request: Request, all_found: Sequence[Found]) -> Request:
    """Return the request with the rules that the checkpoints have recorded, if it asks for the way back without rules.

    Raise ValueError if one has none, or if they differ.
    """
    if not request.back or request.rename is not None:
        return request
    books = {found.path: _recorded_book(found, request.prefix) for found in all_found}
    if len(set(books.values())) > 1:
        listed = " and ".join(f"{path} of {book}" for path, book in books.items())
        raise ValueError(
            f"back=True: the checkpoints have recorded other rules, {listed}; load them one by one"
        )
    return replace(request, rename=rules_of_book(next(iter(books.values())), back=True))


def _recorded_book(found: Found, prefix: str | None) -> str:
    with reading(found):
        return recorded_book(found.listed(prefix).origin or {}, found.path)


def rename_leaves(sources: Sequence[LoadSource], rules: RenamingRules) -> None:
    """Apply the rules to the leaves of each checkpoint, and warn of rules that match no leaf of any checkpoint."""
    found = [_rename(source, rules, is_alone=len(sources) == 1) for source in sources]
    unused = [result.unused_rules for result in found]
    if idle := [text for line, text in unused[0].items() if all(line in lines for lines in unused)]:
        logger.warning("rename= rules that match no leaf: %s", few(idle))
    if notes := list(dict.fromkeys(note for result in found for note in result.notes)):
        logger.warning("rename=: %s", few(notes))


def _rename(source: LoadSource, rules: RenamingRules, *, is_alone: bool) -> Renamed:
    """Apply the rules to the leaves of a checkpoint. An error names the checkpoint if it is one of several."""
    try:
        source.contents, result = renamed(
            source.contents, rules, source.readers.of(source.entry), source.facts
        )
        with reading(source.found):
            result.require_tied()
    except MismatchError as error:
        if is_alone:
            raise
        stacks = _MERGE_FIRST if rules.stacks else ""
        raise MismatchError(error.problems, f"rename, {source.found.path}", stacks) from error
    source.dropped = (*source.dropped, *result.left_out)
    return result


# -------------------------------------------------------------------------------- several checkpoints


def spell_alike(sources: Sequence[LoadSource], like: Leaves | None) -> None:
    """Spell the names of leaves as `like` does; without `like`, as the first checkpoint that has them."""
    known: dict[str, Any] = {}
    for source in sources:
        source.contents = named_like(source.contents, known if like is None else like)
        known |= dict.fromkeys(source.contents.names)


def refuse_bare_leaf(sources: Sequence[LoadSource]) -> None:
    """Refuse to merge a checkpoint of a single array, which has no name, with checkpoints of trees."""
    bare = next(source.found.path for source in sources if BARE_LEAF in source.contents.names)
    raise StructureError(
        f"{bare} holds a single array, which has no name and cannot be merged with the trees of other "
        'checkpoints; pass rename={"%": "name"} to name it, or load it alone'
    )


def given_by(
    sources: Sequence[LoadSource], names: Mapping[str, None], request: Request, like: Leaves | None
) -> list[Collection[str]]:
    """Return the names of the leaves that each checkpoint gives. Refuse leaves that several checkpoints have."""
    holders: dict[str, list[LoadSource]] = {name: [] for name in names}
    for source in sources:
        functions = set(source.contents.functions)  # left to the code: no checkpoint holds them
        for name in source.contents.names:
            if name in names and name not in functions:
                holders[name].append(source)
    several = {n: held for n, held in holders.items() if len(held) > 1 and (like is None or n in like)}
    _require_whole_stacks(several)
    problems = [
        f"leaf {name!r} is in {' and in '.join(source.found.path for source in held)}"
        for name, held in several.items()
    ]
    if problems and request.duplicates is None:
        advice = 'duplicates="last" takes each from the last checkpoint that has it'
        raise MismatchError(problems, "several checkpoints hold the same leaves", advice)
    return [{name for name, held in holders.items() if held and held[-1] is source} for source in sources]


def _require_whole_stacks(several: Mapping[str, Sequence[LoadSource]]) -> None:
    """Refuse a leaf that rules stack from leaves of the last checkpoint, if its shape differs in an earlier checkpoint.

    Otherwise a stack of some layers would replace a stack of all layers.
    """
    problems = [
        f"leaf {name!r} is made of {' and of '.join(_parts_of(name, source) for source in held)}"
        for name, held in several.items()
        if isinstance(array := held[-1].contents.computed.get(name), Rearranged)
        and array.is_joined
        and len({source.contents.arrays[name].shape for source in held if name in source.contents.arrays}) > 1
    ]
    if problems:
        raise MismatchError(problems, "rename= stacks the leaves of each checkpoint alone", _MERGE_FIRST)


def _parts_of(name: str, source: LoadSource) -> str:
    """Name the stored leaves that a leaf is computed from, and their checkpoint."""
    array = source.contents.computed.get(name)
    names = [name] if array is None else [leaf.name for leaf in stored_leaves(array)]
    return f"{few([*map(repr, names)])} in {source.found.path}"


# ---------------------------------------------------------------------------------- quantised leaves


def look_for_quantized(source: LoadSource, request: Request) -> None:
    """Find out how the tree is quantised. Leaves that eformer saved count only if `dequant` asks for numbers."""
    if source.has_looked:
        return
    source.has_looked = True
    find_quantized = source.found.foreign.find_quantized
    if find_quantized is None and request.dequant:
        find_quantized = partial(quantization_of, source.found.store)
    if find_quantized is not None:
        with reading(source.found):
            source.quantized = find_quantized(source.entry)


def read_as_numbers(source: LoadSource, request: Request, like: Leaves | None) -> None:
    """Take the quantised weights as numbers, if `dequant` asks for them, if `like` has all of them as numbers, or if
    rules are a book, which is for dense models."""
    by_book = request.rename and dtype_of_numbers(request.rename, source.facts.config)
    if request.dequant is None and like is None and not by_book:
        return
    look_for_quantized(source, request)
    if (found := source.quantized) is None:
        return
    wanted = dtype_of_dequant(request.dequant)
    with reading(source.found):
        if wanted is not None:
            tree = dense_tree(found, wanted, source.readers.of)
        elif like is not None and (chosen := _as_in(like, source, found, request)) is not None:
            tree = chosen
        elif by_book:
            tree = dense_tree(found, by_book, source.readers.of)
        else:
            return
    source.numbers, source.dropped = tree, tree.left_out
    source.contents = with_numbers(source.contents, tree)


def _as_in(like: Leaves, source: LoadSource, quantized: Quantization, request: Request) -> DenseTree | None:
    """Return the dense tree in the dtypes of `like`; None if `like` does not have its weights as floating arrays."""
    try:
        tree = dense_tree(quantized, "float32", source.readers.of)
    except FormatError:  # damage is an error if somebody asks for numbers
        return None
    dtypes = None if tree.problems else _dtypes_in(like, source, tree, request)
    return None if dtypes is None else tree.cast(dtypes)


def _dtypes_in(like: Leaves, source: LoadSource, tree: DenseTree, request: Request) -> dict[str, str] | None:
    """Return the dtypes that `like` has for the weights of the dense tree; None if it does not have them as floating
    arrays."""
    contents: Contents | None = with_numbers(source.contents, tree)
    with suppress(MismatchError):  # the rules may be for the stored leaves
        if request.root is not None and contents:
            contents = below(contents, request.root)
        if request.rename is not None and contents:
            contents, _ = renamed(contents, request.rename, source.readers.of(source.entry), source.facts)
        contents = named_like(contents or NOTHING, like)
        chosen = contents.select(request.keys)
        return _agreed(like, {n: contents.computed[n] for n in chosen if n in contents.computed}, request)
    return None


def _agreed(like: Leaves, computed: Mapping[str, LazyArray], request: Request) -> dict[str, str] | None:
    dtypes: dict[str, str] = {}
    for name, array in computed.items():
        dtype = floating_dtype_of(like.get(name))
        if dtype is None and (name in like or not request.partial):
            return None
        if dtype is not None:
            dtypes |= {inner.dense_name: dtype for inner in dequantized_in(array)}
    return dtypes or None


def dequantized_names(sources: Sequence[LoadSource]) -> dict[str, str]:
    """Return the dtypes of the loaded leaves that were read as numbers from quantised weights."""
    found = {}
    for source in sources:
        computed = source.contents.computed
        for target in source.targets:
            if target.name in computed and dequantized_in(computed[target.name]):
                found[target.name] = computed[target.name].dtype.name
    return found


def refuse_quantized(
    source: LoadSource, names: Collection[str], given: Collection[str], request: Request, like: Leaves | None
) -> None:
    """Refuse quantised leaves among `names`. `given` are the leaves of all checkpoints of the load."""
    look_for_quantized(source, request)
    if (quantized := source.quantized) is None:
        return
    if request.partial and like is not None:
        names = _not_left_out(names, given, like, has_rules=request.rename is not None)
    taken = {id(stored) for name in names for stored in source.contents.stored(name)}
    leaves, path = source.entry.leaves, source.found.path
    if source.numbers is None:
        refuse_raw(quantized, path, {name for name in quantized.leaves if id(leaves[name]) in taken})
    else:
        problems = source.numbers.problems
        refuse_problems(quantized, path, {n: why for n, why in problems.items() if id(leaves[n]) in taken})


def _not_left_out(
    names: Collection[str], given: Collection[str], like: Leaves, *, has_rules: bool
) -> Collection[str]:
    """Return the names of leaves that a partial load takes, or that are quantised forms of arrays that `like` keeps."""
    missing = (name for name, leaf in like.items() if name not in given and hasattr(leaf, "shape"))
    kept = {readable(name).removesuffix(".value") for name in missing}
    if kept and has_rules:  # rules change names, so any leaf may be a quantised form of a kept array
        return names
    return [name for name in names if name in like or dense_name(name) in kept]


# ------------------------------------------------------------------ leaves that are read box by box


class TreeReader:
    """Read boxes of the leaves of one tree. The first read opens the files of the tree, `close` closes them."""

    def __init__(self, found: Found, tree: TreeEntry, *, verify: bool) -> None:
        self.found, self.tree, self.verify = found, tree, verify
        self.opened: Files | None = None
        self.lock = Lock()

    def read(self, name: str, entry: LeafEntry, box: Box, threads: int | None = None) -> Array:
        ((array,),) = self._fetch([Want(name, entry, entry.dtype, [box])], threads or 1)
        return array

    def read_all(self, names: Sequence[str]) -> dict[str, Array]:
        """Read whole leaves together."""
        wants = [Want(name, entry := self.tree.leaves[name], entry.dtype) for name in names]
        arrays = self._fetch(wants, self.found.store.read_threads)
        return {name: array for name, (array,) in zip(names, arrays, strict=True)}

    def _fetch(self, wants: Sequence[Want], threads: int) -> Sequence[Sequence[Array]]:
        reads, path_to = plan_reads(wants, self.tree), self.found.store.path_to
        return fetch(reads, wants, self.tree, self.files(), threads, verify=self.verify, path_to=path_to)

    def files(self) -> Files:
        with self.lock:
            self.opened = self.opened or self.found.files(self.tree)
            return self.opened

    def require_unchanged(self) -> None:
        """Raise if another program wrote to a file without digests while it was read."""
        if self.opened:
            with reading(self.found):
                require_unchanged(self.tree, self.opened)

    def close(self) -> None:
        if self.opened:
            self.opened.close()


class Readers:
    """Readers of the trees of one checkpoint, made when they are first needed."""

    def __init__(self, found: Found, *, verify: bool) -> None:
        self.found, self.verify = found, verify
        self.made: dict[int, TreeReader] = {}

    def of(self, tree: TreeEntry) -> TreeReader:
        """Return the reader of a tree."""
        if id(tree) not in self.made:
            self.made[id(tree)] = TreeReader(self.found, tree, verify=self.verify)
        return self.made[id(tree)]

    def require_unchanged(self) -> None:
        for reader in self.made.values():
            reader.require_unchanged()

    def close(self) -> None:
        for reader in self.made.values():
            reader.close()


def check_sha256(found: Found, tree: TreeEntry, expected: Mapping[str, str], threads: int | None) -> None:
    """Compare the SHA-256 of stored leaves with `expected`; raise a CorruptionError that lists all differences."""
    problems: list[str] = []

    def check_leaf(name: str, entry: LeafEntry) -> None:
        boxes = pieces(entry.shape, dtype_from_name(entry.dtype).itemsize, _SHA256_BYTES)
        digest = sha256_of(part for box in boxes for part in raw_pieces(reader.read(name, entry, box)))
        if digest != expected[name]:
            where = ", ".join(sorted({tree.path_of(extent.file) for extent in entry.extents}))
            problems.append(f"leaf {name!r} in {where} has SHA-256 {digest}, expected {expected[name]}")

    leaves = [(name, entry) for name, entry in tree.leaves.items() if name in expected]
    with closing(TreeReader(found, tree, verify=True)) as reader:
        run_all(
            [partial(check_leaf, name, entry) for name, entry in leaves], threads or found.store.read_threads
        )
    if problems:
        raise CorruptionError(f"{found.path}: validation failed: {'; '.join(sorted(problems))}")


def read_computed(
    computed: Mapping[str, LazyArray], targets: Sequence[LeafTarget], threads: int, meter: Meter
) -> None:
    """Read the targets that rules compute into host memory.

    Arrays with alternating elements of one source are read side by side, so that the source is read once.
    """
    groups: dict[object, list[tuple[LazyArray, LeafTarget, list[Box]]]] = {}
    for target in targets:
        if (array := computed.get(target.name)) is not None:
            parts = [part for box in _boxes(target) for part in _slices(box, array)]
            shared = frozenset(map(id, shared_in(array)))
            groups.setdefault((shared, *parts) if shared else id(target), []).append((array, target, parts))
    tasks: list[Callable[[], None]] = []
    for group in groups.values():
        for shared_array in shared_in(group[0][0]):
            shared_array.readers = len(group)
        side_by_side = zip(
            *(_tasks(array, target, parts, meter) for array, target, parts in group), strict=True
        )
        tasks += itertools.chain.from_iterable(side_by_side)
    run_all(tasks, threads)


def _tasks(
    array: LazyArray, target: LeafTarget, parts: Sequence[Box], meter: Meter
) -> list[Callable[[], None]]:
    """Return tasks that read the parts of one array, each of which lies in few ranges of the files."""
    dtype = dtype_from_name(target.dtype)
    outputs: list[tuple[Box, Array]] = [
        (box, np.ndarray(box.shape, dtype, aligned(dtype.itemsize * box.size))) for box in target.wanted
    ]
    target.arrays = [output for _, output in outputs]

    def read(part: Box) -> None:
        elements = array.read(part)
        meter.add(elements.nbytes)
        for box, output in outputs:
            if not part.start:
                output[()] = elements
            elif overlap := part.overlap(box):
                output[overlap.inside(box).slices] = elements[overlap.inside(part).slices]

    return [partial(read, part) for part in parts]


def _boxes(target: LeafTarget) -> list[Box]:
    """Return one box around all wanted boxes; if they lie far apart, the wanted boxes."""
    around = bounding(target.wanted)
    return [around] if around.size <= 2 * sum(box.size for box in target.wanted) else list(target.wanted)


def _slices(box: Box, array: LazyArray) -> list[Box]:
    """Cut a box along the axis whose slices need the fewest bytes beside their own."""
    if not box.start or not box.size:
        return [box] if box.size else []
    axis = array.slow_axis
    first, last = box.start[axis], box.stop[axis]
    row = array.dtype.itemsize * box.size // (last - first)
    rows = max(1, _SLICE_BYTES // max(1, row))
    starts = range(first, last, rows)
    return [
        Box(
            (*box.start[:axis], start, *box.start[axis + 1 :]),
            (*box.stop[:axis], min(start + rows, last), *box.stop[axis + 1 :]),
        )
        for start in starts
    ]


# ------------------------------------------------------------------------------ leaves without names
#
# equinox stores arrays and numbers of a tree, and skips other leaves, such as functions.


def name_by_order(sources: Sequence[LoadSource], like: Leaves, request: Request) -> Leaves:
    """Give the leaves of the only checkpoint the names in `like`. Return the leaves to compare them with."""
    if request.partial or len(sources) > 1:
        nameless = next(source.found.path for source in sources if not source.found.foreign.has_names)
        why = "partial=True needs" if len(sources) == 1 else "a load of several checkpoints needs"
        raise ValueError(f"{nameless} has no names of leaves, which {why}")
    (source,) = sources
    source.contents, expected = by_order(source.contents, like, request.cast)
    return expected


def by_order(contents: Contents, like: Leaves, cast: str | None) -> tuple[Contents, dict[str, Any]]:
    """Return the leaves under the names in `like`, and the leaves to compare them with.

    Numbers are stored as arrays without axes. Surplus arrays get impossible names, so that the error lists them as
    unexpected.
    """
    wanted = {name: leaf for name, leaf in like.items() if _is_stored(leaf)}
    spare = (f"%array {number}" for number in itertools.count(len(wanted)))
    names = itertools.chain(wanted, spare)
    entries = dict(zip(names, contents.arrays.values(), strict=False))
    expected = {name: _expected(leaf, entries.get(name), cast) for name, leaf in wanted.items()}
    return replace(contents, arrays=entries), expected


def completed(arrays: Leaves, like: Leaves) -> dict[str, Any]:
    """Return a leaf for every name in `like`: the leaf of `like` if it is not stored, numpy scalars in its dtypes."""
    return {
        **{name: leaf for name, leaf in like.items() if not _is_stored(leaf)},
        **{name: _in_dtype_of(like.get(name), leaf) for name, leaf in arrays.items()},
    }


def _is_stored(leaf: Any) -> bool:
    if isinstance(leaf, np.flexible):  # text and bytes of numpy, which JAX does not have
        return False
    return isinstance(leaf, _ARRAYS) or is_scalar(leaf) or hasattr(leaf, "__jax_array__")


def _expected(leaf: Any, entry: LeafEntry | None, cast: str | None) -> Any:
    """Return the leaf to compare an entry with. Numpy scalars fit any size, because JAX stores 64 bits as 32."""
    if not isinstance(leaf, np.generic) or entry is None or entry.shape:
        return leaf
    if kind_of_number(leaf) is None or kind_of_number(leaf) is not kind_of_dtype(entry.dtype):
        return leaf
    dtype = cast if cast and is_floating(entry.dtype) else entry.dtype
    return np.zeros((), dtype_from_name(dtype))[()]


def _in_dtype_of(leaf: Any, found: Any) -> Any:
    """Cast a numpy scalar to the dtype of the leaf of `like`; return other values unchanged."""
    are_scalars = isinstance(leaf, np.generic) and isinstance(found, np.generic)
    return found.astype(leaf.dtype) if are_scalars else found
