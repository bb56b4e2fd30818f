"""Decide with which settings and credentials a bucket is used: those of the caller, of the URL, of the environment.

obstore reads the environment, too: only what it does not know, or what depends on several of them, is decided here.
"""

from __future__ import annotations

import ipaddress
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eformer._engine.stores.aws_profiles import read_profile
from eformer._engine.stores.redact import secrets_among

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from eformer._engine.stores.aws_profiles import Profile
    from eformer._engine.stores.urls import Address

TIMEOUT = 300.0  # seconds
RETRIES = 10

OWN_OPTIONS = (
    "allow_http",
    "anonymous",
    "connection_string",
    "credential_provider",
    "credentials_path",
    "endpoint",
    "profile",
    "region",
    "retries",
    "signed_payload",
    "single_writer",
    "timeout",
)
CLIENT_OPTIONS = (
    "allow_invalid_certificates",
    "connect_timeout",
    "default_content_type",
    "default_headers",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "read_timeout",
    "root_certificate",
    "user_agent",
)
ONLY_FOR = {
    "profile": "s3",
    "region": "s3",
    "signed_payload": "s3",
    "credentials_path": "gcs",
    "connection_string": "azure",
}
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST")

_OWN_SERVERS = {
    "s3": (".amazonaws.com", ".amazonaws.com.cn"),
    "gcs": (".googleapis.com",),
    "azure": (".core.windows.net", ".core.chinacloudapi.cn", ".core.usgovcloudapi.net"),
}
_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gcs": "GOOGLE_ALLOW_HTTP", "azure": "AZURE_ALLOW_HTTP"}
_AWS = "https://s3.{region}.amazonaws.com"
_KEYS = ("access_key_id", "secret_access_key", "session_token", "token")
_NOBODY = "none"  # a token that is sent as it is: without one obstore asks the machine that it may run on


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Credentials of AWS that do not change. They are given by a function, so that no token of the environment is
    added to them."""

    access_key: str
    secret_key: str
    token: str = ""

    def __call__(self) -> dict[str, Any]:
        return {
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "token": self.token or None,
            "expires_at": None,
        }


@dataclass(frozen=True, slots=True)
class OfBoto3:
    """Credentials of a profile that boto3 has to get; `why` is the setting that makes it so."""

    profile: str
    why: str


@dataclass(frozen=True, slots=True)
class OfGoogleAuth:
    """Credentials of a file, or of the default one, that google-auth has to get."""

    path: str
    why: str


@dataclass(frozen=True, slots=True, repr=False)
class Settings:
    """How the client of a bucket is made. Equal settings share one client.

    config       settings of obstore's store
    client       settings of its HTTP client
    login        where credentials come from, if not from obstore itself
    endpoint     the address of the server, if it was given
    is_own       whether the server is the cloud's own, which is known to honour conditions
    secrets      what must not appear in messages
    """

    config: tuple[tuple[str, Any], ...] = ()
    client: tuple[tuple[str, Any], ...] = ()
    login: Keys | OfBoto3 | OfGoogleAuth | Callable[[], Any] | None = None
    timeout: float = TIMEOUT
    retries: int = RETRIES
    endpoint: str = ""
    is_own: bool = True
    single_writer: bool = False
    secrets: frozenset[str] = frozenset()
    environment: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        names = [name for name, _ in (*self.config, *self.client)]
        return f"<Settings: {', '.join(names)}>"  # without values


def settings_of(address: Address, options: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Return the settings for a bucket. Options win over the URL, and the URL over the environment."""
    for name, cloud in ONLY_FOR.items():
        if name in options and address.cloud != cloud:
            raise ValueError(f"{address.url}: the store option {name} is for {cloud} only")
    decide = {"s3": _s3, "gcs": _gcs, "azure": _azure}[address.cloud]
    config, login, endpoint = decide(address, options, environ)
    others = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    if isinstance(login, Keys):
        others = {name: value for name, value in others.items() if name not in _KEYS}
    client = {name: others.pop(name) for name in CLIENT_OPTIONS if name in others}
    if endpoint and _must_allow_http(address, endpoint, options, environ):
        client["allow_http"] = True
    relevant = {name: value for name, value in environ.items() if name.startswith(_VARIABLES)}
    login = options.get("credential_provider", login)
    secrets = secrets_among({**relevant, **options, **config, **client})
    if isinstance(login, Keys):
        secrets |= {login.access_key, login.secret_key, login.token}
    return Settings(
        config=_items({**config, **others}),
        client=_items(client),
        login=login,
        timeout=_positive(options, "timeout", TIMEOUT),
        retries=int(_positive(options, "retries", RETRIES, least=0)),
        endpoint=endpoint,
        is_own=not endpoint or is_own_server(address, endpoint),
        single_writer=_flag(options, "single_writer"),
        secrets=frozenset(secrets - {""}),
        environment=_items(relevant),
    )


