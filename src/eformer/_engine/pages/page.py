"""Write a report as one HTML file with its styles, scripts and data. It loads nothing, and names are never markup.

Tests: tests/engine/pages/test_report.py, tests/engine/pages/test_timeline.py.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

STYLES = ("report.css",)
_SCRIPTS = ("base.js", "source.js", "charts.js", "tree.js", "report.js")
SCRIPTS = {"checkpoint": _SCRIPTS, "run": (*_SCRIPTS, "run.js")}

MARK = b'<meta name="generator" content="eformer">'  # in every page

# These characters could end the script element or a line of the script, so they become JSON escapes.
_ESCAPES = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page(data: dict[str, Any]) -> str:
    """Return the page of a report of a checkpoint or of a run, given its data.

    The policy of the page allows its own style and script alone, by their hashes, and no loads.
    """
    style = joined_assets(STYLES)
    code = (
        joined_assets(SCRIPTS[data["kind"]])
        + "\neformer.start(eformer.embeddedSource(eformer.embeddedData()));"
    )
    allowed = f"style-src {_hash(style)}; script-src {_hash(code)}"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    return asset("page.html").format(
        policy=policy,
        kind=data["kind"],
        title=html.escape(data["title"]),
        style=style,
        code=code,
        data=embedded_json(data),
    )


def asset(name: str) -> str:
    """Return the text of a file of the package."""
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def joined_assets(names: Sequence[str]) -> str:
    """Return the texts of several files of the package as one."""
    return "\n".join(map(asset, names))


def embedded_json(data: Any) -> str:
    """Return JSON that is safe inside of a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate({ord(character): escaped for character, escaped in _ESCAPES.items()}).encode(
        "utf-8", "replace"
    ).decode()  # fmt: skip


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
