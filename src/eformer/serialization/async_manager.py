"""The documented manager, which translates its arguments into saves and loads of the engine.

Tests: tests/serialization/test_manager_save.py, tests/serialization/test_manager_load.py,
tests/serialization/test_manager_files.py.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import msgspec
import numpy as np

from eformer._engine.formats.safetensors.names import SUFFIX
from eformer._engine.formats.zarr.read import discover
from eformer._engine.loading.load import load_tree
from eformer._engine.record.digests import sha256_of
from eformer._engine.record.dtypes import floating_dtype, raw_pieces
from eformer._engine.record.indexes import INDEX
from eformer._engine.record.names import readable
from eformer._engine.record.options import LoadOptions, SaveOptions
from eformer._engine.record.values import MALFORMED_JSON
from eformer._engine.saving.pending import Pending, run_in_background, wait_for
from eformer._engine.saving.save import complete
from eformer._engine.saving.start import refuse_swapped, start
from eformer._engine.stores.local import is_there
from eformer._engine.stores.locate import store_at
from eformer._engine.stores.store_options import options_during
from eformer._engine.stores.urls import (
    is_bucket_url,
    is_file_url,
    path_of_file_url,
    refuse_cut_url,
    with_home,
)
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.interrupts import held_back, uninterrupted
from eformer._engine.trees.devices import is_key
from eformer.paths import GCSPath, LocalPath, ePath
from eformer.serialization.serialization import request_of
from eformer.serialization.utils import apply_gather_functions, is_gcs_path, mesh_of, to_host

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
    from jax.sharding import Mesh, PartitionSpec

    from eformer._engine.loading.request import Request
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.saving.save import Save

__all__ = ["AsyncCheckpointManager", "CheckpointMetadata"]

logger = logging.getLogger("eformer")

Path = GCSPath | LocalPath | str | os.PathLike[str]
Callback = Callable[[jax.Array, str], jax.Array]
Rules = Mapping[str, "PartitionSpec"] | Sequence[tuple[str, "PartitionSpec"]]

_DEFAULT_TIMEOUT = 400  # seconds; GLOBAL_CHECKPOINT_TIMEOUT overrides it


@dataclasses.dataclass
class CheckpointMetadata:
    """Describe a checkpoint: its time, its writer, and its arrays. Fields that are None are filled in.

    version             the version of eFormer that documents these fields
    timestamp           when it was saved
    checksum            SHA-256 by key, if validation is on
    array_metadata      shape and dtype by key
    framework_version   the version of jax
    custom_metadata     the `metadata` of the save

    Example:

        >>> CheckpointMetadata(timestamp="2026-01-01").to_dict()["timestamp"]
        '2026-01-01'
    """

    version: str = "0.0.90"
    timestamp: str | None = None
    checksum: dict[str, str] | None = None
    array_metadata: dict[str, dict[str, Any]] | None = None
    framework_version: str | None = None
    custom_metadata: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.timestamp is None:
            self.timestamp = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        if self.framework_version is None:
            self.framework_version = jax.__version__
        self.checksum = {} if self.checksum is None else self.checksum
        self.array_metadata = {} if self.array_metadata is None else self.array_metadata
        self.custom_metadata = {} if self.custom_metadata is None else self.custom_metadata

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CheckpointMetadata:
        """Create an instance from `data`, a dict of its fields. Unknown fields are ignored."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})


