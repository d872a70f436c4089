"""The weights store that a configuration names."""

from typing import Protocol

from xain_coordinator.ports import WeightsStore
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.settings import StoreSettings


class OpenStore(WeightsStore, Protocol):
    """A store that is to be closed. It may be a DirectAccess to itself."""

    def close(self) -> None: ...


def open_store(settings: StoreSettings, *, try_out: bool = False) -> OpenStore:
    """The weights store that is configured. Raises StoreError.

    try_out: with a trial of each kind of request that a session makes, of a store far away.
    """
    match settings.kind:
        case "files":
            return FileStore(settings.path)
        case "s3":
            from xain_coordinator.stores.s3 import open_s3  # boto3 takes half a second to import

            return open_s3(settings, try_out=try_out)
