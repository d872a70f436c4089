"""Run a module as a program that ends with the process that has started it:
`python -m xain_foundation.child PIPE MODULE ARGUMENT...`.

Nothing is sent through the pipe. Only the parent process can write to it, so its end is the end of
the parent, also of one that was killed. A signal at the parent's end exists on Linux only.
"""

import os
import runpy
import sys
from functools import cache
from threading import Thread


@cache
def pipe() -> int:
    """A descriptor for subprocess's `pass_fds`, the same for all children of this process."""
    reading, _ = os.pipe()  # the other end is closed with the process, and inherited by no program
    return reading


def command(module: str, *arguments: str) -> list[str]:
    """The command of a child. Start it with pass_fds=[pipe()]."""
    return [sys.executable, "-m", "xain_foundation.child", str(pipe()), module, *arguments]


def main() -> None:
    """Take the place of the module's own command."""
    inherited, module = int(sys.argv[1]), sys.argv[2]
    Thread(target=_end_with, args=(inherited,), name="parent", daemon=True).start()
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with(inherited: int) -> None:
    os.read(inherited, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
