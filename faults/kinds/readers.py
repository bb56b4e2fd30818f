"""Loads beside a process that saves: each gives one whole generation, and never an older one than the load before."""

from __future__ import annotations

import random
import threading

import subjects
from cases import NEW, Outcome
from savers import Strike, Struck

from kinds.kind import Bench, Kind

SAVES = 12


class Readers(Kind):
    name = "readers"
    title = f"loads while another process saves {SAVES} times"
    expects = 5.0

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        scene, rng = bench.scene(layout), random.Random(seed)
        scene.reset()
        ends: list[Struck] = []
        generations = [subjects.NEW + n for n in range(SAVES)]

        def write() -> None:
            ends.append(bench.savers.save(layout, scene.folder, generations, Strike("none")))

        writer = threading.Thread(target=write)
        writer.start()
        seen, loads = subjects.OLD, 0
        try:
            while writer.is_alive():
                found = scene.subject.look(scene.folder)
                if not seen <= found <= generations[-1]:
                    return Outcome("wrong", f"generation {found} after {seen}", loads)
                seen, loads = found, loads + 1
                writer.join(rng.choice([0, 0, 0.001]))
        except subjects.WrongError as error:
            return Outcome("wrong", str(error), loads)
        except Exception as error:  # noqa: BLE001  of any library
            return Outcome("lost", f"{type(error).__name__}: {error}"[:500], loads)
        finally:
            writer.join()
        if ends[0].ending != "returned" or scene.subject.look(scene.folder) != generations[-1]:
            return Outcome("lost", f"the writer {ends[0].ending}: {ends[0].said}", loads)
        return Outcome(NEW, count=loads)
