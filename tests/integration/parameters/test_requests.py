"""Requests of workers to the handlers of servers, workers and the scheduler."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import xain_parameters as parameters
from support.parameter_processes import Fleet
from xain_parameters import Invalid, KVWorker, LocalGroup, Request, RequestFailed, Unavailable
from xain_parameters.client.sync import Server
from xain_parameters.messages import MAX_TEXT_BYTES

LONG_S = 240.0  # for what takes milliseconds, on a machine that has other things to do

# Heads that the handlers of all processes know.
ECHO, RAISE, HOLD, LONG, END = range(1, 6)
HANDLERS = f"""
import os, time
from pathlib import Path

def answer(request):
    if request.head == {ECHO}:
        return f"{{request.sender}} says {{request.body}}"
    if request.head == {RAISE}:
        raise ValueError("no such table")
    if request.head == {HOLD}:
        with open(f"held-{{request.body}}", "a") as held:
            print(os.getpid(), file=held)
        while not Path(f"release-{{request.body}}").exists():
            time.sleep(0.01)  # a poll: it ends when the file is there
        return "held"
    if request.head == {LONG}:
        return {MAX_TEXT_BYTES + 1} * "x"
    if request.head == {END}:
        raise SystemExit(3)
"""


FLAGS = ("--set", "server.handler=handlers:answer")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Processes: a scheduler, servers s0 and s1, workers w1 and w2 of the job "ctr", w3 of another
    one; all with the same handler."""
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "handlers.py").write_text(HANDLERS)
    with Fleet(folder, "--handler", "handlers:answer") as started:
        started.start_servers("s0", "s1", flags=FLAGS)
        started.start_answering_workers("w1", "w2", job="ctr")
        started.start_answering_workers("w3", job="other")
        yield started


def connected(fleet: Fleet, job: str = "ctr") -> Server:
    return parameters.connect_sync(fleet.target, worker="w0", job=job, timeout_s=LONG_S)


def test_requests_reach_the_members_that_they_are_sent_to(fleet):
    """Processes of their own, by group and by name; workers of the sender's job alone."""
    with connected(fleet) as server:
        said = "w0 says hello"
        for to, names in (
            ("servers", {"s0", "s1"}),
            ("workers", {"w1", "w2"}),
            ("scheduler", {"scheduler"}),
            ("all", {"s0", "s1", "scheduler", "w1", "w2"}),
            ("s1", {"s1"}),
            ("w2", {"w2"}),
        ):
            expected = dict.fromkeys(names, said)
            if to in ("workers", "all"):
                expected["w0"] = ""  # it has no handler itself
            assert server.send(to, ECHO, "hello") == expected
        for nobody in ("w3", "w9", ""):
            with pytest.raises(Invalid, match=r"no worker .* its workers are: w0, w1, w2"):
                server.send(nobody)


def test_errors_of_handlers_are_told_and_end_no_process(fleet):
    everybody = {"s0", "s1", "scheduler", "w1", "w2"}
    with connected(fleet) as server:
        for head, text in (
            (RAISE, "ValueError: no such table"),
            (LONG, f"an answer of {MAX_TEXT_BYTES + 1} bytes"),
            (END, "SystemExit: 3"),
        ):
            with pytest.raises(RequestFailed, match="no answer of 5 of 6: ") as failed:
                server.send("all", head)
            assert failed.value.answers == {"w0": ""}
            assert failed.value.failures.keys() == everybody
            assert all(text in why for why in failed.value.failures.values())
        assert server.send("all", ECHO, "on").keys() == everybody | {"w0"}
    assert "handler_failed" in fleet.log("s0")
    assert "no such table" in fleet.log("scheduler")


@pytest.mark.parametrize(
    ("group", "killed", "other"), [("servers", "s8", "s0"), ("workers", "w8", "w1")]
)
def test_member_that_is_killed_in_the_middle_is_named(fleet, group, killed, other):
    """The others' answers are there, long before the sender's time is over."""
    if group == "servers":
        fleet.start_servers(killed, flags=FLAGS)
    else:
        fleet.start_answering_workers(killed, job="ctr")
    with connected(fleet) as server, ThreadPoolExecutor(2) as threads:
        held = threads.submit(server.send, killed, HOLD, killed)
        fleet.until_there(f"held-{killed}")
        asked = threads.submit(server.send, group, ECHO, "on")
        fleet.kill(killed)
        why = f"'{killed}': it has left the group, or was lost"
        with pytest.raises(RequestFailed, match=why):
            held.result(LONG_S)
        with contextlib.suppress(RequestFailed):  # it was killed before it was asked
            assert asked.result(LONG_S)[other] == "w0 says on"
        failed = asked.exception()
        if isinstance(failed, RequestFailed):
            assert failed.failures.keys() == {killed}
            assert failed.answers[other] == "w0 says on"
        assert killed not in server.send(group, ECHO, "on")


