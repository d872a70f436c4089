"""Signals of the command; the SDK leaves those of its program alone."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xain_participant.agent import Agent

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stopped_by_signals(agent: "Agent") -> Iterator[None]:
    """While open, the first SIGTERM or SIGINT stops the agent, the second one the process.

    Both end it with 128 + number, as shells and container engines expect it. With 0 a participant
    that is moved to another machine would count as done, and never be started there.
    """

    def on_signal(number: int, _: FrameType | None) -> None:
        if not agent.stop(128 + number):
            os._exit(128 + number)  # the second signal waits for nothing

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that was not set from Python cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
