"""Files of `flax.serialization`, and of ours that writes the same: a tree as one message of msgpack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eformer._engine.formats.msgpack.locations import Located, locate
from eformer._engine.formats.others.single_file import StoredArray, Window, describe
from eformer._engine.record.names import BARE_LEAF, escape_siblings
from eformer._engine.record.values import is_recorded, value_to_json
from eformer._engine.stores.virtual_files import JoinedRanges
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.others.single_file import SingleFile

FORMAT = "msgpack, of flax"
# Maps, arrays of msgpack, and extensions: a tree that is one array.
BEGINNINGS = frozenset({*range(0x80, 0xA0), *range(0xC7, 0xCA), *range(0xD4, 0xD9), *range(0xDC, 0xE0)})

# What a text begins with that stands in the place of an array: Orbax's, and that of flax.training.checkpoints.
ORBAX_ARRAY = "PLACEHOLDER://"
_FLAX_ARRAY = "//GDAPlaceholder:"

_MOST_DEPTH = 250  # that of our own trees


def in_msgpack(file: SingleFile) -> Found:
    """The tree with the structure that was written. Of its arrays not a byte is read."""
    try:
        tree = locate(Window(file))
        structure, leaves = flattened(tree, is_leaf=is_t5x_array)
        _refuse_arrays_elsewhere(leaves)
        arrays = {name: stored(leaf, name) for name, leaf in leaves.items() if isinstance(leaf, Located)}
        values = {name: recorded(leaf, name) for name, leaf in leaves.items() if name not in arrays}
    except FormatError as error:
        raise FormatError(f"{file.path} begins like msgpack, but cannot be read: {error}") from error
    return describe(file, FORMAT, arrays, structure, values=values)


def is_t5x_array(node: Any) -> bool:
    """Tell whether T5X has put this in the place of an array: a specification for TensorStore."""
    return isinstance(node, dict) and node.keys() >= {"driver", "kvstore", "metadata"}


def _refuse_arrays_elsewhere(leaves: Mapping[str, Any]) -> None:
    """Refuse a file that is a part of a checkpoint: strings in the place of arrays are not leaves."""
    for name, leaf in leaves.items():
        if isinstance(leaf, dict) or (isinstance(leaf, str) and leaf.startswith(ORBAX_ARRAY)):
            raise FormatError(
                f"leaf {name[:200]!r} is an array in the directory of the file, which is a part of a checkpoint of "
                "Orbax or T5X: pass the path of the directory"
            )
        if isinstance(leaf, str) and leaf.startswith(_FLAX_ARRAY):
            raise FormatError(
                f"leaf {name[:200]!r} is an array of several processes, which flax stores in a directory beside the "
                "file, called *_gda: such checkpoints are not read. flax.training.checkpoints reads them"
            )


def flattened(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[Any, dict[str, Any]]:
    """The structure as JSON, and the leaves by name: what `flatten` says of such a tree, which needs jax."""
    leaves: dict[str, Any] = {}
    root: list[Any] = [None]
    todo: list[tuple[Any, Any, Any, tuple[str, ...]]] = [(root, 0, tree, ())]
    while todo:
        holder, slot, node, parts = todo.pop()
        if isinstance(node, (dict, list, tuple)) and not is_leaf(node):
            if node and len(parts) >= _MOST_DEPTH:
                raise FormatError(f"at {'.'.join(parts)[:200]!r}: nested more than {_MOST_DEPTH} deep")
            document, below = _opened(node)
            holder[slot] = document
            todo += reversed([(inner, key, child, (*parts, part)) for inner, key, child, part in below])
        elif node is not None:
            holder[slot] = name = ".".join(parts) or BARE_LEAF
            leaves[name] = node
    return root[0], leaves


_Child = tuple[Any, Any, Any, str]
"""Where the JSON of a child goes, and at what key there; the child, and its part of the name."""


def _opened(node: Any) -> tuple[Any, Iterator[_Child]]:
    """The JSON of a container, with room for that of its children."""
    if not isinstance(node, dict):
        content: Any = [None] * len(node)
        return {type(node).__name__: content}, ((content, i, child, str(i)) for i, child in enumerate(node))
    parts = escape_siblings(list(node))
    children = zip(node.values(), parts, strict=True)
    if all(type(key) is str for key in node):
        content = dict.fromkeys(parts)
        return {"dict": content}, ((content, part, child, part) for child, part in children)
    content = [[value_to_json(key), None] for key in node]
    pairs = zip(content, children, strict=True)
    return {"dict": content}, ((pair, 1, child, part) for pair, (child, part) in pairs)


def stored(leaf: Located, name: str) -> StoredArray:
    nbytes = sum(nbytes for _, nbytes in leaf.ranges)
    if len(leaf.ranges) == 1:
        return StoredArray(leaf.dtype, leaf.shape, nbytes, leaf.ranges[0][0], key=leaf.key)
    return StoredArray(leaf.dtype, leaf.shape, nbytes, part=JoinedRanges(name, leaf.ranges), key=leaf.key)


def recorded(leaf: Any, name: str) -> Any:
    document = value_to_json(leaf)
    if not is_recorded(document):
        raise FormatError(f"leaf {name[:200]!r} is a single {type(leaf).__name__}, which is no plain value")
    return document
