"""Real processes that join, renew and revoke, really killed: kill -9 of the coordinator, of the
site and of the operator's command, at steps of the disk and at any other instant.

    make enrolment-kills KILLS=200          until so many kills have happened
    make enrolment-kills KILLS=5 SEED=1234  with another seed
"""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import grpc
import pytest

from support.process import PATIENCE_S, CoordinatorProcess, DeathStep, Lines, Process, ended
from support.secret_search import Secrets, files_below
from support.wire import reason
from xain_coordinator.access import audit_log
from xain_coordinator.access.evolve import fold
from xain_coordinator.access.records import event_of
from xain_coordinator.access.values import Access, Token
from xain_foundation.security.tls import Certificates
from xain_participant.enrolment.kept import KeptCertificates
from xain_wire.fl import inspection_pb2
from xain_wire.fl.inspection_pb2_grpc import InspectionStub

# The number of kills is what counts, so there is no hurry: this much only if all stands still.
KILLS = int(os.environ.get("KILLS") or 8)
SEED = int(os.environ.get("SEED") or 0)
DYING_SITE = Path(__file__).parents[1] / "support" / "dying_site.py"
AUDIT_STEPS: tuple[DeathStep, ...] = (
    "audit-before",
    "audit-torn",
    "audit-unsynced",
    "audit-after",
)
SITE_STEPS = 12  # changes of the disk, of a site that asks for a certificate
AT_MOST_S = 1.5  # after which those are killed that are killed at any instant
SAMPLE = 3  # of the sites of earlier kills, looked at after each

pytestmark = pytest.mark.timeout(600 + 60 * KILLS)


class Command(Process):
    """A command that ends by itself. Its output is in its log."""

    async def begin(self, *arguments: str) -> None:
        with self.log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdout=log, stderr=log
            )

    async def does(self, *arguments: str) -> int:
        """Run it; returns the exit status."""
        await self.begin(*arguments)
        return await self.died()


@dataclass
class Site:
    """name: of the site, in its token. folder: its state directory."""

    name: str
    folder: Path
    token: Path

    @property
    def kept(self) -> KeptCertificates:
        return KeptCertificates(self.folder)


