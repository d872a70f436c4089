"""Work in the store that nobody waits for."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import ParamSpec

from xain_coordinator.ports import StoreError

P = ParamSpec("P")


def in_background(work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Do it in a thread, some time. It is of no harm if it fails."""

    def attempt() -> None:
        with contextlib.suppress(StoreError):
            work(*args, **kwargs)

    with contextlib.suppress(RuntimeError):  # the process is ending
        asyncio.get_running_loop().run_in_executor(None, attempt)
