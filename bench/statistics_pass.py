"""What the statistics of a report cost an element, beside a pass of numpy that finds the range alone.

    python bench/statistics_pass.py [--elements 16777216] [--rounds 7] > bench/results/statistics_pass.md

CPU time of one thread, which a busy machine hardly changes. The passes take turns; the fastest round of each counts.
The elements are normally distributed; boxes have 16 MiB, as a report reads them.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from eformer._engine.pages.statistics import Collector
from eformer._engine.tools.compare import Comparison

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray

BOX = 16 * 2**20
DTYPES = [
    np.dtype(one) for one in (ml_dtypes.bfloat16, np.float16, np.int8, np.float32, np.float64, np.int32)
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, default=2**24)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    normal = np.random.default_rng(0).standard_normal(arguments.elements, np.float32) * 30
    np.empty(
        BOX, np.uint8
    )  # freed, as a report frees its boxes: from then on malloc keeps memory of that size
    rows = {dtype: measured(normal.astype(dtype), arguments.rounds) for dtype in DTYPES}
    show(rows, arguments.elements, arguments.rounds)


def measured(array: Array, rounds: int) -> dict[str, float]:
    """Return the ns an element of each pass."""
    step = BOX // array.itemsize
    boxes = [array[start : start + step] for start in range(0, array.size, step)]
    others = [box[::-1].copy() for box in boxes]
    passes: dict[str, Callable[[], object]] = {
        "range": lambda: [(box.min(), box.max()) for box in boxes],
        "statistics": lambda: statistics_of(boxes),
        "change": lambda: changes_of(boxes, others),
    }
    took = [{name: processor_time(call) for name, call in passes.items()} for _ in range(rounds)]
    return {name: min(one[name] for one in took) / array.size * 1e9 for name in passes}


def statistics_of(boxes: list[Array]) -> object:
    collector = Collector(boxes[0].dtype)
    for box in boxes:
        collector.add(box)
    return collector.result()


def changes_of(boxes: list[Array], others: list[Array]) -> object:
    comparison = Comparison()
    for box, other in zip(boxes, others, strict=True):
        comparison.add(other, box)
    return comparison


def processor_time(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def show(rows: dict[np.dtype, dict[str, float]], elements: int, rounds: int) -> None:
    print("# Statistics of a report\n")
    print(
        f"`python bench/statistics_pass.py`, {os.cpu_count()} cores, numpy {np.__version__}: {elements:,} elements, "
        f"CPU time of one thread, the fastest of {rounds} rounds. The range is `min` and `max` of numpy; the change "
        "is what `--against` adds.\n"
    )
    print("| dtype | range, ns an element | statistics | x the range | change |\n|---|--:|--:|--:|--:|")
    for dtype, ns in rows.items():
        ratio = ns["statistics"] / ns["range"]
        print(
            f"| {dtype.name} | {ns['range']:.2f} | {ns['statistics']:.1f} | {ratio:.1f} | {ns['change']:.1f} |"
        )


if __name__ == "__main__":
    main()
