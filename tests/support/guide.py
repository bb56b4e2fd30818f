"""Run the blocks of the guide to frameworks, section by section."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "frameworks.md"


def sections() -> dict[str, str]:
    """Return the code of each section, by its heading."""
    _, *parts = PAGE.read_text("utf-8").split("\n## ")
    return {
        part.partition("\n")[0]: "\n".join(re.findall(r"```python\n(.*?)```", part, re.DOTALL))
        for part in parts
    }


def run(section: str) -> dict[str, Any]:
    """Run the blocks of a section, one after the other, in the current directory; return their variables."""
    variables: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(sections()[section], f"{PAGE}: {section}", "exec", dont_inherit=True), variables)
    return variables
