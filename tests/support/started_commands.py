"""What the interpreter has imported that commands are forked from: everything but jax."""

from __future__ import annotations

import os
import sys

import eformer._engine.tools.convert
import eformer._engine.tools.diff
import eformer._engine.tools.prune
import eformer._engine.tools.sign
import eformer._engine.tools.verify
import eformer._engine.tools.view
import eformer.cli.terminal  # noqa: F401
from eformer.cli.commands import main


def carry_out(command: list[str], variables: dict[str, str], directory: str, out: str, err: str) -> None:
    """Run one command as the program would: with these variables, in this directory, its output into files."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", encoding="utf-8")
    sys.argv = ["eformer", *command]
    main()
