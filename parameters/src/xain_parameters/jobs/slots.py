"""The slots of workers in the group of a job: a rank each, kept under the name of the worker."""

from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

NO_RANK: Final = -1


class Slot(msgspec.Struct, frozen=True):
    """The slot of a worker that gave the size of its group.

    rank: from 0 on; NO_RANK: all ranks are taken, and the worker waits for one.
    incarnation: of the process that has the slot.
    is_gone: that process has been no member for a lease; the rank waits for its next process.
    """

    rank: int
    incarnation: int
    is_gone: bool = False


Slots: TypeAlias = dict[str, Slot]


def with_entered(
    slots: Slots,
    size: int,
    name: str,
    incarnation: int,
    wanted: int = NO_RANK,
    *,
    may_replace: bool,
) -> Slots:
    """The slots after a worker has come, or has come back. It has its former rank, or else the one
    that it wants, or the lowest that no worker has.

    may_replace: where all are taken, a worker that is gone loses its own.
    """
    taken = {slot.rank for slot in slots.values()}
    first = wanted if 0 <= wanted < size and wanted not in taken else NO_RANK
    known = slots.get(name, Slot(first, incarnation))
    came = replace(known, incarnation=incarnation, is_gone=False)
    return _with_given({**slots, name: came}, size, may_replace=may_replace)


def with_gone(slots: Slots, size: int, name: str, *, may_replace: bool) -> Slots:
    """The slots after a worker has been no member for a lease."""
    gone = replace(slots[name], is_gone=True)
    if gone.rank == NO_RANK:
        return {other: slot for other, slot in slots.items() if other != name}
    return _with_given({**slots, name: gone}, size, may_replace=may_replace)


def ranked_anew(slots: Slots) -> Slots:
    """The slots of the workers that are there, with ranks from 0 on without a gap: in the order of
    their former ranks, and then those that waited for one."""
    here = [(name, slot) for name, slot in slots.items() if not slot.is_gone]
    here.sort(key=lambda item: item[1].rank if item[1].rank != NO_RANK else len(slots) + 1)
    return {name: replace(slot, rank=rank) for rank, (name, slot) in enumerate(here)}


def ranks_of(slots: Mapping[str, Slot]) -> dict[str, int]:
    """The rank of each worker that is there and has one, in their order."""
    here = {n: p.rank for n, p in slots.items() if not p.is_gone and p.rank != NO_RANK}
    return dict(sorted(here.items(), key=lambda item: item[1]))


def _with_given(slots: Slots, size: int, *, may_replace: bool) -> Slots:
    """Give ranks to the workers that wait for one, in the order in which they came."""
    for name, slot in list(slots.items()):
        if slot.rank != NO_RANK:
            continue
        owners = {other.rank: owner for owner, other in slots.items()}
        free = [rank for rank in range(size) if rank not in owners]
        if not free and may_replace:
            free = [rank for rank in range(size) if slots[owners[rank]].is_gone]
        if not free:
            break
        slots = {n: p for n, p in slots.items() if p.rank != free[0]}
        slots[name] = replace(slot, rank=free[0])
    return slots
