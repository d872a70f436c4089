"""A coordinator process: configuration in, exit status out."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from xain_coordinator.aggregation.rules import optimizer_of_session, rule_of_session
from xain_coordinator.aggregation.trees import mode_option
from xain_coordinator.config.coordinator import (
    CoordinatorConfig,
    CoordinatorLoggingSettings,
    PreprocessingSettings,
    WorkloadSettings,
)
from xain_coordinator.config.parameters import ParametersSettings
from xain_coordinator.core.keys import model_key, object_of, place_of
from xain_coordinator.core.selection import ControllerFailed
from xain_coordinator.core.session import Session
from xain_coordinator.core.values import Phase, Point, Rules
from xain_coordinator.driver.clock import SessionClock
from xain_coordinator.driver.driver import Driver
from xain_coordinator.driver.effects import FIRST_RETRY_S, LAST_RETRY_S, StoreWorker
from xain_coordinator.driver.fence import Fence, FencedStore, TakenOver
from xain_coordinator.driver.model_copies import ModelCopies, copy_latest
from xain_coordinator.driver.own_evaluation import Types, load_own_data
from xain_coordinator.driver.retention import Retention
from xain_coordinator.extensions.controllers import controller_of_session
from xain_coordinator.extensions.plugins import PluginFailed
from xain_coordinator.journal.memory import MemoryJournal
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.metrics.local_file import LocalMetricsFile
from xain_coordinator.metrics.null import NullMetricsStore
from xain_coordinator.metrics.points import parse_points
from xain_coordinator.ports import (
    Clock,
    DirectAccess,
    Fenced,
    Journal,
    JournalError,
    KeyNotFound,
    MetricsStore,
    StoreError,
    StoreUnavailable,
    WeightsStore,
)
from xain_coordinator.process.allocator import configure_allocator
from xain_coordinator.process.changed_rules import OtherRules, differences, require_same_rules
from xain_coordinator.process.log_files import LatencyFile, status_stream
from xain_coordinator.process.warm_start import CannotStartFrom, FirstModel, first_model
from xain_coordinator.server.capabilities import Capabilities, PortFile
from xain_coordinator.server.inspection_service import InspectionService
from xain_coordinator.server.predictions import RemotePredictor
from xain_coordinator.server.serve import GrpcServer
from xain_coordinator.server.weights_port import PortTaken, WeightsPort
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.journalled import JournalledStore
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.stores.model_folder import ModelFolder
from xain_coordinator.stores.paths import folder_to_path
from xain_coordinator.stores.prefixed import PrefixedAccess, PrefixedStore
from xain_foundation import logs
from xain_foundation.commands import EXIT_BAD_CONFIG
from xain_foundation.fields import WrongSetting
from xain_foundation.line_file import why_unwritable
from xain_foundation.names import shortened
from xain_foundation.rare_lines import RareLine
from xain_foundation.threads import run_to_end
from xain_workloads import workload as workloads
from xain_workloads.errors import DataError
from xain_workloads.neural_builders import allow_builders
from xain_workloads.neural_modules import use_threads
from xain_workloads.table import Table

if TYPE_CHECKING:
    from xain_coordinator.process.parameter_group import ParameterGroup
    from xain_coordinator.process.sessions import Sessions
    from xain_coordinator.xain06.bucket import XainBucket

T = TypeVar("T")

log = structlog.get_logger(__name__)

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_FENCED = 3  # another coordinator goes on; starting this one again would not help

SWITCH_INTERVAL_S = 0.0005
COLLECTED_OBJECTS = 10_000

# How long a start waits for a remote store: long enough for a stack that comes up together.
PATIENCE_S = 60.0

# Threads that wait for a store; the default would be a few more than processors.
NUM_THREADS = 32

# Lifetime of the weights port's URLs. A training that takes longer hands in through gRPC.
URL_LIFETIME_S = 24 * 3600

# For what comes after the drain: the last commit, and metrics, which take up to 5 s to give up.
LAST_STEPS_S = 8.0


STARTING_ERRORS = (
    JournalError,
    StoreError,
    ControllerFailed,
    PluginFailed,
    PortTaken,
    OtherRules,
    CannotStartFrom,
    DataError,
    OSError,
)


class Coordinator:
    """Everything that one coordinator consists of, put together from its configuration.

    resume: go on with the session of the journal under its own rules, whatever is configured.
    new_session: open a new one beside it.
    from_model: what a new session begins with; see first_model.
    latencies: the latency stream, if there is one.
    parameters: the status of the parameter server in this process as JSON; empty without one.

    Raises JournalError, StoreError, ControllerFailed, PluginFailed, PortTaken, OtherRules,
    CannotStartFrom, DataError, OSError.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        resume: bool = False,
        new_session: bool = False,
        from_model: str = "",
        latencies: LatencyFile | None = None,
        parameters: Callable[[], str] = str,
    ) -> None:
        self._config = config
        self._parameters = parameters
        own_data = _own_data(config)
        self._journal = _journal(config)
        self._opened: OpenStore | None = None
        self._first_model: FirstModel | None = None
        try:
            if from_model and (new_session or not self._journal.has_session()):
                self._opened = open_store(config)
                self._first_model = first_model(
                    from_model, config, self._journal, self._opened.store
                )
            first = self._first_model
            self.driver = Driver.open(
                self._journal,
                SessionClock,
                config.rules() if first is None else first.rules(config.rules()),
                lambda: uuid.uuid4().hex[:12],
                new_session=new_session,
                lineage=None if first is None else first.lineage,
                make_controller=controller_of_session,
            )
            self.driver.latencies = self._latencies = latencies
            session = self.driver.session
            if not resume:
                require_same_rules(session, config, from_model)
            _require_rule(session)
            opened = self._opened = self._opened or open_store(config)
            whole: WeightsStore = opened.store
            self._fence: Fence | None = None
            if isinstance(self._journal, SqliteJournal):  # one in memory has no second copy
                owners = PrefixedStore(whole, session.session_id)
                self._fence = Fence(owners, self._journal, session.session_id, _place(config))
                whole = FencedStore(whole, self._fence.check)
            # Keys are per session, so that a new one never meets the models of the last.
            part = PrefixedStore(whole, session.session_id)
            self.store = JournalledStore(part, self._journal, is_new=self.driver.is_new)
            self._access: DirectAccess | None = None
            if opened.access is not None and config.storage.presigned:
                self._access = PrefixedAccess(opened.access, session.session_id)
            self._bucket = _xain_bucket(session, whole, self.store, config)
            # Checked first, so that the message names a journal that is behind: the objects that it
            # needs may have been dropped since.
            self._require_latest()
            _require_weights(session, self.store, config)
            self._metrics = _metrics(config, self.driver.clock)
        except BaseException:  # its lock on the file must not outlive a failed start
            self._journal.close()
            if self._opened is not None:
                self._opened.close()
            raise
        self.counters: Counter[str] = Counter()
        self._metrics_refused = RareLine(log.warning, "metrics_refused")  # strangers send them, too
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
            _made(workload, session.rules) if workload.name else None,
            preprocessing=workload.preprocessing.options(),
            publish_further=self._bucket.publish if self._bucket is not None else None,
            require_owner=self._fence.check if self._fence is not None else lambda: None,
            own_data=own_data,
            personal=config.model.personal,
        )
        kept = config.storage.keep_updates
        self._retention = Retention(self.store, None if kept == "all" else kept)
        self._copies = ModelCopies(self.store, self._worker.outage)
        self._models: ModelFolder | None = None
        if config.storage.kind == "files":
            self._models = ModelFolder(config.storage.path, session.session_id, self._copies)
        self._weights_port: WeightsPort | None = None
        self._server: GrpcServer | None = None
        self._watches: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        """The port it listens on, once started."""
        assert self._server is not None, "start() comes first"
        return self._server.port

    @property
    def weights_port(self) -> int | None:
        """The port for weights over HTTP, once started; None without one."""
        return None if self._weights_port is None else self._weights_port.port

    @property
    def inspection(self) -> InspectionService:
        """The service that tells how the session stands, once started."""
        assert self._server is not None, "start() comes first"
        return self._server.inspection

    @property
    def journal(self) -> Journal:
        """The journal with all sessions."""
        return self._journal

    @property
    def weights(self) -> WeightsStore:
        """The store with the weights of all sessions."""
        assert self._opened is not None, "it is opened with the coordinator"
        return self._opened.store

    @property
    def predictions(self) -> RemotePredictor:
        """Asks the participants for predictions, once started."""
        assert self._server is not None, "start() comes first"
        return self._server.predictions

    async def start(self) -> None:
        """Listen, and go on with the session, or open it.

        Raises PortTaken, JournalError and StoreError, TakenOver among them; then nothing has begun,
        and the journal's sessions are as they were.
        """
        server = self._config.server
        self._weights_port = self._open_weights_port()
        # This takes the port. Only then may the driver write the beginning of a new session, which
        # hides the one before for good.
        self._server = GrpcServer(
            self.driver,
            self.store,
            self._metrics,
            self._parse_points,
            address=server.address,
            max_message_bytes=server.max_message_bytes,
            max_update_bytes=server.max_update_bytes,
            max_update_norm=server.max_update_norm,
            update_encoding=server.update_encoding,
            options=server.grpc_options,
            counters=self.counters,
            outage=self._worker.outage,
            latencies=self._latencies,
            access=self._access,
            bucket=self._bucket,
            trouble=lambda: self._worker.trouble,
            verify_model=self._worker.verify,
            predict_timeout_s=self._config.predict.timeout_s,
            predict_max_retries=self._config.predict.max_retries,
            made_model=self._worker.made_model,
            parameters=self._parameters,
            weights_port=self._weights_port,
        )
        if self._fence is not None:
            # A start that fails must not end the coordinator that runs, and nothing may be
            # acknowledged beside it: after all that can go wrong, and before everything else.
            await run_to_end(self._take_over, self._fence)
            self._watches.append(
                asyncio.create_task(self._fence.watch(self.driver, self._worker.outage))
            )
        if self.driver.is_new and isinstance(self._journal, SqliteJournal):
            # The new session hides the objects in the journal of the one before it.
            await run_to_end(copy_latest, self.weights, self._journal)
        if self._first_model is not None:
            at = self.driver.clock.now()
            events = await run_to_end(self._first_model.events, self.store, at)
            self.driver.begin_with(events)
        await run_to_end(self._worker.rebuild_damaged)  # what is offered is what was published
        self.driver.start(self._worker)
        self._watches.append(asyncio.create_task(self._retention.watch(self.driver)))
        self._watches.append(asyncio.create_task(self._copies.watch(self.driver)))
        if self._models is not None:
            self._watches.append(asyncio.create_task(self._models.watch(self.driver)))
        await self._server.start()

    def _open_weights_port(self) -> WeightsPort | None:
        """Raises PortTaken and StoreError."""
        server, store = self._config.server, self.weights
        if server.weights_port == "off" or not isinstance(store, FileStore):
            return None
        session_id = self.driver.session.session_id
        folder = self._config.storage.path / folder_to_path(session_id)
        kept = PortFile.of(folder)
        capabilities = Capabilities(kept.secret, session_id, URL_LIFETIME_S)
        try:
            port = WeightsPort(
                (server.host, server.weights_port),
                capabilities,
                lambda key: store.open(f"{session_id}/{key}"),
                preferred=kept.port,
                advertised=server.weights_address,
            )
        except PortTaken as error:
            if server.weights_port:
                raise
            log.warning("no_weights_port", round=self.driver.session.round, reason=str(error))
            return None  # nobody has asked for it, and gRPC carries the weights
        if kept.port != port.port:
            kept.port = port.port
            kept.save()
        return port

    def _take_over(self, fence: Fence) -> None:
        # A copy that is behind must not end the coordinator that is ahead of it. Afterwards the
        # other one publishes nothing more; what it has published meanwhile is seen here.
        self._require_latest()
        fence.take_over()
        self._require_latest()

    def _require_latest(self) -> None:
        _require_latest(self.driver.session, self.store, self._config)

    async def stop(self) -> None:
        """Stop serving, drain, persist. A step that fails does not keep the others from happening;
        its error is raised at the end."""
        self._retention.stop()
        async with contextlib.AsyncExitStack() as steps:  # the last one first
            if self._opened is not None:
                steps.push_async_callback(asyncio.to_thread, self._opened.close)
            if self._models is not None and not self.driver.is_new:
                # Models that the watch has not shown yet: there may be no later start.
                show = self._models.show
                steps.push_async_callback(asyncio.to_thread, show, self.driver.session)
            # A watch may hang in a store that does not answer.
            steps.push_async_callback(self._end_watches)
            steps.push_async_callback(asyncio.to_thread, self._metrics.close)
            steps.push_async_callback(self.driver.close)
            if not self.driver.is_new and self.driver.failure is None:
                steps.push_async_callback(self._copies.copied, self.driver)
            steps.push_async_callback(self.driver.end)
            steps.push_async_callback(self._worker.close)
            if self._server is not None:
                steps.push_async_callback(self._server.stop, self._config.server.drain_s)
            elif self._weights_port is not None:
                steps.push_async_callback(self._weights_port.stop, 0.0)

    async def _end_watches(self) -> None:
        for watch in self._watches:
            watch.cancel()
        if self._watches:
            await asyncio.wait(self._watches)

    def _parse_points(self, participant_id: str, round_: int, text: str) -> tuple[Point, ...]:
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
    """The session's own rule and optimiser can be had: its first round must not end for nothing.
    Raises PluginFailed."""
    if session.phase is Phase.FINISHED:
        return  # nothing is combined any more
    rules = session.rules
    rule_of_session(rules.aggregation, rules.aggregation_options)
    if rules.optimizer:
        optimizer_of_session(rules.optimizer, rules.optimizer_options)


