"""What the numbers say: medians, fractions of the machine's limits, bars; as Markdown and as JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bars import BARS, UNITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bars import Bar

OPERATIONS = {"save": "durable save", "load": "load, page cache warm", "cold load": "load, page cache cold"}
OTHERS = {  # what else there may be of a system: its heading, and the factor of its unit
    "save, not synced": ("save without sync, ms", 1e3),
    "load, returned": ("load came back after, ms", 1e3),
    "first load": ("first load, with compilation, ms", 1e3),
    "save memory": ("memory of a save, MB", 1e-6),
    "load memory": ("memory of a load beyond the state, MB", 1e-6),
    "disk bytes": ("on disk, MB", 1e-6),
    "blocked": ("blocked, ms", 1e3),
    "open": ("one leaf, ms", 1e3),
    "read, rows": ("read for rows, x the bytes", 1),
    "read, columns": ("for columns", 1),
    "read, 2x4": ("for 2x4", 1),
    "read, one device": ("for one device", 1),
    "an eighth": ("an eighth of the rows, ms", 1e3),
    "read, an eighth": ("for an eighth of the rows", 1),
    "written": ("written, MB", 1e-6),
    "written for each trained byte": ("written, x the trained bytes", 1),
    "step": ("step, ms", 1e3),
    "p50": ("p50 longer by, %", 1),
    "p99": ("p99 longer by, %", 1),
    "mean": ("mean longer by, %", 1),
    "MB a save": ("memory growth, MB a save", 1),
    "MB in all": ("in all, MB", 1),
    "floor of a save": ("leaves handed out, ms", 1e3),
    "floor of a load": ("arrays made, ms", 1e3),
    "floor of a numpy load": ("numpy arrays made, ms", 1e3),
}

Rounds = dict[int, float]
"""A number for each round in which it was measured."""

# ------------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True, slots=True)
class Limit:
    name: str
    rounds: Rounds
    nbytes: int  # that it wrote or read


@dataclass(frozen=True, slots=True)
class Results:
    facts: Mapping[str, Any]
    workloads: Mapping[str, Mapping[str, Any]]
    cells: Sequence[Mapping[str, Any]]

    def of(self, workload: str) -> Iterator[Mapping[str, Any]]:
        return (cell for cell in self.cells if cell["workload"] == workload)

    def rounds(self, workload: str, system: str, what: str) -> Rounds:
        return {
            cell["round"]: cell["values"][what]
            for cell in self.of(workload)
            if cell["system"] == system and cell["values"].get(what) is not None
        }

    def systems(self, workload: str) -> list[str]:
        """In the order of their first cells, without the limits."""
        return [s for s in dict.fromkeys(c["system"] for c in self.of(workload)) if not s.startswith("limit")]

    def measured(self, workload: str) -> list[str]:
        """By the systems, in the order of the first cells."""
        cells = (cell for cell in self.of(workload) if not cell["system"].startswith("limit"))
        return list(dict.fromkeys(what for cell in cells for what in cell["values"]))

    def limit(self, workload: str, what: str, system: str = "") -> Limit | None:
        """The plain program with the best median; for many leaves, with what these take at least."""
        operation = what.partition(",")[0]
        names = {
            (cell["system"], name)
            for cell in self.of(workload)
            for name in cell["values"]
            if cell["system"].startswith("limit") and name.partition(",")[0] == operation
        }
        if not names:
            return None
        files = ("limit: a file a leaf", f"files of a {operation}")
        if system == "eformer, zarr" and self.rounds(workload, *files):
            names = {files}
        best = min(sorted(names), key=lambda name: statistics.median(self.rounds(workload, *name).values()))
        program = " ".join((best[0].removeprefix("limit: "), *best[1].split(", ")[1:]))
        rounds = self.rounds(workload, *best)
        nbytes = next(cell["nbytes"] for cell in self.of(workload) if cell["system"] == best[0])
        kind = "numpy load" if (system, operation) == ("eformer, numpy", "load") else operation
        floor = self.rounds(workload, "limit: leaves", f"floor of a {kind}")
        if not floor:
            return Limit(program, rounds, nbytes)
        both = {n: seconds + floor[n] for n, seconds in rounds.items() if n in floor}
        return Limit(f"{program}, and the leaves", both, nbytes)


def ratio(numerator: Rounds, denominator: Rounds) -> Rounds:
    """Within each round in which both took part."""
    return {n: numerator[n] / denominator[n] for n in numerator if n in denominator}


def median(rounds: Rounds) -> float | None:
    return statistics.median(rounds.values()) if rounds else None


# -------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True, slots=True)
class Row:
    """One system at one operation: medians of the rounds."""

    system: str
    seconds: float
    least: float
    most: float
    gb_per_second: float
    of_limit: float | None
    x_eformer: float | None
    rounds: int


@dataclass(frozen=True, slots=True)
class Table:
    workload: str
    operation: str
    limit: Row | None
    rows: Sequence[Row]


def tables(results: Results) -> list[Table]:
    return [
        table_of(results, workload, what)
        for workload in results.workloads
        for what in results.measured(workload)
        if what.partition(",")[0] in OPERATIONS and what not in OTHERS and not what.endswith("returned")
    ]


def table_of(results: Results, workload: str, what: str) -> Table:
    limit, ours = results.limit(workload, what), results.rounds(workload, "eformer", what)
    nbytes = results.workloads[workload]["nbytes"]
    found = {system: results.rounds(workload, system, what) for system in results.systems(workload)}
    rows = [
        row_of(system, rounds, nbytes, results.limit(workload, what, system), ours)
        for system, rounds in found.items()
        if rounds
    ]
    first = row_of(f"limit: {limit.name}", limit.rounds, limit.nbytes, limit, {}) if limit else None
    return Table(workload, what, first, sorted(rows, key=lambda row: row.seconds))


def row_of(system: str, rounds: Rounds, nbytes: int, limit: Limit | None, ours: Rounds) -> Row:
    seconds = statistics.median(rounds.values())
    return Row(
        system,
        seconds,
        least=min(rounds.values()),
        most=max(rounds.values()),
        gb_per_second=nbytes / seconds / 1e9,
        of_limit=median(ratio(limit.rounds, rounds)) if limit else None,
        x_eformer=median(ratio(rounds, ours)),
        rounds=len(rounds),
    )


# ---------------------------------------------------------------------------------------------- bars


@dataclass(frozen=True, slots=True)
class Verdict:
    bar: Bar
    workload: str  # that stands for the bar's
    reached: float | None
    least: float | None
    most: float | None
    is_met: bool | None  # None if it is not judged

    def row(self) -> list[str]:
        bar, unit = self.bar, UNITS[self.bar.unit]
        beside = f" {bar.beside}" if bar.beside else ""
        if self.reached is None:
            goal = f"{bar.sign} {bar.goal:g} {bar.unit}{beside}"
            return [self.workload, bar.system, bar.what, "not measured", "", goal, ""]
        return [
            self.workload,
            bar.system,
            bar.what,
            f"{unit.format(self.reached)} {bar.unit}{beside}",
            f"{unit.format(self.least)} to {unit.format(self.most)}",
            f"{bar.sign} {bar.goal:g}",
            {True: "yes", False: "**no**", None: "for the full size"}[self.is_met],
        ]


def verdicts(results: Results) -> list[Verdict]:
    return [judge(results, bar) for bar in BARS if workload_of(results, bar)]


def workload_of(results: Results, bar: Bar) -> str | None:
    """The workload that stands for the bar's in this run: a quick one has fewer leaves and saves."""
    names = (bar.workload, bar.quick) if results.facts["quick"] else (bar.workload,)
    return next((workload for workload in results.workloads if workload in names), None)


