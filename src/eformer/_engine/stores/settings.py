"""Decide with which settings and credentials a bucket is used: those of the caller, of the URL, of the environment.

obstore reads the environment, too: only what it does not know, or what depends on several of them, is decided here.
"""

from __future__ import annotations

import ipaddress
import json
import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eformer._engine.stores.aws_profiles import Keys, OfBoto3, read_profile
from eformer._engine.stores.redact import secrets_among

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from eformer._engine.stores.aws_profiles import Profile
    from eformer._engine.stores.urls import Address

TIMEOUT = 300.0  # seconds
RETRIES = 10


STORES = {"s3": "S3Store", "gcs": "GCSStore", "azure": "AzureStore"}
_ALLOW_HTTP = {"s3": "AWS_ALLOW_HTTP", "gcs": "GOOGLE_ALLOW_HTTP", "azure": "AZURE_ALLOW_HTTP"}
_OWN_SERVERS = {
    "s3": (".amazonaws.com", ".amazonaws.com.cn"),
    "gcs": (".googleapis.com",),
    "azure": (".core.windows.net", ".core.chinacloudapi.cn", ".core.usgovcloudapi.net"),
}

# Options that eformer itself understands: of one cloud, and of all.
_OF_ONE = {
    "s3": ("profile", "region", "signed_payload"),
    "gcs": ("credentials_path",),
    "azure": ("connection_string",),
}
_OF_ALL = (
    "allow_http",
    "anonymous",
    "credential_provider",
    "endpoint",
    "retries",
    "single_writer",
    "timeout",
)
_OWN_OPTIONS = sorted({*_OF_ALL, *(name for names in _OF_ONE.values() for name in names)})
_CLIENT_OPTIONS = (
    "allow_invalid_certificates, connect_timeout, default_content_type, default_headers, http1_only, "
    "http2_keep_alive_interval, http2_keep_alive_timeout, http2_keep_alive_while_idle, http2_only, pool_idle_timeout, "
    "pool_max_idle_per_host, proxy_ca_certificate, proxy_excludes, proxy_url, randomize_addresses, read_timeout, "
    "root_certificate, user_agent"
)
_CLIENT = _CLIENT_OPTIONS.split(", ")
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST")
_AWS = "https://s3.{region}.amazonaws.com"
_KEYS = ("access_key_id", "secret_access_key", "session_token", "token")
# Options that name credentials of Google to obstore itself.
_GOOGLE = (
    "bearer_token",
    "service_account",
    "service_account_key",
    "application_credentials",
    "credential_provider",
)
_NOBODY = "none"  # a token that is sent as it is: without one obstore asks the machine that it may run on


@cache
def is_for(cloud: str, name: str) -> bool:
    """Tell whether an option is one of this cloud. obstore is asked for those that it alone knows; it sends nothing."""
    if name in _OWN_OPTIONS or name in _CLIENT:
        return name in (*_OF_ALL, *_CLIENT, *_OF_ONE[cloud])
    from obstore import exceptions, store  # late: it is needed for buckets only

    try:
        getattr(store, STORES[cloud])("bucket", config={name: ""})
    except exceptions.UnknownConfigurationKeyError:
        return False
    except Exception:  # noqa: BLE001  it is known, and needs others
        return True
    return True


def require_known(url: str, names: Iterable[str]) -> None:
    """Raise TypeError for an option that no cloud has."""
    for name in names:
        if not any(is_for(cloud, name) for cloud in STORES):
            raise TypeError(f"{url or 'all buckets'}: there is no store option {name!r}. {known(*STORES)}")


def known(*clouds: str) -> str:
    """Name the options, for messages."""
    return (
        f"Store options are {', '.join(_OWN_OPTIONS)}; those of obstore's client, {_CLIENT_OPTIONS}; and "
        f"those of its {' and '.join(STORES[cloud] for cloud in clouds)}."
    )


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
    for cloud, names in _OF_ONE.items():
        for name in names:
            if name in options and address.cloud != cloud:
                raise ValueError(f"{address.url}: the store option {name} is for {cloud} only")
    decide = {"s3": _s3, "gcs": _gcs, "azure": _azure}[address.cloud]
    config, login, endpoint = decide(address, options, environ)
    config = {name: value for name, value in config.items() if value not in ("", None)}
    others = {name: value for name, value in options.items() if name not in _OWN_OPTIONS}
    if isinstance(login, Keys):
        others = {name: value for name, value in others.items() if name not in _KEYS}
    client = {name: others.pop(name) for name in _CLIENT if name in others}
    if _must_allow_http(address, endpoint, options, environ):
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
        is_own=not endpoint or f".{_host(endpoint)}".endswith(_OWN_SERVERS[address.cloud]),
        single_writer=_flag(options, "single_writer"),
        secrets=frozenset(secrets - {""}),
        environment=_items(relevant),
    )


