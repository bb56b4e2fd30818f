"""The documented names and signatures, and what importing costs."""

import ast
import importlib
import inspect
import pydoc
import re
import subprocess
import sys
import textwrap
from rlcompleter import Completer

import pytest

import eformer.checkpoint
import eformer.pytree
import eformer.serialization
from eformer import paths
from eformer.pytree import _serialization
from eformer.serialization import async_manager, checkpointer, serialization, utils
from support.pages import ROOT

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
UTILS = {
    "apply_gather_functions": "(state: dict, gather_fns: dict | bool, mismatch_allowed: bool, verbose: bool) -> dict",
    "broadcast_tensor": "(tensor, memory_limit_bytes: int, target_sharding=None)",
    "chunk_tensor_by_memory": "(tensor, memory_limit: int) -> list",
    "derive_base_prefix_from_path": "(path_str: str) -> str",
    "estimate_array_nbytes": "(array) -> int",
    "estimate_available_memory": "() -> int",
    "flatten_for_broadcast": "(state: dict) -> dict",
    "group_keys_by_shard_size": "(flat_state: dict, max_shard_size_bytes: int) -> list[list[str]]",
    "index_filename": "(base_prefix: str) -> str",
    "is_gcs_path": "(path: str) -> bool",
    "optimize_shard_layout": "(state: dict, max_shard_size_bytes: int) -> list[list[str]]",
    "parse_gcs_path": "(gcs_path: str) -> tuple[str, str]",
    "read_process_array": "(key: str, shard_fns, mismatch_allowed: bool, manager, callback=None, dtype=None)",
    "reshard": "(x, target_sharding)",
    "shard_filename": "(base_prefix: str, idx: int, total: int) -> str",
    "to_host": "(x, float_dtype, mesh, cpu_offload: bool)",
}
CHECKPOINT = {
    "abstract": "(path, *, step=None, prefix=None, plain=False)",
    "best": "(path, *, by=None, mode='min')",
    "convert": "(source, destination, *, to=None, step=None, prefix=None, root=None, keys=None, rename=None, back=None, like=None, "
    "dtype=None, config=None, max_shard_bytes=None, memory=None, dry_run=False, allow_missing=False, fill_from_like=False, card=True, "
    "progress=None, dequant=None, part=None, commit=False)",
    "diff": "(a, b, *, prefix=None, progress=None, executor=None)",
    "export": "(tree_or_path, destination, *, like=None, rename=None, back=None, step=None, prefix=None, root=None, keys=None, "
    "config=None, dtype=None, max_shard_size='5GB', card=True, fill_from_like=False, allow_missing=False, memory=None, dry_run=False, "
    "progress=None, dequant=None, origin=None)",
    "fingerprint": "(tree, *, timeout=None)",
    "follow": "(path, *, after=None, poll=10.0, timeout=None)",
    "inspect": "(path, *, step=None)",
    "latest": "(path)",
    "load": "(path, *, step=None, like=None, into=None, partial=False, root=None, rename=None, back=False, config=None, resize=None, plain=False, return_report=False, "
    "prefix=None, keys=None, mesh=None, rules=None, shardings=None, dtype=None, callback=None, verify=None, mmap=False, "
    "progress=None, options=LoadOptions(), signed_by=None, dequant=None, duplicates=None)",
    "merge": "(sources, destination, *, weights='mean', ema=None, last=None, lora=None, lora_config=None, rename=None, prefix=None, "
    "root=None, keys=None, to=None, like=None, dtype=None, max_shard_bytes=None, memory=None, dry_run=False, allow_missing=False, "
    "progress=None, dequant=None, part=None, commit=False)",
    "open": "(path, *, step=None, prefix=None, cache=None, signed_by=None, dequant=None, rename=None, back=False, config=None)",
    "placement": "(path, *, mesh=None, rules=None, shardings=None, prefix=None, dtype=None)",
    "prune": "(directory, *, keep, pattern=None, foreign=False, check=False, dry_run=False)",
    "register_module": "(kind, *, state, update=None, build=None)",
    "register_node": "(kind)",
    "request_save": "(path, *, timeout=600.0)",
    "report": "(path, against=None, *, values=True, prefix=None, step=None, keep=None, memory=None, progress=None, "
    "executor=None)",
    "same": "(tree, path, *, prefix=None, timeout=None)",
    "save": "(tree, path, *, prefix=None, format='safetensors', metadata=None, options=SaveOptions(), overwrite=False, "
    "origin=None, progress=None)",
    "save_async": "(tree, path, *, prefix=None, format='safetensors', metadata=None, options=SaveOptions(), "
    "overwrite=False, origin=None)",
    "score": "(path, step, metrics)",
    "rules": "(name)",
    "sign": "(path, *, private_key, password=None, progress=None)",
    "steps": "(path)",
    "store_options": "(url, /, **options)",
    "verify": "(path, *, step=None, signed_by=None, progress=None, executor=None)",
    "wait": "(timeout=None)",
}
SERIALIZATION = {
    "dry_run": "(what, mesh=None, *, rules=None, shardings=None, prefix=None, dtype=None)",
    "is_array_like": "(x: Any) -> bool",
    "join_key": "(prefix, k)",
    "leaf_key_paths": "(pytree: Any, prefix: str | None = '', *, is_leaf: Callable | None = None)",
    "tree_deserialize_leaves": "(checkpoint_dir, mesh, manager=None, *, prefix: str | None = None, partition_rules=None, "
    "shardings=None, callback=None, chunk_size: int | None = None)",
    "tree_serialize_leaves": "(checkpoint_dir, pytree, manager=None, *, prefix: str | None = None, commit_callback=None, "
    "write_index: bool = True)",
}
_SAVE = (
    "(self, tree, path, mesh=None, gather_fns=None, float_dtype=None, metadata=None, callback=None, prefix=None, "
    "do_all_gather=False, cpu_offload=False)"
)
# `float_dtype` is documented as bfloat16, which would halve the precision of every checkpoint; `chunk_size`, and the
# `callback` of load_pytree, are those of tree_deserialize_leaves.
MANAGER = {
    "__init__": "(self, enable=None, float_dtype=None, verbose=False, gcs_bucket=None, gcs_credentials_path=None, "
    "enable_validation=False, enable_compression=False, use_tensorstore=True)",
    "compute_checksum": "(array)",
    "is_tensorstore": "(path)",
    "load": "(self, path, mesh, shardings=None, mismatch_allowed=True, callback=None, partition_rules=None, dtype=None, "
    "validate=None, prefix_filter=None, prefix=None, use_async=True, chunk_size=None)",
    "load_pytree": "(self, path, mesh, *, prefix, shardings=None, partition_rules=None, dtype=None, template=None, "
    "strict_shapes=True, callback=None, chunk_size=None)",
    "load_tree_parallel": "(self, path, shardings=None, mismatch_allowed=True, callback=None, dtype=None, validate=None, "
    "prefix_filter=None)",
    "safe_loadpath": "(path)",
    "save": _SAVE,
    "save_async": _SAVE,
    "save_pytree": "(self, pytree, path, mesh=None, *, prefix, do_all_gather=False, cpu_offload=True, dtype=None, extras=None, "
    "write_index=True)",
    "save_tree": _SAVE,
    "wait_until_finished": "(self)",
}
CHECKPOINTER = {
    "__init__": "(self, base_path, save_interval, step_policies, *, manager=None, dt_now_injection=None, "
    "delete_old_temp_checkpoints=True)",
    "load_checkpoint": "(self, mesh, *, path=None, discover_latest=True, shardings=None, partition_rules=None, dtype=None, "
    "prefix=None, structured=False, template=None, strict_shapes=True)",
    "load_pytree": "(self, mesh, *, prefix, path=None, discover_latest=True, discover_raise=True, partition_rules=None, "
    "dtype=None, load_treedef=False, callback=None, template=None, strict_shapes=True, chunk_size=None)",
    "on_step": "(self, mesh, pytree=None, force=False, *, step, true_callbacks=None, extras=None)",
    "save_checkpoint": "(self, tree, destination, *, commit_callback=None, is_temporary=False, mesh=None, step=-1, "
    "shardings=None, partition_rules=None, prefix=None, structured=False, dtype=None, extras=None)",
    "save_pytree": "(self, tree, prefix, *, step=None, destination=None, mesh=None, dtype=None, extras=None, "
    "temporary=False, write_index=True)",
    "wait_until_finished": "(self)",
}
METADATA = {
    "__init__": "(self, version='0.0.90', timestamp=None, checksum=None, array_metadata=None, framework_version=None, "
    "custom_metadata=None)",
    "from_dict": "(data)",
    "to_dict": "(self)",
}


