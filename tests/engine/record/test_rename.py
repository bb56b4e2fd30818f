"""Rename and reshape leaves by rules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.boxes import Box
from eformer._engine.record.lazy_arrays import stacked, transposed, unstacked
from eformer._engine.record.planned import LazyArray
from eformer._engine.record.rename import parse_rules, rules_from
from eformer.errors import FormatError, MismatchError


class InMemory(LazyArray):
    in_order = True

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def read(self, region):
        return self.array[region.slices]


def whole(array):
    return array.read(Box.whole(array.shape))


def only(rules):
    ((stage,),) = (text.stages for text in rules.texts)
    return stage


def renamed(rules, leaves, plain=()):
    arrays = {name: InMemory(np.asarray(leaf)) for name, leaf in leaves.items()}
    return parse_rules("\n".join(rules), "rules.txt").apply(arrays, list(plain))


def test_the_first_rule_that_matches_the_whole_name_is_applied():
    found = renamed([r"a\.(\w+) -> b.\1", r"a\..* -> c", r"w -> x"], {"a.w": 1, "ww": 2})
    assert list(found.arrays) == ["b.w", "ww"]
    assert found.kept == ["ww (nearest is line 3, w)"]
    assert found.unused_rules == {"line 2": r"line 2, a\..*", "line 3": "line 3, w (nearest is 'ww')"}


@pytest.mark.parametrize("rule", [r"h\.(\d)\.w -> w\1", r"h%2E(\d)%2Ew -> w\1"])
def test_a_rule_matches_either_spelling_of_a_name(rule):
    found = renamed([rule, r"h\.step -> step", r"h\.x ->"], {"h%2E0%2Ew": 1, "h%2Ex": 2}, ["h%2Estep"])
    assert list(found.arrays) == ["w0"]
    assert found.plain == {"h%2Estep": "step"}
    assert found.left_out == ["h%2Ex"]


def test_nothing_behind_the_arrow_leaves_it_out():
    found = renamed(["head ->", "# a comment", ""], {"head": 1, "body": 2}, ["note"])
    assert list(found.arrays) == ["body"]
    assert found.left_out == ["head"]
    assert found.plain == {"note": "note"}


def test_transposed():
    array = np.arange(24).reshape(2, 3, 4)
    found = renamed(["a -> a | transpose", "b -> b | transpose 1 0 2"], {"a": array, "b": array})
    np.testing.assert_array_equal(whole(found.arrays["a"]), array.T)
    np.testing.assert_array_equal(whole(found.arrays["b"]), array.transpose(1, 0, 2))
    assert found.transforms == {"a": "transpose", "b": "transpose 1 0 2"}


def test_stacked_in_the_order_of_the_numbers():
    leaves = {f"h.{i}.w": np.full((2, 3), i) for i in (10, 2, 0, 1, 9, 8, 7, 6, 5, 4, 3)}
    found = renamed([r"h\.(\d+)\.(\w) -> \2 | transpose | stack \1 1"], leaves)
    expected = np.stack([np.full((3, 2), i) for i in range(11)], 1)
    np.testing.assert_array_equal(whole(found.arrays["w"]), expected)
    assert found.transforms == {"w": "transpose, stack 1 of 11"}


def test_unstacked_is_the_way_back():
    array = np.arange(24).reshape(2, 3, 4)
    found = renamed([r"(\w) -> h.{}.\1 | unstack 1 | transpose"], {"w": array})
    assert list(found.arrays) == ["h.0.w", "h.1.w", "h.2.w"]
    np.testing.assert_array_equal(whole(found.arrays["h.1.w"]), array[:, 1].T)


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
def test_every_box_of_a_transformed_array_equals_numpys(data, shape):
    arrays = [np.random.default_rng(i).integers(0, 99, shape) for i in range(3)]
    axis = data.draw(st.integers(0, len(shape)))
    axes = tuple(data.draw(st.permutations(range(len(shape) + 1))))
    lazy = unstacked(transposed(stacked([InMemory(a) for a in arrays], axis), axes), 0)[0]
    expected = np.stack(arrays, axis).transpose(axes)[0]
    start = tuple(data.draw(st.integers(0, n - 1)) for n in expected.shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, expected.shape, strict=True))
    box = Box(start, stop)
    np.testing.assert_array_equal(lazy.read(box), expected[box.slices])


def test_only_the_braces_of_the_rule_are_filled_by_unstack():
    found = renamed([r"(.*) -> \1.{}0 | unstack"], {"w{}": np.arange(2)})
    assert list(found.arrays) == ["w{}.00", "w{}.10"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a b", "a rule is PATTERN -> NAME"),
        ("a -> b -> c", "a rule is PATTERN -> NAME"),
        ("a( -> b", "missing )"),
        (r"a -> \1", r"\1 in '\\1': the pattern has 0 groups"),
        ("a -> b | flip", "unknown step 'flip'; expected transpose"),
        ("a -> b | stack", "unknown step 'stack'; expected"),
        (r"(\d) -> b | stack \1 | transpose", "stack must be the last step"),
        ("a -> b | unstack", "a name contains {}, for the index, if and only if the rule has unstack"),
        ("a -> b{}", "a name contains {}, for the index, if and only if the rule has unstack"),
        (
            "a -> l.{}.e.{} | unstack",
            "the name contains 2 {}, and unstack has one index to fill in; write one {} and unstack one axis at a "
            "time: `convert` with this rule, then use the result with a second rule",
        ),
        ("a -> | transpose", "a rule without a new name drops the leaf, and can have no steps"),
        (r"(?P<n>a) -> \g<n>", "a backslash must be followed by the number of a group"),
        ("a -> b | transpose x", "expected axes, counted from 0"),
    ],
)
def test_invalid_rules_are_refused_with_their_line(line, problem):
    with pytest.raises(FormatError) as caught:
        parse_rules(f"# rules\n{line}\n", "rules.txt")
    assert str(caught.value).startswith("rules.txt cannot be read as rules:\n  line 2, ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "leaves", "problem"),
    [
        (
            ["(.) -> same"],
            {"a": 1, "b": 2},
            "leaf 'b' would be renamed to 'same', which is the name of another leaf",
        ),
        (["a -> a | transpose 0 1"], {"a": [1]}, "transpose 0 1 does not fit an array of shape [1]"),
        ([r"a(\d) -> a | stack \1"], {"a0": 1, "a2": 2}, "a stack of 2 needs the numbers [1], found [0, 2]"),
        ([r"a(.) -> a | stack \1"], {"ax": 1}, "'x' is not a number to stack by"),
        (
            [r"a(\d) -> a | stack \1"],
            {"a0": [1], "a1": [1, 2]},
            "arrays in a stack must have one dtype and shape",
        ),
        ([r"a(\d) -> a | stack \1 3"], {"a0": [1]}, "axis 3 does not exist"),
        (["a -> {} | unstack"], {"a": 1}, "axis 0 does not exist"),
    ],
)
def test_rules_that_do_not_fit_the_leaves_are_refused(rules, leaves, problem):
    with pytest.raises(MismatchError) as caught:
        renamed(rules, leaves)
    assert problem in str(caught.value)


def test_plain_values_cannot_be_transposed():
    with pytest.raises(
        MismatchError, match="'step', by line 1, step: transpose needs an array, and this is a plain value"
    ):
        renamed(["step -> s | transpose"], {}, ["step"])


def test_a_file_without_rules_is_said_to_be_one():
    with pytest.raises(ValueError, match=r"rules\.txt has no rules; write one on each line: PATTERN -> NAME"):
        parse_rules("# nothing yet\n", "rules.txt")


def test_rules_are_a_file_its_text_a_dict_pairs_or_lines(tmp_path, monkeypatch):
    text = "a\\.(\\w+) -> b.\\1 | transpose\n# a comment\nhead ->\n"
    (tmp_path / "rules.txt").write_text(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    rules = {r"a\.(\w+)": r"b.\1 | transpose", "head": None}
    lines = text.splitlines()
    forms = [text, tmp_path / "rules.txt", "~/rules.txt", rules, rules.items(), iter(rules.items()), lines]
    for form in forms:
        found = [(rule.pattern.pattern, rule.name, list(map(str, rule.steps))) for rule in only(rules_from(form))]
        assert found == [(r"a\.(\w+)", r"b.\1", ["transpose"]), ("head", None, [])]
    assert [rule.name for rule in only(rules_from("a -> b"))] == ["b"]
    assert [rule.name for rule in only(rules_from("a ->"))] == [None]


def test_a_dict_of_rules_is_refused_with_all_its_problems():
    with pytest.raises(FormatError) as error:
        rules_from({"(": "a", "b": "c | turn", "d": 3})
    assert "line 1, ('(', 'a'): missing )" in str(error.value)
    assert "line 2, ('b', 'c | turn'): unknown step 'turn'" in str(error.value)
    assert "line 3, ('d', 3): the pattern and the name of a rule are text" in str(error.value)
    with pytest.raises(FormatError, match=r"line 1, .*: a rule is PATTERN -> NAME"):
        rules_from([("a", "b", "c")])
    with pytest.raises(FileNotFoundError):
        rules_from("no-such-file")
