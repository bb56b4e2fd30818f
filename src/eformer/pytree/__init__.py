"""The documented msgpack and state-dict API, as thin functions over the engine.

>>> from eformer.pytree import from_bytes, to_bytes
>>> state = from_bytes(state, to_bytes(state))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eformer.pytree._serialization import MAX_CHUNK_SIZE as MAX_CHUNK_SIZE
    from eformer.pytree._serialization import compress_bytes as compress_bytes
    from eformer.pytree._serialization import current_path as current_path
    from eformer.pytree._serialization import decompress_bytes as decompress_bytes
    from eformer.pytree._serialization import from_bytes as from_bytes
    from eformer.pytree._serialization import from_compressed_bytes as from_compressed_bytes
    from eformer.pytree._serialization import from_state_dict as from_state_dict
    from eformer.pytree._serialization import get_serialization_info as get_serialization_info
    from eformer.pytree._serialization import is_serializable as is_serializable
    from eformer.pytree._serialization import load_from_file as load_from_file
    from eformer.pytree._serialization import msgpack_restore as msgpack_restore
    from eformer.pytree._serialization import msgpack_serialize as msgpack_serialize
    from eformer.pytree._serialization import register_serialization_state as register_serialization_state
    from eformer.pytree._serialization import save_to_file as save_to_file
    from eformer.pytree._serialization import to_bytes as to_bytes
    from eformer.pytree._serialization import to_compressed_bytes as to_compressed_bytes
    from eformer.pytree._serialization import to_state_dict as to_state_dict

__all__ = [
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


def __getattr__(name: str) -> Any:
    # Late, because the module imports jax.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eformer._engine.tasks.interrupts import held_back

    with held_back():  # an interrupted import of jax crashes the program later
        return getattr(import_module(f"{__name__}._serialization"), name)


def __dir__() -> list[str]:
    return list(__all__)
