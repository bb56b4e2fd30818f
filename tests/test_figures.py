"""The figures on the pages are those of the committed results: `python bench/page.py` puts the tables there."""

import re
import sys

import pytest

from support.pages import ROOT


@pytest.fixture(scope="module")
def page():
    before, bench = set(sys.modules), str(ROOT / "bench")
    sys.path.insert(0, bench)
    try:
        import page
    finally:
        sys.path.remove(bench)
    yield page
    for name in set(sys.modules) - before:  # others have modules of the same names
        if str(getattr(sys.modules[name], "__file__", None)).startswith(bench):
            del sys.modules[name]


def test_the_tables_of_the_speed_page_are_those_of_the_results(page):
    text = page.PAGE.read_text("utf-8")
    assert set(re.findall(r"<!-- bench: (\w+) -->", text)) == set(page.blocks())
    assert text == page.filled(text), "run: python bench/page.py"


def test_a_figure_that_was_changed_by_hand_is_noticed(page):
    text = page.PAGE.read_text("utf-8")
    changed = text.replace(" of the limit |", "9 of the limit |", 1)
    assert changed != page.filled(changed)


def test_the_committed_tables_are_those_of_the_committed_numbers(page):
    assert page.bars(page.full()) in (page.RESULTS / "full.md").read_text("utf-8")


@pytest.mark.parametrize(
    "name", ["README.md", "docs/index.md", "docs/guides/training-run.md", "docs/guides/buckets.md"]
)
def test_sentences_that_repeat_a_result_are_right(page, name):
    text = " ".join((ROOT / name).read_text("utf-8").split())
    for sentence in page.sentences()[name]:
        assert sentence in text, f"{name} should say: {sentence}"
