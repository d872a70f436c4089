"""Calls of a script to its coordinator: over gRPC, or within the process."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

import grpc

from xain_coordinator.core.vocabulary.errors import Refusal
from xain_coordinator.core.vocabulary.errors import Unavailable as IsAway
from xain_coordinator.core.vocabulary.values import WeightsRef
from xain_coordinator.ports import JournalError, StoreError
from xain_coordinator.process.embedding import Answers, Coordinator
from xain_foundation.net.grpc_calls import details_of
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.access_pb2_grpc import ControlStub
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorStub
from xain_wire.fl.inspection_pb2_grpc import InspectionStub

DOWNLOAD_S: Final = 600.0


class Refused(Exception):
    """A call has failed. is_passing: the coordinator is away or starts, and may take it later."""

    def __init__(self, text: str, *, is_passing: bool = False) -> None:
        super().__init__(text)
        self.is_passing = is_passing


class Stream(Protocol):
    """Answers, for one thread."""

    def take(self, timeout_s: float) -> Any:
        """Wait for the next one. Raises TimeoutError, Refused, and StopIteration after the last."""

    def cancel(self) -> None:
        """End the wait for the next one, from any thread."""


class Transport(Protocol):
    """Methods of the services Control and Inspection, by name. All raise Refused."""

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        """Make a call. Returns its answer."""

    def stream(self, method: str, request: Any) -> Stream:
        """Make a call that is answered by a stream."""

    def weights(self, ref: WeightsRef) -> bytes:
        """The bytes of a stored object."""


class Remote:
    """A coordinator behind a channel. where: it, for messages."""

    def __init__(self, channel: grpc.Channel, where: str) -> None:
        self._stubs = ControlStub(channel), InspectionStub(channel)
        self._coordinator = CoordinatorStub(channel)
        self._where = where

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return self._method(method)(request, timeout=timeout_s)
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
        """The method of this name, of Control or Inspection."""
        return next(getattr(stub, name) for stub in self._stubs if hasattr(stub, name))

    def _refused(self, error: Any) -> Refused:
        """Convert the failure of a call to Refused, in words for a script."""
        code, text = error.code(), details_of(error)
        if code is grpc.StatusCode.UNIMPLEMENTED:
            text = f"{self._where} takes no decisions of a script: is it an earlier version?"
        if code is grpc.StatusCode.UNAVAILABLE:
            text = f"the coordinator at {self._where} does not answer: {text}"
        return Refused(
            text,
            is_passing=code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED),
        )


class _RemoteStream:
    """A thread reads the call, whose answers cannot be waited for with a limit. They come by a
    SimpleQueue, which Ctrl-C between two lines of Python leaves usable; a few a round, which is as
    many as a script leaves unread."""

    def __init__(self, call: Any, refused: Callable[[Any], Refused]) -> None:
        """Start the thread that reads the call."""
        self._call = call
        self._refused = refused
        self._found: SimpleQueue[tuple[Any, Exception | None]] = SimpleQueue()
        threading.Thread(target=self._read, name="follow session", daemon=True).start()

    def take(self, timeout_s: float) -> Any:
        """Wait for the next answer. Raises TimeoutError, StopIteration and Refused."""
        try:
            answer, error = self._found.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError from None
        if error is not None:
            raise error
        return answer

    def cancel(self) -> None:
        self._call.cancel()

    def _read(self) -> None:
        """The thread: keep all answers, then the error or the end."""
        error: Exception = StopIteration()
        try:
            for answer in self._call:
                self._found.put((answer, None))
        except grpc.RpcError as failure:
            error = self._refused(failure)
        except Exception as failure:  # a defect: who waits must not wait for ever
            error = Refused(f"the session cannot be followed: {failure!r}")
        self._found.put((None, error))


class InProcess:
    """A coordinator in this process."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def call(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return self._coordinator.call(method, request, timeout_s)
        except TimeoutError:
            raise Refused("the coordinator is busy", is_passing=True) from None
        except (Refusal, JournalError) as error:
            raise _refused(error) from None

    def stream(self, method: str, request: Any) -> Stream:
        try:
            return _InnerStream(self._coordinator.stream(method, request))
        except Refusal as error:
            raise _refused(error) from None

    def weights(self, ref: WeightsRef) -> bytes:
        try:
            return self._coordinator.read(ref)
        except StoreError as error:
            raise Refused(str(error)) from None


class _InnerStream:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def take(self, timeout_s: float) -> Any:
        try:
            return self._answers.take(timeout_s)
        except (Refusal, JournalError) as error:
            raise _refused(error) from None

    def cancel(self) -> None:
        self._answers.cancel()


def _refused(error: Exception) -> Refused:
    """The refusal of a call in this process."""
    return Refused(str(error), is_passing=isinstance(error, IsAway))
