"""Compare two records of a scenario, and hold the differences against the list of deviations."""

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

DEVIATIONS = Path(__file__).with_name("deviations.toml")


@dataclass(frozen=True)
class Deviation:
    """A difference that is meant: its scenario and label, with `*` for any, the topic, and the reason."""

    scenario: str
    sees: str
    topic: str
    reason: str

    def covers(self, difference):
        """Tell whether the difference is the one that is meant."""
        return fnmatchcase(difference.scenario, self.scenario) and fnmatchcase(difference.label, self.sees)


@dataclass(frozen=True)
class Difference:
    """A label of a scenario whose views differ."""

    scenario: str
    label: str
    oracle: object
    door: object


@dataclass(frozen=True)
class Verdict:
    """The judged labels, the differences that are listed, the others, and deviations that no longer deviate."""

    labels: int
    listed: tuple
    failures: tuple
    stale: tuple


def read_deviations(path=DEVIATIONS):
    """Read the list of deviations."""
    return [Deviation(**each) for each in tomllib.loads(path.read_text("utf-8")).get("deviation", [])]


def judge(oracle, door, deviations):
    """Compare the records of both sides: `{scenario: {label: view}}`."""
    differences = [each for name in oracle for each in differing(name, oracle[name], door.get(name, {}))]
    listed = [each for each in differences if any(known.covers(each) for known in deviations)]
    failures = [each for each in differences if each not in listed]
    stale = [
        known
        for known in deviations
        if any(fnmatchcase(name, known.scenario) for name in oracle)
        and not any(known.covers(each) for each in differences)
    ]
    return Verdict(sum(map(len, oracle.values())), tuple(listed), tuple(failures), tuple(stale))


def differing(name, oracle, door):
    """List the labels of a scenario whose views differ, or that one side alone has."""
    labels = {**oracle, **door}
    return [
        Difference(name, label, oracle.get(label), door.get(label))
        for label in labels
        if label not in oracle or label not in door or not agree(oracle[label], door[label])
    ]


def agree(oracle, door):
    """Tell whether a caller sees the same. The door's exceptions may belong to more families; words are its own."""
    if isinstance(oracle, dict) and isinstance(door, dict):
        oracle, door = (
            {key: each for key, each in side.items() if key != "message"} for side in (oracle, door)
        )
        return oracle.keys() == door.keys() and all(_agree_at(key, oracle[key], door[key]) for key in oracle)
    if isinstance(oracle, list) and isinstance(door, list):
        return len(oracle) == len(door) and all(map(agree, oracle, door))
    return type(oracle) is type(door) and oracle == door


def _agree_at(key, oracle, door):
    if key == "raised":
        return set(oracle) <= set(door)
    return agree(oracle, door)
