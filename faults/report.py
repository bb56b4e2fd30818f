"""Tables of what came of the cases: one row for each kind and layout, for each kind, or for each kind and library."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cases import FAILURES, OVER, SOUND, VOID

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).resolve().parents[1]
SHOWN = 5
PAGE = ROOT / "docs" / "reliability.md"


def summary(records: Iterable[Mapping[str, Any]], titles: Mapping[str, str], **facts: Any) -> dict[str, Any]:
    """Return everything that the tables show."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    failures, seconds = [], 0.0
    for record in records:
        seconds += record["seconds"]
        if record["word"] in (VOID, OVER):
            continue
        counts = rows.setdefault((record["kind"], record["layout"]), Counter())
        counts[record["word"]] += 1
        counts["count"] += record["count"]
        if record["word"] in FAILURES and sum(counts[word] for word in FAILURES) <= SHOWN:
            failures.append(
                {name: record[name] for name in ("kind", "layout", "seed", "word")}
                | {"note": _told(record["note"])}
            )
    order = list(titles)
    return {
        **facts,
        "minutes": seconds / 60 / facts["workers"],
        "titles": dict(titles),
        "rows": [
            {"kind": kind, "layout": layout, **counts}
            for (kind, layout), counts in sorted(rows.items(), key=lambda row: order.index(row[0][0]))
        ],
        "failures": failures,
    }


def _told(note: str) -> str:
    """Shorten a note, and leave out directories that say nothing on other machines."""
    return re.sub(r"/\S*?(eformer-faults-|\.scratch/)\w+", "…", " ".join(note.split()))[:300]


# -------------------------------------------------------------------------------------------- tables


