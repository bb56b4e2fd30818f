"""Load a tree: find, select, place, plan, fetch, assemble."""

from __future__ import annotations

import logging
import os  # noqa: TC003
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.find import ReplacedError, reading, reread
from eformer._engine.loading.assemble import assemble
from eformer._engine.loading.fetch import check_sha256
from eformer._engine.loading.pinned_stream import is_worth_streaming, stream
from eformer._engine.loading.placement import accelerator_of, on_current_mesh, place_targets, processes_of
from eformer._engine.loading.read import nbytes_read, read
from eformer._engine.loading.request import PlacementRequest, Request
from eformer._engine.loading.scalars import as_scalar, fitted
from eformer._engine.loading.select import LeafTarget, select, targets_of
from eformer._engine.loading.unnamed_leaves import by_order, completed
from eformer._engine.processes import hosts as _hosts
from eformer._engine.processes.hosts import TIMEOUT
from eformer._engine.record.manifest import UNREADABLE, TreeEntry
from eformer._engine.record.text import few
from eformer._engine.tasks.pool import default_threads, gc_paused
from eformer._engine.tasks.progress import is_wanted, metered
from eformer._engine.trees.flatten import flatten
from eformer._engine.trees.unflatten import unflatten, unflatten_like
from eformer.errors import StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import jax

    from eformer._engine.formats.found import Found
    from eformer._engine.loading.request import Rules
    from eformer._engine.processes.hosts import Hosts
    from eformer._engine.tasks.progress import Meter, Progress

logger = logging.getLogger("eformer")

