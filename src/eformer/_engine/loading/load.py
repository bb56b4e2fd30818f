"""Loading a tree: find, select, place, read, check, assemble."""

from __future__ import annotations

import logging
import os  # noqa: TC003
import time
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.find import find, was_replaced
from eformer._engine.loading.checksums import check_sha256
from eformer._engine.loading.pinned_stream import is_worth_streaming, stream
from eformer._engine.loading.placement import accelerator_of, assemble, place_items, processes_of
from eformer._engine.loading.read import nbytes_read, read
from eformer._engine.loading.scalars import as_scalar, fitted
from eformer._engine.loading.select import LeafTarget, Request, items_of, select
from eformer._engine.loading.unnamed_leaves import by_order, completed
from eformer._engine.processes import hosts as _hosts
from eformer._engine.processes.hosts import TIMEOUT
from eformer._engine.record.manifest import UNREADABLE, TreeEntry
from eformer._engine.record.text import few
from eformer._engine.tasks.pool import default_threads, gc_paused
from eformer._engine.tasks.progress import is_wanted, metered
from eformer._engine.trees.flatten import flatten
from eformer._engine.trees.unflatten import unflatten, unflatten_like
from eformer.errors import CorruptionError, FormatError, NotFoundError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import jax

    from eformer._engine.formats.found import Found
    from eformer._engine.loading.rules import Rules
    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.tasks.progress import Meter, Progress

logger = logging.getLogger("eformer")

# Another save may replace the files between the reading of a manifest and that of the data; each time it does,
# a newer checkpoint is there to be read.
_MOST_RESTARTS = 10
_BETWEEN_RESTARTS = 0.2  # seconds, for the others to find the newer one, too


def load(
    path: str | os.PathLike[str],
    *,
    like: Any = None,
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
    timeout: float = TIMEOUT,
) -> Any:
    """The tree that was saved at `path`, bit for bit; or an error that says what is wrong, and where.

    Without `like` the tree has the structure it was saved with, jax arrays are jax arrays and numpy arrays are
    numpy arrays. `like` is a tree of arrays, `ShapeDtypeStruct`s or shardings, whose structure, shapes, dtypes and
    shardings the result has. A number goes into an array without axes and such an array into a number, as `like` has
    it, if the kind is the same (bool, int, float, complex) and the value stays the same. A file of equinox has no
    names, and needs `like`. `keys` are names of leaves or subtrees, or patterns such as "layers.*.bias"; without `like`
    the result is then a flat dict by name.

    `shardings` says where leaves go: one for all, or by name (nested or dotted, some or all), each a `Sharding`, a
    `PartitionSpec` or a function that is called on the loaded array. `rules` are (regex, PartitionSpec) pairs,
    searched for in names joined by "/". With a `mesh` and neither, leaves lie as they were saved.

    `dtype` casts floating leaves. `callback(array, name)` is called for every array, and returns what to have in its
    place. `batch` is how many arrays are read at a time; None for all. `verify=False` skips the digests.

    `progress` is True for a bar on standard error, or is called with the bytes that were read and with all there are,
    some times a second, from any thread; if a newer save replaces the checkpoint meanwhile, from the start again.

    With `mmap` numpy arrays and arrays on CPUs are the bytes of the files, which are read when somebody looks at them:
    the load takes no longer than it takes to make the arrays. So digests are only checked with `verify=True`, which
    reads everything once. What others write into the files in place changes the arrays, and if they cut them short the
    process dies; nothing here ever does either. Leaves that do not lie in the files as they are wanted are read.

    Leaves that go to devices of several processes are loaded by all of these, and an error of one is an error of all;
    no other process has to take part. They wait for each other for `timeout` seconds. Each reads what its devices hold.
    With `broadcast` what several of them hold is read once, each process a part, and travels between the devices; for
    large leaves on a storage that is slower.
    """
    request = Request(
        like=like,
        prefix=prefix,
        keys=None if keys is None else (keys,) if isinstance(keys, str) else tuple(keys),
        mesh=mesh,
        rules=None if rules is None else tuple(rules),
        shardings=shardings,
        dtype=dtype,
        callback=callback,
        batch=batch,
        verify=not mmap if verify is None else verify,
        mmap=mmap,
        progress=progress,
        broadcast=broadcast,
        timeout=timeout,
    )
    return load_entry(path, request)[0]


def load_entry(path: str | os.PathLike[str], request: Request) -> tuple[Any, TreeEntry]:
    """The tree, and what the manifest says of it."""
    like = None if request.like is None else flatten(request.like)[0]
    tree, arrays, selected = _read_together(path, request, like)
    with gc_paused():
        values = {n: value for n, value in tree.values.items() if n in selected and n not in arrays}
        if like is not None:
            values = {name: fitted(value, like[name], request.cast) for name, value in values.items()}
        leaves = arrays | values
        if like is not None:
            return unflatten_like(request.like, leaves), tree
        if request.keys is not None:
            return {name: leaves[name] for name in selected}, tree
        return unflatten(msgspec.json.decode(tree.structure), leaves), tree


Loaded = tuple[TreeEntry, "dict[str, Any]", "dict[str, None]"]


