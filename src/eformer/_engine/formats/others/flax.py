"""Files of `flax.serialization` and of `eformer.pytree`, which have one format: a tree as one msgpack message.

Tests: tests/compat/test_files_msgpack.py, tests/compat/test_orbax_old.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from eformer._engine.formats.msgpack.reader import PRNG_KEY, read_array_head, read_at_most
from eformer._engine.formats.others.single_file import ArrayInFile, SingleFile, Window, describe_file
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.names import BARE_LEAF, MAX_DEPTH, escape_siblings
from eformer._engine.record.values import is_recorded, locating, value_to_json
from eformer._engine.stores.virtual_files import JoinedRanges
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.msgpack.reader import Message

FORMAT = "msgpack, of flax"
# First bytes of maps, of msgpack arrays, and of extensions, which are trees of one array.
BEGINNINGS = frozenset({*range(0x80, 0xA0), *range(0xC7, 0xCA), *range(0xD4, 0xD9), *range(0xDC, 0xE0)})

# Texts that begin like this stand for an array elsewhere, by Orbax and by flax.training.checkpoints.
ORBAX_ARRAY = "PLACEHOLDER://"
_FLAX_ARRAY = "//GDAPlaceholder:"

_MAX_HEAD = 2**11  # bytes of a shape and a name
_MAX_VALUES = 2**20  # no checkpoint has more, and they would take seconds to read


def in_msgpack(file: SingleFile, first: bytes) -> Found | None:
    """Find the tree in a msgpack file, with its structure. The bytes of arrays are not read."""
    if not first or first[0] not in BEGINNINGS:
        return None
    arrays: dict[str, ArrayInFile] = {}
    values: dict[str, Any] = {}
    with locating(f"{file.path} begins like msgpack, but cannot be read"):
        structure, leaves = flatten_message(locate_arrays(Window(file)), is_t5x_array)
        for name, leaf in leaves.items():
            if isinstance(leaf, ArrayLocation):
                arrays[name] = to_array_in_file(leaf, name)
            else:
                _refuse_external_array(leaf, name)
                values[name] = plain_value_to_json(leaf, name)
    return describe_file(file, FORMAT, arrays, structure, values=values)


def is_t5x_array(node: Any) -> bool:
    """Tell whether a dict is a TensorStore specification, which stands for an array elsewhere in files of T5X."""
    return isinstance(node, dict) and node.keys() >= {"driver", "kvstore", "metadata"}


def _refuse_external_array(leaf: Any, name: str) -> None:
    """Refuse a leaf that stands for an array elsewhere: the file is only a part of a checkpoint."""
    if isinstance(leaf, dict) or (isinstance(leaf, str) and leaf.startswith(ORBAX_ARRAY)):
        raise FormatError(
            f"leaf {name[:200]!r} is an array beside the file, which is a part of an Orbax or T5X checkpoint: "
            "pass the path of the directory"
        )
    if isinstance(leaf, str) and leaf.startswith(_FLAX_ARRAY):
        raise FormatError(
            f"leaf {name[:200]!r} is an array of several processes, which flax stores in a *_gda directory beside "
            "the file; eformer cannot read it, load it with flax.training.checkpoints"
        )


def flatten_message(
    tree: Any, is_leaf: Callable[[Any], bool] = lambda _: False
) -> tuple[Any, dict[str, Any]]:
    """Flatten nested dicts, lists and tuples into the structure as JSON and the leaves by name.

    The result is the same as of `trees.flatten`, which needs jax.
    """
    leaves: dict[str, Any] = {}
    root: list[Any] = [None]
    todo: list[tuple[Any, Any, Any, tuple[str, ...]]] = [(root, 0, tree, ())]
    while todo:
        holder, slot, node, parts = todo.pop()
        if isinstance(node, (dict, list, tuple)) and not is_leaf(node):
            if node and len(parts) >= MAX_DEPTH:
                raise FormatError(f"at {'.'.join(parts)[:200]!r}: nested more than {MAX_DEPTH} deep")
            document, children = _container_to_json(node)
            holder[slot] = document
            todo += reversed([(inner, key, child, (*parts, part)) for inner, key, child, part in children])
        elif node is not None:
            holder[slot] = name = ".".join(parts) or BARE_LEAF
            leaves[name] = node
    return root[0], leaves


_Child = tuple[Any, Any, Any, str]
"""The container and the key for the JSON of a child, the child, and its part of the name."""


def _container_to_json(node: Any) -> tuple[Any, Iterator[_Child]]:
    """Return the JSON of a container, with empty places for its children, and the children."""
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


def to_array_in_file(location: ArrayLocation, name: str) -> ArrayInFile:
    """Describe an array of the message. An array in several ranges becomes a virtual file."""
    nbytes = sum(nbytes for _, nbytes in location.ranges)
    if len(location.ranges) == 1:
        (offset, _) = location.ranges[0]
        return ArrayInFile(location.dtype, location.shape, nbytes, offset, key=location.key)
    joined = JoinedRanges(name, location.ranges)
    return ArrayInFile(location.dtype, location.shape, nbytes, virtual_file=joined, key=location.key)


def plain_value_to_json(leaf: Any, name: str) -> Any:
    """Encode a leaf that is not an array. Refuse a leaf that is not a plain value."""
    document = value_to_json(leaf)
    if not is_recorded(document):
        raise FormatError(
            f"leaf {name[:200]!r} is a single {type(leaf).__name__}, which is not a plain value"
        )
    return document


# ------------------------- a tree with the places of the arrays in the message instead of the arrays


class ArrayLocation(Struct, frozen=True):
    """An array whose elements are these `ranges` of the message, (offset, nbytes) each.

    `key` names the generator of a typed PRNG key.
    """

    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    key: str | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def locate_arrays(message: Message) -> Any:
    """Read the tree in a message, with an ArrayLocation for each array. The bytes of arrays are not read."""
    return read_at_most(_MAX_VALUES, message, _LocationMaker())


class _LocationMaker:
    def make(self, payload: Any, at: int) -> ArrayLocation:
        shape, name, start, stop = read_array_head(memoryview(bytes(payload[:_MAX_HEAD])))
        if stop != len(payload) or not _is_shape(shape) or not isinstance(name, str):
            raise FormatError("wrong payload of an extension: not a shape, a dtype and bytes")
        key = PRNG_KEY.fullmatch(name)
        dtype, nbytes = "uint32" if key else name, stop - start
        if dtype_from_name(dtype).itemsize * math.prod(shape) != nbytes:
            raise FormatError(f"an array {dtype}{shape} cannot have {nbytes} bytes")
        if key and not shape:
            raise FormatError("a PRNG key is a single number, expected an array of numbers")
        return ArrayLocation(dtype, tuple(shape), ((at + start, nbytes),), key[1] if key else None)

    def join(self, shape: list[int], chunks: Sequence[Any]) -> ArrayLocation:
        if not all(isinstance(chunk, ArrayLocation) and chunk.key is None for chunk in chunks):
            raise FormatError("the chunks of an array are not arrays of numbers")
        ranges = tuple(span for chunk in chunks for span in chunk.ranges)
        return ArrayLocation(chunks[0].dtype, tuple(shape), ranges)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(type(length) is int and length >= 0 for length in shape)
