"""Loading a tree: find, select, place, read, check, assemble."""

from __future__ import annotations

import fnmatch
import logging
import math
import os  # noqa: TC003
from collections.abc import Callable, Iterable, Mapping, Sequence  # noqa: TC003  msgspec reads them
from dataclasses import dataclass
from functools import lru_cache
from numbers import Number
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Sharding

from eformer.checkpoint._checksums import check_sha256
from eformer.checkpoint._formats._found import Found  # noqa: TC001  msgspec reads it
from eformer.checkpoint._formats.find import find, was_replaced
from eformer.checkpoint._leaf import Region, with_nearest
from eformer.checkpoint._manifest import UNREADABLE, LeafEntry, TreeEntry
from eformer.checkpoint._ndarray import dtype_from_name, floating_dtype, is_floating
from eformer.checkpoint._plan import Read, Want, plan_reads
from eformer.checkpoint._pool import default_threads, uncollected
from eformer.checkpoint._rules import Leaf, PartitionSpec, Rules, Said, place
from eformer.checkpoint._store.files import Files  # noqa: TC001  msgspec reads it
from eformer.checkpoint._transfer import fetch
from eformer.checkpoint._tree import flatten, unflatten, unflatten_like
from eformer.errors import CorruptionError, FormatError, MismatchError, StructureError

_config: Any = jax.config  # whose attributes have no types

logger = logging.getLogger("eformer")

# Another save may replace the files between the reading of a manifest and that of the data; each time it does,
# a newer checkpoint is there to be read.
_MOST_RESTARTS = 10

_MUCH = 2**20  # bytes of one file


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
    verify: bool = True,
) -> Any:
    """The tree that was saved at `path`, bit for bit; or an error that says what is wrong, and where.

    Without `like` the tree has the structure it was saved with, jax arrays are jax arrays and numpy arrays are
    numpy arrays. `like` is a tree of arrays, `ShapeDtypeStruct`s or shardings, whose structure, shapes, dtypes and
    shardings the result has. `keys` are names of leaves or subtrees, or patterns such as "layers.*.bias"; without
    `like` the result is then a flat dict by name.

    `shardings` says where leaves go: one for all, or by name (nested or dotted, some or all), each a `Sharding`, a
    `PartitionSpec` or a function that is called on the loaded array. `rules` are (regex, PartitionSpec) pairs,
    searched for in names joined by "/". With a `mesh` and neither, leaves lie as they were saved.

    `dtype` casts floating leaves. `callback(array, name)` is called for every array, and returns what to have in its
    place. `batch` is how many arrays are read at a time; None for all. `verify=False` skips the digests.
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
        verify=verify,
    )
    return load_entry(path, request)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asked for; beyond what `load` takes,

    every_leaf, replicate, rules_are    see `Said`
    like_is        what the caller's argument for `like` is called
    reshape        a leaf may have another shape than in `like` if it has as many elements
    threads        that read; None for one a core, 2 to 16
    sha256         says which leaves of a tree should have which SHA-256, which is checked first
    """

    like: Any = None
    prefix: str | None = None
    keys: tuple[str, ...] | None = None
    mesh: jax.sharding.Mesh | None = None
    rules: Rules | None = None
    shardings: Any = None
    dtype: Any = None
    callback: Callable[[Any, str], Any] | None = None
    batch: int | None = None
    verify: bool = True
    every_leaf: bool = False
    replicate: bool = False
    reshape: bool = False
    threads: int | None = None
    sha256: Callable[[TreeEntry], Mapping[str, str]] | None = None
    rules_are: str = "rules"
    like_is: str = "like"

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch <= 0:
            raise ValueError(
                f"a batch of {self.batch} arrays: it has to be positive, or None for all at once"
            )


def load_entry(path: str | os.PathLike[str], request: Request) -> tuple[Any, TreeEntry]:
    """The tree, and what the manifest says of it."""
    like = None if request.like is None else flatten(request.like)[0]
    tree, arrays, selected = _read_one(path, request, like)
    with uncollected():
        leaves = arrays | {name: value for name, value in tree.values.items() if name in selected}
        if like is not None:
            return unflatten_like(request.like, leaves), tree
        if request.keys is not None:
            return {name: leaves[name] for name in selected}, tree
        return unflatten(msgspec.json.decode(tree.structure), leaves), tree


