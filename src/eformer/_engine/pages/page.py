"""Write a report as one HTML file: styles, scripts and data are inside, nothing is loaded, names are never markup."""

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

# What would end the element, or a line of a script, is written as JSON escapes.
_ESCAPES = {character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def page(data: dict[str, Any]) -> str:
    """Return the page of a report, given its data: those of a checkpoint or of a run.

    Only its own style and script may run, by their hashes, and nothing may be loaded from anywhere.
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
    """Return the text of several files of the package."""
    return "\n".join(map(asset, names))


def embedded_json(data: Any) -> str:
    """Return JSON that can stand inside of a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate({ord(character): escaped for character, escaped in _ESCAPES.items()}).encode(
        "utf-8", "replace"
    ).decode()  # fmt: skip


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
