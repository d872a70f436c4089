"""Time limit of a training, looked at between its small steps.

Workloads look at it after each mini-batch, estimator or step of Newton's method, so that a training
ends in time however long an epoch takes. A context variable has the limit, and no argument of
Workload.train(): only local models are limited, and a workload that never looks trains as before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_over: ContextVar[Callable[[], bool]] = ContextVar("is_over", default=lambda: False)


class OutOfTime(TimeoutError):
    """The time limit of a training is over."""


@contextmanager
def time_limit(is_over: Callable[[], bool]) -> Iterator[None]:
    """Let trainings within this context raise OutOfTime as soon as is_over() is true."""
    token = _is_over.set(is_over)
    try:
        yield
    finally:
        _is_over.reset(token)


def check_time() -> None:
    """Raise OutOfTime if there is a time limit, and it is over."""
    if _is_over.get()():
        raise OutOfTime
