"""Set the stage for the blocks of each page: the files and the variables that its examples speak of."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from flax import nnx
from jax.sharding import PartitionSpec as P

from eformer import checkpoint
from support.pages import ROOT
from support.slurm import add_commands

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SAMPLES = ROOT / "tests" / "compat"
LLAMA_RULES = r"""
model\.layers\.(\d+)\.mlp\.up\.weight -> layers.up | transpose | stack \1
model\.embed\.weight -> embed
"""


class Done(KeyboardInterrupt):
    """Ends a loop of an example that would go on for ever. Nothing catches it on the way, as nothing catches Ctrl-C."""


STAGES: dict[str, Callable[[], dict[str, Any]]] = {}
REPLACED: dict[str, dict[str, str]] = {
    # A store of this process has the same rules as a bucket.
    "docs/guides/buckets.md": {'"s3://my-bucket/': '"memory://my-bucket/'},
    # Lines run one by one, and each needs its other process.
    "docs/guides/larger-than-a-machine.md": {
        "eformer verify run/step-9000 --coordinator 127.0.0.1:8476 --process 1/2 &\n": "true; eformer verify "
        "run/step-9000 --coordinator 127.0.0.1:8476 --process 1/2 & "
    },
    "docs/guides/recipes.md": {'"s3://my-bucket/': '"memory://my-bucket/'},
    "docs/guides/reports.md": {"memory=2 * 10**9": "memory=10**10"},  # the process of the tests may take more
    "docs/guides/training-run.md": {"/dev/shm/llama": "near", "s3://scratch/": "memory://scratch/"},
    "docs/guides/from-pytorch.md": {"model.embed.weight": "0.weight"},
}

# The facts that hold after the blocks of a page. A loop adds 1 in each step, first with another library, then with
# eformer, and goes back: no step may be lost or done twice.
HOLDS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "docs/guides/from-equinox.md": lambda after: (
        after["run"].step == round(float(after["model"].layers[0].bias[0])) == 80
    ),
    "docs/guides/from-flax.md": lambda after: after["state"]["step"] == after["state"]["w"][0, 0] == 80,
    "docs/guides/hugging-face-and-back.md": lambda after: all_went_back(after),
    "docs/guides/from-orbax.md": lambda after: after["state"]["step"] == after["state"]["w"][0, 0] == 80,
    "docs/guides/to-hugging-face.md": lambda after: same_as_qwen(),
    "docs/guides/from-safetensors.md": lambda after: after["params"]["layer.bias"][0] == 80,
}


def stage(page: str) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    def add(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        STAGES[page] = function
        return function

    return add


def mesh(*axes: str) -> jax.sharding.Mesh:
    sizes = (jax.device_count(), *[1] * (len(axes) - 1))
    return jax.make_mesh(sizes, axes)


def state() -> dict[str, Any]:
    params = {"embedding": jnp.arange(64.0).reshape(32, 2), "kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}
    return {"params": params, "step": 1}


def llama(path: str) -> dict[str, Any]:
    """Write a model as Hugging Face does; return the tree that the rules make of it."""
    weights = {f"model.layers.{i}.mlp.up.weight": np.full((2, 4), i, np.float32) for i in range(3)}
    weights["model.embed.weight"] = np.ones((8, 2), np.float32)
    Path(path).mkdir(parents=True)
    safetensors.numpy.save_file(weights, Path(path, "model.safetensors"))
    Path(path, "config.json").write_text('{"model_type": "llama"}')
    Path("llama.rules").write_text(LLAMA_RULES)
    return {"layers": {"up": jnp.zeros((3, 4, 2))}, "embed": jnp.zeros((8, 2))}


def quantized(path: str) -> None:
    """Write a weight in FP8 with the scale of its block."""
    leaves = {
        "up.weight": np.ones((2, 4), ml_dtypes.float8_e4m3fn),
        "up.weight_scale_inv": np.full((1, 1), 0.5, np.float32),
    }
    Path(path).mkdir(parents=True)
    safetensors.numpy.save_file(leaves, Path(path, "model.safetensors"))
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    Path(path, "config.json").write_text(json.dumps({"quantization_config": method}))


def same_as_qwen() -> bool:
    """Tell whether every way back leads to the leaves of the model, bit for bit."""
    paths = ("for-hf", "plain")
    same = all(checkpoint.diff("models/qwen3", path).same for path in paths)
    return same and Path("for-hf", "tokenizer_config.json").exists() and Path("tuned", "config.json").exists()


@stage("README.md")
def _readme() -> dict[str, Any]:
    saved = {"params": {"embedding": jnp.ones((1000, 64)), "bias": jnp.zeros(64)}}
    model = llama("hf/llama")
    for path in ("pretrained", "checkpoint", "step-100", "step-200"):
        checkpoint.save(saved, path)
    Path("rules.txt").write_text(r"params\.(.*) -> \1")
    return {"mesh": mesh("data", "model"), "model": model, "P": P}


@stage("docs/index.md")
def _index() -> dict[str, Any]:
    return {}


@stage("docs/quickstart.md")
def _quickstart() -> dict[str, Any]:
    return {}


@stage("docs/format/index.md")
def _format() -> dict[str, Any]:
    Path("examples").symlink_to(ROOT / "examples")
    checkpoint.save(state(), "checkpoint")
    return {}


@stage("docs/guides/buckets.md")
def _buckets() -> dict[str, Any]:
    return {"state": state()}


@stage("docs/guides/from-equinox.md")
@stage("docs/guides/from-flax.md")
@stage("docs/guides/from-safetensors.md")
def _loops() -> dict[str, Any]:
    return {}


@stage("docs/guides/from-hugging-face.md")
def _hugging_face() -> dict[str, Any]:
    quantized("models/fp8")  # in the home directory, which is this one
    return {}


@stage("docs/guides/hugging-face-and-back.md")
def _hugging_face_and_back() -> dict[str, Any]:
    _tiny_model("qwen3", "models/qwen3")
    shapes = checkpoint.rules("tunix").check("models/qwen3").leaves
    return {
        "train_step": lambda params: params,
        "make_model": lambda: module_of(shapes),
        "init_params": own_params,
        "train_adapters": lambda adapters, params: jax.tree.map(lambda leaf: leaf + 0.5, adapters),
    }


def own_params() -> dict[str, Any]:
    """Return the parameters of a model of Qwen3 that somebody has written."""
    shapes = {"norm_q": (6,), "norm_k": (6,), "q": (8, 4, 6), "k": (8, 2, 6), "v": (8, 2, 6), "o": (4, 6, 8)}
    shapes |= {"gate": (8, 13), "up": (8, 13), "down": (13, 8), "norm_1": (8,), "norm_2": (8,)}
    whole = {"embed": (37, 8), "norm": (8,), "head": (8, 37)}
    layers = {name: jnp.zeros((3, *shape), jnp.bfloat16) for name, shape in shapes.items()}
    return {"layers": layers, **{name: jnp.zeros(shape, jnp.bfloat16) for name, shape in whole.items()}}


def module_of(shapes: Mapping[str, tuple[int, ...]]) -> nnx.Module:
    """Return a module of NNX whose parameters have these names and shapes."""
    top = nnx.Module()
    for name, shape in shapes.items():
        *outer, last = name.split(".")
        module: Any = top
        for part, after in zip(outer, [*outer[1:], last], strict=True):
            module = _inside(module, part, is_list=after.isdigit())
        setattr(module, last, nnx.Param(jnp.zeros(shape, jnp.float32)))
    return top


def _inside(module: Any, part: str, *, is_list: bool) -> Any:
    """Return a part of a module, which is made if it is missing."""
    if part.isdigit():
        module.extend(nnx.Module() for _ in range(len(module), int(part) + 1))
        return module[int(part)]
    if not hasattr(module, part):
        setattr(module, part, nnx.List([]) if is_list else nnx.Module())
    return getattr(module, part)


def all_went_back(after: dict[str, Any]) -> bool:
    """Tell whether every way back leads to the leaves of the model, bit for bit, and adapters have changed two."""
    same = all(checkpoint.diff("models/qwen3", f"from-{way}").same for way in ("maxtext", "tunix", "mine"))
    changed = {leaf.name.split(".")[-2] for leaf in checkpoint.diff("models/qwen3", "merged").changed}
    shared = jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), after["again"], after["adapters"]))
    return (
        same and changed == {"q_proj", "v_proj"} and shared and Path("for-peft/adapter_config.json").exists()
    )


def _tiny_model(name: str, path: str = "") -> None:
    shutil.copytree(ROOT / "tests" / "rules" / "models" / name, path or f"hf/{name}")


@stage("docs/guides/rule-book.md")
def _rule_book() -> dict[str, Any]:
    for name in ("qwen3", "qwen3_moe"):
        _tiny_model(name)
    return {}


@stage("docs/guides/from-orbax.md")
def _orbax() -> dict[str, Any]:
    checkpoint.save(state(), "saved", prefix="default")
    for step in (1000, 2000):
        checkpoint.convert("saved", f"run/{step}", to="orbax")
    return {}


@stage("docs/guides/from-pytorch.md")
def _torch() -> dict[str, Any]:
    shutil.copy(SAMPLES / "torch" / "weights.pt", "model.pt")
    shutil.copytree(SAMPLES / "torch" / "distributed", "dcp/step_100")
    Path("rules.txt").write_text(r"(\d)\.(.*) -> layer\1.\2")
    params = checkpoint.load("model.pt", rename="rules.txt")
    return {"checkpoint": checkpoint, "params": params, "mesh": mesh("data")}


@stage("docs/guides/from-the-original.md")
def _original() -> dict[str, Any]:
    shutil.copytree(SAMPLES / "data" / "ts_v2", "checkpoint")
    return {}


@stage("docs/guides/msgpack.md")
def _msgpack() -> dict[str, Any]:
    return {"state": state()}


@stage("docs/guides/partial-loads.md")
def _partial_loads() -> dict[str, Any]:
    model = jax.eval_shape(lambda tree: tree, llama("hf/llama"))
    return {"checkpoint": checkpoint, "abstract_model": model, "mesh": mesh("data")}


@stage("docs/guides/to-hugging-face.md")
def _to_hugging_face() -> dict[str, Any]:
    _tiny_model("qwen3", "models/qwen3")
    Path("models/qwen3/tokenizer_config.json").write_text("{}")
    params, report = checkpoint.load("models/qwen3", rename="maxtext", return_report=True)
    with checkpoint.Run("run", every=100, origin=report.origin) as run:
        run.after(100, {"params": params})
    return {}


@stage("docs/guides/peft.md")
def _peft() -> dict[str, Any]:
    lora = {"lora_a": np.ones((4, 2)), "lora_b": np.ones((2, 6))}
    checkpoint.save({"model": {"layers": [{"q_proj": lora}]}}, "lora")
    Path("settings.json").write_text(json.dumps({"lora_alpha": 16}))
    Path("lora.rules").write_text(r"model\.(.*) -> transformer.\1")
    return {}


@stage("docs/guides/merging.md")
def _merging() -> dict[str, Any]:
    for step in (100, 200, 300):
        checkpoint.save(state() | {"step": step}, f"run/step-{step}")
    shutil.copytree(ROOT / "tests" / "rules" / "models" / "qwen3", "models/qwen3")
    module, config = (
        "base_model.model.model.layers.0.self_attn.q_proj",
        {"peft_type": "LORA", "lora_alpha": 4},
    )
    with checkpoint.open("models/qwen3") as view:
        rows, columns = view["model.layers.0.self_attn.q_proj.weight"].shape
    pair = {"lora_A": np.ones((2, columns), np.float32), "lora_B": np.ones((rows, 2), np.float32)}
    Path("adapter").mkdir()
    weights = {f"{module}.{name}.weight": matrix for name, matrix in pair.items()}
    safetensors.numpy.save_file(weights, "adapter/adapter_model.safetensors")
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    return {}


@stage("docs/guides/reports.md")
def _reports() -> dict[str, Any]:
    for step in (100, 200):
        checkpoint.save(state(), f"run/step-{step}", metadata={"step": step})
    safetensors.numpy.save_file({"w": np.ones(3)}, "model.safetensors")
    return {}


@stage("docs/guides/signatures.md")
def _signatures() -> dict[str, Any]:
    saved = state()
    for path in ("checkpoint", "run/step-100"):
        checkpoint.save(saved, path)
    return {"state": saved, "run": checkpoint.Run("run")}


@stage("docs/guides/is-this-what-was-saved.md")
def _same() -> dict[str, Any]:
    return {"state": state()}


@stage("docs/guides/the-manager.md")
def _manager() -> dict[str, Any]:
    return {"state": state(), "mesh": mesh("model"), "P": P}


@stage("docs/guides/recipes.md")
def _recipes() -> dict[str, Any]:
    return {}


@stage("docs/guides/data.md")
def _data() -> dict[str, Any]:
    return {}


@stage("docs/guides/larger-than-a-machine.md")
def larger_than_a_machine() -> dict[str, Any]:
    for step in (8000, 9000):
        tree = {f"layer{n}": np.full((300, 1000), step + n, np.float32) for n in range(4)}
        checkpoint.save(tree, f"run/step-{step}")
    add_commands(Path("bin"))
    os.environ["PATH"] = (
        f"{Path('bin').absolute()}:{os.environ['PATH']}"  # the fixture of the test puts it back
    )
    return {}


@stage("docs/guides/integrations.md")
def scheduled_run() -> dict[str, Any]:
    return {"state": {"w": np.zeros(4, np.float32)}, "train_step": lambda state: {"w": state["w"] + 1}}


@stage("docs/guides/training-run.md")
def training_run() -> dict[str, Any]:
    def evaluate(path: str) -> float:
        if checkpoint.load(path)["step"] == 3000:
            raise Done
        return 0.5

    def train_step(state: Any, batch: Any) -> Any:
        return {**state, "step": state["step"] + 1}, 0.25

    data = _Data()
    return {
        "state": {"params": {"w": jnp.zeros(16)}, "step": 0, "learning_rate": 0.1},
        "mesh": mesh("data"),
        "P": P,
        "data": data,
        "train_step": train_step,
        "evaluate": evaluate,
    }


class _Data:
    """Batches for 3,500 steps."""

    def __init__(self) -> None:
        self.taken = 0

    def __next__(self) -> None:
        self.taken += 1
        if self.taken > 3500:
            raise Done

    def get_state(self) -> int:
        return self.taken

    def set_state(self, state: int) -> None:
        self.taken = state


# ------------------------------------------------------------------------------------------- docstrings


def names_of_docstrings() -> dict[str, Any]:
    """Write a run and models that examples of docstrings speak of, and return their variables."""
    from datetime import timedelta
    from typing import NamedTuple

    for step in (100, 200, 300):
        checkpoint.save(_saved(step), f"run/step-{step}")
    checkpoint.score("run", 300, {"eval.loss": 0.5})
    checkpoint.save(_saved(0), "pretrained")
    checkpoint.save({"params": {"lora": jnp.ones(2)}}, "lora")
    model = llama("hf/llama")
    _tiny_model("qwen3")
    _write_others()
    taken = []

    def evaluate(path: Any) -> float:
        taken.append(path)
        if len(taken) > 2:
            raise Done
        return 0.5

    return {
        **{name: getattr(checkpoint, name) for name in checkpoint.__all__},
        "checkpoint": checkpoint,
        "state": _saved(1),
        "params": _saved(1)["params"],
        "model": model,
        "abstract_model": {**checkpoint.abstract("pretrained"), "params": _with_lora()},
        "batch": None,
        "train_step": lambda state, batch: state,
        "mesh": mesh("data"),
        "PartitionSpec": P,
        "evaluate": evaluate,
        "step": checkpoint.steps("run")[0],
        "timedelta": timedelta,
        "NamedTuple": NamedTuple,
        "Any": Any,
        "Ema": _Ema,
        "ema": _Ema(jnp.ones(2)),
        "jnp": jnp,
        "np": np,
        "jax": jax,
    }


def _with_lora() -> dict[str, Any]:
    return {**checkpoint.abstract("pretrained")["params"], **checkpoint.abstract("lora")["params"]}


def _saved(step: int) -> dict[str, Any]:
    return {
        "params": {"embedding": jnp.ones((32, 2)), "w": jnp.full((8, 4), step / 100, jnp.float32)},
        "step": step,
    }


def _write_others() -> None:
    from eformer.pytree import save_to_file
    from eformer.serialization import Checkpointer
    from support.keys import PRIVATE, PUBLIC

    Path("private.pem").write_bytes(PRIVATE)
    Path("public.pem").write_bytes(PUBLIC)
    save_to_file({"w": np.ones(2)}, "model.msgpack")
    checkpointer = Checkpointer("runs/llama", None, [])
    checkpointer.on_step(None, {"w": np.ones(2)}, step=1000, force=True)
    checkpointer.wait_until_finished()


class _Ema:
    def __init__(self, average: Any) -> None:
        self.average = average

    def set_average(self, average: Any) -> None:
        self.average = average
