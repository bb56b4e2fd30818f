"""A process that is stopped (SIGSTOP) in the middle of a save, while another one saves, and then goes on."""

from __future__ import annotations

import threading

import seccomp
import subjects
from cases import NEW, OLD, VOID, Outcome, spread
from savers import Strike, Struck

from kinds.kind import Bench, Kind, cleared

SECONDS = 0.5


class Stopped(Kind):
    name = "stopped"
    title = f"SIGSTOP for {SECONDS} s before any system call of a save, while another process saves"
    expects = 5.0

    def cannot(self, layout: str) -> str:
        return seccomp.cannot()

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        scene = bench.scene(layout)
        scene.reset()
        ends: list[Struck] = []
        strike = Strike("stop", 1 + spread(seed % (count := bench.count(layout)), count), seconds=SECONDS)

        def save_slowly() -> None:
            ends.append(bench.savers.save(layout, scene.folder, [subjects.NEW], strike))

        first = threading.Thread(target=save_slowly)
        first.start()
        other = bench.others.save(layout, scene.folder, [subjects.NEXT], Strike("none"))
        first.join()
        return self.judged(scene, ends[0], other)

    def judged(self, scene: subjects.Scene, slow: Struck, other: Struck) -> Outcome:
        """Both or one of them have saved, and one of those is there; whoever was refused says so."""
        said = f"slow {slow.ending} {slow.said} after {slow.calls[-1:]}; other {other.ending} {other.said}"[
            :500
        ]
        for struck in (slow, other):
            if struck.ending in ("hung", "crashed"):
                return Outcome(struck.ending, said)
        saved = {
            generation
            for generation, struck in ((subjects.NEW, slow), (subjects.NEXT, other))
            if struck.ending == "returned"
        }
        try:
            found = scene.subject.look(scene.folder)
        except subjects.WrongError as error:
            return Outcome("wrong", f"{error}; {said}")
        except Exception as error:  # noqa: BLE001  of any library
            return Outcome("lost", f"{type(error).__name__}: {error}; {said}"[:500])
        if found not in (saved or {subjects.OLD}):
            return Outcome("lost", f"generation {found}; {said}")
        if not slow.was_struck:
            return Outcome(VOID)
        return cleared(scene.subject, scene.folder, Outcome(NEW if saved else OLD), said)
