"""Recognise the leaves of a LoRA, and name and transpose them as PEFT has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from eformer._engine.record.lazy_arrays import Transposed
from eformer._engine.record.names import split_name, unescape
from eformer._engine.record.regions import Region

if TYPE_CHECKING:
    from eformer._engine.record.planned import Source

BASE = "base_model.model."  # how PEFT begins every name; the module of the base model follows

# PEFT's own names, and equinox's of a linear layer: matrices are out x in.
_THEIRS = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\."
    r"(?P<matrix>lora_[AaBb]\.weight|lora_[AB]\.bias|lora_embedding_[AB]|lora_magnitude_vector)"
)
# A variable of NNX (in a LoRALinear under `lora`), w_lora_a of Tunix, a layer of linen or Haiku: in x out.
_OURS = re.compile(
    r"(?P<module>.+?)(?:\.lora)?\.(?:[^.]+_)?lora_(?P<matrix>[AaBb])(?:\.(?:kernel|w))?(?:\.value)?"
)
_LORA_PART = re.compile(r"(?:.+_)?lora_[AaBb]|lora_embedding_[AB]|lora_magnitude_vector")

_RANK_AXES = {"lora_A.weight": 0, "lora_B.weight": 1, "lora_embedding_A": 0, "lora_embedding_B": 1}


@dataclass(frozen=True, slots=True)
class AdapterName:
    """The name of a leaf in an adapter: a module of the base model, and a part of its LoRA, such as `lora_A.weight`.

    `is_transposed` tells whether the leaf has the axes of JAX, and has to be transposed.
    """

    module: str
    part: str
    is_transposed: bool = False

    def __str__(self) -> str:
        return f"{BASE}{self.module}.{self.part}"

    @property
    def is_matrix(self) -> bool:
        return self.part in _RANK_AXES

    @property
    def other_half(self) -> str:
        """Return the name of the matrix that this one is multiplied with."""
        return f"{BASE}{self.module}.{self.part.translate(str.maketrans('AB', 'BA'))}"


def parse_adapter_name(name: str) -> AdapterName | None:
    """Return the name that PEFT has for a LoRA leaf; None if that cannot be told."""
    if match := _THEIRS.fullmatch(name):
        part = re.sub("lora_[ab]", lambda found: f"lora_{found[0][-1].upper()}", match["matrix"])
        return AdapterName(match["module"], part)
    if match := _OURS.fullmatch(name):
        return AdapterName(match["module"], f"lora_{match['matrix'].upper()}.weight", is_transposed=True)
    return None


def plain_name(name: str) -> str:
    """Return the name of a leaf without escapes: flat dicts have dots in their keys, and PyTorch between modules."""
    return ".".join(map(unescape, split_name(name)))


def is_lora(name: str) -> bool:
    """Tell by the parts of its name whether a leaf belongs to a LoRA."""
    return any(_LORA_PART.fullmatch(part) for part in name.split("."))


@dataclass(frozen=True, slots=True)
class AdapterLeaf:
    """A leaf that goes into an adapter: the array as it is, and its name there."""

    source: Source
    name: AdapterName

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that it has in the adapter."""
        return self.source.shape[::-1] if self.name.is_transposed else self.source.shape

    @property
    def rank(self) -> int:
        """Return the rank of a LoRA's matrix; 0 for other leaves."""
        return self.shape[_RANK_AXES[self.name.part]] if self.name.is_matrix else 0

    def stored_as(self, name: str) -> Source:
        """Return the source of what is written, under that name."""
        ((_, array),) = self.source.parts
        if self.name.is_transposed:
            array = Transposed(array, (1, 0))
        whole = Region.whole(self.shape)
        return msgspec.structs.replace(
            self.source, name=name, shape=self.shape, sharding=None, parts=((whole, array),), regions=(whole,)
        )