@dataclass
class Fleet:
    """A closed coordinator, and sites that join, renew and are revoked.

    waiting: have a token and nothing else. joined: have a certificate. revoked: have one that does
    not count. num_kills: those that have happened.
    """

    folder: Path
    coordinator: CoordinatorProcess
    chance: Random
    waiting: list[Site]
    joined: list[Site] = field(default_factory=list)
    revoked: list[Site] = field(default_factory=list)
    secrets: Secrets = field(default_factory=Secrets)
    num_kills: int = 0

    # --- programs ---

    def command(self, name: str) -> Command:
        return Command(self.folder, name)

    def join(self, site: Site, *, last_step: int = 0) -> list[str]:
        """Arguments of `xain-participant join` for the site. See dying_site."""
        arguments = ["join", str(site.token), f"--state-dir={site.folder}"]
        return [str(DYING_SITE), str(last_step), *arguments]

    def revoke(self, which: str) -> list[str]:
        return ["-m", "xain_coordinator", "certs", "revoke", which, f"--data-dir={self.data}"]

    @property
    def data(self) -> Path:
        return self.coordinator.folder

    # --- one kill ---

    async def do_and_kill(self) -> None:
        """Do one thing, kill one process meanwhile, and check the promises after it."""
        does = self.chance.choice(("join", "renew", "revoke"))
        if not self.joined:
            does = "join"
        at_step = self.chance.random() < 0.7
        if self.chance.random() < 0.6:
            victim = self.coordinator
            if at_step:
                at_step = await self._start_dying()
        else:
            victim = None
        if does == "join":
            await self._joining(victim, at_step)
        elif does == "renew":
            await self._renewing(victim, at_step)
        else:
            await self._revoking(victim, at_step)
        await self.check()

    async def _start_dying(self) -> bool:
        """Start the coordinator anew, so that it dies when it writes a line of the audit log.
        Returns whether that is to come."""
        assert await self.coordinator.stop() == 0
        self.coordinator.dies_of = self.chance.choice(AUDIT_STEPS)
        self.coordinator.dies_at = self.chance.choice((1, 2, 2, 2, 3))
        try:
            await self.coordinator.start()
        except AssertionError:
            if self.coordinator.status != -9:  # else it was the line about the start itself
                raise
            self.num_kills += 1
            self.coordinator.dies_at = None
            await self.coordinator.start()
            return False
        self.coordinator.dies_at = None
        return True

    async def _joining(self, victim: Process | None, at_step: bool) -> None:
        """Join; it can be repeated in any case, and the token counts for one key."""
        site = self.waiting.pop()
        program = self.command(f"join-{site.name}")
        last_step = self.chance.randint(1, SITE_STEPS) if victim is None and at_step else 0
        await program.begin(*self.join(site, last_step=last_step))
        await self._kill(victim or program, program, at_step)
        if self.chance.random() < 0.3:  # the token is used elsewhere before the site tries again
            thief = Site(site.name, self.folder / f"thief-of-{site.name}", site.token)
            if await self.command(f"theft-{site.name}").does(*self.join(thief)) == 0:
                repeated = self.command(f"again-{site.name}")
                assert await repeated.does(*self.join(site)) == 1
                assert "was used at" in repeated.log()
                self.joined.append(thief)
                return
        again = self.command(f"again-{site.name}")
        assert await again.does(*self.join(site)) == 0, again.log()
        thief = Site(site.name, self.folder / f"late-thief-of-{site.name}", site.token)
        late = self.command(f"late-theft-{site.name}")
        assert await late.does(*self.join(thief)) == 1
        assert "was used at" in late.log()
        self.joined.append(site)

    async def _renewing(self, victim: Process | None, at_step: bool) -> None:
        """The certificate before or the new one counts, and the next renewal works."""
        site = self.chance.choice(self.joined)
        program = self.command(f"site-{site.name}")
        last_step = self.chance.randint(1, 2 * SITE_STEPS) if victim is None and at_step else 0
        flags = (f"--state-dir={site.folder}", "--data=iris")
        if self.chance.random() < 0.7:  # begins sooner
            flags = ("tunnel", f"--state-dir={site.folder}", "--listen=0")
        async with ended(program):
            await program.begin(str(DYING_SITE), str(last_step), *flags)
            await self._kill(victim or program, program, at_step)
            lines = Lines(program.log_path)
            if program.status is not None:
                await program.begin(str(DYING_SITE), "0", *flags)
                lines = Lines(program.log_path)
            async with asyncio.timeout(PATIENCE_S):
                while not any("certificate_renewed" in line for line in lines.new()):
                    assert program.status is None, program.log()
                    await asyncio.sleep(0.05)  # a poll, not a race: it ends when the line is there

    async def _revoking(self, victim: Process | None, at_step: bool) -> None:
        """Certificates of the site count no more once the command has said so."""
        site = self.chance.choice(self.joined)
        program = self.command(f"revoke-{site.name}")
        await program.begin(*self.revoke(site.name))
        # The command has no steps of its own.
        await self._kill(victim or program, program, at_step and victim is not None)
        if program.status != 0:
            assert await program.does(*self.revoke(site.name)) == 0, program.log()
        self.joined.remove(site)
        self.revoked.append(site)
        assert await self.outcome(site) == "UNAUTHENTICATED"
        again = Site(site.name, self.folder / f"again-of-{site.name}", site.token)
        join = self.command(f"after-{site.name}")
        assert await join.does(*self.join(again)) == 1
        assert "was revoked" in join.log(), join.log()

    async def _kill(self, victim: Process, program: Process, at_step: bool) -> None:
        """Kill one of them, or let it kill itself; then the coordinator runs, and the program has
        ended unless it goes on by itself."""
        goes_on = program.log_path.stem.startswith("site-")
        if at_step:
            async with asyncio.timeout(PATIENCE_S):
                # All may be over before the step.
                while victim.status is None and (  # noqa: ASYNC110  # nothing tells of it
                    goes_on or program.status is None
                ):
                    await asyncio.sleep(0.01)  # a poll, not a race: it ends when one has
        else:
            await asyncio.sleep(self.chance.uniform(0.0, AT_MOST_S))  # chance is the point
        if victim.status is None:
            await victim.kill()
        self.num_kills += victim.status == -9
        if victim is self.coordinator:
            if not goes_on:
                await program.died()
            audit_log.verify(self.audit_log)  # raises if it is damaged; its end may be torn
            await self.coordinator.start()

    # --- what has to hold ---

    @property
    def audit_log(self) -> Path:
        return self.data / "access" / "audit.log"

    async def check(self) -> None:
        """The chain verifies, no token counts for two keys, no site is outside, and nothing that
        was revoked is valid."""
        lines = list(audit_log.read(self.audit_log))
        access = fold(Access(), (event for event in map(event_of, lines) if event is not None))
        for issued in access.issued.values():
            if isinstance(issued, Token):
                keys = [key for basis, key in access.certificates if basis == issued.serial]
                assert len(keys) <= 1
        for sites, expected in ((self.joined, "let in"), (self.revoked, "UNAUTHENTICATED")):
            for site in [*sites[-1:], *self.chance.sample(sites, min(SAMPLE, len(sites)))]:
                assert await self.outcome(site) == expected, site

    async def outcome(self, site: Site) -> str:
        """How a call under the certificate of a site ends."""
        certificates = Certificates(site.kept.folder)
        address = f"127.0.0.1:{self.coordinator.port}"
        async with grpc.aio.secure_channel(address, certificates.of_channel()) as channel:
            call = InspectionStub(channel).GetStatus(
                inspection_pb2.GetStatusRequest(), timeout=PATIENCE_S
            )
            try:
                await call
            except grpc.aio.AioRpcError as error:
                return reason(error)
        return "let in"

    def check_secrets(self) -> None:
        """No log has a key or a token."""
        for path in self.folder.rglob("*.token"):
            self.secrets.add_text(path.read_text().strip(), path.name)
        for path in self.folder.rglob("tls.key"):
            self.secrets.add_key(path.read_bytes(), str(path))
        assert len(self.secrets) > 0
        assert self.secrets.told_by(files_below(self.folder)) == []


