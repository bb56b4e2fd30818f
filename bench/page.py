"""Say which sentences and rows the pages may repeat of the committed results. `tests/test_figures.py` compares them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from bars import Bar
from report import Verdict, as_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def full() -> dict[str, Any]:
    """Return the committed results of the whole benchmark."""
    return json.loads((RESULTS / "full.json").read_text("utf-8"))  # type: ignore[no-any-return]


def llama() -> dict[str, Any]:
    """Return the committed results of the language model, which is measured in three rounds."""
    return json.loads((RESULTS / "llama.json").read_text("utf-8"))  # type: ignore[no-any-return]


def bars(results: dict[str, Any]) -> str:
    """Return the table of bars, with the goals that they had when it was measured."""
    columns = ["workload", "system", "what", "median round", "all rounds", "bar", "met"]
    return as_table(columns, [verdict.row() for verdict in _verdicts(results)])


def _verdicts(results: dict[str, Any]) -> list[Verdict]:
    return [Verdict(**{**found, "bar": Bar(**found["bar"])}) for found in results["bars"]]


# --------------------------------------------------------------------------------------------- sentences


def sentences() -> dict[str, list[str]]:
    """Return what pages say about the results in words, by page: each must be there, letter by letter."""
    return {
        "README.md": _compared(),
        "docs/index.md": [_beside_orbax(llama())],
        "docs/speed.md": [_dates(), *_of_speed(llama(), full()), *_of_loop(), *_of_h200()],
        "docs/guides/training-run.md": _of_runs(),
        "docs/guides/buckets.md": _of_buckets(),
    }


def _beside_orbax(results: dict[str, Any]) -> str:
    found = {(v.workload, v.bar.system, v.bar.what, v.bar.beside): v.reached or 0 for v in _verdicts(results)}
    save, load = (found["llama", "eformer", what, "orbax"] for what in ("save", "load"))
    size, cores = results["workloads"]["llama"]["nbytes"] / 1e9, results["machine"]["cores"]
    return (
        f"On {cores} cores a {size:.1f} GB model saves {save:.2g} times and loads {load:.2g} times as fast as with "
        f"Orbax, and `save_async` blocks for {found['llama', 'eformer, async', 'blocked', '']:.0f} ms"
    )


def _compared() -> list[str]:
    """Return the cells of the table that compares libraries: row by row, without the words before them."""
    return [_of_flips(), _of_kills(), _of_power_cuts(), _on_h200(), _times_orbax(llama())]


def _of_flips() -> str:
    ours, orbax, safetensors, flax = (
        f"{fault('flips', layout)['wrong']:,}"
        for layout in ("eformer", "Orbax, steps", "safetensors", "flax msgpack")
    )
    return f"| **{ours}** | {orbax} | {safetensors} | {flax} |"


def _of_kills() -> str:
    def lost(layout: str) -> str:
        found = fault("kills", layout)
        return f"{found['lost']} of {found['count']}"

    ours = fault("kills", "eformer")
    orbax = f"{lost('Orbax, steps')} (steps); {lost('Orbax, force=True')} (`force=True`)"
    return f"| **{ours['lost']}** of {ours['count']} | {orbax} | {lost('safetensors')} | {lost('flax msgpack')} |"


def _of_power_cuts() -> str:
    def gone(layout: str) -> str:
        found = fault("blocks", layout)
        return f"{found['lost'] + found['undone']} of {found['count']}"

    ours = fault("blocks", "eformer")
    cells = " | ".join(gone(layout) for layout in ("Orbax, steps", "safetensors", "flax msgpack"))
    return f"| **{ours['lost'] + ours['undone']}** of {ours['count']} | {cells} |"


def fault(kind: str, layout: str) -> Counter[str]:
    """Add up what became of a library, on every file system, under faults of one kind."""
    results = json.loads((ROOT / "faults" / "results" / "peers.json").read_text("utf-8"))
    found: Counter[str] = Counter()
    for row in results["rows"]:
        if row["kind"] == kind and row["layout"].partition(" on ")[0] == layout:
            found.update({word: count for word, count in row.items() if isinstance(count, int)})
    return found


def _on_h200() -> str:
    found = json.loads((RESULTS / "h200.json").read_text("utf-8"))["summary"]
    ours, orbax, safetensors = (
        f"{found[name]['save, GB/s']:.1f}, {found[name]['load, GB/s']:.1f}"
        for name in ("eformer", "orbax", "safetensors, flax")
    )
    return f"| **{ours}** | {orbax} | {safetensors} | |"


def _times_orbax(results: dict[str, Any]) -> str:
    found = {(v.workload, v.bar.system, v.bar.what, v.bar.beside): v.reached or 0 for v in _verdicts(results)}
    save, load = (found["llama", "eformer", what, "orbax"] for what in ("save", "load"))
    return f"| **{save:.2g}, {load:.2g}** | 1 | | |"


def _dates() -> str:
    loop, h200 = (json.loads((RESULTS / f"{name}.json").read_text("utf-8")) for name in ("loop", "h200"))
    return f"measured on {llama()['date']}, the loop on {loop['date']}, the H200 on {h200['facts']['date']};"


def _of_speed(results: dict[str, Any], everything: dict[str, Any]) -> list[str]:
    tables = {t["operation"]: t["limit"] for t in results["tables"] if t["workload"] == "llama"}
    ours = _median_of(results, "eformer")
    verdicts = everything["bars"]
    return [
        _spread("save", results),
        _spread("load", results),
        f"takes {tables['save']['seconds']:.2f} s, one that only reads them {tables['load']['seconds']:.2f} s",
        f"A save needs {ours['save memory'] / 1e6:.1f} MB beyond the state, and a load "
        f"{ours['load memory'] / 1e6:.1f} MB",
        f"of {len(verdicts)}, {sum('yes' in v.row() for v in _verdicts(everything))} were met",
    ]


def _rounds(results: dict[str, Any], system: str) -> list[dict[str, float]]:
    return [
        cell["values"]
        for cell in results["cells"]
        if (cell["workload"], cell["system"]) == ("llama", system) and "values" in cell
    ]


def _median_of(results: dict[str, Any], system: str) -> dict[str, float]:
    rounds = _rounds(results, system)
    return {name: sorted(one[name] for one in rounds)[len(rounds) // 2] for name in rounds[0]}


def _spread(operation: str, results: dict[str, Any]) -> str:
    def seconds(system: str) -> str:
        found = sorted(one[operation] for one in _rounds(results, system))
        return f"{found[0]:.2f} to {found[-1]:.2f} s"

    named = {"Orbax": "orbax", "tuned": "orbax, tuned", "safetensors": "safetensors, flax"}
    others = ", ".join(f"{title} {seconds(system)}" for title, system in named.items())
    return f"a {operation} took {seconds('eformer')} ({others})"


def _of_loop() -> list[str]:
    cells = json.loads((RESULTS / "loop.json").read_text("utf-8"))["cells"]

    def rounds(system: str) -> list[float]:
        return [cell["values"]["p50"] for cell in cells if cell["system"] == system]

    def least_and_most(system: str) -> str:
        return f"{min(rounds(system)):.0f} to {max(rounds(system)):.0f} %"

    first, second, third = (f"{value:.0f}" for value in rounds("eformer"))
    return [
        f"{first}, {second} and {third} % longer in three rounds (Orbax {least_and_most('orbax')}, tuned "
        f"{least_and_most('orbax, tuned')})"
    ]


def _of_h200() -> list[str]:
    found = json.loads((RESULTS / "h200.json").read_text("utf-8"))["summary"]["eformer"]
    returns, first = found["save_async returns, ms"], found["first save_async returns, ms"]
    return [f"`save_async` returns after {returns:.0f} ms (the first time {first:.0f} ms"]


def _row(name: str, beginning: str) -> list[str]:
    """Return the cells of the row that begins like this."""
    lines = (RESULTS / name).read_text("utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"| {beginning} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def _number(cell: str) -> float:
    return float(cell.split()[0])


def _of_runs() -> list[str]:
    plain, saving = (
        _row("runs.md", name)[1] for name in ("no saves", "`checkpoint.Run`, synced to the disk")
    )
    after = _number(_row("runs.md", "`after` without a save")[1])
    listing = _number(_row("runs.md", "listing 10,000 steps in a new process")[1])
    return [
        f"A call of `after` that does not save takes {after:.0f} µs, and a run of 10,000 steps is listed in "
        f"{listing:.1f} s.",
        f"the median step takes {saving} instead of {plain}",
    ]


def _of_buckets() -> list[str]:
    save, load = _row("cloud.md", "`save`, a directory"), _row("cloud.md", "`load`")
    digests = _number(_row("cloud.md", "obstore, with digests")[3]) - _number(
        _row("cloud.md", "obstore, one buffer")[3]
    )
    return [
        f"a save of 1 GiB reaches {_number(save[2]):.1f} of the speed",
        f"a verified load reaches {_number(load[2]):.1f} of the speed",
        f"take {digests:.2f} s of CPU for each GiB",
    ]
