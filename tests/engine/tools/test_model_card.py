"""The card of an exported model: facts of like's card, and no path of this machine."""

import pytest

from eformer import __version__
from eformer._engine.tools.model_card import CardFacts, card_lines, front_matter, hub_id, model_card

CARD = "---\nlicense: mit\r\ntags:\n- a\n- b\nlanguage:\n  - en\nbase_model: org/other\n---\n# Theirs\nlicense: no\n"


def test_the_front_matter_is_taken_as_it_is():
    assert front_matter(CARD)["tags"] == ["tags:", "- a", "- b"]
    assert front_matter(CARD)["language"] == ["language:", "  - en"]


@pytest.mark.parametrize("text", ["", "# No front matter", "---\nnever: closed", "--- \n", "---\n---\n"])
def test_a_card_without_front_matter_has_none(text):
    assert front_matter(text) == {}


def test_odd_entries_are_left_out():
    odd = "---\nlicense: " + "x" * 999 + "\npipeline_tag: a\x1b[31m\nlanguage: en\n---\n"
    assert list(front_matter(odd)) == ["language"]


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("hf://org/model", "org/model"),
        ("hf://org/model@abc/sub", "org/model"),
        ("/home/a/.cache/huggingface/hub/models--org--my-model/snapshots/abc", "org/my-model"),
        ("/models/llama", ""),
        ("s3://bucket/llama", ""),
    ],
)
def test_the_id_of_the_model_comes_from_its_place(url, name):
    assert hub_id(url) == name


def test_a_card_names_the_base_and_the_licence_once():
    facts = CardFacts("org/model", front_matter(CARD), 1000, 2000, "bfloat16", ["One.", "Two."])
    text = model_card(facts)
    assert text.startswith("---\nbase_model: org/model\nlicense: mit\n")
    assert text.count("base_model") == 1
    assert "- One.\n- Two.\n" in text
    assert "Theirs" not in text


def test_without_a_base_on_the_hub_the_base_of_like_stays():
    text = model_card(CardFacts("", front_matter(CARD), 1, 2, "bfloat16"))
    assert "base_model: org/other\n" in text


def test_the_lines_have_digest_and_rules_and_no_path():
    origin = {"rules": {"book": "llama/maxtext", "version": 2}}
    lines = card_lines(origin, [{"path": "/home/me/run/step-9", "digest": "ab" * 16}], "org/model")
    assert f"from step-9, a checkpoint with the digest {'ab' * 16}." in lines[0]
    assert "rules llama/maxtext, version 2, read backwards" in lines[1]
    assert "home" not in "".join(lines)


def test_the_card_of_a_merge_names_every_checkpoint_without_its_path():
    parents = [{"path": f"/home/me/run/step-{n}", "digest": str(n) * 32, "weight": 0.5} for n in (8, 9)]
    line = card_lines({}, [*parents, {"as": "lora"}], "")[0]
    known = "; ".join(f"step-{n}, a checkpoint with the digest {str(n) * 32}" for n in (8, 9))
    assert line == f"Merged by eformer {__version__} from 3 checkpoints: {known}."
