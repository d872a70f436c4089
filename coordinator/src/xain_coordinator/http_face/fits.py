"""Fits, predictions and status for the handlers of /v1 and of Chimera's paths.

The handlers run on the event loop of the HTTP server. Questions to the session run on the event
loop of the gRPC server, and predictions in a thread.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from xain_coordinator.assembly.sessions import Sessions
from xain_coordinator.config.choices import REMEDY, own_rule
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.machine.answers import TRAINING_FAILED
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.machine.strategy import Strategy
from xain_coordinator.core.view.view import planned, waiting_for
from xain_coordinator.core.vocabulary.values import Phase
from xain_coordinator.driver.driver import Driver
from xain_coordinator.export.trained import Entry, Trained
from xain_coordinator.http_face import bodies
from xain_coordinator.http_face.errors import KNOWN, HttpError, refuse
from xain_coordinator.http_face.predicting import Predictor, Rows
from xain_coordinator.inspection.client import Snapshot, ask_service
from xain_coordinator.server.predictions import Predictions
from xain_foundation.settings.settings import mistakes
from xain_wire.metadata import COMPLETED
from xain_workloads.errors import NoModel

T = TypeVar("T")

# One prediction at a time, so that a burst leaves the processors to the training. With MAX_WAITING
# predictions in the queue the answer is TOO_BUSY.
PREDICTING_THREADS = 1
MAX_WAITING = 32

# Options that only the configuration may set, and why.
_NOT_FROM_REQUESTS = {
    "builder": "only the configuration may name code to import",
    "publish": "only the configuration may have fitted estimators sent to the coordinator",
}


class Fits:
    """sessions: of the event loop `loop`."""

    def __init__(self, sessions: Sessions, loop: asyncio.AbstractEventLoop) -> None:
        self.sessions = sessions
        self._loop = loop
        self._pool = ThreadPoolExecutor(PREDICTING_THREADS, "predict")
        self._num_waiting = 0
        self._predictor: Predictor | None = None  # the latest

    def close(self) -> None:
        """Cancel queued predictions without waiting for the running one."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_stopping(self) -> bool:
        """Whether the process is shutting down, or has failed."""
        return self.sessions.stopping.is_set() or self.sessions.failed.is_set()

    async def on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop of the sessions, to its end even if the request is
        given up meanwhile. Raises HttpError."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.shield(asyncio.wrap_future(running))
        except KNOWN as error:
            refuse(error)

    async def ask(self, question: Callable[[], T]) -> T:
        """Call a function on the event loop of the sessions. Returns its result. Raises
        HttpError."""

        async def answer() -> T:
            return question()

        return await self.on_loop(answer())

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run blocking work in the thread pool. Raises HttpError."""
        if self._num_waiting >= MAX_WAITING:
            raise HttpError("TOO_BUSY", "too many requests are being answered; try again")
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except KNOWN as error:
            refuse(error)
        finally:
            self._num_waiting -= 1

    # --- fit ---

    async def fit(self, request: bodies.FitRequest) -> Driver:
        """Request a fit, which goes on whatever happens. Returns the driver that wait_for_end()
        takes. Raises HttpError."""
        config = changed(self.sessions.config, request)
        return await self.on_loop(self.sessions.fit(config))

    async def cancel(self) -> None:
        """End the fit that goes on, without a result. Raises HttpError."""
        await self.on_loop(self.sessions.cancel())

    async def wait_for_end(self, driver: Driver) -> None:
        """Wait for the end of a fit. Raises HttpError if it has no result."""
        session = await self.on_loop(self.sessions.wait_for_end(driver))
        if session.cause != COMPLETED:
            is_of_training = session.cause.startswith(TRAINING_FAILED)
            raise HttpError(
                "TRAINING_FAILED" if is_of_training else "FIT_FAILED",
                f"session {session.session_id} has ended without a result: {session.cause}",
            )

    # --- predict ---

    async def predict(
        self,
        predictor: Predictor,
        columns: Sequence[str],
        rows: Rows,
        *,
        probabilities: Literal["if_any"] | bool = False,
    ) -> Predictions:
        """Predict rows with a model of this process, or with estimators of the participants.

        probabilities: those of the classes, too; with "if_any" a model without them is no error.
        Raises HttpError.
        """
        if predictor.is_held:
            store = self.sessions.store_of(predictor.session_id)
            # The participants keep the estimators of earlier sessions.
            asked = self.sessions.current.server.predictions.ask(
                predictor.names(columns), rows, earlier=(predictor.source, store)
            )
            predicted = await self.on_loop(asked)
            return predicted if probabilities else replace(predicted, probabilities=None)
        return await self.in_thread(
            lambda: predictor.predict(columns, rows, probabilities=probabilities)
        )

    async def predictor(self, which: str = "last") -> Predictor:
        """The model to predict with that "last", "best" or a number names. Raises HttpError."""
        trained = await self.fitted()
        return await self.in_thread(lambda: self._open(trained, trained.choose(which)))

    async def fitted(self) -> Trained:
        """The models of the last completed session, for predictions. Raises HttpError without
        one."""
        trained = await self.ask(self.sessions.fitted)
        if trained is None:
            raise HttpError("NOT_FITTED", f"there is no fitted model: {self._why_not_fitted()}")
        return trained

    def _why_not_fitted(self) -> str:
        """Why there is no model to predict with, and what to do."""
        session = self.sessions.session
        if session.phase is Phase.FINISHED:
            return f"session {session.session_id} has ended without a result: {session.cause}"
        if session.waits_for_request:
            return "request one with POST /v1/fit"
        return f"session {session.session_id} is fitting; see GET /v1/status"

    def _open(self, trained: Trained, entry: Entry) -> Predictor:
        """The predictor of a model; the latest one is kept. Blocks. Raises NoModel and
        HttpError."""
        known, round_ = self._predictor, entry.model.round
        if known is None or (known.session_id, known.round) != (trained.session_id, round_):
            model = trained.load(entry.model)
            self._predictor = known = Predictor(trained.session_id, entry.model, model)
        return known

    # --- questions ---

    async def status(self) -> bodies.Status:
        """State and progress of the present session, and the models to predict with."""

        def find() -> tuple[Session, Strategy, Trained | None, int]:
            sessions = self.sessions
            strategy = sessions.current.driver.strategy
            return sessions.session, strategy, sessions.fitted(), sessions.num_connected()

        session, strategy, trained, num_connected = await self.ask(find)
        fitted = None
        if trained is not None:
            fitted = bodies.Fitted(session=trained.session_id, last=trained.last, best=trained.best)
        finished = session.phase is Phase.FINISHED
        state = "fitting"
        if finished:
            state = "finished" if session.cause == COMPLETED else "failed"
        elif session.waits_for_request:
            state = "waiting"
        share = min(1.0, session.num_trained / session.rules.rounds)
        return bodies.Status.model_validate(
            {
                "state": state,
                "session": session.session_id,
                "phase": session.phase.value,
                "round": session.round,
                "rounds": session.rules.rounds,
                "passes": session.rules.passes,
                "plan": planned(session),
                "progress": 1.0 if state == "finished" else share,
                "connected": num_connected,
                "required": session.rules.num_required,
                "missing": session.missing,
                "waiting_for": waiting_for(session, strategy=strategy),
                "cause": session.cause,
                "workload": session.rules.workload,
                "fitted": fitted,
            }
        )

    async def snapshot(self) -> Snapshot:
        """Snapshot of the Inspection service's answers."""
        inspection = self.sessions.current.server.inspection
        return await self.on_loop(ask_service(inspection, everything=True))

    async def models(self, session_id: str | None = None) -> Trained | None:
        """The models of the present session, or of the one to predict with if it is named; None if
        there are none yet. Raises HttpError if the session is another one."""

        def find() -> Trained | None:
            if session_id not in (None, self.sessions.session.session_id):
                fitted = self.sessions.fitted()
                if fitted is None or fitted.session_id != session_id:
                    raise NoModel("take the present session, or the one to predict with")
                return fitted
            try:
                return self.sessions.models()
            except NoModel:
                return None

        return await self.ask(find)

    async def trained(self, session_id: str | None) -> Trained:
        """The models of the present session, or of the one to predict with if it is named. Raises
        HttpError if there are none yet, or the session is another one."""
        trained = await self.models(session_id)
        if trained is None:
            raise HttpError("NO_MODEL", "the present session has no model yet")
        return trained


