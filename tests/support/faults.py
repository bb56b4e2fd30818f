"""Inject faults: kill saves, fail calls and change bytes. Disks that fill up and lose power are in `disks`.

Run as a program, this module is the server behind `Forks`.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import traceback
import zlib
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import jax
import ml_dtypes
import numpy as np

from eformer._engine.processes import hosts as _hosts
from eformer._engine.saving import commit as _record
from eformer._engine.saving import write as _writing
from eformer._engine.stores import new_files as many
from eformer.checkpoint import SaveOptions, load, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Hook = Callable[[int, str], object]

T = TypeVar("T")

# Faults strike every STRIDE-th call of a save, and each of the last ones. `make faults` strikes all calls.
STRIDE = int(os.environ.get("EFORMER_FAULTS_STRIDE", "32"))

NOTHING, OLD, NEW, NEXT = 0, 1, 2, 3
BESIDE = 9


# ---------------------------------------------------------------------------------------- checkpoints


def tree(generation: int) -> dict[str, Any]:
    """Return a tree, of numpy alone, that differs from other generations in structure, shapes and every array."""
    rng = np.random.default_rng(generation)
    normal = rng.standard_normal
    return {
        f"added in {generation}": normal(generation),
        "generation": generation,
        "layers": [
            {"b": normal(5).astype(ml_dtypes.bfloat16), "w": normal((56 + generation % 4, 16), np.float32)}
            for _ in range(4)
        ],
        "opt": (None, "adam", rng.integers(0, 255, 7, np.uint8), np.empty((0, generation), np.float32)),
    }  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A way to lay out a checkpoint on disk, alone in a folder, which all methods take."""

    title: str
    name: str = "run"
    prefix: str | None = None
    max_shard_bytes: int = 2**30
    piece_bytes: int = 2**20
    format: str = "safetensors"
    ocdbt: bool = False
    compression: str | None = None
    few: int = 32  # up to this many files are synced one by one
    reuse: bool = False  # if so, all generations share some leaves

    def __str__(self) -> str:
        return self.title

    def path(self, folder: Path) -> Path:
        return folder / self.name

    def begin(self, folder: Path) -> Path:
        """Make the folder as it is before the first save, with the other tree if the layout has a prefix."""
        folder.mkdir()
        if self.prefix:
            self.save_beside(folder)
        return folder

    def tree(self, generation: int) -> dict[str, Any]:
        frozen = {"frozen": [np.arange(2000.0 + n) for n in range(2)]} if self.reuse else {}
        return {**tree(generation), **frozen}

    def save_beside(self, folder: Path) -> None:
        save(tree(BESIDE), self.path(folder), format=self.format)

    def save(self, folder: Path, generation: int, how: Callable[..., Any] = save) -> Any:
        options = SaveOptions(
            max_shard_bytes=self.max_shard_bytes,
            threads=2,
            ocdbt=self.ocdbt,
            compression=self.compression,
            reuse=self.reuse,
        )
        with (
            mock.patch.object(_record, "PIECE_BYTES", self.piece_bytes),
            mock.patch.object(many, "_FEW", self.few),
            mock.patch.object(_writing, "_WRITE_BYTES", self.piece_bytes),
        ):
            return how(
                self.tree(generation),
                self.path(folder),
                prefix=self.prefix,
                format=self.format,
                options=options,
            )

    def generation(self, folder: Path) -> int:
        """Return the generation that `load` finds; check that it is complete, and that the other tree is untouched."""
        from support.trees import assert_same  # late: forked processes do not need it

        if self.prefix:
            assert_same(load(self.path(folder), prefix=""), tree(BESIDE))
        try:
            found = load(self.path(folder), prefix=self.prefix)
        except (FileNotFoundError, ValueError) as error:
            if not re.search("no checkpoint at|holds no checkpoint|has no prefix", str(error)):
                raise
            return NOTHING
        generation = found.get("generation", NOTHING)
        assert_same(found, self.tree(generation))
        return generation

    def files(self, folder: Path) -> list[Path]:
        return [file for file in sorted(folder.rglob("*")) if file.is_file()]

    def check_tidy(self, folder: Path) -> None:
        """Check that the folder has only files that the manifest names, and an index where other readers need one."""
        path = self.path(folder)
        assert os.listdir(folder) == [self.name]
        if path.is_file():
            return
        if self.format == "tensorstore":
            self.check_tidy_arrays(path)
            return
        trees = json.loads((path / "manifest.json").read_bytes())["trees"]
        expected = {"manifest.json"}
        for prefix, entry in trees.items():
            base, names = prefix or "model", {file["name"] for file in entry["files"]}
            expected |= names
            if names != {f"{base}.safetensors"} and not any(name.endswith(".private") for name in names):
                index = f"{base}.safetensors.index.json"
                expected.add(index)
                assert set(json.loads((path / index).read_bytes())["weight_map"].values()) == names
        assert set(os.listdir(path)) == expected

    def check_tidy_arrays(self, path: Path) -> None:
        trees = json.loads((path / "tensorstore_index.json").read_bytes())["eformer"]["trees"]
        roots = [path / entry.get("root", "") for entry in trees.values()]
        there = {file for file in path.rglob("*") if file.is_file()}
        if self.ocdbt:
            there = {file for file in there if not any(root in file.parents for root in roots)}
            assert there == {path / "tensorstore_index.json"}
            return
        named = {
            root / file["name"]
            for root, entry in zip(roots, trees.values(), strict=True)
            for file in entry["files"]
        }
        assert there == named | {path / "tensorstore_index.json"}
        assert {d for d in path.rglob("*") if d.is_dir()} <= {d for file in named for d in file.parents}


