"""Compute a property once, at its first use, without a lock.

Tests: tests/engine/tasks/test_forks.py, tests/compat/test_files.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class lazy_property(Generic[T]):  # noqa: N801  a decorator
    """Keep the result of a method in the object, as `functools.cached_property` does.

    The cached_property of Python 3.11 computes under a lock of the class: objects wait for each other, and a child that
    is forked meanwhile never gets the lock. Here two threads may both compute the value, and the last value stays.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> T | Self:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
