"""Load a tree: find, select, place, plan, fetch, assemble."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

from eformer._engine.formats.find import ReplacedError, reading, reread_all
from eformer._engine.formats.process_records import ListedLeaf, ListedTree
from eformer._engine.formats.quantized import dense_name
from eformer._engine.loading.assemble import assemble, change_shapes
from eformer._engine.loading.computed import TreeReader, nbytes_computed, read_computed
from eformer._engine.loading.contents import (
    NOTHING,
    below,
    contents_of,
    has_root,
    merged,
    named_like,
    renamed,
    spelled_alike,
)
from eformer._engine.loading.fetch import check_sha256
from eformer._engine.loading.pinned_stream import is_worth_streaming, stream
from eformer._engine.loading.placement import accelerator_of, on_current_mesh, place_targets, processes_of
from eformer._engine.loading.read import nbytes_read, read, require_boxes
from eformer._engine.loading.report import LoadReport
from eformer._engine.loading.request import PlacementRequest, Request
from eformer._engine.loading.scalars import as_scalar
from eformer._engine.loading.select import compare, select
from eformer._engine.loading.unnamed_leaves import by_order, completed
from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.lazy_arrays import Stacked, stored_leaves
from eformer._engine.record.manifest import UNREADABLE
from eformer._engine.record.names import BARE_LEAF, readable, resolve
from eformer._engine.record.rename import rules_from
from eformer._engine.record.text import few
from eformer._engine.stores.cache import caching
from eformer._engine.stores.keys import public_key
from eformer._engine.stores.store_options import remember
from eformer._engine.tasks.deadline import within
from eformer._engine.tasks.interrupts import called, uninterrupted
from eformer._engine.tasks.pool import gc_paused
from eformer._engine.tasks.progress import is_wanted, metered
from eformer._engine.trees.devices import arrived
from eformer._engine.trees.flatten import flatten, transient_in
from eformer._engine.trees.unflatten import unflatten, unflatten_like
from eformer.errors import FormatError, MismatchError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import jax

    from eformer._engine.formats.found import Found
    from eformer._engine.loading.contents import Contents
    from eformer._engine.loading.request import Resize, Rules
    from eformer._engine.loading.select import LeafTarget, Selection
    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.record.rename import Renamed, RenameRules, Rule
    from eformer._engine.stores.cache import Cached
    from eformer._engine.stores.keys import Key
    from eformer._engine.tasks.progress import Meter, Progress

logger = logging.getLogger("eformer")

T = TypeVar("T")
Path = str | os.PathLike[str]
_ONE_PATH = (str, bytes, os.PathLike)

_MERGE_FIRST = (
    "rules apply to each checkpoint of a list alone: to stack leaves of several, load them without the rule and save "
    "the result, then load that with the rule"
)
_BETWEEN_RESTARTS = 0.2  # seconds, for all processes to find the newer checkpoint


class LoadArguments(TypedDict, total=False):
    """The arguments that `load` and `Run.resume` share, and that do not change the type of the result."""

    partial: bool
    root: str | None
    rename: RenameRules | None
    resize: Resize | None
    prefix: str | None
    keys: str | Iterable[str] | None
    mesh: jax.sharding.Mesh | None
    rules: Rules | None
    shardings: Any
    dtype: Any
    callback: Callable[[Any, str], Any] | None
    batch: int | None
    verify: bool | None
    mmap: bool
    progress: Progress
    broadcast: bool
    cache: Cached
    key: Key | None


class _Arguments(LoadArguments, total=False):
    """The arguments of `load` that do not change the type of its result."""

    dequant: Literal[False] | None
    duplicates: Literal["last"] | None
    timeout: float | None
    store_options: Mapping[str, Any] | None


@overload
def load(
    path: Path | Sequence[Path], *, like: T, return_report: Literal[True], **others: Unpack[_Arguments]
) -> tuple[T, LoadReport]: ...
@overload
def load(
    path: Path | Sequence[Path], *, into: T, return_report: Literal[True], **others: Unpack[_Arguments]
) -> tuple[T, LoadReport]: ...
@overload
def load(path: Path | Sequence[Path], *, like: T, **others: Unpack[_Arguments]) -> T: ...
@overload
def load(path: Path | Sequence[Path], *, into: T, **others: Unpack[_Arguments]) -> T: ...
@overload
def load(
    path: Path | Sequence[Path], *, return_report: bool = False, **others: Unpack[_Arguments]
) -> Any: ...
@uninterrupted
def load(
    path: Path | Sequence[Path],
    *,
    like: Any = None,
    into: Any = None,
    partial: bool = False,
    root: str | None = None,
    rename: RenameRules | None = None,
    resize: Resize | None = None,
    return_report: bool = False,
    prefix: str | None = None,
    keys: str | Iterable[str] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    shardings: Any = None,
    dtype: Any = None,
    callback: Callable[[Any, str], Any] | None = None,
    batch: int | None = None,
    verify: bool | None = None,
    mmap: bool = False,
    progress: Progress = None,
    broadcast: bool = False,
    timeout: float | None = None,
    store_options: Mapping[str, Any] | None = None,
    cache: Cached = None,
    key: Key | None = None,
    dequant: Literal[False] | None = None,
    duplicates: Literal["last"] | None = None,
) -> Any:
    """Load the tree that was saved at `path`, bit for bit.

    Raises an error that names the leaf, the file and the problem if anything is missing, damaged or does not fit.
    Without `like`, the tree has the structure it was saved with: jax arrays are jax arrays and numpy arrays are numpy
    arrays.

    path            a directory, a file or a URL, of eformer or of another program; of a run the last step is loaded. A
                    list of them is loaded as if it were one checkpoint, such as [base, adapter]: `prefix`, `root`,
                    `rename` and `keys` apply to each, and without `like` the result is nested dicts by name
    like            a tree of arrays, `ShapeDtypeStruct`s or shardings: the result has its structure, shapes, dtypes and
                    shardings. A number and an array without axes become each other, as `like` has them, if they are of
                    one kind (bool, int, float, complex) and the value does not change. Functions, such as activations
                    of Equinox, stay as they are. Files of equinox have no names, and need `like`
    into            as `like`, but modules in it that hold their state themselves, such as those of flax NNX and Keras,
                    are updated in place; they are part of the result, too
    partial         allow differences: leaves that the checkpoint lacks stay as `like` has them, leaves that `like`
                    lacks are left out. The names of both are logged
    return_report   return a pair of the tree and a `LoadReport` instead of logging
    root            take the subtree of this name, such as "params.encoder", for the whole checkpoint
    rename          give leaves other names before anything else looks at them, and transpose, stack or unstack them on
                    the way: the rules of `convert`, as a file, text, pairs or a dict
    resize          change arrays that have another shape than in `like`: a dict of patterns of names and functions of
                    the stored array and the leaf of `like`, or one function of these two and the name
    prefix          the tree, if there are several
    keys            names of leaves or subtrees, or patterns such as "layers.*.bias"; dots in a key of a dict may be
                    written as they are. Without `like` the result is a flat dict by the names in the checkpoint
    mesh            the mesh to load onto. With neither `rules` nor `shardings`, leaves are placed as they were saved.
                    Shardings on an `AbstractMesh`, as `jax.eval_shape` gives them, mean the same axes of this mesh.
                    None for the mesh of `jax.set_mesh`, which never makes a load fail: leaves that nothing else places
                    are replicated over it, and leaves that JAX cannot hold are numpy arrays. If it has devices of other
                    processes, it counts only if `rules`, a `PartitionSpec` or an `AbstractMesh` needs a mesh
    rules           pairs of a regex and a PartitionSpec, or a dict; the regex is searched for in names joined by "/"
    shardings       where leaves go: one for all, or by name (nested or dotted, for some leaves or all), each a
                    `Sharding`, a `PartitionSpec` or a function that is called on the loaded array
    dtype           cast floating leaves to this dtype; "like" casts each of them to the dtype that it has in `like`.
                    Other leaves are never cast
    callback        a function of each array and its name, which returns the replacement
    batch           the number of arrays to read at a time; None reads all at once
    verify          False skips the digests; with `mmap`, True checks them, which reads everything once
    mmap            map numpy arrays and arrays on CPUs from the files, which are read when the arrays are used: the
                    load takes only as long as creating the arrays. If another program writes to the files in place, the
                    arrays change; if it truncates them, the process dies. eformer never does either. Leaves that are
                    not stored as they are wanted are read. In a bucket, `mmap` needs a `cache`
    progress        True for a bar on standard error, or a function that is called with the bytes read so far and in
                    total, several times a second and from any thread; it starts again if a newer save replaces the
                    checkpoint
    broadcast       read data that several processes hold only once, a part by each, and send it between the devices:
                    faster for large leaves on slow storage
    timeout         seconds that processes wait for each other, by default 600; and after which a load from a bucket is
                    given up with TimeoutError, by default never, because its requests have limits of their own
    store_options   a dict of options of the bucket that `path` is in, see `store_options`; from this call on they hold
                    for the path and all below it
    cache           a directory of this machine that keeps what is read from a bucket for the next load; None for that
                    of the environment variable EFORMER_CACHE, False for none. Damaged parts of it are fetched again.
                    The least recently used objects are removed when it is larger than EFORMER_CACHE_BYTES, by default
                    100 GB or half of the disk
    key             a public key, as the path of a PEM file or its content: refuse what its owner has not signed (see
                    `sign`), and read nothing that is not checked against the signature first, whatever happens to the
                    files meanwhile. Bytes that the load does not need are not checked; `verify` checks all
    dequant         False loads the leaves of a quantised model of another program as they are stored. None refuses them
                    with a `QuantizedError`: without their scales they are not the numbers of the model
    duplicates      "last" takes a leaf that several checkpoints of a list have from the last of them; None refuses it

    If leaves go to devices of several processes, all of these must call `load`; no other process has to take part. An
    error in one is an error in all. Each process reads what its devices hold.

    Example:

        >>> state = checkpoint.load("run/step-100", like=state)
        >>> checkpoint.load("run/step-100", keys="params", mesh=mesh, rules=[("w", PartitionSpec("data"))])
        >>> model = checkpoint.load("hf/llama", into=model, rename="llama.rules")
        >>> state = checkpoint.load("pretrained", like=state, partial=True)
        >>> model = checkpoint.load(["pretrained", "lora"], like=abstract_model)
    """
    paths = _paths(path)
    for each in paths:
        remember(each, store_options)
    request = request_from(
        like=like,
        into=into,
        partial=partial,
        root=root,
        rename=rename,
        resize=resize,
        prefix=prefix,
        keys=keys,
        mesh=mesh,
        rules=rules,
        shardings=shardings,
        dtype=dtype,
        callback=callback,
        batch=batch,
        verify=verify,
        mmap=mmap,
        progress=progress,
        broadcast=broadcast,
        timeout=timeout,
        cache=cache,
        key=key,
        dequant=dequant,
        duplicates=duplicates,
    )
    loaded = load_tree(paths, request)
    if return_report:
        return loaded.tree, loaded.report
    log_differences(" and ".join(os.fspath(each) for each in paths), request, loaded.report)
    return loaded.tree


def request_from(
    *,
    like: Any = None,
    into: Any = None,
    rename: RenameRules | None = None,
    keys: str | Iterable[str] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    shardings: Any = None,
    verify: bool | None = None,
    mmap: bool = False,
    key: Key | None = None,
    **as_they_are: Any,
) -> Request:
    """Return the request that arguments of `load` make. Raise ValueError for arguments that exclude each other."""
    if like is not None and into is not None:
        raise ValueError("pass like= or into=, not both")
    if key is not None and mmap:
        raise ValueError("mmap=True cannot have a key=: mapped files may change after they were checked")
    return Request(
        like=like if into is None else into,
        in_place=into is not None,
        like_name="like" if into is None else "into",
        rename=None if rename is None else rules_from(rename) or None,
        keys=None if keys is None else (keys,) if isinstance(keys, str) else tuple(keys),
        placement=PlacementRequest(mesh=mesh, rules=rules, shardings=shardings),
        verify=not mmap if verify is None else verify,
        mmap=mmap,
        key=None if key is None else public_key(key),
        **as_they_are,
    )


def log_differences(path: str, request: Request, report: LoadReport) -> None:
    """Log the leaves that `partial` or `rename` kept or left out."""
    if (report.kept or report.left_out) and (request.partial or request.rename):
        logger.warning("%s: %s", path, report)


@dataclass(frozen=True, slots=True)
class LoadedTree:
    """A loaded tree, its record in the checkpoint, and what became of the leaves."""

    tree: Any
    entry: TreeEntry
    report: LoadReport


@uninterrupted
def load_tree(
    path: Path | Sequence[Path], request: Request, see: Callable[[Found], Found] | None = None
) -> LoadedTree:
    """Load what `request` asks for. `see` makes of a checkpoint that was found the one to load."""
    like = None if request.like is None else flatten(request.like)[0]
    paths = _paths(path)
    request = replace(
        request,
        placement=on_current_mesh(request.placement, like),
        transient=transient_in(request.like) if request.in_place else (),
        is_list=len(paths) > 1,
    )
    with (
        within(request.timeout, f"{request.timeout_of}(timeout={request.timeout})"),
        _processes(request, like) as hosts,
        caching(request.cache),
    ):
        load = _Load(request, like, hosts)
        loaded = reread_all(paths, lambda found: load.load([*map(see, found)] if see else found), request.key)
    return LoadedTree(_rebuild(loaded, request), loaded.entry, _report(loaded))


def _paths(path: Any) -> Sequence[Path]:
    """Return the paths of the checkpoints to load from."""
    paths: list[Any] = [path]
    if isinstance(path, _ONE_PATH):
        return paths
    if not isinstance(path, Iterable) or isinstance(path, (set, frozenset)):
        kind = type(path).__name__
        raise TypeError(f"the path is of type {kind}; expected a path, or a list of paths in an order")
    if not (paths := list(path)):
        raise ValueError("an empty list of paths: expected at least one checkpoint to load")
    for each in paths:
        if not isinstance(each, _ONE_PATH):
            kind = type(each).__name__
            raise TypeError(f"an item of the list of paths is of type {kind}; expected a path")
    return paths


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The leaves that were loaded: `arrays`, and in the selection everything else."""

    entry: TreeEntry
    contents: Contents
    selection: Selection
    arrays: dict[str, Any]
    dropped: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint to load from: its tree, its leaves under the names that the load uses, names that rules drop, and
    the targets that it gives. Rules make leaves that `reader` reads."""

    found: Found
    entry: TreeEntry
    contents: Contents
    reader: TreeReader | None = None
    dropped: Sequence[str] = ()
    targets: list[LeafTarget] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Load:
    """A load of what `request` asks for. `like` has the leaves of its tree by name; `hosts` are the processes whose
    devices the leaves go to."""

    request: Request
    like: Mapping[str, Any] | None
    hosts: Hosts

    def load(self, all_found: Sequence[Found]) -> _Loaded:
        """Load the arrays of one checkpoint, by name, or in the order of `like` if they have no names; or the arrays of
        several checkpoints, as if they were one."""
        with ExitStack() as stack:
            sources = [self._opened(found, stack) for found in all_found]
            if self.request.root is not None:
                sources = _below(sources, self.request.root)
            if self.request.rename is not None:
                sources = _renamed(sources, self.request.rename)
            if (
                self.like is None
                or self.request.rename is not None
                or all(s.found.foreign.has_names for s in sources)
            ):
                loaded = self._load_arrays(_spelled_alike(sources, self.like))
            else:
                loaded = self._load_by_order(sources)
            for source in sources:
                if source.reader is not None:
                    with reading(source.found):
                        source.reader.require_unwritten()
        return replace(
            loaded, dropped=[*dict.fromkeys(name for source in sources for name in source.dropped)]
        )

    def _opened(self, found: Found, stack: ExitStack) -> _Source:
        """Read the record of the tree to load, and warn of files beside it that are not read."""
        with reading(found):
            needs_all = self.request.rename is not None or self.request.sha256 is not None
            entry = found.tree(self.request.prefix) if needs_all else found.listed(self.request.prefix)
            contents = contents_of(entry)
        self._require_stored(found)
        if paths := found.left_out(self.request.prefix):
            logger.warning("%s: not read, and may hold leaves: %s", found.path, few(paths))
        if self.request.rename is None:
            return _Source(found, entry, contents)
        reader = stack.enter_context(closing(TreeReader(found, entry, verify=self.request.verify)))
        return _Source(found, entry, contents, reader)

    def _require_stored(self, found: Found) -> None:
        """Refuse to load leaves of kinds that eformer does not store, unless others are asked for."""
        refused = found.foreign.refused
        if not refused or self.request.partial:
            return
        asked = refused if self.request.keys is None else resolve(self.request.keys, refused)[0]
        if asked:
            leaves = few([f"leaf {name!r}: {refused[name]}" for name in asked])
            raise FormatError(
                f"{found.path} has leaves of kinds that eformer does not store: {leaves}. Load the others with keys=, "
                "or with like= and partial=True; or write them as plain arrays first, such as the model before it was "
                "quantised, or dequantize() or to_dense() of tensors of PyTorch"
            )

    def _require_numbers(self, source: _Source, names: Collection[str], given: Collection[str]) -> None:
        """Refuse quantised leaves among `names`, unless they are asked for as they are stored. All checkpoints of the
        load have the leaves `given`."""
        if self.request.dequant is False:
            return
        with reading(source.found):
            quantized = source.found.foreign.find_quantized(source.entry)
        if quantized is None:
            return
        if self.request.partial and self.like is not None:
            names = self._not_left_out(names, given, self.like)
        taken = {id(stored) for name in names for stored in source.contents.stored(name)}
        leaves = source.entry.leaves
        quantized.refuse(source.found.path, {name for name in quantized.leaves if id(leaves[name]) in taken})

    def _not_left_out(
        self, names: Collection[str], given: Collection[str], like: Mapping[str, Any]
    ) -> Collection[str]:
        """Return the names of leaves that a partial load takes, or that are in the place of arrays which `like` keeps:
        the weights before they were quantised."""
        missing = (name for name, leaf in like.items() if name not in given and hasattr(leaf, "shape"))
        kept = {readable(name).removesuffix(".value") for name in missing}
        if (
            kept and self.request.rename is not None
        ):  # for the names of the dense model: any leaf may be the one
            return names
        return [name for name in names if name in like or dense_name(name) in kept]

    def _load_by_order(self, sources: Sequence[_Source]) -> _Loaded:
        """Load a file that stores one array after another, without names."""
        if self.request.partial or len(sources) > 1:
            nameless = next(source.found.path for source in sources if not source.found.foreign.has_names)
            why = "partial=True needs" if len(sources) == 1 else "a load of several checkpoints needs"
            raise ValueError(f"{nameless} has no names of leaves, which {why}")
        assert self.like is not None
        (source,) = sources
        contents, expected = by_order(source.contents, self.like, self.request.cast)
        loaded = replace(self, like=expected)._load_arrays([replace(source, contents=contents)])
        return replace(loaded, arrays=completed(loaded.arrays, self.like))

    def _load_arrays(self, sources: Sequence[_Source]) -> _Loaded:
        """Load the arrays of one tree: select and place, then plan, fetch and assemble."""
        with gc_paused():
            contents = merged([source.contents for source in sources])
            selection, sources = self._selected(sources, contents)
            place_targets(selection.targets, contents, self.request)
            sources = [_located(source) for source in sources]
        return _Loaded(sources[0].entry, contents, selection, self._fetched(sources))

    def _selected(
        self, sources: Sequence[_Source], contents: Contents
    ) -> tuple[Selection, Sequence[_Source]]:
        """Choose the leaves to load, and which checkpoint gives each. Refuse leaves that cannot be given as asked."""
        self._require_trees(sources, contents)
        names = select(contents, self.request.keys, is_list=self.request.is_list)
        owned = self._owned(sources, names)
        for source, own in zip(sources, owned, strict=True):
            self._require_numbers(source, own, names)
        selection = compare(contents, names, self.request, self.like)
        _require_classes(contents, self.request)
        return selection, [
            replace(source, targets=[target for target in selection.targets if target.name in own])
            for source, own in zip(sources, owned, strict=True)
        ]

    def _fetched(self, sources: Sequence[_Source]) -> dict[str, Any]:
        total = sum(map(_nbytes, sources)) if is_wanted(self.request.progress) else 0
        saves = " ".join(source.entry.save_id for source in sources)
        arrays: dict[str, Any] = {}
        with metered(self.request.progress, total, "loading") as meter:
            for number, source in enumerate(sources, 1):
                is_last = number == len(sources)
                self._fetch_and_assemble(source, arrays, meter, f"{saves} {number}", is_last=is_last)
        return arrays

    def _owned(self, sources: Sequence[_Source], names: Mapping[str, None]) -> list[Collection[str]]:
        """Return the names of the leaves that each checkpoint gives. Refuse leaves that several of them could give."""
        if len(sources) == 1:
            return [names]
        holders: dict[str, list[_Source]] = {name: [] for name in names}
        for source in sources:
            functions = set(source.contents.functions)  # left to the code: no checkpoint holds them
            for name in source.contents.names:
                if name in names and name not in functions:
                    holders[name].append(source)
        several = {
            n: held for n, held in holders.items() if len(held) > 1 and (self.like is None or n in self.like)
        }
        _require_whole_stacks(several)
        problems = [
            f"leaf {name!r} is in {' and in '.join(source.found.path for source in held)}"
            for name, held in several.items()
        ]
        if problems and self.request.duplicates is None:
            advice = 'duplicates="last" takes each from the last checkpoint that has it'
            raise MismatchError(problems, "several checkpoints hold the same leaves", advice)
        return [{name for name, held in holders.items() if held and held[-1] is source} for source in sources]

    def _require_trees(self, sources: Sequence[_Source], contents: Contents) -> None:
        """Refuse a checkpoint that is one array, without a name, beside checkpoints of trees."""
        if self.request.partial or self.request.keys is not None or len(contents.names) == 1:
            return
        bare = [source.found.path for source in sources if BARE_LEAF in source.contents.names]
        if bare:
            raise StructureError(
                f"{bare[0]} holds a single array, which has no name and cannot be merged with the trees of other "
                'checkpoints; pass rename={"%": "name"} to name it, or load it alone'
            )

    def _fetch_and_assemble(
        self, source: _Source, arrays: dict[str, Any], meter: Meter, step: str, *, is_last: bool
    ) -> None:
        """Read the targets of a source into `arrays` and hand them to the caller's functions, batch by batch. The
        processes agree on the `step`; with the last source they end their work together."""
        found, entry, targets = source.found, source.entry, source.targets
        threads = self.request.threads or found.store.read_threads
        if self.request.sha256 is not None:
            with reading(found):
                check_sha256(found, entry, self.request.sha256(entry), threads)
        end = max(1, len(targets))
        size = self.request.batch or end
        for start in range(0, end, size):
            batch = targets[start : start + size]
            streamed, others = self._split(batch)
            assembled: dict[str, Any] = {}
            with reading(found):
                if streamed:
                    assembled = stream(
                        found, entry, streamed, threads, verify=self.request.verify, meter=meter
                    )
                read(
                    found,
                    entry,
                    others,
                    threads,
                    verify=self.request.verify,
                    mmap=self.request.mmap,
                    meter=meter,
                )
                if source.contents.computed:
                    read_computed(source.contents.computed, others, threads, meter)
            change_shapes(others)
            ends = is_last and start + size >= end
            if ends or self.request.broadcast:  # a broadcast needs all processes
                _agree(self.hosts, f"{step} {start}", is_last=ends)
            with gc_paused():
                assembled |= assemble(others)
            self._finish(batch, assembled, arrays)

    def _split(self, targets: list[LeafTarget]) -> tuple[list[LeafTarget], list[LeafTarget]]:
        """Split targets into those to stream to accelerators and the others, which are read into host memory first.

        A broadcast streams nothing: all processes have to read all of a batch before the first array of it moves.
        """
        if self.request.broadcast:
            return [], targets
        streamed = [target for target in targets if _can_be_streamed(target)]
        if not is_worth_streaming(streamed):
            return [], targets
        return streamed, [target for target in targets if not _can_be_streamed(target)]

    def _finish(self, batch: list[LeafTarget], assembled: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Move the assembled arrays of a batch to `arrays`, through the caller's functions."""
        callback = self.request.callback
        arrived(list(assembled.values()))  # the caller's functions may run programs, see `Transfer`
        for target in batch:
            leaf = assembled.pop(target.name)
            leaf = called(target.transform, leaf) if target.transform else leaf
            leaf = called(callback, leaf, target.name) if callback else leaf
            arrays[target.name] = leaf if target.like_scalar is None else as_scalar(leaf, target.like_scalar)
            target.arrays = ()  # memory that the caller's functions release is freed at once


