"""Run a module as a program that is killed when its parent process ends, on Linux:
`python -m xain_coordinator.cli.launch.child PARENT MODULE ARGUMENT...`.

The launcher does not ask for that between fork and exec, where code of gRPC would run.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Take the place of the module's own command."""
    parent, module = sys.argv[1:3]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it has ended before
            sys.exit(1)
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
