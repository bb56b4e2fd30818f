"""Plan the weights of a model with a LoRA added: which leaves the LoRA changes, and by which scale."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.others.peft import CONFIG, CONFIG_KEY
from eformer._engine.record.lazy_arrays import Computed, transposed
from eformer._engine.record.merged_arrays import LowRankUpdate
from eformer._engine.record.names import nearest, readable
from eformer._engine.record.text import count, few
from eformer._engine.tools.adapter import BASE, AdapterName, is_lora, parse_adapter_name, setting_of
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np

    from eformer._engine.record.planned import LazyArray
    from eformer._engine.tools.view import View

_CONTEXT = "the LoRA cannot be added to the weights"

# The last parts of the names of weights: out x in as in torch, or in x out as in JAX.
_OUT_IN = (".weight",)
_IN_OUT = (".kernel", ".kernel.value", ".w", ".w.value", ".embedding", ".embedding.value")
_OWN_NAME = ("",)  # the leaf has the name of the module; its matrix is in x out, as that of a module of JAX

_DOWN = ("lora_A.weight", "lora_embedding_A")
_UP = ("lora_B.weight", "lora_embedding_B")

# Settings of PEFT by which the sum of weight and product is not the model, with the reason.
_REFUSED = {
    "use_dora": "DoRA also scales the columns of the sum",
    "use_qalora": "QA-LoRA averages its inputs",
    "use_bdlora": "its matrices are blocks",
    "lora_bias": "its biases have no place in the base",
    "layer_replication": "its layers are copies of layers of the base",
    "alora_invocation_tokens": "aLoRA applies to some tokens only",
    "arrow_config": "Arrow chooses between several LoRAs",
    "target_parameters": "its targets are parameters, and not modules",
    "trainable_token_indices": "it also changes rows of the embedding",
}
_OTHER_BASE = (
    "pissa",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
)  # ways to start that change the weights of the base


@dataclass(slots=True)
class _Halves:
    """The two thin matrices of a module: as PEFT stores them, rank x in and out x rank."""

    down: LazyArray | None = None
    up: LazyArray | None = None
    is_embedding: bool = False


@dataclass(slots=True)
class AddedLora:
    """Leaves of the base with a LoRA added, or in the place of a leaf of the base, and notes for the result."""

    arrays: dict[str, LazyArray] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def lora_settings(view: View, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the configuration of a LoRA: of the adapter, and over it the settings of the caller. Raise MismatchError
    for a LoRA of a kind that cannot be added."""
    recorded = view.metadata.get(CONFIG_KEY)
    config = {**(recorded if isinstance(recorded, dict) else {}), **(given or {})}
    if problems := list(_refusals(config)):
        raise MismatchError(problems, _CONTEXT)
    return config


def _refusals(config: Mapping[str, Any]) -> Iterator[str]:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        yield f"{CONFIG} has the peft_type {kind!r}; only LORA can be added"
    for setting, why in _REFUSED.items():
        if config.get(setting):
            yield f"{CONFIG} has {setting}={config[setting]!r}: {why}; merge it with PEFT"
    start = str(config.get("init_lora_weights", "")).lower()
    if start.startswith(_OTHER_BASE):
        yield (
            f"{CONFIG} has init_lora_weights={start!r}, which changes the base before training; convert the adapter "
            "with PEFT's path_initial_model_for_weight_conversion"
        )


def add_lora(
    base: Mapping[str, LazyArray],
    lora: View,
    config: Mapping[str, Any],
    dtype_of: Callable[[LazyArray], np.dtype[Any]],
) -> AddedLora:
    """Add a LoRA to the arrays of its base. A single error lists all leaves that do not fit."""
    added, problems = AddedLora(), list[str]()
    names = {readable(name): name for name in base}
    whole = _whole_leaves(lora.arrays, base, names, dtype_of, problems)
    halves = _halves(lora.arrays, problems)
    place = _Place({**base, **whole}, names)
    for module, pair in halves.items():
        _add_pair(module, pair, place, config, dtype_of, added, problems)
    if not halves and not problems:
        problems.append(f"no LoRA leaf among {count(len(lora), 'name')}: {few(list(lora))}")
    if problems:
        raise MismatchError(problems, _CONTEXT)
    added.notes.append(f"a LoRA is added to {count(len(added.arrays), 'leaf', 'leaves')}")
    added.notes += [f"taken whole from the adapter: {few(list(whole))}"] if whole else []
    added.arrays = {**whole, **added.arrays}
    return added


def _halves(arrays: Mapping[str, LazyArray], problems: list[str]) -> dict[str, _Halves]:
    """Return the thin matrices by module. Append the other leaves of a LoRA to `problems`."""
    found: dict[str, _Halves] = defaultdict(_Halves)
    for name, array in arrays.items():
        if not is_lora(plain := readable(name)):
            continue
        parsed = parse_adapter_name(plain)
        problem = _problem_of(parsed, array)
        if parsed is None or problem:
            problems.append(f"leaf {name!r} {problem}")
            continue
        half, thin = found[parsed.module], transposed(array, (1, 0)) if parsed.is_transposed else array
        half.is_embedding |= "embedding" in parsed.part
        if parsed.part in _DOWN:
            half.down = thin
        else:
            half.up = thin
    return dict(found)


