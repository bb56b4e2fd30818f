"""Parse the original's `<prefix>_structure.json`: the structure of a tree, its leaves and their names.

Its pickles are read as data: nothing in them is run or imported. The pickle of the tree definition is JAX's list of
nodes, (kind, arity, data, class or None, number of leaves, number of nodes); children come before their parents:

    0 leaf      2 tuple                         4 list                           6 custom, data: auxiliary data
    1 None      3 namedtuple, data: the class   5 dict, data: the sorted keys    7 dataclass, data: static values

Tests: tests/compat/test_original_structure.py, tests/compat/test_original_structure_attacks.py.
"""

from __future__ import annotations

import base64
import re
import sys
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from eformer._engine.formats.pickles import (
    ACTIONS,
    Global,
    Machine,
    PickledDict,
    PickledFrozenSet,
    PickledObject,
    PickledSet,
    refuse,
    run,
)
from eformer._engine.record.dtypes import DTYPES
from eformer._engine.record.names import MAX_DEPTH, escape, escape_siblings, join_name
from eformer._engine.record.values import parse_lenient, value_to_json
from eformer.errors import FormatError, StructureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_HINT = "; pass template= (a tree of the same structure)"

LEAF = 0

_MAX_VALUE_DEPTH = 64


@dataclass(frozen=True, slots=True)
class OriginalStructure:
    """A tree that the original saved, described in eformer's terms.

    document  its structure, which names the leaves
    arrays    for each leaf that is an array, its path below the directory of the checkpoint
    values    for each other leaf, its JSON
    """

    prefix: str
    document: Any
    arrays: dict[str, str]
    values: dict[str, Any]
    extras: dict[str, Any]


def parse_original_structure(data: bytes, origin: str) -> OriginalStructure:
    """Parse the contents of the file `origin`. Raise a FormatError that names the file if they are invalid."""
    try:
        file = parse_lenient(data, _File, "damaged, or not the structure of a tree")
        plain = PlainDecoder(budget=8 * len(data))
        root = parse_treedef(file.treedef_b64)
        leaves = list(_parse_leaves(file, plain))
        if root.leaves != len(leaves):
            refuse(f"the tree has {root.leaves} leaves, leaf_keys_full has {len(leaves)}")
        translator = _Translator(file.prefix, leaves, plain)
        document = translator.translate(root)
        return OriginalStructure(file.prefix, document, translator.arrays, translator.values, file.extras)
    except FormatError as error:
        raise FormatError(f"{origin}: {error}") from error
    except Exception as error:  # hostile bytes may raise errors of any kind
        raise FormatError(f"{origin} is damaged, or not the structure of a tree: {error!r}") from error


# ------------------------------------------------------------------------------------------- the file


class _File(msgspec.Struct):
    format: Literal["pytree-structure"]
    prefix: str
    treedef_b64: str
    leaf_keys_full: list[str]
    arr_mask: list[bool]
    array_keys: list[str]
    array_relpaths: list[str]
    nonarray_payload: dict[str, str]
    extras: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class _Leaf:
    """The original's key of a leaf, with the path of an array or the JSON of a value. A leaf None has neither."""

    key: str
    path: str | None = None
    value: Any = None


def _parse_leaves(file: _File, plain: PlainDecoder) -> Iterator[_Leaf]:
    if len(file.leaf_keys_full) != len(file.arr_mask):
        refuse(f"leaf_keys_full has {len(file.leaf_keys_full)} entries, arr_mask has {len(file.arr_mask)}")
    _require_consistent(file)
    paths = iter(file.array_relpaths)
    for index, (key, is_array) in enumerate(zip(file.leaf_keys_full, file.arr_mask, strict=True)):
        if is_array:
            yield _Leaf(key, path=_require_inside(next(paths)))
        else:
            yield _Leaf(
                key, value=value_to_json(plain.decode(decode_pickle(file.nonarray_payload[str(index)])))
            )


