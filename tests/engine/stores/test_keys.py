"""Keys in PEM files: those of openssl, those with passwords, and those that are refused."""

import shutil
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448

from eformer.checkpoint import load, save, sign
from eformer.errors import SignatureError
from support.keys import PRIVATE, PUBLIC, pair, private_pem


@pytest.fixture
def path(tmp_path):
    save({"w": np.ones(3)}, tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_keys_are_made_as_the_guide_says(path, tmp_path):
    lines = [
        "openssl genpkey -algorithm ed25519 -out private.pem",
        "openssl pkey -in private.pem -pubout -out public.pem",
    ]
    for line in lines:
        subprocess.run(line.split(), cwd=tmp_path, check=True)
    sign(path, private_key=tmp_path / "private.pem")
    load(path, signed_by=str(tmp_path / "public.pem"))


def test_a_password_is_an_argument_or_a_variable_or_asked_for(path, monkeypatch):
    private, public = pair(3, b"secret")
    sign(path, private_key=private, password="secret")
    sign(path, private_key=private, password=lambda: "secret")
    with pytest.raises(SignatureError, match="has a password; pass password= or set EFORMER_KEY_PASSWORD"):
        sign(path, private_key=private)
    with pytest.raises(SignatureError, match="or its password is wrong"):
        sign(path, private_key=private, password="guess")
    monkeypatch.setenv("EFORMER_KEY_PASSWORD", "secret")
    sign(path, private_key=private)
    sign(path, private_key=private, password=lambda: pytest.fail("was asked"))
    load(path, signed_by=public)


def test_the_wrong_half_of_a_pair_is_refused(path):
    with pytest.raises(SignatureError, match="is a public key, expected the private key; make a pair by"):
        sign(path, private_key=PUBLIC)
    with pytest.raises(SignatureError, match="is a private key, expected a public key"):
        load(path, signed_by=PRIVATE)


@pytest.mark.parametrize("other", [ec.generate_private_key(ec.SECP256R1()), ed448.Ed448PrivateKey.generate()])
def test_keys_of_other_kinds_are_refused(path, other):
    private, public = private_pem(other)
    with pytest.raises(SignatureError, match="is not a key of Ed25519"):
        sign(path, private_key=private)
    with pytest.raises(SignatureError, match="is not a key of Ed25519"):
        load(path, signed_by=public)


def test_what_is_not_a_key_is_refused(path, tmp_path):
    (tmp_path / "x.pem").write_text("a key")
    with pytest.raises(SignatureError, match=r"x\.pem is not a private key in PEM"):
        sign(path, private_key=tmp_path / "x.pem")
    with pytest.raises(SignatureError, match=r"x\.pem is not a public key in PEM"):
        load(path, signed_by=tmp_path / "x.pem")
    with pytest.raises(FileNotFoundError, match=r"missing\.pem"):
        load(path, signed_by=tmp_path / "missing.pem")


def test_without_the_package_the_error_names_the_extra(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.serialization", None)
    for call in (partial(sign, private_key=PRIVATE), partial(load, signed_by=PUBLIC)):
        with pytest.raises(ImportError, match=r"pip install 'eformer-checkpoint\[sign\]'"):
            call(path)
