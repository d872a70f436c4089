"""Thousands of participants in one process, for fleet.py: a process of its own, told by its input.

    python benchmarks/fleet_agents.py TARGET FIRST NUMBER [CERTIFICATES]

Each participant is the real Protocol on a channel of its own. What a thread does in the real agent
a task does here: its calls, its timers and its stream. Training adds 1 to a model of a few floats,
when it may. The one thing left out is the second connection that an agent opens when a sign of
life is not answered within SILENCE_S; those that would have been are counted.

A line of input is a command, a line of output its answer, as JSON; all times are CLOCK_MONOTONIC.
"""

import argparse
import asyncio
import io
import json
import sys
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
import xxhash

from xain_foundation.security.tls import FILES
from xain_participant.agent.agent import Agent
from xain_participant.agent.protocol import Protocol, jittered
from xain_participant.sdk import actions as a
from xain_participant.sdk import events as e
from xain_participant.sdk.values import Call, State, Timer
from xain_participant.wire.client import (
    CALL_TIMEOUT_S,
    CHANNEL_OPTIONS,
    CoordinatorClient,
    refused_by,
)
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorStub
from xain_wire.metadata import PARTICIPANT_ID_KEY, TIMEOUT_KEY

NEVER = -1  # no round: training goes on
STATES = {pb.ROUND: State.ROUND, pb.FINISHED: State.FINISHED}


def site(number: int) -> str:
    return f"site-{number:05}"


class Crowd:
    """All participants of this process, and their figures.

    Training ends at once, but in rounds after the one that the latest command has named.
    """

    def __init__(self) -> None:
        self._last_trained = NEVER
        self._changed = asyncio.Event()
        self.heartbeats: list[tuple[float, float]] = []  # when sent, seconds until answered
        self.unanswered: dict[object, float] = {}  # when sent, by call
        self.num_rendezvous = 0
        self.num_lost = 0
        self.num_refused = 0
        self.told: dict[int, list[float]] = {}  # round: when each was told of it first
        self.watching: dict[str, float] = {}  # since when; not in it: no stream

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "train":
                self._last_trained = command["until"]
                self._changed.set()
                self._changed = asyncio.Event()
            case "forget":
                self.heartbeats.clear()
                self.num_rendezvous = self.num_lost = self.num_refused = 0
        return {
            "watching": len(self.watching),
            "watching_since": max(self.watching.values(), default=0.0),
            "rendezvous": self.num_rendezvous,
            "lost": self.num_lost,
            "refused": self.num_refused,
            "told": {
                round_: [len(times), min(times), max(times)] for round_, times in self.told.items()
            },
            "unanswered_since": min(self.unanswered.values(), default=time.monotonic()),
            "heartbeats": self.heartbeats if command["do"] == "heartbeats" else [],
        }

    async def trained(self, round_: int) -> None:
        """Wait until the training of a round may end."""
        while round_ > self._last_trained:
            await self._changed.wait()


