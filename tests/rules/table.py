"""Print the table of the rule book: families, layouts, and the tests of each. `docs/guides/rule-book.md` has it.

.venv/bin/python tests/rules/table.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

from eformer._engine.record.rule_books import books
from support.maxtext_oracle import MODELS as IN_MAXTEXT
from support.tiny_models import NAMES, config_of
from support.tunix_models import MODELS as IN_TUNIX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from eformer._engine.record.rule_books import Family

LAYOUTS = ("flax", "flax-scan", "maxtext-unscanned", "maxtext", "tunix", "gemma")


def kinds_of(names: Iterable[str]) -> set[str]:
    return {config_of(name)["model_type"] for name in names}


def cell(family: Family, layout: str) -> str:
    """Name the tests of a layout: a round trip, equality with MaxText's conversion, equal logits."""
    kinds = {*family.model_types}
    if layout not in family.layouts or not kinds & kinds_of(NAMES):
        return ""
    tests = ["round trip"]
    if layout.startswith("maxtext") and kinds & kinds_of(IN_MAXTEXT):
        tests.append("equal")
    if layout == "tunix" and kinds & kinds_of(IN_TUNIX):
        tests.append("logits")
    return ", ".join(tests)


def _types(family: Family) -> str:
    """Name the model types of a family; types without a tiny model are in parentheses."""
    tested = kinds_of(NAMES)
    return ", ".join(kind if kind in tested else f"({kind})" for kind in family.model_types)


def table() -> str:
    rows = ["| family | model types | " + " | ".join(f"`{layout}`" for layout in LAYOUTS) + " |"]
    rows.append("|---|---|" + "---|" * len(LAYOUTS))
    for family in books():
        if family.model_types:
            cells = [cell(family, layout) for layout in LAYOUTS]
            rows.append(f"| {family.name} | {_types(family)} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
