"""Recognise quantised models of other programs: leaves that are numbers only together with their scales.

A leaf is quantised if its scales lie beside it under the names of a known method. If the configuration declares the
model as quantised, leaves with dtypes of packed weights are quantised as well. Dtypes that masks and indexes also have
count only under names of weights; if that finds no leaf, under all names except names of masks and indexes. A plain
cast to 8 bits, without configuration and scales, is not quantised: its leaves are the numbers.
"""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.model_config import read_config
from eformer._engine.record.dtypes import dtype_from_name, floating_dtype
from eformer._engine.record.names import readable
from eformer.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from eformer._engine.record.manifest import LeafEntry, TreeEntry
    from eformer._engine.stores.base import Store

logger = logging.getLogger("eformer")

_OFTEN_OTHER = "params.json"  # by Mistral; many programs use the name for other things
_CONFIGS = ("config.json", "hf_quant_config.json", _OFTEN_OTHER)  # by Hugging Face, ModelOpt, Mistral
# The fields of a configuration that declare it; "quantization" is by MLX, ModelOpt and Mistral.
_DECLARATIONS = ("quantization_config", "compression_config", "quantization")
# A declaration has a value in one of these: codecs have a "quantization" of audio, and a cache alone may be quantised.
_METHODS = ("quant_method", "quant_algo", "qformat_weight", "method")
_SIGNS = (*_METHODS, "bits", "w_bit", "load_in_4bit", "load_in_8bit", "format", "config_groups", "quant_type")
_MOST_LEVELS = 8  # of configurations inside configurations, such as "text_config"

# Dtypes that no method packs weights into.
_PLAIN = frozenset(["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool", "int64"])
# Dtypes of packed weights, which masks and indexes of dense models have as well.
_OF_BUFFERS = frozenset(["uint8", "int32", "uint32", "uint64"])
_BUFFER = re.compile(
    r"[._](ids|idx|index(es)?|masks?|bias|bucket|positions?|offsets?|tracked|shape|lengths|steps?|count|ptr|seed|rng|"
    r"key|map(ping)?|d2t|tid2eid|extra_state)$"
)
_LEAST_SHARE = 16  # integers that are at least 1/16 of all bytes are packed weights
_PLAIN_BITS = 16
_SCALES = ("float16", "bfloat16", "float32", "float64", "uint8", "float8_e8m0fnu", "float8_e4m3fn")

