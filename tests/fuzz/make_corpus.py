"""Write the corpus: small checkpoints of every kind that eformer reads, one zip file each.

    python tests/fuzz/make_corpus.py

Run it again only when a format gains something; files that eformer wrote before stay, as checkpoints do.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import tensorstore as ts  # noqa: E402

from eformer import checkpoint  # noqa: E402
from eformer.checkpoint import SaveOptions  # noqa: E402
from fuzz.cases import HERE as PLACE  # noqa: E402
from fuzz.cases import Bucket, Case, with_open_databases  # noqa: E402
from fuzz.doors import Position  # noqa: E402
from fuzz.seals import seal  # noqa: E402
from support.keys import PRIVATE  # noqa: E402

RUN_FILE = b'{"id":"0123456789abcdef","host":"a","pid":1,"since":"2026-01-01T00:00:00+00:00"}'
HERE = Path(__file__).parent / "corpus"
COMPAT = Path(__file__).parents[1] / "compat"


def tree() -> dict[str, object]:
    return {
        "params": {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3), "b": np.ones(3, ml_dtypes.bfloat16)},
        "opt": [np.arange(4, dtype=np.int8), (jnp.zeros((0, 2)), None)],
        "key": jax.random.key(0),
        "step": 7,
        "lr": 0.5,
        "name": "run",
    }


def small() -> dict[str, np.ndarray]:
    return {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.arange(3, dtype=np.int32)}


def keep(reader: str, name: str, case: Case) -> None:
    path = HERE / reader / f"{name}.zip"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(case.packed())


def saved(reader: str, name: str, *, values: object = None, target: str = "", **options: object) -> None:
    """Keep what a save writes."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "c"
        checkpoint.save(tree() if values is None else values, place / target, **options)
        keep(reader, name, Case.of_directory(place, target))


def ours() -> None:
    saved("safetensors", "directory", metadata={"a": [1, (2.5, b"x")], "t": {1, 2}})
    saved("safetensors", "shards", values=small(), options=SaveOptions(max_shard_bytes=64, checksums=True))
    saved("single_file", "file", target="model.safetensors", metadata={"a": 1})
    saved("arrays", "directory", format="tensorstore", prefix="model", metadata={"a": 1})
    saved(
        "arrays",
        "compressed",
        values=small(),
        format="tensorstore",
        options=SaveOptions(compression="zstd", max_chunk_bytes=16),
    )
    saved("safetensors", "prefix", values=small(), prefix="model")
    for name, options in (("plain", {}), ("compressed", {"compression": "zstd"})):
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch) / "c"
            checkpoint.save(small(), place, format="tensorstore", options=SaveOptions(ocdbt=True, **options))
            case = Case.of_directory(place)
            keep("database_files", name, case)
            keep("database", name, with_open_databases(case, place))


def together() -> None:
    """Keep what several processes write together, with their records and the table of what each holds."""
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from support.hosts import Crew, save_together

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    value = jnp.arange(32.0).reshape(8, 4)
    rows = jax.device_put(value, NamedSharding(mesh, P("x")))
    both = jax.device_put(value, NamedSharding(mesh, P("x", "y")))
    values = {"rows": rows, "both": both, "n": 3, "own": np.arange(3)}
    layouts = {
        "safetensors": ("safetensors", {}),
        "arrays": ("tensorstore", {}),
        "database": ("tensorstore", {"ocdbt": True}),
    }
    for name, layout in layouts.items():
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch) / "c"
            errors = save_together(Crew(2), lambda host: values, place, layout)
            assert errors == [None, None], errors
            case = Case.of_directory(place)
            keep("processes", name, with_open_databases(case, place) if name == "database" else case)


def runs() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "c"
        with checkpoint.Run(place, every=1, keep=5) as run:
            for step in (1, 2):
                run.after(step, small(), metrics={"loss": 0.5})
        checkpoint.score(place, 2, {"accuracy": 0.5})
        case = Case.of_directory(place)
        case.files["run.json"] = RUN_FILE
        keep("runs", "run", case)
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "c"
        with checkpoint.Run(place, every=1, signals=()) as run:
            run.after(1, small(), data=Position())
        case = Case.of_directory(place)
        case.files["run.json"] = RUN_FILE
        keep("runs", "data", case)
    moved = [["model", 1, "0123456789abcdef", []], ["other", 2, "", [["other/w/.zarray", 3, 4]]]]
    journal = {"save_id": "0123456789abcdef", "new": moved, "old": moved[::-1]}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "c"
        checkpoint.save(small(), place, format="tensorstore", prefix="model")
        case = Case.of_directory(place)
        case.files[".eformer-0123456789abcdef.tmp/journal.json"] = json.dumps(journal).encode()
        case.files[".eformer-0123456789abcdef.tmp/data/w/.zarray"] = b"{}"
        keep("leftovers", "journal", case)


