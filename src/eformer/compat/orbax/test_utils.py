"""The two helpers of Orbax's tests that programs use.

Tests: tests/compat_orbax/test_utils.py.
"""

from __future__ import annotations

import shutil
from typing import Any

import jax
import numpy as np

from eformer.compat.orbax._alike import on_disk, to_path


def erase_and_create_empty(directory: Any) -> Any:
    """Remove a directory with everything in it, and make it anew."""
    place = on_disk(directory)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return to_path(directory)


def assert_tree_equal(testclass: Any, expected: Any, actual: Any) -> None:
    """Raise AssertionError if two trees differ."""
    structures: list[Any] = [jax.tree.structure(expected), jax.tree.structure(actual)]
    assert structures[0] == structures[1]
    jax.tree.map(np.testing.assert_array_equal, expected, actual)
