"""A coordinator process: configuration in, exit status out."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from xain_coordinator.access.errors import AccessError
from xain_coordinator.assembly.changed_rules import differences
from xain_coordinator.assembly.coordinator import SessionCoordinator
from xain_coordinator.assembly.study import first_step
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.config.sections.server import CoordinatorLoggingSettings
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.values import Phase, Step
from xain_coordinator.driver.effects import FIRST_RETRY_S, LAST_RETRY_S
from xain_coordinator.extensions.plugins import PluginFailed
from xain_coordinator.http_face.server import open_listener, serving
from xain_coordinator.inspection.client import Snapshot, ask_service
from xain_coordinator.ports import (
    Fenced,
    JournalError,
    StoreError,
    StoreUnavailable,
)
from xain_coordinator.process.allocator import configure_allocator
from xain_coordinator.server.guard import Guard
from xain_coordinator.telemetry.log_files import LatencyFile, status_stream
from xain_foundation.durable import replace_file
from xain_foundation.exit_statuses import (
    EXIT_BAD_CONFIG,
    EXIT_FAILED,
    EXIT_FENCED,
    EXIT_OK,
    CannotStart,
    CommandFailed,
)
from xain_foundation.logs import logs, streams
from xain_foundation.logs.line_file import why_unwritable
from xain_foundation.logs.logger import get_logger
from xain_foundation.net.backoff import Backoff
from xain_foundation.net.sockets import raise_file_limit
from xain_foundation.security.tls import InvalidCertificates
from xain_foundation.settings.fields import WrongSetting, is_loopback
from xain_foundation.settings.hints import hint
from xain_foundation.wheels import pip_install
from xain_workloads.errors import DataError
from xain_workloads.nets.threads import use_threads

if TYPE_CHECKING:
    from xain_coordinator.assembly.parameter_group import ParameterGroup
    from xain_coordinator.assembly.sessions import Sessions

T = TypeVar("T")

log = get_logger(__name__)


# Whether threads that hang at the end may be left behind with the process.
may_exit: ContextVar[bool] = ContextVar("may_exit", default=True)

LiveView = Callable[
    [Callable[[int], Awaitable[Snapshot]]], contextlib.AbstractAsyncContextManager[None]
]

WhenDone = Callable[[str], None]

SWITCH_INTERVAL_S = 0.0005

# How long a start waits for a remote store: long enough for a stack that comes up together.
PATIENCE_S = 60.0

# Threads that wait for a store; the default would be a few more than processors.
NUM_THREADS = 32


# For what comes after the drain: the last commit, and metrics, which take up to 5 s to give up.
LAST_STEPS_S = 8.0

# How long a heartbeat may be on its way to a coordinator that is about to end.
LAST_HEARTBEAT_S = 1.0

_NOT_FROM_MODEL = "--from-model: the sessions of a study begin anew; to measure a model, " + hint(
    "xain-coordinator", "xain-coordinator evaluate --model FILE"
)


STARTING_ERRORS = (
    JournalError,
    StoreError,
    PluginFailed,
    CommandFailed,
    DataError,
    OSError,
)


def run(
    config: CoordinatorConfig,
    *,
    resume: bool = False,
    new_session: bool = False,
    from_model: str = "",
    live_view: LiveView | None = None,
    when_done: WhenDone | None = None,
) -> int:
    """Run a coordinator until it is told to stop. Returns the exit status of the process.

    live_view: shows the session while it runs; it is given a function that asks for a snapshot with
    a number of rounds.
    when_done: told the table of the study at its end, as JSON; then the process ends, when the
    participants have heard of the end.
    """
    streams.unblock()
    logging = config.logging
    logs.configure(logging.level, console=logging.use_console, third_party=logging.third_party)
    use_threads(1)  # for its own evaluations, beside everything else
    raise_file_limit()
    configure_allocator()
    return serve(
        config,
        resume=resume,
        new_session=new_session,
        from_model=from_model,
        live_view=live_view,
        when_done=when_done,
    )


def serve(
    config: CoordinatorConfig,
    *,
    resume: bool = False,
    new_session: bool = False,
    from_model: str = "",
    live_view: LiveView | None = None,
    when_done: WhenDone | None = None,
    host: "Host | None" = None,
) -> int:
    """Check the settings, open log files, certificates and ports, and serve sessions until the end.
    Returns the exit status of a program; an error of the start is logged, and told to the host.
    host: a program that the coordinator runs in. All other arguments are those of run()."""
    logging = config.logging
    if builder := config.workload.options.get("builder"):
        from xain_workloads.nets.neural_builders import allow_builders

        # Named by this coordinator's owner; one that comes with a model's metadata is not allowed.
        allow_builders([builder])
    with contextlib.ExitStack() as at_end:
        try:
            config.require_certificates()
            latencies = _open_log_files(logging, at_end)
            _require_writable(config.server.port_file)
            guard = Guard.open(
                config.tls, config.certificates, config.access_folder, config.server.passphrase
            )
            at_end.callback(guard.close)
            http, parameters = config.http, config.parameters
            listener = at_end.enter_context(open_listener(http)) if http.is_on else None
            group = _open_parameters(config, guard) if parameters.is_on else None
        except (WrongSetting, InvalidCertificates, AccessError, OSError) as error:
            _tell(host, error)
            is_setting = isinstance(error, WrongSetting | InvalidCertificates)
            return EXIT_BAD_CONFIG if is_setting else EXIT_FAILED
        if group is not None:
            at_end.callback(group.close)
        step = first_step(config)
        if step is not None and from_model:
            _tell(host, CannotStart(_NOT_FROM_MODEL))
            return EXIT_BAD_CONFIG
        make = partial(
            SessionCoordinator,
            latencies=latencies,
            parameters=str if group is None else group.status,
            outcomes={},
            guard=guard,
        )
        make_first = partial(
            make,
            config,
            # In serve mode each session has rules of its own, which a request may have changed.
            resume=resume or config.http.is_on,
            new_session=new_session,
            from_model=from_model or (step.model if step is not None else ""),
            step=step,
        )

        def make_next(config: CoordinatorConfig, step: Step | None) -> SessionCoordinator:
            """Make the coordinator of the next session. step: its part in a study, if any."""
            model = step.model if step is not None else ""
            return make(config, new_session=True, step=step, from_model=model)

        return asyncio.run(
            _run(
                config,
                make_first,
                make_next,
                guard,
                listener,
                group,
                live_view,
                when_done,
                at_end,
                host,
            )
        )


class Host(Protocol):
    """A program of others in which a coordinator runs, see embedding.py. It is told in the thread
    of the coordinator.

    takes_signals: whether SIGTERM and SIGINT end the coordinator.
    """

    takes_signals: bool

    def note_loop(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        """The coordinator runs on this event loop, and ends when the event is set."""

    def note_serving(self, sessions: "Sessions") -> None:
        """The servers are up."""

    def note_failure(self, error: BaseException) -> None:
        """The coordinator cannot start."""


def _tell(host: Host | None, error: BaseException) -> None:
    """Log why the coordinator cannot start, and tell the host, if there is one."""
    log.error("cannot_start", error=str(error))
    if host is not None:
        host.note_failure(error)


def _open_parameters(config: CoordinatorConfig, guard: Guard) -> "ParameterGroup":
    """Start the parameter server of this process. Raises OSError with one line for the operator."""
    try:
        from xain_coordinator.assembly.parameter_group import ParameterGroup
    except ModuleNotFoundError as missing:
        raise OSError(
            f"parameters.port needs {missing.name}: {pip_install('xain-coordinator', 'parameters')}"
        ) from None
    insecure = config.server.insecure
    return ParameterGroup(config.parameters, guard.certificates, insecure=insecure)


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


def _require_writable(port_file: Path | None) -> None:
    """Check that a port file, if one is asked for, can be written. Raises WrongSetting."""
    if port_file is not None and (reason := why_unwritable(port_file)):
        raise WrongSetting("server.port_file", f"{port_file} cannot be written: {reason}")


def _write_port_file(path: Path, address: str, at_end: contextlib.ExitStack) -> None:
    """Write the address into the port file, which is removed at the end. Only for the owner of the
    journal's lock: a second process with the same settings, which is refused, leaves the file of
    the first alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, [f"{address}\n".encode()])
    at_end.callback(path.unlink, missing_ok=True)