def _require_consistent(file: _File) -> None:
    if file.array_keys != [k for k, array in zip(file.leaf_keys_full, file.arr_mask, strict=True) if array]:
        refuse("array_keys are not the leaf_keys_full of the arrays in arr_mask")
    if len(file.array_keys) != len(file.array_relpaths):
        refuse(f"array_keys has {len(file.array_keys)} entries, array_relpaths {len(file.array_relpaths)}")
    if file.nonarray_payload.keys() != {str(i) for i, array in enumerate(file.arr_mask) if not array}:
        refuse("nonarray_payload does not have exactly the leaves that are not arrays in arr_mask")
    if len(set(file.array_relpaths)) < len(file.array_relpaths):
        refuse("two leaves have one path in array_relpaths: one was overwritten when they were saved")


def _require_inside(path: str) -> str:
    if any(part in ("", ".", "..") for part in path.split("/")) or any(c in path for c in "\\:\0"):
        refuse(f"{path[:200]!r} does not lead into the checkpoint")
    return path


# ------------------------------------------------------------------------------------------- plain values


class NotPlainError(FormatError):
    """A pickle holds an object that is not a plain value, made by `found`."""

    def __init__(self, found: Global) -> None:
        super().__init__(
            f"it holds {str(found)[:200]}, which is not a plain value, and is neither imported nor run{_HINT}"
        )
        self.found = found


_COMPLEX = "builtins:complex"
_PLAIN_TYPES = (list, dict, set, tuple, int, float, complex, bool, str, bytes)
FACTORIES = {f"builtins:{kind.__name__}" for kind in _PLAIN_TYPES} | {"collections:OrderedDict"}


class _Machine(Machine):
    def find(self, module: Any, name: Any) -> Global:
        """Return the name of a class. Refuse names that only attacks use, although no name is ever imported."""
        found: Global = super().find(module, name)
        is_tool = module.partition(".")[0] in sys.stdlib_module_names or module.startswith("numpy.")
        if is_tool and str(found) not in FACTORIES | {"collections:defaultdict"}:
            raise NotPlainError(found)
        return found


def decode_pickle(encoded: str) -> Any:
    """Read a pickle in base64 into plain values, `Global`s and `PickledObject`s. Nothing is imported or called."""
    data = base64.b64decode(encoded, validate=True)
    value, end = run(_Machine(), data, ACTIONS, _HINT)
    if end != len(data):
        refuse("a pickle does not hold exactly one value")
    return value


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


_ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS: dict[type, Callable[[list[Any]], Any]] = {
    tuple: tuple,
    list: list,
    PickledSet: set,
    PickledFrozenSet: frozenset,
    PickledDict: _pairs,
}


@dataclass(slots=True)
class PlainDecoder:
    """A decoder of plain values from the contents of pickles.

    It stops when the values have used up `budget`, because references let a short pickle stand for a huge value.
    """

    budget: int

    def decode(self, found: Any, depth: int = 0) -> Any:
        """Return the plain value. Raise a NotPlainError for other objects."""
        self.budget -= 1 + sys.getsizeof(found) // 64
        if self.budget < 0 or depth > _MAX_VALUE_DEPTH:
            refuse("a value is far larger than its pickle, nested too deep, or contains itself")
        kind = type(found)
        if kind in _ATOMS:
            return found
        if kind in _CONTAINERS:
            return _CONTAINERS[kind]([self.decode(item, depth + 1) for item in found])
        if kind is PickledObject and str(found.made_by) == _COMPLEX:
            return complex(*self.decode(found.arguments, depth + 1))
        raise NotPlainError(found if kind is Global else found.made_by)

    def to_json(self, found: Any) -> Any:
        """Encode auxiliary data. Unlike a leaf or a key it may be opaque; a load of the tree then needs a `like`."""
        if type(found) is Global and found.module in _DTYPE_MODULES and found.name in DTYPES:
            return {found.module: found.name}
        try:
            return value_to_json(self.decode(found))
        except NotPlainError as error:
            return {"opaque": str(error.found)[:200]}