def _made(workload: WorkloadSettings, rules: Rules) -> workloads.Workload:
    return workloads.create(workload.name, {**workload.options, **mode_option(rules)})


def _require_weights(session: Session, store: WeightsStore, config: CoordinatorConfig) -> None:
    """The session's own objects are where the configuration says. Raises StoreError.

    Going on without them would end the session: what was acknowledged would count as lost.
    """
    refs = [] if session.model is None else [session.model.ref, *session.model.state.values()]
    refs += [base.model.ref for base in session.bases.values()]
    if session.open_round is not None:
        refs += [update.weights.ref for update in session.open_round.updates.values()]
    # Listed by round: a request for each of a thousand updates would take a store a while.
    keys = [object_of(ref.key) for ref in refs]
    folders = {place_of(key).rpartition("/")[0] for key in keys}
    present = {key for folder in folders for key in store.keys(f"{folder}/")}
    for key in keys:
        if key not in present:
            raise StoreError(
                f"the journal {config.journal.path} goes on from {session.session_id}/{key}, "
                f"which is not in {_place(config)}; is it the right one, and its data all there? A "
                "journal from before later rounds cannot be gone on from: updates are dropped when "
                "their round is over ([storage] keep_updates). xain-coordinator repair lists all "
                "that is missing, and drops an update"
            )


