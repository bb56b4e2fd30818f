"""Views: values of either library as JSON, with everything that a caller can see and nothing else.

Kept: types of containers and leaves, dtypes, shapes, shardings, weak types, bits, and attributes of metadata. Left out:
the order of keys, names of classes that callers do not name, and times.
"""

import dataclasses
import hashlib
import json
import pathlib

import jax
import numpy as np

_METADATA = ("ArrayMetadata", "ScalarMetadata", "StringMetadata")
_LIBRARIES = ("orbax.", "eformer.")
_ERRORS = ("StepAlreadyExistsError", "StepNotFoundError", "InvalidLayoutError", "DeletionInProgressError")
_V1 = ("step", "metadata", "metrics", "custom_metadata")


class Viewer:
    """Turns values into data; paths become relative to `root`."""

    def __init__(self, ocp, root):
        self.ocp, self.root = ocp, str(root)

    def view(self, value):
        """Return the value as JSON."""
        return self._outcome(value) or self._leaf(value) or self._library(value) or self._container(value)

    def _outcome(self, value):
        if type(value).__name__ != "Outcome":
            return None
        if value.error is None:
            return {"returned": self.view(value.value)}
        shown = {"raised": families(value.error), "message": self._text(str(value.error))[:400]}
        return shown if value.says is None else {**shown, "says": value.says}

    def _leaf(self, value):
        plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
        if plain and not isinstance(value, np.generic):
            return {"python": type(value).__name__, "value": self._text(str(value))}
        if isinstance(value, jax.Array):
            return {
                "jax": _array(value),
                "weak": bool(value.aval.weak_type),
                "sharding": sharding(value.sharding),
            }
        if isinstance(value, (np.ndarray, np.generic)):
            return {"numpy" if isinstance(value, np.ndarray) else "numpy scalar": _array(value)}
        if isinstance(value, jax.ShapeDtypeStruct):
            return {"abstract": _shape(value), "sharding": sharding(value.sharding)}
        if isinstance(value, jax.sharding.Sharding):
            return {"sharding": sharding(value)}
        if isinstance(value, np.dtype):
            return {"dtype": str(value)}
        if isinstance(value, (pathlib.PurePath,)) or type(value).__module__.startswith("etils.epath"):
            return {"path": self._text(str(value))}
        if isinstance(value, type):
            return {"class": value.__name__}
        return {"ellipsis": True} if value is ... else None

    def _text(self, text):
        return text.replace(self.root, "<root>")

    def _library(self, value):
        """View objects of the library by their attributes; a class that is not known has its name alone."""
        if not type(value).__module__.startswith(_LIBRARIES):
            return None
        has = lambda *names: all(_has(value, name) for name in names)
        if isinstance(value, self.ocp.args.Composite):
            return {"composite": {key: self.view(value[key]) for key in value.keys()}}  # noqa: SIM118
        if kinds := [name for name in _METADATA if isinstance(value, getattr(self.ocp.metadata, name))]:
            return {"leaf metadata": kinds, **self._described(value)}
        if has("to_jax_sharding"):
            return {"sharding metadata": sharding(value.to_jax_sharding())}
        if has("item_handlers", "item_metadata"):
            return {"step metadata": self._attributes(value, "item_metadata", "metrics", "custom_metadata")}
        if has("internal_metadata", "custom_metadata"):
            return {"root metadata": self._attributes(value, "custom_metadata")}
        if has("tree", "custom_metadata"):
            return {"tree metadata": self._attributes(value, "tree", "custom_metadata")}
        if has("metadata", "custom_metadata", "init_timestamp_nsecs"):
            return {
                "checkpoint metadata": self._attributes(value, *(name for name in _V1 if _has(value, name)))
            }
        if dataclasses.is_dataclass(value) or isinstance(value, tuple) or _is_mapping(value):
            return None
        return {"object": type(value).__name__}

    def _described(self, value):
        shape = {name: getattr(value, name) for name in ("shape", "dtype") if _has(value, name)}
        described = {name: str(found) for name, found in shape.items() if found is not None}
        found = getattr(value, "sharding", None)
        return {**described, "sharding": None if found is None else self.view(found)}

    def _attributes(self, value, *names):
        return {name: self.view(getattr(value, name)) for name in names}

    def _container(self, value):
        kind = type(value).__name__
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return {
                "namedtuple": kind,
                "items": {name: self.view(getattr(value, name)) for name in value._fields},
            }
        if isinstance(value, (list, tuple)):
            return {"sequence": kind, "items": [self.view(each) for each in value]}
        if isinstance(value, (set, frozenset)):
            return {
                "set": kind,
                "items": sorted(json.dumps(self.view(each), sort_keys=True) for each in value),
            }
        if _is_mapping(value):
            items = {f"{type(key).__name__}:{self._text(str(key))}": self.view(value[key]) for key in value}
            return {"mapping": kind, "items": items}
        if dataclasses.is_dataclass(value):
            names = [each.name for each in dataclasses.fields(value)]
            return {"dataclass": kind, "items": {name: self.view(getattr(value, name)) for name in names}}
        leaves = jax.tree.leaves(value)
        if len(leaves) == 1 and leaves[0] is value:
            return {"object": kind}
        return {"node": kind, "items": [self.view(each) for each in leaves]}


def families(error):
    """Name the classes by which a caller may catch the exception; private classes of the libraries do not count."""
    known = [each for each in type(error).__mro__ if each not in (Exception, BaseException, object)]
    return [
        each.__name__
        for each in known
        if each.__name__ in _ERRORS or not each.__module__.startswith(_LIBRARIES)
    ]


def sharding(found):
    """Describe a sharding by its class, the axes of its mesh, its devices and its memory."""
    if found is None:
        return None
    described = {"class": type(found).__name__, "memory": found.memory_kind}
    if mesh := getattr(found, "mesh", None):
        spec = [list(each) if isinstance(each, tuple) else each for each in found.spec]
        while spec and spec[-1] is None:
            spec.pop()
        described |= {"axes": dict(mesh.shape), "spec": spec}
    devices = [] if getattr(getattr(found, "mesh", None), "_is_abstract", False) else found.device_set
    return {**described, "devices": sorted(each.id for each in devices)}


def _array(value):
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return {"key": str(jax.random.key_impl(value)), **_array(np.asarray(jax.random.key_data(value)))}
    data = np.ascontiguousarray(np.asarray(value)).tobytes()
    return {**_shape(value), "bits": data.hex() if len(data) <= 32 else hashlib.sha256(data).hexdigest()[:16]}


def _shape(value):
    return {"dtype": str(value.dtype), "shape": list(value.shape)}


def _has(value, name):
    """Tell whether there is an attribute; a Composite raises KeyError for an absent item."""
    try:
        getattr(value, name)
    except (AttributeError, KeyError):
        return False
    return True


def _is_mapping(value):
    return isinstance(value, dict) or all(
        hasattr(type(value), name) for name in ("keys", "__getitem__", "__len__")
    )
