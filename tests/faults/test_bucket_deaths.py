"""A save to a bucket that dies between any two requests leaves the old checkpoint or the new one; the next save clears
up. Here the buckets are in memory, and a process is dead when none of its requests is sent any more."""

from contextlib import suppress
from unittest import mock

import pytest

from eformer._engine.stores.bucket import BucketUpload
from support.bucket_faults import (
    MEMORY,
    NEW,
    SCENES,
    STRIDE,
    Deaths,
    Died,
    Layout,
    Scene,
    dies,
    forget_all,
    hooked,
    is_torn,
    new_url,
)
from support.faults import noted

ALL = [(layout, name) for layout in MEMORY for name in SCENES]
FEW = [(layout, name) for layout, name in ALL if name == "sweep" or layout.title == "several data files"]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("layout", "name"), ALL if STRIDE == 1 else FEW, ids=str)
def test_a_save_that_dies_before_any_request_leaves_the_old_tree_or_the_new(layout, name, record_property):
    scene, left = Scene.of(layout, name, new_url()), []
    for at in scene.points(new_url()):
        url = new_url()
        with noted(dies(scene, url, at)):
            left.append(scene.check(url))
        forget_all(url)
    record_property("deaths", len(left))
    assert set(left) <= {scene.before, NEW}
    assert left == sorted(left)  # at one single request the old one gives way to the new
    assert scene.before in left
    if not layout.suffix and STRIDE == 1:  # a file is committed by its last request
        assert NEW in left


def test_deaths_one_after_another_never_mix():
    scene = Scene.of(Layout("x", max_shard_bytes=4096), "sweep", new_url())
    url = new_url()
    count, there = scene.requests(url), NEW
    for number in range(10, 10 + 64 // STRIDE):
        death = Deaths(1 + number * 7 % count)
        with hooked(death), suppress(Died):
            scene.save(url, number)
        with noted(death.where):
            found = scene.layout.generation(url)
            assert found in (there, number)
            there = found
    scene.layout.save(url, NEW, -2.0)
    scene.layout.check_tidy(url)


def data_last(self, files):
    self.__dict__.setdefault("late", []).extend(files)


@pytest.mark.thorough
def test_the_test_can_fail_an_index_before_its_data_is_torn(record_property):
    """Saves whose objects are put after the index: the checks above find them."""
    put, finish = BucketUpload.put, BucketUpload._finish

    def late(self, change):
        put(self, self.late)
        finish(self, change)

    scene, torn = Scene.of(Layout("x", format="tensorstore"), "replace", new_url()), []
    with (
        mock.patch.object(BucketUpload, "put", data_last),
        mock.patch.object(BucketUpload, "_finish", late),
        mock.patch.object(BucketUpload, "names", mock.Mock(return_value=["x"])),
    ):
        for at in scene.points(new_url(), 2):
            url = new_url()
            dies(scene, url, at)
            torn.append(is_torn(url, ["", "ema"]))
    record_property("torn", f"{sum(torn)} of {len(torn)}")
    assert sum(torn) > 2