def _below(sources: Sequence[_Source], root: str) -> list[_Source]:
    """Take what lies below `root` for each checkpoint. One of several may have nothing there."""
    if not any(has_root(source.contents, root) for source in sources):
        below(sources[0].contents, root)  # raises, with a hint
    return [
        replace(s, contents=below(s.contents, root) if has_root(s.contents, root) else NOTHING)
        for s in sources
    ]


def _renamed(sources: Sequence[_Source], rules: Sequence[Rule]) -> list[_Source]:
    """Apply the rules to the leaves of each checkpoint, and warn of rules that match a leaf of none."""
    changed = [_renamed_one(source, rules, is_alone=len(sources) == 1) for source in sources]
    unused = [result.unused_rules for _, result in changed]
    if idle := [text for line, text in unused[0].items() if all(line in lines for lines in unused)]:
        logger.warning("rename= rules that match no leaf: %s", few(idle))
    return [
        replace(source, contents=contents, dropped=result.left_out)
        for source, (contents, result) in zip(sources, changed, strict=True)
    ]


def _renamed_one(source: _Source, rules: Sequence[Rule], *, is_alone: bool) -> tuple[Contents, Renamed]:
    """Apply the rules to the leaves of a checkpoint. An error names the checkpoint if it is one of several."""
    assert source.reader
    try:
        return renamed(source.contents, rules, source.reader)
    except MismatchError as error:
        if is_alone:
            raise
        stacks = _MERGE_FIRST if any(rule.stack for rule in rules) else ""
        raise MismatchError(error.problems, f"rename, {source.found.path}", stacks) from error


