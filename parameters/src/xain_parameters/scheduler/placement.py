"""The placement of key ranges on servers.

One step at a time, until nothing follows: ranges lose the servers that are gone, ranges without a
server get one, ranges with too few get learners, and ranges move from servers that have many to
servers that have few. The key space does not change hands anywhere else. Servers are balanced over
the ranges of all jobs.
"""

from collections import Counter

from xain_parameters.scheduler.state import (
    AnyEvent,
    RangeLost,
    RangeReconfigured,
    RangesMade,
    RolledBack,
    State,
)
from xain_parameters.specs import RangeView, job_of

# A range is never divided, so servers that join later get ranges only while there are enough. Each
# costs time with every pull and push. See docs/decisions/0030-number-of-key-ranges.md.
MIN_RANGES = 8
RANGES_PER_SERVER = 2
MAX_RANGES = 4096  # of a job


def next_placement(state: State) -> AnyEvent | None:
    """Return the next change of the placement; None: it is right, or waits for learners."""
    steps = (
        _drop_gone,
        _roll_back,
        _make_ranges,
        _add_first_server,
        _remove_leaving,
        _add_learner,
        _balance_ranges,
        _balance_primaries,
    )
    return next((event for step in steps if (event := step(state)) is not None), None)


def _reconfigure(
    state: State,
    each: RangeView,
    servers: tuple[str, ...],
    learners: tuple[str, ...] = (),
    leaves: str = "",
) -> RangeReconfigured:
    name = state.names[job_of(each.number)]
    return RangeReconfigured(each.number, servers, learners, leaves, job=name)


def with_whole(state: State, each: RangeView, learner: str) -> RangeReconfigured:
    """Make a learner that has everything a server of the range: it replaces the server that leaves
    the range, or is added. If it is primary of fewer ranges than the primary here, it becomes the
    primary."""
    leaves = _leaves(state).get(each.number, "")
    learners = tuple(name for name in each.learners if name != learner)
    if leaves in each.servers:
        servers = tuple(learner if name == leaves else name for name in each.servers)
        return _reconfigure(state, each, servers, learners)
    primaries = _primaries(state)
    if primaries[learner] + 2 <= primaries[each.servers[0]]:
        return _reconfigure(state, each, (learner, *each.servers), learners)
    return _reconfigure(state, each, (*each.servers, learner), learners)


def _drop_gone(state: State) -> AnyEvent | None:
    """Take servers that are gone out of a range; a range without servers is lost."""
    live = {name for name, server in state.servers.items() if server.is_live}
    targets = set(state.placeable)
    for each in state.ranges:
        servers = tuple(name for name in each.servers if name in live)
        learners = tuple(name for name in each.learners if name in targets)
        if (servers, learners) == (each.servers, each.learners):
            continue
        if not servers:
            # The last server in the view: only it is sure to have all that was acknowledged.
            holder = each.servers[0] if state.settings.has_log else ""
            return RangeLost(each.number, holder, job=state.names[job_of(each.number)])
        leaves = _leaves(state).get(each.number, "")
        leaves = leaves if learners and leaves in servers else ""
        return _reconfigure(state, each, servers, learners, leaves)
    return None


def _roll_back(state: State) -> AnyEvent | None:
    """Roll back a job with a lost range that waits for no server."""
    for name, job in state.jobs.items() if state.placeable else ():
        if any(not holder for holder in job.lost.values()):
            return RolledBack(job=name)
    return None


