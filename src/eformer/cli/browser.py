"""Open a page in a browser, if there is one.

Tests: tests/cli/test_report.py.
"""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from eformer.cli.group import say

# One of these variables leads to a browser with a window, except on macOS and Windows. Without a window, a browser for
# terminals would take the terminal from the command.
_WINDOWS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")


def open_page(path: str) -> None:
    """Open a file in a browser. Print its path if there is no browser."""
    has_windows = sys.platform in ("darwin", "win32") or any(map(os.environ.get, _WINDOWS))
    if not (has_windows and webbrowser.open(Path(path).resolve().as_uri())):
        say(f"no browser found; open {Path(path).resolve()} in one")
