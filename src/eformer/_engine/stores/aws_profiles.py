"""Read the profiles of AWS: ~/.aws/config and ~/.aws/credentials, which obstore does not know.

Tests: tests/engine/stores/test_clouds.py.
"""

from __future__ import annotations

import configparser
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# These settings come before keys in the same profile, and need requests of their own.
_NEEDS_BOTO3 = ("role_arn", "sso_session", "sso_start_url", "login_session", "web_identity_token_file")


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Credentials of AWS that do not change. A function returns them, so that obstore adds no token of the environment
    to them."""

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
    """Credentials of a profile that boto3 has to get. `why` is the setting that needs boto3."""

    profile: str
    why: str


@dataclass(frozen=True, slots=True, repr=False)
class Profile:
    """The settings of a profile."""

    region: str
    endpoint: str
    login: Keys | OfBoto3 | None


def read_profile(name: str, environ: Mapping[str, str]) -> Profile:
    """Return a profile by its name; "" for the profile of AWS_PROFILE, or for the default profile, which need not
    exist."""
    places = (
        _path("AWS_CONFIG_FILE", "config", environ),
        _path("AWS_SHARED_CREDENTIALS_FILE", "credentials", environ),
    )
    config, credentials = map(_read, places)
    asked = name or environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or ""
    chosen = asked or "default"
    sections = [config.get(f"profile {chosen}"), credentials.get(chosen)]
    if chosen == "default":
        sections.insert(0, config.get("default"))
    found = [section for section in sections if section is not None]
    if asked and not found:
        raise ValueError(f"AWS profile {asked!r} is neither in {places[0]} nor in {places[1]}")
    values = {key: value for section in found for key, value in section.items()}
    return Profile(values.get("region", ""), _endpoint(values, config), _login(chosen, values))


def _login(name: str, values: Mapping[str, str]) -> Keys | OfBoto3 | None:
    access_key, secret_key = values.get("aws_access_key_id", ""), values.get("aws_secret_access_key", "")
    has_keys = bool(access_key and secret_key)
    for setting in _NEEDS_BOTO3 if has_keys else (*_NEEDS_BOTO3, "credential_process"):
        if values.get(setting):
            return OfBoto3(name, setting)
    return Keys(access_key, secret_key, values.get("aws_session_token", "")) if has_keys else None


def _endpoint(values: Mapping[str, str], config: Mapping[str, Mapping[str, str]]) -> str:
    """Return the endpoint of S3 in the profile's [services], or the profile's endpoint for all services."""
    services = config.get(f"services {values.get('services', '')}", {})
    for line in services.get("s3", "").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "endpoint_url":
            return value.strip()
    return values.get("endpoint_url", "")


def _path(variable: str, name: str, environ: Mapping[str, str]) -> str:
    home = environ.get("HOME") or os.path.expanduser("~")
    given = environ.get(variable) or os.path.join(home, ".aws", name)
    return os.path.join(home, given[2:]) if given.startswith("~/") else given


def _read(path: str) -> dict[str, dict[str, str]]:
    """Read a file of profiles by section. Return no sections if it does not exist."""
    parser = configparser.RawConfigParser(default_section="\0", strict=False)
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (configparser.Error, UnicodeDecodeError):  # not chained: its message shows lines of the file
        raise ValueError(f"{path} cannot be read: it is not a file of AWS profiles") from None
    return {section: dict(parser.items(section)) for section in parser.sections()}
