"""Signals of the command, and of a program that imports the SDK."""

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from integration.participant.conftest import Serve
from integration.participant.scripted import PATIENCE_S, ScriptedCoordinator
from xain_wire.fl import coordinator_pb2 as pb

PROGRAM = textwrap.dedent(
    """
    import signal, sys, threading, numpy as np
    from xain_participant import Agent, Participant, run
    from xain_participant.agent import agent
    from xain_participant.agent.signals import stop_on_signals

    agent.LEAVE_TIMEOUT_S = 3600  # only a second signal ends a goodbye that nobody answers

    class Endless(Participant):
        def init_weights(self):
            return np.zeros(4)

        def train_round(self, weights, epochs, epoch_base):
            print("training", flush=True)
            threading.Event().wait()

    if "guest" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        sys.exit(run(Endless(), sys.argv[1], "ward-7"))
    running = Agent(Endless(), sys.argv[1], "ward-7")
    stop_on_signals(running)
    sys.exit(running.run())
    """
)


@pytest.fixture
def server(serve: Serve) -> ScriptedCoordinator:
    return serve()


@pytest.fixture
def process(
    server: ScriptedCoordinator, request: pytest.FixtureRequest
) -> Iterator["subprocess.Popen[str]"]:
    """A participant in the middle of a training without end. param: an argument of PROGRAM."""
    command = [sys.executable, "-c", PROGRAM, server.target, getattr(request, "param", "")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any(line == "training\n" for line in process.stdout)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("process", "number", "code"),
    [
        ("", signal.SIGTERM, 143),
        ("", signal.SIGINT, 130),
        # run() keeps the handlers of its program, which decide how the program ends.
        ("guest", signal.SIGTERM, 3),
        ("guest", signal.SIGINT, -signal.SIGINT),
    ],
    indirect=["process"],
)
def test_a_signal_leaves_the_session_and_exits(server, process, number, code):
    """The status is not 0: a stopped participant has to be started again."""
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == code
    assert server.heartbeats[-1] == (pb.FINISHED, 0)


def test_a_second_signal_does_not_wait_for_the_goodbye(server, process):
    goodbye_may_pass = threading.Event()
    for _ in range(100):  # whichever heartbeat the goodbye is
        server.before["Heartbeat"].append(
            lambda _: (
                goodbye_may_pass.wait(PATIENCE_S)
                if server.heartbeats[-1][0] == pb.FINISHED
                else None
            )
        )
    process.send_signal(signal.SIGTERM)
    server.wait_until(lambda: server.heartbeats[-1][0] == pb.FINISHED)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    goodbye_may_pass.set()
