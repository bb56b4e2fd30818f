"""Tell which options of buckets there are, and for which clouds."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from eformer._engine.stores.settings import CLIENT_OPTIONS, ONLY_FOR, OWN_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

STORES = {"s3": "S3Store", "gcs": "GCSStore", "azure": "AzureStore"}


@cache
def is_for(cloud: str, name: str) -> bool:
    """Tell whether an option is one of this cloud. obstore is asked for those that it alone knows; it sends nothing."""
    if name in OWN_OPTIONS:
        return ONLY_FOR.get(name, cloud) == cloud
    if name in CLIENT_OPTIONS:
        return True
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
            raise TypeError(f"{url or 'all buckets'}: there is no store option {name!r}. {known(STORES)}")


def known(clouds: Iterable[str]) -> str:
    """Name the options, for messages."""
    return (
        f"Store options are {', '.join(OWN_OPTIONS)}; those of obstore's client, {', '.join(CLIENT_OPTIONS)}; and "
        f"those of its {' and '.join(STORES[cloud] for cloud in clouds)}."
    )
