"""Decide which case comes next: every kind gets the same time, and every layout of a kind as many cases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import libraries
import subjects
from cases import OVER, Case
from kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kinds.kind import Kind


@dataclass(slots=True)
class Lane:
    """The cases of one kind and layout."""

    kind: Kind
    layout: str
    environment: str
    next_seed: int
    is_over: bool = False
    is_busy: bool = False  # of which only one case is run at a time


@dataclass(slots=True)
class Plan:
    lanes: list[Lane]
    first: int
    spent: dict[str, float] = field(default_factory=dict)
    cannot: dict[str, str] = field(default_factory=dict)  # by "kind/layout"

    @classmethod
    def of(cls, kinds: Iterable[Kind], *, peers: bool, seed: int) -> Plan:
        plan = cls([], seed)
        for kind in kinds:
            for layout, environment in layouts_of(kind, peers=peers).items():
                if reason := kind.cannot(layout):
                    plan.cannot[f"{kind.name}/{layout}"] = reason
                else:
                    plan.lanes.append(Lane(kind, layout, environment, seed))
        return plan

    def take(self, seconds_left: float) -> Lane | None:
        """Return the lane whose turn it is; None if nothing can be begun now."""
        ready = [
            lane
            for lane in self.lanes
            if not lane.is_over
            and not (lane.is_busy and lane.kind.expects > 10)
            and lane.kind.expects < seconds_left
        ]
        return min(ready, key=self._rank, default=None)

    def _rank(self, lane: Lane) -> tuple[float, int]:
        """Prefer the kind that has had the least time; while it has layouts to begin, it gets three times as much."""
        share = 3 if lane.next_seed == self.first else 1
        return self.spent.get(lane.kind.name, 0.0) / share, lane.next_seed

    def begin(self, lane: Lane) -> Case:
        case = Case(lane.kind.name, lane.layout, lane.next_seed)
        lane.next_seed += 1
        lane.is_busy = True
        self.spent[lane.kind.name] = self.spent.get(lane.kind.name, 0.0) + lane.kind.expects
        return case

    def end(self, lane: Lane, word: str, seconds: float) -> None:
        lane.is_busy = False
        lane.is_over = lane.is_over or word == OVER
        self.spent[lane.kind.name] += seconds - lane.kind.expects

    def resume(self, records: Iterable[dict[str, Any]]) -> None:
        """Go on where the cases of these records have ended."""
        lanes = {(lane.kind.name, lane.layout): lane for lane in self.lanes}
        for record in records:
            self.spent[record["kind"]] = self.spent.get(record["kind"], 0.0) + record["seconds"]
            if lane := lanes.get((record["kind"], record["layout"])):
                lane.next_seed = max(lane.next_seed, record["seed"] + 1)
                lane.is_over = lane.is_over or record["word"] == OVER


def layouts_of(kind: Kind, *, peers: bool) -> dict[str, str]:
    """Return the environment for each layout of a kind, or for each library if they are compared."""
    if not peers:
        return dict.fromkeys(kind.layouts(), "own")
    return kind.libraries() if kind.for_peers else {}


def environment_of(case: Case) -> str:
    """Return the environment of a case that is repeated."""
    for peers in (False, True):
        found = layouts_of(KINDS[case.kind], peers=peers)
        if case.layout in found:
            return found[case.layout]
    if case.layout.partition(" on ")[0] in libraries.CONTROLS:
        return "own"
    known = [*layouts_of(KINDS[case.kind], peers=False), *subjects.side_by_side()]
    raise ValueError(f"{case.kind} has no layout {case.layout!r}; they are {', '.join(known)}")
