"""Programs that send and end at once, in processes of their own: on every driver and discovery."""

import base64
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from support.messaging import PATIENCE_S, RedisServer, discovery_of, taken, until
from xain_membership.ports import Discovery, Roster
from xain_messaging.discovery.redis import RedisDiscovery
from xain_messaging.format.messages import Message
from xain_messaging.proxy import Proxy

PROGRAM = textwrap.dedent(
    """
    import base64, logging, os, pickle, sys, threading, time
    from xain_messaging import Proxy
    from xain_messaging.format.messages import Message

    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    log = logging.getLogger("program")
    discovery, driver, how, body = pickle.loads(base64.b64decode(sys.argv[1]))
    log.info("before")
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    proxy = Proxy("g", "worker", {"master": 1}, name="w", discovery=discovery, driver=driver)
    log.info("during")
    if how == "fork":
        if (child := os.fork()) == 0:
            sys.exit()
        os.waitpid(child, 0)
    proxy.isend(Message("note", "w", "m", body))
    if how == "close":
        proxy.close()
    elif how == "no threads":
        def refuse(*arguments):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        threading._start_new_thread = refuse
    elif how == "wait":
        time.sleep(1000)  # until it is killed
    assert (root.level, root.handlers) == before
    log.info("after")
    """
)

# A program that receives in a thread, and ends when it has received.
RECEIVER = textwrap.dedent(
    """
    import base64, pickle, sys, threading
    from xain_messaging import Proxy

    discovery, driver, how, body = pickle.loads(base64.b64decode(sys.argv[1]))
    proxy = Proxy("g", "worker", {"master": 1}, name="w", discovery=discovery, driver=driver)
    heard = threading.Event()

    def receive():
        for message in proxy.receive():
            proxy.reply(message, body=message.body)
            heard.set()

    threading.Thread(target=receive, daemon=True).start()
    heard.wait()
    if how == "close":
        proxy.close()
    """
)

# It sends a note, works at a task, and may fail there.
WORKER = textwrap.dedent(
    """
    import base64, contextlib, pickle, sys
    from xain_messaging import Proxy
    from xain_messaging.format.messages import Message

    discovery, driver, how, body = pickle.loads(base64.b64decode(sys.argv[1]))
    with contextlib.ExitStack() as stack:
        proxy = Proxy("g", "worker", {"master": 1}, name="w", discovery=discovery, driver=driver)
        if how.startswith("with"):
            stack.enter_context(proxy)
        proxy.isend(Message("note", "w", "m", body))
        task = proxy.receive_once(20.0)
        if how.endswith("exception"):
            raise RuntimeError(task.body)
        proxy.isend(Message("note", "w", "m", task.body))
        sys.exit()
    """
)


