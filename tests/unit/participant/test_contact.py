"""When a participant calls its coordinator: at first, while it is heard, and while it is not."""

from collections.abc import Iterator

import pytest

from support.talk import CONTACT, JOINED, TRAINING, Talk, refused, told
from xain_participant.agent.protocol import MAX_RECONNECT_S, MIN_BACKOFF_S, RETRY_JITTER
from xain_participant.sdk import actions as a
from xain_participant.sdk import events as e
from xain_participant.sdk.values import Call, State, Timer


@pytest.fixture
def joined() -> Talk:
    return Talk(*JOINED)


def test_protocol_begins_with_a_rendezvous():
    talk = Talk(e.Started())
    assert talk.timers == {Timer.CONTACT: 0.0}
    assert talk.hear(CONTACT) == [a.Rendezvous()]


def test_accepted_participant_watches_and_sends_a_heartbeat_at_once():
    talk = Talk()
    assert talk.hear(e.Started(), e.Joined("s1", 5.0)) == [a.StartWatch()]
    assert talk.timers[Timer.CONTACT] == 0.0
    assert talk.hear(CONTACT) == [a.SendHeartbeat(training=False, round=-1)]
    assert talk.timers[Timer.CONTACT] <= 5.0


def test_heartbeats_go_on_while_training():
    assert Talk(*TRAINING).hear(CONTACT) == [a.SendHeartbeat(training=True, round=3)]


@pytest.mark.parametrize(("given_s", "every_s"), [(0.0, 10.0), (5.0, 5.0)])
def test_heartbeats_of_participants_that_join_together_come_apart(given_s, every_s):
    """The first heartbeat comes at any moment of the interval, and never later: the coordinator
    would otherwise have everything to do at once. Without an interval it is that of XAIN."""
    firsts = []
    for seed in range(1000):
        talk = Talk(e.Started(), e.Joined("s1", given_s), CONTACT, seed=seed)
        firsts.append(talk.timers[Timer.CONTACT])
        talk.hear(CONTACT)
        assert 0.75 * every_s <= talk.timers[Timer.CONTACT] <= every_s
    tenths = [int(10 * first / every_s) for first in firsts]
    assert max(tenths.count(tenth) for tenth in range(10)) < 150
    assert max(firsts) <= every_s


def test_later_waits_as_long_as_the_coordinator_suggests():
    """A little longer, by chance: others may have been told the same. Without a suggestion the
    participant backs off."""
    waits = set()
    for seed in range(100):
        talk = Talk(e.Started(), e.AskedToWait(15.0), seed=seed)
        waits.add(talk.timers[Timer.CONTACT])
        assert talk.hear(CONTACT) == [a.Rendezvous()]
    assert len(waits) > 50
    assert 15.0 <= min(waits) <= max(waits) <= 15.0 * (1 + RETRY_JITTER)
    assert 0 < Talk(e.Started(), e.AskedToWait(0.0)).timers[Timer.CONTACT] <= 0.2


def test_absent_coordinator_is_asked_again_for_ever_but_ever_more_seldom():
    """Full jitter below a ceiling that doubles from 0.2 s to 10 s."""
    talk = Talk(e.Started())
    for n in range(200):
        assert talk.hear(CONTACT) == [a.Rendezvous()]
        assert talk.hear(refused(Call.RENDEZVOUS)) == []
        assert 0 <= talk.timers[Timer.CONTACT] <= min(10.0, 0.2 * 2**n)
    assert talk.timers[Timer.CONTACT] > 0


def test_watch_does_not_replace_heartbeats(joined):
    """Only heartbeats renew the lease, so what a stream says must not put them off."""
    joined.hear(CONTACT)
    joined.timers.clear()
    joined.hear(told(0, State.STANDBY))
    assert Timer.CONTACT not in joined.timers


def pauses_after_loss(spread_s: float, interval_s: float = 10.0) -> Iterator[float]:
    """Seconds that each of many participants waits before it connects again."""
    for seed in range(1000):
        talk = Talk(e.Started(), e.Joined("s1", interval_s, spread_s), seed=seed)
        assert talk.hear(e.ConnectionLost()) == []
        yield talk.timers[Timer.CONTACT]


def test_fleet_comes_back_spread_over_the_time_that_the_coordinator_asks_for():
    """All hear at the same instant that the connection is lost; no second gets more than its share
    of them. Few come back at once, and no wait outlasts the lease."""
    seconds = [int(pause) for pause in pauses_after_loss(4.0)]
    assert set(seconds) == {0, 1, 2, 3}
    assert max(map(seconds.count, range(4))) < 300
    assert max(pauses_after_loss(0.0)) <= 0.2
    assert max(pauses_after_loss(3600.0, 5.0)) <= 5.0


@pytest.mark.parametrize("is_away", [False, True])
def test_heartbeats_tell_when_the_fleet_has_grown(joined, is_away):
    """The Watch stream does not, and changes nothing. Attempts that fail are spread as well, from
    the first one on: the coordinator is away for all of them."""
    joined.hear(told(0, State.STANDBY, reconnect_spread_s=4.0), told(0, State.STANDBY))
    pauses = []
    for _ in range(50):
        joined.hear(e.ConnectionLost(), *([refused(Call.HEARTBEAT)] if is_away else []))
        pauses.append(joined.timers[Timer.CONTACT])
        joined.hear(told(0, State.STANDBY))  # so that it is the first attempt each time
    assert 2.0 < max(pauses) <= 4.0


def test_member_looks_for_its_coordinator_every_other_second(joined):
    """However long it was away: it is found as soon as it is back, before the lease is over. An
    answer makes the next pause short again."""
    for _ in range(20):
        joined.hear(CONTACT, refused(Call.HEARTBEAT, status="DEADLINE_EXCEEDED"))
        assert joined.timers[Timer.CONTACT] <= MAX_RECONNECT_S
    joined.hear(told(3, State.STANDBY), refused(Call.HEARTBEAT))
    assert joined.timers[Timer.CONTACT] <= MIN_BACKOFF_S


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("PROFILE_MISMATCH", "INVALID_ARGUMENT"),
        ("INVALID_NAME", "INVALID_ARGUMENT"),
        ("INVALID_TAGS", "INVALID_ARGUMENT"),
        ("OF_A_NEWER_COORDINATOR", "UNAUTHENTICATED"),
    ],
)
def test_rendezvous_refused_for_good_ends_with_the_message(reason, status):
    talk = Talk(e.Started(), CONTACT)
    ends = [a.Leave(), a.Exit(1, "because")]
    assert talk.hear(refused(Call.RENDEZVOUS, reason, status)) == ends


@pytest.mark.parametrize("call", [Call.HEARTBEAT, Call.BEGIN_ROUND, Call.TRAIN, Call.HAND_IN])
@pytest.mark.parametrize("reason", ["NOT_A_MEMBER", ""])
def test_expired_participant_joins_again_after_any_refused_call(call, reason):
    before = {Call.TRAIN: [e.Assigned(3)], Call.HAND_IN: [e.Assigned(3), e.Trained(3)]}
    talk = Talk(*JOINED, told(3), *before.get(call, []))
    assert talk.hear(refused(call, reason, "PERMISSION_DENIED")) == []
    assert talk.timers[Timer.CONTACT] <= 0.2
    assert talk.hear(CONTACT) == [a.Rendezvous()]
