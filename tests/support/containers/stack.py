"""The compose stack, as a project of its own that leaves nothing behind."""

import uuid
from pathlib import Path

from support.containers.engine import BASE, PATIENCE_S, docker, run
from xain_coordinator.server import inspection_client
from xain_foundation.sockets import free_ports

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
        """The coordinator's status; None if it does not answer."""
        try:
            return inspection_client.fetch(f"127.0.0.1:{self.ports['XAIN_PORT']}", everything=True)
        except inspection_client.NoStatus:
            return None

    def secret(self, volume: str, file: str) -> str:
        """Out of the volume, which only containers can read."""
        mounted = f"--volume={self.project}_{volume}:/secrets:ro"
        return docker("run", "--rm", "--network=none", mounted, BASE, "cat", f"/secrets/{file}")

    def end(self) -> None:
        """Everything is gone afterwards, whatever state it was in."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout=5")
