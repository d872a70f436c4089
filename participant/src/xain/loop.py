"""The loop of a script: for round in xain.rounds(model).

The agent (xain_participant.agent) runs in a background thread, as for the class Participant. Where
it would call train_round(), the round is handed to the thread of the script, and the agent waits
for what the body of the loop makes of it:

    agent's worker thread          script's thread
    Asked(...)            ->       Rounds.__next__() returns a Round
                          <-       Submitted, or Failed if the body raised

An iterator cannot see an exception of the body. `with xain.rounds() as rounds` sees it at once. An
exception that has ended the script is found in sys.last_value, where Python keeps it. Otherwise an
iterator that is collected while its round is open knows at least that the loop was left.

The program of the script keeps its own signal handlers and exception hooks.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, Self

from xain.result import LastModel, Result, SessionError, fetch_last_model
from xain.round import Round, Submitted
from xain.script import Asked, Failed, Initial, KeptByScript, ScriptParticipant, initial_weights
from xain.weights import Declared, declare, from_vector, plain_layout
from xain_foundation.commands import split_host_port
from xain_foundation.exit_statuses import (
    EXIT_FAILED,
    EXIT_NO_BETTER,
    EXIT_NOTHING_COUNTED,
    EXIT_OK,
)
from xain_foundation.logs.logger import get_logger
from xain_foundation.settings.settings import COMMAND_LINE, ConfigError, load
from xain_participant.agent.agent import Agent
from xain_participant.config import ENV_PREFIX, ParticipantConfig
from xain_participant.enrolment.enrolled import Enrolled, enrolled
from xain_participant.keep.state import StateDirectory
from xain_workloads.model import personal_patterns

# Time that an exception may take from the loop to the end of the script.
GRACE_S = 1.0
# Time that a loop which is left with `break` waits for its last update to be acknowledged.
HAND_IN_S = 60.0
# Time to wait for the agent's goodbye.
LEAVE_S = 5.0
NO_RESULT_YET = (
    "rounds.result is there when the loop has come to the end of the session; until then "
    "round.weights is the global model"
)


class RoundAbandoned(RuntimeError):
    """The loop was left before round.submit(). Reported to the coordinator, never raised."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The agent has ended. code: as the agent's run(). error: what it raised, if it did."""

    code: int
    message: str = ""
    error: BaseException | None = None


