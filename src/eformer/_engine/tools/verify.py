"""Read every byte of a checkpoint once, and check it. No jax."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from eformer._engine.formats.find import (
    ReplacedError,
    later_of_flax,
    reread,
    signed_place,
    signer_of,
    was_replaced,
)
from eformer._engine.formats.others.orbax import inside_run
from eformer._engine.formats.process_records import unreadable
from eformer._engine.formats.steps import is_of_orbax, is_run, steps_in
from eformer._engine.loading.fetch import check_pieces
from eformer._engine.loading.read_plan import Want
from eformer._engine.record.digests import xxh3_128
from eformer._engine.record.text import count, few, glance
from eformer._engine.runs.steps import path_of_step, steps
from eformer._engine.stores.cache import caching
from eformer._engine.stores.keys import public_key
from eformer._engine.stores.local import on_disk
from eformer._engine.stores.locate import locate, store_at
from eformer._engine.stores.signed import look_at_signed
from eformer._engine.tasks.interrupts import uninterrupted
from eformer._engine.tasks.pool import run_all
from eformer._engine.tasks.progress import metered
from eformer.errors import Damage, EformerError, FormatError, NotFoundError, SignatureError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from eformer._engine.formats.found import Found
    from eformer._engine.record.manifest import TreeEntry
    from eformer._engine.runs.steps import Step
    from eformer._engine.stores.base import Files
    from eformer._engine.stores.keys import Key, PublicKey
    from eformer._engine.stores.signed import SignedStore
    from eformer._engine.tasks.progress import Meter, Progress


@dataclass(frozen=True, slots=True)
class Verification:
    """Report what `verify` found. `print` shows it.

    damages         every damaged or missing range of bytes
    has_digests     False for files of other programs: only their structure and completeness could be checked
    has_checksums   whether such files have checksums of their own, which were compared
    left_out        files of the directory that are not read and may hold leaves
    is_signed       whether there is a signature, which is checked only with a key
    signed_by       the id of the key whose signature was checked; what differs from it is in `damages`
    steps           of a run: the report of each step. The counts are then sums, and the damages have paths from the run
    ok              whether nothing is damaged and nothing left out
    """

    path: str
    trees: int
    leaves: int
    nbytes: int
    has_digests: bool
    damages: tuple[Damage, ...]
    has_checksums: bool = False
    left_out: tuple[str, ...] = ()
    is_signed: bool = False
    signed_by: str | None = None
    steps: tuple[Verification, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged and nothing left out."""
        return not self.damages and not self.left_out

    def __repr__(self) -> str:
        return glance(str(self))

    def __str__(self) -> str:
        if self.steps:
            return "\n".join(map(str, self.steps))
        if not self.left_out:
            return self._checked
        number = count(len(self.left_out), "file")
        return f"{self._checked}\n  {number} left out, which may hold leaves: {few(self.left_out)}"

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
        return f"{self.path}: {self.leaves} leaves, {self.nbytes} bytes: {how}{self._signed}"

    @property
    def _signed(self) -> str:
        if self.signed_by:
            return f"; signed by {self.signed_by}"
        return "; it is signed, which was not checked without a key" if self.is_signed else ""


