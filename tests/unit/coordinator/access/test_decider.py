"""Commands to access control in, events out."""

import pytest

from support.refusals import refused_as
from xain_coordinator.access import commands as c
from xain_coordinator.access import events as e
from xain_coordinator.access.decider import MAX_VALID, SERIALS_A_LINE, decide, made_by
from xain_coordinator.access.errors import Unauthenticated
from xain_coordinator.access.evolve import evolve
from xain_coordinator.access.values import Access, entries_of
from xain_foundation.security.identity import Role

NOW = 1_800_000_000.25
DAY = 86_400.0
TOKEN, FIRST, SECOND = "70", "c1", "c2"


class Bench:
    """State of access control at a time that tests set."""

    def __init__(self) -> None:
        self.access, self.now = Access(), NOW
        self.events: list[e.Event] = []

    def do(self, command: c.Command) -> tuple[e.Event, ...]:
        events = decide(self.access, command, self.now)
        for event in events:
            self.access = evolve(self.access, event)
        self.events += events
        return events

    def token(self, serial: str = TOKEN, name: str = "ward-7", **options: bool) -> None:
        self.do(c.CreateToken(serial, name, "participant", DAY, "alice", **options))

    def join(self, serial: str, key: str, token: str = TOKEN, peer: str = "10.0.0.1"):
        return self.do(c.Join(serial, token, key, peer, 90 * DAY, "joining"))

    def renew(self, serial: str, certificate: str, key: str):
        return self.do(c.Renew(serial, certificate, key, 90 * DAY, "ward-7"))

    def revoke(self, which: str):
        return self.do(c.Revoke(which, "alice"))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_token_gives_its_own_name_and_role(bench):
    """Name and role of a certificate are those of the token, not of the request."""
    bench.token()
    (issued,) = bench.join(FIRST, "key")
    assert issued == e.CertificateIssued(
        at=NOW,
        by="joining",
        serial=FIRST,
        name="ward-7",
        role=Role.PARTICIPANT,
        expires_at=1_800_000_001.0 + 90 * DAY,
        key_digest="key",
        basis=TOKEN,
        peer="10.0.0.1",
    )


def test_unknown_token_is_refused(bench):
    with pytest.raises(Unauthenticated, match="no token with the serial number 70"):
        bench.join(FIRST, "key")


def test_expired_and_foreign_certificates_are_not_renewed(bench):
    bench.token()
    bench.join(FIRST, "key")
    bench.now += 91 * DAY
    with pytest.raises(Unauthenticated, match="tokens create"):
        bench.renew(SECOND, FIRST, "new")
    with pytest.raises(Unauthenticated, match="not issued here"):
        bench.renew(SECOND, "ffff", "new")


def test_coordinator_renews_its_own_certificate_itself(bench):
    bench.do(c.IssueOwn(FIRST, "key", ("localhost",), DAY, "coordinator"))
    with refused_as("NOT_PERMITTED"):
        bench.renew(SECOND, FIRST, "new")


@pytest.mark.parametrize("which", ["0A:BC", "abc", SECOND, "c3"])
def test_revocation_of_a_serial_takes_all_of_its_renewals(bench, which):
    """Certificates before and after it go, since the one before could be renewed again. The token
    stays, which others may hold too, and so does another certificate of the name. A serial number
    counts as openssl writes it, too."""
    bench.token()
    bench.join("abc", "key")
    bench.renew(SECOND, "abc", "new")
    bench.renew("c3", SECOND, "newer")
    bench.renew("c4", "abc", "beside it")
    bench.do(c.Sign("d0", "ward-7", "participant", "key", DAY, "alice"))
    (revoked,) = bench.revoke(which)
    assert revoked.serials == ("abc", SECOND, "c3", "c4")
    with pytest.raises(Unauthenticated):  # the same certificate is not given out again
        bench.join("c5", "key")


@pytest.mark.parametrize(
    ("which", "serial"),
    [
        ("7A:9B:00:11:22:33:44:55:66", "7a9b00112233445566"),
        ("00ff00ff00ff00ff", "ff00ff00ff00ff"),
        ("0x1000", "1000"),
    ],
)
def test_certificate_of_another_authority_is_revoked_by_its_serial_number(bench, which, serial):
    (revoked,) = bench.revoke(which)
    assert revoked.serials == (serial,)
    assert bench.revoke(which) == (), "it can be repeated"
    (listed,) = entries_of(bench.access)
    assert (listed.serial, listed.kind, listed.revoked) == (serial, "foreign", True)


@pytest.mark.parametrize("which", ["1000", "ada", "0x", "0000000000000000", "f" * 41, "ward-7"])
def test_short_or_invalid_serial_number_is_not_taken_for_a_foreign_one(bench, which):
    with refused_as("UNKNOWN_CERTIFICATE"):
        bench.revoke(which)


