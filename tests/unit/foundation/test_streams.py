"""Standard streams that hold up no program, whatever is done with their other end."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from support.streams import fill_pipe
from xain_foundation.logs import streams
from xain_foundation.logs.streams import Descriptor, open_stream

PATIENCE_S = 60.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(its reading end, its writing end)"""
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


@pytest.mark.parametrize("does_not_wait", [False, True])
def test_nothing_is_lost_while_a_reader_reads(pipe, *, does_not_wait):
    """Twenty times as much is written as the queue holds, as fast as it goes, in order; also where
    another process has told the pipe not to wait."""
    reading, writing = pipe
    if does_not_wait:
        flags = fcntl.fcntl(writing, fcntl.F_GETFL)
        fcntl.fcntl(writing, fcntl.F_SETFL, flags | os.O_NONBLOCK)
    read = []
    reader = threading.Thread(target=lambda: read.append(read_all(reading)))
    reader.start()
    descriptor = Descriptor(writing)
    stream = open_stream(descriptor)
    text = "x" * 1000
    num_lines = 20 * streams.MAX_WAITING_BYTES // 1000
    for number in range(num_lines):
        print(number, text, file=stream)
    descriptor.close(PATIENCE_S)
    os.close(writing)
    reader.join(PATIENCE_S)
    assert descriptor.num_lost == 0
    assert read[0].decode().splitlines() == [f"{number} {text}" for number in range(num_lines)]


def test_reader_that_comes_back_hears_how_many_lines_were_lost(pipe):
    """No write waits for the reader, the newest lines are kept, and lines stay whole."""
    reading, writing = pipe
    num_filled = fill_pipe(writing)
    descriptor = Descriptor(writing)
    descriptor.notice = lambda num_lost: f"lost {num_lost}"
    stream = open_stream(descriptor)
    text = "x" * 1000
    for number in range(5000):
        stream.write(f"{number} {text}\n")
    assert 3000 < descriptor.num_lost < 5000
    read = []
    reader = threading.Thread(target=lambda: read.append(read_all(reading)))
    reader.start()
    descriptor.close(PATIENCE_S)
    os.close(writing)
    reader.join(PATIENCE_S)
    lines = read[0][num_filled:].decode().splitlines()
    at = lines.index(f"lost {descriptor.num_lost}")
    kept = [*range(at), *range(at + descriptor.num_lost, 5000)]
    assert [line for line in lines if "x" in line] == [f"{number} {text}" for number in kept]


def test_close_waits_no_longer_than_told_for_a_reader_that_has_stopped(pipe):
    fill_pipe(pipe[1])
    descriptor = Descriptor(pipe[1])
    stream = open_stream(descriptor)
    print("line", file=stream)
    descriptor.close(0.0)
    print("line", file=stream)
    assert descriptor.num_lost == 2


@pytest.mark.parametrize("is_full_disk", [False, True])
def test_stream_whose_other_end_is_broken_raises_nothing(pipe, *, is_full_disk):
    if is_full_disk:
        fd = os.open("/dev/full", os.O_WRONLY)
        os.dup2(fd, pipe[1])
        os.close(fd)
    os.close(pipe[0])
    descriptor = Descriptor(pipe[1])
    stream = open_stream(descriptor)
    for _ in range(100):
        print("line", file=stream)
    descriptor.close(PATIENCE_S)
    assert descriptor.num_lost == 100


def test_characters_that_an_encoding_lacks_are_escaped(pipe):
    descriptor = Descriptor(pipe[1])
    print("20 \u00b0C", file=open_stream(descriptor, "ascii"), flush=True)
    descriptor.close(PATIENCE_S)
    os.close(pipe[1])
    assert read_all(pipe[0]) == b"20 \\xb0C\n"


PROGRAM = """
import os, sys, threading
from xain_foundation.logs import logs, streams
streams.unblock()
logs.configure("info", console=False, third_party=False)
print("out")
print("err", file=sys.stderr)
if os.fork() == 0:
    print("child")
    sys.exit()
os.wait()
sys.stdout.write("no line")
raise RuntimeError("last")
"""


def test_last_lines_of_a_program_and_its_traceback_arrive_in_order():
    """Two streams into one pipe keep their order; a forked process writes by itself."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE_S,
        check=False,
    )
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 1
    assert sorted(lines[:3]) == ["child", "err", "out"]
    assert lines.index("out") < lines.index("err")
    assert "Traceback" in lines[3]
    assert any("RuntimeError: last" in line for line in lines)
    assert any("no line" in line for line in lines)


def test_forked_process_ends_whatever_its_parent_was_doing(pipe):
    """The pipe is full, and at the fork another thread has the lock of the queue."""
    program = """
import os, sys, threading
from xain_foundation.logs import streams
streams.unblock()
held, forked = threading.Event(), threading.Event()
def hold():
    with streams._descriptors[0]._entries._changed:
        held.set()
        forked.wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    print("line")
    sys.exit()
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    fill_pipe(pipe[1])
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=pipe[1], timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0


def test_lost_lines_of_a_log_are_told_in_its_form():
    """The reader begins when the program has logged all, and ends."""
    program = """
import sys
from xain_foundation.logs import logs, streams
from xain_foundation.logs.logger import get_logger
streams.unblock()
logs.configure("warning", console=False, third_party=False)
log = get_logger("xain_coordinator")
for number in range(20_000):
    log.warning("event", number=number, text="x" * 100)
print("all are logged")
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"all are logged\n"
        entries = [json.loads(line) for line in process.stderr]
    numbers = [entry["number"] for entry in entries if entry["event"] == "event"]
    lost = sum(entry["lines"] for entry in entries if entry["event"] == "log_lines_lost")
    assert numbers == sorted(numbers)
    assert lost > 0
    assert len(numbers) + lost == 20_000


def test_missing_streams_take_no_file_that_is_opened_later():
    """Otherwise what is printed would be written into the file."""
    program = """
import os
from xain_foundation.logs import streams
streams.fill()
streams.unblock()
print("nothing")
assert os.open(os.devnull, os.O_RDONLY) > 2
"""
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", program],
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0
