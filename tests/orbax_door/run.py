"""Run the scenarios with Orbax and with the door, compare, and print the table: `make orbax-door`.

Until there is a door, Orbax alone runs: the scenarios must run without an accident, twice alike with `--twice`.
"""

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from orbax_door import compare, kinds

HERE = Path(__file__).parent
LIMIT = 1500  # seconds for a module


@dataclass(frozen=True)
class Order:
    """One pass over a module: the side of each leg, and the name of the pass."""

    name: str
    module: str
    sides: tuple


def main():
    options = _options()
    modules = [path.stem for path in sorted((HERE / "scenarios").glob("[a-z]*.py"))]
    chosen = {name: names for name in modules if (names := _chosen(name, options.only))}
    there = has_door()
    with (
        tempfile.TemporaryDirectory(prefix="orbax-door-") as scratch,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        orders = [each for name in chosen for each in _orders(name, there, options.twice)]
        runs = pool.map(lambda each: run(each, chosen[each.module], Path(scratch)), orders)
        records = {each.name: record for each, record in zip(orders, runs, strict=True)}
    if options.out:
        Path(options.out).write_text(json.dumps(records, indent=1), encoding="utf-8")
    sys.exit(report(records, list(chosen), there, options))


def _options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=["*"], help="names such as managers.* or *prefix*")
    parser.add_argument("--jobs", type=int, default=min(4, len(os.sched_getaffinity(0))))
    parser.add_argument(
        "--twice", action="store_true", help="compare Orbax with itself: scenarios must be repeatable"
    )
    parser.add_argument("--out", help="write every view to this file")
    parser.add_argument("--verbose", action="store_true", help="print both views of each difference")
    parser.add_argument(
        "--write-kinds", action="store_true", help="write the table of kinds of leaves as Orbax has it"
    )
    return parser.parse_args()


def has_door():
    """Tell whether the door exists."""
    try:
        return importlib.util.find_spec("eformer.compat.orbax") is not None
    except ModuleNotFoundError:
        return False


def _chosen(module, patterns):
    names = [each.name for each in scenarios(module)]
    return [name for name in names if any(fnmatchcase(f"{module}.{name}", each) for each in patterns)]


def scenarios(module):
    """Return the scenarios of a module."""
    return importlib.import_module(f"orbax_door.scenarios.{module}").SCENARIOS


def _orders(module, there, twice):
    """List the passes: Orbax, and the door. In programs of several processes each also reads the other's files."""
    legs = max(len(each.devices) for each in scenarios(module))
    yield Order(f"oracle:{module}", module, ("oracle",) * legs)
    if twice:
        yield Order(f"again:{module}", module, ("oracle",) * legs)
    if there:
        yield Order(f"door:{module}", module, ("door",) * legs)
    if there and legs > 1:
        yield Order(f"oracle then door:{module}", module, ("oracle", *("door",) * (legs - 1)))
        yield Order(f"door then oracle:{module}", module, ("door", *("oracle",) * (legs - 1)))


def run(order, names, scratch):
    """Run a pass, and return the views: `{scenario: {label: view}}`."""
    place = Path(tempfile.mkdtemp(dir=scratch))
    known = {each.name: each for each in scenarios(order.module) if each.name in names}
    found = {name: {} for name in known}
    for leg, side in enumerate(order.sides):
        for devices in sorted({each.devices[leg] for each in known.values() if leg < len(each.devices)}):
            due = [
                each.name
                for each in known.values()
                if leg < len(each.devices) and each.devices[leg] == devices
            ]
            for name, views in _run_leg(order, side, leg, devices, due, place).items():
                found[name] |= {
                    f"leg {leg}: {label}" if leg else label: view for label, view in views.items()
                }
    shutil.rmtree(place, ignore_errors=True)
    return {f"{order.module}.{name}": views for name, views in found.items()}


def _run_leg(order, side, leg, devices, due, place):
    """Run scenarios in one process, and in another after each that ends it."""
    found, out = {}, place / f"{leg}-{devices}.jsonl"
    while left := [name for name in due if name not in found]:
        code = _start(order, side, leg, devices, left, place, out)
        lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()] if out.exists() else []
        found |= {each["name"]: each["seen"] for each in lines if "name" in each}
        if not (begun := [each["begun"] for each in lines if "begun" in each and each["begun"] not in found]):
            begun = [name for name in left if name not in found][:1]
        found |= {name: {"accident": {"raised": ["process ended"], "trace": code}} for name in begun}
    return found


def _start(order, side, leg, devices, names, place, out):
    layout = {"EFORMER_ORBAX_LAYOUT": "orbax"} if "then oracle" in order.name else {}
    paths = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-W", "ignore", "-m", "orbax_door.worker"]
    command += [side, order.module, str(leg), str(devices), str(place / "roots"), str(out), *names]
    environment = {**os.environ, **layout, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with (place / "log").open("w+") as log:
        try:
            code = subprocess.run(
                command, env=environment, stdout=log, stderr=log, timeout=LIMIT, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = "time limit"
        log.seek(0)
        return f"exit {code}: {log.read()[-3000:]}"


def report(records, modules, there, options):
    """Print the table and the failures; return the exit status."""
    oracle = {name: views for module in modules for name, views in records[f"oracle:{module}"].items()}
    problems = [f"{name}: Orbax had an accident:\n{trace}" for name, trace in accidents(oracle)]
    problems += [f"{name}: {label}: Orbax does not say the words" for name, label in unsaid(oracle)]
    problems += kinds.check(oracle, write=options.write_kinds)
    passes = [name for name in records if not name.startswith("oracle:")]
    deviations = compare.read_deviations()
    rows = [_row(name, records, deviations) for name in passes]
    print(f"Orbax: {len(oracle)} scenarios, {sum(map(len, oracle.values()))} labels")
    if not there:
        print("eformer.compat.orbax does not exist yet: nothing is compared")
    for name, verdict in rows:
        listed, failed, stale = map(len, (verdict.listed, verdict.failures, verdict.stale))
        agreed = verdict.labels - listed - failed
        print(
            f"{name:30} agreed {agreed:5}   listed deviations {listed:4}   failures {failed:4}   stale {stale:4}"
        )
    for name, verdict in rows:
        problems += [_failure(name, each, options.verbose) for each in verdict.failures]
        problems += [
            f"{name}: {each.scenario}: {each.sees}: deviates no longer; take it off the list"
            for each in verdict.stale
        ]
    print(*problems, sep="\n")
    return bool(problems)


def _row(name, records, deviations):
    """Judge a pass. Orbax against itself has no deviations, and the door alone tells which of them are stale."""
    kind, _, module = name.partition(":")
    verdict = compare.judge(records[f"oracle:{module}"], records[name], [] if kind == "again" else deviations)
    return name, verdict if kind == "door" else replace(verdict, stale=())


def accidents(oracle):
    """List scenarios whose program ended by an exception that it did not expect."""
    for name, views in oracle.items():
        yield from ((name, views[label]["trace"][-700:]) for label in views if label.endswith("accident"))


def unsaid(oracle):
    """List labels whose exception lacks the words that callers match."""
    for name, views in oracle.items():
        yield from (
            (name, label)
            for label, view in views.items()
            if isinstance(view, dict) and view.get("says") is False
        )


def _failure(order, difference, verbose):
    text = f"{order.partition(':')[0]}: {difference.scenario}: {difference.label}"
    if not verbose:
        return text
    return f"{text}\n   Orbax {json.dumps(difference.oracle)[:1500]}\n   door  {json.dumps(difference.door)[:1500]}"


if __name__ == "__main__":
    main()
