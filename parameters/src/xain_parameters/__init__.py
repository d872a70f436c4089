"""The parameter server: tables over key ranges, clocks, replicas, checkpoints.

    async with parameters.connect("HOST:50052", worker="w3") as server:
        w = await server.dense("w", shape=(785, 10), update=Adam(1e-3), init=Zeros())
        async for clock in server.clocks(staleness=2):
            x = await w.pull()
            await w.push(gradient(x))

connect_sync has the same names without `await`; KVWorker those of ps-lite. local(shards=2) is a
parameter server of this process alone.

A module is loaded when one of its names is used first, so that a command does not wait for more
than it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xain_parameters.certificates import Certificates
    from xain_parameters.client.connecting import connect, connect_sync
    from xain_parameters.client.kv import KVWorker
    from xain_parameters.client.local import LocalGroup, local, local_sync
    from xain_parameters.errors import (
        Closed,
        Damaged,
        Evicted,
        Invalid,
        ParameterError,
        RolledBack,
        TableConflict,
        Unavailable,
    )
    from xain_parameters.node.server import ParameterServer
    from xain_parameters.tables.initialisers import Constant, Normal, Uniform, Zeros
    from xain_parameters.tables.rules import (
        FTRL,
        SGD,
        Adagrad,
        Adam,
        Add,
        Assign,
        Momentum,
    )

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Add",
    "Assign",
    "Certificates",
    "Closed",
    "Constant",
    "Damaged",
    "Evicted",
    "Invalid",
    "KVWorker",
    "LocalGroup",
    "Momentum",
    "Normal",
    "ParameterError",
    "ParameterServer",
    "RolledBack",
    "TableConflict",
    "Unavailable",
    "Uniform",
    "Zeros",
    "connect",
    "connect_sync",
    "local",
    "local_sync",
]

_MODULES = {
    "Adagrad": "tables.rules",
    "Adam": "tables.rules",
    "Add": "tables.rules",
    "Assign": "tables.rules",
    "Certificates": "certificates",
    "Closed": "errors",
    "Constant": "tables.initialisers",
    "Damaged": "errors",
    "Evicted": "errors",
    "FTRL": "tables.rules",
    "Invalid": "errors",
    "KVWorker": "client.kv",
    "LocalGroup": "client.local",
    "Momentum": "tables.rules",
    "Normal": "tables.initialisers",
    "ParameterError": "errors",
    "ParameterServer": "node.server",
    "RolledBack": "errors",
    "SGD": "tables.rules",
    "TableConflict": "errors",
    "Unavailable": "errors",
    "Uniform": "tables.initialisers",
    "Zeros": "tables.initialisers",
    "connect": "client.connecting",
    "connect_sync": "client.connecting",
    "local": "client.local",
    "local_sync": "client.local",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
