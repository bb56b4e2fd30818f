"""Draw the charts of docs/speed.md and docs/reliability.md from the committed results: `python bench/charts.py`.

One chart answers one question, with few bars and one unit. The files are plain SVG, light or dark as the reader's
system, and readable at a width of 400 pixels. `tests/test_figures.py` fails if a chart is not that of the results.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from page import fault

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
CHARTS = ROOT / "docs" / "charts"

WIDTH, LABELS, ROW = 480, 158, 34  # pixels
BARS = WIDTH - LABELS - 76  # what a value needs beside its bar

STYLE = """\
  text { font: 14px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 }
  .ours { fill: #0b7285 } .peer { fill: #c3c9cf }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .ours { fill: #3aa5b8 } .peer { fill: #4d555f }
  }"""

LIBRARIES = {
    "eformer": "eformer",
    "orbax": "Orbax",
    "orbax, tuned": "Orbax, tuned",
    "safetensors, flax": "safetensors",
}

# As each library's documentation says to use it, and Orbax over one path, for which it has `force=True`.
TRIED = {
    "eformer": "eformer",
    "Orbax, steps": "Orbax, steps",
    "Orbax, force=True": "Orbax, one path",
    "safetensors": "safetensors",
    "flax msgpack": "flax msgpack",
}

Bars = dict[str, float]


def charts() -> dict[str, str]:
    """Return every chart by the name of its file."""
    model, h200 = result("llama"), result("h200")
    llama = {row: cells(model, "llama", row) for row in ("save", "load", "blocked")}
    gigabytes = f"{model['workloads']['llama']['nbytes'] / 1e9:.1f} GB, {model['machine']['cores']} cores"
    return {
        "stops.svg": chart(f"How long a save stops the program ({gigabytes}), ms", stops(llama)),
        "save.svg": chart(
            f"A save, until it is on the disk ({gigabytes}), seconds", libraries(llama["save"])
        ),
        "load.svg": chart(f"A load onto shardings ({gigabytes}), seconds", libraries(llama["load"])),
        "loop.svg": chart("Median training step with saves, percent longer", loop()),
        "h200.svg": chart("A load to an H200 (7.4 GB), seconds", on_h200(h200, "load")),
        "h200-save.svg": chart("A save from an H200 (7.4 GB), seconds", on_h200(h200, "save")),
        "small-save.svg": chart("A save of 10,000 tiny arrays, microseconds an array", small("save")),
        "small-load.svg": chart("A load of 10,000 tiny arrays, microseconds an array", small("load")),
        "memory.svg": chart(f"Memory of a load beyond the state ({gigabytes}), MB", memory(model)),
        "flips.svg": chart("One bit flipped: a load returns wrong values, percent", shares("flips", "wrong")),
        "kills.svg": chart(
            "Killed while saving: the old checkpoint is lost, percent", shares("kills", "lost", "wrong")
        ),
        "power.svg": chart(
            "Power cut: a finished save is gone, percent", shares("blocks", "lost", "undone", "wrong")
        ),
    }


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))  # type: ignore[no-any-return]


def cells(results: dict[str, Any], workload: str, value: str) -> Bars:
    """Return a value of every system, the median of the rounds."""
    found: dict[str, list[float]] = {}
    for cell in results["cells"]:
        if cell["workload"] == workload and value in cell.get("values", {}):
            found.setdefault(cell["system"], []).append(cell["values"][value])
    return {system: sorted(values)[len(values) // 2] for system, values in found.items()}


def libraries(values: Bars) -> Bars:
    return {title: values[system] for system, title in LIBRARIES.items()}


def stops(llama: dict[str, Bars]) -> Bars:
    blocked, save = llama["blocked"], llama["save"]
    return {
        "eformer, async": 1e3 * blocked["eformer, async"],
        "Orbax, async": 1e3 * blocked["orbax, async"],
        "safetensors": 1e3 * save["safetensors, flax"],
    }


def loop() -> Bars:
    found = cells(result("loop"), "training loop", "p50")
    return {LIBRARIES[system]: found[system] for system in ("eformer", "orbax", "orbax, tuned")}


def on_h200(results: dict[str, Any], operation: str) -> Bars:
    gigabytes = results["facts"]["bytes"] / 1e9
    found = results["summary"]
    speeds = {system: found[system][f"{operation}, GB/s"] for system in LIBRARIES}
    return libraries({system: gigabytes / speed for system, speed in speeds.items()})


def small(operation: str) -> Bars:
    lines = (RESULTS / "small_leaves.md").read_text("utf-8").splitlines()

    def row(name: str) -> float:
        line = next(line for line in lines if line.startswith(f"| {name} |"))
        return float(line.split("|")[2])

    return {
        "eformer": row(f"{operation}, 10,000 leaves"),
        "safetensors": row(f"safetensors.flax, {operation}, 10,000 leaves"),
    }


def memory(results: dict[str, Any]) -> Bars:
    found = cells(results, "llama", "load memory")
    return {title: max(0.0, found[system] / 1e6) for system, title in LIBRARIES.items()}


def shares(kind: str, *failures: str) -> Bars:
    """Return how many of the faults of a kind were such failures, in percent, by library."""
    found = {title: fault(kind, layout) for layout, title in TRIED.items()}
    return {
        title: 100 * sum(each[word] for word in failures) / each["count"] for title, each in found.items()
    }


# --------------------------------------------------------------------------------------------- drawing


def chart(title: str, bars: Bars) -> str:
    """Return bars beside each other, shortest best, with their values."""
    height = 34 + ROW * len(bars) + 6
    most = max(bars.values()) or 1.0
    drawn = [bar(number, name, value, value / most) for number, (name, value) in enumerate(bars.items())]
    spoken = escape(f"{title}: " + ", ".join(f"{name} {figure(value)}" for name, value in bars.items()))
    head = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" aria-label="{spoken}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {head}>',
        f"<title>{spoken}</title>",
        f"<style>\n{STYLE}\n</style>",
        f'<text class="title" x="0" y="18">{escape(title)}</text>',
        *drawn,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def bar(number: int, name: str, value: float, share: float) -> str:
    top, kind = 34 + ROW * number, "ours" if name.startswith("eformer") else "peer"
    length = max(2, round(BARS * share))
    return (
        f'<text x="{LABELS - 10}" y="{top + 19}" text-anchor="end">{escape(name)}</text>'
        f'<rect class="{kind}" x="{LABELS}" y="{top + 3}" width="{length}" height="{ROW - 10}" rx="3"/>'
        f'<text x="{LABELS + length + 8}" y="{top + 19}">{figure(value)}</text>'
    )


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    CHARTS.mkdir(exist_ok=True)
    for name, text in charts().items():
        (CHARTS / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