def start(
    discovery: Discovery, driver: str, how: str, body: str, program: str = PROGRAM
) -> "subprocess.Popen[str]":
    given = base64.b64encode(pickle.dumps((discovery, driver, how, body))).decode()
    return subprocess.Popen(
        [sys.executable, "-c", program, given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def has_ended(program: "subprocess.Popen[str]") -> None:
    """The program ends by itself. Standard error has its own lines and those of our loggers."""
    out, err = program.communicate(timeout=PATIENCE_S)
    lines = err.splitlines()
    assert (program.returncode, out) == (0, ""), err
    own = [line for line in lines if line.startswith("program ")]
    assert own == [f"program INFO {when}" for when in ("before", "during", "after")]
    assert all(line.startswith(("program INFO ", "xain_messaging.")) for line in lines), err


def received(master: Proxy) -> list[str]:
    """The bodies of all that has come and comes in a moment, the first awaited."""
    first = taken(master)
    return [first.body, *(message.body for message in master.receive(0.05))]


@pytest.fixture(params=["coordinator", "redis"])
def discovery(request: pytest.FixtureRequest) -> Iterator[Discovery]:
    with discovery_of(request.param) as found:
        yield found


@pytest.mark.parametrize("driver", ["grpc", "zmq"])
def test_the_last_message_of_a_program_is_delivered(discovery, driver, capfd):
    """A program that ends without close() leaves no entry that counts as a peer. One that comes
    back under its name, and closes before the others are told of it, is heard once."""
    with Proxy("g", "master", name="m", discovery=discovery, driver=driver) as master:
        program = start(discovery, driver, "end", "first")
        assert received(master) == ["first"]
        has_ended(program)
        with Proxy("g", "late", discovery=discovery, driver=driver) as late:
            assert late.peers == {"master": ["m"]}
        until(lambda: "worker" not in master.peers, "the master to be told")

        membership = master.endpoint.membership
        on_change = membership._on_change

        def tell_late(roster: Roster) -> None:
            if "w" in roster:
                until(lambda: master.endpoint._links["w"]._has_dropped_later, "its message")
            on_change(roster)

        membership._on_change = tell_late
        program = start(discovery, driver, "close", "second")
        assert received(master) == ["second"]
        has_ended(program)
        until(lambda: "worker" not in master.peers, "the master to be told")
    assert "goaway" not in capfd.readouterr().err  # which gRPC prints when a peer's server fails


@pytest.mark.parametrize("driver", ["grpc", "zmq"])
def test_a_message_is_delivered_where_no_thread_can_be_started_at_the_end(driver):
    """From Python 3.12 on no thread starts after the last line of a program."""
    with (
        discovery_of("coordinator") as discovery,
        Proxy("g", "master", name="m", discovery=discovery, driver=driver) as master,
    ):
        program = start(discovery, driver, "no threads", "x")
        assert received(master) == ["x"]
        has_ended(program)


@pytest.mark.parametrize("driver", ["grpc", "zmq"])
@pytest.mark.parametrize("how", ["end", "close"])
def test_a_program_whose_thread_receives_ends_without_a_traceback(driver, how):
    with (
        discovery_of("coordinator") as discovery,
        Proxy("g", "master", name="m", discovery=discovery, driver=driver) as master,
    ):
        program = start(discovery, driver, how, "", RECEIVER)
        until(lambda: "worker" in master.peers, "the worker to come")
        assert master.ask("w", "task", "x") == "x"
        assert program.communicate(timeout=PATIENCE_S) == ("", "")
        assert program.returncode == 0


@pytest.mark.parametrize("driver", ["grpc", "zmq"])
@pytest.mark.parametrize("block", ["", "with "])
def test_a_task_that_raises_goes_to_the_next_process(driver, block):
    """A worker that an exception ends delivers what it has sent, and does not acknowledge the task
    that it worked at. One that ends with sys.exit() does, and its last message is delivered."""
    with (
        discovery_of("coordinator") as discovery,
        Proxy("g", "master", name="m", discovery=discovery, driver=driver) as master,
    ):
        for how, new_task, notes in (
            ("exception", "a", ["1"]),
            ("exit", None, ["2", "a"]),
            ("exception", "b", ["3"]),
        ):
            worker = start(discovery, driver, block + how, notes[0], WORKER)
            found = [master.receive_once(PATIENCE_S)]
            if new_task is not None:
                master.isend(Message("task", "m", "w", new_task))
            found += [master.receive_once(PATIENCE_S) for _ in notes[1:]]
            _, err = worker.communicate(timeout=PATIENCE_S)
            assert [note.body for note in found if note is not None] == notes
            assert err.strip().endswith(f"RuntimeError: {new_task}" if new_task else ""), err
            until(lambda: "worker" not in master.peers, "the master to be told")


def test_a_forked_process_does_not_leave_in_the_name_of_its_parent():
    """The end of a forked process is not the end of the program that made the proxy."""
    with (
        discovery_of("redis") as discovery,
        Proxy("g", "master", name="m", discovery=discovery, driver="zmq") as master,
    ):
        membership = master.endpoint.membership
        on_change = membership._on_change
        seen = []

        def note(roster: Roster) -> None:
            seen.append(roster)
            on_change(roster)

        membership._on_change = note
        program = start(discovery, "zmq", "fork", "x")
        assert received(master) == ["x"]
        has_ended(program)
        until(lambda: "worker" not in master.peers, "the master to be told")
        assert [sorted(roster) for roster in seen] == [["m", "w"], ["m"]]


def test_a_redis_entry_of_a_killed_process_ends_with_its_lease():
    """A dead process does not renew it, and is then no peer of those who come."""
    with RedisServer() as redis:
        discovery = RedisDiscovery(redis.url, settle_s=0.0)
        with Proxy("g", "master", name="m", discovery=discovery, driver="zmq") as master:
            program = start(RedisDiscovery(redis.url, 3.0, settle_s=0.0), "zmq", "wait", "x")
            assert received(master) == ["x"]
            os.kill(program.pid, signal.SIGKILL)
            program.communicate()

            def is_missing() -> bool:
                with Proxy("g", "late", discovery=discovery) as late:
                    return late.peers == {"master": ["m"]}

            until(is_missing, "the lease to end")
