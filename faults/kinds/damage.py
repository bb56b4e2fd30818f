"""Bytes that change at rest: a load gives what was saved, or refuses."""

from __future__ import annotations

import random
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from cases import OLD, Outcome

from kinds.kind import Bench, Kind, judged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from subjects import Scene


class Damage(Kind):
    for_peers = True

    def damages(self, files: list[Path], rng: random.Random) -> dict[Path, bytes | None]:
        """Return the new bytes of each file that changes; None if it is gone."""
        raise NotImplementedError

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        scene, rng = bench.scene(layout), random.Random(seed)
        files = scene.subject.files(scene.template)
        changes = self.damages(files, rng)
        what = ", ".join(str(file.relative_to(scene.template)) for file in changes)
        with ExitStack() as stack:
            for file, data in changes.items():
                stack.enter_context(_replaced(file, data))
            outcome = judged(scene.subject, scene.template, is_damaged=True)
            if not outcome.is_failure and self.is_unnoticed(scene, list(changes)):
                return Outcome("wrong", f"{what}: verify finds nothing")
        return Outcome(outcome.word, f"{what}: {outcome.note}") if outcome.word != OLD else outcome

    def is_unnoticed(self, scene: Scene, files: list[Path]) -> bool:
        """Tell whether `verify` misses it: of a database and of files for other programs not every byte counts."""
        is_for_others = any(file.name.endswith(".index.json") for file in files)
        is_database = any(scene.template.rglob("manifest.ocdbt"))
        return not is_for_others and not is_database and scene.subject.verify(scene.template)


class Flips(Damage):
    name = "flips"
    title = "one bit of one file is flipped"

    def damages(self, files: list[Path], rng: random.Random) -> dict[Path, bytes | None]:
        """Half of them anywhere in all bytes, half in a file at random, whose size does not count."""
        sizes = [file.stat().st_size for file in files]
        weights = sizes if rng.random() < 0.5 else [int(size > 0) for size in sizes]
        (file,) = rng.choices(files, weights)
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return {file: bytes(data)}


class Edits(Damage):
    name = "edits"
    title = "a page is zeroed, a file is cut, longer, missing, or swapped with another"

    def damages(self, files: list[Path], rng: random.Random) -> dict[Path, bytes | None]:
        while True:
            file, other = rng.choice(files), rng.choice(files)
            data, edit = file.read_bytes(), rng.choice(["page", "cut", "longer", "missing", "swapped"])
            changes: dict[Path, bytes | None] = {}
            if edit == "page":
                start = rng.randrange(0, len(data) + 1, 4096)
                changes[file] = data[:start] + bytes(len(data[start : start + 4096])) + data[start + 4096 :]
            elif edit == "cut":
                changes[file] = data[: rng.randrange(len(data) + 1)]
            elif edit == "longer":
                changes[file] = data + rng.choice([b"\0", b" ", b"\xff", data[:1]]) * rng.choice(
                    [1, 64, 4096]
                )
            elif edit == "missing":
                changes[file] = None
            else:
                changes = {file: other.read_bytes(), other: data}
            if any(file.read_bytes() != changed for file, changed in changes.items()):
                return changes


@contextmanager
def _replaced(file: Path, data: bytes | None) -> Iterator[None]:
    sound = file.read_bytes()
    try:
        if data is None:
            file.unlink()
        else:
            file.write_bytes(data)
        yield
    finally:
        file.write_bytes(sound)