class Loop:
    """One participant: its agent in a background thread, and the open round of its script.

    Safe to use from several threads. initialises: whether the script declares a model, so that it
    has initial weights.
    Raises ValueError if the name, the tags, the address or the certificates cannot be used, and
    StateError.
    """

    def __init__(
        self,
        *,
        coordinator: str | None = None,
        participant_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        evaluates: bool = False,
        initialises: bool = True,
    ) -> None:
        """Read settings, make the agent, and start its thread. Raises ValueError or StateError."""
        settings, there = _settings(coordinator, participant_id, tags, state_dir)
        ours = settings.participant
        self._state: StateDirectory | None = None
        if ours.state_dir is not None:
            self._state = StateDirectory(
                ours.state_dir, there.participant_id or None, ours.instance_id or None
            )
        self._inbox: SimpleQueue[Asked | Ended] = SimpleQueue()
        self._answers: SimpleQueue[Initial | Submitted | Failed] = SimpleQueue()
        self._message = ""
        self._handed_in = threading.Event()  # nothing is left to send
        self._handed_in.set()
        self._settled = threading.Event()  # the end of the loop has begun
        self._pid = os.getpid()
        self._thread_id = threading.get_ident()
        self.open_round: Round | None = None
        self.is_over = False
        self.exit_status = EXIT_OK  # of the agent, once next_round() has returned None
        try:
            self._agent = Agent(
                ScriptParticipant(self._ask, evaluates=evaluates, initialises=initialises),
                there.address,
                there.participant_id or None,
                tags=ours.tags,
                direct=settings.coordinator.direct,
                observer=self._observe,
                state=self._state,
                instance_id=ours.instance_id or None,
                tells_messages=ours.report_failures == "full",
                tls=there.tls,
                insecure=settings.coordinator.insecure,
                upkeep=there.upkeep(),
            )
        except BaseException:  # raised again
            if self._state is not None:
                self._state.close()
            raise
        self.participant_id = self._agent.participant_id
        self._target, self._tls = there.address, there.tls
        self._session_id = ""
        self._result: Result | None = None
        self._is_finished = False  # the script has come to the end of the session
        self._kept = KeptByScript(ours.state_dir, self.participant_id)
        self._log = get_logger(__name__).bind(participant=self.participant_id)
        self._thread = threading.Thread(
            target=self._run, name=f"agent-{self.participant_id}", daemon=True
        )
        atexit.register(self._on_exit)
        self._thread.start()

    # --- the agent's threads ---

    def _run(self) -> None:
        """The agent's thread: run it, and tell the script's thread how it has ended."""
        error: BaseException | None = None
        code = EXIT_FAILED
        try:
            code = self._agent.run()
        except BaseException as raised:  # the script's thread must hear of it
            error = raised
        finally:
            self.is_over = True
            self._kept.close()
            if self._state is not None:
                self._state.close()
            self._handed_in.set()
            atexit.unregister(self._on_exit)
            self._inbox.put(Ended(code, self._message, error))
            # A script that has left answers no question. The agent has ended, so that the result of
            # the worker is not kept.
            self._answers.put(Failed(RoundAbandoned("the agent has ended")))

    def _ask(self, asked: Asked) -> Initial | Submitted | Failed:
        """Hand a question of the agent to the script, and wait for the answer. Called in the
        agent's thread."""
        if self.is_over:
            return Failed(RoundAbandoned("the agent has ended"))
        self._inbox.put(asked)
        return self._answers.get()

    def _observe(self, step: str, _: int, reason: str) -> None:
        """Note from the agent that an update was handed in or dropped, or why the session is
        finished."""
        match step:
            case "handed_in" | "dropped":
                self._handed_in.set()
            case "finished":
                self._message = reason

    # --- the script's thread ---

    def next_round(self, declared: Declared | None) -> Round | None:
        """Wait for the next round. Returns None after the end of the session. Raises RuntimeError
        if the last round was not submitted, LayoutMismatch, and SessionError."""
        self._thread_id = threading.get_ident()
        if self.open_round is not None and not self.open_round.is_done:
            wanted = "round.submit()" if self.open_round.task == "train" else "round.evaluate()"
            number = self.open_round.number
            self._refuse(
                RuntimeError(f"the body of the loop ended without {wanted} in round {number}")
            )
        self.open_round = None
        while True:
            asked = self._inbox.get()
            if isinstance(asked, Ended):
                self._inbox.put(asked)  # for the next call
                self._end(asked)
                return None
            try:
                round_ = self._answer(asked, declared)
            except Exception as error:  # raised again
                self._refuse(error)
            if round_ is not None:
                self._session_id = asked.assignment.session_id
                self.open_round = round_
                return round_

    def _answer(self, asked: Asked, declared: Declared | None) -> Round | None:
        """Answer the question for initial weights, or make a round of the question."""
        if asked.weights is None:
            initial = initial_weights(asked, declared)
            self._handed_in.clear()
            self._answers.put(initial)
            return None
        return self._kept.round_of(asked, asked.weights, declared, self._submit)

    def _submit(self, submitted: Submitted) -> None:
        """Hand what the script has submitted to the agent."""
        self._handed_in.clear()
        if self.is_over:
            self._handed_in.set()
        self._answers.put(submitted)

    def _refuse(self, error: Exception) -> NoReturn:
        """Report the error as a failure of the round, and raise it."""
        self.fail(error)
        raise error

    def _end(self, ended: Ended) -> None:
        """Note the end of the session. Raises the agent's error, and SessionError if the session
        has no result, unless the script has left before."""
        if ended.error is not None:
            raise ended.error
        self.exit_status = ended.code
        if (
            ended.code not in (EXIT_OK, EXIT_NO_BETTER, EXIT_NOTHING_COUNTED)
            and not self._settled.is_set()
        ):
            raise SessionError(ended.message)
        if not self._settled.is_set():
            self._is_finished = True

    def result(self, declared: Declared | None) -> Result:
        """Ask for the result of a session that is over, once: weights, metrics and round.

        Raises RuntimeError if the loop has not come to the end of the session, and SessionError if
        the coordinator does not give the model.
        """
        if not self._is_finished:
            raise RuntimeError(NO_RESULT_YET)
        if self._result is None:
            self._result = result_of(
                lambda: fetch_last_model(self._target, self.participant_id, self._tls),
                self._target,
                self._session_id,
                declared,
                self._kept,
            )
        return self._result

    # --- the end ---

    def end(self, error: BaseException | None) -> None:
        """End with the exception that has left the loop, or without one."""
        if error is None:
            self.leave()
        elif isinstance(error, Exception):
            self.fail(error)
        else:
            self.leave(1)

    def fail(self, error: BaseException) -> None:
        """End with the script's own exception: the open round is reported as failed."""
        if self._settled.is_set() or self._is_copy:
            return
        self._settled.set()
        round_ = self.open_round
        if round_ is not None and round_.is_done:
            self._leave(0, HAND_IN_S)
            return
        self._answers.put(Failed(error))
        self.join()
        self._leave(1, 0.0)

    def leave(self, code: int = 0) -> None:
        """Leave the session. Waits for the last update to be acknowledged, unless interrupted."""
        if self._settled.is_set() or self._is_copy:
            return
        self._settled.set()
        self._leave(code, 0.0 if code else HAND_IN_S)

    def abandon(self, line: str) -> None:
        """End after the script has left the loop at this line.

        Waits whether an exception ends the script, since its report says more.
        """
        threading.main_thread().join(GRACE_S)
        if self.is_settled:
            return
        if (error := self._uncaught()) is not None:
            self.end(error)
        elif self.open_round is not None and not self.open_round.is_done:
            number = self.open_round.number
            error = RoundAbandoned(f"{line} left the loop before round.submit() of round {number}")
            self._log.warning("round_abandoned", round=number, reason=str(error))
            self.fail(error)
        else:
            self.leave()

    def _on_exit(self) -> None:
        """End with the script, and wait for the agent's goodbye."""
        self.end(self._uncaught())
        self.join()

    def _uncaught(self) -> BaseException | None:
        """The exception that has ended the script, if it ran in the main thread."""
        main = threading.main_thread()
        if main.is_alive() or self._thread_id != main.ident:
            return None
        return getattr(sys, "last_value", None)

    def join(self) -> None:
        """Wait for the agent's goodbye."""
        if not self._is_copy:
            self._thread.join(LEAVE_S)

    def _leave(self, code: int, hand_in_s: float) -> None:
        """Stop the agent, which returns `code`, after it has handed in for hand_in_s at most."""
        if not self._handed_in.wait(hand_in_s) and hand_in_s:
            self._log.warning("left_before_acknowledgement")
        self._agent.stop(code)
        self.join()

    @property
    def is_settled(self) -> bool:
        """Whether the end of the loop has begun, or the agent has ended."""
        return self._settled.is_set() or self.is_over

    @property
    def _is_copy(self) -> bool:
        """Whether this is the copy of a process that was forked, such as a data loader."""
        return os.getpid() != self._pid


