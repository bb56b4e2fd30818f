"""Errors of a bucket in words: no bucket, no credentials, no permission."""

import traceback

import numpy as np
import pytest
from obstore import exceptions

from eformer import checkpoint
from eformer._engine.stores.objects import Objects
from support.commands import run, run_anew
from support.object_server import credentials, serving


@pytest.fixture
def server():
    options = {"retries": 0, **credentials()}
    with serving() as server, checkpoint.store_options("s3://words", endpoint=server.url, **options):
        yield server


def answer(code):
    return (
        f"<Error><Code>{code}</Code><Message>why</Message><RequestId>raw-answer</RequestId></Error>".encode()
    )


CALLS = {
    "save": lambda: checkpoint.save({"w": np.ones(2)}, "s3://words/x"),
    "load": lambda: checkpoint.load("s3://words/x"),
    "resume": lambda: checkpoint.Run("s3://words/run", every=1).resume(like={"w": 0}),
    "verify": lambda: checkpoint.verify("s3://words/x"),
    "prune": lambda: checkpoint.prune("s3://words/run", keep=1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_missing_bucket_is_called_so_and_is_not_taken_for_an_empty_one(server, call):
    server.refuse_with = 404, answer("NoSuchBucket")
    with pytest.raises(
        OSError, match=r"s3://words: bucket words does not exist .*; create it or check"
    ) as raised:
        call()
    assert "raw-answer" not in str(raised.value)
    assert "raw-answer" in "".join(traceback.format_exception(raised.value)), "in the chained exception"


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_refusal_is_a_permission_error_with_the_code_of_the_server(server, call):
    server.refuse_with = 403, answer("InvalidAccessKeyId")
    message = r"permission denied: .*\(403 Forbidden, InvalidAccessKeyId: why\); check the credentials"
    with pytest.raises(PermissionError, match=message) as raised:
        call()
    assert "raw-answer" not in str(raised.value)


@pytest.mark.parametrize(("status", "body"), [(301, b""), (400, answer("AuthorizationHeaderMalformed"))])
def test_a_bucket_in_another_region_asks_for_the_region(server, status, body):
    server.refuse_with = status, body
    with pytest.raises(OSError, match="the bucket lies in another region; set AWS_REGION"):
        checkpoint.load("s3://words/x")


def test_other_answers_keep_their_code_and_their_message(server):
    server.refuse_with = 400, answer("Strange")
    with pytest.raises(OSError, match=r"failed after .*: 400 Bad Request, Strange: why$"):
        checkpoint.load("s3://words/x")


def test_a_server_that_cannot_be_reached_is_named_without_the_words_of_the_client():
    options = {"endpoint": "http://127.0.0.1:1", "retries": 0, **credentials()}
    with (
        checkpoint.store_options("s3://words", **options),
        pytest.raises(
            OSError, match=r"s3://words/x.*: the server http://127.0.0.1:1 cannot be reached"
        ) as raised,
    ):
        checkpoint.load("s3://words/x")
    assert "Generic" not in str(raised.value)
    assert "Generic" in "".join(traceback.format_exception(raised.value)), "in the chained exception"


# Messages of obstore where no credentials were found, and it asked the machine in vain.
ASKED = {
    "s3": ("http://127.0.0.1:1/latest/api/token", "AWS_ACCESS_KEY_ID"),
    "gs": ("http://127.0.0.1:1/computeMetadata/v1/instance/token", "GOOGLE_APPLICATION_CREDENTIALS"),
    "az": ("http://127.0.0.1:1/metadata/identity/oauth2/token", "AZURE_STORAGE_ACCOUNT_KEY"),
}


@pytest.mark.parametrize("cloud", ASKED)
def test_without_credentials_they_are_asked_for_by_name(cloud):
    address, variable = ASKED[cloud]

    class Client:
        async def head_async(self, key):
            raise exceptions.GenericError(
                f"Generic error: Error performing PUT {address} in 1 ms - HTTP error"
            )

    with pytest.raises(
        PermissionError, match=f"{cloud}://b: no credentials found: looked in .*{variable}.*; set"
    ):
        Objects(Client(), f"{cloud}://b").head("x")


NO_KEYS = {"HOME": "/nowhere", "AWS_ACCESS_KEY_ID": "", "AWS_EC2_METADATA_DISABLED": "true"}


def test_without_credentials_nothing_is_asked_where_the_environment_forbids_it():
    done = run("ls", "s3://words/x", code=1, **NO_KEYS)
    assert done.stderr.startswith("error: s3://words: no credentials found: looked in the environment (AWS_")
    assert "AWS_EC2_METADATA_DISABLED" in done.stderr


def test_debug_shows_the_raw_answer_of_the_server(server):
    server.refuse_with = 404, answer("NoSuchBucket")
    options = [f"--store-option={name}={value}" for name, value in credentials().items()]
    command = ["ls", "s3://words/x", f"--store-option=endpoint={server.url}", *options]
    assert "raw-answer" not in run(*command, code=1).stderr
    assert "raw-answer" in run_anew(["--debug", *command], {}).stderr
