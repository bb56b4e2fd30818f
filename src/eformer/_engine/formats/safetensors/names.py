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
PRIVATE = ".private"  # ends the names of files for eformer alone, which hold more than the tree

_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_SHARD = re.compile(r"(?P<base>.*)-(?P<index>\d{5,})-of-(?P<total>\d{5,})", re.DOTALL)

# Suffixes of formats that `convert` writes, each with a hint for the caller.
_CONVERTED = {
    ".msgpack": "write msgpack with eformer.pytree's save_to_file, or convert a checkpoint to it",
    ".npz": "write npz by converting a checkpoint to it",
}
_NOT_WRITTEN = (
    *(".npy", ".eqx", ".pt", ".pth", ".bin", ".h5", ".hdf5", ".keras"),
    *(".pkl", ".pickle", ".gguf", ".onnx", ".json"),
)


def base_name(prefix: str) -> str:
    """Return the beginning of the file names of a tree: its prefix, or "model" without one, as Hugging Face has it."""
    return escape(prefix) if prefix else "model"


def shard_name(base: str, index: int, total: int) -> str:
    return f"{base}-{index:05d}-of-{total:05d}{SUFFIX}"


def plain_names(base: str, total: int) -> list[str]:
    if total == 1:
        return [base + SUFFIX]
    return [shard_name(base, index, total) for index in range(1, total + 1)]


def unique_names(plain: Sequence[str], save_id: str) -> list[str]:
    """Return the names of a save's files if the plain names are taken."""
    return [f"{name.removesuffix(SUFFIX)}.{save_id}{SUFFIX}" for name in plain]


def split_shard(stem: str) -> tuple[str, int, int] | None:
    """Return (base, index, total) of a name such as base-00001-of-00004, without suffix; None for other names."""
    match = _SHARD.fullmatch(stem)
    return (match["base"], int(match["index"]), int(match["total"])) if match else None


def tensor_names(leaves: Iterable[str]) -> dict[str, str]:
    """Return the tensor's name in a file for each leaf of a tree: its readable spelling, which other programs expect,
    unless that is ambiguous. The name that the format reserves is escaped.

    The names depend on all leaves of the tree: a process that writes some of them must still pass all.
    """
    names = readable_names(leaves)
    if "__metadata__" in names.values():
        names |= {leaf: "%5F_metadata__" for leaf, name in names.items() if name == "__metadata__"}
    return names


def box_name(tensor: str, box: Box | None) -> str:
    """Return the tensor's name in a file for a box of a leaf; None is the whole leaf."""
    if box is None:
        return tensor
    axes = ",".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))
    return f"{tensor}%[{axes}]"


# The metadata of a data file names its save: leftovers of a dead save differ from files of other programs by that.


def file_metadata(save_id: str, base: str) -> dict[str, str]:
    """Return the metadata of a data file. transformers requires `format`, the framework whose layout tensors follow."""
    return {"format": "pt", "eformer": f"{save_id} {base}"}


def is_marked(metadata: Mapping[str, str]) -> bool:
    return "eformer" in metadata


def save_of(metadata: Mapping[str, str]) -> str:
    """Return the id of the save that wrote a file; "" if eformer did not write it. The id is checked, because file
    names are made of it, and any program could have written the metadata."""
    save_id = metadata.get("eformer", "").partition(" ")[0]
    return save_id if _SAVE_ID.fullmatch(save_id) else ""


def own_name(name: str, save_id: str, *, is_private: bool) -> str:
    """Return the name of a file of this save that a later save keeps beside its own files: a plain name would stand for
    the whole checkpoint. The suffix of a private file hides it from other readers."""
    stem = name.removesuffix(PRIVATE).removesuffix(SUFFIX).removesuffix(f".{save_id}")
    return f"{stem}.{save_id}{SUFFIX}{PRIVATE if is_private else ''}"


def renumbered(name: str) -> str:
    """Return another name for a file that has an `own_name`. It still shows the save that the file is from."""
    stem, _, save_id = name.removesuffix(PRIVATE).removesuffix(SUFFIX).rpartition(".")
    shard = split_shard(stem)
    base, number = (shard[0], shard[1] + shard[2]) if shard else (stem, 1)
    return own_name(shard_name(base, number, number), save_id, is_private=name.endswith(PRIVATE))


def is_leftover(name: str, metadata: Mapping[str, str], bases: Container[str]) -> bool:
    """Tell whether a save of eformer gave the file this name, for a tree whose file names begin with one of `bases`.
    Return False for a renamed copy: it is not eformer's to remove."""
    save_id, base = save_of(metadata), metadata.get("eformer", "").partition(" ")[2]
    pattern = (
        rf"{re.escape(base)}(-\d{{5,}}-of-\d{{5,}})?(\.{re.escape(save_id)})?{re.escape(SUFFIX)}({PRIVATE})?"
    )
    return bool(save_id) and base in bases and re.fullmatch(pattern, name) is not None


def refuse_other_suffix(name: str, format: str) -> None:  # noqa: A002
    """Raise a ValueError if the name has the suffix of another format."""
    path = PurePath(name)
    suffix = path.suffix.lower()
    if suffix == SUFFIX and format != "safetensors":
        raise ValueError(
            f"{name!r} is the name of a safetensors file, but the format is {format!r}; pass the path of a directory"
        )
    if suffix not in (*_CONVERTED, *_NOT_WRITTEN):
        return
    hint = _CONVERTED.get(suffix, f"eformer does not write {suffix} files")
    raise ValueError(
        f"{name!r} is the name of a file, and a checkpoint is a directory or a {SUFFIX} file: save to "
        f"{path.stem!r} or {path.stem + SUFFIX!r}; {hint}"
    )
