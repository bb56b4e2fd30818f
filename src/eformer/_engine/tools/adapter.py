"""Plan the conversion to a PEFT adapter: which leaves go into it, under which names, and with which configuration."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.nested_names import nested_dicts, parts_of_name
from eformer._engine.formats.others.peft import CONFIG, CONFIG_KEY
from eformer._engine.record.boxes import Box
from eformer._engine.record.lazy_arrays import stored_leaves, transposed
from eformer._engine.record.names import readable
from eformer._engine.record.text import count, few
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from eformer._engine.record.planned import Source
    from eformer._engine.record.rename import RenamingRules
    from eformer._engine.tools.conversion import ConvertedTree

BASE = "base_model.model."  # PEFT begins every name with this, before the module of the base model

# PEFT's own names, and equinox's of a linear layer: matrices are out x in.
_THEIRS = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\."
    r"(?P<matrix>lora_[AaBb]\.weight|lora_[AB]\.bias|lora_embedding_[AB]|lora_magnitude_vector)"
)
# A variable of NNX (in a LoRALinear under `lora`), w_lora_a of Tunix, a layer of linen or Haiku: in x out.
_OURS = re.compile(
    r"(?P<module>.+?)(?:\.lora)?\.(?:[^.]+_)?lora_(?P<matrix>[AaBb])(?:\.(?:kernel|w))?(?:\.value)?"
)
_LORA_PART = re.compile(r"(?:.+_)?lora_[AaBb]|lora_embedding_[AB]|lora_magnitude_vector")

_RANK_AXES = {"lora_A.weight": 0, "lora_B.weight": 1, "lora_embedding_A": 0, "lora_embedding_B": 1}


@dataclass(frozen=True, slots=True)
class AdapterName:
    """The name of a leaf in an adapter: a module of the base model, and a part of its LoRA, such as `lora_A.weight`.

    `is_transposed` tells whether the leaf has the axes of JAX, and must be transposed.
    """

    module: str
    part: str
    is_transposed: bool = False

    def __str__(self) -> str:
        return f"{BASE}{self.module}.{self.part}"

    @property
    def is_matrix(self) -> bool:
        return self.part in _RANK_AXES

    @property
    def other_half(self) -> str:
        """Return the name of the other matrix of the product."""
        return f"{BASE}{self.module}.{self.part.translate(str.maketrans('AB', 'BA'))}"


def parse_adapter_name(name: str) -> AdapterName | None:
    """Return the name that PEFT has for a LoRA leaf; None if the leaf does not read like a LoRA."""
    if match := _THEIRS.fullmatch(name):
        part = re.sub("lora_[ab]", lambda found: f"lora_{found[0][-1].upper()}", match["matrix"])
        return AdapterName(match["module"], part)
    if match := _OURS.fullmatch(name):
        return AdapterName(match["module"], f"lora_{match['matrix'].upper()}.weight", is_transposed=True)
    return None


def is_lora(name: str) -> bool:
    """Tell by the parts of its name whether a leaf belongs to a LoRA."""
    return any(_LORA_PART.fullmatch(part) for part in name.split("."))


@dataclass(frozen=True, slots=True)
class AdapterLeaf:
    """A leaf for an adapter: the array as it is, and its name in the adapter."""

    source: Source
    name: AdapterName

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in the adapter."""
        return self.source.shape[::-1] if self.name.is_transposed else self.source.shape

    @property
    def rank(self) -> int:
        """Return the rank of a LoRA's matrix; 0 for other leaves."""
        return self.shape[_RANK_AXES[self.name.part]] if self.name.is_matrix else 0

    def stored_as(self, name: str) -> Source:
        """Return the source to write, under a name."""
        ((_, array),) = self.source.parts
        if self.name.is_transposed:
            array = transposed(array, (1, 0))
        whole = Box.whole(self.shape)
        return msgspec.structs.replace(
            self.source, name=name, shape=self.shape, sharding=None, parts=((whole, array),), regions=(whole,)
        )


# --------------------------------------------------------------------------------------- configuration

Config = dict[str, Any]

