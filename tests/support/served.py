"""A coordinator with an HTTP face and participants that stay, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from xain_foundation.net.sockets import free_ports

PATIENCE_S = 240.0  # for what takes seconds, on a machine that has other things to do

SGD: Mapping[str, object] = {
    "workload.name": "sgd",
    "rounds.rounds": 3,
    "rounds.min_participants": 2,
    "server.heartbeat_time_s": 0.3,
    "server.drain_s": 2.0,
}


class Served:
    """Use it as a context; all processes are gone afterwards. settings: dotted keys."""

    def __init__(self, folder: Path, settings: Mapping[str, object] = SGD) -> None:
        self.folder = folder
        self.port, self.http_port = free_ports(2)
        self.settings = dict(settings)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.http_port}", timeout=PATIENCE_S, trust_env=False
        )

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()

    def start(self, **settings: object) -> None:
        """Start the coordinator; returns when its HTTP face answers."""
        given = {**self.settings, "http.port": self.http_port, **settings}
        flags = [f"--set={key}={value}" for key, value in given.items()]
        self._run(
            "coordinator",
            "xain_coordinator",
            f"--data-dir={self.folder / 'data'}",
            f"--port={self.port}",
            *flags,
        )
        self.until(self.answers)

    def join(
        self, *names: str, data: str = "iris", task: str = "classification", serve: bool = True
    ) -> None:
        """Start participants, each with its share of the rows."""
        for index, name in enumerate(names):
            self._run(
                name,
                "xain_participant",
                f"--coordinator=127.0.0.1:{self.port}",
                f"--data={data}",
                f"--task={task}",
                "--test-fraction=0",
                f"--id={name}",
                "--partition=iid",
                f"--num-parts={len(names)}",
                f"--index={index}",
                *(["--serve"] if serve else []),
            )

    def _run(self, name: str, module: str, *arguments: str) -> None:
        self.run(name, [sys.executable, "-m", module, *arguments])

    def run(self, name: str, command: list[str]) -> None:
        """Start a process that is gone at the end."""
        self.folder.mkdir(exist_ok=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(command, stderr=log, stdout=log, cwd=self.folder)

    def answers(self) -> bool:
        """Whether the HTTP face is there; it fails if the coordinator has ended."""
        status = self._running["coordinator"].poll()
        assert status is None, f"the coordinator has ended with {status}:\n{self.log()}"
        try:
            return self.client.get("/v1/status").status_code == 200
        except httpx.TransportError:
            return False

    def log(self, name: str = "coordinator") -> str:
        return (self.folder / f"{name}.log").read_text()

    def kill(self, name: str = "coordinator") -> None:
        process = self._running[name]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self, name: str = "coordinator") -> int:
        """SIGTERM. Returns the exit status."""
        process = self._running[name]
        process.terminate()
        return process.wait(PATIENCE_S)

    def is_running(self, name: str) -> bool:
        return self._running[name].poll() is None

    @staticmethod
    def until(condition: Any) -> None:
        gives_up_at = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < gives_up_at, "it has not come to that"
            time.sleep(0.02)  # a poll: it ends when the condition holds

    def status(self) -> dict[str, Any]:
        answer = self.client.get("/v1/status")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def fit(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/fit", json=body)

    def predict(self, columns: list[str], rows: list[list[Any]], **more: Any) -> httpx.Response:
        body = {"columns": columns, "rows": rows, **more}
        return self.client.post("/v1/predict", json=body)


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """(status, code) of an error of /v1."""
    body = answer.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"code", "message"}, body
    return answer.status_code, body["error"]["code"]
