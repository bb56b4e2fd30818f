"""The page of a checkpoint, as a file that has its data inside, and as it is served: they look and behave alike."""

import itertools
from contextlib import ExitStack

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

from browser.page import Page
from eformer import checkpoint

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.sample(2)]  # of a file and a server, one

RNG = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


TREE = {
    "params": {
        "embedding": normal(200, 16),
        "layers": [{"attention": {"q": normal(16, 16), "k": normal(16, 16, dtype=np.float16)}, "bias": np.zeros(16, np.float32)} for _ in range(6)],
        "head": {"kernel": normal(16, 40), "bias": np.array([1, np.nan, np.inf, 0], np.float32)},
    },
    "step": 300,
}  # fmt: skip

# Names that are markup, ends of scripts, escapes for terminals, marks that turn the direction, and line ends of scripts.
HOSTILE = (
    "<img src=x onerror=window.hacked=1>", "</script><script>window.hacked=2</script>", "<!--<script>", "\"'><b>bold</b>",
    "\u202egnp.tfel-ot-thgir", "\u2066isolate", "\x1b[31mred\x1b[0m", "line\u2028end\u2029s", "{{7*7}}", "${window.hacked=3}",
    "javascript:window.hacked=4", "a & b &lt;", "nul\x00byte", "%2e%2e", "name with spaces", "emoji 🙂 and ÄÖ", "__proto__", "constructor",
)  # fmt: skip


@pytest.fixture(scope="module")
def addresses(tmp_path_factory, serve):
    """The addresses of both pages of one checkpoint, and of one with hostile names."""
    place = tmp_path_factory.mktemp("pages")
    trees = {
        "plain": TREE,
        "hostile": {"top": {name: normal(3) for name in HOSTILE}, "text": "</script>\u2028<b>"},
    }
    found = {}
    with ExitStack() as stack:
        for name, tree in trees.items():
            checkpoint.save(tree, place / name)
            checkpoint.report(place / name).save(place / f"{name}.html")
            found["file", name] = (place / f"{name}.html").as_uri()
            found["served", name] = stack.enter_context(serve(place / name))
        yield found


@pytest.fixture(params=["file", "served"])
def page(request, browser, addresses):
    return Page(browser).open(addresses[request.param, "plain"])


@pytest.fixture(params=["file", "served"])
def hostile(request, browser, addresses):
    return Page(browser).open(addresses[request.param, "hostile"])


def unfolded(page, *names):
    """Fold everything, then unfold these rows."""
    page.focus_tree()
    page.until(page.names)
    while len(page.names()) > 2:
        page.press("up", "up", "up", "up", "up", "up", "up", "up", "left")
    for name in names:
        page.click_row(name)


def test_groups_unfold_and_fold_by_clicks(page):
    unfolded(page)
    page.until_names(["params", "step"])
    page.click_row("params")
    page.until_names(["params", "embedding", "head", "layers.0–5", "step"])
    page.click_row("head")
    page.until_names(["params", "embedding", "head", "bias", "kernel", "layers.0–5", "step"])
    page.click_row("params")
    page.until_names(["params", "step"])


def test_the_tree_is_walked_by_keys(page):
    unfolded(page)
    page.press("right", "down", "down", "down")
    page.until(
        lambda: page.js("return document.querySelector('.row.active')?.innerText").startswith("▸\nlayers")
    )
    page.press("right", "down", "right")
    page.until_names(
        [
            "params",
            "embedding",
            "head",
            "layers.0–5",
            "0",
            "attention",
            "bias",
            "1",
            "2",
            "3",
            "4",
            "5",
            "step",
        ]
    )
    page.press("down", "down", "enter")
    page.panel_shows("params.layers.0.bias")
    page.press("left", "left", "left", "left")
    page.until_names(["params", "embedding", "head", "layers.0–5", "step"])
    page.press("left", "left")
    page.until_names(["params", "step"])
    assert (
        page.js("return document.querySelector('[role=treegrid]').getAttribute('aria-activedescendant')")
        == "row-0"
    )


