"""Every tiny model goes to every layout of its family, and comes back with its names, dtypes and bits."""

import json
from dataclasses import replace

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.record.dtypes import name_of_dtype
from eformer._engine.record.rename import rules_from
from eformer._engine.record.rule_books import books, find_book
from rules.results import RESULTS, digest
from support.tiny_models import (
    CASES,
    MODELS,
    NAMES,
    arrays_of,
    config_of,
    laid_out,
    layouts_of,
    leaves_of,
    read,
)

# Tunix has no vision tower for this model.
LEFT_OUT = {("gemma4", "tunix"): ("model.vision_tower.", "model.embed_vision.")}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_model_comes_back_bit_for_bit(name, layout):
    config, original = config_of(name), leaves_of(name)
    forth = rules_from(layout)  # a book, in which every leaf must match a rule
    with checkpoint.open(MODELS / name) as view:
        there = forth.apply(arrays_of(view), (), config)
        shapes = {leaf: array.shape for leaf, array in original.items()}
        dtypes = {leaf: name_of_dtype(array.dtype) for leaf, array in original.items()}
        back = replace(forth, back=True).apply(there.arrays, (), config, shapes, dtypes)
        found = {leaf: read(array) for leaf, array in back.arrays.items()}
    assert all(leaf.startswith(LEFT_OUT.get((name, layout), ())) for leaf in there.left_out)
    assert found.keys() == original.keys() - {*there.left_out}
    for leaf, array in found.items():
        assert array.dtype == original[leaf].dtype, leaf
        assert array.tobytes() == original[leaf].tobytes(), leaf


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_values_move_and_none_is_lost(name, layout):
    """The elements of all new leaves are those of the model, where no step changes them."""
    if " | " in find_book(layout, config_of(name)["model_type"]).text or (name, layout) in LEFT_OUT:
        pytest.skip("its values change, or some are left out")
    found = [array.ravel().astype(np.float32) for array in laid_out(name, layout).values()]
    elements = [array.ravel().astype(np.float32) for array in leaves_of(name).values()]
    assert np.array_equal(np.sort(np.concatenate(found)), np.sort(np.concatenate(elements)))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_way_back_needs_no_model_but_its_configuration(name, layout):
    """Without the shapes of the model, config.json has all numbers. Dtypes are those of the configuration."""
    config, original = config_of(name), leaves_of(name)
    forth = rules_from(layout)
    with checkpoint.open(MODELS / name) as view:
        there = forth.apply(arrays_of(view), (), config)
        back = replace(forth, back=True).apply(there.arrays, (), config)
    shapes = {leaf: array.shape for leaf, array in back.arrays.items()}
    assert shapes == {leaf: a.shape for leaf, a in original.items() if leaf not in there.left_out}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_result_is_the_one_that_was_compared_with_other_programs(name, layout):
    """`make frameworks` compares the results with MaxText and Tunix; `python tests/rules/results.py` records them."""
    assert digest(name, layout) == json.loads(RESULTS.read_text())[f"{name}/{layout}"]


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
    assert sum(file.stat().st_size for file in MODELS.rglob("*") if file.is_file()) < 800_000
