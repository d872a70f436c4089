"""Processes of the programs, forked from one that has imported them already.

An import of a program costs more processor time than most tests of it, and the tests start
thousands. `install` has subprocess, asyncio and multiprocessing start a program of ours (`python
-m xain_…`, `xain-…`), a script and a worker of multiprocessing by a request to a fork server, which
is this file run as a program. The process that it forks is a child of the caller as any other: it
has its pid, its exit status, its signals, its files. What it starts itself is forked as well, by a
fork server that is its own child.

A program that is forked begins with its imports done, so a test of the imports, or of a signal
before they are done, is marked `real_exec`. XAIN_REAL_EXEC=1 in the environment starts all
processes anew. The mark `frameworks` has a fork server that has imported frameworks, too.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import inspect
import io
import json
import multiprocessing.process
import multiprocessing.util
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

# Imported by the fork server: the start of each program, and what most of them come to in their
# first seconds. No framework: a program that trains with one shall import it by itself.
MODULES = [
    "xain.script",
    "xain_coordinator.assembly.sessions",
    "xain_coordinator.cli.launch.cli",
    "xain_coordinator.cli.main",
    "xain_coordinator.export.trained",
    "xain_coordinator.process.run",
    "xain_foundation.child",
    "xain_parameters.client",
    "xain_parameters.node.primary",
    "xain_participant.cli.cli",
    "xain_participant.cli.inspection",
    "xain_participant.tables.workload_participant",
    "xain_session.session",
    "xain_session.simulation.simulated",
]
# Where a test's mark says so: one that is about what a program does with them.
FRAMEWORKS = [
    "sklearn.ensemble",
    "sklearn.linear_model",
    "skops.io",
    "torch._dynamo",  # which the first optimiser imports
    "torch.distributed.pipelining",
    "xgboost",
]
PROGRAMS = ("xain_", "support.", "ipykernel_launcher")
WORKER = "from multiprocessing.spawn import spawn_main; "
# A process with other values of these is started anew: they are read before, or by, the imports.
READ_BY_IMPORTS = ("PYTHON", "LC_", "LANG", "LD_", "OMP_", "GRPC_", "FORCE_COLOR", "COLUMNS")
OF_ITS_OWN = {"PYTHONPATH"}  # which the forked process reads itself
# Set by our programs and by an import of xain, also in the process of the tests.
SET_BY_OURS = {"GRPC_ENABLE_FORK_SUPPORT", "GRPC_VERBOSITY"}
PR_SET_CHILD_SUBREAPER = 36
HIGH_FD = 200  # above the descriptors that a test passes
MOST_BYTES = 1 << 20  # of a request
SHOWN_BYTES = 1 << 14  # of a command line and of an environment in /proc, and more of the latter
LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
# Arguments of Popen with which multiprocessing would start a worker.
HOW_WORKERS_START = {
    **dict.fromkeys(("cwd", "env", "gid", "gids", "uid", "process_group", "preexec_fn")),
    **dict.fromkeys(("shell", "start_new_session", "executable"), False),
    "umask": -1,
}


class ForkServer:
    """The caller's end of a fork server, which starts with the first request.

    environment: which the server has. modules: that it imports besides MODULES.
    connection: to one that is a child of this process already.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        modules: Sequence[str] = (),
        connection: socket.socket | None = None,
    ) -> None:
        self.environment = dict(environment)
        self._modules = modules
        self._lock = threading.Lock()
        self._socket = connection
        self._process: subprocess.Popen[bytes] | None = None
        # The process whose child it is: another one, forked from that, has its own.
        self._of = os.getpid()

    def fork(self, request: Mapping[str, object], files: Sequence[int]) -> int:
        """Have it fork a process; returns its pid. The process is the caller's child.

        request: see `_become`. files: descriptors, which become 0, 1, 2 and request["passed"].
        """
        with self._lock:
            if self._socket is None or self._of != os.getpid():
                self._start()
                assert self._socket is not None
            with _parent_of_orphans():
                socket.send_fds(self._socket, [json.dumps(request).encode()], list(files))
                answer = self._socket.recv(64)
        if not answer:
            raise OSError("the fork server has ended: run with XAIN_REAL_EXEC=1 to see why")
        return int(answer)

    def _start(self) -> None:
        self._socket, its = _pair()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(its.fileno()), *self._modules, " " * SHOWN_BYTES],
                env={
                    "ROOM": " " * SHOWN_BYTES,
                    **{name: v for name, v in self.environment.items() if name not in OF_ITS_OWN},
                },
                pass_fds=[its.fileno()],
                process_group=0,  # Ctrl-C is the tests'; the server ends when its socket does
            )
        self._of = os.getpid()
        atexit.register(self._end, self._socket, self._process)

    @staticmethod
    def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        connection.close()
        process.wait()