@uninterrupted
def verify(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    signed_by: Key | None = None,
    progress: Progress = None,
) -> Verification:
    """Check every leaf of every tree at `path`, and the headers of the files, against their digests; and that the
    indexes for other readers, and the marks of databases, are those of the manifest.

    All damage is in the report; only a manifest that cannot be read raises. Files in a directory of another program
    that are not read and may hold leaves are reported as left out. `progress` is True for a progress bar, or a
    function of the bytes read and the total.

    The path of a run checks all of its steps; `step` checks one of them. A step that cannot be read at all is a damage
    then. `Verification.steps` has the report of each step.

    `signed_by` is a public key: the path of a PEM file, or its content. Every byte of every file is then compared with
    the signature of its owner, too; files that were added or removed since are damages. A checkpoint that is not
    signed, or is signed by another key, raises SignatureError; in a run it is a damage.

    Example:

        >>> report = verify("run/step-100")
        >>> report.ok
        True
        >>> print(report)
        run/step-100: 3 leaves, 384 bytes: every digest matches
        >>> [each.path for each in verify("run").steps]
        ['run/step-100', 'run/step-200', 'run/step-300']
    """
    path = path_of_step(path, step)
    key = None if signed_by is None else public_key(signed_by)
    with caching(False):  # it is the checkpoint that has to be checked
        if step is None and is_run(store_at(path)):
            return _verify_run(path, key, progress)
        return _verify_one(path, key, progress)


def _verify_one(path: str | os.PathLike[str], key: PublicKey | None, progress: Progress) -> Verification:
    if key is None:
        return reread(path, lambda found: _report(found, progress))
    return _verify_signed(path, key, progress)


def _verify_run(path: str | os.PathLike[str], key: PublicKey | None, progress: Progress) -> Verification:
    """Check the steps of a run, one after the other. Leave out steps that are removed meanwhile."""
    reports: list[Verification] = []
    while not reports:
        if not (there := steps(path)):
            raise NotFoundError(f"{store_at(path).url} has no steps any more: they were removed meanwhile")
        reports = [
            report
            for step in there
            if not ((report := _report_of(step.path, key, progress)).damages and _is_gone(step))
        ]
    store = store_at(path)
    if later := later_of_flax(store):
        reports.append(_report_of(store.path_to(later), key, progress))
    named = [(report.path.rpartition("/")[2], report) for report in reports]
    return Verification(
        path=store.url,
        trees=sum(report.trees for report in reports),
        leaves=sum(report.leaves for report in reports),
        nbytes=sum(report.nbytes for report in reports),
        has_digests=all(report.has_digests for report in reports),
        damages=tuple(
            replace(damage, file=f"{name}/{damage.file}".rstrip("/"))
            for name, report in named
            for damage in report.damages
        ),
        has_checksums=all(report.has_checksums for report in reports),
        left_out=tuple(f"{name}/{file}" for name, report in named for file in report.left_out),
        is_signed=all(report.is_signed for report in reports),
        signed_by=None if key is None else key.id,
        steps=tuple(reports),
    )


def _report_of(path: str, key: PublicKey | None, progress: Progress) -> Verification:
    """Check one of several checkpoints. That it cannot be read is a damage, too."""
    try:
        _require_inside(path)
        return _verify_one(path, key, progress)
    except (EformerError, OSError) as error:
        state = "fails the check of its signature" if isinstance(error, SignatureError) else "cannot be read"
        return Verification(path, 0, 0, 0, False, (Damage("", "", 0, 0, f"{state}: {error}"),))


def _require_inside(path: str) -> None:
    """Refuse a step of Orbax that is a link out of its run, as a load of the run does."""
    store, name = store_at(path).parent()
    if (run := on_disk(store)) and is_of_orbax(store, name):
        inside_run(run, name)


def _is_gone(step: Step) -> bool:
    store, name = store_at(step.path).parent()
    return step.number not in {number for number, there in steps_in(store) if there == name}


def _verify_signed(path: str | os.PathLike[str], key: PublicKey, progress: Progress) -> Verification:
    store, name, scope = signed_place(*locate(path))

    def find_damages(signed: SignedStore) -> list[Damage]:
        with metered(progress, signed.nbytes, "checking the signature") as meter:
            return signed.find_altered(meter)

    _, altered = look_at_signed(store, scope, key, find_damages)
    where = store.path_to(name) if name else store.url
    try:
        report = reread(where, lambda found: _report(found, progress))
    except (EformerError, OSError):
        if not altered:
            raise
        report = Verification(where, 0, 0, 0, False, ())  # what was altered says enough
    return replace(report, damages=(*altered, *report.damages), signed_by=key.id)