_DTYPE_MODULES = ("numpy", "ml_dtypes", "jax.numpy")


# ------------------------------------------------------------------------------- the tree definition


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node of the tree, with the number of its leaves and the index of its first leaf."""

    kind: int
    data: Any
    node_class: Any
    children: Sequence[Node]
    first_leaf: int
    leaves: int
    depth: int


def parse_treedef(encoded: str) -> Node:
    """Parse a pickled tree definition in base64, and return its root. Nothing in it is run or imported."""
    return _assemble(_node_list(decode_pickle(encoded)))


def _node_list(treedef: Any) -> list[Any]:
    if type(treedef) is not PickledObject:
        refuse("treedef_b64 holds no tree definition")
    if not treedef.made_by.module.startswith("jaxlib.") or treedef.made_by.name != "PyTreeDef":
        raise NotPlainError(treedef.made_by)
    registry, nodes = treedef.state
    if not registry.module.startswith(("jax.", "jaxlib.")) or not registry.name.endswith("registry"):
        raise NotPlainError(registry)
    if treedef.arguments or type(nodes) is not list:
        refuse("treedef_b64 holds no list of nodes")
    return nodes


def _assemble(nodes: list[Any]) -> Node:
    waiting: list[Node] = []
    leaf_count = 0
    for kind, arity, data, node_class, leaves, _ in nodes:
        if not type(kind) is type(arity) is type(leaves) is int:
            refuse("a node has values of other types in place of its numbers")
        if not 0 <= arity <= len(waiting):
            refuse(f"a node needs {arity} children, but {len(waiting)} come before it")
        start = len(waiting) - arity
        children, waiting[start:] = waiting[start:], []
        waiting.append(_node(kind, data, node_class, children, leaf_count))
        leaf_count += kind == LEAF
        if leaves != waiting[-1].leaves:
            refuse(f"a node claims {leaves!r} leaves, but has {waiting[-1].leaves}")
    if len(waiting) != 1:
        refuse(f"treedef_b64 holds {len(waiting)} trees, expected one")
    return waiting[0]


def _node(kind: Any, data: Any, node_class: Any, children: list[Node], leaf_count: int) -> Node:
    depth = 1 + max((child.depth for child in children), default=-1)
    if depth > MAX_DEPTH:
        refuse(f"the tree is nested more than {MAX_DEPTH} deep")
    if kind == LEAF and children:
        refuse("a leaf has children")
    leaves = 1 if kind == LEAF else sum(child.leaves for child in children)
    first_leaf = children[0].first_leaf if children else leaf_count
    return Node(kind, data, node_class, children, first_leaf, leaves, depth)


# ------------------------------------------------------------------------------------------- the structure


@dataclass(frozen=True, slots=True)
class _Level:
    """The JSON of a node, with empty `slots` for its children, and the keys of the children, also as the original
    writes them."""

    document: Any
    slots: Sequence[tuple[Any, Any]] = ()
    keys: Sequence[Any] = ()
    original_keys: Sequence[str] | None = None

    def children_below(self, children: Sequence[Node], original_keys: _Path, parts: _Path) -> Iterator[_Todo]:
        if len(children) != len(self.keys):
            refuse(f"a node of {len(children)} children has {len(self.keys)} keys")
        own_keys = self.original_keys or [str(key) for key in self.keys]
        own_parts = escape_siblings(self.keys)
        for (holder, slot), child, text, part in zip(self.slots, children, own_keys, own_parts, strict=True):
            yield holder, slot, child, (*original_keys, text), (*parts, part)


_Path = tuple[str, ...]
_Todo = tuple[Any, Any, Node, _Path, _Path]


def _in_list(
    document: Any, tag: str, keys: Sequence[Any], original_keys: Sequence[str] | None = None
) -> _Level:
    content = document[tag] = [None] * len(keys)
    return _Level(document, [(content, index) for index in range(len(keys))], keys, original_keys)


def _in_dict(document: Any, tag: str, keys: Sequence[str]) -> _Level:
    content = document[tag] = dict.fromkeys(map(escape, keys))
    return _Level(document, [(content, part) for part in content], keys)


def _in_pairs(document: Any, tag: str, keys: Sequence[Any]) -> _Level:
    pairs = document[tag] = [[value_to_json(key), None] for key in keys]
    return _Level(document, [(pair, 1) for pair in pairs], keys)


# JAX's name for a child for which its class has no key.
_FLAT_INDEX = re.compile(r"<flat index (\d+)>")


@dataclass(slots=True)
class _Translator:
    """A translator of nodes into JSON, and of leaves into their names in eformer."""

    prefix: str
    leaves: list[_Leaf]
    plain: PlainDecoder
    arrays: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def translate(self, root: Node) -> Any:
        """Return the structure as JSON, and fill `arrays` and `values`."""
        top = [None]
        todo: list[_Todo] = [(top, 0, root, (), ())]
        while todo:
            holder, slot, node, original_keys, parts = todo.pop()
            if node.kind == LEAF:
                holder[slot] = self.name_leaf(self.leaves[node.first_leaf], original_keys, join_name(parts))
            else:
                level = self.translate_node(node, original_keys)
                holder[slot] = level.document
                todo.extend(reversed(list(level.children_below(node.children, original_keys, parts))))
        return top[0]

    def name_leaf(self, leaf: _Leaf, original_keys: _Path, name: str) -> str | None:
        key = ".".join(text for text in (self.prefix, ".".join(original_keys)) if text)
        if key != leaf.key:
            refuse(f"leaf_keys_full has {leaf.key[:200]!r} where the tree has {key[:200]!r}")
        if leaf.path is not None:
            self.arrays[name] = leaf.path
        elif leaf.value is not None:
            self.values[name] = leaf.value
        else:  # None is a leaf in the original, but a node in eformer
            return None
        return name

    def translate_node(self, node: Node, original_keys: _Path) -> _Level:
        if node.kind not in _LEVELS:
            refuse(f"the tree has a node of the unknown kind {node.kind!r}")
        return _LEVELS[node.kind](self, node, original_keys)

    def translate_dict(self, node: Node, original_keys: _Path) -> _Level:
        keys = self.decode_keys(node.data)
        return (_in_dict if all(type(key) is str for key in keys) else _in_pairs)({}, "dict", keys)

    def translate_namedtuple(self, node: Node, original_keys: _Path) -> _Level:
        name = _class_name(node.data)
        names = self.child_names(node, original_keys, getattr(_resolve(name), "_fields", ()))
        return _in_dict({"namedtuple": name}, "children", names)

    def translate_custom(self, node: Node, original_keys: _Path) -> _Level:
        name = _class_name(node.node_class)
        if name == "collections:OrderedDict":
            return _in_pairs({}, "OrderedDict", self.decode_keys(node.data))
        if name == "collections:defaultdict":
            factory, keys = node.data
            return _in_pairs(
                {"factory": self.factory_to_json(factory)}, "defaultdict", self.decode_keys(keys)
            )
        return self.translate_class(node, original_keys, name)

    def translate_class(self, node: Node, original_keys: _Path, name: str) -> _Level:
        known, aux = _prototype(name)
        names = self.child_names(node, original_keys, known)
        static = self.static_fields(aux, node.data) if names == known else None
        if static is not None:
            return _in_dict({"dataclass": name, "static": static}, "children", names)
        keys = [_FLAT_INDEX.sub(r"\1", text) for text in names]
        return _in_list({"node": name, "aux": self.plain.to_json(node.data)}, "children", keys, names)

    def decode_keys(self, found: Any) -> Sequence[Any]:
        keys: Sequence[Any] = self.plain.decode(found)
        if len(dict.fromkeys(keys)) < len(keys):
            refuse("a dict has one key twice")
        return keys

    def factory_to_json(self, found: Any) -> Any:
        is_known = type(found) is Global and str(found) in FACTORIES
        return found.name if is_known else self.plain.to_json(found)

    def static_fields(self, names: Any, values: Any) -> dict[str, Any] | None:
        """Return the auxiliary data of a dataclass by field; None if it contains other data."""
        if type(names) is not tuple or type(values) is not tuple or len(names) != len(values):
            return None
        pairs = list(zip(names, values, strict=True))
        if not all(type(name) is _Field or _is_empty_instance(value, type(name)) for name, value in pairs):
            return None
        return {str(name): self.plain.to_json(value) for name, value in pairs if type(name) is _Field}

    def child_names(self, node: Node, original_keys: _Path, known: Sequence[str]) -> list[str]:
        """Return the names of the children by leaf_keys_full. Children without leaves are named by their class or
        position."""
        usual = known if len(known) == len(node.children) else range(len(node.children))
        above = ".".join((*filter(None, [self.prefix]), *original_keys, "")) if node.leaves else ""
        names = [
            self.next_part(child, above) if child.leaves else str(name)
            for child, name in zip(node.children, usual, strict=True)
        ]
        if len(set(names)) < len(names):
            refuse(f"two children have the same name, below {above[:200]!r}")
        return names

    def next_part(self, child: Node, above: str) -> str:
        key = self.leaves[child.first_leaf].key
        if not key.startswith(above):
            refuse(f"leaf_keys_full has {key[:200]!r} where the tree has a leaf below {above[:200]!r}")
        below = key[len(above) :]
        return below if child.kind == LEAF else below.partition(".")[0]


_LEVELS: dict[Any, Callable[[_Translator, Node, _Path], _Level]] = {
    1: lambda translator, node, original_keys: _Level(None),
    2: lambda translator, node, original_keys: _in_list({}, "tuple", range(len(node.children))),
    3: _Translator.translate_namedtuple,
    4: lambda translator, node, original_keys: _in_list({}, "list", range(len(node.children))),
    5: _Translator.translate_dict,
    6: _Translator.translate_custom,
    7: _Translator.translate_custom,
}


# ---------------------------------------------------------------------------------------- the classes


class _Field(str):
    """The name of a field, used in place of its value."""

    __slots__ = ()


def _class_name(found: Any) -> str:
    if type(found) is not Global:
        refuse("a node has no class")
    return str(found)


def _resolve(name: str) -> Any:
    """Return the class of this name if a tree may contain it, else None. Without jax imported, return None."""
    # Tools that only look at files run without jax, and so without this module. A load has imported it.
    nodes = sys.modules.get("eformer._engine.trees.nodes")
    try:
        return nodes and nodes.resolve_class(name)
    except StructureError:
        return None


def _prototype(name: str) -> tuple[list[str], Any]:
    """Return a dataclass's fields that are children, and its auxiliary data with names in place of values."""
    kind = _resolve(name)
    if not is_dataclass(kind):
        return [], None
    names = {member.name: _Field(member.name) for member in fields(kind)}
    try:
        level = sys.modules["eformer._engine.trees.nodes"].dataclass_level(kind, names, {})
        return list(level.keys), level.aux
    except Exception:  # noqa: BLE001  the class's own functions may raise errors of any kind
        return [], None


def _is_empty_instance(found: Any, kind: type) -> bool:
    """Tell whether a pickle makes an instance of this class without arguments and state."""
    is_of_kind = (
        type(found) is PickledObject and str(found.made_by) == f"{kind.__module__}:{kind.__qualname__}"
    )
    return is_of_kind and not found.arguments and found.state is None
