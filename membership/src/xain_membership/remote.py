"""Being a member where a service over a network knows the members: what is the same for all.

The service may be away, and may have forgotten all when it is back. Until then its members go on
with what they know of each other; then each tells it who it is, and is that again.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from xain_foundation import waits
from xain_foundation.logs.logger import get_logger
from xain_membership.errors import Closed, DiscoveryUnavailable, MembershipLost, NameTaken, TimedOut
from xain_membership.ports import Member, Roster
from xain_membership.registry import MAX_FORMER, check_barrier, note_latest, replaced

log = get_logger(__name__)

CALL_TIMEOUT_S = 5.0
RETRY_S = 0.25
# What a call has at least, also where no time is left for it.
MIN_CALL_S = 0.1
# For all that leave() has to do: who does not answer by then expires by itself.
LEAVE_S = 1.0


@dataclass(frozen=True, slots=True)
class Joining:
    """Arguments of Discovery.join, but for the timeout."""

    group: str
    role: str
    name: str
    address: str
    on_change: Callable[[Roster], None]
    on_lost: Callable[[Exception], None]


class RemoteDiscovery(ABC):
    """See ports.Discovery."""

    @abstractmethod
    def _membership(self, joining: Joining) -> "RemoteMembership":
        """Make what join() is called of next."""

    def _why_unreachable(self) -> str:
        """Say why nobody answers; "" if that is not known."""
        return ""

    def join(
        self,
        group: str,
        role: str,
        name: str,
        address: str,
        *,
        timeout_s: float,
        on_change: Callable[[Roster], None],
        on_lost: Callable[[Exception], None],
    ) -> "RemoteMembership":
        """Join a group and return the membership. After an error, leave the group again."""
        deadline = time.monotonic() + timeout_s
        membership = self._membership(Joining(group, role, name, address, on_change, on_lost))
        try:
            membership.join(deadline)
        except BaseException as error:  # an interrupt too: no thread and connection stay behind
            membership.leave_by(deadline)
            if isinstance(error, DiscoveryUnavailable) and (why := self._why_unreachable()):
                raise DiscoveryUnavailable(why) from None
            raise
        return membership


class RemoteMembership(ABC):
    """See ports.Membership. Threads of it keep the membership, from join() to leave()."""

    def __init__(self, joining: Joining) -> None:
        self._joining_as = joining
        self._group = joining.group
        self._name = joining.name
        self._on_change = joining.on_change
        self._chance = Random()
        self._member: Member | None = None
        self._roster: Roster = {}
        self._listed: set[str] = set()
        self._former: OrderedDict[str, int] = OrderedDict()  # incarnations of those who have gone
        self._heard = 0  # the highest incarnation; a service that has lost all asks for it
        self._has_ended = threading.Event()
        self._joining = threading.Lock()  # so that nobody comes back who has left
        self._threads: list[threading.Thread] = []
        self._calling = threading.Lock()
        self._calls: dict[str, int] = {}  # the number of the newest at each barrier
        self._num_calls = 0

    @property
    def member(self) -> Member:
        """We ourselves."""
        assert self._member is not None, "join() comes first"
        return self._member

    @property
    def _who(self) -> tuple[str, str, int]:
        """The group, the name and the incarnation of this process."""
        return self._group, self._name, self.member.incarnation

    # --- what services differ in ---

    @abstractmethod
    def _ask_to_join(self, timeout_s: float) -> Member:
        """Ask the service once to add this member; a `_member` that there is comes back.

        Raises NameTaken, DiscoveryUnavailable, and MembershipLost if another process has replaced
        it.
        """

    @abstractmethod
    def _begin(self, deadline: float) -> None:
        """We are a member: tell who is there before this returns, and start what keeps us one.
        Raises DiscoveryUnavailable, but at the deadline only if anything has been started."""

    @abstractmethod
    def _wait_at(self, barrier: str, num_members: int, deadline: float, call: int) -> bool:
        """Wait at a barrier, with _check_waits() after each wait. Returns whether it has opened by
        the deadline. call: number by which the service knows a call that comes again."""

    @abstractmethod
    def _end(self, timeout_s: float) -> None:
        """We are none any more: tell the service if it hears, and end what goes on."""

    # --- to come, to come back, and to go ---

    def join(self, deadline: float) -> None:
        """Ask to join until the deadline. Raises NameTaken if an attempt was refused so: the last
        attempt may have no time for an answer. Otherwise DiscoveryUnavailable."""
        taken: NameTaken | None = None
        while True:
            try:
                self._member = self._ask_to_join(left_s(deadline))
                self._begin(deadline)
                return
            except (NameTaken, DiscoveryUnavailable) as error:
                # The threads of a membership are started once.
                if self._threads:
                    raise
                if isinstance(error, NameTaken):
                    if taken is None:
                        log.info("name_is_taken", peer=self._name, waits_for=str(error))
                    taken = error
                if time.monotonic() + RETRY_S > deadline:
                    if taken is None:
                        raise
                    raise taken from None
                time.sleep(RETRY_S)  # until the name is free, or the service there

    def _come_back(self) -> None:
        """Join again as the same member, after the service has removed it."""
        with self._joining:
            if not self._has_ended.is_set():
                self._member = self._ask_to_join(CALL_TIMEOUT_S)
                log.info("member_came_back", group=self._group, peer=self._name)

    def next_call(self) -> int:
        """Return a new number for calls that wait at one opening of a barrier."""
        with self._calling:
            self._num_calls += 1
            return self._num_calls

    def barrier(
        self, name: str, num_members: int, timeout_s: float, call: int | None = None
    ) -> None:
        """Wait until `num_members` members wait at the barrier. Raises as Membership says.

        call: of next_call(), for several calls that wait at one opening: where the answer of an
            earlier one was lost, the next one returns at once.
        """
        check_barrier(name, num_members)
        call = self.next_call() if call is None else call
        with self._calling:
            self._calls[name] = call
        try:
            self._check_waits(name, call)
            if not self._wait_at(name, num_members, time.monotonic() + timeout_s, call):
                raise TimedOut(f"waited {timeout_s:g} s at the barrier {name!r}")
        finally:
            with self._calling:
                if self._calls.get(name) == call:
                    del self._calls[name]

    def _check_waits(self, barrier: str, call: int) -> None:
        """Raises Closed, and the error for a call that a newer one has replaced."""
        if self._has_ended.is_set():
            raise Closed(f"{self._name!r} is no member of {self._group!r} any more")
        if self._calls.get(barrier) != call:
            raise replaced(barrier)

    def leave(self) -> None:
        self.leave_by(time.monotonic() + LEAVE_S)

    def leave_by(self, deadline: float) -> None:
        """Leave the group by the deadline: end the stream, the threads and the channel."""
        deadline = min(deadline, time.monotonic() + LEAVE_S)
        if self._has_ended.is_set() and not self._threads:
            return
        self._has_ended.set()
        # A service that hangs while we come back to it is not waited for: then it is a lease later
        # that we have gone.
        if self._joining.acquire(timeout=left_s(deadline)):
            self._joining.release()
        self._end(left_s(deadline))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(left_s(deadline))
        self._threads.clear()

    # --- in threads ---

    def _start(self, work: Callable[[], None]) -> None:
        """Start a thread of the membership. Raises DiscoveryUnavailable if there is none."""
        thread = threading.Thread(target=self._run, args=(work,), name="membership", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            raise DiscoveryUnavailable(f"there is no thread to be a member in: {error}") from error
        self._threads.append(thread)  # not before: nobody can wait for one that does not run

    def _run(self, work: Callable[[], None]) -> None:
        """Run the work of a thread. If it fails, report the membership as lost."""
        try:
            work()
        except MembershipLost as lost:
            self._lose(lost)
        except Exception as error:  # a defect, ours or of who is told: nobody may go on unnoticed
            if self._has_ended.is_set():
                return  # what it was using has been closed
            log.exception("membership_failed", group=self._group, peer=self._name)
            self._lose(MembershipLost(f"the thread that keeps it has failed: {error!r}"))

    def _lose(self, error: MembershipLost) -> None:
        """Report that the membership is lost, once, and not after leave()."""
        with self._joining:
            has_ended = self._has_ended.is_set()
            self._has_ended.set()
        if not has_ended:
            self._joining_as.on_lost(error)

    def _tell(self, listed: Roster, *, is_settling: bool) -> None:
        """Add what the service lists to the known members, and report a change of them.

        is_settling: the service has just been started and has not heard of all members yet. Whom it
            has never listed may be on its way back; whom it lists no more has gone. Clear `_listed`
            when it may be another one than before.

        A service that has lost all may list a process that another one has replaced, if that one is
        back first. Peers that know the later process ignore the other, so the owner is not told of
        it.
        """
        former = {name for name, member in listed.items() if self._is_former(member)}
        listed = {name: member for name, member in listed.items() if name not in former}
        self._listed = self._listed - former | listed.keys()
        self._heard = max([self._heard, *(member.incarnation for member in listed.values())])
        others = {
            name: member
            for name, member in self._roster.items()
            # We ourselves are there until we hear that we have been replaced.
            if (is_settling and name not in self._listed) or name == self._name
        }
        roster = {**others, **listed}
        if roster != self._roster:
            for name in self._roster.keys() - roster.keys():
                note_latest(self._former, name, self._roster[name].incarnation, MAX_FORMER)
            self._roster = roster
            self._on_change(roster)

    def _is_former(self, member: Member) -> bool:
        """Whether a later process of the member's name is known."""
        known = self._roster.get(member.name)
        last = self._former.get(member.name, 0) if known is None else known.incarnation
        return member.incarnation < last


def left_s(deadline: float) -> float:
    """Return the seconds that a call may take."""
    return max(MIN_CALL_S, waits.left_s(deadline))