@asynccontextmanager
async def fleet(folder: Path, num_sites: int, seed: int) -> AsyncIterator[Fleet]:
    settings = {"workload.name": "sgd", "rounds.min_participants": 1000}
    coordinator = CoordinatorProcess(folder / "data", settings)
    tokens, data = folder / "tokens", f"--data-dir={coordinator.folder}"
    last = num_sites - 1
    for arguments in (
        ("certs", "init", "--host=localhost", data),
        (
            *("tokens", "create", f"--name=site-{{0..{last}}}", f"--to={tokens}", data),
            f"--address=127.0.0.1:{coordinator.port}",
        ),
    ):
        command = Command(folder, arguments[1])
        assert await command.does("-m", "xain_coordinator", *arguments) == 0, command.log()
    names = [f"site-{number}" for number in range(num_sites)]
    sites = [Site(name, folder / name, tokens / f"{name}.token") for name in names]
    async with ended(coordinator):
        await coordinator.start()
        yield Fleet(folder, coordinator, Random(seed), sites)


async def test_enrolment_outlives_kills(tmp_path, capsys):
    """No token counts for two keys, a lost answer leaves no site outside, nothing is valid after an
    acknowledged revocation, and the chain verifies."""
    folder, seed, num_kills = tmp_path / "fleet", SEED, 0
    while num_kills < KILLS:
        folder.mkdir()
        wanted = min(KILLS - num_kills, 25)
        async with fleet(folder, 4 * wanted, seed) as one:
            for _ in range(4 * wanted):
                if one.num_kills >= wanted:
                    break
                await one.do_and_kill()
            assert await one.coordinator.stop() == 0
            one.check_secrets()
        num_kills += one.num_kills
        seed += 1
        shutil.rmtree(folder)  # that of a failure stays
        if "KILLS" in os.environ:  # somebody waits for it
            with capsys.disabled():
                sys.stdout.write(f"{num_kills} of {KILLS} kills, the next seed is {seed}\n")