def _spelled_alike(sources: Sequence[_Source], like: Mapping[str, Any] | None) -> list[_Source]:
    """Spell the names of leaves as `like` does, or as the first checkpoint that has them."""
    some = [source.contents for source in sources]
    alike = spelled_alike(some) if like is None else [named_like(contents, like) for contents in some]
    return [replace(source, contents=contents) for source, contents in zip(sources, alike, strict=True)]


def _require_whole_stacks(several: Mapping[str, Sequence[_Source]]) -> None:
    """Refuse a leaf that rules stack of the leaves of the last checkpoint, and that has another shape in one before.

    A stack of some layers would replace a stack of all.
    """
    problems = [
        f"leaf {name!r} is made of {' and of '.join(_parts_of(name, source) for source in held)}"
        for name, held in several.items()
        if isinstance(held[-1].contents.computed.get(name), Stacked)
        and len({source.contents.arrays[name].shape for source in held if name in source.contents.arrays}) > 1
    ]
    if problems:
        raise MismatchError(problems, "rename= stacks the leaves of each checkpoint alone", _MERGE_FIRST)


def _parts_of(name: str, source: _Source) -> str:
    """Name the stored leaves that a leaf is made of, and their checkpoint."""
    array = source.contents.computed.get(name)
    names = [name] if array is None else [leaf.name for leaf in stored_leaves(array)]
    return f"{few([*map(repr, names)])} in {source.found.path}"


