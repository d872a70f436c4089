"""The weights store that a configuration names."""

from collections.abc import Callable
from dataclasses import dataclass

from xain_coordinator.ports import DirectAccess, WeightsStore
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.stores.settings import StoreSettings


@dataclass(frozen=True, slots=True)
class OpenStore:
    """An open store. access: how participants reach the store themselves, if they can."""

    store: WeightsStore
    access: DirectAccess | None = None
    close: Callable[[], None] = lambda: None


def open_store(settings: StoreSettings) -> OpenStore:
    """The weights store that is configured. Raises StoreError."""
    match settings.kind:
        case "memory":
            return OpenStore(MemoryStore())
        case "files":
            files = FileStore(settings.path)
            return OpenStore(files, close=files.close)
        case "s3":
            from xain_coordinator.stores.s3 import open_s3  # boto3 takes half a second to import

            s3 = open_s3(settings)
            return OpenStore(s3, s3, s3.close)