def _report(found: Found, progress: Progress) -> Verification:
    trees, damages = _readable_trees(found)
    with metered(progress, sum(tree.nbytes for tree in trees), "verifying") as meter:
        damages += [damage for tree in trees for damage in _damages(found, tree, meter)]
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
        is_signed=signer_of(found) is not None,
    )


def _readable_trees(found: Found) -> tuple[list[TreeEntry], list[Damage]]:
    """Return the trees whose process records can be read, and the damage of the others."""
    trees, damages = [], []
    for prefix, record in found.manifest.trees.items():
        if record.parts:
            try:
                found.trees[prefix].check_leaves()
            except (OSError, FormatError) as error:
                problems = unreadable(found.store, record) or [(str(found.path), str(error))]
                damages += [
                    Damage("", name, 0, 0, f"cannot be read: {problem}") for name, problem in problems
                ]
                continue
        trees.append(found.trees[prefix])
    trees += [found.trees[prefix] for prefix in found.trees if prefix not in found.manifest.trees]
    return trees, damages


def _damages(found: Found, tree: TreeEntry, meter: Meter) -> list[Damage]:
    try:
        files = found.files(tree)
    except (FileNotFoundError, FormatError) as error:
        return [Damage("", tree.root, 0, 0, f"cannot be read: {error}")]
    try:
        store = found.store
        damages, lost = _damages_of_files(tree, files, store.read_threads)
        wants = []
        for name, entry in tree.leaves.items():
            if extents := [extent for extent in entry.extents if extent.file in lost]:
                for extent in extents:
                    start = tree.files[extent.file].header_nbytes + extent.offset
                    damages.append(_lost(name, tree, extent.file, start, extent.nbytes, lost[extent.file]))
            else:
                wants.append(Want(name, entry, entry.dtype))
        check_pieces(wants, tree, files, store.read_threads, damages.append, meter, store.read_bytes)
    finally:
        files.close()
    return damages


def _damages_of_files(tree: TreeEntry, files: Files, threads: int) -> tuple[list[Damage], dict[int, str]]:
    """Check files outside their leaves, several at once. Return what is damaged, and why files cannot be read."""
    damages: list[list[Damage]] = [[] for _ in tree.files]
    lost: dict[int, str] = {}

    def look(number: int) -> None:
        try:
            damages[number] = list(_file_damages(tree, number, files))
        except (OSError, FormatError) as error:
            lost[number] = str(error)
            if (header_nbytes := tree.files[number].header_nbytes) == tree.files[number].nbytes:
                damages[number] = [_lost("", tree, number, 0, header_nbytes, str(error))]

    run_all([partial(look, number) for number in range(len(tree.files))], threads)
    return [damage for some in damages for damage in some], lost


def _lost(leaf: str, tree: TreeEntry, file: int, start: int, nbytes: int, why: str) -> Damage:
    return Damage(leaf, tree.path_of(file), start, start + nbytes, f"cannot be read: {why}")


def _file_damages(tree: TreeEntry, number: int, files: Files) -> Iterator[Damage]:
    """Check a file outside its leaves: its length, and its header, which other readers rely on."""
    file, name = tree.files[number], tree.path_of(number)
    nbytes = files.nbytes(number)
    if nbytes != file.nbytes:
        yield Damage("", name, 0, nbytes, f"are the whole file, expected {file.nbytes} bytes")
    if file.header and nbytes >= file.header_nbytes:
        header = bytearray(file.header_nbytes)
        found = files.read_into(number, memoryview(header), 0)
        digest = xxh3_128(memoryview(header)[:found])
        if digest != file.header:
            problem = (
                f"are damaged: their digest is {digest}, expected {file.header}. They are the header, which only other "
                "readers use"
            )
            yield Damage("", name, 0, file.header_nbytes, problem)
