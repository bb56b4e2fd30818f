"""Rule books: files that parse, names that are found, and errors that name books near by."""

import hashlib

import pytest

from eformer._engine.record.rename import parse_rules, rules_from
from eformer._engine.record.rule_books import book_names, books, find_book, is_layout, parse_file
from eformer.errors import FormatError, MismatchError, NotFoundError
from support.lazy import applied, numbers

HEAD = "# toy: a toy\n# rules 3; tested with maxtext 0.2.5, transformers 5.22.2\nfor toy, toy2\nh = heads\n"


@pytest.mark.parametrize("name", book_names())
def test_every_book_is_rules(name):
    book = find_book(name)
    assert parse_rules(book.text, name)
    assert f"{name}, rules {book.version}: " in book.text.splitlines()[0]


@pytest.mark.parametrize("family", books(), ids=lambda family: family.name)
def test_every_file_names_its_models_and_the_versions_it_was_tested_with(family):
    assert family.title
    assert family.version >= 1
    assert any(program.startswith("transformers ") for program in family.tested_with)
    for layout, program in (("maxtext", "maxtext "), ("tunix", "google-tunix ")):
        assert (layout in family.layouts) == any(tested.startswith(program) for tested in family.tested_with)


def test_a_layout_takes_its_family_from_the_model_type():
    assert find_book("maxtext", "mistral") == find_book("mistral/maxtext")
    assert find_book("mistral/maxtext").name == "mistral/maxtext"


def test_a_layout_after_another_is_a_further_stage():
    base, scanned = find_book("llama/maxtext-unscanned").text, find_book("llama/maxtext").text
    assert scanned.count("\n---\n") == base.count("\n---\n") + 1
    assert (
        scanned.splitlines()[-1]
        == "params.decoder.layers_{l}.{*q} [a ...] <-> params.decoder.layers.{*q} [a l ...]"
    )


def test_a_book_has_the_digest_of_its_text():
    book = find_book("qwen3/tunix")
    assert book.sha256 == hashlib.sha256(book.text.encode()).hexdigest()
    assert (book.version, book.layout) == (1, "tunix")


def test_rules_carry_the_books_that_they_came_from():
    rules = rules_from(["maxtext", "params.{*q} <-> {*q}"]).of_model({"model_type": "qwen3_moe"})
    (book,) = rules.books
    assert book == find_book("qwen3_moe/maxtext")


def test_the_layouts_of_flax_serve_every_model():
    assert find_book("flax", "never_seen").name == "flax/flax"
    assert find_book("qwen3/flax").text.splitlines()[1:] == find_book("flax/flax").text.splitlines()[1:]
    assert find_book("gpt2/flax").text != find_book("flax/flax").text


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("lama/maxtext", None, "no rule book 'lama/maxtext'; near are llama/maxtext"),
        (
            "llama/maxtxt",
            None,
            "no rules for the layout 'maxtxt' of 'llama', which has flax, flax-scan, maxtext",
        ),
        ("maxtext", None, "'maxtext' is a layout of several families, and no config.json says the family"),
        ("maxtext", "lama", "no rule book 'maxtext' for 'lama'; near are llama/maxtext"),
        ("maxtext", "phi3", "no rules for the layout 'maxtext' of 'phi3', which has flax, flax-scan"),
    ],
)
def test_an_unknown_book_is_an_error_that_names_books_near_by(name, kind, said):
    with pytest.raises(NotFoundError) as caught:
        find_book(name, kind)
    assert said in str(caught.value)


def test_names_of_books_differ_from_names_of_files():
    assert is_layout("maxtext")
    assert is_layout("qwen3_moe/tunix")
    assert not is_layout("my/rules.txt")
    assert not is_layout("qwen3_moe/gemma")


def test_a_file_gives_its_layouts():
    parsed = parse_file("toy", HEAD + "a ->\n[one]\nb <-> c\n[two] after one\nc <-> d\n")
    assert (parsed.title, parsed.version) == ("a toy", 3)
    assert parsed.model_types == ("toy", "toy2")
    assert parsed.tested_with == ("maxtext 0.2.5", "transformers 5.22.2")
    assert (parsed.numbers, parsed.first) == (("h = heads",), "a ->")
    assert {name: (layout.after, layout.text) for name, layout in parsed.layouts.items()} == {
        "one": (None, "b <-> c"), "two": ("one", "c <-> d"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "# toy: a toy\nfor toy\n[a]\nb <-> c\n",
            "has no line '# rules VERSION; tested with PROGRAM VERSION, ...'",
        ),
        (HEAD + "something else\n[a]\nb <-> c\n", "'something else' is above all layouts"),
        (HEAD + "[a\nb <-> c\n", "'[a' is no new layout"),
        (HEAD + "[a]\nb <-> c\n[a]\nd <-> e\n", "'[a]' is no new layout"),
    ],
)
def test_a_file_that_is_wrong_names_the_line(text, said):
    with pytest.raises(FormatError) as caught:
        parse_file("toy", text)
    assert said in str(caught.value)


def test_a_book_of_another_family_than_the_model_is_noted():
    def notes(book):
        return applied(book, {"model.norm.weight": numbers(3)}, {"model_type": "llama"}).notes

    differ = "config.json is of a model 'llama', whose rules 'llama/maxtext' differ from 'qwen3/maxtext'"
    assert notes("qwen3/maxtext") == [differ]
    assert notes("llama/maxtext") == notes("mistral/maxtext") == notes("qwen3/flax") == notes("maxtext") == []


def test_a_family_alone_is_no_book_and_its_layouts_are_listed():
    with pytest.raises(
        NotFoundError, match="'llama' is a family of models; name a layout of it as well: llama/flax, ll"
    ):
        find_book("llama")


def test_an_unmatched_leaf_says_in_which_direction_the_book_was_read():
    with pytest.raises(MismatchError, match="x: no rule of llama/maxtext, read from right to left, matches"):
        applied("llama/maxtext", {"x": numbers(2)}, back=True)
    with pytest.raises(MismatchError, match="x: no rule of llama/maxtext matches"):
        applied("llama/maxtext", {"x": numbers(2)})
