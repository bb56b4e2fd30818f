"""The document that signs a checkpoint: as the format says, and nothing that is hostile in it does harm."""

import base64
import hashlib
import json
import os

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from hypothesis import given
from hypothesis import strategies as st

from eformer._engine.record.signature import SIGNED_BLOCK_BYTES, SignedFile, sign_files, signed_files
from eformer._engine.stores.keys import private_key, public_key
from eformer.checkpoint import inspect, load, save, sign, verify
from eformer.errors import SignatureError
from support.keys import OTHER_PRIVATE, OTHER_PUBLIC, PRIVATE, PUBLIC

ID = public_key(PUBLIC).id
KIND = "application/vnd.eformer.signature.v1+json"


@pytest.fixture
def path(tmp_path):
    save({"w": np.zeros(3 * 2**20, np.float32), "n": np.ones(3)}, tmp_path / "c")
    sign(tmp_path / "c", private_key=PRIVATE)
    return tmp_path / "c"


def encoding(payload):
    return b"DSSEv1 %d %b %d %b" % (len(KIND), KIND.encode(), len(payload), payload)


def test_another_program_can_verify_it(path):
    """As docs/format/signature.md says, and without anything of eformer."""
    envelope = json.loads((path / "eformer.sig").read_bytes())
    payload = base64.b64decode(envelope["payload"])
    (signature,) = envelope["signatures"]
    load_pem_public_key(PUBLIC).verify(base64.b64decode(signature["sig"]), encoding(payload))
    statement = json.loads(payload)
    assert statement.keys() == {"piece_bytes", "files"}
    size = statement["piece_bytes"]
    assert size == SIGNED_BLOCK_BYTES == 2**23
    found = {}
    for name in sorted(os.listdir(path)):
        data = (path / name).read_bytes()
        starts = range(0, max(1, len(data)), size)
        digests = [hashlib.sha256(data[start : start + size]).hexdigest() for start in starts]
        found[name] = {"name": name, "nbytes": len(data), "sha256": digests}
    assert len(found["model.safetensors"]["sha256"]) == 2
    del found["eformer.sig"]
    assert statement["files"] == [*found.values()]


def test_the_id_of_a_key_is_what_openssl_and_sha256sum_say(path):
    key = inspect(path).signed_by
    lines = PUBLIC.decode().split("\n")
    assert key == hashlib.sha256(base64.b64decode("".join(lines[1:-2]))).hexdigest()


def test_what_another_program_has_signed_is_accepted(path):
    statement = json.loads(base64.b64decode(json.loads((path / "eformer.sig").read_bytes())["payload"]))
    put(path, json.dumps(statement, indent=2, sort_keys=True).encode())
    assert verify(path, signed_by=PUBLIC).ok


def put(path, payload, *, kind=KIND, key=PRIVATE):
    """Sign a payload with the right key, and put it in place of the signature."""
    signature = load_pem_private_key(key, None).sign(encoding(payload))
    envelope = {"payloadType": kind, "payload": base64.b64encode(payload).decode()}
    envelope["signatures"] = [{"keyid": ID, "sig": base64.b64encode(signature).decode()}]
    (path / "eformer.sig").write_text(json.dumps(envelope, separators=(",", ":")))


def entry(name="manifest.json", nbytes=3, sha256=("0" * 64,)):
    return {"name": name, "nbytes": nbytes, "sha256": list(sha256)}


