"""The number of threads of torch in this process."""

_num_threads: list[int] = []  # empty for its own choice


def use_threads(num_threads: int) -> None:
    """Set how many threads torch computes with in this process, once it is imported.

    Left alone, torch takes all cores, and small networks of several processes on one machine train
    a hundred times slower, because their threads wait for each other.
    """
    _num_threads[:] = [num_threads]


def threads_in_use() -> int | None:
    """The number that use_threads() was given; None if torch is left alone."""
    return _num_threads[0] if _num_threads else None
