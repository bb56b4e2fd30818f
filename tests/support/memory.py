"""Inspect the objects that memory:// URLs name, and change them as another program would."""

from eformer._engine.stores import memory
from eformer._engine.stores.memory import SCHEME


def objects(url):
    """Return every object in a checkpoint and beside it, by key."""
    start = url.removeprefix(SCHEME).rpartition("/")[0] + "/"
    return {key: found.data for key, found in memory._bucket.below(start).items()}


def overwrite(key, how):
    """Change the bytes of an object, in place or to those that `how` returns; keep its version."""
    data = bytearray(memory._bucket.get(key).data)
    changed = how(data)
    version = memory._bucket.get(key).version
    memory._bucket.objects[key] = memory._Object(bytes(data if changed is None else changed), version)


def forget(url):
    """Remove every object in a checkpoint and beside it."""
    memory._bucket.remove_below(url.removeprefix(SCHEME).rpartition("/")[0] + "/")
