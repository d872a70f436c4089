"""A bounded number of seeds; `python -m simulation_parameters --seeds N` runs more."""

from dataclasses import replace

import pytest

from simulation_parameters.scenario import OF_JOBS, Event, Fault, from_seed, with_job, with_rows
from simulation_parameters.world import simulate

NUM_SEEDS = 30


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_faults_lose_nothing_that_was_acknowledged(seed):
    """Each pull sees what its consistency promises, and the final model is that of an undisturbed
    run; see oracle.py."""
    simulate(from_seed(seed))


@pytest.mark.parametrize("seed", range(24))
def test_each_row_is_read_once_in_an_epoch(seed):
    """Workers of a job divide rows by rank and epoch, while workers, servers and the scheduler are
    killed and workers come and leave for good; see oracle.py. Under BSP the model counts each row
    once, and else the notes do."""
    simulate(with_rows(from_seed(7 * seed + 1)))


@pytest.mark.parametrize("num_servers", [1, 2, 3, 4])
@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
@pytest.mark.parametrize("num_replicas", [0, 1])
def test_tenth_of_all_messages_is_lost(num_servers, num_workers, num_replicas):
    """Each message breaks its connection with a chance of 10 %, from the first clock to the last,
    and the same is promised. A backup is filled over many connections."""
    scenario = replace(
        from_seed(num_servers),
        staleness=0,
        num_servers=num_servers,
        num_workers=num_workers,
        num_replicas=num_replicas,
        num_clocks=5,
        compute_s=0.05,
        loss=0.1,
        events=(),
        quiet_at=1000.0,
        num_epochs=0,
    )
    assert simulate(scenario).trained_s < scenario.quiet_at


@pytest.mark.parametrize("fault", OF_JOBS)
@pytest.mark.parametrize("seed", range(12))
def test_job_that_stalls_or_is_removed_changes_nothing_in_another(seed, fault):
    """The first job ends meanwhile with the model of an undisturbed run, bit for bit. A stalled job
    ends later with its own, and servers drop the ranges of a removed one."""
    seed *= 7  # of one job without rows, as the next one
    first = replace(from_seed(seed), staleness=0, marks_staleness="loop")
    simulate(with_job(first, from_seed(seed + 1), fault))


@pytest.mark.parametrize("seed", range(8))
def test_rollback_of_one_job_changes_nothing_in_another(seed):
    """Each job has one range, without a backup, at a server of its own; either server dies."""
    job = replace(
        from_seed(7 * seed),
        staleness=0,
        num_servers=2,
        num_workers=2,
        num_replicas=0,
        has_log=False,
        num_ranges=1,
        num_clocks=10,
        checkpoint_interval=2,
        compute_s=0.4,
        loss=0.0,
        marks_staleness="loop",
        quiet_at=8.0,
    )
    rollbacks = []
    for index in range(2):
        death = Event(1.0 + 0.2 * seed, Fault.KILL_SERVER, index, 0, 0.2)
        rollbacks.append(simulate(with_job(replace(job, events=(death,)), job)).num_rollbacks)
    assert {"": 1, "other": 0} in rollbacks
    assert {"": 0, "other": 1} in rollbacks