def is_own_server(address: Address, endpoint: str) -> bool:
    return f".{_host(endpoint)}".endswith(_OWN_SERVERS[address.cloud])


_Decided = tuple[dict[str, Any], "Keys | OfBoto3 | OfGoogleAuth | None", str]

# ------------------------------------------------------------------------------------------------ AWS


def _s3(address: Address, options: Mapping[str, Any], environ: Mapping[str, str]) -> _Decided:
    profile = read_profile(str(options.get("profile", "")), environ)
    in_environ = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    region = str(options.get("region") or address.region or in_environ or profile.region)
    endpoint = str(options.get("endpoint") or address.endpoint or _aws_endpoint(environ, profile.endpoint))
    endpoint = endpoint.replace("{region}", region or "us-east-1").rstrip("/")
    config: dict[str, Any] = {"region": region} if region else {}
    if endpoint:
        _check_endpoint(address, endpoint)
        config["aws_endpoint_url_s3"] = endpoint  # which wins over all others in obstore
    if "signed_payload" in options:
        config["unsigned_payload"] = not _flag(options, "signed_payload")
    elif "AWS_UNSIGNED_PAYLOAD" not in environ and "unsigned_payload" not in options:
        config["unsigned_payload"] = not endpoint.startswith("http://") or _is_loopback(endpoint)
    if _flag(options, "anonymous"):
        config["skip_signature"] = True
    return config, _aws_login(options, environ, profile), endpoint


def _aws_login(
    options: Mapping[str, Any], environ: Mapping[str, str], profile: Profile
) -> Keys | OfBoto3 | None:
    """Choose credentials in the order of AWS's own clients; None leaves them to obstore."""
    if _flag(options, "anonymous"):
        return None
    if "access_key_id" in options:
        return _own_keys(options)
    if not options.get("profile") and _has_credentials(environ):
        return None
    if profile.needs_boto3:
        return OfBoto3(profile.name, profile.needs_boto3)
    return Keys(profile.access_key, profile.secret_key, profile.token) if profile.access_key else None


def _own_keys(options: Mapping[str, Any]) -> Keys:
    if "secret_access_key" not in options:
        raise ValueError("the store option access_key_id needs secret_access_key")
    token = options.get("session_token") or options.get("token") or ""
    return Keys(str(options["access_key_id"]), str(options["secret_access_key"]), str(token))


def _aws_endpoint(environ: Mapping[str, str], of_profile: str) -> str:
    if is_true(environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "")):
        return _AWS
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((environ[name] for name in names if environ.get(name)), of_profile)


def _has_credentials(environ: Mapping[str, str]) -> bool:
    """Tell whether the environment has what comes before profiles: keys, a web identity, or no signatures at all."""
    if environ.get("AWS_ACCESS_KEY_ID") or environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return True
    return is_true(environ.get("AWS_SKIP_SIGNATURE", ""))


# --------------------------------------------------------------------------------------------- Google


