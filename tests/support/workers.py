"""Functions for the workers of an executor."""

import os
import signal


def die() -> None:
    """Kill the worker that runs this."""
    os.kill(os.getpid(), signal.SIGKILL)