class Rounds:
    """The rounds of one participant, one after the other; see xain.rounds().

    As a context manager it sees an exception of the body at once, also one that the script handles.
    """

    def __init__(self, loop: Loop, declared: Declared | None) -> None:
        self._loop = loop
        self._declared = declared

    @property
    def participant_id(self) -> str:
        """Name of the participant."""
        return self._loop.participant_id

    @property
    def exit_status(self) -> int:
        """Status for the script to end with after the loop: 5 if the session is finished and
        nothing that the script trained counted, also if there was no round; else 0."""
        return self._loop.exit_status

    @property
    def result(self) -> Result:
        """The model that the session has made, its metrics and its number; see Result.

        The coordinator is asked for it at the first use, which must be while it runs.
        Raises RuntimeError before the session has ended, and SessionError if it cannot be fetched.
        """
        return self._loop.result(self._declared)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Round:
        """Wait for the next round. Raises SessionError if the session ends without a result, and
        what Loop.next_round() raises."""
        round_ = self._loop.next_round(self._declared)
        if round_ is None:
            raise StopIteration
        return round_

    def close(self) -> None:
        """Leave the session, after the last update was acknowledged."""
        self._loop.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._loop.end(error)

    def __del__(self) -> None:
        """End the loop, in a thread of its own, if the script has left it."""
        loop = self._loop
        if loop.is_settled or sys.is_finalizing():
            return
        frame = sys._getframe(1) if hasattr(sys, "_getframe") else None
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "the script"
        # No daemon thread: a script that ends with the loop waits for its last update.
        threading.Thread(target=loop.abandon, args=(line,), name="leave").start()