# The tree is small, but its pieces are even smaller: a save takes more than sixty calls.
LAYOUTS = [
    Layout("one data file", piece_bytes=320),
    Layout("several data files", max_shard_bytes=4096, piece_bytes=640),
    Layout("single file", name="run.safetensors", piece_bytes=256),
    Layout("second prefix", prefix="ema", piece_bytes=320),
    Layout("arrays", format="tensorstore", piece_bytes=320),
    Layout("arrays, synced at once", format="tensorstore", prefix="ema", few=1, compression="zstd"),
    Layout("kept data files", reuse=True, piece_bytes=320),
    Layout("kept arrays", reuse=True, format="tensorstore", piece_bytes=2048),
]

# TensorStore writes it with threads of its own, so there are no calls to hook, and it cannot be forked.
DATABASE = Layout("database", format="tensorstore", ocdbt=True, piece_bytes=320)


def coarse(layout: Layout) -> Layout:
    """Return the same layout with fewer pieces, for tests of the calls that do not write."""
    return replace(layout, piece_bytes=2048)


@dataclass(frozen=True)
class Scene:
    """A folder that can be reset to its first state any number of times."""

    layout: Layout
    folder: Path
    template: Path

    @classmethod
    def of(cls, layout: Layout, place: Path, generation: int = OLD) -> Scene:
        template = layout.begin(place / "template")
        if generation:
            layout.save(template, generation)
        return cls(layout, place / "folder", template)

    def reset(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.template, self.folder)

    @property
    def generation(self) -> int:
        return self.layout.generation(self.folder)

    def check_no_half(self, generation: int) -> None:
        """Check that the name of a checkpoint is there only if the checkpoint is: for readers that list names."""
        if not self.layout.prefix:
            assert os.path.lexists(self.layout.path(self.folder)) == (generation != NOTHING)

    def check_next_save(self) -> None:
        """Check that an undisturbed save works, and removes everything that the disturbed one left."""
        self.layout.save(self.folder, NEXT)
        assert self.generation == NEXT
        self.layout.check_tidy(self.folder)


