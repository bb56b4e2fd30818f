"""How a save is carried out, as one value."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

Snapshot = Literal["auto", "device", "host"]


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """What `save` and `save_async` may be told beyond the tree and the path.

    max_shard_bytes   a data file of a directory holds at most this much, unless one leaf alone is larger
    dtype             floating leaves are stored as this dtype; None stores them as they are
    snapshot          where `save_async` keeps accelerator arrays that the caller may donate at once: in copies
                      on the "device", or in "host" memory; "auto" takes the device if it has room
    staging_bytes     at most this much host memory holds bytes on their way from an accelerator to the disk
    threads           that write; None for one a core, 2 to 8
    checksums         records the SHA-256 of every array, beside the digests that are always there; of several
                      processes, of those arrays that one of them has whole
    processes         that save the tree together, by number; None for all there are. One alone saves what it has
                      without asking the others
    timeout           seconds that a process waits for the others at each of the two meetings of a save
    reuse             leaves that an earlier checkpoint holds already, by their digests, are not written again: True
                      for the one that this save replaces, or the path of another on the same file system. Its files are
                      linked, so that either may be deleted. The bytes on the disk are trusted, `verify` checks them

    and for the format "tensorstore" alone:

    max_chunk_bytes   a chunk of an array is a shard, or as many of its rows as take at most this much; None for
                      1 GiB, or 8 MiB of what is compressed or goes into a database
    compression       "zstd" compresses every chunk
    ocdbt             puts the arrays into one OCDBT database instead of a directory each: few files
    """

    max_shard_bytes: int = 5_000_000_000
    dtype: str | None = None
    snapshot: Snapshot = "auto"
    staging_bytes: int = 2**30
    threads: int | None = None
    checksums: bool = False
    processes: tuple[int, ...] | None = None
    timeout: float = 600.0
    reuse: bool | str | os.PathLike[str] = False
    max_chunk_bytes: int | None = None
    compression: Literal["zstd"] | None = None
    ocdbt: bool = False

    def __post_init__(self) -> None:
        for name in ("max_shard_bytes", "staging_bytes", "timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"SaveOptions.{name} must be positive, not {getattr(self, name)}")
        for name in ("threads", "max_chunk_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"SaveOptions.{name} must be positive, not {value}")
        if not isinstance(self.reuse, (bool, str, os.PathLike)):
            raise TypeError(f"SaveOptions.reuse is {self.reuse!r}, neither True nor a path")
        if self.compression not in (None, "zstd"):
            raise ValueError(f"SaveOptions.compression is {self.compression!r}, not 'zstd' or None")
        if self.snapshot not in get_args(Snapshot):
            raise ValueError(f"SaveOptions.snapshot is {self.snapshot!r}, not one of {get_args(Snapshot)}")