def parameters(signature):
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


def documented(text):
    namespace = {name: getattr(eformer.checkpoint, name) for name in ("LoadOptions", "SaveOptions")}
    exec(f"from __future__ import annotations\ndef f{text}: ...", namespace)
    return parameters(inspect.signature(namespace["f"]))


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [(_serialization, n, t) for n, t in PYTREE_SERIALIZATION.items()]
    + [(serialization, n, t) for n, t in SERIALIZATION.items()]
    + [(utils, n, t) for n, t in UTILS.items()]
    + [(eformer.checkpoint, n, t) for n, t in CHECKPOINT.items()]
    + [(async_manager.AsyncCheckpointManager, n, t) for n, t in MANAGER.items()]
    + [(async_manager.CheckpointMetadata, n, t) for n, t in METADATA.items()]
    + [(checkpointer.Checkpointer, n, t) for n, t in CHECKPOINTER.items()]
    + [(checkpointer, "find_latest_checkpoint", "(base_path)")],
)
def test_every_documented_function_has_its_documented_signature(module, name, text):
    function = getattr(module, name)
    assert parameters(inspect.signature(function)) == documented(text)
    assert inspect.getdoc(module if name == "__init__" else function)


def test_the_modules_export_what_is_documented_and_no_more():
    assert set(_serialization.__all__) == {*PYTREE_SERIALIZATION, "MAX_CHUNK_SIZE"}
    assert set(serialization.__all__) == set(SERIALIZATION)
    assert set(utils.__all__) == set(UTILS)
    assert set(async_manager.__all__) == {"AsyncCheckpointManager", "CheckpointMetadata"}
    assert set(checkpointer.__all__) == {"CheckpointInterval", "Checkpointer", "find_latest_checkpoint"}
    assert set(paths.__all__) == {"GCSPath", "LocalPath", "MLUtilPath", "PathStat", "ePath", "ePathLike"}
    public = {
        name for name, value in vars(_serialization).items() if inspect.isfunction(value) and name[0] != "_"
    }
    assert public == set(PYTREE_SERIALIZATION)


