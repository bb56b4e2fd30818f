"""Find out which checkpoints of eformer the original eFormer 0.0.101 reads, and make the table of the guide.

    python tests/compat/make_samples/original_reads.py [--write docs/guides/from-the-original.md] DIRECTORY

The original has the same name, and so is installed into an environment of its own in DIRECTORY, by
`bench/requirements-original.txt`. The checkpoints are written there, too, and both are kept for the next run.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
REQUIREMENTS = HERE.parents[3] / "bench" / "requirements-original.txt"
BEGIN, END = "<!-- the table of original_reads.py begins -->\n", "<!-- and ends -->\n"

# What is saved here, and the call of the original that reads it.
WAYS = {
    "tensorstore": ('`checkpoint.save(tree, path, format="tensorstore")`', "`manager.load(path, mesh)`"),
    "prefix": ("the same, `prefix=`", "`manager.load(path, mesh, prefix=)`"),
    "leaves": ("`tree_serialize_leaves(path, tree)`", "`tree_deserialize_leaves(path, mesh)`"),
    "compressed": ('`checkpoint.save`, `SaveOptions(compression="zstd")`', "`manager.load(path, mesh)`"),
    "file": ('`checkpoint.save(tree, "x.safetensors")`', "`manager.load(path, mesh)`"),
    "shards": (
        "`checkpoint.save(tree, path)`, safetensors in shards",
        "`manager.load(path, mesh)`, of the base name",
    ),
    "msgpack": ("`save_to_file(tree, path)`", "`load_from_file(target, path)`"),
    "gzip": ("`to_compressed_bytes(tree)`", "`from_compressed_bytes(target, data)`"),
    "checkpointer": ("`Checkpointer.save_checkpoint`", "`Checkpointer.load_checkpoint`"),
    "arrays": (
        "`manager.save_pytree(tree, path, prefix=)`",
        "`manager.load(path, mesh, prefix=)`, as nested dicts",
    ),
    "pytree": ("the same", "`manager.load_pytree(path, mesh, prefix=)`"),
    "ocdbt": ("`checkpoint.save`, `SaveOptions(ocdbt=True)`", "`manager.load(path, mesh)`"),
}


def tree():
    import jax.numpy as jnp
    import numpy as np

    return {
        "w": jnp.arange(24.0).reshape(4, 6),
        "layers": {"0": {"b": jnp.arange(5, dtype=jnp.bfloat16)}, "1": {"n": jnp.arange(3)}},
        "scale": jnp.float32(2.5),
        "mask": np.array([True, False]),
    }


def bits(found):
    """Return what is compared: dtype, shape and bytes of every array by its path."""
    import jax
    import numpy as np

    return {
        jax.tree_util.keystr(path): [
            np.asarray(leaf).dtype.name,
            list(np.shape(leaf)),
            np.asarray(leaf).tobytes().hex(),
        ]
        for path, leaf in jax.tree_util.tree_leaves_with_path(found)
    }


def write(folder):
    """Save the tree in every way; run by eformer's own Python."""
    import jax

    from eformer import checkpoint
    from eformer.checkpoint import SaveOptions
    from eformer.pytree import save_to_file, to_compressed_bytes
    from eformer.serialization import AsyncCheckpointManager, Checkpointer, tree_serialize_leaves

    saved, mesh = tree(), jax.make_mesh((1,), ("x",))
    checkpoint.save(saved, folder / "tensorstore", format="tensorstore")
    checkpoint.save(saved, folder / "prefix", format="tensorstore", prefix="model")
    tree_serialize_leaves(folder / "leaves", saved)
    checkpoint.save(
        saved, folder / "compressed", format="tensorstore", options=SaveOptions(compression="zstd")
    )
    checkpoint.save(saved, folder / "file.safetensors")
    checkpoint.save(saved, folder / "shards", options=SaveOptions(max_shard_bytes=64))
    save_to_file(saved, folder / "msgpack")
    (folder / "gzip").write_bytes(to_compressed_bytes(saved))
    checkpointer = Checkpointer(str(folder / "checkpointer"), None, [])
    checkpointer.save_checkpoint(saved, "run-1", mesh=mesh)
    checkpointer.wait_until_finished()
    AsyncCheckpointManager().save_pytree(saved, str(folder / "pytree"), mesh, prefix="model")
    checkpoint.save(saved, folder / "ocdbt", format="tensorstore", options=SaveOptions(ocdbt=True))


def read(folder):
    """Load every checkpoint with the original; run by its Python. Prints JSON."""
    import jax

    from eformer.pytree._serialization import from_compressed_bytes, load_from_file
    from eformer.serialization.async_manager import AsyncCheckpointManager
    from eformer.serialization.checkpointer import Checkpointer
    from eformer.serialization.serialization import tree_deserialize_leaves

    mesh, manager, expected = jax.make_mesh((1,), ("x",)), AsyncCheckpointManager(), bits(tree())
    calls = {
        "tensorstore": lambda path: manager.load(path, mesh)[0],
        "prefix": lambda path: manager.load(path, mesh, prefix="model")[0],
        "leaves": lambda path: tree_deserialize_leaves(path, mesh),
        "compressed": lambda path: manager.load(path, mesh)[0],
        "file": lambda path: manager.load(f"{path}.safetensors", mesh)[0],
        "shards": lambda path: manager.load(f"{path}/model.safetensors", mesh)[0],
        "msgpack": lambda path: load_from_file(tree(), path),
        "gzip": lambda path: from_compressed_bytes(tree(), Path(path).read_bytes()),
        "checkpointer": lambda path: Checkpointer(path, None, []).load_checkpoint(mesh)[0],
        "arrays": lambda path: manager.load(str(folder / "pytree"), mesh, prefix="model")[0],
        "pytree": lambda path: manager.load_pytree(path, mesh, prefix="model")[0],
        "ocdbt": lambda path: manager.load(path, mesh)[0],
    }
    results = {}
    for name, call in calls.items():
        try:
            results[name] = "equal" if bits(call(str(folder / name))) == expected else "other values"
        except Exception as error:  # noqa: BLE001 - whatever the original raises is the result
            results[name] = f"{type(error).__name__}: {str(error)[:300]}"
    sys.stdout.write(json.dumps(results))


def install(directory):
    environment = directory / "original"
    if not (environment / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin" / "pip", "install", "-q", "-r", REQUIREMENTS], check=True)
        (environment / ".installed").touch()
    return environment / "bin" / "python"


def table(results):
    lines = ["| saved here | read by the original | |", "|---|---|---|"]
    lines += [
        f"| {here} | {there} | {'yes' if results[name] == 'equal' else 'no'} |"
        for name, (here, there) in WAYS.items()
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--read", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.directory.resolve() / "saved"
    if options.read:
        read(folder)
        return
    if not folder.exists():
        folder.mkdir(parents=True)
        write(folder)
    command = [install(options.directory.resolve()), HERE, options.directory, "--read"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=options.directory)
    results = json.loads(done.stdout[done.stdout.rindex('{"tensorstore"') :])
    text = table(results)
    sys.stdout.write(
        text + "".join(f"{name}: {result}\n" for name, result in results.items() if result != "equal")
    )
    if options.write:
        before, _, rest = options.write.read_text("utf-8").partition(BEGIN)
        options.write.write_text(f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}", "utf-8")


if __name__ == "__main__":
    main()
