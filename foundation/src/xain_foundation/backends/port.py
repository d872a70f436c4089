"""Where workers run: the port of the backends.

A worker is a function that is called in another process, and that returns a text when it has come
to its end. A backend starts workers, tells how each has ended, and stops those that run.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, Self

Call = Callable[[], str]


class BackendError(RuntimeError):
    """Workers cannot be started. The text is one sentence for the one who started them.

    died: name of the worker that has ended without a result; "" if none has.
    """

    def __init__(self, text: str, *, died: str = "") -> None:
        super().__init__(text)
        self.died = died


class Backend(Protocol):
    """Runs workers. As a context manager it stops them all at the end.

    Its context raises BackendError if no workers can run there.
    host: address at which its workers reach this machine.
    """

    @property
    def host(self) -> str: ...

    def start(self, name: str, call: Call) -> None:
        """Begin to call a function in a process of its own.

        A worker whose machine is lost may be called anew elsewhere.
        Raises BackendError if the function cannot be given to another process.
        """

    def wait(self, timeout_s: float) -> Mapping[str, str]:
        """Wait for workers to end. Returns what each has returned that has ended meanwhile, by
        name; empty after timeout_s. Raises BackendError if a worker has died."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