def judge(results: Results, bar: Bar) -> Verdict:
    workload = workload_of(results, bar) or bar.workload
    rounds = in_unit_of(results, bar, workload)
    reached = median(rounds)
    if reached is None:
        return Verdict(bar, workload, None, None, None, None if results.facts["quick"] else False)
    is_met = None if results.facts["quick"] else bar.is_met(reached)
    return Verdict(bar, workload, reached, min(rounds.values()), max(rounds.values()), is_met)


def in_unit_of(results: Results, bar: Bar, workload: str) -> Rounds:
    ours = results.rounds(workload, bar.system, bar.what)
    if bar.unit == "of the limit":
        limit = results.limit(workload, bar.what, bar.system)
        return ratio(limit.rounds, ours) if limit else {}
    if bar.unit == "x as fast as":
        return ratio(results.rounds(workload, bar.beside, bar.what), ours)
    if bar.unit == "x the floor":
        return ratio(ours, results.rounds(workload, "limit: leaves", "floor of a load"))
    factor = {
        "µs a leaf": 1e6 / results.workloads[workload]["leaves"],
        "ms": 1e3,
        "MB beyond the state": 1e-6,
    }
    return {n: value * factor.get(bar.unit, 1) for n, value in ours.items()}


# --------------------------------------------------------------------------------------------- output


