"""Tools of which any call fails, or that are killed at any call: nothing half done is left for good."""

import errno
import os
import shutil

import pytest

from support.faults import STRIDE, hooked, noted, struck
from support.tool_faults import STEPS, carry_out, die_at, prepare, result_of

pytestmark = pytest.mark.sample(3)

CONVERSIONS = [f"convert to {name}" for name in ("new.npz", "new.msgpack", "new.safetensors", "new", "orbax")]
TOOLS = ["prune", "save_to_file", *CONVERSIONS]


def stride_of(tool):
    return 1 if tool == "save_to_file" else STRIDE  # it makes few calls


@pytest.mark.sample(5)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_killed_tool_leaves_is_swept_by_the_next_one(place, tool, moment):
    def strike(at):
        return at if die_at(at, moment, tool, prepare(tool, place)) else None

    for at in struck(strike, (tool, moment), stride_of(tool)):
        with noted(f"call {at}"):
            if tool in CONVERSIONS:  # which make new files only
                clear(place / "folder" / result_of(tool)[0])
            carry_out(tool, place / "folder")
            assert sorted(os.listdir(place / "folder")) == result_of(tool)


def clear(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_of_which_a_call_fails_leaves_no_litter(place, tool):
    for at, error in struck(lambda at: failed_at(at, tool, place), tool, stride_of(tool)):
        left = sorted(os.listdir(place / "folder"))
        with noted(f"call {at}: {error!r}"):
            assert error is None or error.errno == errno.EIO
            if tool == "prune":
                assert not [name for name in left if name.startswith(".")]
                carry_out(tool, place / "folder")
                assert sorted(os.listdir(place / "folder")) == result_of(tool)
            elif tool == "save_to_file":
                assert left in ([], result_of(tool))
            else:
                assert left == ([] if error else result_of(tool))


def failed_at(at, tool, place):
    folder, failed = prepare(tool, place), []

    def fail(number, name):
        if number == at:
            failed.append(name)
            raise OSError(errno.EIO, "bad sector")

    try:
        with hooked(before=fail):
            carry_out(tool, folder)
    except OSError as error:
        return at, error
    return (at, None) if failed else None


def test_scores_of_steps_that_are_there_stay(place):
    carry_out("prune", prepare("prune", place))
    assert {name for name in os.listdir(place / "folder") if name in STEPS} == {"step-3"}
    assert (place / "folder" / "step-3.scores.json").exists()
