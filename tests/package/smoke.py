"""Use an installed eformer as a newcomer would. Run by `check.py`, outside the checkout: python -I smoke.py [EXTRA ...]

Every step is a function; the extras are those that are installed, and all others must be named when they are missing.
"""

import importlib.metadata
import importlib.util
import os
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

EXTRAS = {
    "hf": "huggingface_hub",
    "h5": "h5py",
    "sign": "cryptography",
}
EFORMER = str(Path(sys.executable).with_name("eformer"))
SAMPLES = Path(__file__).parents[1] / "compat"


def shell(*command: str, code: int = 0) -> str:
    """Run a command; return what it printed."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == code, (command, ended.returncode, ended.stdout, ended.stderr)
    return ended.stdout + ended.stderr


def is_the_installed_package() -> None:
    import eformer

    assert Path(eformer.__file__).is_relative_to(sys.prefix), eformer.__file__
    assert eformer.__version__ == importlib.metadata.version("eformer-checkpoint")
    assert Path(eformer.__file__).with_name("py.typed").is_file()


def imports_little() -> None:
    loaded = "import sys, eformer.checkpoint; print(*sys.modules)"
    heavy = {"jax", "numpy", "msgspec", "click", "rich", "asyncio", "obstore", "tensorstore"}
    assert not heavy & set(shell(sys.executable, "-I", "-c", loaded).split())


def every_module_and_name_is_there() -> None:
    import eformer
    from eformer import checkpoint, errors, paths, pytree, serialization

    for module in pkgutil.walk_packages(eformer.__path__, "eformer."):
        if not module.name.endswith("__main__") and module.name != "eformer.keras":  # which needs keras
            importlib.import_module(module.name)
    for door in (checkpoint, errors, paths, pytree, serialization):
        assert all(hasattr(door, name) for name in dir(door))


def saves_and_loads() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from eformer import checkpoint
    from eformer.checkpoint import SaveOptions

    state = {
        "w": jnp.arange(12.0, dtype=jnp.bfloat16).reshape(3, 4),
        "key": jax.random.key(1),
        "step": (7, None, "x"),
    }
    checkpoint.save(state, "step-100")
    checkpoint.save_async(state, "step-200").result()
    checkpoint.save(state, "zarr", format="tensorstore")
    checkpoint.save(state, "zstd", format="tensorstore", options=SaveOptions(compression="zstd"))
    for path in ("step-100", "zarr", "zstd"):
        loaded = checkpoint.load(path)
        assert loaded["step"] == (7, None, "x")
        assert np.array_equal(loaded["w"], state["w"])
        assert jax.random.key_data(loaded["key"]).tolist() == [0, 1]
    assert checkpoint.open("step-200")["w"][1].tolist() == [4, 5, 6, 7]
    assert checkpoint.verify("step-200").ok
    assert checkpoint.diff("step-100", "step-200").same


def trains_a_run() -> None:
    import numpy as np

    from eformer import checkpoint

    state = {"w": np.zeros(4)}
    for stop in (3, 5):  # the second time it is resumed
        with checkpoint.Run("run", every=1, keep=2) as run:
            if found := run.resume(like=state):
                state = found.tree
            for step in range(run.step, stop):
                state = {"w": state["w"] + 1}
                run.after(step + 1, state, metrics={"loss": 1 / (step + 1)})
    assert [step.number for step in checkpoint.steps("run")] == [3, 4, 5]  # the one it was resumed from stays
    assert checkpoint.load(checkpoint.latest("run"))["w"].tolist() == [5.0] * 4


def speaks_msgpack() -> None:
    import numpy as np

    from eformer.pytree import from_bytes, load_from_file, save_to_file, to_bytes

    tree = {"w": np.arange(6.0).reshape(2, 3), "n": 3}
    assert np.array_equal(from_bytes(tree, to_bytes(tree))["w"], tree["w"])
    save_to_file(tree, "tree.msgpack")
    assert load_from_file(tree, "tree.msgpack")["n"] == 3
    assert "float64[2,3]" in shell(EFORMER, "ls", "tree.msgpack")


def has_a_manager() -> None:
    import jax.numpy as jnp

    from eformer.serialization import (
        AsyncCheckpointManager,
        tree_deserialize_leaves,
        tree_serialize_leaves,
    )

    manager = AsyncCheckpointManager(enable_compression=True)
    manager.save({"w": jnp.ones(3)}, "managed")
    tree, _ = manager.load("managed", mesh=None)
    assert tree["w"].tolist() == [1.0] * 3
    tree_serialize_leaves("by-jax", {"w": jnp.ones(3)}, manager=manager.global_manager)
    manager.global_manager.wait_until_finished()
    assert tree_deserialize_leaves("by-jax", None)["w"].tolist() == [1.0] * 3


def uses_buckets_and_databases() -> None:
    import numpy as np

    from eformer import checkpoint
    from eformer.checkpoint import SaveOptions

    tree = {"w": np.arange(6.0)}
    checkpoint.save(tree, "memory://bucket/run")
    assert np.array_equal(checkpoint.load("memory://bucket/run")["w"], tree["w"])
    checkpoint.save(tree, "database", format="tensorstore", options=SaveOptions(ocdbt=True))
    assert np.array_equal(checkpoint.load("database")["w"], tree["w"])


def reads_checkpoints_of_other_programs() -> None:
    from eformer import checkpoint

    for sample in ("orbax/v0_standard", "orbax/v0_zarr3", "orbax/manager", "data/ts_v2", "data/pytree_basic"):
        assert checkpoint.load(SAMPLES / sample), sample


def has_a_command() -> None:
    version = importlib.metadata.version("eformer-checkpoint")
    assert shell(EFORMER, "--version") == shell(sys.executable, "-m", "eformer", "--version")
    assert version in shell(EFORMER, "--version")
    from eformer.cli.commands import main

    for name in main.commands:
        assert "Usage: eformer" in shell(EFORMER, name, "--help")
    assert "bfloat16" in shell(EFORMER, "inspect", "step-100")
    assert "w" in shell(EFORMER, "ls", "step-100", "--json")
    shell(EFORMER, "verify", "step-100")
    shell(EFORMER, "diff", "step-100", "step-200")
    shell(EFORMER, "convert", "step-100", "hf", "--to", "safetensors", "--dtype", "f32")
    assert "loss" in shell(EFORMER, "steps", "run")
    shell(EFORMER, "prune", "run", "--keep", "1", "--yes")
    for kind in ("bash", "zsh", "fish"):
        assert "_EFORMER_COMPLETE" in shell(EFORMER, "completion", kind)
    assert "Try next" in shell(EFORMER, "demo", "demo")


def names_the_extras_that_are_missing(installed: set[str]) -> None:
    for extra in EXTRAS.keys() - installed:
        if importlib.util.find_spec(EXTRAS[extra]) is None:
            assert f"pip install 'eformer-checkpoint[{extra}]'" in use(extra), extra
    for extra in installed:
        assert "pip install" not in use(extra), extra


def use(extra: str) -> str:
    """Do what needs an extra; return the message of the error, if there is one."""
    from eformer import checkpoint

    Path("x.weights.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    Path("x.pem").write_text("not a key")
    calls = {
        "hf": lambda: checkpoint.load("hf://org/model"),
        "h5": lambda: checkpoint.load("x.weights.h5"),
        "sign": lambda: checkpoint.sign("step-100", private_key="x.pem"),
    }
    try:
        calls[extra]()
    except Exception as error:  # noqa: BLE001  which one is looked at by the caller
        return str(error)
    return ""


def main() -> None:
    # Nothing is asked of the Hub: with the package, this says that it is offline.
    os.environ |= {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for step in (
            is_the_installed_package,
            imports_little,
            every_module_and_name_is_there,
            saves_and_loads,
            trains_a_run,
            speaks_msgpack,
            has_a_manager,
            uses_buckets_and_databases,
            reads_checkpoints_of_other_programs,
            has_a_command,
        ):
            step()
        names_the_extras_that_are_missing(set(sys.argv[1:]))
        os.chdir("/")
    import jax

    print(f"ok, jax {jax.__version__}")


if __name__ == "__main__":
    main()
