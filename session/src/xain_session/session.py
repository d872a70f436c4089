"""The server's loop of a script, see xain.session()."""

import asyncio
import math
import os
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self, TextIO, TypeVar, cast

from xain.result import SessionError
from xain_coordinator.server.calls.translate import layout_of
from xain_coordinator.telemetry.trackers import Position
from xain_foundation.logs import streams
from xain_session.record import Best, Record, Result, Site, W
from xain_session.round import AsyncRound, Participant, Round
from xain_session.script_client import ScriptClient, Status
from xain_session.stopping import Interrupts
from xain_session.trackers import Tracker, by_name
from xain_wire.fl import access_pb2 as control
from xain_wire.fl import inspection_pb2 as inspection
from xain_wire.metadata import COMPLETED
from xain_workloads.model import Layout, control_size, personal_patterns, unflatten
from xain_workloads.scaffold import without_control

if TYPE_CHECKING:
    from xain.weights import Declared
    from xain_session.deployments import Deployment

TELL_S: Final = 3.0  # a wait that is longer is told of
FAIL_S: Final = 10.0  # how long a session that is to hear of an error may take


Resume = Literal["same", "changed"]
T = TypeVar("T")


class Session(Generic[W]):
    """The rounds of a session, one after the other; see xain.session() and xain.connect().

    A context manager. Its end ends the session, unless Ctrl-C or pause() came first: then the same
    script goes on with it when it is started again.
    """

    def __init__(
        self,
        deployment: "Deployment",
        declared: "Declared | None" = None,
        *,
        trackers: Sequence[Tracker] = (),
        progress: bool = True,
        is_scripted: bool = True,
    ) -> None:
        """is_scripted: whether the coordinator waits for the loop; else it goes on by itself, and
        the end of the `with` waits for the end of the session."""
        self._is_scripted = is_scripted
        self._began = time.monotonic()
        self._shown = 0  # the last model that a line was printed of
        self._deployment = deployment
        self._declared = declared
        self._trackers = by_name(trackers)
        self._progress = progress
        self._stack = ExitStack()
        self._client: ScriptClient | None = None
        self._open: Round[W] | None = None
        self._resumes = True
        self._is_used = False
        self._is_stopped = False
        self._is_paused = False
        self._is_over = False
        self._tell: Callable[[str], None] = lambda text: None
        self._last_told = (0.0, "")  # beginning of the wait, and what was told of it
        self._result: Result[W] | None = None
        self._under_asyncio: AsyncSession[W] | None = None
        # The first one that trains: before it the sites may have made the model in a round.
        self._first: int | None = None

    # --- its life ---

    def __enter__(self) -> Self:
        """Reach or start the coordinator, then the participants. Raises RuntimeError if used."""
        if self._is_used:
            raise RuntimeError(
                "this session has had its `with`; xain.session() gives another one, which goes on "
                "where it is"
            )
        self._is_used = True
        with ExitStack() as stack:
            self._tell = _Printer(stack)
            transport = stack.enter_context(self._deployment.opened(self._tell))
            self._client = ScriptClient(transport, self._look)
            stack.callback(self._client.close)
            self._deployment.start_participants()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the session, or report the body's error, unless it is paused; then stop all."""
        try:
            if isinstance(error, Exception):
                self._fail(error)
            elif error is None and not self._is_paused:
                if self._open is not None and self._open.record is not None:  # after `break`
                    self._track(self._open.record)
                self._end()
                self._track_end(self.result)
                self._deployment.linger()
                self._deployment.forget()
        finally:
            self._stack.close()
            self._client = None

    async def __aenter__(self) -> "AsyncSession[W]":
        self._under_asyncio = AsyncSession(self)
        await self._under_asyncio.enter()
        return self._under_asyncio

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the `with` in the session's thread; a cancelled task pauses the session."""
        if isinstance(error, asyncio.CancelledError):
            self._is_paused = True
        assert self._under_asyncio is not None
        await self._under_asyncio.leave(error)

    def __iter__(self) -> Iterator[Round[W]]:
        return self

    def __next__(self) -> Round[W]:
        """Wait until a round is to be run, and return it; after a restart first the round that was
        configured last.

        Raises SessionError if the session has ended without a result, or if the body of the loop
        did not run its round.
        """
        before = self._open
        if before is not None:
            if before.record is None:
                raise SessionError(
                    f"round {before.number}: the body of the loop has ended without round.run()"
                )
            self._track(before.record)
        self._open = None
        if self._is_paused or self._is_over:
            raise StopIteration
        if self._is_stopped:
            self._end()
            raise StopIteration
        number = -1 if before is None else before.number
        resumes, self._resumes = self._resumes, False

        def is_next(status: Status) -> bool:
            """Whether a round is to be run, or the loop comes to its end."""
            if resumes and status.HasField("configured"):
                return True
            is_open = status.is_scripted and not (status.is_trained or status.is_over)
            return not is_open or (status.waits and status.round > number)

        status = self._wait(is_next)
        if resumes:
            self._require_same_model()
        if not status.is_scripted:
            raise SessionError("no script drives this session: rounds.scripted is not set")
        if not (status.is_finished or status.is_over):
            # The body of the round that was configured last may not have come to its end.
            if resumes and status.HasField("configured"):
                self._open = Round(self, status.configured.round, status.configured)
                return self._open
            if not status.is_trained:
                self._open = Round(self, status.round)
                return self._open
        self._end()
        raise StopIteration

    def pause(self) -> None:
        """Leave the loop with this round, and the session as it is: the coordinator stops, the
        sites wait for it, and the same script goes on when it is started again."""
        self._is_paused = True

    # --- what there is ---

    @property
    def id(self) -> str:
        """Identity of the session."""
        self._wait(lambda status: True)
        return self._asked.session_id

    @property
    def address(self) -> str:
        """HOST:PORT of the coordinator, for the sites."""
        return self._deployment.address

    @property
    def participants(self) -> list[Participant]:
        """The connected sites, in the order of their names."""
        found, token = [], ""
        while True:
            answer = self._asked.ask(
                "ListParticipants",
                inspection.ListParticipantsRequest(page_size=1000, page_token=token),
            )
            for one in answer.participants:
                samples = one.profile.num_samples if one.HasField("profile") else None
                found.append(Participant(one.participant_id, samples, dict(one.tags)))
            if not (token := answer.next_page_token):
                return sorted(found, key=lambda one: one.name)

    @property
    def result(self) -> Result[W]:
        """The models and metrics of the session; also after the `with`. Raises RuntimeError before
        the end of the loop."""
        if self._result is None:
            if not self._is_over and not self._is_scripted:
                self._end()
            if not self._is_over:
                raise RuntimeError(
                    "session.result is there when the loop has come to the end of the session"
                )
            self._result = self._load_result()
        return self._result

    def export(self, path: str | os.PathLike[str], which: str = "last") -> None:
        """Write a model to a file: .npz, .safetensors, .json, .onnx or .skops, as far as it has
        such a form. which: "last", "best", or a number. Also after the `with`.

        Raises SessionError, and OSError.
        """
        self._deployment.export(Path(path), which, is_running=self._client is not None)

    # --- the loop ---

    @property
    def _asked(self) -> ScriptClient:
        """The client of the coordinator. Raises RuntimeError outside of the `with`."""
        if self._client is None:
            raise RuntimeError("the session is used in its `with`: with xain.session(...) as ...")
        return self._client

    def _wait(self, is_so: Callable[[Status], bool], timeout_s: float = math.inf) -> Status:
        """Wait until the session is as wanted, or finished. Returns its status. Raises
        SessionError."""
        return self._asked.wait(is_so, timeout_s)

    def _look(self, client: ScriptClient) -> None:
        """Check the participants, and print finished rounds and what the coordinator waits for."""
        self._deployment.check()
        if client.status is not None and not self._is_scripted and not client.trouble:
            self._show_rounds(client.status)
        if not self._progress or time.monotonic() - client.waits_since < TELL_S:
            return
        text = client.waiting_for()
        if text and (client.waits_since, text) != self._last_told:
            self._last_told = (client.waits_since, text)
            self._tell(f"waiting: {text}")

    def _show_rounds(self, status: Status) -> None:
        """Print a line for each round that is over, of a session that goes on by itself."""
        if not self._progress or status.model <= self._shown:
            return
        for one in self._asked.latest_rounds(status.model - self._shown):
            if one.phase == "published" and one.round >= self._shown:
                self._shown = one.round + 1
                self._tell(_line(self._record_of(one, status), self._first_round(), status.rounds))

    def _first_round(self) -> int:
        """Number of the first round that trains."""
        if self._first is None:
            self._first = self._asked.first_round()
        return self._first

    def _run(self, round_: Round[W], request: control.ConfigureRoundRequest | None) -> Record[W]:
        """Configure a round, if there is something to decide, and wait for its model. Returns its
        record. Raises SessionError."""
        if request is not None:
            self._asked.configure(request)
        status = self._wait(lambda status: status.model > round_.number)
        if status.model <= round_.number:
            raise self._ended_otherwise(status)
        assert status.last_round.round == round_.number, "a script's rounds come one by one"
        record = self._record_of(status.last_round, status)
        if self._progress:
            self._tell(_line(record, self._first_round(), status.rounds))
        return record

    def _record_of(self, found: inspection.RoundStatus, status: Status) -> Record[W]:
        """Make the script's record of a round."""
        number = found.round
        evaluated = status.evaluated if status.HasField("evaluated") else None
        return Record(
            number,
            session=status.session_id,
            samples=found.num_samples,
            num_updates=found.num_contributors,
            sites=_sites(found),
            metrics=found.metrics,
            evaluation=found.evaluation.metrics,
            seconds=found.seconds,
            evaluated=dict(evaluated.metrics)
            if evaluated is not None and evaluated.model == number + 1
            else None,
            fetch=self._weights,
            tell=self._asked.record_evaluation,
        )

    def _track(self, record: Record[W]) -> None:
        """Have the trackers take a record that they have not taken yet."""
        session_id = record.session
        for name, tracker in self._trackers.items():
            position = self._deployment.position_of(name)
            is_taken = position.taken(session_id) >= record.round
            if not is_taken and self._tell_tracker(name, tracker.on_round, record):
                self._note_taken(position, session_id, record.round)

    def _track_end(self, result: Result[W]) -> None:
        """Have the trackers take the end that have not taken it yet."""
        session_id = result.session
        for name, tracker in self._trackers.items():
            position = self._deployment.position_of(name)
            is_taken = position.has_ended(session_id)
            if not is_taken and self._tell_tracker(name, tracker.on_end, result):
                self._note_taken(position, session_id, position.taken(session_id), is_end=True)

    def _note_taken(
        self, position: Position, session_id: str, round_: int, *, is_end: bool = False
    ) -> None:
        """Note how far a tracker has come; a failure is printed."""
        try:
            position.take(session_id, round_, is_end=is_end)
        except OSError as error:
            self._tell(f"what a tracker has taken was not noted: {error}")

    def _tell_tracker(self, name: str, tell: Callable[[T], None], what: T) -> bool:
        """Tell a tracker of this name. Returns whether it has taken that: its failure is printed,
        and ends no session that trains for weeks."""
        try:
            tell(what)
        except Exception as error:  # another's program, and its server
            method = "on_end" if isinstance(what, Result) else "on_round"
            self._tell(f"{name}.{method}() has failed: {type(error).__name__}: {error}")
            return False
        return True

    def _stop(self) -> None:
        """Let the present round be the last one."""
        self._is_stopped = True

    def _end(self) -> None:
        """End the session, and wait until it has ended. Raises SessionError."""
        if self._is_over:
            return
        status = self._wait(lambda status: True)
        if not status.is_finished:
            if self._is_scripted:
                self._asked.end()
            status = self._wait(lambda status: False)
        if not self._is_scripted:
            self._show_rounds(status)
        self._is_over = True
        if status.cause != COMPLETED:
            raise self._ended_otherwise(status)

    def _ended_otherwise(self, status: Status) -> SessionError:
        """Make the error of a session without a result; the next start begins another session."""
        self._is_over = True
        self._deployment.forget()
        return SessionError(f"the session has ended: {status.cause}")

    def _fail(self, error: Exception) -> None:
        """End the session because of an error in the body. One of this package itself, such as that
        of a wrong argument, leaves it as it is: it goes on when the script is mended."""
        if self._is_over or _is_of_this_package(error):
            return
        where = "" if self._open is None else f"round {self._open.number}: "
        text = "".join(traceback.format_exception(error))
        try:
            self._asked.end(f"{where}{type(error).__name__}\n{text}", FAIL_S)
            self._wait(lambda status: False, FAIL_S)
            self._is_over = True
            self._deployment.forget()
        except SessionError as failed:  # the error itself is raised, and says more
            self._tell(f"the session has not heard of the error, and goes on: {failed}")

    def _weights(self, number: int) -> W:
        """Fetch a model, in the form of the script's own. Raises RuntimeError after the `with`, and
        SessionError."""
        from xain.weights import from_vector

        if self._client is None:
            raise RuntimeError(
                f"model {number} was not fetched before the end of the `with`; the last model is "
                "session.result.weights"
            )
        model = without_control(self._asked.model(number))
        declared, layout = self._agreed(model.layout, model.vector.size, model.metadata)
        if declared is None:  # arrays, whatever the script has imported
            return cast(W, unflatten(model.vector, layout) if layout else model.vector)
        return cast(W, from_vector(model.vector, layout, declared, {}))

    def _require_same_model(self) -> None:
        """Check that the session trains the model that the script has. Raises SessionError."""
        found = self._asked.present_model()
        if self._declared is not None and found is not None:
            layout = layout_of(found.layout)
            size = math.prod(found.shape) - control_size(layout)
            if size:  # else the sites are to make the model
                travels = tuple(spec for spec in layout if spec.kind != "control")
                self._agreed(travels, size, found.metadata)

    def _agreed(
        self, layout: Layout, size: int, metadata: Mapping[str, str]
    ) -> "tuple[Declared | None, Layout]":
        """Compare the script's model with the session's: (declared tensors that travel, their
        layout). Raises SessionError if they are different."""
        from xain.weights import agreed_layout

        declared = self._declared
        try:
            if declared is not None:
                declared = declared.without(personal_patterns(metadata))
            return declared, agreed_layout(declared, layout, size)
        except ValueError as error:  # LayoutMismatch among them
            raise SessionError(
                f"the session was begun with another model: {error}; give the script that model, "
                "or begin another session"
            ) from None

    def _load_result(self) -> Result[W]:
        """Ask for all that the result has: last and best model, metrics and history. Raises
        SessionError."""
        status = self._asked.ask("GetStatus", inspection.GetStatusRequest())
        records = sorted(self._asked.rounds(), key=lambda one: one.round)
        script = self._wait(lambda status: True)
        number = script.model
        if number < 0:
            raise SessionError(f"the session has ended without a model: {status.cause}")
        weights = self._weights(number)
        best = None
        if status.HasField("best_round"):
            same = status.best_round == number
            best = Best(
                status.best_round,
                status.metric,
                status.best_value,
                weights if same else self._weights(status.best_round),
            )
        history = [
            {
                **one.metrics,
                "round": one.round,
                "model": one.round + 1,
                "num_updates": one.num_contributors,
                "num_samples": one.num_samples,
                "seconds": one.seconds,
                "evaluation": dict(one.evaluation.metrics),
            }
            for one in records
            if one.phase == "published"
        ]
        metrics = dict(records[-1].metrics) if records else {}
        metrics |= self._asked.evaluation_by_sites(number)
        if script.HasField("evaluated") and script.evaluated.model == number:
            metrics |= dict(script.evaluated.metrics)
        seconds = time.monotonic() - self._began
        return Result(
            weights, number, metrics, best, history, status.cause, seconds, script.session_id
        )


