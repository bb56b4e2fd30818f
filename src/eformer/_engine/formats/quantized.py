"""Tell quantised models of other programs: leaves that are numbers only together with their scales.

Leaves are quantised if they lie beside their scales under the names that the known methods use; and, if the
configuration says that the model is quantised, if they have dtypes of quantised weights. Dtypes that masks and indexes
have as well count under the names of weights alone. A plain cast to 8 bits, without configuration and scales, is not
quantised: its leaves are the numbers.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eformer._engine.record.dtypes import dtype_from_name
from eformer._engine.record.names import readable
from eformer._engine.record.text import few
from eformer._engine.stores.base import read_whole
from eformer.errors import FormatError, QuantizedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from eformer._engine.record.manifest import LeafEntry, TreeEntry
    from eformer._engine.stores.base import Store

logger = logging.getLogger("eformer")

_CONFIG = "config.json"
_MODELOPT_CONFIG = "hf_quant_config.json"
_MOST_CONFIG = 2**26  # bytes
# In these configurations; the last one is by MLX and ModelOpt.
_DECLARATIONS = ("quantization_config", "compression_config", "quantization")
_MOST_LEVELS = 8  # of configurations inside of others, such as "text_config"

# Dtypes that no method packs weights into.
_PLAIN = frozenset(["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool", "int64"])
# Dtypes that packed weights have, and in dense models masks and indexes.
_OF_BUFFERS = frozenset(["uint8", "int32", "uint32", "uint64"])
_SCALES = ("float16", "bfloat16", "float32", "float64", "uint8", "float8_e8m0fnu", "float8_e4m3fn")

# How names of weights end, and how those of their scales end instead, with the sizes of the weights' elements in bytes.
_PARTNERS: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...] = (
    (".weight", (".weight_scale_inv", ".weight_scale"), (1,)),  # fp8, nvfp4
    (".weight", (".scale", ".scale_weight"), (1,)),  # DeepSeek, ComfyUI
    (".weight", (".weight.absmax", ".SCB", ".weight_scales"), (1,)),  # bitsandbytes, EETQ
    (".weight", (".scales",), (1, 4)),  # int8, MLX
    ("_blocks", ("_scales",), (1,)),  # mxfp4
    (".weight_packed", (".weight_scale",), (1, 4)),  # compressed-tensors
    (".qweight", (".scales",), (1, 2, 4)),  # GPTQ, AWQ
    (".weight._data", (".weight._scale",), (1,)),  # quanto
    (".weight:qdata", (".weight:scale",), (1, 4)),  # torchao
    (".W_q", (".scale", ".meta"), (1, 4)),  # HQQ
    (".codes", (".codebooks",), (1, 2)),  # AQLM
)  # fmt: skip
_ANY_PARTNERS = ("_scale_inv", "_scale")  # beside any leaf of 8-bit floats or int8, such as stacked experts
_WEIGHTS = (*dict.fromkeys(end for end, _, _ in _PARTNERS), "weight", "weights")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a tree is quantised, and which of its leaves are: their names, with the dtypes and the scales."""

    how: str
    leaves: Mapping[str, str]

    def refuse(self, path: str, names: Collection[str]) -> None:
        """Raise a QuantizedError if one of these names of the tree is that of a quantised leaf."""
        taken = [f"{readable(name)}: {text}" for name, text in self.leaves.items() if name in names]
        if taken:
            leaves = "leaf is" if len(taken) == 1 else "leaves are"
            raise QuantizedError(
                f"{path} is quantised: {self.how}. {len(taken):,} {leaves} not the numbers of the model without their "
                f"scales: {few(taken)}. Load the model that it was made from, or pass dequant=False (checkpoint.load, "
                "checkpoint.convert) for the leaves as they are stored"
            )


def check_dequant(dequant: object) -> None:
    """Raise ValueError for a value of the argument `dequant` that is not known."""
    if dequant is not None and dequant is not False:
        raise ValueError(
            f"dequant={dequant!r}: expected False, for quantised leaves as they are stored, or None, which refuses "
            "them; quantised leaves cannot be loaded as numbers yet"
        )


