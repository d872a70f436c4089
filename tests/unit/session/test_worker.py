"""The order in which a worker does what waits, and the code after the loop of a site."""

import sys
from typing import Any

import numpy as np
import pytest

import xain
from xain.result import LastModel
from xain_foundation.exit_statuses import EXIT_NOTHING_COUNTED, EXIT_OK
from xain_participant.sdk import events as e
from xain_participant.sdk.values import Call
from xain_session.simulation import worker
from xain_session.simulation.worker import TRAINING, UPLOAD, Job, SiteScript, Worker, _Run


def job(kind: int, last_s: float, number: int) -> Job:
    """last_s: of the site's last training."""
    agent: Any = None
    return Job(kind, -last_s, number, agent, 0)


def test_uploads_go_first_and_then_the_site_that_took_longest():
    """One that has not trained yet may take longest; of equal ones the first goes first."""
    new, again = job(TRAINING, float("inf"), 3), job(TRAINING, float("inf"), 6)
    short, long = job(TRAINING, 0.1, 1), job(TRAINING, 9.0, 2)
    uploads = job(UPLOAD, 0.2, 4), job(UPLOAD, 0.1, 5)
    assert sorted([again, short, long, new, *uploads[::-1]]) == [*uploads, new, again, long, short]


class Trained:
    """An agent whose trainings take seconds of a clock that the test has."""

    exit_status = None

    def __init__(self, seconds: float, begun: list["Trained"], clock: list[float]) -> None:
        self.last_s = float("inf")
        self.seconds = seconds
        self.begun = begun
        self.clock = clock
        self.work = self

    def do(self, call: Call, round_: int) -> e.Trained:
        self.begun.append(self)
        is_training = round_ > 0
        self.clock[0] += self.seconds if is_training else 0.0
        return e.Trained(round_, is_training=is_training)


def test_site_whose_last_training_took_longest_is_trained_first(monkeypatch):
    """Times are those that the worker has measured in the round before, in any order of the news.
    Initial weights are no training: whoever made them may still take longest."""
    clock, begun = [0.0], list[Trained]()
    monkeypatch.setattr(worker.time, "monotonic", lambda: clock[0])
    run = _Run(Worker(lambda site: None, [], "127.0.0.1:1"))
    monkeypatch.setattr(run, "_hand_back", lambda outcome: None)
    agents = [Trained(seconds, begun, clock) for seconds in (3.0, 1.0, 2.0)]

    def train(round_, *given):
        for agent in given:
            run._add(TRAINING, agent, round_)
        waiting = []
        for _ in given:
            run._do(run._next(waiting))
        order = [agent.seconds for agent in begun]
        begun.clear()
        return order

    first, second, third = agents
    assert train(0, second) == [1.0]
    assert train(1, first, second, third) == [3.0, 1.0, 2.0], "none has trained before"
    assert train(2, second, third, first) == [3.0, 2.0, 1.0]
    second.seconds = 9.0
    assert train(3, second, third, first) == [3.0, 2.0, 9.0]
    assert train(4, first, third, second) == [9.0, 3.0, 2.0]


def finished(main: Any, exit_status: int = EXIT_OK) -> list[str]:
    """Failures of main() that are told when the session of a site is over."""
    site = xain.Site(0, 1, "site-0")
    told: list[str] = []
    model = LastModel("session", 3, np.ones(2), (), {}, {"loss": 0.5})
    script = SiteScript(Worker(main, [site], "127.0.0.1:1"), site, told.append, lambda: model)
    script.finish(exit_status)
    return told


def test_code_after_the_loop_has_the_last_model():
    """The loop has no round, as at a site that joins when the session is over."""
    seen = []

    def main(site):
        rounds = xain.rounds(np.zeros(2))
        seen.extend(rounds)
        seen.append((rounds.result.round, rounds.result.weights.tolist(), rounds.exit_status))

    assert finished(main, EXIT_NOTHING_COUNTED) == []
    assert seen == [(3, [1.0, 1.0], EXIT_NOTHING_COUNTED)]


def test_script_of_many_sessions_ends_with_the_simulated_one():
    sessions = []

    def main(site):
        while True:
            for _ in xain.rounds(np.zeros(2)):
                raise AssertionError("the session is over")
            sessions.append(1)

    assert finished(main) == []
    assert sessions == [1]


@pytest.mark.parametrize(
    ("status", "is_failure"),
    [(None, False), (EXIT_OK, False), (EXIT_NOTHING_COUNTED, False), (1, True), ("no disk", True)],
)
def test_script_may_end_with_the_exit_status_of_its_rounds(status, is_failure):
    """Any other status is a failure, as an exception is."""

    def main(site):
        for _ in xain.rounds(np.zeros(2)):
            raise AssertionError("the session is over")
        sys.exit(status)

    told = finished(main, EXIT_NOTHING_COUNTED)
    assert [text.splitlines()[0] for text in told] == [f"SystemExit({status!r})"] * is_failure
