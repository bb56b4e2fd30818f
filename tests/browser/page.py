"""What people do on the pages, and what they see."""

import time

from selenium.webdriver.common.keys import Keys

KEYS = {
    "down": Keys.DOWN,
    "up": Keys.UP,
    "left": Keys.LEFT,
    "right": Keys.RIGHT,
    "enter": Keys.ENTER,
    "escape": Keys.ESCAPE,
}


class Page:
    """A page in the browser. Every look waits until it shows what is expected, for a while."""

    def __init__(self, browser):
        self.browser = browser

    def open(self, url):
        self.browser.get(url)
        self.until(lambda: self.js("return document.documentElement.dataset.ready") == "true")
        return self

    def js(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def ask(self, expression):
        """Return what a promise of the page gives."""
        return self.browser.execute_async_script(
            f"const done = arguments[arguments.length - 1]; Promise.resolve({expression}).then(done, (e) => done(String(e)));"
        )

    def rows(self, expression):
        """Return facts about the rows that an expression with `source` and `root` gives."""
        return self.js(
            "const { source } = eformer, { root } = source;"
            f"return {expression}.map((row) => ({{ path: row.path, name: row.name, kind: row.kind, leaves: row.leaves, params: row.params,"
            " nbytes: row.nbytes, dtypes: row.dtypes, count: row.count, shape: row.shape, value: row.value, special: row.special,"
            " damaged: row.damaged, problem: row.problem, change: row.change, std: source.statistics(row)?.std }));"
        )

    def until(self, is_so, seconds=15):
        """Wait until something is so; return what it is."""
        end = time.monotonic() + seconds
        while not (found := is_so()):
            assert time.monotonic() < end, self.text()[-2000:]
            time.sleep(0.01)
        return found

    def text(self):
        return self.js("return document.body.innerText")

    def shows(self, text):
        return self.until(lambda: text in self.text())

    # ------------------------------------------------------------------------------------ tree

    def names(self):
        """The names of the rows that are drawn, from top to bottom."""
        return self.js(
            "return [...document.querySelectorAll('.rows .row .cell.name bdi.text')].map((one) => one.textContent)"
        )

    def until_names(self, expected):
        self.until(lambda: self.names() == expected)

    def click_row(self, name):
        """Click a row, at once: it may be drawn anew at any time."""
        self.until(
            lambda: self.js(
                "const row = [...document.querySelectorAll('.rows .row')].find((one) => "
                "one.querySelector('.cell.name bdi.text')?.textContent === arguments[0]); row?.click(); return Boolean(row);",
                name,
            )
        )

    def click(self, selector):
        """Click an element, at once: it may be drawn anew at any time."""
        self.until(
            lambda: self.js(
                "const found = document.querySelector(arguments[0]);"
                "found?.dispatchEvent(new MouseEvent('click', {bubbles: true})); return Boolean(found);",
                selector,
            )
        )

    def panel(self):
        return self.js("return document.getElementById('leaf').innerText")

    def panel_shows(self, text):
        return self.until(lambda: text in self.panel())

    def search(self, text):
        box = self.browser.find_element("id", "search")
        box.clear()
        box.send_keys(text)
        self.until(lambda: "found" in self.status() if text else "found" not in self.status())

    def status(self):
        return self.js("return document.querySelector('.status').textContent")

    def sort_by(self, column):
        self.browser.find_element("css selector", f".head .cell.{column} button").click()

    def press(self, *keys):
        element = self.browser.switch_to.active_element
        for key in keys:
            element.send_keys(KEYS.get(key, key))

    def focus_tree(self):
        self.js("document.querySelector('[role=treegrid]').focus()")

    # ----------------------------------------------------------------------------------- looks

    def style(self, selector, name):
        return self.js(
            "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, name
        )

    def emulate(self, media="", **features):
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": listed})

    def is_too_wide(self):
        """Tell whether the page has to be scrolled sideways."""
        return self.js("return document.documentElement.scrollWidth > document.documentElement.clientWidth")
