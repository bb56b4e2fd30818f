"""Execute notebooks in a real kernel. As a program: execute them again and keep their outputs.

python tests/support/notebooks.py docs/notebooks/tour.ipynb
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def executed(path: Path) -> nbformat.NotebookNode:
    """Execute a notebook from its first cell; an error in a cell is raised."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False).execute()


def kinds(cell: nbformat.NotebookNode) -> list[tuple[str, ...]]:
    """Return what a cell shows, without the content: streams, and the MIME types of results."""
    return [(each.output_type, *sorted(each.get("data", {"": each.get("name")}))) for each in cell.outputs]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = executed(Path(name))
        found.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        nbformat.write(found, name)
