"""Rows of a checkpoint on the server: folded, sorted, searched and paged."""

import numpy as np
import pytest
from eformer._engine.pages.rows import MOST_ROWS, Options, Rows, label
from hypothesis import given
from hypothesis import strategies as st

from eformer import checkpoint
from eformer._engine.pages.contents import contents_of
from eformer._engine.pages.reading import measure_one
from eformer._engine.pages.report import changes_of


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
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "checkpoint"
    checkpoint.save(TREE, path)
    with contents_of(path) as contents:
        yield Rows(contents)


def options(**given):
    return Options(
        {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in given.items()}
    )


def names(page):
    return [row["name"] for row in page["rows"]]


def all_leaves(rows, path=""):
    for row in rows.children(path, options())["rows"]:
        if row["kind"] == "leaf":
            yield row["path"]
        else:
            yield from all_leaves(rows, row["path"])


def test_unfolding_every_group_shows_every_leaf_once(rows):
    found = list(all_leaves(rows))
    assert len(found) == len(set(found)) == 12 * 3 + 1 + 3 + 1 + 1
    assert "params.layers.11.attention.q" in found


def test_a_group_has_the_totals_of_what_is_below_it(rows):
    root = rows.children("", options())["rows"]
    params = next(row for row in root if row["path"] == "params")
    assert (params["kind"], params["leaves"]) == ("group", 12 * 3 + 4)
    assert params["params"] == 800 + 12 * (64 + 64 + 8) + 13
    assert params["nbytes"] == 4 * (800 + 12 * (64 + 8) + 13) + 12 * 2 * 64
    assert set(params["dtype"].split(", ")) == {"float32", "float16"}


def test_layers_that_are_alike_are_one_row(rows):
    (layers,) = [row for row in rows.children("params", options())["rows"] if "layers" in row["name"]]
    assert layers["count"] == 12
    assert rows.children(layers["path"], options())["total"] == 12


def test_a_plain_value_is_a_row_with_its_value(rows):
    (count,) = rows.search("count", options())["rows"]
    assert (count["kind"], count["value"]) == ("leaf", "3")


def test_pages_together_are_the_whole_list(rows):
    whole = names(rows.search("layers", options()))
    pages = [names(rows.search("layers", options(offset=start, limit=7))) for start in range(0, 42, 7)]
    assert [name for page in pages for name in page] == whole
    assert len(whole) == 36


def test_rows_are_sorted_by_size_by_name_with_numbers_and_back(rows):
    by_size = rows.children("params", options(sort="nbytes", descending=True))["rows"]
    assert [row["nbytes"] for row in by_size] == sorted((row["nbytes"] for row in by_size), reverse=True)
    assert names(rows.children("params.head", options(sort="name"))) == ["layer1", "layer2", "layer10"]
    assert names(rows.children("params.head", options(sort="name", descending=True))) == [
        "layer10",
        "layer2",
        "layer1",
    ]


@pytest.mark.parametrize(
    ("query", "total"),
    [("BIAS", 12), ("layers.1*.bias", 0), ("params.layers.1*.bias", 3), ("*.q", 12), ("odd/name.with %", 1), ("%2F", 1),
     ("nothing like it", 0), ("", 42), ("[", 0), ("*" * 400, 42), ("layer?", 0), ("*layer?", 2)],
)  # fmt: skip
def test_a_search_finds_parts_of_names_and_patterns(rows, query, total):
    assert rows.search(query, options())["total"] == total


def test_a_row_is_located_by_its_place_in_each_group_above_it(rows):
    for asked in (options(), options(sort="nbytes", descending=True), options(sort="name")):
        path = ""
        for at in rows.locate("params.layers.7.attention.k", "leaf", asked):
            row = rows.children(path, asked)["rows"][at]
            path = row["path"]
        assert (row["kind"], path) == ("leaf", "params.layers.7.attention.k")


