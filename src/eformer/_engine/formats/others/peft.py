"""Find PEFT's adapters: `adapter_model.safetensors`, with `adapter_config.json` as metadata of the tree."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.formats.found import Found, Place, foreign_found
from eformer._engine.formats.left_out import left_out
from eformer._engine.formats.safetensors.names import SUFFIX
from eformer._engine.formats.safetensors.read import find_file
from eformer._engine.record.indexes import MANIFEST, PEFT_CONFIG
from eformer._engine.record.values import parse_json, value_to_json
from eformer._engine.stores.base import Store, Version, read_whole

if TYPE_CHECKING:
    from eformer._engine.record.manifest import TreeEntry

FORMAT = "PEFT adapter"

WEIGHTS = "adapter_model.safetensors"
CONFIG = PEFT_CONFIG
CONFIG_KEY = "adapter_config"  # in the metadata of a tree


def by_config(place: Place) -> Found | None:
    """Find the adapter of a directory that holds only an adapter. Beside other safetensors files the adapter is one of
    several prefixes, and left to the reader of these."""
    weights = [name for name in place.names if name.endswith(SUFFIX)]
    if CONFIG not in place.names or MANIFEST in place.names or weights != [WEIGHTS]:
        return None
    store = place.store
    config, version = _read_config(store)
    found = find_file(store, WEIGHTS)
    trees = {prefix: with_config(tree, config) for prefix, tree in found.trees.items()}
    foreign = replace(found.foreign, find_left_out=partial(left_out, store, {WEIGHTS}))
    return foreign_found(store.url, store, FORMAT, trees, {**found.versions, CONFIG: version}, foreign)


def _read_config(store: Store) -> tuple[dict[str, Any], Version]:
    data, entry = read_whole(store, CONFIG)
    problem = (
        f"{store.path_to(CONFIG)} is not the configuration of an adapter; to load without one, pass the path of "
        f"{WEIGHTS}"
    )
    return parse_json(data, dict[str, Any], problem), entry.version


def with_config(tree: TreeEntry, config: dict[str, Any]) -> TreeEntry:
    """Return the tree with the configuration of its adapter as metadata."""
    metadata = {**tree.raw_metadata, CONFIG_KEY: value_to_json(config)}
    return msgspec.structs.replace(tree, raw_metadata=metadata)
