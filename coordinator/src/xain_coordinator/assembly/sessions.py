"""The sessions of one process, one after the other: of serve mode, and of a study.

A fit that is requested while a session waits for it starts that session. After the end of a session
a fit opens the next one: its coordinator, with the gRPC server, is stopped, and another one is
started on the same port, journal and weights store. Participants find it as they find a coordinator
that was restarted.

Sessions run on the event loop of the gRPC server.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.rules.pacing import names_of
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary.commands import CancelFit, RequestFit
from xain_coordinator.core.vocabulary.errors import Reason, Refusal, Unavailable
from xain_coordinator.core.vocabulary.values import ParticipantState, Phase, Step, WeightsRef
from xain_coordinator.driver.driver import Driver
from xain_coordinator.journal.restore import restore_session
from xain_coordinator.ports import JournalError, Reader, WeightsStore
from xain_coordinator.stores.integrity import read_weights
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_foundation.logs.logger import get_logger
from xain_wire.metadata import COMPLETED

if TYPE_CHECKING:  # the program's tables come with it, which a start need not wait for
    from xain_coordinator.export.trained import Trained

log = get_logger(__name__)


# How long a fit waits for the participants of the session before, beyond those that it needs, where
# the session does not wait for as many.
REJOIN_S = 5.0
POLL_S = 0.05  # a rendezvous sends no notification

# How often a wait for the end of a session looks whether participants are still connected.
LOOK_S = 0.5


STOPPING = "the coordinator is shutting down; the fit goes on when it is back"


class NoParticipants(Exception):
    """Too few participants are connected."""


class Sessions:
    """current: the coordinator of the present session.

    open_next: start the coordinator of a new session; None if the process is told to stop
        meanwhile. Its configuration has the ports in use.
    failed: set when the process cannot go on, because of `failure`.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        coordinator: SessionCoordinator,
        open_next: Callable[[CoordinatorConfig, Step | None], Awaitable[SessionCoordinator | None]],
    ) -> None:
        self.current = coordinator
        server = config.server.model_copy(update={"port": coordinator.port})
        self.config = config.model_copy(update={"server": server})
        self._start_next = open_next
        self._opening = asyncio.Lock()
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self.stopping = asyncio.Event()
        self._fitted: Trained | None = None  # the latest one that is known
        self._watching = asyncio.create_task(self._watch(coordinator))

    @property
    def session(self) -> Session:
        """The present session, up to its last durable event."""
        return self.current.driver.session

    @property
    def is_opening(self) -> bool:
        """Whether a fit is being started, for which the next session may be opened."""
        return self._opening.locked()

    async def load_fitted(self) -> None:
        """Find the models of the last session that was completed, in the journal if it is not the
        present one, so that fitted() has them."""
        if self.fitted() is not None:
            return
        try:
            self._fitted = await asyncio.to_thread(self._last_completed)
        except JournalError as error:  # the present session goes on without them
            log.warning("earlier_models_not_found", round=self.session.round, error=str(error))

    def fitted(self) -> "Trained | None":
        """The models of the last session that was completed; None if there is none yet. Models of a
        session that trains, or has ended without a result, are not among them."""
        driver = self.current.driver
        known = self._fitted
        if known is None or known.session_id != driver.session.session_id:
            found = self._trained(driver.session, driver.history)
            self._fitted = known = found or known
        return known

    def models(self) -> "Trained":
        """The models of the present session, whatever its state. Raises NoModel."""
        driver = self.current.driver
        return self._models_of(driver.session, driver.history)

    async def fit(self, config: CoordinatorConfig) -> Driver:
        """Request a fit under the rules of this configuration. Returns the session's driver.

        On return the request is in the journal: the fit goes on after a kill. Raises
        ALREADY_FITTING, NoParticipants, Unavailable and what opening a session raises.
        """
        if self.is_opening:
            raise Refusal(
                Reason.ALREADY_FITTING, "another fit is being started; wait until it is finished"
            )
        async with self._opening:
            session = self.session
            if session.phase is not Phase.FINISHED and not session.waits_for_request:
                raise Refusal(
                    Reason.ALREADY_FITTING,
                    f"session {session.session_id} is fitting; wait until it is finished",
                )
            expected = 0
            if not session.waits_for_request or not self._is_of(session, config):
                if session.phase is Phase.FINISHED:  # it stays if the fit cannot begin
                    await self._wait_for_participants(config.rules().num_required)
                expected = self.num_connected()
                await self.open_next(config)
            rules = self.session.rules
            if rules.start_participants >= expected:
                expected = 0  # the session itself waits for them, and declares for how long
            await self._wait_for_participants(rules.num_required, expected)
            if self.session.waits_for_request:  # else it starts by itself
                await self.current.driver.submit(RequestFit())
            return self.current.driver

    async def cancel(self) -> None:
        """End the fit of the present session without a result. Raises NOT_FITTING and
        Unavailable."""
        await self.current.driver.submit(CancelFit())

    async def wait_for_end(self, driver: Driver) -> Session:
        """Wait for the end of the session that a fit has returned. Returns the session.

        Raises NoParticipants when the last participant has been away for
        http.participants_timeout_s, although the session goes on when enough are back, and
        Unavailable.
        """
        loop = asyncio.get_running_loop()
        alone_since: float | None = None
        while (session := driver.session).phase is not Phase.FINISHED:
            if self.stopping.is_set():
                raise Unavailable(STOPPING)
            alone_since = None if session.members.num_eligible else alone_since or loop.time()
            timeout_s = self.config.http.participants_timeout_s
            if alone_since is not None and loop.time() - alone_since > timeout_s:
                raise NoParticipants(
                    "no participant is connected any more; the fit goes on when "
                    f"{session.rules.num_required} are back{self._missing()}"
                )
            try:
                async with asyncio.timeout(LOOK_S):
                    await driver.wait_for_change()
            except TimeoutError:
                pass
            except Unavailable:
                raise Unavailable(STOPPING) from None
        return session

    async def study(self) -> None:
        """Open one session of a study after the other, until the last one is finished. Raises
        Unavailable when the process stops, and what opening a session raises."""
        while (study := self.current.study) is not None:
            driver = self.current.driver
            while driver.session.phase is not Phase.FINISHED:
                await driver.wait_for_change()
            if reason := study.why_not_compared(driver.session, driver.history):
                log.warning(
                    "option_not_compared",
                    study=study.step.shown,
                    round=driver.session.round,
                    reason=reason,
                )
            step = study.next_step(driver.session, driver.history)
            if step is None:
                log.info("study_finished", study=study.step.study, round=driver.session.round)
                return
            async with self._opening:
                if self.stopping.is_set():
                    return
                await self.open_next(self.config, step)

    async def close(self) -> None:
        """End all waits with Unavailable. The caller stops the present coordinator."""
        self.stopping.set()
        async with self._opening:  # a session that is being opened
            self._watching.cancel()

    # --- the next session ---

    def _is_of(self, session: Session, config: CoordinatorConfig) -> bool:
        """Whether a fit of this configuration can have the present session, without a new one."""
        if session.lineage is not None and config is self.config:
            return True  # it begins with a model, and that changes its rules
        return session.rules == config.rules()

    def num_connected(self) -> int:
        """How many eligible participants are connected. After the end: participants that have
        stayed, or come since, for the next session."""
        session = self.session
        if session.phase is not Phase.FINISHED:
            return session.members.num_eligible
        return len(self._connected())

    def _connected(self) -> set[str]:
        """Names of connected eligible participants; after the end, of those that are there."""
        driver = self.current.driver
        members, lease_s = driver.session.members, driver.session.rules.lease_s
        if driver.session.phase is not Phase.FINISHED:
            return set(members.eligible)
        now = driver.clock.now()
        stayed = {n for n in members.eligible if members.is_connected_after_end(n, lease_s, now)}
        return stayed | {
            name
            for name, sign in members.heard.items()
            if name not in members
            and sign.state is not ParticipantState.FINISHED
            and now < sign.at + lease_s
        }

    async def open_next(self, config: CoordinatorConfig, step: Step | None = None) -> None:
        """Stop the present coordinator and start one with a new session in its place.

        step: its part in a study. Raises what opening a session raises, after which the process
        ends, and Unavailable if it is told to stop.
        """
        before = self.current
        self.fitted()  # while its history is at hand
        self._watching.cancel()
        try:
            await before.stop()
            server = self.config.server
            coordinator = await self._start_next(config.model_copy(update={"server": server}), step)
        except BaseException as error:  # the process ends, whatever it is
            log.error("next_session_failed", round=self.session.round, error=str(error))
            self.fail(error)
            raise
        if coordinator is None:
            raise Unavailable("the coordinator is shutting down; no session was opened")
        self.current = coordinator
        self._watching = asyncio.create_task(self._watch(coordinator))
        fields = {} if step is None else {"study": step.shown}
        log.info("session_opened", session=self.session.session_id, round=0, **fields)

    async def _wait_for_participants(self, required: int, expected: int = 0) -> None:
        """Wait until `required` participants are connected, and for a moment until `expected` ones
        are. Raises NoParticipants and Unavailable."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        timeout_s = self.config.http.participants_timeout_s
        while True:
            connected = self.num_connected()
            waited_s = loop.time() - began
            if connected >= required and (connected >= expected or waited_s > REJOIN_S):
                return
            if self.stopping.is_set():
                raise Unavailable("the coordinator is shutting down; the fit was not started")
            if waited_s > timeout_s:
                raise NoParticipants(
                    f"{connected} of {required} participants are connected; the fit was not started"
                    f"{self._missing()}"
                )
            await asyncio.sleep(POLL_S)  # a poll: see POLL_S

    def _missing(self) -> str:
        """The end of a message: expected participants that are not connected."""
        names = set(self.config.rounds.expected_participants) - self._connected()
        return f"; missing: {names_of(sorted(names))}" if names else ""

    async def _watch(self, coordinator: SessionCoordinator) -> None:
        """Wait until the coordinator's driver has failed, and fail these sessions then."""
        await coordinator.driver.failed.wait()
        failure = coordinator.driver.failure
        assert failure is not None, "it says why"
        self.fail(failure)

    def fail(self, error: BaseException) -> None:
        """End the process because of this error."""
        self.failure = error
        self.failed.set()

    # --- models ---

    def _trained(self, session: Session, history: History) -> "Trained | None":
        """The models of a session that was completed with a model; None for any other."""
        if session.phase is not Phase.FINISHED or session.cause != COMPLETED:
            return None
        if session.model is None or session.model.is_empty:
            return None
        return self._models_of(session, history)

    def _models_of(self, session: Session, history: History) -> "Trained":
        """The models of a session, read from the store when they are asked for. Raises NoModel."""
        from xain_coordinator.export.trained import Trained

        session_id = session.session_id
        return Trained.of(
            session, history, lambda ref: read_weights(self.store_of(session_id), ref.key)
        )

    def open(self, session_id: str, ref: WeightsRef) -> Reader:
        """Open a stored object. Blocks; for any thread. Raises StoreError."""
        return self.store_of(session_id).open(ref.key)

    def store_of(self, session_id: str) -> WeightsStore:
        """The store of a session's objects, of the present session or an earlier one."""
        current = self.current
        if session_id == current.driver.session.session_id:
            return current.store
        return PrefixedStore(current.weights, session_id)

    def _last_completed(self) -> "Trained | None":
        """The models of the newest completed session in the journal; None if there is none. Reads
        whole sessions from the newest on. Blocks. Raises JournalError."""
        journal = self.current.journal
        for session_id in reversed(journal.session_ids()):
            records = journal.records_of(session_id)
            assert records is not None, "the journal has just named it"
            last = restore_session(records)
            if (found := self._trained(last.session, last.history)) is not None:
                return found
        return None
