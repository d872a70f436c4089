"""Operations that all members of a group take part in, each with an array of its own.

    group = proxy.group("worker")                   # all of the role who are here, by rank
    group = proxy.group("layer 2", ["gpu-1", "gpu-7"])
    total = group.all_reduce(gradient)              # the same bits at every member

Every member calls the same operations of a group in the same order, with arrays of the same shape
and dtype; of broadcast() and scatter() the root alone gives arrays. What comes out is numpy, and
the caller's own. Sums and products are of the dtype that came in, in the machine's byte order:
small integers overflow as they do in numpy. A call with wrong arguments counts: it fails at all
members, and the next one works.

A group is of processes, not of names: when one has gone, or has come back as another, it is of no
more use, and those who are there make a new one. One that leaves when it has its result does no
harm to the operation that the result is of. An operation ends at every member, with its result or
with CollectiveFailed, within its time: whoever waits for a member that is gone, or has no more
time, tells the others. Some may have their result by then.

For a moment some may know of one that has come or gone, and others not yet, so that their groups of
one name have other members. A member that waits for a part for more than LOOK_S says so to the
member that owes it; if that one is at work in a group of that name with other members, both
operations fail. So two groups of one name that share two members are not for use at the same time.

A group is for one thread at a time. A second one that calls an operation meanwhile is refused, and
that call does not count: if those of the other members do, they are one ahead from then on.

Small arrays go along a binomial tree, which takes the fewest steps; large ones around a ring, in as
many parts as there are members, so that every connection carries as little as possible (Thakur,
Rabenseifner and Gropp 2005, Optimization of Collective Communication Operations in MPICH). In both
the order of a reduction depends on the ranks alone.
"""

from xain_messaging.collectives.group import Collectives, Group, Operator

__all__ = ["Collectives", "Group", "Operator"]
