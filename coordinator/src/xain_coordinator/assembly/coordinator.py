"""A coordinator of one session: stores, journal, driver and servers, put together."""

import asyncio
import contextlib
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from xain_coordinator.aggregation.rules import (
    mode_option,
    optimizer_of_session,
    rule_of_session,
)
from xain_coordinator.assembly.changed_rules import require_same_rules
from xain_coordinator.assembly.study import Known, Study
from xain_coordinator.assembly.tracking import Tracking
from xain_coordinator.assembly.warm_start import FirstModel, first_model
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.config.sections.workload import PreprocessingSettings, WorkloadSettings
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.keys import base_key_of, model_key
from xain_coordinator.core.vocabulary.values import Phase, Point, Step
from xain_coordinator.driver.clock import SessionClock
from xain_coordinator.driver.driver import Driver
from xain_coordinator.driver.effects import StoreWorker
from xain_coordinator.extensions import plugins
from xain_coordinator.extensions.options import WrongOption, make_named
from xain_coordinator.extensions.strategies import strategy_of_session
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import (
    Clock,
    DirectAccess,
    Fenced,
    KeyNotFound,
    MetricsStore,
    StoreError,
    WeightsStore,
)
from xain_coordinator.server.guard import Guard
from xain_coordinator.server.operators_socket import OperatorsSocket
from xain_coordinator.server.serve import GrpcServer
from xain_coordinator.server.weights.capabilities import Capabilities, PortFile
from xain_coordinator.server.weights.weights_port import Closed, WeightsPort
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.journalled import JournalledStore
from xain_coordinator.stores.opening import open_store
from xain_coordinator.stores.paths import folder_to_path
from xain_coordinator.stores.prefixed import PrefixedAccess, PrefixedStore
from xain_coordinator.stores.secret_files import Secret, authorities_in
from xain_coordinator.telemetry.local_file import LocalMetricsFile
from xain_coordinator.telemetry.log_files import LatencyFile
from xain_coordinator.telemetry.null import NullMetricsStore
from xain_coordinator.telemetry.points import parse_points
from xain_coordinator.telemetry.queue import QueuedMetrics
from xain_coordinator.upkeep.fence import Fence, FencedStore
from xain_coordinator.upkeep.model_copies import ModelCopies, copy_latest
from xain_coordinator.upkeep.model_folder import ModelFolder, folder_of, write_central
from xain_coordinator.upkeep.retention import Retention
from xain_foundation.exit_statuses import CannotStart, CommandFailed
from xain_foundation.logs.logger import get_logger
from xain_foundation.logs.rate_limited_log import RateLimitedLog
from xain_foundation.names import shortened
from xain_foundation.threads import run_to_end
from xain_workloads import workload as workloads

if TYPE_CHECKING:
    from xain_coordinator.driver.own_evaluation import Types
    from xain_coordinator.xain06.bucket import XainBucket
    from xain_workloads.tables.table import Table

log = get_logger(__name__)


# Lifetime of the weights port's URLs. A training that takes longer hands in through gRPC.
URL_LIFETIME_S = 24 * 3600

CERTIFICATE_POINT_S = 600.0  # between two metric points of the coordinator's certificate


