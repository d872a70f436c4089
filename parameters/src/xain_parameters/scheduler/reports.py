"""Reports of servers to the scheduler, and of the scheduler to an operator."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from xain_parameters.jobs.parts import Source
from xain_parameters.scheduler.commands import LearnerWhole, RangeSaved, SaveFailed
from xain_parameters.specs import RangeView, View


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
    returned: tuple[Returned, ...] = ()
    is_leaving: bool = False
    loads: dict[int, Load] | None = None  # by the number of the job


class DataStatus(msgspec.Struct, frozen=True):
    """How far the data of a job are read.

    num_done, num_begun: of num_epochs epochs. holders: by part of the last epoch that has begun,
    the worker that reads it; "": it is read.
    """

    num_done: int
    num_begun: int
    num_epochs: int
    holders: tuple[str, ...] = ()


class JobStatus(msgspec.Struct, frozen=True):
    """The state of a job.

    clocks: by live worker, the number of clocks that it has completed. staleness: by number of
    clocks ahead of the slowest worker, the number of workers. load: at all servers, as last
    reported. lost: by range without a server, the server whose log is awaited. cuts: numbers of the
    whole checkpoints. data: by name.
    """

    view: View
    opened: int
    clocks: dict[str, int]
    staleness: dict[int, int]
    load: Load
    lost: dict[int, str]
    cuts: tuple[int, ...]
    num_rollbacks: int
    data: dict[str, DataStatus] = {}


class Status(msgspec.Struct, frozen=True):
    """The state of a group, as `status` shows it.

    jobs: by name, those that have a table, a worker in a loop, or one with a rank. addresses: of
    the servers, by name. loads: by server, as last reported. in_clear: addresses that other
    machines reach, in a group without certificates.
    """

    jobs: dict[str, JobStatus]
    addresses: dict[str, str]
    loads: dict[str, Load]
    leaving: tuple[str, ...]
    num_replicas: int
    has_log: bool
    in_clear: tuple[str, ...] = ()

    @property
    def ranges(self) -> tuple[RangeView, ...]:
        """The ranges of all jobs."""
        return tuple(each for job in self.jobs.values() for each in job.view.ranges)

    @property
    def clocks(self) -> dict[str, int]:
        """The clocks of the workers of all jobs."""
        return {name: clock for job in self.jobs.values() for name, clock in job.clocks.items()}

    @property
    def lost(self) -> dict[int, str]:
        """The ranges of all jobs that have no server."""
        return {number: name for job in self.jobs.values() for number, name in job.lost.items()}

    @property
    def num_rollbacks(self) -> int:
        return sum(job.num_rollbacks for job in self.jobs.values())


def total(loads: Iterable[Load]) -> Load:
    pulled = pushed = 0.0
    num_bytes = 0
    for each in loads:
        pulled += each.pulled_keys_per_s
        pushed += each.pushed_keys_per_s
        num_bytes += each.bytes
    return Load(pulled, pushed, num_bytes)


decode_report = msgspec.msgpack.Decoder(Report).decode
decode_source = msgspec.msgpack.Decoder(Source).decode
decode_divisions = msgspec.msgpack.Decoder(tuple[tuple[int, int], ...]).decode
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
    load = total(status.loads.values())
    num_tables = sum(len(job.view.tables) for job in status.jobs.values())
    lines = [
        f"parameters: {len(status.addresses)} servers, {len(status.jobs)} jobs, "
        f"{len(status.ranges)} ranges, {num_tables} tables, {len(status.clocks)} workers; "
        f"{status.num_replicas} replicas, log {'on' if status.has_log else 'off'}; "
        f"{load.pulled_keys_per_s:,.0f} keys/s pulled, {load.pushed_keys_per_s:,.0f} pushed"
    ]
    if status.in_clear:
        lines.append(
            f"NOT ENCRYPTED, without certificates: {', '.join(status.in_clear[:MAX_ROWS])}"
        )
    lines += _first([_server_line(status, name) for name in sorted(status.addresses)], "servers")
    num_copies = len(status.ranges) * (status.num_replicas + 1)
    if status.ranges and num_copies < len(status.addresses):
        lines.append(
            f"{len(status.addresses) - num_copies} servers have nothing to do: the jobs were begun "
            f"with {len(status.ranges)} ranges; see scheduler.num_ranges"
        )
    lines += [
        f"range {number} waits for {f'server {holder}' if holder else 'any server'}"
        for number, holder in sorted(status.lost.items())[:MAX_ROWS]
    ]
    num_lacking: dict[int, list[int]] = {}
    for each in status.ranges:
        missing = status.num_replicas + 1 - len(each.servers)
        if each.servers and missing > 0:
            num_lacking.setdefault(missing, []).append(each.number)
    lines += [
        f"{missing} of {status.num_replicas} replicas missing: range {_listed(numbers)}"
        for missing, numbers in sorted(num_lacking.items())
    ]
    for name, job in status.jobs.items():
        lines += _job_lines(name, job)
    return lines


def _job_lines(name: str, job: JobStatus) -> list[str]:
    view, load = job.view, job.load
    lines = [
        f"job {shown(name)}: {len(view.tables)} tables, range {_listed([*_numbers(job)])}, "
        f"{len(job.clocks)} workers; clock {job.opened}; "
        f"{load.pulled_keys_per_s:,.0f} keys/s pulled, {load.pushed_keys_per_s:,.0f} pushed, "
        f"{load.bytes / 1e6:,.1f} MB"
    ]
    if job.num_rollbacks:
        to = "nothing" if view.rolled_back_to is None else f"checkpoint {view.rolled_back_to}"
        lines.append(f"  rolled back {job.num_rollbacks} times, last to {to}")
    lines += _first([_worker_line(job, name) for name in workers_of(job)], "workers")
    lines += _histogram(job.staleness)
    lines += [
        f"  data {data}: {each.num_done} of {each.num_epochs} epochs are read"
        for data, each in job.data.items()
    ]
    if job.cuts:
        lines.append(f"  checkpoints: {_listed(job.cuts)}")
    return lines


def workers_of(job: JobStatus) -> list[str]:
    """The workers of a job: those with a rank in the order of ranks, then the others."""
    ranks = job.view.ranks
    return [*ranks, *sorted(job.clocks.keys() - ranks.keys())]


def _worker_line(job: JobStatus, name: str) -> str:
    rank, clock = job.view.ranks.get(name), job.clocks.get(name)
    parts = [] if rank is None else [f"rank {rank} of {job.view.num_workers}"]
    parts.append("not in a loop" if clock is None else f"clock {clock}")
    return f"  worker {name}: {', '.join(parts)}"


def job_line(name: str, job: JobStatus) -> str:
    """A job with its size and ranks in one line; a job without a size is its name."""
    if not (size := job.view.num_workers):
        return shown(name)
    ranks = ", ".join(f"{rank} {worker}" for worker, rank in job.view.ranks.items())
    return f"{shown(name)}: {len(job.view.ranks)} of {size} workers: {ranks or 'none'}"


def shown(name: str) -> str:
    """The name of a job for people."""
    return name or "(no name)"


def _numbers(job: JobStatus) -> Iterator[int]:
    return (each.number for each in job.view.ranges)


def _server_line(status: Status, name: str) -> str:
    load = status.loads.get(name, Load())
    primary = [each.number for each in status.ranges if each.servers[:1] == (name,)]
    backup = [each.number for each in status.ranges if name in each.servers[1:]]
    learning = [each.number for each in status.ranges if name in each.learners]
    parts = [f"primary of {_listed(primary)}"]
    parts += [f"backup of {_listed(backup)}"] if backup else []
    parts += [f"is being given {_listed(learning)}"] if learning else []
    parts += ["leaving"] if name in status.leaving else []
    return (
        f"server {name} at {status.addresses[name]}: {', '.join(parts)}; "
        f"{load.pulled_keys_per_s:,.0f} keys/s pulled, {load.pushed_keys_per_s:,.0f} pushed, "
        f"{load.bytes / 1e6:,.1f} MB"
    )


def _histogram(staleness: dict[int, int]) -> list[str]:
    """Workers by the number of clocks that they are ahead of the slowest: 0, 1, 2-3, 4-7, ..."""
    bins: Counter[int] = Counter()
    for ahead, num_workers in staleness.items():
        bins[ahead.bit_length()] += num_workers
    most = max(bins.values(), default=0)
    lines = (
        ["  staleness, workers by the clocks that they are ahead of the slowest:"] if bins else []
    )
    for number, num_workers in sorted(bins.items()):
        low, high = (1 << number) >> 1, (1 << number) - 1
        label = f"{low}" if low >= high else f"{low}-{high}"
        bar = "#" * max(1, num_workers * BAR_COLUMNS // most)
        lines.append(f"    {label:>9}  {bar:{BAR_COLUMNS}}  {num_workers}")
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
