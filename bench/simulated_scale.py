"""Plan the work of 1,000 processes on 10 TB, with the real planner: no file is read.

    python bench/simulated_scale.py

The checkpoint is a model with experts: 100,000 arrays, 10 TB, in shards of 5 GB. The store is a double, which knows the
length of a request and nothing else. For `verify` and for `convert`, the program computes the bytes and the requests
of every process, and the time that a process takes to plan its part.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eformer._engine.formats.safetensors.layout import plan_files
from eformer._engine.loading.read_plan import plan_reads
from eformer._engine.processes.hosts import Hosts
from eformer._engine.record.boxes import Box
from eformer._engine.record.digests import DIGEST_DIGITS
from eformer._engine.record.division import ByteLine, Portion, spans
from eformer._engine.record.manifest import DataFile, Extent, LeafEntry
from eformer._engine.record.options import SaveOptions
from eformer._engine.record.pieces import PIECE_BYTES, count_pieces
from eformer._engine.record.planned import LazyArray, Source
from eformer._engine.saving.commit import new_entry
from eformer._engine.saving.in_parts import Division, planned
from eformer._engine.saving.save import Save
from eformer._engine.tools.verify import extents_of, wants_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROCESSES = 1000
TIMED = 10  # processes whose planning is timed alone
READ_BYTES = {"disk": 4 * 2**20, "bucket": 16 * 2**20}
LAYERS, EXPERTS = 128, 256


class Double(LazyArray):
    """An array of the source, which nobody reads. A transposed one cannot be read in order."""

    def __init__(self, shape: tuple[int, ...], *, in_order: bool) -> None:
        self.shape, self.dtype, self.in_order = shape, np.dtype(np.float32), in_order


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield 100,000 arrays of 10 TB: experts, attention, norms, and two large tables."""
    yield "embed.weight", (256_000, 16_384)
    for layer in range(LAYERS):
        for name in ("q", "k", "v", "o"):
            yield f"layers.{layer}.attn.{name}.weight", (7168, 7168)
        for name in ("norm1", "norm2", "router.bias"):
            yield f"layers.{layer}.{name}", (7168,)
        for expert in range(EXPERTS):
            for name in ("up", "gate", "down"):
                yield f"layers.{layer}.experts.{expert}.{name}.weight", (7168, 3500)
    yield "head.weight", (256_000, 16_384)
    for number in range(700):
        yield f"state.{number}", (1 + number % 7,)


def sources(*, in_order: bool = True) -> list[Source]:
    found = []
    for name, shape in shapes():
        whole = Box.whole(shape)
        array: Any = Double(shape, in_order=in_order)
        found.append(Source(name, "float32", shape, parts=((whole, array),), regions=(whole,)))
    return found


def stored() -> TreeRecord:
    """Return the record of the checkpoint, as the layout of safetensors puts it into files."""
    every = sources()
    files = plan_files(every, {source.name: source.name for source in every}, 5 * 10**9, PIECE_BYTES)
    digests: dict[int, str] = {}
    entries = {}
    for number, file in enumerate(files):
        for extent in file.extents:
            pieces = count_pieces(extent.shape, 4, PIECE_BYTES)
            text = digests.setdefault(pieces, "f" * DIGEST_DIGITS * pieces)
            entry = Extent(number, extent.offset, extent.nbytes, text)
            entries[extent.source.name] = LeafEntry("float32", extent.shape, (entry,), "numpy")
    listed = tuple(
        DataFile(f"model-{n}.safetensors", file.nbytes + 1000, 1000) for n, file in enumerate(files)
    )
    return TreeRecord(listed, entries)


class TreeRecord:
    """A double of a tree's record: the planner asks for these fields alone."""

    block = PIECE_BYTES

    def __init__(self, files: tuple[DataFile, ...], leaves: dict[str, LeafEntry]) -> None:
        self.files, self.leaves = files, leaves
        self.nbytes = sum(entry.nbytes for entry in leaves.values())


