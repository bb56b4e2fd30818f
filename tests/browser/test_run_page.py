"""The page of a run: as a file, and live while it trains."""

import shutil
import subprocess

import numpy as np
import pytest

from browser.page import Page
from eformer import checkpoint
from eformer._engine.record.policies import Keep
from support import browser as support
from support.commands import EFORMER

pytestmark = pytest.mark.xdist_group("browser")


def save(path, *numbers):
    with checkpoint.Run(path, every=1) as run:
        run.resume()
        for number in numbers:
            run.after(
                number,
                {"params": {"w": np.full((8, 8), number, np.float32)}},
                metrics={"loss": 1 / number, "</script>": 1.0},
            )


@pytest.fixture
def run(tmp_path):
    save(tmp_path / "run", *range(1, 6))
    return tmp_path / "run"


@pytest.fixture
def live(run, browser, serve):
    with serve(run, [Keep(last=2)]) as url:
        yield Page(browser).open(url)


def steps(page, kind=""):
    return page.js(
        f"return [...document.querySelectorAll('table.steps tbody tr{kind} th')].map((one) => one.textContent)"
    )


def test_a_run_as_a_file_shows_its_steps_metrics_and_what_rules_keep(run, browser, tmp_path):
    checkpoint.report(run, keep=2).save(tmp_path / "run.html")
    page = Page(browser).open((tmp_path / "run.html").as_uri())
    assert steps(page) == [f"step-{n}" for n in (5, 4, 3, 2, 1)]
    assert steps(page, ".gone") == ["step-3", "step-2", "step-1"]
    assert "loss" in page.text()
    assert "</script>" in page.text()


def test_a_step_that_is_saved_appears_and_one_that_goes_vanishes(live, run):
    assert steps(live) == [f"step-{n}" for n in (5, 4, 3, 2, 1)]
    save(run, 6)
    live.until(lambda: steps(live) == [f"step-{n}" for n in (6, 5, 4, 3, 2, 1)])
    shutil.rmtree(run / "step-1")
    live.until(lambda: steps(live) == [f"step-{n}" for n in (6, 5, 4, 3, 2)])
    live.until(lambda: steps(live, ".gone") == ["step-4", "step-3", "step-2"])


def test_a_step_that_is_damaged_turns_red(live, run):
    assert steps(live, ".bad") == []
    next((run / "step-2").glob("*.safetensors")).unlink()
    live.until(lambda: steps(live, ".bad") == ["step-2"])
    live.shows("1 damaged step")
    assert live.style("rect.step.bad", "fill") != live.style("rect.step.kept", "fill")


def test_what_is_chosen_stays_chosen_while_steps_appear(live, run):
    live.js("document.querySelectorAll('table.steps tbody tr')[1].click()")
    save(run, 6)
    live.until(lambda: "step-6" in steps(live))
    assert live.js("return document.querySelector('tr[aria-selected=true] th').textContent") == "step-4"


def test_a_step_opens_in_its_own_page_and_the_way_back_is_there(live):
    live.browser.find_element("link text", "step-3").click()
    live.until(lambda: live.js("return document.querySelector('h1')?.textContent") == "step-3")
    live.click_row("params.w")
    live.panel_shows("every byte matches its digest")
    live.browser.find_element("partial link text", "run").click()
    live.until(lambda: live.js("return document.querySelector('table.steps')") is not None)


def test_a_run_that_has_not_begun_waits_for_its_first_step(tmp_path, browser, serve):
    with serve(tmp_path) as url:
        page = Page(browser).open(url)
        page.until(lambda: "waiting for the first step" in page.text().lower())
        assert page.js("return document.getElementById('verification').className") == "state neutral"
        assert page.browser.title.endswith("· no steps yet")
        save(tmp_path, 1)
        page.until(lambda: steps(page) == ["step-1"])


def test_a_page_that_is_live_says_so_and_tells_screen_readers_of_new_steps(live, run):
    live.until(lambda: live.js("return document.getElementById('live').textContent").startswith("live · "))
    assert live.browser.title == "run · step 5"
    save(run, 6)
    live.until(
        lambda: live.js("return document.querySelector('[role=status]').textContent") == "step-6 was saved"
    )
    assert live.browser.title == "run · step 6"


@pytest.fixture
def thinned(tmp_path, browser):
    """The page of a run that has removed its first three steps."""
    with checkpoint.Run(tmp_path / "run", every=1, keep=2) as run:
        for step in range(1, 6):
            run.after(step, {"w": np.full(2, step)}, metrics={"loss": float(step % 2)})
    checkpoint.report(tmp_path / "run").save(tmp_path / "run.html")
    return Page(browser).open((tmp_path / "run.html").as_uri())


