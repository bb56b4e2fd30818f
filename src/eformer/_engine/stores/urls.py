"""Parse the URLs of buckets: which cloud, which bucket, which path in it.

Nothing here repeats a query, a fragment or a user name of a URL: they may carry secrets.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NoReturn
from urllib.parse import unquote, urlsplit

from msgspec import Struct

if TYPE_CHECKING:
    from urllib.parse import SplitResult

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

# pathlib turns s3://bucket into s3:/bucket and s3:// into s3:, and os.path.abspath into /here/s3:/bucket: a local
# directory called "s3:".
_CUT_URL = re.compile(
    rf"(?:^|/)((?:{'|'.join((*_CLOUDS, *_WEB, 'hf', 'file'))}):)(?:/(?!/)|$)", re.IGNORECASE
)

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CONTAINER = re.compile(r"\$?[A-Za-z0-9][A-Za-z0-9-]*")
_REGION = r"[a-z]{2}(?:-[a-z]+)+-\d+"
_S3 = re.compile(
    rf"(?:(?P<bucket>.+)\.)?(?P<host>s3(?:-fips)?(?:[.-](?:dualstack\.)?(?P<region>{_REGION}))?\.amazonaws\.com(?:\.cn)?)"
)
_R2 = re.compile(
    r"(?:(?P<bucket>.+)\.)?(?P<host>[0-9a-f]{32}(?:\.(?:eu|fedramp))?\.r2\.cloudflarestorage\.com)"
)
_GCS = re.compile(r"(?:(?P<bucket>.+)\.)?storage\.googleapis\.com|storage\.cloud\.google\.com")
_AZURE = re.compile(
    r"(?P<account>[a-z0-9-]+)\.(?:blob|dfs)\."
    r"(?P<suffix>core\.windows\.net|core\.chinacloudapi\.cn|core\.usgovcloudapi\.net)"
)


class Address(Struct, frozen=True):
    """A place in a bucket.

    url        the bucket as the caller has written it, for messages
    bucket     its name; for Azure that of the container
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
    """Raise ValueError for a local path that is a URL without one of its slashes, or ends in one."""
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
        _refuse_bucket(url)
    return Address(_CLOUDS[scheme], f"{scheme}://{host}", host, path)


def shown(url: str) -> str:
    """Return a URL without what may be a secret in it."""
    scheme, _, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    if "@" in host and scheme not in ("abfs", "abfss"):
        host = "..." + host[host.rindex("@") :]
    return f"{scheme}://{host}{slash}{path}"


def _checked_path(path: str, url: str) -> str:
    path = path.strip("/")
    if path and {"", ".", ".."} & set(path.split("/")):
        raise ValueError(f"{shown(url)}: the parts of a path in a bucket are not empty, '.' or '..'")
    return path


def _refuse_bucket(url: str) -> NoReturn:
    scheme = url.partition("://")[0]
    raise ValueError(
        f"{scheme}://... does not name a bucket: expected {scheme}://bucket/path, with letters, digits, '.', '_' and "
        "'-' in the name of the bucket, and without credentials"
    )


def _azure(scheme: str, host: str, path: str) -> Address:
    """Understand az://container and abfss://container@account.dfs.core.windows.net."""
    container, has_account, server = host.partition("@")
    found = _AZURE.fullmatch(server)
    if not _CONTAINER.fullmatch(container) or (has_account and (scheme == "az" or found is None)):
        raise ValueError(
            f"{scheme}://... does not name a container: expected az://container/path, "
            "abfss://container/path or abfss://container@account.dfs.core.windows.net/path"
        )
    if found is None:
        return Address("azure", f"{scheme}://{container}", container, path)
    return Address(
        "azure", f"{scheme}://{host}", container, path, _azure_endpoint(found), account=found["account"]
    )


def _azure_endpoint(found: re.Match[str]) -> str:
    return f"https://{found['account']}.blob.{found['suffix']}"


# -------------------------------------------------------------------------------------------- https


def _web(url: str) -> Address:
    """Understand the https URLs of the clouds: the bucket is in the name of the host, or the first part of the path."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    for cloud, pattern in (("s3", _S3), ("s3", _R2), ("gcs", _GCS), ("azure", _AZURE)):
        if found := pattern.fullmatch(host):
            return _in_cloud(cloud, found, parts, url)  # type: ignore[arg-type]
    raise ValueError(
        f"{shown(url)}: {host} is not a server of Amazon S3, Cloudflare R2, Google Cloud Storage or Azure; for another "
        "server with the interface of S3 use s3://bucket/path, and its address as AWS_ENDPOINT_URL or as the store "
        "option endpoint"
    )


def _in_cloud(cloud: Cloud, found: re.Match[str], parts: SplitResult, url: str) -> Address:
    if parts.scheme != "https" or parts.username is not None or parts.port not in (None, 443):
        raise ValueError(f"{shown(url)}: expected https, and neither a port nor a user name")
    named = found.groupdict()
    bucket, path = named.get("bucket") or "", unquote(parts.path).strip("/")
    outer = f"https://{parts.hostname}"
    if not bucket:
        bucket, _, path = path.partition("/")
        outer = f"{outer}/{bucket}"
    if not (_CONTAINER if cloud == "azure" else _BUCKET).fullmatch(bucket):
        raise ValueError(f"https://{parts.hostname}/...: expected the name of a bucket after the host")
    return Address(
        cloud,
        outer,
        bucket,
        _checked_path(path, url),
        _endpoint(cloud, found),
        named.get("region") or ("auto" if found.re is _R2 else ""),
        named.get("account") or "",
    )


def _endpoint(cloud: Cloud, found: re.Match[str]) -> str:
    if cloud == "azure":
        return _azure_endpoint(found)
    if cloud == "gcs":
        return "https://storage.googleapis.com"
    host = found["host"]
    return "https://s3.{region}.amazonaws.com" if host == "s3.amazonaws.com" else f"https://{host}"
