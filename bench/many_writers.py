"""Checkpoints of many processes: what each of many readers asks for, how many bytes it gets and how long it takes.

    python bench/many_writers.py [--quick] [--dir DIRECTORY] [--out bench/results]

Writers and readers are played one after the other in one process. A writer lays out, writes and records its part by the
code of a save, and the first one commits; a reader finds, selects, locates, plans and reads into host memory by the
code of a load, without making arrays of JAX. Every reader reads twice: as it is, and from the same checkpoint without
the table of owners in the manifest, as earlier versions wrote it, where it has to read the records of all writers.

With 1,000 writers that each have a box of 100,000 leaves only the writers that the readers need are played. The others
are what these recorded, moved to their place. Takes four minutes, 3 GB of disk and 4 GB of memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from eformer._engine.formats.find import find
from eformer._engine.formats.process_records import ListedTree
from eformer._engine.loading.contents import contents_of
from eformer._engine.loading.read import read
from eformer._engine.loading.request import Request
from eformer._engine.loading.select import compare, select
from eformer._engine.loading.sources import Source as LoadSource
from eformer._engine.record.boxes import Box
from eformer._engine.record.digests import Hasher
from eformer._engine.record.indexes import MANIFEST
from eformer._engine.record.manifest import Manifest, Receipt, RecordedSharding, coverage_of
from eformer._engine.record.options import SaveOptions
from eformer._engine.record.owners import OwnedLeaves, Owners
from eformer._engine.record.planned import Source
from eformer._engine.saving.commit import new_entry
from eformer._engine.saving.reuse import Kept
from eformer._engine.saving.save import Compared, Save
from eformer._engine.saving.several import SaveOfSeveral, joined_receipts
from eformer._engine.saving.staging import Staging
from eformer._engine.saving.write import write
from eformer._engine.stores.base import update_file
from eformer._engine.stores.local import LocalStore
from eformer._engine.stores.local_files import LocalFiles
from eformer._engine.stores.locate import store_at
from eformer._engine.stores.objects import Objects
from eformer._engine.tasks.pool import gc_paused
from eformer._engine.tasks.progress import SILENT
from eformer._engine.tasks.turns import turns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


COLUMNS = 4

# ---------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """Writers and their leaves. "sharded" leaves have a box on every writer, "whole" ones are on one writer each.

    A reader wants the boxes or the leaves of `share` neighbouring writers; `readers` are the first of these.
    """

    writers: int
    leaves: int
    cut: str
    place: str = "disk"
    share: int = 1
    readers: tuple[int, ...] = ()
    is_all_played: bool = True
    has_before: bool = True

    def shape(self, leaf: int) -> tuple[int, ...]:
        """Three kinds of leaves: cut by rows, by columns, and with rows of another length."""
        if self.cut == "whole":
            return (8, COLUMNS)
        return ((self.writers, COLUMNS), (COLUMNS, self.writers), (self.writers, 2, 2))[leaf % 3]

    def box(self, leaf: int, first: int, count: int = 1) -> Box:
        """What some neighbouring writers have of a sharded leaf."""
        axis = leaf % 3 == 1
        shape = self.shape(leaf)
        start, stop = [0] * len(shape), list(shape)
        start[axis], stop[axis] = first, first + count
        return Box(tuple(start), tuple(stop))

    def writer_of(self, leaf: int) -> int:
        return leaf % self.writers

    @property
    def played(self) -> list[int]:
        if self.is_all_played:
            return list(range(self.writers))
        needed = {0, *(first + i for first in self.readers for i in range(self.share))}
        return sorted(needed)


# ---------------------------------------------------------------------------------------------- write


class First:
    """The first of many hosts, whose others bring what it brings."""

    number = 0

    def __init__(self, count: int) -> None:
        self.count = count

    def meet(self, message: bytes, answer: Any) -> bytes:
        return answer([message] * self.count)

    def process_of(self, device: Any) -> int:
        raise NotImplementedError

    def name(self, number: int) -> str:
        return f"process {number}"

    def fail(self, error: BaseException, *, after_all: bool = False) -> str:
        raise error

    def end(self) -> None:
        pass


def names_of(case: Case) -> list[str]:
    return [f"layers.{number // 20}.w{number % 20}" for number in range(case.leaves)]


def sources_of(case: Case, writer: int) -> list[Source]:
    """What a snapshot makes of the leaves that one writer has a part of."""
    make = _whole_sources if case.cut == "whole" else _sharded_sources
    return make(case, writer)


def _whole_sources(case: Case, writer: int) -> list[Source]:
    data = np.arange(8 * COLUMNS, dtype=np.float32).reshape(8, COLUMNS)
    whole, sharding = Box.whole(data.shape), RecordedSharding((), {"x": case.writers})
    parts = [(whole, data)]
    return [
        Source(name, "float32", data.shape, "jax", None, sharding, None, parts, [whole], data.shape, -1)
        for leaf, name in enumerate(names_of(case))
        if case.writer_of(leaf) == writer
    ]


def _sharded_sources(case: Case, writer: int) -> list[Source]:
    mesh, first = {"x": case.writers}, writer == 0
    shardings = [RecordedSharding(spec, mesh) for spec in (("x", None), (None, "x"), ("x", None, None))]
    boxes = [case.box(kind, writer) for kind in range(3)]
    parts = [[(box, np.full(box.shape, writer, np.float32))] for box in boxes]
    found = []
    for leaf, name in enumerate(names_of(case)):
        kind = leaf % 3
        box, shape = boxes[kind], case.shape(leaf)
        sharding = shardings[kind]
        found.append(
            Source(
                name, "float32", shape, "jax", None, sharding, None, parts[kind], [box], box.shape, -1, first
            )
        )
    return found


def all_sources(case: Case) -> list[Source]:
    """The leaves as the first writer sees them, also those that it has nothing of."""
    own = {source.name: source for source in sources_of(case, 0)}
    like = next(iter(own.values()))
    theirs = msgspec.structs.replace(like, parts=(), regions=(), writes_start=False)
    return [own.get(name) or msgspec.structs.replace(theirs, name=name) for name in names_of(case)]


@dataclass
class Written:
    """What a save of many writers took."""

    write: float = 0.0  # seconds of one writer
    commit: float = 0.0
    receipt: int = 0  # bytes, the longest
    record: int = 0
    manifest: int = 0
    table: int = 0


def save(case: Case, url: str) -> Written:
    """Play the writers, then let the first one commit."""
    written, receipts = Written(), dict[int, Any]()
    with ExitStack() as stack, gc_paused():
        first = first_save(case, url)
        first.format = first.new_format()
        first.prepare(stack)
        receipts[0] = first.write(SILENT)
        for writer in case.played[1:]:
            began = time.perf_counter()
            receipts[writer] = write_part(case, first, writer, stack)
            written.write = max(written.write, time.perf_counter() - began)
        if not case.is_all_played:
            _add_others(case, first, receipts)
        messages = [msgspec.msgpack.encode(receipts[writer]) for writer in range(case.writers)]
        decode = msgspec.msgpack.Decoder(Receipt).decode
        began = time.perf_counter()
        Save.commit(first, joined_receipts([decode(message) for message in messages]))
        written.commit = time.perf_counter() - began
    data = store_at(url).read(MANIFEST)[0]
    owners = Manifest.from_json(data, url).trees[""].owners
    written.receipt = max(map(len, messages))
    written.record = max(file.header_nbytes for receipt in receipts.values() for file in receipt.files)
    written.manifest, written.table = len(data), len(msgspec.json.encode(owners))
    return written


def first_save(case: Case, url: str) -> SaveOfSeveral:
    entry = new_entry("bench", {"dict": {}}, {}, {})
    hosts, turn = First(case.writers), turns.take(url, "process 0")
    compared, sources = Compared([], Hasher()), all_sources(case)
    options = SaveOptions()
    return SaveOfSeveral(store_at(url), "", "", "safetensors", sources, entry, options, hosts, turn, compared)


def write_part(case: Case, first: SaveOfSeveral, writer: int, stack: ExitStack) -> Receipt:
    """Write the part of one of the other writers, as `Save.write` does."""
    fmt = dataclasses.replace(first.format, process=writer)
    upload = fmt.begin(first.store, first.upload.token)
    stack.callback(upload.close)
    files = fmt.layout([sources_of(case, writer)], {})
    header = partial(fmt.header, sha256={})
    write(files, upload, first.entry.block, Staging(2**26), threads=1, meter=SILENT, header=header)
    part = dataclasses.replace(first)
    part.format, part.upload, part.numbers = fmt, upload, first.numbers
    return part.receipt(files, Kept(), {}, {})


def _add_others(case: Case, first: SaveOfSeveral, receipts: dict[int, Receipt]) -> None:
    """Add the receipts of writers that are not played, and links to the file of one that is."""
    last = case.played[-1]
    like = receipts[last]
    (file,) = like.files
    expected = sum(
        coverage_of(name, int(np.prod(case.shape(leaf)))) for leaf, name in enumerate(names_of(case))
    )
    missing = expected - sum(receipt.coverage for receipt in receipts.values())
    data = Path(first.upload.data.path)
    for writer in range(case.writers):
        if writer in receipts:
            continue
        name = file.name.replace(f"process-{last}-", f"process-{writer}-")
        os.link(data / file.name, data / name)
        receipts[writer] = msgspec.structs.replace(
            like,
            files=[msgspec.structs.replace(file, name=name)],
            coverage=missing % 2**64,
            owners=moved(case, like.owners, writer),
        )
        missing = 0
    assert all(receipts[w].owners == moved(case, like.owners, w) for w in case.played)


def moved(case: Case, owners: Any, writer: int) -> Owners:
    """What another writer holds: other boxes of the same leaves."""

    def there(held: OwnedLeaves) -> OwnedLeaves:
        ((start, stop),) = held.boxes or ()
        kind = next(
            kind
            for kind in range(3)
            if len(case.shape(kind)) == len(start)
            and stop[1 - (kind == 1)] == case.shape(kind)[1 - (kind == 1)]
        )
        box = case.box(kind, writer)
        return OwnedLeaves(held.leaves, ((box.start, box.stop),))

    return Owners(owners.leaves, tuple(tuple(map(there, held)) for held in owners.files))


# ----------------------------------------------------------------------------------------------- read


@dataclass
class Counts:
    """Requests of a reader, and the bytes that it got. A file that is opened and read is a request for each read."""

    requests: int = 0
    nbytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.requests += 1
            self.nbytes += nbytes


@contextmanager
def counted() -> Iterator[Counts]:
    """Count the reads of files, and all requests to a bucket."""
    counts = Counts()
    read_file, read_into, ask, get = LocalStore.read, LocalFiles.read_into, Objects._request, Objects.read

    def counted_file(self: Any, *arguments: Any) -> Any:
        data, entry = read_file(self, *arguments)
        counts.add(len(data))
        return data, entry

    def counted_into(self: Any, number: int, memory: memoryview, offset: int) -> int:
        counts.add(len(memory))
        return read_into(self, number, memory, offset)

    def counted_request(self: Any, *arguments: Any) -> Any:
        counts.add(0)
        return ask(self, *arguments)

    def counted_get(self: Any, *arguments: Any) -> Any:
        data, entry = get(self, *arguments)
        with counts.lock:
            counts.nbytes += len(data)
        return data, entry

    patched: list[tuple[Any, str, Any, Any]] = [
        (LocalStore, "read", read_file, counted_file),
        (LocalFiles, "read_into", read_into, counted_into),
        (Objects, "_request", ask, counted_request),
        (Objects, "read", get, counted_get),
    ]
    for owner, name, _, new in patched:
        setattr(owner, name, new)
    try:
        yield counts
    finally:
        for owner, name, old, _ in patched:
            setattr(owner, name, old)


@dataclass(frozen=True)
class Measured:
    requests: int
    nbytes: int
    seconds: float


def load(case: Case, url: str, first: int) -> Measured:
    """Play one reader; check what it reads."""
    names = names_of(case)
    wanted = range(first, first + case.share)
    number = {name: leaf for leaf, name in enumerate(names)}
    keys = None
    if case.cut == "whole" and case.share < case.writers:
        keys = [name for leaf, name in enumerate(names) if case.writer_of(leaf) in wanted]
    is_cut = case.cut == "sharded" and case.share < case.writers
    boxes = [case.box(kind, first, case.share) for kind in range(3)] if is_cut else []
    with counted() as counts, gc_paused():
        began = time.perf_counter()
        found = find(url)
        entry = found.listed(None)
        contents = contents_of(entry)
        targets = compare(contents, select(contents, keys), Request(), None).targets
        for target in targets if boxes else ():
            target.regions = [boxes[number[target.name] % 3]]
        source = LoadSource(found, entry, contents, targets=targets)
        if isinstance(entry, ListedTree):
            source.locate(entry)
        read(found, source.entry, targets, found.store.read_threads, verify=True)
        took = time.perf_counter() - began
    for target in targets:
        _check(case, first, target, number[target.name])
    return Measured(counts.requests, counts.nbytes, took)


def _check(case: Case, first: int, target: Any, leaf: int) -> None:
    (array,) = target.arrays
    if case.cut == "whole":
        assert array[7, 3] == 31, target.name
    else:
        assert (array.min(), array.max()) == (first, first + case.share - 1), target.name
        assert array.shape == case.box(leaf, first, case.share).shape, target.name


def without_table(url: str) -> None:
    """Write the manifest as earlier versions did."""
    store = store_at(url)
    data, _ = store.read(MANIFEST)
    manifest = Manifest.from_json(data, url)
    tree = msgspec.structs.replace(manifest.trees[""], owners=msgspec.UNSET)
    new = msgspec.structs.replace(manifest, trees={"": tree}).to_json()
    update_file(store, MANIFEST, lambda _: new)


# --------------------------------------------------------------------------------------------- report


def median(found: Sequence[Measured]) -> Measured:
    return Measured(
        max(one.requests for one in found),
        max(one.nbytes for one in found),
        statistics.median(one.seconds for one in found),
    )


def play(case: Case, directory: str) -> str:
    url = f"memory://many/{time.time_ns()}" if case.place == "memory" else f"{directory}/{time.time_ns()}"
    written = save(case, url)
    after = median([load(case, url, first) for first in case.readers])
    before = f"not run: {case.writers * written.record / 1e6:,.0f} MB of records" + " | | "
    if case.has_before:
        without_table(url)
        before = row(median([load(case, url, first) for first in case.readers[:2]]))
    who = f"{case.writers:,} x {case.leaves:,} {case.cut}"
    wants = "everything" if case.share == case.writers else f"1/{case.writers // case.share:,}"
    saved = f"{written.write:.2f} | {written.commit:.2f} | {written.receipt:,} | {written.record / 1e3:,.0f}"
    sizes = f"{written.manifest / 1e6:.1f} | {written.table / 1e3:,.0f}"
    read = f"| {who} | {case.place} | {wants} | {before} | {row(after)} |"
    return read + f"\n| {who} | {case.place} | {saved} | {sizes} |"


def row(found: Measured) -> str:
    return f"{found.requests:,} | {found.nbytes / 1e6:.2f} | {found.seconds:.2f}"


def cases(*, quick: bool) -> list[Case]:
    if quick:
        return [
            Case(16, 300, "sharded", readers=(0, 7, 15)),
            Case(16, 300, "sharded", "memory", readers=(0, 7, 15)),
            Case(16, 300, "whole", readers=(0, 7, 15)),
            Case(16, 300, "sharded", readers=(0, 15), is_all_played=False, has_before=False),
        ]
    some = (0, 250, 500, 998)
    return [
        Case(64, 2000, "sharded", share=64, readers=(0, 0, 0)),
        Case(64, 2000, "sharded", readers=(0, 1, 31, 62)),
        Case(1000, 1000, "sharded", readers=some),
        Case(1000, 1000, "sharded", "memory", readers=some),
        Case(1000, 1000, "sharded", share=10, readers=(0, 250, 500, 990)),
        Case(1000, 100_000, "whole", readers=some),
        Case(1000, 100_000, "whole", "memory", readers=some),
        Case(1000, 100_000, "whole", share=1000, readers=(0, 0)),
        Case(1000, 100_000, "whole", "memory", share=1000, readers=(0, 0)),
        Case(1000, 100_000, "sharded", readers=(0, 500, 998), is_all_played=False, has_before=False),
        Case(1000, 100_000, "sharded", share=2, readers=(0, 500), is_all_played=False, has_before=False),
    ]


READ = """
| writers x leaves | place | a reader wants | before: requests | MB | s | after: requests | MB | s |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
SAVED = """
| writers x leaves | place | write, s | commit, s | receipt, bytes | record, kB | manifest, MB | table in it, kB |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    reads, saves = [], []
    for case in cases(quick=arguments.quick):
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix=".many-writers-") as directory:
            read_row, saved_row = play(case, directory).split("\n")
        print(read_row, saved_row, sep="\n", flush=True)
        reads.append(read_row)
        if saved_row.split("|")[1:3] not in [one.split("|")[1:3] for one in saves]:
            saves.append(saved_row)
    text = READ + "\n".join(reads) + "\n" + SAVED + "\n".join(saves) + "\n"
    print(text)
    if arguments.out:
        (arguments.out / "many_writers.md").write_text(HEAD + text)


HEAD = """# Many writers, many readers

By `python bench/many_writers.py --out bench/results`, warm, one reader at a time. Requests and bytes are the most of
the sampled readers, with those for the manifest and for the data; seconds are their median, up to arrays in host
memory. "Before" is the same checkpoint without the table of owners in its manifest. Of 1,000 readers each does what
its row says: their requests together are 1,000 times as many.
"""

if __name__ == "__main__":
    main()
