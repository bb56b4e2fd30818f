"""The command `eformer serve`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from eformer._engine.record.text import printable
from eformer.cli.group import colours
from eformer.cli.rules import keep_options, rules_from

if TYPE_CHECKING:
    from eformer._engine.pages.requests import Site


@click.command()
@click.argument("path", type=click.Path())
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="The port to listen at; by default any that is free.",
)
@keep_options
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
                f"{host} can be reached from other machines: whoever has the address below can read everything in "
                f"{path}, and it is sent unencrypted"
            )
            click.secho(printable(f"warning: {warning}"), fg="yellow", err=True, color=colours())
        click.echo(site.url)
        click.echo("Ctrl-C stops it.", err=True)
        sys.stdout.flush()

    carry_out(path, host=host, port=port, rules=rules_from(**keep), ready=ready)
