"""The page of the rule book has the table that the tests give, and the versions of the programs that they ran with."""

import re

from eformer._engine.record.rule_books import books
from rules.table import table
from support.pages import ROOT

PAGE = (ROOT / "docs" / "guides" / "rule-book.md").read_text("utf-8")
REQUIREMENTS = ROOT / "tests" / "frameworks"


def test_the_table_is_that_of_the_tests():
    assert table() in PAGE, "run: python tests/rules/table.py"


def test_books_were_tested_with_the_versions_that_the_tests_install():
    texts = [(REQUIREMENTS / name).read_text("utf-8") for name in ("requirements.txt", "no-deps.txt")]
    installed = dict(re.findall(r"^([\w-]+)==(\S+)$", "\n".join(texts), re.MULTILINE))
    for family in books():
        for program, version in (tested.split() for tested in family.tested_with):
            assert installed[program] == version, family.name


def test_every_layout_of_a_book_is_on_the_page():
    layouts = {layout for family in books() for layout in family.layouts}
    assert layouts == set(re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE))
