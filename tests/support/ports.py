"""Free ports of this machine, for servers of tests."""

import contextlib
import random
import socket

_SYSTEM = (
    random.SystemRandom()
)  # other tests run at the same time, and property tests seed `random`


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on, below those that outgoing connections take: a server that was
    killed must find its port free when it comes back."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < number:
            taken = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                taken.bind(("127.0.0.1", _SYSTEM.randrange(12_000, 32_000)))
                ports.append(taken.getsockname()[1])
        return ports