def markdown(results: Results) -> str:
    return "\n\n".join(
        [
            *heading(results),
            "## Bars\n\n" + as_table(
                ["workload", "system", "what", "median round", "all rounds", "bar", "met"],
                [verdict.row() for verdict in verdicts(results)],
            ),
            *(section(results, workload) for workload in results.workloads),
        ]
    )  # fmt: skip


def heading(results: Results) -> Iterator[str]:
    facts, machine = results.facts, results.facts["machine"]
    yield "# Benchmark" + (", quick: a fifth of the size, one round" if facts["quick"] else "")
    yield (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory GB']} GB, Linux {machine['kernel']}, "
        f"{machine['file system']} ({machine['mount options']}). {facts['date']}, {facts['minutes']:.0f} minutes: "
        f"`{facts['command']}`."
    )
    yield "\n".join(
        f"- {name}: " + ", ".join(f"{package} {version}" for package, version in found.items())
        for name, found in facts["versions"].items()
    )
    yield (
        "Every cell is a fresh process; systems and limits take turns, and ratios are taken within each round. At "
        "full size each has up to three tries in its process, of which the fastest counts, limits as systems. Saves "
        "end on stable storage, loads when every page has been touched; every bit is compared. *Of the limit* is the "
        "time of the best plain program for the same bytes, divided by the system's; *x eformer* is the system's time, "
        "divided by ours."
    )


def section(results: Results, workload: str) -> str:
    facts = results.workloads[workload]
    parts = [
        f"## {workload}",
        f"{facts['about']}: {facts['nbytes'] / 1e6:,.0f} MB, leaves: {facts['leaves']:,}.",
    ]
    for table in tables(results):
        if table.workload == workload:
            name = OPERATIONS.get(table.operation, table.operation)
            parts += [f"**{workload}: {name}**", operation_table(table)]
    parts += [others_table(results, workload), *notes(results, workload)]
    return "\n\n".join(part for part in parts if part)


def operation_table(table: Table) -> str:
    rows = [table.limit] if table.limit else []
    return as_table(
        ["system", "median s", "all rounds", "GB/s", "of the limit", "x eformer"],
        [
            [
                f"**{row.system}**" if row.system.startswith("eformer") else row.system,
                in_seconds(row.seconds),
                f"{in_seconds(row.least)} to {in_seconds(row.most)}" if row.rounds > 1 else "",
                shown(row.gb_per_second),
                shown(row.of_limit),
                shown(row.x_eformer),
            ]
            for row in (*rows, *table.rows)
        ],
    )


def others_table(results: Results, workload: str) -> str:
    found = [what for what in results.measured(workload) if what in OTHERS]
    rows = [
        [system, *(scaled(median(results.rounds(workload, system, what)), OTHERS[what][1]) for what in found)]
        for system in results.systems(workload)
    ]
    return as_table(["system", *(OTHERS[what][0] for what in found)], [row for row in rows if any(row[1:])])


def notes(results: Results, workload: str) -> Iterator[str]:
    """What went wrong, and what this machine cannot do."""
    found = {
        f"- {cell['system']}: {text}": None
        for cell in results.of(workload)
        for text in (cell.get("error"), cell.get("skipped"))
        if text
    }
    if found:
        yield "\n".join(line.replace("\n", " ") for line in found)


def in_seconds(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def scaled(value: float | None, factor: float) -> str:
    return "" if value is None else f"{value * factor:.2f}"


def as_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def as_json(results: Results) -> str:
    """One line for each bar, table and cell, so that two results can be compared line by line."""
    parts = {
        **{
            name: json.dumps(value)
            for name, value in {**results.facts, "workloads": results.workloads}.items()
        },
        "bars": lines(asdict(verdict) for verdict in verdicts(results)),
        "tables": lines(asdict(table) for table in tables(results)),
        "cells": lines(results.cells),
    }
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {text}" for name, text in parts.items()) + "\n}\n"


def lines(values: Any) -> str:
    return "[\n" + ",\n".join(json.dumps(value) for value in values) + "\n]"
