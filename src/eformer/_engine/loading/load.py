"""Load a tree: find the checkpoint; rename, select and place its leaves; fetch them, which plans, reads and assembles;
rebuild the tree."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

from eformer._engine.formats.find import ReplacedError, reading, reread_all
from eformer._engine.formats.model_config import given_config
from eformer._engine.formats.process_records import ListedTree
from eformer._engine.formats.run_steps import path_of_step
from eformer._engine.loading.assemble import assemble, change_shapes
from eformer._engine.loading.contents import Contents, merge_contents
from eformer._engine.loading.pinned_stream import stream, streamable
from eformer._engine.loading.placement import on_current_mesh, place_targets, processes_of
from eformer._engine.loading.read import read_targets, require_boxes
from eformer._engine.loading.request import LoadReport, PlacementRequest, Request
from eformer._engine.loading.select import as_scalar, compare
from eformer._engine.loading.sources import (
    LoadSource,
    Readers,
    check_sha256,
    completed,
    dequantized_names,
    given_by,
    model_facts,
    name_by_order,
    origin_of,
    read_as_numbers,
    read_computed,
    refuse_bare_leaf,
    refuse_kinds,
    refuse_quantized,
    rename_leaves,
    spell_alike,
    take_below,
    with_recorded_rules,
)
from eformer._engine.processes import hosts as _hosts
from eformer._engine.record.manifest import parse_structure
from eformer._engine.record.names import BARE_LEAF
from eformer._engine.record.options import LoadOptions, options_from
from eformer._engine.record.rename import rules_from
from eformer._engine.record.text import few
from eformer._engine.stores.cache import caching
from eformer._engine.stores.keys import public_key
from eformer._engine.stores.store_options import options_of_call
from eformer._engine.tasks.deadline import within
from eformer._engine.tasks.interrupts import called, uninterrupted
from eformer._engine.tasks.pool import gc_paused
from eformer._engine.tasks.progress import SILENT, is_wanted, metered
from eformer._engine.trees.devices import arrived
from eformer._engine.trees.flatten import flatten, transient_in
from eformer._engine.trees.unflatten import unflatten, unflatten_like

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import jax

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.model_config import ModelConfig
    from eformer._engine.formats.run_steps import StepChoice
    from eformer._engine.loading.request import Resize, Rules
    from eformer._engine.loading.select import LeafTarget, Selection
    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.record.rename import RenameRules
    from eformer._engine.stores.keys import Key
    from eformer._engine.tasks.progress import Meter, Progress

logger = logging.getLogger("eformer")

T = TypeVar("T")
Path = str | os.PathLike[str]
_ONE_PATH = (str, bytes, os.PathLike)

_DEFAULT = LoadOptions()
_BETWEEN_RESTARTS = 0.2  # seconds, for all processes to find the newer checkpoint


class LoadArguments(TypedDict, total=False):
    """The arguments that `load` and `Run.resume` share, without the arguments that change the type of the result."""

    partial: bool
    plain: bool
    root: str | None
    rename: RenameRules | None
    back: bool
    config: ModelConfig | None
    resize: Resize | None
    prefix: str | None
    keys: str | Iterable[str] | None
    mesh: jax.sharding.Mesh | None
    rules: Rules | None
    shardings: Any
    dtype: Any
    callback: Callable[[Any, str], Any] | None
    verify: bool | None
    mmap: bool
    progress: Progress
    options: LoadOptions | Mapping[str, Any]
    signed_by: Key | None


class _Arguments(LoadArguments, total=False):
    """The arguments of `load`, without the arguments that change the type of the result."""

    step: StepChoice
    dequant: Any
    duplicates: Literal["last"] | None


@overload
def load(
    path: Path | Sequence[Path], *, like: T, return_report: Literal[True], **arguments: Unpack[_Arguments]
) -> tuple[T, LoadReport]: ...
@overload
def load(
    path: Path | Sequence[Path], *, into: T, return_report: Literal[True], **arguments: Unpack[_Arguments]
) -> tuple[T, LoadReport]: ...
@overload
def load(path: Path | Sequence[Path], *, like: T, **arguments: Unpack[_Arguments]) -> T: ...
@overload
def load(path: Path | Sequence[Path], *, into: T, **arguments: Unpack[_Arguments]) -> T: ...
@overload
def load(
    path: Path | Sequence[Path], *, return_report: bool = False, **arguments: Unpack[_Arguments]
) -> Any: ...
def load(
    path: Path | Sequence[Path],
    *,
    step: StepChoice = None,
    like: Any = None,
    into: Any = None,
    partial: bool = False,
    root: str | None = None,
    rename: RenameRules | None = None,
    back: bool = False,
    config: ModelConfig | None = None,
    resize: Resize | None = None,
    plain: bool = False,
    return_report: bool = False,
    prefix: str | None = None,
    keys: str | Iterable[str] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    shardings: Any = None,
    dtype: Any = None,
    callback: Callable[[Any, str], Any] | None = None,
    verify: bool | None = None,
    mmap: bool = False,
    progress: Progress = None,
    options: LoadOptions | Mapping[str, Any] = _DEFAULT,
    signed_by: Key | None = None,
    dequant: Any = None,
    duplicates: Literal["last"] | None = None,
) -> Any:
    """Load the tree that was saved at `path`, bit for bit.

    Without `like`, the tree has the structure that it was saved with; jax arrays are jax arrays, and
    numpy arrays are numpy arrays. If leaves are missing, are damaged or do not fit, one error names
    them, the file and the problem.

    From where:

    path            a directory, a file or a URL, of eformer or of another program; of a run, the newest
                    step is loaded. A list of paths is loaded as one checkpoint, such as [base, adapter]
    step            of a run: the number of another step, or "best" for the best step by the rule of
                    `Run(keep=)` that names a metric, see `best`
    prefix          the tree, if the checkpoint has several
    duplicates      "last" takes a leaf that several checkpoints of a list have from the last of them;
                    None refuses it
    dequant         a floating dtype, such as "bf16": the weights of a quantised model as numbers; False
                    loads its leaves as they are stored. None takes the dtypes of `like`, if it has the
                    weights as floating arrays, or by a book of `rename` the dtype of the configuration,
                    and otherwise raises a `QuantizedError`
    signed_by       a public key, as the path of a PEM file or its content: every byte is checked against
                    the signature of its owner before it is used, see `sign`

    Which leaves, and in which form:

    root            name of a subtree, such as "params.encoder", to load as the whole checkpoint
    keys            names of leaves or subtrees, or patterns such as "layers.*.bias". Without `like`, the
                    result is a flat dict by the names in the checkpoint
    rename          rules that rename and rearrange leaves before all else: a file, text, lines, a dict, or
                    the name of a shipped book, such as "maxtext"; see the guide on renaming
    back            read these rules from right to left; without `rename`, the rules that the checkpoint has
                    recorded
    config          config.json of the model for them, as a dict or a path; None for the file at `path`
    dtype           cast floating leaves to this dtype; "like" casts each to its dtype in `like`
    callback        a function of each array and its name, which returns the replacement

    Into which tree:

    like            a tree of arrays, `ShapeDtypeStruct`s or shardings: the result has its structure,
                    shapes, dtypes and shardings. Functions in it stay as they are
    into            as `like`, but modules that hold their state, such as modules of flax NNX and Keras,
                    are updated in place
    partial         allow differences: leaves that the checkpoint lacks stay as `like` has them, leaves
                    that `like` lacks are left out; the names of both are logged
    resize          change arrays that have another shape than in `like`: a dict from patterns of names to
                    functions of the stored array and the leaf of `like`, or one such function that
                    takes the name, too
    plain           without `like`: nested dicts in the place of classes that this program cannot build, with
                    the children of an object by their names, and without its other fields
    return_report   return a pair of the tree and a `LoadReport`, and log nothing

    Where to:

    mesh            the mesh to load onto; None for the mesh of `jax.set_mesh`. With neither `rules` nor
                    `shardings`, leaves are placed as they were saved
    rules           pairs of a regex and a `PartitionSpec`, or a dict; the regex is searched for in names
                    joined by "/"
    shardings       one `Sharding`, `PartitionSpec` or function of the loaded array for all leaves, or a
                    dict of them by name, nested or dotted, for some leaves or all

    How:

    verify          False skips the digests; with `mmap`, True checks them, which reads everything once
    mmap            map numpy arrays and arrays on CPUs from the files, which are read when they are used.
                    No other program may write to these files in place
    progress        True for a bar on standard error, or a function of the bytes read and the total, which
                    is called several times a second and from any thread
    options         a `LoadOptions`, or a dict of its fields: `batch`, `broadcast`, `timeout`,
                    `store_options`, `cache`

    If leaves go to devices of several processes, all of these must call `load`, each reads the bytes
    that its devices hold, and an error in one is an error in all. No other process has to take part.

    Example:

        >>> state = checkpoint.load("run/step-100", like=state)
        >>> checkpoint.load("run/step-100", keys="params", mesh=mesh, rules=[("w", PartitionSpec("data"))])
        >>> model = checkpoint.load("hf/llama", into=model, rename="llama.rules")
        >>> state = checkpoint.load("pretrained", like=state, partial=True)
        >>> model = checkpoint.load(["pretrained", "lora"], like=abstract_model)
        >>> state = checkpoint.load("run", step=100, like=state)
    """
    arguments = dict(locals())  # by name; all but these two belong to a request
    del arguments["path"], arguments["return_report"]
    paths = [path] if isinstance(path, _ONE_PATH) else _list_of(path)
    request = request_from(is_list=len(paths) > 1, **arguments)
    given = request.options.store_options
    with options_of_call(given, *paths) if given else nullcontext():
        loaded = load_tree(paths, request)
    if return_report:
        return loaded.tree, loaded.report
    if request.partial or request.by_rules:
        log_differences(" and ".join(os.fspath(each) for each in paths), loaded.report)
    return loaded.tree


def _list_of(paths: Any) -> Sequence[Path]:
    """Return the paths of several checkpoints to load as one. Refuse a set, which has no order."""
    if not isinstance(paths, Iterable) or isinstance(paths, (set, frozenset)):
        kind = type(paths).__name__
        raise TypeError(f"the path is of type {kind}; expected a path, or a list of paths in an order")
    if not (found := list(paths)):
        raise ValueError("an empty list of paths: expected at least one checkpoint to load")
    for each in found:
        if not isinstance(each, _ONE_PATH):
            kind = type(each).__name__
            raise TypeError(f"an item of the list of paths is of type {kind}; expected a path")
    return found


def request_from(
    *,
    like: Any = None,
    into: Any = None,
    rename: RenameRules | None = None,
    back: bool = False,
    config: ModelConfig | None = None,
    keys: str | Iterable[str] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
    shardings: Any = None,
    verify: bool | None = None,
    mmap: bool = False,
    options: LoadOptions | Mapping[str, Any] = _DEFAULT,
    signed_by: Key | None = None,
    **as_they_are: Any,
) -> Request:
    """Return the arguments of `load` as a request. Raise ValueError for arguments that exclude each other."""
    if like is not None and into is not None:
        raise ValueError("pass like= or into=, not both")
    if rename is None and not back and config is not None:
        raise ValueError("config= is for the rules of rename=, or of back=True")
    if isinstance(like, (FunctionType, MethodType)):
        raise TypeError("`like` is a function; call it, or pass jax.eval_shape of it")
    if signed_by is not None and mmap:
        raise ValueError("mmap=True excludes signed_by=: mapped files may change after they were checked")
    options = options_from(options, LoadOptions)
    return Request(
        like=like if into is None else into,
        in_place=into is not None,
        transient=() if into is None else transient_in(into),
        like_name="like" if into is None else "into",
        rename=None if rename is None else rules_from(rename, back=back) or None,
        back=back,
        config=None if config is None else given_config(config),
        keys=None if keys is None else (keys,) if isinstance(keys, str) else tuple(keys),
        placement=PlacementRequest(mesh=mesh, rules=rules, shardings=shardings),
        verify=not mmap if verify is None else verify,
        mmap=mmap,
        options=options,
        signed_by=None if signed_by is None else public_key(signed_by),
        **as_they_are,
    )


def log_differences(path: str, report: LoadReport) -> None:
    """Log the leaves that `partial` or `rename` kept or left out."""
    if report.kept or report.left_out:
        logger.warning("%s: %s", path, report)


@dataclass(frozen=True, slots=True)
class LoadedTree:
    """A loaded tree, its record in the checkpoint, and the report of its leaves."""

    tree: Any
    entry: TreeEntry
    report: LoadReport


@uninterrupted
def load_tree(paths: Sequence[Path], request: Request) -> LoadedTree:
    """Load one checkpoint, or several as if they were one, as `request` asks.

    Wait first for saves of this process to these paths in the background. If a newer save replaces a checkpoint during
    the read, start again; give up after 100 attempts. After 5 restarts, hold back the saves of this process.
    """
    like = None if request.like is None else flatten(request.like)[0]
    placement = on_current_mesh(request.placement, like)
    if placement is not request.placement:
        request = replace(request, placement=placement)
    members = processes_of(request.placement, like)
    timeout = request.options.timeout
    hosts = _hosts.current("loads", members, timeout) if members else None
    limit = f"{request.timeout_of}(timeout={timeout})"
    choose = partial(path_of_step, step=request.step)

    def loaded(all_found: Sequence[Found]) -> LoadedTree:
        return Load(with_recorded_rules(request, all_found), like, hosts).load(all_found)

    try:
        with (
            within(timeout, limit) if timeout is not None else nullcontext(),
            caching(request.options.cache),
        ):
            return reread_all(paths, loaded, request.signed_by, choose)
    except BaseException as error:
        if hosts:
            hosts.fail(error)  # so that the other processes raise, too, instead of waiting
        raise


@dataclass(slots=True)
class Load:
    """One load.

    like       the leaves of the tree `like`, by name
    hosts      the processes whose devices the leaves go to; None if they all belong to this process
    expected   the leaves to compare with: `like`, unless the checkpoint has no names
    """

    request: Request
    like: Mapping[str, Any] | None
    hosts: Hosts | None
    expected: Mapping[str, Any] | None = None

    def load(self, all_found: Sequence[Found]) -> LoadedTree:
        """Load the tree of one checkpoint, or of several as if they were one."""
        with ExitStack() as stack:
            sources = [self.find(found, stack) for found in all_found]
            with gc_paused():
                self.rename(sources)
                contents, selection = self.select(sources)
                self.place(sources, contents, selection)
            arrays = self.fetch(sources)
            for source in sources:
                source.readers.require_unchanged()
        with gc_paused():
            tree = self.rebuild(contents, selection, arrays)
        dropped = dict.fromkeys(name for source in sources for name in source.dropped)
        report = selection.report(dropped, dequantized_names(sources))
        report = replace(report, origin=origin_of(sources, self.request.rename))
        return LoadedTree(tree, sources[0].entry, report)

    def find(self, found: Found, stack: ExitStack) -> LoadSource:
        """Return the checkpoint as a source, with the record of the tree to load. Warn of files that may hold leaves
        and are not read."""
        request = self.request
        found = request.whole_of(found) if request.whole_of else found
        with reading(found):
            # Rules, scales and SHA-256 need all extents now. Otherwise `place` reads only the process records that it
            # needs.
            needs_all = request.rename is not None or request.sha256 is not None or bool(request.dequant)
            entry = found.tree(request.prefix) if needs_all else found.listed(request.prefix)
            paths = found.left_out(request.prefix)
            contents = Contents(entry.leaves, entry.raw_values, bytes(entry.structure))
            source = LoadSource(found, entry, contents, Readers(found, verify=request.verify))
        if found.foreign.refused and not request.partial:
            refuse_kinds(found, request.keys)
        if paths:
            logger.warning("%s: not read, and may hold leaves: %s", found.path, few(paths))
        stack.enter_context(closing(source.readers))
        if request.rename is not None:
            with reading(found):
                source.facts = model_facts(source, request.rename, request, self.like)
        if request.dequant is not False:
            read_as_numbers(source, request, self.like)
        return source

    def rename(self, sources: Sequence[LoadSource]) -> None:
        """Give the leaves their names in the loaded tree."""
        request, self.expected = self.request, self.like
        if request.root is not None:
            take_below(sources, request.root)
        if request.rename is not None:
            rename_leaves(sources, request.rename)
        elif self.like is not None and not all(source.found.foreign.has_names for source in sources):
            self.expected = name_by_order(sources, self.like, request)
            return
        if self.like is not None or len(sources) > 1:
            spell_alike(sources, self.like)

    def select(self, sources: Sequence[LoadSource]) -> tuple[Contents, Selection]:
        """Choose the leaves to load and, of several checkpoints, the one that each is read from. Refuse leaves that do
        not fit."""
        request, like, is_one = self.request, self.expected, len(sources) == 1
        contents = sources[0].contents if is_one else merge_contents([source.contents for source in sources])
        names = contents.select(request.keys, is_list=request.is_list)
        if BARE_LEAF in names and len(names) > 1 and request.keys is None and not request.partial:
            refuse_bare_leaf(sources)
        given = [names] if is_one else given_by(sources, names, request, like)
        for source, own in zip(sources, given, strict=True):
            if request.dequant is not False:
                refuse_quantized(source, own, names, request, like)
        selection = compare(contents, names, request, like)
        if like is None and request.keys is None:
            contents.require_rebuildable(selection.values, plain=request.plain)
        for source, own in zip(sources, given, strict=True):
            source.targets = [target for target in selection.targets if target.name in own]
        return contents, selection

    def place(self, sources: Sequence[LoadSource], contents: Contents, selection: Selection) -> None:
        """Decide where the arrays go, and which boxes this process reads. If several processes wrote the tree, read the
        records that have these boxes."""
        place_targets(selection.targets, contents, self.request)
        for source in sources:
            if self.request.whole_of:
                require_boxes(source.targets)
            if isinstance(source.entry, ListedTree):
                source.locate(source.entry)

    def fetch(self, sources: Sequence[LoadSource]) -> dict[str, Any]:
        """Read the leaves, make arrays of them on their devices, and call the caller's functions, batch by batch."""
        request = self.request
        arrays: dict[str, Any] = {}
        for source in sources:
            if request.sha256 is not None:
                with reading(source.found):
                    check_sha256(source.found, source.entry, request.sha256(source.entry), request.threads)
        saves = " ".join(source.entry.save_id for source in sources)
        size = request.options.batch or max(1, *(len(source.targets) for source in sources))
        batches = [
            (source, source.targets[start : start + size])
            for source in sources
            for start in range(0, len(source.targets) or 1, size)
        ]
        with nullcontext(SILENT) if request.progress is None else self.metered(sources) as meter:
            for number, (source, batch) in enumerate(batches):
                assembled, others = self.read(source, batch, meter)
                is_last = number == len(batches) - 1
                if self.hosts and (
                    is_last or request.options.broadcast
                ):  # a broadcast moves arrays in all processes together
                    _agree(self.hosts, f"{saves} {number}", is_last=is_last)
                with gc_paused():
                    assembled |= assemble(others)
                self.finish(batch, assembled, arrays)
        return arrays

    def metered(self, sources: Sequence[LoadSource]) -> AbstractContextManager[Meter]:
        is_told = is_wanted(self.request.progress)
        total = sum(source.nbytes() for source in sources) if is_told else 0
        return metered(self.request.progress, total, "loading")

    def read(
        self, source: LoadSource, batch: list[LeafTarget], meter: Meter
    ) -> tuple[dict[str, Any], list[LeafTarget]]:
        """Read a batch. Return the arrays that were streamed to accelerators, and the targets in host memory.

        A broadcast streams nothing: all processes must have read a whole batch before its first array moves.
        """
        request, found, entry = self.request, source.found, source.entry
        threads = request.threads or found.store.read_threads
        assembled: dict[str, Any] = {}
        streamed, others = ([], batch) if request.options.broadcast else streamable(batch)
        with reading(found):
            if streamed:
                assembled = stream(found, entry, streamed, threads, verify=request.verify, meter=meter)
            read_targets(found, entry, others, threads, verify=request.verify, mmap=request.mmap, meter=meter)
            if source.contents.computed:
                read_computed(source.contents.computed, others, threads, meter)
        if request.resize is not None or request.reshape:
            change_shapes(others)
        return assembled, others

    def finish(self, batch: list[LeafTarget], assembled: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Call the caller's functions on the arrays of a batch, and add the results to `arrays`."""
        callback = self.request.callback
        arrived(list(assembled.values()))  # the caller's functions may run programs on them, see `Transfer`
        for target in batch:
            leaf = assembled.pop(target.name)
            leaf = called(target.transform, leaf) if target.transform else leaf
            leaf = called(callback, leaf, target.name) if callback else leaf
            arrays[target.name] = leaf if target.like_scalar is None else as_scalar(leaf, target.like_scalar)
            target.arrays = ()  # if the caller's function drops the array, its memory is freed now

    def rebuild(self, contents: Contents, selection: Selection, arrays: dict[str, Any]) -> Any:
        """Return the leaves in the structure of `like`, flat by name for `keys`, or in the recorded structure."""
        request = self.request
        if self.expected is not self.like:  # the checkpoint has no names
            arrays = completed(arrays, self.like or {})
        leaves = {**arrays, **selection.values}
        if request.like is not None:
            leaves |= {**selection.kept, **selection.code}
            return unflatten_like(request.like, leaves, in_place=request.in_place)
        if request.keys is not None:
            return {name: leaves[name] for name in contents.names if name in leaves}
        stored = contents.stored_names
        leaves = {stored[name]: leaf for name, leaf in leaves.items()} if stored else leaves
        return unflatten(parse_structure(contents.raw_structure), leaves, plain=request.plain)


def _agree(hosts: Hosts, step: str, *, is_last: bool) -> None:
    """Wait until all processes have read the same batch of the same save.

    Raise ReplacedError, which begins the load again, if they have read different saves. Raise ProcessError if a process
    has failed.
    """
    if hosts.meet(step.encode(), lambda steps: b"" if len(set(steps)) == 1 else b"again"):
        time.sleep(_BETWEEN_RESTARTS)
        raise ReplacedError
    if is_last:
        hosts.end()