@contextlib.contextmanager
def _parent_of_orphans() -> Iterator[None]:
    """Meanwhile, a descendant whose parent ends becomes a child of this process."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def arguments_of(command: Sequence[str], cwd: str) -> list[str] | None:
    """The arguments of Python that start a program of ours; None for any other command."""
    program, *rest = command
    if (
        Path(program).name.startswith("xain-")
        and Path(program).parent == Path(sys.executable).parent
    ):
        return [program, *rest]
    if program != sys.executable or not rest:
        return None
    if rest[:2] == ["-X", "faulthandler"]:
        rest = rest[2:]
    if rest[0] == "-m" or (rest[0] == "-c" and rest[2:] == ["--multiprocessing-fork"]):
        return rest if rest[1].startswith((*PROGRAMS, WORKER)) else None
    script = Path(cwd, rest[0])
    is_ours = script.suffix == ".py" and script.is_file() and script != Path(__file__)
    return rest if is_ours else None


class Starts:
    """How processes are started while `installed`.

    are_real: all of them anew, by exec. have_frameworks: imported, besides MODULES.
    """

    are_real = bool(os.environ.get("XAIN_REAL_EXEC")) or not sys.platform.startswith("linux")
    have_frameworks = False

    def __init__(self, server: ForkServer | None = None) -> None:
        self._servers = {} if server is None else {False: server}
        self._environment = dict(os.environ) if server is None else server.environment
        self._execute: Callable[..., None] = subprocess.Popen._execute_child
        self._signature = inspect.signature(self._execute)

    def install(self) -> None:
        def execute(process: Any, *given: Any, **named: Any) -> None:
            how = self._signature.bind(process, *given, **named).arguments
            request = None if self.are_real else _request(how, self._environment)
            if request is None:
                self._execute(process, *given, **named)
            else:
                self._fork(process, request, how)

        spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds

        def spawn_worker(path: bytes, words: list[str], passed: Sequence[int]) -> int:
            how = {**HOW_WORKERS_START, "args": words, "pass_fds": sorted(passed)}
            request = None if self.are_real else _request(how, self._environment)
            if request is None:
                return spawn(path, words, passed)
            return self._server().fork(request, [0, 1, 2, *request["passed"]])

        subprocess.Popen._execute_child = execute
        multiprocessing.util.spawnv_passfds = spawn_worker

    def _server(self) -> ForkServer:
        key = self.have_frameworks
        if key not in self._servers:
            self._servers[key] = ForkServer(self._environment, FRAMEWORKS if key else [])
        return self._servers[key]

    def _fork(self, process: Any, request: dict[str, Any], how: Mapping[str, Any]) -> None:
        ends = (how["p2cread"], how["c2pwrite"], how["errwrite"])
        files = [own if end == -1 else end for own, end in enumerate(ends)]
        process.pid = self._server().fork(request, [*files, *request["passed"]])
        process._child_created = True
        process._close_pipe_fds(
            *(how[end] for end in ("p2cread", "p2cwrite", "c2pread", "c2pwrite")),
            *(how[end] for end in ("errread", "errwrite")),
        )


def _request(how: Mapping[str, Any], of_server: Mapping[str, str]) -> dict[str, Any] | None:
    """A request for what Popen was asked for; None where it wants more than the server can."""
    args = [how["args"]] if isinstance(how["args"], str | bytes | Path) else list(how["args"])
    command, cwd = [os.fsdecode(word) for word in args], os.fspath(how["cwd"] or Path.cwd())
    environment = dict(os.environ if how["env"] is None else how["env"])
    wants_more = how["shell"] or how["preexec_fn"] or how["executable"] or not Path(cwd).is_dir()
    plain = all(how[name] is None for name in ("gid", "gids", "uid")) and how["umask"] == -1
    arguments = arguments_of(command, cwd)
    if wants_more or not plain or arguments is None or not _are_alike(environment, of_server):
        return None
    group = how["process_group"]
    return {
        "arguments": arguments,
        "command": command,
        "cwd": cwd,
        "environment": environment,
        "passed": list(how["pass_fds"]),
        "session": how["start_new_session"],
        "group": os.getpgrp() if group in (None, -1) else group,
        **_inherited(),
    }


def _inherited() -> dict[str, Any]:
    """State that a process has of its parent besides files, directory and environment."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    reset = (signal.SIGPIPE, signal.SIGXFSZ)  # by Popen, since Python ignores them
    signals = sorted(signal.valid_signals() - {*reset})
    return {
        "umask": int(status.partition("Umask:")[2].split()[0], 8),
        "limits": [[kind, *resource.getrlimit(kind)] for kind in LIMITS],
        "ignored": [number for number in signals if signal.getsignal(number) == signal.SIG_IGN],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }


