"""The figures on the pages are those of the committed results: `python bench/charts.py` draws them."""

import importlib
import re
import sys

import pytest

from support.pages import ROOT


@pytest.fixture(scope="module")
def bench():
    """The modules of bench/, which are no package; other directories have modules of the same names."""
    before, place = set(sys.modules), str(ROOT / "bench")
    sys.path.insert(0, place)
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(place)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(place):
            del sys.modules[name]


@pytest.fixture(scope="module")
def page(bench):
    return bench("page")


def test_the_charts_are_those_of_the_results(bench):
    charts = bench("charts")
    drawn = charts.charts()
    assert {path.name for path in charts.CHARTS.iterdir()} == set(drawn)
    for name, text in drawn.items():
        assert (charts.CHARTS / name).read_text("utf-8") == text, "run: python bench/charts.py"


def test_the_pages_show_every_chart(bench):
    text = "".join((ROOT / "docs" / name).read_text("utf-8") for name in ("speed.md", "reliability.md"))
    assert set(re.findall(r"\(charts/([^)]+)\)", text)) == set(bench("charts").charts())


def test_the_committed_tables_are_those_of_the_committed_numbers(page):
    assert page.bars(page.full()) in (page.RESULTS / "full.md").read_text("utf-8")


@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/index.md", "docs/speed.md", "docs/guides/training-run.md", "docs/guides/buckets.md"],
)
def test_sentences_that_repeat_a_result_are_right(page, name):
    text = " ".join((ROOT / name).read_text("utf-8").split())
    for sentence in page.sentences()[name]:
        assert sentence in text, f"{name} should say: {sentence}"
