"""The status of a group, for people and as JSON."""

from msgspec.structs import replace

from xain_parameters.scheduler.reports import JobStatus, Load, Status, as_json, from_json, lines_of
from xain_parameters.specs import RangeView, View

JOB = JobStatus(
    view=View(
        generation=1,
        number=2,
        tables=(),
        ranges=(
            RangeView(1, 0, 99, 3, ("s0", "s1")),
            RangeView(2, 100, 199, 3, ("s0",), ("s1",)),
            RangeView(3, 200, 299, 3, ("s0",)),
            RangeView(4, 300, 2**64 - 1, 3, ()),
        ),
        addresses={},
    ),
    opened=4,
    clocks={"w1": 9, "w0": 4, "w2": 4, "w3": 5},
    staleness={0: 2, 1: 1, 5: 1},
    load=Load(2_000.5, 1_000.0, 3_500_000),
    lost={4: "s2"},
    cuts=(3, 4),
    num_rollbacks=1,
)
OTHER = JobStatus(
    view=View(1, 1, (), (RangeView(10_001, 0, 2**64 - 1, 1, ("s1", "s0")),), {}),
    opened=0,
    clocks={},
    staleness={},
    load=Load(),
    lost={},
    cuts=(),
    num_rollbacks=0,
)
STATUS = Status(
    jobs={"ctr": JOB, "table:v": OTHER},
    addresses={"s1": "h1:1", "s0": "h0:1"},
    loads={"s0": Load(2_000.0, 1_000.0, 3_500_000), "s1": Load(0.5, 0.0, 0)},
    leaving=("s1",),
    num_replicas=1,
    has_log=True,
)


def test_status_tells_servers_ranges_and_by_job_clocks_staleness_and_keys_per_second():
    assert lines_of(STATUS) == [
        "parameters: 2 servers, 2 jobs, 5 ranges, 0 tables, 4 workers; 1 replicas, log on; "
        "2,000 keys/s pulled, 1,000 pushed",
        "server s0 at h0:1: primary of 1-3, backup of 10001; "
        "2,000 keys/s pulled, 1,000 pushed, 3.5 MB",
        "server s1 at h1:1: primary of 10001, backup of 1, is being given 2, leaving; "
        "0 keys/s pulled, 0 pushed, 0.0 MB",
        "range 4 waits for server s2",
        "1 of 1 replicas missing: range 2-3",
        "job ctr: 0 tables, range 1-4, 4 workers; clock 4; "
        "2,000 keys/s pulled, 1,000 pushed, 3.5 MB",
        "  rolled back 1 times, last to nothing",
        "  worker w0: clock 4",
        "  worker w1: clock 9",
        "  worker w2: clock 4",
        "  worker w3: clock 5",
        "  staleness, workers by the clocks that they are ahead of the slowest:",
        "            0  ####################  2",
        "            1  ##########            1",
        "          4-7  ##########            1",
        "  checkpoints: 3-4",
        "job table:v: 0 tables, range 10001, 0 workers; clock 0; 0 keys/s pulled, 0 pushed, 0.0 MB",
    ]


def test_status_is_the_same_after_json():
    assert from_json(as_json(STATUS)) == STATUS


def test_status_of_a_thousand_workers_fits_a_screen():
    clocks = {f"w{number:04}": number for number in range(1000)}
    job = replace(JOB, clocks=clocks, staleness=dict.fromkeys(range(1000), 1))
    lines = lines_of(replace(STATUS, jobs={"ctr": job}))
    assert "and 960 more workers" in lines
    assert len(lines) < 70
