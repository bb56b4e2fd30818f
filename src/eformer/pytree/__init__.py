"""The documented msgpack and state-dict API, as thin functions over the engine.

>>> from eformer.pytree import from_bytes, to_bytes
>>> state = from_bytes(state, to_bytes(state))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = [
    "MAX_CHUNK_SIZE",
    "compress_bytes",
    "current_path",
    "decompress_bytes",
    "from_bytes",
    "from_compressed_bytes",
    "from_state_dict",
    "get_serialization_info",
    "is_serializable",
    "load_from_file",
    "msgpack_restore",
    "msgpack_serialize",
    "register_serialization_state",
    "save_to_file",
    "to_bytes",
    "to_compressed_bytes",
    "to_state_dict",
]

if TYPE_CHECKING:
    from eformer.pytree._serialization import *  # noqa: F403
else:
    __all__ = _NAMES  # type checkers go by the import


def __getattr__(name: str) -> Any:
    # Late, because the module imports jax.
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eformer._engine.tasks.interrupts import held_back

    with held_back():  # an interrupted import of jax crashes the program later
        return getattr(import_module(f"{__name__}._serialization"), name)


def __dir__() -> list[str]:
    return list(_NAMES)