def result_of(
    fetch: Callable[[], LastModel],
    target: str,
    session_id: str,
    declared: Declared | None,
    kept: KeptByScript,
) -> Result:
    """Fetch the last model, and convert it to what the script gets.

    fetch: asks the coordinator at `target` for it. session_id: of the last round; "" if there was
    none. declared: the script's model. kept: has the tensors that do not travel.
    Raises SessionError if the coordinator does not give the model, or is at another session.
    """
    last = fetch()
    if session_id not in ("", last.session_id):
        raise SessionError(
            f"the coordinator at {target} has begun another session, {last.session_id}: this one's "
            "model is in its store"
        )
    if declared is not None:
        declared = declared.without(personal_patterns(last.metadata))
    layout = () if declared is not None and not declared.layout else last.layout
    tensors = kept.tensors(last.session_id)
    weights = from_vector(last.vector, plain_layout(layout), declared, tensors)
    return Result(weights, last.metrics, last.round)


# Makes the rounds of the participant that runs at the moment, in a simulation; else None.
rounds_of_site: ContextVar[Callable[[Declared | None], Rounds] | None] = ContextVar(
    "rounds_of_site", default=None
)


def rounds(
    initial: Any = None,
    *,
    coordinator: str | None = None,
    id: str | None = None,  # noqa: A002  # as the setting is called
    tags: Mapping[str, str] | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    evaluates: bool = False,
    scaffold: bool = False,
) -> Rounds:
    """Join a session, and give its rounds until it ends.

    initial: the model: a torch module, a mapping of names to tensors or arrays, a flat vector, or a
        function that returns one of them. It declares the tensors, whose names and shapes must be
        those of the session, and has the initial weights, if the coordinator asks for them. It asks
        no script without a model.
    coordinator: HOST:PORT or HOST. id: this participant's name. tags: what a selection may ask for.
    state_dir: a folder that keeps results and round.state over a restart.
    evaluates: whether the body of the loop calls round.evaluate(), so that rounds may be given that
        only evaluate.
    scaffold: whether local steps are corrected by control variates; see Round.correct().

    Settings that are not given are read from the environment, such as
    XAIN_PARTICIPANT_COORDINATOR__HOST; by default the coordinator is on this machine. Each thread
    of a process may have its own rounds. The session is left when the loop is left, and at the end
    of the script. An exception in the body is reported to the coordinator as a failure of the
    round. Signals are the script's own: one that raises, as Ctrl-C does, ends the loop.

    Raises ValueError for a setting that cannot be used, and TypeError for an `initial` that is none
    of these.
    """
    declared = None if initial is None else declare(initial)
    if scaffold and (declared is None or not declared.layout):
        raise ValueError(
            "scaffold=True needs a model with named tensors: xain.rounds(model, scaffold=True)"
        )
    if declared is not None:
        declared = replace(declared, has_control=scaffold)
    if (simulated := rounds_of_site.get()) is not None:
        return simulated(declared)
    loop = Loop(
        coordinator=coordinator,
        participant_id=id,
        tags=tags,
        state_dir=state_dir,
        evaluates=evaluates,
        initialises=declared is not None,
    )
    return Rounds(loop, declared)


def _settings(
    coordinator: str | None,
    participant_id: str | None,
    tags: Mapping[str, str] | None,
    state_dir: str | os.PathLike[str] | None,
) -> tuple[ParticipantConfig, Enrolled]:
    """The settings in force, those given here before those of the environment, and the means by
    which the site connects. Raises ValueError with a line for each wrong setting."""
    host, port = (None, None) if coordinator is None else split_host_port(coordinator)
    values: dict[str, object] = {
        "coordinator.host": host,
        "coordinator.port": port,
        "participant.id": participant_id,
        "participant.tags": dict(tags) if tags is not None else None,
        "participant.state_dir": None if state_dir is None else os.fspath(state_dir),
    }
    try:
        settings = load(ParticipantConfig, None, ENV_PREFIX, values)
        return settings, enrolled(settings)
    except ConfigError as error:
        raise ValueError(str(error).replace(COMMAND_LINE, "xain.rounds()")) from None