class AsyncSession(Generic[W]):
    """A session under asyncio: `async with xain.session(...) as session`, `async for round in
    session`, `record = await round.run()`. What waits has a thread of its own, one for all."""

    def __init__(self, session: Session[W]) -> None:
        self._session = session
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session")
        self._work: asyncio.Future[Any] | None = None
        self._interrupts = Interrupts()

    async def enter(self) -> None:
        """Enter the `with` in the session's thread, and handle SIGINT until its end."""
        self._interrupts.listen()
        try:
            await self.do(self._session.__enter__)
        except BaseException:  # a cancellation too: no handler of signals stays behind
            self._interrupts.end()
            raise

    async def do(self, work: Callable[..., T], *arguments: object) -> T:
        """Run a function in the thread. It goes on when this is cancelled."""
        self._work = asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        return cast(T, await asyncio.shield(self._work))

    async def leave(self, error: BaseException | None) -> None:
        """Leave the `with`, with what its body has raised."""
        self._interrupts.is_ending = True
        trace = None if error is None else error.__traceback__
        try:
            await self._give_up()
            await self.do(self._session.__exit__, type(error), error, trace)
        finally:
            if self._work is not None and not self._work.done():  # cancelled meanwhile
                await asyncio.wait([self._work])
            self._thread.shutdown(wait=False)
            self._interrupts.end()

    async def _give_up(self) -> None:
        """End a wait that its caller has given up."""
        client = self._session._client
        if self._work is not None and not self._work.done() and client is not None:
            client.is_interrupted = True
            await asyncio.wait([self._work])
            client.is_interrupted = False

    @property
    def id(self) -> str:
        """Identity of the session."""
        return self._session.id

    @property
    def address(self) -> str:
        """HOST:PORT of the coordinator, for the sites."""
        return self._session.address

    @property
    def participants(self) -> list[Participant]:
        """The connected sites, in the order of their names."""
        return self._session.participants

    @property
    def result(self) -> Result[W]:
        """The models and metrics of the session, as Session.result has them."""
        return self._session.result

    def pause(self) -> None:
        """Leave the loop with this round, and the session as it is, as Session.pause() does."""
        self._session.pause()

    def export(self, path: str | os.PathLike[str], which: str = "last") -> None:
        """Write a model to a file, as Session.export() does."""
        self._session.export(path, which)

    async def __aiter__(self) -> AsyncIterator[AsyncRound[W]]:
        while (round_ := await self.do(next, self._session, None)) is not None:
            yield AsyncRound(round_, self.do)