def main() -> None:
    tree: Any = stored()
    lines = [
        f"# {PROCESSES:,} processes, {len(tree.leaves):,} arrays, {tree.nbytes / 1e12:.2f} TB",
        "",
        "`python bench/simulated_scale.py`: the real planner, with doubles for stores and arrays. Nothing is read.",
        "",
        f"{dt.datetime.now(dt.UTC).date()}, {os.cpu_count()} cores, Python {platform.python_version()}.",
        "",
        "| work | bytes of a process, mean | largest over mean | bytes of all over needed | requests, disk | "
        "requests, bucket | planning of a process |",
        "|---|---|---|---|---|---|---|",
        verified(tree),
        converted("convert, same layout", sources()),
        converted("convert, transposed", sources(in_order=False)),
    ]
    text = "\n".join(lines) + "\n"
    print(text, flush=True)
    (Path(__file__).parent / "results" / "simulated_scale.md").write_text(text)


def verified(tree: Any) -> str:
    line = ByteLine(extents_of(tree))
    read, requests = [], {where: [] for where in READ_BYTES}
    by_file: dict[int, dict[str, LeafEntry]] = {}
    for name, entry in tree.leaves.items():
        by_file.setdefault(entry.extents[0].file, {})[name] = entry
    for number in range(PROCESSES):
        (span,) = spans([line], Portion(number, PROCESSES))
        first, last = span.files  # the leaves of other files are not in the span: this saves time here
        near = {
            n: e for file in range(first, min(last + 1, len(tree.files))) for n, e in by_file[file].items()
        }
        wants = wants_in(TreeRecord(tree.files, near), span)
        for where, nbytes in READ_BYTES.items():
            plan = plan_reads(wants, tree, nbytes, span=span)
            requests[where].append(len(plan))
        read.append(sum(one.nbytes for one in plan))
    return row("verify", read, tree.nbytes, requests, timed(lambda part: plan_of(tree, part)))


def plan_of(tree: Any, part: Portion) -> None:
    """Plan one part from the beginning, as a process does."""
    (span,) = spans([ByteLine(extents_of(tree))], part)
    plan_reads(wants_in(tree, span), tree, READ_BYTES["bucket"], span=span)


def converted(what: str, every: list[Source]) -> str:
    begun = time.perf_counter()
    tree = planned(save_of(every))
    layout = time.perf_counter() - begun
    needed = sum(extent.nbytes for _, _, extent in tree.extents)
    found, requests = [], {where: [] for where in READ_BYTES}
    division = Division([tree])
    for number in range(PROCESSES):
        own = division.own(Portion(number, PROCESSES))
        sizes = [one.nbytes for one in own.pieces]
        found.append(sum(sizes))
        for where, nbytes in READ_BYTES.items():
            requests[where].append(sum(-(-size // nbytes) for size in sizes))
    seconds = timed(lambda part: Division([tree]).own(part))
    return row(what, found, needed, requests, [layout + one for one in seconds])


def save_of(every: list[Source]) -> Save:
    entry = new_entry("bench", None, {}, {})
    options = SaveOptions(max_shard_bytes=5 * 10**9)
    return Save(None, "", "", "safetensors", every, entry, options, Hosts(), None)  # type: ignore[arg-type]


def timed(plan: Callable[[Portion], object]) -> list[float]:
    chosen = random.Random(0).sample(range(PROCESSES), TIMED)
    seconds = []
    for number in chosen:
        begun = time.perf_counter()
        plan(Portion(number, PROCESSES))
        seconds.append(time.perf_counter() - begun)
    return seconds


def row(
    what: str, nbytes: list[int], needed: int, requests: dict[str, list[int]], seconds: list[float]
) -> str:
    mean = statistics.mean(nbytes)
    counts = [f"{max(requests[where]):,}" for where in READ_BYTES]
    cells = [
        what,
        f"{mean / 1e9:.2f} GB",
        f"{max(nbytes) / mean:.4f}",
        f"{sum(nbytes) / needed:.4f}",
        *counts,
        f"{statistics.median(seconds):.2f} s",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
