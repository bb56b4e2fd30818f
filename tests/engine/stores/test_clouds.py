"""URLs of buckets, and the settings and credentials that they are used with: all without a network."""

import json
import sys

import pytest

from eformer._engine.stores import clouds
from eformer._engine.stores.locate import store_at
from eformer._engine.stores.settings import Keys, OfBoto3, OfGoogleAuth, settings_of
from eformer._engine.stores.urls import is_bucket_url, parse_url

ACCOUNT = "0123456789abcdef0123456789abcdef"

# ------------------------------------------------------------------------------------------------ URLs


@pytest.mark.parametrize(
    ("url", "cloud", "bucket", "path"),
    [
        ("s3://b/a/c", "s3", "b", "a/c"),
        ("s3a://my.bucket_1/a/", "s3", "my.bucket_1", "a"),
        ("s3://b", "s3", "b", ""),
        ("s3://b/a b%20c", "s3", "b", "a b%20c"),
        ("gs://b/x", "gcs", "b", "x"),
        ("gcs://b/x", "gcs", "b", "x"),
        ("az://c/x", "azure", "c", "x"),
        ("abfs://c/x", "azure", "c", "x"),
        ("abfss://c@acct.dfs.core.windows.net/x/y", "azure", "c", "x/y"),
        ("https://s3.amazonaws.com/b/x", "s3", "b", "x"),
        ("https://s3.eu-west-1.amazonaws.com/b/x", "s3", "b", "x"),
        ("https://b.s3.amazonaws.com/x", "s3", "b", "x"),
        ("https://my.b.s3.us-gov-west-1.amazonaws.com/x%20y", "s3", "my.b", "x y"),
        ("https://b.s3-us-west-2.amazonaws.com/x", "s3", "b", "x"),
        ("https://b.s3.dualstack.us-west-2.amazonaws.com/x", "s3", "b", "x"),
        ("https://b.s3.cn-north-1.amazonaws.com.cn/x", "s3", "b", "x"),
        (f"https://{ACCOUNT}.r2.cloudflarestorage.com/b/x", "s3", "b", "x"),
        (f"https://b.{ACCOUNT}.eu.r2.cloudflarestorage.com/x", "s3", "b", "x"),
        ("https://storage.googleapis.com/b/x", "gcs", "b", "x"),
        ("https://b.storage.googleapis.com/x", "gcs", "b", "x"),
        ("https://acct.blob.core.windows.net/c/x", "azure", "c", "x"),
        ("https://acct.dfs.core.windows.net/c/x", "azure", "c", "x"),
        ("memory://a/b", "memory", "", "a/b"),
    ],
)
def test_a_url_names_a_bucket_and_a_path(url, cloud, bucket, path):
    assert is_bucket_url(url)
    found = parse_url(url)
    assert (found.cloud, found.bucket, found.path) == (cloud, bucket, path)


@pytest.mark.parametrize(
    ("url", "endpoint", "region"),
    [
        ("https://s3.eu-west-1.amazonaws.com/b/x", "https://s3.eu-west-1.amazonaws.com", "eu-west-1"),
        ("https://b.s3.us-west-2.amazonaws.com/x", "https://s3.us-west-2.amazonaws.com", "us-west-2"),
        ("https://b.s3.amazonaws.com/x", "https://s3.{region}.amazonaws.com", ""),
        (
            f"https://b.{ACCOUNT}.eu.r2.cloudflarestorage.com/x",
            f"https://{ACCOUNT}.eu.r2.cloudflarestorage.com",
            "auto",
        ),
        ("abfss://c@acct.dfs.core.windows.net/x", "https://acct.blob.core.windows.net", ""),
        ("https://acct.blob.core.usgovcloudapi.net/c", "https://acct.blob.core.usgovcloudapi.net", ""),
    ],
)
def test_a_url_may_name_the_server(url, endpoint, region):
    found = parse_url(url)
    assert (found.endpoint, found.region) == (endpoint, region)


