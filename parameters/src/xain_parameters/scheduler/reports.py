"""Reports of servers to the scheduler, and of the scheduler to an operator."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from xain_parameters.scheduler.commands import LearnerWhole, RangeSaved, SaveFailed
from xain_parameters.specs import View


class Load(msgspec.Struct, frozen=True):
    """The load of a server, for status: keys (rows) a second, and bytes of its rows."""

    pulled_keys_per_s: float = 0.0
    pushed_keys_per_s: float = 0.0
    bytes: int = 0


class Returned(msgspec.Struct, frozen=True):
    """Ranges without a server that the sender has, or lacks; see commands.ServerReturned."""

    generation: int
    has: dict[int, int]
    lacks: dict[int, int]


class Report(msgspec.Struct, frozen=True):
    """Everything that a server has done since its last report. A report may arrive twice."""

    news: tuple[LearnerWhole | RangeSaved | SaveFailed, ...] = ()
    returned: Returned | None = None
    is_leaving: bool = False
    load: Load | None = None


class Status(msgspec.Struct, frozen=True):
    """The state of a group, as `status` shows it.

    clocks: by live worker, the number of clocks that it has completed. staleness: by number of
    clocks ahead of the slowest worker, the number of workers. loads: by server, as last reported.
    lost: by range without a server, the server whose log is awaited. cuts: numbers of the whole
    checkpoints.
    """

    view: View
    opened: int
    clocks: dict[str, int]
    staleness: dict[int, int]
    loads: dict[str, Load]
    leaving: tuple[str, ...]
    lost: dict[int, str]
    cuts: tuple[int, ...]
    num_rollbacks: int


decode_report = msgspec.msgpack.Decoder(Report).decode
decode_status = msgspec.msgpack.Decoder(Status).decode

# Rows of a list in the text of a status; JSON has all.
MAX_ROWS = 40
BAR_COLUMNS = 20


def as_json(status: Status) -> str:
    """A status as one JSON object."""
    return msgspec.json.encode(status).decode()


def from_json(text: str) -> Status:
    return msgspec.json.decode(text, type=Status)


def lines_of(status: Status) -> list[str]:
    """A status as lines of text for people."""
    view = status.view
    loads = [status.loads.get(name, Load()) for name in view.addresses]
    lines = [
        f"parameters: {len(view.addresses)} servers, {len(view.ranges)} ranges, "
        f"{len(view.tables)} tables, {len(status.clocks)} workers; clock {status.opened}, "
        f"{view.num_replicas} replicas, log {'on' if view.has_log else 'off'}; "
        f"{sum(each.pulled_keys_per_s for each in loads):,.0f} keys/s pulled, "
        f"{sum(each.pushed_keys_per_s for each in loads):,.0f} pushed"
    ]
    if status.num_rollbacks:
        to = "nothing" if view.rolled_back_to is None else f"checkpoint {view.rolled_back_to}"
        lines.append(f"rolled back {status.num_rollbacks} times, last to {to}")
    lines += _first([_server(status, name) for name in sorted(view.addresses)], "servers")
    num_copies = len(view.ranges) * (view.num_replicas + 1)
    if view.ranges and num_copies < len(view.addresses):
        lines.append(
            f"{len(view.addresses) - num_copies} servers have nothing to do: the group was begun "
            f"with {len(view.ranges)} ranges; see scheduler.num_ranges"
        )
    lines += [
        f"range {number} waits for {f'server {holder}' if holder else 'any server'}"
        for number, holder in sorted(status.lost.items())[:MAX_ROWS]
    ]
    num_lacking: dict[int, list[int]] = {}
    for each in view.ranges:
        missing = view.num_replicas + 1 - len(each.servers)
        if each.servers and missing > 0:
            num_lacking.setdefault(missing, []).append(each.number)
    lines += [
        f"{missing} of {view.num_replicas} replicas missing: range {_listed(numbers)}"
        for missing, numbers in sorted(num_lacking.items())
    ]
    clocks = sorted(status.clocks.items())
    lines += _first([f"worker {name}: clock {clock}" for name, clock in clocks], "workers")
    lines += _histogram(status.staleness)
    if status.cuts:
        lines.append(f"checkpoints: {_listed(status.cuts)}")
    return lines


def _server(status: Status, name: str) -> str:
    view, load = status.view, status.loads.get(name, Load())
    primary = [each.number for each in view.ranges if each.servers[:1] == (name,)]
    backup = [each.number for each in view.ranges if name in each.servers[1:]]
    learning = [each.number for each in view.ranges if name in each.learners]
    parts = [f"primary of {_listed(primary)}"]
    parts += [f"backup of {_listed(backup)}"] if backup else []
    parts += [f"is being given {_listed(learning)}"] if learning else []
    parts += ["leaving"] if name in status.leaving else []
    return (
        f"server {name} at {view.addresses[name]}: {', '.join(parts)}; "
        f"{load.pulled_keys_per_s:,.0f} keys/s pulled, {load.pushed_keys_per_s:,.0f} pushed, "
        f"{load.bytes / 1e6:,.1f} MB"
    )


def _histogram(staleness: dict[int, int]) -> list[str]:
    """Workers by the number of clocks that they are ahead of the slowest: 0, 1, 2-3, 4-7, ..."""
    bins: Counter[int] = Counter()
    for ahead, num_workers in staleness.items():
        bins[ahead.bit_length()] += num_workers
    most = max(bins.values(), default=0)
    lines = ["staleness, workers by the clocks that they are ahead of the slowest:"] if bins else []
    for number, num_workers in sorted(bins.items()):
        low, high = (1 << number) >> 1, (1 << number) - 1
        label = f"{low}" if low >= high else f"{low}-{high}"
        bar = "#" * max(1, num_workers * BAR_COLUMNS // most)
        lines.append(f"  {label:>9}  {bar:{BAR_COLUMNS}}  {num_workers}")
    return lines


def _first(lines: list[str], what: str) -> list[str]:
    more = len(lines) - MAX_ROWS
    return [*lines[:MAX_ROWS], *([f"and {more} more {what}"] if more > 0 else [])]


def _listed(numbers: Sequence[int]) -> str:
    """Ascending numbers, with those that follow each other as one item: "1-3, 7"."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) or "nothing"
