"""Read every byte of a checkpoint once, and check it. No jax."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from eformer._engine.formats.find import (
    ReplacedError,
    later_of_flax,
    look_at,
    reread,
    signed_place,
    signer_of,
    was_replaced,
)
from eformer._engine.formats.others.orbax import inside_run
from eformer._engine.formats.process_records import unreadable
from eformer._engine.formats.run_steps import path_of_step, steps
from eformer._engine.formats.steps import is_of_orbax, is_run, steps_in
from eformer._engine.loading.fetch import check_pieces
from eformer._engine.loading.read_plan import Want
from eformer._engine.processes.crew import AgainError, divided
from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.division import ALL, WHOLE, ByteLine, spans
from eformer._engine.record.text import count, few, glance, size
from eformer._engine.stores.cache import caching
from eformer._engine.stores.keys import public_key
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.locate import locate, store_at
from eformer._engine.stores.signed import look_at_signed
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tasks.pool import run_all
from eformer._engine.tasks.progress import metered
from eformer.errors import CorruptionError, Damage, EformerError, FormatError, NotFoundError, SignatureError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

    from eformer._engine.formats.found import Found
    from eformer._engine.formats.run_steps import Step, StepChoice
    from eformer._engine.processes.crew import Crew
    from eformer._engine.record.division import ByteSpan, Portion
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.stores.base import Files
    from eformer._engine.stores.keys import Key, PublicKey
    from eformer._engine.stores.signed import SignedStore
    from eformer._engine.tasks.progress import Meter, Progress


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`. `print` shows it.

    damages         every damaged or missing range of bytes
    has_digests     False for files of other programs: eformer checks their structure and completeness only
    has_checksums   whether the files of another program have checksums of their own, which were compared
    left_out        files in the directory that are not read and may hold leaves
    not_checked     items of a step that a handler of the caller wrote: only the handler can read their files
    is_signed       whether a signature exists; it is checked only with a key
    signed_by       the id of the key whose signature was checked; differences from the signed bytes are in `damages`
    steps           for a run, the result for each step. The counts are then sums, and the damages have paths from the
                    run
    digest          the digest of the manifest, if it has one
    ok              whether nothing is damaged and no file is left out

    Example:

        >>> found = checkpoint.verify("run/step-100")
        >>> found.ok, found.damages
        (True, ())
    """

    path: str
    trees: int
    leaves: int
    nbytes: int
    has_digests: bool
    damages: tuple[Damage, ...]
    has_checksums: bool = False
    left_out: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    is_signed: bool = False
    signed_by: str | None = None
    steps: tuple[Verification, ...] = ()
    digest: str = ""

    @property
    def facts(self) -> Verification:
        """Return the same without the damage: equal for all parts of one check."""
        return replace(self, damages=(), steps=tuple(step.facts for step in self.steps))

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged and no file is left out."""
        return not self.damages and not self.left_out

    def __repr__(self) -> str:
        return glance(str(self))

    def __str__(self) -> str:
        if self.steps:
            return "\n".join(map(str, self.steps))
        lines = [self._checked]
        if self.not_checked:
            lines.append(f"not checked, written by handlers of the caller: {few(self.not_checked)}")
        if self.left_out:
            number = count(len(self.left_out), "file")
            lines.append(f"{number} not read, which may hold leaves: {few(self.left_out)}")
        return "\n  ".join(lines)

    @property
    def _checked(self) -> str:
        if self.damages:
            return "\n  ".join([f"{self.path}: {len(self.damages)} damaged", *map(str, self.damages)])
        how = "complete, but there are no digests to check the bytes against"
        if self.left_out:
            how = "can be read"
        if self.has_digests:
            how = "every digest matches"
        elif self.has_checksums:
            how = "every checksum matches"
        leaves = count(self.leaves, "leaf", "leaves")
        return f"{self.path}: {leaves}, {size(self.nbytes)}: {how}{self._signed}"

    @property
    def _signed(self) -> str:
        if self.signed_by:
            return f"; signed by {self.signed_by}"
        return "; it is signed, which was not checked without a key" if self.is_signed else ""


@uninterrupted
def verify(
    path: str | os.PathLike[str],
    *,
    step: StepChoice = None,
    signed_by: Key | None = None,
    progress: Progress = None,
    executor: Executor | Crew | None = None,
) -> Verification:
    """Check every leaf of every tree at `path`, and the headers of the files, against their digests.

    Also check that the Hugging Face indexes, and the marks of databases, agree with the manifest.

    The result lists all damage; only a manifest that cannot be read raises. For a directory of another program, the
    result also lists the files that are not read and may hold leaves. `progress` is True for a progress bar, or a
    function of the bytes read and the total.

    The path of a run checks all of its steps; `step` checks one step, by its number or "best". A step that cannot be
    read at all counts as damage then. `Verification.steps` has the result for each step.

    `signed_by` is a public key: the path of a PEM file, or its content. With it, `verify` also compares every byte of
    every file with the signature; files that were added or removed since count as damage. If the signature is missing
    or belongs to another key, raise SignatureError; in a run this counts as damage.

    `executor` is a `concurrent.futures.Executor`, such as a process pool or the executor of a cluster. Its workers read
    the checkpoint by its path; each checks a part of the bytes.

    Example:

        >>> found = verify("run/step-100")
        >>> found.ok
        True
        >>> print(found)
        run/step-100: 3 leaves, 384 B: every digest matches
        >>> [each.path for each in verify("run").steps]
        ['run/step-100', 'run/step-200', 'run/step-300']
    """
    path = os.fspath(path_of_step(path, step))
    if signed_by is not None:
        public_key(signed_by)  # an error of the key comes before any work
    return divided(
        partial(_verify_part, path, signed_by, step is None),
        _joined,
        Verification,
        executor=executor,
        progress=progress,
        nbytes=partial(_nbytes_at, path, may_be_run=step is None),
        doing="verifying",
    )


def _verify_part(
    path: str, signed_by: Key | None, may_be_run: bool, part: Portion, progress: Progress
) -> Verification:
    """Check a part of the bytes at `path`."""
    key = None if signed_by is None else public_key(signed_by)
    with caching(False):  # check the checkpoint itself, not copies of it
        if may_be_run and is_run(store_at(path)):
            return _verify_run(path, key, progress, part)
        return _verify_one(path, key, progress, part)


def _nbytes_at(path: str, *, may_be_run: bool) -> int:
    if may_be_run and is_run(store_at(path)):
        return sum(step.nbytes for step in steps(path))
    return look_at(path, lambda found: sum(tree.nbytes for tree in found.trees.values()))


def _joined(parts: Sequence[Verification]) -> Verification:
    """Join the results of all parts. Raise AgainError if they have not read the same checkpoint."""
    first = parts[0]
    if any(one.facts != first.facts for one in parts):
        raise AgainError
    by_place = sorted((d for one in parts for d in one.damages), key=lambda d: (d.file, d.start, d.leaf))
    inner = [_joined(each) for each in zip(*(one.steps for one in parts), strict=True)]
    return replace(first, damages=tuple(dict.fromkeys(by_place)), steps=tuple(inner))


def _verify_one(
    path: str | os.PathLike[str], key: PublicKey | None, progress: Progress, part: Portion
) -> Verification:
    if key is None:
        return reread(path, lambda found: _verify_found(found, progress, part))
    return _verify_signed(path, key, progress, part)


def _verify_run(
    path: str | os.PathLike[str], key: PublicKey | None, progress: Progress, part: Portion
) -> Verification:
    """Check the steps of a run in turn. Skip steps that are removed meanwhile."""
    checked: list[Verification] = []
    while not checked:
        if not (there := steps(path)):
            raise NotFoundError(f"{store_at(path).url} has no steps: they were removed during the check")
        checked = [
            one
            for step in there
            if not ((one := _verify_step(step.path, key, progress, part)).damages and _is_gone(step))
        ]
    store = store_at(path)
    if later := later_of_flax(store):
        checked.append(_verify_step(store.path_to(later), key, progress, part))
    named = [(one.path.rpartition("/")[2], one) for one in checked]
    return Verification(
        path=store.url,
        trees=sum(one.trees for one in checked),
        leaves=sum(one.leaves for one in checked),
        nbytes=sum(one.nbytes for one in checked),
        has_digests=all(one.has_digests for one in checked),
        damages=tuple(
            replace(damage, file=f"{name}/{damage.file}".rstrip("/"))
            for name, one in named
            for damage in one.damages
        ),
        has_checksums=all(one.has_checksums for one in checked),
        left_out=tuple(f"{name}/{file}" for name, one in named for file in one.left_out),
        not_checked=tuple(f"{name}/{file}" for name, one in named for file in one.not_checked),
        is_signed=all(one.is_signed for one in checked),
        signed_by=None if key is None else key.id,
        steps=tuple(checked),
    )


def _verify_step(path: str, key: PublicKey | None, progress: Progress, part: Portion) -> Verification:
    """Check one of several checkpoints. A checkpoint that cannot be read counts as damaged."""
    try:
        _require_inside(path)
        return _verify_one(path, key, progress, part)
    except (EformerError, OSError) as error:
        state = "fails the check of its signature" if isinstance(error, SignatureError) else "cannot be read"
        return Verification(path, 0, 0, 0, False, (Damage("", "", 0, 0, f"{state}: {error}"),))


def _require_inside(path: str) -> None:
    """Raise FormatError if a step of Orbax is a link out of its run: a load of the run refuses it, too."""
    store, name = store_at(path).parent()
    if (run := on_disk(store)) and is_of_orbax(store, name):
        inside_run(run, name)


def _is_gone(step: Step) -> bool:
    store, name = store_at(step.path).parent()
    return step.number not in {number for number, there in steps_in(store) if there == name}


def _verify_signed(
    path: str | os.PathLike[str], key: PublicKey, progress: Progress, part: Portion
) -> Verification:
    store, name, scope = signed_place(*locate(path))

    def find_damages(signed: SignedStore) -> list[Damage]:
        with metered(progress, len(part.share(signed.nbytes)), "checking the signature") as meter:
            return signed.find_altered(meter, part)

    _, altered = look_at_signed(store, scope, key, find_damages)
    where = store.path_to(name) if name else store.url
    try:
        found = reread(where, lambda found: _verify_found(found, progress, part))
    except (EformerError, OSError):
        if not altered and part != WHOLE:  # the altered file may be in another part
            _, altered = look_at_signed(store, scope, key, lambda signed: signed.find_altered())
        if not altered:
            raise
        found = Verification(where, 0, 0, 0, False, ())  # the altered bytes explain the failure
    return replace(found, damages=(*altered, *found.damages), signed_by=key.id)


def _verify_found(found: Found, progress: Progress, part: Portion) -> Verification:
    trees, damages = _readable_trees(found)
    total = sum(tree.nbytes for tree in trees)
    with metered(progress, len(part.share(total)), "verifying") as meter:
        for tree, span in zip(trees, _spans(trees, part), strict=True):
            damages += _damages(found, tree, span, meter)
    if part.is_first:
        if found.foreign.find_damages:
            damages += found.foreign.find_damages()
        damages += found.check_beside()
    if damages and was_replaced(found):
        raise ReplacedError
    return Verification(
        path=str(found.path),
        trees=len(found.trees),
        leaves=sum(len(tree.leaves) + len(tree.raw_values) for tree in trees),
        nbytes=sum(tree.nbytes for tree in trees),
        has_digests=all(tree.has_digests for tree in trees),
        damages=tuple(damages),
        has_checksums=found.foreign.find_damages is not None,
        left_out=found.left_out(),
        not_checked=found.foreign.of_handlers,
        is_signed=signer_of(found) is not None,
        digest=found.manifest.digest,
    )


def _spans(trees: Sequence[TreeEntry], part: Portion) -> list[ByteSpan]:
    if part == WHOLE:
        return [ALL] * len(trees)
    return spans([ByteLine(extents_of(tree)) for tree in trees], part)


def extents_of(tree: TreeEntry) -> Iterator[tuple[int, int, int]]:
    """Yield the file, the place in it and the length of every extent."""
    starts = [file.header_nbytes for file in tree.files]
    for entry in tree.leaves.values():
        for extent in entry.extents:
            yield extent.file, starts[extent.file] + extent.offset, extent.nbytes


def _readable_trees(found: Found) -> tuple[list[TreeEntry], list[Damage]]:
    """Return the trees whose process records can be read, and the damage of all other trees."""
    trees, damages = [], []
    for prefix, record in found.manifest.trees.items():
        if record.wholeness:
            try:
                found.trees[prefix].check_leaves()
            except (OSError, FormatError) as error:
                problems = unreadable(found.store, record) or [(str(found.path), str(error))]
                damages += [
                    Damage("", name, 0, 0, f"cannot be read: {problem}") for name, problem in problems
                ]
                continue
        trees.append(found.trees[prefix])
    for prefix in found.trees:
        if prefix not in found.manifest.trees:
            try:
                trees.append(found.trees[prefix])
            except CorruptionError as error:
                if not found.manifest.trees:
                    raise
                damages.append(Damage("", prefix, 0, 0, f"cannot be read: {error}"))
    return trees, damages


def _damages(found: Found, tree: TreeEntry, span: ByteSpan, meter: Meter) -> list[Damage]:
    """Find the damage in a tree: of files whose headers are in `span`, and of pieces that begin there."""
    try:
        files = found.files(tree)
    except (FileNotFoundError, FormatError) as error:
        return [Damage("", tree.root, 0, 0, f"cannot be read: {error}")]
    try:
        store = found.store
        damages, lost = _damages_of_files(tree, span, files, store.read_threads)
        wants = []
        for want in wants_in(tree, span):
            gone = [
                (extent, tree.files[extent.file].header_nbytes + extent.offset)
                for extent in want.entry.extents
                if extent.file in lost
            ]
            damages += [
                _lost(want.name, tree, extent.file, start, extent.nbytes, lost[extent.file])
                for extent, start in gone
                if (extent.file, start) in span
            ]
            if not gone:
                wants.append(want)
        threads, room = store.read_threads, store.read_bytes
        check_pieces(wants, tree, files, threads, damages.append, meter, room, span)
    finally:
        files.close()
    return damages


def wants_in(tree: TreeEntry, span: ByteSpan) -> list[Want]:
    """Return the leaves that have bytes in a span."""
    if span is ALL:
        return [Want(name, entry, entry.dtype) for name, entry in tree.leaves.items()]
    starts = [file.header_nbytes for file in tree.files]
    return [
        Want(name, entry, entry.dtype)
        for name, entry in tree.leaves.items()
        if any(span.touches(e.file, starts[e.file] + e.offset, e.nbytes) for e in entry.extents)
    ]


def _damages_of_files(
    tree: TreeEntry, span: ByteSpan, files: Files, threads: int
) -> tuple[list[Damage], dict[int, str]]:
    """Check the headers and lengths of the files in a span, several in parallel. Return the damage of files that begin
    in it, and why files cannot be read."""
    damages: list[list[Damage]] = [[] for _ in tree.files]
    lost: dict[int, str] = {}

    def look(number: int) -> None:
        try:
            if (number, 0) in span:
                damages[number] = list(_file_damages(tree, number, files))
            else:
                files.nbytes(number)
        except (OSError, FormatError) as error:
            lost[number] = str(error)
            header_nbytes = tree.files[number].header_nbytes
            if header_nbytes == tree.files[number].nbytes and (number, 0) in span:
                damages[number] = [_lost("", tree, number, 0, header_nbytes, str(error))]

    first, last = span.files
    run_all([partial(look, number) for number in range(first, min(last + 1, len(tree.files)))], threads)
    return [damage for some in damages for damage in some], lost


def _lost(leaf: str, tree: TreeEntry, file: int, start: int, nbytes: int, why: str) -> Damage:
    return Damage(leaf, tree.path_of(file), start, start + nbytes, f"cannot be read: {why}")


def _file_damages(tree: TreeEntry, number: int, files: Files) -> Iterator[Damage]:
    """Check the length of a file, and its header, which other readers rely on."""
    file, name = tree.files[number], tree.path_of(number)
    nbytes = files.nbytes(number)
    if nbytes != file.nbytes:
        problem = f"is {nbytes} bytes long, expected {file.nbytes}; restore it from a copy"
        yield Damage("", name, 0, 0, problem)
    if file.header and nbytes >= file.header_nbytes:
        header = bytearray(file.header_nbytes)
        found = files.read_into(number, memoryview(header), 0)
        digest = xxh3_128(memoryview(header)[:found])
        if digest != file.header:
            problem = (
                f"are damaged: their digest is {digest}, expected {file.header}. They are the header, which only other "
                "programs read"
            )
            yield Damage("", name, 0, file.header_nbytes, problem)
