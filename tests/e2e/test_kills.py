"""Real processes, really killed: kill -9 at any moment, through a network that fails meanwhile, and
the same models come out, bit for bit.

    make kills KILLS=100          until so many kills have happened
    make kills KILLS=5 SEED=1234  the session of this seed

Any twenty seeds, one after another, are every way up with every encoding, with and without a state
directory; the simulation has all combinations in each run of the tests. Chance is in the seed, too:
whom to kill, when, and what the network does. The moment it meets depends on the machine, so a seed
that has failed may have to be tried more than once.
"""

import asyncio
import os
import shutil
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import pytest

from support.fault_proxy import FaultProxy
from support.influx_servers import VictoriaMetrics
from support.process import Lines, ParticipantProcess
from support.s3_servers import SeaweedFS
from support.training import Scenario, Training, close_gates, digests, training, undisturbed
from xain_foundation.net.sockets import free_ports

# The number of kills is what counts, so there is no hurry: this much only if all stands still.
KILLS = int(os.environ.get("KILLS") or 5)
SEED = int(os.environ.get("SEED") or 0)
KILLS_A_SESSION = 5
ENCODINGS = ("float16", "plain")
# inline: inside the call that hands it in. stream: through gRPC. resumed: the same, but large, and
# over lines that are cut in the middle of it. port: as resumed, through the weights port. url: put
# into S3 by a signed URL. Encoded updates take no URL: then the last two are streams, too.
WAYS = ("port", "stream", "url", "resumed", "inline")
LARGE_WAYS = ("resumed", "port")
ROUNDS = 8
TRAINING_S = 0.3  # how long a training takes at most

pytestmark = pytest.mark.timeout(600 + 60 * KILLS)

# Just after these lines a record has become durable that no participant has heard of.
MOMENTS = ("update_accepted", "round_opened", "model_published")
AIMING_S = 0.002  # how often to look for such a line
STEPS = ("training", "trained", "handed_in")
# At which step of its life a coordinator kills itself: a handful of syncs and about one commit for
# each update and each model.
LAST_STEPS: dict[Literal["sync", "before-commit", "after-commit"], int] = {
    "sync": 40,
    "before-commit": 12,
    "after-commit": 12,
}


