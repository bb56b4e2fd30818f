"""Save trees of arrays to checkpoints, load them onto any mesh, and maintain them.

save, save_async         save a tree, with SaveOptions; save_async returns a Pending
wait                     wait for every save_async of this process
Run                      save the steps of a training run by rule (Every, Keep, Near), and resume it (Resumed, Step)
steps, latest, best      list the steps of a run; the path of the newest one, of the best one by a metric
follow, score            look at a run from another job: wait for its steps, add metrics to them
request_save             ask the job that writes a run to save at its next step
load                     load a tree onto any mesh, with LoadOptions; with return_report, return a LoadReport, too
abstract                 give the shapes and dtypes of a saved tree, in its structure
open, inspect            look at the leaves of a checkpoint without loading it; return a View, an Inspection
fingerprint              compute a digest of each leaf of a tree in memory, the one that inspect shows
same                     compare a tree in memory with the record of a checkpoint; return a Same
verify                   check every byte against its digest; return a Verification
sign                     sign every byte with a private key; `load` and `verify` check it with the public key
diff                     compare two checkpoints; return a Diff
report                   show a checkpoint, two of them or a run as a page for a browser; return a Report
convert                  write a checkpoint in another format; return a Conversion
rules                    show rules by name as NamedRules; their `check` tells whether they fit a model, a RuleCheck
export                   write a tree or a checkpoint as a model that transformers opens; return a Conversion
merge                    write weighted sums of checkpoints, or a base with its LoRA added; return a Conversion
prune                    delete all but the last checkpoints of a run; return a Pruned
store_options            set endpoints, credentials and other options of buckets
placement                compute how many bytes a load would put on each device; return a Placement
register_module          allow objects of a class of your own as parts of a tree
register_node            allow trees with nodes of a class to be rebuilt without `like`

    >>> from eformer import checkpoint
    >>> checkpoint.save(state, "run/step-100")
    >>> state = checkpoint.load("run/step-100")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eformer import _install  # noqa: F401  which warns of another package of this name

# The public names by their modules; a test compares them with the imports below.
_NAMES = {
    "loading.load": "load",
    "loading.preview": "Placement abstract placement",
    "loading.request": "LoadReport",
    "record.options": "LoadOptions SaveOptions",
    "record.policies": "Every Keep Near",
    "pages.report": "Report report",
    "runs.follow": "follow score",
    "runs.requests": "request_save",
    "runs.resume": "Resumed",
    "runs.run": "Run",
    "formats.run_steps": "Step best latest steps",
    "saving.live": "Same fingerprint same",
    "saving.pending": "Pending wait",
    "saving.start": "save save_async",
    "stores.store_options": "store_options",
    "tools.conversion": "Conversion",
    "tools.check_rules": "NamedRules RuleCheck rules",
    "tools.convert": "convert",
    "tools.diff": "Diff diff",
    "tools.export": "export",
    "tools.merge": "merge",
    "tools.prune": "Pruned prune",
    "tools.sign": "sign",
    "tools.verify": "Verification verify",
    "tools.view": "Inspection View inspect open",
    "trees.modules": "register_module",
    "trees.nodes": "register_node",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from eformer._engine.formats.run_steps import Step as Step
    from eformer._engine.formats.run_steps import best as best
    from eformer._engine.formats.run_steps import latest as latest
    from eformer._engine.formats.run_steps import steps as steps
    from eformer._engine.loading.load import load as load
    from eformer._engine.loading.preview import Placement as Placement
    from eformer._engine.loading.preview import abstract as abstract
    from eformer._engine.loading.preview import placement as placement
    from eformer._engine.loading.request import LoadReport as LoadReport
    from eformer._engine.pages.report import Report as Report
    from eformer._engine.pages.report import report as report
    from eformer._engine.record.options import LoadOptions as LoadOptions
    from eformer._engine.record.options import SaveOptions as SaveOptions
    from eformer._engine.record.policies import Every as Every
    from eformer._engine.record.policies import Keep as Keep
    from eformer._engine.record.policies import Near as Near
    from eformer._engine.runs.follow import follow as follow
    from eformer._engine.runs.follow import score as score
    from eformer._engine.runs.requests import request_save as request_save
    from eformer._engine.runs.resume import Resumed as Resumed
    from eformer._engine.runs.run import Run as Run
    from eformer._engine.saving.live import Same as Same
    from eformer._engine.saving.live import fingerprint as fingerprint
    from eformer._engine.saving.live import same as same
    from eformer._engine.saving.pending import Pending as Pending
    from eformer._engine.saving.pending import wait as wait
    from eformer._engine.saving.start import save as save
    from eformer._engine.saving.start import save_async as save_async
    from eformer._engine.stores.store_options import store_options as store_options
    from eformer._engine.tools.check_rules import NamedRules as NamedRules
    from eformer._engine.tools.check_rules import RuleCheck as RuleCheck
    from eformer._engine.tools.check_rules import rules as rules
    from eformer._engine.tools.conversion import Conversion as Conversion
    from eformer._engine.tools.convert import convert as convert
    from eformer._engine.tools.diff import Diff as Diff
    from eformer._engine.tools.diff import diff as diff
    from eformer._engine.tools.export import export as export
    from eformer._engine.tools.merge import merge as merge
    from eformer._engine.tools.prune import Pruned as Pruned
    from eformer._engine.tools.prune import prune as prune
    from eformer._engine.tools.sign import sign as sign
    from eformer._engine.tools.verify import Verification as Verification
    from eformer._engine.tools.verify import verify as verify
    from eformer._engine.tools.view import Inspection as Inspection
    from eformer._engine.tools.view import View as View
    from eformer._engine.tools.view import inspect as inspect
    from eformer._engine.tools.view import open as open  # noqa: A004
    from eformer._engine.trees.modules import register_module as register_module
    from eformer._engine.trees.nodes import register_node as register_node
else:
    __all__ = sorted(_HOME)  # type checkers go by the imports


def __getattr__(name: str) -> Any:
    # Late, because some of these modules import jax, which slows down the start of tools that only read files.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eformer._engine.tasks.interrupts import held_back

    with held_back():  # an interrupted import of jax crashes the program later
        return getattr(import_module(f"eformer._engine.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