@pytest.mark.parametrize("url", ["s3://b/x", "gs://b/x", "az://c/x", "https://b.s3.amazonaws.com/x"])
def test_the_url_in_messages_is_the_one_that_was_given(url):
    found = parse_url(url)
    assert f"{found.url}/{found.path}" == url


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/x?X-Amz-Signature=SENTINEL",
        "s3://b/x#SENTINEL",
        "https://acct.blob.core.windows.net/c/x?sv=1&sig=SENTINEL",
        "https://user:SENTINEL@b.s3.amazonaws.com/x",
        "https://user:SENTINEL@example.com/x",
        "s3://key:SENTINEL@b/x",
        "az://key:SENTINEL@c/x",
        "abfss://c:SENTINEL@acct.dfs.core.windows.net/x",
        "gs://SENTINEL@b/x?a",
    ],
)
def test_a_url_with_what_may_be_a_secret_is_refused_without_repeating_it(url):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        store_at(url)
    assert "SENTINEL" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "expected s3://bucket/path"),
        ("s3:///x", "expected s3://bucket/path"),
        ("s3://b/../x", "has no empty names"),
        ("gs://b/a//x", "has no empty names"),
        ("https://storage.googleapis.com/b/%2e%2e/x", "has no empty names"),
        ("abfss://c@acct/x", "abfss://container@account"),
        ("az://c@acct.dfs.core.windows.net/x", "az://container/path"),
        ("https://s3.amazonaws.com/", "name of a bucket"),
        ("http://b.s3.amazonaws.com/x", "expected https"),
        ("https://b.s3.amazonaws.com:8443/x", "neither a port"),
        (
            "https://minio.example.com/b/x",
            r"minio\.example\.com is not a server of.*s3://bucket/path.*endpoint",
        ),
        ("http://127.0.0.1:9000/b/x", "AWS_ENDPOINT_URL"),
        ("https://b.s3-accelerate.amazonaws.com/x", "is not a server"),
    ],
)
def test_a_url_that_names_no_bucket_is_refused(url, message):
    with pytest.raises(ValueError, match=message):
        parse_url(url)


@pytest.mark.parametrize("path", ["run/x", "/run/x", "file:///x", "s3:/b", "hf://org/model", "C:\\x"])
def test_other_paths_are_not_urls_of_buckets(path):
    assert not is_bucket_url(path)


# ------------------------------------------------------------------------------------------------- AWS


@pytest.fixture
def home(tmp_path):
    (tmp_path / ".aws").mkdir()
    return tmp_path


@pytest.fixture
def decide(home):
    """Return the settings for a URL, options and an environment."""

    def decide(url, options=(), **environ):
        return settings_of(parse_url(url), dict(options), {"HOME": str(home), **environ})

    return decide


def config_of(settings):
    return dict(settings.config)


def test_the_environment_of_aws_is_left_to_obstore(decide):
    found = decide(
        "s3://b/x", AWS_ACCESS_KEY_ID="AKID", AWS_SECRET_ACCESS_KEY="secret", AWS_REGION="eu-west-1"
    )
    assert found.login is None
    assert found.is_own
    assert config_of(found) == {"region": "eu-west-1", "unsigned_payload": True}


