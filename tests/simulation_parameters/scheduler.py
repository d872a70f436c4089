"""The scheduler's process: the decider with its journal, leases, and calls from other processes."""

from collections.abc import Callable
from functools import partial
from typing import Any

from simulation_parameters.clock import Clock, Process
from simulation_parameters.network import Network
from simulation_parameters.oracle import Oracle
from simulation_parameters.scenario import Scenario
from xain_parameters.errors import ParameterError
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler.decider import decide, is_saved
from xain_parameters.scheduler.state import JobEvent, Settings, State, evolve, view_of
from xain_parameters.specs import View

NAME = "scheduler"
LEASE_S = 1.0
RETRY_S = 0.4
LOOKS_S = 0.1  # after leases
VIEW_S = (0.0005, 0.05)  # until a server hears of a view; now and then far longer


class SchedulerMachine:
    """journal: events that are on disk. A process folds them when it starts.

    names: of all jobs that there ever were, by number.
    """

    def __init__(
        self, clock: Clock, network: Network, scenario: Scenario, oracles: dict[str, Oracle]
    ) -> None:
        self._clock = clock
        self._network = network
        self._oracles = oracles  # by job
        self._settings = Settings(
            num_replicas=scenario.num_replicas,
            has_log=scenario.has_log,
            checkpoint_interval=scenario.checkpoint_interval,
            num_ranges=scenario.num_ranges,
            checkpoints="simulated",
        )
        self._journal: list[Any] = []
        self._heard: dict[tuple[str, int], float] = {}  # by name and incarnation of a worker
        self._incarnation = 0
        self.on_view: Callable[[View], None] = lambda view: None
        self.process: Process | None = None
        self.names: dict[int, str] = {}
        self.state: State

    def boot(self) -> None:
        self._incarnation += 1
        self.process = Process(self._clock, NAME, self._incarnation)
        state = State.first(1, self._settings)
        for event in self._journal:
            state = evolve(state, event)
        self.state = state
        now = self._clock.now
        self._heard = dict.fromkeys(((name, 0) for name in state.servers), now)
        for job in state.jobs.values():
            for name, each in (*job.workers.items(), *job.slots.items()):
                self._heard[name, each.incarnation] = now
        self.decide(c.Start(self._settings))
        self._look()

    def kill(self, down_s: float) -> None:
        if self.process is not None and self.process.is_alive:
            self.process.is_alive = False
            self._clock.note(NAME, "dies")
            self._clock.after(down_s, None, self.boot)

    def decide(self, command: c.Command) -> None:
        """Raises what the decider raises."""
        decision = decide(self.state, command)
        before = {name: view.version for name, view in self.views().items()}
        for event in decision.events:
            self._journal.append(event)
            if isinstance(event, JobEvent) and event.job in self.state.jobs:
                self._oracles[event.job].decided(self.state.jobs[event.job], event)
            self.state = evolve(self.state, event)
            if not isinstance(command, c.Tick):
                self._clock.note(NAME, f"{event}")
        assert self.state == decision.state
        self.names |= self.state.names
        for name, job in self.state.jobs.items():
            if job.cut is not None and is_saved(job):
                written = c.CutWritten(job.cut.number, job=name)
                self.process.after(0.01, partial(self._written, written))
        if decision.events:
            for name, view in self.views().items():
                if view.version != before.get(name):
                    self.on_view(view)

    def _written(self, command: c.CutWritten) -> None:
        if command.job in self.state.jobs:  # it may have been removed meanwhile
            self.decide(command)

    def view(self, job: str) -> View:
        return view_of(self.state, job)

    def views(self) -> dict[str, View]:
        return {name: view_of(self.state, name) for name in self.state.jobs}

    def heard(self, name: str, incarnation: int = 0) -> None:
        self._heard[name, incarnation] = self._clock.now

    def _look(self) -> None:
        assert self.process is not None
        late = {who for who, at in self._heard.items() if self._clock.now - at > LEASE_S}
        for name, server in list(self.state.servers.items()):
            if (name, 0) in late and server.is_live:
                self.decide(c.ServerDied(name))
        for job_name, job in list(self.state.jobs.items()):
            for name, worker in job.workers.items():
                if (name, worker.incarnation) in late and worker.is_live:
                    self.decide(c.WorkerDied(name, job=job_name))
            for name, slot in job.slots.items():
                if (name, slot.incarnation) in late and not slot.is_gone:
                    self.decide(c.WorkerGone(name, job=job_name))
        self.process.after(LOOKS_S, self._look)

    def ask(
        self, caller: Process, question: Callable[[], Any], answered: Callable[[Any], None]
    ) -> None:
        """Ask until there is an answer: what `question` returns at the scheduler, or the
        ParameterError that it raises."""
        is_answered = False

        def arrive() -> None:
            process = self.process
            if process is None or not process.is_alive or self._delay(caller) > 0:
                return
            try:
                answer = question()
            except ParameterError as error:
                answer = error
            if self._delay(caller) == 0:
                caller.after(self._latency(), lambda: finish(answer))

        def finish(answer: Any) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                answered(answer)

        def attempt() -> None:
            if not is_answered:
                self._clock.after(self._latency(), None, arrive)
                caller.after(RETRY_S, attempt)

        attempt()

    def _delay(self, caller: Process) -> float:
        return self._network.delay(caller.name, NAME)

    def _latency(self) -> float:
        if self._clock.chance.random() < 0.03:
            return self._clock.between(*VIEW_S) * 10
        return self._clock.between(*VIEW_S) / 5
