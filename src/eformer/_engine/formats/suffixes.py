"""Refuse to save under a name that other programs take for a file of their own format."""

from __future__ import annotations

from pathlib import PurePath

from eformer._engine.formats.safetensors.names import SUFFIX

# Written by `convert`, with what to say of each.
_CONVERTED = {
    ".msgpack": "write msgpack with eformer.pytree's save_to_file, or convert a checkpoint to it",
    ".npz": "write npz by converting a checkpoint to it",
}
_NOT_WRITTEN = (
    *(".npy", ".eqx", ".pt", ".pth", ".bin", ".h5", ".hdf5", ".keras"),
    *(".pkl", ".pickle", ".gguf", ".onnx", ".json"),
)


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
