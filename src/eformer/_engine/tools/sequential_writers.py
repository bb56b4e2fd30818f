"""Write leaves to one file from beginning to end: npz, and flax's msgpack.

Tests: tests/engine/tools/test_convert.py, tests/engine/tools/test_convert_structures.py.
"""

from __future__ import annotations

import reprlib
import zipfile
from collections import Counter
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from eformer._engine.formats.msgpack.writer import Streamed, can_pack, pack_tree
from eformer._engine.formats.nested_names import parts_of_name
from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.names import BARE_LEAF, MAX_DEPTH, join_name, readable, unescape
from eformer._engine.record.planned import LazyArray
from eformer._engine.record.values import value_from_json
from eformer._engine.saving.write import elements_of
from eformer.errors import LeafError, MismatchError, StructureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from eformer._engine.record.planned import Source
    from eformer._engine.saving.staging import Staging
    from eformer._engine.tasks.progress import Meter

_MAX_CHUNK = 2**30  # bytes; flax splits larger arrays


def elements_in_order(source: Source, staging: Staging, meter: Meter) -> Iterator[memoryview]:
    """Yield the elements of a leaf in order, and report them as done."""
    for data in elements_of(source, staging):
        yield data
        meter.add(len(data))
    for _, array in source.parts:
        if isinstance(array, LazyArray):
            array.forget()


# -------------------------------------------------------------------------------------------------- npz

_TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # of every member, so that equal checkpoints are equal files
_BARE = "arr_0"  # numpy's name for an array without a name


def write_npz(
    file: IO[bytes], sources: Sequence[Source], values: Mapping[str, Any], staging: Staging, meter: Meter
) -> None:
    """Write a file that `numpy.load` reads. Plain numbers and strings become arrays without axes."""
    members = _members([source.name for source in sources] + list(values))
    with zipfile.ZipFile(file, "w") as archive:
        for source in sources:
            with _member(archive, members[source.name]) as member:
                _write_array(member, source, staging, meter)
        for name, value in values.items():
            with _member(archive, members[name]) as member:
                np.lib.format.write_array(member, np.asarray(value), allow_pickle=False)


def _members(names: Sequence[str]) -> dict[str, str]:
    """Choose the names of npz members: the readable names of the leaves, unless two leaves read the same."""
    plain = {name: _BARE if name == BARE_LEAF else readable(name) for name in names}
    count = Counter(plain.values())
    return {name: text if text.isprintable() and count[text] == 1 else name for name, text in plain.items()}


def renamed_in_npz(sources: Sequence[Source], values: Mapping[str, Any]) -> list[str]:
    """List the members that come back under another name, because a key has dots or had to be escaped."""
    members = _members([source.name for source in sources] + list(values))
    return [member for name, member in members.items() if join_name(parts_of_name(member)) != name]


def _member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    return archive.open(zipfile.ZipInfo(f"{name}.npy", _TIMESTAMP), "w", force_zip64=True)


def _write_array(member: IO[bytes], source: Source, staging: Staging, meter: Meter) -> None:
    descr = np.lib.format.dtype_to_descr(dtype_from_name(source.dtype).newbyteorder("<"))
    header = {"descr": descr, "fortran_order": False, "shape": source.shape}
    np.lib.format.write_array_header_1_0(member, header)
    for data in elements_in_order(source, staging, meter):
        member.write(data)


def check_npz(sources: Sequence[Source], values: Mapping[str, Any]) -> None:
    """Refuse dtypes that numpy cannot name. bfloat16 is allowed: readers recognise it as the only two-byte void."""
    problems = [
        f"leaf {source.name!r} is {source.dtype}"
        for source in sources
        if dtype_from_name(source.dtype).type.__module__ != "numpy" and source.dtype != "bfloat16"
    ]
    problems += [
        f"leaf {name!r} is a plain {type(value).__name__}"
        for name, value in values.items()
        if not isinstance(value, (bool, int, float, complex, str, np.generic))
        or np.asarray(value).dtype.kind == "O"
    ]
    if problems:
        raise MismatchError(
            problems,
            context="npz cannot store these types; cast floats with dtype=, or convert to safetensors",
        )


# ---------------------------------------------------------------------------------------------- msgpack


