"""Give a changed checkpoint of ours the lengths and digests that it has now, so that readers look further than these."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from eformer._engine.record.digests import NO_DIGEST, stamp_digest, xxh3_128
from eformer._engine.record.signature import SIGNATURE, SignedFile, digest_block, sign_files
from eformer._engine.stores.keys import private_key
from fuzz.cases import DATABASE
from fuzz.documents import Embedded, parse, written
from fuzz.edits import with_header
from support.keys import PRIVATE

if TYPE_CHECKING:
    from random import Random

    from fuzz.cases import Case

_INDEXES = ("manifest.json", "tensorstore_index.json")
_DIGEST = b'"digest":"'
_SIGNER = private_key(PRIVATE)
_WRONG = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    RecursionError,
    struct.error,
    OverflowError,
)


def seal(case: Case, rng: Random) -> None:
    """Seal all files of a case; of lengths and digests of leaves, sometimes only the one or the other."""
    _seal_documents(case, rng)
    for name in list(case.files):
        if name.endswith(SIGNATURE) and rng.random() < 0.7:
            _sign(case, name)


def _seal_documents(case: Case, rng: Random) -> None:
    if rng.random() < 0.4:  # parsing a document and writing it again would mend what is odd in it
        _stamp_all(case)
        return
    lengths, leaves = rng.random() < 0.7, rng.random() < 0.9
    for name in list(case.files):
        if name.endswith(".safetensors"):
            _try(_seal_file, case, name, leaves)
    for name in list(case.files):
        if name.rpartition("/")[2] in _INDEXES:
            _try(_seal_index, case, name, lengths, leaves)


def _sign(case: Case, name: str) -> None:
    """Sign what is there: the file that the signature is called after, or all files of the directory."""
    alone = name.removesuffix(SIGNATURE).removesuffix(".")
    signed = [alone] if alone in case.files else [file for file in case.files if file != name]
    digests = [
        SignedFile(file, len(case.files[file]), (digest_block(case.files[file]),))
        for file in signed
        if file.isprintable()
    ]
    case.files[name] = sign_files(digests, _SIGNER.id, _SIGNER.sign)


def _stamp_all(case: Case) -> None:
    """Give documents the digests of their bytes as they are."""
    for name, data in case.files.items():
        if name.rpartition("/")[2] in _INDEXES:
            case.files[name] = _stamped(data)
        elif name.endswith(".safetensors"):
            stop = 8 + int.from_bytes(data[:8], "little")
            case.files[name] = _stamped(data[:stop]) + data[stop:]


def _stamped(data: bytes) -> bytes:
    start = data.find(_DIGEST, 0, 64) + len(_DIGEST)
    if start < len(_DIGEST) or len(data) < start + len(NO_DIGEST):
        return data
    return stamp_digest(data[:start] + NO_DIGEST.encode() + data[start + len(NO_DIGEST) :])


def _try(work: Any, case: Case, name: str, *others: Any) -> None:
    """What has no shape any more stays as it is."""
    try:
        work(case, name, *others)
    except _WRONG:
        return


def _seal_file(case: Case, name: str, leaves: bool) -> None:
    """Seal a file that has its manifest in its header, or the record of a process."""
    data = case.files[name]
    (length,) = struct.unpack("<Q", data[:8])
    rest = data[8 + length :]
    header = parse(data[8 : 8 + length])
    metadata = header["__metadata__"]
    if isinstance(metadata.get("part"), Embedded) and leaves:
        _seal_extents(metadata["part"].content["extents"].values(), lambda _: rest)
        case.files[name] = with_header(written(header).encode(errors="surrogatepass"), rest)
    if isinstance(metadata.get("manifest"), Embedded):
        if leaves:
            for tree in metadata["manifest"].content["trees"].values():
                _try_leaves(tree, lambda _: rest)
        metadata["digest"] = NO_DIGEST
        header["__metadata__"] = {"digest": NO_DIGEST, **metadata}
        header = {"__metadata__": header["__metadata__"], **header}
        sealed = with_header(written(header).encode(errors="surrogatepass"), rest)
        (length,) = struct.unpack("<Q", sealed[:8])
        case.files[name] = stamp_digest(sealed[: 8 + length]) + rest


def _seal_index(case: Case, name: str, lengths: bool, leaves: bool) -> None:
    document = parse(case.files[name])
    manifest = document if name.endswith("manifest.json") else document.get("eformer")
    if "digest" not in document:
        return
    if isinstance(manifest, dict) and isinstance(manifest.get("trees"), dict):
        for tree in manifest["trees"].values():
            try:
                _seal_tree(case, name.rpartition("/")[0], tree, lengths, leaves)
            except _WRONG:
                continue
    document = {"digest": NO_DIGEST, **(document | {"digest": NO_DIGEST})}
    case.files[name] = stamp_digest(written(document).encode(errors="surrogatepass"))


def _seal_tree(case: Case, directory: str, tree: Any, lengths: bool, leaves: bool) -> None:
    root = "/".join(filter(None, (directory, tree.get("root", ""))))
    between = DATABASE if tree.get("ocdbt") else "/"
    found = []
    for file in tree["files"]:
        data = case.files.get(
            f"{root}{between}{file['name']}" if root or between == DATABASE else file["name"]
        )
        found.append(b"" if data is None else data[file.get("header_nbytes", 0) :])
        if data is None:
            continue
        if lengths:
            was = file["nbytes"] == file.get("header_nbytes")
            file["nbytes"] = len(data)
            if file["name"].endswith(".safetensors"):
                file["header_nbytes"] = min(len(data), 8 + struct.unpack("<Q", data[:8])[0])
            elif was:
                file["header_nbytes"] = len(data)
            found[-1] = data[file.get("header_nbytes", 0) :]
        if file.get("header"):
            file["header"] = xxh3_128(data[: file["header_nbytes"]])
    if leaves:
        _try_leaves(tree, found.__getitem__)


def _try_leaves(tree: Any, data_of: Any) -> None:
    for leaf in tree["leaves"].values():
        try:
            _seal_extents([leaf[2]], data_of)
        except _WRONG:
            continue


def _seal_extents(groups: Any, data_of: Any) -> None:
    for extents in groups:
        for extent in extents:
            data = data_of(extent[0])[extent[1] : extent[1] + extent[2]]
            if len(extent) > 3 and len(extent[3]) <= 32:
                extent[3] = xxh3_128(data) if data else ""