async def _run(
    config: CoordinatorConfig,
    make: Callable[[], SessionCoordinator],
    make_next: Callable[[CoordinatorConfig, Step | None], SessionCoordinator],
    guard: Guard,
    listener: socket.socket | None,
    group: "ParameterGroup | None",
    live_view: LiveView | None,
    when_done: WhenDone | None,
    at_end: contextlib.ExitStack,
    host: Host | None,
) -> int:
    """Start a coordinator, serve until a signal, an error or a host's stop, and stop it. Returns
    the exit status of a program.

    make_next: makes the coordinator of a further session. listener: of the HTTP face; None without
    one. group: the parameter server, likewise. at_end: closes what is opened here.
    """
    from xain_coordinator.assembly.sessions import Sessions  # which imports this module

    stop = asyncio.Event()
    if host is None or host.takes_signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if host is not None:
        may_exit.set(False)
        host.note_loop(asyncio.get_running_loop(), stop)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS, "store"))
    try:
        coordinator = await start_coordinator(config, make, stop, at_end)
    except STARTING_ERRORS as error:
        _tell(host, error)
        log.debug("cannot_start_because", exc_info=error)
        return EXIT_OK if stop.is_set() else _status_after(error)
    if coordinator is None:
        return EXIT_OK
    if host is None:
        # Imported objects stay until the end; a look at them in every collection would cost a small
        # round a tenth of its time.
        gc.freeze()
        # Threads that store updates must not keep the event loop from the interpreter for 5 ms a
        # time, Python's default: a whole small round takes but four times that.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
    _greet(config, coordinator)
    if different := list(differences(coordinator.driver.session, config)):
        session_id = coordinator.driver.session.session_id
        await guard.try_to_note("settings_differ", session=session_id, kept=different)
    if config.server.port_file is not None:
        address = config.server.address_at(coordinator.port)
        _write_port_file(config.server.port_file, address, at_end)

    def open_next(
        config: CoordinatorConfig, step: Step | None
    ) -> Awaitable[SessionCoordinator | None]:
        """Open the next session; None if the process is to stop meanwhile."""
        return start_coordinator(config, partial(make_next, config, step), stop, at_end)

    sessions = Sessions(config, coordinator, open_next)
    watching = asyncio.create_task(guard.watch())
    async with (
        _http_face(sessions, listener, guard),
        _view(live_view, sessions),
    ):
        study = asyncio.create_task(_study(sessions, stop, when_done))
        if host is not None:
            host.note_serving(sessions)
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
    watching.cancel()
    study.cancel()  # not while it opens a session
    coordinator, driver = sessions.current, sessions.current.driver
    status = _status_of(sessions)
    has_stopped = await _stop(coordinator)
    if group is not None:
        await closing
    if not has_stopped:
        return EXIT_FAILED
    if status == EXIT_OK:
        log.info("stopped", round=driver.session.round, phase=driver.session.phase.value)
    return status