@pytest.mark.parametrize(
    ("package", "modules"),
    [
        (eformer.pytree, [_serialization]),
        (eformer.serialization, [async_manager, checkpointer, serialization, utils]),
    ],
)
def test_the_packages_export_every_name_of_their_modules(package, modules):
    for module in modules:
        for name in module.__all__:
            assert getattr(package, name) is getattr(module, name)
            assert name in package.__all__


@pytest.mark.parametrize("package", [eformer, eformer.checkpoint, eformer.pytree, eformer.serialization])
def test_type_checkers_see_the_names_that_are_imported_late(package):
    (block,) = [n for n in ast.parse(inspect.getsource(package)).body if isinstance(n, ast.If)]
    names = [(line.module, alias) for line in block.body for alias in line.names]
    seen = {alias.asname for _, alias in names if alias.name != "*"}
    for module in (module for module, alias in names if alias.name == "*"):
        seen |= {*importlib.import_module(module).__all__}
    assert seen == set(package.__all__) - {"__version__"}


def test_the_manager_offers_what_is_documented_and_no_more():
    public = {name for name in vars(async_manager.AsyncCheckpointManager) if name[0] != "_"}
    assert public == {*MANAGER, "global_manager"} - {"__init__"}
    assert inspect.getdoc(async_manager.AsyncCheckpointManager.global_manager)
    public = {name for name in vars(checkpointer.Checkpointer) if name[0] != "_"}
    assert public == set(CHECKPOINTER) - {"__init__"}


def test_the_engine_offers_what_is_documented_and_no_more():
    nouns = {
        "Conversion",
        "Diff",
        "Every",
        "Inspection",
        "Keep",
        "LoadOptions",
        "LoadReport",
        "NamedRules",
        "Near",
        "Pending",
        "Placement",
        "Pruned",
        "Report",
        "RuleCheck",
        "Same",
        "Resumed",
        "Run",
        "SaveOptions",
        "Step",
        "Verification",
        "View",
    }
    assert set(eformer.checkpoint.__all__) == set(CHECKPOINT) | nouns
    assert all(inspect.getdoc(getattr(eformer.checkpoint, noun)) for noun in nouns)