_DEFAULTS: Config = {
    "peft_type": "LORA",
    "task_type": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "inference_mode": True,
}


def _new_config(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> Config:
    """Merge the settings of the source and of the caller, as they read from a file: sets become lists."""
    try:
        config: Config = msgspec.json.decode(msgspec.json.encode({**_DEFAULTS, **recorded, **given}))
    except TypeError as error:
        raise ValueError(f"config= cannot be written to {CONFIG}: {error}") from error
    if isinstance(found := config.get("modules_to_save"), str):
        raise ValueError(f'modules_to_save in config= is {found!r}; expected a list, such as ["{found}"]')
    return config


def _asks_for(config: Config, name: str) -> bool:
    """Tell whether a leaf outside of the LoRA, under PEFT's name, belongs into the adapter."""
    if not name.startswith(BASE) or ".base_layer." in name:
        return False
    if config["bias"] != "none" and name.endswith(".bias"):
        return True
    return any(f".{module}." in name for module in config.get("modules_to_save") or ())


def _complete(config: Config, leaves: Sequence[AdapterLeaf]) -> None:
    """Complete a configuration from the leaves: the rank, and the modules with a LoRA."""
    ranks = Counter(leaf.rank for leaf in leaves if leaf.rank and _rank_of(leaf, config) is None)
    if ranks:
        config["r"] = ranks.most_common(1)[0][0]
    if not config.get("target_modules") and not config.get("target_parameters"):
        config["target_modules"] = target_modules({leaf.name.module for leaf in leaves if leaf.rank})


def _rank_of(leaf: AdapterLeaf, config: Config) -> Any:
    """Return the rank of a leaf in the configuration, as PEFT finds it; None if the configuration has none."""
    return setting_of(config, "rank_pattern", "r", leaf.name.module)


def setting_of(config: Mapping[str, Any], patterns: str, default: str, module: str) -> Any:
    """Return a setting of a module: the first of the patterns that matches its name, else the default."""
    by_pattern = config.get(patterns) or {}
    found = (value for key, value in by_pattern.items() if _matches(rf"(.*\.)?({key})", module))
    return next(found, config.get(default))


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise ValueError(f"config= has {pattern!r}, which is not a regular expression: {error}") from error


def target_modules(modules: Collection[str]) -> list[str]:
    """Name modules of the base model by their last parts, as users of PEFT do.

    Use the full name if the last part would also match other modules: if a layer has no such module, or if the last
    part is a number.
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


def _disagreements(config: Config, leaves: Sequence[AdapterLeaf]) -> Iterator[str]:
    """Yield where the configuration and the leaves disagree: PEFT would fail, or drop leaves with a warning."""
    if config["peft_type"] != "LORA":
        yield f"config= has the peft_type {config['peft_type']!r}; only LORA can be written"
    if config.get("lora_alpha") is None:
        yield "lora_alpha is unknown, and does not follow from the leaves; pass it with config=, such as lora_alpha=32"
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


# ------------------------------------------------------------------------------------------------ plan

_CONTEXT = "cannot be converted to a PEFT adapter"


def plan_adapter(tree: ConvertedTree, given: Mapping[str, Any], rules: RenamingRules | None) -> None:
    """Reduce a tree to the leaves of an adapter, and add its configuration. A single error lists all problems.

    given    settings of the caller; they override the settings in the metadata of a former adapter
    rules    the rules that renamed the tree
    """
    recorded = tree.view.metadata.get(CONFIG_KEY)
    config = _new_config(recorded if isinstance(recorded, dict) else {}, given)
    chosen = _choose(tree, config)
    problems = [] if rules is None else list(_unmatched(chosen, rules))
    leaves = list(_name(chosen, problems))
    _complete(config, leaves)
    problems += [*_collisions(leaves), *_halves(leaves), *_disagreements(config, leaves)]
    if problems:
        raise MismatchError(problems, _CONTEXT)
    _reduce(tree, leaves, config)


def _choose(tree: ConvertedTree, config: Config) -> list[Source]:
    """Return the leaves of a LoRA, and the other leaves that the configuration asks for."""
    plain = {source.name: readable(source.name) for source in tree.sources}
    if not any(map(is_lora, plain.values())):
        names = [*plain, *tree.raw_values]
        problem = f"no LoRA leaf among {count(len(names), 'name')}: {few(names)}"
        raise MismatchError(
            [f"{problem}. A part of its name is lora_a or lora_b; rename= can give it one"], _CONTEXT
        )
    return [
        source
        for source in tree.sources
        if is_lora(plain[source.name]) or _asks_for(config, plain[source.name])
    ]


def _unmatched(sources: Sequence[Source], rules: RenamingRules) -> Iterator[str]:
    """Yield a problem for leaves that no rule matches: they may be moments of an optimizer instead of weights."""
    for source in sources:
        ((_, array),) = source.parts
        (first, *_) = stored_leaves(array)
        if not rules.matches(first.name):
            yield f"leaf {first.name!r} is matched by no rule; add a rule; a rule without a new name drops the leaf"


def _name(sources: Sequence[Source], problems: list[str]) -> Iterator[AdapterLeaf]:
    """Yield the leaves under their names in the adapter. Append leaves without a valid name to `problems`."""
    for source in sources:
        name = _adapter_name(readable(source.name))
        axes = len(source.shape)
        if name is None:
            problems.append(
                f"leaf {source.name!r} does not have the name of a LoRA leaf, such as MODULE.lora_a; rename= can give "
                f"it PEFT's name, {BASE}MODULE.lora_A.weight"
            )
        elif name.is_matrix and (axes < 2 or (axes > 2 and name.is_transposed)):
            problems.append(
                f"leaf {source.name!r} has the shape {list(source.shape)}, and a matrix has two axes; rename= can "
                "unstack layers"
            )
        else:
            yield AdapterLeaf(source, name)


def _adapter_name(plain: str) -> AdapterName | None:
    if is_lora(plain):
        return parse_adapter_name(plain)
    module, _, part = plain.removeprefix(BASE).rpartition(".")
    return AdapterName(module, part)


def _collisions(leaves: Sequence[AdapterLeaf]) -> Iterator[str]:
    origins: dict[str, list[str]] = defaultdict(list)
    for leaf in leaves:
        origins[str(leaf.name)].append(leaf.source.name)
    for name, several in origins.items():
        if len(several) > 1:
            yield f"leaves {few(several)} would have the same name, {name}; rename= can tell them apart"


def _halves(leaves: Sequence[AdapterLeaf]) -> Iterator[str]:
    names = {str(leaf.name) for leaf in leaves}
    for leaf in leaves:
        if leaf.name.is_matrix and leaf.name.other_half not in names:
            yield f"leaf {leaf.source.name!r} is one of two matrices, and the other, {leaf.name.other_half}, is missing"


def _reduce(tree: ConvertedTree, leaves: Sequence[AdapterLeaf], config: Config) -> None:
    """Reduce the tree to these leaves and the configuration, and add a note for each dropped leaf."""
    names = [str(leaf.name) for leaf in leaves]
    structure, final = nested_dicts({name: parts_of_name(name) for name in names})
    taken = {leaf.source.name for leaf in leaves}
    left_out = [name for name in (*(s.name for s in tree.sources), *tree.raw_values) if name not in taken]
    tree.transforms = {final[name]: _steps(tree, leaf) for leaf, name in zip(leaves, names, strict=True)}
    tree.sources = [leaf.stored_as(final[name]) for leaf, name in zip(leaves, names, strict=True)]
    tree.structure, tree.raw_values, tree.kept, tree.adapter_config = structure, {}, [], config
    shown = [f"{key}={config[key]!r}" for key in ("r", "lora_alpha", "target_modules") if key in config]
    tree.notes.append(f"{CONFIG} has {', '.join(shown)}")
    if left_out:
        tree.notes.append(f"left out {count(len(left_out), 'name')} that are not of a LoRA: {few(left_out)}")


def _steps(tree: ConvertedTree, leaf: AdapterLeaf) -> str:
    transpose = "transpose" if leaf.name.is_transposed else ""
    return ", ".join(filter(None, [tree.transforms.get(leaf.source.name), transpose]))