# Settings of obstore, of which empty ones are left out; where credentials come from; and the endpoint.
_Decided = tuple[dict[str, Any], "Keys | OfBoto3 | OfGoogleAuth | None", str]

# ------------------------------------------------------------------------------------------------ AWS


def _s3(address: Address, options: Mapping[str, Any], environ: Mapping[str, str]) -> _Decided:
    profile = read_profile(str(options.get("profile", "")), environ)
    in_environ = environ.get("AWS_REGION"), environ.get("AWS_DEFAULT_REGION")
    region = _first(options.get("region"), address.region, *in_environ, profile.region)
    given = _first(options.get("endpoint"), address.endpoint, _aws_endpoint(environ, profile.endpoint))
    endpoint = _checked(address, given.replace("{region}", region or "us-east-1"))
    unsigned: bool | None = None
    if "signed_payload" in options:
        unsigned = not _flag(options, "signed_payload")
    elif "AWS_UNSIGNED_PAYLOAD" not in environ and "unsigned_payload" not in options:
        unsigned = not endpoint.startswith("http://") or _is_loopback(endpoint)
    config = {
        "region": region,
        "aws_endpoint_url_s3": endpoint,  # which wins over all others in obstore
        "unsigned_payload": unsigned,
        "skip_signature": _flag(options, "anonymous") or None,
    }
    return config, _aws_login(options, environ, profile), endpoint


def _aws_login(
    options: Mapping[str, Any], environ: Mapping[str, str], profile: Profile
) -> Keys | OfBoto3 | None:
    """Choose credentials in the order of AWS's own clients; None leaves them to obstore."""
    if _flag(options, "anonymous"):
        return None
    if "access_key_id" in options:
        if "secret_access_key" not in options:
            raise ValueError("the store option access_key_id needs secret_access_key")
        token = _first(options.get("session_token"), options.get("token"))
        return Keys(str(options["access_key_id"]), str(options["secret_access_key"]), token)
    in_environ = environ.get("AWS_ACCESS_KEY_ID") or environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    if not options.get("profile") and (in_environ or is_true(environ.get("AWS_SKIP_SIGNATURE", ""))):
        return None
    return profile.login


def _aws_endpoint(environ: Mapping[str, str], of_profile: str) -> str:
    if is_true(environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "")):
        return _AWS
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return _first(*map(environ.get, names), of_profile)


# --------------------------------------------------------------------------------------------- Google


def _gcs(address: Address, options: Mapping[str, Any], environ: Mapping[str, str]) -> _Decided:
    emulator = "" if address.endpoint or "endpoint" in options else _emulator(environ)
    given = options.get("endpoint"), address.endpoint, emulator, environ.get("GOOGLE_BASE_URL")
    endpoint = _checked(address, _first(*given))
    config, login = _google_login(options, environ, is_emulated=bool(emulator))
    return {"base_url": endpoint, **config}, login, endpoint


def _google_login(
    options: Mapping[str, Any], environ: Mapping[str, str], *, is_emulated: bool
) -> tuple[dict[str, Any], OfGoogleAuth | None]:
    """Choose credentials, and return settings of obstore that name them."""
    if any(name in options for name in _GOOGLE):
        return {}, None
    if "credentials_path" in options:
        return _google_file(str(options["credentials_path"]))
    if _flag(options, "anonymous") or is_emulated or is_true(environ.get("GOOGLE_SKIP_SIGNATURE", "")):
        return {"skip_signature": True, "bearer_token": _NOBODY}, None
    names = ("SERVICE_ACCOUNT", "SERVICE_ACCOUNT_PATH", "SERVICE_ACCOUNT_KEY", "BEARER_TOKEN")
    if any(environ.get(f"GOOGLE_{name}") for name in names):
        return {}, None
    path = environ.get("GOOGLE_APPLICATION_CREDENTIALS") or _default_credentials(environ)
    return _google_file(path) if path else ({}, None)


def _emulator(environ: Mapping[str, str]) -> str:
    host = environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    return f"http://{host}" if host and "://" not in host else host


def _default_credentials(environ: Mapping[str, str]) -> str:
    """Return the file of `gcloud auth application-default login`, if it is there."""
    home = environ.get("HOME") or os.path.expanduser("~")
    folder = environ.get("CLOUDSDK_CONFIG") or os.path.join(home, ".config", "gcloud")
    path = os.path.join(folder, "application_default_credentials.json")
    return path if os.path.isfile(path) else ""


