"""Read the directory of a model of Hugging Face that an export resembles: its tensors, configuration and other files.

Tests: tests/engine/tools/test_export.py.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.find import look_at
from eformer._engine.formats.model_config import model_config, read_config
from eformer._engine.record.lazy_arrays import entry_of
from eformer._engine.record.names import readable
from eformer._engine.record.values import MALFORMED_JSON, json_decoder
from eformer._engine.stores.base import read_whole
from eformer._engine.stores.local import resolved
from eformer._engine.stores.locate import locate
from eformer._engine.tools.config_edits import dtype_in
from eformer._engine.tools.view import View
from eformer.errors import FormatError, NotFoundError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import ExitStack

    from eformer._engine.formats.found import Found
    from eformer._engine.record.manifest import LeafEntry
    from eformer._engine.stores.base import Store

CONFIG, GENERATION, CARD, TOKENIZER = "config.json", "generation_config.json", "README.md", "tokenizer.json"

# Files that are copied byte for byte. Tokenizers are never written anew: a version of transformers may not read what
# another has written, and templates would be lost.
_COPIED = (
    GENERATION, TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "tokenizer.model.*", "spiece.model", "sentencepiece*.model",
    "*.tiktoken", "*.spm", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json", "image_processor_config.json", "modules.json",
    "LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"
_WITH_CODE = (CONFIG, "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")
_IMPORT = re.compile(rb"^\s*from\s+\.(\w+)\s+import\b", re.MULTILINE)
_CLASS = re.compile(r"(\w+)\.\w+", re.ASCII)
_MOST_CODE = 2**22  # bytes of a file of code
_MAIN = "model"  # the prefix of a model's weights beside other weights


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model of Hugging Face: its configuration, its tensors by their names, and the names of its files.

    view     reads its tensors; None if it has no weights
    leaves   the tensors by readable name
    """

    store: Store
    config: dict[str, Any]
    names: frozenset[str]
    view: View | None = None
    leaves: Mapping[str, LeafEntry] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.store.url

    def copied(self) -> list[str]:
        """List the files that an export copies."""
        plain = [name for name in self.names if any(fnmatchcase(name, pattern) for pattern in _COPIED)]
        return sorted({*plain, *self._templates(), *(self.code() & self.names)})

    def missing_code(self) -> list[str]:
        """List the files of code that a configuration names and the directory lacks."""
        return sorted(self.code() - self.names)

    def read(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the directory; an empty dict if the directory has no such file."""
        return read_config(self.store, name) if name in self.names else {}

    def text(self, name: str) -> str:
        """Return a text file of the directory; "" if the directory has no such file."""
        if name not in self.names:
            return ""
        with suppress(FormatError, OSError):
            return read_whole(self.store, name, _MOST_CODE)[0].decode(errors="replace")
        return ""

    def _templates(self) -> list[str]:
        with suppress(FileNotFoundError, NotADirectoryError, FormatError):
            return [
                f"{_TEMPLATES}/{name}" for name in self.store.kinds(_TEMPLATES) if name.endswith(".jinja")
            ]
        return []

    def code(self) -> set[str]:
        """Name the files of code that configurations ask for, and the files that these import."""
        found: set[str] = set()
        todo = [name for file in _WITH_CODE for name in _modules_in(self.read(file).get("auto_map"))]
        while todo:
            if (name := todo.pop()) in found:
                continue
            found.add(name)
            if name in self.names:
                todo += _imports_in(read_whole(self.store, name, _MOST_CODE)[0])
        return found


def _modules_in(auto_map: Any) -> Iterator[str]:
    """Yield the files of a map from classes to "module.Class". Code of another repository, "repository--module.Class",
    is not in this directory."""
    values = auto_map.values() if isinstance(auto_map, dict) else ()
    texts = (text for value in values for text in (value if isinstance(value, list) else [value]))
    for text in texts:
        if isinstance(text, str) and (found := _CLASS.fullmatch(text)):
            yield f"{found[1]}.py"


def _imports_in(code: bytes) -> Iterable[str]:
    return [f"{name.decode()}.py" for name in _IMPORT.findall(code)]


def open_model(path: str | os.PathLike[str], stack: ExitStack) -> ModelDirectory:
    """Open the directory of a model. Raise NotFoundError if it is not there, or has no configuration."""
    store, name = locate(path)
    if name:
        if not store.exists(name):
            raise NotFoundError(
                f"like={str(path)!r} does not exist; pass the directory of a model of Hugging Face"
            )
        store, _ = resolved(store, "")
    config = model_config(store)
    if not config:
        raise NotFoundError(
            f"like={str(path)!r} has no {CONFIG}; pass the directory of a model of Hugging Face, or config="
        )
    names = frozenset(
        name for name, kind in store.kinds().items() if kind != "directory" and store.exists(name)
    )
    view = _weights(store.url, dtype_in(config) or "bfloat16", stack)
    leaves = {readable(name): entry_of(array) for name, array in view.arrays.items()} if view else {}
    return ModelDirectory(store, config, names, view, leaves)


def _weights(url: str, dtype: str, stack: ExitStack) -> View | None:
    """Open the weights of a model, quantised weights as numbers; None if the directory has no weights."""

    def opened(found: Found) -> View:
        prefix = _MAIN if _MAIN in found.trees and len(found.trees) > 1 else None
        return stack.enter_context(View(found, prefix, dequant=dtype))

    try:
        return look_at(url, opened)
    except NotFoundError:
        return None


# -------------------------------------------------------------------------------------------- tokens


class _AddedToken(msgspec.Struct):
    id: int


class _TokenModel(msgspec.Struct):
    vocab: dict[str, int] | list[msgspec.Raw] = msgspec.field(default_factory=dict)


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = msgspec.field(default_factory=list)
    model: _TokenModel = msgspec.field(default_factory=_TokenModel)


def largest_token(data: bytes) -> int | None:
    """Return the largest id of a token in tokenizer.json; None if it has none, or is of an unknown form."""
    try:
        found = json_decoder(_Tokenizer).decode(data)
    except MALFORMED_JSON:
        return None
    vocab = found.model.vocab
    last = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
    most = max([last, *(token.id for token in found.added_tokens)])
    return most if most >= 0 else None


def special_tokens(generation: Mapping[str, Any]) -> dict[str, int]:
    """Return the largest id of each setting of generation_config.json that names tokens."""
    found = {}
    for key, value in generation.items():
        if key.endswith(("_token_id", "_token_ids")):
            ids = [one for one in (value if isinstance(value, list) else [value]) if type(one) is int]
            if ids:
                found[key] = max(ids)
    return found
