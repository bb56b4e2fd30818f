"""The numbers of rules, from config.json."""

import pytest

from eformer._engine.record.expressions import Numbers, parse_expression
from eformer.errors import FormatError

CONFIG = {"heads": 4, "width": 32, "none": None, "text": {"layers": 14, "kind": "llama"}, "tied": True}


def value(text, lets=None, config=CONFIG):
    return Numbers({name: parse_expression(each) for name, each in (lets or {}).items()}, config).get(
        parse_expression(text)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("width / heads", 8),
        ("2 + 3 * 4 - 1", 13),
        ("(2 + 3) * -4", -20),
        ("text.layers - text.layers % 6", 12),
        ("1 / 4", 0.25),
        ("sqrt(width / 2)", 4),
        ("bf16(sqrt(20))", 4.46875),
        ("none or head_dim or width / heads", 8),
        ("1.5", 1.5),
        ("tied", 1),
        ("missing + 1", None),
        ("none", None),
    ],
)
def test_the_value_of_an_expression(text, expected):
    found = value(text)
    assert found == expected
    assert type(found) is type(expected)


def test_names_stand_for_expressions_and_win_over_keys():
    assert value("k + h", {"k": "width / h", "h": "heads"}) == 12
    assert value("width", {"width": "7"}) == 7


def test_a_name_may_complete_its_own_key():
    assert value("head_dim", {"head_dim": "head_dim or width / heads"}) == 8
    assert value("heads", {"heads": "heads or 1"}) == 4


def test_names_that_need_each_other_are_refused():
    with pytest.raises(FormatError, match="the numbers of these names need each other: a -> b -> a"):
        value("a", {"a": "b + 1", "b": "a"})
    with pytest.raises(FormatError, match="need each other"):
        value("n0", {f"n{i}": f"n{i + 1}" for i in range(100)})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it ends too early"),
        ("1 +", "it ends too early"),
        ("1 2", "unexpected '2'"),
        ("__import__('os')", 'unexpected "\'"'),
        ("open(1)", "unknown function 'open'; expected sqrt or bf16"),
        ("2 ** 8", "unexpected '*'"),
        ("(1", "a parenthesis is not closed"),
        ("or 1", "unexpected 'or'"),
        ("(" * 40 + "1" + ")" * 40, "more than 32 parentheses"),
        ("1" * 501, "an expression has at most 500 characters, and this one 501"),
    ],
)
def test_a_text_that_is_no_expression_is_refused(text, problem):
    with pytest.raises(FormatError) as caught:
        parse_expression(text)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("1 / 0", "1 / 0 has no value"),
        ("sqrt(0 - 1)", "has no value"),
        ("9999999999 * 9999999999", "is too large"),
        ("text.kind + 1", "text.kind of config.json is 'llama', which is not a number"),
    ],
)
def test_an_expression_without_a_value_is_refused(text, problem):
    with pytest.raises(FormatError) as caught:
        value(text)
    assert problem in str(caught.value)


def test_a_required_number_names_the_missing_key():
    numbers = Numbers({}, {"a": 1})
    with pytest.raises(
        FormatError, match=r"b \+ a is unknown \(config.json has no b\); pass config= with it"
    ):
        numbers.require(parse_expression("b + a"))
    with pytest.raises(FormatError, match=r"no config\.json"):
        Numbers({}, {}).require(parse_expression("b"))
