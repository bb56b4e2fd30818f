"""Trees of dicts and lists, made of the paths of their items."""

import pytest

from eformer._engine.formats.nested_names import SequenceIndex, tree_of_paths
from eformer.errors import FormatError


def test_keys_that_count_from_0_on_make_a_list_whether_they_are_numbers_or_texts_of_an_index():
    assert tree_of_paths([(("a", 1), "y"), (("a", 0), "x")]) == {"a": ["x", "y"]}
    assert tree_of_paths([((SequenceIndex("0"), "b"), "x"), ((SequenceIndex("1"),), "y")]) == [
        {"b": "x"},
        "y",
    ]


@pytest.mark.parametrize("keys", [(0, 2), ("0", "1"), (SequenceIndex("0"), SequenceIndex("01"))])
def test_other_keys_make_a_dict(keys):
    assert tree_of_paths([((key,), key) for key in keys]) == {key: key for key in keys}


def test_a_container_that_is_an_item_stays_as_it_is():
    assert tree_of_paths([(("a",), {0: "x"}), (("b",), [])]) == {"a": {0: "x"}, "b": []}


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        ([("a",), ("a",)], "leaf 'a' is listed twice"),
        ([("a",), ("a", "b")], "leaf 'a.b' is inside another leaf"),
        ([("a", "b"), ("a",)], "leaf 'a' is listed twice"),
        ([()], "leaf '' is nested 0 deep"),
        ([("a",) * 101], "is nested 101 deep"),
    ],
)
def test_paths_that_make_no_tree_are_refused(paths, problem):
    with pytest.raises(FormatError, match=problem):
        tree_of_paths([(path, {}) for path in paths])
