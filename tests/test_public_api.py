"""The documented names and signatures, and what importing costs."""

import inspect
import subprocess
import sys

import pytest

import eformer.checkpoint
from eformer.pytree import _serialization
from eformer.serialization import serialization

# Name by name from the documentation: parameters with their defaults.
PYTREE_SERIALIZATION = {
    "compress_bytes": "(data: bytes) -> bytes",
    "current_path": "()",
    "decompress_bytes": "(data: bytes) -> bytes",
    "from_bytes": "(target, encoded_bytes: bytes)",
    "from_compressed_bytes": "(target, compressed_data: bytes)",
    "from_state_dict": "(target, state: dict[str, Any], name: str = '.')",
    "get_serialization_info": "(pytree) -> dict[str, Any]",
    "is_serializable": "(target)",
    "load_from_file": "(target, filepath: str)",
    "msgpack_restore": "(encoded_pytree: bytes)",
    "msgpack_serialize": "(pytree, in_place: bool = False) -> bytes",
    "register_serialization_state": "(ty, ty_to_state_dict, ty_from_state_dict, override=False)",
    "save_to_file": "(target, filepath: str) -> None",
    "to_bytes": "(target) -> bytes",
    "to_compressed_bytes": "(target) -> bytes",
    "to_state_dict": "(target) -> dict[str, Any]",
}
SERIALIZATION = {
    "is_array_like": "(x: Any) -> bool",
    "join_key": "(prefix, k)",
    "leaf_key_paths": "(pytree: Any, prefix: str | None = '', *, is_leaf: Callable | None = None)",
}


def parameters(signature):
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def documented(text):
    namespace = {}
    exec(f"from __future__ import annotations\ndef f{text}: ...", namespace)
    return parameters(inspect.signature(namespace["f"]))


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [(_serialization, n, t) for n, t in PYTREE_SERIALIZATION.items()]
    + [(serialization, n, t) for n, t in SERIALIZATION.items()],
)
def test_every_documented_function_has_its_documented_signature(module, name, text):
    function = getattr(module, name)
    assert parameters(inspect.signature(function)) == documented(text)
    assert inspect.getdoc(function)


def test_the_modules_export_what_is_documented_and_no_more():
    assert set(_serialization.__all__) == {*PYTREE_SERIALIZATION, "MAX_CHUNK_SIZE"}
    assert set(serialization.__all__) == set(SERIALIZATION)
    public = {
        name for name, value in vars(_serialization).items() if inspect.isfunction(value) and name[0] != "_"
    }
    assert public == set(PYTREE_SERIALIZATION)


def test_the_engine_offers_what_its_errors_tell_people_to_call():
    assert eformer.checkpoint.__all__ == ["register_node"]
    assert callable(eformer.checkpoint.register_node)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = eformer.checkpoint.nothing


def test_the_package_is_typed_and_has_a_version():
    from importlib.metadata import version
    from importlib.resources import files

    assert files("eformer").joinpath("py.typed").is_file()
    assert eformer.__version__ == version("eformer")


def test_importing_the_package_imports_no_jax_and_starts_no_backend():
    code = (
        "import sys, eformer; assert 'jax' not in sys.modules\n"
        "import eformer.pytree._serialization, eformer.serialization.serialization, jax\n"
        "jax.distributed.is_initialized(); jax.config.update('jax_platforms', 'cpu')\n"
        "jax.config.update('jax_num_cpu_devices', 3); assert jax.device_count() == 3"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
