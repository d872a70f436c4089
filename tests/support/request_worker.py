"""A worker in a process of its own that answers requests by answer() of handlers.py in the working
directory, until it is killed.

    python request_worker.py SCHEDULER NAME JOB

A file ready-NAME tells that it is a member of the group.
"""

import signal
import sys
from importlib import import_module
from pathlib import Path

import xain_parameters as parameters


def main() -> None:
    target, name, job = sys.argv[1:]
    sys.path.append("")
    answer = import_module("handlers").answer
    with parameters.connect_sync(target, worker=name, job=job, handler=answer):
        Path(f"ready-{name}").touch()
        signal.pause()


if __name__ == "__main__":
    main()
