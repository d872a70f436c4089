"""Questions and decisions of a script, by the services Control and Inspection.

All in one thread, without locks: Ctrl-C may come between any two lines. Decisions are repeated
where no answer has come: the same decision again changes nothing.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, TypeVar

from xain.result import SessionError
from xain_coordinator.core.vocabulary.values import WeightsRef
from xain_coordinator.ports import StoreError
from xain_coordinator.server.calls.translate import layout_of
from xain_coordinator.stores.integrity import parse_vector
from xain_foundation.net.backoff import Backoff
from xain_session.transports import Refused, Stream, Transport
from xain_wire.fl import access_pb2 as control
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_workloads.model import Model

# Between two looks of a wait at what else may have ended it, such as Ctrl-C and a worker's failure.
LOOK_S: Final = 0.5
PAGE: Final = 1000  # rounds or models of an answer
LATEST: Final = 4  # rounds or models among which the present one is, with those that evaluate
CALL_S: Final = 30.0  # how long an answer may take
ASK_S: Final = 2.0  # the same of a question that only says what a wait is for
RETRY_S: Final = (0.1, 5.0)  # the first and the longest pause before a call is repeated

Status = control.FollowScriptResponse
T = TypeVar("T")


class ScriptClient:
    """A script's end of a coordinator. transport: of its calls; it stays until close()."""

    def __init__(self, transport: Transport, look: Callable[["ScriptClient"], None]) -> None:
        """look: called every LOOK_S while something is waited for. What it raises ends the wait."""
        self._transport = transport
        self._look = look
        self.session_id = ""
        self.status: Status | None = None  # as it was told last
        self.trouble = ""  # why the coordinator does not answer at the moment
        self.waits_since = 0.0  # time.monotonic() at the beginning of the present wait
        self._looked = 0.0
        self._followed: Stream | None = None
        self._backoff = Backoff(*RETRY_S)
        self._retry_at = 0.0
        self.is_interrupted = False  # set by any thread: the wait under way raises SessionError

    def close(self) -> None:
        """Follow the session no more."""
        if self._followed is not None:
            self._followed.cancel()

    # --- what the session is at ---

    def wait(self, is_so: Callable[[Status], bool], timeout_s: float = math.inf) -> Status:
        """Wait until the session is as wanted, or finished. Raises SessionError, also after
        timeout_s."""
        self._begin_wait()
        while True:
            while self._followed is not None and self._follow(0.0):
                pass  # until all that was told is known
            status = self.status
            if status is not None and (status.is_finished or is_so(status)):
                return status
            self._go_on_waiting(timeout_s)
            self._follow(LOOK_S)

    def _begin_wait(self) -> None:
        """Begin the time of a wait."""
        self.waits_since = self._looked = time.monotonic()

    def _go_on_waiting(self, timeout_s: float = math.inf) -> None:
        """Look after what else may end a wait, if it is time for that. Raises SessionError."""
        if self.is_interrupted:
            raise SessionError("the wait was given up")
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._look(self)
        if now - self.waits_since >= timeout_s:
            raise SessionError(self.trouble or "the session has not come so far")

    def _follow(self, timeout_s: float) -> bool:
        """Wait for the next status, and keep it. Returns whether one has come; a stream that broke
        off is opened again after a pause. Raises SessionError."""
        if self._followed is None:
            pause_s = self._retry_at - time.monotonic()
            if pause_s > 0:
                time.sleep(min(pause_s, timeout_s))  # before the coordinator is asked again
                return False
        try:
            if self._followed is None:
                request = control.FollowScriptRequest(session_id=self.session_id)
                self._followed = self._transport.stream("FollowScript", request)
            self._take(self._followed.take(timeout_s))
        except TimeoutError:
            return False
        except StopIteration:
            self._followed = None
            return False
        except Refused as error:
            self._followed = None
            if not error.is_passing:
                raise SessionError(str(error)) from None
            self.trouble = str(error)
            self._retry_at = time.monotonic() + self._backoff.next_s()
            return False
        self._backoff.reset()
        return True

    def _take(self, status: Status) -> None:
        """Keep a status, unless a later one is there already."""
        self.session_id = status.session_id
        self.trouble = ""
        if self.status is None or status.position >= self.status.position:
            self.status = status

    # --- decisions ---

    def configure(self, request: control.ConfigureRoundRequest) -> None:
        """Send the settings of a round. Raises SessionError, also if others were decided before."""
        request.session_id = self.session_id
        self._take(self._ask("ConfigureRound", request).status)

    def record_evaluation(self, model: int, num_samples: int, metrics: Mapping[str, float]) -> None:
        """Send the script's evaluation of a model. Raises SessionError, also if it was another
        before."""
        request = control.RecordEvaluationRequest(
            session_id=self.session_id, model=model, num_samples=num_samples, metrics=metrics
        )
        self._take(self._ask("RecordEvaluation", request).status)

    def end(self, failure: str = "", timeout_s: float = math.inf) -> None:
        """Come to the end of the script's loop; with the failure of its body, if there was one.
        Raises as configure() does, also after timeout_s."""
        request = control.EndScriptRequest(session_id=self.session_id, failure=failure)
        self._take(self._ask("EndScript", request, timeout_s).status)

    def _ask(self, method: str, request: Any, timeout_s: float = math.inf) -> Any:
        """Call a method until there is an answer. Raises SessionError, also after timeout_s."""
        return self._repeat(lambda: self._transport.call(method, request, CALL_S), timeout_s)

    def _repeat(self, call: Callable[[], T], timeout_s: float = math.inf) -> T:
        """Call until there is an answer: a coordinator that is away is waited for. Raises
        SessionError, also after timeout_s."""
        backoff = Backoff(*RETRY_S)
        self._begin_wait()
        while True:
            try:
                answer = call()
            except Refused as error:
                if not error.is_passing:
                    raise SessionError(str(error)) from None
                self.trouble = str(error)
            else:
                self.trouble = ""
                return answer
            retry_at = time.monotonic() + backoff.next_s()
            while (pause_s := retry_at - time.monotonic()) > 0:
                self._go_on_waiting(timeout_s)
                time.sleep(min(pause_s, LOOK_S))  # before the coordinator is asked again

    # --- what it has made ---

    def ask(self, method: str, request: Any) -> Any:
        """Ask the service Inspection. Raises SessionError."""
        return self._ask(method, request)

    def waiting_for(self) -> str:
        """Condition that the session waits for, or why the coordinator does not answer; it is asked
        once."""
        if self.status is not None and not self.trouble:
            try:
                answer = self._transport.call("GetStatus", inspection.GetStatusRequest(), ASK_S)
            except Refused as error:
                self.trouble = str(error)
            else:
                return str(answer.waiting_for)
        return self.trouble

    def latest_rounds(self, number: int) -> list[inspection.RoundStatus]:
        """Records of so many of the latest rounds that train, at most PAGE, the oldest first."""
        request = inspection.ListRoundsRequest(limit=min(number + LATEST, PAGE))
        return [one for one in self.ask("ListRounds", request).rounds if one.task == pb.TRAIN]

    def rounds(self) -> list[inspection.RoundStatus]:
        """Records of the rounds that train, the oldest first."""
        request = inspection.ListRoundsRequest(page_size=PAGE)
        listed = (one for page in self._pages("ListRounds", request) for one in page.rounds)
        return [one for one in listed if one.task == pb.TRAIN]

    def first_round(self) -> int:
        """Number of the first round that trains; 0 before there is one."""
        request = inspection.ListRoundsRequest(page_size=LATEST)
        listed = self.ask("ListRounds", request).rounds
        return min((one.round for one in listed if one.task == pb.TRAIN), default=0)

    def present_model(self) -> inspection.ModelStatus | None:
        """The last model, without its weights."""
        models = self.ask("ListModels", inspection.ListModelsRequest(limit=1)).models
        return models[-1] if models else None

    def evaluation_by_sites(self, model: int) -> Mapping[str, float]:
        """Figures of one of the latest models over the rows of all sites, by the round that started
        from it, which may have measured it only; empty if no site has."""
        request = inspection.ListRoundsRequest(limit=LATEST)
        listed = self.ask("ListRounds", request).rounds
        return next((dict(one.evaluation.metrics) for one in listed if one.round == model), {})

    def model(self, number: int) -> Model:
        """Fetch a global model by its number. Raises SessionError."""
        latest = self.ask("ListModels", inspection.ListModelsRequest(limit=LATEST)).models
        every = inspection.ListModelsRequest(page_size=PAGE)
        listed = (one for page in self._pages("ListModels", every) for one in page.models)
        for one in chain(latest, listed):
            if one.round == number:
                return self._fetch_model(one)
        raise SessionError(
            f"model {number} is not there any more; storage.keep_models says how many stay"
        )

    def _pages(self, method: str, request: Any) -> Iterator[Any]:
        """Answers of a method that lists, page by page. Raises SessionError."""
        while True:
            page = self.ask(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _fetch_model(self, message: inspection.ModelStatus) -> Model:
        """Fetch the weights of a listed model. Raises SessionError."""
        ref = WeightsRef(message.ref.key, message.ref.size_bytes, message.ref.digest.hex())
        data = self._repeat(lambda: self._transport.weights(ref))
        layout = layout_of(message.layout)
        try:
            return Model(parse_vector(data, ref), layout, dict(message.metadata))
        except StoreError as error:
            raise SessionError(f"model {message.round} cannot be read: {error}") from None