def write_msgpack(
    file: IO[bytes],
    structure: Any,
    sources: Sequence[Source],
    values: Mapping[str, Any],
    staging: Staging,
    meter: Meter,
) -> None:
    """Write a file that `flax.serialization.from_bytes` reads: the state dict of the tree."""

    def streamed(source: Source) -> Streamed:
        elements = elements_in_order(source, staging, meter)
        return Streamed(source.dtype, source.shape, source.itemsize, elements)

    leaves = {source.name: streamed(source) for source in sources} | dict(values)
    pack_tree(state_of(structure, leaves), file.write, max_chunk=_MAX_CHUNK, sort_keys=False)


def state_of(structure: Any, leaves: Mapping[str, Any]) -> Any:
    """Build the state dict as flax does: nested dicts with string keys, for containers of every kind.

    A leaf that is not in `leaves` is None.
    """
    if structure is None:
        return None
    if isinstance(structure, str):
        return leaves.get(structure)
    return {key: state_of(child, leaves) for key, child in children_of(structure)}


# The member of a container's JSON that has its children, by all of its members.
_CONTENTS = {
    frozenset({"dict"}): "dict",
    frozenset({"list"}): "list",
    frozenset({"tuple"}): "tuple",
    frozenset({"OrderedDict"}): "OrderedDict",
    frozenset({"defaultdict", "factory"}): "defaultdict",
    frozenset({"namedtuple", "children"}): "children",
    frozenset({"dataclass", "static", "children"}): "children",
    frozenset({"node", "aux", "children"}): "children",
}
_MAPPINGS = ("dict", "OrderedDict", "defaultdict")


def children_of(structure: Any) -> list[tuple[str, Any]]:
    """List the children of a container with their keys. Raise StructureError if `structure` is not a container."""
    try:
        content = _CONTENTS[frozenset(structure)]
        inside = structure[content]
        if isinstance(inside, dict):
            return [(unescape(key) if content == "dict" else key, child) for key, child in inside.items()]
        if content in _MAPPINGS:
            return [(str(value_from_json(key)), child) for key, child in inside]
        return [(str(index), child) for index, child in enumerate(inside)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StructureError(f"not a recorded structure: {reprlib.repr(structure)}") from error


def nodes_of(structure: Any) -> Iterator[Any]:
    """Yield the containers of a structure and the names of its leaves. Raise StructureError if it is too deep."""
    pending = [(structure, 0)]
    while pending:
        node, depth = pending.pop()
        if node is None:
            continue
        yield node
        if not isinstance(node, str):
            if depth > MAX_DEPTH:
                raise StructureError(f"the recorded structure is nested more than {MAX_DEPTH} deep")
            pending += [(child, depth + 1) for _, child in children_of(node)]


def require_structure(structure: Any, names: Iterable[str]) -> None:
    """Raise MismatchError unless the structure has exactly these leaves: further leaves would be lost on the way."""
    counted = Counter(node for node in nodes_of(structure) if isinstance(node, str))
    expected = set(names)
    problems = [f"missing leaf {name!r}" for name in counted.keys() - expected]
    problems += [f"unexpected leaf {name!r}" for name in expected - counted.keys()]
    problems += [f"leaf {name!r} in {times} places" for name, times in counted.items() if times > 1]
    if problems:
        raise MismatchError(sorted(problems), context="the leaves do not fit the structure")


def has_sequences(structure: Any) -> bool:
    """Tell whether a list or a tuple is among the containers."""
    return any(isinstance(node, dict) and ("list" in node or "tuple" in node) for node in nodes_of(structure))


def check_msgpack(structure: Any, values: Mapping[str, Any]) -> None:
    """Refuse values that msgpack cannot store, such as large integers, and keys that read the same."""
    problems = [f"leaf {name!r} is {value!r}"[:200] for name, value in values.items() if not can_pack(value)]
    if problems:
        raise MismatchError(problems, context="msgpack cannot store these values; convert to safetensors")
    for node in nodes_of(structure):
        keys = [] if isinstance(node, str) else [key for key, _ in children_of(node)]
        if len(set(keys)) < len(keys):
            raise LeafError(
                f"some of the keys {keys[:8]} read the same, such as 1 and '1'; flax's keys are strings only"
            )
