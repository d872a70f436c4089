"""The machine that a script runs on, which drives the session: what it decides, and the calls by
which it says so. A script that is killed is started again, and goes on with what it is told."""

import json
from collections.abc import Mapping
from random import Random

import grpc

from simulation.channel import CallError, Channel
from simulation.hub import Hub, Process
from simulation.network import Link, Network
from simulation.oracle import Oracle
from simulation.plan import configuration_of, ends_at, measures
from simulation.scenario import Scenario
from simulation.threads import Runtime, sleep
from xain_wire.fl import access_pb2 as pb
from xain_wire.fl.access_pb2_grpc import ControlStub

SILENCE_S = (10.0, 10.0)  # before a ping of the connection, and after it
CALL_S = 20.0  # that a call may take
FOLLOWED_S = 60.0  # after which a script asks anew: a stream may stall without a word
PAUSE_S = 1.0

# Errors that a script gets while the coordinator, or the call, is away.
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class ScriptMachine:
    """Keeps a script running until its session is finished.

    is_done: it has heard of the end.
    """

    def __init__(self, hub: Hub, scenario: Scenario, network: Network, oracle: Oracle) -> None:
        self.name = "script"
        self.is_done = not scenario.scripted
        self.process: Process | None = None
        self.link = Link(self.name)
        if scenario.scripted:
            network.links[self.name] = self.link
        self._hub = hub
        self._scenario = scenario
        self._network = network
        self._oracle = oracle
        self._num_started = 0
        self._restart_s = 1.0

    def boot(self) -> None:
        """Start a process, if none runs."""
        if self.process is not None or self.is_done:
            return
        self._num_started += 1
        process = self.process = Process(self.name)
        runtime = Runtime(self._hub, process)
        process.on_kill = lambda: self._gone(process, runtime, "is dead")
        chance = Random(f"{self._scenario.seed} {self.name} {self._num_started}")
        self._hub.note(self.name, "starts")
        runtime.spawn("main", lambda: self._main(process, runtime, chance))

    def kill(self, steps: int, *, down_s: float) -> None:
        """Kill the process after so many steps."""
        if self.process is None:
            return
        self._restart_s = down_s
        if steps:
            self.process.steps_left = steps
        else:
            self.process.kill()

    def spare(self) -> None:
        """Cancel the planned kill."""
        if self.process is not None:
            self.process.steps_left = None

    def _gone(self, process: Process, runtime: Runtime, how: str) -> None:
        process.is_alive = False
        self._hub.note(self.name, how)
        self.process = None
        for channel in list(self.link.channels):
            channel.hang_up()
        self._hub.bury_after_step(runtime.bury)
        if not self.is_done:
            self._hub.after(self._restart_s, None, self.boot)

    # --- its life ---

    def _main(self, process: Process, runtime: Runtime, chance: Random) -> None:
        channel = Channel(self._network, process, self.link, SILENCE_S)
        try:
            _Loop(self._hub, self._scenario, self._oracle, ControlStub(channel), chance).run()
        except CallError as error:
            self._oracle.fail(f"{self.name} ends with {error.code().name}: {error.details()}")
            return
        self.is_done = True
        self._gone(process, runtime, "exits")


class _Loop:
    """The loop over the rounds."""

    def __init__(
        self, hub: Hub, scenario: Scenario, oracle: Oracle, control: ControlStub, chance: Random
    ) -> None:
        self._hub = hub
        self._scenario = scenario
        self._oracle = oracle
        self._control = control
        self._chance = chance

    def run(self) -> None:
        """Decide until the session is finished. Raises CallError."""
        while True:
            try:
                stream = self._control.FollowScript(pb.FollowScriptRequest(), timeout=FOLLOWED_S)
                for status in stream:
                    if status.is_finished:
                        return
                    self._decide(status)
            except CallError as error:
                if error.code() not in _AWAY:
                    raise
            sleep(PAUSE_S)

    def _decide(self, status: pb.FollowScriptResponse) -> None:
        if not status.waits:
            return
        number, is_measured = status.model, status.evaluated.model >= status.model
        if measures(self._scenario, number) and not (status.HasField("evaluated") and is_measured):
            sleep(self._scenario.script_s * (0.5 + self._chance.random()))
            self._record(number)
            return  # the next status has it
        if status.is_trained or ends_at(self._scenario) == number:
            self._say("EndScript", pb.EndScriptRequest(session_id=status.session_id))
            return
        sleep(self._scenario.script_s * self._chance.random())
        self._configure(status.round, status.session_id)

    def _configure(self, number: int, session_id: str) -> None:
        request = configuration_of(self._scenario, number)
        request.session_id = session_id
        if not self._say("ConfigureRound", request):
            return
        if self._chance.random() < 0.3:
            self._say("ConfigureRound", request)
        if self._chance.random() < 0.3:
            other = pb.ConfigureRoundRequest(round=number, config=json.dumps({"lr": -1}))
            self._must_be_refused("ConfigureRound", other)

    def _record(self, number: int) -> None:
        request = pb.RecordEvaluationRequest(model=number, metrics=self._metrics_of(number))
        if not self._say("RecordEvaluation", request):
            return
        if self._chance.random() < 0.3:
            self._say("RecordEvaluation", request)
        if self._chance.random() < 0.3:
            other = pb.RecordEvaluationRequest(model=number, metrics={"accuracy": -1.0})
            self._must_be_refused("RecordEvaluation", other)

    def _metrics_of(self, number: int) -> Mapping[str, float]:
        return {"accuracy": self._oracle.score_of_model(number)}

    def _say(self, method: str, request: object) -> bool:
        """Whether the decision was taken; otherwise the script looks again at what is waited for.

        Raises CallError if the coordinator does not take it."""
        try:
            getattr(self._control, method)(request, timeout=CALL_S)
        except CallError as error:
            # The session may have ended, or gone on with what an earlier call has decided.
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION or error.code() in _AWAY:
                return False
            raise
        return True

    def _must_be_refused(self, method: str, request: object) -> None:
        try:
            getattr(self._control, method)(request, timeout=CALL_S)
        except CallError as error:
            is_told = error.code() is grpc.StatusCode.ALREADY_EXISTS
            if not is_told and error.code() not in (*_AWAY, grpc.StatusCode.FAILED_PRECONDITION):
                raise
            return
        self._oracle.fail(f"{method} was taken a second time, with another value")
