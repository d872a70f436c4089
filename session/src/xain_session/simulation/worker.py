"""A worker: a process with the participants of some sites, one of which trains at a time.

    thread that trains                        thread "participants"
    run(): main(site) of one site after       event loop: LightAgents, their calls and timers
    another, weights that travel by HTTP
                     <- jobs ----------------
                     ---- outcomes ->

The thread that trains is the one that calls run(), the main thread of a process of its own: PyTorch
and signal handlers expect it. A job is one call of Work. Of those that wait, an upload goes first,
as it lets go of a model; then comes the site whose last training took longest. A site whose session
is over has one more job: its main(site) is called with a loop that has no round, for the code after
the loop. A site whose main(site) leaves the loop with `break` leaves the session with its next
result.
"""

import asyncio
import heapq
import multiprocessing
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Self

from xain.loop import NO_RESULT_YET, Rounds, result_of, rounds_of_site
from xain.result import LastModel, Result, fetch_last_model
from xain.round import Round, Submitted
from xain.script import Asked, Failed, Initial, KeptByScript, ScriptParticipant, initial_weights
from xain.weights import Declared
from xain_foundation.exit_statuses import EXIT_NO_BETTER, EXIT_NOTHING_COUNTED, EXIT_OK
from xain_participant.sdk import events as e
from xain_participant.sdk.values import Call
from xain_participant.wire.client import Refused
from xain_session.simulation.light_agents import LightAgent, LightAgents
from xain_wire.fl import coordinator_pb2 as pb

# Time that the goodbye of a site has whose main() has failed.
GOODBYE_S = 5.0
# Pause between two looks at the process that has started the worker.
LOOK_S = 0.25
UPLOAD, TRAINING, AFTER_THE_LOOP = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Site:
    """One simulated participant. index: from 0, below count. id: its name."""

    index: int
    count: int
    id: str


Main = Callable[[Site], object]


@dataclass(frozen=True, slots=True)
class Worker:
    """The part of a simulation that one process runs.

    target: HOST:PORT of the coordinator. evaluates: as in xain.rounds().
    state_dir: of what the sites keep from round to round, a folder for each; None: in memory.
    """

    main: Main
    sites: Sequence[Site]
    target: str
    evaluates: bool = False
    state_dir: str | None = None

    def run(self) -> str:
        """Take part with all sites, until the session is over for each and the code after its loop
        has run.

        Returns why the simulation must end, with the traceback if main() has failed; else "".
        """
        return _Run(self).run()


# --- main(site) ---


class _Parked(BaseException):
    """Raised in main() to leave it until its site is given another round."""


