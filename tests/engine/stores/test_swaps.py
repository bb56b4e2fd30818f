"""Before each call of a save or a removal in turn, a directory is swapped for a link to a copy of it: the copy stays as
it is."""

import os
import shutil
from contextlib import suppress

import pytest

from eformer.checkpoint import Keep, Run, prune, save
from eformer.errors import EformerError
from support.links import LAYOUTS, NEXT, TREE, contents, save_as, scratch_in

pytestmark = pytest.mark.sample(3)

CALLS = ("open", "rename", "replace", "unlink", "rmdir", "mkdir", "link", "chmod", "scandir", "stat", "lstat")


class Swap:
    """Swaps a directory for a link to a copy, before the call of this number that can have an effect."""

    def __init__(self, monkeypatch, number, find, mirror):
        self.number, self.find, self.mirror = number, find, mirror
        self.calls, self.before, self._is_acting = 0, None, False
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, call):
        def wrapped(*args, **kwargs):
            if not self._is_acting and self.before is None:
                self.calls += 1
                self._is_acting = True
                try:
                    self._act()
                finally:
                    self._is_acting = False
            return call(*args, **kwargs)

        return wrapped

    def _act(self):
        target = self.find() if self.calls > self.number else None
        if target is None or target.is_symlink() or not target.is_dir():
            return
        shutil.copytree(target, self.mirror, symlinks=True)
        self.before = contents(self.mirror)
        target.rename(target.with_name("away"))
        target.symlink_to(self.mirror)


def try_every_call(tmp_path, make, find, act, stride=1):
    """Make a place, act on it, and swap before call 0, 1, 2, ... until there is nothing left to swap."""
    number, swapped = 0, 0
    while True:
        place, mirror = tmp_path / f"{number}", tmp_path / f"{number}-mirror"
        place.mkdir()
        make(place)
        with pytest.MonkeyPatch.context() as patch:
            swap = Swap(patch, number, lambda place=place: find(place), mirror)
            with suppress(OSError, EformerError, ValueError):
                act(place)
        if swap.before is None:
            assert swapped
            return
        assert contents(mirror) == swap.before, number
        swapped += 1
        number += stride


def first(paths):
    return next(iter(sorted(paths)), None)


def opened(place):
    """Return the directory once the save has opened it. Before that, the path may lead anywhere: it is the caller's."""
    return place / "run" if len(list(place.glob("run/.eformer-*.tmp"))) > 1 else None


FIND = {
    "run": opened,
    "scratch": lambda place: first(place.glob("run/.eformer-*.tmp")),
    "data": lambda place: first(place.glob("run/.eformer-*.tmp/data")),
    "a directory in it": lambda place: first(
        path for path in place.glob("run/*") if path.is_dir() and path.name[0] != "."
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("layout", "what"),
    [
        (layout, what)
        for layout in ("safetensors", "arrays", "arrays, prefix", "database, prefix")
        for what in FIND
        if what != "a directory in it" or layout != "safetensors"
    ],
)
def test_a_save(tmp_path, layout, what):
    def make(place):
        save_as(layout, TREE, place)
        dead = scratch_in(place / "run", {})
        (dead / "data" / "x").mkdir(parents=True)

    try_every_call(tmp_path, make, FIND[what], lambda place: save_as(layout, NEXT, place), stride=5)


STEPS = {
    "step": lambda place: place / "run" / "step-1",
    "scratch": lambda place: first(place.glob("run/.eformer-*.tmp")),
    "data": lambda place: first(place.glob("run/.eformer-*.tmp/data")),
    "hidden": lambda place: first(place.glob("run/.eformer-*.tmp/data/step-1")),
}


def make_steps(place):
    for step in (1, 2):
        save(TREE, place / "run" / f"step-{step}", **LAYOUTS["arrays, prefix"])


@pytest.mark.parametrize("what", STEPS)
def test_a_prune(tmp_path, what):
    try_every_call(tmp_path, make_steps, STEPS[what], lambda place: prune(place / "run", keep=1), stride=3)


@pytest.mark.sample(6)
@pytest.mark.parametrize("what", STEPS)
def test_the_retention_of_a_run(tmp_path, what):
    def act(place):
        with Run(place / "run", keep=[Keep(last=1)], signals=()) as run:
            run.resume(step=2)
            run.save(3, TREE)

    try_every_call(tmp_path, make_steps, STEPS[what], act, stride=7)