def buckets() -> None:
    """Keep what saves put into a bucket, where an index has a log of commits, and others a lease."""
    bucket = Bucket()
    layouts = {"safetensors": {}, "arrays": {"format": "tensorstore"}}
    for name, options in layouts.items():
        for number in range(2):
            checkpoint.save(small() | {"n": number}, bucket.url, **options)
        case = bucket.get()
        case.files[".eformer-leases/0123456789abcdef"] = b"{}"
        index = "manifest.json" if name == "safetensors" else "tensorstore_index.json"
        dead = b'"dead":{"fedcba9876543210":"2026-01-01T00:00:00+00:00"},"done"'
        case.files[index] = case.files[index].replace(b'"done"', dead)
        seal(case, Random(0))
        keep("bucket", name, case)
        bucket.clear()
    with checkpoint.Run(bucket.url, every=1, keep=2) as run:
        for step in (1, 2, 3):
            run.after(step, small(), metrics={"loss": 0.5})
    case = bucket.get()
    case.files["run.json"] = RUN_FILE
    keep("bucket_runs", "run", case)


def others() -> None:
    import msgpack
    from safetensors.numpy import save as safetensors_bytes

    from eformer.pytree import to_bytes, to_compressed_bytes

    index = {"metadata": {"total_size": 60}, "weight_map": {"w": "a.safetensors", "b": "b.safetensors"}}
    files = {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "a.safetensors": safetensors_bytes({"w": small()["w"]}),
        "b.safetensors": safetensors_bytes({"b": small()["b"]}, {"format": "pt"}),
    }
    keep("hugging_face", "shards", Case(files))
    keep("hugging_face", "file", Case({"model.safetensors": safetensors_bytes(small())}, "model.safetensors"))
    lora = {f"base_model.model.q.lora_{one}.weight": np.ones((2, 2), np.float32) for one in "AB"}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "bias": "none"}
    adapter = {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": safetensors_bytes(lora),
    }
    keep("hugging_face", "adapter", Case(adapter))
    values = {
        "w": small()["w"],
        "n": 3,
        "t": {"0": np.float16([1]), "c": 1 + 2j},
        "s": np.float32(2),
        "x": "text",
        "l": [1, 2],
    }
    keep("msgpack", "ours", Case({"tree.msgpack": to_bytes(values)}, "tree.msgpack"))
    keep(
        "msgpack",
        "scalars",
        Case(
            {"tree.msgpack": msgpack.packb({"a": [1, -1, 2**63, 1.5, None, True, b"x", "y"]})}, "tree.msgpack"
        ),
    )
    for name in ("flax", "flax_chunked"):
        keep(
            "msgpack",
            name,
            Case({"tree.msgpack": (COMPAT / "files" / f"{name}.msgpack").read_bytes()}, "tree.msgpack"),
        )
    keep("msgpack_gzip", "ours", Case({"tree.msgpack.gz": to_compressed_bytes(values)}, "tree.msgpack.gz"))
    for name in ("equinox", "equinox_with_line"):
        keep(
            "equinox", name, Case({"model.eqx": (COMPAT / "files" / f"{name}.eqx").read_bytes()}, "model.eqx")
        )
    for name, write in (("stored", np.savez), ("deflated", np.savez_compressed)):
        data = io.BytesIO()
        write(data, **small(), **{"deep/name": np.float16([[1]]), "c": np.array(1 + 2j, np.complex64)})
        keep("npz", name, Case({"a.npz": data.getvalue()}, "a.npz"))
    data = io.BytesIO()
    np.save(data, np.asfortranarray(small()["w"]))
    keep("npz", "npy", Case({"a.npy": data.getvalue()}, "a.npy"))