class SiteScript:
    """Calls main(site) for each question that the agent of the site asks its script, and once more
    when the session is over, unless the site has left before.

    on_failure: told of main()'s exception, with its traceback. last_model: asks the coordinator.
    """

    __slots__ = (
        "_answer",
        "_asked",
        "_kept",
        "_last_model",
        "_main",
        "_on_failure",
        "_open",
        "_session_id",
        "_target",
        "exit_status",
        "has_left",
        "participant",
        "site",
    )

    def __init__(
        self,
        worker: Worker,
        site: Site,
        on_failure: Callable[[str], None],
        last_model: Callable[[], LastModel],
    ) -> None:
        folder = None if worker.state_dir is None else Path(worker.state_dir) / site.id
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.site = site
        self.participant = ScriptParticipant(
            self._ask, evaluates=worker.evaluates, initialises=True
        )
        self.exit_status: int | None = None  # of the site, when the session is over
        self.has_left = False  # its main() has left the loop, and come to its end
        self._main = worker.main
        self._target = worker.target
        self._on_failure = on_failure
        self._last_model = last_model
        self._kept = KeptByScript(folder, site.id)
        self._asked: Asked | None = None
        self._open: Round | None = None
        self._answer: Initial | Submitted | None = None
        self._session_id = ""  # of the last round

    def finish(self, exit_status: int) -> None:
        """Call main(site) after the session: its loop ends at once, and the code after it runs."""
        self.exit_status = exit_status
        num_loops = 0

        def rounds(declared: Declared | None) -> Rounds:
            """Give main() one loop without rounds; a second one leaves main()."""
            nonlocal num_loops
            num_loops += 1
            if num_loops > 1:  # of a script that loops over one session after the other
                raise _Parked
            return _SiteRounds(self, declared)

        before = rounds_of_site.set(rounds)
        try:
            self._call_main(exit_status)
        except _Parked:
            pass
        except BaseException as error:  # of main(); the caller hears it
            self._on_failure(f"{error!r}\n\n{traceback.format_exc()}")
        finally:
            rounds_of_site.reset(before)

    def result(self, declared: Declared | None) -> Result:
        """The last model of the session, as Loop.result() gives it. Raises RuntimeError before the
        end, and SessionError."""
        if self.exit_status is None:
            raise RuntimeError(NO_RESULT_YET)
        return result_of(self._last_model, self._target, self._session_id, declared, self._kept)

    def _ask(self, asked: Asked) -> Initial | Submitted | Failed:
        """Call main(site) for a question of the agent. Returns its answer, or that it has failed,
        which on_failure is told too."""
        self._asked, self._open, self._answer = asked, None, None
        self._session_id = asked.assignment.session_id
        before = rounds_of_site.set(lambda declared: _SiteRounds(self, declared))
        try:
            self._call_main(EXIT_OK)
            return self._last_answer()
        except _Parked:
            answer = self._answer
            assert answer is not None, "main() is left when it has answered"
            return answer
        except BaseException as error:  # of main(); the coordinator and the caller hear it
            self._on_failure(f"{error!r}\n\n{traceback.format_exc()}")
            return Failed(error)
        finally:
            rounds_of_site.reset(before)
            self._asked = self._open = self._answer = None

    def _call_main(self, exit_status: int) -> None:
        """Call main(site), which may end with sys.exit(rounds.exit_status)."""
        try:
            self._main(self.site)
        except SystemExit as error:
            if error.code not in (None, EXIT_OK, exit_status):
                raise

    def _last_answer(self) -> Initial | Submitted:
        """Return the answer of main(), which has left its loop and come to its end. Raises
        RuntimeError if it has given none."""
        if self._answer is not None:
            self.has_left = True
            return self._answer
        if self._open is not None:
            raise RuntimeError(
                f"main() left the loop before round.submit() of round {self._open.number}"
            )
        raise RuntimeError("main() ended without a loop over xain.rounds()")

    def next_round(self, declared: Declared | None) -> Round:
        """The round that main() is called for, once. Raises _Parked when it is done, and
        StopIteration when the session is over."""
        if self.exit_status is not None:
            raise StopIteration
        opened = self._open
        if opened is not None and not opened.is_done:
            wanted = "round.submit()" if opened.task == "train" else "round.evaluate()"
            raise RuntimeError(
                f"the body of the loop ended without {wanted} in round {opened.number}"
            )
        if opened is not None or self._asked is None:
            raise _Parked
        if self._asked.weights is None:
            self._answer = initial_weights(self._asked, declared)
            raise _Parked
        self._open = self._kept.round_of(self._asked, self._asked.weights, declared, self._submit)
        return self._open

    def _submit(self, submitted: Submitted) -> None:
        """Keep what main() has submitted as the answer."""
        self._answer = submitted


class _SiteRounds(Rounds):
    """The one round of a site that main() is called for; none when the session is over. It never
    leaves the session."""

    def __init__(self, script: SiteScript, declared: Declared | None) -> None:
        self._script = script
        self._declared = declared
        self._result: Result | None = None

    @property
    def participant_id(self) -> str:
        return self._script.site.id

    @property
    def exit_status(self) -> int:
        return self._script.exit_status or EXIT_OK

    @property
    def result(self) -> Result:
        if self._result is None:
            self._result = self._script.result(self._declared)
        return self._result

    def __next__(self) -> Round:
        return self._script.next_round(self._declared)

    def close(self) -> None:
        """Stay in the session."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stay in the session."""

    def __del__(self) -> None:
        """Stay in the session."""


