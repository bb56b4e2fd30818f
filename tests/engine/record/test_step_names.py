"""How steps are called."""

import pytest

from eformer import checkpoint
from eformer._engine.record.step_names import OF_ANY_PROGRAM, OF_FLAX, OF_ORBAX, STEPS, StepNames, step_number

NAMES = [
    "step-7",
    "step_7",
    "run-7",
    "checkpoint_7",
    "ckpt7",
    "7",
    "default_7",
    "checkpoint_7.5",
    "step-7.old",
]


@pytest.mark.parametrize(
    ("of", "known"),
    [
        (STEPS, NAMES[:6]),
        (OF_FLAX, ["checkpoint_7", "checkpoint_7.5"]),
        (OF_ANY_PROGRAM, [*NAMES[:6], NAMES[7]]),
    ],
    ids=["steps", "flax", "any"],
)
def test_each_program_has_its_names(of, known):
    assert [*of.numbers(NAMES)] == known
    assert of.numbers(["checkpoint_" + "9" * 18]) == {"checkpoint_" + "9" * 18: 10**18 - 1}


def test_any_text_may_stand_before_the_number_of_an_orbax_step():
    assert OF_ORBAX.numbers(NAMES) == dict.fromkeys(["step_7", "checkpoint_7", "7", "default_7"], 7)


@pytest.mark.parametrize("digits", ["٣", "३", "３"])
def test_a_number_has_digits_of_ascii(tmp_path, digits):
    assert step_number(f"step-{digits}") is None
    for of in (STEPS, OF_FLAX, OF_ORBAX, OF_ANY_PROGRAM, StepNames.like("checkpoint_*")):
        assert of.numbers([f"checkpoint_{digits}"]) == {}
    (tmp_path / f"checkpoint_7.{digits}").write_bytes(b"a file of another program")
    with checkpoint.Run(tmp_path, signals=()) as run:
        assert run.resume() is None


def test_a_pattern_has_one_star():
    assert StepNames.like("ema.*.final").parse("ema.12.final") == ("ema.", 12)
    with pytest.raises(ValueError, match=r"pattern='a\*b\*': expected a name with one \*"):
        StepNames.like("a*b*")
