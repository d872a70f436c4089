"""Programs that end just when gRPC's thread handles the end of a call.

On a machine with much to do the interpreter once ended that thread while it held the lock of the
call, and then waited for the lock forever. Here the thread holds it for a moment.
"""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from xain_messaging import MembershipServer, Proxy
from xain_parameters import LocalGroup

LONG_S = 60.0

SLOW = textwrap.dedent(
    """
    import gc, sys, threading, time
    import grpc._channel as channel

    gc.set_threshold(1_000_000)  # the interpreter deletes the calls at the end
    make_handler, handle = channel._event_handler, channel._handle_event

    def is_end(event):
        in_thread = threading.current_thread() is not threading.main_thread()
        return in_thread and any(each.type() == 6 for each in event.batch_operations)

    def make_late_handler(state, deserialize):
        handle_event = make_handler(state, deserialize)

        def handle_late(event):
            if is_end(event):
                time.sleep(0.05)  # the thread that iterates over the answers goes on
            return handle_event(event)

        return handle_late

    def handle_slowly(event, state, deserialize):
        callbacks = handle(event, state, deserialize)
        if is_end(event):
            time.sleep(0.5)  # under the lock of the call
        return callbacks

    channel._event_handler, channel._handle_event = make_late_handler, handle_slowly
    """
)

PEER = """
from xain_messaging import Proxy

def main():
    with Proxy("g", "worker", {"master": 1}, discovery=sys.argv[1], driver=sys.argv[2]) as proxy:
        assert proxy.ask("m", "add", 1) == 2
"""

WORKER = """
import xain_parameters as parameters

def main():
    with parameters.connect_sync(sys.argv[1], worker="w") as server:
        assert server.dense("w", 3).pull().tolist() == [0, 0, 0]
"""

# The program ends while gRPC's thread holds the lock, unless it has waited for the thread.
END = """
main()
time.sleep(0.2)
"""


@contextmanager
def running(program: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", SLOW + program + END, *arguments]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("driver", ["grpc", "zmq"])
def test_program_of_a_peer_ends(driver):
    with (
        MembershipServer(settle_s=0.0) as members,
        Proxy("g", "master", name="m", discovery=members.target, driver=driver) as proxy,
        running(PEER, members.target, driver) as peer,
    ):
        question = proxy.receive_once(LONG_S)
        proxy.reply(question, body=question.body + 1)
        assert peer.wait(LONG_S) == 0


def test_program_of_a_worker_ends():
    with LocalGroup(1) as group, running(WORKER, group.target) as worker:
        assert worker.wait(LONG_S) == 0
