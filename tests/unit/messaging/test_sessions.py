"""What is forgotten of too many open sessions, and what is not."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from xain_messaging.messages import SessionMessage, SessionType
from xain_messaging.sessions import Sessions

STEPS = st.sampled_from(["opened", "closed", "forgotten"])


def task(peer: str) -> SessionMessage:
    return SessionMessage("t", "a", peer)


def opened(sessions: Sessions, peer: str, number: int) -> list[SessionMessage]:
    tasks = [task(peer) for _ in range(number)]
    for one in tasks:
        sessions.send(one)
    return tasks


def test_one_too_many_costs_the_busiest_peer_one() -> None:
    """Its oldest, and no more of it."""
    sessions = Sessions(max_tasks=1000)
    of_b = opened(sessions, "b", 999)
    opened(sessions, "c", 2)
    assert [sessions.received(one.reply()) for one in of_b] == [False] + 998 * [True]


def test_who_has_nothing_open_has_no_share() -> None:
    """However many peers have been asked before: one that is alone may have all."""
    sessions = Sessions(max_tasks=10)
    for i in range(100):
        (done,) = opened(sessions, f"done-{i}", 1)
        assert sessions.received(done.reply())
    of_c = opened(sessions, "c", 4)
    of_b = opened(sessions, "b", 6)
    opened(sessions, "c", 1)  # its share is 5
    assert [sessions.received(one.reply()) for one in of_c] == 4 * [True]
    assert [sessions.received(one.reply()) for one in of_b] == [False] + 5 * [True]


def test_those_who_have_most_lose_in_turn() -> None:
    """Until each has its share; what was open at one before does not count."""
    sessions = Sessions(max_tasks=8)
    tasks = {
        peer: opened(sessions, peer, number) for peer, number in [("b", 5), ("c", 4), ("d", 2)]
    }
    left = [sum(sessions.received(one.reply()) for one in asked) for asked in tasks.values()]
    assert left == [3, 3, 2]


@given(
    most=st.integers(1, 6),
    steps=st.lists(
        st.tuples(st.sampled_from(["opened", "closed", "forgotten"]), st.integers(0, 4))
    ),
)
def test_it_is_as_if_all_were_looked_at(most: int, steps: list[tuple[str, int]]) -> None:
    """Whoever has most is found without that, whoever has come and gone."""
    sessions = Sessions(max_tasks=most)
    peers: dict[str, deque[SessionMessage]] = {}
    for step, number in steps:
        peer = f"peer-{number}"
        if step == "opened":
            peers.setdefault(peer, deque()).extend(opened(sessions, peer, 1))
            if sum(map(len, peers.values())) > most:
                is_over = len(peers[peer]) > most // len(peers)
                largest = max(map(len, peers.values()))
                may_lose = [name for name in peers if len(peers[name]) == largest]
                table = sessions._asked[SessionType.TASK]
                (loses,) = [
                    name
                    for name in ([peer] if is_over else may_lose)
                    if table.get(name, peers[name][0].session_id) is None
                ]
                peers[loses].popleft()
        elif step == "closed" and peer in peers:
            assert sessions.received(peers[peer].popleft().reply())
        elif step == "forgotten":
            sessions.forget(peer)
            peers.pop(peer, None)
        peers = {name: open_ones for name, open_ones in peers.items() if open_ones}
    for open_ones in peers.values():
        assert all(sessions.received(one.reply()) for one in open_ones)
