"""The notebooks of the documentation, executed in a real kernel."""

import nbformat
import pytest
from markdown_it import MarkdownIt

from support.notebooks import executed, kinds
from support.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs_and_shows_what_is_committed(path, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where the notebook writes
    committed, found = nbformat.read(path, as_version=4), executed(path)
    assert [kinds(cell) for cell in found.cells if cell.cell_type == "code"] == [
        kinds(cell) for cell in committed.cells if cell.cell_type == "code"
    ]


def test_the_tour_shows_the_tree_the_bars_and_the_differences():
    tour = next(path for path in NOTEBOOKS if path.stem == "tour").read_text("utf-8")
    for shown in (
        "eformer-tree",
        "<progress",
        "3 changed",
        "every digest matches",
        "Resumed: 100 steps done",
    ):
        assert shown in tour
    assert len(tour) < 250_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_the_page_of_a_notebook_has_every_cell_and_what_it_showed(path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_site")
    from notebooks import as_markdown

    page = as_markdown(path.read_text("utf-8"), path.name)
    fences = [token for token in MarkdownIt().parse(page) if token.type == "fence"]
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [one.content.strip() for one in fences if one.info == "python"] == [cell.source for cell in code]
    assert len(fences) == len(code) + sum(len(cell.outputs) for cell in code)
    assert f"<{path.name}>" in page
