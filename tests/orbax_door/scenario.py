"""Scenarios: short programs over `ocp` that show a caller's view, and the tools that their authors use.

A scenario yields `(label, value)`. `record.py` turns each value into data, so that values of two libraries compare.
"""

import contextlib
import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Scenario:
    """A program, and the number of devices of each process that runs it, one after the other, on one root."""

    name: str
    run: Callable
    devices: tuple = (8,)
    options: dict = field(default_factory=dict)

    def seen(self, ocp, root, leg):
        """Run the program, and yield its labels and values; a program that is no generator yields what it returns."""
        given = {**self.options, "leg": leg} if len(self.devices) > 1 else self.options
        if inspect.isgeneratorfunction(self.run):
            yield from self.run(ocp, root, **given)
        else:
            yield "result", self.run(ocp, root, **given)


@dataclass(frozen=True)
class Outcome:
    """The end of a call: its value, or its exception, and whether the exception says the words that callers match."""

    value: object = None
    error: BaseException | None = None
    says: bool | None = None


def scenario(run=None, *, devices=(8,), tail=None, **options):
    """Add the program to the scenarios of its module; each further name in `tail` adds it once more, with options.

    With more than one number in `devices`, the program runs once for each, in processes of their own, with `leg=`.
    """
    if run is None:
        return lambda run: scenario(run, devices=devices, tail=tail, **options)
    known = run.__globals__.setdefault("SCENARIOS", [])
    for name, more in (tail or {"": {}}).items():
        full = run.__name__ + (f"[{name}]" if name else "")
        known.append(Scenario(full, run, tuple(devices), {**options, **more}))
    return run


def outcome(call, *args, words=None, **kwargs):
    """Call, and return the `Outcome`. `words` is a regular expression that callers are known to match."""
    try:
        return Outcome(value=call(*args, **kwargs))
    except Exception as error:
        says = bool(re.search(words, str(error), re.DOTALL)) if words else None
        return Outcome(error=error, says=says)


def there(directory, *names):
    """Tell of each name below the directory whether it is a file, a directory, or absent."""
    kinds = {name: Path(directory, name) for name in names}
    return {
        name: "directory" if path.is_dir() else "file" if path.is_file() else None
        for name, path in kinds.items()
    }


def listing(directory):
    """Return the names in a directory, sorted; None if it does not exist."""
    path = Path(directory)
    return sorted(each.name for each in path.iterdir()) if path.is_dir() else None


def json_of(*path):
    """Return the content of a JSON file."""
    return json.loads(Path(*path).read_text("utf-8"))


def fields(found, *names):
    """Return attributes by name; an absent attribute is the name of its exception."""
    return {name: _field(found, name) for name in names}


def _field(found, name):
    result = outcome(getattr, found, name)
    return result if result.error else result.value


@contextlib.contextmanager
def manager(ocp, root, *args, **options):
    """Open a manager with options, and close it at the end."""
    with ocp.CheckpointManager(root, *args, options=ocp.CheckpointManagerOptions(**options)) as found:
        yield found
