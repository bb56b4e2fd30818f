"""MaxText's own conversion of tiny models, out of its package: the mapping of names, the hooks, and the stacking.

Only two modules of it run, which need numpy and jax; the package itself is never imported.
"""

from __future__ import annotations

import importlib.util
import types
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

# The model of MaxText whose mapping converts a model of `tests/rules/models`, with the layers of a period.
MODELS = {
    "llama": ("llama3.1-8b", 1),
    "llama-tied": ("llama3.1-8b", 1),
    "mistral": ("llama3.1-8b", 1),
    "qwen2": ("qwen2.5-7b", 1),
    "qwen2-tied": ("qwen2.5-1.5b", 1),
    "qwen3": ("qwen3-8b", 1),
    "qwen3-tied": ("qwen3-0.6b", 1),
    "qwen3_moe": ("qwen3-30b-a3b", 1),
    "mixtral": ("mixtral-8x7b", 1),
    "deepseek_v3": ("deepseek3-671b", 1),
    "deepseek_v2": ("deepseek2-16b", 1),
    "deepseek_v4": ("deepseek4-284b", 2),
    "gpt_oss": ("gpt-oss-20b", 2),
    "olmo3": ("olmo3-7b", 4),
    "gemma2": ("gemma2-2b", 1),
    "gemma3": ("gemma3-4b", 1),
    "gemma4": ("gemma4-26b", 1),
    "gemma4_text": ("gemma4-31b", 1),
    "qwen3_next": ("qwen3-next-80b-a3b", 4),
    "qwen3_5_moe": ("qwen3.5-35b-a3b", 4),
}

_NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_UTILS = "checkpoint_conversion/utils"


@cache
def _module(name: str) -> Any:
    """Run one module of MaxText."""
    spec = importlib.util.find_spec("maxtext")
    assert spec, "maxtext is not installed: see tests/frameworks/no-deps.txt"
    assert spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0], _UTILS, f"{name}.py")
    module = types.ModuleType(name)
    exec(
        compile(file.read_bytes(), str(file), "exec"), module.__dict__
    )  # no import: the package needs much more
    return module


def converted(
    name: str,
    config: dict[str, Any],
    leaves: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    *,
    scan: bool,
) -> dict[str, Any]:
    """Convert a model as MaxText does. `shapes` are the shapes of its parameters, which its hooks take as given."""
    model, period = MODELS[name]
    mapping, tensors = _module("param_mapping"), _module("tensor_handling")
    text = config.get("text_config", config)
    settings = types.SimpleNamespace(
        num_experts=next(filter(None, map(text.get, _NUMBERS_OF_EXPERTS)), 1),
        inhomogeneous_layer_cycle_interval=period,
        head_dim=text.get("head_dim"),
        use_multimodal="vision_config" in config,
        scan_layers=scan,
        param_scan_axis=1,
        share_kv_projections=text.get("attention_k_eq_v", False),
        v_norm_with_scale=False,
    )
    config = {"num_experts": settings.num_experts} | config
    keys = mapping.PARAM_MAPPING[model](config, settings, scan)
    hooks = mapping.HOOK_FNS[model](config, settings, scan, saving_to_hf=False)

    def read(key: Any) -> Any:
        return tuple(leaves[each] for each in key) if isinstance(key, tuple) else leaves[key]

    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vocabularies that are padded
        for key, source in keys.items():
            names = [each.replace("-", ".") for each in (key if isinstance(key, tuple) else (key,))]
            if source is not None and not all(each in leaves for each in _flat(source)):
                continue  # biases, heads that are tied, and parts that only other models of the mapping have
            if source is None:  # a constant
                found[names[0]] = hooks[key](None, shapes[names[0]])
                continue
            shape = shapes[names[0]] if len(names) == 1 else tuple(shapes[each] for each in names)
            # MaxText 0.2.5 fails with the experts of a layer outside of the scan: it takes them for a stack of layers.
            is_apart = scan and model.startswith("deepseek4") and "decoder-layers_" in key
            here = types.SimpleNamespace(**vars(settings) | {"scan_layers": scan and not is_apart})
            load = tensors.get_hf_loading_function(source, read, hooks.get(key), shape, here, key)
            array = np.asarray(load())
            for index, each in enumerate(names):
                found[each] = array if len(names) == 1 else array[..., index]
    return found


def _flat(source: Any) -> list[str]:
    return (
        [name for each in source for name in _flat(each)] if isinstance(source, (list, tuple)) else [source]
    )
