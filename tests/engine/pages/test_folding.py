"""The rows of a tree."""

from eformer._engine.pages.folding import tree_rows
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.pages.contents import row_paths
from eformer._engine.record.names import escape, join_name
from support.trees import keys


def shown(names):
    rows = tree_rows((name, "f4") for name in names)
    return row_paths(rows)


@given(st.sets(st.lists(keys, min_size=1, max_size=4).map(lambda parts: join_name(map(escape, parts)))))
def test_every_leaf_has_one_row_with_its_own_path(names):
    names = sorted(names)
    rows = tree_rows((name, "f4") for name in names)
    leaves = [(row.leaf, path) for row, path in zip(rows, row_paths(rows), strict=True) if row.leaf >= 0]
    assert sorted(leaves) == list(enumerate(names))
    assert all(row.parent < number for number, row in enumerate(rows))


def test_layers_that_are_alike_come_below_one_row_in_the_order_of_their_numbers():
    names = [f"layers.{n}.{part}" for n in (10, 9, 8, 11) for part in ("a", "b")]
    assert shown(names)[1:4] == ["layers.%*8-11", "layers.%*8-11.8", "layers.8.a"]


def test_layers_of_other_kinds_stay_apart():
    kinds = {
        "h.0.a": "f4[2]",
        "h.0.b": "f4",
        "h.1.a": "f4[3]",
        "h.1.b": "f4",
        "h.2.a": "f4[2]",
        "h.2.b": "f4",
    }
    rows = tree_rows(kinds.items())
    assert not any(row.part.startswith("%*") for row in rows)


def test_a_leaf_that_is_also_a_module_is_shown_in_it():
    assert shown(["a", "a.b"]) == ["", "a", "a", "a.b"]


def test_chains_are_one_row():
    assert shown(["a.b.c.w", "a.b.c.v"]) == ["", "a.b.c", "a.b.c.w", "a.b.c.v"]


def test_a_bare_leaf_and_deep_names_are_rows():
    assert shown(["%"]) == ["", "%"]
    deep = ".".join("x" * 300)
    assert shown([deep])[-1] == deep
