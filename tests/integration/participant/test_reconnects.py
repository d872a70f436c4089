"""How an agent comes back to a coordinator that was away."""

import threading
import time
from typing import Any

from integration.participant.scripted import PATIENCE_S, Ledger
from xain_participant import Agent, Participant


class Idle(Participant):
    """There is nothing to train."""

    def init_weights(self) -> Any:
        raise AssertionError("no round is open")

    def train_round(self, weights: Any, epochs: int, epoch_base: int) -> Any:
        raise AssertionError("no round is open")


def test_the_stream_comes_back_after_the_first_sign_of_life(serve):
    """When that is sent is spread over time; a stream that went ahead would connect at once. And
    no member joins again."""
    first = serve(Ledger(paused=True))
    may_beat = threading.Event()

    def held(_: Any) -> None:
        assert may_beat.wait(PATIENCE_S)

    agent = Agent(Idle(), first.target, "ward-7")
    agent.min_watch_pause_s, agent.max_watch_pause_s = 0.001, 0.01
    running = threading.Thread(target=agent.run)
    running.start()
    try:
        first.wait_until(lambda: first.calls["Watch"] == 1 and first.calls["Heartbeat"] > 1)
        first.stop()
        second = serve(first.ledger, first.port)
        second.before["Heartbeat"].append(held)
        second.wait_until(lambda: second.calls["Heartbeat"] == 1)
        time.sleep(50 * agent.max_watch_pause_s)  # in which a stream that went ahead would come
        assert second.calls["Watch"] == 0
        may_beat.set()
        second.wait_until(lambda: second.calls["Watch"] == 1)
        assert second.calls["Rendezvous"] == 0
    finally:
        may_beat.set()
        agent.stop()
        running.join(PATIENCE_S)
    assert not running.is_alive()