def _read_one(
    path: str | os.PathLike[str], request: Request, like: Mapping[str, Any] | None
) -> tuple[TreeEntry, dict[str, Any], dict[str, None]]:
    """The wanted leaves of one whole checkpoint: if another save replaces it meanwhile, those of the newer one."""
    for _ in range(_MOST_RESTARTS):
        found = find(path)
        tree = found.tree(request.prefix)
        with uncollected():
            selected = select(tree, request.keys)
            items = _items(tree, selected, request, like)
            if like is None and request.keys is None:
                _require_classes(tree)
            _place(items, tree, request)
        try:
            arrays = _arrays(found, tree, items, request)
        except _Unreadable as unreadable:
            if was_replaced(found):
                continue
            error = unreadable.error
            if isinstance(error, FileNotFoundError):
                raise CorruptionError(f"{path}: the manifest names a file that is gone: {error}") from error
            raise error from None
        return tree, arrays, selected
    raise FormatError(f"{path} was replaced {_MOST_RESTARTS} times while it was being read")


def _arrays(found: Found, tree: TreeEntry, items: list[_Item], request: Request) -> dict[str, Any]:
    """The arrays by name, read and handed to the caller's functions batch by batch."""
    if request.sha256 is not None:
        try:
            check_sha256(found, tree, request.sha256(tree), request.threads or default_threads())
        except (FileNotFoundError, CorruptionError) as error:
            raise _Unreadable(error) from None
    arrays: dict[str, Any] = {}
    batch = request.batch or max(1, len(items))
    for start in range(0, len(items), batch):
        some = items[start : start + batch]
        try:
            _read(found, tree, some, request.verify, request.threads or default_threads())
        except (FileNotFoundError, CorruptionError) as error:
            raise _Unreadable(error) from None
        with uncollected():
            assembled = _assemble(some)
        for item in some:
            leaf = assembled.pop(item.name)
            leaf = item.after(leaf) if item.after else leaf
            arrays[item.name] = request.callback(leaf, item.name) if request.callback else leaf
            item.arrays = ()  # what the caller's functions let go of, is gone
    return arrays


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


# -------------------------------------------------------------------------------------------- select


def select(tree: TreeEntry, keys: Iterable[str] | None) -> dict[str, None]:
    """The names of the leaves that `keys` name or match, or that lie below a name."""
    names = dict.fromkeys([*tree.leaves, *tree.raw_values])
    if keys is None:
        return names
    chosen: dict[str, None] = {}
    unknown = []
    for key in keys:
        if key in names:
            chosen[key] = None
            continue
        below = [name for name in names if name.startswith(key + ".") or fnmatch.fnmatchcase(name, key)]
        chosen |= dict.fromkeys(below)
        if not below:
            unknown.append(key)
    if unknown:
        there = dict.fromkeys(start for name in names for start in (name, name.rpartition(".")[0]) if start)
        hints = (
            f"no leaf is named {key!r}, matches it or lies below it{hint}"
            for key, hint in with_nearest(unknown, there)
        )
        raise MismatchError(list(hints), context="keys")
    return {name: None for name in names if name in chosen}


