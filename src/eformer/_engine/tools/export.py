"""Export a tree, a checkpoint or a run as a model that transformers opens."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec

from eformer._engine.record.text import parse_size
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tools.conversion import Conversion
from eformer._engine.tools.convert import convert, convert_opened
from eformer._engine.tools.view import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import ExitStack

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.run_steps import StepChoice
    from eformer._engine.record.rename import RenameRules
    from eformer._engine.tasks.progress import Progress


@uninterrupted
def export(
    tree_or_path: Any,
    destination: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    rename: RenameRules | None = None,
    back: bool | None = None,
    step: StepChoice = None,
    prefix: str | None = None,
    root: str | None = None,
    keys: str | Iterable[str] | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: Any = None,
    max_shard_size: str | int = "5GB",
    card: bool = True,
    fill_from_like: bool = False,
    allow_missing: bool = False,
    memory: int | None = None,
    dry_run: bool = False,
    progress: Progress = None,
    dequant: Any = None,
    origin: Mapping[str, Any] | None = None,
) -> Conversion:
    """Write a tree as a directory that `AutoModelForCausalLM.from_pretrained` and vLLM open.

    The directory has the weights under the names of Hugging Face, their index, config.json, the tokenizer and all
    other files that `like` has beside its weights, a card, and a manifest with digests. It appears complete or not at
    all; in a bucket the index comes last. Names, shapes, the vocabulary and tokens are compared with `like` before
    anything is written, and one error lists all differences.

    tree_or_path    a tree of arrays; or the path of a checkpoint or a run. If the program has several processes, all of
                    them pass the tree; it goes through a checkpoint beside the destination, `NAME.to-export`, which
                    the first process converts
    destination     a new directory, on this machine or in a bucket; or hf://org/model[@revision], to which one commit
                    uploads the model. A directory that exists is refused; that commit replaces the weights of the
                    model
    like            the directory, or hf://org/model, of the model that the tree was made from. Its weights are not
                    read, except for `fill_from_like`. Without it, `config` or the recorded origin must have the
                    configuration
    rename          rules that give the leaves their names at Hugging Face
    back            read the rules of `rename`, or the recorded rules, from right to left; None does so if the rules can
                    be read backwards
    step            of a run: the number of another step than the newest, or "best"
    prefix          the tree, if the checkpoint has several
    root            name of the subtree with the weights, such as "params"
    keys            names of leaves or subtrees to export, or patterns; after `rename`
    config          settings for config.json, such as {"vocab_size": 32064}; they override those of `like`
    dtype           dtype of all floating tensors; None for the dtype that each has in `like`, else for that in the
                    configuration
    max_shard_size  maximum size of a file, such as "5GB"; a larger tensor has a file of its own
    card            write README.md: licence, base model, and how the weights were made
    fill_from_like  take tensors that the tree lacks from `like`
    allow_missing   write the model even if it lacks tensors of `like`
    memory          maximum memory of the program in bytes, see `convert`
    dry_run         plan and check the export, but write nothing
    progress        True for a progress bar, or a function of the bytes done and the total
    dequant         of the path of a quantised model: a floating dtype, such as "bf16", for its weights, see `convert`
    origin          of a tree: `LoadReport.origin` of the load that it began with, which has rules and configuration

    Example:

        >>> model = checkpoint.load("hf/llama")
        >>> plan = checkpoint.export(model, "for-hf", like="hf/llama", dry_run=True)
        >>> plan.notes
        ()
    """
    arguments = {name: value for name, value in locals().items() if name in _OF_CONVERT}
    shard = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    arguments |= {"to": "hf", "max_shard_bytes": shard}
    if isinstance(tree_or_path, (str, os.PathLike)):
        if origin is not None:
            raise ValueError("origin= is for a tree; a checkpoint has a recorded origin")
        return convert(tree_or_path, destination, **arguments)
    if step is not None or prefix is not None or dequant is not None:
        raise ValueError("step=, prefix= and dequant= are for the path of a checkpoint, not for a tree")

    from eformer._engine.processes.hosts import is_alone  # late: these import jax

    if not is_alone():
        from eformer._engine.saving.memory import through_store

        if dry_run:
            raise ValueError("dry_run=True is for a program of one process, or for the path of a checkpoint")
        made = through_store(
            tree_or_path,
            os.fspath(destination),
            origin,
            lambda path: msgspec.msgpack.encode(convert(path, destination, **arguments)),
        )
        return msgspec.msgpack.decode(made, type=Conversion)

    def opened(stack: ExitStack) -> tuple[Found, dict[str, View]]:
        from eformer._engine.saving.memory import found_in_memory  # late: it imports jax

        found = found_in_memory(tree_or_path, origin)
        return found, {"": stack.enter_context(View(found, None))}

    return convert_opened(opened, "tree", destination, **arguments)


_OF_CONVERT = (
    *(
        "like",
        "rename",
        "back",
        "step",
        "prefix",
        "root",
        "keys",
        "config",
        "dtype",
        "card",
        "fill_from_like",
    ),
    *("allow_missing", "memory", "dry_run", "progress", "dequant"),
)
