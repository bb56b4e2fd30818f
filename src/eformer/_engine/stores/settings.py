"""Choose the settings and credentials of a bucket from store options, the URL and the environment.

obstore reads the environment itself. Only settings that it does not know, or that depend on several of these sources,
are decided here.

Tests: tests/engine/stores/test_clouds.py, tests/engine/stores/test_store_options.py.
"""

from __future__ import annotations

import ipaddress
import json
import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eformer._engine.stores.answers import no_credentials
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

# Options that eformer itself understands: of one cloud, and of all clouds. All other options are obstore's.
_OF_ONE = {
    "s3": ("profile", "region", "signed_payload"),
    "gcs": ("credentials_path",),
    "azure": ("connection_string",),
}
_OF_ALL = [
    "allow_http",
    "anonymous",
    "credential_provider",
    "endpoint",
    "retries",
    "single_writer",
    "timeout",
]
_OWN_OPTIONS = sorted({*_OF_ALL, *(name for names in _OF_ONE.values() for name in names)})
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
# A token that is sent as it is; without a token obstore would ask the metadata server of the machine.
_NOBODY = "none"


def is_for(cloud: str, name: str) -> bool:
    """Tell whether this cloud has an option."""
    if name in _OWN_OPTIONS:
        return name in (*_OF_ALL, *_OF_ONE[cloud])
    return _is_known(cloud, "config", name) or _is_of_client(name)


def _is_of_client(name: str) -> bool:
    """Tell whether an option belongs to obstore's HTTP client, which all clouds share."""
    return _is_known("s3", "client_options", name)


@cache
def _is_known(cloud: str, argument: str, name: str) -> bool:
    """Ask obstore whether it knows an option. No request is sent."""
    from obstore import exceptions, store  # late: obstore is needed for buckets only

    try:
        getattr(store, STORES[cloud])("bucket", **{argument: {name: None}})
    except Exception as error:  # noqa: BLE001  a name that is known is refused for its value
        return not isinstance(error, (exceptions.UnknownConfigurationKeyError, ValueError))
    return True


def require_known(url: str, names: Iterable[str]) -> None:
    """Raise TypeError for an option that no cloud has."""
    for name in names:
        if not any(is_for(cloud, name) for cloud in STORES):
            raise TypeError(f"{url or 'all buckets'}: {name!r} is not a store option. {known(*STORES)}")


def known(*clouds: str) -> str:
    """Name the options, for messages."""
    return (
        f"Store options are {', '.join(_OWN_OPTIONS)}; options of obstore's ClientConfig, such as proxy_url and "
        f"root_certificate; and options of its {' and '.join(STORES[cloud] for cloud in clouds)}."
    )


@dataclass(frozen=True, slots=True)
class OfGoogleAuth:
    """Credentials of a file, which google-auth has to get. `why` is their kind."""

    path: str
    why: str


@dataclass(frozen=True, slots=True, repr=False)
class Settings:
    """The settings of the client of a bucket. Equal settings share one client.

    config       settings of obstore's store
    client       settings of its HTTP client
    login        where credentials come from, if not from obstore itself
    endpoint     the address of the server, if it was given
    is_own       whether the server is the cloud's own, which is known to honour conditions
    secrets      texts that must not appear in messages
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


@dataclass(frozen=True, slots=True, repr=False)
class _Asked:
    """The address of a bucket, the options of the caller, and the environment."""

    address: Address
    options: Mapping[str, Any]
    environ: Mapping[str, str]

    def choose(self, option: str, of_url: str, variables: Iterable[str], otherwise: str = "") -> str:
        """Choose a value. Options win over the URL, and the URL over the environment."""
        values = (self.options.get(option), of_url, *map(self.environ.get, variables), otherwise)
        return next((str(value) for value in values if value), "")

    def is_true(self, variable: str) -> bool:
        return is_true(self.environ.get(variable, ""))

    def flag(self, name: str) -> bool:
        """Return an option that is true or false. A command line gives it as text."""
        value = str(self.options.get(name, False))
        if not is_true(value) and value.strip().lower() not in ("false", "0", "no", "off"):
            raise ValueError(f"the store option {name} is not a flag, expected true or false")
        return is_true(value)

    def number(self, name: str, default: float, least: float = 1e-3) -> float:
        try:
            value = float(self.options.get(name, default))
        except (TypeError, ValueError):
            value = -1.0
        if not least <= value < 1e9:
            raise ValueError(f"the store option {name} is a number, at least {least:g}")
        return value


def settings_of(address: Address, options: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Return the settings for a bucket. Options win over the URL, and the URL over the environment."""
    for cloud, names in _OF_ONE.items():
        if cloud != address.cloud and (wrong := [name for name in names if name in options]):
            raise ValueError(f"{address.url}: the store option {wrong[0]} is for {cloud} only")
    asked = _Asked(address, options, environ)
    decided, login, endpoint = {"s3": _s3, "gcs": _gcs, "azure": _azure}[address.cloud](asked)
    config = {name: value for name, value in decided.items() if value not in ("", None)}
    unused = (*_OWN_OPTIONS, *(_KEYS if isinstance(login, Keys) else ()))
    others = {name: value for name, value in options.items() if name not in unused}
    client = {name: others.pop(name) for name in [*others] if _is_of_client(name)}
    if endpoint.startswith("http://"):  # `_endpoint` has checked that this is allowed
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
        timeout=asked.number("timeout", TIMEOUT),
        retries=int(asked.number("retries", RETRIES, least=0)),
        endpoint=endpoint,
        is_own=not endpoint or f".{_host(endpoint)}".endswith(_OWN_SERVERS[address.cloud]),
        single_writer=asked.flag("single_writer"),
        secrets=frozenset(secrets - {""}),
        environment=_items(relevant),
    )


