"""The commands of `eformer`: parse the arguments, call a tool, print the result."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from eformer._engine.record.text import printable
from eformer._version import __version__
from eformer.cli import options
from eformer.cli.browser import open_page
from eformer.cli.group import (
    Commands,
    RulesOf,
    Size,
    exit_code,
    picked,
    print_error,
    print_json,
    say,
    wants_bar,
    with_options,
)
from eformer.cli.pages import report, serve
from eformer.cli.together import by_all_or_in_parts, by_all_processes
from eformer.errors import NotFoundError

if TYPE_CHECKING:
    from eformer._engine.formats.run_steps import StepChoice
    from eformer._engine.processes.crew import Crew
    from eformer._engine.tools.conversion import Conversion
    from eformer._engine.tools.convert_parts import How
    from eformer._engine.tools.prune import Pruned
    from eformer._engine.tools.verify import Verification


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="eformer")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:  # noqa: ARG001  read by the group
    """Inspect, verify, compare and convert checkpoints of eformer, Orbax, flax, Hugging Face, PyTorch, Keras, Equinox,
    GGUF and numpy.

    \b
    Examples:
      eformer inspect ./checkpoint             show the format and the tree
      eformer ls ./checkpoint "*.bias"         list leaves, one line each
      eformer verify ./checkpoint              check every byte against its digest
      eformer diff ./checkpoint ./other        show which leaves differ
      eformer sign ./checkpoint --key private.pem
      eformer convert ./checkpoint model.safetensors --dtype bf16
      eformer rules check ./hf --rename maxtext  check rules for a model
      eformer report ./checkpoint              write a page for a browser
      eformer steps ./run                      list the steps of a run
      eformer serve ./run                      show a run while it trains
      eformer prune ./run --keep 3             delete old checkpoints
      eformer request ./run                    ask the running job to save
      eformer demo                             try everything in ten seconds
    """
    # As a KeyboardInterrupt, so that a command that is terminated removes its unfinished files.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)


@main.command(short_help="Show format, metadata and tree")
@options.path
@click.argument("name", required=False)
@options.step
@options.prefix
@options.as_json
@click.option("--svg", type=click.Path(dir_okay=False), help="Write an SVG image to this file instead.")
def inspect(
    path: str, name: str | None, step: StepChoice, prefix: str | None, as_json: bool, svg: str | None
) -> None:
    """Show the format, the metadata and the tree of the checkpoint at PATH, or only the leaves that NAME finds.

    NAME is the name of a leaf or subtree, or a glob pattern.

    \b
    eformer inspect ./checkpoint
    eformer inspect ./checkpoint params.encoder
    eformer inspect model.safetensors --json | jq .trees
    """
    from eformer._engine.formats.run_steps import path_of_step  # late: `--help` should not wait for numpy
    from eformer.cli.facts import checkpoint_facts, leaf_facts

    if svg and as_json:
        raise click.UsageError("--svg and --json cannot be combined")
    path = str(path_of_step(path, step))
    facts, trees = checkpoint_facts(path, prefix, name)
    if as_json:
        marks = facts.pop("quantized")
        for each, tree in trees.items():
            facts["trees"][each]["leaves"] = list(leaf_facts(tree, marks.get(each)))
        print_json(facts)
    else:
        from eformer.cli import terminal

        if svg:
            Path(svg).write_text(
                terminal.picture(facts, trees, f"eformer inspect {printable(path)}"), "utf-8"
            )
        else:
            terminal.show_checkpoint(facts, trees, terminal.console())
    if facts["problems"] or "damage" in facts:
        sys.exit(1)


@main.command("ls", short_help="List leaves, one line each")
@options.path
@click.argument("name", required=False)
@options.step
@options.prefix
@options.as_json
def list_leaves(path: str, name: str | None, step: StepChoice, prefix: str | None, as_json: bool) -> None:
    """List the leaves of the checkpoint at PATH, or only the leaves that NAME finds, one line each.

    NAME is the name of a leaf or subtree, or a glob pattern. Write keys that contain dots as they are. The exit code is
    1 if NAME finds nothing.

    \b
    eformer ls ./checkpoint
    eformer ls ./checkpoint params.encoder
    eformer ls ./checkpoint "layers.*.bias"
    """
    from eformer._engine.formats.run_steps import path_of_step
    from eformer.cli.facts import checkpoint_facts, chosen, leaf_facts, spellings

    facts, trees = checkpoint_facts(str(path_of_step(path, step)), prefix)
    found = chosen(trees, "*" if name is None else name)
    leaves = [
        ({"prefix": each} if each else {}) | leaf
        for each, names in found.items()
        for leaf in leaf_facts(trees[each], facts["quantized"].get(each))
        if leaf["name"] in names
    ]
    if as_json:
        print_json(leaves)
    else:
        from eformer.cli import terminal

        terminal.list_leaves(leaves, spellings(trees), terminal.console())
    for each, problem in facts["problems"].items():
        print_error(f"{each or 'the tree'} cannot be read: {problem}")
    if "damage" in facts:
        print_error(facts["damage"])
    if facts["problems"] or "damage" in facts:
        sys.exit(1)


@main.command(short_help="Check every byte against its digest")
@click.argument("paths", type=click.Path(), nargs=-1, required=True, metavar="PATH...")
@options.step
@click.option(
    "--signed-by",
    type=click.Path(exists=True, dir_okay=False),
    help="Check the signature with this public key.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: an object, or a list for several paths.")
@options.quiet
@by_all_processes
def verify(
    paths: tuple[str, ...],
    step: StepChoice,
    signed_by: str | None,
    as_json: bool,
    quiet: bool,
    crew: Crew | None,
) -> None:
    """Check every byte of the checkpoints at PATH against their digests. The path of a run checks all of its steps.

    The exit code is 0 if nothing is damaged, 1 if a checkpoint is damaged, 2 if no checkpoint exists at a PATH.

    Checkpoints of other programs have no digests: eformer checks their structure and completeness only. It lists files
    beside them that it does not read and that may hold leaves; the exit code is then 1, too.

    With --signed-by, eformer also compares every byte of every file with the signature; files that were added or
    removed since count as damage. The exit code is 1 if the signature is missing or belongs to another key.

    \b
    eformer verify ./checkpoint && rsync -a ./checkpoint backup:
    eformer verify ./checkpoint --signed-by public.pem
    eformer verify ./run
    eformer verify ./run --step 100
    eformer verify ./checkpoint ./other
    srun -N 32 eformer verify s3://bucket/run/step-9000
    """
    from eformer._engine.tools.verify import verify as check

    checked, codes = [], []
    for path in paths:
        try:
            found = check(path, step=step, signed_by=signed_by, progress=wants_bar(quiet), executor=crew)
        except (ValueError, OSError) as error:
            if len(paths) == 1 or crew:
                raise
            checked.append({"path": path, "ok": False, "error": str(error)})
            codes.append(exit_code("verify", error))
            print_error(str(error))
        else:
            checked.append(_verified_facts(found))
            codes.append(0 if found.ok else 1)
            if not (as_json or quiet):
                for each in found.steps or (found,):
                    say(str(each), "green" if each.ok else "red")
    if as_json:
        print_json(checked[0] if len(paths) == 1 else checked)
    if any(codes):
        sys.exit(1 if 1 in codes else 2)


def _verified_facts(found: Verification) -> dict[str, Any]:
    """Return the facts that `verify` found; for a run, also the facts of each step."""
    facts = picked(
        found,
        *("path", "trees", "leaves", "nbytes", "has_digests", "has_checksums", "left_out"),
        *("is_signed", "signed_by", "ok", "damages"),
    )
    return facts | ({"steps": [_verified_facts(step) for step in found.steps]} if found.steps else {})


@main.command(short_help="Sign a checkpoint with a private key")
@options.path
@click.option(
    "--key",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A private key of Ed25519, in PEM.",
)
@options.as_json
def sign(path: str, key: str, as_json: bool) -> None:
    """Sign the checkpoint at PATH. With the public key, anyone can detect changed, added and removed files.

    The signature is PATH/eformer.sig, or PATH.eformer.sig beside a single file. `eformer verify --signed-by` checks it,
    and in Python `load(..., signed_by=)`. The password of a key comes from EFORMER_KEY_PASSWORD; without it, eformer
    asks.

    \b
    openssl genpkey -algorithm ed25519 -out private.pem
    openssl pkey -in private.pem -pubout -out public.pem
    eformer sign ./checkpoint --key private.pem
    eformer verify ./checkpoint --signed-by public.pem
    """
    from eformer._engine.tools.sign import sign as carry_out

    def ask() -> str:
        return str(click.prompt(f"password of {printable(key)}", hide_input=True, err=True))

    signature = carry_out(path, private_key=key, password=ask, progress=wants_bar(as_json))
    if as_json:
        print_json({"signature": signature})
    else:
        say(f"signed: {signature}", "green")


@main.command(short_help="Compare two checkpoints")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@options.prefix
@options.as_json
@options.quiet
@by_all_processes
def diff(a: str, b: str, prefix: str | None, as_json: bool, quiet: bool, crew: Crew | None) -> None:
    """Compare the checkpoints at A and B: leaves, shapes, dtypes, values.

    Formats and shardings may differ. Leaves of one dtype are equal if their bits are equal. Leaves that became NaN or
    infinite come first. The exit code is 0 if all leaves are equal, 1 if a leaf differs, 2 on an error.

    \b
    eformer diff ./step-100 ./step-200
    eformer diff ./checkpoint model.safetensors && echo the same
    """
    from eformer._engine.tools.diff import diff as compare

    found = compare(a, b, prefix=prefix, progress=wants_bar(quiet), executor=crew)
    if as_json:
        print_json(picked(found, "a", "b", "same", "added", "removed", "unchanged", "notes", "changed"))
    elif not quiet:
        shades = {"-": "red", "+": "green", "~": "yellow", "!": "cyan"}
        loud = sum(change.became > 0 for change in found.changed)  # these lines follow the headline
        for n, line in enumerate(str(found).split("\n")):
            is_loud = 1 <= n <= loud
            say(line, "red" if is_loud else shades.get(line[:1]), bold=is_loud or None)
    if not found.same:
        sys.exit(1)


_MOST_NOTES = 20


@main.command(short_help="Write another format, dtype or names")
@click.argument("source", type=click.Path())
@click.argument("destination", type=click.Path())
@click.option(
    "--to",
    type=click.Choice(["safetensors", "zarr", "tensorstore", "msgpack", "npz", "peft", "orbax", "hf"]),
    help="The target format; tensorstore is another name of zarr, and hf a model that transformers opens.",
)
@click.option("--dtype", help="Cast floating leaves: bf16, fp16, float32, ...")
@click.option(
    "--max-shard-size",
    "max_shard_bytes",
    type=Size(),
    help="Maximum size of one safetensors file, such as 5GB.",
)
@options.step
@click.option("--prefix", help="Convert this tree only, and store it without a prefix.")
@click.option("--root", metavar="NAME", help="Convert this subtree, such as params, as the whole checkpoint.")
@click.option(
    "--keys",
    multiple=True,
    metavar="NAME",
    help="Convert only the leaves that NAME finds: a leaf, a subtree or a pattern. Can be repeated.",
)
@click.option(
    "--rename",
    type=RulesOf(),
    metavar="FILE|BOOK",
    help="Rename and rearrange leaves by the rules in this file, or of a shipped book such as maxtext.",
)
@click.option(
    "--back/--no-back",
    default=None,
    help="Read the rules from right to left: those of --rename, or those that SOURCE has recorded.",
)
@click.option(
    "--like",
    metavar="MODEL",
    help="For --to hf: the directory, or hf://org/model, whose configuration and tokenizer the result gets.",
)
@click.option(
    "--model-config",
    metavar="PATH",
    help="config.json of the model for the rules, or its directory. Default: the file at SOURCE.",
)
@click.option(
    "--config",
    "settings",
    multiple=True,
    metavar="NAME=VALUE|FILE",
    help="For --to peft and hf: a setting of adapter_config.json or config.json, or a JSON file of settings. Can be "
    "repeated.",
)
@click.option(
    "--fill-from-like", is_flag=True, help="For --to hf: take tensors that SOURCE lacks from --like."
)
@click.option("--card/--no-card", default=True, help="For --to hf: write README.md.", show_default=True)
@click.option(
    "--allow-missing",
    is_flag=True,
    help="Convert even if eformer does not read all files that may hold leaves.",
)
@click.option(
    "--dequant",
    metavar="DTYPE",
    help="Convert the weights of a quantised model to numbers of this dtype: bf16, float32, ...",
)
@click.option(
    "--no-dequant",
    is_flag=True,
    help="Convert the leaves of a quantised model as stored, without their scales.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@click.option(
    "--memory", type=Size(), default="2GB", show_default=True, help="Maximum memory of the program."
)
@options.as_json
@by_all_or_in_parts
def convert(
    source: str,
    destination: str,
    *,
    settings: tuple[str, ...],
    keys: tuple[str, ...],
    model_config: str | None,
    dequant: str | None,
    no_dequant: bool,
    dry_run: bool,
    as_json: bool,
    how: How,
    **arguments: Any,
) -> None:
    """Convert the checkpoint at SOURCE to a new checkpoint at DESTINATION, which appears complete or not at all.

    If SOURCE has digests, eformer checks every byte that it reads. Leave out --to if DESTINATION ends in .safetensors,
    .npz or .msgpack.

    \b
    eformer convert ./checkpoint ./hf --to safetensors --max-shard-size 5GB
    eformer convert ./orbax/100 ./checkpoint --to zarr
    eformer convert ./hf ./mine --to safetensors --rename rules.txt --dry-run
    eformer convert ./lora ./adapter --to peft --config lora_alpha=32
    eformer convert ./run best.safetensors --step best --root params
    eformer convert ./run ./for-hf --to hf --like ./hf --root params

    Each line of the file for --rename names the axes of a leaf before and behind, or is a regular expression for the
    whole name, an arrow, and the new name with steps. A rule without a new name drops the leaf. `eformer rules` lists
    the shipped books.

    \b
    model.layers.{l}.self_attn.q_proj.weight [(h k) d] <-> layers.query [d l h k]
    model\\.layers\\.(\\d+)\\.(\\w+)\\.weight -> layers.\\2.kernel | transpose | stack \\1
    layers\\.(\\w+)\\.kernel -> model.layers.{}.\\1.weight | unstack | transpose
    lm_head\\.weight ->
    """
    from eformer._engine.tools.convert import convert_in

    if settings and model_config:
        raise click.UsageError(
            "--config is for --to peft, and --model-config for the rules of --rename; use one"
        )
    if dequant is not None and no_dequant:
        raise click.UsageError("--dequant and --no-dequant exclude each other")
    done = convert_in(
        how,
        source,
        destination,
        keys=keys or None,
        config=_parse_settings(settings) or model_config,
        dry_run=dry_run,
        dequant=False if no_dequant else dequant,
        progress=wants_bar(as_json),
        **arguments,
    )
    _show_conversion(done, dry_run=dry_run, as_json=as_json)


def _show_conversion(done: Conversion, *, dry_run: bool, as_json: bool) -> None:
    """Print the result of a conversion: the plan of a dry run, and else the notes."""
    from eformer._engine.record.text import count

    if as_json:
        facts = picked(done, "source", "destination", "to", "nbytes", "notes", "kept", "leaves")
        print_json(facts | {"dry_run": dry_run})
        return
    first, *lines = str(done).split("\n")
    say(first, bold=True)
    if not dry_run:
        lines = [f"! {note}" for note in done.notes[:_MOST_NOTES]]
        if (more := len(done.notes) - _MOST_NOTES) > 0:
            lines.append(f"! and {more:,} more notes; --dry-run and --json show all")
        if done.kept:
            lines.append(f"! {count(len(done.kept), 'name')} matched by no rule and kept")
    for line in lines:
        say(line, "cyan" if line.startswith("!") else None)


@main.command(short_help="Average checkpoints, or add a LoRA")
@click.argument("sources", nargs=-1, required=True, type=click.Path(), metavar="SOURCE... DESTINATION")
@click.option(
    "--weights",
    default="mean",
    show_default=True,
    metavar="RULE|NUMBERS",
    help="mean; wsm (1-sqrt) or cosine, a schedule of decay; or a number for each SOURCE, such as 0.6,0.4.",
)
@click.option("--ema", type=float, metavar="DECAY", help="Exponential moving average, such as 0.9.")
@click.option(
    "--last", type=click.IntRange(min=1), help="SOURCE is a run: merge this number of its last steps."
)
@click.option(
    "--lora", type=click.Path(), help="Add this adapter, or the LoRA leaves of a checkpoint, to SOURCE."
)
@click.option(
    "--config",
    "settings",
    multiple=True,
    metavar="NAME=VALUE|FILE",
    help="For --lora: a setting of adapter_config.json, such as lora_alpha=32, or a JSON file of settings. Can be "
    "repeated.",
)
@click.option(
    "--rename",
    type=RulesOf(),
    metavar="FILE|BOOK",
    help="For --lora: rules that give its leaves PEFT's names.",
)
@click.option(
    "--to",
    type=click.Choice(["safetensors", "zarr", "tensorstore", "msgpack", "npz", "orbax", "hf"]),
    help="The target format, as for convert.",
)
@click.option(
    "--like",
    metavar="MODEL",
    help="For --to hf: the model whose configuration and tokenizer the result gets.",
)
@click.option("--dtype", help="Write floating leaves in this dtype: bf16, fp16, float32, ...")
@click.option(
    "--max-shard-size",
    "max_shard_bytes",
    type=Size(),
    help="Maximum size of one safetensors file, such as 5GB.",
)
@click.option("--prefix", help="Merge this tree only, and store it without a prefix.")
@click.option("--root", metavar="NAME", help="Merge this subtree, such as params, as the whole checkpoint.")
@click.option(
    "--keys",
    multiple=True,
    metavar="NAME",
    help="Merge only the leaves that NAME finds: a leaf, a subtree or a pattern. Can be repeated.",
)
@click.option(
    "--allow-missing",
    is_flag=True,
    help="Merge even if eformer does not read all files that may hold leaves.",
)
@click.option(
    "--dequant", metavar="DTYPE", help="Read the weights of a quantised model as numbers of this dtype."
)
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
@click.option(
    "--memory", type=Size(), default="2GB", show_default=True, help="Maximum memory of the program."
)
@options.as_json
@by_all_or_in_parts
def merge(
    sources: tuple[str, ...],
    *,
    weights: str,
    settings: tuple[str, ...],
    keys: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    how: How,
    **arguments: Any,
) -> None:
    """Write the weighted sum of the leaves of all SOURCE as a new checkpoint at DESTINATION.

    Sums are in float32, in the order of SOURCE, divided by the sum of the weights, and rounded once. Integers, keys and
    plain values are those of the last SOURCE. The new checkpoint records all SOURCE with their weights, which `eformer
    inspect` shows.

    \b
    eformer merge ./run ./merged --last 3 --weights wsm --to safetensors
    eformer merge ./run-a ./run-b soup.safetensors --weights 0.6,0.4
    eformer merge ./base ./merged --lora ./adapter --to safetensors
    eformer merge ./hf ./merged --lora ./adapter --to hf --like ./hf
    srun -N 4 eformer merge ./run ./merged --last 5 --weights wsm --to safetensors
    """
    from eformer._engine.tools.merge import merge_in

    *paths, destination = sources
    if not paths:
        raise click.UsageError("expected: eformer merge SOURCE... DESTINATION")
    done = merge_in(
        how,
        paths,
        destination,
        weights=_parse_weights(weights),
        lora_config=_parse_settings(settings),
        keys=keys or None,
        dry_run=dry_run,
        progress=wants_bar(as_json),
        **arguments,
    )
    _show_conversion(done, dry_run=dry_run, as_json=as_json)


def _parse_weights(text: str) -> Any:
    """Return the numbers of `--weights`, or the name of a rule."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        return text


