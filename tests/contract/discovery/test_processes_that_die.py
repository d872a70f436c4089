"""Members whose process is killed, or held up for longer than its lease."""

import pytest

from support.discovery import NETWORKED, Peer, Service, is_refused
from support.messaging import PATIENCE_S, until
from support.peers import PeerProcess, answer, member
from xain_membership.errors import MembershipLost, NameTaken
from xain_membership.ports import Discovery


def process(discovery: Discovery, name: str, timeout_s: float = PATIENCE_S) -> PeerProcess:
    options = {"name": name, "join_timeout_s": timeout_s, "timeout_s": PATIENCE_S}
    return PeerProcess("training", "worker", None, discovery, "in-process", options)


@pytest.mark.parametrize("kind", NETWORKED)
def test_the_entry_of_a_killed_process_expires(kind):
    """The name is refused to others, in this process and in another, as long as the process lives;
    after a kill the watchers hear of it, and the name and the rank are free."""
    with Service(kind, lease_s=3.0) as service:
        watcher = Peer(service.discovery, "anna")
        ben = process(service.discovery, "ben")
        before = ben.do(member)
        until(lambda: watcher.sees.keys() == {"anna", "ben"}, "anna to hear of ben")
        found = service.discovery
        is_refused(NameTaken, "ben", lambda time_s: process(found, "ben", time_s))
        is_refused(NameTaken, "ben", lambda time_s: Peer(found, "ben", timeout_s=time_s))
        ben.end()
        until(lambda: watcher.sees.keys() == {"anna"}, "anna to hear that ben has died")
        again = process(service.discovery, "ben")
        after = again.do(member)
        assert after.rank == before.rank == 1
        assert after.incarnation > before.incarnation
        until(lambda: watcher.sees.keys() == {"anna", "ben"}, "anna to hear of the next")
        again.end()
        assert not watcher.lost
        watcher.leave()


@pytest.mark.parametrize("meanwhile", ["nobody", "another", "another that has left"])
@pytest.mark.parametrize("kind", NETWORKED)
def test_member_that_was_taken_for_dead_is_told(kind, meanwhile):
    """A process that was held up for longer than its lease is a member again when it goes on, as
    who it was; unless another one has come under its name meanwhile: then it is told so, and the
    other keeps the name. If that has left it is the same, since peers that have heard of it do not
    listen to an older one any more."""
    with Service(kind, lease_s=3.0) as service:
        watcher = Peer(service.discovery, "anna")
        ben = process(service.discovery, "ben")
        try:
            before = ben.do(member)
            until(lambda: "ben" in watcher.sees, "anna to hear of ben")
            ben.suspend()
            until(lambda: "ben" not in watcher.sees, "ben to be taken for dead")
            if meanwhile != "nobody":
                other = Peer(service.discovery, "ben", address="elsewhere")
                if meanwhile == "another that has left":
                    other.leave()
            ben.resume()
            if meanwhile != "nobody":
                with pytest.raises(MembershipLost, match="taken for dead"):
                    ben.do(answer, 1)
                assert not other.lost
                if meanwhile == "another":
                    until(lambda: watcher.sees.get("ben") == "elsewhere", "anna to know it")
                    other.leave()
            else:
                until(lambda: "ben" in watcher.sees, "ben to be back")
                assert watcher.rosters[-1]["ben"] == ben.do(member) == before
        finally:
            ben.end()
            watcher.leave()
