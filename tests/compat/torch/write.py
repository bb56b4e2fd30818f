"""Write the files of PyTorch that tests/compat/test_torch.py reads, and beside each what PyTorch loads from it.

pip install torch==2.13.0 && python tests/compat/torch/write.py
"""

import argparse
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint
import torch.distributed.tensor

HERE = Path(__file__).parent


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    weights = model.state_dict()
    training = {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(lr=1),
    }
    write("weights", weights)
    write("weights_protocol_4", weights, pickle_protocol=4)
    write("weights_stream", weights, _use_new_zipfile_serialization=False)
    write("training", training)
    kinds = many_kinds()
    write("kinds", kinds)
    late = ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")
    write(
        "kinds_stream",
        {k: v for k, v in kinds.items() if k not in late},
        _use_new_zipfile_serialization=False,
    )
    write("bare", torch.arange(6.0).reshape(2, 3))
    torch.save({"w": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, HERE / "quantised.pt")
    torch.save({"w": torch.ones(2).to_sparse()}, HERE / "sparse.pt")
    torch.save({"w": torch.empty(2, device="meta")}, HERE / "meta.pt")
    torch.save(model, HERE / "module.pt")
    torch.jit.script(model.eval()).save(HERE / "script.pt")
    write_shards(weights)
    write_distributed()
    write_views()
    write_strided()
    write_protocols()
    write_distributed_training()
    write_fp8()


def many_kinds() -> dict:
    matrix, numbers = torch.arange(12.0).reshape(3, 4), torch.arange(100, dtype=torch.int32)
    plain = {str(dtype).removeprefix("torch."): torch.tensor([0, 1, 3]).to(dtype) for dtype in DTYPES}
    return plain | {
        "matrix": matrix,
        "transposed": matrix.t(),
        "the same": matrix,
        "slice": numbers[10:20],
        "every seventh": numbers[::7],
        "window": numbers[:90].reshape(9, 10)[2:5, 3:7],
        "expanded": torch.tensor([1.5]).expand(4, 3),
        "scalar": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "buffer": torch.nn.Buffer(torch.ones(2) * 2),
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        "inside": [torch.ones(1), {"x.y": torch.zeros(2), "x.z": torch.ones(2)}, (torch.ones(2), None)],
        "plain": {
            "size": torch.Size([1, 2]),
            "dtype": torch.float32,
            "none": None,
            "bytes": b"\x00\xff",
        },
        "numbered": {3: "three"},
    }


def write_views() -> None:
    """Write views whose elements are stored as they were before they were conjugated or negated."""
    numbers = torch.complex(torch.arange(6.0), torch.arange(6.0) - 2).reshape(2, 3)
    views = {
        "conjugated": numbers.clone().conj(),
        "both": numbers.clone().t().conj(),
        "negated": numbers.clone().conj().imag,
        "real": numbers.clone().real,
        "diagonal": torch.arange(16.0).reshape(4, 4).diagonal(),
        "channels last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "unfolded": torch.arange(10).unfold(0, 4, 2),
    }
    write("views", views)
    write("views_stream", views, _use_new_zipfile_serialization=False)
    torch.save(
        {"w": torch.ones(2), "fp4": torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
        HERE / "packed.pt",
    )


def write_strided() -> None:
    """Write views of every dtype whose elements do not lie one after the other."""
    more = (torch.float32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
    bits = (torch.arange(24 * 16) * 7 % 120).to(torch.uint8)
    tree = {}
    for dtype in (*DTYPES, *more):
        numbers = (bits % 2 if dtype == torch.bool else bits).view(dtype)[:24]
        cube = numbers.clone().reshape(2, 3, 4)
        tree[str(dtype).removeprefix("torch.")] = {
            "transposed": cube[0].t(),
            "permuted": cube.permute(2, 0, 1),
            "with an offset": cube[1:, 1:, ::2],
            "expanded": cube[1, 2, 3:].expand(3, 2),
            "empty": cube[:, 3:].transpose(0, 2),
        }
    write("strided", tree)


def write_protocols() -> None:
    """Write pickles of every protocol, archives and streams, with plain values of every kind; and two in one file."""
    tree = {
        "w": torch.ones(2),
        "values": [1, 2.5, "x", b"y", None, True, (1,), {1, 2}, 2**70, 1 + 2j, bytearray(b"z")],
    }
    for protocol in (3, 4, 5):
        write(f"protocol_{protocol}", tree, pickle_protocol=protocol)
        write(
            f"protocol_{protocol}_stream",
            tree,
            pickle_protocol=protocol,
            _use_new_zipfile_serialization=False,
        )
    for name, is_archive in (("two", True), ("two_stream", False)):
        with open(HERE / f"{name}.pt", "wb") as file:
            for tree in ({"a": torch.ones(1)}, {"b": torch.ones(1)}):
                torch.save(tree, file, _use_new_zipfile_serialization=is_archive)


def write_distributed_training() -> None:
    """Write the state of a training run by torch.distributed.checkpoint, with values that are not tensors."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "values": {"none": None, "pair": (1, 2), "empty": {}, "list": [], "text": "x", "bytes": b"y"},
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "args": argparse.Namespace(lr=1),
    }
    save_distributed(tree, fresh("distributed_training"))
    keep("distributed_training", tree)
    more = fresh("distributed_more")
    save_distributed({"a": torch.ones(2), "b": 3}, more)
    metadata = pickle.loads((more / ".metadata").read_bytes())
    del metadata.state_dict_metadata["b"]
    (more / ".metadata").write_bytes(pickle.dumps(metadata))


def write_fp8() -> None:
    """Write weights of FP8 beside their scales, in an archive and by torch.distributed.checkpoint."""
    tree = {
        "model": {
            "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
            "a.weight_scale_inv": torch.ones(1, 1),
        }
    }
    torch.save(tree | {"step": 1}, HERE / "fp8.pt")
    save_distributed(tree, fresh("distributed_fp8"))


def save_distributed(tree: object, folder: Path) -> None:
    """Save to a relative path, because PyTorch writes it into the metadata."""
    os.chdir(folder.parent)
    torch.distributed.checkpoint.save(tree, checkpoint_id=folder.name)


DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32,
    torch.uint64,
]  # fmt: skip


def write(name: str, tree: object, **how: object) -> None:
    torch.save(tree, HERE / f"{name}.pt", **how)
    keep(name, tree)


def keep(name: str, tree: object) -> None:
    """Keep what PyTorch has, beside what it wrote."""
    expected: dict[str, np.ndarray] = {}
    note(tree, "", expected)
    np.savez_compressed(HERE / f"{name}.npz", **expected)


def note(node: object, path: str, expected: dict) -> None:
    """Note the shape and the bytes of every tensor by its path, without the dots in keys."""
    if isinstance(node, torch.Tensor):
        node = node.resolve_conj().resolve_neg()
        raw = (
            node.detach().contiguous().flatten().view(torch.uint8).numpy()
            if node.numel()
            else np.zeros(0, np.uint8)
        )
        expected[f"{path}|{str(node.dtype).removeprefix('torch.')}|{list(node.shape)}"] = raw
    elif isinstance(node, dict):
        for key, child in node.items():
            note(child, f"{path}/{str(key).replace('.', '/')}", expected)
    elif isinstance(node, (list, tuple)):
        for number, child in enumerate(node):
            note(child, f"{path}/{number}", expected)


def write_shards(weights: dict) -> None:
    """Write a model as Hugging Face does, in two files with an index."""
    folder = fresh("shards")
    names = sorted(weights)
    files = {name: f"pytorch_model-0000{1 + (i > 2)}-of-00002.bin" for i, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: weights[name] for name in names if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    keep("shards", weights)


def write_distributed() -> None:
    """Write a tree of two processes, with shards of rows and of columns, by torch.distributed.checkpoint."""
    folder = fresh("distributed")
    torch.multiprocessing.spawn(save_one, (str(folder),), nprocs=2)
    keep("distributed", distributed_tree())


def distributed_tree() -> dict:
    rows, columns = torch.arange(24.0).reshape(6, 4), torch.arange(10, dtype=torch.bfloat16).reshape(2, 5)
    inner = {"layer.0.weight": rows, "layer.0.bias": torch.ones(4), "layer.1.weight": columns}
    return {
        "model": inner,
        "transposed": rows.t(),
        "list": [torch.ones(2), torch.zeros(())],
        "step": 7,
        "name": "x",
    }


def save_one(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    tree = distributed_tree()
    for name, axis in (("layer.0.weight", 0), ("layer.1.weight", 1)):
        place = [torch.distributed.tensor.Shard(axis)]
        tree["model"][name] = torch.distributed.tensor.distribute_tensor(tree["model"][name], mesh, place)
    save_distributed(tree, Path(folder))
    torch.distributed.destroy_process_group()


def fresh(name: str) -> Path:
    shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / name).mkdir()
    return HERE / name


if __name__ == "__main__":
    main()
