"""A forked process is as one that is started anew: it and what it starts, in all that it sees."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.fork_server import Starts

# A program that tells what it is, and starts itself in the two ways that programs do.
REPORT = """
import json, multiprocessing, os, resource, signal, subprocess, sys
from pathlib import Path

def told(parent):
    return {
        "is_child": os.getppid() == parent,
        "group_of_parent": os.getpgid(0) == os.getpgid(parent),
        "leads_group": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0) == os.getsid(parent),
        "shown": sorted(set(Path("/proc/self/environ").read_text().split("\\0"))),
        "argv": [sys.argv[0], len(sys.argv)],
        "command": Path("/proc/self/cmdline").read_text().rstrip("\\0").split("\\0")[:2],
        "path": sys.path,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "files": [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd < 200],
        "ignored": signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN,
        "interrupt": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "limit": resource.getrlimit(resource.RLIMIT_CORE),
        "umask": os.umask(0o77),
        "main": sorted(vars(sys.modules["__main__"]).keys() - {"__annotations__"}),
    }

def work(parent, pipe):
    pipe.send(told(parent))
    sys.exit(5)

if __name__ == "__main__":
    parent, *again = map(int, sys.argv[1:])
    found = told(parent)
    if again:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (again[0], hard))
        command = [sys.executable, "report.py", str(os.getpid())]
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        worker = spawn.Process(target=work, args=(os.getpid(), theirs))
        worker.start()
        found["worker"] = ours.recv()
        worker.join()
        found["status of worker"] = worker.exitcode
        done = subprocess.run(command, stdout=subprocess.PIPE)
        found["child"], found["status"] = json.loads(done.stdout), done.returncode
    print(json.dumps(found))
    sys.exit(3)
"""


def report(folder: Path, **how: Any) -> dict[str, Any]:
    command = [sys.executable, "report.py", str(os.getpid()), "4096"]
    environment = {**os.environ, "A": "b"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, check=False, **how
    )
    assert done.returncode == 3
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "how", [{}, {"start_new_session": True}, {"process_group": 0}, {"pass_fds": [2]}]
)
def test_forked_process_is_as_one_that_is_started_anew(tmp_path, monkeypatch, how):
    """A process that the forked one starts is likewise."""
    (tmp_path / "report.py").write_text(REPORT)
    forked = report(tmp_path, **how)
    monkeypatch.setattr(Starts, "are_real", True)
    anew = report(tmp_path, **how)
    assert forked == anew


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_forked_process_ends_by_a_signal(tmp_path, number):
    (tmp_path / "waiting.py").write_text("print(flush=True); input()")
    command = [sys.executable, "waiting.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        process.stdout.read(1)
        process.send_signal(number)
    assert process.returncode == -number


@pytest.mark.parametrize(
    "ending",
    [
        "",
        "sys.exit(300)",
        "sys.exit('a mistake')",
        "raise ValueError('a mistake')",
        "raise KeyboardInterrupt",
        "sys.stdout = None",
        "os.close(1)",
        "signal.raise_signal(signal.SIGINT)",
        "threading.Thread(target=lambda: (time.sleep(0.2), print('last'))).start()",
    ],
)
def test_forked_process_ends_likewise(tmp_path, monkeypatch, ending):
    """Status, standard output and the last line of standard error are the same."""
    (tmp_path / "ending.py").write_text(
        "import atexit, os, signal, sys, threading, time\n"
        f"print('begun')\natexit.register(os.write, 2, b'its exit\\n')\n{ending}\n"
    )
    command = [sys.executable, "ending.py"]
    ends = []
    for are_real in (False, True):
        monkeypatch.setattr(Starts, "are_real", are_real)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        ends.append((done.returncode, done.stdout, done.stderr.splitlines()[-1:]))
    assert ends[0] == ends[1]
