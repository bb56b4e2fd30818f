"""Plan the conversion to a PEFT adapter: which leaves go into it, under which names, and with which configuration."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.nested_names import nested, parts_of_name
from eformer._engine.formats.others.peft import CONFIG, CONFIG_KEY
from eformer._engine.record.lazy_arrays import stored_leaves
from eformer._engine.record.text import count, few
from eformer._engine.tools import adapter_config
from eformer._engine.tools.adapter_leaves import (
    BASE,
    AdapterLeaf,
    AdapterName,
    is_lora,
    parse_adapter_name,
    plain_name,
)
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from eformer._engine.record.planned import Source
    from eformer._engine.record.rename import Rule
    from eformer._engine.tools.adapter_config import Config
    from eformer._engine.tools.conversion import ConvertedTree

_CONTEXT = "cannot be converted to a PEFT adapter"


def plan_adapter(tree: ConvertedTree, given: Mapping[str, Any], rules: Sequence[Rule] | None) -> None:
    """Reduce a tree to the leaves of an adapter, and add the adapter's configuration. One error lists every problem.

    given    settings of the caller; those in the metadata of a tree that once was an adapter come second
    rules    those that the tree was renamed by
    """
    recorded = tree.view.metadata.get(CONFIG_KEY)
    config = adapter_config.new_config(recorded if isinstance(recorded, dict) else {}, given)
    chosen = _choose(tree, config)
    problems = [] if rules is None else list(_unmatched(chosen, rules))
    leaves = list(_name(chosen, problems))
    adapter_config.complete(config, leaves)
    problems += [*_collisions(leaves), *_halves(leaves), *adapter_config.problems(config, leaves)]
    if problems:
        raise MismatchError(problems, _CONTEXT)
    _reduce(tree, leaves, config)


def _choose(tree: ConvertedTree, config: Config) -> list[Source]:
    """Return the leaves of a LoRA, and others that the configuration asks for."""
    plain = {source.name: plain_name(source.name) for source in tree.sources}
    if not any(map(is_lora, plain.values())):
        names = [*plain, *tree.raw_values]
        problem = f"no LoRA leaf among {count(len(names), 'name')}: {few(names)}"
        raise MismatchError(
            [f"{problem}. A part of its name is lora_a or lora_b; rename= can give it one"], _CONTEXT
        )
    return [
        source
        for source in tree.sources
        if is_lora(plain[source.name]) or adapter_config.asks_for(config, plain[source.name])
    ]


def _unmatched(sources: Sequence[Source], rules: Sequence[Rule]) -> Iterator[str]:
    """Refuse leaves that the rules do not mention: they may be moments of an optimizer as well as weights."""
    for source in sources:
        ((_, array),) = source.parts
        (first, *_) = stored_leaves(array)
        if not any(rule.pattern.fullmatch(first.name) for rule in rules):
            yield f"leaf {first.name!r} is matched by no rule; add one, or one without a new name to leave it out"


def _name(sources: Sequence[Source], problems: list[str]) -> Iterator[AdapterLeaf]:
    """Yield the leaves under their names in the adapter; append to `problems` where that cannot be done."""
    for source in sources:
        name = _adapter_name(plain_name(source.name))
        axes = len(source.shape)
        if name is None:
            problems.append(
                f"leaf {source.name!r} is not called like a leaf of a LoRA, such as MODULE.lora_a; rename= can give it "
                f"PEFT's name, {BASE}MODULE.lora_A.weight"
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
            yield f"leaves {few(several)} would all be called {name}; rename= can tell them apart"


def _halves(leaves: Sequence[AdapterLeaf]) -> Iterator[str]:
    names = {str(leaf.name) for leaf in leaves}
    for leaf in leaves:
        if leaf.name.is_matrix and leaf.name.other_half not in names:
            yield f"leaf {leaf.source.name!r} is one of two matrices, and the other, {leaf.name.other_half}, is missing"


def _reduce(tree: ConvertedTree, leaves: Sequence[AdapterLeaf], config: Config) -> None:
    """Let the tree hold these leaves and the configuration; note what it does not hold any more."""
    names = [str(leaf.name) for leaf in leaves]
    structure, final = nested({name: parts_of_name(name) for name in names})
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