def _gcs(address: Address, options: Mapping[str, Any], environ: Mapping[str, str]) -> _Decided:
    config: dict[str, Any] = {}
    emulator = "" if address.endpoint or "endpoint" in options else _emulator(environ)
    given = options.get("endpoint") or address.endpoint or emulator or environ.get("GOOGLE_BASE_URL")
    endpoint = str(given or "")
    endpoint = endpoint.rstrip("/")
    if endpoint:
        _check_endpoint(address, endpoint)
        config["base_url"] = endpoint
    has_own = {"bearer_token", "service_account", "service_account_key", "application_credentials"} & set(
        options
    )
    if has_own or "credential_provider" in options:
        return config, None, endpoint
    if "credentials_path" in options:
        login = _google_file(str(options["credentials_path"]), config)
        return config, login, endpoint
    if _flag(options, "anonymous") or emulator or is_true(environ.get("GOOGLE_SKIP_SIGNATURE", "")):
        config |= {"skip_signature": True, "bearer_token": _NOBODY}
        return config, None, endpoint
    names = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")
    if any(environ.get(name) for name in (*names, "GOOGLE_BEARER_TOKEN")):
        return config, None, endpoint
    path = environ.get("GOOGLE_APPLICATION_CREDENTIALS") or _default_credentials(environ)
    return config, _google_file(path, config) if path else None, endpoint


def _emulator(environ: Mapping[str, str]) -> str:
    host = environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    return f"http://{host}" if host and "://" not in host else host


def _default_credentials(environ: Mapping[str, str]) -> str:
    """Return the file of `gcloud auth application-default login`, if it is there."""
    home = environ.get("HOME") or os.path.expanduser("~")
    folder = environ.get("CLOUDSDK_CONFIG") or os.path.join(home, ".config", "gcloud")
    path = os.path.join(folder, "application_default_credentials.json")
    return path if os.path.isfile(path) else ""


def _google_file(path: str, config: dict[str, Any]) -> OfGoogleAuth | None:
    """Let obstore read a file of credentials if it knows its kind, else google-auth."""
    try:
        with open(path, "rb") as file:
            kind = json.load(file).get("type", "service_account")
    except (ValueError, AttributeError):  # whose messages may show the file
        raise ValueError(f"{path} is not a file of Google credentials") from None
    except OSError as error:
        raise type(error)(f"the Google credentials at {path} cannot be read: {error.strerror}") from None
    if kind == "service_account":
        config["service_account"] = path
        return None
    if kind == "authorized_user":
        config["application_credentials"] = path
        return None
    return OfGoogleAuth(path, str(kind))


# ---------------------------------------------------------------------------------------------- Azure


def _azure(address: Address, options: Mapping[str, Any], environ: Mapping[str, str]) -> _Decided:
    given = options.get("connection_string") or environ.get("AZURE_STORAGE_CONNECTION_STRING") or ""
    told = _connection(str(given))
    in_environ = environ.get("AZURE_STORAGE_ACCOUNT_NAME") or environ.get("AZURE_STORAGE_ACCOUNT")
    account = str(
        options.get("account_name") or address.account or in_environ or told.get("account_name", "")
    )
    is_emulated = is_true(str(options.get("use_emulator", environ.get("AZURE_STORAGE_USE_EMULATOR", ""))))
    is_emulated = is_emulated or "use_emulator" in told
    if not account and not is_emulated:
        raise ValueError(
            f"{address.url}: the name of the storage account is needed; use "
            f"abfss://{address.bucket}@ACCOUNT.dfs.core.windows.net/path, set AZURE_STORAGE_ACCOUNT_NAME, or give the "
            "store option account_name"
        )
    config: dict[str, Any] = {"account_name": account} if account else {}
    if told.get("account_name", account) == account:  # else they are those of another account
        config |= told
    if not told and environ.get("AZURE_STORAGE_KEY") and "AZURE_STORAGE_ACCOUNT_KEY" not in environ:
        config["account_key"] = environ["AZURE_STORAGE_KEY"]
    variables = environ.get("AZURE_STORAGE_ENDPOINT") or environ.get("AZURE_ENDPOINT")
    endpoint = str(options.get("endpoint") or address.endpoint or variables or config.get("endpoint", ""))
    endpoint = endpoint.rstrip("/")
    if endpoint:
        _check_endpoint(address, endpoint)
        config["endpoint"] = endpoint
    if _flag(options, "anonymous"):
        config["skip_signature"] = True
    if is_emulated:
        config["use_emulator"] = True
    return config, None, endpoint or ("http://127.0.0.1:10000" if is_emulated else "")


