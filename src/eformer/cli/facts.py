"""Collect facts about a checkpoint as plain values, for the terminal and for `--json`.

Tests: tests/cli/test_commands.py.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.dense import marks_in
from eformer._engine.formats.find import find, signer_of
from eformer._engine.formats.steps import is_run, last_step_in, steps_in
from eformer._engine.record.manifest import encode_leaves
from eformer._engine.record.names import readable_names, resolve
from eformer._engine.record.values import value_from_json
from eformer._engine.stores.locate import store_at
from eformer.errors import CorruptionError, EformerError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from eformer._engine.formats.found import Found
    from eformer._engine.record.manifest import RecordedSharding, TreeEntry

Facts = dict[str, Any]


def checkpoint_facts(
    path: str, prefix: str | None = None, name: str | None = None
) -> tuple[Facts, dict[str, TreeEntry]]:
    """Return facts about a checkpoint, and its readable trees by prefix. `problems` says why a tree cannot be read.

    With a `name`, the trees have only the leaves that the name finds. "quantized" has the methods of quantised leaves.
    """
    found, damage = _found(path)
    trees, problems, marks = {}, {}, {}
    for each in [prefix] if prefix is not None else list(found.trees):
        try:
            trees[each] = found.tree(each)
            trees[each].check_leaves()
            marks[each] = marks_in(found, trees[each])
        except (EformerError, OSError) as error:
            trees.pop(each, None)
            problems[each] = str(error)
    if name is not None:
        trees = {each: _restricted(trees[each], names) for each, names in chosen(trees, name).items()}
    facts: Facts = {
        "path": str(found.path),
        "format": found.manifest.format,
        "trees": {each: tree_facts(tree) for each, tree in trees.items()},
        "problems": problems,
        "quantized": {each: found for each, found in marks.items() if found},
        "left_out": list(found.left_out()),
        "signed_by": signer_of(found),
    }
    store = store_at(path)
    steps = [name for _, name in steps_in(store)] if is_run(store) else []
    if steps and found.path == store.path_to(steps[-1]):
        facts["steps"] = steps
    if found.foreign.find_damages:
        facts["checksums"] = True
    if damage:
        facts["damage"] = damage
    return facts, trees


def _found(path: str) -> tuple[Found, str | None]:
    """Find the checkpoint to show, and its damage.

    If the newest step of a run is damaged, show that step as far as its manifest can be read.
    """
    try:
        return find(path), None
    except CorruptionError as error:
        if (newest := last_step_in(store_at(path))) is None:
            raise
        with suppress(EformerError, OSError):
            return find(store_at(path).path_to(newest[1])), str(error)
        raise


def chosen(trees: dict[str, TreeEntry], name: str) -> dict[str, dict[str, None]]:
    """Return the leaves of each tree that the name of a leaf or subtree, or a pattern, finds. Raise a MismatchError if
    no tree has such a leaf."""
    found, problems = {}, []
    for prefix, tree in trees.items():
        names, why = resolve([name], _names(tree))
        problems += [f"{prefix}: {problem}" if prefix else problem for problem in why]
        if names:
            found[prefix] = names
    if not found and any(map(_names, trees.values())):
        raise MismatchError(problems)
    return found


def spellings(trees: dict[str, TreeEntry]) -> dict[str, dict[str, str]]:
    """Return the readable names of each tree by the stored names; ambiguous names stay escaped."""
    return {prefix: readable_names(_names(tree)) for prefix, tree in trees.items()}


def _names(tree: TreeEntry) -> list[str]:
    return [*tree.leaves, *tree.raw_values]


def _restricted(tree: TreeEntry, names: dict[str, None]) -> TreeEntry:
    leaves = {name: entry for name, entry in tree.leaves.items() if name in names}
    values = {name: value for name, value in tree.raw_values.items() if name in names}
    return msgspec.structs.replace(tree, raw_leaves=encode_leaves(leaves), raw_values=values)


def tree_facts(tree: TreeEntry) -> Facts:
    """Return the totals of a tree, and its metadata."""
    entries = tree.leaves.values()
    arrays, nbytes = Counter[str](), Counter[str]()
    for entry in entries:
        arrays[entry.logical_dtype] += 1
        nbytes[entry.logical_dtype] += entry.nbytes
    return {
        "written_by": tree.written_by,
        "saved_at": tree.saved_at,
        "origin": tree.origin,
        "arrays": len(tree.leaves),
        "values": len(tree.raw_values),
        "parameters": sum(math.prod(entry.logical_shape) for entry in entries),
        "bytes": tree.nbytes,
        "files": len(tree.files),
        "dtypes": {name: {"arrays": arrays[name], "bytes": nbytes[name]} for name, _ in nbytes.most_common()},
        "shardings": dict(Counter(sharding_text(entry.sharding) for entry in entries).most_common()),
        "digests": tree.has_digests,
        "metadata": tree.metadata,
    }


def leaf_facts(tree: TreeEntry, marks: Mapping[str, str] | None = None) -> Iterator[Facts]:
    """Yield the facts of each leaf: arrays first, then plain values. `marks` are the methods of quantised leaves."""
    marks = marks or {}
    fingerprints = tree.fingerprints
    for name, entry in tree.leaves.items():
        yield {
            "name": name,
            "dtype": entry.logical_dtype,
            "shape": list(entry.logical_shape),
            "bytes": entry.nbytes,
            "sharding": sharding_text(entry.sharding),
            "fingerprint": fingerprints[name],
        } | ({"quantized": marks[name]} if name in marks else {})
    for name, value in tree.raw_values.items():
        yield {"name": name, "value": value_from_json(value), "fingerprint": fingerprints[name]}


def sharding_text(sharding: RecordedSharding | None) -> str:
    if sharding is None:
        return "one device"
    axes = ", ".join(map(repr, sharding.spec))
    mesh = ", ".join(f"{name}={size}" for name, size in sharding.mesh.items())
    return f"P({axes}) on {mesh}" if mesh else f"P({axes})"