def test_curves_begin_where_the_run_began_and_say_what_is_under_the_pointer(thinned):
    assert steps(thinned) == ["step-5", "step-4"]
    curve = "return document.querySelector('.chart .curve').getAttribute('points').split(' ').length"
    assert thinned.js(curve) == 5
    assert thinned.js("return document.querySelector('.chart .axis-labels').textContent") == "12345"
    thinned.js(
        "const hit = document.querySelector('.chart .hit'), box = hit.getBoundingClientRect();"
        "hit.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: box.left + 2, clientY: box.top + 9}))"
    )
    thinned.until(
        lambda: (
            thinned.js("return document.querySelector('.tip')?.innerText")
            == "loss 1 · step 1, removed\nloss 1"
        )
    )


def test_curves_are_smoothed_as_far_as_the_slider_says(thinned):
    curves = "return [...document.querySelectorAll('.chart .curve')].slice(0, 2).map((one) => one.getAttribute('points').split(',').length - 1)"
    assert thinned.js(curves) == [5, 0]
    thinned.js(
        "const one = document.getElementById('smoothing'); one.value = 0.9; one.dispatchEvent(new Event('input'))"
    )
    assert thinned.js(curves) == [5, 5]
    heights = "return document.querySelectorAll('.chart .curve')[1].getAttribute('points').split(' ').map((one) => Number(one.split(',')[1]))"
    assert thinned.js(heights) == [8.0, 50.1, 34.6, 50.1, 39.8]  # a mean of 1, 0, 1, 0, 1


def test_the_rules_of_the_run_are_shown_if_no_others_are_given(thinned):
    assert "saves every step · keeps the last 2 · nothing would be removed" in thinned.text()


def test_steps_are_cards_in_a_narrow_window(thinned):
    thinned.browser.set_window_size(500, 800)
    thinned.until(lambda: thinned.style("table.steps thead", "display") == "none")
    assert not thinned.is_too_wide()
    sizes = thinned.js("return getComputedStyle(document.querySelector('.steps td.num'), '::before').content")
    assert sizes == '"Size"'


def test_a_step_that_retention_removes_while_its_page_is_open_is_a_message(run, chromium, serve):
    with serve(run) as url:
        page = Page(chromium).open(f"{url}step/2/")
        shutil.rmtree(run / "step-2")
        page.click_row("params.w")
        page.shows("step 2 is not there: it was removed by the rules of the run or by hand")
    chromium.get("about:blank")
    problems = support.problems(chromium)
    assert problems
    assert all("404" in one for one in problems), problems