def _problem_of(parsed: AdapterName | None, array: LazyArray) -> str:
    if parsed is None:
        return (
            f"does not have the name of a LoRA leaf; rename= can give it PEFT's, {BASE}MODULE.lora_A.weight"
        )
    if parsed.part not in _DOWN + _UP:
        kind = "DoRA" if parsed.part == "lora_magnitude_vector" else "a LoRA with biases"
        return f"belongs to {kind}, which cannot be added; merge it with PEFT"
    if len(array.shape) != 2:
        return f"has the shape {list(array.shape)}, expected a matrix; rename= can unstack layers"
    if ".base_layer" in parsed.module:
        return "belongs to a LoRA of a parameter, and not of a module; merge it with PEFT"
    return ""


@dataclass(frozen=True, slots=True)
class _Place:
    """The arrays of the base, and their names by readable names."""

    arrays: Mapping[str, LazyArray]
    names: Mapping[str, str]

    def of(self, module: str) -> tuple[str, bool] | None:
        """Return the name of the weight of a module, and whether its axes are in x out."""
        for endings, is_in_out in ((_OUT_IN, False), (_IN_OUT, True), (_OWN_NAME, True)):
            for ending in endings:
                if found := self.names.get(module + ending):
                    return found, is_in_out
        return None


def _add_pair(
    module: str,
    pair: _Halves,
    place: _Place,
    config: Mapping[str, Any],
    dtype_of: Callable[[LazyArray], np.dtype[Any]],
    added: AddedLora,
    problems: list[str],
) -> None:
    """Add one product to the leaf of its module."""
    found = place.of(module)
    if pair.down is None or pair.up is None:
        half = "A" if pair.down is None else "B"
        problems.append(f"module {module!r} has one of two matrices; lora_{half} is missing")
    elif found is None:
        near = nearest(f"{module}.weight", place.names)
        hint = f"; is it {near!r}? rename= gives the leaves of the LoRA other names" if near else ""
        problems.append(f"module {module!r} has no weight in the base{hint}")
    else:
        name, is_in_out = found
        flips = bool(config.get("fan_in_fan_out")) and not pair.is_embedding
        rows, columns = pair.up, pair.down
        if pair.is_embedding or is_in_out != flips:
            rows, columns = transposed(columns, (1, 0)), transposed(rows, (1, 0))
        array, scale = place.arrays[name], _scale(module, pair.down.shape[0], config, problems)
        if problem := _shape_problem(name, array, rows, columns):
            problems.append(problem)
        else:
            added.arrays[name] = LowRankUpdate(array, rows, columns, scale, dtype_of(array))


def _shape_problem(name: str, array: LazyArray, rows: LazyArray, columns: LazyArray) -> str:
    """Return why a product does not fit a leaf; "" if it fits."""
    if not array.dtype.name.startswith(("float", "bfloat")):
        return f'leaf {name!r} of the base is {array.dtype.name}; read quantised weights as numbers, dequant="bf16"'
    product = (rows.shape[0], columns.shape[1])
    if rows.shape[1] != columns.shape[0]:
        return f"leaf {name!r}: its LoRA has the ranks {rows.shape[1]} and {columns.shape[0]}"
    if array.shape != product:
        return f"leaf {name!r} has the shape {list(array.shape)}, and its LoRA {list(product)}"
    return ""


def _scale(module: str, rank: int, config: Mapping[str, Any], problems: list[str]) -> float:
    """Return the factor of a product, as PEFT computes it."""
    recorded = setting_of(config, "rank_pattern", "r", module)
    alpha = setting_of(config, "alpha_pattern", "lora_alpha", module)
    if recorded is not None and recorded != rank:
        problems.append(f"module {module!r} has the rank {rank}, and {CONFIG} r={recorded}")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        problem = "the scale of the LoRA is unknown; pass lora_alpha with lora_config=, such as lora_alpha=32"
        problems += [] if problem in problems else [problem]
        return 0.0
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else max(rank, 1))


def _whole_leaves(
    lora: Mapping[str, LazyArray],
    base: Mapping[str, LazyArray],
    names: Mapping[str, str],
    dtype_of: Callable[[LazyArray], np.dtype[Any]],
    problems: list[str],
) -> dict[str, LazyArray]:
    """Return the leaves that PEFT saved whole, such as a trained head or a resized embedding below its LoRA, by the
    names of the leaves of the base that they replace."""
    taken: dict[str, LazyArray] = {}
    for name, array in lora.items():
        plain = readable(name)
        if is_lora(plain) or not plain.startswith(BASE):
            continue
        inner = plain.removeprefix(BASE).replace(".base_layer.", ".")
        old = names.get(inner)
        if old is None:
            problems.append(f"leaf {name!r} has no leaf {inner!r} in the base")
        elif base[old].shape != array.shape:
            shapes = f"{list(array.shape)}, and in the base {list(base[old].shape)}"
            problems.append(f"leaf {name!r} has the shape {shapes}")
        else:
            dtype = dtype_of(base[old])
            taken[old] = array if array.dtype == dtype else Computed(array, dtype)
    return taken
