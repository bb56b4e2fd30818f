"""Tell functions, which a program has in its code, from objects that hold arrays and can be called."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import numpy as np

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, np.ufunc, type, functools._lru_cache_wrapper)


def is_function(leaf: Any) -> bool:
    """Tell whether a leaf is a function or a class: nothing of it has to be stored, because the code has it.

    Of other objects that can be called, such as modules and bound methods, nobody knows what they hold.
    """
    if isinstance(leaf, types.BuiltinFunctionType):
        return leaf.__self__ is None or isinstance(leaf.__self__, types.ModuleType)
    if isinstance(leaf, functools.partial):
        arguments = jax.tree.leaves((leaf.args, leaf.keywords))
        return is_function(leaf.func) and not any(hasattr(argument, "dtype") for argument in arguments)
    return isinstance(leaf, _FUNCTIONS) or _is_of_jax(leaf)


def _is_of_jax(leaf: Any) -> bool:
    """Tell whether this is a function that JAX has wrapped: by jit, vmap, custom_jvp."""
    package = type(leaf).__module__.partition(".")[0]
    return callable(leaf) and package in ("jax", "jaxlib") and not hasattr(leaf, "dtype")
