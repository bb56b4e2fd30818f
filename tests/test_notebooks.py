"""The notebooks of the documentation, executed in a real kernel."""

from pathlib import Path

import nbformat
import pytest

from support.notebooks import executed, kinds

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


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
