"""The machines that participants run on: the real agent around a training of a few floats."""

from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from simulation.channel import Channel
from simulation.direct import SimulatedDirect
from simulation.disk import SimulatedKeeper, StateDisk, StoreDisk, Trouble
from simulation.hub import Hub, Process
from simulation.network import Link, Network
from simulation.oracle import (
    Oracle,
    corrected_weights,
    first_weights,
    layout_of,
    num_samples_of,
    participant_name,
    score_of,
    trained_weights,
)
from simulation.scenario import Scenario
from simulation.threads import Runtime, sleep
from xain_foundation.exit_statuses import EXIT_FAILED, EXIT_NOTHING_COUNTED, EXIT_OK
from xain_participant.agent.agent import Agent
from xain_participant.keep.variates import KeptVariates
from xain_participant.sdk.participant import Assignment, Participant
from xain_workloads.model import CONTROL_LOST, Layout, Model
from xain_workloads.tables.profile import DataProfile

EXIT_STOPPED = 143


class ParticipantMachine:
    """Keeps a participant running until the session is finished.

    is_done: it has exited as it should.
    """

    def __init__(
        self,
        hub: Hub,
        scenario: Scenario,
        network: Network,
        store: StoreDisk,
        trouble: Trouble,
        oracle: Oracle,
        index: int,
    ) -> None:
        self._store = store
        self._trouble = trouble
        self.name = participant_name(index)
        self.index = index
        self.is_done = False
        self.process: Process | None = None
        self.link = network.links[self.name] = Link(self.name)
        self._hub = hub
        self._scenario = scenario
        self._network = network
        self._oracle = oracle
        self._agent: Agent | None = None
        self._state = StateDisk()
        self._variates = KeptVariates(None, self.name)  # on its disk
        self._num_started = 0
        # Chance of its own: which of its updates are bad.
        self._bad = dict(scenario.bad).get(index, 0.0)
        self._of_bad = Random(f"{scenario.seed} bad {index}")
        self._restart_s: float | None = 1.0

    def boot(self) -> None:
        """Start a process, if none runs."""
        if self.process is not None or self.is_done:
            return
        self._num_started += 1
        process = self.process = Process(self.name, self._scenario.clock_rate(self.index))
        runtime = Runtime(self._hub, process)
        process.on_kill = lambda: self._died(runtime)
        if self._bad:
            process.excuse = "it sends bad updates"
        chance = Random(f"{self._scenario.seed} {self.name} {self._num_started}")
        self._hub.note(self.name, "starts")
        runtime.spawn("main", lambda: self._main(process, runtime, chance))

    # --- what ends it ---

    def kill(self, steps: int = 0, *, down_s: float | None, host: bool = False) -> None:
        """Kill the process after so many steps. down_s: None: for ever. host: no peer is told."""
        if self.process is None:
            if down_s is None:
                self.is_done = True
            return
        self._restart_s = down_s
        if host:
            for channel in self.link.channels:
                if channel.connection is not None:
                    channel.connection.silence(acknowledged=False)
        if steps:
            self.process.steps_left = steps
        else:
            self.process.kill()

    def cut_power(self, *, down_s: float) -> None:
        """Cut the power of the machine, whether a process runs on it or not."""
        self.kill(down_s=down_s, host=True)
        if self._state.kept is not self._state.durable:
            self._hub.note(self.name, "power cut: its result may be as it was")
            self._state.cut_power(self._hub)

    def freeze(self, seconds: float) -> None:
        """Pause the process, while its machine goes on."""
        process = self.process
        if process is not None:
            process.is_paused = True
            self._hub.after(seconds, None, lambda: self._hub.go_on(process))

    def stop(self, *, down_s: float) -> None:
        if self._agent is not None:
            self._restart_s = down_s
            self._agent.stop(EXIT_STOPPED)

    def _died(self, runtime: Runtime) -> None:
        self._hub.note(self.name, "is dead")
        self._gone(runtime)

    def _exited(self, process: Process, runtime: Runtime, code: int) -> None:
        if not process.is_alive:
            return
        process.is_alive = False
        self._hub.note(self.name, f"exits with {code}")
        session = self._oracle.session
        is_completed = session is not None and session.cause == "completed"
        # 5 also where the participant made initial weights or measured, and trained nothing.
        expected = (EXIT_OK, EXIT_NOTHING_COUNTED) if is_completed else (EXIT_FAILED,)
        if is_completed and code == EXIT_OK and not self._oracle.has_counted(self.name):
            self._oracle.fail(f"{self.name} ends as done, and nothing of it counted")
        if self._oracle.is_finished and code in expected:
            self.is_done = True
        elif code == 1 and self._bad:
            self._restart_s = None  # whoever is refused again and again leaves
        elif code != EXIT_STOPPED:
            self._oracle.fail(f"{self.name} exits with {code}")
        self._gone(runtime)

    def _gone(self, runtime: Runtime) -> None:
        self.process, self._agent = None, None
        for channel in list(self.link.channels):
            channel.hang_up()
        # Not now: one of them may be running.
        self._hub.bury_after_step(runtime.bury)
        if self._restart_s is None:
            self.is_done = True
        else:
            self._hub.after(self._restart_s, None, self.boot)

    def _spoilt(self, vector: NDArray[Any], *, is_first: bool) -> NDArray[Any] | None:
        """An update that must be refused, in the place of this one; None: it is a good one.
        is_first: there is no model yet, whose length an update must have."""
        if self._of_bad.random() >= self._bad:
            return None
        if not is_first and self._of_bad.random() < 0.5:
            return np.append(vector, vector[:1])
        spoilt = vector.copy()
        spoilt[-1] = self._of_bad.choice((np.nan, np.inf))
        return spoilt

    # --- its life ---

    def _main(self, process: Process, runtime: Runtime, chance: Random) -> None:
        if not self._scenario.keeps_results:
            self._variates = KeptVariates(None, self.name)
        training = _Training(
            self._hub,
            self._scenario,
            self._oracle,
            self.index,
            self._state,
            self._variates,
            self._spoilt,
        )
        keeper = SimulatedKeeper(self._hub, process, self._state, self.name)
        transfer = SimulatedDirect(self._network, process, self.link, self._store, self._trouble)
        with mock.patch("xain_participant.agent.agent.DirectTransfer", return_value=transfer):
            agent = self._agent = Agent(
                training,
                "coordinator:50051",
                self.name,
                direct=self._scenario.is_direct,
                observer=training.observe,
                state=keeper if self._scenario.keeps_results else None,
                insecure=True,  # a network that is simulated
                runtime=runtime,
                channel=lambda _, silence_s: Channel(self._network, process, self.link, silence_s),
                chance=chance,
            )
        try:
            code = agent.run()
        except Exception as error:  # whatever the code under test does
            self._oracle.fail(f"{self.name} ends with {error!r}")
            return
        self._exited(process, runtime, code)


