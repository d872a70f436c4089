"""Runs a participant against a coordinator: threads, clock, signals and log around the Protocol.

    run(participant, "localhost:50051")

The calling thread owns the Protocol: it takes one event after another, carries out the actions, and
sends the heartbeats, so they go on while the participant trains. A worker thread does one piece of
work at a time; a watch thread listens. Both only ever post events.
"""

import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from random import Random
from types import FrameType
from typing import Any, Literal

import numpy as np
import structlog
from numpy.typing import NDArray

from xain_participant import protocol as p
from xain_participant.client import CoordinatorClient, Refused
from xain_participant.metrics import to_json
from xain_participant.participant import (
    Participant,
    call_init_weights,
    call_train_round,
    take_metrics,
)
from xain_proto.fl import coordinator_pb2 as pb
from xain_workloads.model import Layout, TensorSpec
from xain_workloads.profile import DataProfile

# Whoever stops us waits for this; the coordinator's lease takes care of a goodbye that is lost.
LEAVE_TIMEOUT_S = 2.0
# Threads that are not in the participant's own code end by themselves once the channel is closed.
JOIN_TIMEOUT_S = 2.0

MIN_WATCH_PAUSE_S = 0.1
MAX_WATCH_PAUSE_S = 2.0

# A service manager sends SIGTERM and counts anything but 0 as a failure; a shell expects 130.
_EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}

_STATES: Mapping[int, p.State] = {
    pb.STANDBY: p.State.STANDBY,
    pb.ROUND: p.State.ROUND,
    pb.FINISHED: p.State.FINISHED,
}


@dataclass(frozen=True, slots=True)
class Progress:
    """One step, for whoever shows it. round: the last one that was begun, -1 before the first.
    message: why, for waiting, refused, dropped and finished. metrics: for trained, the newest value
    of each name."""

    what: Literal[
        "joined", "waiting", "training", "trained", "handed_in", "dropped", "refused", "finished"
    ]
    participant_id: str
    round: int
    message: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


Observer = Callable[[Progress], None]


def run(
    participant: Participant,
    target: str,
    participant_id: str | None = None,
    *,
    observer: Observer | None = None,
) -> int:
    """Take part until the session is finished. Returns the exit status of the process.

    0: finished, stopped by SIGTERM, or nothing to train on. 1: the participant's code failed, or
    the coordinator refuses us for good. 130: stopped by SIGINT. A second signal exits at once.
    target: HOST:PORT. participant_id: by default the host's name and a random suffix.
    observer: called in this thread.
    Signals are handled only if this is the main thread; anywhere else use Agent and stop().
    """
    agent = Agent(participant, target, participant_id, observer=observer)
    with _stopped_by_signals(agent):
        return agent.run()


def default_participant_id() -> str:
    """The host's name and a random suffix, since many participants may share a host."""
    return f"{socket.gethostname()[:64]}-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class _Result:
    round: int
    vector: NDArray[np.floating[Any]]
    num_samples: int
    metrics_json: str


@dataclass(frozen=True, slots=True)
class _Posted:
    """An event of another thread. handled: to call when its turn has come."""

    event: p.Event
    handled: Callable[[], None] = lambda: None


