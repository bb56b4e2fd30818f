"""What eformer has to reach, at full size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UNITS = {
    "of the limit": "{:.2f}",
    "x as fast as": "{:.2f}",
    "x the floor": "{:.2f}",
    "x the bytes needed": "{:.3f}",
    "x the trained bytes": "{:.3f}",
    "µs a leaf": "{:.1f}",
    "ms": "{:.2f}",
    "MB beyond the state": "{:.1f}",
    "MB a save": "{:.3f}",
    "% longer": "{:.1f}",
}


@dataclass(frozen=True, slots=True)
class Bar:
    workload: str
    system: str
    what: str
    sign: Literal[">=", "<=", "±"]
    goal: float
    unit: str
    beside: str = ""
    quick: str = ""  # what stands for the workload in a quick run

    def is_met(self, reached: float) -> bool:
        if self.sign == "±":
            return abs(reached) <= self.goal
        return reached >= self.goal if self.sign == ">=" else reached <= self.goal


TEN, EIGHT, HUNDRED, SOAK = "10k small leaves", "10k leaves, 8 devices", "100k small leaves", "50 saves"
FEW, FEW_EIGHT, FEW_SAVES = "2k small leaves", "2k leaves, 8 devices", "20 saves"


def of_limits(workload: str) -> list[Bar]:
    return [
        Bar(workload, "eformer", "save", ">=", 0.9, "of the limit"),
        Bar(workload, "eformer", "load", ">=", 0.85, "of the limit"),
        Bar(workload, "eformer, no digests", "load", ">=", 0.95, "of the limit"),
        Bar(workload, "eformer", "cold load", ">=", 0.9, "of the limit"),
    ]


BARS = [
    *of_limits("llama"),
    *of_limits("training state"),
    *of_limits("one array"),
    Bar(TEN, "eformer", "save", "<=", 10, "µs a leaf", quick=FEW),
    Bar(TEN, "eformer", "load", "<=", 20, "µs a leaf", quick=FEW),
    Bar(EIGHT, "eformer", "save", "<=", 10, "µs a leaf", quick=FEW_EIGHT),
    Bar(EIGHT, "eformer", "load", "<=", 20, "µs a leaf", quick=FEW_EIGHT),
    Bar(EIGHT, "eformer, 8 replicas", "load", "<=", 30, "µs a leaf", quick=FEW_EIGHT),
    Bar(EIGHT, "eformer, 8 rows", "load", "<=", 40, "µs a leaf", quick=FEW_EIGHT),
    Bar(HUNDRED, "eformer", "save", "<=", 15, "µs a leaf", quick=FEW),
    Bar(HUNDRED, "eformer", "load", "<=", 30, "µs a leaf", quick=FEW),
    Bar(HUNDRED, "eformer, numpy", "load", "<=", 5, "µs a leaf", quick=FEW),
    Bar(HUNDRED, "eformer, mapped", "load, returned", "<=", 1.5, "x the floor", quick=FEW),
    Bar(HUNDRED, "eformer, one leaf", "open", "<=", 60, "ms", quick=FEW),
    Bar("resharding", "eformer", "read, rows", "<=", 1.05, "x the bytes needed"),
    Bar("resharding", "eformer, rows", "read, an eighth", "<=", 1.05, "x the bytes needed"),
    Bar("training loop", "eformer", "p50", "<=", 5, "% longer"),
    Bar(SOAK, "eformer", "MB a save", "±", 1, "MB a save", quick=FEW_SAVES),
    Bar("frozen base", "eformer, reuse", "written for each trained byte", "<=", 1.05, "x the trained bytes"),
    Bar("llama", "eformer", "save", ">=", 1.8, "x as fast as", "orbax"),
    Bar("llama", "eformer", "load", ">=", 6, "x as fast as", "orbax"),
    Bar("llama", "eformer", "load", ">=", 5, "x as fast as", "safetensors, flax"),
    Bar("llama", "eformer, async", "blocked", "<=", 3, "ms"),
    Bar("llama", "eformer", "save memory", "<=", 64, "MB beyond the state"),
    Bar("llama", "eformer", "load memory", "<=", 64, "MB beyond the state"),
    Bar("llama", "eformer, zarr", "save", ">=", 1.4, "x as fast as", "orbax"),
    Bar("llama", "eformer, zarr", "load", ">=", 3, "x as fast as", "orbax"),
    Bar(TEN, "eformer", "save", ">=", 20, "x as fast as", "orbax", quick=FEW),
    Bar(TEN, "eformer", "load", ">=", 20, "x as fast as", "orbax", quick=FEW),
    Bar(TEN, "eformer", "load", ">=", 1, "x as fast as", "safetensors, flax", quick=FEW),
    Bar(EIGHT, "eformer", "save", ">=", 1, "x as fast as", "safetensors, numpy", quick=FEW_EIGHT),
    Bar(EIGHT, "eformer", "load", ">=", 1, "x as fast as", "safetensors, numpy", quick=FEW_EIGHT),
]
