"""Warn once if another package called eformer is installed, or if its removal has removed files of this package.

The distribution `eformer` has the import name of `eformer-checkpoint`, and pip does not know that. The second package
to be installed overwrites files of the first, and removing either package removes files of both.

Tests: tests/package/test_install.py.
"""

import os
import sys

_MARK = "eformer/jaximus/__init__.py"  # every version of the other package has this file
_REPAIR = "pip uninstall eformer eformer-checkpoint && pip install eformer-checkpoint"


def find_problem() -> str | None:
    """Describe foreign or missing files of the installed package; return None if there are none."""
    own = os.path.dirname(__file__)  # noqa: PTH120  pathlib takes milliseconds to import
    if getattr(sys.modules["eformer"], "__file__", None) is None:
        return f"{own} has lost files of eformer-checkpoint, as after `pip uninstall eformer`"
    for place in sys.path:
        if os.path.isfile(f"{place or '.'}/{_MARK}"):  # noqa: PTH113
            return (
                f"{place or '.'}/eformer has files of the package eformer, which has the import name of "
                "eformer-checkpoint; each overwrites or hides files of the other, so an environment can have only one"
            )
    return None


if (_problem := find_problem()) is not None:
    import warnings

    warnings.warn(f"{_problem}. To have eformer-checkpoint: {_REPAIR}", stacklevel=3)
