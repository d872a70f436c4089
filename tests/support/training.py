"""A whole session of real processes, and what it must come to, whatever befalls them.

The participants' training is a function of their names, so every session of the same scenario must
make the same models, bit for bit.
"""

import asyncio
import contextlib
import hashlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.agents import ends_of
from support.fault_proxy import FaultProxy
from support.logs import capture_logs
from support.process import CoordinatorProcess, ParticipantProcess
from support.trainee import Trainee
from support.wire import Member
from xain_coordinator import Coordinator
from xain_participant import Agent

Flags = Callable[[str], Sequence[str]]

PATIENCE_S = 240.0  # for what takes seconds, on a machine that has other things to do
TAIL_LINES = 12


@dataclass(frozen=True)
class Scenario:
    """A session in which all train every round, so that the models depend on nothing else than
    this.

    size: of the model, in float32. training_s: a training takes up to this long.
    encoding: of updates; it changes their values.
    """

    participants: tuple[str, ...]
    rounds: int
    size: int
    training_s: float = 0.0
    encoding: str = "plain"
    settings: dict[str, object] = field(default_factory=dict)

    def having(self, settings: dict[str, object]) -> "Scenario":
        """The same, with these settings of the coordinator, which change no model."""
        return replace(self, settings={**self.settings, **settings})

    def rules(self) -> dict[str, object]:
        """Settings of the coordinator, by dotted key."""
        return {
            "rounds.rounds": self.rounds,
            "rounds.initial_weights": "average",
            "rounds.min_participants": len(self.participants),
            "server.update_encoding": self.encoding,
            "server.heartbeat_time_s": 1.0,
            # No process is to be given up because it is dead for a while, or the machine slow.
            "server.heartbeat_timeout_s": 10 * PATIENCE_S,
        }


async def undisturbed(scenario: Scenario, folder: Path) -> list[str]:
    """The models of a session in this process, in which nothing is killed."""
    settings: dict[str, Any] = {
        "server.port": 0,
        "storage.path": folder / "weights",
        "journal.path": folder / "journal.sqlite",
        "metrics.kind": "none",
        **scenario.rules(),
    }
    with capture_logs(), Coordinator(settings) as coordinator:  # nobody looks for its logs
        agents = [
            Agent(Trainee(p, scenario.size), coordinator.address, p) for p in scenario.participants
        ]
        assert set(await ends_of(agents)) == {0}
        return await models(coordinator.port, scenario)


async def models(port: int, scenario: Scenario, reader: Member | None = None) -> list[str]:
    """Every global model, as a participant gets it; only a hash of each, so that two lists of them
    can be shown. reader: who asks; by default one without certificate."""
    reader = reader or Member(port, "reader")
    try:
        return [
            hashlib.sha256(await reader.download(f"{number}/global")).hexdigest()
            for number in range(scenario.rounds + 1)
        ]
    finally:
        await reader.close()


def close_gates(folder: Path, *names: str) -> None:
    """Trainings that are to wait, as {participant}-{round}, until the file of this name is gone."""
    folder.mkdir()
    for name in names:
        (folder / name).touch()


def digests(journal: Path) -> dict[tuple[int, str], str]:
    """Digests of the objects of all accepted updates, by round and participant."""
    with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as db:
        rows = db.execute("SELECT body FROM record WHERE type = 'UpdateAccepted'").fetchall()
    accepted = (json.loads(text) for (text,) in rows)
    return {
        (body["round"], body["update"]["participant_id"]): body["update"]["weights"]["ref"][
            "digest"
        ]
        for body in accepted
    }