@pytest.mark.parametrize(
    ("environ", "endpoint"),
    [
        ({"AWS_ENDPOINT_URL": "https://a"}, "https://a"),
        ({"AWS_ENDPOINT_URL": "https://a", "AWS_ENDPOINT_URL_S3": "https://b/"}, "https://b"),
        ({"AWS_ENDPOINT": "https://c"}, "https://c"),
        (
            {"AWS_ENDPOINT_URL": "https://a", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
            "https://s3.us-east-1.amazonaws.com",
        ),
    ],
)
def test_the_endpoint_comes_from_the_environment(decide, environ, endpoint):
    found = decide("s3://b/x", **environ)
    assert config_of(found)["aws_endpoint_url_s3"] == endpoint
    assert found.is_own == endpoint.endswith("amazonaws.com")


def test_an_option_wins_over_the_url_and_the_url_over_the_environment(decide):
    url, environ = (
        "https://b.s3.eu-west-1.amazonaws.com/x",
        {"AWS_ENDPOINT_URL_S3": "https://minio", "AWS_REGION": "x"},
    )
    found = config_of(decide(url, **environ))
    assert (found["aws_endpoint_url_s3"], found["region"]) == (
        "https://s3.eu-west-1.amazonaws.com",
        "eu-west-1",
    )
    found = config_of(decide(url, {"endpoint": "https://other", "region": "y"}, **environ))
    assert (found["aws_endpoint_url_s3"], found["region"]) == ("https://other", "y")
    found = config_of(decide("https://b.s3.amazonaws.com/x", AWS_REGION="eu-north-1"))
    assert found["aws_endpoint_url_s3"] == "https://s3.eu-north-1.amazonaws.com"


@pytest.mark.parametrize(
    ("endpoint", "options", "environ", "unsigned"),
    [
        ("https://minio", {}, {}, True),
        ("http://127.0.0.1:9000", {}, {}, True),
        ("http://[::1]:9000", {}, {}, True),
        ("http://minio:9000", {}, {"AWS_ALLOW_HTTP": "true"}, False),
        ("https://minio", {"signed_payload": True}, {}, False),
        ("http://minio:9000", {"signed_payload": "false", "allow_http": True}, {}, True),
        ("https://minio", {}, {"AWS_UNSIGNED_PAYLOAD": "false"}, None),
    ],
)
def test_payloads_are_not_signed_where_nobody_can_change_them(decide, endpoint, options, environ, unsigned):
    found = decide("s3://b/x", {"endpoint": endpoint, **options}, **environ)
    assert config_of(found).get("unsigned_payload") == unsigned
    assert dict(found.client).get("allow_http", False) == endpoint.startswith("http://")


def test_a_server_without_encryption_has_to_be_allowed(decide):
    for environ in ({}, {"AWS_ALLOW_HTTP": "false"}):
        with pytest.raises(
            ValueError, match=r"s3://b: the endpoint http://minio is not encrypted.*AWS_ALLOW_HTTP"
        ):
            decide("s3://b/x", AWS_ENDPOINT_URL="http://minio:9000", **environ)


@pytest.mark.parametrize(
    "endpoint", ["minio:9000", "ftp://x", "https://u:SENTINEL@x", "https://x?SENTINEL", "https://["]
)
def test_an_endpoint_that_is_none_is_refused_and_not_shown(decide, endpoint):
    with pytest.raises(ValueError, match="has to look like https://host") as raised:
        decide("s3://b/x", {"endpoint": endpoint})
    assert "SENTINEL" not in str(raised.value)


def test_a_profile_gives_keys_region_and_endpoint(decide, home):
    (home / ".aws/config").write_text(
        "[default]\nregion = a\n[profile lab]\nregion = eu-west-1\nservices = mine\n"
        "[services mine]\ns3 =\n  endpoint_url = https://minio\n"
    )
    (home / ".aws/credentials").write_text(
        "[default]\naws_access_key_id=D\naws_secret_access_key=DS\n"
        "[lab]\naws_access_key_id = L\naws_secret_access_key = LS%x\naws_session_token = LT\n"
    )
    default = decide("s3://b/x")
    assert default.login == Keys("D", "DS")
    assert config_of(default)["region"] == "a"
    for found in (decide("s3://b/x", AWS_PROFILE="lab"), decide("s3://b/x", {"profile": "lab"})):
        assert found.login == Keys("L", "LS%x", "LT")
        assert config_of(found)["region"] == "eu-west-1"
        assert config_of(found)["aws_endpoint_url_s3"] == "https://minio"


def test_keys_of_the_environment_come_before_profiles_except_for_one_that_is_asked_for(decide, home):
    (home / ".aws/credentials").write_text("[lab]\naws_access_key_id=L\naws_secret_access_key=LS\n")
    environ = {"AWS_ACCESS_KEY_ID": "E", "AWS_SECRET_ACCESS_KEY": "ES", "AWS_SESSION_TOKEN": "ET"}
    assert decide("s3://b/x", AWS_PROFILE="lab", **environ).login is None
    asked = decide("s3://b/x", {"profile": "lab"}, **environ)
    assert asked.login == Keys("L", "LS")
    assert asked.login()["token"] is None  # not that of other keys
    assert decide("s3://b/x", AWS_PROFILE="lab", AWS_WEB_IDENTITY_TOKEN_FILE="/token").login is None


def test_other_places_of_the_files_are_found(decide, home):
    (home / "c").write_text("[profile p]\nregion=r\n")
    (home / "k").write_text("[p]\naws_access_key_id=K\naws_secret_access_key=S\n")
    files = {"AWS_CONFIG_FILE": "~/c", "AWS_SHARED_CREDENTIALS_FILE": str(home / "k")}
    found = decide("s3://b/x", AWS_PROFILE="p", **files)
    assert (found.login, config_of(found)["region"]) == (Keys("K", "S"), "r")


@pytest.mark.parametrize(
    "line",
    [
        "role_arn = arn:x\nsource_profile = y",
        "sso_session = x",
        "sso_start_url = x",
        "credential_process = x",
    ],
)
def test_a_profile_that_needs_requests_is_left_to_boto3(decide, home, line):
    (home / ".aws/config").write_text(f"[profile lab]\n{line}\n")
    login = decide("s3://b/x", AWS_PROFILE="lab").login
    assert login == OfBoto3("lab", line.partition(" ")[0])


def test_without_boto3_it_is_named(decide, monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(
        ImportError, match=r"s3://b: the AWS profile 'lab' uses sso_session.*pip install boto3"
    ):
        clouds._provider("s3://b", OfBoto3("lab", "sso_session"))


def test_a_profile_that_is_not_there_is_an_error_and_the_default_is_not(decide):
    assert decide("s3://b/x").login is None
    with pytest.raises(ValueError, match=r"'nope' is neither in .*\.aws/config nor in .*\.aws/credentials"):
        decide("s3://b/x", AWS_PROFILE="nope")


@pytest.mark.parametrize("text", ["SENTINEL", "[default]\nSENTINEL", "[default\nx=SENTINEL", "\udcff"])
def test_a_damaged_file_of_profiles_is_not_shown(decide, home, text):
    (home / ".aws/credentials").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"\.aws/credentials cannot be read") as raised:
        decide("s3://b/x")
    assert "SENTINEL" not in str(raised.value)


def test_keys_as_options_are_used_alone(decide):
    options = {"access_key_id": "O", "secret_access_key": "OS"}
    found = decide("s3://b/x", options, AWS_ACCESS_KEY_ID="E", AWS_SESSION_TOKEN="ET")
    assert found.login == Keys("O", "OS")
    assert "access_key_id" not in config_of(found)
    with pytest.raises(ValueError, match="needs secret_access_key"):
        decide("s3://b/x", {"access_key_id": "O"})


def test_public_buckets_are_read_without_credentials(decide, home):
    (home / ".aws/credentials").write_text("[default]\naws_access_key_id=D\naws_secret_access_key=DS\n")
    found = decide("s3://b/x", {"anonymous": True})
    assert (found.login, config_of(found)["skip_signature"]) == (None, True)
    assert decide("s3://b/x", AWS_SKIP_SIGNATURE="true").login is None  # which obstore reads itself
    assert config_of(decide("gs://b/x", {"anonymous": "true"})) == {
        "skip_signature": True,
        "bearer_token": "none",
    }
    assert config_of(decide("az://c/x", {"anonymous": True, "account_name": "a"}))["skip_signature"] is True


# ---------------------------------------------------------------------------------------------- Google


@pytest.mark.parametrize("kind", ["service_account", "authorized_user", "external_account"])
@pytest.mark.parametrize("how", ["option", "variable", "gcloud", "gcloud elsewhere"])
def test_google_credentials_are_found(decide, home, kind, how):
    folder = home / (".config/gcloud" if how == "gcloud" else "else")
    folder.mkdir(parents=True)
    path = folder / "application_default_credentials.json"
    path.write_text(json.dumps({"type": kind}))
    options = {"credentials_path": path} if how == "option" else {}
    environ = {
        "variable": {"GOOGLE_APPLICATION_CREDENTIALS": str(path)},
        "gcloud elsewhere": {"CLOUDSDK_CONFIG": str(folder)},
    }.get(how, {})
    found = decide("gs://b/x", options, **environ)
    names = {"service_account": "service_account", "authorized_user": "application_credentials"}
    assert config_of(found) == ({names[kind]: str(path)} if kind in names else {})
    assert found.login == (None if kind in names else OfGoogleAuth(str(path), kind))
    assert found.is_own


def test_without_google_auth_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(
        ImportError, match=r"/k\.json are of the kind external_account.*pip install google-auth"
    ):
        clouds._provider("gs://b", OfGoogleAuth("/k.json", "external_account"))


@pytest.mark.parametrize("text", ["SENTINEL", '["SENTINEL"]', "{"])
def test_a_file_without_credentials_is_refused_and_not_shown(decide, tmp_path, text):
    (tmp_path / "k.json").write_text(text)
    with pytest.raises(ValueError, match=r"k\.json is not a file of Google credentials") as raised:
        decide("gs://b/x", {"credentials_path": tmp_path / "k.json"})
    assert "SENTINEL" not in str(raised.value)
    with pytest.raises(FileNotFoundError, match=r"/no/such\.json cannot be read"):
        decide("gs://b/x", GOOGLE_APPLICATION_CREDENTIALS="/no/such.json")


@pytest.mark.parametrize("host", ["127.0.0.1:4443", "http://127.0.0.1:4443", "http://gcs:4443/"])
def test_the_emulator_of_google_is_used_without_credentials(decide, host):
    found = decide("gs://b/x", STORAGE_EMULATOR_HOST=host, GOOGLE_APPLICATION_CREDENTIALS="/no/such.json")
    assert config_of(found)["base_url"] == "http://" + host.removeprefix("http://").rstrip("/")
    assert config_of(found)["bearer_token"] == "none"
    assert dict(found.client)["allow_http"]
    assert not found.is_own


def test_a_url_of_google_is_not_the_emulator(decide):
    found = decide("https://storage.googleapis.com/b/x", STORAGE_EMULATOR_HOST="127.0.0.1:4443")
    assert config_of(found) == {"base_url": "https://storage.googleapis.com"}
    assert found.is_own


# ----------------------------------------------------------------------------------------------- Azure

CONNECTION = (
    "DefaultEndpointsProtocol=https;AccountName=acct;AccountKey=a2V5==;EndpointSuffix=core.windows.net"
)


def test_a_connection_string_names_the_account(decide):
    for found in (
        decide("az://c/x", AZURE_STORAGE_CONNECTION_STRING=CONNECTION),
        decide("az://c/x", {"connection_string": CONNECTION}),
    ):
        assert config_of(found) == {
            "account_name": "acct",
            "account_key": "a2V5==",
            "endpoint": "https://acct.blob.core.windows.net",
        }
        assert found.is_own


def test_a_connection_string_of_another_account_is_not_used(decide):
    found = decide("abfss://c@other.dfs.core.windows.net/x", AZURE_STORAGE_CONNECTION_STRING=CONNECTION)
    assert config_of(found) == {"account_name": "other", "endpoint": "https://other.blob.core.windows.net"}


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (
            "BlobEndpoint=https://acct.blob.core.windows.net/;AccountName=acct;SharedAccessSignature=?sv=1&sig=x%3D",
            {"sas_key": "sv=1&sig=x%3D", "endpoint": "https://acct.blob.core.windows.net"},
        ),
        (
            "AccountName=acct;AccountKey=k;BlobEndpoint=http://127.0.0.1:10000/acct",
            {"account_key": "k", "endpoint": "http://127.0.0.1:10000/acct"},
        ),
    ],
)
def test_other_connection_strings(decide, text, config):
    found = decide("az://c/x", AZURE_STORAGE_CONNECTION_STRING=text)
    assert config_of(found) == {"account_name": "acct", **config}
    assert found.is_own == ("127" not in text)