def test_a_server_that_has_ended_is_a_message_and_what_was_seen_stays(run, chromium):
    process = subprocess.Popen(
        [EFORMER, "serve", str(run)], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    try:
        page = Page(chromium).open(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()
    page.shows("The server does not answer")
    assert "step-5" in steps(page)
    chromium.get("about:blank")
    assert all("ERR_CONNECTION" in one or "ERR_EMPTY" in one for one in support.problems(chromium))


def test_of_many_steps_the_newest_are_drawn_and_the_others_when_asked_for(run, browser, serve):
    for number in range(6, 400):
        shutil.copytree(run / "step-5", run / f"step-{number}")
    with serve(run) as url:
        page = Page(browser).open(url)
        page.until(lambda: len(steps(page)) == 300)
        assert steps(page)[0] == "step-399"
        page.js(
            "document.getElementById('all-steps').click()"
        )  # at once: the page draws it anew when it has news
        page.until(lambda: len(steps(page)) == 399)
        page.js("document.querySelector('table.steps tbody tr:last-child').click()")
        assert page.js("return document.querySelector('tr[aria-selected=true] th').textContent") == "step-1"


def test_a_metric_may_have_the_name_of_a_property_of_all_objects(tmp_path, browser):
    with checkpoint.Run(tmp_path / "run", every=1) as run:
        run.after(1, {"w": np.zeros(2)}, metrics={"constructor": 0.25})
        run.after(2, {"w": np.zeros(2)})
    checkpoint.report(tmp_path / "run").save(tmp_path / "run.html")
    page = Page(browser).open((tmp_path / "run.html").as_uri())
    assert steps(page) == ["step-2", "step-1"]
    assert "0.25" in page.text()


def test_a_step_is_compared_with_another_that_is_chosen(live):
    live.open(live.js("return document.baseURI") + "step/5/")
    assert live.js("return [...document.querySelectorAll('#against option')].map((one) => one.textContent)") == [
        "nothing", "step 4", "step 3", "step 2", "step 1",
    ]  # fmt: skip
    live.js(
        "const one = document.querySelector('#against'); one.value = '4'; one.dispatchEvent(new Event('change'))"
    )
    live.shows("Select a leaf to compare its values.")
    assert "against step-4" in live.js("return document.querySelector('h1').textContent")
    assert live.js("return document.querySelector('#against').value") == "4"
    live.until_names(["params.w"])
    live.js("document.querySelector('.rows .row').click()")
    live.until(lambda: "25.0 %" in live.js("return document.querySelector('#leaf').textContent"))


def test_a_step_that_became_nan_and_a_metric_that_is_not_finite_are_marked(tmp_path, browser):
    with checkpoint.Run(tmp_path / "run", every=1) as run:
        for step, value in enumerate([1.0, 2.0, np.nan], 1):
            run.after(step, {"w": np.full(2, value)}, metrics={"loss": value})
    checkpoint.report(tmp_path / "run").save(tmp_path / "run.html")
    page = Page(browser).open((tmp_path / "run.html").as_uri())
    assert page.js("return document.querySelectorAll('.odd-step').length") == 2
    assert "not finite at step 3" in page.text()
    newest = page.js("return document.querySelector('table.steps tbody tr').textContent")
    assert "1 leaf became NaN or Inf" in newest
    assert "step-3: 1 leaf became NaN or Inf: w" in page.js(
        "return document.querySelector('.notes.bad').textContent"
    )


@pytest.mark.parametrize(
    ("numbers", "labels"),
    [
        (range(100_000, 100_900, 100), [f"{100_000 + n:,}" for n in range(0, 900, 100)]),
        (range(1000, 9000, 1000), [f"{n}k" for n in range(1, 9)]),
        ([10**17, 10**17 + 16], None),  # next to each other as doubles
    ],
    ids=["near each other", "round", "beyond the integers of a double"],
)
def test_labels_of_the_axis_differ_and_end(browser, tmp_path, numbers, labels):
    save(tmp_path / "run", *numbers)
    checkpoint.report(tmp_path / "run").save(tmp_path / "run.html")
    page = Page(browser).open((tmp_path / "run.html").as_uri())
    shown = page.js(
        "return [...document.querySelector('.axis-labels').children].map((one) => one.textContent)"
    )
    assert len(set(shown)) == len(shown)
    assert labels is None or shown == labels


@pytest.mark.parametrize("chosen", ["#smoothing", "#theme", "table.steps tbody a"])
def test_the_focus_stays_while_steps_appear(live, run, chosen):
    live.js("document.querySelector(arguments[0]).focus()", chosen)
    known = "return document.activeElement.id || document.activeElement.getAttribute('href')"
    before = live.js(known)
    assert before
    save(run, 6)
    live.until(lambda: "step-6" in steps(live))
    assert live.js(known) == before


def test_a_server_that_refuses_to_show_the_run_is_not_called_live(live):
    live.js("window.fetch = async () => new Response('', { status: 403 })")
    live.shows("The server refuses to show the run (403).")
    live.until(lambda: live.js("return document.getElementById('live').textContent").startswith("not live"))


def test_names_of_metrics_and_rules_are_text_and_no_markup(browser, tmp_path):
    names = ["<img src=x onerror=document.title='x'>", "__proto__", "\"'&amp;%3Cb%3E", "مرحبا\u202e", "100 %"]
    with checkpoint.Run(tmp_path / "run", every=1, keep=Keep(best=3, by=names[0])) as run:
        for number in range(1, 4):
            run.after(number, {"w": np.ones(2)}, metrics=dict.fromkeys(names, float(number)))
    checkpoint.report(tmp_path / "run").save(tmp_path / "run.html")
    page = Page(browser).open((tmp_path / "run.html").as_uri())
    shown = page.js("return [...document.querySelectorAll('figcaption bdi')].map((one) => one.textContent)")
    assert shown[:5] == [*names[:3], "مرحبا\\u202e", names[4]]
    assert page.js("return document.querySelectorAll('img').length") == 0
    assert f"keeps the best 3 by {names[0]} (min)" in page.text()


def test_the_ends_of_an_axis_never_read_the_same(tmp_path, browser):
    with checkpoint.Run(tmp_path / "run", every=1) as run:
        for step, value in enumerate([1.0, 2.0, 3.9996, 7.999], 1):
            run.after(step, {"w": np.full(2, value)}, metrics={"loss": 100_000.0 + step})
    checkpoint.report(tmp_path / "run").save(tmp_path / "run.html")
    page = Page(browser).open((tmp_path / "run.html").as_uri())
    ends = page.js(
        "return [...document.querySelectorAll('.range')].map((one) => [...one.children].map((end) => end.textContent))"
    )
    assert len(ends) == 2
    for one in ends:
        assert len(set(one)) == 2, ends
