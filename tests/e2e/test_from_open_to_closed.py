"""A coordinator gets certificates in the middle of a session, over real processes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.process import CoordinatorProcess, ParticipantProcess, ran
from support.training import Scenario, close_gates, digests, models, undisturbed
from support.wire import Member
from xain_foundation.security.tls import Certificates
from xain_participant.enrolment.kept import KeptCertificates

SITES = ("north", "south")
SCENARIO = Scenario(SITES, rounds=3, size=100)
ROUND = 1  # in which it happens


def typed(*words: str) -> str:
    done = ran("-m", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Fleet:
    """A coordinator and two sites with state directories; south waits in the middle of ROUND."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.gates = folder / "gates"
        close_gates(self.gates, f"south-{ROUND}")
        self.coordinator = CoordinatorProcess(self.data_dir, SCENARIO.rules())
        target = f"127.0.0.1:{self.coordinator.port}"
        size, gates = f"--size={SCENARIO.size}", f"--gates={self.gates}"
        self.sites = {
            name: ParticipantProcess(
                folder, name, target, size, gates, f"--state-dir={folder / name}"
            )
            for name in SITES
        }

    async def until(self, name: str, step: str, round_: int) -> None:
        """Wait until a site's book has this."""
        async with asyncio.timeout(240):
            while (step, round_) not in self.sites[name].book():
                assert self.sites[name].status is None, self.sites[name].log()
                await asyncio.sleep(0.02)  # a poll, not a race: it ends when the line is there

    async def reach_the_middle(self) -> None:
        """Start everything, and wait until north has handed its result in and south trains."""
        await self.coordinator.start()
        for site in self.sites.values():
            await site.start()
        await self.until("north", "handed_in", ROUND)
        await self.until("south", "at_gate", ROUND)

    def close(self) -> None:
        """Make certificates, and a token for each site."""
        data_dir = f"--data-dir={self.data_dir}"
        typed("xain_coordinator", "certs", "init", "--host=127.0.0.1", data_dir)
        address = f"--address=127.0.0.1:{self.coordinator.port}"
        for name in SITES:
            words = ("tokens", "create", f"--name={name}", address, f"--to={self.folder}")
            typed("xain_coordinator", *words, data_dir)

    async def join(self) -> None:
        """Let the sites join with their tokens, and start them."""
        for name, site in self.sites.items():
            token, state_dir = self.folder / f"{name}.token", self.folder / name
            typed("xain_participant", "join", str(token), f"--state-dir={state_dir}")
            await site.start()

    def taken(self) -> dict[tuple[int, str], str]:
        """Digests of what was acknowledged up to now, by the journal of the stopped coordinator."""
        found = digests(self.data_dir / "journal.sqlite")
        assert (ROUND, "north") in found
        assert (ROUND, "south") not in found
        return found

    async def finish(self) -> None:
        """Let south train, and wait until both have seen the end."""
        (self.gates / f"south-{ROUND}").unlink()
        for site in self.sites.values():
            assert await site.died() == 0, site.log()

    async def check(self, taken: dict[tuple[int, str], str], reader: Member) -> None:
        """Stop, and require that what was taken counted, and the models are the right ones."""
        got = await models(self.coordinator.port, SCENARIO, reader)
        assert await self.coordinator.stop() == 0
        after = digests(self.data_dir / "journal.sqlite")
        assert {key: after[key] for key in taken} == taken
        assert got == await undisturbed(SCENARIO, self.folder / "undisturbed")

    async def end(self) -> None:
        for process in (*self.sites.values(), self.coordinator):
            await process.end()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    await fleet.end()


async def test_same_round_goes_on_behind_certificates(fleet):
    """Coordinator and the site whose result was taken are killed, the coordinator once more after
    it is closed: the models are those of a session that nothing befell, and nobody trains again
    whose result was taken. A site that goes on without a certificate is told what to do."""
    coordinator, north, south = fleet.coordinator, *fleet.sites.values()
    await fleet.reach_the_middle()
    await north.kill()
    await coordinator.kill()
    taken = fleet.taken()

    fleet.close()
    await coordinator.start()
    await coordinator.kill()
    await coordinator.start()
    await south.until_logged("xain-participant join FILE")
    await south.kill()
    await fleet.join()
    await fleet.finish()

    assert north.book().count(("training", ROUND)) == 1
    own = Certificates(KeptCertificates(fleet.folder / "north").folder)
    reader = Member(coordinator.port, None, own.of_channel())
    reader.metadata = (("xain-instance-id", "north"),)  # as the process before
    await fleet.check(taken, reader)


async def test_same_round_goes_on_after_the_way_back(fleet):
    """The way back: the coordinator without access/, the sites without certificates."""
    coordinator, north, south = fleet.coordinator, *fleet.sites.values()
    fleet.close()
    await coordinator.start()
    await fleet.join()
    await fleet.until("north", "handed_in", ROUND)
    await fleet.until("south", "at_gate", ROUND)
    await north.kill()
    await south.kill()
    await coordinator.kill()
    taken = fleet.taken()

    (fleet.data_dir / "access").rename(fleet.folder / "access")
    for name in SITES:
        (fleet.folder / name / "tls").unlink()
        (fleet.folder / name / "certificates").rename(fleet.folder / f"{name}-certificates")
    await fleet.reach_the_middle()
    await fleet.finish()
    assert north.book().count(("training", ROUND)) == 1
    await fleet.check(taken, Member(coordinator.port, "reader"))