@pytest.mark.parametrize("to", ["s0", "w1", "scheduler"])
def test_slow_member_is_named_when_the_time_is_over(fleet, to):
    """The answer, when it comes, is not taken for that of the next request."""
    with connected(fleet) as server:
        with pytest.raises(RequestFailed, match=f"no answer of 1 of 1: '{to}': .*after 0.5 s"):
            server.send(to, HOLD, to, timeout_s=0.5)
        (fleet.folder / f"release-{to}").touch()
        assert server.send(to, ECHO, "on") == {to: "w0 says on"}


def test_requests_are_checked_before_they_are_sent():
    with LocalGroup(1) as group, group.connect() as server:
        assert server.send("all", -(2**63), MAX_TEXT_BYTES * "x").keys() == {
            *("s0", "scheduler", "w0")
        }
        with pytest.raises(Invalid, match=f"a body of {MAX_TEXT_BYTES + 1} bytes"):
            server.send("s0", 0, (MAX_TEXT_BYTES + 1) * "x")
        with pytest.raises(Invalid, match="a number of 64 bits"):
            server.send("s0", 2**63)
        with pytest.raises(Invalid, match="no text"):
            server.send("workers", 0, "\ud800")
        for name in ("all", "servers", "workers", "scheduler"):
            with pytest.raises(Invalid, match=f"'{name}' names a group"):
                group.connect(name)
    with (
        LocalGroup(0) as group,
        group.connect() as server,
        pytest.raises(Unavailable, match="no servers"),
    ):
        server.send("servers")


def test_handlers_get_plain_values_one_call_at_a_time():
    """Requests of several workers at once; None answers with an empty text."""
    running = threading.Semaphore()
    seen = []

    def handle(request: Request) -> str | None:
        assert running.acquire(blocking=False)
        seen.append(request)
        running.release()
        return None

    with LocalGroup(1, handler=handle) as group:
        workers = [group.connect(f"w{i}") for i in range(4)]
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda each: each.send("servers", 7, "x"), 5 * workers))
        for worker in workers:
            worker.close()
    assert answers == 20 * [{"s0": ""}]
    assert Counter(seen) == {Request(7, "x", f"w{i}"): 5 for i in range(4)}


async def test_asynchronous_workers_send_and_answer():
    """A handler that is a coroutine function runs in the worker's event loop, and may send
    itself."""
    loops = set()
    with LocalGroup(1, handler=lambda request: f"s {request.body}") as group:

        async def handle(request: Request) -> str:
            loops.add(asyncio.get_running_loop())
            (said,) = (await first.send("servers", 0, request.body)).values()
            return f"w {said}"

        first = parameters.connect(group.target, worker="w0", job="x", handler=handle)
        second = parameters.connect(group.target, worker="w1", job="x")
        async with first, second:
            assert await second.send("workers", 0, "hello") == {"w0": "w s hello", "w1": ""}
            many = await asyncio.gather(*(second.send("w0", 0, str(i)) for i in range(20)))
            assert many == [{"w0": f"w s {i}"} for i in range(20)]
    assert loops == {asyncio.get_running_loop()}


async def test_local_server_has_requests():
    async with parameters.local(shards=1) as server:
        assert await server.send("all") == {"s0": "", "scheduler": "", "w0": ""}


def test_worker_that_enters_a_job_is_reached_there():
    """Without a name, the job is that of the first table."""
    with (
        LocalGroup(1) as group,
        group.connect("w0", handler=lambda request: "here") as first,
        group.connect("w1") as second,
    ):
        assert second.send("workers") == {"w0": "here", "w1": ""}
        first.dense("w", (4,))
        assert second.send("workers") == {"w1": ""}
        second.dense("w", (4,))
        assert second.send("workers") == {"w0": "here", "w1": ""}


def test_request_goes_to_the_worker_of_a_rank():
    with (
        LocalGroup(1) as group,
        group.connect("b", job="x", workers=2, handler=lambda request: "first") as first,
        group.connect("a", job="x", workers=2, handler=lambda request: "second") as second,
    ):
        assert (first.rank, second.rank) == (0, 1)
        assert second.send(0) == {"b": "first"}
        assert second.send(1) == {"a": "second"}
        with pytest.raises(Invalid, match="has the rank 2; there are: 0, 1"):
            second.send(2)


def test_requests_of_ps_lite_go_to_a_group_or_to_one_member():
    with (
        LocalGroup(2, handler=lambda request: f"{request.head} {request.body}") as group,
        group.connect(timeout_s=LONG_S) as server,
        KVWorker(server) as kv,
    ):
        first = kv.request(7, "hello")
        second = kv.request(8, "", "s1")
        assert kv.wait(first, LONG_S) == {"s0": "7 hello", "s1": "7 hello"}
        assert kv.wait(second, LONG_S) == {"s1": "8 "}
