"""The option of all commands that sets options of buckets."""

from __future__ import annotations

import click


def store_option() -> click.Option:
    """Return the option, which takes effect while its command runs."""
    return click.Option(
        ["--store-option"],
        multiple=True,
        metavar="NAME=VALUE",
        expose_value=False,
        callback=_set,
        help="An option of the bucket, such as endpoint=https://host. Can be repeated. Others can see it: credentials "
        "belong into the environment.",
    )


def _set(context: click.Context, _: click.Parameter, given: tuple[str, ...]) -> None:
    options = {}
    for text in given:
        name, is_pair, value = text.partition("=")
        if not is_pair or not name.isidentifier():
            raise click.UsageError("--store-option takes NAME=VALUE, such as endpoint=https://host")
        options[name] = value
    if options:
        from eformer._engine.stores.store_options import store_options  # late, as all that commands need

        context.with_resource(store_options("", **options))
