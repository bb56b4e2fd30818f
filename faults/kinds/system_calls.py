"""A save that is killed, or gets an error, at any system call that changes the disk, whichever thread makes it."""

from __future__ import annotations

import errno

import seccomp
import subjects
from cases import OVER, Outcome, spread
from savers import Strike

from kinds.kind import Bench, Kind, after_save


class SystemCalls(Kind):
    for_peers = True

    def layouts(self) -> list[str]:
        return [*subjects.ours(), *subjects.runs()]

    def cannot(self, layout: str) -> str:
        return seccomp.cannot()

    def strikes(self, count: int) -> list[Strike]:
        """Return all strikes at a save that makes so many calls."""
        raise NotImplementedError

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        strikes = [(strike, False) for strike in self.strikes(bench.count(layout))]
        if layout in subjects.ours():  # others have nothing to lose in a first save
            strikes += [(strike, True) for strike in self.strikes(bench.count(layout, is_first=True))]
        if seed - bench.first >= len(strikes):
            return Outcome(OVER)
        strike, is_first = strikes[spread(seed, len(strikes))]
        scene = bench.scene(layout)
        scene.reset(is_first=is_first)
        struck = bench.savers.save(layout, scene.folder, [subjects.NEW], strike)
        return after_save(scene.subject, scene.folder, struck, is_first=is_first)


class Kills(SystemCalls):
    name = "kills"
    title = (
        "SIGKILL before any system call that changes the disk, in a first save and in one over an older one"
    )

    def strikes(self, count: int) -> list[Strike]:
        return [Strike("kill", at) for at in range(1, count + 1)]


class Errors(SystemCalls):
    name = "errors"
    title = (
        "EIO, ENOSPC, EDQUOT or EMFILE from any system call that changes the disk; ENOSPC also from there on"
    )

    def strikes(self, count: int) -> list[Strike]:
        codes = [(errno.EIO, False), (errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EMFILE, False)]
        return [
            Strike("fail", at, error=code, lasting=lasting)
            for at in range(1, count + 1)
            for code, lasting in [*codes, (errno.ENOSPC, True)]
        ]