def _read_together(path: str | os.PathLike[str], request: Request, like: Mapping[str, Any] | None) -> Loaded:
    """The wanted leaves, in all processes whose devices are to have them of one and the same save."""
    processes = processes_of(request, like)
    hosts = _hosts.current("loads", processes, request.timeout) if processes else _hosts.Alone()
    for _ in range(_MOST_RESTARTS):
        try:
            return _read_one(path, request, like, hosts)
        except _Again:
            time.sleep(_BETWEEN_RESTARTS)
        except BaseException as error:
            hosts.fail(error)
            raise
    raise FormatError(f"{path} was replaced {_MOST_RESTARTS} times while the processes were reading it")


def _agree(hosts: Hosts, what: str, *, is_last: bool) -> None:
    """No process goes on if another cannot, or has found another save."""
    if hosts.meet(what.encode(), lambda messages: b"" if len(set(messages)) == 1 else b"again"):
        raise _Again
    if is_last:
        hosts.end()


class _Again(Exception):  # noqa: N818
    """The processes have read different saves."""


def _read_one(
    path: str | os.PathLike[str], request: Request, like: Mapping[str, Any] | None, hosts: Hosts
) -> Loaded:
    """The wanted leaves of one whole checkpoint: if another save replaces it meanwhile, those of the newer one."""
    for _ in range(_MOST_RESTARTS):
        found = find(path)
        try:
            tree, wanted = _tree(found, request.prefix), like
            if paths := found.left_out(request.prefix):
                logger.warning("%s: not read, and may hold leaves: %s", path, few(paths))
            if like is not None and not found.has_names:
                tree, wanted = by_order(tree, like, request.dtype)
            with gc_paused():
                selected = select(tree, request.keys)
                items = items_of(tree, selected, request, wanted)
                if like is None and request.keys is None:
                    _require_classes(tree)
                place_items([item for item in items if item.number is None], tree, request)
            stored = [item for item in items if item.is_stored]
            total = nbytes_read(tree, stored) if is_wanted(request.progress) else 0
            with metered(request.progress, total, "loading") as meter:
                arrays = _arrays(found, tree, items, request, hosts, meter)
        except _Unreadable as unreadable:
            if was_replaced(found):
                continue
            error = unreadable.error
            if isinstance(error, FileNotFoundError):
                raise CorruptionError(f"{path}: the manifest names a file that is gone: {error}") from error
            raise error from None
        if like is not None and not found.has_names:
            arrays = completed(arrays, like)
        return tree, arrays, selected
    raise FormatError(f"{path} was replaced {_MOST_RESTARTS} times while it was being read")


def _tree(found: Found, prefix: str | None) -> TreeEntry:
    try:
        return found.tree(prefix)
    except NotFoundError:
        raise
    except (FileNotFoundError, CorruptionError) as error:  # parts of it lie with the data
        raise _Unreadable(error) from None


def _arrays(
    found: Found, tree: TreeEntry, items: list[LeafTarget], request: Request, hosts: Hosts, meter: Meter
) -> dict[str, Any]:
    """The arrays by name, read and handed to the caller's functions batch by batch."""
    threads = request.threads or default_threads()
    if request.sha256 is not None:
        try:
            check_sha256(found, tree, request.sha256(tree), threads)
        except (FileNotFoundError, CorruptionError) as error:
            raise _Unreadable(error) from None
    arrays: dict[str, Any] = {}
    batch, end = request.batch or max(1, len(items)), max(1, len(items))
    for start in range(0, end, batch):
        some = items[start : start + batch]
        streamed, others = _divided(some, request)
        try:
            assembled = {}
            if streamed:
                assembled = stream(found, tree, streamed, threads, verify=request.verify, meter=meter)
            stored = [item for item in others if item.is_stored]
            read(found, tree, stored, threads, verify=request.verify, mmap=request.mmap, meter=meter)
        except (FileNotFoundError, CorruptionError) as error:
            raise _Unreadable(error) from None
        is_last = start + batch >= end
        if is_last or request.broadcast:  # what is broadcast needs all processes
            _agree(hosts, f"{tree.save_id} {start}", is_last=is_last)
        with gc_paused():
            assembled |= assemble(others)
        for item in some:
            leaf = assembled.pop(item.name)
            leaf = item.after(leaf) if item.after else leaf
            leaf = request.callback(leaf, item.name) if request.callback else leaf
            arrays[item.name] = as_scalar(leaf, item.number)
            item.arrays = ()  # what the caller's functions let go of, is gone
    return arrays


def _divided(items: list[LeafTarget], request: Request) -> tuple[list[LeafTarget], list[LeafTarget]]:
    """Those that go to accelerators, through a little memory at a time, and the others. What is broadcast has to be
    read by all processes before the first piece of it moves."""
    if request.broadcast:
        return [], items
    streamed = [item for item in items if item.is_stored and accelerator_of(item) is not None]
    if not is_worth_streaming(streamed):
        return [], items
    return streamed, [item for item in items if not item.is_stored or accelerator_of(item) is None]


class _Unreadable(Exception):  # noqa: N818
    """What reading raised, told apart from what the caller's functions raise, which is not ours to interpret."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _require_classes(tree: TreeEntry) -> None:
    """Refuses a structure that cannot be rebuilt before its data is read. Only classes can be missing, or all of it."""
    if bytes(tree.structure).startswith(b'{"%s":' % UNREADABLE.encode()):
        raise StructureError(msgspec.json.decode(tree.structure)[UNREADABLE])
    if any(kind in bytes(tree.structure) for kind in (b'"namedtuple":', b'"dataclass":', b'"node":')):
        names = [*tree.leaves, *tree.raw_values]
        unflatten(msgspec.json.decode(tree.structure), dict.fromkeys(names))