async def _study(sessions: "Sessions", stop: asyncio.Event, when_done: WhenDone | None) -> None:
    """Open the sessions of a study, if the present one is of one. At its end hand its table to
    when_done, if there is one, let participants hear of the end, and set `stop`."""
    try:
        await sessions.study()
    except Unavailable:
        return  # the process stops
    except Exception as error:  # whatever keeps the next session from being opened
        sessions.fail(error)
        return
    coordinator = sessions.current
    if when_done is None or coordinator.study is None:
        return
    driver = coordinator.driver
    when_done(coordinator.study.table(driver.session, driver.history))
    # Participants without a Watch stream hear of the end with their next heartbeat.
    await asyncio.sleep(driver.session.rules.heartbeat_time_s + LAST_HEARTBEAT_S)
    stop.set()


async def start_coordinator(
    config: CoordinatorConfig,
    make: Callable[[], SessionCoordinator],
    stop: asyncio.Event,
    at_end: contextlib.ExitStack,
) -> SessionCoordinator | None:
    """Make a coordinator, in a thread, and start it. A remote store that is away is waited for,
    PATIENCE_S at most.

    Returns None if the process is told to stop meanwhile. Raises STARTING_ERRORS.
    """
    give_up_at = asyncio.get_running_loop().time() + PATIENCE_S
    backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
    while True:
        coordinator: SessionCoordinator | None = None
        leaving: threading.Timer | None = None
        try:
            coordinator = await _run_step(stop, asyncio.to_thread(make), at_end)
            await _run_step(stop, coordinator.start(), at_end)
        except STARTING_ERRORS as error:
            if coordinator is not None:
                leaving = _exit_after(LAST_STEPS_S, _status_after(error))
                at_end.callback(leaving.cancel)
                await _stop(coordinator)
            delay = backoff.next_s()
            remote = config.storage.kind != "files" and isinstance(error, StoreUnavailable)
            if remote and asyncio.get_running_loop().time() + delay < give_up_at:
                if leaving is not None:
                    leaving.cancel()
                log.warning("store_unavailable", error=str(error), next_try_s=delay)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await stop.wait()
                if stop.is_set():
                    return None
                continue
            raise
        return coordinator