def _require_latest(session: Session, store: WeightsStore, config: CoordinatorConfig) -> None:
    """The session has not gone on without this journal, as it has if the store holds a model that
    the journal never asked for. Raises TakenOver, and the store's errors.

    Taking over would end the coordinator that made it, and lead to another model of that round,
    which cannot be published.
    """
    if session.model is None or session.phase is Phase.FINISHED:
        return
    # The one that is being made may be there: whoever wrote it can have died before it said so.
    is_asked_for = session.phase is Phase.AGGREGATING
    key = model_key(session.model.round + (2 if is_asked_for else 1))
    try:
        store.open(key, 0, 1).close()
    except KeyNotFound:
        return
    raise TakenOver(
        f"{_place(config)} has {session.session_id}/{key}, which the journal {config.journal.path} "
        "has not come to: the session has gone on from another copy of it; start that one. If it "
        "is lost for good, or there is none and the end of this journal's write-ahead log is lost, "
        "and with it what was acknowledged there, delete this model and those after it and start "
        "again"
    )


def _xain_bucket(
    session: Session, bare: WeightsStore, store: WeightsStore, config: CoordinatorConfig
) -> "XainBucket | None":
    """Bucket of XAIN's participants for models and updates, if there are to be any.

    A new session must find it without another one's weights, whose names would be the same. Raises
    StoreError.
    """
    if config.storage.format != "xain-pickle":
        return None
    from xain_coordinator.xain06.bucket import XainBucket

    if session.model is None:
        # 0/global may be ours: whoever wrote it can have died before it was journalled.
        found = next((k for r in (0, 1) for k in bare.keys(f"{r}/") if k != model_key(0)), None)
    else:
        found = None
    if found is not None:
        raise StoreError(
            f"{found} is there already in {_place(config)}, from another session; XAIN's "
            "participants know one session a bucket: empty it, or choose another"
        )
    return XainBucket(bare, store, config.server.max_update_bytes)


