"""Calls whose types a type checker knows: `make check` runs mypy on this file, nothing runs it."""

from typing import Any, assert_type

from eformer import checkpoint
from eformer.checkpoint import LoadReport


class State:
    """What somebody trains."""


def load(state: State) -> None:
    assert_type(checkpoint.load("run/100"), Any)
    assert_type(checkpoint.load("run/100", like=state), State)
    assert_type(checkpoint.load("run/100", into=state, mesh=None, partial=True), State)
    assert_type(checkpoint.load("run/100", like={"step": 1}), dict[str, int])
    assert_type(checkpoint.load(["base", "lora"], like=state, dtype="like", duplicates="last"), State)
    assert_type(checkpoint.load("hf", dequant=False), Any)
    assert_type(checkpoint.load("hf", like=state, dequant="bf16"), State)
    assert_type(checkpoint.load("run", step="best", like=state), State)
    assert_type(checkpoint.best("run", by="loss", mode="max"), str | None)
    assert_type(checkpoint.load("run/100", like=state, return_report=True), tuple[State, LoadReport])
    assert_type(checkpoint.load("run/100", into=state, return_report=True), tuple[State, LoadReport])


def resume(run: checkpoint.Run, state: State) -> None:
    found = run.resume(like=state, partial=True, rename={"a": "b"}, dtype="bfloat16", return_report=True)
    assert_type(found, checkpoint.Resumed | None)
    if found:
        assert_type(found.report, LoadReport | None)
    run.resume(partail=True)  # type: ignore[call-arg]
