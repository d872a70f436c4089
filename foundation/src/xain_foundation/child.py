"""Run a module as a program that ends with the process that has started it:
`python -m xain_foundation.child PIPE MODULE ARGUMENT...`.

Nothing is sent through the pipe. Only the parent process can write to it, so its end is the end of
the parent, also of one that was killed. A signal at the parent's end exists on Linux only.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any

# The two ends of the pipe for all children of this process. No program inherits the second one,
# which is closed with the process.
_pipes: list[tuple[int, int]] = []


def start(
    module: str, *arguments: str, pass_fds: Sequence[int] = (), **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a module as a child that ends with this process. options: of subprocess.Popen."""
    if not _pipes:
        _pipes.append(os.pipe())
    reading, _ = _pipes[0]
    command = [sys.executable, "-m", "xain_foundation.child", str(reading), module, *arguments]
    return subprocess.Popen(command, pass_fds=(*pass_fds, reading), **options)


def environment(own: Mapping[str, str], without: Sequence[str]) -> dict[str, str]:
    """Return variables for a child: its own, and those of this process without these prefixes."""
    kept = {n: v for n, v in os.environ.items() if not n.upper().startswith(tuple(without))}
    return {**kept, **own}


def exit_status(code: int) -> int:
    """The status of a child as a shell has it, above 128 after a signal. code: of Popen."""
    return code if code >= 0 else 128 - code


def _forked() -> None:
    """Close the pipe in a forked process, whose end is not the end of its parent's children."""
    while _pipes:
        for end in _pipes.pop():
            os.close(end)


os.register_at_fork(after_in_child=_forked)


def main() -> None:
    """Run the module that the command line names, and end with the parent process."""
    inherited, module = int(sys.argv[1]), sys.argv[2]
    Thread(target=_end_with, args=(inherited,), name="parent", daemon=True).start()
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with(inherited: int) -> None:
    os.read(inherited, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