def quantization_of(store: Store, tree: TreeEntry) -> Quantization | None:
    """Tell how a tree of another program is quantised, by its names, its dtypes and the configuration in `store`; None
    if it is not. The configuration is read only if leaves can be quantised."""
    suspects = {
        name: entry for name, entry in tree.leaves.items() if entry.dtype not in _PLAIN and not entry.key
    }
    scales = _scales_of(suspects, tree.leaves)
    weights = {name for name, entry in suspects.items() if _can_be_weight(name, entry)} - {*scales.values()}
    if not scales and not weights:
        return None
    how = _declared(store)
    if how is None and not scales:
        return None
    chosen = scales if how is None else [name for name in suspects if name in weights or name in scales]
    leaves = {name: _described(suspects[name], scales.get(name), tree.leaves) for name in chosen}
    return Quantization(how or "weights of few bits beside their scales", leaves)


def dense_name(name: str) -> str:
    """Return the name, as people write it, that the weight of a quantised leaf has in the model as numbers."""
    dotted = f".{readable(name)}"  # a root may leave only the end of a name
    for end, _, _ in _PARTNERS:
        if dotted.endswith(end):
            dotted = dotted.removesuffix(end) + (".weight" if end.startswith(".") else "")
            break
    return dotted[1:]


def _described(entry: LeafEntry, scale: str | None, leaves: Mapping[str, LeafEntry]) -> str:
    beside = f", scales {leaves[scale].described} in {readable(scale)}" if scale else ""
    return entry.described + beside


# ---------------------------------------------------------------------------------------------- by names


def _scales_of(suspects: Mapping[str, LeafEntry], leaves: Mapping[str, LeafEntry]) -> dict[str, str]:
    """Return the names of the scales beside leaves, by the names of these."""
    if not suspects:
        return {}
    spelled = {f".{readable(name)}": name for name, entry in leaves.items() if _can_be_scale(entry)}
    found = {}
    for name, entry in suspects.items():
        for candidate in _candidates(f".{readable(name)}", entry.dtype):
            if candidate in spelled:
                found[name] = spelled[candidate]
                break
    return found


def _can_be_weight(name: str, entry: LeafEntry) -> bool:
    return entry.dtype not in _OF_BUFFERS or f".{readable(name)}".endswith(_WEIGHTS)


def _can_be_scale(entry: LeafEntry) -> bool:
    return entry.dtype in _SCALES


def _candidates(name: str, dtype: str) -> Iterator[str]:
    itemsize = dtype_from_name(dtype).itemsize
    for end, others, sizes in _PARTNERS:
        if name.endswith(end) and itemsize in sizes:
            yield from (name.removesuffix(end) + other for other in others)
    if itemsize == 1 and dtype not in _OF_BUFFERS:
        yield from (name + end for end in _ANY_PARTNERS)


# ------------------------------------------------------------------------------------- by configuration


def _declared(store: Store) -> str | None:
    """Say how the configuration beside the files declares the model to be quantised; None if it does not."""
    for file in (_CONFIG, _MODELOPT_CONFIG):
        for part in _parts_of(_read_config(store, file)):
            for name in _DECLARATIONS:
                if isinstance(found := part.get(name), dict) and found:
                    return f"{_method(found)} ({file})"
    return None


def _parts_of(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration and the configurations inside of it, outer ones first."""
    level = [config]
    for _ in range(_MOST_LEVELS):
        yield from level
        level = [inner for part in level for inner in part.values() if isinstance(inner, dict)]


def _read_config(store: Store, file: str) -> dict[str, Any]:
    try:
        return _parsed(read_whole(store, file, _MOST_CONFIG)[0], store.path_to(file))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (FormatError, PermissionError) as error:  # the leaves may still tell
        logger.warning("%s; whether it says that the model is quantised is not known", error)
        return {}


def _parsed(data: bytes, path: str) -> dict[str, Any]:
    """Parse a configuration as Python reads JSON: with Infinity, large integers and a byte order mark."""
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not a configuration: {error}") from error
    if not isinstance(config, dict):
        raise FormatError(f"{path} is not a configuration: it holds a {type(config).__name__}")
    return config


def _method(config: Mapping[str, Any]) -> str:
    """Describe a declaration: its method, with the bits and the blocks that it gives."""
    known = config.get
    method = known("quant_method") or known("quant_algo") or known("mode") or "an unnamed method"
    bits = (
        known("bits")
        or known("w_bit")
        or (4 if known("load_in_4bit") else 8 if known("load_in_8bit") else None)
    )
    block = known("weight_block_size")
    parts = [str(method)[:100]]
    if isinstance(bits, int):
        parts.append(f"of {bits} bits")
    if isinstance(block, list) and block:
        parts.append(f"in blocks of {' x '.join(str(size)[:20] for size in block[:4])}")
    if isinstance(name := known("format"), str):
        parts.append(f"as {name[:100]}")
    return " ".join(parts)