class Agent:
    """One participant's run. Use it once."""

    def __init__(
        self,
        participant: Participant,
        target: str,
        participant_id: str | None = None,
        *,
        observer: Observer | None = None,
    ) -> None:
        self.participant_id = participant_id or default_participant_id()
        self._participant = participant
        self._target = target
        self._observer = observer
        self._log = structlog.get_logger(__name__).bind(participant=self.participant_id)

        self._client = CoordinatorClient(target, self.participant_id)
        self._protocol = p.Protocol(Random())
        self._timers: dict[p.Timer, float] = {}  # monotonic time at which each is due
        # A SimpleQueue, because it alone may be put to from a signal handler. What bounds it: the
        # worker has one piece of work, the watcher waits until its last event was handled, and
        # stop() posts once.
        self._mailbox: SimpleQueue[_Posted] = SimpleQueue()
        self._answers: deque[p.Event] = deque()
        self._stopping = False
        self._closing = threading.Event()

        self._profile: DataProfile | None = None
        self._jobs: SimpleQueue[tuple[p.Call, int] | None] = SimpleQueue()  # at most one
        self._threads: list[threading.Thread] = []
        self._watch_credit = threading.Semaphore(1)
        # Written by the worker while it works, and by the loop only while it does not.
        self._assignment = pb.StartTrainingRoundResponse()
        self._result: _Result | None = None
        self._in_participant = False

    def stop(self, code: int = 0) -> bool:
        """Leave the session and let run() return `code`. From any thread or signal handler.

        Returns whether this was the first time.
        """
        if self._stopping:
            return False
        self._stopping = True
        self._mailbox.put(_Posted(p.StopRequested(code)))
        return True

    def run(self) -> int:
        """Take part until the session is finished; see the function of this name."""
        try:
            self._profile = self._participant.profile()
            if self._profile is not None and self._profile.num_samples == 0:
                self._info("nothing_to_train_on", hint="the local data has no rows; not joining")
                self._tell("finished", "the local data has no rows")
                return 0
            self._info("starting", coordinator=self._target)
            self._start_thread("work", self._work)
            return self._loop()
        finally:
            self._close()

    # --- the loop ---

    def _loop(self) -> int:
        self._answers.append(p.Started())
        while True:
            for event in self._next_events():
                self._note(event)
                for action in self._protocol.handle(event):
                    if isinstance(action, p.Exit):
                        self._on_exit(action)
                        return action.code
                    self._do(action)

    def _next_events(self) -> Iterator[p.Event]:
        """Those that are there, or else the next one."""
        if self._answers:
            yield self._answers.popleft()
            return
        # The protocol always has a rendezvous or a heartbeat before it, so there is a timer.
        timer = min(self._timers, key=lambda timer: self._timers[timer])
        try:
            posted = self._mailbox.get(timeout=max(0.0, self._timers[timer] - time.monotonic()))
        except Empty:
            del self._timers[timer]
            yield p.TimerFired(timer)
        else:
            yield posted.event
            posted.handled()

    def _do(self, action: p.Action) -> None:
        match action:
            case p.SetTimer(timer, after_s):
                self._timers[timer] = time.monotonic() + after_s
            case p.Rendezvous():
                self._answers.append(self._answer(p.Call.RENDEZVOUS, self._rendezvous))
            case p.SendHeartbeat(training, round_):
                self._answers.append(
                    self._answer(p.Call.HEARTBEAT, lambda: self._heartbeat(training, round_))
                )
            case p.StartWatch():
                self._start_thread("watch", self._watch)
            case p.BeginRound(round_):
                self._jobs.put((p.Call.BEGIN_ROUND, round_))
            case p.Train(round_):
                self._info("training")
                self._tell("training")
                self._jobs.put((p.Call.TRAIN, round_))
            case p.HandIn(round_):
                self._jobs.put((p.Call.HAND_IN, round_))
            case p.Drop():
                self._drop(action)
            case p.Leave():
                self._leave()
            case p.Exit():
                raise AssertionError("the loop ends with it")

    def _rendezvous(self) -> p.Event:
        response = self._client.rendezvous(self._profile)
        if response.reply == pb.LATER:
            return p.AskedToWait(response.retry_after_ms / 1000)
        return p.Joined(response.session_id, response.heartbeat_interval_ms / 1000)

    def _heartbeat(self, training: bool, round_: int) -> p.Event:
        return _advertised(
            self._client.heartbeat(pb.TRAINING if training else pb.READY, round_)
        )

    def _answer(self, call: p.Call, ask: Callable[[], p.Event]) -> p.Event:
        try:
            return ask()
        except Refused as refused:
            return p.RefusedBy(call, refused.reason, refused.status.name, refused.message)

    def _drop(self, drop: p.Drop) -> None:
        self._result = None
        if drop.invalid:
            self._log.error("update_invalid", round=drop.round, reason=drop.why)
        else:
            self._log.debug("result_dropped", round=drop.round, reason=drop.why)
        self._tell("dropped", drop.why)

    def _leave(self) -> None:
        try:
            self._client.heartbeat(pb.FINISHED, self._protocol.round, timeout_s=LEAVE_TIMEOUT_S)
        except Refused as refused:
            self._info("left_without_goodbye", reason=str(refused))

    def _on_exit(self, action: p.Exit) -> None:
        log = self._log.info if action.code != 1 else self._log.error
        log("exiting", round=self._protocol.round, code=action.code, reason=action.message)
        self._tell("finished", action.message)

    def _note(self, event: p.Event) -> None:
        """Log and show what happens, before the protocol decides what follows."""
        match event:
            case p.Joined(session_id, interval_s):
                self._info("joined", session=session_id, heartbeat_interval_s=interval_s)
                self._tell("joined")
            case p.AskedToWait(retry_after_s):
                self._info("asked_to_wait", retry_after_s=retry_after_s)
                self._tell("waiting", "the coordinator has no place now")
            case p.HandedIn(round_):
                self._log.info("handed_in", round=round_)
                self._tell("handed_in")
            case p.Trained(round_):
                result = self._result
                assert result is not None, "the worker keeps what it has trained"
                self._log.info("trained", round=round_, num_samples=result.num_samples)
                self._tell("trained", metrics=self._newest)
            case p.RefusedBy(call, reason, status, message):
                self._log.warning(
                    "refused",
                    round=self._protocol.round,
                    call=call.name.lower(),
                    reason=reason,
                    status=status,
                    message=message,
                )
                self._tell("refused", message or reason or status)
            case p.ConnectionLost():
                self._info("connection_lost")

    def _info(self, event: str, **fields: object) -> None:
        self._log.info(event, round=self._protocol.round, **fields)

    def _tell(
        self,
        what: Literal[
            "joined",
            "waiting",
            "training",
            "trained",
            "handed_in",
            "dropped",
            "refused",
            "finished",
        ],
        message: str = "",
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        if self._observer is not None:
            self._observer(
                Progress(what, self.participant_id, self._protocol.round, message, metrics or {})
            )
