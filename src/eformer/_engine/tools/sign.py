"""Sign a checkpoint with a private key, so that the public key detects every change. No jax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eformer._engine.formats.find import ReplacedError, has_new_versions, problem_of, reread, was_replaced
from eformer._engine.record.signature import parse_envelope, sign_files, signature_name
from eformer._engine.record.text import few, printable
from eformer._engine.stores.base import update_file
from eformer._engine.stores.cache import caching
from eformer._engine.stores.keys import private_key as read_private_key
from eformer._engine.stores.locate import absolute, locate
from eformer._engine.stores.signed import digest_files, files_to_sign
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tasks.progress import metered
from eformer.errors import CorruptionError, SignatureError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from eformer._engine.formats.found import Found
    from eformer._engine.stores.base import Store
    from eformer._engine.stores.keys import Key, PrivateKey
    from eformer._engine.tasks.progress import Progress


@uninterrupted
def sign(
    path: str | os.PathLike[str],
    *,
    private_key: Key,
    password: str | Callable[[], str] | None = None,
    progress: Progress = None,
) -> str:
    """Sign the checkpoint at `path`, and return the path of its signature.

    The signature is a file: `eformer.sig` in a directory, which signs every file below it; `<file>.eformer.sig` beside
    a checkpoint in one file. The path of a run signs its last step. The signature has the SHA-256 of all files, which
    are read on all cores. It replaces an earlier signature; a later save to the path removes it.

    `sign` does not check digests. If the checkpoint may be damaged, `verify` it first.

    private_key   a private key of Ed25519: the path of a PEM file (PKCS 8), or its content
    password      password of the key, or a function that returns it; by default the environment variable
                  EFORMER_KEY_PASSWORD
    progress      True for a progress bar, or a function of the bytes read and the total

    Example:

        >>> sign("run/step-100", private_key="private.pem")
        'run/step-100/eformer.sig'
        >>> load("run/step-100", signed_by="public.pem")
    """
    absolute(path)  # raises for places that cannot be written to
    signer = read_private_key(private_key, password)
    with caching(False):
        return reread(path, lambda found: _sign(found, signer, progress))


def _sign(found: Found, signer: PrivateKey, progress: Progress) -> str:
    if problem := problem_of(found):
        raise CorruptionError(f"{found.path} is incomplete, and was not signed: {problem}")
    store, name = locate(found.path)
    sizes = _files_of(found, store, name)
    with metered(progress, sum(sizes.values()), "signing") as meter:
        document = sign_files(digest_files(store, sizes, meter), signer.id, signer.sign)
    if was_replaced(found):
        raise ReplacedError
    place = store.path_to(signature_name(name))

    def replaced(before: bytes | None) -> bytes:
        if before is not None:
            _require_ours(before, place)
        # A save uses new names for its files, and waits during this look.
        if has_new_versions(found) or _files_of(found, store, name) != sizes:
            raise ReplacedError
        return document

    update_file(store, signature_name(name), replaced)
    return place


def _files_of(found: Found, store: Store, name: str) -> dict[str, int]:
    """Return the lengths of the files to sign, by name."""
    if name:
        return {name: _nbytes_of_single(found, store, name)}
    sizes = files_to_sign(store)
    if links := [printable(file) for file in sizes if not store.is_file(file)]:
        raise ValueError(
            f"{store.url} has links, which cannot be signed: {few(links)}; sign a copy with regular files"
        )
    return sizes


def _nbytes_of_single(found: Found, store: Store, name: str) -> int:
    names = {tree.path_of(number) for tree in found.trees.values() for number in range(len(tree.files))}
    if any(each != name and not each.startswith(f"{name}/") for each in names) or not store.is_file(name):
        raise ValueError(f"{found.path} is not a checkpoint in one file; sign the directory {store.url}")
    return store.read(name, 0, 0)[1].nbytes


def _require_ours(data: bytes, place: str) -> None:
    """Raise FileExistsError if the file at `place` is not a signature by eformer."""
    try:
        parse_envelope(data, place)
    except SignatureError as error:
        raise FileExistsError(f"{error}; remove it to sign the checkpoint") from error
