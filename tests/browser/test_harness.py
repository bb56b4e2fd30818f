"""Pages that are watched: an error and a foreign address do not go unseen."""

import pytest

from support import browser as support

pytestmark = pytest.mark.xdist_group("browser")


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("<script>throw Error('the sky falls')</script>", "the sky falls"),
        ("<script>console.error('the sky falls')</script>", "the sky falls"),
        ("<img src='https://example.org/pixel.png'>", "asked for https://example.org/pixel.png"),
        ("<script>fetch('http://8.8.8.8/').catch(() => 0)</script>", "asked for http://8.8.8.8/"),
    ],
)
def test_what_a_page_must_not_do_is_seen(chromium, tmp_path, page, problem):
    (tmp_path / "page.html").write_text(f"<!doctype html>{page}")
    chromium.get((tmp_path / "page.html").as_uri())
    chromium.get("about:blank")
    assert problem in "\n".join(support.problems(chromium))


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({}, pytest.skip.Exception),
        ({"CI": "true"}, pytest.fail.Exception),
        ({"EFORMER_BROWSER": "required"}, pytest.fail.Exception),
        ({"CI": "true", "EFORMER_BROWSER": "none"}, pytest.skip.Exception),
    ],
)
def test_without_a_browser_the_tests_are_skipped_unless_one_is_required(
    tmp_path, monkeypatch, variables, outcome
):
    for name in ("CI", "EFORMER_BROWSER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PATH": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(outcome, match=r"no Chromium and no chromedriver .*: apt-get install chromium"):
        support.start(tmp_path)
