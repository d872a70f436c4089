"""The compose stack, as a project of its own that leaves nothing behind."""

import uuid
from pathlib import Path
from tempfile import TemporaryDirectory

from support.containers.engine import BASE, PATIENCE_S, docker, run
from xain_coordinator.inspection import client as inspection_client
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.net.sockets import free_ports
from xain_foundation.security.tls import Certificates
from xain_participant.enrolment import joining
from xain_participant.enrolment.kept import KeptCertificates

OVERRIDE = Path(__file__).with_name("compose.test.yml")


class Stack:
    """rounds: how many the training has. profile: of compose, "" for none."""

    def __init__(self, rounds: int, profile: str = "") -> None:
        self.project = f"xain-test-{uuid.uuid4().hex[:12]}"
        names = ("XAIN_PORT", "XAIN_S3_PORT", "XAIN_INFLUXDB_PORT", "XAIN_GRAFANA_PORT")
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._env = {name: str(port) for name, port in self.ports.items()}
        self._env["XAIN_ROUNDS"] = str(rounds)
        self._env["COMPOSE_PROFILES"] = profile
        self._folder = TemporaryDirectory()
        self._observer: Certificates | None = None

    def compose(self, *arguments: object, timeout: float = PATIENCE_S) -> str:
        """The output of a compose command. Raises AssertionError with its errors if it fails."""
        files = ("--file", "docker-compose.yml", "--file", OVERRIDE)
        command = ("docker", "compose", "--project-name", self.project, *files, *arguments)
        status, output, errors = run(*command, timeout=timeout, env=self._env)
        assert status == 0, f"{self.logs()}\ndocker compose {arguments}: {errors}"
        return output.strip()

    def logs(self) -> str:
        """The logs of all containers, also of ended ones."""
        command = ("docker", "compose", "--project-name", self.project, "logs", "--no-color")
        _, output, errors = run(*command, env=self._env)
        return output + errors

    def containers(self, service: str) -> list[str]:
        """Their ids, those that have ended among them."""
        return self.compose("ps", "--all", "--quiet", service).split()

    def container(self, service: str) -> str:
        (only,) = self.containers(service)
        return only

    def status(self) -> inspection_client.Snapshot | None:
        """The coordinator's status, by its published port; None if it does not answer."""
        address = f"127.0.0.1:{self.ports['XAIN_PORT']}"
        try:
            if self._observer is None:
                self._observer = self._joined(address)
            before = inspection_client.TLS.set(self._observer)
            try:
                return inspection_client.fetch(address, everything=True)
            finally:
                inspection_client.TLS.reset(before)
        except (AssertionError, CommandFailed, inspection_client.NoStatus):
            return None

    def _joined(self, address: str) -> Certificates:
        """Raises AssertionError and CommandFailed."""
        create = ("tokens", "create", "--name=tests", "--role=observer", f"--address={address}")
        made = self.compose("exec", "--no-TTY", "coordinator", "xain-coordinator", *create)
        kept = KeptCertificates(Path(self._folder.name) / "observer")
        joining.join(kept, joining.Token(made.splitlines()[0], "the token of the tests"))
        return Certificates(kept.folder)

    def secret(self, volume: str, file: str) -> str:
        """Out of the volume, which only containers can read."""
        mounted = f"--volume={self.project}_{volume}:/secrets:ro"
        return docker("run", "--rm", "--network=none", mounted, BASE, "cat", f"/secrets/{file}")

    def end(self) -> None:
        """Everything is gone afterwards, whatever state it was in."""
        self._folder.cleanup()
        self.compose("down", "--volumes", "--remove-orphans", "--timeout=5")
