"""Plan the export of a tree as a model of Hugging Face: its tensors, its configuration and the files beside them.

All mismatches are one error, before anything is written.

Tests: tests/engine/tools/test_export.py.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.nested_names import nested_dicts, parts_of_name
from eformer._engine.record.dtypes import floating_dtype, is_floating
from eformer._engine.record.names import nearest, readable
from eformer._engine.record.origin import config_in, new_origin, published_parent
from eformer._engine.record.planned import LazyArray
from eformer._engine.record.stages import largest_difference
from eformer._engine.record.text import count, few
from eformer._engine.stores.base import publish, read_whole, remove_files
from eformer._engine.tools.config_edits import dtype_in, for_export, setting, with_setting, with_settings
from eformer._engine.tools.conversion import source_of
from eformer._engine.tools.model_card import CardFacts, card_lines, front_matter, hub_id, model_card
from eformer._engine.tools.model_files import (
    CARD,
    CONFIG,
    GENERATION,
    TOKENIZER,
    largest_token,
    special_tokens,
)
from eformer.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from eformer._engine.record.manifest import LeafEntry
    from eformer._engine.record.planned import Source
    from eformer._engine.stores.base import Store
    from eformer._engine.tools.conversion import ConvertedTree
    from eformer._engine.tools.model_files import ModelDirectory

_CONTEXT = "cannot be exported as a model of Hugging Face"
_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|embed_in|word_embeddings|shared|tok_embeddings|embeddings)\.weight"
)
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.weight")
_LAYER = re.compile(r"(.*?\.\d+)\..*")
_COPY = 4 * 2**20  # bytes of a file to read and write at a time
_INDENT = 2


@dataclass(frozen=True, slots=True)
class ExportWish:
    """The caller's wishes for an export.

    like             the model of Hugging Face that the result resembles
    config           settings on top of its configuration
    dtype            the dtype of floating tensors; None for the dtypes in `like`
    card             write README.md
    fill_from_like   take tensors that the tree lacks from `like`
    allow_missing    allow tensors that `like` has and the tree lacks
    """

    like: ModelDirectory | None = None
    config: Mapping[str, Any] | None = None
    dtype: Any = None
    card: bool = True
    fill_from_like: bool = False
    allow_missing: bool = False


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model beside its weights: the bytes of new files, and the names of files to copy from `origin`."""

    written: Mapping[str, bytes]
    copied: Sequence[str] = ()
    origin: Store | None = None

    def put(self, store: Store) -> None:
        """Write the files to a new directory. The files of a directory appear together."""
        for folder, names in self._by_folder().items():
            with closing(_inside(store, folder).begin(may_be_new=True)) as upload:
                for name in names:
                    upload.stream(name, *self._content(f"{folder}/{name}" if folder else name))
                upload.sync()
                publish(upload, names)

    def remove(self, store: Store) -> None:
        """Remove the files of an export that has failed."""
        for folder, names in self._by_folder().items():
            remove_files(_inside(store, folder), names)

    def _by_folder(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path in (*self.copied, *self.written):
            folder, _, name = path.rpartition("/")
            found.setdefault(folder, []).append(name)
        return found

    def _content(self, name: str) -> tuple[int, Iterable[bytes]]:
        """Return the length of a file, and its bytes in chunks."""
        if (data := self.written.get(name)) is not None:
            return len(data), [data]
        assert self.origin
        nbytes = self.origin.read(name, 0, 0)[1].nbytes
        return nbytes, _chunks(self.origin, name, nbytes)


def _inside(store: Store, folder: str) -> Store:
    return store.at(folder) if folder else store


def _chunks(store: Store, name: str, nbytes: int) -> Iterator[bytes]:
    for start in range(0, nbytes, _COPY):
        yield store.read(name, start, min(_COPY, nbytes - start))[0]


def plan_model(tree: ConvertedTree, wish: ExportWish) -> ModelFiles:
    """Reduce a tree to the tensors of a model, and plan the files beside them. A single error lists all problems."""
    plan = _Plan(tree, wish)
    plan.take_leaves()
    plan.fill()
    plan.settle_head()
    plan.compare_with_like()
    plan.settle_dtypes()
    plan.settle_vocabulary()
    plan.check_files()
    if plan.problems:
        raise MismatchError(plan.problems, _CONTEXT, "; ".join(plan.advice))
    plan.reduce()
    return plan.files()


@dataclass(slots=True)
class _Plan:
    """The state of a plan: the tensors by their names at Hugging Face, the configuration, and the problems so far."""

    tree: ConvertedTree
    wish: ExportWish
    leaves: dict[str, Source] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fillings: frozenset[str] = frozenset()

    # --------------------------------------------------------------------------------------- leaves

    def take_leaves(self) -> None:
        """Take the arrays of the tree by their readable names, in natural order, and the configuration."""
        recorded = config_in(self.tree.view.tree.origin or {})
        base = self.wish.like.config if self.wish.like else recorded
        if not base and not self.wish.config:
            raise ValueError(
                "transformers cannot open weights alone: it needs config.json, and this tree has no recorded "
                "configuration. Pass like= with the directory of the model that it comes from, or config= with the "
                "settings of config.json"
            )
        self.config = with_settings(base, self.wish.config or {})
        named = {readable(source.name): source for source in self.tree.sources}
        self.leaves = {name: named[name] for name in sorted(named, key=_natural)}
        for name, source in self.leaves.items():
            if source.key:
                self.problems.append(
                    f"leaf {name!r} holds PRNG keys, which transformers does not have; leave it out"
                )
        if values := [*map(readable, self.tree.raw_values)]:
            self.notes.append(f"left out, because they are no arrays: {few(values)}")

    @property
    def expected(self) -> Mapping[str, LeafEntry]:
        """The tensors of `like`."""
        return self.wish.like.leaves if self.wish.like else {}

    def fill(self) -> None:
        """Take tensors that the tree lacks from `like`."""
        like = self.wish.like
        if not self.wish.fill_from_like:
            return
        if like is None or like.view is None:
            raise ValueError("fill_from_like=True takes tensors from like=, which has no weights")
        named = {readable(name): array for name, array in like.view.arrays.items()}
        lacking = [name for name in named if name not in self.leaves and not self._is_tied_head(name)]
        filled = {name: source_of(name, named[name]) for name in lacking}
        both = self.leaves | filled
        self.leaves = {name: both[name] for name in sorted(both, key=_natural)}
        self.fillings = frozenset(filled)
        if filled:
            self.notes.append(f"taken from like: {count(len(filled), 'tensor')}: {few([*filled])}")

    # ----------------------------------------------------------------------------------------- head

    @property
    def embedding(self) -> str | None:
        """The name of the token embedding."""
        return _first(_EMBEDDING, self.leaves)

    def _is_tied_head(self, name: str) -> bool:
        return _HEAD.fullmatch(name) is not None and setting(self.config, "tie_word_embeddings") is True

    def settle_head(self) -> None:
        """Leave the head out if it is tied to the embedding, and let the configuration agree with the tensors."""
        told = setting(self.config, "tie_word_embeddings")
        head, embedding = _first(_HEAD, self.leaves), self.embedding
        has_head = _first(_HEAD, self.expected) if self.expected else head
        is_tied = told if isinstance(told, bool) else not has_head
        if is_tied and head and embedding:
            if difference := _difference(self.leaves[head], self.leaves[embedding]):
                self.problems.append(
                    f"{head} is not {embedding} ({difference}), and the configuration says that they are tied; set "
                    "tie_word_embeddings to false in config="
                )
            del self.leaves[head]
            self.notes.append(f"{head} is tied to {embedding} and not written")
        if not is_tied and not head and not self.expected and embedding and self._has_head():
            is_tied = True
            self.notes.append(f"tie_word_embeddings is true now: the tree has no {_HEAD_NAME}")
        if told is not None or (self._has_head() and not self.expected):
            self.config = with_setting(self.config, "tie_word_embeddings", is_tied)

    def _has_head(self) -> bool:
        """Tell whether the configuration is of a model that predicts tokens."""
        named = self.config.get("architectures")
        return any("LM" in str(one) or "Conditional" in str(one) for one in named or ())

    # ------------------------------------------------------------------------------------ comparison

    def compare_with_like(self) -> None:
        """Compare names and shapes with the header of `like`."""
        if not self.expected:
            if self.wish.like:
                self.notes.append("names and shapes are not compared: like has no weights")
            return
        self._compare_names()
        for name in (name for name in self.leaves if name in self.expected):
            found, wanted = self.leaves[name].shape, self.expected[name].shape
            if found != wanted and not self._is_new_vocabulary(name):
                self.problems.append(
                    f"leaf {name!r} has the shape {list(found)}, and like has {list(wanted)}"
                )
            kinds = is_floating(self.leaves[name].dtype), is_floating(self.expected[name].dtype)
            if kinds[0] != kinds[1]:
                dtypes = self.leaves[name].dtype, self.expected[name].dtype
                self.problems.append(f"leaf {name!r} has the dtype {dtypes[0]}, and like has {dtypes[1]}")

    def _compare_names(self) -> None:
        extra = [name for name in self.leaves if name not in self.expected and not _HEAD.fullmatch(name)]
        for name in extra:
            near = nearest(name, self.expected) if len(extra) <= _FEW else None
            hint = f" (nearest is {near!r})" if near else ""
            self.problems.append(f"leaf {name!r} is not in like{hint}")
        if extra:
            self.advice.append("root=, keys= and rename= choose and name the leaves of the tree")
        lacking = [n for n in self.expected if n not in self.leaves and not self._is_tied_head(n)]
        if lacking and self.wish.allow_missing:
            self.notes.append(f"in like, and not in this tree: {few(lacking)}")
        elif lacking:
            self.problems += [f"{text} in like and not in this tree" for text in _grouped(lacking)]
            self.advice.append(
                "fill_from_like=True takes leaves from like, allow_missing=True goes on without them"
            )

    def _is_new_vocabulary(self, name: str) -> bool:
        """Tell whether a tensor has another number of rows because the caller asks for another vocabulary."""
        rows, wanted = self.leaves[name].shape[:1], self.expected[name].shape
        is_of_tokens = _EMBEDDING.fullmatch(name) or _HEAD.fullmatch(name)
        asked = setting(self.wish.config or {}, "vocab_size")
        return bool(is_of_tokens) and rows == (asked,) and self.leaves[name].shape[1:] == wanted[1:]

    # ---------------------------------------------------------------------------------------- dtypes

    def settle_dtypes(self) -> None:
        """Give each floating tensor its dtype: of the caller, else of `like`, else of the configuration."""
        asked = None if self.wish.dtype is None else floating_dtype(self.wish.dtype)
        default = dtype_in(self.config)
        for name, source in self.leaves.items():
            if is_floating(source.dtype):
                like = self.expected.get(name)
                of_like = like.dtype if like and is_floating(like.dtype) else None
                dtype = asked or of_like or default or source.dtype
                self.leaves[name] = msgspec.structs.replace(source, dtype=dtype, sharding=None)

    @property
    def dtype(self) -> str | None:
        """The dtype of most bytes of floating tensors."""
        nbytes = Counter[str]()
        for source in self.leaves.values():
            if is_floating(source.dtype):
                nbytes[source.dtype] += source.itemsize * math.prod(source.shape)
        return nbytes.most_common(1)[0][0] if nbytes else None

    # ------------------------------------------------------------------------------------ vocabulary

    def settle_vocabulary(self) -> None:
        """Let vocab_size agree with the embedding, and check that every token has a row in it."""
        name, like = self.embedding, self.wish.like
        if name is None:
            return
        rows, told = self.leaves[name].shape[0], setting(self.config, "vocab_size")
        if told != rows and (told is not None or not self.expected):
            self.config = with_setting(self.config, "vocab_size", rows)
            if told is not None:
                self.notes.append(f"vocab_size is {rows} now, as {name} has it, and was {told}")
        if like is None:
            return
        most = largest_token(read_whole(like.store, TOKENIZER)[0]) if TOKENIZER in like.names else None
        if most is not None and most >= rows:
            self.problems.append(
                f"{name} has {rows:,} rows, and {TOKENIZER} has tokens up to {most:,}; expected at least {most + 1:,} "
                "rows"
            )
        self.problems += [
            f"{key} in {GENERATION} is {token:,}, expected less than the {rows:,} rows of {name}"
            for key, token in special_tokens(like.read(GENERATION)).items()
            if token >= rows
        ]

    # ----------------------------------------------------------------------------------------- files

    def check_files(self) -> None:
        if self.wish.like:
            self.problems += [
                f"{name} is missing in {self.wish.like.url}, and auto_map in its configuration names it; fetch it"
                for name in self.wish.like.missing_code()
            ]

    def files(self) -> ModelFiles:
        """Return the files beside the weights."""
        like = self.wish.like
        written = {CONFIG: _json(for_export(self.config, self.dtype))}
        if self.wish.card:
            written[CARD] = self.card().encode()
        return ModelFiles(written, like.copied() if like else (), like.store if like else None)

    def card(self) -> str:
        like = self.wish.like
        base = hub_id(like.url) if like else ""
        sources = self.leaves.values()
        return model_card(
            CardFacts(
                base=base,
                front=front_matter(like.text(CARD)) if like else {},
                parameters=sum(math.prod(source.shape) for source in sources),
                nbytes=sum(source.itemsize * math.prod(source.shape) for source in sources),
                dtype=self.dtype or "integers",
                steps=card_lines(self.tree.view.tree.origin or {}, self.tree.view.parents, base),
            )
        )

    # ---------------------------------------------------------------------------------------- result

    def reduce(self) -> None:
        """Reduce the tree to the tensors of the model, as nested dicts by their names."""
        tree = self.tree
        structure, final = nested_dicts({name: parts_of_name(name) for name in self.leaves})
        old = {readable(source.name): source.name for source in tree.sources}
        tree.transforms = {
            final[name]: tree.transforms[old[name]]
            for name in self.leaves
            if old.get(name) in tree.transforms
        }
        tree.sources = [msgspec.structs.replace(one, name=final[name]) for name, one in self.leaves.items()]
        tree.structure, tree.raw_values = structure, {}
        # A model is published: metrics, positions in data and paths of this machine are not for everybody.
        tree.keeps_metadata = False
        tree.origin = new_origin("merge" if tree.view.tool == "merge" else "export", self._parents())
        tree.notes += self.notes

    def _parents(self) -> list[dict[str, Any]]:
        """Describe the checkpoints that are exported, without paths that only this machine can read."""
        return [parent for parent in map(published_parent, self.tree.view.parents) if parent]


_HEAD_NAME = "lm_head.weight"
_FEW = 20  # names to search for a similar name


def _first(pattern: re.Pattern[str], names: Iterable[str]) -> str | None:
    """Return the shortest of the names that a pattern matches."""
    return min((name for name in names if pattern.fullmatch(name)), key=len, default=None)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return the key that sorts layers.2 before layers.10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def _grouped(names: Sequence[str]) -> Iterator[str]:
    """Yield a text for each name, or for all names of a layer together."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        match = _LAYER.fullmatch(name)
        groups[match[1] if match else name].append(name)
    for group, inside in groups.items():
        yield f"leaf {inside[0]!r} is" if len(inside) == 1 else f"{len(inside)} leaves of {group} are"


def _difference(head: Source, embedding: Source) -> str:
    """Describe how two tensors differ; "" if they are equal. They are read in bounded memory."""
    if head.shape != embedding.shape:
        return f"{list(head.shape)} and {list(embedding.shape)}"
    most = largest_difference(_array(head), _array(embedding))
    return f"max difference {most:.3g}" if most else ""


def _array(source: Source) -> LazyArray:
    ((_, array),) = source.parts
    assert isinstance(array, LazyArray)
    return array


def _json(value: Any) -> bytes:
    """Return JSON as transformers writes it: sorted, indented by two, with a line break at the end."""
    try:
        return f"{json.dumps(value, indent=_INDENT, sort_keys=True)}\n".encode()
    except TypeError as error:
        raise ValueError(f"config= has values that are not JSON: {error}; pass plain values") from error
