"""Let saves to buckets die between any two of their requests, and let others run there.

Requests are hooked at one place. A process dies either really, by SIGKILL, which needs a server; or every request that
it would make from then on fails, which is all that a bucket notices of a death.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from eformer import checkpoint
from eformer._engine.saving import commit as record
from eformer._engine.stores import bucket, leases
from eformer._engine.stores import objects as requests
from eformer._engine.stores.bucket import BucketUpload
from eformer._engine.stores.leases import Leases
from eformer._engine.stores.objects import Objects
from eformer._engine.tasks.turns import Turn
from eformer.checkpoint import SaveOptions, load, save
from eformer.errors import LeaseLostError
from support.buckets import around
from support.faults import BESIDE, NEW, NEXT, NOTHING, OLD, tree
from support.trees import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from eformer._engine.stores.base import Commit

    Hook = Callable[[str, str], object]

STRIDE = int(os.environ.get("EFORMER_FAULTS_STRIDE", "64"))  # requests between two faults

LIVE, EXPIRED = leases.LEASE, -2.0  # whole seconds are all that servers tell

_numbers = itertools.count()


def new_url() -> str:
    return f"memory://faults-{os.getpid()}-{next(_numbers)}/x"


class Died(BaseException):
    """A process that is dead by now."""


# ------------------------------------------------------------------------------------------- requests


@contextmanager
def hooked(before: Hook) -> Iterator[None]:
    """Call `before(operation, key)` before each request: each object that is written or removed, each part of a large
    one. If it raises, nothing is sent."""
    request, put, delete, stream = Objects._request, Objects._put, Objects._delete, Objects.stream

    def requested(self: Objects, operation: str, key: str, work: Any) -> Any:
        if operation not in ("write", "delete"):
            before(operation, key)
        return request(self, operation, key, work)

    async def written(self: Objects, key: str, data: Any, **how: Any) -> None:
        before("write", key)
        await put(self, key, data, **how)

    async def deleted(self: Objects, keys: Any) -> None:
        for key in keys:  # a server removes many one after the other, too
            before("delete", key)
            await delete(self, [key])

    def streamed(self: Objects, key: str, chunks: Any) -> Any:
        def parts() -> Iterator[Any]:
            for chunk in chunks:
                before("upload", key)
                yield chunk
            before("upload", key)

        return stream(self, key, parts())

    with (
        mock.patch.object(Objects, "_request", requested),
        mock.patch.object(Objects, "_put", written),
        mock.patch.object(Objects, "_delete", deleted),
        mock.patch.object(Objects, "stream", streamed),
    ):
        yield


class Deaths:
    """Dies before request number `at`, of 1 and more; counts the requests if it is not reached."""

    def __init__(self, at: int, die: Callable[[], None] | None = None) -> None:
        self.at, self.count, self._die, self._lock = at, 0, die, threading.Lock()
        self.where = "after all requests"

    def __call__(self, operation: str, key: str) -> None:
        with self._lock:
            self.count += 1
            if self.count == self.at:
                self.where = f"before request {self.at}: {operation} {key}"
        if self.at and self.count >= self.at:
            if self._die:
                self._die()
            raise Died(self.where)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -------------------------------------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Layout:
    """A way to lay out a checkpoint in a bucket."""

    title: str
    format: str = "safetensors"
    suffix: str = ""
    prefix: str | None = "ema"
    max_shard_bytes: int = 2**30
    reuse: bool = False  # if so, all generations share some leaves
    large: int = 0  # bytes of a leaf that is sent in several parts
    part_bytes: int = 2**30

    def __str__(self) -> str:
        return self.title

    def tree(self, generation: int) -> dict[str, Any]:
        found = tree(generation)
        if self.reuse:
            found["frozen"] = {"a": np.arange(2000.0), "b": np.arange(3000.0)}
        if self.large:
            found["large"] = np.full(self.large // 8, generation, np.float64)
        return found

    def options(self) -> SaveOptions:
        return SaveOptions(max_shard_bytes=self.max_shard_bytes, threads=2, reuse=self.reuse)

    def save(self, url: str, generation: int, lease: float = LIVE, how: Callable[..., object] = save) -> None:
        with (
            mock.patch.object(leases, "LEASE", lease),
            mock.patch.object(bucket, "PART_BYTES", min(self.part_bytes, bucket.PART_BYTES)),
            mock.patch.object(requests, "PART_BYTES", min(self.part_bytes, requests.PART_BYTES)),
            mock.patch.object(record, "PIECE_BYTES", min(self.part_bytes, record.PIECE_BYTES)),
        ):
            how(
                self.tree(generation),
                url + self.suffix,
                prefix=self.prefix,
                format=self.format,
                options=self.options(),
            )

    def save_beside(self, url: str) -> None:
        if self.prefix:
            save(tree(BESIDE), url, format=self.format)

    def generation(self, url: str) -> int:
        """Return which generation a reader finds. Check that it is whole, as is the tree beside it."""
        if self.prefix:
            assert_same(load(url, prefix=""), tree(BESIDE))
        try:
            found = load(url + self.suffix, prefix=self.prefix)
        except (FileNotFoundError, ValueError) as error:
            if not any(sign in str(error) for sign in ("no checkpoint", "no prefix")):
                raise
            return NOTHING
        assert_same(found, self.tree(found["generation"]))
        report = checkpoint.verify(url + self.suffix)
        assert report.ok, str(report)
        return int(found["generation"])

    def check_tidy(self, url: str) -> None:
        """Check that all objects are named, or replaced by the last save, whose lease says so; nothing else is there."""
        found, start = around(url)
        keys = {entry.key.removeprefix(start) for entry in found.list(start)}
        if self.suffix:
            assert keys == {f"x{self.suffix}"}
            return
        index = "manifest.json" if self.format == "safetensors" else "tensorstore_index.json"
        document = json.loads(bytes(found.read(f"{start}x/{index}")[0]))
        trees = (document["eformer"] if self.format == "tensorstore" else document)["trees"]
        last = trees[self.prefix or ""]["save_id"]
        there = {key.removeprefix(f"x/{leases.LEASES}/") for key in keys if f"/{leases.LEASES}/" in key}
        assert all(name.endswith(f".{last}") for name in there), there
        replaced = {name.partition(".")[0] for name in there}
        named = {
            f"x/{entry['root']}/{file['name']}" if "root" in entry else f"x/{file['name']}"
            for entry in trees.values()
            for file in entry["files"]
        }
        indexes = {f"x/{prefix or 'model'}.safetensors.index.json" for prefix in trees} | {f"x/{index}"}
        data = {key for key in keys if f"/{leases.LEASES}/" not in key} - indexes
        assert named <= data
        assert not [key for key in data - named if not leases.ids_in({key}) & replaced]


MEMORY = [
    Layout("one data file"),
    Layout("several data files", max_shard_bytes=4096),
    Layout("arrays", format="tensorstore"),
    Layout("kept data files", reuse=True),
    Layout("kept arrays", format="tensorstore", reuse=True),
    Layout("single file", suffix=".safetensors", prefix=None),
    Layout("in parts", large=40_000, part_bytes=8192),
    Layout("single file in parts", suffix=".safetensors", prefix=None, large=40_000, part_bytes=8192),
    Layout("arrays in parts", format="tensorstore", large=40_000, part_bytes=8192),
]

SERVER = [
    Layout("one data file"),
    Layout("arrays", format="tensorstore"),
    Layout("kept data files", reuse=True),
    Layout("in parts", large=12 * 2**20, part_bytes=5 * 2**20),
    Layout(
        "single file in parts", suffix=".safetensors", prefix=None, large=12 * 2**20, part_bytes=5 * 2**20
    ),
]

SCENES = ("first", "replace", "sweep")


def remains_of(layout: Layout, url: str) -> None:
    """Leave what a save leaves that dies before its commit, and what others have replaced."""
    hook = Deaths(0)
    with suppress(Died), hooked(hook), mock.patch.object(BucketUpload, "swap", _die):
        layout.save(url, 7)
    for generation in (8, OLD):
        layout.save(url, generation)


def _die(*_: object) -> None:
    raise Died


@dataclass(frozen=True)
class Scene:
    """What is there before a save dies, as often as it is needed."""

    layout: Layout
    name: str
    contents: dict[str, bytes]

    @classmethod
    def of(cls, layout: Layout, name: str, url: str) -> Scene:
        layout.save_beside(url)
        if name == "sweep" and not layout.suffix:
            remains_of(layout, url)
        elif name != "first":
            layout.save(url, OLD)
        found, start = around(url)
        return cls(
            layout,
            name,
            {e.key.removeprefix(start): bytes(found.read(e.key)[0]) for e in found.list(start)},
        )

    @property
    def before(self) -> int:
        return NOTHING if self.name == "first" else OLD

    def put(self, url: str) -> None:
        found, start = around(url)
        found.put_all([(start + key, data) for key, data in self.contents.items()])

    def save(self, url: str, generation: int = NEW) -> None:
        self.layout.save(url, generation, EXPIRED if self.name == "sweep" else LIVE)

    def check(self, url: str) -> int:
        """Check what a save has left that died. Return the generation that is there."""
        left = self.layout.generation(url)
        assert left in (self.before, NEW)
        self.layout.save(url, NEXT, EXPIRED)
        assert self.layout.generation(url) == NEXT
        self.layout.check_tidy(url)
        return left

    def requests(self, url: str) -> int:
        """Count the requests of an undisturbed save."""
        self.put(url)
        counted = Deaths(0)
        with hooked(counted):
            self.save(url)
        assert self.layout.generation(url) == NEW
        return counted.count

    def points(self, url: str, stride: int = STRIDE) -> list[int]:
        """Return before which requests to die: every `stride`-th, and every one of the last, where the commit is."""
        count = self.requests(url)
        return sorted(
            {*range(1, count + 1, stride), *range(max(1, count - 10), count + 1, max(1, stride // 4))}
        )


def dies(scene: Scene, url: str, at: int) -> str:
    """Let a save die in this process. Return where it did."""
    scene.put(url)
    death = Deaths(at)
    with hooked(death), suppress(Died):
        scene.save(url)
    return death.where


# ------------------------------------------------------------------------------------------- meetings


class Countdown:
    """Calls a function before request number `at`, while it is on."""

    def __init__(self, at: int, call: Callable[[], None]) -> None:
        self.at, self.count, self.is_on, self._call = at, 0, True, call

    def __call__(self, operation: str, key: str) -> None:
        self.count += self.is_on
        if self.is_on and self.count == self.at:
            self._call()


class Paused:
    """A save in a thread that stops before request `at` of its commit, and goes on when it is told."""

    def __init__(self, work: Callable[[], None], at: int) -> None:
        self.error: BaseException | None = None
        self.count, self._at = 0, at
        self._stopped, self._go = threading.Event(), threading.Event()
        self._is_committing, self._is_over = False, False
        self._work = work
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  looked at by the test
            self.error = error
        finally:
            self._is_over = True
            self._stopped.set()

    def commits(self) -> None:
        """Say that the commit begins."""
        self._is_committing = True

    def before(self, operation: str, key: str) -> None:
        if not self._is_committing:
            return
        self.count += 1
        if self.count == self._at:
            self._stopped.set()
            assert self._go.wait(60)

    def start(self) -> None:
        """Return when the save has stopped, or is over."""
        self.thread.start()
        assert self._stopped.wait(60)

    def finish(self) -> None:
        self._go.set()
        self.thread.join(60)
        assert self._is_over

    @property
    def told(self) -> str:
        if self.error is None:
            return "committed"
        if isinstance(self.error, LeaseLostError):
            return "refused"
        raise self.error


@contextmanager
def watched(
    before: dict[threading.Thread, Hook],
    on_commit: dict[threading.Thread, Callable[[], None]],
    *,
    looks: bool = False,
) -> Iterator[None]:
    """Call the hook of the thread that makes a request before it is sent, and another one when it begins to commit.
    Unless it `looks`, such a thread takes no save for dead."""
    request, committing, look = Objects._request, BucketUpload.commit, Leases.look

    def requested(self: Objects, operation: str, key: str, work: Any) -> Any:
        if hook := before.get(threading.current_thread()):
            hook(operation, key)
        return request(self, operation, key, work)

    def committed(self: BucketUpload, commit: Commit) -> None:
        if commit.save_id and (begin := on_commit.get(threading.current_thread())):  # else it is no save
            begin()
        committing(self, commit)

    def looked(self: Leases) -> None:
        if looks or threading.current_thread() not in on_commit:
            look(self)

    with (
        mock.patch.object(Objects, "_request", requested),
        mock.patch.object(BucketUpload, "commit", committed),
        mock.patch.object(Leases, "look", looked),
        mock.patch.object(Turn, "wait", mock.Mock()),  # as if they were of two processes
    ):
        yield


def interleaved(
    slow: Callable[[], None], at: int, other: Callable[[], None], where: int
) -> tuple[Paused, int]:
    """Run `slow` up to request `at` of its commit, `other` up to its request `where`, then `slow` to its end, then
    `other` to its end. Return the slow save, and how many requests the other one has made."""
    zombie = Paused(slow, at)
    before = Countdown(where, zombie.finish)
    here = threading.current_thread()
    with watched({zombie.thread: zombie.before, here: before}, {zombie.thread: zombie.commits}):
        zombie.start()
        other()
        zombie.finish()
    return zombie, before.count


def is_torn(url: str, prefixes: list[str]) -> bool:
    """Tell whether any tree cannot be read as it was saved."""
    try:
        for prefix in prefixes:
            load(url, prefix=prefix)
        return not checkpoint.verify(url).ok
    except (OSError, ValueError, RuntimeError):
        return True


def forget_all(url: str) -> None:
    found, start = around(url)
    found.delete([entry.key for entry in found.list(start)])
