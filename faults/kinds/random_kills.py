"""Processes that save again and again and are killed at a random moment."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

import subjects
from savers import Strike

from kinds.kind import Bench, Kind, after_save

if TYPE_CHECKING:
    from cases import Outcome


class RandomKills(Kind):
    name = "random-kills"
    title = "SIGKILL at a random moment of a save"
    for_peers = True

    def layouts(self) -> list[str]:
        return [*subjects.ours(), *subjects.runs()]

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        scene = bench.scene(layout)
        scene.reset()
        moment = random.Random(seed).uniform(0.0, 1.1) * self.seconds(layout, bench)
        struck = bench.savers.save(
            layout, scene.folder, [subjects.NEW], Strike("kill", after=max(0.001, moment))
        )
        return after_save(scene.subject, scene.folder, struck)

    @functools.cache  # noqa: B019
    def seconds(self, layout: str, bench: Bench) -> float:
        """Return how long a save takes that is not disturbed: the least of three."""
        found = []
        for _ in range(3):
            bench.scene(layout).reset()
            found.append(
                bench.savers.save(layout, bench.scene(layout).folder, [subjects.NEW], Strike("none")).seconds
            )
        return min(found)
