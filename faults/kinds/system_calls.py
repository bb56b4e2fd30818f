"""A save that is killed, or gets an error, at any system call that changes the disk, whichever thread makes it."""

from __future__ import annotations

import errno

import seccomp
from cases import OVER, Outcome, spread
from kinds.kind import Bench, Kind, after_save
from savers import Strike
from subjects import NEW


class SystemCalls(Kind):
    for_peers = True

    def cannot(self, layout: str) -> str:
        return seccomp.cannot()

    def strikes(self, count: int) -> list[Strike]:
        """Return all strikes at a save that makes so many calls."""
        raise NotImplementedError

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        strikes = self.strikes(bench.count(layout))
        if seed - bench.first >= len(strikes):
            return Outcome(OVER)
        scene = bench.scene(layout)
        scene.reset()
        strike = strikes[spread(seed, len(strikes))]
        struck = bench.savers.save(layout, scene.folder, [NEW], strike)
        return after_save(scene.subject, scene.folder, struck)


class Kills(SystemCalls):
    name = "kills"
    title = "SIGKILL before any system call that changes the disk"

    def strikes(self, count: int) -> list[Strike]:
        return [Strike("kill", at) for at in range(1, count + 1)]


class Errors(SystemCalls):
    name = "errors"
    title = "EIO, ENOSPC, EDQUOT or EMFILE from any system call that changes the disk; ENOSPC also from there on"

    def strikes(self, count: int) -> list[Strike]:
        codes = [(errno.EIO, False), (errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EMFILE, False)]
        return [
            Strike("fail", at, error=code, lasting=lasting)
            for at in range(1, count + 1)
            for code, lasting in [*codes, (errno.ENOSPC, True)]
        ]