class Killer:
    """Kills the processes of a training, and starts them again. Now and then it only stops the
    coordinator.

    line: the way to the weights port, if it has one of its own.
    cuts_uploads: before each kill it ends all connections when a part of an upload has arrived.
    num_kills: those that have happened.
    """

    def __init__(
        self,
        training: Training,
        chance: Random,
        line: FaultProxy | None = None,
        *,
        cuts_uploads: bool = False,
    ) -> None:
        self.num_kills = 0
        self._lines = [training.proxy] if line is None else [training.proxy, line]
        self._cuts_uploads = cuts_uploads
        self._training = training
        self._chance = chance

    async def kill(self, number: int) -> None:
        """Kill so many processes, or fewer if the session is over before."""
        goes_on = True
        while goes_on and self.num_kills < number:
            if self._cuts_uploads:
                await self._cut_an_upload()
            alive = self._alive()
            if self._training.coordinator.dies_at is not None:
                goes_on = await self._let_die()
            elif self._chance.random() < 0.1:
                goes_on = await self._stop_coordinator()
            elif self._chance.random() < 0.6 or not alive:
                goes_on = await self._kill_coordinator(number - self.num_kills)
            else:
                goes_on = await self._kill_participant(self._chance.choice(alive))

    async def _cut_an_upload(self) -> None:
        """Or nothing, if the coordinator dies or all is over before."""
        incoming = self._training.folder / "weights" / ".incoming"
        coordinator = self._training.coordinator
        # Those that another coordinator has left do not grow.
        before = {part: part_bytes(part) for part in incoming.glob("*.*.part")}

        def is_under_way() -> bool:
            return coordinator.status is not None or any(
                part_bytes(part) > max(1 << 20, before.get(part, 0))
                for part in incoming.glob("*.*.part")
            )

        if coordinator.dies_at is None and await self._training.until(
            is_under_way, look_every_s=AIMING_S
        ):
            for line in self._lines:
                await asyncio.to_thread(line.cut)

    def _alive(self) -> list[ParticipantProcess]:
        return [p for p in self._training.participants.values() if p.status is None]

    async def _kill_coordinator(self, left: int) -> bool:
        """left: so many kills, this one among them. With others to come, the next life may be one
        that ends by itself, or a participant dies, too."""
        coordinator = self._training.coordinator
        if self._chance.random() < 0.5:
            lines, moment = Lines(coordinator.log_path), self._chance.choice(MOMENTS)
            if not await self._training.until(
                lambda: any(moment in one for one in lines.new()), look_every_s=AIMING_S
            ):
                return False
            await asyncio.sleep(self._chance.choice([0.0, self._chance.uniform(0.0, 0.02)]))  # aims
        elif not await self._some_time(0.6):
            return False
        await coordinator.kill()
        self.num_kills += 1
        if left > 1 and self._alive() and self._chance.random() < 0.3:
            await self._kill_with_a_result(self._chance.choice(self._alive()))
        elif left > 1 and self._chance.random() < 0.5:
            coordinator.dies_of = self._chance.choice(list(LAST_STEPS))
            coordinator.dies_at = self._chance.randint(1, LAST_STEPS[coordinator.dies_of])
        await self._start_coordinator()
        return True

    async def _stop_coordinator(self) -> bool:
        """Stop and start the coordinator: no kill, but one more end that must cost nothing."""
        if not await self._some_time(0.6):
            return False
        assert await self._training.coordinator.stop() == 0
        await self._start_coordinator()
        return True

    async def _let_die(self) -> bool:
        """One that was started to die at a step of its own."""
        coordinator = self._training.coordinator
        coordinator.dies_at = None
        if not await self._training.until(lambda: coordinator.status == -9):
            # All is over before its step, at which it would die while it stops.
            await coordinator.kill()
            await self._start_coordinator()
            return False
        self.num_kills += 1
        await self._start_coordinator()
        return True

    async def _start_coordinator(self) -> None:
        coordinator = self._training.coordinator
        await asyncio.sleep(self._away_s())  # chance is the point
        try:
            await coordinator.start()
        except AssertionError:
            if coordinator.status != -9:  # else it has died before it served, as it was told to
                raise

    async def _kill_participant(self, participant: ParticipantProcess) -> bool:
        if self._chance.random() < 0.5:
            lines, step = Lines(participant.book_path), self._chance.choice(STEPS)
            await self._training.until(
                lambda: any(one.startswith(step) for one in lines.new()) or participant.status == 0,
                look_every_s=AIMING_S,
            )
        elif not await self._some_time(0.6):
            return False
        await self._restart(participant)
        return True

    async def _kill_with_a_result(self, participant: ParticipantProcess) -> None:
        """While the coordinator is away: one that trains has the time to come to its end, and
        nobody to hand in to. It may be at something else, too, so the wait is short."""
        for _ in range(50):
            if participant.book() and participant.book()[-1][0] == "trained":
                break
            await asyncio.sleep(TRAINING_S / 25)  # a poll, in time bounded on purpose
        await self._restart(participant)

    async def _restart(self, participant: ParticipantProcess) -> None:
        await participant.kill()
        if participant.status == 0:
            return  # it had heard of the end
        self.num_kills += 1
        await asyncio.sleep(self._away_s())  # chance is the point
        await participant.start()

    def _away_s(self) -> float:
        """For how long one that was killed stays away."""
        return self._chance.choice([0.0, self._chance.uniform(0.0, 0.5)])

    async def _some_time(self, at_most_s: float) -> bool:
        await asyncio.sleep(self._chance.uniform(0.0, at_most_s))  # chance is the point
        return not self._training.is_over


def part_bytes(part: Path) -> int:
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0  # it has come to its end since


