"""Call functions of the caller, and tell their errors from errors of eformer."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from eformer._engine.tasks.interrupts import let_through

if TYPE_CHECKING:
    from collections.abc import Callable

_MARK = "_eformer_is_of_caller"


def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the caller: let it be interrupted by Ctrl-C, and mark the error that it raises.

    A FileNotFoundError of a callback, say, looks like that of a missing file of the checkpoint, and would be taken for
    damage.
    """
    try:
        return let_through(partial(function, *arguments))
    except Exception as error:
        with suppress(Exception):  # an error of any class, which may refuse attributes
            setattr(error, _MARK, True)
        raise


def is_of_caller(error: BaseException) -> bool:
    """Tell whether a function of the caller has raised an error."""
    return getattr(error, _MARK, False) is True
