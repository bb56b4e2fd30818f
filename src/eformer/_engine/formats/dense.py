"""Plan the weights of a quantised tree as numbers: which leaves have the codes and the scales of each, and in which
blocks.

A leaf keeps its name, or gets the name that it has in the dense model. Scales disappear. Leaves of methods that cannot
be read stay as they are stored, with the reason, so that a caller can refuse them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from eformer._engine.formats.nested_names import nested_spelled
from eformer._engine.formats.quantized import Quantization, declared_method, method_of_name
from eformer._engine.record.dequantized import EXPONENTS, GROUP_BYTES, Blocks, Dequantized
from eformer._engine.record.lazy_arrays import LeafReader, StoredLeaf
from eformer._engine.record.names import readable
from eformer._engine.record.text import few
from eformer._engine.tasks.pool import gc_paused
from eformer.errors import EformerError, FormatError, QuantizedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import numpy as np

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.quantized import Beside
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.record.planned import LazyArray

_READABLE = (
    "fp8",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "fbgemm_fp8",
    "fp8_e4m3",
    "mixed_precision",
    "fp8_per_channel_per_token",
)
_READABLE_FORMATS = (
    "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized",
    "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
_OF_EXPERTS = ("_blocks", ".blocks")  # names of transformers, and of OpenAI
_DEFAULT_BLOCK = (128, 128)
_MX_BLOCK = (1, 32)
_NV_BLOCK = (1, 16)
# Leaves of one number for activations and caches, which a dense model does not have.
_OF_ACTIVATIONS = (
    "input_scale", "activation_scale", "input_global_scale", "output_scale", ".k_scale", ".v_scale", ".scale_input",
    ".qscale_act",
)  # fmt: skip
# Beside a weight of compressed-tensors or ModelOpt whose numbers are not its codes times its scales.
_MORE_THAN_SCALES = ("weight_zero_point", "weight_g_idx", "pre_quant_scale")
_BITS: dict[int, Any] = {4: "int4", 8: "int8"}


class ManyReader(LeafReader, Protocol):
    """Read leaves of one tree, also many together."""

    def read_all(self, names: Sequence[str]) -> Mapping[str, np.ndarray[Any, Any]]:
        """Return whole leaves by name."""
        ...


@dataclass(frozen=True, slots=True)
class DenseLeaf:
    """A quantised leaf that can be read as numbers.

    name       its name in the dense model
    mark       its method and blocks, for display
    shape_of   a leaf with its shape, if padding may hide the shape
    """

    name: str
    mark: str
    blocks: Blocks
    scales: Beside
    whole: Beside | None = None
    shape_of: Beside | None = None


@dataclass(frozen=True, slots=True)
class DenseTree:
    """The leaves of a quantised tree as numbers.

    arrays       all arrays by name: stored leaves, and quantised weights as numbers
    values       the names of plain values in this tree, by their stored names
    dequantized  the names of the weights
    left_out     the stored names of leaves that a dense model does not have, beside the scales
    problems     for each leaf that stays as it is stored, the reason
    """

    arrays: Mapping[str, LazyArray]
    values: Mapping[str, str]
    structure: Any
    dequantized: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    problems: Mapping[str, str] = field(default_factory=dict)

    def cast(self, dtypes: Mapping[str, str]) -> DenseTree:
        """Return the tree with some weights in other dtypes, by their names."""
        arrays = {
            name: array.cast(dtypes.get(name, array.dtype.name)) if isinstance(array, Dequantized) else array
            for name, array in self.arrays.items()
        }
        return replace(self, arrays=arrays)


def dense_tree(
    quantization: Quantization, dtype: str, reader_of: Callable[[TreeEntry], ManyReader]
) -> DenseTree:
    """Return the tree with its quantised weights as numbers. `reader_of` opens a tree of the checkpoint."""
    with gc_paused():
        leaves, problems = plan_dense(quantization)
    blocks = _with_shapes(leaves, reader_of)
    with gc_paused():
        return _dense_tree(quantization.tree, dtype, reader_of, leaves, blocks, problems)


def _dense_tree(
    tree: TreeEntry,
    dtype: str,
    reader_of: Callable[[TreeEntry], ManyReader],
    leaves: Mapping[str, DenseLeaf],
    blocks: Mapping[str, Blocks],
    problems: Mapping[str, str],
) -> DenseTree:
    taken = {id(beside.entry) for leaf in leaves.values() for beside in _beside(leaf)}
    left_out = dict.fromkeys(_of_activations(tree) if leaves else ())
    arrays: dict[str, LazyArray] = {}
    reader = reader_of(tree)
    for name, entry in tree.leaves.items():
        if id(entry) in taken or name in left_out:
            continue
        leaf, stored = leaves.get(name), StoredLeaf(reader, name, entry, keeps_small=True)
        new = leaf.name if leaf else name
        if new in arrays:
            raise FormatError(f"leaf {new!r} is stored both as numbers and in quantised form")
        arrays[new] = stored
        if leaf:
            others = [_stored(beside, reader_of) for beside in (leaf.scales, leaf.whole) if beside]
            arrays[new] = Dequantized(stored, others[0], blocks[name], dtype, *others[1:])
    structure, final = nested_spelled({name: name for name in (*arrays, *tree.raw_values)})
    for name, array in arrays.items():
        if isinstance(array, Dequantized):
            array.dense_name = final[name]
    return DenseTree(
        {final[name]: array for name, array in arrays.items()},
        {name: final[name] for name in tree.raw_values},
        structure,
        tuple(final[leaf.name] for leaf in leaves.values()),
        tuple(left_out),
        problems,
    )


def plan_dense(quantization: Quantization) -> tuple[dict[str, DenseLeaf], dict[str, str]]:
    """Return the quantised leaves that can be read as numbers, and for all others the reason why they cannot."""
    planner = _Planner(quantization)
    leaves, problems = {}, {}
    for name in quantization.leaves:
        found = planner.plan(name)
        if isinstance(found, DenseLeaf):
            leaves[name] = found
        elif found:
            problems[name] = found
    return leaves, problems


def marks_in(found: Found, tree: TreeEntry) -> dict[str, str]:
    """Return a short text for each quantised leaf of a tree, such as "fp8·128x128". Damage is no error here."""
    find_quantized = found.foreign.find_quantized
    try:
        quantization = find_quantized(tree) if find_quantized else None
    except (EformerError, OSError):  # the caller shows the rest of the checkpoint
        return {}
    return {} if quantization is None else _marks(quantization)


def _marks(quantization: Quantization) -> dict[str, str]:
    leaves, problems = plan_dense(quantization)
    method = str(declared_method(quantization.config) or "quantised")[:40]
    return {name: leaf.mark for name, leaf in leaves.items()} | dict.fromkeys(problems, method)


def refuse_raw(quantization: Quantization, path: str, names: Collection[str]) -> None:
    """Raise a QuantizedError if one of these names is the name of a quantised leaf."""
    taken = [name for name in quantization.leaves if name in names]
    if not taken:
        return
    shown = few([f"{readable(name)}: {quantization.leaves[name]}" for name in taken])
    scaled = sum(name in quantization.scales for name in taken)
    weights = f"{len(taken):,} weight{'s' if len(taken) > 1 else ''}"
    with_scale = (
        " with a scale" if scaled == len(taken) else f", {scaled:,} of them with a scale" if scaled else ""
    )
    planner = _Planner(quantization)
    unreadable = [why for name in taken if isinstance(why := planner.plan(name), str) and why]
    way = (
        f"{unreadable[0]} (checkpoint.load, checkpoint.convert) for the stored leaves"
        if len(unreadable) == len(taken) and "dequant=False" in unreadable[0]
        else 'Pass dequant="bf16" for the weights as numbers, or dequant=False (checkpoint.load, checkpoint.convert) '
        "for the stored leaves"
    )
    raise QuantizedError(
        f"{path} is quantised: {quantization.how}, {weights}{with_scale} ({shown}). Read raw, the weights would be "
        f"wrong. {way}"
    )


def refuse_problems(quantization: Quantization, path: str, problems: Mapping[str, str]) -> None:
    """Raise a QuantizedError that lists the leaves that cannot be read as numbers, if there are some."""
    if problems:
        every = [*dict.fromkeys(problems.values())]
        raise QuantizedError(f"{path} is quantised: {quantization.how}: {few(every)}")


# ------------------------------------------------------------------------------------------ one leaf


class _Planner:
    """Decide how each quantised leaf of a tree becomes numbers."""

    def __init__(self, quantization: Quantization) -> None:
        self.found = quantization
        self.method = _unreadable_method(quantization.config)
        self.groups = list(_groups(quantization.config))
        self.blocks = [*dict.fromkeys(_declared_blocks(quantization.config, self.groups))]
        self.unconverted = [f".{module}." for module in _unconverted(quantization.config)]

    def plan(self, name: str) -> DenseLeaf | str:
        """Return the plan for a leaf, or the reason why there is none. An empty reason is for a leaf that is stored as
        numbers."""
        found, dot = self.found, f".{readable(name)}"
        scales_dot = found.scales.get(name)
        if self.method:
            return _cannot(self.method)
        if scales_dot is None:
            return self._without_scales(name, dot)
        scales, entry = found.spelled[scales_dot], found.tree.leaves[name]
        if not entry.shape:
            return f"{readable(name)} is {entry.described} and has scales; expected a weight with axes"
        stem = dot.removesuffix("weight_packed").removesuffix("weight")
        if any(stem + end in found.spelled for end in _MORE_THAN_SCALES):
            return _cannot(self._named(dot, scales_dot))
        divides = scales_dot.removesuffix("_scale") + "_global_scale"
        whole = found.spelled.get(f"{scales_dot}_2") or found.spelled.get(divides)
        if whole and math.prod(whole.entry.shape) != 1:
            return f"{readable(whole.name)} is {whole.entry.described}, expected one number"
        if entry.dtype.startswith("float8_") and entry.dtype not in EXPONENTS and not whole:
            return self._float8(name, scales, is_inverse=scales_dot.endswith("_inv"))
        if dot.endswith(_OF_EXPERTS) and entry.dtype == "uint8" and scales.dtype in EXPONENTS:
            return self._grouped(name, scales)
        if entry.dtype == "int8" and scales.dtype == "float8_e8m0fnu":
            return self._fp4(name, scales, _MX_BLOCK, "mxfp4")
        if entry.dtype == "uint8" and whole and scales.dtype == "float8_e4m3fn":
            return self._fp4(name, scales, _NV_BLOCK, "nvfp4", whole, divides=divides in found.spelled)
        if dot.endswith(".weight_packed") and entry.dtype == "uint8" and scales.dtype in EXPONENTS:
            return self._fp4(name, scales, _MX_BLOCK, "mxfp4")
        if dot.endswith(".weight_packed") and entry.dtype == "int32" and scales.dtype not in EXPONENTS:
            return self._integers(name, scales, found.spelled.get(f"{stem}weight_shape"))
        return _cannot(self._named(dot, scales_dot))

    def _named(self, dot: str, scales_dot: str) -> str:
        declared = declared_method(self.found.config)
        more = f" {self.found.config.get('format')}" if declared == "compressed-tensors" else ""
        return f"{declared}{more}" if declared else method_of_name(dot, scales_dot) or "an unknown method"

    def _without_scales(self, name: str, dot: str) -> str:
        if any(module in f"{dot}." for module in self.unconverted):
            return ""
        number, dtype = len(self.found.scales), self.found.tree.leaves[name].dtype
        others = f"{number:,} others have theirs" if number else "no leaf has scales"
        missing = f"{_expected_scales(dot, self.found.scales)[1:]} is missing ({others})"
        return f"{readable(name)} is {dtype} and {missing}; restore it, or pass dequant=False"

    def _float8(self, name: str, scales: Beside, *, is_inverse: bool) -> DenseLeaf | str:
        shape, grid = self.found.tree.leaves[name].shape, scales.entry.shape
        around = (1,) * (len(shape) - 2)
        one_byte = scales.dtype == "uint8" or "mxfp8" in str(declared_method(self.found.config)).lower()
        tried = self.blocks or [_MX_BLOCK if one_byte else _DEFAULT_BLOCK]
        candidates = [(*around, *block) for block in tried] if len(shape) > 1 else []
        if math.prod(grid) == 1 and len(grid) < 2:
            candidates = [tuple(max(1, size) for size in shape)]
        elif not is_inverse:
            candidates += _broadcast(shape, grid)
        for block in candidates:
            blocks = Blocks("float8", shape, block)
            is_one = math.prod(grid) == 1 and block == tuple(max(1, size) for size in shape)
            if blocks.grid == grid or is_one:
                return DenseLeaf(name, f"fp8{_block_text(blocks)}", blocks, scales)
            if len(grid) == 1 and blocks.grid == (*grid, *(1,) * (len(shape) - 1)):
                return DenseLeaf(name, f"fp8{_block_text(blocks)}", blocks, scales)
        return _misfit(name, shape, scales, tried)

    def _grouped(self, name: str, scales: Beside) -> DenseLeaf | str:
        """Plan FP4 numbers of experts. The dense leaves of transformers have inputs before outputs; the
        leaves of OpenAI stay in stored order."""
        shape, is_of_transformers = self.found.tree.leaves[name].shape, name.endswith("_blocks")
        if len(shape) != 4 or shape[-1] != GROUP_BYTES:
            return f"{readable(name)} is uint8{list(shape)}, expected [experts, outputs, groups, 16]"
        whole = (*shape[:2], 2 * GROUP_BYTES * shape[2])
        blocks = Blocks("fp4", whole, (1, *_MX_BLOCK), is_grouped=True, is_transposed=is_of_transformers)
        if blocks.grid != scales.entry.shape:
            return _misfit(name, whole, scales, [_MX_BLOCK])
        return DenseLeaf(re.sub(r"[_.]blocks$", "", name), f"mxfp4{_block_text(blocks)}", blocks, scales)

    def _fp4(
        self,
        name: str,
        scales: Beside,
        block: tuple[int, int],
        method: str,
        whole: Beside | None = None,
        *,
        divides: bool = False,
    ) -> DenseLeaf | str:
        *around, bytes_ = self.found.tree.leaves[name].shape or (0,)
        shape = (*around, 2 * bytes_)
        blocks = Blocks("fp4", shape, (*(1,) * len(around), block[1]), divides=divides)
        if blocks.grid != scales.entry.shape:
            return _misfit(name, shape, scales, [block])
        return DenseLeaf(_dense_name(name), f"{method}{_block_text(blocks)}", blocks, scales, whole)

    def _integers(self, name: str, scales: Beside, shape_of: Beside | None) -> DenseLeaf | str:
        """Plan integers of 4 or 8 bits in words of 32 bits."""
        *around, words = self.found.tree.leaves[name].shape or (0,)
        if shape_of and (shape_of.entry.shape != (len(around) + 1,) or not shape_of.dtype.startswith("int")):
            return (
                f"{readable(shape_of.name)} is {shape_of.entry.described}, expected int64[{len(around) + 1}]"
            )
        for group in self.groups:
            bits, size = group.get("num_bits"), group.get("group_size")
            if bits not in _BITS or group.get("symmetric") is False or group.get("type", "int") != "int":
                continue
            shape = (*around, words * (32 // bits))
            per_row = (*(1,) * len(around), max(1, shape[-1]))
            block = (*per_row[:-1], size) if _is_size(size) else per_row
            if math.prod(scales.entry.shape) == 1 and len(scales.entry.shape) < len(shape):
                block = tuple(max(1, n) for n in shape)
            blocks = Blocks(_BITS[bits], shape, block)
            if block[-1] % blocks.per_element == 0 and (
                blocks.grid == scales.entry.shape
                or math.prod(scales.entry.shape) == math.prod(blocks.grid) == 1
            ):
                mark = f"int{bits}{_block_text(blocks)}"
                return DenseLeaf(_dense_name(name), mark, blocks, scales, shape_of=shape_of)
        expected = "config.json declares no symmetric group of 4 or 8 bits that fits"
        return f"{readable(name)}: scales {list(scales.entry.shape)} of int32{[*around, words]}: {expected}"


def _cannot(method: str) -> str:
    return f"{method} cannot be dequantised here; load the original model, or pass dequant=False"


def _misfit(name: str, shape: Sequence[int], scales: Beside, tried: Sequence[tuple[int, int]]) -> str:
    blocks = " or ".join(f"{block[0]} x {block[1]}" for block in tried)
    return (
        f"{readable(name)}: scales {list(scales.entry.shape)} do not fit {list(shape)} in blocks of {blocks}"
    )


def _broadcast(shape: tuple[int, ...], grid: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the block of scales for whole rows, or other whole axes; nothing if the scales are not of that form."""
    if len(grid) == 1 and len(shape) > 1:
        grid = (*grid, *(1,) * (len(shape) - 1))
    if len(grid) != len(shape) or any(n not in (1, size) for n, size in zip(grid, shape, strict=True)):
        return []
    return [tuple(max(1, size) if n == 1 else 1 for n, size in zip(grid, shape, strict=True))]