# --- values and texts ---


def _is_of_this_package(error: Exception) -> bool:
    """Whether an error was raised by xain itself, and not by what the body of a loop does."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("xain_session.")


def _sites(found: inspection.RoundStatus) -> dict[str, Site]:
    """Convert a round's status to sites by name, those that did not count too."""
    measured = {one.participant_id: one for one in found.sites}
    counted = set(found.contributors)
    names = sorted({*found.selected, *counted, *found.missing, *measured})
    sites = {}
    for name in names:
        one = measured.get(name)
        sites[name] = Site(
            name,
            name in counted,
            found.missing.get(name, ""),
            0 if one is None else one.num_samples,
            {} if one is None else dict(one.metrics),
            {} if one is None else dict(one.evaluation.metrics),
        )
    return sites


def _line(record: Record[Any], first: int, last_model: int) -> str:
    """Write the line that is printed of a round. first: number of the first round that trains.
    last_model: of the planned length, 0 if it is not known."""
    of = f"/{last_model - first}" if last_model else ""
    metrics = "".join(
        f", {name} {value:.4g}"
        for name, value in sorted(record.metrics.items())
        if math.isfinite(value)
    )
    made = f"{record.num_updates} updates in {record.seconds:.1f} s"
    return f"round {record.model - first}{of}: {made}{metrics}"


class _Printer:
    """Prints lines to standard error, and waits for no reader."""

    def __init__(self, stack: ExitStack) -> None:
        """Open standard error without blocking, unless a notebook or a test has replaced it."""
        self._stream: TextIO | None = sys.stderr  # None: it was closed before the start
        own = sys.__stderr__
        if own is not None and own is sys.stderr:  # a notebook's is its own affair
            descriptor = streams.Descriptor(own.fileno())
            stack.callback(descriptor.close, streams.CLOSE_S)
            self._stream = streams.open_stream(descriptor, own.encoding)

    def __call__(self, text: str) -> None:
        """Print a line, unless the stream is closed or its reader has gone."""
        if self._stream is None:
            return
        with suppress(OSError, ValueError):  # a reader that has gone, and a closed stream
            self._stream.write(f"{text}\n")
            self._stream.flush()
