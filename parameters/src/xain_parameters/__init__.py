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

from typing import TYPE_CHECKING

from xain_foundation.on_use import loaded_on_use

if TYPE_CHECKING:
    from xain_foundation.security.identity import IdentityRules
    from xain_foundation.security.tls import Certificates, InvalidCertificates
    from xain_parameters.client.batches import Batch, Piece, Reading, RowNumbers
    from xain_parameters.client.connecting import connect, connect_sync
    from xain_parameters.client.kv import KVWorker
    from xain_parameters.client.local import LocalGroup, local, local_sync
    from xain_parameters.errors import (
        Closed,
        Damaged,
        Evicted,
        Invalid,
        ParameterError,
        RequestFailed,
        RolledBack,
        TableConflict,
        Unavailable,
    )
    from xain_parameters.handlers import Request
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
    "Batch",
    "Certificates",
    "Closed",
    "Constant",
    "Damaged",
    "Evicted",
    "IdentityRules",
    "Invalid",
    "InvalidCertificates",
    "KVWorker",
    "LocalGroup",
    "Momentum",
    "Normal",
    "ParameterError",
    "ParameterServer",
    "Piece",
    "Reading",
    "Request",
    "RequestFailed",
    "RolledBack",
    "RowNumbers",
    "TableConflict",
    "Unavailable",
    "Uniform",
    "Zeros",
    "connect",
    "connect_sync",
    "local",
    "local_sync",
]

__getattr__, __dir__ = loaded_on_use(
    __name__,
    {
        "xain_foundation.security.identity": "IdentityRules",
        "xain_foundation.security.tls": "Certificates InvalidCertificates",
        "client.batches": "Batch Piece Reading RowNumbers",
        "client.connecting": "connect connect_sync",
        "client.kv": "KVWorker",
        "client.local": "LocalGroup local local_sync",
        "errors": (
            "Closed Damaged Evicted Invalid ParameterError RequestFailed RolledBack TableConflict "
            "Unavailable"
        ),
        "handlers": "Request",
        "node.server": "ParameterServer",
        "tables.initialisers": "Constant Normal Uniform Zeros",
        "tables.rules": "Adagrad Adam Add Assign FTRL Momentum SGD",
    },
)
