"""A headless Chromium of the distribution, driven through Selenium, that reaches loopback alone."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_PROGRAMS = {
    "Chromium": ("chromium", "chromium-browser", "google-chrome"),
    "chromedriver": ("chromedriver",),
}

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root cannot have, and the pages are our own
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",  # /dev/shm is small in containers
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-features=OptimizationHints,MediaRouter,Translate,DialMediaRouteProvider",
    "--no-proxy-server",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    "--window-size=1280,900",
    "--force-device-scale-factor=1",
)


def start(profile: Path) -> Any:
    """Start a browser, or skip the test; fail it where a browser is required."""
    paths = {
        name: next(filter(None, map(shutil.which, several)), None) for name, several in _PROGRAMS.items()
    }
    if missing := [name for name, path in paths.items() if path is None]:
        _go_without(
            f"no {' and no '.join(missing)} on this machine: apt-get install chromium chromium-driver"
        )
    from selenium import webdriver  # late: it takes a while

    options = webdriver.ChromeOptions()
    options.binary_location = paths["Chromium"]
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With both programs given, Selenium looks for none and downloads none.
    return webdriver.Chrome(options, webdriver.ChromeService(paths["chromedriver"]))


def _go_without(why: str) -> None:
    default = "required" if os.environ.get("CI") == "true" else "wanted"
    if os.environ.get("EFORMER_BROWSER", default) == "required":
        pytest.fail(why)
    pytest.skip(why)


def problems(driver: Any) -> list[str]:
    """List the errors in the console, and the requests for anything but loopback, since the last call."""
    console = [entry["message"] for entry in driver.get_log("browser") if entry["level"] != "INFO"]
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    return console + [f"the page asked for {url}" for url in asked if not _is_here(url)]


def _is_here(url: str) -> bool:
    found = urlsplit(url)
    return found.scheme in ("about", "blob", "chrome", "data", "file") or found.hostname == "127.0.0.1"