class _Training(Participant):
    """Makes of a model what oracle.py says, and takes its time."""

    def __init__(
        self,
        hub: Hub,
        scenario: Scenario,
        oracle: Oracle,
        index: int,
        state: StateDisk,
        variates: KeptVariates,
        spoilt: Callable[..., NDArray[Any] | None],
    ) -> None:
        self._spoilt = spoilt
        self._hub = hub
        self._scenario = scenario
        self._oracle = oracle
        self._name = participant_name(index)
        self._takes_s = scenario.train_s[index]
        self._state = state
        self._variates = variates
        self._round = -1
        self._asked = Assignment("", 0)
        self._trained: set[int] = set()
        self._can_evaluate = index in scenario.evaluators
        self._can_initialise = index not in scenario.without_weights

    def observe(self, step: str, round_: int, reason: str) -> None:
        self._hub.note(self._name, f"{step} {round_} {reason}")
        if step == "training":
            self._round = round_

    def profile(self) -> DataProfile | None:
        return DataProfile(5, 1, ())

    @property
    def can_evaluate(self) -> bool:
        return self._can_evaluate

    @property
    def can_initialise(self) -> bool:
        return self._can_initialise

    def on_round(self, assignment: Assignment) -> None:
        self._asked = assignment
        self._variates.on_round(assignment)

    def evaluate_round(self, weights: NDArray[Any]) -> None:
        self._oracle.begins_with(self._name, weights)
        # An evaluation takes simulated time.
        sleep(self._takes_s * (0.8 + 0.4 * self._hub.chance.random()))
        self.report_evaluation({"accuracy": score_of(weights)}, 5)

    def init_weights(self) -> NDArray[Any]:
        if not self._can_initialise:
            self._oracle.fail(f"{self._name} is asked for initial weights, and has none")
        return self._train(lambda: first_weights(self._scenario, self._name))

    def init_layout(self) -> Layout:
        return layout_of(self._scenario)

    def train_round(
        self, weights: NDArray[Any], epochs: int, epoch_base: int
    ) -> tuple[NDArray[Any], int]:
        self._oracle.begins_with(self._name, weights)
        if self._asked.evaluate and self._can_evaluate:
            self.report_evaluation({"accuracy": score_of(weights)}, 5)

        def compute() -> NDArray[Any]:
            if not self._scenario.has_control:
                return trained_weights(weights, self._name, epochs, epoch_base)
            begun = self._variates.begin(Model(weights, layout_of(self._scenario)))
            vector, own = corrected_weights(self._scenario, weights, self._name, begun.own)
            self._variates.keep(own)
            return vector

        vector = self._train(compute, weights)
        lost = {CONTROL_LOST: 1.0} if self._variates.is_lost else {}
        if lost:
            self._hub.note(self._name, "has lost its control variate")
        self.update_metrics(norm=float(np.abs(vector).sum()), **lost)
        return vector, num_samples_of(self._name)

    def _train(
        self, compute: Callable[[], NDArray[Any]], base: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        round_ = self._round
        self._oracle.trains(self._name, round_)
        if round_ in self._trained:
            self._oracle.fail(f"{self._name} trains round {round_} twice in one life")
        if self._state.kept is not None and self._state.kept.round == round_:
            self._oracle.fail(f"{self._name} trains round {round_}, whose result it has kept")
        # What training takes, in virtual time.
        sleep(self._takes_s * (0.8 + 0.4 * self._hub.chance.random()))
        vector = compute()
        spoilt = self._spoilt(vector, is_first=base is None)
        if spoilt is not None:
            self._hub.note(self._name, f"trains a bad update of round {round_}")
            return spoilt
        self._trained.add(round_)
        self._oracle.trained(self._name, round_, vector, base)
        return vector
