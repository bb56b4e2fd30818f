"""What a page of another site can do with the address of a server, even if it knows the token: nothing."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from browser.page import Page
from eformer import checkpoint
from support import browser as support

pytestmark = pytest.mark.xdist_group("browser")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path, serve):
    checkpoint.save({"w": np.arange(4.0)}, tmp_path / "checkpoint")
    with serve(tmp_path / "checkpoint") as url:
        yield url


@pytest.fixture
def elsewhere(tmp_path):
    """Another site on this machine: return a function that puts a page there."""
    (tmp_path / "site").mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=tmp_path / "site")) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

        def put(body):
            (tmp_path / "site" / "page.html").write_text(f"<!doctype html><title>elsewhere</title>{body}")
            return f"http://127.0.0.1:{server.server_address[1]}/page.html"

        yield put
        server.shutdown()


@pytest.fixture
def page(chromium):
    yield Page(chromium)
    chromium.get("about:blank")
    support.problems(chromium)  # the console says what was refused


def test_another_site_cannot_read_anything(page, served, elsewhere):
    page.browser.get(elsewhere(""))
    for mode in ("cors", "no-cors", "same-origin"):
        found = page.ask(f"fetch('{served}summary.json', {{mode: '{mode}'}}).then((a) => a.text())")
        assert "leaves" not in str(found)


def test_another_site_cannot_show_a_page_in_a_frame_or_run_its_scripts(page, served, elsewhere):
    page.browser.get(
        elsewhere(f"<iframe src='{served}'></iframe><script src='{served}checkpoint.js'></script>")
    )
    assert page.js("return typeof eformer") == "undefined"
    frame = page.browser.find_element("css selector", "iframe")
    page.browser.switch_to.frame(frame)
    assert page.js("return document.getElementById('app')") is None
    page.browser.switch_to.default_content()


def test_somebody_who_follows_a_link_on_another_site_gets_the_page(page, served, elsewhere):
    page.browser.get(elsewhere(f"<a href='{served}'>go</a>"))
    page.browser.find_element("link text", "go").click()
    page.until(lambda: page.js("return document.documentElement.dataset.ready") == "true")


def test_without_the_token_there_is_only_a_message(page, served):
    page.browser.get(served.replace("t0ken", "wrong"))
    assert "open the address that `eformer serve` printed" in page.text()
    page.browser.get(served.replace("127.0.0.1", "localhost"))
    page.shows("w")


def test_a_page_of_the_server_cannot_be_made_to_load_anything_else(page, served):
    page.open(served)
    assert page.ask("fetch('http://127.0.0.1:9/').then(() => 'loaded', () => 'refused')") == "refused"
    assert (
        page.js(
            "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); return window.ran"
        )
        is None
    )
    assert "Content Security Policy" in "\n".join(support.problems(page.browser))
