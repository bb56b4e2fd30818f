"""Change the bytes of files as a failing disk or another program would."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from eformer._engine.record.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def change(file: Path, how: Callable[[bytearray], bytes | None]) -> None:
    """Write the bytes that `how` returns for those of the file or, if it returns None, has changed in place."""
    data = bytearray(file.read_bytes())
    changed = how(data)
    file.write_bytes(data if changed is None else changed)


def flip(file: Path, at: int, mask: int = 1) -> None:
    """Flip bits of the byte at a position, which may be counted from the end."""

    def flipped(data: bytearray) -> None:
        data[at] ^= mask

    change(file, flipped)


def newer_version(step: Path) -> None:
    """Let the manifest of a checkpoint be of a later version."""
    file = step / "manifest.json"
    manifest = Manifest.from_json(file.read_bytes(), "")
    file.write_bytes(msgspec.structs.replace(manifest, version=99).to_json())