def _place(config: CoordinatorConfig) -> str:
    """Place of the weights, for messages."""
    storage = config.storage
    if storage.kind == "s3":
        return f"bucket {storage.bucket}" + (f" below {storage.prefix}" if storage.prefix else "")
    return f"[storage] path {storage.path}"


@dataclass(frozen=True, slots=True)
class OpenStore:
    """access: how participants reach it themselves, if they can."""

    store: WeightsStore
    access: DirectAccess | None = None
    close: Callable[[], None] = lambda: None


def open_store(config: CoordinatorConfig) -> OpenStore:
    """The weights store that is configured. Raises StoreError."""
    match config.storage.kind:
        case "memory":
            return OpenStore(MemoryStore())
        case "files":
            files = FileStore(config.storage.path)
            return OpenStore(files, close=files.close)
        case "s3":
            from xain_coordinator.stores.s3 import open_s3  # boto3 takes half a second to import

            s3 = open_s3(config.storage)
            return OpenStore(s3, s3, s3.close)


def _own_data(config: CoordinatorConfig) -> Callable[[Types], Table] | None:
    """Read the data that the coordinator evaluates models on, if there are any.

    Returns a function that reads them with the types of columns. Raises DataError.
    """
    evaluate = config.evaluate
    if not evaluate.data:
        return None
    load = partial(load_own_data, evaluate.data, evaluate.target, evaluate.task, evaluate.scale)
    load(tuple(config.data_schema.columns.items()))  # a wrong file is told at the start
    return load