def _block_text(blocks: Blocks) -> str:
    """Describe blocks for display: nothing for one scale, "row" for a scale for each row."""
    if math.prod(blocks.grid) <= 1:
        return ""
    *_, height, width = (1, *blocks.block)
    return "·row" if (height, width) == (1, blocks.shape[-1]) else f"·{height}x{width}"


def _dense_name(name: str) -> str:
    return f"{name.removesuffix('weight_packed')}weight" if name.endswith("weight_packed") else name


def _expected_scales(dot: str, scales: Mapping[str, str]) -> str:
    """Return the name that the scales of a leaf would have, as other leaves have theirs."""
    for weight, found in scales.items():
        shared = f".{readable(weight)}"
        if found.startswith(shared):
            return dot + found.removeprefix(shared)
        stem, _, end = shared.rpartition(".")
        if dot.endswith(f".{end}") and found.startswith(f"{stem}."):
            return dot.removesuffix(end) + found.removeprefix(f"{stem}.")
    return f"{dot}_scale_inv"


# ------------------------------------------------------------------------------------- declarations


def _unreadable_method(config: Mapping[str, Any]) -> str:
    """Name the declared method if no leaf of it can be read; "" otherwise."""
    method = str(declared_method(config) or "").lower()
    if method.startswith("modelopt"):
        algorithm = str(config.get("quant_algo") or "").lower()
        return f"{method} {algorithm}"[:100] if algorithm and algorithm not in _READABLE else ""
    if method == "compressed-tensors":
        written = config.get("format")
        sparsity = config.get("sparsity_config")
        is_sparse = isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense"
        if is_sparse or _has_transforms(config) or (written is not None and written not in _READABLE_FORMATS):
            return f"{method} {'sparse' if is_sparse else written}"[:100]
        return ""
    return "" if not method or method in _READABLE else method[:100]


