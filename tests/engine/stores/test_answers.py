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


def answer(code, message="why"):
    return f"<Error><Code>{code}</Code><Message>{message}</Message><RequestId>raw-answer</RequestId></Error>".encode()


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


WRONG = "the region 'us-east-1' is wrong; expecting 'eu-west-1'"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (301, b"", "$"),
        (400, answer("AuthorizationHeaderMalformed", WRONG), r" \(Auth.*expecting 'eu-west-1'\)$"),
    ],
    ids=["redirect", "region"],
)
def test_a_bucket_in_another_region_asks_for_the_region_that_the_server_names(server, status, body, said):
    server.refuse_with = status, body
    message = f"the bucket lies in another region; set AWS_REGION or the store option region{said}"
    with pytest.raises(OSError, match=message):
        checkpoint.load("s3://words/x")


REFUSALS = {
    "no key": (
        400,
        "AuthorizationHeaderMalformed",
        "a non-empty Access Key must be provided",
        "be provided$",
    ),
    "clock": (403, "RequestTimeTooSkewed", "too large", "set the clock of this machine$"),
    "archive": (403, "InvalidObjectState", "storage class", "in an archive; restore it from there first$"),
    "old login": (400, "ExpiredToken", "The token has expired", "credentials have expired; renew them$"),
}


@pytest.mark.parametrize(("status", "code", "said", "remedy"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_names_the_remedy_of_its_code_alone(server, status, code, said, remedy):
    server.refuse_with = status, answer(code, said)
    with pytest.raises(OSError, match=f"{code}: .*{remedy}") as raised:
        checkpoint.load("s3://words/x")
    assert not any(wrong in str(raised.value) for wrong in ("AWS_REGION", "what they may do"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": "invalid_grant", "error_description": "revoked"}', '"error_description": "revoked"'),
        (
            b"<html><style>p {}</style><body>blocked by\n the <b>proxy</b></body>" + b"x" * 2000,
            "by the proxy x+",
        ),
        (
            b"<Error><Code>AccessDenied</Code><Details>billing is disabled</Details></Error>",
            "billing is disabled",
        ),
    ],
    ids=["json", "page of a proxy", "details"],
)
@pytest.mark.parametrize("status", [400, 403])
def test_an_answer_in_another_form_is_not_hidden(server, status, body, words):
    server.refuse_with = status, body
    with pytest.raises(OSError, match=words) as raised:
        checkpoint.load("s3://words/x")
    assert len(str(raised.value)) < 600
    assert "p {}" not in str(raised.value)


@pytest.mark.parametrize("key", ["latest/meta-data/x", "metadata/identity/x", "computeMetadata/x"])
def test_a_key_like_the_path_of_a_service_of_credentials_is_not_taken_for_it(key):
    text = f"Error performing GET https://b.s3.amazonaws.com/{key} in 1 ms - status code: 500 Oh: "
    with pytest.raises(OSError, match=f"s3://b/{key}: the request to look it up failed after .*: 500 Oh$"):
        failing(text).head(key)


def failing(text):
    class Client:
        async def head_async(self, key):
            raise exceptions.GenericError(f"Generic error: {text}")

    return Objects(Client(), "s3://b")


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


IN_VAIN = {
    "nothing there": ("HTTP error", r"the role of this machine \(its service did not answer\);"),
    "black hole": (
        "HTTP error: operation timed out",
        r"the role of this machine \(its service did not answer\);",
    ),
    "no role": (
        "Server returned non-2xx status code: 404 Not Found: ",
        r"the role of this machine \(its service answered 404 Not Found\);",
    ),
}


@pytest.mark.parametrize(("end", "looked"), IN_VAIN.values(), ids=IN_VAIN)
@pytest.mark.parametrize("cloud", ASKED)
def test_without_credentials_they_are_asked_for_by_name(cloud, end, looked):
    address, variable = ASKED[cloud]

    class Client:
        async def head_async(self, key):
            raise exceptions.GenericError(f"Generic error: Error performing PUT {address} in 1 ms - {end}")

    with pytest.raises(
        PermissionError, match=f"{cloud}://b: no credentials found: looked in .*{variable}.*{looked} set"
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