def test_a_search_finds_leaves_by_parts_of_names_and_by_patterns(page):
    page.search("BIAS")
    page.until(lambda: page.status() == "7 leaves found")
    page.search("params.layers.[0-2].*.q")
    page.until_names([f"params.layers.{n}.attention.q" for n in range(3)])
    page.search("no such leaf")
    page.until(lambda: page.status() == "0 leaves found")
    page.press("escape")
    page.until(lambda: page.status() == "22 leaves")


def test_a_search_that_finds_nothing_says_what_would_find_leaves(page):
    page.search("layers 3 bias")
    page.until(lambda: page.status() == "0 leaves found: try layers*3*bias")
    page.click(".status button")
    page.until_names(["params.layers.3.bias"])
    assert page.js("return document.querySelector('.rows mark').textContent") == "layers.3.bias"


def test_a_slash_goes_to_the_search_and_enter_shows_what_is_found(page):
    page.js("document.activeElement.blur()")
    page.browser.find_element("css selector", "body").send_keys("/")
    page.press("kernel")
    page.until(lambda: page.status() == "1 leaf found")
    page.press("enter")
    page.panel_shows("params.head.kernel")


def test_rows_are_sorted_by_size_and_by_name(page):
    unfolded(page, "params")
    page.sort_by("nbytes")
    page.until_names(["params", "embedding", "layers.0–5", "head", "step"])
    page.sort_by("nbytes")
    page.until_names(["step", "params", "head", "layers.0–5", "embedding"])
    page.sort_by("name")
    page.until_names(["params", "embedding", "head", "layers.0–5", "step"])
    assert (
        page.js("return document.querySelector('.head .cell.name').getAttribute('aria-sort')") == "ascending"
    )


def test_clicks_on_the_treemap_go_down_and_the_path_goes_up(page):
    def tiles():
        return page.js("return [...document.querySelectorAll('.tile')].map((one) => one.dataset.path)")

    page.until(lambda: "params" in tiles())
    page.click(".tile[data-path='params'] .label")
    page.until(lambda: "params.embedding" in tiles() and "params" not in tiles())
    page.click(".tile[data-path='params.embedding']")
    page.panel_shows("params.embedding")
    page.panel_shows("float32")
    page.click(".crumbs button")
    page.until(lambda: "params" in tiles())


def test_the_treemap_is_one_stop_of_the_tabulator_and_arrows_go_from_tile_to_tile(page):
    def here():
        return page.js("return document.activeElement.dataset.path")

    page.until(lambda: page.js("return document.querySelectorAll('.tile').length") > 4)
    stops = "return [...document.querySelectorAll('.tile')].filter((one) => one.tabIndex === 0).map((one) => one.dataset.path)"
    assert page.js(stops) == ["params"]
    page.js("document.querySelector('.tile[tabindex=\"0\"]').focus()")
    page.press("enter")  # one tile at once has the focus again
    assert here() == "params.embedding"
    page.press("right")
    beside = here()
    assert beside != "params.embedding"
    assert page.js(stops) == [beside]
    page.press("left")
    assert here() == "params.embedding"
    page.press("escape")
    assert here() == "params"


def test_the_group_of_the_rows_that_are_seen_is_above_them_and_leads_back(page):
    where = "return document.querySelector('.where').textContent"
    unfolded(page, "params", "head", "bias")
    page.until(lambda: page.js(where) == "all › params › head")
    page.search("bias")
    page.until(lambda: page.js(where) == "Leaves of all groups")
    page.press("escape")
    page.until(lambda: page.js(where) == "all › params › head")
    page.js("[...document.querySelectorAll('.where button')].at(-1).click()")
    page.until(lambda: page.js(where) == "all › params" or page.js(where) == "all")


def test_filters_show_leaves_with_nan_or_zeros_alone(browser, addresses):
    page = Page(browser).open(addresses["file", "plain"])
    filters = "return [...document.querySelectorAll('.browse .chip')].map((one) => one.textContent)"
    assert page.js(filters) == ["1 NaN or Inf", "6 all zero"]
    page.click(".tiles button")  # NaN in 1
    page.until_names(["params.head.bias"])
    assert page.js("return document.querySelector('.chip.special').getAttribute('aria-pressed')") == "true"
    page.click(".browse .chip.zero")
    page.until_names([f"params.layers.{n}.bias" for n in range(6)])
    page.search("4")
    page.until_names(["params.layers.4.bias"])
    page.click(".browse .chip.zero")
    page.until(lambda: page.status() == "3 leaves found")
    page.browser.find_element("id", "search").send_keys(Keys.ESCAPE)
    page.until(lambda: page.status() == "22 leaves")