def _make_ranges(state: State) -> AnyEvent | None:
    servers = state.placeable
    for name, job in state.jobs.items() if servers else ():
        if job.tables and not job.ranges:
            per_server = max(RANGES_PER_SERVER, -(-MIN_RANGES // len(servers)))
            num_ranges = state.settings.num_ranges or per_server * len(servers)
            return RangesMade(min(num_ranges, MAX_RANGES), job=name)
    return None


def _add_first_server(state: State) -> AnyEvent | None:
    """Give a first server to a range that is new, or that was lost and rolled back. The range is
    empty there, or is loaded from the checkpoint."""
    lost = {number for job in state.jobs.values() for number in job.lost}
    for each in state.ranges:
        if not each.servers and each.number not in lost and state.placeable:
            primaries = _primaries(state)
            name = min(state.placeable, key=lambda name: (primaries[name], name))
            return _reconfigure(state, each, (name,))
    return None


def _remove_leaving(state: State) -> AnyEvent | None:
    """Take a leaving server out of a range at once where no other server can replace it."""
    for each in state.ranges:
        staying = tuple(name for name in each.servers if not state.servers[name].is_leaving)
        if staying == each.servers or not staying or each.learners:
            continue
        if len(staying) >= _num_wanted(state) or not _candidates(state, each):
            return _reconfigure(state, each, staying)
    return None


def _add_learner(state: State) -> AnyEvent | None:
    """Begin a learner for a range that has too few servers, or whose server leaves; ranges with the
    fewest servers come first."""
    if not _has_room(state):
        return None
    for each in sorted(state.ranges, key=lambda each: len(each.servers)):
        leaving = [name for name in each.servers if state.servers[name].is_leaving]
        staying = len(each.servers) - len(leaving)
        if not each.servers or each.learners or staying >= _num_wanted(state):
            continue
        if learners := _candidates(state, each):
            leaves = leaving[0] if leaving else ""
            return _reconfigure(state, each, each.servers, (learners[0],), leaves)
    return None


def _balance_ranges(state: State) -> AnyEvent | None:
    """Move a range from the server with the most to that with the fewest; where none has two more
    than another, drop what settings no longer ask for."""
    for each in state.ranges:
        if len(each.servers) > state.settings.num_replicas + 1 and not each.learners:
            return _reconfigure(state, each, each.servers[:-1])
    servers = state.placeable
    if len(servers) < 2 or not _has_room(state):
        return None
    copies, primaries = _copies(state), _primaries(state)
    most = max(servers, key=lambda name: (copies[name], primaries[name], name))
    least = min(servers, key=lambda name: (copies[name], primaries[name], name))
    if copies[most] - copies[least] < 2:
        return None
    movable = [
        each
        for each in state.ranges
        if most in each.servers and least not in each.servers and not each.learners
    ]
    if not movable:
        return None
    prefers_primary = primaries[most] > primaries[least]
    each = min(movable, key=lambda each: (each.servers[0] == most) != prefers_primary)
    return _reconfigure(state, each, each.servers, (least,), most)


def _balance_primaries(state: State) -> AnyEvent | None:
    """If nothing else is to be done, make a backup the primary instead of a server that is primary
    of two ranges more. The backup has everything that was acknowledged, as after a death.

    If the two have no range in common, a third server hands a range on and gets another.
    """
    if any(each.learners for each in state.ranges):
        return None
    primaries = _primaries(state)
    for source in sorted(state.placeable, key=lambda name: (-primaries[name], name)):
        came_by: dict[str, RangeView | None] = {source: None}
        for name in (reached := [source]):  # breadth first; it grows meanwhile
            way = came_by[name]
            if way is not None and primaries[name] + 2 <= primaries[source]:
                others = tuple(other for other in way.servers if other != name)
                return _reconfigure(state, way, (name, *others))
            for each in state.ranges:
                if each.servers and each.servers[0] == name:
                    for backup in each.servers[1:]:
                        if backup not in came_by and not state.servers[backup].is_leaving:
                            came_by[backup] = each
                            reached.append(backup)
    return None


def _num_wanted(state: State) -> int:
    """The number of servers that a range should have."""
    return min(state.settings.num_replicas + 1, max(1, len(state.placeable)))


def _has_room(state: State) -> bool:
    return sum(len(each.learners) for each in state.ranges) < state.settings.max_learners


def _candidates(state: State, each: RangeView) -> list[str]:
    """Servers that may become a learner of a range, the least loaded first."""
    copies = _copies(state)
    return sorted(
        (name for name in state.placeable if name not in each.servers),
        key=lambda name: (copies[name], name),
    )


def _copies(state: State) -> Counter[str]:
    """The number of ranges that each server has, or will have when all learners are whole."""
    copies = Counter(name for each in state.ranges for name in (*each.servers, *each.learners))
    copies.subtract(_leaves(state).values())
    return copies


def _leaves(state: State) -> dict[int, str]:
    return {number: name for job in state.jobs.values() for number, name in job.leaves.items()}


def _primaries(state: State) -> Counter[str]:
    return Counter(each.servers[0] for each in state.ranges if each.servers)
