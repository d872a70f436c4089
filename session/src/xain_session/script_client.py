"""Questions and decisions of a script, by the services Control and Inspection.

One thread follows the session. Decisions are repeated where no answer has come: the same decision
again changes nothing.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from xain_coordinator.core.values import WeightsRef
from xain_coordinator.ports import StoreError
from xain_coordinator.server.translate import layout_of
from xain_coordinator.stores.integrity import parse_vector
from xain_foundation.backoff import Backoff
from xain_session.errors import DecidedOtherwise, SessionFailed
from xain_session.transports import Refused, Transport
from xain_wire.fl import access_pb2 as control
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_workloads.model import Model

# Between two looks of a wait at what else may have ended it, such as Ctrl-C and a worker's failure.
LOOK_S: Final = 0.5
RETRY_S: Final = (0.1, 5.0)  # the first and the longest pause before a call is repeated

Status = control.FollowScriptResponse


class ScriptClient:
    """A script's end of a coordinator. transport: of its calls; it stays until close()."""

    def __init__(self, transport: Transport, check: Callable[[], None]) -> None:
        """check: raises what keeps the coordinator from ever answering again."""
        self._transport = transport
        self._check = check
        self.trouble = ""  # why the coordinator does not answer at the moment
        self._changed = threading.Condition()
        self._status: Status | None = None
        self._failure: SessionFailed | None = None
        self._ended = threading.Event()
        self._call: Any = None
        self.session_id = ""
        self._thread = threading.Thread(target=self._follow, name="follow session", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Follow the session no more."""
        self._ended.set()
        with self._changed:
            if self._call is not None:
                self._call.cancel()
        self._thread.join()

    # --- what the session is at ---

    def wait(
        self, is_so: Callable[[Status], bool], look: Callable[[Status | None], None]
    ) -> Status:
        """Wait until the session is as wanted, or finished. look: called now and then meanwhile,
        and what it raises ends the wait. Raises SessionFailed."""
        while True:
            with self._changed:
                status = self._status
                if self._failure is not None:
                    raise self._failure
                if self._ended.is_set():
                    raise SessionFailed("the session was left")
                if status is not None and (status.is_finished or is_so(status)):
                    return status
                self._changed.wait(LOOK_S)
                status = self._status
            look(status)

    def _follow(self) -> None:
        backoff = Backoff(*RETRY_S)
        while not self._ended.is_set():
            try:
                request = control.FollowScriptRequest(session_id=self.session_id)
                with self._changed:
                    if self._ended.is_set():
                        return
                    self._call = self._transport.stream("FollowScript", request)
                for status in self._call:
                    backoff.reset()
                    self._take(status)
                    if status.is_finished:
                        return
            except Refused as error:
                if self._ended.is_set():
                    return
                if not error.is_passing:
                    self._fail(SessionFailed(str(error)))
                    return
                self.trouble = str(error)
            except Exception as error:  # a defect: who waits must not wait for ever
                self._fail(SessionFailed(f"the session cannot be followed: {error!r}"))
                return
            self._ended.wait(backoff.next_s())

    def _take(self, status: Status) -> None:
        """Have a status, unless a later one is there already."""
        self.session_id = status.session_id
        self.trouble = ""
        with self._changed:
            known = self._status
            if known is None or status.position >= known.position:
                self._status = status
            self._changed.notify_all()

    def _fail(self, failure: SessionFailed) -> None:
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    # --- decisions ---

    def configure(self, request: control.ConfigureRoundRequest) -> None:
        """Raises DecidedOtherwise, and SessionFailed if the session does not take it."""
        request.session_id = self.session_id
        self._take(self._ask("ConfigureRound", request).status)

    def evaluated(self, model: int, num_samples: int, metrics: Mapping[str, float]) -> None:
        """Raises as configure() does."""
        request = control.RecordEvaluationRequest(
            session_id=self.session_id, model=model, num_samples=num_samples, metrics=metrics
        )
        self._take(self._ask("RecordEvaluation", request).status)

    def end(self, failure: str = "") -> None:
        """Come to the end of the script's loop; with the failure of its body, if there was one."""
        request = control.EndScriptRequest(session_id=self.session_id, failure=failure)
        self._take(self._ask("EndScript", request).status)

    def _ask(self, method: str, request: Any) -> Any:
        """Ask until there is an answer: a coordinator that is away is waited for."""
        backoff = Backoff(*RETRY_S)
        while True:
            try:
                return self._transport.call(method, request)
            except Refused as error:
                if error.is_decided:
                    raise DecidedOtherwise(str(error)) from None
                if not error.is_passing or self._ended.is_set():
                    raise SessionFailed(str(error)) from None
            self._check()
            time.sleep(backoff.next_s())  # before the coordinator is asked again

    # --- what it has made ---

    def ask(self, method: str, request: Any) -> Any:
        """Ask the service Inspection. Raises SessionFailed."""
        return self._ask(method, request)

    def rounds(self, number: int | None = None) -> list[inspection.RoundStatus]:
        """Records of rounds that train: all, or that of one number."""
        limit = 0 if number is None else 4
        listed = self.ask("ListRounds", inspection.ListRoundsRequest(limit=limit)).rounds
        found = [one for one in listed if one.task == pb.TRAIN and number in (None, one.round)]
        if not found and number is not None:
            return [one for one in self.rounds() if one.round == number]
        return found

    def model(self, number: int) -> Model:
        """A global model. Raises SessionFailed."""
        for limit in (2, 0):
            listed = self.ask("ListModels", inspection.ListModelsRequest(limit=limit)).models
            if found := [one for one in listed if one.round == number]:
                return self._fetched(found[0])
        raise SessionFailed(
            f"model {number} is not there any more; storage.keep_models says how many stay"
        )

    def _fetched(self, message: inspection.ModelStatus) -> Model:
        ref = WeightsRef(message.ref.key, message.ref.size_bytes, message.ref.digest.hex())
        try:
            data = self._transport.weights(ref)
        except Refused as error:
            raise SessionFailed(f"model {message.round} cannot be fetched: {error}") from None
        layout = layout_of(message.layout)
        try:
            return Model(parse_vector(data, ref), layout, dict(message.metadata))
        except StoreError as error:
            raise SessionFailed(f"model {message.round} cannot be read: {error}") from None