def test_a_filter_of_the_server_counts_leaves_as_they_are_read(browser, serve, tmp_path):
    checkpoint.save({"a": np.array([1, np.nan]), "b": np.zeros(2)}, tmp_path / "c")
    with serve(tmp_path / "c") as url:
        page = Page(browser).open(url)
        filters = "return [...document.querySelectorAll('.browse .chip')].map((one) => one.textContent)"
        assert page.js(filters) == []
        page.click_row("a")
        page.until(lambda: page.js(filters) == ["1 NaN or Inf"])
        page.click_row("b")
        page.until(lambda: page.js(filters) == ["1 NaN or Inf", "1 all zero"])


def test_a_leaf_shows_its_values_and_what_is_not_finite(page):
    unfolded(page, "params", "head", "bias")
    page.panel_shows("params.head.bias")
    page.panel_shows("NaN")
    shown = page.js(
        "return Object.fromEntries([...document.querySelectorAll('#leaf dl div')].map((one) => [one.querySelector('dt').textContent, one.querySelector('dd').textContent]))"
    )
    assert shown["NaN"] == "1 (25.0 %)"
    assert shown["+Inf"] == "1 (25.0 %)"
    assert (shown["min"], shown["max"], shown["mean"]) == ("0", "1", "0.5")
    assert "every byte matches its digest" in page.panel()


def test_dark_colours_follow_the_system_and_the_button_overrules_it(page):
    light = page.style("html", "backgroundColor")
    page.emulate(prefers_color_scheme="dark")
    dark = page.until(
        lambda: page.style("html", "backgroundColor") != light and page.style("html", "backgroundColor")
    )
    button = page.browser.find_element("id", "theme")
    button.click()
    assert page.style("html", "backgroundColor") == light
    button.click()
    page.emulate(prefers_color_scheme="light")
    assert page.style("html", "backgroundColor") == dark
    button.click()


def test_text_can_be_told_from_its_background(page):
    selectors = ("h1", ".row .cell.name", ".muted", ".tiles dt", "#search")
    for scheme, selector in itertools.product(("light", "dark"), selectors):
        page.emulate(prefers_color_scheme=scheme)
        page.until(lambda selector=selector: contrast(page, selector) >= 4.5)


def contrast(page, selector):
    """Return the contrast of an element's text with what is behind it, as WCAG counts it."""
    colours = page.js(
        """let at = document.querySelector(arguments[0]); const text = getComputedStyle(at).color;
        let back = "rgba(0, 0, 0, 0)";
        while (at && back === "rgba(0, 0, 0, 0)") { back = getComputedStyle(at).backgroundColor; at = at.parentElement; }
        const drawn = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
        return [text, back].map((colour) => { drawn.fillStyle = colour; drawn.fillRect(0, 0, 1, 1); return [...drawn.getImageData(0, 0, 1, 1).data]; });""",
        selector,
    )
    one, other = sorted((luminance(colour) for colour in colours), reverse=True)
    return (one + 0.05) / (other + 0.05)


