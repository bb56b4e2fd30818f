"""Name the files of a checkpoint, recognise those that eformer wrote, and refuse names of other formats."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING

from eformer._engine.record.names import escape, readable_names

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from eformer._engine.record.boxes import Box

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PRIVATE = ".private"  # for eformer alone: it holds more than the tree

_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_SHARD = re.compile(r"(?P<base>.*)-(?P<index>\d{5,})-of-(?P<total>\d{5,})", re.DOTALL)

# Suffixes of other formats: those that `convert` writes, with what to say of each, and others.
_CONVERTED = {
    ".msgpack": "write msgpack with eformer.pytree's save_to_file, or convert a checkpoint to it",
    ".npz": "write npz by converting a checkpoint to it",
}
_NOT_WRITTEN = (
    *(".npy", ".eqx", ".pt", ".pth", ".bin", ".h5", ".hdf5", ".keras"),
    *(".pkl", ".pickle", ".gguf", ".onnx", ".json"),
)


def base_name(prefix: str) -> str:
    """Return the beginning of the file names of a tree: the prefix, or without one the name that Hugging Face uses."""
    return escape(prefix) if prefix else "model"


def shard_name(base: str, index: int, total: int) -> str:
    return f"{base}-{index:05d}-of-{total:05d}{SUFFIX}"


def plain_names(base: str, total: int) -> list[str]:
    if total == 1:
        return [base + SUFFIX]
    return [shard_name(base, index, total) for index in range(1, total + 1)]


def unique_names(plain: Sequence[str], save_id: str) -> list[str]:
    """Return the names for a save when the plain ones are taken."""
    return [f"{name.removesuffix(SUFFIX)}.{save_id}{SUFFIX}" for name in plain]


def split_shard(stem: str) -> tuple[str, int, int] | None:
    """Return (base, index, total) of a name like base-00001-of-00004, without suffix; None for other names."""
    match = _SHARD.fullmatch(stem)
    return (match["base"], int(match["index"]), int(match["total"])) if match else None


def tensor_names(leaves: Iterable[str]) -> dict[str, str]:
    """Return what each leaf of a tree is called in a file: its readable spelling, which other programs expect, unless
    that is ambiguous. The name that the format reserves is escaped.

    It depends on all leaves of the tree: processes that write some of them must still pass all.
    """
    names = readable_names(leaves)
    if "__metadata__" in names.values():
        names |= {leaf: "%5F_metadata__" for leaf, name in names.items() if name == "__metadata__"}
    return names


def region_name(tensor: str, region: Box | None) -> str:
    """Return what a region of a leaf is called in a file; None is the whole leaf."""
    if region is None:
        return tensor
    ranges = ",".join(f"{a}:{b}" for a, b in zip(region.start, region.stop, strict=True))
    return f"{tensor}%[{ranges}]"


# The metadata of a data file names the save, so that leftovers of a dead save can be told from files of other programs.


def marks(save_id: str, base: str) -> dict[str, str]:
    """Return the metadata of a data file. transformers requires `format`, the framework whose layout tensors follow."""
    return {"format": "pt", "eformer": f"{save_id} {base}"}


def is_marked(metadata: Mapping[str, str]) -> bool:
    return "eformer" in metadata


def save_of(metadata: Mapping[str, str]) -> str:
    """Return the id of the save that wrote a file; "" if eformer did not. It is checked, because file names are made of
    it, and any program could have written the file."""
    save_id = metadata.get("eformer", "").partition(" ")[0]
    return save_id if _SAVE_ID.fullmatch(save_id) else ""


def own_name(name: str, save_id: str, *, is_private: bool) -> str:
    """Return the name of a file of this save when it is kept beside those of others: a plain name would stand for the
    whole checkpoint. A private file is hidden from other readers."""
    stem = name.removesuffix(PRIVATE).removesuffix(SUFFIX).removesuffix(f".{save_id}")
    return f"{stem}.{save_id}{SUFFIX}{PRIVATE if is_private else ''}"


def renumbered(name: str) -> str:
    """Return another name for a file that has an `own_name`, which is still recognised as one of that save."""
    stem, _, save_id = name.removesuffix(PRIVATE).removesuffix(SUFFIX).rpartition(".")
    shard = split_shard(stem)
    base, number = (shard[0], shard[1] + shard[2]) if shard else (stem, 1)
    return own_name(shard_name(base, number, number), save_id, is_private=name.endswith(PRIVATE))


def is_leftover(name: str, metadata: Mapping[str, str], bases: Container[str]) -> bool:
    """Tell whether a save of eformer gave the file this name, for a tree whose files begin with one of `bases`. That is
    not true of a renamed copy."""
    save_id, base = save_of(metadata), metadata.get("eformer", "").partition(" ")[2]
    pattern = (
        rf"{re.escape(base)}(-\d{{5,}}-of-\d{{5,}})?(\.{re.escape(save_id)})?{re.escape(SUFFIX)}({PRIVATE})?"
    )
    return bool(save_id) and base in bases and re.fullmatch(pattern, name) is not None


def refuse_other_suffix(name: str, format: str) -> None:  # noqa: A002
    """Raise a ValueError if a checkpoint of this format must not have this name: that of a file of another kind."""
    path = PurePath(name)
    suffix = path.suffix.lower()
    if suffix == SUFFIX and format != "safetensors":
        raise ValueError(f"{name!r} is the name of a safetensors file, and the format is {format!r}")
    if suffix not in (*_CONVERTED, *_NOT_WRITTEN):
        return
    hint = _CONVERTED.get(suffix, f"eformer does not write {suffix} files")
    raise ValueError(
        f"{name!r} is the name of a file, and a checkpoint is a directory or a {SUFFIX} file: save to "
        f"{path.stem!r} or {path.stem + SUFFIX!r}; {hint}"
    )
