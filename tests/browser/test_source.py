"""The source of a page: rows are folded, sorted, searched and added up alike in a file and where they are served."""

import numpy as np
import pytest

from browser.page import Page
from eformer import checkpoint

pytestmark = pytest.mark.xdist_group("browser")


def leaf(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


TREE = {
    "params": {
        "embedding": leaf(100, 8),
        "layers": [
            {"attention": {"q": leaf(8, 8), "k": leaf(8, 8, dtype=np.float16)}, "bias": leaf(8)}
            for _ in range(12)
        ],
        "head": {"layer2": leaf(2), "layer10": leaf(10), "layer1": leaf(1)},
    },
    "count": 3,
    "odd/name.with %": leaf(2),
}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("source")
    checkpoint.save(TREE, path / "checkpoint")
    checkpoint.report(path / "checkpoint").save(path / "page.html")
    return (path / "page.html").as_uri()


@pytest.fixture
def page(browser, address):
    return Page(browser).open(address)


def opened(browser, path, against=None):
    """Open the page of a checkpoint as a file."""
    checkpoint.report(path, against).save(path.parent / "page.html", overwrite=True)
    return Page(browser).open((path.parent / "page.html").as_uri())


def names(rows):
    return [row["name"] for row in rows]


def children(path="", order="{}"):
    return f"source.children(source.find('{path}', 'group'), {order})"


def test_every_leaf_is_below_one_group(page):
    leaves = page.js(
        "const all = (row) => row.kind === 'leaf' ? [row.path] : row.kids.flatMap(all); return all(eformer.source.root)"
    )
    assert len(leaves) == len(set(leaves)) == 12 * 3 + 1 + 3 + 1 + 1
    assert "params.layers.11.attention.q" in leaves


def test_a_group_has_the_totals_of_what_is_below_it(page):
    (params,) = [row for row in page.rows(children()) if row["path"] == "params"]
    assert (params["kind"], params["leaves"]) == ("group", 12 * 3 + 4)
    assert params["params"] == 800 + 12 * (64 + 64 + 8) + 13
    assert params["nbytes"] == 4 * (800 + 12 * (64 + 8) + 13) + 12 * 2 * 64
    assert params["dtypes"] == ["float32", "float16"]


def test_layers_that_are_alike_are_one_row_with_twelve_below_it(page):
    (layers,) = [row for row in page.rows(children("params")) if "layers" in row["name"]]
    assert layers["count"] == 12 == len(page.rows(children(layers["path"])))


def test_a_plain_value_is_a_row_with_its_value(page):
    (count,) = page.rows("source.search('count')")
    assert (count["kind"], count["value"]) == ("leaf", "3")


def test_rows_are_sorted_by_size_by_name_with_numbers_and_back(page):
    by_size = page.rows(children("params", "{sort: 'nbytes', descending: true}"))
    assert [row["nbytes"] for row in by_size] == sorted((row["nbytes"] for row in by_size), reverse=True)
    by_name = names(page.rows(children("params.head", "{sort: 'name'}")))
    assert by_name == ["layer1", "layer2", "layer10"]
    assert names(page.rows(children("params.head", "{sort: 'name', descending: true}"))) == by_name[::-1]


@pytest.mark.parametrize(
    ("query", "total"),
    [("BIAS", 12), ("layers.1*.bias", 3), ("params.layers.1*.bias", 3), ("*.q", 12), ("odd/name.with %", 1), ("%2F", 1),
     ("nothing like it", 0), ("", 42), ("[", 0), ("*" * 400, 42), ("*" * 400 + "x", 0), ("head.layer?", 3), ("*layer?", 2),
     ("emb*", 0), ("params.e*", 1), ("*emb*", 1), ("[ab]*tention", 24), ("[z-a]", 0), ("a*" * 400 + "z", 0), ("[!x]ead", 3)],
)  # fmt: skip
def test_a_search_finds_parts_of_names_and_patterns(page, query, total):
    assert page.js("return eformer.source.search(arguments[0]).length", query) == total


def test_a_search_that_finds_nothing_has_a_hint_made_of_its_parts(page):
    hints = {"layers 3 bias": "layers*3*bias", "emb*": "*emb**", "bias of layer": "layer", "no such": None}
    assert {
        query: page.js("return eformer.source.hint(arguments[0]) ?? null", query) for query in hints
    } == hints


def test_a_row_is_found_by_its_path_below_the_groups_above_it(page):
    above = page.js(
        "let row = eformer.source.find('params.layers.7.attention.k', 'leaf'), found = [];"
        "for (; row; row = row.parent) found.unshift(row.path); return found"
    )
    fold = "params.layers.%*0-11"
    assert above == ["", "params", fold, f"{fold}.7", f"{fold}.7.attention", "params.layers.7.attention.k"]
    assert page.js("return eformer.source.find('params.layers', 'leaf') === undefined")


def test_a_tree_that_is_one_leaf_is_found_by_its_label(browser, tmp_path):
    checkpoint.save(leaf(3), tmp_path / "checkpoint")
    page = opened(browser, tmp_path / "checkpoint")
    assert [row["path"] for row in page.rows("source.search('only leaf')")] == ["%"]


def test_the_largest_rows_and_their_rest_add_up_to_all_bytes_of_250_layers(browser, tmp_path):
    layers = [{"w": leaf(4, n + 1), "b": leaf(n + 1)} for n in range(250)]  # of other shapes: not folded
    checkpoint.save({"model": {"layers": layers, "head": leaf(3)}, "step": 1}, tmp_path / "checkpoint")
    page = opened(browser, tmp_path / "checkpoint")
    shown = page.js(
        "return eformer.source.largest(eformer.source.find('model.layers', 'group'), 24).map((row) => [row.name, row.nbytes])"
    )
    assert (len(shown), shown[-1][0]) == (25, "226 more")
    assert sum(nbytes for _, nbytes in shown) == sum(20 * (n + 1) for n in range(250))
    assert [nbytes for _, nbytes in shown[:-1]] == sorted((20 * n for n in range(227, 251)), reverse=True)


# ------------------------------------------------------------------------------------------ comparisons


@pytest.fixture(scope="module")
def compared(tmp_path_factory, serve):
    """The addresses of both pages of a step beside an earlier one."""
    run = tmp_path_factory.mktemp("compared") / "run"
    same = {"same": np.ones(3), "wide": {f"m{n}": np.ones(9) for n in range(250)}}
    before = {
        "a": {"x": np.ones(3), "y": np.ones(3)},
        "b": {"z": np.zeros(3)},
        "loss": 1.0,
        "bits": np.zeros(4),
    }
    after = {"a": {"x": np.full(3, 2.0), "y": np.array([1, np.nan, np.inf])}, "b": {"z": np.ones(3)}}
    checkpoint.save(before | same | {"w": {"tiny": np.ones(1)}}, run / "step-1")
    late = {
        "loss": float("inf"),
        "bits": -np.zeros(4),
        "w": {"tiny": np.array([np.nan])},
        "new": np.ones((2, 2)),
    }
    checkpoint.save(after | same | late, run / "step-2")
    page = run.parent / "page.html"
    checkpoint.report(run / "step-2", run / "step-1").save(page)
    with serve(run) as url:
        yield {"file": page.as_uri(), "served": f"{url}step/2/?against=1"}


BY_CHANGE = "{sort: 'change', descending: true}"


def by_change(page):
    found = page.rows(children("", BY_CHANGE))
    return [(row["path"], row["change"]["status"], row["change"].get("became_nan", 0)) for row in found]


def read(page, *paths):
    for path in paths:
        page.ask(f"eformer.source.leaf('{path}')")


QUESTIONS = (
    children(), children("", BY_CHANGE), children("a", BY_CHANGE), children("wide", "{sort: 'nbytes'}"), f"source.search('', {BY_CHANGE})",
    "source.search('', {sort: 'std', descending: true})", "source.search('*m?', {sort: 'name'})", "source.search('', {sort: 'dtype'})",
)  # fmt: skip


def test_both_pages_have_the_same_rows_in_the_same_order_once_all_leaves_were_read(browser, compared):
    page = Page(browser).open(compared["file"])
    in_file = [page.rows(one) for one in QUESTIONS]
    changes = page.js("return eformer.source.changes")
    page.open(compared["served"])
    read(page, *(row["path"] for row in page.rows("source.search('')")))
    assert [page.rows(one) for one in QUESTIONS] == in_file
    page.open(compared["served"])  # and so has everybody who opens the page later
    assert [page.rows(one) for one in QUESTIONS] == in_file
    assert page.js("return eformer.source.changes") == changes


def test_rows_by_change_before_leaves_were_read_and_after(browser, serve, tmp_path):
    before = {
        "a": {"x": np.ones(3), "y": np.ones(3)},
        "b": {"z": np.zeros(3)},
        "same": np.ones(3),
        "loss": 1.0,
    }
    after = {"a": {"x": np.full(3, 2.0), "y": np.array([1, np.nan, np.inf])}, "b": {"z": np.ones(3)}}
    checkpoint.save(before, tmp_path / "step-1")
    checkpoint.save(after | {"same": np.ones(3), "loss": float("inf")}, tmp_path / "step-2")
    with serve(tmp_path) as url:
        page = Page(browser).open(f"{url}step/2/?against=1")
        start = [("loss", "changed", 0), ("a", "unknown", 0), ("b.z", "unknown", 0), ("same", "same", 0)]
        assert by_change(page) == start
        read(page, "a.y", "b.z")
        assert by_change(page) == [("a", "unknown", 1), start[0], ("b.z", "changed", 0), start[3]]
        read(page, "a.x")
        assert by_change(page)[0] == ("a", "changed", 1)
        assert names(page.rows(children("a", BY_CHANGE))) == ["y", "x"]


def test_the_rest_of_the_largest_rows_says_that_a_leaf_in_it_became_nan(browser, compared):
    page = Page(browser).open(compared["file"])
    rest = page.js("return eformer.source.largest(eformer.source.root, 2).at(-1)")
    assert (rest["kind"], rest["change"]["became_nan"]) == ("rest", 1)


def test_a_damaged_leaf_marks_the_rows_above_it_as_soon_as_it_was_read(browser, serve, tmp_path):
    checkpoint.save({"a": {"x": np.full(3, 7.0), "y": np.ones(3)}}, tmp_path / "c")
    mark = np.float64(7).tobytes()
    data = next(file for file in (tmp_path / "c").glob("*.safetensors") if mark in file.read_bytes())
    data.write_bytes(data.read_bytes().replace(mark, np.float64(8).tobytes(), 1))
    with serve(tmp_path / "c") as url:
        page = Page(browser).open(url)
        page.click_row("x")
        page.panel_shows("Damaged")
        page.until(
            lambda: (
                [row["damaged"] for row in page.rows("[root, ...root.kids, ...root.kids[0].kids]")]
                == [True, True, True, False]
            )
        )
        page.shows("has damage")