def test_names_that_a_revoked_operator_has_made_are_known(bench):
    """Also when their tokens were exchanged; not what has expired, is revoked, or is another's."""
    bench.do(c.Sign(FIRST, "alice", "operator", "key", DAY, "operator 'root'"))
    alice = "operator 'alice'"
    for number, name in enumerate(("mallory", "eve", "gone", "old")):
        bench.do(c.CreateToken(f"7{number}", name, "participant", DAY, alice))
    bench.join("d0", "key", token="70")
    bench.do(c.CreateBearer("b1", "page", "observer", 3 * DAY, alice, "digest"))
    bench.do(c.Sign("d1", "bobs", "participant", "key", 3 * DAY, "operator 'bob'"))
    for name in ("gone", "alice"):
        bench.revoke(name)
    assert made_by(bench.access, [FIRST], bench.now) == ["eve", "mallory", "old", "page"]
    bench.now += 2 * DAY
    assert made_by(bench.access, [FIRST], bench.now) == ["mallory", "page"]
    assert made_by(bench.access, ["d0", "d1"], bench.now) == []


def test_revocation_takes_the_beginning_of_a_serial(bench):
    """Lists show the beginning alone; one that two have is refused, and so is a short one."""
    first, second = "aaaabbbbccc1", "aaaabbbbccc2"
    bench.token(first)
    bench.token(second, "ward-8")
    with refused_as("UNKNOWN_CERTIFICATE", match=f"2 serial numbers begin .*{first}, {second}"):
        bench.revoke("AAAABBBB")
    with refused_as("UNKNOWN_CERTIFICATE", match="nothing was issued"):
        bench.revoke("aaaabbb")
    bench.token("aaaaddddeee3")
    (revoked,) = bench.revoke("aaaadddd")
    assert revoked.serials == ("aaaaddddeee3",)


def test_revocation_of_many_serials_is_many_lines(bench):
    """No line of the audit log gets longer than a reader takes."""
    for number in range(SERIALS_A_LINE + 1):
        bench.now += 2 * DAY  # the one before has expired
        bench.token(f"{number:x}")
    events = bench.revoke("ward-7")
    assert [len(event.serials) for event in events] == [SERIALS_A_LINE, 1]


def test_no_name_fills_the_audit_log(bench):
    """A site that renews without end is refused; its certificates that have expired count no
    more."""
    bench.token()
    bench.join("c0", "k0")
    for number in range(1, MAX_VALID - 1):
        bench.renew(f"c{number}", f"c{number - 1}", f"k{number}")
    with refused_as("NOT_PERMITTED", match=f"{MAX_VALID} valid certificates"):
        bench.renew("last", "c0", "last")
    bench.now += DAY + 2  # of the token
    assert bench.renew("last", "c0", "last")


WRONG_ROLE = "the roles are participant, observer"


@pytest.mark.parametrize(
    ("name", "role", "told"),
    [
        *[("x", role, WRONG_ROLE) for role in ("joining", "coordinator", "king", "")],
        *[(name, "node", "cannot be a name") for name in ("", "a/b", "global", "ä", "x" * 129)],
    ],
)
def test_impossible_names_and_roles_are_refused(bench, name, role, told):
    for command in (
        c.CreateToken("1", name, role, DAY, "alice"),
        c.CreateBearer("1", name, role, DAY, "alice", "digest"),
        c.Sign("1", name, role, "key", DAY, "alice"),
    ):
        with refused_as("INVALID_CERTIFICATE_REQUEST", match=told):
            bench.do(command)


@pytest.mark.parametrize("lifetime_s", [0.0, -1.0, float("nan"), float("inf"), 11 * 365 * DAY])
def test_impossible_lifetimes_are_refused(bench, lifetime_s):
    with refused_as("INVALID_CERTIFICATE_REQUEST", match="10 years"):
        bench.do(c.CreateToken("1", "x", "node", lifetime_s, "alice"))


def test_list_has_the_kind_of_each_entry(bench):
    bench.token()
    bench.token("71", "pods", reusable=True)
    bench.join(FIRST, "key")
    bench.do(c.CreateBearer("b1", "page", "observer", DAY, "alice", "digest"))
    bench.do(c.Sign("c9", "bob", "operator", "key", DAY, "alice"))
    shown = [(x.serial, x.kind, x.role, x.used, x.reusable) for x in entries_of(bench.access)]
    assert shown == [
        (TOKEN, "token", "participant", True, False),
        ("71", "token", "participant", False, True),
        (FIRST, "certificate", "participant", False, False),
        ("b1", "bearer", "observer", False, False),
        ("c9", "certificate", "operator", False, False),
    ]
