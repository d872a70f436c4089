"""Request messages, bounded and parsed before a handler has them.

gRPC has one limit for the messages of all methods, and the chunks of PutWeights need a large one.
Most other requests are a few names and numbers. So each method has a limit of its own here; a
longer request is refused by its length, before anything is made of it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from xain_coordinator.core.vocabulary.errors import InvalidUpdate, Reason, invalid_request
from xain_coordinator.server.calls.script_messages import MAX_CONFIG_BYTES
from xain_coordinator.server.predictions import MAX_BATCH_BYTES, MAX_ROWS_BYTES
from xain_coordinator.updates.inbox import MAX_INLINE_UPDATE_BYTES
from xain_wire.limits import MAX_METRICS_BYTES
from xain_workloads.tables.profile import MAX_CLASS_NAMES_BYTES, MAX_CLASSES
from xain_workloads.tables.schema import MAX_COLUMNS, MAX_NAMES_BYTES
from xain_workloads.tables.statistics import MAX_STATISTICS_BYTES

# Names, keys and digests, and as much again for fields of later versions.
MAX_REQUEST_BYTES = 16 << 10

_COORDINATOR = "/xain_proto.fl.Coordinator/"

# Bytes, of which none takes the event loop longer than 50 ms to parse. None: gRPC's own limit,
# MAX_MESSAGE_BYTES of server.serve.
_LIMITS: Mapping[str, int | None] = {
    # The classes of the data, each with up to 4 bytes for its length, the columns, each with its
    # type and the lengths of its texts, their statistics, and the tags.
    f"{_COORDINATOR}Rendezvous": MAX_CLASS_NAMES_BYTES
    + 4 * MAX_CLASSES
    + MAX_NAMES_BYTES
    + 24 * MAX_COLUMNS
    + MAX_STATISTICS_BYTES
    + MAX_REQUEST_BYTES,
    # A small update, and metrics. Longer metrics are dropped, and the update counts without them.
    f"{_COORDINATOR}EndTrainingRound": (
        MAX_INLINE_UPDATE_BYTES + 8 * MAX_METRICS_BYTES + MAX_REQUEST_BYTES
    ),
    f"{_COORDINATOR}PutWeights": None,
    # The settings of a round, in a form with blanks, and the names of its sites.
    "/xain_proto.fl.Control/ConfigureRound": 2 * MAX_CONFIG_BYTES + MAX_REQUEST_BYTES,
    # A traceback, of which the beginning is kept: a script that has failed must not fail at this.
    "/xain_proto.fl.Control/EndScript": 1 << 20,
    # The votes for the rows of a question, and the digests of estimators that are lost.
    f"{_COORDINATOR}Predict": 2 * MAX_BATCH_BYTES,
    # Rows as JSON, which takes long to parse, and the names of their columns.
    "/xain_proto.fl.Inspection/AskPredictions": MAX_ROWS_BYTES
    + MAX_NAMES_BYTES
    + 4 * MAX_COLUMNS
    + MAX_REQUEST_BYTES,
}

Parse = Callable[[bytes], Any]


def bounded(method: str, parse: Parse) -> Parse:
    """A parser of the requests of a method. It raises TOO_LARGE and INVALID_REQUEST."""
    limit = _LIMITS.get(method, MAX_REQUEST_BYTES)

    def parse_bounded(data: bytes) -> Any:
        """Parse a request of at most `limit` bytes."""
        if limit is not None and len(data) > limit:
            raise InvalidUpdate(
                f"{method.rpartition('/')[2]} takes {limit} bytes at most, and has {len(data)}",
                Reason.TOO_LARGE,
            )
        try:
            return parse(data)
        except DecodeError:
            raise invalid_request("the request is not a protobuf message of its method") from None

    return parse_bounded
