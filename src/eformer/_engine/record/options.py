"""The options of a save and of a load, each as one value.

Tests: tests/engine/saving/test_start.py, tests/engine/loading/test_request.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from eformer._engine.record.names import with_nearest

Snapshot = Literal["auto", "device", "host"]


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Set options of `save` and `save_async`.

    max_shard_bytes   maximum size of a data file in a directory; only a single larger leaf exceeds it
    dtype             store floating leaves as this dtype; None stores them unchanged
    snapshot          where `save_async` copies accelerator arrays, so that the caller may donate the originals when it
                      returns: to the "device" or to "host" memory; "auto" uses the device if it has room
    staging_bytes     maximum host memory for bytes on their way from an accelerator to the disk
    threads           number of threads that write; None for one per core, at least 2 and at most 8
    checksums         record the SHA-256 of every array, in addition to the digests, which are always recorded; if
                      several processes save, only for arrays that one process holds whole. In zarr arrays of one
                      process, also record every fingerprint
    processes         numbers of the processes that save the tree together; None for all. A single process saves its own
                      data without waiting for other processes
    timeout           seconds that each of the two meetings of the processes may take; None for 600. On a disk it also
                      limits the wait for earlier saves to the same path. In a bucket it also limits the whole save;
                      None limits only its requests
    reuse             hard-link leaves from an earlier checkpoint that has the same digests, instead of writing them.
                      True uses the checkpoint that this save replaces; a path, a checkpoint on the same file system.
                      Either checkpoint may be deleted later. A local file is read and checked before it is linked, at
                      most once in 10 minutes; a damaged file is written anew. Other programs can open the result if no
                      linked file holds leaves that have changed since. None, the default, means False, except in a
                      `Run`, which uses its last step and links only files whose leaves are all unchanged: other
                      programs can always open them
    store_options     a dict of options of the bucket, which `store_options` lists. They hold for one save, until it is
                      done; the options of a `Run` hold until it is closed

    Only for the format "zarr":

    max_chunk_bytes   maximum size of a chunk, which is the part of a leaf on one device, or rows of it; None for 1
                      GiB, or 8 MiB if chunks are compressed or stored in a database
    compression       "zstd" compresses every chunk; None compresses nothing
    ocdbt             store all arrays in one OCDBT database instead of one directory each, for fewer files

    Example:

        >>> options = checkpoint.SaveOptions(dtype="bfloat16", threads=4)
        >>> checkpoint.save(params, "half", options=options)
        'half'
    """

    max_shard_bytes: int = 5_000_000_000
    dtype: str | None = None
    snapshot: Snapshot = "auto"
    staging_bytes: int = 2**30
    threads: int | None = None
    checksums: bool = False
    processes: tuple[int, ...] | None = None
    timeout: float | None = None
    reuse: bool | str | os.PathLike[str] | None = None
    # Not shown: they may hold secrets.
    store_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    max_chunk_bytes: int | None = None
    compression: Literal["zstd"] | None = None
    ocdbt: bool = False

    def __post_init__(self) -> None:
        for name in ("max_shard_bytes", "staging_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"SaveOptions.{name} must be positive, not {getattr(self, name)}")
        for name in ("threads", "max_chunk_bytes", "timeout"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"SaveOptions.{name} must be positive, not {value}")
        if not isinstance(self.reuse, (bool, str, os.PathLike, type(None))):
            raise TypeError(f"SaveOptions.reuse must be True, False or a path, not {self.reuse!r}")
        if self.reuse and (self.ocdbt or self.compression):
            raise ValueError("SaveOptions.reuse cannot be combined with ocdbt or compression")
        if self.compression not in (None, "zstd"):
            raise ValueError(f"SaveOptions.compression must be 'zstd' or None, not {self.compression!r}")
        if self.snapshot not in get_args(Snapshot):
            raise ValueError(
                f"SaveOptions.snapshot must be one of {get_args(Snapshot)}, not {self.snapshot!r}"
            )


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Set options of `load` and `Run.resume`.

    batch           number of arrays to read at a time, which limits the memory of a `callback`; None reads all together
    broadcast       read data that several processes need only once, a part by each process, and send it between the
                    devices: faster for large leaves on slow storage
    timeout         seconds that a process waits for the other processes of a load; None for 600. A load from a bucket
                    is also given up with TimeoutError after so many seconds in all; None: only its requests have
                    limits. `Run.resume` takes it from `Run(options=)`
    store_options   a dict of options of the bucket, which `store_options` lists. They hold for one load. `Run.resume`
                    takes them from `Run(options=)`
    cache           directory of this machine that keeps the bytes read from a bucket for the next load; None for the
                    one in the environment variable EFORMER_CACHE, False for none

    Example:

        >>> options = checkpoint.LoadOptions(batch=100, timeout=60)
        >>> state = checkpoint.load("run/step-100", options=options)
    """

    batch: int | None = None
    broadcast: bool = False
    timeout: float | None = None
    # They may hold secrets.
    store_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    cache: str | os.PathLike[str] | Literal[False] | None = None

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch <= 0:
            raise ValueError(
                f"a batch of {self.batch} arrays: LoadOptions.batch must be positive, or None for all arrays"
            )
        if self.timeout is not None and self.timeout <= 0:
            raise ValueError(f"LoadOptions.timeout must be positive, not {self.timeout}")


Options = TypeVar("Options", SaveOptions, LoadOptions)


def options_from(given: Options | Mapping[str, Any], kind: type[Options]) -> Options:
    """Return options that may be given as a dict of their fields. One error lists every unknown field."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"options must be {kind.__name__} or a dict of its fields, not {given!r}")
    known = [one.name for one in fields(kind)]
    unknown = [f"{name!r}{hint}" for name, hint in with_nearest(map(str, given.keys() - set(known)), known)]
    if unknown:
        raise TypeError(f"options has fields that {kind.__name__} lacks: {', '.join(sorted(unknown))}")
    return kind(**given)