@contextmanager
def noted(what: object) -> Iterator[None]:
    """Add a note to errors of the block that says in which of many rounds they were raised."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"this was {what}")
        raise


# --------------------------------------------------------------------------------------------- calls

STATE_CHANGING = (
    "open", "write", "pwrite", "pwritev", "truncate", "ftruncate", "fsync", "fdatasync", "rename", "replace", "unlink",
    "remove", "mkdir", "rmdir", "chmod", "fchmod", "link", "symlink",
)  # fmt: skip


def _nothing(number: int, name: str) -> None:
    pass


@contextmanager
def hooked(before: Hook = _nothing, after: Hook = _nothing) -> Iterator[None]:
    """Call `before(number, name)` and `after(number, name)` around each call of `os` that changes a disk.

    The numbers count from 1. If `before` raises, the error replaces the call.
    """
    numbers = itertools.count(1)

    def around(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return call(*args, **kwargs)
            number = next(numbers)
            before(number, name)
            try:
                return call(*args, **kwargs)
            finally:
                after(number, name)

        return hook

    calls = {name: getattr(os, name) for name in STATE_CHANGING if hasattr(os, name)}
    hooks = {name: around(name, call) for name, call in calls.items()}
    with mock.patch.object(many, "_syncfs", around("syncfs", many._syncfs)):
        vars(os).update(hooks)
        try:
            yield
        finally:
            vars(os).update(calls)


def calls_of(action: Callable[[], object]) -> list[str]:
    """Return the names of the calls that the action makes."""
    names: list[str] = []
    with hooked(before=lambda number, name: names.append(name)):
        action()
    return names


@dataclass(frozen=True)
class Failure:
    """A save in which call number `number` failed, or all from there on; `error` is its error, if it raised one."""

    number: int
    call: str
    error: BaseException | None


def struck(strike: Callable[[int], T | None], which: object, stride: int = STRIDE) -> Iterator[T]:
    """Strike at one call after another, until none is left. Where to begin depends on `which`, so that different tests
    strike at different calls."""
    at = 1 + zlib.crc32(str(which).encode()) % min(stride, 8)
    while (outcome := strike(at)) is not None or stride > 1:
        if outcome is None:
            at, stride = at - stride, 1  # each call after the last one that was struck
        else:
            yield outcome
        at += stride


def failures(scene: Scene, fault: BaseException, *, lasting: bool = False) -> Iterator[Failure]:
    """Save NEW repeatedly, each time with another call that fails. Files can still be removed from a full disk."""

    def strike(at: int) -> Failure | None:
        failed: list[str] = []

        def fail(number: int, name: str) -> None:
            if number == at or (lasting and number > at and name not in ("unlink", "rmdir")):
                failed.append(name)
                raise type(fault)(*fault.args)

        scene.reset()
        error = None
        with hooked(before=fail):
            try:
                scene.layout.save(scene.folder, NEW)
            except type(fault) as caught:
                error = caught
        return Failure(at, failed[0], error) if failed else None

    yield from struck(strike, (scene.layout, fault, lasting))


# --------------------------------------------------------------------------------------------- kills


@dataclass(frozen=True)
class Death:
    """A save that was killed before or after its call number `number`."""

    number: int
    call: str
    moment: str


class Forks:
    """Processes for saves that are killed: forks of a server that has imported everything and started no threads."""

    def __init__(self) -> None:
        one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        self._server = subprocess.Popen(
            [sys.executable, "-m", "support.faults"],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | one_thread,
        )

    def close(self) -> None:
        self._server.communicate()

    def save(self, layout: Layout, folder: Path, generation: int, at: int, moment: str) -> Death | None:
        """Save, and kill the process at call number `at`. Return None if the save makes fewer calls."""
        assert self._server.stdin
        assert self._server.stdout
        request = [type(layout).__name__, asdict(layout), str(folder), generation, at, moment]
        print(json.dumps(request), file=self._server.stdin, flush=True)
        status, said = json.loads(self._server.stdout.readline())
        assert status in (0, signal.SIGKILL), said
        return Death(at, said, moment) if status else None

    def deaths(self, scene: Scene, moment: str) -> Iterator[Death]:
        """Save NEW repeatedly, each time killed at another call."""

        def strike(at: int) -> Death | None:
            scene.reset()
            return self.save(scene.layout, scene.folder, NEW, at, moment)

        yield from struck(strike, (scene.layout, moment))


def prepare_to_fork() -> None:
    """Spare forks the start of a backend of JAX, to learn that they are alone, and garbage in shared memory."""
    _hosts.current = lambda *_: _hosts.Hosts()
    _hosts.is_alone = lambda: True
    jax.process_index, jax.process_count = lambda: 0, lambda: 1
    gc.freeze()


def serve() -> None:
    prepare_to_fork()
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            with open(writer, "wb", buffering=0) as report:
                _save_and_die(report, *json.loads(line))
        os.close(writer)
        _, status = os.waitpid(child, 0)
        with open(reader) as said:
            print(json.dumps([status, said.read()]), flush=True)  # noqa: T201


def _save_and_die(
    report: Any, kind: str, layout: dict[str, Any], folder: str, generation: int, at: int, moment: str
) -> None:
    def strike(number: int, name: str) -> None:
        if number == at:
            report.write(name.encode())  # not os.write, which is hooked
            os.kill(os.getpid(), signal.SIGKILL)

    kinds = {one.__name__: one for one in (Layout, *Layout.__subclasses__())}
    try:
        with hooked(**{moment: strike}):
            kinds[kind](**layout).save(Path(folder), generation)
        os._exit(0)
    except Exception:  # noqa: BLE001  reported to the tests
        report.write(traceback.format_exc().encode())
    finally:
        os._exit(1)


# ------------------------------------------------------------------------------------------- damages


@contextmanager
def damaged(file: Path, damage: Callable[[bytes], bytes | None]) -> Iterator[None]:
    """Replace the bytes of a file by `damage(bytes)`, or remove it if that is None; restore it after the block."""
    sound = file.read_bytes()
    changed = damage(sound)
    try:
        if changed is None:
            file.unlink()
        else:
            file.write_bytes(changed)
        yield
    finally:
        file.write_bytes(sound)


def flip(data: bytes, bit: int) -> bytes:
    at = bit // 8
    return data[:at] + bytes([data[at] ^ 1 << bit % 8]) + data[at + 1 :]


def zero(data: bytes, start: int, nbytes: int) -> bytes:
    part = data[start : start + nbytes]
    return data[:start] + bytes(len(part)) + data[start + nbytes :]


if __name__ == "__main__":
    from support import faults, run_faults  # noqa: F401  by their names, as tests know them

    faults.serve()
