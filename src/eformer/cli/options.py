"""Options that several commands have.

Tests: tests/cli/test_steps.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from eformer._engine.record.policies import Keep

F = TypeVar("F", bound="Callable[..., Any]")

path = click.argument("path", type=click.Path())
prefix = click.option("--prefix", help="Use this tree, if the checkpoint has several.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _Step(click.ParamType):  # type: ignore[type-arg]  # it is not generic in older versions of click
    """The number of a step, or best."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, int):
            return value
        if value == "best":
            return "best"
        if not value.isdecimal():
            self.fail(f"{value!r} is neither the number of a step nor 'best'", param, ctx)
        return int(value)


step = click.option(
    "--step",
    type=_Step(),
    metavar="N|best",
    help="Of a run, use this step: its number, or best, by the rule of the run that names a metric.",
)
quiet = click.option("--quiet", "-q", is_flag=True, help="Print nothing; set the exit code only.")


# --------------------------------------------------------------------------------------- steps that stay

_POSITIVE = click.IntRange(min=1)

_RULES = (
    click.option("--keep", type=_POSITIVE, metavar="N", help="Keep the last N steps."),
    click.option("--keep-every", type=_POSITIVE, metavar="N", help="Keep the steps that are multiples of N."),
    click.option(
        "--keep-best", type=_POSITIVE, metavar="N", help="Keep the best N steps by the metric of --by."
    ),
    click.option("--by", metavar="METRIC", help="The metric of --keep-best, such as eval.loss."),
    click.option(
        "--mode",
        type=click.Choice(["min", "max"]),
        help="Whether a lower (min) or higher (max) metric is better.  [default: min]",
    ),
    click.option(
        "--keep-hours", type=float, metavar="H", help="Keep the steps of the H hours before the newest."
    ),
    click.option(
        "--keep-at", type=int, multiple=True, metavar="STEP", help="Keep this step. Can be repeated."
    ),
    click.option(
        "--foreign", is_flag=True, help="Also count and delete steps of other programs, such as Orbax."
    ),
)


def keep(command: F) -> F:
    """Add the options of rules to a command, which passes them to `rules_from`."""
    for option in reversed(_RULES):
        command = option(command)
    return command


def rules_from(
    keep: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    by: str | None = None,
    mode: str | None = None,
    keep_hours: float | None = None,
    keep_at: tuple[int, ...] = (),
    foreign: bool = False,
) -> tuple[Keep, ...]:
    """Return a rule for each given option: a step stays if any rule keeps it."""
    from eformer._engine.record.policies import Keep

    if (keep_best is None) != (by is None):
        raise click.UsageError("--keep-best and --by METRIC need each other")
    if mode is not None and keep_best is None:
        raise click.UsageError("--mode belongs to --keep-best, which is missing")
    given: list[dict[str, Any]] = [
        {"last": keep},
        {"every": keep_every},
        {"best": keep_best, "by": by, "mode": mode or "min"},
        {"hours": keep_hours},
        {"at": keep_at},
    ]
    return tuple(
        Keep(**rule, foreign=foreign)
        for rule in given
        if any(value for name, value in rule.items() if name != "mode")
    )


# --------------------------------------------------------------------------------------------- buckets


def _set(context: click.Context, _: click.Parameter, given: tuple[str, ...]) -> None:
    found = {}
    for text in given:
        name, is_pair, value = text.partition("=")
        if not is_pair or not name.isidentifier():
            raise click.UsageError("--store-option takes NAME=VALUE, such as endpoint=https://host")
        found[name] = value
    if found:
        from eformer._engine.stores.store_options import store_options  # late: `--help` should not wait

        context.with_resource(store_options("", **found))


store = click.option(
    "--store-option",
    multiple=True,
    metavar="NAME=VALUE",
    expose_value=False,
    callback=_set,  # the options hold while the command runs
    help="An option of the bucket, such as endpoint=https://host. Can be repeated. Other users can see command lines: "
    "put credentials into environment variables.",
)