async def _run_step(stop: asyncio.Event, step: Awaitable[T], at_end: contextlib.ExitStack) -> T:
    """Run a step of the start, which may wait for a store. Returns its result. After a signal to
    stop, the process ends LAST_STEPS_S later if the step has not ended by then."""
    under_way = asyncio.ensure_future(step)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((under_way, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not under_way.done():
        at_end.callback(_exit_after(LAST_STEPS_S, EXIT_OK).cancel)
    return await under_way


def _status_of(sessions: "Sessions") -> int:
    """Exit status of sessions that have ended."""
    return EXIT_OK if sessions.failure is None else _status_after(sessions.failure)


def _status_after(error: BaseException) -> int:
    """Exit status after an error: wrong settings, another coordinator that has taken over, or a
    failure."""
    if isinstance(error, CannotStart):
        return EXIT_BAD_CONFIG
    return EXIT_FENCED if isinstance(error, Fenced) else EXIT_FAILED


async def _stop(coordinator: SessionCoordinator) -> bool:
    """Stop the coordinator; False, with the error in the log, if a step of the stop failed."""
    try:
        await coordinator.stop()
    except Exception:  # any step's; the exit status tells of it
        log.exception("stop_failed", round=coordinator.driver.session.round)
        return False
    return True


def _exit_after(delay_s: float, status: int) -> threading.Timer:
    """Timer that ends the process with a status after so long, unless it is cancelled, or the
    process is a host's.

    Threads cannot be stopped from outside, and Python waits for all of them: one that hangs in a
    store would hold the process for as long as that. Everything acknowledged is in the journal by
    then, and the next start does again what the thread was doing.
    """

    def leave() -> None:
        """End the process at once, without waiting for its threads."""
        log.warning("threads_left_behind", waited_s=delay_s)
        streams.close()
        os._exit(status)

    timer = threading.Timer(delay_s, leave)
    timer.daemon = True
    if may_exit.get():
        timer.start()
    return timer


@contextlib.asynccontextmanager
async def _http_face(
    sessions: "Sessions", listener: socket.socket | None, guard: Guard
) -> AsyncIterator[None]:
    """Serve HTTP at the listener, if there is one."""
    if listener is None:
        yield
        return
    await sessions.load_fitted()
    async with serving(sessions, listener, guard=guard):
        yield


def _view(
    show: LiveView | None, sessions: "Sessions"
) -> contextlib.AbstractAsyncContextManager[None]:
    """The live view, which asks for snapshots of the present session; nothing without one."""

    def ask(num_rounds: int) -> Awaitable[Snapshot]:
        """Ask for a snapshot with so many rounds."""
        return ask_service(sessions.current.server.inspection, num_rounds=num_rounds)

    return contextlib.nullcontext() if show is None else show(ask)


def _greet(config: CoordinatorConfig, coordinator: SessionCoordinator) -> None:
    """Log that the coordinator serves, where, and what an operator should know: that others can
    reach it unprotected, that rules differ from the configured ones, that the session is
    finished."""
    session = coordinator.driver.session
    log.info(
        "coordinator_serving",
        address=config.server.address_at(coordinator.port),
        weights_port=coordinator.weights_port,
        **(
            {}
            if coordinator.server.health_port is None
            else {"health_port": coordinator.server.health_port}
        ),
        session=session.session_id,
        phase=session.phase.value,
        round=session.round,
        rounds=session.rules.rounds,
        required=session.rules.num_required,
        pid=os.getpid(),
    )
    if not is_loopback(config.server.host) and config.certificates is None:
        log.warning(
            "open_to_others",
            address=config.server.address_at(coordinator.port),
            hint="nothing is encrypted, and whoever reaches this port can read the model and hand "
            "in updates: let only the sites' network, a VPN or SSH reach it",
        )
    if session.lineage is not None:
        log.info("began_with", model=session.lineage.source, rounds=session.lineage.num_rounds)
    if different := list(differences(session, config)):
        log.warning(
            "rules_differ",
            round=session.round,
            kept=different,
            hint="the session goes on with the rules it was opened with; to open one with the "
            "configured rules, " + hint("xain-coordinator", "--new-session"),
        )
    step = session.rules.step
    if step is not None:
        log.info("study", round=session.round, step=step.shown)
    if session.phase is Phase.FINISHED and not config.http.is_on and step is None:
        log.warning(
            "session_is_finished",
            round=session.round,
            cause=session.cause,
            hint="its result is served to whoever asks; to train it further, "
            + hint("xain-coordinator", "xain-coordinator extend --rounds +1")
            + "; to open another one, "
            + hint("xain-coordinator", "--new-session"),
        )
