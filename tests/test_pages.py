"""Pages are written to be read: lines that fit a screen and a diff, and names of modules that exist."""

import pytest

from support.pages import ROOT, blocks, long_lines, modules, pages

MOST = 200  # characters in a line
MOST_CODE = 80  # in a line of code: the column of the site is no wider

OF_OTHER_PACKAGES = {"eformer/jaximus/__init__.py"}
PLACES = ["", "src/eformer/_engine", "src/eformer"]


@pytest.mark.parametrize("page", pages())
def test_no_line_of_a_page_is_too_long(page):
    assert long_lines(page, MOST) == [], (
        f"{page}: wrap prose at about 110 characters, shorten cells of tables"
    )


@pytest.mark.parametrize("page", pages())
def test_no_line_of_code_is_cut_on_the_site(page):
    code = [block for block in blocks(page) if not block.language.startswith("{")]
    long = [line for block in code for line in block.text.splitlines() if len(line) > MOST_CODE]
    assert long == [], f"{page}: wrap code at {MOST_CODE} characters, put comments above the line"


@pytest.mark.parametrize("page", pages())
def test_every_module_that_a_page_names_exists(page):
    named = set(modules(page)) - OF_OTHER_PACKAGES
    gone = [name for name in named if not any(any((ROOT / place).glob(name)) for place in PLACES)]
    assert gone == [], f"{page} names modules that do not exist"


def test_a_long_line_in_code_or_in_generated_tables_is_allowed(tmp_path):
    long = "word " * 60
    page = tmp_path / "page.md"
    page.write_text(
        f"{long}\n\n```\n{long}\n```\n\n    {long}\n\n<!-- bench: x -->\n{long}\n<!-- end of x -->\n\n{long}"
    )
    assert [number for number, _ in long_lines(str(page), MOST)] == [1, 13]


def test_modules_are_found_in_commands_and_patterns(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "`python bench/page.py --all` and `tests/x/test_*.py`, not `name.py` or `https://a.org/b.py`"
    )
    assert modules(str(page)) == ["bench/page.py", "tests/x/test_*.py"]