def _show(words: Sequence[str], variables: Mapping[str, str]) -> None:
    """Have these as the command line and the environment of this process that others see."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    bounds = map(int, fields[45:49])  # arg_start, arg_end, env_start and env_end in proc(5)
    for texts in (words, [f"{name}={value}" for name, value in variables.items()]):
        begin, end = next(bounds), next(bounds)
        shown = b"".join(os.fsencode(text) + b"\0" for text in texts)
        ctypes.memmove(begin, shown[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)


def _inherit(request: Mapping[str, Any]) -> None:
    os.umask(request["umask"])
    for kind, soft, hard in request["limits"]:
        if resource.getrlimit(kind) != (soft, hard):
            resource.setrlimit(kind, (soft, hard))
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _are_alike(*environments: Mapping[str, str]) -> bool:
    """Whether imports read the same in all of them."""
    read = [
        {
            name: value
            for name, value in environment.items()
            if name.startswith(READ_BY_IMPORTS) and name not in OF_ITS_OWN | SET_BY_OURS
        }
        for environment in environments
    ]
    return all(one == read[0] for one in read)


def serve(listener: socket.socket) -> tuple[dict[str, Any], socket.socket] | None:
    """Answer requests until the caller has ended; returns None then.

    Returns in a forked process, too: with the request that it shall become, and a connection to a
    fork server of its own.
    """
    while True:
        message, files, _, _ = socket.recv_fds(listener, MOST_BYTES, 64)
        if not message:
            return None
        request: dict[str, Any] = json.loads(message)
        if not _is_forked(listener, request):
            for file in files:
                os.close(file)
            continue
        listener.detach()  # closed with all files of the server
        _take_files(files, request["passed"])
        ours, its = _pair()
        if os.fork():
            its.close()
            high = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
            ours.close()
            return request, socket.socket(fileno=high)
        ours.close()
        listener = _serve_on(its)


def _is_forked(listener: socket.socket, request: Mapping[str, Any]) -> bool:
    """Fork a child of the caller and tell the caller its pid; whether this is the child."""
    parent_read, parent_known = os.pipe()
    told_read, told = os.pipe()
    between = os.fork()
    if not between:
        if os.fork():
            os._exit(0)
        if request["session"]:
            os.setsid()
        elif request["group"] == 0:
            os.setpgid(0, 0)
        os.write(told, str(os.getpid()).encode())
        os.close(parent_known)
        os.read(parent_read, 1)  # an end of file, once the caller is this process' parent
        if not request["session"] and request["group"]:
            # Only now: when a parent ends that is in another group, the system continues what is
            # stopped in this one, unless a parent elsewhere in the session looks after it.
            os.setpgid(0, request["group"])
        return True
    os.waitpid(between, 0)
    listener.send(os.read(told_read, 32))
    for file in (parent_read, parent_known, told_read, told):
        os.close(file)
    return False


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection to a fork server."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
    return pair


def _serve_on(listener: socket.socket) -> socket.socket:
    """Become the fork server of the process that has forked this one: without its files, out of
    reach of its Ctrl-C. Returns its end of the connection."""
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    _take_files([null, null, null, listener.detach()], [HIGH_FD])
    return socket.socket(fileno=HIGH_FD)


def _take_files(files: Sequence[int], passed: Sequence[int]) -> None:
    """Have these descriptors as 0, 1, 2 and those passed, and no other."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH_FD) for file in files]
    numbers = [0, 1, 2, *passed]
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
    first = 3
    for number in [*sorted(passed), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(first, number)
        first = number + 1


def become(request: Mapping[str, Any], paths: list[str], starts: Starts) -> None:
    """Go on as the process that was asked for; returns at its end.

    paths: sys.path of a process without PYTHONPATH and script. starts: of its own processes.
    """
    _inherit(request)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _show(request["command"], request["environment"])
    time.tzset()
    _open_streams()
    _forget_chance()
    _begin_multiprocessing()
    starts.install()
    if "faulthandler" in request["command"][:3]:
        faulthandler.enable()
    first, *rest = request["arguments"]
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.orig_argv = list(request["command"])
    main = sys.modules["__main__"]
    _empty(main)
    if first == "-m":
        sys.argv = rest
        sys.path[:] = [request["cwd"], *own, *paths]
        sys.modules.pop(rest[0], None)  # runpy warns of a module that is imported already
        runpy._run_module_as_main(rest[0])
        return
    if first == "-c":
        sys.argv = [first, *rest[1:]]
        sys.path[:] = ["", *own, *paths]
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv = [first, *rest]
        sys.path[:] = [str(Path(first).resolve().parent), *own, *paths]
        code = compile(Path(first).read_bytes(), first, "exec")
        main.__file__, main.__cached__ = first, None
    main.__spec__ = main.__package__ = None
    exec(code, vars(main))


def _open_streams() -> None:
    """Streams over the descriptors 0, 1 and 2 as an interpreter makes them at its start."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before: io.TextIOWrapper = getattr(sys, f"__{name}__")
        file = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        is_raw = number > 0 and bool(os.environ.get("PYTHONUNBUFFERED"))
        kind: Any = io.BufferedWriter if number else io.BufferedReader
        stream = io.TextIOWrapper(
            file if is_raw else kind(file),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=number == 2 or file.isatty(),
            write_through=is_raw,
        )
        setattr(sys, f"__{name}__", stream)
        setattr(sys, name, stream)


def _forget_chance() -> None:
    """Random numbers of its own, as each process has: those of `random` are forgotten by fork."""
    import numpy as np

    np.random.seed()


def _begin_multiprocessing() -> None:
    """State that multiprocessing has from the time of its import."""
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())
    multiprocessing.process.current_process().authkey = os.urandom(32)


def _empty(main: types.ModuleType) -> None:
    """Leave of the module __main__, which has run this one, what each new one has."""
    for name in vars(main).keys() - {"__builtins__", "__name__", "__doc__", "__loader__"}:
        delattr(main, name)


def main() -> None:
    number, *modules = sys.argv[1:-1]
    paths = sys.path[1:]
    for name in [*MODULES, *modules]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would copy the memory that the processes share
    signal.signal(signal.SIGINT, signal.default_int_handler)
    forked = serve(socket.socket(fileno=int(number)))
    if forked is None:
        os._exit(0)
    request, connection = forked
    server = ForkServer(request["environment"], modules, connection)
    _end(lambda: become(request, paths, Starts(server)))


def _end(program: Callable[[], None]) -> NoReturn:
    """Run a program and end the process as the interpreter does, but leave its modules as they
    are: to clear them would copy all memory that is shared with the fork server."""
    status, is_interrupted = 0, False
    try:
        program()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    except BaseException as error:
        status, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
        # As the interpreter keeps what ends the main thread.
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
    for step in (threading._shutdown, atexit._run_exitfuncs):
        try:
            step()
        except BaseException:  # as the interpreter does, which goes on with the next step
            traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as error:
            status = 120  # the interpreter's
            told = f"Exception ignored in: {stream}\n{type(error).__name__}: {error}"
            with contextlib.suppress(OSError, AttributeError):
                print(told, file=sys.stderr, flush=True)  # noqa: T201
    for kept in (sys.__stdout__, sys.__stderr__):  # where the program has others in their place
        with contextlib.suppress(OSError, ValueError):
            kept.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    # The module by its name: forked programs keep it, but not the contents of __main__.
    importlib.import_module(Path(__file__).stem).main()