class _Item(msgspec.Struct, gc=False):
    """A leaf on its way: what is stored, what it is to become, and where."""

    name: str
    entry: LeafEntry
    dtype: str
    sharding: Any = None
    as_numpy: bool = False
    is_explicit: bool = False
    after: Callable[[Any], Any] | None = None
    regions: list[Region] | None = None
    devices: list[Any] = []
    arrays: Sequence[Any] = ()
    new_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the user sees."""
        return self.entry.logical_shape if self.new_shape is None else self.new_shape


def _items(
    tree: TreeEntry, selected: Mapping[str, None], request: Request, like: Mapping[str, Any] | None
) -> list[_Item]:
    """The arrays among the selected leaves, if they are what `like` expects; else every difference at once."""
    cast = None if request.dtype is None else floating_dtype(request.dtype)
    entries = tree.leaves
    items = []
    for name in selected:
        if name in entries:
            entry = entries[name]
            dtype = cast if cast and is_floating(entry.dtype) else entry.dtype
            items.append(_Item(name, entry, dtype, as_numpy=entry.home == "numpy"))
    if like is not None:
        if request.reshape:
            for item in items:
                _take_shape(item, like.get(item.name))
        problems = list(_differences(items, selected, tree, like))
        if problems:
            raise MismatchError(problems, context=f"the checkpoint does not fit `{request.like_is}`")
        for item in items:
            _follow(item, like[item.name])
    return items


def _take_shape(item: _Item, leaf: Any) -> None:
    """Lets the item have the shape that `like` says, if it has as many elements."""
    shape = getattr(leaf, "shape", None)
    stored = item.entry.shape
    if not isinstance(shape, tuple) or shape == stored or math.prod(shape) != math.prod(stored):
        return
    if not item.entry.key:
        item.new_shape = shape
        logger.warning("leaf %r is reshaped from %s to %s", item.name, list(stored), list(shape))


def _differences(
    items: Sequence[_Item], selected: Mapping[str, None], tree: TreeEntry, like: Mapping[str, Any]
) -> Iterable[str]:
    missing = [name for name in like if name not in selected]
    unexpected = [name for name in selected if name not in like]
    for name, hint in with_nearest(missing, selected):
        yield f"missing leaf {name!r}{hint}: `like` has it, the checkpoint does not"
    for name, hint in with_nearest(unexpected, like):
        yield f"unexpected leaf {name!r}{hint}: the checkpoint has it, `like` does not"
    for item in items:
        if item.name in like:
            yield from _array_difference(item, like[item.name])
    for name, value in tree.values.items():
        if name in selected and name in like:
            yield from _value_difference(name, value, like[name])


def _value_difference(name: str, value: Any, leaf: Any) -> Iterable[str]:
    if _describes_array(leaf):
        yield f"leaf {name!r}: expected an array, found a plain {type(value).__name__}"
    elif type(value) is not type(leaf) and not (isinstance(value, Number) and isinstance(leaf, Number)):
        yield f"leaf {name!r}: expected a plain {type(leaf).__name__}, found a {type(value).__name__}"


def _describes_array(leaf: Any) -> bool:
    return isinstance(leaf, (Sharding, PartitionSpec)) or (
        hasattr(leaf, "shape") and not isinstance(leaf, np.generic)
    )


def _array_difference(item: _Item, leaf: Any) -> Iterable[str]:
    if isinstance(leaf, (Sharding, PartitionSpec)):
        return
    found = _described(_key_dtype(item.entry.key) if item.entry.key else item.dtype, item.shape)
    if not _describes_array(leaf):
        yield f"leaf {item.name!r}: expected a plain {type(leaf).__name__}, found {found}"
        return
    expected = _described(_dtype_name(leaf.dtype), tuple(leaf.shape))
    same_shape = tuple(leaf.shape) == item.shape
    if expected != found:
        cast = "; dtype= casts" if is_floating(expected) and is_floating(found) else ""
        yield f"leaf {item.name!r}: expected {expected}, found {found}{cast if same_shape else ''}"


def _described(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def _dtype_name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype)


@lru_cache
def _key_dtype(impl: str) -> str:
    """What JAX calls the dtype of the keys of a generator."""
    return str(jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype)


def _follow(item: _Item, leaf: Any) -> None:
    """Makes the item what this leaf of `like` is."""
    if isinstance(leaf, (Sharding, PartitionSpec)):
        item.as_numpy, item.sharding, item.is_explicit = False, leaf, True
    elif isinstance(leaf, np.ndarray):
        item.as_numpy = True
    else:
        item.as_numpy = False
        if (sharding := getattr(leaf, "sharding", None)) is not None and getattr(leaf, "committed", True):
            item.sharding, item.is_explicit = sharding, True


# --------------------------------------------------------------------------------------------- place


def _place(items: Sequence[_Item], tree: TreeEntry, request: Request) -> None:
    """A sharding, the default device or host memory for every item, and the boxes that each device needs."""
    said = (request.mesh, request.rules, request.shardings, *(i.sharding for i in items))
    if any(argument is not None for argument in said):
        _follow_arguments(items, tree, request)
    _keep_on_host(
        [item for item in items if not item.as_numpy and not jax_holds(item.dtype, _config.jax_enable_x64)]
    )
    for item in items:
        if item.sharding is not None and not item.as_numpy and item.new_shape is None:
            _cut_up(item)


def _follow_arguments(items: Sequence[_Item], tree: TreeEntry, request: Request) -> None:
    leaves = {item.name: _as_leaf(item) for item in items}
    said = Said(
        mesh=request.mesh,
        rules=request.rules,
        shardings=request.shardings,
        prefix=request.prefix,
        every_leaf=request.every_leaf,
        replicate=request.replicate,
        rules_are=request.rules_are,
    )
    placed, after = place(leaves, said, ignored=tree.leaves.keys() - leaves.keys())  # which `keys` leave out
    for item in items:
        item.after = after.get(item.name)
        if item.name in placed:
            item.sharding, item.as_numpy, item.is_explicit = placed[item.name], False, True


def _as_leaf(item: _Item) -> Leaf:
    stays = item.as_numpy and not jax_holds(item.dtype, _config.jax_enable_x64)
    return Leaf(item.shape, item.sharding, item.entry.sharding, item.as_numpy, stays)


@lru_cache
def jax_holds(dtype: str, x64: bool) -> bool:  # noqa: ARG001  x64 is for the cache
    """Whether JAX has this dtype. Without x64 it would cut 64 bits to 32 without a word; some it never has."""
    try:
        found: Any = jax.device_put(np.zeros(1, dtype_from_name(dtype)))
    except Exception:  # noqa: BLE001  JAX has several for dtypes that it or its compiler does not know
        return False
    return bool(found.dtype == dtype_from_name(dtype))


def _keep_on_host(items: Sequence[_Item]) -> None:
    """Leaves that JAX cannot hold as they are stay numpy arrays, unless somebody wants them on a device."""
    refuse_on_devices((item.name, item.dtype, item.entry.shape) for item in items if item.is_explicit)
    for item in items:
        item.as_numpy = True
    if items:
        logger.warning(
            "%d leaves are returned as numpy arrays, because JAX would change them (64 bits need jax_enable_x64); "
            "the first is %r, %s",
            len(items), items[0].name, items[0].dtype,
        )  # fmt: skip


def refuse_on_devices(leaves: Iterable[tuple[str, str, tuple[int, ...]]]) -> None:
    """For names, dtypes and shapes of what is wanted on devices and cannot be there."""
    problems = [f"leaf {name!r} is {dtype}{list(shape)}" for name, dtype, shape in leaves]
    if problems:
        raise MismatchError(
            problems,
            context="JAX cannot hold these as they are; set jax_enable_x64, or pass dtype= or numpy arrays in like=",
        )


def _cut_up(item: _Item) -> None:
    """The distinct boxes that this process's devices hold, and which device holds which."""
    sharding, shape = item.sharding, item.entry.logical_shape
    assert sharding is not None
    numbers: dict[Region, int] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = [s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True)]
        inner = item.entry.shape[len(shape) :]  # the numbers of a PRNG key are never cut
        region = Region((*(a for a, _ in bounds), *(0 for _ in inner)), (*(b for _, b in bounds), *inner))
        item.devices.append((device, numbers.setdefault(region, len(numbers))))
    item.regions = list(numbers)


