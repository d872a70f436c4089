"""The event loop of the process."""

import asyncio
import threading

import pytest

from support.messaging import PATIENCE_S
from xain_membership import background


def test_a_loop_whose_thread_did_not_start_is_made_again(monkeypatch):
    """The system has a thread for it at the second try."""
    monkeypatch.setattr(background, "_loop", None)
    monkeypatch.setattr(background, "_thread", None)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            background.event_loop()
    loop = background.event_loop()
    # A sleep of 0 s does nothing: it shows that the loop runs.
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
    background._thread.join(PATIENCE_S)
    loop.close()
