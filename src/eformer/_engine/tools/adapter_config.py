"""Complete and check the configuration of a PEFT adapter, `adapter_config.json`. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.others.peft import CONFIG
from eformer._engine.record.text import few
from eformer._engine.tools.adapter_leaves import BASE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from eformer._engine.tools.adapter_leaves import AdapterLeaf

Config = dict[str, Any]

_DEFAULTS: Config = {
    "peft_type": "LORA",
    "task_type": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "inference_mode": True,
}


def new_config(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> Config:
    """Return the settings of the source with those of the caller, as they read from a file: sets are lists."""
    try:
        config: Config = msgspec.json.decode(msgspec.json.encode({**_DEFAULTS, **recorded, **given}))
    except TypeError as error:
        raise ValueError(f"config= cannot be written to {CONFIG}: {error}") from error
    if isinstance(found := config.get("modules_to_save"), str):
        raise ValueError(f'modules_to_save in config= is {found!r}; expected a list, such as ["{found}"]')
    return config


def asks_for(config: Config, name: str) -> bool:
    """Tell whether a leaf that is not of a LoRA, and has PEFT's name, belongs into the adapter."""
    if not name.startswith(BASE) or ".base_layer." in name:
        return False
    if config["bias"] != "none" and name.endswith(".bias"):
        return True
    return any(f".{module}." in name for module in config.get("modules_to_save") or ())


def complete(config: Config, leaves: Sequence[AdapterLeaf]) -> None:
    """Add to a configuration what the leaves tell: the rank, and the modules that have a LoRA."""
    ranks = Counter(leaf.rank for leaf in leaves if leaf.rank and _rank_of(leaf, config) is None)
    if ranks:
        config["r"] = ranks.most_common(1)[0][0]
    if not config.get("target_modules") and not config.get("target_parameters"):
        config["target_modules"] = target_modules({leaf.name.module for leaf in leaves if leaf.rank})


def _rank_of(leaf: AdapterLeaf, config: Config) -> Any:
    """Return the rank that the configuration has for a leaf, found as PEFT finds it; None if it has none."""
    patterns = config.get("rank_pattern") or {}
    found = (rank for key, rank in patterns.items() if _matches(rf"(.*\.)?({key})", leaf.name.module))
    return next(found, config.get("r"))


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise ValueError(f"config= has {pattern!r}, which is not a regular expression: {error}") from error


# --------------------------------------------------------------------------------------------- targets


def target_modules(modules: Collection[str]) -> list[str]:
    """Name modules of the base model as PEFT's users do, by their last parts.

    Name them in full where a last part would surely stand for other modules as well: if one of the layers has no such
    module, or if it is a number.
    """
    layers: dict[tuple[str, str], set[int]] = defaultdict(set)
    for module in modules:
        head, number, tail = _split_at_layer(module)
        layers[head, tail].add(number)
    last_layer: dict[str, int] = {}
    for (head, _), numbers in layers.items():
        last_layer[head] = max(last_layer.get(head, 0), *numbers)
    in_full = {_last(module) for module in modules if _last(module).isdecimal()}
    in_full |= {
        _last(head + tail) for (head, tail), numbers in layers.items() if len(numbers) <= last_layer[head]
    }
    return sorted({module if _last(module) in in_full else _last(module) for module in modules})


_LAYER = re.compile(r"(?P<head>(?:.*?\.)?)(?P<number>\d+)(?P<tail>\..*)")


def _split_at_layer(module: str) -> tuple[str, int, str]:
    """Split the name of a module at its first number. A module outside of layers counts as one of a single layer."""
    match = _LAYER.fullmatch(module)
    return (match["head"], int(match["number"]), match["tail"]) if match else (module, 0, "")


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _is_target(module: str, config: Config) -> bool:
    targets = config["target_modules"]
    if isinstance(targets, str):
        return targets == "all-linear" or _matches(targets, module)
    return any(f".{module}".endswith(f".{target}") for target in targets)


# -------------------------------------------------------------------------------------------- problems


def problems(config: Config, leaves: Sequence[AdapterLeaf]) -> Iterator[str]:
    """Say where the configuration and the leaves disagree: PEFT would fail, or leave out leaves with a warning."""
    if config["peft_type"] != "LORA":
        yield f"config= has the peft_type {config['peft_type']!r}; only LORA can be written"
    if config.get("lora_alpha") is None:
        yield "lora_alpha is not known, and no leaf tells it; give it with config=, such as lora_alpha=32"
    yield from _wrong_ranks(config, leaves)
    if not config.get("target_parameters"):
        modules = sorted({leaf.name.module for leaf in leaves if leaf.rank})
        if missing := [module for module in modules if not _is_target(module, config)]:
            yield f"target_modules={config['target_modules']!r} in config= do not match {few(missing)}"
    for module in config.get("modules_to_save") or ():
        if not any(f".{module}." in str(leaf.name) for leaf in leaves):
            yield f"modules_to_save in config= has {module!r}, and no leaf is called {BASE}...{module}..."


def _wrong_ranks(config: Config, leaves: Sequence[AdapterLeaf]) -> Iterator[str]:
    for leaf in leaves:
        if leaf.rank and leaf.rank != (expected := _rank_of(leaf, config)):
            yield (
                f"leaf {leaf.source.name!r} has the rank {leaf.rank}, not r={expected}: {leaf.name.part} would have "
                f"the shape {list(leaf.shape)}. rank_pattern in config= allows several ranks"
            )