_BETWEEN_RESTARTS = 0.2  # seconds, for all processes to find the newer checkpoint


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
    """Load the tree that was saved at `path`, bit for bit.

        state = load("run/100", like=state)
        weights = load("run/100", keys="params", mesh=mesh, rules=[("kernel", PartitionSpec(None, "model"))])

    Raises an error that names the leaf, the file and the problem if anything is missing, damaged or does not fit.

    Without `like` the tree has the structure it was saved with: jax arrays are jax arrays and numpy arrays are numpy
    arrays. `like` is a tree of arrays, `ShapeDtypeStruct`s or shardings; the result has its structure, shapes, dtypes
    and shardings. A number and an array without axes become each other, as `like` has them, if they are of one kind
    (bool, int, float, complex) and the value does not change. Files of equinox have no names, and need `like`.
    `keys` are names of leaves or subtrees, or patterns such as "layers.*.bias"; without `like` the result is then a
    flat dict by name.

    `shardings` place leaves: one for all, or by name (nested or dotted, for some leaves or all), each a `Sharding`, a
    `PartitionSpec` or a function that is called on the loaded array. `rules` are pairs of a regex and a PartitionSpec;
    the regex is searched for in names joined by "/". With a `mesh` and neither, leaves are placed as they were saved.
    Shardings on an `AbstractMesh`, as `jax.eval_shape` gives them, mean the same axes of `mesh`.

    Inside of `jax.set_mesh` that mesh is the default for `mesh`. It never makes a load fail: leaves that no argument
    and no record places are replicated over it, and leaves that JAX cannot hold are numpy arrays. If it has devices of
    other processes, it counts only if `rules`, a `PartitionSpec` or an `AbstractMesh` needs a mesh.

    `dtype` casts floating leaves. `callback(array, name)` is called for every array and returns its replacement.
    `batch` is the number of arrays to read at a time; None reads all at once. `verify=False` skips the digests.

    `progress` is True for a bar on standard error, or a function that is called with the bytes read so far and in
    total, several times a second and from any thread; it starts again if a newer save replaces the checkpoint.

    `mmap` maps numpy arrays and arrays on CPUs from the files, which are read when the arrays are used: the load takes
    only as long as making the arrays. Digests are then checked only with `verify=True`, which reads everything once.
    If another program writes to the files in place, the arrays change; if it truncates them, the process dies. eformer
    never does either. Leaves that are not stored as they are wanted are read.

    If leaves go to devices of several processes, all of these must call `load`; no other process has to take part. An
    error in one is an error in all. They wait for each other for `timeout` seconds. Each process reads what its devices
    hold. With `broadcast`, data that several processes hold is read once, a part by each, and sent between the devices;
    this is faster for large leaves on slow storage.
    """
    request = Request(
        like=like,
        prefix=prefix,
        keys=None if keys is None else (keys,) if isinstance(keys, str) else tuple(keys),
        placement=PlacementRequest(mesh=mesh, rules=rules, shardings=shardings),
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
    """Load what `request` asks for; return it with the record of the tree."""
    like = None if request.like is None else flatten(request.like)[0]
    request = replace(request, placement=on_current_mesh(request.placement, like))
    with _processes(request, like) as hosts:
        loaded = reread(path, lambda found: _load_found(found, request, like, hosts))
    return _rebuild(loaded, request, like), loaded.tree


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The record of a tree, the names of the selected leaves, and those of them that are arrays."""

    tree: TreeEntry
    names: dict[str, None]
    arrays: dict[str, Any]


def _load_found(found: Found, request: Request, like: Mapping[str, Any] | None, hosts: Hosts) -> _Loaded:
    """Load the arrays of one checkpoint, by name, or in the order of `like` if they have no names."""
    with reading(found):
        tree = found.tree(request.prefix)
    if paths := found.left_out(request.prefix):
        logger.warning("%s: not read, and may hold leaves: %s", found.path, few(paths))
    if like is None or found.has_names:
        return _load_arrays(found, tree, request, like, hosts)
    tree, expected = by_order(tree, like, request.dtype)
    loaded = _load_arrays(found, tree, request, expected, hosts)
    return replace(loaded, arrays=completed(loaded.arrays, like))


def _load_arrays(
    found: Found, tree: TreeEntry, request: Request, like: Mapping[str, Any] | None, hosts: Hosts
) -> _Loaded:
    """Load the arrays of one tree: select, place, then plan, fetch and assemble."""
    with gc_paused():
        names = select(tree, request.keys)
        targets = targets_of(tree, names, request, like)
        _require_classes(tree, request)
        place_targets(targets, tree, request)
    total = nbytes_read(tree, targets) if is_wanted(request.progress) else 0
    with metered(request.progress, total, "loading") as meter:
        arrays = _fetch_and_assemble(found, tree, targets, request, hosts, meter)
    return _Loaded(tree, names, arrays)


def _fetch_and_assemble(
    found: Found, tree: TreeEntry, targets: list[LeafTarget], request: Request, hosts: Hosts, meter: Meter
) -> dict[str, Any]:
    """Read the arrays and hand them to the caller's functions, batch by batch."""
    threads = request.threads or default_threads()
    if request.sha256 is not None:
        with reading(found):
            check_sha256(found, tree, request.sha256(tree), threads)
    arrays: dict[str, Any] = {}
    end = max(1, len(targets))
    size = request.batch or end
    for start in range(0, end, size):
        batch = targets[start : start + size]
        streamed, others = _split(batch, request)
        assembled: dict[str, Any] = {}
        with reading(found):
            if streamed:
                assembled = stream(found, tree, streamed, threads, verify=request.verify, meter=meter)
            read(found, tree, others, threads, verify=request.verify, mmap=request.mmap, meter=meter)
        is_last = start + size >= end
        if is_last or request.broadcast:  # a broadcast needs all processes
            _agree(hosts, f"{tree.save_id} {start}", is_last=is_last)
        with gc_paused():
            assembled |= assemble(others)
        _finish(batch, assembled, arrays, request)
    return arrays


def _split(targets: list[LeafTarget], request: Request) -> tuple[list[LeafTarget], list[LeafTarget]]:
    """Split targets into those to stream to accelerators and the others, which are read into host memory first.

    A broadcast streams nothing: all processes have to read all of a batch before the first array of it moves.
    """
    if request.broadcast:
        return [], targets
    streamed = [target for target in targets if target.is_stored and accelerator_of(target) is not None]
    if not is_worth_streaming(streamed):
        return [], targets
    return streamed, [target for target in targets if not target.is_stored or accelerator_of(target) is None]


def _finish(
    batch: list[LeafTarget], assembled: dict[str, Any], arrays: dict[str, Any], request: Request
) -> None:
    """Move the assembled arrays of a batch to `arrays`, through the caller's functions."""
    callback = request.callback
    for target in batch:
        leaf = assembled.pop(target.name)
        leaf = target.transform(leaf) if target.transform else leaf
        leaf = callback(leaf, target.name) if callback else leaf
        arrays[target.name] = leaf if target.like_scalar is None else as_scalar(leaf, target.like_scalar)
        target.arrays = ()  # memory that the caller's functions release is freed at once


def _rebuild(loaded: _Loaded, request: Request, like: Mapping[str, Any] | None) -> Any:
    """Return the loaded leaves in the structure of `like`, flat by name for `keys`, or in the recorded structure."""
    tree, names, arrays = loaded.tree, loaded.names, loaded.arrays
    with gc_paused():
        values = {n: value for n, value in tree.values.items() if n in names and n not in arrays}
        if like is not None:
            values = {name: fitted(value, like[name], request.cast) for name, value in values.items()}
        leaves = arrays | values
        if like is not None:
            return unflatten_like(request.like, leaves)
        if request.keys is not None:
            return {name: leaves[name] for name in names}
        return unflatten(msgspec.json.decode(tree.structure), leaves)


def _require_classes(tree: TreeEntry, request: Request) -> None:
    """Refuse a structure that cannot be rebuilt before its data is read: without a structure, or without a class."""
    if request.like is not None or request.keys is not None:
        return
    structure = bytes(tree.structure)
    if structure.startswith(b'{"%s":' % UNREADABLE.encode()):
        raise StructureError(msgspec.json.decode(structure)[UNREADABLE])
    if any(kind in structure for kind in (b'"namedtuple":', b'"dataclass":', b'"node":')):
        names = [*tree.leaves, *tree.raw_values]
        unflatten(msgspec.json.decode(structure), dict.fromkeys(names))


# ------------------------------------------------------------------------------------ several processes


@contextmanager
def _processes(request: Request, like: Mapping[str, Any] | None) -> Iterator[Hosts]:
    """Yield the processes whose devices the leaves go to, and tell the others if this one fails."""
    members = processes_of(request.placement, like)
    hosts = _hosts.current("loads", members, request.timeout) if members else _hosts.Alone()
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
