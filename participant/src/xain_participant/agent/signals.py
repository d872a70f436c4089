"""Signals of the command; the SDK leaves those of its program alone."""

import os
import signal
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xain_participant.agent.agent import Agent


def stop_on_signals(agent: "Agent") -> None:
    """Let the first SIGTERM or SIGINT stop the agent, and the second one the process.

    Both end it with 128 + number, as shells and container engines expect it. With 0 a participant
    that is moved to another machine would count as done, and never be started there.
    """

    def on_signal(number: int, _: FrameType | None) -> None:
        if not agent.stop(128 + number):
            os._exit(128 + number)  # the second signal waits for nothing

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
