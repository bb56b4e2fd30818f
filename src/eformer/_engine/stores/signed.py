"""Read a signed checkpoint so that every byte is checked against its signed SHA-256 before it is used.

A `SignedStore` has exactly the signed files. It reads a block into memory of this process, digests that memory, and
returns bytes of it. So a file that is swapped or written to at any moment is detected or has no effect. The store gives
out no path on this machine's disk, so that no reader can go around it.

Tests: tests/engine/tools/test_sign.py, tests/engine/stores/test_hub.py.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Self

from eformer._engine.record.division import WHOLE
from eformer._engine.record.signature import (
    MOST_BYTES,
    SIGNED_BLOCK_BYTES,
    SignedFile,
    count_signed_blocks,
    digest_block,
    is_signed_name,
    parse_envelope,
    signature_name,
    signed_files,
)
from eformer._engine.record.text import few, printable
from eformer._engine.stores.base import KeepsCopies, read_whole
from eformer._engine.stores.listed import ListedStore, Listing
from eformer._engine.stores.virtual_files import UnchangingFiles
from eformer._engine.tasks.forks import Lock
from eformer._engine.tasks.pool import run_all
from eformer._engine.tasks.progress import SILENT
from eformer.errors import AlteredError, Damage, FormatError, SignatureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from eformer._engine.record.division import Portion
    from eformer._engine.record.signature import Verifier
    from eformer._engine.stores.base import Files, Store, Version
    from eformer._engine.tasks.progress import Meter

_ALL_DEPTHS = 10**6
_MOST_LOOKS = 10  # tries to look at a checkpoint while a save replaces it


# ---------------------------------------------------------------------------------------------- look


def scope_of(store: Store, file: str) -> str | None:
    """Return the scope of the signature of a file: the file itself, "" for the whole directory, None if it is not
    signed.

    Without a `file`, look for the signature of the directory.
    """
    scopes = (file, "") if file else ("",)
    return next((scope for scope in scopes if store.exists(signature_name(scope))), None)


def claimed_signer(store: Store, scope: str) -> str:
    """Return the id of the key that a signature names. It proves nothing: any program can write it."""
    name = signature_name(scope)
    try:
        return parse_envelope(_read_signature(store, name), store.path_to(name)).key_id
    except SignatureError as error:
        return f"nobody: {error}"


def signed_store(store: Store, scope: str, verifier: Verifier) -> SignedStore:
    """Return the store of the files that the owner of the key has signed: one file or, with "", all files of a
    directory.

    Raise SignatureError if the signature is missing or not the owner's, and AlteredError if files were added, are
    missing, or have other lengths than the signed files.
    """
    found, problems = look_at_signed(store, scope, verifier, SignedStore.differences)
    if problems:
        where = store.path_to(scope) if scope else store.url
        raise AlteredError(
            f"{where} differs from its signature, or was saved again since: {few([str(each) for each in problems])}"
        )
    return found


def look_at_signed(
    store: Store, scope: str, verifier: Verifier, find_damages: Callable[[SignedStore], list[Damage]]
) -> tuple[SignedStore, list[Damage]]:
    """Return the store of the signed files, and the differences from the signature.

    During a save or a signing, the files and the signature that was read may not belong together. Then look again.
    """
    name = signature_name(scope)
    origin = store.path_to(name)
    for _ in range(_MOST_LOOKS):
        data = _read_signature(store, name)
        found = SignedStore(store, _files_in(data, scope, verifier, origin), scope)
        with suppress(FileNotFoundError):  # a scratch directory disappeared during the listing
            if not (damages := find_damages(found)) or _read_signature(store, name) == data:
                return found, damages
    raise SignatureError(f"{origin} changes too often to be checked; try again later")


def _read_signature(store: Store, name: str) -> bytes:
    try:
        return read_whole(store, name, MOST_BYTES)[0]
    except FileNotFoundError:
        raise SignatureError(f"{store.url} is not signed: {store.path_to(name)} does not exist") from None
    except FormatError as error:  # a link, a directory, or far too long
        raise SignatureError(str(error)) from error


def _files_in(data: bytes, scope: str, verifier: Verifier, origin: str) -> Mapping[str, SignedFile]:
    files = signed_files(data, verifier, origin)
    if scope and files.keys() != {scope}:
        raise SignatureError(
            f"{origin} is the signature of other files: {few([printable(name) for name in files])}"
        )
    return files


def files_to_sign(store: Store) -> dict[str, int]:
    """Return the lengths of all files of a directory that a signature covers, by path."""
    found = store.sizes("", _ALL_DEPTHS)
    return {name: nbytes for name, nbytes in found.items() if is_signed_name(name)}


# --------------------------------------------------------------------------------------------- digest


def digest_files(store: Store, sizes: Mapping[str, int], meter: Meter = SILENT) -> list[SignedFile]:
    """Digest files, their blocks on all cores."""
    names, nbytes = list(sizes), list(sizes.values())
    found = [[""] * count_signed_blocks(size) for size in nbytes]
    files, buffers = store.open(names), threading.local()

    def digest(number: int, block: int) -> None:
        start = block * SIGNED_BLOCK_BYTES
        length = min(SIGNED_BLOCK_BYTES, nbytes[number] - start)
        memory = _buffer(buffers)[:length]
        if files.read_into(number, memory, start) != length:
            raise AlteredError(f"{store.path_to(names[number])} was changed while it was read")
        found[number][block] = digest_block(memory)
        meter.add(length)

    tasks = (partial(digest, n, block) for n, blocks in enumerate(found) for block in range(len(blocks)))
    try:
        # SHA-256 does not hold the interpreter lock, so more threads help here than for other reads.
        run_all(tasks, max(store.read_threads, os.cpu_count() or 1))
    finally:
        files.close()
    return [
        SignedFile(name, size, tuple(blocks)) for name, size, blocks in zip(names, nbytes, found, strict=True)
    ]


def _buffer(local: threading.local) -> memoryview:
    """Return memory for one block. Each thread has its own."""
    if not hasattr(local, "memory"):
        local.memory = memoryview(bytearray(SIGNED_BLOCK_BYTES))
    memory: memoryview = local.memory
    return memory


# ---------------------------------------------------------------------------------------------- store


class SignedStore(ListedStore):
    """The signed files of a directory, or a single signed file of it."""

    read_bytes = 8 * SIGNED_BLOCK_BYTES  # so that most blocks are read directly to where they are wanted
    missing = "does not exist, or is not signed"

    def __init__(self, store: Store, files: Mapping[str, SignedFile], scope: str = "") -> None:
        self.files, self._store, self._scope = files, store, scope
        self._listing = Listing({name: file.nbytes for name, file in files.items()})
        self.alarms: list[AlteredError] = []
        self.read_threads = store.read_threads
        self._enter("")

    def _enter(self, path: str) -> None:
        self._path, self.url = path, self._store.path_to(path) if path else self._store.url
        self.refusal = f"{self.url} is read with key=, which makes it read-only"

    @property
    def listing(self) -> Listing:
        return self._listing

    @property
    def key(self) -> str:
        return f"{self._store.key}/{self._path}" if self._path else self._store.key

    def path_to(self, name: str) -> str:
        return self._store.path_to(self._inner(name))

    def path_of(self, file: SignedFile) -> str:
        return self._store.path_to(file.name)

    def parent(self) -> tuple[Self, str]:
        if not self._path:
            raise SignatureError(f"the directory around {self.url} is not signed")
        return super().parent()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise AlteredError at the end if a file was altered, even if a reader took it for damage and went on without
        the file."""
        try:
            yield
        except Exception as error:
            if self.alarms and not isinstance(error, AlteredError):
                raise self.alarms[0] from error
            raise
        if self.alarms:
            raise self.alarms[0]

    # ---------------------------------------------------------------------------------------- look

    def differences(self) -> list[Damage]:
        """Find files that were added or removed since the signing, or have other lengths. Read no content."""
        there = {self._scope: -1} if self._scope else files_to_sign(self._store)
        damages = [
            Damage("", printable(name), 0, 0, "was added after the checkpoint was signed")
            for name in there
            if name not in self.files
        ]
        for name, file in self.files.items():
            if there.get(name) != file.nbytes and (now := self._nbytes_now(name)) != file.nbytes:
                gone = "is missing, and was signed"
                problem = gone if now is None else f"is {now} bytes long, and was signed with {file.nbytes}"
                damages.append(Damage("", printable(name), 0, 0, problem))
        return damages

    def find_altered(self, meter: Meter = SILENT, part: Portion = WHOLE) -> list[Damage]:
        """Find all differences: read every byte of the files of this part, on all cores."""
        damages = self.differences()
        lost = {damage.file for damage in damages}
        sizes = {name: size for name, size in self._listing.sizes.items() if printable(name) not in lost}
        sizes = _files_of(sizes, part)
        damages = damages if part.is_first else []
        for now in digest_files(self._store, sizes, meter):
            file = self.files[now.name]
            for block, (digest, signed) in enumerate(zip(now.sha256, file.sha256, strict=True)):
                if digest != signed:
                    start = block * SIGNED_BLOCK_BYTES
                    stop = min(start + SIGNED_BLOCK_BYTES, file.nbytes)
                    problem = f"differ from the signature: their SHA-256 is {digest}, expected {signed}"
                    damages.append(Damage("", printable(now.name), start, stop, problem))
        return damages

    @property
    def nbytes(self) -> int:
        """Return the number of signed bytes."""
        return sum(self._listing.sizes.values())

    def _nbytes_now(self, name: str) -> int | None:
        """Return the length of a file, perhaps through a link as in a cache of Hugging Face; None if it is gone."""
        try:
            return self._store.read(name, 0, 0)[1].nbytes
        except (OSError, FormatError):
            return None

    # ---------------------------------------------------------------------------------------- read

    def _version(self, path: str) -> Version:
        return self._store.read(path, 0, 0)[1].version  # if later reads have another one, digests differ

    def open(self, names: Sequence[str], versions: Mapping[str, Version] | None = None) -> SignedFiles:
        paths = [self.inside(name) for name in names]
        inner = {self._inner(name): version for name, version in (versions or {}).items()}
        return SignedFiles(self._store.open(paths, inner), [self.files[path] for path in paths], self)


