"""The engine: trees to named leaves, leaves to bytes, bytes to stable storage, and back.

    save, save_async         write a tree; SaveOptions says how, Pending is a save that is under way
    load                     read a tree, onto any mesh
    open, inspect            look at the leaves of a checkpoint without loading it: View, Manifest
    verify                   check every byte against its digest: Report
    diff                     compare two checkpoints: Diff
    convert                  write a checkpoint in another format: Conversion
    prune                    delete all but the last checkpoints of a run: Pruned
    dry_run                  compute how many bytes a load would put on each device: DryRun
    register_node            let trees with nodes of a class come back without `like`

Modules that start with an underscore are private, and may change at any time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eformer.checkpoint._conversion import Conversion as Conversion
    from eformer.checkpoint._convert import convert as convert
    from eformer.checkpoint._diff import Diff as Diff
    from eformer.checkpoint._diff import diff as diff
    from eformer.checkpoint._dry_run import DryRun as DryRun
    from eformer.checkpoint._dry_run import dry_run as dry_run
    from eformer.checkpoint._load import load as load
    from eformer.checkpoint._manifest import Manifest as Manifest
    from eformer.checkpoint._nodes import register_node as register_node
    from eformer.checkpoint._options import SaveOptions as SaveOptions
    from eformer.checkpoint._pending import Pending as Pending
    from eformer.checkpoint._prune import Pruned as Pruned
    from eformer.checkpoint._prune import prune as prune
    from eformer.checkpoint._save import save as save
    from eformer.checkpoint._save import save_async as save_async
    from eformer.checkpoint._verify import Report as Report
    from eformer.checkpoint._verify import verify as verify
    from eformer.checkpoint._view import View as View
    from eformer.checkpoint._view import inspect as inspect
    from eformer.checkpoint._view import open as open  # noqa: A004

_HOME = {
    "Conversion": "_conversion",
    "Diff": "_diff",
    "DryRun": "_dry_run",
    "Manifest": "_manifest",
    "Pending": "_pending",
    "Pruned": "_prune",
    "Report": "_verify",
    "SaveOptions": "_options",
    "View": "_view",
    "convert": "_convert",
    "diff": "_diff",
    "dry_run": "_dry_run",
    "inspect": "_view",
    "load": "_load",
    "open": "_view",
    "prune": "_prune",
    "register_node": "_nodes",
    "save": "_save",
    "save_async": "_save",
    "verify": "_verify",
}

__all__ = [
    "Conversion",
    "Diff",
    "DryRun",
    "Manifest",
    "Pending",
    "Pruned",
    "Report",
    "SaveOptions",
    "View",
    "convert",
    "diff",
    "dry_run",
    "inspect",
    "load",
    "open",
    "prune",
    "register_node",
    "save",
    "save_async",
    "verify",
]


def __getattr__(name: str) -> Any:
    # Late, because some of these modules import jax, and what only reads files should start without it.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
