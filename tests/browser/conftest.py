"""One Chromium for all tests. Every page that a test opens is watched: an error in its console fails the test, and so
does a request for any address but loopback.

Without Chromium and chromedriver the tests are skipped, and say so. With EFORMER_BROWSER=required they fail instead:
`.ci/run` sets it where it has a browser or could install one. CI=true means the same, unless EFORMER_BROWSER is set.
"""

import threading
from contextlib import contextmanager

import pytest

from eformer._engine.pages import live
from eformer._engine.pages.addresses import Pages
from eformer._engine.pages.server import Server
from support import browser as support


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    driver = support.start(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium):
    """The browser, watched from here to the end of the test."""
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    chromium.set_window_size(1280, 900)
    chromium.get("about:blank")
    support.problems(chromium)
    yield chromium
    chromium.get("about:blank")  # so that nothing of the page goes on into the next test
    assert support.problems(chromium) == []


@pytest.fixture(scope="session")
def serve():
    """Serve a run or a checkpoint, in a thread; return the address."""

    @contextmanager
    def served(path, rules=()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live, "_SECONDS_BETWEEN", 0.05)
            pages = Pages(str(path), rules)
        with Server("127.0.0.1", 0, "t0ken", pages) as server:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
            yield server.site.url
            server.shutdown()
            pages.close()

    return served
