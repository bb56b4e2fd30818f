"""Read the profiles of AWS: ~/.aws/config and ~/.aws/credentials, which obstore does not know."""

from __future__ import annotations

import configparser
import os
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

# These come before keys in the same profile, and need requests of their own.
_NEEDS_BOTO3 = ("role_arn", "sso_session", "sso_start_url", "login_session", "web_identity_token_file")


class Profile(Struct, frozen=True):
    """A profile: its settings, and why its credentials need boto3, if they do."""

    name: str
    region: str = ""
    endpoint: str = ""
    access_key: str = ""
    secret_key: str = ""
    token: str = ""
    needs_boto3: str = ""

    def __repr__(self) -> str:
        return f"Profile({self.name!r})"


def read_profile(name: str, environ: Mapping[str, str]) -> Profile:
    """Return a profile by its name; "" for that of AWS_PROFILE, or the default one, which need not exist."""
    config = _read("AWS_CONFIG_FILE", "config", environ)
    credentials = _read("AWS_SHARED_CREDENTIALS_FILE", "credentials", environ)
    asked = name or environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or ""
    chosen = asked or "default"
    sections = [config.get(f"profile {chosen}"), credentials.get(chosen)]
    if chosen == "default":
        sections.insert(0, config.get("default"))
    found = [section for section in sections if section is not None]
    if asked and not found:
        raise ValueError(
            f"AWS profile {asked!r} is neither in {_file('AWS_CONFIG_FILE', 'config', environ)} nor in "
            f"{_file('AWS_SHARED_CREDENTIALS_FILE', 'credentials', environ)}"
        )
    values = {key: value for section in found for key, value in section.items()}
    return _profile(chosen, values, config)


def _profile(name: str, values: Mapping[str, str], config: Mapping[str, Mapping[str, str]]) -> Profile:
    has_keys = bool(values.get("aws_access_key_id") and values.get("aws_secret_access_key"))
    needs = [key for key in _NEEDS_BOTO3 if values.get(key)]
    if not has_keys and values.get("credential_process"):
        needs.append("credential_process")
    return Profile(
        name=name,
        region=values.get("region", ""),
        endpoint=_endpoint(values, config),
        access_key=values.get("aws_access_key_id", "") if has_keys else "",
        secret_key=values.get("aws_secret_access_key", "") if has_keys else "",
        token=values.get("aws_session_token", "") if has_keys else "",
        needs_boto3=needs[0] if needs else "",
    )


def _endpoint(values: Mapping[str, str], config: Mapping[str, Mapping[str, str]]) -> str:
    """Return the endpoint of S3 in the profile's [services], or the one for all services."""
    services = config.get(f"services {values.get('services', '')}", {})
    for line in services.get("s3", "").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "endpoint_url":
            return value.strip()
    return values.get("endpoint_url", "")


def _file(variable: str, name: str, environ: Mapping[str, str]) -> str:
    home = environ.get("HOME") or os.path.expanduser("~")
    given = environ.get(variable) or os.path.join(home, ".aws", name)
    return os.path.join(home, given[2:]) if given.startswith("~/") else given


def _read(variable: str, name: str, environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Read a file of profiles by section; none if it does not exist."""
    path = _file(variable, name, environ)
    parser = configparser.RawConfigParser(default_section="\0", strict=False)
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (configparser.Error, UnicodeDecodeError):  # whose messages show lines of the file
        raise ValueError(f"{path} cannot be read: it is not a file of AWS profiles") from None
    return {section: dict(parser.items(section)) for section in parser.sections()}
