"""What servers report to the scheduler, and what the scheduler reports to an operator."""

from typing import Any

import msgspec

from xain_parameters.specs import View


class Whole(msgspec.Struct, frozen=True):
    """A learner has everything; see commands.LearnerWhole."""

    range: int
    epoch: int
    server: str


class Saved(msgspec.Struct, frozen=True):
    """A part of a checkpoint is written; see commands.RangeSaved."""

    generation: int
    cut: int
    range: int
    path: str
    clocks: dict[str, int] = {}


class Load(msgspec.Struct, frozen=True):
    """What a server does at the moment, for status: keys (rows) a second, and bytes that it has."""

    pulled_keys_per_s: float = 0.0
    pushed_keys_per_s: float = 0.0
    bytes: int = 0


class Returned(msgspec.Struct, frozen=True):
    """Which of the ranges without a server this one has; see commands.ServerReturned."""

    generation: int
    has: dict[int, int]
    lacks: dict[int, int]


class Report(msgspec.Struct, frozen=True):
    """A server tells what it has done since it last did. All of it may be told again."""

    wholes: tuple[Whole, ...] = ()
    saved: tuple[Saved, ...] = ()
    returned: Returned | None = None
    is_leaving: bool = False
    load: Load | None = None


class Status(msgspec.Struct, frozen=True):
    """What `status` shows.

    clocks: that each live worker has completed. staleness: number of workers by how many clocks
    they are ahead of the slowest. loads: by server, as last reported. lost: by range without a
    server, the server whose log is awaited. cuts: numbers of the whole checkpoints.
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


def lines_of(status: Status) -> list[str]:
    """For people."""
    view = status.view
    lines = [
        f"parameters: {len(view.addresses)} servers, {len(view.ranges)} ranges, "
        f"{len(view.tables)} tables, {len(status.clocks)} workers; clock {status.opened}, "
        f"{view.num_replicas} replicas, log {'on' if view.has_log else 'off'}"
    ]
    if status.num_rollbacks:
        to = "nothing" if view.rolled_back_to is None else f"checkpoint {view.rolled_back_to}"
        lines.append(f"rolled back {status.num_rollbacks} times, last to {to}")
    for name, address in sorted(view.addresses.items()):
        load = status.loads.get(name, Load())
        primary = [each.number for each in view.ranges if each.servers[:1] == (name,)]
        backup = [each.number for each in view.ranges if name in each.servers[1:]]
        learning = [each.number for each in view.ranges if name in each.learners]
        parts = [f"primary of {_listed(primary)}"]
        parts += [f"backup of {_listed(backup)}"] if backup else []
        parts += [f"is being given {_listed(learning)}"] if learning else []
        parts += ["leaving"] if name in status.leaving else []
        lines.append(
            f"server {name} at {address}: {', '.join(parts)}; "
            f"{load.pulled_keys_per_s:,.0f} keys/s pulled, {load.pushed_keys_per_s:,.0f} pushed, "
            f"{load.bytes / 1e6:,.1f} MB"
        )
    for number, holder in sorted(status.lost.items()):
        lines.append(f"range {number} waits for {f'server {holder}' if holder else 'any server'}")
    for each in view.ranges:
        missing = view.num_replicas + 1 - len(each.servers)
        if each.servers and missing > 0:
            lines.append(f"range {each.number} lacks {missing} of {view.num_replicas} replicas")
    for name, clock in sorted(status.clocks.items()):
        lines.append(f"worker {name}: clock {clock}")
    if status.staleness:
        ahead = ", ".join(f"{n} by {ahead}" for ahead, n in sorted(status.staleness.items()))
        lines.append(f"ahead of the slowest worker: {ahead}")
    if status.cuts:
        lines.append(f"checkpoints: {_listed(status.cuts)}")
    return lines


def _listed(numbers: Any) -> str:
    return ", ".join(map(str, numbers)) or "nothing"
