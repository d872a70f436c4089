"""The bounds of a job's workers and data."""

import pytest

from xain_parameters.errors import Invalid
from xain_parameters.jobs.parts import Source
from xain_parameters.scheduler import commands as c
from xain_parameters.scheduler.decider import MAX_DATA, decide
from xain_parameters.scheduler.state import State
from xain_parameters.specs import MAX_WORKERS


def test_number_of_workers_and_of_data_of_a_job_is_bounded():
    state = State.first(1)
    with pytest.raises(Invalid, match=f"1 to {MAX_WORKERS} workers, not {MAX_WORKERS + 1}"):
        decide(state, c.WorkerEntered("a", 1, MAX_WORKERS + 1, job="j"))
    state = decide(state, c.WorkerEntered("a", 1, MAX_WORKERS, job="j")).state
    for number in range(MAX_DATA + 1):
        wanted = c.PartWanted("a", 1, 1, -1, f"x{number}", Source(100, 7, 1), job="j")
        if number == MAX_DATA:
            with pytest.raises(Invalid, match=f"'j' has {MAX_DATA} data already"):
                decide(state, wanted)
        else:
            state = decide(state, wanted).state
