"""Items by name: the arguments and the results of saves and restores of several items.

Tests: tests/compat_orbax/test_handlers.py.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from eformer.compat.orbax._alike import Alike


class CheckpointArgs(Alike):
    """The base of arguments of saves and restores."""

    alike: tuple[str, ...] = ("CheckpointArgs",)


# Python asks objects for these, and takes an AttributeError for a no.
_ASKED = (
    "__deepcopy__",
    "__copy__",
    "__getstate__",
    "__setstate__",
    "__jax_array__",
    "__array__",
    "__wrapped__",
)


class Composite(Alike, Mapping[str, Any]):
    """Anything by the names of items: `it["state"]` or `it.state`. It cannot be changed.

    An item whose name is also the name of a method, such as "keys", is only found by `it["keys"]`.
    """

    alike = ("Composite",)

    _items: dict[str, Any]

    def __init__(self, **items: Any) -> None:
        for name in items:
            if name.startswith("__"):
                raise ValueError(f'Composite keys cannot start with "__". Got: {name}')
        object.__setattr__(self, "_items", items)

    def __getitem__(self, key: str) -> Any:
        if key not in self._items:
            raise KeyError(f"Unknown key: {key}. Available keys: {list(self._items)}")
        return self._items[key]

    def __getattr__(self, key: str) -> Any:
        if key in _ASKED:
            raise AttributeError(key)
        return self[key]

    def __setattr__(self, key: str, value: Any) -> None:
        raise ValueError("Composite is immutable after initialization.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __and__(self, other: Any) -> Composite:
        return Composite(**{key: value for key, value in self.items() if key in other})

    def __or__(self, other: Any) -> Composite:
        return Composite(**{**self._items, **dict(other.items())})

    def __reduce__(self) -> Any:
        return _make, (type(self), self._items)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._items!r})"

    def keys(self) -> KeysView[str]:
        """Return the names of the items."""
        return self._items.keys()

    def values(self) -> ValuesView[Any]:
        """Return the values of the items."""
        return self._items.values()

    def items(self) -> ItemsView[str, Any]:
        """Return the names and values of the items."""
        return self._items.items()


def _make(kind: type[Composite], items: dict[str, Any]) -> Composite:
    return kind(**items)


class CompositeArgs(Composite, CheckpointArgs):  # type: ignore[misc]
    """Arguments, or restored values, by the names of items."""

    alike = ("CompositeArgs",)
