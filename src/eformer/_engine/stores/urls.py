"""Understand paths as people write them: URLs of buckets, file:// URLs, and local paths with "~".

No message repeats a query, a fragment or a user name of the URL of a bucket, because they may carry secrets.

Tests: tests/engine/stores/test_clouds.py, tests/engine/stores/test_locate.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from msgspec import Struct

Cloud = Literal["s3", "gcs", "azure", "memory"]

_CLOUDS: dict[str, Cloud] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "memory": "memory",
}
_WEB = ("https", "http")

# pathlib turns s3://bucket into s3:/bucket and s3:// into s3:, and os.path.abspath makes /here/s3:/bucket, a local path
# with a directory called "s3:".
_CUT_URL = re.compile(
    rf"(?:^|/)((?:{'|'.join((*_CLOUDS, *_WEB, 'hf', 'file'))}):)(?:/(?!/)|$)", re.IGNORECASE
)

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CONTAINER = re.compile(r"\$?[A-Za-z0-9][A-Za-z0-9-]*")
_REGION = r"[a-z]{2}(?:-[a-z]+)+-\d+"
_AZURE = (
    r"(?P<account>[a-z0-9-]+)\.(?:blob|dfs)\."
    r"(?P<suffix>core\.windows\.net|core\.chinacloudapi\.cn|core\.usgovcloudapi\.net)"
)
_AZURE_ENDPOINT = "https://{account}.blob.{suffix}"
_FIRST = r"(?:(?P<bucket>.+)\.)?"  # else the bucket is the first name in the path

# Hosts of https URLs, the endpoints that they name, and the region where the host names none. The first match counts.
_HOSTS: tuple[tuple[Cloud, str, str, str], ...] = (
    ("s3", rf"{_FIRST}s3\.amazonaws\.com", "https://s3.{{region}}.amazonaws.com", ""),
    (
        "s3",
        rf"{_FIRST}(?P<host>s3(?:-fips)?(?:[.-](?:dualstack\.)?(?P<region>{_REGION}))?\.amazonaws\.com(?:\.cn)?)",
        "https://{host}",
        "",
    ),
    (
        "s3",
        rf"{_FIRST}(?P<host>[0-9a-f]{{32}}(?:\.(?:eu|fedramp))?\.r2\.cloudflarestorage\.com)",
        "https://{host}",
        "auto",
    ),
    (
        "gcs",
        rf"{_FIRST}storage\.googleapis\.com|storage\.cloud\.google\.com",
        "https://storage.googleapis.com",
        "",
    ),
    ("azure", _AZURE, _AZURE_ENDPOINT, ""),
)


class Address(Struct, frozen=True):
    """A place in a bucket.

    url        the bucket as the caller has written it, for messages
    bucket     its name; for Azure the name of the container
    path       the beginning of the keys
    endpoint   the server that the URL names, perhaps with {region} for the region of the settings
    region     the region that the URL names
    account    the storage account that the URL names
    """

    cloud: Cloud
    url: str
    bucket: str
    path: str
    endpoint: str = ""
    region: str = ""
    account: str = ""


def is_bucket_url(path: str) -> bool:
    """Tell whether a path is the URL of a bucket, or of a web server."""
    scheme, is_url, _ = path.partition("://")
    return bool(is_url) and (scheme in _CLOUDS or scheme in _WEB)


def refuse_cut_url(path: str) -> None:
    """Raise ValueError for a local path that is, or ends in, a URL without one of its slashes."""
    if cut := _CUT_URL.search(path):
        url = shown(f"{cut[1]}//{path[cut.end() :]}")
        written = url.replace("//", "/", 1)
        if cut[1].lower() == "file:":
            url = url.replace("//", "///", 1)  # its host is empty
        raise ValueError(
            f"{path[: cut.start(1)]}{written} is a URL without its second slash, which pathlib.Path drops; pass the "
            f"URL as text, {url!r}, or rename the directory {cut[1]!r} if it is local"
        )


def parse_url(url: str) -> Address:
    """Find the bucket that a URL names, and the path in it."""
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        return Address("memory", "memory:/", "", _checked_path(rest, url))
    if "?" in rest or "#" in rest:
        raise ValueError(
            f"{shown(url)} has a query or a fragment, which may hold a secret and is not shown here; remove it, and "
            "give credentials by the environment or by checkpoint.store_options"
        )
    if scheme in _WEB:
        return _web(url)
    host, _, path = rest.partition("/")
    path = _checked_path(path, url)
    if _CLOUDS[scheme] == "azure":
        return _azure(scheme, host, path)
    if not _BUCKET.fullmatch(host):
        raise ValueError(
            f"{scheme}://... does not name a bucket: expected {scheme}://bucket/path, with letters, digits, '.', '_' "
            "and '-' in the name of the bucket, and without credentials"
        )
    return Address(_CLOUDS[scheme], f"{scheme}://{host}", host, path)


def is_same_bucket(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    """Tell whether two paths are URLs of the same bucket."""
    urls = os.fspath(first), os.fspath(second)
    return all(map(is_bucket_url, urls)) and parse_url(urls[0]).url == parse_url(urls[1]).url


def shown(url: str) -> str:
    """Return a URL without its query, fragment and user name, which may hold secrets."""
    scheme, _, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    if "@" in host and scheme not in ("abfs", "abfss"):
        host = "..." + host[host.rindex("@") :]
    return f"{scheme}://{host}{slash}{path}"


def _checked_path(path: str, url: str) -> str:
    path = path.strip("/")
    if path and {"", ".", ".."} & set(path.split("/")):
        raise ValueError(f"{shown(url)}: a path in a bucket has no empty names, and neither '.' nor '..'")
    return path


def _azure(scheme: str, host: str, path: str) -> Address:
    """Understand az://container and abfss://container@account.dfs.core.windows.net."""
    container, has_account, server = host.partition("@")
    found = re.fullmatch(_AZURE, server)
    if not _CONTAINER.fullmatch(container) or (has_account and (scheme == "az" or found is None)):
        raise ValueError(
            f"{scheme}://... does not name a container: expected az://container/path, "
            "abfss://container/path or abfss://container@account.dfs.core.windows.net/path"
        )
    if found is None:
        return Address("azure", f"{scheme}://{container}", container, path)
    named = found.groupdict()
    endpoint = _AZURE_ENDPOINT.format(**named)
    return Address("azure", f"{scheme}://{host}", container, path, endpoint, account=named["account"])


