"""Secrets in settings are not in messages, representations, pickles, logs and checkpoints."""

import base64
import itertools
import json
import pickle
import traceback

import numpy as np
import pytest

from eformer import checkpoint
from eformer._engine.stores.locate import store_at
from eformer._engine.stores.redact import Redactor
from eformer.checkpoint import SaveOptions, load, save
from support.object_server import serving

SECRET = "SENTINELsentinel+/0123456789"
KEY = base64.b64encode(SECRET.encode()).decode()
numbers = itertools.count()

AWS = {
    "access_key_id": "SENTINELID",
    "secret_access_key": SECRET,
    "session_token": f"token{SECRET}",
    "region": "r",
}
ACCOUNTS = {
    "keys of AWS": ("s3://{}/x", AWS),
    "a token of Google": ("gs://{}/x", {"bearer_token": SECRET}),
    "a key of Azure": ("az://{}/x", {"account_name": "acct", "account_key": KEY}),
    "a SAS of Azure": ("az://{}/x", {"account_name": "acct", "sas_key": f"sv=1&sig={SECRET}"}),
    "a token of Azure": ("az://{}/x", {"account_name": "acct", "token": SECRET}),
    "a connection string": (
        "az://{}/x",
        {"connection_string": f"AccountName=acct;SharedAccessSignature=sv=1&sig={SECRET}"},
    ),
    "a proxy": ("s3://{}/x", {**AWS, "proxy_url": f"http://user:{KEY.strip('=')}@127.0.0.1:1"}),
    "a header": ("s3://{}/x", {**AWS, "default_headers": {"x-secret": SECRET}}),
}
ECHO = (
    "<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message><StringToSign>AWS4 {0}</StringToSign>"
    "<CanonicalRequest>PUT\nx-amz-security-token:{0}\n</CanonicalRequest><Detail>{1}</Detail></Error>"
)


@pytest.fixture(params=ACCOUNTS)
def account(request):
    url, options = ACCOUNTS[request.param]
    return url.format(f"secrets-{next(numbers)}"), options


def shown(error):
    """All that a log would show of an error."""
    return "".join(traceback.format_exception(error)) + repr(error)


def is_clean(text):
    return not any(form in text for form in ("SENTINEL", "sentinel", KEY, KEY.strip("="), "U0VOVElORUx"))


def failures(url, options):
    """Make every kind of call, and return the errors."""
    with checkpoint.store_options(url, retries=0, timeout=5, **options):
        calls = [
            lambda: save({"w": np.ones(3)}, url),
            lambda: load(url),
            lambda: checkpoint.inspect(url),
            lambda: store_at(url).read("a"),
            lambda: store_at(url).kinds(),
            lambda: store_at(url).objects.put("a", b"1"),
            lambda: store_at(url).objects.delete(["a"]),
            lambda: store_at(url).objects.copy("a", "b"),
            lambda: store_at(url).objects.stream("a", [bytes(2**24), bytes(2**24)]).wait(),
        ]
        for call in calls:
            with pytest.raises((OSError, ValueError)) as raised:
                call()
            yield raised.value


def test_a_refused_connection_shows_no_secret(account):
    url, options = account
    for error in failures(url, {**options, "endpoint": "http://127.0.0.1:1"}):
        assert is_clean(shown(error))
        assert url in str(error) or url.removesuffix("/x") in str(error)


@pytest.mark.parametrize("status", [400, 401, 403, 500])
@pytest.mark.sample(4)
def test_a_server_that_repeats_secrets_does_not_get_them_into_messages(account, status):
    url, options = account
    with serving() as server:
        server.refuse_with = status, ECHO.format(SECRET, " ".join(map(str, options.values()))).encode()
        for error in failures(url, {**options, "endpoint": server.url}):
            assert is_clean(shown(error))


def test_settings_that_obstore_refuses_are_not_shown(account):
    url, options = account
    for bad in (
        {"http1_only": SECRET},
        {"pool_idle_timeout": SECRET},
        {"skip_signature": SECRET},
        {"wat": SECRET},
    ):
        with (
            pytest.raises((TypeError, ValueError)) as raised,
            checkpoint.store_options(url, **options, **bad),
        ):
            store_at(url)
        assert is_clean(shown(raised.value)), bad


def test_secrets_of_the_environment_are_not_shown(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SENTINELID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"token{SECRET}")
    url = f"s3://secrets-{next(numbers)}/x"
    with serving() as server:
        server.refuse_with = 403, ECHO.format(SECRET, f"token{SECRET} SENTINELID").encode()
        for error in failures(url, {"endpoint": server.url}):
            assert is_clean(shown(error))


def test_objects_do_not_show_their_settings_and_are_not_pickled(account):
    url, options = account
    with checkpoint.store_options(url, **options) as given:
        store = store_at(url)
    for one in (given, store, store.objects, store.objects._client, SaveOptions(store_options=options)):
        assert is_clean(repr(one))
    for one in (store, store.objects):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(one)


def test_a_checkpoint_and_the_log_hold_no_secret(caplog):
    caplog.set_level(0)
    url = f"s3://secrets-{next(numbers)}/x"
    with serving() as server:
        options = SaveOptions(store_options={**AWS, "endpoint": server.url})
        save({"w": np.ones(3)}, url, options=options, metadata={"step": 1})
        load(url, options={"store_options": options.store_options})
        assert is_clean(json.dumps({key: data.decode("latin-1") for key, data in server.objects.items()}))
        assert "x-amz-security-token" in server.requests[0][2]  # they were used
    assert is_clean(caplog.text)


def test_what_looks_like_a_secret_is_not_shown_even_if_it_is_not_known():
    hide = Redactor()
    for text in (
        "GET https://host/c/k?sv=1&sig=SENTINEL failed",
        "https://user:SENTINEL@host",
        "Authorization: Bearer SENTINEL",
        "x-amz-security-token:SENTINEL",
        "<StringToSign>SENTINEL\nSENTINEL</StringToSign><AWSAccessKeyId>SENTINEL</AWSAccessKeyId>",
    ):
        assert "SENTINEL" not in hide(text)
    assert hide("403 Forbidden: <Code>AccessDenied</Code>") == "403 Forbidden: <Code>AccessDenied</Code>"


def test_short_values_are_not_taken_for_secrets():
    assert Redactor(["any", ""])("any company") == "any company"
