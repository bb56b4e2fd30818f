"""The command `eformer report`."""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import Any

import click

from eformer._engine.record.text import printable
from eformer.cli.group import Size, colours, print_json, wants_bar
from eformer.cli.rules import keep_options, rules_from


@click.command()
@click.argument("path", type=click.Path())
@click.option("--against", type=click.Path(), metavar="OTHER", help="Compare with another checkpoint.")
@click.option("--output", "-o", type=click.Path(), help="The file to write, - for standard output.")
@click.option("--no-values", is_flag=True, help="Read headers only: no statistics, nothing is checked.")
@click.option("--step", type=int, help="This step of the run at PATH.")
@click.option("--prefix", help="Only this tree, if there are several.")
@click.option("--memory", type=Size(), help="The most memory that the program takes, such as 2GB.")
@keep_options
@click.option("--json", "as_json", is_flag=True, help="Print what the page shows as JSON.")
def report(
    path: str,
    against: str | None,
    output: str | None,
    no_values: bool,
    step: int | None,
    prefix: str | None,
    memory: int | None,
    as_json: bool,
    **keep: Any,
) -> None:
    """Write a page for a browser that shows the checkpoint at PATH: tree, sizes, dtypes, shardings, distributions.

    The page is one file that needs no network: NAME-report.html in this directory, unless --output says otherwise. A
    file that is not a report is never replaced. Arrays are read once and checked against their digests.

    The path of a run gives a page of the run: steps, sizes, metrics, what is damaged, and how much each step changed
    the model. With rules, it shows which steps they keep.

    \b
    eformer report ./run/step-200
    eformer report ./run/step-200 --against ./run/step-100 -o change.html
    eformer report model.safetensors --no-values
    eformer report ./run --keep 3
    """
    from eformer._engine.pages.report import became_in, check_replaceable, damage_in
    from eformer._engine.pages.report import report as make

    if as_json and output:
        raise click.UsageError("--json prints to standard output; leave out --output")
    if output == "-" and sys.stdout is None:
        raise OSError("standard output is closed: the page has nowhere to go")
    if output and output != "-":
        check_replaceable(output)  # before anything is read
    found = make(
        path,
        against,
        values=not no_values,
        prefix=prefix,
        step=step,
        keep=rules_from(**keep) or None,
        memory=memory,
        progress=wants_bar(as_json),
    )
    if as_json:
        print_json(found.data)
    elif output == "-":
        click.echo(found.html, nl=False)
    else:
        written = found.save(output or default_name(found.path))
        click.secho(f"report: {printable(written)}", fg="green", color=colours())
    if became := became_in(found):
        click.secho(printable(f"warning: {found.path}: {became}"), fg="red", err=True, color=colours())
    if damage := damage_in(found):
        click.secho(printable(f"warning: {found.path}: {damage}"), fg="red", err=True, color=colours())
        sys.exit(1)


def default_name(path: str) -> str:
    """Return the name of the page for a checkpoint: that of its last directories, as in run-step-100-report.html."""
    parts = [
        part for part in PurePath(path.partition("://")[2] or path).parts if part not in ("/", ".", "..")
    ]
    return f"{'-'.join(parts[-1:]) or 'checkpoint'}-report.html"