@pytest.mark.parametrize("module", [eformer, eformer.checkpoint, eformer.pytree, eformer.serialization])
def test_tab_completes_the_public_names_and_no_others(module):
    completer = Completer({"module": module})
    completer.matches = completer.attr_matches("module.")
    found = {match.removeprefix("module.").rstrip("()") for match in completer.matches}
    assert found == {name for name in module.__all__ if not name.startswith("_")}
    assert sorted(dir(module)) == sorted(module.__all__)


@pytest.mark.parametrize("name", ["load", "save", "convert", "export", "open"])
def test_the_help_of_a_call_fits_on_two_screens(name):
    lines = pydoc.plain(pydoc.render_doc(getattr(eformer.checkpoint, name))).splitlines()
    shown = [part for line in lines for part in textwrap.wrap(line, 110) or [""]]
    assert len(shown) <= 100


def test_help_begins_with_the_public_names_and_lists_them_with_their_docstrings():
    text = pydoc.plain(pydoc.render_doc(eformer.checkpoint))
    contents, listed = text.index("PACKAGE CONTENTS"), text.index("CLASSES")
    for name in eformer.checkpoint.__all__:
        assert re.search(rf"\b{name}\b", text[:contents])
        assert re.search(rf"^    (class )?{name}\(", text[listed:], re.MULTILINE)
    assert "__getattr__" not in text
    assert text[contents:listed].split() == ["PACKAGE", "CONTENTS"]  # no private modules


def test_the_doors_open_after_import_eformer_alone():
    code = (
        "import sys, eformer\n"
        "assert not {'jax', 'numpy'} & sys.modules.keys() and dir(eformer)\n"
        "assert eformer.checkpoint and eformer.errors.MismatchError and eformer.paths.ePath\n"
        "assert not {'jax', 'tensorstore', 'obstore'} & sys.modules.keys()\n"
        "assert eformer.checkpoint.save and eformer.serialization.async_manager.AsyncCheckpointManager\n"
        "assert eformer.serialization.utils.to_host and eformer.serialization.serialization.join_key\n"
        "from eformer.serialization import tree_serialize_leaves, to_host\n"
        "from eformer.pytree import from_bytes, to_bytes\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", [eformer, eformer.checkpoint, eformer.pytree, eformer.serialization])
def test_a_name_that_is_not_there_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = module.nothing


def test_the_package_is_typed_and_has_a_version():
    from importlib.metadata import version
    from importlib.resources import files

    assert files("eformer").joinpath("py.typed").is_file()
    assert eformer.__version__ == version("eformer-checkpoint")


def test_importing_the_package_imports_no_jax_and_starts_no_backend():
    code = (
        "import sys, eformer; assert 'jax' not in sys.modules\n"
        "import eformer.paths; assert 'jax' not in sys.modules and 'tensorstore' not in sys.modules\n"
        "import eformer.pytree, eformer.serialization; assert not {'jax', 'numpy'} & sys.modules.keys()\n"
        "import eformer.pytree._serialization, eformer.serialization.utils, jax\n"
        "import eformer.serialization.async_manager, eformer.serialization.serialization\n"
        "import eformer.serialization.checkpointer\n"
        "assert not {'tensorstore', 'obstore'} & sys.modules.keys()\n"
        "from eformer.checkpoint import save, load, save_async, open, inspect, verify\n"
        "jax.distributed.is_initialized(); jax.config.update('jax_platforms', 'cpu')\n"
        "jax.config.update('jax_num_cpu_devices', 3); assert jax.device_count() == 3"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def modules_after(statement):
    """Return the modules that a statement imports, beside those that typing and importlib need."""
    code = f"import sys, typing, importlib\nbefore = {{*sys.modules}}\n{statement}\nprint(*{{*sys.modules}} - before)"
    ended = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


def test_importing_the_doors_imports_nothing_else():
    doors = {"eformer", "eformer._install", "eformer._version", "eformer.checkpoint"}
    assert modules_after("import eformer.checkpoint") == doors


def test_the_command_starts_without_what_it_may_need_later():
    found = modules_after("import eformer.cli.commands")
    assert "click" in found
    assert not {"numpy", "jax", "msgspec", "rich", "asyncio", "logging"} & found
    assert {name for name in found if name.startswith("eformer._engine.")} <= {
        "eformer._engine.record",
        "eformer._engine.record.text",
    }


def test_no_public_name_of_the_engine_is_defined_in_two_modules():
    found = {}
    for path in sorted((ROOT / "src/eformer/_engine").rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(path.name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
