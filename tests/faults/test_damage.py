"""Bytes that change at rest: `load` gives what was saved or refuses, and `verify` notices in either case."""

import itertools
import random

import pytest

from eformer.checkpoint import save, verify
from support.faults import NOTHING, OLD, STRIDE, Layout, damaged, flip, noted, tree, zero

pytestmark = pytest.mark.sample(3)

REFUSALS = (ValueError, FileNotFoundError)
FLIPS = 250 if STRIDE == 1 else 30


@pytest.fixture
def layout(any_layout):
    return any_layout


@pytest.fixture
def folder(layout, place):
    folder = layout.begin(place / "folder")
    layout.save(folder, OLD)
    return folder


def check(layout, folder, file, damage):
    if damage(sound := file.read_bytes()) == sound:
        return
    with damaged(file, damage):
        check_load(layout, folder)
        is_for_others = file.name.endswith(".index.json")
        if not is_for_others and not layout.ocdbt:  # in a database not every byte means something
            check_verify(layout, folder)


def check_load(layout, folder):
    try:
        generation = layout.generation(folder)
    except REFUSALS:
        return
    assert generation in (OLD, NOTHING)


def check_verify(layout, folder):
    try:
        report = verify(layout.path(folder))
    except REFUSALS:
        return
    assert not report.ok, "verify found nothing wrong"


def test_a_flipped_bit_never_gives_another_tree(layout, folder):
    rng, files = random.Random(0), layout.files(folder)
    for file in files:
        for bit in rng.sample(range(8 * file.stat().st_size), 1 + FLIPS // len(files)):
            with noted(f"bit {bit} of {file.name}"):
                check(layout, folder, file, lambda data, bit=bit: flip(data, bit))


def test_a_flipped_bit_at_the_beginning_of_a_file_never_gives_another_tree(layout, folder):
    for file in layout.files(folder)[:2]:
        for bit in range(
            0, 8 * min(40, file.stat().st_size), 1 if STRIDE == 1 else 7
        ):  # 7: every bit of a byte has its turn
            with noted(f"bit {bit} of {file.name}"):
                check(layout, folder, file, lambda data, bit=bit: flip(data, bit))


def test_a_flipped_bit_in_a_data_file_that_is_loaded_by_its_own_path_never_gives_another_tree(place):
    layout, file = Layout("by its file", name="run/model.safetensors"), place / "run" / "model.safetensors"
    save(tree(OLD), place / "run")
    for bit in range(0, 8 * 72, 1 if STRIDE == 1 else 5):
        with noted(f"bit {bit}"), damaged(file, lambda data, bit=bit: flip(data, bit)):
            check_load(layout, place)


def test_a_file_cut_short_never_gives_another_tree(layout, folder):
    for file in layout.files(folder):
        size = file.stat().st_size
        lengths = (0, 8, size // 2, size - 1, 1, 7, 9, 64, size - 65)
        for length in lengths if STRIDE == 1 else lengths[:4]:
            with noted(f"{file.name} cut to {length} bytes"):
                check(layout, folder, file, lambda data, length=length: data[:length])


def test_a_zeroed_page_never_gives_another_tree(layout, folder):
    for file in layout.files(folder):
        for start in range(0, file.stat().st_size, 4096):
            with noted(f"the page at {start} of {file.name}"):
                check(layout, folder, file, lambda data, start=start: zero(data, start, 4096))


@pytest.mark.sample(9)
@pytest.mark.parametrize("extra", [bytes(64), b" " * 64, b"\xff" * 64], ids=["zeros", "spaces", "ones"])
def test_appended_bytes_never_give_another_tree(layout, folder, extra):
    for file in layout.files(folder):
        with noted(file.name):
            check(layout, folder, file, lambda data: data + extra)


def test_a_missing_file_never_gives_another_tree(layout, folder):
    for file in layout.files(folder):
        with noted(file.name):
            check(layout, folder, file, lambda data: None)


@pytest.mark.sample(9)
def test_swapped_files_never_give_another_tree(layout, folder):
    pairs = list(itertools.combinations(layout.files(folder), 2))
    for one, other in pairs[:: 1 if STRIDE == 1 else 4]:
        first, second = one.read_bytes(), other.read_bytes()
        if first == second:
            continue
        with (
            noted(f"{one.name} and {other.name}"),
            damaged(one, lambda data, second=second: second),
            damaged(other, lambda data, first=first: first),
        ):
            check_load(layout, folder)
            if not layout.ocdbt:  # whose files are not all in use
                check_verify(layout, folder)