def _metrics(config: CoordinatorConfig, clock: Clock) -> MetricsStore:
    if config.metrics.kind == "none":
        return NullMetricsStore()
    if config.metrics.kind == "influxdb":
        from xain_coordinator.metrics.influx import open_influx

        return open_influx(config.metrics, clock.wall_ns)
    return LocalMetricsFile(config.metrics.path, clock.wall_ns)


def _journal(config: CoordinatorConfig) -> Journal:
    # A journal must not outlive the weights that it speaks of.
    if config.storage.kind == "memory":
        return MemoryJournal()
    return SqliteJournal(config.journal.path)


def run(
    config: CoordinatorConfig,
    *,
    resume: bool = False,
    new_session: bool = False,
    from_model: str = "",
) -> int:
    """Run a coordinator until it is told to stop. Returns the exit status of the process."""
    logging = config.logging
    logs.configure(logging.level, console=logging.use_console, third_party=logging.third_party)
    # Named by this coordinator's owner; one that comes with a model's metadata is not allowed.
    allow_builders(filter(None, [config.workload.options.get("builder")]))
    use_threads(1)  # for its own evaluations, beside everything else
    _raise_file_limit()
    configure_allocator()
    with contextlib.ExitStack() as at_end:
        try:
            latencies = _open_log_files(logging, at_end)
        except WrongSetting as error:
            log.error("cannot_start", error=str(error))
            return EXIT_BAD_CONFIG
        listener = None
        if config.http.is_on:
            from xain_coordinator.server.http.server import CannotServe, open_listener

            try:
                listener = at_end.enter_context(open_listener(config.http))
            except CannotServe as error:
                log.error("cannot_start", error=str(error))
                return EXIT_ERROR
        group = None
        if config.parameters.is_on:
            try:
                group = _open_parameters(config.parameters)
            except OSError as error:
                log.error("cannot_start", error=str(error))
                return EXIT_ERROR
            at_end.callback(group.close)
        make = partial(
            Coordinator, latencies=latencies, parameters=str if group is None else group.status
        )
        make_first = partial(
            make,
            config,
            # In serve mode each session has rules of its own, which a request may have changed.
            resume=resume or config.http.is_on,
            new_session=new_session,
            from_model=from_model,
        )
        make_next = partial(make, new_session=True)
        return asyncio.run(_run(config, make_first, make_next, listener, group, at_end))


def _open_parameters(settings: ParametersSettings) -> "ParameterGroup":
    """Start the parameter server of this process. Raises OSError with one line for the operator."""
    try:
        from xain_coordinator.process.parameter_group import ParameterGroup
    except ModuleNotFoundError as missing:
        raise OSError(
            f"parameters.port needs {missing.name}: pip install 'xain-coordinator[parameters]'"
        ) from None
    return ParameterGroup(settings)


