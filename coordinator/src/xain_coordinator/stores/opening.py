"""The weights store that a configuration names."""

from collections.abc import Mapping
from typing import Protocol

from xain_coordinator.extensions import plugins
from xain_coordinator.extensions.options import WrongOption, make_named
from xain_coordinator.ports import WeightsStore
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.settings import StoreSettings
from xain_foundation.exit_statuses import CannotStart


class OpenStore(WeightsStore, Protocol):
    """A store that is to be closed. It may be a DirectAccess to itself."""

    def close(self) -> None: ...


METHODS = ("open", "upload", "find_unfinished", "sweep", "put", "settle", "keys", "delete")


def open_plugin(name: str, options: Mapping[str, object]) -> OpenStore:
    """The store of a plug-in. Raises KeyError if there is none of this name, PluginFailed,
    WrongOption, and what the plug-in raises."""
    kind: object = plugins.load(plugins.STORES, name, {})
    made: OpenStore = make_named(kind, "store", name, options, (*METHODS, "num_parallel", "close"))
    return made


def open_store(settings: StoreSettings, *, try_out: bool = False) -> OpenStore:
    """The weights store that is configured. Raises StoreError, and PluginFailed. try_out: with a
    trial of each kind of request that a session makes, of a store far away."""
    match settings.kind:
        case "files":
            return FileStore(settings.path)
        case "s3":
            from xain_coordinator.stores.s3.s3 import open_s3  # boto3 takes half a second to import

            return open_s3(settings, try_out=try_out)
        case name:
            try:
                return open_plugin(name, settings.options)
            except KeyError:
                raise plugins.PluginFailed(f"the store {name!r} is not installed") from None
            except WrongOption as error:
                raise CannotStart(f"storage.options.{error}") from None
