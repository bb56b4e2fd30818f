"""Look into the memory that memory:// URLs name, and change it behind the program's back."""

from eformer._engine.stores import memory
from eformer._engine.stores.memory import SCHEME


def objects(url):
    """Every object around a checkpoint and in it, by key."""
    start = url.removeprefix(SCHEME).rpartition("/")[0] + "/"
    return {key: found.data for key, found in memory._bucket.below(start).items()}


def overwrite(key, how):
    """Changes the bytes of an object, in place or to those that `how` returns; its version stays."""
    data = bytearray(memory._bucket.get(key).data)
    changed = how(data)
    version = memory._bucket.get(key).version
    memory._bucket.objects[key] = memory._Object(bytes(data if changed is None else changed), version)


def forget(url):
    """Removes every object around a checkpoint and in it."""
    memory._bucket.remove_below(url.removeprefix(SCHEME).rpartition("/")[0] + "/")