class AsyncCheckpointManager:
    """Save and load trees as zarr arrays or as safetensors files.

    enable                 False turns saving off; each skipped save is logged
    float_dtype            store floating leaves as this dtype; None, the default, stores them as they are
    verbose                log every save and load
    gcs_bucket             the bucket of Google Cloud Storage that relative paths lead into
    gcs_credentials_path   a file of Google credentials, for this bucket and other gs:// URLs; None for credentials of
                           the environment
    enable_validation      record the SHA-256 of every array and check it on load, in addition to the digests, which are
                           always recorded and checked
    enable_compression     compress arrays with zstd; not possible for safetensors
    use_tensorstore        False writes safetensors; so does a path that ends in ".safetensors"

    Every method may be called from several threads and inside a running event loop. `wait_until_finished`, or leaving
    the manager as a context manager, waits for all `save_async` calls.

    Example:

        >>> manager = AsyncCheckpointManager()
        >>> manager.save(state, "run", prefix="model")
        >>> state, metadata = manager.load("run", mesh, prefix="model")
    """

    def __init__(
        self,
        enable: bool | None = None,
        float_dtype: Any = None,
        verbose: bool = False,
        gcs_bucket: str | None = None,
        gcs_credentials_path: str | None = None,
        enable_validation: bool = False,
        enable_compression: bool = False,
        use_tensorstore: bool = True,
    ) -> None:
        if float_dtype is not None:
            floating_dtype(float_dtype)
        if enable_compression and not use_tensorstore:
            raise ValueError(
                "enable_compression=True needs use_tensorstore=True: safetensors cannot be compressed"
            )
        if gcs_credentials_path is not None and not os.path.isfile(gcs_credentials_path):  # noqa: PTH113
            raise FileNotFoundError(f"gcs_credentials_path={gcs_credentials_path!r}: no such file")
        self.enable = enable
        self.float_dtype = float_dtype
        self.verbose = verbose
        self.gcs_bucket = gcs_bucket
        self.gcs_credentials_path = gcs_credentials_path
        self.enable_validation = enable_validation
        self.enable_compression = enable_compression
        self.use_tensorstore = use_tensorstore
        self._lock = Lock()
        self._with_credentials: set[str] = (
            set()
        )  # paths for which Google's credentials are set while this lives
        self._pending: list[Pending] = []
        self._global_manager: GlobalAsyncCheckpointManager | None = None

    # -------------------------------------------------------------------------------------------- save

    @uninterrupted
    def save_tree(
        self,
        tree: Any,
        path: Path,
        mesh: Mesh | None = None,
        gather_fns: dict[str, Any] | bool | None = None,
        float_dtype: Any = None,
        metadata: dict[str, Any] | None = None,
        callback: Callable[[str], None] | None = None,
        prefix: str | None = None,
        do_all_gather: bool = False,
        cpu_offload: bool = False,
    ) -> str:
        """Save `tree` to `path`, atomically and durably, and return the path.

        prefix          the name of the tree in the directory
        metadata        a dict of plain values, which `load` returns
        float_dtype     store floating leaves as this dtype; None for the dtype of the manager
        gather_fns      functions called on leaves before saving, by dotted key or nested; True for `jax.device_get`
        do_all_gather   gather every array first: on all devices of the mesh, or with `cpu_offload` on the CPU
        cpu_offload     without a gather: keep arrays that wait to be written in host memory
        callback        called with the path afterwards
        mesh            only needed for a gather
        """
        refuse_swapped(tree, path, "save(tree, path)")
        where = self._resolve(path)
        gather = _Gather(mesh, gather_fns, do_all_gather, cpu_offload, self.verbose)
        if save := self._start(tree, where, prefix, metadata, float_dtype, gather):
            complete(save)
            if callback is not None:
                callback(where)
        return where

    save = save_tree

    def save_async(
        self,
        tree: Any,
        path: Path,
        mesh: Mesh | None = None,
        gather_fns: dict[str, Any] | bool | None = None,
        float_dtype: Any = None,
        metadata: dict[str, Any] | None = None,
        callback: Callable[[str], None] | None = None,
        prefix: str | None = None,
        do_all_gather: bool = False,
        cpu_offload: bool = False,
    ) -> Pending:
        """Start a save, and return as soon as the caller may donate or change every array of the tree.

        The arguments are those of `save`.
        """
        refuse_swapped(tree, path, "save_async(tree, path)")
        where = self._resolve(path)
        with held_back() as block:
            pending = Pending(where)
            block.otherwise = pending.give_up
            gather = _Gather(mesh, gather_fns, do_all_gather, cpu_offload, self.verbose)
            save = self._start(tree, where, prefix, metadata, float_dtype, gather, detach=True)
            if save is None:
                pending.start(lambda: None)
                return pending
            with self._lock:
                self._pending = [p for p in self._pending if not (p.done() and p.was_asked)] + [pending]
            run_in_background(save, pending, after=None if callback is None else lambda: callback(where))
            return pending

    @uninterrupted
    def save_pytree(
        self,
        pytree: Any,
        path: Path,
        mesh: Mesh | None = None,
        *,
        prefix: str,
        do_all_gather: bool = False,
        cpu_offload: bool = True,
        dtype: Any = None,
        extras: dict[str, Any] | None = None,
        write_index: bool = True,
    ) -> str:
        """Save `pytree` under a required prefix, and return the path.

        dtype         store floating leaves as this dtype; None for the dtype of the manager
        extras        the metadata
        write_index   False writes the arrays alone, without digests and structure

        The other arguments are those of `save`.
        """
        _require_prefix(prefix)
        refuse_swapped(pytree, path, "save_pytree(pytree, path)")
        where = self._resolve(path)
        gather = _Gather(mesh, None, do_all_gather, cpu_offload, self.verbose)
        if save := self._start(pytree, where, prefix, extras, dtype, gather, write_index=write_index):
            complete(save)
        return where

    @uninterrupted
    def wait_until_finished(self) -> None:
        """Wait for every `save_async` of this manager. Raises the first error that has not been raised yet."""
        with self._lock:
            pending, self._pending = self._pending, []
        wait_for(pending)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.wait_until_finished()
        except Exception:
            if kind is None:
                raise
            logger.exception("a save failed, too")  # the error of the block is raised, not this one

    def _start(
        self,
        tree: Any,
        where: str,
        prefix: str | None,
        metadata: dict[str, Any] | None,
        dtype: Any,
        gather: _Gather,
        *,
        detach: bool = False,
        write_index: bool = True,
    ) -> Save | None:
        """Start a save; return None if saving is turned off."""
        if self.enable is False:
            logger.warning("saving is turned off (enable=False): not writing %s", where)
            return None
        dtype = self.float_dtype if dtype is None else dtype
        options = SaveOptions(
            dtype=None if dtype is None else floating_dtype(dtype),
            snapshot="host" if gather.cpu_offload else "auto",
            checksums=self.enable_validation,
            compression="zstd" if self.enable_compression else None,
        )
        self._log("saving to %s", where)
        return start(
            tree,
            where,
            prefix=prefix,
            format="tensorstore" if self.use_tensorstore and not where.endswith(SUFFIX) else "safetensors",
            metadata=metadata,
            options=options,
            detach=detach,
            write_index=write_index,
            first=gather,
        )

    # -------------------------------------------------------------------------------------------- load

    def load(
        self,
        path: Path,
        mesh: Mesh | None,
        shardings: Any = None,
        mismatch_allowed: bool = True,
        callback: Callback | None = None,
        partition_rules: Rules | None = None,
        dtype: Any = None,
        validate: bool | None = None,
        prefix_filter: str | None = None,
        prefix: str | None = None,
        use_async: bool = True,
        chunk_size: int | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Load the tree at `path`, and return it with its `CheckpointMetadata` as a dict.

        path               a directory, its index, a safetensors file, any shard of a model, which stands for the whole
                           model, or the common beginning of the names of shards
        mesh               every array goes to this mesh, also an array that was saved from numpy, unless JAX cannot
                           hold it (64 bits without jax_enable_x64), which is logged; None for the mesh of
                           `jax.set_mesh`
        shardings          where leaves go, by key, nested or flat: a Sharding, a PartitionSpec or a function
        partition_rules    where leaves go that `shardings` does not name; leaves without a rule go where they were
                           saved
        mismatch_allowed   False raises a KeyError for leaves that `shardings` does not name
        callback           called with each array and its key; returns the replacement
        dtype              cast floating leaves to this dtype
        prefix             the tree, of several
        prefix_filter      the former name of `prefix`
        chunk_size         the number of arrays to read at a time; None for all
        validate           False skips the digests; True also checks the recorded SHA-256 of every array; None does so
                           if `enable_validation` is set
        use_async          False reads one array at a time
        """
        if prefix_filter is not None:
            warnings.warn("prefix_filter is deprecated; use prefix", DeprecationWarning, stacklevel=2)
            prefix = _same(prefix, prefix_filter)
        if dtype is not None:
            floating_dtype(dtype)  # "like" needs a template
        request = request_of(
            mesh,
            prefix=prefix,
            rules=partition_rules,
            shardings=shardings,
            every_leaf=not mismatch_allowed,
            dtype=dtype,
            callback=callback,
            options=LoadOptions(batch=chunk_size),
            verify=validate is not False,
        )
        if not use_async:
            request = dataclasses.replace(request, options=LoadOptions(batch=1), threads=1)
        return self._load(path, request, validate)

    def load_tree_parallel(
        self,
        path: Path,
        shardings: Any = None,
        mismatch_allowed: bool = True,
        callback: Callback | None = None,
        dtype: Any = None,
        validate: bool | None = None,
        prefix_filter: str | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Load with `mesh=None`: leaves without a sharding go to the mesh of `jax.set_mesh`, or to the default device.

        The arguments are those of `load`.
        """
        return self.load(
            path, None, shardings, mismatch_allowed, callback, None, dtype, validate, prefix=prefix_filter
        )

    def load_pytree(
        self,
        path: Path,
        mesh: Mesh | None,
        *,
        prefix: str,
        shardings: Any = None,
        partition_rules: Rules | None = None,
        dtype: Any = None,
        template: Any = None,
        strict_shapes: bool = True,
        callback: Callback | None = None,
        chunk_size: int | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Load one prefix; leaves without a sharding or rule are replicated. The arguments are those of `load`.

        `template` is a tree of arrays or `ShapeDtypeStruct`s that gives the structure, shapes, dtypes and shardings;
        its values are not used. `dtype="like"` casts each floating leaf to its dtype in the template.
        `strict_shapes=False` reshapes leaves with the same number of elements.
        """
        _require_prefix(prefix)
        request = request_of(
            mesh,
            like=template,
            prefix=prefix,
            rules=partition_rules,
            shardings=shardings,
            replicate=True,
            dtype=dtype,
            callback=callback,
            options=LoadOptions(batch=chunk_size),
            reshape=not strict_shapes,
            like_name="template",
        )
        return self._load(path, request, None)

    def _load(self, path: Path, request: Request, validate: bool | None) -> tuple[Any, dict[str, Any]]:
        where = self._resolve(path)
        self._log("loading from %s", where)
        if self.enable_validation if validate is None else validate:
            request = dataclasses.replace(request, sha256=_checksums_of)
        loaded = load_tree([where], request)
        return loaded.tree, _metadata_of(loaded.entry).to_dict()

    # ------------------------------------------------------------------------------------------- paths

    @staticmethod
    def is_tensorstore(path: Path) -> bool:
        """Tell whether the path is a checkpoint of zarr arrays, or the index of one."""
        text = str(path) if isinstance(path, GCSPath) else os.fsdecode(path)
        refuse_cut_url(text)
        is_remote = is_bucket_url(text)
        store = store_at(
            text.removesuffix(f"/{INDEX}") if is_remote else str(AsyncCheckpointManager.safe_loadpath(path))
        )
        if not is_there(store):
            return False
        return store.exists(INDEX) or next(discover(store), None) is not None

    @staticmethod
    def safe_loadpath(path: Path) -> GCSPath | LocalPath:
        """Return the directory of a checkpoint, given its path or the path of its index."""
        where = ePath(path if isinstance(path, GCSPath) else with_home(os.fsdecode(path)))
        return where.parent if where.name == INDEX else where

    def _resolve(self, path: Path) -> str:
        text = str(path) if isinstance(path, GCSPath) else with_home(os.fsdecode(path))
        if is_file_url(text):
            text = path_of_file_url(text)
        refuse_cut_url(text)
        if self.gcs_bucket and not is_bucket_url(text) and not os.path.isabs(text):  # noqa: PTH117
            text = f"gs://{self.gcs_bucket}/{text}"
        if self.gcs_credentials_path and is_gcs_path(text):
            with self._lock:
                if text not in self._with_credentials:
                    options_during(self, text, {"credentials_path": self.gcs_credentials_path})
                    self._with_credentials.add(text)
        return text

    # -------------------------------------------------------------------------------------------- rest

    @staticmethod
    def compute_checksum(array: Any) -> str:
        """Compute the SHA-256 of the elements of `array` in C order, little endian."""
        numbers = jax.random.key_data(array) if is_key(array) else array
        return sha256_of(raw_pieces(np.asarray(numbers)))

    @property
    def global_manager(self) -> GlobalAsyncCheckpointManager:
        """Return JAX's own manager, created once, to pass to `tree_serialize_leaves`."""
        from jax.experimental.array_serialization import serialization  # late: it imports TensorStore

        with self._lock:
            if self._global_manager is None:
                timeout = int(os.environ.get("GLOBAL_CHECKPOINT_TIMEOUT", _DEFAULT_TIMEOUT))
                manager: Any = serialization.GlobalAsyncCheckpointManager  # untyped
                self._global_manager = manager(timeout)
            return self._global_manager

    def _log(self, message: str, *arguments: object) -> None:
        logger.log(logging.INFO if self.verbose else logging.DEBUG, message, *arguments)


def _require_prefix(prefix: Any) -> None:
    if not isinstance(prefix, str) or not prefix:
        raise ValueError(f"A non-empty string prefix is required, not {prefix!r}")


def _same(prefix: str | None, prefix_filter: str) -> str:
    if prefix is not None and prefix != prefix_filter:
        raise ValueError(f"prefix={prefix!r} and prefix_filter={prefix_filter!r} contradict each other")
    return prefix_filter


@dataclasses.dataclass(frozen=True, slots=True)
class _Gather:
    """The gathering of a tree before it is saved."""

    mesh: Mesh | None
    functions: dict[str, Any] | bool | None
    is_all: bool
    cpu_offload: bool
    verbose: bool

    def __call__(self, tree: Any) -> Any:
        if self.functions is not None:
            tree = apply_gather_functions(tree, self.functions, mismatch_allowed=True, verbose=self.verbose)
        if not self.is_all:
            return tree
        return jax.tree.map(lambda leaf: _gather_leaf(leaf, self.mesh, self.cpu_offload), tree)


def _gather_leaf(leaf: Any, mesh: Mesh | None, cpu_offload: bool) -> Any:
    """Gather an array on all devices of a mesh, or on the CPU; return a leaf that is no jax array unchanged."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if jax.process_count() > 1 and leaf.is_fully_addressable:  # every process has a whole array of its own
        return jax.device_put(leaf, jax.local_devices(backend="cpu")[0]) if cpu_offload else leaf
    return to_host(leaf, None, mesh or mesh_of(leaf), cpu_offload)


# ----------------------------------------------------------------------------------------- metadata


def _metadata_of(tree: TreeEntry) -> CheckpointMetadata:
    """Return the metadata of a tree, saved by eformer or by another program."""
    keys = _keys_of(tree.leaves)
    arrays = {
        keys[name]: {"dtype": entry.logical_dtype, "shape": list(entry.logical_shape)}
        for name, entry in tree.leaves.items()
    }
    if not tree.has_digests:
        return _foreign_metadata(tree.metadata, arrays)
    return CheckpointMetadata(
        timestamp=tree.saved_at,
        checksum={keys[name]: sha256 for name, sha256 in _checksums_of(tree).items()},
        array_metadata=arrays,
        framework_version=tree.written_by.rpartition("jax ")[2],
        custom_metadata=tree.metadata,
    )


def _keys_of(names: Iterable[str]) -> dict[str, str]:
    """Map names to dotted keys; a name whose dotted key would be ambiguous maps to itself."""
    keys = {name: readable(name) for name in names}
    count = Counter(keys.values())
    return {name: key if count[key] == 1 else name for name, key in keys.items()}


def _checksums_of(tree: TreeEntry) -> dict[str, str]:
    """Return the recorded SHA-256 of each leaf, by name."""
    if tree.has_digests:
        return {name: entry.sha256 for name, entry in tree.leaves.items() if entry.sha256}
    recorded = _foreign_metadata(tree.metadata, {}).checksum or {}
    return {name: recorded[key] for name, key in _keys_of(tree.leaves).items() if key in recorded}


def _foreign_metadata(found: dict[str, Any], arrays: dict[str, dict[str, Any]]) -> CheckpointMetadata:
    """Parse the metadata of the original eFormer; return any other metadata as the caller's."""
    if "timestamp" not in found or "custom_metadata" not in found:
        return CheckpointMetadata(
            timestamp="", array_metadata=arrays, framework_version="", custom_metadata=found
        )
    record = {name: _decoded(value) if name not in _TEXT else value for name, value in found.items()}
    for name, kind in (("checksum", dict), ("custom_metadata", dict), ("framework_version", str)):
        if not isinstance(record.get(name), kind):
            record[name] = kind()
    return CheckpointMetadata.from_dict(record | {"array_metadata": arrays})


_TEXT = ("version", "timestamp")


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except MALFORMED_JSON:
        return value
