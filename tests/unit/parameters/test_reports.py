"""The status of a group, for people and as JSON."""

from msgspec.structs import replace

from xain_parameters.scheduler.reports import Load, Status, as_json, from_json, lines_of
from xain_parameters.specs import RangeView, View

STATUS = Status(
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
        addresses={"s1": "h1:1", "s0": "h0:1"},
        num_replicas=1,
        has_log=True,
    ),
    opened=4,
    clocks={"w1": 9, "w0": 4, "w2": 4, "w3": 5},
    staleness={0: 2, 1: 1, 5: 1},
    loads={"s0": Load(2_000.0, 1_000.0, 3_500_000), "s1": Load(0.5, 0.0, 0)},
    leaving=("s1",),
    lost={4: "s2"},
    cuts=(3, 4),
    num_rollbacks=1,
)


def test_status_tells_servers_ranges_clocks_staleness_and_keys_per_second() -> None:
    assert lines_of(STATUS) == [
        "parameters: 2 servers, 4 ranges, 0 tables, 4 workers; clock 4, 1 replicas, log on; "
        "2,000 keys/s pulled, 1,000 pushed",
        "rolled back 1 times, last to nothing",
        "server s0 at h0:1: primary of 1-3; 2,000 keys/s pulled, 1,000 pushed, 3.5 MB",
        "server s1 at h1:1: primary of nothing, backup of 1, is being given 2, leaving; "
        "0 keys/s pulled, 0 pushed, 0.0 MB",
        "range 4 waits for server s2",
        "1 of 1 replicas missing: range 2-3",
        "worker w0: clock 4",
        "worker w1: clock 9",
        "worker w2: clock 4",
        "worker w3: clock 5",
        "staleness, workers by the clocks that they are ahead of the slowest:",
        "          0  ####################  2",
        "          1  ##########            1",
        "        4-7  ##########            1",
        "checkpoints: 3-4",
    ]


def test_status_is_the_same_after_json() -> None:
    assert from_json(as_json(STATUS)) == STATUS


def test_status_of_a_thousand_workers_fits_a_screen() -> None:
    clocks = {f"w{number:04}": number for number in range(1000)}
    lines = lines_of(replace(STATUS, clocks=clocks, staleness=dict.fromkeys(range(1000), 1)))
    assert "and 960 more workers" in lines
    assert len(lines) < 70