def _located(source: _Source) -> _Source:
    """Read where the boxes of the targets are, if several processes wrote the tree: each has recorded its own."""
    found, entry, targets = source.found, source.entry, source.targets
    if found.is_part:
        require_boxes(targets)
    if not isinstance(entry, ListedTree):
        return source
    listed = {target.entry.stored_name: target for target in targets if isinstance(target.entry, ListedLeaf)}
    with reading(found):
        tree = entry.locate({name: target.regions for name, target in listed.items()})
    for name, target in listed.items():
        target.entry = tree.leaves[name]
    return replace(source, entry=tree)


def _nbytes(source: _Source) -> int:
    computed = nbytes_computed(source.contents.computed, source.targets)
    return nbytes_read(source.entry, source.targets) + computed


def _can_be_streamed(target: LeafTarget) -> bool:
    """Tell whether a target goes to an accelerator as it is stored, without the functions of the caller between."""
    if target.as_numpy or not target.is_stored:
        return False
    is_as_stored = target.new_shape is None and target.read_sharding is None
    return is_as_stored and accelerator_of(target) is not None


def _rebuild(loaded: _Loaded, request: Request) -> Any:
    """Return the loaded leaves in the structure of `like`, flat by name for `keys`, or in the recorded structure."""
    selection, arrays = loaded.selection, loaded.arrays
    with gc_paused():
        leaves = {**arrays, **selection.values}
        if request.like is not None:
            leaves |= {**selection.kept, **selection.code}
            return unflatten_like(request.like, leaves, in_place=request.in_place)
        if request.keys is not None:
            return {name: leaves[name] for name in loaded.contents.names if name in leaves}
        stored = loaded.contents.stored_names
        leaves = {stored[name]: leaf for name, leaf in leaves.items()} if stored else leaves
        return unflatten(loaded.contents.structure, leaves)


