"""How all commands of `eformer` behave: errors, colours, JSON, help, and pipes that close early.

Tests: tests/cli/test_commands.py, tests/cli/test_changes.py.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from eformer._engine.record.text import parse_size, printable
from eformer.cli.together import is_said_elsewhere, leave_together
from eformer.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator


_INTERRUPTED = 130  # the exit code that shells use

# The commands by the headings of `eformer --help`.
_SECTIONS = {
    "Look": ("inspect", "ls", "verify", "diff", "report", "serve"),
    "Runs": ("steps", "prune", "request"),
    "Change": ("convert", "merge", "rules", "sign"),
    "Other": ("demo", "completion"),
}


def say(text: str, colour: str | None = None, *, bold: bool | None = None, err: bool = False) -> None:
    """Print lines, with control characters escaped. Colour them on terminals, unless NO_COLOR is set: https://no-color.org"""
    lines = "\n".join(map(printable, text.split("\n")))
    allowed = False if os.environ.get("NO_COLOR") else None
    click.secho(lines, fg=colour, bold=bold, err=err, color=allowed)


def print_error(problem: str) -> None:
    """Print an error in red to standard error."""
    say(f"error: {problem}", "red", err=True)


@contextmanager
def _written_as_errors() -> Iterator[None]:
    """Let click write an error of usage in the form of `print_error`, after the usage."""
    try:
        yield
    except click.UsageError as error:
        error.show = partial(_show_usage, error)  # type: ignore[method-assign]
        raise


def _show_usage(error: click.UsageError, file: Any = None) -> None:  # noqa: ARG001  the signature of click
    if error.ctx is not None:
        say(f"{error.ctx.get_usage()}\nTry '{error.ctx.command_path} --help' for help.\n", err=True)
    # Choices of an argument have a line each.
    problem = " ".join(error.format_message().removesuffix(".").split())
    print_error(problem[:1].lower() + problem[1:] + _hint(error))


def _hint(error: click.UsageError) -> str:
    """Return a hint for an option of commands that stands before the command."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return ""
    commands = getattr(error.ctx.command, "commands", {}).values()
    known = {name for command in commands for param in command.params for name in param.opts}
    return "; write it after the command" if error.option_name in known else ""


# Arguments of the functions, as options of the command line.
_OPTIONS = {
    "SaveOptions.max_shard_bytes ": "--max-shard-size ", "max_shard_bytes=": "--max-shard-size ",
    "allow_missing=True": "--allow-missing", "memory=": "--memory ", "prefix=": "--prefix", "dtype=": "--dtype",
    "rename=": "--rename", "back=True": "--back", "pass config=": "pass --model-config", "config=": "--config",
    "foreign=True": "--foreign", "fill_from_like=True": "--fill-from-like", "root=": "--root", "keys=": "--keys",
    "card=False": "--no-card", "Pass like=": "Pass --like", "like='": "--like '",
    "dequant=False (checkpoint.load, checkpoint.convert)": "--no-dequant", "dequant=False": "--no-dequant",
    'dequant="bf16"': "--dequant bf16",
    "pattern=": "--pattern ",
    "lora=": "--lora", "last=": "--last ", "weights=": "--weights ", "ema=": "--ema ", "lora_config=": "--config",
    "to=": "--to", "like=": "`like` in Python",
}  # fmt: skip
_ARGUMENT = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, _OPTIONS))})")


def with_options(text: str) -> str:
    """Replace the arguments of functions in a message by the options of the command line."""
    return _ARGUMENT.sub(lambda found: _OPTIONS[found[1]], text)


class _Output(io.FileIO):
    """A standard stream that discards output after its reader has closed the pipe, as `head` does after a few lines."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


@contextmanager
def _readers_may_go() -> Iterator[None]:
    """Let a command finish although the pipe of its output is closed, so that its exit code stays right."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_until_closed, before)
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with suppress(OSError):  # a full disk, which the command has reported
                stream.flush()
        sys.stdout, sys.stderr = before


def _until_closed(stream: Any) -> Any:
    if not isinstance(stream, io.TextIOWrapper):  # closed, or replaced by the program
        return stream
    try:
        number = stream.fileno()
    except OSError:  # not a file
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(number, "wb", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",  # names may contain characters that the terminal's encoding lacks
        line_buffering=stream.line_buffering,
    )


class Command(click.Command):
    """A command that imports numpy, late: `--help` should not wait for it."""

    def invoke(self, ctx: click.Context) -> Any:
        from eformer._engine.tasks.interrupts import held_back

        # An extension module that is interrupted while it is imported raises ImportError, without a trace of the
        # Ctrl-C. So the signal waits until the modules are there.
        with held_back():
            import_module("eformer._engine.record.manifest")
        return super().invoke(ctx)


class Commands(click.Group):
    """Turn errors into one red line, and with `--json` into JSON. `--debug` shows the traceback."""

    command_class = Command

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str()) for name in names])

    def main(self, *args: Any, **options: Any) -> Any:
        with _readers_may_go():
            try:
                return super().main(*args, **options)
            except SystemExit as end:
                leave_together(end.code if isinstance(end.code, int) else int(end.code is not None))
                raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Versions of click disagree about the output of a group without a command.
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        ctx.obj = "--json" in args
        with _written_as_errors():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _written_as_errors():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except (ValueError, OSError, TypeError, RuntimeError, MemoryError, ImportError) as error:
            if ctx.params.get("debug"):
                raise
            if is_said_elsewhere(error):
                ctx.exit(exit_code(ctx.invoked_subcommand, error))
            problem = with_options(str(error) or "not enough memory")
            if ctx.obj:
                with suppress(OSError):  # the disk is full, which may be the problem
                    print_json({"error": problem})
            print_error(problem)
            ctx.exit(exit_code(ctx.invoked_subcommand, error))
        except KeyboardInterrupt:
            print_error("interrupted")
            ctx.exit(_INTERRUPTED)


def exit_code(command: str | None, error: Exception) -> int:
    """Return 2 where 1 is an answer: that checkpoints differ or are damaged, or that rules do not fit."""
    is_no_answer = command in ("diff", "rules") or (command == "verify" and isinstance(error, NotFoundError))
    return 2 if is_no_answer else 1


if TYPE_CHECKING:
    _Number = click.ParamType[int]
else:  # not generic in older versions of click
    _Number = click.ParamType


class Size(_Number):
    """A number of bytes, with or without a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class RulesOf(click.ParamType):  # type: ignore[type-arg]  # it is not generic in older versions of click
    """A file of rules, or the name of a book of rules."""

    name = "rules"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from eformer._engine.formats.model_rules import is_book  # late: `--help` should not wait for it

        return value if is_book(value) else click.Path(exists=True, dir_okay=False).convert(value, param, ctx)


def wants_bar(quiet: bool) -> bool:
    """Tell whether to draw a progress bar: standard error is a terminal, and the command is not quiet."""
    return not quiet and sys.stderr is not None and sys.stderr.isatty()


def print_json(value: Any) -> None:
    click.echo(json.dumps(_as_json(value), indent=1, allow_nan=False))


def picked(record: Any, *names: str) -> dict[str, Any]:
    """Return the named fields of a record as a dict."""
    return {name: getattr(record, name) for name in names}


def _as_json(value: Any) -> Any:
    """Convert to strict JSON: records are objects, keys are strings, and numbers that JSON lacks become strings."""
    if is_dataclass(value):
        value = picked(value, *(field.name for field in fields(value)))
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