@pytest.mark.parametrize("name", ["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"])
def test_the_account_comes_from_the_environment(decide, name):
    found = decide("az://c/x", **{name: "acct", "AZURE_STORAGE_KEY": "k"})
    assert config_of(found) == {"account_name": "acct", "account_key": "k"}


def test_an_account_is_needed(decide):
    with pytest.raises(
        ValueError, match=r"az://c: the name of the storage account.*AZURE_STORAGE_ACCOUNT_NAME"
    ):
        decide("az://c/x")


def test_the_emulator_of_azure(decide):
    for found in (
        decide("az://c/x", AZURE_STORAGE_CONNECTION_STRING="UseDevelopmentStorage=true"),
        decide("az://c/x", AZURE_STORAGE_USE_EMULATOR="true"),
        decide("az://c/x", {"use_emulator": True}),
    ):
        assert config_of(found) == {"use_emulator": True}
        assert not found.is_own


# --------------------------------------------------------------------------------------------- options


def test_options_of_obstore_go_to_its_store_or_its_client(decide):
    found = decide(
        "s3://b/x",
        {"virtual_hosted_style_request": True, "proxy_url": "http://p", "timeout": 7, "retries": "2"},
    )
    assert config_of(found)["virtual_hosted_style_request"] is True
    assert dict(found.client) == {"proxy_url": "http://p"}
    assert (found.timeout, found.retries) == (7, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "timeout is a number"),
        ({"timeout": "soon"}, "timeout is a number"),
        ({"retries": -1}, "retries is a number"),
        ({"anonymous": "perhaps"}, "anonymous is not a flag, expected true or false"),
        ({"credentials_path": "x"}, "credentials_path is for gcs only"),
        ({"connection_string": "x"}, "connection_string is for azure only"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_an_error(decide, options, message):
    with pytest.raises(ValueError, match=message):
        decide("s3://b/x", options)
