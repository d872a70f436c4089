"""A parameter server of real processes, killed with kill -9 in the middle of clocks.

A worker that holds a clock makes sure that training is not over before; requests of the others are
under way meanwhile.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import xain_parameters as parameters
from support.parameter_processes import Fleet
from support.parameter_worker import Floats, model, residual, train

WORKERS = ("w0", "w1")
TOLERANCE = 0.01  # 0.001 or so without deaths


@pytest.fixture(scope="module")
def undisturbed() -> tuple[Floats, Floats]:
    """The model of a bulk synchronous training."""
    with parameters.LocalGroup(2) as group:

        def work(name: str) -> None:
            with group.connect(name) as server:
                train(server, len(WORKERS))

        with ThreadPoolExecutor() as threads:
            list(threads.map(work, WORKERS))
        with group.connect("reader") as reader:
            trained = model(reader)
    assert residual(trained) < TOLERANCE
    return trained


def trained_by(fleet: Fleet) -> tuple[Floats, Floats]:
    """The model, when all workers have ended well."""
    fleet.ended(*WORKERS)
    with parameters.connect_sync(fleet.target, worker="reader") as reader:
        return model(reader)


def assert_same_bits(trained: tuple[Floats, Floats], expected: tuple[Floats, Floats]) -> None:
    for mine, theirs in zip(trained, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def kill_with_replicas(fleet: Fleet) -> tuple[Floats, Floats]:
    """A server after another, each when all ranges have a backup again, then a worker, then the
    scheduler."""
    fleet.hold("w0", 2, 4, 6, 8, 10)
    fleet.start_servers("s0", "s1", "s2")
    fleet.start_workers(*WORKERS)
    for clock, victim in ((2, "s0"), (4, "s1"), (6, "s2")):
        fleet.until_held("w0", clock)
        fleet.until_replicated()
        fleet.kill(victim)
        fleet.release("w0", clock)
        fleet.start_servers(victim)
    fleet.until_held("w0", 8)
    fleet.kill("w0")
    fleet.release("w0", 8)
    fleet.start_workers("w0")
    fleet.until_held("w0", 10)
    fleet.kill("scheduler")
    fleet.release("w0", 10)
    fleet.start_scheduler()
    return trained_by(fleet)


def kill_with_log(fleet: Fleet) -> tuple[Floats, Floats]:
    """A server, then all servers and the scheduler at a time, then a worker."""
    fleet.hold("w0", 2, 4, 6)
    fleet.start_servers("s0", "s1")
    fleet.start_workers(*WORKERS)
    fleet.until_held("w0", 2)
    fleet.kill("s0")
    fleet.release("w0", 2)
    fleet.start_servers("s0")
    fleet.until_held("w0", 4)
    for name in ("scheduler", "s0", "s1"):
        fleet.kill(name)
    fleet.release("w0", 4)
    fleet.start_scheduler()
    fleet.start_servers("s0", "s1")
    fleet.until_held("w0", 6)
    fleet.kill("w0")
    fleet.release("w0", 6)
    fleet.start_workers("w0")
    return trained_by(fleet)


def test_deaths_lose_no_bit_of_a_bulk_synchronous_training_with_replicas(tmp_path, undisturbed):
    with Fleet(tmp_path, "--replicas", "1") as fleet:
        assert_same_bits(kill_with_replicas(fleet), undisturbed)
        assert fleet.status().num_rollbacks == 0


def test_deaths_lose_no_bit_of_a_bulk_synchronous_training_with_a_log(tmp_path, undisturbed):
    with Fleet(tmp_path, "--log") as fleet:
        assert_same_bits(kill_with_log(fleet), undisturbed)
        assert fleet.status().num_rollbacks == 0
