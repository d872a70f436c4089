"""The order in which a worker does what waits."""

from typing import Any

from xain_session.simulation.worker import TRAINING, UPLOAD, Job


def job(kind: int, last_s: float, number: int) -> Job:
    """last_s: of the site's last training."""
    agent: Any = None
    return Job(kind, -last_s, number, agent, 0)


def test_uploads_go_first_and_then_the_site_that_took_longest() -> None:
    """One that has not trained yet may take longest; of equal ones the first goes first."""
    new, again = job(TRAINING, float("inf"), 3), job(TRAINING, float("inf"), 6)
    short, long = job(TRAINING, 0.1, 1), job(TRAINING, 9.0, 2)
    uploads = job(UPLOAD, 0.2, 4), job(UPLOAD, 0.1, 5)
    assert sorted([again, short, long, new, *uploads[::-1]]) == [*uploads, new, again, long, short]