def _google_file(path: str) -> tuple[dict[str, Any], OfGoogleAuth | None]:
    """Let obstore read a file of credentials if it knows its kind, else google-auth."""
    try:
        with open(path, "rb") as file:
            kind = str(json.load(file).get("type", "service_account"))
    except (ValueError, AttributeError):  # whose messages may show the file
        raise ValueError(f"{path} is not a file of Google credentials") from None
    except OSError as error:
        raise type(error)(f"the Google credentials at {path} cannot be read: {error.strerror}") from None
    setting = {"service_account": "service_account", "authorized_user": "application_credentials"}.get(kind)
    return ({setting: path}, None) if setting else ({}, OfGoogleAuth(path, kind))


# ---------------------------------------------------------------------------------------------- Azure


def _azure(address: Address, options: Mapping[str, Any], environ: Mapping[str, str]) -> _Decided:
    told = _connection(
        _first(options.get("connection_string"), environ.get("AZURE_STORAGE_CONNECTION_STRING"))
    )
    in_environ = environ.get("AZURE_STORAGE_ACCOUNT_NAME"), environ.get("AZURE_STORAGE_ACCOUNT")
    account = _first(options.get("account_name"), address.account, *in_environ, told.get("account_name"))
    is_emulated = is_true(str(options.get("use_emulator", environ.get("AZURE_STORAGE_USE_EMULATOR", ""))))
    is_emulated = is_emulated or "use_emulator" in told
    if not account and not is_emulated:
        raise ValueError(
            f"{address.url}: the name of the storage account is needed; use "
            f"abfss://{address.bucket}@ACCOUNT.dfs.core.windows.net/path, set AZURE_STORAGE_ACCOUNT_NAME, or give the "
            "store option account_name"
        )
    config: dict[str, Any] = {"account_name": account}
    if told.get("account_name", account) == account:  # else they are those of another account
        config |= told
    if not told and "AZURE_STORAGE_ACCOUNT_KEY" not in environ:
        config["account_key"] = environ.get("AZURE_STORAGE_KEY")
    variables = environ.get("AZURE_STORAGE_ENDPOINT"), environ.get("AZURE_ENDPOINT")
    endpoint = _checked(
        address, _first(options.get("endpoint"), address.endpoint, *variables, config.get("endpoint"))
    )
    config |= {
        "endpoint": endpoint,
        "skip_signature": _flag(options, "anonymous") or None,
        "use_emulator": is_emulated or None,
    }
    return config, None, endpoint or ("http://127.0.0.1:10000" if is_emulated else "")


def _connection(text: str) -> dict[str, Any]:
    """Parse a connection string: name=value, separated by semicolons."""
    parts = {name.lower(): value for name, _, value in (part.partition("=") for part in text.split(";"))}
    if is_true(parts.get("usedevelopmentstorage", "")):
        return {"use_emulator": True}
    account, suffix = parts.get("accountname", ""), parts.get("endpointsuffix", "")
    of_suffix = f"{parts.get('defaultendpointsprotocol', 'https')}://{account}.blob.{suffix}"
    found = {
        "account_name": account,
        "account_key": parts.get("accountkey"),
        "sas_key": parts.get("sharedaccesssignature", "").lstrip("?"),
        "endpoint": parts.get("blobendpoint") or (of_suffix if suffix and account else ""),
    }
    return {name: value for name, value in found.items() if value}


# --------------------------------------------------------------------------------------------- values


def _first(*values: Any) -> str:
    """Return the first value that is given."""
    return next((str(value) for value in values if value), "")


_TRUE = ("true", "1", "yes", "on")


def is_true(text: str) -> bool:
    return text.strip().lower() in _TRUE


def _flag(options: Mapping[str, Any], name: str) -> bool:
    """Return an option that is true or false; from a command line it comes as text."""
    value = str(options.get(name, False)).strip().lower()
    if value not in (*_TRUE, "false", "0", "no", "off"):
        raise ValueError(f"the store option {name} is true or false")
    return value in _TRUE


def _positive(options: Mapping[str, Any], name: str, default: float, least: float = 1e-3) -> float:
    try:
        value = float(options.get(name, default))
    except (TypeError, ValueError):
        value = -1.0
    if not least <= value < 1e9:
        raise ValueError(f"the store option {name} is a number, at least {least:g}")
    return value


def _checked(address: Address, endpoint: str) -> str:
    """Refuse an endpoint without its scheme, and one that carries secrets. Neither is shown."""
    endpoint = endpoint.rstrip("/")
    if not endpoint:
        return ""
    try:
        parts = urlsplit(endpoint)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        is_sound = False
    if not is_sound or "?" in endpoint or "#" in endpoint:
        raise ValueError(
            f"{address.url}: the endpoint has to look like https://host or https://host:port, without credentials"
        )
    return endpoint


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
    return tuple(
        (name, tuple(sorted(value.items())) if isinstance(value, dict) else value)
        for name, value in sorted(values.items())
    )
