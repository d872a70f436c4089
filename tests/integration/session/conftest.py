"""Sites of a script's session, in threads."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xain
from xain_foundation.net.sockets import free_ports

NAMES = ("east", "west")
MODEL = {"w": np.zeros(3)}


def opened(folder: Path, address: str, **settings: Any) -> xain.Session:
    wanted = {"rounds": 2, "min_participants": 2, "linger_s": 0.0, "progress": False}
    return xain.session(MODEL, data_dir=folder, address=address, **{**wanted, **settings})


def run_all(session: xain.Session[Any]) -> None:
    for round_ in session:
        round_.run()


def settings_of(folder: Path, address: str) -> dict[str, Any]:
    """Settings of a coordinator that no script starts."""
    return {
        "journal.path": str(folder / "journal.sqlite"),
        "storage.path": str(folder / "weights"),
        "metrics.path": str(folder / "metrics.jsonl"),
        "server.port": int(address.rpartition(":")[2]),
    }


class Share(xain.Rule):
    """The mean times a share. It fails without one."""

    def __init__(self, share: float) -> None:
        self.share = share

    def combine(self, tile: Any, weights: Any) -> Any:
        if not self.share:
            raise ZeroDivisionError("no share")
        return self.share * tile.astype(np.float64).mean(axis=0)


@pytest.fixture
def address() -> str:
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"


@pytest.fixture
def sites(address: str) -> Iterator[Callable[..., None]]:
    """Start sites by name, which add to the model their number times lr, from 1 on. Each takes part
    in one session."""
    threads = []

    def train(name: str, number: int) -> None:
        try:
            for round_ in xain.rounds({"w": np.zeros(3)}, id=name, coordinator=address):
                lr = round_.config.get("lr", 1.0) * round_.config.epochs
                round_.submit(
                    {"w": round_.weights["w"] + number * lr}, samples=number, metrics={"loss": lr}
                )
        except xain.SessionError:
            pass  # the session was ended by its script

    def start(*names: str) -> None:
        for number, name in enumerate(names or NAMES, 1):
            thread = threading.Thread(target=train, args=(name, number), daemon=True)
            thread.start()
            threads.append(thread)

    yield start
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