def _table(heads: list[str], rows: Iterable[list[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _number(value: int) -> str:
    return f"{value:,}" if value else "–"


def _cases(counts: Mapping[str, int]) -> int:
    return sum(counts.get(word, 0) for word in (*SOUND, *FAILURES))


def _failures(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[word]:,} {word}" for word in FAILURES if counts.get(word)) or "0"


def _sound(counts: Mapping[str, int]) -> list[str]:
    return [_number(counts.get(word, 0)) for word in SOUND]


def by_layout(found: Mapping[str, Any]) -> str:
    """Return a row for each kind and layout."""
    rows = [
        [row["kind"], row["layout"], f"{_cases(row):,}", f"{row['count']:,}", *_sound(row), _failures(row)]
        for row in found["rows"]
    ]
    rows += [[*key.split("/"), "cannot run", reason, *[""] * 5] for key, reason in found["cannot"].items()]
    return _table(["kind", "layout", "cases", "faults, loads or tests", *SOUND, "failures"], rows)


def by_kind(found: Mapping[str, Any]) -> str:
    """Return a row for each kind, over all layouts."""
    rows = []
    for kind, title in found["titles"].items():
        layouts = [row for row in found["rows"] if row["kind"] == kind]
        if layouts:
            counts = sum(
                (Counter({k: v for k, v in row.items() if isinstance(v, int)}) for row in layouts), Counter()
            )
            shown = [f"{_cases(counts):,}", f"{counts['count']:,}", *_sound(counts), _failures(counts)]
            rows.append([f"`{kind}`: {title}", len(layouts), *shown])
        else:
            reasons = {reason for key, reason in found["cannot"].items() if key.startswith(f"{kind}/")}
            rows.append([f"`{kind}`: {title}", "–", "cannot run" if reasons else "–", *[""] * 6])
    return _table(["fault", "layouts", "cases", "faults, loads or tests", *SOUND, "failures"], rows)


def by_library(found: Mapping[str, Any]) -> str:
    """Return a row for each kind, a column for each library; failures are bold."""
    libraries = list(dict.fromkeys(row["layout"].partition(" on ")[0] for row in found["rows"]))
    rows = []
    for kind, title in found["titles"].items():
        cells = []
        for library in libraries:
            counts: Counter[str] = Counter()
            for row in found["rows"]:
                if row["kind"] == kind and row["layout"].partition(" on ")[0] == library:
                    counts.update({word: row.get(word, 0) for word in (*SOUND, *FAILURES)})
            words = [f"{counts[word]:,} {word}" for word in SOUND if counts[word]]
            words += [f"**{counts[word]:,} {word}**" for word in FAILURES if counts[word]]
            cells.append("<br>".join(words) or "–")
        rows.append([f"`{kind}`: {title}", *cells])
    return _table(["fault", *libraries], rows)


def markdown(found: Mapping[str, Any]) -> str:
    """Return the whole report."""
    main = by_library(found) if found["peers"] else by_kind(found)
    parts = [
        f"# Faults: {found['name']}",
        facts(found),
        main,
        unable(found),
        meanings(),
        "## By layout",
        by_layout(found),
    ]
    if found["failures"]:
        lines = [
            f"- `{f['kind']}/{f['layout']}/{f['seed']}`: {f['word']}: {f['note']}" for f in found["failures"]
        ]
        parts += [f"## Failures (the first {SHOWN} of each kind and layout)", "\n".join(lines)]
    return "\n\n".join(parts)


def facts(found: Mapping[str, Any]) -> str:
    return f"{found['minutes']:.1f} minutes with {found['workers']} workers: `{found['command']}`. {found['machine']}."


def unable(found: Mapping[str, Any]) -> str:
    """Say what could not run, and why."""
    reasons: dict[tuple[str, str], int] = Counter(
        (key.partition("/")[0], reason) for key, reason in found["cannot"].items()
    )
    said = "; ".join(
        f"`{kind}`, {count} of its layouts: {reason}" for (kind, reason), count in reasons.items()
    )
    return f"Could not run here: {said or 'nothing'}."


def meanings() -> str:
    """Return a list of the words in the tables, with the meaning of each."""
    words = {
        "old, new": "the load returned this checkpoint, whole",
        "refused": "an error names the damage",
        "passed": "a file of tests, or a measurement, without a failure",
        **{f"{word} (failure)": meaning for word, meaning in FAILURES.items()},
    }
    return "\n".join(f"- *{word}*: {meaning}" for word, meaning in words.items())


# ---------------------------------------------------------------------------------------------- page


def blocks(directory: Path) -> dict[str, str]:
    """Return the parts of the page that come from result files."""
    ours, peers = (json.loads((directory / f"{name}.json").read_text()) for name in ("ours", "peers"))
    return {
        "ours": f"{facts(ours)}\n\n{by_kind(ours)}\n\n{unable(ours)}",
        "peers": f"{facts(peers)}\n\n{by_library(peers)}",
        "words": meanings(),
        "fuzz": fuzzed(json.loads((directory / "fuzz.json").read_text())),
    }


def fuzzed(found: Mapping[str, Any]) -> str:
    """Return how many inputs the fuzzer has tried, and on which readers; two readers in a row of the table."""
    inputs: dict[str, int] = found["inputs"]
    cells = [[f"`{name}`", f"{count:,}"] for name, count in inputs.items()]
    half = -(-len(cells) // 2)
    rows = [left + right for left, right in zip_longest(cells[:half], cells[half:], fillvalue=["", ""])]
    total = f"{sum(inputs.values()):,} inputs, {found['findings']} findings."
    return f"{total}\n\n{_table(['reader', 'inputs', 'reader', 'inputs'], rows)}"


def filled(page: str, parts: Mapping[str, str]) -> str:
    """Return the page with each part between its marks."""
    for name, text in parts.items():
        begin, end = f"<!-- faults: {name} -->", f"<!-- end of {name} -->"
        page = re.sub(
            f"{begin}.*?{end}", lambda _, t=text, b=begin, e=end: f"{b}\n{t}\n{e}", page, flags=re.DOTALL
        )
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the tables of faults/results into docs/reliability.md.")
    parser.add_argument("--results", type=Path, default=ROOT / "faults" / "results")
    args = parser.parse_args()
    PAGE.write_text(filled(PAGE.read_text("utf-8"), blocks(args.results)), "utf-8")


if __name__ == "__main__":
    main()