def _has_transforms(config: Mapping[str, Any]) -> bool:
    """Tell whether weights are rotated, so that their numbers need more than scales."""
    transforms = config.get("transform_config")
    return isinstance(transforms, dict) and bool(transforms.get("config_groups"))


def _groups(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield how groups of weights are quantised, as compressed-tensors and ModelOpt declare it."""
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield weights


def _declared_blocks(
    config: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, int]]:
    for pair in (config.get("weight_block_size"), *(group.get("block_structure") for group in groups)):
        if isinstance(pair, list) and len(pair) == 2 and all(map(_is_size, pair)):
            yield (pair[0], pair[1])
    for size in (config.get("group_size"), *(group.get("group_size") for group in groups)):
        if isinstance(size, int) and _is_size(size):
            yield (1, size)


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**31


def _unconverted(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the modules that a declaration leaves as they are."""
    for key in ("modules_to_not_convert", "ignore", "exclude_modules"):
        modules = config.get(key)
        yield from (
            module for module in (modules if isinstance(modules, list) else ()) if isinstance(module, str)
        )


# ------------------------------------------------------------------------------------------- leaves


def _beside(leaf: DenseLeaf) -> Iterator[Beside]:
    yield from (beside for beside in (leaf.scales, leaf.whole, leaf.shape_of) if beside)


def _stored(beside: Beside, reader_of: Callable[[TreeEntry], ManyReader]) -> StoredLeaf:
    return StoredLeaf(reader_of(beside.tree), beside.name, beside.entry, keeps_small=True)


def _of_activations(tree: TreeEntry) -> Iterator[str]:
    """Yield the leaves of one number that scale activations or caches."""
    for name, entry in tree.leaves.items():
        if f".{readable(name)}".endswith(_OF_ACTIVATIONS) and math.prod(entry.shape) == 1:
            yield name


def _with_shapes(
    leaves: Mapping[str, DenseLeaf], reader_of: Callable[[TreeEntry], ManyReader]
) -> dict[str, Blocks]:
    """Read the shapes of packed weights, all together, and return the blocks of every weight."""
    wanted: dict[int, tuple[TreeEntry, list[str]]] = {}
    for leaf in leaves.values():
        if leaf.shape_of:
            tree = leaf.shape_of.tree
            wanted.setdefault(id(tree), (tree, []))[1].append(leaf.shape_of.name)
    found = {number: reader_of(tree).read_all(names) for number, (tree, names) in wanted.items()}
    return {
        name: _cut(leaf, found[id(leaf.shape_of.tree)][leaf.shape_of.name]) if leaf.shape_of else leaf.blocks
        for name, leaf in leaves.items()
    }


def _cut(leaf: DenseLeaf, stored: np.ndarray[Any, Any]) -> Blocks:
    """Return the blocks of a weight whose rows end in padding, by its stored shape."""
    blocks = leaf.blocks
    shape = tuple(max(0, int(size)) for size in stored)
    cut, unit = Blocks(blocks.codes, shape, blocks.block), blocks.per_element
    padded = (*shape[:-1], -(-shape[-1] // unit) * unit)
    if padded != blocks.shape or cut.grid != blocks.grid:
        raise FormatError(
            f"{leaf.name} is {list(shape)} by its weight_shape, expected at most {list(blocks.shape)}; restore the "
            "file from its origin, or pass dequant=False for the stored leaves"
        )
    return cut