# For each method: how names of weights end, how the names of their scales end instead, the sizes of the weights'
# elements in bytes, and the name of the method.
_PARTNERS: tuple[tuple[str, tuple[str, ...], tuple[int, ...], str], ...] = (
    (".weight", (".weight_scale_inv", ".weight_scale"), (1,), "fp8"),  # and nvfp4
    (".weight", (".scale", ".scale_weight", ".qscale_weight"), (1,), "fp8"),  # DeepSeek, ComfyUI, Mistral
    (".weight", (".SCB",), (1,), "bitsandbytes"),
    (".weight", (".weight_scales",), (1,), "eetq"),
    (".weight", (".scales",), (1, 4), "int8 or mlx"),
    ("_blocks", ("_scales",), (1,), "mxfp4"),
    (".blocks", (".scales",), (1,), "mxfp4"),  # of GPT-OSS as OpenAI publishes it
    (".weight_packed", (".weight_scale",), (1, 4), "compressed-tensors"),
    (".qweight", (".scales", ".wscales"), (1, 2, 4), "gptq, awq or nunchaku"),
    (".q_weight", (".q_scale_max",), (4,), "exl2"),
    (".weight._data", (".weight._scale",), (1,), "quanto"),
    (".weight:qdata", (".weight:scale",), (1, 4), "torchao"),
    ("._weight_qdata", ("._weight_scale",), (1, 4), "torchao"),
    (".W_q", (".scale", ".meta"), (1, 4), "hqq"),
    (".codes", (".codebooks",), (1, 2), "aqlm"),
)
# Scales beside leaves of any name, such as stacked experts. The leaves are 8-bit floats or int8; in a declared model
# they may have the dtypes of masks as well.
_ANY_PARTNERS = ("_scale_inv", "_scale", "_scales", "_weight_scale_inv", "_weight_scale", ".weight_scale")
_OTHER_SCALES = ("_weight_scale_2",)  # beside the scale of a leaf
# Beside weights of bitsandbytes, which may have any dtype (`bnb_4bit_quant_storage`). No dense model has these names.
_STATES = (".absmax", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_ENDS_OF_STATES = tuple(end.rpartition(".")[2] for end in _STATES)  # as escaped names end
_WEIGHTS = (*dict.fromkeys(end for end, *_ in _PARTNERS), "weight", "weights")


@dataclass(frozen=True, slots=True)
class Beside:
    """A leaf of a checkpoint, and the tree that has it."""

    tree: TreeEntry
    name: str
    entry: LeafEntry

    @property
    def dtype(self) -> str:
        return self.entry.dtype


@dataclass(frozen=True, slots=True)
class Quantization:
    """The method by which a tree is quantised, and its quantised leaves.

    how      the method, in words
    config   the declaration of the method; empty without one
    leaves   for each quantised leaf, its dtype and its scales, in words
    scales   for each quantised leaf with scales, the name of the scales after a dot
    spelled  the leaves of the checkpoint by their readable names after a dot
    """

    how: str
    config: Mapping[str, Any]
    tree: TreeEntry
    leaves: Mapping[str, str]
    scales: Mapping[str, str]
    spelled: Mapping[str, Beside]


def dtype_of_dequant(dequant: object) -> str | None:
    """Return the dtype that the argument `dequant` asks for; None for its other values. Raise ValueError for an unknown
    value."""
    if dequant is None or dequant is False:
        return None
    if dequant is True:
        raise ValueError('dequant=True: expected a floating dtype, such as "bf16", or False or None')
    return floating_dtype(dequant)


def quantization_of(
    store: Store, tree: TreeEntry, *, also: Sequence[Store] = (), beside: Iterable[TreeEntry] = ()
) -> Quantization | None:
    """Tell how a tree of another program is quantised, by its names, its dtypes and the configuration in `store`.
    Return None if it is not. The configuration is only read if leaves can be quantised.

    also    more directories that may have the configuration
    beside  the trees of the checkpoint, which may hold the scales
    """
    suspects = _suspects(tree.leaves)
    weights = [name for name, entry in suspects.items() if _can_be_weight(name, entry)]
    integers = _packed_in(tree)
    spelled = _spelled(*(other for other in beside if other is not tree), tree) if suspects else {}
    scales = _scales_of(suspects, spelled)
    if not scales and not weights and not integers:
        return None
    how, config = _declared([store, *also], tree.raw_metadata)
    if how is not None:
        scales = _scales_of(suspects, spelled, is_declared=True)
        are_scales = {*scales.values()} | {name for name in spelled if _is_scale(name, spelled)}
        weights = [name for name in weights if f".{readable(name)}" not in are_scales]
    lonely = _without_scales(suspects, scales)
    chosen = [*scales, *lonely] if how is None else [*dict.fromkeys([*scales, *weights])] or integers
    if not chosen:
        return None
    beside_them = {
        name: f", scales {spelled[dot].entry.described} in {dot[1:]}" for name, dot in scales.items()
    }
    beside_them |= dict.fromkeys(lonely, ", whose scales are missing")
    described = {name: tree.leaves[name].described + beside_them.get(name, "") for name in chosen}
    how = how or "weights of few bits beside their scales"
    return Quantization(how, config, tree, described, scales, spelled)


def dense_name(name: str) -> str:
    """Return the readable name that the weight of a quantised leaf has in the dense model."""
    dotted = f".{readable(name)}"  # if the caller took a root off, only the end of the name may be left
    for end, *_ in _PARTNERS:
        if dotted.endswith(end):
            is_alone = end.endswith(
                "blocks"
            )  # the weight has no name of its own behind the name of its module
            dotted = dotted.removesuffix(end) + ("" if is_alone else ".weight" if end.startswith(".") else "")
            break
    return dotted[1:]


# ---------------------------------------------------------------------------------------------- by names


def _suspects(leaves: Mapping[str, LeafEntry]) -> dict[str, LeafEntry]:
    """Return the leaves with dtypes of packed weights, and leaves beside a state of bitsandbytes."""
    states = (readable(name) for name in leaves if name.endswith(_ENDS_OF_STATES))
    stored = {name.removesuffix(end) for name in states for end in _STATES if name.endswith(end)}
    return {
        name: entry
        for name, entry in leaves.items()
        if not entry.key and (entry.dtype not in _PLAIN or (stored and readable(name) in stored))
    }


def _spelled(*trees: TreeEntry) -> dict[str, Beside]:
    """Return the leaves of trees by their readable names after a dot. Later trees win."""
    return {
        f".{readable(name)}": Beside(tree, name, entry)
        for tree in trees
        for name, entry in tree.leaves.items()
    }


def _scales_of(
    suspects: Mapping[str, LeafEntry], spelled: Mapping[str, Beside], *, is_declared: bool = False
) -> dict[str, str]:
    """Return for each leaf with scales beside it the name of the scales, after a dot."""
    found = {}
    for name, entry in suspects.items():
        for candidate in _candidates(f".{readable(name)}", entry.dtype, is_declared=is_declared):
            if candidate in spelled and spelled[candidate].dtype in _SCALES:
                found[name] = candidate
                break
    return found


def _without_scales(suspects: Mapping[str, LeafEntry], scales: Collection[str]) -> list[str]:
    """Return the weights without scales whose dtype is also the dtype of weights with scales."""
    dtypes = {suspects[name].dtype for name in scales} - _OF_BUFFERS
    return [
        name
        for name, entry in suspects.items()
        if entry.dtype in dtypes and name not in scales and readable(name).endswith(".weight")
    ]


def _can_be_weight(name: str, entry: LeafEntry) -> bool:
    return entry.dtype not in _OF_BUFFERS or f".{readable(name)}".endswith(_WEIGHTS)


def _packed_in(tree: TreeEntry) -> list[str]:
    """Return the integers that may be weights of a method with unknown names. In a dense model, tables and counters are
    small beside the weights."""
    found = {name: entry for name, entry in tree.leaves.items() if _can_be_packed(name, entry)}
    is_large = sum(entry.nbytes for entry in found.values()) * _LEAST_SHARE >= tree.nbytes
    return [*found] if is_large else []


def _can_be_packed(name: str, entry: LeafEntry) -> bool:
    is_integer = entry.dtype in _OF_BUFFERS or entry.dtype == "int64"
    return is_integer and bool(entry.shape) and not entry.key and not _BUFFER.search(f".{readable(name)}")


def _is_scale(name: str, spelled: Collection[str]) -> bool:
    ends = (*_ANY_PARTNERS, *_OTHER_SCALES)
    return any(name.endswith(end) and name.removesuffix(end) in spelled for end in ends)


def _candidates(name: str, dtype: str, *, is_declared: bool) -> Iterator[str]:
    itemsize = dtype_from_name(dtype).itemsize
    for end, ends_of_scales, sizes, _ in _PARTNERS:
        if name.endswith(end) and itemsize in sizes:
            yield from (name.removesuffix(end) + scale for scale in ends_of_scales)
    yield from (name + end for end in _STATES)
    if is_declared or (itemsize == 1 and dtype not in _OF_BUFFERS):
        yield from (name + end for end in _ANY_PARTNERS)


# ------------------------------------------------------------------------------------- by configuration


def _declared(stores: Sequence[Store], metadata: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Describe how the header or a configuration declares the model as quantised, and return the declaration; None and
    an empty dict if it is not declared."""
    for origin, config in _configurations(stores, metadata):
        for part in _parts_of(config):
            for name in _DECLARATIONS:
                found = part.get(name)
                if isinstance(found, dict) and _is_declaration(found):
                    return f"{_described(found)} ({origin})", found
    return None, {}


def _is_declaration(config: Mapping[str, Any]) -> bool:
    """Tell whether a declaration is of packed weights. If only the cache is quantised, its algorithm is null."""
    bits = config.get("bits")
    if (isinstance(bits, (int, float)) and bits >= _PLAIN_BITS) or config.get("quant_algo", "") is None:
        return False
    return str(config.get("quant_method", "")) != "none" and any(config.get(sign) for sign in _SIGNS)


def _configurations(
    stores: Sequence[Store], metadata: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "header", _in_header(metadata)
    for store in stores:
        for file in _CONFIGS:
            yield file, _read_config(store, file)


def _in_header(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name in metadata.keys() & _DECLARATIONS:
        with suppress(TypeError, ValueError, RecursionError):  # the names of the leaves may still tell
            found[name] = json.loads(metadata[name])
    return found


def _parts_of(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration and the configurations inside it, the outer before the inner."""
    level = [config]
    for _ in range(_MOST_LEVELS):
        yield from level
        level = [inner for part in level for inner in part.values() if isinstance(inner, dict)]


def _read_config(store: Store, file: str) -> dict[str, Any]:
    try:
        return read_config(store, file)
    except (FormatError, PermissionError) as error:  # the names of the leaves may still tell
        if file != _OFTEN_OTHER:
            logger.warning("%s; eformer cannot tell whether it declares the model as quantised", error)
        return {}


def declared_method(config: Mapping[str, Any]) -> Any:
    """Return the name of the method in a declaration; None without one."""
    return next(filter(None, map(config.get, _METHODS)), None)


def method_of_name(name: str, scales: str) -> str:
    """Name the method that gives a weight and its scales these names, both after a dot; "" for an unknown method."""
    for end, ends_of_scales, _, method in _PARTNERS:
        if name.endswith(end) and scales.endswith(ends_of_scales):
            return method
    return "bitsandbytes" if scales.endswith(_STATES) else ""


def _described(config: Mapping[str, Any]) -> str:
    """Describe a declaration: its method, bits and blocks."""
    known = config.get
    method = declared_method(config) or "an unnamed method"
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
