"""Write a checkpoint in every layout that this version of eformer has, for all later versions to read.

    python tests/compat/make_samples/release.py

Part of every release: the samples go to tests/compat/releases/VERSION, with `expected.json`, and stay there unchanged.
`tests/compat/test_releases.py` reads those of all releases, and fails for a version that has none.

    {"version": "0.1.0",
     "trees": [{"path": "zarr", "prefix": null, "structure": ..., "metadata": ..., "leaves": {name: [kind, dtype, shape, sha256]},
                "values": {name: repr}}],
     "runs": [{"path": "run", "steps": {"2": {"metrics": ..., "data": ...}}}]}
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eformer import __version__, checkpoint
from eformer._engine.stores.base import read_whole
from eformer._engine.stores.locate import store_at
from eformer.pytree import from_compressed_bytes, load_from_file, save_to_file, to_compressed_bytes
from eformer.serialization import AsyncCheckpointManager, Checkpointer
from support.releases import Data, described

RELEASES = Path(__file__).resolve().parents[1] / "releases"
PROCESSES = 2


# ------------------------------------------------------------------------------------------------ trees


def tree() -> dict[str, Any]:
    """Return a tree with a leaf, a node and a name of every kind."""
    params = {"dense": {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.zeros(4, jnp.bfloat16)}}
    mesh = jax.make_mesh((2,), ("data",))
    return {
        "params": params,
        "optimizer": optax.adam(1e-3).init(params),
        "layers": [{"w": np.full((2, 2), i, np.float32)} for i in range(3)],
        "pair": (np.arange(3, dtype=np.int64), None, [], {}),
        "sharded": jax.device_put(jnp.arange(8.0).reshape(4, 2), NamedSharding(mesh, P("data"))),
        "weak": jnp.asarray(0.5),
        "key": jax.random.key(7),
        "dtypes": {str(np.dtype(d)): np.array([0, 1], d) for d in DTYPES},
        "shapes": {"no axes": np.float64(1.5), "empty": np.zeros((0, 3), np.int8)},
        "model.embed.weight": np.ones((2, 3), np.float16),
        "names": {"a/b": np.int8(1), "%": np.int8(2), "": np.int8(3), "é": np.int8(4)},
        "numbers": {5: np.int8(5), 6: {(1, "x"): np.int8(6)}},
        "values": {
            "int": 2**70,
            "float": float("inf"),
            "text": "tëxt",
            "bytes": b"\0\xff",
            "bool": True,
            "complex": 1j,
        },
    }


DTYPES = [
    "bool",
    "int8",
    "uint16",
    "int32",
    "uint64",
    "float16",
    "float64",
    "complex64",
    "complex128",
    "datetime64[s]",
]
DTYPES += [
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.int4,
    ml_dtypes.uint4,
]

METADATA = {"step": 100, "note": "a text", "rates": [0.1, 0.2], "when": {"epoch": 1}}


def small(number: int) -> dict[str, Any]:
    return {
        "model": {"w": jnp.full((4, 4), number, jnp.float32)},
        "frozen": {"w": jnp.arange(512.0)},
        "step": number,
    }


# --------------------------------------------------------------------------------------------- layouts


def write(folder: Path) -> dict[str, Any]:
    """Write all samples, and return what is in them."""
    options, found = checkpoint.SaveOptions, []

    def add(saved: Any, path: str, prefix: str | None = None, metadata: Any = None) -> None:
        found.append({"path": path, "prefix": prefix, "metadata": metadata, **described(saved)})

    def save(saved: Any, path: str, prefix: str | None = None, **arguments: Any) -> None:
        checkpoint.save(saved, folder / path, prefix=prefix, metadata=METADATA, **arguments)
        add(saved, path, prefix, METADATA)

    save(tree(), "directory")
    save(tree(), "file/model.safetensors")
    save(tree(), "shards", options=options(max_shard_bytes=400))
    save(tree(), "checksums", options=options(checksums=True))
    checkpoint.save(small(1), folder / "prefixes", prefix="model")
    for prefix, number in (("model", 2), ("ema", 3), (None, 4)):  # the first replaces what is there
        save(small(number), "prefixes", prefix=prefix)

    save(small(1), "reuse/first", options=options(reuse=True))
    save(small(2), "reuse/second", options=options(reuse=folder / "reuse/first"))

    save(tree(), "zarr", format="tensorstore")
    save(small(1), "zarr-prefixes", prefix="model", format="tensorstore")
    save(small(2), "zarr-prefixes", prefix="ema", format="tensorstore")
    save(
        tree(),
        "zarr-compressed",
        format="tensorstore",
        options=options(compression="zstd", max_chunk_bytes=16),
    )
    save(small(3), "zarr-database", format="tensorstore", options=options(ocdbt=True))

    for layout in ("safetensors", "tensorstore"):  # what lies in a bucket is a checkpoint in a directory, too
        for number in (1, 2):
            checkpoint.save(small(number), f"memory://samples/{layout}", format=layout)
        _download(f"memory://samples/{layout}", folder / f"bucket-{layout}")
        add(small(2), f"bucket-{layout}")

    for path in ("processes", "processes-zarr", "processes-database"):
        add(_held_by_all(), path)
    _save_by_processes(folder)

    (folder / "msgpack").mkdir()
    state = small(5)
    save_to_file(state, str(folder / "msgpack/state.msgpack"))
    (folder / "msgpack/state.msgpack.gz").write_bytes(to_compressed_bytes(state))
    add(load_from_file(None, str(folder / "msgpack/state.msgpack")), "msgpack/state.msgpack")
    add(
        from_compressed_bytes(None, (folder / "msgpack/state.msgpack.gz").read_bytes()),
        "msgpack/state.msgpack.gz",
    )

    AsyncCheckpointManager(enable_validation=True).save(
        small(6), folder / "manager", prefix="model", metadata=METADATA
    )
    add(small(6), "manager", "model")
    checkpointer = Checkpointer(folder / "checkpointer", None, [])
    checkpointer.on_step(None, small(7), step=7, force=True)
    checkpointer.wait_until_finished()
    add(small(7), "checkpointer/run-7")

    save(small(8), "signed/directory")
    save(small(8), "signed/model.safetensors")
    _sign(folder / "signed", ["directory", "model.safetensors"])
    for step in (2, 4):
        add(_step(step), f"run/step-{step}")
    return {"version": __version__, "trees": found, "runs": [_run(folder)]}


def _download(url: str, folder: Path) -> None:
    store = store_at(url)
    for name in store.sizes("", depth=9):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(read_whole(store, name)[0])


def _sign(folder: Path, names: list[str]) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = Ed25519PrivateKey.generate()  # and forgotten
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for name in names:
        checkpoint.sign(folder / name, private_key=private)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "public.pem").write_bytes(public)


# ------------------------------------------------------------------------------------------------ runs


def _step(number: int) -> dict[str, Any]:
    return {"w": jnp.full((3, 3), number, jnp.float32), "frozen": jnp.arange(64.0)}


def _run(folder: Path) -> dict[str, Any]:
    socket.gethostname = lambda: "host"  # which the run records, for people
    data = Data()
    with checkpoint.Run(folder / "run", every=2) as run:
        for step in range(1, 5):
            data.taken = step
            run.after(step, _step(step), data=data, metrics={"loss": 1 / step}, metadata={"note": str(step)})
    checkpoint.score(folder / "run", 4, {"eval.loss": 0.25})
    return {
        "path": "run",
        "taken": 4,
        "steps": {
            str(s.number): {"metrics": s.metrics, "metadata": s.metadata}
            for s in checkpoint.steps(folder / "run")
        },
    }


# ------------------------------------------------------------------------------------------- processes


def _held_by_all() -> dict[str, Any]:
    """Return what several processes save: every device of the job holds a part of the first leaf."""
    devices = np.array(jax.devices())
    mesh = jax.sharding.Mesh(devices, ("data",))
    rows = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    whole = np.arange(6, dtype=np.int32)

    def put(values: Any, spec: P) -> jax.Array:
        return jax.make_array_from_callback(
            values.shape, NamedSharding(mesh, spec), lambda index: values[index]
        )

    return {"cut": put(rows, P("data")), "replicated": put(whole, P()), "own": np.ones(3), "step": 9}


def _save_by_processes(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = range(PROCESSES)
    jobs = [subprocess.Popen([sys.executable, __file__, str(folder), address, str(rank)]) for rank in ranks]
    if sum(job.wait() for job in jobs):  # all of them, not only up to the first that fails
        raise SystemExit("a process failed")


def _save_as_process(folder: Path, address: str, rank: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, PROCESSES, rank)
    saved, options = _held_by_all(), checkpoint.SaveOptions
    checkpoint.save(saved, folder / "processes")
    checkpoint.save(saved, folder / "processes-zarr", format="tensorstore")
    checkpoint.save(saved, folder / "processes-database", format="tensorstore", options=options(ocdbt=True))
    jax.distributed.shutdown()


def _as_text(expected: dict[str, Any]) -> str:
    """Return JSON with a line for each tree."""
    fields = {name: value if isinstance(value, list) else [value] for name, value in expected.items()}
    lines = {
        name: ",\n ".join(json.dumps(each, ensure_ascii=False) for each in field)
        for name, field in fields.items()
    }
    return (
        f'{{"version": {lines["version"]},\n"trees": [\n {lines["trees"]}],\n"runs": [\n {lines["runs"]}]}}\n'
    )


def main() -> None:
    folder = RELEASES / __version__
    if folder.exists():
        raise SystemExit(f"{folder} exists: samples of a release stay as they are")
    try:
        folder.mkdir(parents=True)
        expected = write(folder)
    except BaseException:
        shutil.rmtree(folder)
        raise
    (folder / "expected.json").write_text(_as_text(expected), "utf-8")
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    sys.stdout.write(f"{folder}: {len(expected['trees'])} trees, {total:,} bytes\n")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        _save_as_process(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        main()
