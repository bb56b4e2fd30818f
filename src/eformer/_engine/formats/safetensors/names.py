"""What the files of a checkpoint are called, and which of them are ours."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from eformer._engine.record.names import escape

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from eformer._engine.record.regions import Region

MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PRIVATE = ".private"  # what only we should read: there is more in it than belongs to the tree

_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_SHARD = re.compile(r"(?P<base>.*)-(?P<index>\d{5,})-of-(?P<total>\d{5,})", re.DOTALL)


def base_name(prefix: str) -> str:
    """What the files of a tree begin with: the name that Hugging Face looks for, unless a prefix was given."""
    return escape(prefix) if prefix else "model"


def shard_name(base: str, index: int, total: int) -> str:
    return f"{base}-{index:05d}-of-{total:05d}{SUFFIX}"


def plain_names(base: str, total: int) -> list[str]:
    if total == 1:
        return [base + SUFFIX]
    return [shard_name(base, index, total) for index in range(1, total + 1)]


def unique_names(plain: Sequence[str], save_id: str) -> list[str]:
    """The names of a save that finds the plain ones taken."""
    return [f"{name.removesuffix(SUFFIX)}.{save_id}{SUFFIX}" for name in plain]


def split_shard(stem: str) -> tuple[str, int, int] | None:
    """(base, index, total) of a name like base-00001-of-00004, without its suffix."""
    match = _SHARD.fullmatch(stem)
    return (match["base"], int(match["index"]), int(match["total"])) if match else None


def tensor_name(leaf: str, region: Region | None) -> str:
    """What a leaf is called in a file: a name that the format reserves, and parts of a leaf, are called something
    else."""
    name = leaf if leaf != "__metadata__" else "%5F_metadata__"
    if region is None:
        return name
    ranges = ",".join(f"{a}:{b}" for a, b in zip(region.start, region.stop, strict=True))
    return f"{name}%[{ranges}]"


# A data file says in its metadata who wrote it, so that what a dead save left can be told from what is not ours.


def marks(save_id: str, base: str) -> dict[str, str]:
    """`format` is what transformers insists on; it names the framework whose layout a tensor follows."""
    return {"format": "pt", "eformer": f"{save_id} {base}"}


def is_marked(metadata: Mapping[str, str]) -> bool:
    return "eformer" in metadata


def save_of(metadata: Mapping[str, str]) -> str:
    """Which save wrote a file; nothing for one that is not ours. Names are made of it: whoever wrote the file could
    have written anything."""
    save_id = metadata.get("eformer", "").partition(" ")[0]
    return save_id if _SAVE_ID.fullmatch(save_id) else ""


def own_name(name: str, save_id: str, *, is_private: bool) -> str:
    """The name that a file of this save has when it is kept beside others: the plain one would mean all there is. What
    was private stays so."""
    is_private = is_private or name.endswith(PRIVATE)
    stem = name.removesuffix(PRIVATE).removesuffix(SUFFIX).removesuffix(f".{save_id}")
    return f"{stem}.{save_id}{SUFFIX}{PRIVATE if is_private else ''}"


def renumbered(name: str) -> str:
    """Another name for a file that has an `own_name`, by which it is still known as one of that save."""
    stem, _, save_id = name.removesuffix(PRIVATE).removesuffix(SUFFIX).rpartition(".")
    shard = split_shard(stem)
    base, number = (shard[0], shard[1] + shard[2]) if shard else (stem, 1)
    return own_name(shard_name(base, number, number), save_id, is_private=name.endswith(PRIVATE))


def is_leftover(name: str, metadata: Mapping[str, str], bases: Container[str]) -> bool:
    """Whether the file was put under this name by a save of ours, of a tree whose files begin with one of `bases`. A
    renamed copy was not."""
    save_id, base = save_of(metadata), metadata.get("eformer", "").partition(" ")[2]
    pattern = (
        rf"{re.escape(base)}(-\d{{5,}}-of-\d{{5,}})?(\.{re.escape(save_id)})?{re.escape(SUFFIX)}({PRIVATE})?"
    )
    return bool(save_id) and base in bases and re.fullmatch(pattern, name) is not None
