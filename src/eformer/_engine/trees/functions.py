"""Tell leaves that a program has in its code, such as functions, from objects that hold arrays."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import numpy as np

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, np.ufunc, type, functools._lru_cache_wrapper)


# Leaves without a value: Equinox puts one in the place of each weight that another one is tied to.
_PLACEHOLDERS = frozenset({("equinox.nn._shared", "SharedNode")})


def is_code(leaf: Any) -> bool:
    """Tell whether a leaf is a function, a class or a placeholder: nothing of it has to be stored, the code has it.

    Of other objects that can be called, such as modules and bound methods, nobody knows what they hold.
    """
    if hasattr(leaf, "dtype"):
        return False
    if isinstance(leaf, types.BuiltinFunctionType):
        return leaf.__self__ is None or isinstance(leaf.__self__, types.ModuleType)
    if isinstance(leaf, functools.partial):
        arguments = jax.tree.leaves((leaf.args, leaf.keywords))
        return is_code(leaf.func) and not any(hasattr(argument, "dtype") for argument in arguments)
    kind = type(leaf)
    is_of_jax = callable(leaf) and kind.__module__.partition(".")[0] in ("jax", "jaxlib")  # jit, custom_jvp
    return isinstance(leaf, _FUNCTIONS) or is_of_jax or (kind.__module__, kind.__qualname__) in _PLACEHOLDERS
