"""Rules that name axes: the syntax, and the problems of a line."""

import pytest

from eformer._engine.record.notation import is_notation, parse_axes, parse_let, parse_rule, without_comment
from eformer._engine.record.rename import parse_rules, rules_from
from eformer.errors import FormatError


@pytest.mark.parametrize(
    "text",
    ["d", "", "(h k) d", "(h k)+(g k)+(g k) d", "d (u x+x+(r y)+(r y))", "a ...", "1 p d", "(h n+(j s))"],
)
def test_axes_read_as_they_are_written(text):
    assert " ".join(map(str, parse_axes(text))) == text


def test_a_rule_has_leaves_steps_and_a_condition():
    rule = parse_rule(
        "line 1", "a.{l<N} or b.{l} [(h k) d] <-> c.{l} [d h k] | scale 1 / 2 | cast f32 if x - 1"
    )
    (left,), (right,) = rule.left, rule.right
    assert (str(left), left.tied.text, str(right)) == ("a.{l<N} [(h k) d]", "b.{l}", "c.{l} [d h k]")
    assert [*map(str, rule.steps)] == ["scale 1 / 2", "cast float32"]
    assert (rule.is_two_way, str(rule.condition)) == (True, "x - 1")


def test_leaves_are_set_apart_by_commas_with_a_space():
    rule = parse_rule("line 1", "x,y.{c=a|b} [a+b d], z [e d] <-> p.{c=a|b} [d a], q.{c=a|b} [d b], z [d e]")
    assert [leaf.text for leaf in rule.left] == ["x,y.{c=a|b}", "z"]
    assert len(rule.right) == 3


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (r"model\.layers\.(\d+)\.w -> w", False),
        (r"h\.\d{2}\.w -> w", False),
        (r"h.[0-9] -> w", False),
        (r"w{1,3} -> w", False),
        ("a <-> b", True),
        ("a.{l}.b -> c.{l}", True),
        ("a.{*q} ->", True),
        ("a.{(b i)} ->", True),
        ("a [d] -> b [d]", True),
        ("-> b [d] | fill 1", True),
    ],
)
def test_the_notation_and_regular_expressions_are_told_apart(line, expected):
    assert is_notation(line) is expected


def test_comments_begin_with_a_space_and_a_hash():
    assert without_comment("a#1 <-> b # the rest") == "a#1 <-> b"
    assert without_comment("# all of it") == ""


def test_a_number_has_a_name():
    name, expression = parse_let("k = head_dim or width / 4")
    assert (name, str(expression)) == ("k", "head_dim or width / 4")
    assert parse_let("a <-> b") is None
    assert parse_let("{c=a|b} <-> {c=d|e}") is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "q [(h k) d] <-> q.{l} [d l h]",
            "axis k is on the left only; both sides name the same axes (left: h k d, right: l d l h)",
        ),
        ("a [d] <-> b [d d]", "axis d is twice on the right"),
        ("a [x+y+z] <-> b [x], c [y]", "3 blocks on the left, 2 on the right"),
        ("a.{c=x|y} <-> b.{c=z}", "c has 2 words on the left, 1 on the right"),
        ("a.{c=x|x} <-> b.{c=z|y}", "the words differ from each other"),
        ("a [d] <-> b", "both sides have brackets, or neither has"),
        ("a [...] <-> b [d]", "... stands on both sides, or on neither"),
        ("a [... d ...] <-> b [d ...]", "... stands once"),
        ("a [(... d)] <-> b [... d]", "... stands once, and in no group"),
        ("a [x+y (u+v)] <-> b [x+y (u+v)]", "a leaf has at most one axis with +"),
        ("a [2 d] <-> b [d]", "unexpected '2'; an axis is a name, 1 or ..."),
        ("a [(d] <-> b [d]", "a group is not closed"),
        ("a [()] <-> b []", "a group is empty"),
        ("a [+d] <-> b [d]", "expected an axis before +"),
        ("a [d)] <-> b [d]", "unexpected ')'"),
        ("a.{1} <-> b", "{1}: '1' is not a name"),
        ("a.{b i} <-> b", "{b i} is no placeholder; expected {l}"),
        ("a.{(b<2 i)} <-> b.{b}.{i}", "only an inner axis of a number has a limit"),
        ("a.{*q}{*q} <-> {*q}", "more than 3 placeholders of text, or one twice"),
        ("a.{*q} <-> b.{*r}", "both sides have the same placeholders of text"),
        ("a or b or c <-> d", "unexpected 'or c'"),
        ("a or b [d], e [f] <-> c [d], g [f]", "`A or B` stands alone on the left"),
        ("a.{l} or b.{m} <-> c.{l}", "a.{l} and b.{m} have different placeholders"),
        ("a, <-> b", "unexpected ','"),
        ("a b <-> c", "unexpected 'b'; leaves are set apart by a comma and a space"),
        ("a <-> b <-> c", "a rule is NAME [AXES] <-> NAME [AXES]"),
        (
            "a <-> b | flip",
            "unknown step 'flip'; expected one of scale X, add X, pad AXIS N, cast DTYPE, fill X",
        ),
        ("a <-> b | cast string", "'string' is not a floating dtype"),
        ("a <-> b | scale 1 +", "'1 +' is not an expression"),
        ("a [d] <-> b [d] | pad e 4", "pad: e is not an axis of its own on the right"),
        ("a <-> b | pad d 4", "pad needs brackets"),
        ("a.{l} -> | scale 2", "a rule without a new name leaves the leaf out, and can have no steps"),
        ("<-> b | fill 1", "a constant leaf has nothing on the left, and axes and fill on the right"),
        (
            "a{x}{y} <-> b.{x}.{y}",
            "a{x}{y} has two numbers side by side, so that 12 could be 1 and 2; write text",
        ),
        (
            "".join(f"{{{c}=a|aa}}" for c in "abcdefghi") + " -> b",
            "has more than 8 placeholders of words",
        ),
        ("-> b [d] | fill 1 | scale 2", "fill is the first step, and only cast can follow it"),
        ("a [d] <-> b [d] | fill 1", "a constant leaf has nothing on the left"),
        ("<-> b [d]", "a constant leaf has nothing on the left"),
        ("<->", "a rule without a new name leaves the leaf out"),
    ],
)
def test_a_line_that_can_fit_no_leaf_is_refused(line, problem):
    with pytest.raises(FormatError) as caught:
        parse_rules(f"# rules\n{line}\n", "llama.rules")
    assert str(caught.value).startswith("llama.rules cannot be read as rules:\n  line 2, ")
    assert problem in str(caught.value)


def test_one_error_lists_all_lines():
    with pytest.raises(FormatError) as caught:
        parse_rules("k = 1 +\na [d] <-> b\n( -> c\n", "x")
    assert [line.split(",")[0] for line in str(caught.value).split("\n")[1:]] == [
        "  line 1",
        "  line 2",
        "  line 3",
    ]


def test_deep_groups_and_long_lines_are_refused_soon():
    with pytest.raises(FormatError, match="expected an axis before"):
        parse_rule("line 1", f"a [{'(' * 400}d{')' * 400}] <-> b [d]")


@pytest.mark.parametrize("given", ["", "."])
def test_a_directory_is_no_file_of_rules(given):
    with pytest.raises(FormatError, match="expected rules: the name of a book, a file, or their text"):
        rules_from(given)


def test_a_text_may_begin_with_a_byte_order_mark():
    ((rule,),) = rules_from("\ufeffa <-> b\r\n").texts[0].stages
    assert rule.left[0].text == "a"