def _connection(text: str) -> dict[str, Any]:
    """Parse a connection string: name=value, separated by semicolons."""
    parts = {name.lower(): value for name, _, value in (part.partition("=") for part in text.split(";"))}
    if is_true(parts.get("usedevelopmentstorage", "")):
        return {"use_emulator": True}
    account, suffix = parts.get("accountname", ""), parts.get("endpointsuffix", "")
    endpoint = parts.get("blobendpoint", "")
    if not endpoint and suffix and account:
        endpoint = f"{parts.get('defaultendpointsprotocol', 'https')}://{account}.blob.{suffix}"
    found = {
        "account_name": account,
        "account_key": parts.get("accountkey", ""),
        "sas_key": parts.get("sharedaccesssignature", "").lstrip("?"),
        "endpoint": endpoint,
    }
    return {name: value for name, value in found.items() if value}


# --------------------------------------------------------------------------------------------- values


def is_true(text: str) -> bool:
    return text.strip().lower() in ("true", "1", "yes", "on")


def _flag(options: Mapping[str, Any], name: str) -> bool:
    """Return an option that is true or false; from a command line it comes as text."""
    value = options.get(name, False)
    if isinstance(value, bool):
        return value
    if str(value).strip().lower() not in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        raise ValueError(f"the store option {name} is true or false")
    return is_true(str(value))


def _positive(options: Mapping[str, Any], name: str, default: float, least: float = 1e-3) -> float:
    try:
        value = float(options.get(name, default))
    except (TypeError, ValueError):
        value = -1.0
    if not least <= value < 1e9:
        raise ValueError(f"the store option {name} is a number, at least {least:g}")
    return value


def _check_endpoint(address: Address, endpoint: str) -> None:
    """Refuse an endpoint without its scheme, and one that carries secrets. Neither is shown."""
    try:
        parts = urlsplit(endpoint)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        is_sound = False
    if not is_sound or "?" in endpoint or "#" in endpoint:
        raise ValueError(
            f"{address.url}: the endpoint has to look like https://host or https://host:port, without credentials"
        )


def _must_allow_http(
    address: Address, endpoint: str, options: Mapping[str, Any], environ: Mapping[str, str]
) -> bool:
    """Tell whether the endpoint is one without encryption. Raise ValueError if nobody has allowed that."""
    if not endpoint.startswith("http://"):
        return False
    variable = _ALLOW_HTTP[address.cloud]
    is_emulator = address.cloud == "gcs" and endpoint == _emulator(environ)
    is_allowed = _flag(options, "allow_http") or is_true(environ.get(variable, ""))
    if is_emulator or is_allowed or _is_loopback(endpoint):
        return True
    raise ValueError(
        f"{address.url}: the endpoint http://{_host(endpoint)} is not encrypted; use https, or allow it by "
        f"{variable}=true or the store option allow_http"
    )


def _host(endpoint: str) -> str:
    return urlsplit(endpoint).hostname or ""


def _is_loopback(endpoint: str) -> bool:
    host = _host(endpoint)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _items(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return settings as a value that can be compared. Headers are the only ones that have several values."""
    plain = {
        name: tuple(sorted(value.items())) if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return tuple(sorted(plain.items()))
