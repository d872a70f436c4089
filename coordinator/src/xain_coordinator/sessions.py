"""The sessions of one process, one after the other: serve mode.

A fit that is requested while a session waits for it starts that session. After the end of a session
a fit opens the next one: its coordinator, with the gRPC server, is stopped, and another one is
started on the same port, journal and weights store. Participants find it as they find a coordinator
that was restarted.

Sessions run on the event loop of the gRPC server.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from xain_coordinator.admission import chunks
from xain_coordinator.app import Coordinator
from xain_coordinator.bundles import open_weights
from xain_coordinator.config import CoordinatorConfig
from xain_coordinator.core.commands import CancelFit, RequestFit
from xain_coordinator.core.errors import AlreadyFitting, Unavailable
from xain_coordinator.core.membership import is_connected_after_end
from xain_coordinator.core.session import Session
from xain_coordinator.core.values import ParticipantState, Phase, WeightsRef
from xain_coordinator.history import History
from xain_coordinator.ports import JournalError, Reader, WeightsStore
from xain_coordinator.restore import restore_session
from xain_coordinator.stores.prefixed import PrefixedStore

if TYPE_CHECKING:  # the program's tables come with it, which a start need not wait for
    from xain_coordinator.export.trained import Trained

log = structlog.get_logger(__name__)

COMPLETED = "completed"

# How long a fit waits for the participants of the session before, beyond those that it needs.
REJOIN_S = 5.0
POLL_S = 0.05  # joining notifies nobody

MAX_ENDS = 100  # ends of sessions that are remembered for those who wait for them


class NoParticipants(Exception):
    """Too few participants are connected."""


class Stopping(Exception):
    """The process is shutting down."""


@dataclass(frozen=True, slots=True)
class End:
    """The end of a session. cause: "completed", or what went wrong."""

    session_id: str
    cause: str


class Sessions:
    """current: the coordinator of the present session.

    open_next: start the coordinator of a new session; None if the process is told to stop
        meanwhile. Its configuration has the ports in use.
    failed: set when the process cannot go on, because of `failure`.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        coordinator: Coordinator,
        open_next: Callable[[CoordinatorConfig], Awaitable[Coordinator | None]],
    ) -> None:
        self.current = coordinator
        server = config.server.model_copy(update={"port": coordinator.port})
        self.config = config.model_copy(update={"server": server})
        self._start_next = open_next
        self._opening = asyncio.Lock()
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        self.stopping = asyncio.Event()
        self._ends: dict[str, End] = {}
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
        present one."""
        if self.fitted() is not None:
            return
        try:
            self._fitted = await asyncio.to_thread(self._completed_before)
        except JournalError as error:  # the present session goes on without them
            log.warning("earlier_models_not_found", round=self.session.round, error=str(error))

    def fitted(self) -> "Trained | None":
        """The models of the last session that was completed; None if there is none yet.

        Models of a session that trains, or has ended without a result, are not among them.
        """
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

    async def fit(self, config: CoordinatorConfig) -> str:
        """Request a fit under the rules of this configuration. Returns the session's id.

        On return the request is in the journal: the fit goes on after a kill. Raises
        AlreadyFitting, NoParticipants, Unavailable and what opening a session raises.
        """
        if self.is_opening:
            raise AlreadyFitting("another fit is being started; wait until it is finished")
        async with self._opening:
            session = self.session
            if session.phase is not Phase.FINISHED and not session.waits_for_request:
                raise AlreadyFitting(
                    f"session {session.session_id} is fitting; wait until it is finished"
                )
            expected = 0
            if not session.waits_for_request or not self._is_of(session, config):
                if session.phase is Phase.FINISHED:  # it stays if the fit cannot begin
                    await self._gathered(config.rules().num_required)
                expected = self.num_connected()
                await self._open_next(config)
            await self._gathered(self.session.rules.num_required, expected)
            if self.session.waits_for_request:  # else it starts by itself
                await self.current.driver.submit(RequestFit())
            return self.session.session_id

    async def cancel(self) -> str:
        """End the fit of the present session without a result. Returns the session's id.

        Raises NotFitting and Unavailable.
        """
        await self.current.driver.submit(CancelFit())
        return self.session.session_id

    async def ended(self, session_id: str) -> End:
        """Wait for the end of a session.

        Raises NoParticipants when the last participant has been away for
        http.participants_timeout_s, although the session goes on when enough are back, and
        Stopping.
        """
        loop = asyncio.get_running_loop()
        alone_since: float | None = None
        while True:
            driver = self.current.driver
            session = driver.session
            if session_id in self._ends:
                return self._ends[session_id]
            if session.session_id == session_id and session.phase is Phase.FINISHED:
                return End(session_id, session.cause)
            if self.stopping.is_set() or self.failed.is_set():
                raise Stopping("the coordinator is shutting down; the fit goes on when it is back")
            is_alone = not session.num_eligible
            alone_since = (alone_since or loop.time()) if is_alone else None
            timeout_s = self.config.http.participants_timeout_s
            if alone_since is not None and loop.time() - alone_since > timeout_s:
                raise NoParticipants(
                    "no participant is connected any more; the fit goes on when "
                    f"{session.rules.num_required} are back"
                )
            with contextlib.suppress(TimeoutError, Unavailable):
                async with asyncio.timeout(0.5):
                    await driver.changed()
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """End all waits with Stopping. The caller stops the present coordinator."""
        self.stopping.set()
        async with self._opening:  # a session that is being opened
            self._watching.cancel()

    # --- the next session ---

    def _is_of(self, session: Session, config: CoordinatorConfig) -> bool:
        """Whether a session that waits has the rules of this configuration."""
        if session.lineage is not None and config is self.config:
            return True  # it begins with a model, and that changes its rules
        return session.rules == config.rules()

    def num_connected(self) -> int:
        """Eligible participants that are connected. After the end: participants that have stayed,
        or come since, for the next session."""
        driver = self.current.driver
        session = driver.session
        if session.phase is not Phase.FINISHED:
            return session.num_eligible
        now, lease_s = driver.clock.now(), session.rules.lease_s
        stayed = sum(
            member.is_eligible
            and is_connected_after_end(
                member, session.heard.get(name), session.lease_floor, lease_s, now
            )
            for name, member in session.members.items()
        )
        return stayed + sum(
            name not in session.members
            and sign.state is not ParticipantState.FINISHED
            and now < sign.at + lease_s
            for name, sign in session.heard.items()
        )

    async def _open_next(self, config: CoordinatorConfig) -> None:
        """Stop the present coordinator and start one with a new session in its place."""
        before = self.current
        self.fitted()  # while its history is at hand
        self._note_end(before.driver.session)
        self._watching.cancel()
        try:
            await before.stop()
            server = self.config.server
            if self.config.storage.kind == "memory":
                self._fitted = None  # its models have gone with the store
            coordinator = await self._start_next(config.model_copy(update={"server": server}))
        except BaseException as error:
            log.error("next_session_failed", round=self.session.round, error=str(error))
            self._fail(error)
            raise
        if coordinator is None:
            raise Unavailable("the coordinator is shutting down; the fit was not started")
        self.current = coordinator
        self._watching = asyncio.create_task(self._watch(coordinator))
        log.info("session_opened", session=self.session.session_id, round=0)

    def _note_end(self, session: Session) -> None:
        if session.phase is Phase.FINISHED:
            self._ends[session.session_id] = End(session.session_id, session.cause)
            for forgotten in list(self._ends)[:-MAX_ENDS]:
                del self._ends[forgotten]

    async def _gathered(self, required: int, expected: int = 0) -> None:
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
                )
            await asyncio.sleep(POLL_S)

    async def _watch(self, coordinator: Coordinator) -> None:
        await coordinator.driver.failed.wait()
        failure = coordinator.driver.failure
        assert failure is not None, "it says why"
        self._fail(failure)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.failed.set()

    # --- models ---

    def _trained(self, session: Session, history: History) -> "Trained | None":
        if session.phase is not Phase.FINISHED or session.cause != COMPLETED:
            return None
        if session.model is None or session.model.is_empty:
            return None
        return self._models_of(session, history)

    def _models_of(self, session: Session, history: History) -> "Trained":
        from xain_coordinator.export.trained import Trained

        best = session.evaluation.best
        session_id = session.session_id
        return Trained(
            session_id,
            tuple(history.models.values()),
            tuple(history.rounds),
            None if best is None else best.round,
            lambda ref: self._read(session_id, ref),
        )

    def open(self, session_id: str, ref: WeightsRef) -> Reader:
        """A stored object; blocks, in any thread. Raises StoreError."""
        return open_weights(self.store_of(session_id), ref.key)

    def store_of(self, session_id: str) -> WeightsStore:
        """The models of a session, the present one or an earlier one."""
        return PrefixedStore(self.current.weights, session_id)

    def _read(self, session_id: str, ref: WeightsRef) -> bytes:
        with self.open(session_id, ref) as reader:
            return b"".join(chunks(reader))

    def _completed_before(self) -> "Trained | None":
        journal = self.current.journal
        for session_id in reversed(journal.session_ids()):
            records = journal.records_of(session_id)
            assert records is not None, "the journal has just named it"
            last = restore_session(records)
            if (found := self._trained(last.session, last.history)) is not None:
                return found
        return None
