"""The documents hang together: links, anchors, navigation, and messages that the program really has."""

import re
from pathlib import Path

import pytest

from support.pages import ROOT, anchors, in_navigation, links, pages

START = "docs/index.md"
README = (ROOT / "README.md").read_text("utf-8")
NOT_ON_THE_SITE = {"README.md"}


@pytest.mark.parametrize("page", [*pages(), "docs/_site/navigation.md"])
def test_every_link_leads_somewhere(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        if ":" in target:  # of another site: nothing is fetched
            continue
        place = (ROOT / page).parent / target if target else ROOT / page
        assert place.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(str(place.resolve().relative_to(ROOT))), f"{page}: {link}"


def test_every_page_is_in_the_navigation_once():
    shown = in_navigation()
    notebooks = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/notebooks/*.ipynb")}
    assert {page for page in pages() if page not in NOT_ON_THE_SITE | {START}} | notebooks == shown
    text = (ROOT / "docs/_site/navigation.md").read_text("utf-8")
    entries = re.findall(r"^(?![`:]).+$", text, re.MULTILINE)
    assert len(entries) == len(set(entries)) == len(shown)


def test_every_page_begins_with_one_title():
    for page in pages():
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        assert text.startswith("# "), page
        assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1, page


def test_the_messages_in_the_troubleshooting_page_are_messages_of_the_program():
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # text over several lines
    page = (ROOT / "docs/troubleshooting.md").read_text("utf-8").split("## Questions")[0]
    messages = [title for title in re.findall(r"^### (.*)$", page, re.MULTILINE) if is_message(title)]
    for part in (part.strip() for message in messages for part in message.split("…")):
        assert part in source, part
    assert len(messages) >= 15


def is_message(title):
    """Tell a message of the program from a heading in the words of the page, which begins with a capital letter."""
    return not title[0].isupper() and not title.startswith("save_async")


def test_every_module_says_in_its_first_line_what_it_is_for():
    for module in (ROOT / "src").rglob("*.py"):
        assert Path(module).read_text("utf-8").startswith('"""'), module


def test_every_promise_of_the_readme_names_a_test_that_make_test_runs():
    promises = re.findall(r"^- .*$", README.split("## What you can rely on")[1], re.MULTILINE)
    assert len(promises) >= 6
    for promise in promises:
        named = re.findall(r"`(tests/[^`]+)`", promise)
        assert named, promise
        for name in named:
            assert (ROOT / name).is_file(), name
            assert not name.startswith(tuple(left_to_the_site())), name
            assert is_in_the_quick_set((ROOT / name).read_text("utf-8")), name


def is_in_the_quick_set(text):
    """Tell whether `make test` runs a test of a file: marks may leave some of them to `make faults`, but not all."""
    tests = re.findall(r"^def test_|^class Test", text, re.MULTILINE)
    has_left = re.search(r"^pytestmark.*\bthorough\b", text, re.MULTILINE)
    return not has_left and len(tests) > len(re.findall(r"^@pytest\.mark\.thorough\b", text, re.MULTILINE))


def left_to_the_site():
    """Return the tests that `make test` leaves to `make test-site`."""
    (line,) = re.findall(r"^SITE := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert all((ROOT / name).exists() for name in line.split())
    return line.split()