# Settings of obstore, where empty settings count as missing; where credentials come from; and the endpoint.
_Decided = tuple[dict[str, Any], "Keys | OfBoto3 | OfGoogleAuth | None", str]

# ------------------------------------------------------------------------------------------------ AWS


def _s3(asked: _Asked) -> _Decided:
    address, options = asked.address, asked.options
    profile = read_profile(str(options.get("profile", "")), asked.environ)
    region = asked.choose("region", address.region, ("AWS_REGION", "AWS_DEFAULT_REGION"), profile.region)
    variables: tuple[str, ...] = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    if is_ignored := asked.is_true("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
        variables = ()
    otherwise = _AWS if is_ignored else profile.endpoint
    endpoint = _endpoint(asked, address.endpoint, variables, otherwise, region or "us-east-1")
    unsigned: bool | None = None
    if "signed_payload" in options:
        unsigned = not asked.flag("signed_payload")
    elif "AWS_UNSIGNED_PAYLOAD" not in asked.environ and "unsigned_payload" not in options:
        unsigned = not endpoint.startswith("http://") or _is_loopback(endpoint)
    config = {
        "region": region,
        "aws_endpoint_url_s3": endpoint,  # obstore prefers it to all other credentials
        "unsigned_payload": unsigned,
        "skip_signature": asked.flag("anonymous") or None,
    }
    return config, _aws_login(asked, profile), endpoint


def _aws_login(asked: _Asked, profile: Profile) -> Keys | OfBoto3 | None:
    """Choose credentials in the order of AWS's own clients; None leaves them to obstore."""
    options = asked.options
    if asked.flag("anonymous"):
        return None
    if "access_key_id" in options:
        if "secret_access_key" not in options:
            raise ValueError("the store option access_key_id needs secret_access_key")
        token = options.get("session_token") or options.get("token") or ""
        return Keys(str(options["access_key_id"]), str(options["secret_access_key"]), str(token))
    in_environ = any(map(asked.environ.get, ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")))
    if not options.get("profile") and (in_environ or asked.is_true("AWS_SKIP_SIGNATURE")):
        return None
    if profile.login is None and asked.is_true("AWS_EC2_METADATA_DISABLED") and not _may_log_in(asked):
        machine = "; AWS_EC2_METADATA_DISABLED forbids to ask this machine"
        raise no_credentials(asked.address.url, "s3", machine)
    return profile.login


def _may_log_in(asked: _Asked) -> bool:
    """Tell whether options or the environment of a container lead obstore to credentials, or away from them."""
    is_told = any(name in asked.options for name in ("credential_provider", "skip_signature"))
    in_container = any(name.startswith("AWS_CONTAINER_CREDENTIALS_") for name in asked.environ)
    return is_told or in_container or bool(secrets_among(asked.options))


# --------------------------------------------------------------------------------------------- Google


def _gcs(asked: _Asked) -> _Decided:
    address, options = asked.address, asked.options
    emulator = "" if address.endpoint or "endpoint" in options else _emulator(asked.environ)
    endpoint = _endpoint(asked, address.endpoint or emulator, ["GOOGLE_BASE_URL"])
    config, login = _google_login(asked, is_emulated=bool(emulator))
    return {"base_url": endpoint, **config}, login, endpoint


def _google_login(asked: _Asked, *, is_emulated: bool) -> tuple[dict[str, Any], OfGoogleAuth | None]:
    """Choose credentials. Return settings of obstore that name them."""
    if any(name in asked.options for name in _GOOGLE):
        return {}, None
    if "credentials_path" in asked.options:
        return _google_file(str(asked.options["credentials_path"]))
    if asked.flag("anonymous") or is_emulated or asked.is_true("GOOGLE_SKIP_SIGNATURE"):
        return {"skip_signature": True, "bearer_token": _NOBODY}, None
    names = ("SERVICE_ACCOUNT", "SERVICE_ACCOUNT_PATH", "SERVICE_ACCOUNT_KEY", "BEARER_TOKEN")
    if any(asked.environ.get(f"GOOGLE_{name}") for name in names):
        return {}, None
    path = asked.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or _default_credentials(asked.environ)
    return _google_file(path) if path else ({}, None)


def _emulator(environ: Mapping[str, str]) -> str:
    host = environ.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    return f"http://{host}" if host and "://" not in host else host


def _default_credentials(environ: Mapping[str, str]) -> str:
    """Return the file of `gcloud auth application-default login`, if it exists."""
    home = environ.get("HOME") or os.path.expanduser("~")
    folder = environ.get("CLOUDSDK_CONFIG") or os.path.join(home, ".config", "gcloud")
    path = os.path.join(folder, "application_default_credentials.json")
    return path if os.path.isfile(path) else ""


def _google_file(path: str) -> tuple[dict[str, Any], OfGoogleAuth | None]:
    """Let obstore read a file of credentials if it knows its kind; else let google-auth read it."""
    try:
        with open(path, "rb") as file:
            kind = str(json.load(file).get("type", "service_account"))
    except (ValueError, AttributeError):  # not chained: its message may show the file
        raise ValueError(f"{path} is not a file of Google credentials") from None
    except OSError as error:
        raise type(error)(f"the Google credentials at {path} cannot be read: {error.strerror}") from None
    setting = {"service_account": "service_account", "authorized_user": "application_credentials"}.get(kind)
    return ({setting: path}, None) if setting else ({}, OfGoogleAuth(path, kind))


# ---------------------------------------------------------------------------------------------- Azure


def _azure(asked: _Asked) -> _Decided:
    address, options = asked.address, asked.options
    told = _connection(asked.choose("connection_string", "", ["AZURE_STORAGE_CONNECTION_STRING"]))
    variables = ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT")
    account = asked.choose("account_name", address.account, variables, told.get("account_name", ""))
    is_emulated = "use_emulator" in told or is_true(
        str(options.get("use_emulator", asked.environ.get("AZURE_STORAGE_USE_EMULATOR", "")))
    )
    if not account and not is_emulated:
        raise ValueError(
            f"{address.url}: the name of the storage account is needed; use "
            f"abfss://{address.bucket}@ACCOUNT.dfs.core.windows.net/path, set AZURE_STORAGE_ACCOUNT_NAME, or give the "
            "store option account_name"
        )
    config: dict[str, Any] = {"account_name": account}
    if told.get("account_name", account) == account:  # the keys of the environment belong to that account
        config |= told
    if not told and "AZURE_STORAGE_ACCOUNT_KEY" not in asked.environ:
        config["account_key"] = asked.environ.get("AZURE_STORAGE_KEY")
    variables = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    endpoint = _endpoint(asked, address.endpoint, variables, config.get("endpoint", ""))
    config |= {
        "endpoint": endpoint,
        "skip_signature": asked.flag("anonymous") or None,
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


def is_true(text: str) -> bool:
    return text.strip().lower() in ("true", "1", "yes", "on")


def _endpoint(
    asked: _Asked, of_url: str, variables: Iterable[str], otherwise: str = "", region: str = "{region}"
) -> str:
    """Choose the address of the server. Refuse an address without its scheme, or with credentials in it, and do not
    show it. Refuse http, unless the server is on this machine or http was allowed."""
    url, variable = asked.address.url, _ALLOW_HTTP[asked.address.cloud]
    endpoint = asked.choose("endpoint", of_url, variables, otherwise).replace("{region}", region).rstrip("/")
    try:
        parts = urlsplit(endpoint)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
    except ValueError:
        is_sound = False
    if endpoint and (not is_sound or "?" in endpoint or "#" in endpoint):
        raise ValueError(
            f"{url}: the endpoint has to look like https://host or https://host:port, without credentials"
        )
    if not endpoint.startswith("http://") or asked.flag("allow_http") or asked.is_true(variable):
        return endpoint
    if _is_loopback(endpoint) or (asked.address.cloud == "gcs" and endpoint == _emulator(asked.environ)):
        return endpoint
    raise ValueError(
        f"{url}: the endpoint http://{_host(endpoint)} is not encrypted; use https, or allow it by {variable}=true or "
        "the store option allow_http"
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
    """Return settings as a value that can be compared. Only headers are dicts."""
    return tuple(
        (name, tuple(sorted(value.items())) if isinstance(value, dict) else value)
        for name, value in sorted(values.items())
    )
