"""Report on a checkpoint, alone or compared with another, or on a run."""

from __future__ import annotations

import datetime as dt
import html
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from eformer._engine.formats.run_steps import path_of_step
from eformer._engine.formats.steps import is_run
from eformer._engine.pages.changes import LeafChange, overview, recorded_change
from eformer._engine.pages.contents import page_contents
from eformer._engine.pages.facts import columns
from eformer._engine.pages.page import MARK, page
from eformer._engine.pages.reading import Measured, MeasuredPart, joined_parts, measure
from eformer._engine.pages.timeline import alarms, run_facts
from eformer._engine.processes.crew import Crew, divided
from eformer._engine.record.policies import keep_from
from eformer._engine.record.text import count, few
from eformer._engine.stores.durable import replacing
from eformer._engine.stores.locate import store_at
from eformer._engine.stores.urls import local_path
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from eformer._engine.formats.run_steps import StepChoice
    from eformer._engine.pages.contents import PageContents
    from eformer._engine.record.division import Portion
    from eformer._engine.record.policies import Keep
    from eformer._engine.tasks.progress import Progress


@dataclass(frozen=True)
class Report:
    """A report as one HTML page, which needs no network. Notebooks show it inline.

    path   the checkpoint or the run that it describes
    data   its facts, as JSON
    html   the page

    Example:

        >>> checkpoint.report("run/step-100").save("report.html")
        'report.html'
    """

    path: str
    data: dict[str, Any] = field(repr=False)

    @property
    def html(self) -> str:
        """Return the page as text."""
        return page(self.data)

    @uninterrupted
    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> str:
        """Write the page to a file, which appears whole or not at all; return its path.

        An existing report is replaced; any other file only with `overwrite`.
        """
        if not overwrite:
            check_report_path(path)
        with replacing(local_path(path)) as file:
            file.write(self.html.encode())
        return os.fspath(path)

    def _repr_html_(self) -> str:
        """Return the page in a frame that may run its own script, and nothing else."""
        source = html.escape(self.html, quote=True)
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{source}" title="eformer report" '
            'style="width: 100%; height: 720px; border: 1px solid #8884; border-radius: 8px"></iframe>'
        )


def check_report_path(path: str | os.PathLike[str]) -> None:
    """Raise FileExistsError unless `path` is free, or a report."""
    file = local_path(path)
    if file.exists() and not _is_report(file):
        state = "is a directory" if file.is_dir() else "exists and is not a report"
        raise FileExistsError(f"{os.fspath(path)} {state}; choose another name")


def _is_report(path: Path) -> bool:
    if not path.is_file():  # a directory, or a pipe, whose reads would wait
        return False
    with path.open("rb") as file:
        return MARK in file.read(4096)


@uninterrupted
def report(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    *,
    values: bool = True,
    prefix: str | None = None,
    step: StepChoice = None,
    keep: int | Keep | Sequence[Keep] | None = None,
    memory: int | None = None,
    progress: Progress = None,
    executor: Executor | Crew | None = None,
) -> Report:
    """Report on the checkpoint at `path`: its tree, sizes, dtypes, shardings, and the distribution of every leaf.

    The path of a run gives a report on the run: its steps, sizes, metrics and damage, and how much each step changed
    the model.

    against    another checkpoint, such as an earlier step: leaves added, removed and changed, and by how much
    values     False reads headers only: no statistics, and nothing is checked
    prefix     report on this tree alone, of several
    step       report on this step of the run at `path`: its number, or "best"
    keep       rules as for `Run`: a report on a run shows which steps they keep
    memory     the most bytes that the program takes; None for 1 GB more than it takes now
    progress   True for a progress bar, or a function of the bytes read and the total
    executor   a `concurrent.futures.Executor` whose workers read the arrays, a part of the bytes each; a report on a
               run is made here

    Every array is read once, box by box, and checked against its digests where the format has them; damage is shown in
    the report, and does not raise.

    Example:

        >>> report = checkpoint.report("run/step-200", against="run/step-100")
        >>> report.save("report.html")
        'report.html'
    """
    if step is None and against is None and prefix is None and is_run(store_at(path)):
        if isinstance(executor, Crew) and not executor.is_first:
            values = False  # the first process reads the run, and the others have nothing to do
        run = run_facts(path, keep_from(keep) or (), values=values, memory=memory, progress=progress)
        return Report(
            run["path"], {"version": 1, "kind": "run", "title": f"{run['title']}: run", "run": run | made()}
        )
    path = path_of_step(path, step)
    with page_contents(path, prefix) as contents:
        work = _work(path, against, prefix, memory, executor)
        if against is None:
            return _checkpoint_report(contents, None, values, memory, progress, work)
        with page_contents(against, prefix) as other:
            return _checkpoint_report(contents, other, values, memory, progress, work)


def _work(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | None,
    prefix: str | None,
    memory: int | None,
    executor: Executor | Crew | None,
) -> Callable[[Progress, int], dict[str, Measured]] | None:
    """Return a function that measures the leaves by the workers of an executor; None without one."""
    if executor is None:
        return None
    paths = os.fspath(path), None if against is None else os.fspath(against)

    def measured(progress: Progress, nbytes: int) -> dict[str, Measured]:
        return divided(
            partial(_measure_part, *paths, prefix, memory),
            joined_parts,
            MeasuredPart,
            executor=executor,
            progress=progress,
            nbytes=lambda: nbytes,
            doing="reading",
        ).leaves

    return measured


