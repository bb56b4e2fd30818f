"""A picture of the results: how fast every system saves and loads each workload, and the machine's limit.

    python bench/plot.py bench/results/full.json

Writes an SVG and a PNG beside the JSON, the same bytes every time. Needs matplotlib, which the peers' environment has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

OPERATIONS = {
    "save": "Save, until it is on stable storage",
    "load": "Load onto shardings, page cache warm, every page touched",
}
# Another operation; and what is mapped has read nothing yet.
LEFT_OUT = {"eformer, async", "orbax, async", "eformer, numpy", "eformer, one leaf", "eformer, mapped"}
OURS, VARIANT, PEER, LIMIT, TEXT, FAINT = "#0b7285", "#74b8c4", "#c3c9cf", "#c2410c", "#1f2933", "#7b8794"
BAR_HEIGHT, WIDTH = 0.235, 11.5  # inches

STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": "#d5dae0",
    "xtick.color": FAINT,
    "xtick.labelsize": 8,
    "ytick.color": TEXT,
    "svg.hashsalt": "eformer",  # or every drawing would have other names inside
    "svg.fonttype": "path",
}


def main() -> None:
    source = Path(sys.argv[1])
    results = json.loads(source.read_text())
    rows = drawn(results)
    if not rows:
        sys.exit("no workload was both saved and loaded: there is nothing to draw")
    with plt.rc_context(STYLE):
        figure = draw(results, rows)
        figure.savefig(source.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
        figure.savefig(source.with_suffix(".png"), dpi=160, metadata={"Software": None})


def drawn(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By workload and operation: the tables of those that have both."""
    found: dict[str, dict[str, Any]] = {}
    for table in results["tables"]:
        if table["operation"] in OPERATIONS and table["limit"]:
            found.setdefault(table["workload"], {})[table["operation"]] = table
    return {workload: tables for workload, tables in found.items() if len(tables) == len(OPERATIONS)}


def draw(results: dict[str, Any], rows: dict[str, dict[str, Any]]) -> Any:
    heights = [max(len(bars_of(table)) for table in tables.values()) + 2.6 for tables in rows.values()]
    figure, axes = plt.subplots(
        len(rows),
        2,
        figsize=(WIDTH, BAR_HEIGHT * sum(heights) + 0.5),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.06)
    for line, (workload, tables) in zip(axes, rows.items(), strict=True):
        for axis, operation in zip(line, OPERATIONS, strict=True):
            draw_table(axis, tables[operation], results["workloads"][workload])
        line[0].set_title(title_of(workload, results["workloads"][workload]), **heading(weight="bold"))
    for axis, name in zip(axes[0], OPERATIONS.values(), strict=True):
        axis.annotate(
            name,
            (0, 1),
            (0, 26),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=11,
            color=OURS,
        )
    return figure


def heading(**more: Any) -> dict[str, Any]:
    return {"loc": "left", "fontsize": 9.5, "pad": 8, **more}


def title_of(workload: str, facts: dict[str, Any]) -> str:
    nbytes, leaves = facts["nbytes"], facts["leaves"]
    size = f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
    return f"{workload}: {size}" + (f" in {leaves:,} leaves" if leaves > 1 else "")


def bars_of(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in table["rows"] if row["system"] not in LEFT_OUT]


def draw_table(axis: Any, table: dict[str, Any], facts: dict[str, Any]) -> None:
    """Fastest first; what is faster is longer."""
    bars, is_small = bars_of(table), facts["nbytes"] / facts["leaves"] < 2**16
    unit, amount = (
        ("thousand leaves/s", facts["leaves"] / 1e3) if is_small else ("GB/s", facts["nbytes"] / 1e9)
    )
    speeds = [amount / row["seconds"] for row in bars]
    limit = amount / table["limit"]["seconds"]
    axis.barh(
        range(len(bars)), speeds, height=0.74, color=[color_of(row["system"]) for row in bars], zorder=2
    )
    axis.axvline(limit, color=LIMIT, linewidth=1.3, linestyle=(0, (4, 2)), zorder=3)
    axis.text(limit, -0.72, f"limit {limit:.3g} ", color=LIMIT, fontsize=8, ha="center", va="bottom")
    for number, (row, speed) in enumerate(zip(bars, speeds, strict=True)):
        label_bar(axis, number, row, speed)
    axis.set_yticks(range(len(bars)), [row["system"] for row in bars])
    for label, row in zip(axis.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if row["system"] == "eformer" else "normal")
    axis.set_ylim(len(bars) - 0.4, -0.7)
    axis.set_xlim(0, 1.18 * max(limit, *speeds))
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", length=2)
    axis.set_xlabel(unit, loc="right", fontsize=8, labelpad=1)


def label_bar(axis: Any, number: int, row: dict[str, Any], speed: float) -> None:
    is_ours = row["system"] == "eformer"
    share = f"  {100 * row['of_limit']:.0f} % of the limit" if is_ours and row["of_limit"] else ""
    inside = is_ours and row["of_limit"] and row["of_limit"] > 0.45
    axis.annotate(
        f"{speed:.3g}{share}",
        (speed, number),
        (-4 if inside else 4, 0),
        textcoords="offset points",
        ha="right" if inside else "left",
        va="center",
        fontsize=8,
        color="white" if inside else TEXT if is_ours else FAINT,
        fontweight="bold" if is_ours else "normal",
        zorder=4,
    )


def color_of(system: str) -> str:
    if system == "eformer":
        return OURS
    return VARIANT if system.startswith("eformer") else PEER


if __name__ == "__main__":
    main()
