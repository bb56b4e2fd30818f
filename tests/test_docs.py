"""The documents say what the program does."""

import doctest
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_examples_in_the_documents_are_what_happens():
    for page in ROOT.glob("docs/**/*.md"):
        failed, _ = doctest.testfile(str(page), module_relative=False)
        assert failed == 0, page


def test_every_link_leads_somewhere():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_module_says_in_its_first_line_what_it_is_for():
    for module in (ROOT / "src").rglob("*.py"):
        assert module.read_text("utf-8").startswith('"""'), module