_ZARRS = {
    "zstd": {"compressor": {"id": "zstd", "level": 1}},
    "gzip": {"compressor": {"id": "gzip", "level": 1}},
    "zlib": {"compressor": {"id": "zlib", "level": 1}, "order": "F", "dtype": ">i2"},
    "blosc": {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}},
    "bz2": {"compressor": {"id": "bz2", "level": 1}, "dimension_separator": "/"},
    "none": {"compressor": None, "fill_value": 1.5},
}


def zarrs() -> None:
    """Keep zarr arrays with every codec, with the index of the original and without one."""
    for name, metadata in _ZARRS.items():
        with tempfile.TemporaryDirectory() as scratch:
            spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{scratch}/w/"}}
            array = ts.open(
                spec | {"metadata": {"shape": [5, 4], "chunks": [3, 4], "dtype": "<f4", **metadata}},
                create=True,
            ).result()
            array[:] = np.arange(20, dtype=array.dtype.numpy_dtype).reshape(5, 4)
            keep("zarr", name, Case.of_directory(Path(scratch)))
    for name in ("ts_v1", "ts_v2", "ts_mixed", "ts_noindex"):
        keep("zarr", f"original_{name}", Case.of_directory(COMPAT / "data" / name))
    for name in ("pytree_basic", "pytree_optax", "checkpointer/run-5"):
        keep("original", name.replace("/", "_"), Case.of_directory(COMPAT / "data" / name))
    for name in ("single", "gathered_bf16"):
        case = Case(
            {"model.safetensors": (COMPAT / "data" / f"{name}.safetensors").read_bytes()}, "model.safetensors"
        )
        keep("hugging_face", f"original_{name}", case)


def orbax() -> None:
    for path in sorted((COMPAT / "orbax").iterdir()):
        if path.is_dir():
            case = Case.of_directory(path)
            keep("orbax", path.name, case)
            if "plain" not in path.name and path.name not in ("manager", "v1"):
                keep("orbax_keys", path.name, with_open_databases(case, path))


_OLD = (
    "orbax-0.2.7/ptmixagg_base", "orbax-0.3.5/pt_base", "orbax-0.4.1/pt_base", "orbax-0.4.8/ptagg_optax",
    "orbax-0.5.3/ptmixagg_nulls", "flaxorbax-0.4.1/flax_guide", "flaxorbax-0.5.20/flax_guide",
)  # fmt: skip


def old_orbax() -> None:
    with (
        tempfile.TemporaryDirectory() as scratch,
        tarfile.open(COMPAT / "orbax-old" / "samples.tar.xz") as archive,
    ):
        archive.extractall(scratch, filter="data")
        for name in _OLD:
            keep("orbax_old", name.replace("/", "-"), Case.of_directory(Path(scratch) / name))


_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_CODECS = {
    "params.dense.kernel": [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "gzip", "configuration": {"level": 1}}],
    "params.emb": [{"name": "transpose", "configuration": {"order": [1, 0]}}, _BYTES, {"name": "zstd", "configuration": {"level": 1}}],
    "params.dense.bias": [_BYTES, {"name": "blosc", "configuration": {"cname": "lz4", "clevel": 1, "shuffle": "shuffle", "typesize": 4, "blocksize": 0}}],
    "flag": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [1], "codecs": [_BYTES, {"name": "crc32c"}]}}],
    "opt.0.mu.w": [_BYTES],
}  # fmt: skip


def zarr3() -> None:
    """Keep arrays of Orbax in zarr 3 with every codec."""
    case = Case.unpacked((HERE / "orbax_keys" / "v0_zarr3.zip").read_bytes())
    for name, codecs in _CODECS.items():
        old = json.loads(case.files[f"!{name}/zarr.json"])
        for key in [key for key in case.files if key.startswith(f"!{name}/")]:
            del case.files[key]
        metadata = {"shape": old["shape"], "data_type": old["data_type"], "codecs": codecs}
        spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata}
        array = ts.open(spec, create=True).result()
        array[...] = np.ones(array.shape, array.dtype.numpy_dtype)
        found = array.kvstore
        case.files |= {f"!{name}/{key.decode()}": bytes(found[key]) for key in found.list().result()}
    keep("orbax_keys", "zarr3_codecs", case)