def _web(url: str) -> Address:
    """Understand the https URLs of the clouds. The bucket is in the name of the host, or is the first name in the
    path."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    for cloud, pattern, endpoint, region in _HOSTS:  # noqa: B007
        if found := re.fullmatch(pattern, host):
            break
    else:
        raise ValueError(
            f"{shown(url)}: {host} is not a server of Amazon S3, Cloudflare R2, Google Cloud Storage or Azure; for "
            "another server with the interface of S3 use s3://bucket/path, and its address as AWS_ENDPOINT_URL or as "
            "the store option endpoint"
        )
    if parts.scheme != "https" or parts.username is not None or parts.port not in (None, 443):
        raise ValueError(f"{shown(url)}: expected https, and neither a port nor a user name")
    named = found.groupdict("")
    bucket, path, outer = named.get("bucket", ""), unquote(parts.path).strip("/"), f"https://{host}"
    if not bucket:
        bucket, _, path = path.partition("/")
        outer = f"{outer}/{bucket}"
    if not (_CONTAINER if cloud == "azure" else _BUCKET).fullmatch(bucket):
        raise ValueError(f"https://{host}/...: expected the name of a bucket after the host")
    return Address(
        cloud,
        outer,
        bucket,
        _checked_path(path, url),
        endpoint.format(**named),
        named.get("region") or region,
        named.get("account", ""),
    )


# ------------------------------------------------------------------------------------------- local


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a local path, given a path that may begin with "~" or be a file:// URL.

    Refuse any other URL, which would otherwise name a local directory.
    """
    text = os.fspath(path)
    if not text:
        raise ValueError("the path is empty")
    if is_file_url(text):
        return Path(path_of_file_url(text))
    if is_bucket_url(text):
        raise ValueError(f"{path} is in a bucket, expected a local path; copy it first")
    if "://" in text:
        raise ValueError(
            f"{path} is a URL of an unknown kind; expected s3://, gs:// or az:// for a bucket, file:// or a path for a "
            "local file"
        )
    refuse_cut_url(text)
    found = Path(with_home(text))
    return found.absolute() if text.startswith("./~") else found  # pathlib drops the dot, and "~" is a home


def with_home(path: str) -> str:
    """Return a path with a leading "~" or "~user" replaced as by a shell. The name of an unknown user stays."""
    return os.path.expanduser(path)  # pathlib raises for an unknown user


def is_file_url(path: str) -> bool:
    return path.startswith("file:/")  # pathlib turns file:///x into file:/x, which is refused later


def path_of_file_url(url: str) -> str:
    """Return the absolute local path that a file:// URL names, decoded as in RFC 8089."""
    if not url.startswith(("file:///", "file://localhost/")):
        raise ValueError(f"{url!r} is not a local path: expected file:///absolute/path")
    return os.fsdecode(unquote_to_bytes(url.removeprefix("file://").removeprefix("localhost")))
