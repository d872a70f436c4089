"""Calls of a script to its coordinator: over gRPC, or within the process."""

from collections.abc import Iterator
from typing import Any, Final, Protocol

import grpc

from xain_coordinator.access.errors import NotPermitted
from xain_coordinator.core.errors import Refusal
from xain_coordinator.core.errors import Unavailable as IsAway
from xain_coordinator.core.values import WeightsRef
from xain_coordinator.ports import JournalError, StoreError
from xain_coordinator.process.embedding import Coordinator
from xain_coordinator.server.statuses import STATUSES
from xain_foundation.grpc_calls import details_of
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.access_pb2_grpc import ControlStub
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorStub
from xain_wire.fl.inspection_pb2_grpc import InspectionStub

CALL_S: Final = 30.0
DOWNLOAD_S: Final = 600.0


class Refused(Exception):
    """A call has failed. is_passing: the coordinator is away or starts, and may take it later.
    is_decided: something else was decided before."""

    def __init__(self, text: str, *, is_passing: bool = False, is_decided: bool = False) -> None:
        super().__init__(text)
        self.is_passing = is_passing
        self.is_decided = is_decided


class Stream(Protocol):
    """Answers, for one thread. The next one raises Refused."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def cancel(self) -> None:
        """End the wait for the next one, from any thread."""


class Transport(Protocol):
    """Methods of the services Control and Inspection, by name. All raise Refused."""

    def call(self, method: str, request: Any) -> Any: ...

    def stream(self, method: str, request: Any) -> Stream: ...

    def weights(self, ref: WeightsRef) -> bytes:
        """A stored object."""


class Remote:
    """A coordinator behind a channel. where: it, for messages."""

    def __init__(self, channel: grpc.Channel, where: str) -> None:
        self._stubs = ControlStub(channel), InspectionStub(channel)
        self._coordinator = CoordinatorStub(channel)
        self._where = where

    def call(self, method: str, request: Any) -> Any:
        try:
            return self._method(method)(request, timeout=CALL_S)
        except grpc.RpcError as error:
            raise self._refused(error) from None

    def stream(self, method: str, request: Any) -> Stream:
        return _RemoteStream(self._method(method)(request), self._refused)

    def weights(self, ref: WeightsRef) -> bytes:
        try:
            request = pb.GetWeightsRequest(key=ref.key)
            stream = self._coordinator.GetWeights(request, timeout=DOWNLOAD_S)
            return b"".join(part.data for part in stream)
        except grpc.RpcError as error:
            raise self._refused(error) from None

    def _method(self, name: str) -> Any:
        return next(getattr(stub, name) for stub in self._stubs if hasattr(stub, name))

    def _refused(self, error: Any) -> Refused:
        code, text = error.code(), details_of(error)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            text = f"{self._where} takes no decisions of a script: is it an earlier version?"
        if code is grpc.StatusCode.UNAVAILABLE:
            text = f"the coordinator at {self._where} does not answer: {text}"
        return Refused(
            text,
            is_passing=code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED),
            is_decided=code is grpc.StatusCode.ALREADY_EXISTS,
        )


class _RemoteStream:
    def __init__(self, call: Any, refused: Any) -> None:
        self._call = call
        self._refused = refused

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._call)
        except grpc.RpcError as error:
            raise self._refused(error) from None

    def cancel(self) -> None:
        self._call.cancel()


class InProcess:
    """A coordinator in this process."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def call(self, method: str, request: Any) -> Any:
        try:
            return self._coordinator.call(method, request)
        except (Refusal, NotPermitted, JournalError) as error:
            raise _refused(error) from None

    def stream(self, method: str, request: Any) -> Stream:
        return _InnerStream(self._coordinator.stream(method, request))

    def weights(self, ref: WeightsRef) -> bytes:
        try:
            return self._coordinator.read(ref)
        except StoreError as error:
            raise Refused(str(error)) from None


class _InnerStream:
    def __init__(self, answers: Any) -> None:
        self._answers = answers

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._answers)
        except (Refusal, NotPermitted, JournalError) as error:
            raise _refused(error) from None

    def cancel(self) -> None:
        self._answers.cancel()


def _refused(error: Exception) -> Refused:
    is_decided = STATUSES.get(type(error)) is grpc.StatusCode.ALREADY_EXISTS  # type: ignore[arg-type]
    return Refused(str(error), is_passing=isinstance(error, IsAway), is_decided=is_decided)