class SessionCoordinator:
    """Stores, journal, driver and servers of one coordinator, made from its configuration.

    resume: go on with the session of the journal under its own rules, whatever is configured.
    new_session: open a new one beside it.
    from_model: what a new session begins with; see first_model.
    step: the part of a new session in a study. outcomes: of the study's earlier sessions, as far as
        they are known; those of others are added.
    latencies: the latency stream, if there is one.
    parameters: see InspectionService.
    guard: of this process; by default that of an open coordinator.

    Raises JournalError, StoreError, PluginFailed, CommandFailed,
    DataError, OSError.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        resume: bool = False,
        new_session: bool = False,
        from_model: str = "",
        step: Step | None = None,
        outcomes: Known | None = None,
        latencies: LatencyFile | None = None,
        parameters: Callable[[], str] = str,
        guard: Guard | None = None,
    ) -> None:
        """Open journal and store, take up the session or prepare a new one, and make its parts.
        Nothing is written or served before start(). Blocks."""
        self._config = config
        self._guard = Guard() if guard is None else guard
        rules = config.rules(step)
        self._parameters = parameters
        self._operators_socket = OperatorsSocket(config.journal.path)
        own_data = _own_data(config)
        self._first_model: FirstModel | None = None
        with contextlib.ExitStack() as opened:  # a lock on a file must not outlive a failed start
            self.journal = SqliteJournal(config.journal.path)
            opened.callback(self.journal.close)
            self.weights = open_store(config.storage, try_out=True)  # of all sessions
            opened.callback(self.weights.close)
            if from_model and (new_session or not self.journal.has_session()):
                self._first_model = first_model(from_model, config, self.journal, self.weights)
            first = self._first_model
            self.driver = Driver.open(
                self.journal,
                SessionClock,
                rules if first is None else first.rules(rules),
                lambda: uuid.uuid4().hex[:12],
                new_session=new_session,
                lineage=None if first is None else first.lineage,
                make_strategy=strategy_of_session,
            )
            self.driver.latencies = self._latencies = latencies
            session = self.driver.session
            known = {} if outcomes is None else outcomes
            self.study = Study.of(session, self.journal, known)
            if self.study is not None:
                self.driver.goes_on = self._study_goes_on
                self.driver.took_part = self.study.took_part
            if not resume or session.rules.study:  # later sessions of a study need them
                require_same_rules(session, config, from_model)
            _require_rule(session)
            whole: WeightsStore = self.weights
            if isinstance(whole, FileStore):
                self.journal.make_room = whole.spares.clear
            owners = PrefixedStore(whole, session.session_id)
            self._fence = Fence(owners, self.journal, session.session_id, config.storage.location)
            whole = FencedStore(whole, self._fence.check)
            # Keys are per session, so that a new one never meets the models of the last.
            part = PrefixedStore(whole, session.session_id)
            self.store = JournalledStore(part, self.journal, is_new=self.driver.is_new)
            self._access: DirectAccess | None = None
            if isinstance(self.weights, DirectAccess) and config.storage.presigned:
                self._access = PrefixedAccess(self.weights, session.session_id)
            self._bucket = _xain_bucket(session, whole, self.store, config)
            # Checked first, so that the message names a journal that is behind: the objects that it
            # needs may have been dropped since.
            self._require_latest()
            _require_weights(session, self.store, config)
            self._metrics = _metrics(config, self.driver.clock)
            self._tracking = Tracking(
                config.metrics.trackers,
                config.metrics.path.parent,
                config.journal.path,
                session.session_id,
            )
            opened.pop_all()
        self.counters: Counter[str] = Counter()
        self._metrics_refused = RateLimitedLog(log.warning, "metrics_refused")  # of any sender
        workload = config.workload
        if session.rules.workload:  # its own, whatever is configured now
            workload = WorkloadSettings(
                name=session.rules.workload,
                options=json.loads(session.rules.workload_options or "{}"),
                preprocessing=PreprocessingSettings(
                    **json.loads(session.rules.preprocessing or "{}")
                ),
            )
        self._worker = StoreWorker(
            self.driver,
            self.store,
            self._metrics,
            workloads.create(workload.name, {**workload.options, **mode_option(session.rules)})
            if workload.name
            else None,
            preprocessing=workload.preprocessing.options(),
            publish_further=self._bucket.publish if self._bucket is not None else None,
            require_owner=self._fence.check,
            own_data=own_data,
            keep_central=None
            if config.storage.kind != "files"
            else partial(write_central, folder_of(config.storage.path, session.session_id)),
            personal=config.model.personal or workload.personal,
            checks=config.checks,
            min_sites=config.data_schema.min_sites,
            model_sites=config.data_schema.min_sites if self._guard.is_closed else 1,
        )
        self._copies = ModelCopies(self.store, self._worker.outage)
        self._models: ModelFolder | None = None
        if config.storage.kind == "files":
            self._models = ModelFolder(config.storage.path, session.session_id, self._copies)
        kept, kept_models = config.storage.keep_updates, config.storage.keep_models
        self._retention = Retention(
            self.store,
            None if kept == "all" else kept,
            None if kept_models == "all" else kept_models,
            (lambda rounds: None) if self._models is None else self._models.forget,
        )
        self._weights_port: WeightsPort | None = None
        self._server: GrpcServer | None = None
        self._watches: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        """Port of the gRPC server, once started."""
        return self.server.port

    @property
    def weights_port(self) -> int | None:
        """Port of the weights port, once started; None without one."""
        return None if self._weights_port is None else self._weights_port.port

    @property
    def server(self) -> GrpcServer:
        """The gRPC server, once started."""
        assert self._server is not None, "start() comes first"
        return self._server

    async def start(self) -> None:
        """Start the servers, and resume the session or open a new one.

        Raises CommandFailed, JournalError and StoreError, Fenced among them; then nothing has
        begun, and the journal's sessions are as they were.
        """
        self._weights_port = self._open_weights_port()
        # GrpcServer takes the port. Only then may the driver write the beginning of a new session,
        # which hides the session before for good.
        self._server = GrpcServer(
            self.driver,
            self.store,
            self._metrics,
            self._parse_points,
            self._config,
            self._worker,
            self.counters,
            latencies=self._latencies,
            access=self._access,
            bucket=self._bucket,
            parameters=self._parameters,
            operators_socket=self._operators_socket,
            journal_copied=self.journal_copied,
            study=self._table_of_study,
            weights_port=self._weights_port,
            guard=self._guard,
        )
        # A start that fails must not end the coordinator that runs, and nothing may be acknowledged
        # beside it: after all that can go wrong, and before everything else.
        await run_to_end(self._take_over)
        self._watches.append(
            asyncio.create_task(self._fence.watch(self.driver, self._worker.outage))
        )
        if self.driver.is_new:
            # The new session hides the objects in the journal of the one before it.
            await run_to_end(copy_latest, self.weights, self.journal)
        if self._first_model is not None:
            at = self.driver.clock.now()
            events = await run_to_end(self._first_model.events, self.store, at)
            self.driver.begin_with(events)
        await run_to_end(self._worker.rebuild_damaged)  # what is offered is what was published
        is_new = self.driver.is_new
        self.driver.start(self._worker)
        self._watches.append(asyncio.create_task(self._note_session(is_new=is_new)))
        if self._guard.is_closed:
            self._watches.append(asyncio.create_task(self._measure_certificates()))
        self._watches.append(asyncio.create_task(self._retention.watch(self.driver)))
        self._watches.append(asyncio.create_task(self._copies.watch(self.driver)))
        self._watches.append(asyncio.create_task(self._tracking.watch(self.driver)))
        if self._models is not None:
            self._watches.append(asyncio.create_task(self._models.watch(self.driver)))
        await self._server.start()

    async def _measure_certificates(self) -> None:
        """Write metric points of the coordinator's certificate every CERTIFICATE_POINT_S, until the
        task is cancelled."""
        while True:
            fields = self._guard.fields_of_metrics
            self._metrics.write((Point("certificate", fields),))
            await asyncio.sleep(CERTIFICATE_POINT_S)  # the interval of the points

    async def _note_session(self, *, is_new: bool) -> None:
        """Have the audit log tell of the session's opening or resumption now, and of its end when
        it comes."""
        session = self.driver.session
        about = {"session": session.session_id}
        if is_new:
            lineage = session.lineage
            began_with = {} if lineage is None else {"began_with": lineage.source}
            await self._guard.try_to_note("session_opened", **about, **began_with)
        elif session.phase is not Phase.FINISHED:
            await self._guard.try_to_note("session_resumed", **about, round=session.round)
        if session.phase is Phase.FINISHED:
            return
        with contextlib.suppress(Unavailable):  # the process stops
            while self.driver.session.phase is not Phase.FINISHED:
                await self.driver.wait_for_change()
        if self.driver.session.phase is Phase.FINISHED:
            cause = self.driver.session.cause
            await self._guard.try_to_note("session_finished", **about, cause=cause)

    def _study_goes_on(self) -> bool:
        """Whether another session of the study follows on this one, which is finished."""
        driver = self.driver
        return (
            self.study is not None
            and self.study.next_step(driver.session, driver.history) is not None
        )

    def _table_of_study(self) -> str:
        """The table of the study as JSON; "" if the session is of none."""
        driver = self.driver
        return "" if self.study is None else self.study.table(driver.session, driver.history)

    def _open_weights_port(self) -> WeightsPort | None:
        """Open the weights port; None if it is off, the store is not of files, or no port is free
        and none was asked for. A new port number is kept for the next start. Raises
        CommandFailed and StoreError."""
        server, store = self._config.server, self.weights
        if server.weights_port == "off" or not isinstance(store, FileStore):
            return None
        session_id = self.driver.session.session_id
        folder = self._config.storage.path / folder_to_path(session_id)
        kept = PortFile.of(folder)
        capabilities = Capabilities(kept.secret, session_id, URL_LIFETIME_S)
        guard, closed = self._guard, None
        if guard.certificates is not None:
            closed = Closed(guard.certificates, guard.caller_of, guard.note_refused)
        try:
            port = WeightsPort(
                (server.host, server.weights_port),
                capabilities,
                lambda key: store.open(f"{session_id}/{key}"),
                preferred=kept.port,
                advertised=server.weights_address,
                closed=closed,
            )
        except CommandFailed as error:
            if server.weights_port:
                raise
            log.warning("no_weights_port", round=self.driver.session.round, reason=str(error))
            return None  # nobody has asked for it, and gRPC carries the weights
        if kept.port != port.port:
            kept.port = port.port
            kept.save()
        return port

    def _take_over(self) -> None:
        """Make this coordinator the store's only writer of the session. Raises Fenced and
        StoreError."""
        # A copy that is behind must not end the coordinator that is ahead of it. Afterwards the
        # other one publishes nothing more; what it has published meanwhile is seen here.
        self._require_latest()
        self._fence.take_over()
        self._require_latest()

    def _require_latest(self) -> None:
        """Check that the store has no model that the journal does not know. Raises Fenced and
        StoreError."""
        _require_latest(self.driver.session, self.store, self._config)

    @contextlib.asynccontextmanager
    async def journal_copied(self) -> AsyncIterator[Path]:
        """Yield the path of a copy of the journal as it is now. In the block no object that it
        names is removed; after it the copy is. Raises JournalError."""
        path = self._config.journal.path.with_suffix(".copy").absolute()
        async with self._retention.pause:
            try:
                path.unlink(missing_ok=True)  # of a coordinator that was killed meanwhile
                await run_to_end(self.journal.copy_to, path)
                yield path
            finally:
                path.unlink(missing_ok=True)

    async def stop(self) -> None:
        """Stop serving, drain, persist. A step that fails does not keep the others from happening;
        its error is raised at the end."""
        self._retention.stop()
        async with contextlib.AsyncExitStack() as steps:  # the last one first
            steps.push_async_callback(asyncio.to_thread, self.weights.close)
            if self._models is not None and not self.driver.is_new:
                # Models that the watch has not shown yet: there may be no later start.
                show = self._models.show
                steps.push_async_callback(asyncio.to_thread, show, self.driver.session)
            # A watch may hang in a store that does not answer.
            steps.push_async_callback(self._end_watches)
            steps.push_async_callback(asyncio.to_thread, self._tracking.finish, self.driver)
            steps.push_async_callback(asyncio.to_thread, self._metrics.close)
            steps.push_async_callback(self.driver.close)
            if not self.driver.is_new and self.driver.failure is None:
                steps.push_async_callback(self._copies.copy_now, self.driver)
            steps.push_async_callback(self.driver.end)
            steps.push_async_callback(self._worker.close)
            if self._server is not None:
                steps.push_async_callback(self._server.stop, self._config.server.drain_s)
            elif self._weights_port is not None:
                steps.push_async_callback(self._weights_port.stop, 0.0)

    async def _end_watches(self) -> None:
        """Cancel the tasks that follow the session, and wait for their ends."""
        for watch in self._watches:
            watch.cancel()
        if self._watches:
            await asyncio.wait(self._watches)

    def _parse_points(self, participant_id: str, round_: int, text: str) -> tuple[Point, ...]:
        """Metric points that a participant has sent, tagged with its name alone. An invalid rest of
        the text is logged and counted."""
        points, error = parse_points(text, self.driver.clock.wall_ns())
        if error is not None:
            self.counters["invalid_metrics"] += 1
            self._metrics_refused(
                participant=shortened(participant_id), round=round_, error=shortened(error, 200)
            )
        # A participant reports about itself only, whatever its points say.
        tags = {"id": participant_id}
        return tuple(replace(point, tags=tags) for point in points)


def _require_rule(session: Session) -> None:
    """Check that the session's rule and optimiser can be loaded, before a round is trained. Raises
    PluginFailed."""
    if session.phase is Phase.FINISHED:
        return  # nothing is combined any more
    rules = session.rules
    rule_of_session(rules.aggregation, rules.aggregation_options)
    if rules.optimizer:
        optimizer_of_session(rules.optimizer, rules.optimizer_options)


def _require_weights(session: Session, store: WeightsStore, config: CoordinatorConfig) -> None:
    """Check that the session's objects are in the configured store. Raises StoreError. Going on
    without them would end the session: what was acknowledged would count as lost."""
    refs = [] if session.model is None else [session.model.ref, *session.model.state.values()]
    refs += [base.model.ref for base in session.buffered.bases.values()]
    if session.open_round is not None:
        refs += [update.weights.ref for update in session.open_round.updates.values()]
    # Listed by round: a request for each of a thousand updates would take a store a while.
    keys = [ref.key for ref in refs]
    folders = {base_key_of(key).rpartition("/")[0] for key in keys}
    present = {key for folder in folders for key in store.keys(f"{folder}/")}
    for key in keys:
        if key not in present:
            raise StoreError(
                f"the journal {config.journal.path} goes on from {session.session_id}/{key}, "
                f"which is not in {config.storage.location}; is it the right one, and its data all "
                "there? A journal from before later rounds cannot be gone on from: updates are "
                "dropped when their round is over ([storage] keep_updates). xain-coordinator "
                "repair lists all that is missing, and drops an update"
            )


def _require_latest(session: Session, store: WeightsStore, config: CoordinatorConfig) -> None:
    """Check that the store holds no model that this journal does not know, from another coordinator
    of the session. Raises Fenced, and the store's errors.

    Taking over would end the coordinator that made it, and lead to another model of that round,
    which cannot be published.
    """
    if session.model is None or session.phase is Phase.FINISHED:
        return
    # The model that is being made may be there: its writer can have died before it said so.
    is_asked_for = session.phase is Phase.AGGREGATING
    key = model_key(session.model.round + (2 if is_asked_for else 1))
    try:
        store.open(key, 0, 1).close()
    except KeyNotFound:
        return
    raise Fenced(
        f"{config.storage.location} has {session.session_id}/{key}, which the journal "
        f"{config.journal.path} has not come to: the session has gone on from another copy of it; "
        "start that one. If it is lost for good, or there is none and the end of this journal's "
        "write-ahead log is lost, and with it what was acknowledged there, delete this model "
        "and those after it and start again"
    )


def _xain_bucket(
    session: Session, bare: WeightsStore, store: WeightsStore, config: CoordinatorConfig
) -> "XainBucket | None":
    """Bucket of XAIN's participants for models and updates, if there are to be any. A new session
    must find it without another one's weights, whose names would be the same. Raises StoreError."""
    if config.storage.format != "xain-pickle":
        return None
    from xain_coordinator.xain06.bucket import XainBucket

    # 0/global may be ours: its writer can have died before it was journalled.
    foreign = (k for r in (0, 1) for k in bare.keys(f"{r}/") if k != model_key(0))
    if session.model is None and (found := next(foreign, None)) is not None:
        raise StoreError(
            f"{found} is there already in {config.storage.location}, from another session; XAIN's "
            "participants know one session a bucket: empty it, or choose another"
        )
    return XainBucket(bare, store, config.server.max_update_bytes)


