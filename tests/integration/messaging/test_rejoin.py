"""Three workers, of whom one goes and comes back under its name: on every driver and discovery."""

from collections.abc import Callable

from integration.messaging.conftest import Group
from support.messaging import until
from support.peers import LocalPeer, Peer, answer, member
from xain_messaging.format.messages import Message, SessionType
from xain_messaging.proxy import Proxy

NAMES = ("w-1", "w-2", "w-3")
NOTES = ["a", "b", "c", "d", "e"]


def scattered(master: Proxy, bodies: list[tuple[str, int]], peers: list[Peer]) -> list[str]:
    """The sessions of a scatter that is answered by those of the workers who are here."""
    sessions = master.iscatter("double", SessionType.TASK, bodies)
    for peer in peers:
        peer.do(answer, 1)
    return sessions


def goes_and_comes_back(group: Group, start: Callable[..., Peer]) -> None:
    """start: makes the third worker."""
    master = group("master", name="master")
    first, second = (LocalPeer(group("worker", {"master": 1}, name=name)) for name in NAMES[:2])
    third = start("worker", {"master": 1}, name="w-3")
    until(lambda: len(master.peers.get("worker", [])) == 3, "the workers")
    before = third.do(member)
    bodies = [(name, i) for i, name in enumerate(NAMES, 1)]
    sessions = scattered(master, bodies, [first, second, third])
    replies = master.receive_by_id(sessions).complete()
    assert sorted((reply.source, reply.body) for reply in replies) == [
        ("w-1", 2),
        ("w-2", 4),
        ("w-3", 6),
    ]
    # These come to it, or do not, but it never takes them.
    for note in NOTES:
        master.isend(Message("note", "master", "w-3", note))
    third.end()
    until(lambda: "w-3" not in master.peers["worker"], "the third to be gone")

    pending = []
    for number in (10, 20):
        bodies = [(name, number + i) for i, name in enumerate(NAMES, 1)]
        *sessions, of_third = scattered(master, bodies, [first, second])
        replies = master.receive_by_id(sessions).complete()
        assert sorted(reply.body for reply in replies) == [2 * number + 2, 2 * number + 4]
        assert master.receive_by_id(of_third, 0.05).missing == ("w-3",)
        pending.append(of_third)

    back = start("worker", {"master": 1}, name="w-3")
    after = back.do(member)
    assert (after.name, after.rank) == (before.name, before.rank)
    assert after.address != before.address
    assert after.incarnation > before.incarnation
    assert back.do(answer, len(NOTES) + 2) == [*NOTES, 13, 23]
    late = master.receive_by_id(pending).complete()
    assert [(reply.source, reply.body) for reply in late] == [("w-3", 26), ("w-3", 46)]

    bodies = [(name, 30 + i) for i, name in enumerate(NAMES, 1)]
    sessions = scattered(master, bodies, [first, second, back])
    assert len(master.receive_by_id(sessions).complete()) == 3
    assert back.do(answer, 1, 0.1) == []
    assert master.receive_once(0.1) is None


def test_the_reply_of_a_worker_that_comes_back_is_not_lost(group_anywhere):
    """The worker leaves; both messages scattered to it are kept with those that it had not taken,
    and come in order and once when it is back, wherever it is now. Both scatters are answered."""
    goes_and_comes_back(
        group_anywhere, lambda *who, **options: LocalPeer(group_anywhere(*who, **options))
    )


def test_the_reply_of_a_worker_that_is_killed_is_not_lost(group_of_processes):
    """The same after SIGKILL of its process, which can say nothing to anybody."""
    goes_and_comes_back(group_of_processes, group_of_processes.process)