def _measure_part(
    path: str, against: str | None, prefix: str | None, memory: int | None, part: Portion, progress: Progress
) -> MeasuredPart:
    """Measure the leaves of a part."""
    with ExitStack() as stack:
        contents = stack.enter_context(page_contents(path, prefix))
        other = None if against is None else stack.enter_context(page_contents(against, prefix))
        leaves = measure(contents, other, memory=memory, progress=progress, part=part)
        read = [contents, *([other] if other else [])]
        digests = [view.tree.save_id for one in read for view in one.views.values()]
        return MeasuredPart(digests, leaves)


def damage_in(report: Report) -> str:
    """Return the damage in a report as text: the number of damaged arrays or steps, and the first. Empty if none."""
    if report.data["kind"] == "run":
        steps = [
            f"{step['name']}: {step['problem']}" for step in report.data["run"]["steps"] if step["problem"]
        ]
        return f"{count(len(steps), 'damaged step')}: {few(steps)}" if steps else ""
    leaves = [problem for problem, is_damaged in report.data["leaves"]["problems"].values() if is_damaged]
    texts = [f"{count(len(leaves), 'damaged array')}: {few(leaves)}"] if leaves else []
    return "; ".join([*report.data["summary"]["problems"], *texts])


def became_in(report: Report) -> str:
    """Return the leaves, or the steps of a run, that became NaN or infinite, as text. Empty if none did."""
    if report.data["kind"] == "run":
        return few(alarms(report.data["run"]["steps"]))
    against = report.data.get("against")
    if not against or not against["became"]:
        return ""
    leaves = [leaf["path"] for leaf in against["became"]]
    return f"{count(against['counts']['became'], 'leaf', 'leaves')} became NaN or Inf: {few(leaves)}"


def _checkpoint_report(
    contents: PageContents,
    other: PageContents | None,
    values: bool,
    memory: int | None,
    progress: Progress,
    work: Callable[[Progress, int], dict[str, Measured]] | None,
) -> Report:
    measured: dict[str, Measured] = {}
    if values and work:
        measured = work(progress, contents.nbytes)
    elif values:
        measured = measure(contents, other, memory=memory, progress=progress)
    found = changes_of(contents, other, measured)
    summary = contents.summary() | made() | {
        "has_values": values,
        "verification": verification(contents, measured, values=values),
        "health": health(measured),
    }  # fmt: skip
    data = {"version": 1, "kind": "checkpoint", "title": f"{summary['title']}: report", "summary": summary}
    if other:
        data["against"] = overview(contents, other, found)
        summary["against"] = other.brief()
    return Report(contents.path, data | {"leaves": columns(contents, measured, found)})


def changes_of(
    contents: PageContents, other: PageContents | None, measured: dict[str, Measured]
) -> dict[str, LeafChange]:
    """Return how each leaf differs from its counterpart, as measured, or as far as the records tell. Empty without
    another checkpoint."""
    found: dict[str, LeafChange] = {}
    if other is None:
        return found
    for leaf in contents.leaves:
        read = measured.get(leaf.path)
        change = read.change if read else None
        found[leaf.path] = change or recorded_change(contents, leaf, other) or LeafChange("unknown")
    return found


def made() -> dict[str, str]:
    """Return the program and the time of the report."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {"made_by": f"eformer {__version__}", "made_at": now}


def verification(contents: PageContents, measured: dict[str, Measured], *, values: bool) -> dict[str, Any]:
    """Describe the checks that the report has made."""
    damaged = [path for path, found in measured.items() if found.is_damaged]
    unread = sum(found.problem is not None and not found.is_damaged for found in measured.values())
    if not values:
        return {"state": "unchecked", "text": "Headers only: no values were read, and nothing was checked."}
    if damaged:
        text = f"{count(len(damaged), 'damaged array')}: see the rows in red."
        return {"state": "damaged", "text": text, "damaged": damaged[:100]}
    if contents.problems:
        return {
            "state": "damaged",
            "text": "A tree of the checkpoint cannot be read as a whole.",
            "damaged": [],
        }
    if unread:
        text = f"{count(unread, 'array')} could not be read within the allowed memory."
        return {"state": "partly", "text": text}
    if contents.trees and all(tree.has_digests for tree in contents.trees.values()):
        return {"state": "verified", "text": "Every byte of every array was read and matches its digest."}
    return {
        "state": "read",
        "text": "Every array could be read. This format has no digests to check the bytes against.",
    }


def health(measured: dict[str, Measured]) -> dict[str, int]:
    """Count the arrays with NaN elements, with infinite elements, and with zeros alone."""
    found = [one.statistics for one in measured.values() if one.statistics]
    return {
        "nan": sum(one.nans > 0 for one in found),
        "inf": sum(one.positive_infinities + one.negative_infinities > 0 for one in found),
        "zero": sum(0 < one.zeros == one.size for one in found),
    }