# ---------------------------------------------------------------------------------------------- read


def _read(found: Found, tree: TreeEntry, items: Sequence[_Item], verify: bool, threads: int) -> None:
    wants = [Want(item.name, item.entry, item.dtype, item.regions) for item in items]
    reads = plan_reads(wants, tree)
    files = found.files(tree)
    try:
        needed = _needed_files(tree, reads)
        files.hold(needed)
        _require_bytes(tree, items, needed, files)
        fetched = fetch(reads, wants, tree, files, threads, verify=verify)
    finally:
        files.close()
    for item, arrays in zip(items, fetched, strict=True):
        item.arrays = arrays


def _require_bytes(tree: TreeEntry, items: Sequence[_Item], needed: Iterable[int], files: Files) -> None:
    """Refuses files that are shorter than the leaves, before much memory is allocated for these."""
    lengths = [file.nbytes for file in tree.files]
    for number in needed:
        if lengths[number] > _MUCH and not tree.is_database:
            lengths[number] = files.nbytes(number)
    if all(length >= file.nbytes for length, file in zip(lengths, tree.files, strict=True)):
        return
    for item in items:
        for extent in item.entry.extents:
            file = tree.files[extent.file]
            stop = file.header_nbytes + extent.offset + extent.nbytes
            if stop > lengths[extent.file]:
                raise CorruptionError(
                    f"leaf {item.name!r}: {tree.path_of(extent.file)} was cut short: it ends after "
                    f"{lengths[extent.file]} bytes, the leaf after {stop}; restore the file from a copy, or load "
                    "an older checkpoint"
                )


