"""The commands `eformer report` and `eformer serve`: a checkpoint or a run as a page for a browser.

Tests: tests/cli/test_report.py, tests/cli/test_serve.py.
"""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

from eformer.cli import options
from eformer.cli.browser import open_page
from eformer.cli.group import Command, Size, print_json, say, wants_bar
from eformer.cli.together import by_all_processes

if TYPE_CHECKING:
    from eformer._engine.formats.run_steps import StepChoice
    from eformer._engine.pages.requests import Site
    from eformer._engine.processes.crew import Crew


@click.command(cls=Command, short_help="Write a page for a browser")
@options.path
@click.option("--against", type=click.Path(), metavar="OTHER", help="Compare with another checkpoint.")
@click.option("--output", "-o", type=click.Path(), help="The file to write, - for standard output.")
@click.option("--no-values", is_flag=True, help="Read headers only: no statistics, no check of digests.")
@options.step
@options.prefix
@click.option("--memory", type=Size(), help="Maximum memory of the program, such as 2GB.")
@options.keep
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the data of the page as JSON.")
@by_all_processes
def report(
    path: str,
    against: str | None,
    output: str | None,
    no_values: bool,
    step: StepChoice,
    prefix: str | None,
    memory: int | None,
    show: bool,
    as_json: bool,
    crew: Crew | None,
    **keep: Any,
) -> None:
    """Write a page for a browser that shows the checkpoint at PATH: tree, sizes, dtypes, shardings, distributions.

    The page is one file that needs no network: NAME-report.html in this directory, or the file of --output. eformer
    never replaces a file that is not a report. It reads each array once and checks its digests.

    The path of a run gives a page of the run: steps, sizes, metrics, damage, and how much each step changed the model.
    With rules, the page shows which steps they keep.

    \b
    eformer report ./run/step-200
    eformer report ./run/step-200 --against ./run/step-100 -o change.html
    eformer report model.safetensors --no-values
    eformer report ./run --open
    """
    from eformer._engine.pages.report import became_in, check_report_path, damage_in
    from eformer._engine.pages.report import report as make

    if as_json and output:
        raise click.UsageError("--json prints to standard output; leave out --output")
    if show and (as_json or output == "-"):
        raise click.UsageError("--open needs a file; leave out --json and --output -")
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
        executor=crew,
    )
    if crew and not crew.is_first:
        return
    if as_json:
        print_json(found.data)
    elif output == "-":
        click.echo(found.html, nl=False)
    else:
        written = found.save(output or default_name(found.path))
        say(f"report: {written}", "green")
        if show:
            open_page(written)
    if became := became_in(found):
        say(f"warning: {found.path}: {became}", "red", err=True)
    if damage := damage_in(found):
        say(f"warning: {found.path}: {damage}", "red", err=True)
        sys.exit(1)


def default_name(path: str) -> str:
    """Return the name of the page for a checkpoint: its last directory, as in step-100-report.html."""
    parts = [
        part for part in PurePath(path.partition("://")[2] or path).parts if part not in ("/", ".", "..")
    ]
    return f"{'-'.join(parts[-1:]) or 'checkpoint'}-report.html"


@click.command(cls=Command, short_help="Show a run in a browser while it trains")
@options.path
@click.option("--host", default="127.0.0.1", show_default=True, help="Listen at this address.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Listen at this port; by default at any free port.",
)
@options.keep
def serve(path: str, host: str, port: int, **keep: Any) -> None:
    """Show the run or the checkpoint at PATH in a browser: open the address that is printed.

    The page of a run follows it while it trains, and links to each step; eformer reads the values of a leaf when you
    select it. With rules, the page marks the steps that `prune` would delete. Ctrl-C stops the server.

    The server writes nothing, and answers only requests with the token in the address. Only this machine can connect.
    With --host other machines can, but the connection is not encrypted: prefer to forward the port, with the same
    number at both ends.

    \b
    eformer serve ./run
    eformer serve ./run --keep 3
    eformer serve ./run --port 8090  # elsewhere: ssh -L 8090:127.0.0.1:8090 host
    """
    from eformer._engine.pages.server import serve as carry_out

    def ready(site: Site) -> None:
        if not site.is_loopback:
            warning = (
                f"warning: other machines can reach {host}: the address below gives access to everything in {path}, "
                "and the connection is not encrypted"
            )
            say(warning, "yellow", err=True)
        click.echo(site.url)
        click.echo("Ctrl-C stops the server.", err=True)
        sys.stdout.flush()

    carry_out(path, host=host, port=port, rules=options.rules_from(**keep), ready=ready)