# --- the two threads ---


@dataclass(order=True, slots=True)
class Job:
    """A training, an upload before the hand-in, or the code after the loop of a site whose session
    is over. Those that compare less go first."""

    kind: int
    minus_last_s: float
    number: int
    agent: LightAgent = field(compare=False)
    round: int = field(compare=False)


class _Run:
    """One run of a worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # None: the end
        self._num_jobs = 0
        self._failure = ""  # why the simulation must end
        self._running = len(worker.sites)  # sites whose main() has not come to its end
        self._scripts: dict[str, SiteScript] = {}
        # Outcomes for the event loop, which is woken once for all that have come meanwhile.
        self._outcomes: deque[Callable[[], None]] = deque()
        self._over = asyncio.Event()

    def run(self) -> str:
        """Do the jobs of all sites until the session is over for each. Returns why the simulation
        must end; "" if it need not."""
        self._loop = asyncio.new_event_loop()
        thread = Thread(target=self._run_loop, name="participants", daemon=True)
        thread.start()
        try:
            waiting: list[Job] = []
            while not self._failure and (job := self._next(waiting)) is not None:
                self._do(job)
            if self._failure:
                thread.join(GOODBYE_S)  # the site reports it, and leaves
        finally:
            with suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._over.set)
            thread.join(GOODBYE_S)
        return self._failure

    # --- the thread that trains ---

    def _next(self, waiting: list[Job]) -> Job | None:
        """Wait for a job, and return the one that goes first; None at the end."""
        while True:
            try:
                job = self._jobs.get(block=not waiting)
            except Empty:
                return heapq.heappop(waiting)
            if job is None:
                return None
            heapq.heappush(waiting, job)

    def _do(self, job: Job) -> None:
        """Do a job, and hand its outcome to the event loop."""
        agent, round_ = job.agent, job.round
        if job.kind == AFTER_THE_LOOP:
            assert agent.exit_status is not None, "the session is over"
            self._scripts[agent.name].finish(agent.exit_status)
            self._hand_back(self._on_end_of_main)
            return
        if agent.exit_status is not None:
            return  # the session has ended meanwhile
        if job.kind == TRAINING:
            begin = time.monotonic()
            outcome = agent.work.do(Call.TRAIN, round_)
            if not isinstance(outcome, e.Trained) or outcome.is_training:
                # Initial weights and evaluations say nothing of how long a training takes.
                agent.last_s = time.monotonic() - begin
            self._hand_back(lambda: self._on_trained(agent, outcome))
            return
        request: pb.EndTrainingRoundRequest | None
        try:
            request = agent.work.end_request(round_)
        except Refused as refused:
            event = refused.event(Call.HAND_IN)
            self._hand_back(lambda: agent.post(event))
        except Exception as error:  # a defect, which the caller hears
            self._fail(f"{agent.name}: {error!r}\n\n{traceback.format_exc()}")
        else:
            self._hand_back(lambda: agent.hand_in(round_, request))

    def _hand_back(self, outcome: Callable[[], None]) -> None:
        """Have the event loop handle an outcome."""
        self._outcomes.append(outcome)
        if len(self._outcomes) == 1:  # else the loop is woken already, and takes this one, too
            self._loop.call_soon_threadsafe(self._take_outcomes)

    def _fail(self, why: str) -> None:
        """Keep the first reason why the simulation must end."""
        self._failure = self._failure or why

    # --- the thread of the event loop ---

    def _run_loop(self) -> None:
        """The thread of the event loop; at its end no job follows."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._take_part())
        except BaseException as error:  # a defect, which the caller hears
            self._fail(f"{error!r}\n\n{traceback.format_exc()}")
        finally:
            self._jobs.put(None)

    async def _take_part(self) -> None:
        """Take part with the agents of all sites, until _over is set."""
        lights = LightAgents(
            self._worker.target,
            len(self._worker.sites),
            train=lambda agent, round_: self._add(TRAINING, agent, round_),
            upload=lambda agent, round_: self._add(UPLOAD, agent, round_),
            over=self._on_over,
            fail=self._on_defect,
        )
        last_model = _kept_model(self._worker)
        agents = []
        for i, site in enumerate(self._worker.sites):
            script = SiteScript(self._worker, site, self._teller(site), last_model)
            self._scripts[site.id] = script
            agents.append(LightAgent(lights, i, site.id, script.participant))
        try:
            for agent in agents:
                agent.start()
            while not await self._is_over(LOOK_S):
                _end_with_parent()
        finally:
            for agent in agents:
                agent.close()
            await lights.close()

    async def _is_over(self, timeout_s: float) -> bool:
        """Wait so long for the end. Returns whether it has come."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), timeout_s)
        return self._over.is_set()

    def _teller(self, site: Site) -> Callable[[str], None]:
        """A function that is told why main() has failed at a site."""
        return lambda why: self._fail(f"main() failed at {site.id}: {why}".rstrip())

    def _add(self, kind: int, agent: LightAgent, round_: int) -> None:
        """Add a job; a training of an agent whose last one took longer goes first."""
        self._num_jobs += 1
        self._jobs.put(Job(kind, -agent.last_s, self._num_jobs, agent, round_))

    def _take_outcomes(self) -> None:
        """Handle the outcomes that have come."""
        while self._outcomes:
            # The first one stays until it is handled, so that others wake the loop no more.
            self._outcomes[0]()
            self._outcomes.popleft()

    def _on_trained(self, agent: LightAgent, outcome: e.Event) -> None:
        """Have an agent handle the outcome of its training."""
        agent.on_trained(outcome, leaves=self._scripts[agent.name].has_left)

    def _on_over(self, agent: LightAgent, message: str) -> None:
        """Have the code after a site's loop run; a session that has ended without a result ends the
        simulation."""
        if agent.exit_status in (EXIT_OK, EXIT_NO_BETTER, EXIT_NOTHING_COUNTED):
            if self._scripts[agent.name].has_left:  # the code after its loop has run
                self._on_end_of_main()
            else:
                self._add(AFTER_THE_LOOP, agent, -1)
        else:
            self._fail(f"{agent.name}: {message}")
            self._over.set()

    def _on_end_of_main(self) -> None:
        """Count a site whose main() has come to its end; the last one ends the run."""
        self._running -= 1
        if self._failure or not self._running:
            self._over.set()

    def _on_defect(self, error: BaseException) -> None:
        """End the simulation because of a defect."""
        self._fail("".join(traceback.format_exception(error)))
        self._over.set()


def _end_with_parent() -> None:
    """End the process when the script that has spawned it was killed, which stops nobody then."""
    parent = multiprocessing.parent_process()
    # A process that the script has forked keeps the pipe of multiprocessing open.
    if parent is not None and not (parent.is_alive() and os.getppid() == parent.pid):
        os._exit(1)


def _kept_model(worker: Worker) -> Callable[[], LastModel]:
    """Make the function that asks the coordinator for the last model once, and gives each caller a
    copy. The function raises SessionError."""

    @cache
    def fetched() -> LastModel:
        return fetch_last_model(worker.target, worker.sites[0].id)

    def copied() -> LastModel:
        last = fetched()
        return replace(last, vector=last.vector.copy())

    return copied


def sites_of(number: int) -> list[Site]:
    """The sites of a simulation, whose names have the order of their indices."""
    width = len(str(number - 1))
    return [Site(i, number, f"site-{i:0{width}d}") for i in range(number)]
