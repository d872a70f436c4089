"""Requests of an S3 store that go at the same time."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, ParamSpec, TypeVar

from xain_coordinator.ports import StoreUnavailable

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 12  # requests at a time beside those of the callers' own threads


class Sizes(NamedTuple):
    """Bytes of requests."""

    head: int = 256 << 10  # with the opening if no range is asked for: all of a small object
    range: int = 8 << 20  # a read of more is cut into ranges, which come at the same time
    part: int = 16 << 20  # an object of more is uploaded in parts, 10,000 of them at most: 156 GiB
    # A copy of more goes in parts. S3 would do 5 GiB at once, but some servers are silent while
    # they copy, for longer than we wait.
    copy_part: int = 128 << 20


class Requests:
    """Threads for requests, and a queue for those that find none free."""

    def __init__(self) -> None:
        self.sizes = Sizes()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "s3")
        self._closed = False

    def submit(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do work in a thread as soon as one is free. Its future raises StoreUnavailable if it
        waited until close(). Raises StoreUnavailable after close(), or if no thread can be made."""

        def run() -> T:
            """Do the work, unless the store is being closed."""
            if self._closed:
                raise StoreUnavailable("the store is being closed")
            return work(*args, **kwargs)

        try:
            return self._pool.submit(run)
        except RuntimeError as error:
            raise StoreUnavailable(
                f"the store is being closed, or has no thread: {error}"
            ) from None

    def close(self) -> None:
        """Wait for requests under way; those that have not begun fail."""
        self._closed = True
        # Without cancel_futures, which ends a future without waking its wait().
        self._pool.shutdown()


def results(futures: Sequence[Future[T]]) -> list[T]:
    """Wait for futures, and return their results. If one fails, cancel those that have not begun,
    and raise its error once all have ended."""
    _, others = wait(futures, return_when=FIRST_EXCEPTION)
    for future in others:
        future.cancel()
    wait(others)
    # One is cancelled only because another has failed.
    return [future.result() for future in futures if not future.cancelled()]
