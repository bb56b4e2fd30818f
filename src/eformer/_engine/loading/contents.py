"""List the leaves that a load can choose from: below a root, renamed, and under the names in `like`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.nested_names import nested_spelled
from eformer._engine.record.dequantized import undequantized
from eformer._engine.record.lazy_arrays import StoredLeaf, entry_of
from eformer._engine.record.manifest import UNREADABLE, LeafEntry, parse_structure
from eformer._engine.record.names import names_below, readable, resolve
from eformer._engine.record.rename import refuse_transformed_keys
from eformer._engine.record.stages import ModelFacts
from eformer._engine.record.structure import part_below
from eformer._engine.record.text import few
from eformer._engine.record.values import LeftToCode
from eformer._engine.trees.unflatten import unflatten
from eformer.errors import MismatchError, StructureError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from eformer._engine.formats.dense import DenseTree
    from eformer._engine.record.lazy_arrays import LeafReader
    from eformer._engine.record.planned import LazyArray
    from eformer._engine.record.rename import RenamingRules
    from eformer._engine.record.stages import Renamed


@dataclass(frozen=True, slots=True)
class Contents:
    """The leaves of a checkpoint, under the names that a load uses.

    arrays          the records of the arrays
    raw_values      the plain values, as JSON
    raw_structure   the structure, as the text of its JSON
    computed        the arrays that rules, or the scales of quantised weights, compute from stored arrays
    stored_names    the names in the structure, if they differ
    """

    arrays: Mapping[str, LeafEntry]
    raw_values: Mapping[str, Any]
    raw_structure: bytes
    computed: Mapping[str, LazyArray] = field(default_factory=dict)
    stored_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [*self.arrays, *self.raw_values]

    def select(self, keys: Collection[str] | None, *, is_list: bool = False) -> dict[str, None]:
        """Return the names of the leaves that `keys` select, in the order of the tree; all names for None.

        In the merged leaves of a list of checkpoints, a subtree may be nested in one checkpoint and flat in another.
        """
        names = dict.fromkeys(self.names)
        if keys is None:
            return names
        chosen, problems = resolve(keys, names)
        if problems:
            raise MismatchError(problems, context="keys")
        if not is_list:
            return chosen
        subtrees = tuple(f"{key}." for key in keys)
        return {name: None for name in names if name in chosen or readable(name).startswith(subtrees)}

    def stored(self, name: str) -> Iterable[LeafEntry]:
        """Return the records of the stored arrays that an array is computed from, without quantised weights that it has
        as numbers; its own record if it is stored."""
        if name in self.computed:
            return [leaf.entry for leaf in undequantized(self.computed[name])]
        return [self.arrays[name]] if name in self.arrays else []

    @property
    def functions(self) -> list[str]:
        """List the functions, which a checkpoint leaves to the code."""
        return [name for name, raw in self.raw_values.items() if isinstance(raw, dict) and "code" in raw]

    @property
    def structure(self) -> Any:
        return parse_structure(self.raw_structure)

    def has_structure(self, *kinds: str) -> bool:
        """Tell whether the structure has nodes of one of these kinds."""
        return any(b'"%s":' % kind.encode() in self.raw_structure for kind in kinds)

    def require_rebuildable(self, values: Mapping[str, Any], *, plain: bool = False) -> None:
        """Refuse a tree that cannot be rebuilt, for lack of a structure, a class or a function, before data is read."""
        if self.has_structure(UNREADABLE) and UNREADABLE in (structure := self.structure):
            raise StructureError(structure[UNREADABLE])
        if functions := [name for name, value in values.items() if isinstance(value, LeftToCode)]:
            raise StructureError(
                f"leaves are functions, which a checkpoint leaves to the code: {few(functions)}; pass like= with a "
                "tree that has them, or keys= for the other leaves"
            )
        if self.has_structure("namedtuple", "dataclass", "node"):
            unflatten(self.structure, dict.fromkeys(self.stored_names.values() or self.names), plain=plain)


NOTHING = Contents({}, {}, b"null")


def merge_contents(some: Sequence[Contents]) -> Contents:
    """Return the leaves of all contents, in nested dicts by name. If several have a leaf of one name, the last wins.

    Names that read the same must be spelled alike, see `named_like`.
    """
    arrays: dict[str, LeafEntry] = {}
    values: dict[str, Any] = {}
    computed: dict[str, LazyArray] = {}
    for contents in some:
        for name in contents.names:
            for leaves in (arrays, values, computed):
                leaves.pop(name, None)
        arrays |= contents.arrays
        values |= contents.raw_values
        computed |= contents.computed
    structure, final = nested_spelled({name: name for name in (*arrays, *values)})
    return Contents(arrays, values, msgspec.json.encode(structure), computed, final)


# ------------------------------------------------------------------------------------------------ root


def below(contents: Contents, root: str) -> Contents | None:
    """Return the leaves below `root`, under the rest of their names; None if no leaf lies below it."""
    found = names_below(contents.names, root)
    if not found:
        return None
    part = part_below(contents.structure, root, found)
    if part is None:  # a flat dict, in which only the names read as if they lay below a node
        return _in_dicts(contents, found)
    stored = {new: old for old, new in found.items()}
    return replace(_under(contents, found), raw_structure=msgspec.json.encode(part[0]), stored_names=stored)


def _under(contents: Contents, names: Mapping[str, str]) -> Contents:
    """Return the leaves that are in `names`, under their new names."""
    return replace(
        contents,
        arrays={names[name]: entry for name, entry in contents.arrays.items() if name in names},
        raw_values={names[name]: value for name, value in contents.raw_values.items() if name in names},
        computed={names[name]: array for name, array in contents.computed.items() if name in names},
    )


def _in_dicts(contents: Contents, names: Mapping[str, str]) -> Contents:
    """Return the leaves that are in `names` in nested dicts by their new names."""
    structure, final = nested_spelled(names)
    return replace(_under(contents, final), raw_structure=msgspec.json.encode(structure))


# ------------------------------------------------------------------------------------------- quantised


def with_numbers(contents: Contents, tree: DenseTree) -> Contents:
    """Return the contents of a tree whose quantised weights are read as numbers."""
    arrays, computed = {}, {}
    for name, array in tree.arrays.items():
        arrays[name] = entry_of(array)
        if not isinstance(array, StoredLeaf):
            computed[name] = array
    values = {tree.values[name]: value for name, value in contents.raw_values.items()}
    return Contents(arrays, values, msgspec.json.encode(tree.structure), computed)


# ---------------------------------------------------------------------------------------------- rename


NO_FACTS = ModelFacts()


def renamed(
    contents: Contents, rules: RenamingRules, reader: LeafReader, model: ModelFacts = NO_FACTS
) -> tuple[Contents, Renamed]:
    """Apply rules to the leaves; return the leaves in nested dicts by their new names, and the record of the rules."""
    stored = {
        name: contents.computed.get(name) or StoredLeaf(reader, name, entry, keeps_small=True)
        for name, entry in contents.arrays.items()
    }
    result = rules.apply(stored, list(contents.raw_values), model.config, model.shapes, model.dtypes)
    refuse_transformed_keys(result.arrays.values())
    structure, final = nested_spelled({name: name for name in (*result.arrays, *result.plain.values())})
    arrays, computed = {}, {}
    for new, array in result.arrays.items():
        name = final[new]
        arrays[name] = entry_of(array)
        if not isinstance(array, StoredLeaf):
            computed[name] = array
    values = {final[new]: contents.raw_values[old] for old, new in result.plain.items()}
    return Contents(arrays, values, msgspec.json.encode(structure), computed), result


# ------------------------------------------------------------------------------------- names of `like`


def named_like(contents: Contents, like: Mapping[str, Any]) -> Contents:
    """Spell names as `like` does, if it has the same name in another spelling.

    A flat dict has a dot in a key where a nested dict has a level. In boxes of flax, such as `nn.Partitioned` and
    variables of NNX that other programs saved, the value is one level below.
    """
    missing = like.keys() - contents.arrays.keys() - contents.raw_values.keys()
    if not missing:
        return contents
    wanted: dict[str, list[str]] = {}
    for name in missing:
        wanted.setdefault(readable(name), []).append(name)
    names = {name: name for name in contents.names}
    for name in contents.names:
        text = readable(name)
        spellings = (text, text.removesuffix(".value"), f"{text}.value")
        found = next(filter(None, map(wanted.get, spellings)), [])
        if name not in like and len(found) == 1:
            names[name] = found[0]
    times = Counter(names.values())  # two leaves never become one
    return _under(contents, {old: new if times[new] == 1 else old for old, new in names.items()})