def _files_of(sizes: Mapping[str, int], part: Portion) -> dict[str, int]:
    """Return the files of a part: their middle lies in its share of all bytes."""
    weights = {name: size + 1 for name, size in sizes.items()}
    share, before, found = part.share(sum(weights.values())), 0, {}
    for name, weight in weights.items():
        if before + weight // 2 in share:
            found[name] = sizes[name]
        before += weight
    return found


# ---------------------------------------------------------------------------------------------- files


class _Block:
    """A block. The first thread that needs it reads it, and other threads wait."""

    __slots__ = ("lock", "memory")

    def __init__(self) -> None:
        self.lock = Lock()
        self.memory: memoryview | None = None


class SignedFiles(UnchangingFiles):
    """Signed files by number. A few blocks are kept, because reads begin and end inside of blocks.

    No file is mapped, because a mapped file can change after it was checked. No file counts as rewritten, because all
    bytes that were read were checked, whatever the files contain now.
    """

    def __init__(self, files: Files, signed: Sequence[SignedFile], store: SignedStore) -> None:
        self._files, self._signed, self._store = files, signed, store
        self._block = lru_cache(store.read_threads + 2)(lambda number, block: _Block())
        self._lock = Lock()

    def read_into(self, number: int, memory: memoryview, offset: int) -> int:
        nbytes = self._signed[number].nbytes
        start, stop = offset, min(offset + len(memory), nbytes)
        while start < stop:
            block = start // SIGNED_BLOCK_BYTES
            first, last = block * SIGNED_BLOCK_BYTES, min((block + 1) * SIGNED_BLOCK_BYTES, nbytes)
            end = min(stop, last)
            wanted = memory[start - offset : end - offset]
            if (start, end) == (first, last):
                self._read_checked(number, block, wanted)
            else:
                wanted[:] = self._kept(number, block, last - first)[start - first : end - first]
            start = end
        return max(0, stop - offset)

    def _kept(self, number: int, block: int, nbytes: int) -> memoryview:
        """Return a checked block, and keep it for neighbouring reads."""
        with self._lock:
            found = self._block(number, block)
        with found.lock:
            if found.memory is None:
                memory = memoryview(bytearray(nbytes))
                self._read_checked(number, block, memory)
                found.memory = memory
            return found.memory

    def _read_checked(self, number: int, block: int, memory: memoryview) -> None:
        """Read a whole block, and check the bytes in memory, so that later changes of the file do not matter."""
        file, start = self._signed[number], block * SIGNED_BLOCK_BYTES
        signed, digest = file.sha256[block], self._read(number, memory, start)
        if (
            digest != signed
            and isinstance(self._files, KeepsCopies)
            and self._files.forget(number, start, len(memory))
        ):
            digest = self._read(number, memory, start)  # from the source: the cached copy may be damaged
        if digest != signed:
            error = AlteredError(
                f"{self._store.path_of(file)} differs from its signature: the SHA-256 of its {len(memory)} "
                f"bytes from {start} on is {digest}, expected {signed}"
            )
            self._store.alarms.append(error)
            raise error

    def _read(self, number: int, memory: memoryview, start: int) -> str:
        return digest_block(memory[: self._files.read_into(number, memory, start)])

    def nbytes(self, number: int) -> int:
        return self._signed[number].nbytes

    def hold(self, numbers: Iterable[int]) -> None:
        self._files.hold(numbers)

    def close(self) -> None:
        self._block.cache_clear()
        self._files.close()