def changed(config: CoordinatorConfig, request: bodies.FitRequest) -> CoordinatorConfig:
    """The configuration with what a request changes. Raises HttpError that names the key."""
    sections: dict[str, dict[str, Any]] = {}
    whole = config.given()
    for key in ("rounds", "passes", "epochs", "seed", "min_participants"):
        if (value := getattr(request, key)) is not None:
            sections.setdefault("rounds", {})[key] = value
            if replaced := {"rounds": "passes", "passes": "rounds"}.get(key):
                whole.get("rounds", {}).pop(replaced, None)  # one takes the place of the other
    if (change := request.workload) is not None:
        name = change.name or config.workload.name
        options = whole.get("workload", {}).get("options", {})
        kept = options if name == config.workload.name else {}
        if refused := [key for key in _NOT_FROM_REQUESTS if key in change.options]:
            key = f"workload.options.{refused[0]}"
            raise HttpError("INVALID_SETTING", f"{key}: {_NOT_FROM_REQUESTS[refused[0]]}")
        remedy = {key: value for key, value in change.options.items() if key in REMEDY}
        given = {key: value for key, value in change.options.items() if key not in REMEDY}
        sections["workload"] = {"name": name, "options": {**kept, **given}, **remedy}
        if name != config.workload.name:
            for key in REMEDY:
                whole.get("workload", {}).pop(key, None)
        if own_rule(sections["workload"]) != own_rule(whole.get("workload", {})):
            whole.setdefault("aggregation", {}).update(rule="", options={})
    if (other := request.aggregation) is not None:
        before = whole.pop("aggregation", {})
        is_same = other.rule in (None, "", config.aggregation.rule)
        kept = before.get("options", {}) if is_same else {}
        sections["aggregation"] = {
            "rule": other.rule or before.get("rule", ""),
            "options": {**kept, **other.options},
        }
        optimizer = before.get("optimizer") if other.optimizer is None else other.optimizer
        is_same = optimizer == before.get("optimizer")
        of_optimizer = before.get("optimizer_options", {}) if is_same else {}
        if of_optimizer := {**of_optimizer, **other.optimizer_options}:
            sections["aggregation"]["optimizer_options"] = of_optimizer
        if optimizer is not None:  # else the workload may choose one
            sections["aggregation"]["optimizer"] = optimizer
    if not sections:
        return config
    for name, changes in sections.items():
        whole[name] = {**whole.get(name, {}), **changes}
    try:
        return CoordinatorConfig.model_validate(whole)
    except ValidationError as error:
        told = mistakes(CoordinatorConfig, whole, error)
        raise HttpError("INVALID_SETTING", "; ".join(told)) from None
