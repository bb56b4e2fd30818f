"""Inspect the objects that URLs of buckets name, and change them as another program would."""

from eformer._engine.stores.leases import LEASES
from eformer._engine.stores.locate import store_at


def around(url):
    """Return the objects of a bucket, and where the keys of a checkpoint and of those beside it begin."""
    store, _ = store_at(url).parent()
    return store.objects, store.url.removeprefix(store.objects.url + "/") + "/"


def objects(url):
    """Return every object in a checkpoint and beside it, by key, but no leases."""
    found, start = around(url)
    keys = [entry.key for entry in found.list(start) if f"/{LEASES}/" not in entry.key]
    return {key: bytes(found.read(key)[0]) for key in keys}


def leases(url):
    """Return the keys of all leases in a checkpoint and beside it."""
    found, start = around(url)
    return [entry.key for entry in found.list(start) if f"/{LEASES}/" in entry.key]


def overwrite(url, key, how, to=None):
    """Change the bytes of an object, in place or to those that `how` returns; put them to another key if one is given."""
    found, _ = around(url)
    data = bytearray(found.read(key)[0])
    changed = how(data)
    found.put(to or key, bytes(data if changed is None else changed))


def forget(url):
    """Remove every object in a checkpoint and beside it."""
    found, start = around(url)
    found.delete([entry.key for entry in found.list(start)])


def upload(directory, url):
    """Put the files of a directory below a URL, as another program would."""
    store = store_at(url)
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    names = [path.relative_to(directory).as_posix() for path in files]
    store.objects.put_all(
        [(store.key_of(name), path.read_bytes()) for name, path in zip(names, files, strict=True)]
    )
