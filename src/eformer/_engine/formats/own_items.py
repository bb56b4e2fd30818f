"""Read the items of a step that are checkpoints by eformer.

    step/_CHECKPOINT_METADATA    written last: a directory without it is no step
    step/state/manifest.json     an item by eformer: its trees have the prefix "state"
    step/config/metadata         an item that is JSON
    step/data/process_0.json     an item that a handler of the caller wrote

Tests: tests/engine/formats/test_own_items.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from eformer._engine.formats.found import Trees
from eformer._engine.formats.process_records import joined_trees
from eformer._engine.formats.safetensors.hf_index import damaged_indexes
from eformer._engine.record.digests import has_own_digest, xxh3_128
from eformer._engine.record.indexes import MANIFEST, SAFETENSORS
from eformer._engine.record.manifest import Manifest, TreeEntry
from eformer._engine.stores.base import read_whole
from eformer.errors import CorruptionError, EformerError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from eformer._engine.stores.base import Store
    from eformer.errors import Damage

OURS = "eformer."  # begins the names of handlers whose items are checkpoints by eformer

ItemManifests = dict[str, "Manifest | EformerError"]
"""By item, its manifest, or the error of a manifest that is missing or damaged."""


def own_items(store: Store, names: Iterable[str], handlers: Mapping[str, Any]) -> ItemManifests:
    """Read the manifests of the items that eformer wrote. `handlers` has the class name of the handler of each item."""
    found: ItemManifests = {}
    for name in sorted({*names, *(name for name in handlers if _is_ours(handlers[name]))}):
        try:
            if (manifest := _manifest_in(store, name)) is not None:
                found[name] = manifest
            elif _is_ours(handlers.get(name)):
                found[name] = _lost(store, name)
        except EformerError as error:
            found[name] = error
    return found


def _is_ours(handler: Any) -> bool:
    """Tell whether a handler writes trees as checkpoints by eformer, and not JSON."""
    return str(handler).startswith(OURS) and "Json" not in str(handler)


def _manifest_in(store: Store, item: str) -> Manifest | None:
    try:
        data, _ = read_whole(store, f"{item}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FormatError:  # a link or a directory
        return None
    return Manifest.from_json(data, store.path_to(f"{item}/{MANIFEST}")) if has_own_digest(data) else None


def _lost(store: Store, item: str) -> CorruptionError:
    where = store.path_to(f"{item}/{MANIFEST}")
    return CorruptionError(
        f"{where} is missing, expected the manifest of an item of this step; restore it from a copy"
    )


def joined_manifest(items: ItemManifests, metadata: Mapping[str, Any]) -> Manifest:
    """Make one manifest of the readable items, whose trees have the items as prefixes and roots. `metadata` is the JSON
    of the step, which each tree gets beside its own metadata."""
    manifests = {name: one for name, one in items.items() if isinstance(one, Manifest)}
    trees = {
        f"{item}/{prefix}" if prefix else item: _below(item, tree, metadata)
        for item, manifest in manifests.items()
        for prefix, tree in manifest.trees.items()
    }
    digest = xxh3_128("".join(f"{name}:{one.digest};" for name, one in manifests.items()).encode())
    return Manifest(format=SAFETENSORS, trees=trees, digest=digest)


def _below(item: str, tree: TreeEntry, metadata: Mapping[str, Any]) -> TreeEntry:
    root = f"{item}/{tree.root}" if tree.root else item
    return msgspec.structs.replace(tree, raw_root=root, raw_metadata={**metadata, **tree.raw_metadata})


def joined_items(store: Store, items: ItemManifests, manifest: Manifest, others: Trees) -> Trees:
    """Return the trees of all items. A tree whose manifest is damaged raises its error on first use."""
    whole = joined_trees(store, manifest.trees)
    mine = {prefix: partial(whole.__getitem__, prefix) for prefix in manifest.trees}
    broken = {name: partial(_raise, one) for name, one in items.items() if isinstance(one, EformerError)}
    listed = (
        {prefix: partial(whole.listed, prefix) for prefix in manifest.trees}
        if isinstance(whole, Trees)
        else {}
    )
    rest = {prefix: partial(others.__getitem__, prefix) for prefix in (*others, *others.also)}
    also = {prefix: rest.pop(prefix) for prefix in others.also}
    return Trees({}, {**mine, **broken, **rest}, also, listed)


def _raise(error: EformerError) -> NoReturn:
    raise error


def damages_beside(store: Store, items: ItemManifests) -> list[Damage]:
    """Check the files of items that hold no leaves, such as Hugging Face indexes."""
    return list(_damages_beside(store, items))


def _damages_beside(store: Store, items: ItemManifests) -> Iterator[Damage]:
    for name, manifest in items.items():
        if isinstance(manifest, Manifest):
            for damage in damaged_indexes(store.at(name), manifest):
                yield replace(damage, file=f"{name}/{damage.file}")