def near() -> None:
    """Keep a run with a near tier."""
    with tempfile.TemporaryDirectory() as scratch:
        with checkpoint.Run(
            f"{scratch}/far", every=4, near=checkpoint.Near(f"{scratch}/near", every=1), signals=()
        ) as run:
            for step in (1, 2, 3):
                run.after(step, small())
        case = Case.of_directory(Path(scratch))
        case.files = {name: data.replace(scratch.encode(), PLACE) for name, data in case.files.items()}
        claim = json.loads(case.files["far/run.json"]) | {"host": "a", "pid": 1}
        case.files["far/run.json"] = json.dumps(claim).encode()
        keep("near", "run", case)


def torch() -> None:
    """Keep files of PyTorch, which tests/compat/torch/write.py writes."""
    for name in ("weights", "weights_stream", "kinds", "kinds_stream", "training"):
        keep("torch", name, Case({"m.pt": (COMPAT / "torch" / f"{name}.pt").read_bytes()}, "m.pt"))
    for name in ("shards", "distributed"):
        keep("torch", name, Case.of_directory(COMPAT / "torch" / name))


def single_files() -> None:
    """Keep files of llama.cpp and of Keras, which write.py beside them writes."""
    for name in ("plain", "aligned", "quantised"):
        keep("gguf", name, Case({"m.gguf": (COMPAT / "gguf" / f"{name}.gguf").read_bytes()}, "m.gguf"))
    for name in ("legacy.h5", "model.weights.h5", "model.keras"):
        keep("keras", name.replace(".", "_"), Case({name: (COMPAT / "keras" / name).read_bytes()}, name))


def flax_directories() -> None:
    step = (COMPAT / "files" / "flax.msgpack").read_bytes()
    keep("flax_directory", "steps", Case({"checkpoint_9": step, "checkpoint_10": step}))
    keep("flax_directory", "model", Case({"flax_model.msgpack": step, "config.json": b'{"a":1}'}))


_ZARR_PYTHON = {
    "zarr": ("v2-default", "v2-one"),
    "zarr3": (
        "v3-default", "v3-one", "v3-shards", "v3-blosc", "v3-transpose", "v3-gzip", "v3-crc", "v3-big", "v3-v2keys", "v3-zstd",
    ),
}  # fmt: skip


def zarr_python() -> None:
    """Keep groups of zarr 2 and 3, which tests/compat/zarr/write.py writes."""
    with zipfile.ZipFile(COMPAT / "zarr" / "samples.zip") as archive:
        for reader, names in _ZARR_PYTHON.items():
            for name in names:
                inner = [
                    file for file in archive.namelist() if file.startswith(f"{name}/") and file[-1] != "/"
                ]
                files = {file.removeprefix(f"{name}/"): archive.read(file) for file in inner}
                keep(reader, name, Case(files))


_KINDS = (
    "orbax-0.12.8/item_array", "orbax-0.12.8/item_json", "orbax-0.12.8/item_key", "orbax-0.12.8/version_1-base",
    "orbax-0.12.8/flax_legacy-optimizer", "orbax-0.2.7/array_aggregated", "orbax-0.2.7/pytree-slashes",
    "orbax-0.4.1/manager_of_items-slashes", "orbax-0.5.3/half_aggregated-texts", "orbax-0.5.20/item_numpy_key",
    "orbax-0.5.20/pytree-empties", "orbax-0.9.1/item_only_json",
)  # fmt: skip


def orbax_kinds() -> None:
    with (
        tempfile.TemporaryDirectory() as scratch,
        tarfile.open(COMPAT / "orbax-old" / "kinds.tar.xz") as archive,
    ):
        archive.extractall(scratch, filter="data")
        for name in _KINDS:
            keep("orbax_kinds", name.replace("/", "-"), Case.of_directory(Path(scratch) / name))


def signed() -> None:
    """Keep checkpoints with their signatures."""
    layouts = {
        "directory": ("", {}),
        "file": ("model.safetensors", {}),
        "arrays": ("", {"format": "tensorstore"}),
        "shards": ("", {"options": SaveOptions(max_shard_bytes=64)}),
    }
    for name, (target, options) in layouts.items():
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch) / "c"
            checkpoint.save(small(), place / target, **options)
            checkpoint.sign(place / target, private_key=PRIVATE)
            keep("signed", name, Case.of_directory(place, target))


def main() -> None:
    for work in (
        ours, together, runs, buckets, others, zarrs, orbax, old_orbax, zarr3, near, torch, single_files, flax_directories,
        zarr_python, orbax_kinds, signed,
    ):  # fmt: skip
        work()


if __name__ == "__main__":
    main()
