"""The calls that an input is given to, and which of their errors are as documented."""

from __future__ import annotations

import errno
import io
import linecache
import shutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import eformer
from eformer import checkpoint, pytree
from eformer._engine.formats.msgpack import reader
from eformer._engine.formats.msgpack.reader import unpack_tree
from eformer._engine.formats.msgpack.writer import pack_tree
from eformer._engine.stores.checkpoints import remove_checkpoint
from eformer._engine.stores.locate import store_at
from eformer._engine.tools.view import LeafView
from eformer.errors import EformerError, FormatError
from eformer.serialization import (
    AsyncCheckpointManager,
    Checkpointer,
    find_latest_checkpoint,
    tree_deserialize_leaves,
)
from support.keys import PUBLIC

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = str(Path(eformer.__file__).parent)


class Position:
    """An iterator over data, as far as a run knows one."""

    def get_state(self) -> dict[str, Any]:
        return {"i": 3, "order": np.arange(4), "rest": [1.5, "a"]}

    def set_state(self, state: Any) -> None:
        self.state = state


class Doors:
    """The calls on the checkpoint at a path. `like` and `path_before` are of the case before it was changed."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.like: Any = None
        self.before = ""

    def clear(self) -> None:
        if self.out.exists():
            shutil.rmtree(self.out)
        self.out.mkdir()

    # ---------------------------------------------------------------------------------------- reading

    def inspect(self, path: str) -> None:
        record = checkpoint.inspect(path)
        for tree in record.trees.values():
            len(tree.leaves)

    def describe(self, path: str) -> None:
        """Ask for everything that a record can tell."""
        record = checkpoint.inspect(path)
        repr(record)
        for tree in record.trees.values():
            _told(lambda tree=tree: tree.metadata)
            _told(lambda tree=tree: tree.values)
        _told(lambda: record.metadata)

    def view(self, path: str) -> None:
        for prefix in checkpoint.inspect(path).trees:
            with checkpoint.open(path, prefix=prefix) as view:
                for name in list(view)[:20]:
                    _told(lambda name=name, view=view: _read(view[name]))

    def load(self, path: str) -> None:
        checkpoint.load(path)

    def load_signed(self, path: str) -> None:
        checkpoint.load(path, signed_by=PUBLIC)

    def verify_signed(self, path: str) -> None:
        checkpoint.verify(path, signed_by=PUBLIC)

    def load_each(self, path: str) -> None:
        for prefix in checkpoint.inspect(path).trees:
            _told(lambda prefix=prefix: checkpoint.load(path, prefix=prefix, mmap=True))

    def load_like(self, path: str) -> None:
        if self.like is not None:
            checkpoint.load(path, like=self.like)

    def load_part(self, path: str) -> None:
        if self.like is not None:
            checkpoint.load(path, like=self.like, partial=True, dtype="bf16", return_report=True)

    def dry_run(self, path: str) -> None:
        for prefix in checkpoint.inspect(path).trees:
            _told(lambda prefix=prefix: checkpoint.placement(path, mesh=_mesh(), prefix=prefix))

    def manager(self, path: str) -> None:
        AsyncCheckpointManager().load(path, _mesh(), validate=True)

    def manager_pytree(self, path: str) -> None:
        manager = AsyncCheckpointManager()
        for prefix in checkpoint.inspect(path).trees:
            if prefix:
                _told(lambda prefix=prefix: manager.load_pytree(path, _mesh(), prefix=prefix))
                _told(
                    lambda prefix=prefix: manager.load_pytree(
                        path, None, prefix=prefix, template=self.like, strict_shapes=False
                    )
                )

    def leaves(self, path: str) -> None:
        tree_deserialize_leaves(path, _mesh())

    def abstract(self, path: str) -> None:
        checkpoint.abstract(path)

    def verify(self, path: str) -> None:
        str(checkpoint.verify(path))

    def command(self, path: str) -> None:
        """Run `eformer verify`: the status says 0 only if the report does."""
        status = _command(["--debug", "verify", path, "--json"])
        if status not in (0, 1, 2):
            raise AssertionError(f"exit status {status}")

    def inspect_command(self, path: str) -> None:
        if (status := _command(["--debug", "inspect", path])) not in (0, 1, 2):
            raise AssertionError(f"exit status {status}")

    def diff(self, path: str) -> None:
        str(checkpoint.diff(self.before, path))

    def convert_to_msgpack(self, path: str) -> None:
        self._convert(path, "tree.msgpack", "msgpack")

    def convert_to_safetensors(self, path: str) -> None:
        self._convert(path, "out", "safetensors")

    def convert_to_arrays(self, path: str) -> None:
        self._convert(path, "out", "tensorstore")

    def convert_to_npz(self, path: str) -> None:
        self._convert(path, "a.npz", "npz")

    def _convert(self, path: str, name: str, to: Any) -> None:
        self.clear()
        try:
            checkpoint.convert(path, self.out / name, to=to, allow_missing=True)
        except Exception as error:
            if left := [str(one) for one in self.out.iterdir()]:
                raise AssertionError(f"a conversion that failed has left {left}") from None
            if not (isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG):
                raise  # else it has a prefix that no file can be called after

    # ------------------------------------------------------------------------------------ other doors

    def unpack(self, path: str) -> None:
        pytree.msgpack_restore(Path(path).read_bytes())

    def unpack_twice(self, path: str) -> None:
        """Read with and without a check of the framing first: both agree, and so does what is read after writing it."""
        data = Path(path).read_bytes()
        trees = [_unpacked(data, above) for above in (2**16, -1)]
        if (trees[0] is None) != (trees[1] is None):
            raise AssertionError("the two ways of reading disagree")
        if trees[0] is not None:
            first = _packed(trees[0])
            if _packed(unpack_tree(first)) != first:
                raise AssertionError("what was read is not what is read after writing it")

    def from_bytes(self, path: str) -> None:
        if self.like is not None:
            pytree.from_bytes(self.like, Path(path).read_bytes())

    def unpack_compressed(self, path: str) -> None:
        pytree.from_compressed_bytes(self.like or {}, Path(path).read_bytes())

    def steps(self, path: str) -> None:
        for step in checkpoint.steps(path):
            for name in ("saved_at", "reason", "metrics", "metadata", "nbytes"):
                _told(lambda name=name, step=step: getattr(step, name))
            step.problem()
        checkpoint.latest(path)

    def resume(self, path: str) -> None:
        keep = (checkpoint.Keep(last=1), checkpoint.Keep(best=1, by="loss"), checkpoint.Keep(hours=1))
        with checkpoint.Run(path, every=1, keep=keep, signals=()) as run:
            run.resume(like=self.like)
            run.after(3, {"w": 1.0})

    def resume_data(self, path: str) -> None:
        with checkpoint.Run(path, every=1, signals=()) as run:
            run.resume(like=self.like, data=Position())

    def resume_near(self, path: str) -> None:
        with checkpoint.Run(
            f"{path}/far", every=4, near=checkpoint.Near(f"{path}/near", every=1), signals=()
        ) as run:
            run.resume(like=self.like)
            run.after(5, {"w": 1.0})

    def latest(self, path: str) -> None:
        find_latest_checkpoint(path)
        Checkpointer(path, None, []).load_checkpoint(_mesh())

    def score(self, path: str) -> None:
        checkpoint.score(path, 2, {"loss": 0.5})

    def prune(self, path: str) -> None:
        str(checkpoint.prune(path, keep=1))

    def steps_command(self, path: str) -> None:
        _command(["--debug", "steps", path, "--json"])

    def save(self, path: str) -> None:
        checkpoint.save({"b": 1.0}, path, format="tensorstore", prefix="model")

    def save_other(self, path: str) -> None:
        checkpoint.save({"b": 1.0}, path, prefix="model")

    def remove(self, path: str) -> None:
        store, name = store_at(path).parent()
        remove_checkpoint(store, name)


READING = (
    "inspect", "describe", "view", "load", "load", "load_each", "load_like", "load_part", "abstract", "verify", "verify", "dry_run", "manager", "manager_pytree",
    "command", "inspect_command", "diff", "convert_to_msgpack", "convert_to_safetensors", "convert_to_arrays", "convert_to_npz",
)  # fmt: skip
SIGNED = ("load_signed", "verify_signed", "inspect", "verify")
MSGPACK = ("unpack", "unpack_twice", "from_bytes")
COMPRESSED = ("unpack_compressed",)
NEAR = ("resume_near",)
RUNS = (
    "latest",
    "steps",
    "steps_command",
    "resume",
    "resume_data",
    "score",
    "prune",
    "load",
    "inspect",
    "verify",
)
WRITING = ("save", "save", "save_other")


@cache
def _mesh() -> Any:
    import jax

    return jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])


def _told(work: Callable[[], Any]) -> None:
    """Do it; an error that is documented does not keep the rest from being tried."""
    try:
        work()
    except Exception as error:
        if not is_documented(error):
            raise


def _read(leaf: Any) -> None:
    if isinstance(leaf, LeafView):
        leaf[...]
        if leaf.shape:
            leaf[:1]


def _unpacked(data: bytes, check_framing_above: int) -> Any:
    before, reader._CHECK_FRAMING_ABOVE = reader._CHECK_FRAMING_ABOVE, check_framing_above
    try:
        return unpack_tree(data)
    except FormatError:
        return None
    finally:
        reader._CHECK_FRAMING_ABOVE = before


def _packed(tree: Any) -> bytes:
    data = io.BytesIO()
    pack_tree(tree, data.write, max_chunk=64, sort_keys=False)
    return data.getvalue()


def _command(arguments: list[str]) -> int:
    from click.testing import CliRunner

    from eformer.cli.commands import main

    done = CliRunner().invoke(main, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return int(done.exit_code)


# ----------------------------------------------------------------------------------------------- errors


def is_documented(error: BaseException) -> bool:
    """Tell whether a caller can expect this error: one of ours, or a ValueError or OSError with our own text."""
    if isinstance(error, EformerError):
        return True
    if isinstance(error, (UnicodeError, AssertionError)):
        return False
    if isinstance(error, (ValueError, OSError, MemoryError)):
        return _is_raised_by_us(error)
    return False


def _is_raised_by_us(error: BaseException) -> bool:
    """Tell whether the last line of the traceback is a `raise` in eformer."""
    *_, (filename, number, _) = [("", 0, ""), *_frames(error)]
    return filename.startswith(SOURCE) and linecache.getline(filename, number).strip().startswith("raise")


def signature(error: BaseException) -> str:
    """Name an error by its type and by the last line of ours that it went through."""
    frames = [frame for frame in _frames(error) if frame[0].startswith(SOURCE)]
    if not frames:
        return type(error).__name__
    filename, number, function = frames[-1]
    return f"{type(error).__name__} in {filename[len(SOURCE) + 1 : -3]}:{function}:{number}"


def _frames(error: BaseException) -> list[tuple[str, int, str]]:
    """List file, line and function of a traceback, which the module of that name does ten times as slowly."""
    found, at = [], error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        found.append((code.co_filename, at.tb_lineno, code.co_name))
        at = at.tb_next
    return found
