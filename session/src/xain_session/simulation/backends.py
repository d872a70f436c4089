"""Where workers run: the port of the backends local.py and ray_backend.py.

A worker is a function that is called in another process, and that returns a text when it has come
to its end. A backend starts workers, tells how each has ended, and stops those that run.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, Self

from xain_session.errors import SessionFailed

Call = Callable[[], str]


class SimulationError(SessionFailed):
    """The simulation cannot be run, or main() has failed. The text has main's traceback."""


class Backend(Protocol):
    """Runs workers. As a context manager it stops them all at the end.

    host: address at which its workers reach this machine.
    """

    @property
    def host(self) -> str: ...

    def start(self, name: str, call: Call) -> None:
        """Begin to call a function in a process of its own.

        A worker whose machine is lost may be called anew elsewhere.
        Raises SimulationError if the function cannot be given to another process.
        """

    def wait(self, timeout_s: float) -> Mapping[str, str]:
        """Wait for workers to end. Returns what each has returned that has ended meanwhile, by
        name; empty after timeout_s. Raises SimulationError if a worker has died."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
