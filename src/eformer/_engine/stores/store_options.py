"""Options of buckets by the beginning of URLs, given for a call, a block, a run or the process."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from eformer._engine.stores.settings import is_for, require_known
from eformer._engine.stores.urls import is_bucket_url, refuse_cut_url
from eformer._engine.tasks.forks import Lock

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

_lock = Lock()
_given: dict[str, list[dict[str, Any]]] = {}  # by the beginning of a URL; the last options win
# Options of the current call, by URL. A context variable, so that calls in other threads do not see them; `run_all`
# passes it on to its threads.
_of_call: ContextVar[Mapping[str, Mapping[str, Any]] | None] = ContextVar(
    "eformer_store_options", default=None
)


def store_options(url: str | os.PathLike[str], /, **options: Any) -> StoreOptions:
    """Set options of all buckets whose URLs begin with `url`, until the end of a `with` block or of the process.

    "s3://bucket/run" means this directory and all below it, "s3://" all buckets of S3, and "" all buckets. Options of a
    longer URL win over options of a shorter URL, and all of them win over the environment. An option for all buckets
    applies to the clouds that have it. An option that no cloud has raises TypeError. `LoadOptions(store_options=)` and
    `SaveOptions(store_options=)` give options for one call.

    endpoint           the address of the server, such as "https://minio.example.com"; http only for this machine, or
                       with allow_http
    region             the region of the bucket
    profile            a profile of ~/.aws/config and ~/.aws/credentials; some kinds of them need boto3
    credentials_path   a file of Google credentials
    connection_string  the connection string of an Azure storage account
    anonymous          read without credentials
    allow_http         allow a server without encryption
    signed_payload     sign the data sent to S3, at a third of the speed; TLS and the digests protect the data anyway
    timeout            seconds that a request may take with its retries, by default 300
    retries            how often a request is tried again, by default 10 times
    single_writer      save to a server that ignores conditions of requests, and promise that no other process saves to
                       the same place at the same time. Without this option saving to such a server is refused

    All other options are settings of obstore's stores and of its client, such as access_key_id, secret_access_key,
    account_name, account_key, sas_key, bearer_token, credential_provider, proxy_url or root_certificate.

    Example:
        >>> checkpoint.store_options("s3://bucket", endpoint="https://minio.example.com", profile="training")
    """
    return StoreOptions(str(url), options)


class StoreOptions:
    """Options that apply until the end of a `with` block, or of the process."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        refuse_cut_url(url)
        require_known(url, options)
        self._url, self._options = url, options
        with _lock:
            _given.setdefault(_plain(url), []).append(options)

    def __repr__(self) -> str:
        names = ", ".join(self._options)  # without values, which may be secrets
        return f"<store options of {self._url or 'all buckets'}: {names}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the effect of the options; closing again does nothing."""
        with _lock:
            _given[_plain(self._url)] = [one for one in _given[_plain(self._url)] if one is not self._options]


@contextmanager
def options_of_call(options: Mapping[str, Any] | None, *paths: str | os.PathLike[str]) -> Iterator[None]:
    """Apply the options of a call to its paths and all below them, in this thread and the threads of `run_all`.

    Raise ValueError for a path that is not in a bucket.
    """
    if not options:
        yield
        return
    for path in paths:
        _require_bucket(path)
        require_known(str(path), options)
    token = _of_call.set({**(_of_call.get() or {}), **{_plain(str(path)): options for path in paths}})
    try:
        yield
    finally:
        _of_call.reset(token)


def options_during(
    owner: object, path: str | os.PathLike[str], options: Mapping[str, Any] | None
) -> Callable[[], object]:
    """Apply options to a path in the whole process while `owner` lives; return a function that ends them earlier.

    Raise ValueError for a path that is not in a bucket.
    """
    if not options:
        return _do_nothing
    _require_bucket(path)
    return weakref.finalize(owner, StoreOptions(str(path), dict(options)).close)


def _do_nothing() -> None: ...


def _require_bucket(path: str | os.PathLike[str]) -> None:
    """Raise ValueError for a path that is not in a bucket, where store options have no meaning."""
    refuse_cut_url(str(path))
    if not is_bucket_url(str(path)):
        raise ValueError(f"store_options are for buckets; {path} is a local path")


def options_of(url: str, cloud: str = "") -> dict[str, Any]:
    """Return the options for a URL. With a `cloud`, leave out options for all buckets that this cloud lacks."""
    of_call = _of_call.get() or {}
    with _lock:
        return {
            name: value
            for start in _beginnings(url)
            for options in (*_given.get(start, ()), of_call.get(start, {}))
            for name, value in options.items()
            if start or not cloud or is_for(cloud, name)
        }


def _plain(url: str) -> str:
    return url.rstrip("/")


def _beginnings(url: str) -> Iterator[str]:
    """Yield "", "s3:", "s3://bucket", "s3://bucket/a", ..."""
    yield ""
    scheme, _, rest = url.partition("://")
    yield f"{scheme}:"
    start = f"{scheme}:/"
    for part in rest.strip("/").split("/"):
        start = f"{start}/{part}"
        yield start