def _needed_files(tree: TreeEntry, reads: Sequence[Read]) -> set[int]:
    """By number; refuses leaves that claim more bytes than the files have, before memory is allocated for them."""
    claimed = [0] * len(tree.files)
    for read in reads:
        claimed[read.file] += read.nbytes
    for file, nbytes in zip(tree.files, claimed, strict=True):
        if nbytes > file.nbytes:
            raise FormatError(f"the leaves in {file.name!r} claim {nbytes} bytes, it has {file.nbytes}")
    return {read.file for read in reads}


# ------------------------------------------------------------------------------------------ assemble


def _assemble(items: Sequence[_Item]) -> dict[str, Any]:
    """The arrays by name. Memory that JAX takes as it is, is private and never written again."""
    buffers: list[Any] = []
    devices: list[Any] = []
    plain: list[Any] = []
    for item in items:
        if item.new_shape is not None:
            item.arrays = [item.arrays[0].reshape(item.new_shape)]
        if item.as_numpy or item.new_shape is not None:
            continue
        for array in item.arrays:
            array.flags.writeable = False
        if item.sharding is None:
            plain.append(item.arrays[0])
        else:
            buffers += [item.arrays[number] for _, number in item.devices]
            devices += [_memory_of(device, item.sharding) for device, _ in item.devices]
    on_default = iter(jax.device_put(plain))
    on_devices = iter(jax.device_put(buffers, devices))
    leaves = {}
    for item in items:
        if item.as_numpy:
            leaf = item.arrays[0]
        elif item.new_shape is not None:
            leaf = jax.device_put(item.arrays[0], item.sharding)
        elif item.sharding is None:
            leaf = _keyed(next(on_default), item)
        else:
            shards = [next(on_devices) for _ in item.devices]
            leaf = _keyed(_joined(shards, item), item)
        leaves[item.name] = leaf
    return leaves


def _memory_of(device: Any, sharding: Any) -> Any:
    """The device, or that memory of it that the sharding asks for."""
    kind = sharding.memory_kind
    if kind is None or kind == device.default_memory().kind:
        return device
    return jax.sharding.SingleDeviceSharding(device, memory_kind=kind)


def _joined(shards: list[Any], item: _Item) -> Any:
    sharding = item.sharding
    assert sharding is not None
    if item.entry.key:
        sharding = _of_key_data(sharding, len(item.entry.logical_shape))
    return jax.make_array_from_single_device_arrays(item.entry.shape, sharding, shards)


def _of_key_data(sharding: Sharding, ndim: int) -> Sharding:
    """The sharding of the numbers inside keys that lie so."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = (*sharding.spec, *(None for _ in range(ndim - len(sharding.spec))), None)
        return jax.sharding.NamedSharding(
            sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind
        )
    return sharding


def _keyed(array: Any, item: _Item) -> Any:
    return jax.random.wrap_key_data(array, impl=item.entry.key) if item.entry.key else array
