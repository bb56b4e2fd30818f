"""What `eformer` does, command by command."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import sys
from typing import Any

import click

import eformer
from eformer.cli._text import printable


def _complain(problem: str) -> None:
    lines = "\n".join(map(printable, problem.split("\n")))
    click.secho(f"error: {lines}", fg="red", err=True, color=_colours())


def _colours() -> bool | None:
    """Where there is a terminal, unless nobody wants them: https://no-color.org"""
    return False if os.environ.get("NO_COLOR") else None


class _Commands(click.Group):
    """Errors are one red line with a hint; `--debug` shows where they come from."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (ValueError, OSError, TypeError, RuntimeError) as error:
            if ctx.params.get("debug"):
                raise
            _complain(str(error))
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(eformer.__version__, prog_name="eformer")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Look at checkpoints, whoever wrote them: ours, safetensors, Orbax, the original eFormer.

    \b
    eformer inspect ./checkpoint           what it is, and the tree
    eformer ls ./checkpoint "*.bias"       one line a leaf
    eformer verify ./checkpoint            every byte against its digest
    """


@main.command()
@click.argument("path")
@click.option("--prefix", help="Of one tree, if there are several.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def inspect(path: str, prefix: str | None, as_json: bool) -> None:
    """What the checkpoint at PATH is, and its tree.

    \b
    eformer inspect ./checkpoint
    eformer inspect model.safetensors --json | jq .trees
    """
    from eformer.cli import _facts  # late: `--help` should not wait for numpy

    facts, trees = _facts.checkpoint_facts(path, prefix)
    if as_json:
        for name, tree in trees.items():
            facts["trees"][name]["leaves"] = list(_facts.leaf_facts(tree))
        _print_json(facts)
    else:
        from eformer.cli import _show

        _show.show_checkpoint(facts, trees, _show.console())
    if facts["problems"]:
        sys.exit(1)


@main.command("ls")
@click.argument("path")
@click.argument("glob", default="*")
@click.option("--prefix", help="Of one tree, if there are several.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_leaves(path: str, glob: str, prefix: str | None, as_json: bool) -> None:
    """The leaves of the checkpoint at PATH whose names match GLOB, one line each.

    \b
    eformer ls ./checkpoint
    eformer ls ./checkpoint "layers.*.bias"
    """
    from eformer.cli import _facts

    facts, trees = _facts.checkpoint_facts(path, prefix)
    leaves = [
        ({"prefix": name} if name else {}) | leaf
        for name, tree in trees.items()
        for leaf in _facts.leaf_facts(tree)
        if fnmatch.fnmatchcase(leaf["name"], glob)
    ]
    if as_json:
        _print_json(leaves)
    else:
        from eformer.cli import _show

        _show.list_leaves(leaves, _show.console())
    for name, problem in facts["problems"].items():
        _complain(f"{name or 'the tree'} cannot be read: {problem}")
    if facts["problems"]:
        sys.exit(1)


@main.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--quiet", "-q", is_flag=True, help="Nothing but the exit code.")
def verify(path: str, as_json: bool, quiet: bool) -> None:
    """Read every byte of the checkpoint at PATH, and compare it with what was saved. Exit code 1 if it is not.

    Checkpoints of other writers have no digests: then it is only known that all bytes are there, which is said.

    \b
    eformer verify ./checkpoint && rsync -a ./checkpoint backup:
    """
    from eformer.checkpoint._verify import verify as check

    report = check(path, progress=not quiet and sys.stderr.isatty())
    if as_json:
        damages = [{name: getattr(damage, name) for name in damage.__slots__} for damage in report.damages]
        shown = {
            name: getattr(report, name) for name in ("path", "trees", "leaves", "nbytes", "has_digests", "ok")
        }
        _print_json(shown | {"damages": damages})
    elif not quiet:
        lines = "\n".join(map(printable, str(report).split("\n")))
        click.secho(lines, fg="green" if report.ok else "red", color=_colours())
    if not report.ok:
        sys.exit(1)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(_plain(value), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    """What every reader of JSON takes: keys are text, and so are numbers that JSON has not."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
