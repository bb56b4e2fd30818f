"""One server that processes are forked from. It has imported what they need, and has started nothing."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

_PRELOADED = ["support.started_commands", "multihost.scenes", "support.run_faults"]


def context() -> ForkServerContext:
    """Return the context to start processes in; the first call starts the server."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOADED)
    before = os.environ.get("PYTHONPATH")
    # The server does not get the path of this interpreter, and does not say what it could not import.
    here = str(Path(__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, before)))
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return found
