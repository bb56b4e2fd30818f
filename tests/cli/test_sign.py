"""`eformer sign`, and `eformer verify --signed-by`."""

import json

import numpy as np
import pytest

from eformer.checkpoint import save
from support.commands import run
from support.keys import OTHER_PUBLIC, PRIVATE, PUBLIC, pair


@pytest.fixture
def place(tmp_path):
    save({"w": np.arange(1000)}, tmp_path / "c")
    for name, key in {"private": PRIVATE, "public": PUBLIC, "other": OTHER_PUBLIC}.items():
        (tmp_path / f"{name}.pem").write_bytes(key)
    return tmp_path


def test_a_checkpoint_is_signed_and_verified(place):
    assert "eformer.sig" in run("sign", place / "c", "--key", place / "private.pem").stdout
    assert "signed by" in run("verify", place / "c", "--signed-by", place / "public.pem").stdout
    assert "it is signed, which was not checked without a key" in run("verify", place / "c").stdout
    assert "signed" in run("inspect", place / "c").stdout
    done = run("verify", place / "c", "--signed-by", place / "other.pem", code=1)
    assert "is signed by another key" in done.stderr


def test_the_unsigned_and_the_altered_have_exit_code_1(place):
    assert "is not signed" in run("verify", place / "c", "--signed-by", place / "public.pem", code=1).stderr
    run("sign", place / "c", "--key", place / "private.pem")
    (place / "c" / "config.json").write_text("{}")
    done = run("verify", place / "c", "--signed-by", place / "public.pem", code=1)
    assert "config.json was added after the checkpoint was signed" in done.stdout


def test_json_says_who_has_signed(place):
    assert json.loads(run("inspect", place / "c", "--json").stdout)["signed_by"] is None
    found = json.loads(run("sign", place / "c", "--key", place / "private.pem", "--json").stdout)
    assert found == {"signature": str(place / "c" / "eformer.sig")}
    report = json.loads(run("verify", place / "c", "--signed-by", place / "public.pem", "--json").stdout)
    assert report["is_signed"]
    assert json.loads(run("inspect", place / "c", "--json").stdout)["signed_by"] == report["signed_by"]


def test_the_password_of_a_key_comes_from_the_environment(place):
    (place / "private.pem").write_bytes(pair(1, b"secret")[0])
    run("sign", place / "c", "--key", place / "private.pem", EFORMER_KEY_PASSWORD="secret")
    run("verify", place / "c", "--signed-by", place / "public.pem")
