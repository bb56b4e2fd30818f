"""Read the attributes that zarr-python attaches to groups and arrays: JSON, in which Python also writes NaN."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from eformer._engine.record.values import value_to_json
from eformer._engine.stores.base import read_whole
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from eformer._engine.stores.base import Store

ZATTRS = ".zattrs"  # of zarr 2

_T = TypeVar("_T")


def parse_lenient(data: bytes, origin: str) -> Any:
    """Parse JSON that may have NaN and Infinity in it."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{origin} is not JSON: {str(error)[:200]}") from error


def convert_lenient(document: Any, kind: type[_T]) -> _T:
    """Convert what `parse_lenient` returned; raise a FormatError if it is not of this kind."""
    try:
        return msgspec.convert(document, kind)
    except (
        msgspec.ValidationError,
        UnicodeEncodeError,
    ) as error:  # the latter: a member named by a lone surrogate
        raise FormatError(str(error)) from error


def to_metadata(attributes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return attributes as metadata of the tree: those of the root by their names, those of a path under `PATH/`."""
    below = {f"{path}/": value_to_json(dict(found)) for path, found in attributes.items() if path and found}
    return below | {name: value_to_json(value) for name, value in attributes.get("", {}).items()}


def read_attributes(store: Store, arrays: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read the attributes of arrays of zarr 2, given by path, and of the groups that they are in."""
    found = {}
    for path in sorted({path for array in arrays for path in _upwards(array)}):
        name = f"{path}/{ZATTRS}" if path else ZATTRS
        if store.exists(name):
            document = parse_lenient(read_whole(store, name)[0], store.path_to(name))
            if not isinstance(document, dict):
                raise FormatError(f"{store.path_to(name)} does not hold attributes")
            found[path] = document
    return found


def _upwards(path: str) -> Iterable[str]:
    """Return a path and those above it, up to the root."""
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield ""