def test_a_treemap_has_the_largest_first_and_the_way_up(rows):
    found = rows.treemap("params")
    assert [one["path"] for one in found["above"]] == ["", "params"]
    sizes = [item["nbytes"] for item in found["items"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) + found["rest"]["nbytes"] == found["nbytes"]
    assert found["items"][0]["children"]


@given(
    st.dictionaries(
        st.sampled_from(["offset", "limit", "sort", "descending", "x"]),
        st.text(max_size=12)
        | st.integers(-(10**20), 10**20).map(str)
        | st.sampled_from(["name", "std", "true"]),
    ),
    st.text(max_size=20),
)
def test_no_parameters_make_it_fail_or_send_more_than_a_page(rows, parameters, text):
    asked = Options(parameters)
    for found in (rows.children("", asked), rows.children(text, asked), rows.search(text, asked)):
        assert len(found["rows"]) <= min(found["total"], MOST_ROWS)
    assert isinstance(rows.locate(text, "leaf", asked), list)
    assert rows.treemap(text)["items"]


def test_a_tree_that_is_one_leaf_has_a_label_and_is_found_by_it(tmp_path):
    checkpoint.save(leaf(3), tmp_path / "checkpoint")
    with contents_of(tmp_path / "checkpoint") as contents:
        assert label(contents.leaves[0].path) == "(the only leaf)"
        assert Rows(contents).search("only leaf", options())["total"] == 1


def tiles(found):
    """Every group and tile of a treemap, with the group itself first."""
    yield found
    for one in found.get("items", found.get("children")):
        yield from tiles(one)


def assert_areas_add_up(found):
    for one in tiles(found):
        inside = one.get("items", one.get("children"))
        if one.get("kind", "group") == "group":
            assert sum(tile["nbytes"] for tile in inside) + one["rest"]["nbytes"] == one["nbytes"]


def test_the_areas_of_a_treemap_add_up_to_all_bytes_of_250_layers(tmp_path):
    layers = [{"w": leaf(4, n + 1), "b": leaf(n + 1)} for n in range(250)]  # of other shapes: not folded
    checkpoint.save({"model": {"layers": layers, "head": leaf(3)}, "step": 1}, tmp_path / "checkpoint")
    with contents_of(tmp_path / "checkpoint") as contents:
        found = Rows(contents).treemap("")
    assert found["nbytes"] == contents.nbytes
    assert_areas_add_up(found)
    (model,) = found["items"]
    (layers_tile, _) = model["children"]
    assert (len(layers_tile["children"]), layers_tile["rest"]["count"]) == (24, 226)


def test_the_areas_of_a_treemap_add_up_when_it_runs_out_of_tiles(tmp_path):
    tree = {f"g{n}": {f"h{m}": {"w": leaf(m + 1), "v": leaf(n + 1)} for m in range(30)} for n in range(300)}
    checkpoint.save(tree, tmp_path / "checkpoint")
    with contents_of(tmp_path / "checkpoint") as contents:
        found = Rows(contents).treemap("")
    assert found["rest"]["count"] == 60
    assert_areas_add_up(found)


@pytest.fixture
def compared(tmp_path):
    """Rows of a checkpoint beside an earlier one, as they are before any leaf was read; and a function that reads one."""
    before = {
        "a": {"x": np.ones(3), "y": np.ones(3)},
        "b": {"z": np.zeros(3)},
        "same": np.ones(3),
        "loss": 1.0,
    }
    after = {"a": {"x": np.full(3, 2.0), "y": np.array([1, np.nan, np.inf])}, "b": {"z": np.ones(3)}}
    checkpoint.save(before, tmp_path / "a")
    checkpoint.save(after | {"same": np.ones(3), "loss": float("inf")}, tmp_path / "b")
    with contents_of(tmp_path / "b") as contents, contents_of(tmp_path / "a") as other:
        rows = Rows(contents, changes_of(contents, other, {}))

        def read(path):
            leaf = contents.by_path[path]
            rows.note(path, measure_one(contents, leaf, other, before_box=lambda: None))

        yield rows, read


def by_change(rows):
    found = rows.children("", options(sort="change", descending=True))["rows"]
    return [(row["path"], row["change"]["status"], row["change"].get("became_nan", 0)) for row in found]


def test_a_plain_value_that_became_infinite_is_first_before_anything_is_read(compared):
    rows, _ = compared
    assert by_change(rows) == [
        ("loss", "changed", 0),
        ("a", "unknown", 0),
        ("b.z", "unknown", 0),
        ("same", "same", 0),
    ]
    assert rows.search("loss", options())["rows"][0]["change"]["became_inf"] == 1


def test_a_group_with_a_leaf_that_was_read_and_became_nan_is_first(compared):
    rows, read = compared
    for path in ("a.y", "b.z"):
        read(path)
    assert by_change(rows) == [
        ("a", "unknown", 1),
        ("loss", "changed", 0),
        ("b.z", "changed", 0),
        ("same", "same", 0),
    ]
    read("a.x")
    assert by_change(rows)[0] == ("a", "changed", 1)
    assert [row["path"] for row in rows.children("a", options(sort="change", descending=True))["rows"]] == [
        "a.y",
        "a.x",
    ]


def test_the_rest_of_a_treemap_says_that_a_leaf_in_it_became_nan(tmp_path):
    tree = {f"m{n}": np.ones(9) for n in range(250)}
    checkpoint.save(tree | {"tiny": np.ones(1)}, tmp_path / "a")
    checkpoint.save(tree | {"tiny": np.array([np.nan])}, tmp_path / "b")
    with contents_of(tmp_path / "b") as contents, contents_of(tmp_path / "a") as other:
        rows = Rows(contents, changes_of(contents, other, {}))
        tiny = measure_one(contents, contents.by_path["tiny"], other, before_box=lambda: None)
        rows.note("tiny", tiny)
    assert rows.treemap("")["rest"]["change"]["became_nan"] == 1
