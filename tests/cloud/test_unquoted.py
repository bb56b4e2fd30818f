"""A server that compares ETags without their quotes, as Ceph does: here what concerns ETags, the rest on Ceph itself."""

import pytest

from contracts.bucket import BucketCommits, BucketStoreContract
from eformer._engine.stores.base import SwapError
from eformer._engine.stores.clouds import bucket_at
from eformer._engine.stores.objects import Objects

SERVER = "unquoted"


@pytest.fixture
def fresh(url):
    """The objects of the server, to which nobody has written yet."""
    found = bucket_at(url).objects
    return Objects(found._client, found.url)


def test_a_quoted_etag_is_always_refused(url, fresh):
    fresh.put("a", b"one")
    version = fresh.head("a").version
    assert '"' in version
    assert not fresh.put_if("a", b"two", version)
    fresh.compares_unquoted = True
    assert fresh.put_if("a", b"two", version)
    assert not fresh.put_if("a", b"three", version)
    fresh.delete(["a"])


class TestStore:
    """Its index is swapped on the condition of an ETag."""

    swap, version = BucketStoreContract.swap, BucketStoreContract.version
    store = BucketStoreContract.store
    test_an_index_is_swapped = BucketStoreContract.test_an_index_is_swapped_as_a_whole
    test_swaps_at_once = BucketStoreContract.test_saves_that_swap_at_once_lose_none_of_each_others_work
    test_another_save = BucketStoreContract.test_an_index_that_another_save_has_swapped_is_not_overwritten
    test_a_replaced_file = BucketStoreContract.test_a_file_that_was_replaced_is_known


@pytest.mark.parametrize("kind", ["safetensors", "tensorstore"])
class TestCommits:
    """Saves that meet each other."""

    test_saves_at_once = BucketCommits.test_saves_that_commit_at_once_keep_each_others_trees
    test_what_is_replaced = BucketCommits.test_what_is_replaced_goes_after_a_while


def test_an_index_that_was_removed_is_not_made_again(url):
    store = bucket_at(url)
    upload = store.begin()
    upload.swap("index", b"one", None)
    version = store.read("index", 0, 0)[1].version
    store.objects.delete([store.key_of("index")])
    with pytest.raises(SwapError):
        upload.swap("index", b"two", version)
    assert not store.exists("index")
    upload.close()
