"""Access control under everything that can come to it, in any order, at any time.

A Hypothesis state machine plays operators, sites with few keys, thieves of tokens, the clock and
restarts. Beside the state it keeps its own small book of what was acknowledged: for which key each
token was exchanged, and what was revoked. After each step the invariants hold.
"""

import json
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from support.refusals import Why, is_refused
from xain_coordinator.access import commands as c
from xain_coordinator.access import events as e
from xain_coordinator.access.audit_log import Line
from xain_coordinator.access.decider import decide, require_valid
from xain_coordinator.access.errors import Unauthenticated
from xain_coordinator.access.evolve import evolve, fold
from xain_coordinator.access.records import event_of, line_of
from xain_coordinator.access.values import Access, Certificate, Token, entries_of
from xain_wire.refusal import Refusal

T = TypeVar("T")
NAMES = st.sampled_from(["ward-7", "ward-8"])
ROLES = st.sampled_from(["participant", "observer", "operator", "node"])
KEYS = st.sampled_from(["k1", "k2"])
LIFETIMES_S = st.sampled_from([60.0, 86_400.0, 86_400.0 * 3])


class AccessMachine(RuleBasedStateMachine):
    issued = Bundle("issued")

    def __init__(self) -> None:
        super().__init__()
        self.access = Access()
        self.events: list[e.Event] = []
        self.now = 1_800_000_000.0
        self.num_issued = 0
        # The book of what was acknowledged.
        self.keys: dict[str, str] = {}  # of tokens that count once
        self.certificates: dict[tuple[str, str], Certificate] = {}
        self.revoked: set[str] = set()
        self.refused_at: dict[str, float] = {}

    def serial(self) -> str:
        self.num_issued += 1
        return f"{0x70 + self.num_issued:x}"

    def do(self, command: c.Command) -> tuple[e.Event, ...]:
        before = self.access
        events = decide(before, command, self.now)
        assert decide(before, command, self.now) == events, "a decision hangs on nothing else"
        for event in events:
            self.access = evolve(self.access, event)
        self.events += events
        return events

    # --- operators ---

    @rule(target=issued, name=NAMES, role=ROLES, lifetime_s=LIFETIMES_S, reusable=st.booleans())
    def create_token(self, name: str, role: str, lifetime_s: float, reusable: bool) -> str:
        serial = self.serial()
        self.do(c.CreateToken(serial, name, role, lifetime_s, "operator", reusable))
        return serial

    @rule(target=issued, name=NAMES, role=ROLES, lifetime_s=LIFETIMES_S)
    def create_bearer(self, name: str, role: str, lifetime_s: float) -> str:
        serial = self.serial()
        self.do(c.CreateBearer(serial, name, role, lifetime_s, "operator", f"digest of {serial}"))
        return serial

    @rule(target=issued, name=NAMES, role=ROLES, key=KEYS, lifetime_s=LIFETIMES_S)
    def sign(self, name: str, role: str, key: str, lifetime_s: float) -> str:
        serial = self.serial()
        self.do(c.Sign(serial, name, role, key, lifetime_s, "operator"))
        return serial

    @rule(name=NAMES)
    def revoke_name(self, name: str) -> None:
        known = [each.serial for each in entries_of(self.access) if each.name == name]
        if known:
            self.do(c.Revoke(name, "operator"))
            self.revoked.update(known)
        elif name not in self.access.issued:
            self.must_refuse("UNKNOWN_CERTIFICATE", c.Revoke(name, "operator"))

    @rule(serial=issued)
    def revoke_serial(self, serial: str) -> None:
        if serial not in self.access.serials:  # no name
            self.do(c.Revoke(serial, "operator"))
            first, bases = serial, {each.serial: each.basis for each in self.certificates_issued()}
            while bases.get(first) in bases:  # not a token
                first = bases[first]
            self.revoked |= self.come_of(first)

    def certificates_issued(self) -> list[e.CertificateIssued]:
        return [each for each in self.events if isinstance(each, e.CertificateIssued)]

    def come_of(self, serial: str) -> set[str]:
        """The serial numbers of what came of a token or certificate, and its own."""
        later = [each.serial for each in self.certificates_issued() if each.basis == serial]
        return {serial}.union(*map(self.come_of, later))

    @rule(serial=consumes(issued))
    def forget(self, serial: str) -> None:
        """No later step uses this certificate."""

    # --- sites, and others ---

    @rule(target=issued, serial=issued, key=KEYS, lifetime_s=LIFETIMES_S)
    def join(self, serial: str, key: str, lifetime_s: float) -> str:
        command = c.Join(self.serial(), serial, key, "10.0.0.1", lifetime_s, "joining")
        token = self.access.issued[serial]
        if not isinstance(token, Token) or self.is_out(serial):
            self.must_refuse(Unauthenticated, command)
            return serial
        return self.exchange(token, key, command)

    def exchange(self, token: Token, key: str, command: c.Join) -> str:
        first = self.keys.setdefault(token.serial, key)
        before = self.certificates.get((token.serial, key))
        if first != key and not token.reusable:
            told_at = self.refused_at.get(token.serial)
            if told_at is not None and self.now - told_at < 60:
                self.must_refuse("TOKEN_USED", command)
            else:
                (refused,) = self.do(command)
                assert isinstance(refused, e.TokenRefused)
                self.refused_at[token.serial] = self.now
            return token.serial
        if before is not None and before.serial in self.revoked:
            self.must_refuse(Unauthenticated, command)
            return before.serial
        return self.answered(token.serial, key, self.do(command))

    @rule(target=issued, serial=issued, key=KEYS, lifetime_s=LIFETIMES_S)
    def renew(self, serial: str, key: str, lifetime_s: float) -> str:
        command = c.Renew(self.serial(), serial, key, lifetime_s, "site")
        current = self.access.issued[serial]
        if isinstance(current, Token):
            self.must_refuse("NOT_PERMITTED", command)
            return serial
        before = self.certificates.get((serial, key))
        is_revoked = before is not None and before.serial in self.revoked
        if not isinstance(current, Certificate) or self.is_out(serial) or is_revoked:
            self.must_refuse(Unauthenticated, command)
            return serial
        found = self.answered(serial, key, self.do(command))
        renewed = self.access.issued[found]
        assert (renewed.name, renewed.role) == (current.name, current.role)
        return found

    def answered(self, basis: str, key: str, events: tuple[e.Event, ...]) -> str:
        """The serial number that the site is answered: that of the certificate that was
        acknowledged before, or of a new one if that is not valid any more."""
        found = self.access.certificate_for(basis, key)
        assert found is not None
        assert found.key_digest == key
        before = self.certificates.get((basis, key))
        if before is not None and self.now <= before.expires_at:
            assert found == before
            assert not events
        else:
            assert len(events) == 1
        self.certificates[basis, key] = found
        return found.serial

    def is_out(self, serial: str) -> bool:
        return serial in self.revoked or self.now > self.access.issued[serial].expires_at

    def must_refuse(self, why: Why, command: c.Command) -> None:
        with pytest.raises(Refusal) as caught:
            decide(self.access, command, self.now)
        assert is_refused(caught.value, why), f"{command} must be refused as {why}"

    # --- the clock, and restarts ---

    @rule(seconds=st.sampled_from([0.5, 2.0, 61.0, 90_000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def restart(self) -> None:
        """The state is read from the lines of the audit log."""
        lines = [line_of(event) for event in self.events]
        read = [
            event_of(Line(x.at, x.event, x.by, json.loads(json.dumps(x.fields)))) for x in lines
        ]
        self.access = fold(Access(), [event for event in read if event is not None])

    # --- invariants ---

    @invariant()
    def state_is_the_fold_of_the_events(self) -> None:
        assert fold(Access(), self.events) == self.access

    @invariant()
    def no_token_counts_for_two_keys(self) -> None:
        for each in self.access.issued.values():
            if isinstance(each, Token) and not each.reusable:
                keys = {key for basis, key in self.access.certificates if basis == each.serial}
                assert keys <= {self.keys.get(each.serial)}

    @invariant()
    def nothing_is_valid_after_its_revocation(self) -> None:
        assert self.revoked == self.access.revoked
        for serial in self.revoked:
            try:
                require_valid(self.access, self.access.issued[serial], self.now)
            except Unauthenticated:
                continue
            raise AssertionError(f"{serial} was revoked")

    @invariant()
    def nothing_has_another_name_or_role_than_its_basis(self) -> None:
        for each in self.access.issued.values():
            if isinstance(each, Certificate) and each.basis:
                basis = self.access.issued[each.basis]
                assert (each.name, each.role) == (basis.name, basis.role)


AccessMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestAccess = AccessMachine.TestCase