def luminance(colour):
    parts = [part / 255 for part in colour[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_print_shows_every_unfolded_row_and_no_buttons(page):
    unfolded(page, "params", "layers.0–5")
    page.until(lambda: "5" in page.names())  # a server's rows come later
    page.emulate("print")
    page.js("dispatchEvent(new Event('beforeprint'))")
    assert page.style("#theme", "display") == "none"
    assert page.style(".scroller", "maxHeight") == "none"
    assert {"embedding", "5", "step"} <= set(page.names())
    pdf = page.browser.execute_cdp_cmd("Page.printToPDF", {})["data"]
    assert len(pdf) > 5000
    page.js("dispatchEvent(new Event('afterprint'))")


def test_a_narrow_window_is_not_scrolled_sideways(page):
    for width, gone in ((1280, []), (800, []), (500, ["shape"])):
        page.browser.set_window_size(width, 800)
        page.until(lambda: not page.is_too_wide())
        shown = {name: page.style(f".head .{name}", "display") for name in ("name", "shape", "nbytes")}
        assert [name for name, display in shown.items() if display == "none"] == gone


def test_names_are_text_whatever_they_are(hostile):
    hostile.search("*")
    hostile.until(lambda: hostile.status() == f"{len(HOSTILE) + 1} leaves found")
    shown = "\n".join(hostile.names())
    for name in (
        "<img src=x onerror=window.hacked=1>",
        "</script><script>window.hacked=2</script>",
        "<!--<script>",
        "${window.hacked=3}",
    ):
        assert name in shown
    assert not any(character in hostile.text() for character in "\u202e\u2066\x1b\u2028\x00")
    assert hostile.js("return window.hacked") is None
    assert hostile.js("return document.querySelectorAll('#app img, #app b b, #app script').length") == 0
    assert hostile.js("return document.scripts.length") <= 2


def test_leaves_with_hostile_names_are_shown_when_they_are_selected(hostile):
    hostile.search("*")
    for name in hostile.until(hostile.names)[:8]:
        hostile.click_row(name)
        hostile.panel_shows("every byte matches its digest" if name != "text" else "A plain value")
    assert hostile.js("return window.hacked") is None


def test_a_tree_that_is_one_leaf_says_so(browser, tmp_path, serve):
    checkpoint.save(normal(3), tmp_path / "c")
    checkpoint.report(tmp_path / "c").save(tmp_path / "c.html")
    with serve(tmp_path / "c") as served:
        for url in ((tmp_path / "c.html").as_uri(), served):
            Page(browser).open(url).until_names(["(the only leaf)"])


# ------------------------------------------------------------------------------------------ comparisons


def model(*, is_after):
    """250 layers of two shapes that take turns, so that they are not folded; one became NaN in the later model."""
    layers = [{"w": np.full((4, 1 + n % 2), 2.0), "b": np.ones(2)} for n in range(250)]
    tree = {"layers": layers, "head": np.ones(40), "from_zero": np.zeros(8), "bits": np.zeros(4), "step": 1}
    if is_after:
        layers[249]["b"][0] = np.nan
        layers[3]["w"][:] = 3.0
        tree |= {"from_zero": np.ones(8), "bits": -np.zeros(4), "step": 2}
    return tree


@pytest.fixture(scope="module")
def compared(tmp_path_factory, serve):
    """The addresses of both pages of a step beside an earlier one."""
    run = tmp_path_factory.mktemp("compared") / "run"
    for number in (1, 2):
        checkpoint.save(model(is_after=number == 2), run / f"step-{number}")
    page = run.parent / "page.html"
    checkpoint.report(run / "step-2", run / "step-1").save(page)
    with serve(run) as url:
        yield {"file": page.as_uri(), "served": f"{url}step/2/?against=1"}


def test_a_leaf_that_became_nan_is_the_first_and_the_loudest(browser, compared):
    page = Page(browser).open(compared["file"])
    assert "1 leaf became NaN or Inf" in page.js("return document.getElementById('became').innerText")
    page.panel_shows("layers.249.b")
    page.panel_shows("became NaN")
    cell = page.js(
        "return [...document.querySelectorAll('.heatmap td.became')].map((one) => one.textContent)"
    )
    assert cell == ["became NaN in 1 element"]
    red = page.js("return getComputedStyle(document.querySelector('.flag.bad, .chip.became b')).color")
    assert page.style(".heatmap td.became", "backgroundColor") == red
    assert page.js("return document.querySelectorAll('.heatmap td.same').length") == 498
    assert page.js("return document.querySelectorAll('.tile.alarm').length") >= 1


def test_a_step_in_which_no_array_changed_says_so(browser, tmp_path):
    for step in (1, 2):
        checkpoint.save({"w": np.ones(3), "step": step}, tmp_path / f"step-{step}")
    checkpoint.report(tmp_path / "step-2", tmp_path / "step-1").save(tmp_path / "page.html")
    page = Page(browser).open((tmp_path / "page.html").as_uri())
    assert page.js("return document.querySelector('.chip.changed').textContent") == "1 changed"
    assert page.js("return document.querySelector('.change-split p').textContent") == "No array changed."


def test_a_leaf_that_became_nan_is_loud_in_words_and_one_click_away(browser, compared):
    page = Page(browser).open(compared["file"])
    assert page.js("return document.getElementById('became').getAttribute('role')") == "alert"
    tiles = page.js(
        "return [...document.querySelectorAll('.tile.alarm')].map((one) => one.getAttribute('aria-label'))"
    )
    assert tiles
    assert all("change: became NaN" in label for label in tiles)
    assert page.js("return document.querySelector('ol.largest li').textContent").startswith("layers.249.b")
    red = page.style("#became b", "color")
    assert page.style(".stat.bad .big", "color") == red
    page.click(".changes .chip.became")
    page.until_names(["layers.249.b"])
    assert page.style(".rows .delta.became", "color") == page.style(".rows .flag.bad", "color") == red
    cell = page.js(
        "const one = document.querySelector('.rows .cell.change'); return one.scrollWidth <= one.clientWidth"
    )
    assert cell  # its words are not cut


def test_the_legend_explains_hatched_cells_where_there_are_any(browser, compared):
    legend = "return document.querySelector('.changes .legend').innerText"
    assert "not read" in Page(browser).open(compared["served"]).js(legend)
    assert "not read" not in Page(browser).open(compared["file"]).js(legend)


def test_a_leaf_of_the_server_that_became_nan_is_as_loud_once_it_was_read(browser, compared):
    page = Page(browser).open(compared["served"])
    assert page.js("return document.querySelectorAll('#became, td.became').length") == 0
    page.search("layers.249.b")
    page.click_row("layers.249.b")
    page.until(
        lambda: (
            "1 leaf became NaN or Inf" in page.js("return document.getElementById('became')?.innerText ?? ''")
        )
    )
    assert (
        page.js("return document.querySelector('.heatmap td.became').textContent")
        == "became NaN in 1 element"
    )
    assert page.js("return document.querySelectorAll('.changes').length") == 1


def test_the_areas_of_the_treemap_are_in_proportion_to_bytes(browser, compared):
    page = Page(browser).open(compared["file"])
    drawn = page.js(
        "return [...document.querySelectorAll('.tile')].map((one) => [one.dataset.path, Number(one.dataset.bytes), one.classList.contains('frame'), "
        "(parseFloat(one.style.width) + 2) * (parseFloat(one.style.height) + 2), one.textContent, one.dataset.kind])"
    )
    assert any(text.startswith("226 more") for *_, text, kind in drawn if kind == "rest")
    inside = [
        (nbytes, area)
        for path, nbytes, is_frame, area, *_ in drawn
        if path.startswith("layers") and not is_frame
    ]
    sizes = [area / nbytes for nbytes, area in inside]
    assert max(sizes) == pytest.approx(min(sizes), rel=0.01)
    page.js("document.querySelector('.tile[data-kind=rest]').click()")  # opens the group
    page.until(
        lambda: page.js("return document.querySelector('.crumbs').textContent").startswith("all › layers")
    )


def test_a_row_of_the_server_says_how_its_leaf_changed_as_soon_as_it_was_read(browser, serve, tmp_path):
    for number, last in ((1, 1.0), (2, np.nan)):
        checkpoint.save({"a": {"x": normal(3), "y": np.array([1.0, last])}}, tmp_path / f"step-{number}")
    with serve(tmp_path) as url:
        page = Page(browser).open(f"{url}step/2/?against=1")
        page.until_names(["a", "x", "y"])
        page.click_row("y")
        page.panel_shows("became NaN")
        changes = "return [...document.querySelectorAll('.rows .delta')].map((one) => one.textContent)"
        page.until(lambda: page.js(changes) == ["became NaN", "not read", "became NaN"])
        page.sort_by("change")
        page.until(lambda: page.names() == ["a", "y", "x"])
