"""The commands `eformer report` and `eformer serve`: a checkpoint or a run as a page for a browser."""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

from eformer.cli import options
from eformer.cli.group import Size, print_json, say, wants_bar

if TYPE_CHECKING:
    from eformer._engine.pages.requests import Site


@click.command()
@options.path
@click.option("--against", type=click.Path(), metavar="OTHER", help="Compare with another checkpoint.")
@click.option("--output", "-o", type=click.Path(), help="The file to write, - for standard output.")
@click.option("--no-values", is_flag=True, help="Read headers only: no statistics, nothing is checked.")
@click.option("--step", type=int, help="This step of the run at PATH.")
@options.prefix
@click.option("--memory", type=Size(), help="The most memory that the program takes, such as 2GB.")
@options.keep
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
    from eformer._engine.pages.report import became_in, check_report_path, damage_in
    from eformer._engine.pages.report import report as make

    if as_json and output:
        raise click.UsageError("--json prints to standard output; leave out --output")
    if output == "-" and sys.stdout is None:
        raise OSError("standard output is closed: the page has nowhere to go")
    if output and output != "-":
        check_report_path(output)  # before anything is read
    found = make(
        path,
        against,
        values=not no_values,
        prefix=prefix,
        step=step,
        keep=options.rules_from(**keep) or None,
        memory=memory,
        progress=wants_bar(as_json),
    )
    if as_json:
        print_json(found.data)
    elif output == "-":
        click.echo(found.html, nl=False)
    else:
        written = found.save(output or default_name(found.path))
        say(f"report: {written}", "green")
    if became := became_in(found):
        say(f"warning: {found.path}: {became}", "red", err=True)
    if damage := damage_in(found):
        say(f"warning: {found.path}: {damage}", "red", err=True)
        sys.exit(1)


def default_name(path: str) -> str:
    """Return the name of the page for a checkpoint: that of its last directories, as in run-step-100-report.html."""
    parts = [
        part for part in PurePath(path.partition("://")[2] or path).parts if part not in ("/", ".", "..")
    ]
    return f"{'-'.join(parts[-1:]) or 'checkpoint'}-report.html"


@click.command()
@options.path
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="The port to listen at; by default any that is free.",
)
@options.keep
def serve(path: str, host: str, port: int, **keep: Any) -> None:
    """Show the run or the checkpoint at PATH in a browser: open the address that is printed.

    The page of a run follows it while it trains, and has a link to each step; the values of a leaf are read when it
    is selected. With rules, the steps that `prune` would remove by them are marked. Ctrl-C ends it.

    Nothing is written, and only requests with the token of the address are answered. Other machines can connect only
    with another --host: they can read what they see on the way, as it is not encrypted. Forward the port instead, with
    the same number at both ends.

    \b
    eformer serve ./run
    eformer serve ./run --keep 3
    eformer serve ./run --port 8090    # and on the other machine: ssh -L 8090:127.0.0.1:8090 host
    """
    from eformer._engine.pages.server import serve as carry_out

    def ready(site: Site) -> None:
        if not site.is_loopback:
            warning = (
                f"warning: {host} can be reached from other machines: whoever has the address below can read "
                f"everything in {path}, and it is sent unencrypted"
            )
            say(warning, "yellow", err=True)
        click.echo(site.url)
        click.echo("Ctrl-C stops it.", err=True)
        sys.stdout.flush()

    carry_out(path, host=host, port=port, rules=options.rules_from(**keep), ready=ready)
