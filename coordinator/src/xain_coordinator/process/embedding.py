"""A coordinator within a program of others: a notebook, a test, a service."""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self, cast

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.values import Phase, WeightsRef
from xain_coordinator.process.run import serve
from xain_coordinator.server.identity import CALLER, THIS_MACHINE
from xain_coordinator.stores.integrity import read_weights
from xain_foundation.exit_statuses import EXIT_FAILED
from xain_foundation.settings.settings import ConfigError, load

if TYPE_CHECKING:
    from xain_coordinator.assembly.sessions import Sessions

_STOPPED = "the coordinator has stopped"
LOOK_S = 1.0  # between two looks of a wait whether the coordinator is still there


class Coordinator:
    """The coordinator of `xain-coordinator --config FILE`, with settings as values.

    settings: the sections of a configuration file, {"rounds": {"rounds": 3}}, or dotted keys,
        {"rounds.rounds": 3}, with values of the types that they have in a file. No environment
        variable is read.
    resume, new_session, from_model: as the flags of the program.

    Logging, signals, the allocator and the garbage collector stay as the program has set them; but
    run() takes SIGTERM and SIGINT while it runs in the main thread.
    Raises ConfigError that names the wrong key.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        new_session: bool = False,
        from_model: str = "",
    ) -> None:
        """Load the settings; nothing is served yet. Raises ConfigError."""
        try:
            self.config = load(
                CoordinatorConfig, overrides=_dotted(settings or {}), reads_text=False
            )
        except ConfigError as error:  # no flags are wrong
            raise ConfigError(str(error).replace("command line: ", "")) from None
        self.takes_signals = False
        self._serve_sessions = partial(
            serve, self.config, resume=resume, new_session=new_session, from_model=from_model
        )
        self._thread: threading.Thread | None = None
        self._is_up, self._has_ended = threading.Event(), threading.Event()
        self._is_stopping = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._sessions: Sessions | None = None
        self._failure: BaseException | None = None
        self._status = 0

    def run(self) -> int:
        """Serve in this thread until stop() is called in another one, or a signal comes. Returns
        the exit status of the program; at once after stop(). Raises the error that ended the
        coordinator."""
        self._require_new()
        self._thread = threading.current_thread()
        self.takes_signals = threading.current_thread() is threading.main_thread()
        self._serve()
        if self._failure is not None:
            raise self._failure
        return self._status

    def start(self) -> Self:
        """Serve in a thread, and return when participants can connect.

        Raises what keeps the coordinator from starting: WrongSetting, CommandFailed, JournalError
        and StoreError among them; then it has ended. Raises Unavailable if stop() comes first.
        """
        self._require_new()
        self._thread = threading.Thread(target=self._serve, name="coordinator", daemon=True)
        try:
            self._thread.start()
            self._is_up.wait()
        except BaseException:  # Ctrl-C: nobody else could stop it
            self.stop()
            raise
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        if self._sessions is None or self._is_stopping.is_set():
            self.stop()
            raise Unavailable(_STOPPED)
        return self

    def stop(self, timeout_s: float | None = None) -> int:
        """Stop serving, drain and persist, as SIGTERM has the program do. Returns its exit status.
        May be repeated; in the thread of run() it does not wait for the end. Raises TimeoutError
        if the end takes longer than timeout_s; it comes nevertheless."""
        self._is_stopping.set()  # before the look at the event loop, see note_loop()
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        is_other = self._thread not in (None, threading.current_thread())
        if is_other and not self._has_ended.wait(timeout_s):
            raise TimeoutError
        return self._status

    def wait(self, timeout_s: float | None = None) -> Session:
        """Wait until the present session is finished. Returns it. Raises TimeoutError, and
        Unavailable if the coordinator stops meanwhile."""
        finished = Answers(self, _once(self._wait_until_finished))
        try:
            return cast(Session, finished.take(timeout_s))
        except TimeoutError:
            finished.cancel()
            raise

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """Port of the gRPC server, once started."""
        return self._started.current.port

    @property
    def address(self) -> str:
        """Host and port of the gRPC server, once started."""
        return self.config.server.address_at(self.port)

    def call(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """Have a method of Control or Inspection answer, as the operator's socket does, without a
        call over it. Raises a Refusal, Unavailable if the coordinator stops, and TimeoutError."""
        answers = Answers(self, _once(partial(self._servicer(method), request, None)))
        return answers.take(timeout_s)

    def stream(self, method: str, request: Any) -> "Answers":
        """The answers of a method that streams them."""
        return Answers(self, aiter(self._servicer(method)(request, None)))

    def read(self, ref: WeightsRef) -> bytes:
        """A stored model of the present session. Blocks. Raises StoreError."""
        return read_weights(self._started.current.store, ref.key)

    @property
    def has_ended(self) -> bool:
        """Whether it serves no more."""
        return self._has_ended.is_set()

    @property
    def failure(self) -> BaseException | None:
        """Why it serves no more, if it was not stopped."""
        return self._started.failure

    @property
    def num_connected(self) -> int:
        """How many participants are connected; after the end of the session, how many have not
        left it yet."""
        return self._started.num_connected()

    @property
    def session(self) -> Session:
        """The present session."""
        return self._started.session

    @property
    def history(self) -> History:
        """The rounds of the present session."""
        return self._started.current.driver.history

    @property
    def _started(self) -> "Sessions":
        """The sessions of a coordinator that was started."""
        assert self._sessions is not None, "start() comes first"
        return self._sessions

    def _servicer(self, method: str) -> Any:
        """The method of Control, or else of Inspection, of this name."""
        server = self._started.current.server
        service = server.control if hasattr(server.control, method) else server.inspection
        return getattr(service, method)

    async def _wait_until_finished(self) -> Session:
        """Wait until the present session is finished. Returns it. Raises Unavailable if the
        coordinator stops."""
        driver = self._started.current.driver
        while driver.session.phase is not Phase.FINISHED:
            if self._stop.is_set():
                raise Unavailable("the coordinator is stopping")
            await driver.wait_for_change()
        return driver.session

    def _require_new(self) -> None:
        """Check that the coordinator was never started. Raises RuntimeError."""
        if self._thread is not None:
            raise RuntimeError("the coordinator was started before; make another one")

    def _serve(self) -> None:
        """Serve until the end, in the present thread, and note the exit status or the error."""
        try:
            self._status = self._serve_sessions(host=self)
        except BaseException as error:  # told in the thread of start()
            self._failure, self._status = error, EXIT_FAILED
        finally:
            self._has_ended.set()
            self._is_up.set()

    # --- Host ---

    def note_loop(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        """Keep the event loop and the event that ends it; it ends at once if stop() came before."""
        self._loop, self._stop = loop, stop
        if self._is_stopping.is_set():
            stop.set()

    def note_serving(self, sessions: "Sessions") -> None:
        self._sessions = sessions
        self._is_up.set()

    def note_failure(self, error: BaseException) -> None:
        self._failure = error


class Answers:
    """Answers of a coordinator in this process, for one thread; cancel() is for any. The next one
    raises a Refusal, and Unavailable if the coordinator stops or after cancel().

    The answers come by a SimpleQueue, which Ctrl-C between two lines of Python leaves usable: a
    lock that an interrupted thread has kept would hold up the coordinator itself. It holds all that
    is not taken, of which a stream's method decides how much there is.
    """

    def __init__(self, coordinator: Coordinator, answers: AsyncIterator[Any]) -> None:
        """Begin to take answers on the coordinator's event loop. Raises Unavailable."""
        assert coordinator._loop is not None, "start() comes first"
        self._coordinator = coordinator
        self._loop = coordinator._loop
        self._answers = answers
        self._found: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._task: asyncio.Task[None] | None = None
        try:
            self._loop.call_soon_threadsafe(self._begin)
        except RuntimeError:  # the event loop has ended
            raise Unavailable(_STOPPED) from None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.take()

    def take(self, timeout_s: float | None = None) -> Any:
        """Wait for the next answer. Raises a Refusal, Unavailable, TimeoutError, and StopIteration
        at the end of a stream."""
        give_up_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = give_up_at - time.monotonic()
            try:
                answer, error = self._found.get(timeout=max(min(left, LOOK_S), 0.0))
            except Empty:
                if self._coordinator.has_ended:
                    raise Unavailable(_STOPPED) from None
                if left <= LOOK_S:
                    raise TimeoutError from None
                continue
            if error is not None:
                raise error
            return answer

    def cancel(self) -> None:
        """Have a thread that waits for an answer wait no longer, and end the task."""
        self._found.put((None, Unavailable("it was waited for no longer")))
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._end)

    def _begin(self) -> None:
        """Begin to pass answers on, in a task of the coordinator's event loop."""
        self._task = asyncio.ensure_future(self._pass_on())

    def _end(self) -> None:
        """Cancel that task."""
        if self._task is not None:
            self._task.cancel()

    async def _pass_on(self) -> None:
        """Hand each answer to the thread that waits, and at the end an error that says so."""
        CALLER.set(THIS_MACHINE)
        error: BaseException = StopIteration()
        try:
            async for answer in self._answers:
                self._found.put((answer, None))
        except asyncio.CancelledError:
            error = Unavailable(_STOPPED)
        except Exception as raised:  # told in the thread that waits
            error = raised
        self._found.put((None, error))


async def _once(work: Callable[[], Awaitable[Any]]) -> AsyncIterator[Any]:
    """The one answer of work that gives no stream."""
    yield await work()


def _dotted(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Turn sections into settings by dotted key."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        dotted = f"{above}.{key}" if above else key
        if not above and isinstance(value, Mapping) and "." not in key:
            found |= _dotted(value, key)
        else:
            found[dotted] = value
    return found
