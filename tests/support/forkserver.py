"""One server that processes are forked from. It has imported what they need, and has started nothing."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import tempfile
import warnings
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerContext

_PRELOADED = [
    "support.started_commands",
    "multihost.scenes",
    "support.run_faults",
    "support.interrupting",
    "support.forking",
]


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


def run(function: Callable[..., object], *arguments: Any, limit: float) -> subprocess.CompletedProcess[str]:
    """Call a function in a fork without warnings; return its exit code and what it wrote. Kill it at the limit."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "err")]
        for output in outputs:
            output.touch()
        process = context().Process(target=_redirected, args=(outputs, function, arguments))
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
        told = (output.read_text("utf-8", errors="replace") for output in outputs)
        return subprocess.CompletedProcess(arguments, process.exitcode, *told)


def _redirected(outputs: list[Path], function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    for path, descriptor in zip(outputs, (1, 2), strict=True):
        opened = os.open(path, os.O_WRONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    warnings.simplefilter("ignore")
    function(*arguments)
