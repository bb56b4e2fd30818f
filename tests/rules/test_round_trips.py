"""Every tiny model goes to every layout of its family, and comes back with its names, dtypes and bits."""

from dataclasses import replace

import numpy as np
import pytest
from support.tiny_models import CASES, MODELS, NAMES, config_of, layouts_of, leaves_of

from eformer import checkpoint
from eformer._engine.record.boxes import Box
from eformer._engine.record.dtypes import name_of_dtype
from eformer._engine.record.lazy_arrays import StoredLeaf
from eformer._engine.record.rename import parse_rules
from eformer._engine.record.rule_books import books, find_book


def arrays_of(view):
    return {name: StoredLeaf(view, name, entry) for name, entry in view.tree.leaves.items()}


def read(array):
    return array.read(Box.whole(array.shape))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_model_comes_back_bit_for_bit(name, layout):
    config, original = config_of(name), leaves_of(name)
    book = find_book(layout, config["model_type"])
    forth = parse_rules(book.text, book.name)
    with checkpoint.open(MODELS / name) as view:
        there = forth.apply(arrays_of(view), (), config)
        shapes = {leaf: array.shape for leaf, array in original.items()}
        dtypes = {leaf: name_of_dtype(array.dtype) for leaf, array in original.items()}
        back = replace(forth, back=True).apply(there.arrays, (), config, shapes, dtypes)
        found = {leaf: read(array) for leaf, array in back.arrays.items()}
    assert there.kept == [], f"{layout} has no rule for some leaves"
    assert found.keys() == original.keys()
    for leaf, array in original.items():
        assert found[leaf].dtype == array.dtype, leaf
        assert found[leaf].tobytes() == array.tobytes(), leaf


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_values_move_and_none_is_lost(name, layout):
    """The elements of all new leaves are those of the model, where no step changes them."""
    config, original = config_of(name), leaves_of(name)
    book = find_book(layout, config["model_type"])
    if " | " in book.text:
        pytest.skip("its values change")
    with checkpoint.open(MODELS / name) as view:
        there = parse_rules(book.text, book.name).apply(arrays_of(view), (), config)
        found = [read(array).ravel().astype(np.float32) for array in there.arrays.values()]
    elements = [array.ravel().astype(np.float32) for array in original.values()]
    assert np.array_equal(np.sort(np.concatenate(found)), np.sort(np.concatenate(elements)))


def test_every_family_has_a_tiny_model():
    kinds = {config_of(name)["model_type"] for name in NAMES}
    without = [family.name for family in books() if family.model_types and not kinds & {*family.model_types}]
    assert without == []


def test_scanned_layouts_have_fewer_leaves():
    config = config_of("llama")
    number = {}
    for layout in layouts_of("llama"):
        book = find_book(layout, config["model_type"])
        number[layout] = len(checkpoint.rules(book.name).check(MODELS / "llama").leaves)
    assert number["maxtext"] < number["maxtext-unscanned"]
    assert number["flax-scan"] < number["flax"]


def test_all_models_are_small():
    assert sum(file.stat().st_size for file in MODELS.rglob("*") if file.is_file()) < 900_000