def _open_log_files(
    logging: CoordinatorLoggingSettings, at_end: contextlib.ExitStack
) -> LatencyFile | None:
    """Open the files of [logging] until the end. Returns the latency stream, if there is one.
    Raises WrongSetting."""
    key, path = "status_file", logging.status_file
    try:
        if path is not None:
            at_end.enter_context(status_stream(path, logging.level))
        key, path = "latency_file", logging.latency_file
        if path is None:
            return None
        return at_end.enter_context(contextlib.closing(LatencyFile(path)))
    except OSError as error:
        assert path is not None, "a file was opened"
        reason = why_unwritable(path) or error.strerror
        raise WrongSetting(f"logging.{key}", f"{path} cannot be written: {reason}") from None


async def _run(
    config: CoordinatorConfig,
    make: Callable[[], Coordinator],
    make_next: Callable[[CoordinatorConfig], Coordinator],
    listener: socket.socket | None,
    group: "ParameterGroup | None",
    at_end: contextlib.ExitStack,
) -> int:
    """listener: of the HTTP face; None without one. group: the parameter server, likewise."""
    from xain_coordinator.process.sessions import Sessions  # which imports this module

    stop = asyncio.Event()
    _on_signals(stop)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS, "store"))
    coordinator = await _start(config, make, stop, at_end)
    if not isinstance(coordinator, Coordinator):
        return coordinator
    # Imported objects stay until the end; a look at them in every collection would cost a small
    # round a tenth of its time.
    gc.freeze()
    # A collection finds the calls under way alive. Objects found several times are collected with
    # all others, which holds up a thousand participants for a tenth of a second. With Python's
    # default of 700 objects there would be a collection every few calls.
    gc.set_threshold(COLLECTED_OBJECTS)
    # Threads that store updates must not keep the event loop from the interpreter for 5 ms a time,
    # Python's default: a whole small round takes but four times that.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _greet(config, coordinator)

    def open_next(config: CoordinatorConfig) -> Awaitable[Coordinator | None]:
        return started(config, partial(make_next, config), stop, at_end)

    sessions = Sessions(config, coordinator, open_next)
    async with _http_face(sessions, listener), _view(config, sessions):
        waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(sessions.failed.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        log.info("stopping", round=sessions.session.round, drain_s=config.server.drain_s)
        stop.set()  # a session that is being opened heeds it
        sessions.stopping.set()
        # From here on: the HTTP face and a session that is being opened may hang in a store.
        leaving = _exit_after(config.server.drain_s + LAST_STEPS_S, _status_of(sessions))
        at_end.callback(leaving.cancel)
        if group is not None:  # beside the end of the session, since both may take drain_s
            closing = asyncio.create_task(asyncio.to_thread(group.close, config.server.drain_s))
    await sessions.close()
    coordinator, driver = sessions.current, sessions.current.driver
    status = _status_of(sessions)
    has_stopped = await _stopped(coordinator)
    if group is not None:
        await closing
    if not has_stopped:
        return EXIT_ERROR
    if status == EXIT_OK:
        log.info("stopped", round=driver.session.round, phase=driver.session.phase.value)
    return status


async def _start(
    config: CoordinatorConfig,
    make: Callable[[], Coordinator],
    stop: asyncio.Event,
    at_end: contextlib.ExitStack,
) -> Coordinator | int:
    """Start the coordinator of a process. Returns the exit status, with one line in the log, if it
    cannot be started as things are, or the process is told to stop."""
    try:
        coordinator = await started(config, make, stop, at_end)
    except STARTING_ERRORS as error:
        log.error("cannot_start", error=str(error))
        log.debug("cannot_start_because", exc_info=error)
        return EXIT_OK if stop.is_set() else _status_after(error)
    return EXIT_OK if coordinator is None else coordinator


async def started(
    config: CoordinatorConfig,
    make: Callable[[], Coordinator],
    stop: asyncio.Event,
    at_end: contextlib.ExitStack,
) -> Coordinator | None:
    """Make a coordinator, in a thread, and start it. A remote store that is away is waited for,
    PATIENCE_S at most.

    Returns None if the process is told to stop meanwhile. Raises STARTING_ERRORS.
    """
    give_up_at = asyncio.get_running_loop().time() + PATIENCE_S
    delay = FIRST_RETRY_S
    while True:
        coordinator: Coordinator | None = None
        leaving: threading.Timer | None = None
        try:
            coordinator = await _heeding(stop, asyncio.to_thread(make), at_end)
            await _heeding(stop, coordinator.start(), at_end)
        except STARTING_ERRORS as error:
            if coordinator is not None:
                leaving = _exit_after(LAST_STEPS_S, _status_after(error))
                at_end.callback(leaving.cancel)
                await _stopped(coordinator)
            remote = config.storage.kind == "s3" and isinstance(error, StoreUnavailable)
            if remote and asyncio.get_running_loop().time() + delay < give_up_at:
                if leaving is not None:
                    leaving.cancel()
                log.warning("store_unavailable", error=str(error), next_try_s=delay)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await stop.wait()
                if stop.is_set():
                    return None
                delay = min(2 * delay, LAST_RETRY_S)
                continue
            raise
        return coordinator


async def _heeding(stop: asyncio.Event, step: Awaitable[T], at_end: contextlib.ExitStack) -> T:
    """A step of the start, which waits for a store and may take its time. Told to stop, the process
    does not wait for it for long."""
    under_way = asyncio.ensure_future(step)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((under_way, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not under_way.done():
        at_end.callback(_exit_after(LAST_STEPS_S, EXIT_OK).cancel)
    return await under_way


def _status_of(sessions: "Sessions") -> int:
    return EXIT_OK if sessions.failure is None else _status_after(sessions.failure)


def _status_after(error: BaseException) -> int:
    if isinstance(error, OtherRules | CannotStartFrom):
        return EXIT_BAD_CONFIG
    return EXIT_FENCED if isinstance(error, Fenced) else EXIT_ERROR


async def _stopped(coordinator: Coordinator) -> bool:
    """Stop it; False, with its error in the log, if something went wrong on the way."""
    try:
        await coordinator.stop()
    except Exception:  # any step's; the exit status tells of it
        log.exception("stop_failed", round=coordinator.driver.session.round)
        return False
    return True


def _exit_after(delay_s: float, status: int) -> threading.Timer:
    """End the process then, unless it is cancelled.

    Threads cannot be stopped from outside, and Python waits for all of them: one that hangs in a
    store would hold the process for as long as that. Everything acknowledged is in the journal by
    then, and the next start does again what the thread was doing.
    """

    def leave() -> None:
        log.warning("threads_left_behind", waited_s=delay_s)
        os._exit(status)

    timer = threading.Timer(delay_s, leave)
    timer.daemon = True
    timer.start()
    return timer


def _raise_file_limit() -> None:
    """A connection takes a file descriptor, and a process may usually open 1024 (on macOS 256)
    unless it asks for more: a fleet of that size would be refused by the operating system."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # macOS says that there is no limit, and then refuses what is above its own.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for signal_ in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt
            loop.add_signal_handler(signal_, stop.set)


@contextlib.asynccontextmanager
async def _http_face(sessions: "Sessions", listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve HTTP at the listener, if there is one."""
    if listener is None:
        yield
        return
    from xain_coordinator.server.http.server import serving

    await sessions.load_fitted()
    async with serving(sessions, listener):
        yield


def _view(
    config: CoordinatorConfig, sessions: "Sessions"
) -> contextlib.AbstractAsyncContextManager[None]:
    """A live view below the log lines, on a terminal and unless [logging] console is set."""
    if config.logging.console is not None or not sys.stderr.isatty():
        return contextlib.nullcontext()
    from xain_coordinator.cli import live_view
    from xain_coordinator.cli.status import Snapshot, ask_service

    def ask() -> Awaitable[Snapshot]:
        return ask_service(sessions.current.inspection, num_rounds=live_view.ROUNDS)

    return live_view.on_terminal(ask)


def _greet(config: CoordinatorConfig, coordinator: Coordinator) -> None:
    session = coordinator.driver.session
    log.info(
        "serving",
        address=config.server.address_at(coordinator.port),
        weights_port=coordinator.weights_port,
        session=session.session_id,
        phase=session.phase.value,
        round=session.round,
        rounds=session.rules.rounds,
        required=session.rules.num_required,
        pid=os.getpid(),
    )
    if session.lineage is not None:
        log.info("began_with", model=session.lineage.source, rounds=session.lineage.num_rounds)
    if different := list(differences(session, config)):
        log.warning(
            "rules_differ",
            round=session.round,
            kept=different,
            hint="the session goes on with the rules it was opened with; "
            "--new-session opens one with the configured rules",
        )
    if session.phase is Phase.FINISHED and not config.http.is_on:
        log.warning(
            "session_is_finished",
            round=session.round,
            cause=session.cause,
            hint="its result is served to whoever asks; `xain-coordinator extend --rounds +N` "
            "trains it further, --new-session opens another one",
        )