def _report(loaded: _Loaded) -> LoadReport:
    selection = loaded.selection
    return LoadReport(
        loaded=(*(target.name for target in selection.targets), *selection.values),
        kept=tuple(selection.kept),
        left_out=(*selection.left_out, *loaded.dropped),
        resized=tuple(target.name for target in selection.targets if target.resize),
        code=tuple(selection.code),
    )


def _require_classes(contents: Contents, request: Request) -> None:
    """Refuse a structure that cannot be rebuilt before its data is read: without a structure, a class or a function."""
    if request.like is not None or request.keys is not None:
        return
    if contents.has_structure(UNREADABLE) and UNREADABLE in (structure := contents.structure):
        raise StructureError(structure[UNREADABLE])
    if functions := contents.functions:
        raise StructureError(
            f"leaves are functions, which a checkpoint leaves to the code: {few(functions)}; pass like= with a tree "
            "that has them, or keys= for the other leaves"
        )
    if contents.has_structure("namedtuple", "dataclass", "node"):
        names = contents.stored_names.values() or contents.names
        unflatten(contents.structure, dict.fromkeys(names))


# ------------------------------------------------------------------------------------ several processes


@contextmanager
def _processes(request: Request, like: Mapping[str, Any] | None) -> Iterator[Hosts]:
    """Yield the processes whose devices the leaves go to, and tell the others if this one fails."""
    members = processes_of(request.placement, like)
    hosts = _hosts.current("loads", members, request.timeout) if members else _hosts.Hosts()
    try:
        yield hosts
    except BaseException as error:
        hosts.fail(error)
        raise


def _agree(hosts: Hosts, step: str, *, is_last: bool) -> None:
    """Wait for all processes to reach the same step of the same save; start again if they have found different saves.

    Raises if another process has failed.
    """
    if hosts.meet(step.encode(), lambda steps: b"" if len(set(steps)) == 1 else b"again"):
        time.sleep(_BETWEEN_RESTARTS)
        raise ReplacedError
    if is_last:
        hosts.end()
