"""Power cuts: the file system is shut down at once, or its disk is rebuilt from a log of its writes."""

from __future__ import annotations

import functools
import os
import random
import shutil
from pathlib import Path

import block_log
import subjects
from cases import OLD, OVER, Outcome, spread
from savers import Strike, Struck

from kinds.kind import Bench, Kind, after_save, cleared, judged


class OnDisk(Kind):
    """A kind of layouts named "LAYOUT on FILE SYSTEM"."""

    for_peers = True
    expects = 5.0
    systems: tuple[str, ...]
    titles: tuple[str, ...]

    def layouts(self) -> list[str]:
        return [f"{title} on {system}" for title in self.titles for system in self.systems]

    def libraries(self) -> dict[str, str]:
        return {f"{title} on ext4": where for title, where in subjects.side_by_side().items()}

    def cannot(self, layout: str) -> str:
        _, _, system = layout.rpartition(" on ")
        if os.geteuid():
            return "needs root"
        if not shutil.which(f"mkfs.{system}"):
            return f"mkfs.{system} is not installed"
        if system not in Path("/proc/filesystems").read_text():
            return f"this kernel does not have {system}"
        return "" if os.path.exists("/dev/loop-control") else "there are no loop devices"


def parted(layout: str) -> tuple[str, str]:
    title, _, system = layout.rpartition(" on ")
    return title, system


def promised(outcome: Outcome) -> Outcome:
    """Return the outcome for a save that had returned before the cut."""
    if outcome.word == OLD:
        return Outcome("undone", "the save had returned")
    return outcome


class Power(OnDisk):
    name = "power"
    title = (
        "the power of a disk is cut (a shutdown of ext4 or xfs) before any system call of a save, or after it"
    )
    systems, titles = ("ext4", "xfs"), tuple(subjects.ours())

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        from support.disks import FragileDisk

        title, system = parted(layout)
        count = bench.count(title)
        after = max(2, count // 8)  # so many of the cases are cuts right after the save
        if seed - bench.first >= count + after:
            return Outcome(OVER)
        at = 1 + spread(seed, count + after)
        scene = bench.scene(title)
        disk = FragileDisk(bench.disk / f"power-{os.getpid()}", system)
        try:
            folder = disk.place / "folder"
            shutil.copytree(scene.template, folder)
            disk.sync()
            strike = Strike("cut", at, disk=str(disk.place)) if at <= count else Strike("none")
            struck = bench.savers.save(title, folder, [subjects.NEW], strike)
            if not struck.was_struck:
                disk.cut_power()
            disk.restart()
            return self.judged(scene.subject, folder, struck)
        finally:
            disk.remove()

    def judged(self, subject: subjects.Subject, folder: Path, struck: Struck) -> Outcome:
        if struck.was_struck:
            return after_save(subject, folder, struck)
        if struck.ending != "returned":
            return Outcome("crashed", f"{struck.ending}: {struck.said}")
        outcome = promised(judged(subject, folder))
        return outcome if outcome.is_failure else cleared(subject, folder, outcome)


class Blocks(OnDisk):
    name = "blocks"
    title = "the power is cut: of the writes since the last flush any are lost, in any order, and one is torn"
    systems = ("ext4", "xfs", "btrfs")
    titles = ("one data file", "several data files", "single file", "arrays", "kept arrays", "database")

    def cannot(self, layout: str) -> str:
        return super().cannot(layout) or block_log.cannot()

    def run(self, layout: str, seed: int, bench: Bench) -> Outcome:
        from support.disks import OPTIONS, Mount

        title, system = parted(layout)
        rng = random.Random(seed)
        history, base = self.recorded(layout, bench)
        writes, has_returned = history.cut(rng)
        image = bench.memory / f"cut-{os.getpid()}.img"
        block_log.copy_sparse(base, image)
        block_log.apply(image, writes)
        mount = Mount(str(image), image.with_suffix(""), "-t", system, "-o", OPTIONS[system])
        try:
            folder, subject = mount.place / "folder", subjects.find(title)
            outcome = judged(subject, folder)
            outcome = promised(outcome) if has_returned else outcome
            return outcome if outcome.is_failure else cleared(subject, folder, outcome)
        finally:
            mount.close()
            mount.place.rmdir()
            image.unlink()

    @functools.cache  # noqa: B019
    def recorded(self, layout: str, bench: Bench) -> tuple[block_log.History, Path]:
        """Return the writes of a save over an older one, and the disk as it was before. Done once by each worker."""
        from support.disks import OPTIONS, Mount, administer, make_image

        title, system = parted(layout)
        name = layout.replace(" ", "-").replace(",", "")
        image, base = bench.memory / f"{name}.img", bench.memory / f"{name}-base.img"
        make_image(image, system)
        block_log.copy_sparse(image, base)
        logged = block_log.LoggedDisk(image, bench.disk / f"{name}-log")
        mount = Mount(str(logged.disk), bench.disk / name, "-t", system, "-o", OPTIONS[system])
        try:
            folder = mount.place / "folder"
            shutil.copytree(bench.scene(title).template, folder)
            administer("sync", "--file-system", str(mount.place))
            logged.mark()
            struck = bench.savers.save(title, folder, [subjects.NEW], Strike("none"))
            logged.mark()
            assert struck.ending == "returned", struck.said
        finally:
            mount.close()
            logged.close()
        history = block_log.History.read(logged.log)
        block_log.apply(base, history.base)
        image.unlink()
        return history, base