def _parse_settings(settings: tuple[str, ...]) -> dict[str, Any] | None:
    """Parse the values of `--config`; later values win. A value that is not JSON is a string."""
    parsed: dict[str, Any] = {}
    for text in settings:
        name, is_pair, value = text.partition("=")
        if not is_pair:
            parsed |= _read_settings(text)
            continue
        try:
            parsed[name] = json.loads(value)
        except json.JSONDecodeError:
            parsed[name] = value
    return parsed if settings else None


def _read_settings(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise click.UsageError(f"--config {path} is neither NAME=VALUE nor a JSON file: {error}") from error
    if not isinstance(found, dict):
        raise click.UsageError(f"--config {path} holds no settings: expected a JSON object")
    return found


@main.command(short_help="List, print and check rule books")
@click.argument("name", required=False)
@click.argument("source", required=False, type=click.Path())
@click.option("--rename", metavar="RULES", help="With `check`: a layout, a rule book or a file of rules.")
@click.option("--like", type=click.Path(), help="With `check`: a checkpoint with the leaves to be made.")
@click.option(
    "--model-config",
    metavar="PATH",
    help="With `check`: config.json of the model, or its directory. Default: the file at SOURCE.",
)
@options.as_json
def rules(
    name: str | None,
    source: str | None,
    rename: str | None,
    like: str | None,
    model_config: str | None,
    as_json: bool,
) -> None:
    """List the rule books: the families of models with their layouts. With NAME, print the rules of a book or a file.

    `eformer rules check SOURCE --rename RULES` applies rules to the names and shapes of a checkpoint, and goes back. It
    reads no data. RULES is a layout, such as maxtext, for the family that config.json names; a book, such as
    qwen3/maxtext; or a file. With --like, the new leaves must be those of that checkpoint.

    The exit code of `check` is 0 if the rules fit, 1 if they do not, 2 on an error.

    \b
    eformer rules
    eformer rules qwen3_moe/maxtext
    eformer rules check ./hf --rename maxtext
    eformer rules check ./hf --rename tunix --like ./checkpoint
    """
    from eformer._engine.tools.check_rules import rules as named

    if name != "check":
        if source or rename or like or model_config:
            raise click.UsageError(
                "a SOURCE, --rename, --like and --model-config are for `eformer rules check SOURCE`"
            )
        _show_rules(name, as_json)
        return
    if source is None or rename is None:
        raise click.UsageError("expected: eformer rules check SOURCE --rename RULES")
    found = named(rename).check(source, like, config=model_config)
    if as_json:
        print_json(picked(found, "name", "path", "ok", "leaves", "number", *_PROBLEMS_OF_RULES))
    else:
        first, *lines = str(found).split("\n")
        say(first, "green" if found.ok else "red")
        for line in lines:
            say(line)
    if not found.ok:
        sys.exit(1)


_PROBLEMS_OF_RULES = (
    *("left_out", "unmatched", "missing", "unexpected", "wrong_shapes", "not_back", "errors"),
)


def _show_rules(name: str | None, as_json: bool) -> None:
    """Print the text of rules, or the list of all books."""
    from eformer._engine.record.rule_books import books
    from eformer._engine.tools.check_rules import rules as named

    if name is not None:
        text = str(named(name))
        print_json({"name": name, "text": text}) if as_json else say(text.rstrip())
    elif as_json:
        fields = ("name", "title", "version", "model_types", "layouts", "tested_with")
        print_json([picked(family, *fields) for family in books()])
    else:
        for family in books():
            kinds = ", ".join(family.model_types) or "any model"
            say(f"{kinds}: {', '.join(family.layouts)}", bold=True)
            say(f"  {family.title}")


@main.command(short_help="Delete old checkpoints of a run")
@click.argument("directory", type=click.Path())
@options.keep
@click.option(
    "--pattern",
    metavar="NAME",
    help="Count entries of this name instead; one asterisk stands for the number. Quote it.",
)
@click.option("--check", is_flag=True, help="Verify the remaining checkpoints first.")
@click.option("--dry-run", is_flag=True, help="Print the plan; delete nothing.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; needs --yes or --dry-run.")
def prune(
    directory: str, pattern: str | None, check: bool, dry_run: bool, yes: bool, as_json: bool, **keep: Any
) -> None:
    """Delete checkpoints in DIRECTORY that eformer wrote under the name of a step: step-100, run-100, 100.

    Keeps the newest checkpoint, every checkpoint that a rule selects, and the step that the run resumed from. Ignores
    incomplete or damaged entries, and checkpoints of other programs. Also deletes the leftovers of interrupted saves
    and scores whose step no longer exists.

    Lists files that do not belong to a checkpoint, such as notes, before it deletes them with the checkpoint.

    \b
    eformer prune ./run --keep 3 --dry-run
    eformer prune ./run --keep 3 --check --yes
    eformer prune ./run --keep 2 --keep-every 1000 --keep-best 3 --by eval.loss
    eformer prune ./run --keep 2 --pattern 'ema-*'
    eformer prune ./orbax --keep 3 --foreign
    eformer prune s3://bucket/run --keep 3
    """
    from eformer._engine.record.text import count, size
    from eformer._engine.tools.prune import prune as carry_out
    from eformer._engine.tools.prune import remove_planned

    if as_json and not (yes or dry_run):
        raise click.UsageError("--json cannot ask for confirmation: add --yes or --dry-run")
    if not (rules := options.rules_from(**keep)):
        raise click.UsageError("no rule selects checkpoints to keep; add one, such as --keep 3")
    plan = carry_out(directory, keep=rules, pattern=pattern, check=check, dry_run=True)
    if not as_json:
        _show_plan(plan)
    amount = f"{count(len(plan.removed), 'checkpoint')}, {size(plan.nbytes)}"
    if not dry_run:
        if plan.removed and not yes:
            _confirm(f"Remove {amount}?")
        asked_for, plan = plan.removed, remove_planned(plan)
        for name in asked_for if not as_json else ():
            if name not in plan.removed:
                say(f"leave   {name}: {plan.left[name]}", "cyan")
    if as_json:
        facts = picked(
            plan, *("directory", "removed", "kept", "left", "other_files", "scores", "nbytes", "freed")
        )
        print_json(facts | {"dry_run": dry_run})
    elif not plan.removed:
        click.echo("no checkpoint to remove")
    elif not dry_run:
        freed = size(plan.freed)
        if plan.freed < plan.nbytes:
            freed = f"{freed} of {size(plan.nbytes)} freed: checkpoints that stay share the rest"
        else:
            freed = f"{freed} freed"
        click.echo(f"removed {count(len(plan.removed), 'checkpoint')}, {freed}")


def _confirm(question: str) -> None:
    """Ask, and end the command unless the answer is yes. If standard input ends without an answer, name --yes."""
    try:
        agreed = click.confirm(question)
    except click.Abort:
        if sys.stdin is not None and sys.stdin.isatty():  # Ctrl-C or Ctrl-D
            raise
        click.echo(err=True)  # the question has no line end
        raise click.UsageError(
            "standard input has no answer: add --yes to delete without a question"
        ) from None
    if not agreed:
        raise click.Abort


def _show_plan(plan: Pruned) -> None:
    from eformer._engine.formats.run_steps import resumed_from
    from eformer._engine.record.step_names import step_number
    from eformer._engine.stores.locate import store_at

    resumed = resumed_from(store_at(plan.directory))
    for name in plan.kept:
        is_start = resumed is not None and step_number(name) == resumed
        say(f"keep    {name}{': the run resumed from it' if is_start else ''}")
    for name, why in plan.left.items():
        say(f"leave   {name}: {with_options(why)}", "cyan")
    for name in plan.removed:
        say(f"remove  {name}", "red")
        for file in plan.other_files.get(name, ()):
            say(f"        with {file}, which does not belong to it", "red")
    for file in plan.scores:
        say(f"remove  {file}: its checkpoint has gone", "red")


@main.command(short_help="List the steps of a run")
@click.argument("run", type=click.Path())
@options.keep
@options.as_json
def steps(run: str, as_json: bool, **keep: Any) -> None:
    """List the steps of RUN: when and why each was saved, its size, and its metrics.

    With rules, marks the steps that `prune` would delete. `prune` also deletes steps of the same number under another
    name, such as run-2 beside step-2; the list does not show them. If steps share the files of unchanged leaves, the
    size of the first step includes them.

    \b
    eformer steps ./run
    eformer steps ./run --keep 3
    """
    from eformer._engine.formats.steps import is_checkpoint
    from eformer._engine.pages.timeline import step_facts
    from eformer._engine.stores.locate import store_at

    found = step_facts(run, options.rules_from(**keep))
    if as_json:
        print_json({"run": run, "steps": found})
        return
    if not found:
        if is_checkpoint(store_at(run)):
            raise NotFoundError(f"{run} is a checkpoint, not a run with steps; eformer inspect shows it")
        say(f"no steps in {run}")
        return
    from eformer.cli import terminal

    terminal.list_steps(found, terminal.console())


@main.command(short_help="Ask a running job to save")
@click.argument("run", type=click.Path())
@click.option("--timeout", type=float, default=600, show_default=True, help="Seconds to wait for the step.")
def request(run: str, timeout: float) -> None:
    """Ask the job that writes RUN to save at its next step. Print the path of the step when it is saved.

    The job notices the request within a second, in a bucket within 10 seconds. Its rules and its loop stay as they are.

    \b
    eformer request ./run
    eformer request s3://bucket/run --timeout 1800
    """
    from eformer._engine.runs.requests import request_save

    click.echo(request_save(run, timeout=timeout))


@main.command(short_help="Try everything in ten seconds")
@click.argument("directory", type=click.Path(), required=False)
@click.option("--open", "show", is_flag=True, help="Open the page of the run in a browser.")
def demo(directory: str | None, show: bool) -> None:
    """Save a training state, load it on another mesh, convert it, detect a flipped bit, and kill a run and resume it.

    Keeps the files in DIRECTORY, if given. With --open and without DIRECTORY, keeps them in a new temporary directory.

    \b
    eformer demo
    eformer demo ./demo
    eformer demo --open
    """
    import tempfile
    from contextlib import nullcontext

    from eformer._engine.stores.urls import local_path
    from eformer.demo import run  # late: it imports jax, which takes a second

    if show and directory is None:
        directory = f"{tempfile.mkdtemp(prefix='eformer-demo-')}/demo"
    if directory is not None:
        place = local_path(directory)
        if place.exists():
            raise FileExistsError(f"{directory} already exists; choose another directory")
        place.mkdir(parents=True)
    with nullcontext(directory) if directory else tempfile.TemporaryDirectory() as folder:
        run(local_path(folder))
    _say_what_to_try(directory)
    if show:
        from eformer._engine.pages.report import report as make

        written = make(f"{directory}/run").save(f"{directory}/run-report.html")
        say(f"\nreport: {written}", "green")
        open_page(written)


def _say_what_to_try(directory: str | None) -> None:
    where = directory or "./demo"
    tries = {
        f"inspect {where}/step-100": "show the tree",
        f"diff {where}/step-100 {where}/step-200": "show which leaves a step changed",
        f"verify {where}/damaged": "show which bytes are damaged",
        f"steps {where}/run": "list the steps of the run that was killed",
        f"report {where}/run": "write a page of the run for a browser",
        "inspect YOUR/CHECKPOINT": "Orbax, safetensors, flax, npz, PyTorch, ...",
    }
    if directory is None:
        tries = {"demo ./demo": "run it again and keep the files"} | tries
    say("\nTry next:", bold=True)
    width = max(map(len, tries))
    columns = len("  eformer    ") + width + max(map(len, tries.values()))
    is_wide = columns > shutil.get_terminal_size((100, 24)).columns
    for command, purpose in tries.items():
        line = f"{command}\n      {purpose}" if is_wide else f"{command:<{width}}   {purpose}"
        click.echo(f"  eformer {line}")


@main.command(short_help="Print a completion script for a shell")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script that completes the commands, options and paths of eformer in SHELL.

    \b
    eformer completion bash >> ~/.bashrc
    eformer completion zsh >> ~/.zshrc
    eformer completion fish > ~/.config/fish/completions/eformer.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "eformer", "_EFORMER_COMPLETE").source())


main.add_command(report)
main.add_command(serve)

for _command in (inspect, list_leaves, verify, diff, convert, merge, prune, steps, request, report, serve):
    options.store(_command)
