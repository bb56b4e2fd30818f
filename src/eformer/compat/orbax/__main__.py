"""Run a program with the door in the place of Orbax: `python -m eformer.compat.orbax prog.py ARGUMENTS`."""

import runpy
import sys
from pathlib import Path

from eformer.compat.orbax import install


def main() -> None:
    """Run the program that the arguments name."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m eformer.compat.orbax PROGRAM.py [ARGUMENT ...]")
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
