"""Sites of a script's session, in threads."""

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import xain
from xain_foundation.net.sockets import free_ports

NAMES = ("east", "west")


@pytest.fixture
def address() -> str:
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"


@pytest.fixture
def sites(address: str) -> Iterator[Callable[..., None]]:
    """Start sites by name, which add to the model their number times lr, from 1 on. Each takes part
    in one session."""
    threads: list[threading.Thread] = []

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