def _own_data(config: CoordinatorConfig) -> "Callable[[Types], Table] | None":
    """Read the data that the coordinator evaluates models on, if there are any. Returns a function
    that reads them with the types of columns. Raises DataError."""
    evaluate = config.evaluate
    if not evaluate.data:
        return None
    from xain_coordinator.driver.own_evaluation import load_own_data

    load = partial(load_own_data, evaluate.data, evaluate)
    load(tuple(config.data_schema.columns.items()))  # a wrong file is told at the start
    return load


def metrics_plugin(name: str, options: Mapping[str, object]) -> MetricsStore:
    """The metrics store of a plug-in. Raises PluginFailed, and what the plug-in raises."""
    try:
        kind: object = plugins.load(plugins.METRICS, name, {})
        made: MetricsStore = make_named(
            kind, "metrics store", name, options, ("num_lost", "write", "close")
        )
        return made
    except KeyError:
        raise plugins.PluginFailed(f"the metrics store {name!r} is not installed") from None
    except WrongOption as error:
        raise CannotStart(f"metrics.options.{error}") from None


def _metrics(config: CoordinatorConfig, clock: Clock) -> MetricsStore:
    """The metrics store of the configuration: none, InfluxDB, a file, or a plug-in's."""
    if config.metrics.kind == "none":
        return NullMetricsStore()
    if config.metrics.kind == "influxdb":
        from xain_coordinator.telemetry.influx import LINGER_S, InfluxWriter

        chosen = config.metrics
        token = Secret("metrics", chosen, "token")
        authorities = authorities_in("metrics", chosen.ca_file)
        writer = InfluxWriter(chosen.url, chosen.org, chosen.bucket, token, authorities=authorities)
        return QueuedMetrics(writer, clock.wall_ns, linger_s=LINGER_S)
    if config.metrics.kind != "file":
        return metrics_plugin(config.metrics.kind, config.metrics.options)
    return LocalMetricsFile(config.metrics.path, clock.wall_ns)
