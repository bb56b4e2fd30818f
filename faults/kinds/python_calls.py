"""A save that is killed before or after any call of Python's `os`, gets an error there, or is cancelled; also on other
systems."""

from __future__ import annotations

import errno
import functools
import os
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import subjects
from cases import OVER, Outcome, spread
from savers import Struck

from kinds.kind import Bench, Kind, after_save

if TYPE_CHECKING:
    from pathlib import Path

    from support.faults import Forks

_CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE)


class PythonCalls(Kind):
    ways: int  # to strike at one call

    def layouts(self) -> list[str]:
        return [layout for layout in subjects.ours() if layout != "database"]  # which TensorStore writes

    def strike(self, bench: Bench, layout: str, at: int, way: int) -> Struck:
        raise NotImplementedError

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        scene = bench.scene(layout)
        count = self.ways * _count(scene)
        if seed - bench.first >= count:
            return Outcome(OVER)
        at, way = divmod(spread(seed, count), self.ways)
        scene.reset()
        struck = self.strike(bench, layout, at + 1, way)
        return after_save(scene.subject, scene.folder, struck)


@functools.cache
def _count(scene: subjects.Scene) -> int:
    from support.faults import calls_of

    scene.reset()
    return len(calls_of(lambda: scene.subject.save(scene.folder, subjects.NEW)))


@functools.cache
def _forks() -> Forks:
    from support.faults import Forks

    return Forks()


class Kills(PythonCalls):
    name = "kills-python"
    title = "SIGKILL before and after any call of `os` that changes the disk"
    ways = 2

    def strike(self, bench: Bench, layout: str, at: int, way: int) -> Struck:
        import layouts

        moment, folder = ("before", "after")[way], bench.scene(layout).folder
        death = _forks().save(layouts.OURS[layout].layout, folder, subjects.NEW, at, moment)
        return Struck("killed", [f"{moment} {death.call}"], True) if death else Struck("returned")


class Errors(PythonCalls):
    name = "errors-python"
    title = "EIO, ENOSPC, EDQUOT or EMFILE from any call of `os`; no descriptor stays open"
    ways = len(_CODES)

    def strike(self, bench: Bench, layout: str, at: int, way: int) -> Struck:
        from support.faults import hooked

        failed: list[str] = []

        def fail(number: int, name: str) -> None:
            if number == at:
                failed.append(name)
                raise OSError(_CODES[way], os.strerror(_CODES[way]))

        scene, before = bench.scene(layout), os.listdir("/proc/self/fd")
        ending, said = "returned", ""
        with hooked(before=fail):
            try:
                scene.subject.save(scene.folder, subjects.NEW)
            except OSError as error:
                ending, said = "raised", str(error)
        if os.listdir("/proc/self/fd") != before:
            return Struck("crashed", failed, True, "a descriptor stays open")
        return Struck(ending, failed, bool(failed), said)


class Cancels(PythonCalls):
    name = "cancels"
    title = "`Pending.cancel` before any call of `os` that changes the disk; nothing but the old files stays"
    ways = 1

    def strike(self, bench: Bench, layout: str, at: int, way: int) -> Struck:
        import layouts

        from support.cancelling import Cancelling
        from support.faults import hooked

        folder, cancelling = bench.scene(layout).folder, Cancelling(at)
        before, ending, said = _files_in(folder), "returned", ""
        with hooked(before=cancelling):
            try:
                layouts.OURS[layout].layout.save(folder, subjects.NEW, cancelling.save)
            except CancelledError as error:
                ending, said = "raised", str(error)
        if ending == "raised" and _files_in(folder) != before:
            return Struck("crashed", [cancelling.where], True, "a cancelled save leaves something")
        return Struck(ending, [cancelling.where], cancelling.was_stopped is not None, said)


def _files_in(folder: Path) -> dict[str, int]:
    """Return everything in a folder, with the inodes."""
    return {str(path): path.lstat().st_ino for path in folder.rglob("*")}