@dataclass(frozen=True)
class Plan:
    """A session of `make kills`. is_kept: participants keep their results over a kill."""

    scenario: Scenario
    way: str
    is_kept: bool

    @staticmethod
    def of(seed: int) -> "Plan":
        """The first seeds differ in all of it, and twenty of them are every combination."""
        chance = Random(seed)
        number = seed % len(WAYS)
        way = WAYS[number]
        # The first session of the port has no encoding, so that the port is used.
        encoding = ENCODINGS[(seed // len(WAYS) + (way == "port")) % len(ENCODINGS)]
        is_kept = (seed // len(WAYS) // len(ENCODINGS) + number) % 2 == 0
        names = tuple(f"site-{number}" for number in range(chance.randint(2, 4)))
        sizes = {"inline": [1_000], "resumed": [2_000_000], "port": [2_000_000]}
        size = chance.choice(sizes.get(way, [300_000, 600_000]))
        return Plan(Scenario(names, ROUNDS, size, TRAINING_S, encoding), way, is_kept)


async def session(seed: int, kills: int, folder: Path) -> int:
    """One session with so many kills at most; how many there were."""
    chance = Random(f"kills of {seed}")
    plan = Plan.of(seed)
    about = f"\nto try it again: make kills KILLS={kills} SEED={seed}\n{plan}"
    expected = await undisturbed(plan.scenario, folder / "undisturbed")
    states = folder / "states"

    def flags(name: str) -> tuple[str, ...]:
        return (f"--state-dir={states / name}",) if plan.is_kept else ()

    with ExitStack() as stack:
        one = plan.scenario
        if plan.way == "url" and SeaweedFS.missing() is None:  # else files take its place
            one = one.having(s3_settings(stack.enter_context(SeaweedFS())))
        line = None  # to the weights port
        if plan.way == "port":
            line = stack.enter_context(FaultProxy(free_ports(1)[0]))
            one = one.having(
                {
                    "server.weights_port": line.upstream,
                    "server.weights_address": f"127.0.0.1:{line.port}",
                }
            )
            line.storm(seed + 1)
        else:
            one = one.having({"server.weights_port": "off"})
        async with training(one, folder / "killed", flags=flags, about=about) as under_way:
            killer = Killer(under_way, chance, line, cuts_uploads=plan.way in LARGE_WAYS)
            under_way.proxy.storm(seed)
            await killer.kill(kills)
            under_way.proxy.calm()
            if line is not None:
                line.calm()
            assert await under_way.finish() == expected
            under_way.check_journal()
            under_way.check_books(kept=plan.is_kept)
            under_way.check_logs()
            changed = (folder / one / "journal.sqlite" for one in ("killed", "undisturbed"))
            assert len({frozenset(digests(journal).items()) for journal in changed}) == 1
    return killer.num_kills


def s3_settings(store: SeaweedFS) -> dict[str, object]:
    settings = {f"storage.{key}": v for key, v in store.settings("weights").items()}
    return settings | {"storage.create_bucket": "true", "storage.timeout_s": 2}


async def test_kills_change_nothing(tmp_path, capsys):
    """Kills and faults of the network change no model: each is that of the undisturbed session,
    every update counts once, and no participant trains again a result that was acknowledged or
    that it has kept."""
    num_kills, seed = 0, SEED
    while num_kills < KILLS:
        folder = tmp_path / f"seed-{seed}"
        folder.mkdir()
        num_kills += await session(seed, min(KILLS_A_SESSION, KILLS - num_kills), folder)
        seed += 1
        shutil.rmtree(folder)  # that of a failure stays
        if "KILLS" in os.environ:  # somebody waits for it
            num_rounds = (seed - SEED) * ROUNDS
            with capsys.disabled():
                sys.stdout.write(
                    f"{num_kills} of {KILLS} kills, {num_rounds} rounds, the next seed is {seed}\n"
                )


async def test_outages_on_the_way_change_nothing(tmp_path):
    """The database of metrics dies and comes back empty; the store dies in the middle of a round,
    the coordinator while it is away, and again while it waits for it. The session waits for the
    store and not for the metrics."""
    for kind in (SeaweedFS, VictoriaMetrics):
        if (missing := kind.missing()) is not None:
            pytest.skip(missing)  # says what is not installed
    plain = Scenario(("a", "b", "c"), rounds=8, size=300_000, training_s=0.3)
    expected = await undisturbed(plain, tmp_path / "undisturbed")
    gates = tmp_path / "gates"
    close_gates(gates, "b-1", "b-3")
    with SeaweedFS() as store, VictoriaMetrics() as first, FaultProxy(first.port) as way:
        settings = s3_settings(store)
        settings |= {"metrics.kind": "influxdb", "metrics.url": f"http://127.0.0.1:{way.port}"}
        settings |= {"metrics.org": "org", "metrics.bucket": "bucket", "metrics.token": "token"}
        async with training(
            plain.having(settings), tmp_path / "outages", flags=lambda _: (f"--gates={gates}",)
        ) as one:
            one.proxy.storm(SEED)
            a, _, c = one.participants.values()

            async def told(event: str, since: Lines) -> None:
                assert await one.until(lambda: any(event in line for line in since.new()))

            await one.until(lambda: ("handed_in", 1) in a.book() and ("handed_in", 1) in c.book())
            since = Lines(one.coordinator.log_path)
            first.stop()
            way.cut()
            (gates / "b-1").unlink()
            await told("metrics_unavailable", since)

            await one.until(lambda: ("handed_in", 3) in a.book() and ("handed_in", 3) in c.book())
            since = Lines(one.coordinator.log_path)
            await asyncio.to_thread(store.kill)
            (gates / "b-3").unlink()
            await told("store_unavailable", since)
            await one.coordinator.kill()
            since = Lines(one.coordinator.log_path)
            await one.coordinator.begin()
            await told("store_unavailable", since)
            await asyncio.to_thread(store.start)
            await one.coordinator.kill()  # else it may wait for some seconds more
            await one.coordinator.start()

            with VictoriaMetrics() as second:
                way.upstream = second.port
                await Killer(one, Random(SEED)).kill(2)
                one.proxy.calm()
                assert await one.finish() == expected
                assert second.series()
            one.check_journal()
            one.check_books(kept=False)
            one.check_logs()
