"""How long updates are kept once their model has been made.

They are what participants have learnt from their data, and many times as large as the models: of a
session of weeks they would fill any disk.
"""

import threading

from xain_coordinator.core.keys import model_key
from xain_coordinator.ports import WeightsStore

# A process before us may have died before it came to these.
LOOK_BACK = 16


class Retention:
    """Drops updates from a store; the models stay.

    keep: rounds whose updates stay, the latest of those that are over; None for all.
    stop: once set, nothing more is dropped.
    """

    def __init__(self, store: WeightsStore, keep: int | None, stop: threading.Event) -> None:
        self._store = store
        self._keep = keep
        self._stop = stop
        self._lock = threading.Lock()
        self._next: int | None = None  # the rounds before it have been looked through

    def drop(self, needed_from: int) -> None:
        """Blocks. needed_from: updates of this round and of later ones may still be counted.

        Raises the store's errors; the next call goes on where this one has ended.
        """
        if self._keep is None:
            return
        with self._lock:
            end = needed_from - self._keep
            first = max(0, end - LOOK_BACK) if self._next is None else self._next
            for round_ in range(first, end):
                self._drop_round(round_)
                if self._stop.is_set():
                    return
                self._next = round_ + 1

    def _drop_round(self, round_: int) -> None:
        for key in list(self._store.keys(f"{round_}/")):
            if self._stop.is_set():
                return
            if key != model_key(round_):
                self._store.delete(key)
