"""Show notebooks as pages: their cells and the outputs that are stored with them. Nothing is executed.

myst-nb would do the same, with a database for executions and a kernel, which a page of stored outputs does not need.
"""

import json
from collections.abc import Iterator
from typing import Any

FENCE = "`" * 12  # longer than any fence inside


def as_markdown(text: str, name: str) -> str:
    """Return a notebook as Markdown for MyST, with a link to the file itself after its first cell."""
    first, *others = json.loads(text)["cells"]
    link = f"{{download}}`Download this notebook <{name}>`: every cell shows what it showed when it was last run."
    return "\n\n".join(
        [
            *_cell(first),
            link,
            *(part for cell in others for part in _cell(cell)),
        ]
    )


def _cell(cell: Any) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield _fenced("python", source)
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "text/html" in data:
            yield _fenced("{raw} html", "".join(data["text/html"]))
        elif shown := "".join(data.get("text/plain", output.get("text", ""))):
            yield _fenced("text", shown)


def _fenced(kind: str, text: str) -> str:
    return f"{FENCE}{kind}\n{text}\n{FENCE}"
