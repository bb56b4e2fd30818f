"""Find the bucket that a URL names, and make its client. Equal buckets and settings share one client."""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from functools import lru_cache
from typing import Any

from eformer._engine.stores.aws_profiles import OfBoto3
from eformer._engine.stores.bucket import BucketStore
from eformer._engine.stores.objects import Objects
from eformer._engine.stores.redact import Redactor
from eformer._engine.stores.settings import STORES, OfGoogleAuth, Settings, known, settings_of
from eformer._engine.stores.store_options import options_of
from eformer._engine.stores.urls import Address, parse_url
from eformer._engine.tasks.forks import Lock

_REQUEST = 60.0  # seconds for one try of a request, which sends at most PART_BYTES
_CONNECT = 10.0
_RETRY = 120.0  # seconds, after which a request is not tried again
_making = Lock()


def bucket_at(url: str) -> BucketStore:
    """Return the store of a directory in a bucket."""
    address = parse_url(url)
    return BucketStore(objects_at(address, url), address.path)


def objects_at(address: Address, url: str) -> Objects:
    """Return the objects of a bucket, with the store options for `url`."""
    if address.cloud == "memory":
        with _making:
            return _memory()
    try:
        settings = settings_of(address, options_of(url, address.cloud), os.environ)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if address.url in text else f"{address.url}: {text}") from None
    with _making:  # threads that come here first at the same time make one client
        return _objects(address.cloud, address.url, address.bucket, settings)


@lru_cache(64)
def _objects(cloud: str, url: str, bucket: str, settings: Settings) -> Objects:
    return Objects(
        _client(cloud, url, bucket, settings),
        url,
        settings.timeout,
        hide=Redactor(settings.secrets),
        is_trusted=settings.is_own,
        is_alone=settings.single_writer,
        server=settings.endpoint,
    )


def _client(cloud: str, url: str, bucket: str, settings: Settings) -> Any:
    from obstore import exceptions, store

    hide = Redactor({*settings.secrets, *(str(value) for _, value in (*settings.config, *settings.client))})
    provider = _provider(url, settings.login)
    try:
        return getattr(store, STORES[cloud])(
            bucket,
            config=dict(settings.config),
            client_options=_client_options(settings),
            retry_config={
                "max_retries": settings.retries,
                "retry_timeout": timedelta(seconds=min(_RETRY, settings.timeout)),
            },
            credential_provider=provider,
        )
    except exceptions.UnknownConfigurationKeyError as error:
        raise TypeError(f"{url}: {_first_line(hide, error)} {known(cloud)}") from None
    except (exceptions.BaseError, ValueError, TypeError) as error:
        raise ValueError(f"{url}: obstore does not accept the settings: {_first_line(hide, error)}") from None


def _first_line(hide: Redactor, error: Exception) -> str:
    return hide(str(error).partition("\n")[0])


def _client_options(settings: Settings) -> dict[str, Any]:
    given = {name: dict(value) if isinstance(value, tuple) else value for name, value in settings.client}
    limits = {"timeout": _REQUEST, "connect_timeout": _CONNECT}
    return {name: timedelta(seconds=min(most, settings.timeout)) for name, most in limits.items()} | given


def _provider(url: str, login: Any) -> Any:
    """Return a function that gets credentials; None if obstore finds them itself."""
    if isinstance(login, OfBoto3):
        try:
            import boto3
            from obstore.auth.boto3 import Boto3CredentialProvider
        except ImportError:
            raise ImportError(
                f"{url}: the AWS profile {login.profile!r} uses {login.why}, which needs boto3: pip install boto3"
            ) from None
        return Boto3CredentialProvider(boto3.Session(profile_name=login.profile))
    if isinstance(login, OfGoogleAuth):
        try:
            import google.auth
            from obstore.auth.google import GoogleCredentialProvider
        except ImportError:
            raise ImportError(
                f"{url}: the Google credentials at {login.path} are of the kind {login.why}, which needs google-auth: "
                "pip install google-auth requests"
            ) from None
        scopes = ["https://www.googleapis.com/auth/devstorage.read_write"]
        found, _ = google.auth.load_credentials_from_file(login.path, scopes=scopes)
        return GoogleCredentialProvider(found)
    return login


@lru_cache(1)
def _memory() -> Objects:
    from obstore.store import MemoryStore

    return Objects(MemoryStore(), "memory:/", server=secrets.token_hex(8))  # of this process alone
