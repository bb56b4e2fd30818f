"""What is measured, as data: workloads, the systems that take part in each, and the cells in their order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MODES = ("buffered", "written out", "O_DIRECT", "RWF_DONTCACHE")


@dataclass(frozen=True, slots=True)
class Cell:
    """One task of one system with one tree in one round. It travels as JSON to the process that runs it."""

    workload: str
    system: str
    task: str
    kind: str = ""  # the class behind the system's name
    round: int = 0
    tree: str = ""
    size: int = 0
    nbytes: int = 0
    leaves: int = 0
    values: str = ""  # a file that has the tree's values
    directory: str = ""  # for whatever is written
    is_numpy: bool = False
    is_cold: bool = False
    devices: int = 1
    place: str = ""  # where to load it: one of tasks.places; the first device if not told
    tries: int = 1  # at most, of which the fastest counts
    saves: int = 0
    steps: int = 0
    mode: str = ""
    threads: Sequence[int] = ()
    cold_threads: Sequence[int] = ()

    @property
    def is_limit(self) -> bool:
        return self.system.startswith("limit")

    @property
    def is_ours(self) -> bool:
        return self.system.startswith("eformer")

    @property
    def environment(self) -> str:
        """Whose interpreter runs it."""
        if self.is_ours or self.is_limit or not self.kind:
            return "own"
        return "original" if self.kind == "original" else "peers"


@dataclass(frozen=True, slots=True)
class Entry:
    """A system that takes part in a workload, in all its rounds or in the first few."""

    cell: Cell
    rounds: int = 99


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    about: str
    tree: str
    size: int
    rounds: int
    entries: Sequence[Entry]
    tries: int = 1

    def cells(self) -> Iterator[Cell]:
        """Round by round; each time another one is first."""
        for number in range(self.rounds):
            first = number * len(self.entries) // self.rounds
            for entry in (*self.entries[first:], *self.entries[:first]):
                if number < entry.rounds:
                    yield replace(
                        entry.cell,
                        workload=self.name,
                        round=number,
                        tree=self.tree,
                        size=self.size,
                        tries=self.tries,
                    )


def take(
    *systems: str, task: str = "roundtrip", rounds: int = 99, name: str = "", **more: object
) -> list[Entry]:
    return [Entry(Cell("", name or system, task, kind=system, **more), rounds) for system in systems]  # type: ignore[arg-type]


def limits(*, quick: bool, cold: bool = True, nbytes: int = 0) -> list[Entry]:
    """Plain programs that write and read as many bytes as the tree has, if not told otherwise."""
    threads, warm, cold_threads = ((2,), (2, 4), (2, 4)) if quick else ((1, 2, 4), (2, 4), (2, 4, 8))
    reads = Cell(
        "", "limit: read", "read", threads=warm, cold_threads=cold_threads if cold else (), nbytes=nbytes
    )
    return [
        *(Entry(Cell("", f"limit: {m}", "write", mode=m, threads=threads, nbytes=nbytes)) for m in MODES),
        Entry(reads),
    ]


TRAINED = 40 * 2 * 64 * 2  # bytes beside a frozen base, for each unit of its width
FLOORS = [Entry(Cell("", "limit: leaves", "floors"))]
FILES_OF_LEAVES = [Entry(Cell("", "limit: a file a leaf", "files", threads=(1, 2)))]
LOADS = ("eformer, no like", "eformer, no digests", "eformer, mapped")
DATABASES = ("orbax", "orbax, tuned", "jax")
FILES = ("safetensors, numpy", "safetensors, flax", "flax msgpack", "equinox")


def on_eight_devices(*systems: str) -> list[Entry]:
    """Loads onto eight devices, of which each gets all of a leaf, or a row of it."""
    return [
        entry
        for place in ("replicas", "rows")
        for system in systems
        for entry in take(system, task="load", name=f"{system}, 8 {place}", devices=8, place=place)
    ]


def workloads(*, quick: bool) -> list[Workload]:
    return quick_workloads() if quick else [replace(workload, tries=3) for workload in full_workloads()]


def full_workloads() -> list[Workload]:
    disk = limits(quick=False)
    cached = limits(quick=False, cold=False)
    return [
        Workload(
            "llama", "a language model, bf16 in 93 leaves", "llama", 2048, 5,
            [
                *take("eformer", is_cold=True),
                *disk,
                *take(*LOADS, task="load", is_cold=True),
                *take("eformer, zarr", is_cold=True),
                *take("eformer", task="async", name="eformer, async"),
                *take(*DATABASES, *FILES, rounds=3, is_cold=True),
                *take("orbax", task="async", name="orbax, async", rounds=3),
                *take("original", rounds=2, is_cold=True),
            ],
        ),
        Workload(
            "training state", "parameters, fp32 originals and Adam's moments, 373 leaves", "training", 1152, 3,
            [
                *take("eformer", is_cold=True),
                *disk,
                *take("eformer, no digests", task="load"),
                *take("orbax, tuned", "safetensors, numpy", rounds=2),
                *take("orbax", "jax", "safetensors, flax", rounds=1),
            ],
        ),
        Workload(
            "one array", "fp32", "one array", 16384, 3,
            [
                *take("eformer", is_cold=True),
                *disk,
                *take("eformer, no digests", task="load"),
                *take("orbax", "orbax, tuned", "safetensors, numpy", rounds=2),
                *take("jax", "safetensors, flax", "equinox", rounds=1),
            ],
        ),
        Workload(
            "10k small leaves", "256 B to 16 KB each", "small", 10_000, 3,
            [
                *take("eformer"),
                *cached,
                *FLOORS,
                *take("eformer, no like", task="load"),
                *take("safetensors, numpy", "flax msgpack"),
                *take("eformer, zarr"),
                *FILES_OF_LEAVES,
                # These take a minute; equinox, which compiles something for each shape as safetensors.flax does, more.
                *take(*DATABASES, "original", "safetensors, flax", rounds=1),
            ],
        ),
        Workload(
            "10k leaves, 8 devices", "8 x 32 each", "even", 10_000, 3,
            [
                *take("eformer"),
                *cached,
                *FLOORS,
                *take("eformer, no like", task="load"),
                *on_eight_devices("eformer"),
                *take("safetensors, numpy", "safetensors, flax"),
                *on_eight_devices("safetensors, numpy", "safetensors, flax"),
                *take("orbax, tuned", rounds=1),  # onto eight devices it takes minutes
            ],
        ),
        Workload(
            "100k small leaves", "256 B to 16 KB each", "small", 100_000, 3,
            [
                *take("eformer"),
                *cached,
                *FLOORS,
                *take("eformer, no like", "eformer, mapped", task="load"),
                *take("eformer", task="one leaf", name="eformer, one leaf", rounds=2),
                *take("eformer, no like", name="eformer, numpy", is_numpy=True),
                *take("safetensors, numpy", "flax msgpack", rounds=1),
            ],
        ),
        Workload(
            "frozen base", "a model, and 21 MB that are trained; the median of saves 2 to 5", "frozen", 2048, 2,
            [
                *take("eformer, reuse", "eformer", task="frozen", saves=5),
                *limits(quick=False, cold=False, nbytes=TRAINED * 2048)[:-1],
                *take("orbax", "orbax, tuned", "safetensors, numpy", task="frozen", saves=5, rounds=1),
            ],
        ),
        Workload(
            "resharding", "the language model, saved by rows of 8 devices", "llama", 2048, 2,
            [
                *take("eformer", task="reshard", devices=8),
                *take("orbax", "orbax, tuned", "jax", task="reshard", devices=8, rounds=1),
                *take("eformer", task="rows", name="eformer, rows", devices=8),
                *limits(quick=False, cold=False)[-1:],
            ],
        ),
        Workload(
            "training loop", "weights, saved with as many moments every 5 steps, and donated", "layers", 2048, 3,
            [
                *take("eformer", task="loop", steps=60),
                *take("orbax", "orbax, tuned", task="loop", steps=60, rounds=2),
            ],
        ),
        Workload(
            "50 saves", "of one state", "squares", 24, 1,
            take("eformer", "orbax", "orbax, tuned", task="soak", saves=50),
        ),
    ]  # fmt: skip


def quick_workloads() -> list[Workload]:
    """A fifth of the size and one round: whether all of it works, and roughly how fast."""
    disk = limits(quick=True)
    return [
        Workload(
            "llama", "a small language model, bf16 in 93 leaves", "llama", 768, 1,
            [
                *take("eformer", is_cold=True),
                *disk,
                *take(*LOADS, task="load"),
                *take("eformer, zarr"),
                *take("eformer", task="async", name="eformer, async"),
                *take("orbax", task="async", name="orbax, async"),
                *take(*DATABASES, *FILES, "original", is_cold=True),
            ],
        ),
        Workload(
            "training state", "parameters, fp32 originals and Adam's moments, 373 leaves", "training", 256, 1,
            [
                *take("eformer", is_cold=True), *disk,
                *take("eformer, no digests", task="load"),
                *take("orbax, tuned", "safetensors, numpy"),
            ],
        ),
        Workload(
            "one array", "fp32", "one array", 2048, 1,
            [
                *take("eformer", is_cold=True), *disk,
                *take("eformer, no digests", task="load"),
                *take("orbax, tuned", "safetensors, numpy"),
            ],
        ),
        Workload(
            "2k small leaves", "256 B to 16 KB each", "small", 2000, 1,
            [
                *take("eformer"), *limits(quick=True, cold=False), *FLOORS,
                *take("eformer, zarr"), *FILES_OF_LEAVES,
                *take("eformer, no like", "eformer, mapped", task="load"),
                *take("eformer, no like", name="eformer, numpy", is_numpy=True),
                *take("eformer", task="one leaf", name="eformer, one leaf"),
                *take("orbax, tuned", "safetensors, numpy", "flax msgpack"),
            ],
        ),
        Workload(
            "2k leaves, 8 devices", "8 x 32 each", "even", 2000, 1,
            [
                *take("eformer"), *limits(quick=True, cold=False), *FLOORS,
                *take("eformer, no like", task="load"),
                *take("orbax, tuned", "safetensors, numpy"),
                *on_eight_devices("eformer", "safetensors, numpy"),
            ],
        ),
        Workload(
            "frozen base", "a small model, and 8 MB that are trained; the median of saves 2 to 5", "frozen", 768, 1,
            [
                *take("eformer, reuse", "eformer", "orbax, tuned", task="frozen", saves=5),
                *limits(quick=True, cold=False, nbytes=TRAINED * 768)[:-1],
            ],
        ),
        Workload(
            "resharding", "the small language model, saved by rows of 8 devices", "llama", 768, 1,
            [
                *take("eformer", "orbax, tuned", task="reshard", devices=8),
                *take("eformer", task="rows", name="eformer, rows", devices=8),
                *limits(quick=True, cold=False)[-1:],
            ],
        ),
        Workload(
            "training loop", "weights, saved with as many moments every 5 steps, and donated", "layers", 1024, 1,
            take("eformer", "orbax, tuned", task="loop", steps=30),
        ),
        Workload("20 saves", "of one state", "squares", 6, 1, take("eformer", "orbax, tuned", task="soak", saves=20)),
    ]  # fmt: skip