STATEMENTS = {
    "not JSON": b"{",
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "no files": {"piece_bytes": SIGNED_BLOCK_BYTES},
    "files by name": {"piece_bytes": SIGNED_BLOCK_BYTES, "files": {"a": 1}},
    "another field": {"piece_bytes": SIGNED_BLOCK_BYTES, "files": [], "links": []},
    "another field of a file": {"piece_bytes": SIGNED_BLOCK_BYTES, "files": [entry() | {"link": "x"}]},
    "other pieces": {"piece_bytes": 2**20, "files": []},
    "no pieces": {"piece_bytes": 0, "files": []},
    "above": [entry("../x")],
    "far above": [entry("a/../../x")],
    "absolute": [entry("/etc/passwd")],
    "itself": [entry("eformer.sig")],
    "of git": [entry(".git/config")],
    "no name": [entry("")],
    "twice": [entry(), entry()],
    "with a zero": [entry("a\0b")],
    "negative": [entry(nbytes=-1)],
    "huge": [entry(nbytes=2**62)],
    "a number as a name": [entry(1)],
    "too few digests": [entry(nbytes=2**24)],
    "too many digests": [entry(sha256=("0" * 64, "0" * 64))],
    "no digest": [entry(sha256=())],
    "a short digest": [entry(sha256=("0",))],
    "a digest in capitals": [entry(sha256=("A" * 64,))],
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", STATEMENTS)
def test_nonsense_that_the_right_key_has_signed_is_refused(path, name):
    found = STATEMENTS[name]
    if isinstance(found, list):
        found = {"piece_bytes": SIGNED_BLOCK_BYTES, "files": found}
    put(path, found if isinstance(found, bytes) else json.dumps(found).encode())
    for refuse in (load, verify):
        with pytest.raises(SignatureError, match=r"eformer\.sig"):
            refuse(path, signed_by=PUBLIC)


ENVELOPES = {
    "empty": b"",
    "not JSON": b"signed, sincerely",
    "not text": b"\xff\xfe" * 100,
    "deep": b'{"payload":' + b"[" * 200_000,
    "a list": b"[]",
    "a number": b"1e999",
    "spaces": b'{"payloadType": "%b","payload":"","signatures":[{"keyid":"","sig":""}]}' % KIND.encode(),
    "no signature": b'{"payloadType":"%b","payload":"","signatures":[]}' % KIND.encode(),
    "many signatures": b'{"payloadType":"%b","payload":"","signatures":[%b]}'
    % (KIND.encode(), b",".join([b'{"keyid":"","sig":""}'] * 1000)),
    "types": b'{"payloadType":1,"payload":[],"signatures":{}}',
    "not base64": b'{"payloadType":"%b","payload":"*","signatures":[{"keyid":"","sig":"*"}]}' % KIND.encode(),
    "other text": f'{{"payloadType":"{KIND}","payload":"é","signatures":[{{"keyid":"é","sig":"é"}}]}}'.encode(),
    "another kind": b'{"payloadType":"application/vnd.in-toto+json","payload":"","signatures":[{"keyid":"","sig":""}]}',
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ENVELOPES)
def test_an_envelope_that_makes_no_sense_is_refused(path, name):
    found = ENVELOPES[name]
    (path / "eformer.sig").write_bytes(found)
    for refuse in (load, verify):
        with pytest.raises(SignatureError, match=r"eformer\.sig"):
            refuse(path, signed_by=PUBLIC)
    assert verify(path).is_signed
    assert inspect(path).signed_by is not None


def test_a_signature_that_is_no_file_is_refused_without_being_opened(path, tmp_path):
    signature = path / "eformer.sig"
    signature.rename(tmp_path / "outside.sig")
    signature.symlink_to(tmp_path / "outside.sig")
    with pytest.raises(SignatureError):
        load(path, signed_by=PUBLIC)
    signature.unlink()
    signature.mkdir()
    with pytest.raises(SignatureError):
        load(path, signed_by=PUBLIC)
    signature.rmdir()
    os.mkfifo(signature)
    with pytest.raises(SignatureError):
        load(path, signed_by=PUBLIC)


def test_a_signature_that_is_far_too_long_is_not_read(path, monkeypatch):
    monkeypatch.setattr("eformer._engine.stores.signed.MOST_BYTES", 10)
    with pytest.raises(SignatureError, match="expected at most 10"):
        load(path, signed_by=PUBLIC)


def test_the_id_of_the_right_key_does_not_help_another(path):
    payload = base64.b64decode(json.loads((path / "eformer.sig").read_bytes())["payload"])
    put(path, payload, key=OTHER_PRIVATE)
    with pytest.raises(SignatureError, match=r"the signature does not match the key"):
        load(path, signed_by=PUBLIC)
    with pytest.raises(SignatureError, match="is signed by another key"):
        load(path, signed_by=OTHER_PUBLIC)


@given(data=st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    with pytest.raises(SignatureError):
        signed_files(data, public_key(PUBLIC), "random")


@given(at=st.integers(0, 10**6), value=st.integers(1, 255))
def test_any_flipped_bit_of_a_document_is_found(at, value):
    files = [SignedFile("a", 3, ("0" * 64,)), SignedFile("b/c", 0, ("1" * 64,))]
    key = private_key(PRIVATE)
    document = bytearray(sign_files(files, key.id, key.sign))
    document[at % len(document)] ^= value
    with pytest.raises(SignatureError):
        signed_files(bytes(document), public_key(PUBLIC), "flipped")


def test_the_kind_of_the_document_is_signed_with_it():
    key = load_pem_private_key(PRIVATE, None)
    with pytest.raises(InvalidSignature):
        load_pem_public_key(PUBLIC).verify(key.sign(b"{}"), encoding(b"{}"))