class LightAgent:
    """One participant, from its first rendezvous to its end."""

    def __init__(self, crowd: Crowd, target: str, name: str, tls: Path | None) -> None:
        self._crowd = crowd
        self._name = name
        self._metadata = ((PARTICIPANT_ID_KEY, name),)
        timeout = (TIMEOUT_KEY, str(round(1000 * CALL_TIMEOUT_S)))
        self._metadata_of_heartbeats = (*self._metadata, timeout)
        self._channel = (
            grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(target, _credentials(tls / name), CHANNEL_OPTIONS)
        )
        self._stub: Any = CoordinatorStub(self._channel)  # its types are those of blocking calls
        self._chance = Random(name)
        self._protocol = Protocol(self._chance)
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._events: deque[tuple[e.Event, pb.StartTrainingRoundResponse | None]] = deque()
        self._is_handling = False
        self._assignment = pb.StartTrainingRoundResponse()
        self._result = b""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_back = asyncio.Event()
        self.done = asyncio.Event()

    def post(self, event: e.Event, work: pb.StartTrainingRoundResponse | None = None) -> None:
        """Events are handled one after another, also those that come of an action."""
        self._events.append((event, work))
        if self._is_handling:
            return
        self._is_handling = True
        while self._events:
            event, work = self._events.popleft()
            for action in self._protocol.handle(event):
                self._do(action, work)
        self._is_handling = False

    def _do(self, action: a.Action, announced: pb.StartTrainingRoundResponse | None) -> None:
        match action:
            case a.SetTimer(timer, after_s):
                if timer in self._timers:
                    self._timers[timer].cancel()
                loop = asyncio.get_running_loop()
                self._timers[timer] = loop.call_later(after_s, self.post, e.TimerFired(timer))
            case a.Rendezvous():
                self._spawn(self._answered(Call.RENDEZVOUS, self._rendezvous()))
            case a.SendHeartbeat(training, round_):
                self._spawn(self._answered(Call.HEARTBEAT, self._heartbeat(training, round_)))
            case a.StartWatch():
                self._spawn(self._watch())
            case a.BeginRound(round_, ask):
                if announced is not None and announced.round == round_ and not ask:
                    self.post(self._assign(announced))
                else:
                    self._spawn(self._answered(Call.BEGIN_ROUND, self._begin_round()))
            case a.Train(round_):
                self._spawn(self._train(round_))
            case a.HandIn(round_):
                self._spawn(self._answered(Call.HAND_IN, self._hand_in(round_)))
            case a.Drop() | a.Leave():
                self._result = b""
            case a.Exit():
                self.done.set()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answered(self, call: Call, asking: Awaitable[e.Event]) -> None:
        event: e.Event
        try:
            event = await asking
        except grpc.aio.AioRpcError as error:
            self._crowd.num_refused += 1
            event = refused_by(error).event(call)
        if call in (Call.RENDEZVOUS, Call.HEARTBEAT) and not isinstance(event, e.RefusedBy):
            self._is_back.set()
        self.post(event)

    async def _rendezvous(self) -> e.Event:
        self._crowd.num_rendezvous += 1
        response = await self._stub.Rendezvous(
            pb.RendezvousRequest(), metadata=self._metadata, timeout=CALL_TIMEOUT_S
        )
        if response.reply == pb.LATER:
            return e.AskedToWait(response.retry_after_ms / 1000)
        return e.Joined(
            response.session_id,
            response.heartbeat_interval_ms / 1000,
            response.reconnect_spread_ms / 1000,
        )

    async def _heartbeat(self, training: bool, round_: int) -> e.Event:
        request = pb.HeartbeatRequest(state=pb.TRAINING if training else pb.READY, round=round_)
        call = object()  # there may be two of a participant
        sent_at = self._crowd.unanswered[call] = time.monotonic()
        try:
            response = await self._stub.Heartbeat(
                request, metadata=self._metadata_of_heartbeats, timeout=CALL_TIMEOUT_S
            )
        finally:  # one that was not answered took as long as its sender waited
            self._crowd.heartbeats.append((sent_at, time.monotonic() - sent_at))
            del self._crowd.unanswered[call]
        return replace(advertised(response), reconnect_spread_s=response.reconnect_spread_ms / 1000)

    async def _watch(self) -> None:
        failures = 0
        while not self.done.is_set():
            has_told, retry_after_s = False, 0.0
            try:
                async for message in self._stub.Watch(pb.WatchRequest(), metadata=self._metadata):
                    now = time.monotonic()
                    if not has_told:
                        self._crowd.watching[self._name] = now
                    has_told, failures = True, 0
                    if message.state == pb.ROUND:
                        self._crowd.told.setdefault(message.round, []).append(now)
                    work = message.work if message.HasField("work") else None
                    self.post(advertised(message), work)
            except grpc.aio.AioRpcError as error:
                self._crowd.num_refused += not has_told
                retry_after_s = refused_by(error).retry_after_s
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
            self._crowd.watching.pop(self._name, None)
            if has_told and not self.done.is_set():
                self._crowd.num_lost += 1
                self._is_back.clear()
                self.post(e.ConnectionLost())
                await self._is_back.wait()
            ceiling = min(Agent.max_watch_pause_s, Agent.min_watch_pause_s * 2 ** min(failures, 8))
            failures += 1
            pause_s = self._chance.uniform(Agent.min_watch_pause_s, ceiling)
            if retry_after_s:
                pause_s = jittered(self._chance, retry_after_s)
            await asyncio.sleep(pause_s)  # as the participant's own stream does

    async def _begin_round(self) -> e.Event:
        return self._assign(
            await self._stub.StartTrainingRound(
                pb.StartTrainingRoundRequest(), metadata=self._metadata, timeout=CALL_TIMEOUT_S
            )
        )

    def _assign(self, assignment: pb.StartTrainingRoundResponse) -> e.Event:
        self._assignment = assignment
        return e.Assigned(assignment.round, assignment.update_accepted)

    async def _train(self, round_: int) -> None:
        await self._crowd.trained(round_)
        weights = np.load(io.BytesIO(self._assignment.model.data))
        # The coordinator's first model may be XAIN's empty one, which is to be initialised. Random:
        # updates that are alike would be cheaper than real ones.
        rng = np.random.default_rng(self._chance.getrandbits(64))
        vector = weights + 1 if weights.size else rng.random(10, np.float32)
        file = io.BytesIO()
        np.save(file, vector)
        self._result = file.getvalue()
        self.post(e.Trained(round_))

    async def _hand_in(self, round_: int) -> e.Event:
        result = self._result
        ref = pb.WeightsRef(
            key=f"{round_}/{self._name}",
            size_bytes=len(result),
            digest=xxhash.xxh3_128_digest(result),
            data=result,
        )
        request = pb.EndTrainingRoundRequest(
            participant_id=self._name, number_samples=10, metrics="[]", round=round_, update=ref
        )
        await self._stub.EndTrainingRound(
            request, metadata=self._metadata, timeout=CoordinatorClient.hand_in_timeout_s
        )
        return e.HandedIn(round_)


def advertised(message: pb.HeartbeatResponse | pb.WatchResponse) -> e.Advertised:
    return e.Advertised(
        STATES.get(message.state, State.STANDBY),
        message.round,
        message.update_accepted,
        message.session_id,
        message.cause,
    )


def _credentials(folder: Path) -> grpc.ChannelCredentials:
    """Credentials without the contexts of `ssl` of Certificates, which a program has once."""
    authority, certificate, key = ((folder / name).read_bytes() for name in FILES)
    return grpc.ssl_channel_credentials(authority, key, certificate)


async def run(target: str, names: Sequence[str], tls: Path | None) -> None:
    crowd = Crowd()
    agents = [LightAgent(crowd, target, name, tls) for name in names]
    for agent in agents:
        agent.post(e.Started())
    commands = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(commands)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    while line := await commands.readline():
        print(json.dumps(crowd.answer(json.loads(line))), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("first", type=int)
    parser.add_argument("number", type=int)
    parser.add_argument("certificates", type=Path, nargs="?", help="one folder for each, by name")
    given = parser.parse_args()
    names = [site(i) for i in range(given.first, given.first + given.number)]
    asyncio.run(run(given.target, names, given.certificates))


if __name__ == "__main__":
    main()