class Training:
    """A coordinator and its participants, each in a process, with a proxy between.

    flags: of the participants, by name, besides those of the scenario.
    ways: participants that have a proxy of their own.
    """

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        proxy: FaultProxy,
        flags: Flags,
        ways: Mapping[str, FaultProxy],
    ) -> None:
        self.scenario = scenario
        self.folder = folder
        self.proxy = proxy
        self.coordinator = CoordinatorProcess(folder, {**scenario.rules(), **scenario.settings})
        self._proxies = (proxy, *ways.values())
        size, training = f"--size={scenario.size}", f"--training-s={scenario.training_s}"
        self.participants = {
            name: ParticipantProcess(
                folder,
                name,
                f"127.0.0.1:{ways.get(name, proxy).port}",
                *(size, training, *flags(name)),
            )
            for name in scenario.participants
        }

    async def start(self) -> None:
        await self.coordinator.start()
        for proxy in self._proxies:
            proxy.upstream = self.coordinator.port
        for participant in self.participants.values():
            await participant.start()

    async def end(self) -> None:
        for process in (*self.participants.values(), self.coordinator):
            await process.end()

    @property
    def is_over(self) -> bool:
        """Whether all participants have heard of the end."""
        return all(participant.status == 0 for participant in self.participants.values())

    async def until(self, found: Callable[[], object], *, look_every_s: float = 0.02) -> bool:
        """Wait for it; False if all have left before.

        Raises AssertionError when something ends as it must not, and after a long time.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            is_over = self.is_over
            if found():
                return True
            if is_over:
                return False
            for process in (self.coordinator, *self.participants.values()):
                assert process.status in (None, 0), (
                    f"{process.log_path.stem} has ended with {process.status}"
                )
            assert time.monotonic() < deadline, f"not within {PATIENCE_S} s"
            await asyncio.sleep(look_every_s)  # a poll, not a race: it ends when it is found

    async def finish(self) -> list[str]:
        """Wait until all have left, and stop. Returns the models."""
        await self.until(lambda: self.is_over)
        got = await models(self.coordinator.port, self.scenario)
        assert await self.coordinator.stop() == 0
        return got

    def check_journal(self) -> None:
        """Every round's updates are there, each once; so are the models, and one end."""
        accepted: Counter[tuple[int, str]] = Counter()
        published: Counter[int] = Counter()
        causes: list[str] = []
        path = self.folder / "journal.sqlite"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            rows = db.execute("SELECT session, type, body FROM record ORDER BY session, seq")
            for session, kind, text in rows:
                assert session == 1, "a session was begun anew"
                body = json.loads(text)
                assert kind != "ParticipantLeft", f"a lease ran out, so all is open: {text}"
                if kind == "UpdateAccepted":
                    accepted[body["round"], body["update"]["participant_id"]] += 1
                elif kind == "ModelPublished":
                    published[body["round"]] += 1
                elif kind == "SessionFinished":
                    causes.append(body["cause"])
        rounds = range(self.scenario.rounds)
        assert accepted == {(n, p): 1 for n in rounds for p in self.scenario.participants}
        assert published == dict.fromkeys(rounds, 1)
        assert causes == ["completed"]

    def check_books(self, *, kept: bool) -> None:
        """Require that no participant trained a round that it had been told was taken. kept: nor
        one that it had trained, since it keeps its result until then."""
        for name, participant in self.participants.items():
            book = participant.book()
            done: set[int] = set()
            for what, round_ in book:
                if what == "training":
                    assert round_ not in done, f"{name} trained round {round_} again: {book}"
                elif what == "handed_in" or (what == "trained" and kept):
                    done.add(round_)
            trained = {round_ for what, round_ in book if what == "training"}
            assert trained == set(range(self.scenario.rounds)), f"{name} did {book}"

    def check_logs(self) -> None:
        """Require that no process has logged an error or a traceback."""
        for process in (self.coordinator, *self.participants.values()):
            for line in process.log().splitlines():
                assert '"level": "error"' not in line, line
                assert "Traceback" not in line, process.log()

    def report(self) -> str:
        """Logs and work of all processes, to look at after a failure."""
        lines = [f"its folder is {self.folder}", f"the proxy did: {self.proxy.told}"]
        for process in (self.coordinator, *self.participants.values()):
            lines.append(f"--- the end of {process.log_path.name} ---")
            lines += process.log().splitlines()[-TAIL_LINES:]
        lines += [f"{name} did {p.book()}" for name, p in self.participants.items()]
        return "\n".join(lines)


@asynccontextmanager
async def training(
    scenario: Scenario,
    folder: Path,
    *,
    flags: Flags = lambda _: (),
    ways: Mapping[str, FaultProxy] | None = None,
    about: str = "",
) -> AsyncIterator[Training]:
    """A training that has begun; a failure within tells all that is known.

    about: how to come here again.
    """
    with FaultProxy() as proxy:
        one = Training(scenario, folder, proxy, flags, ways or {})
        try:
            await one.start()
            yield one
        except Exception as error:  # whatever it is, the logs go with it
            error.add_note(f"{about}\n{one.report()}")
            raise
        finally:
            await one.end()
