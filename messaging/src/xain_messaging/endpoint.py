"""One peer among its peers: what comes, what goes, and who is there.

There is no thread that receives. Whoever waits for something receives, for all: one thread at a
time is in the driver, and tells the others what has come. So a program that uses a proxy from one
thread pays for no other. What the discovery tells comes from a thread of its own; it connects, and
sends what was kept. Another thread sends kept messages again after a connection has broken, while
the program does something else.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from xain_foundation.logger import get_logger
from xain_messaging.codec import Frames, decode, num_bytes
from xain_messaging.errors import (
    BodyError,
    Closed,
    MalformedMessage,
    MessagingError,
    OutboxFull,
    UnknownPeer,
)
from xain_messaging.inbox import Inbox
from xain_messaging.links import (
    COLLECTIVE,
    Bounds,
    Delivery,
    Head,
    Kind,
    Link,
    Outbox,
    Packet,
    Untaken,
    read_head,
)
from xain_messaging.messages import Message, SessionMessage
from xain_messaging.ports import (
    Arrived,
    Discovery,
    Driver,
    DriverEvent,
    Lost,
    Member,
    Membership,
    Roster,
)
from xain_messaging.sessions import Sessions
from xain_messaging.waits import LONGEST_S

log = get_logger(__name__)

T = TypeVar("T")

# An ack that nothing carries waits for so long for something that might.
ACK_DELAY_S = 0.01
# How long packets are held of a process that the discovery has not listed yet.
HOLD_S = 60.0
# Between two looks of the thread that sends kept messages again.
RESEND_S = 0.5
# How long a proxy that closes waits until its peers say that they have received its messages.
HEARD_S = 1.0
# How long messages are kept for a peer that is away.
FORGET_S = 3600.0
# Between two looks for those whose time is over.
FORGET_EVERY_S = 60.0
# Between two attempts to connect to a peer; each time twice as long.
RETRY_S = 0.1
MAX_RETRY_S = 10.0
# Events that are handled before those who wait are told.
BATCH = 64
# Names that the discovery has never told us of. What is sent under one more is not heard.
MAX_STRANGERS = 1024
# Names of those who have left. Beyond it the first to leave are forgotten sooner, but for those for
# whom something is kept, or of whom something waits here.
MAX_AWAY = 4096

# Of what is said in the log of a message that could not be handled.
MAX_WHY = 500

Handler = Callable[[Message, Delivery], None]


@dataclass(slots=True)
class _Retry:
    """Of a connect() or send() that has failed. at: on time.monotonic()."""

    at: float
    wait_s: float


class Endpoint:
    """Joins on construction; see Discovery.join for what that raises. It closes the driver."""

    def __init__(
        self,
        driver: Driver,
        discovery: Discovery,
        group: str,
        role: str,
        name: str,
        *,
        join_timeout_s: float,
        bounds: Bounds,
    ) -> None:
        self.name = name
        self.role = role
        self.inbox = Inbox()
        self.sessions = Sessions()
        self._on_collective: Handler | None = None
        self._unheard: list[tuple[Message, Delivery]] = []  # before anybody hears collectives
        self.num_too_large = 0  # kept messages that were dropped, see _drop_too_large()
        self.lock = threading.RLock()  # one that knows whose it is, see _from_driver()
        self._driver = driver
        self._outbox = Outbox(bounds)
        self._waiting = Untaken()
        self._changed = threading.Condition(self.lock)
        self._is_receiving = False
        # Where these are set though nobody is there, an interrupt has come: in the middle of
        # something that is done under the lock; and in the driver.
        self._is_halfway = False
        self._is_in_driver = False
        self._handed: Delivery | None = None  # it counts as heard, and may be nowhere yet
        self._come: deque[DriverEvent] = deque()  # from the driver, and to be handled first
        self._num_waiting = 0  # threads, for the one that is receiving
        self._roster: Roster = MappingProxyType({})
        self._links: dict[str, Link] = {}
        self._owed: dict[str, Link] = {}  # acks
        self._owed_since = 0.0
        # On time.monotonic(), the oldest first.
        self._away_since: dict[str, float] = {}
        self._strangers_since: dict[str, float] = {}
        self._held_since: dict[str, float] = {}
        self._unreached: dict[str, _Retry] = {}  # members
        self._forget_at = 0.0
        self._has_refused = False  # what somebody sent for whom there was no link
        self._failure: MessagingError | None = None
        try:
            self._membership: Membership = discovery.join(
                group,
                role,
                name,
                driver.address,
                timeout_s=join_timeout_s,
                on_change=self._on_change,
                on_lost=self._on_lost,
            )
        except BaseException:  # whatever it is, an interrupt too: the port must be free again
            driver.close(0.0)
            raise
        self._has_ended = threading.Event()
        with suppress(RuntimeError, MemoryError):  # no thread: they go when the proxy is used
            threading.Thread(target=self._resend, name="messages-resend", daemon=True).start()

    # --- who is there ---

    @property
    def member(self) -> Member:
        """We ourselves."""
        return self._membership.member

    @property
    def membership(self) -> Membership:
        return self._membership

    @property
    def roster(self) -> Roster:
        """All who are in the group now, with us."""
        return self._roster

    def _on_change(self, roster: Roster) -> None:
        with self.lock:
            if self._failure is not None:
                return  # we are on our way out, and the driver is closed
            if self._roster:
                self._catch_up()  # what somebody has taken is not sent again to who comes for it
            before, self._roster = self._roster, MappingProxyType(dict(roster))
            now = time.monotonic()
            for name in before.keys() - roster.keys() - {self.name}:
                self._driver.disconnect(name)
                self._unreached.pop(name, None)
                self._link(name).gone()
                self._away_since.pop(name, None)  # to the end
                self._away_since[name] = now
                log.info("peer_away", peer=name, kept=self._link(name).num_kept)
            for name, member in roster.items():
                if name != self.name and _place(before.get(name)) != _place(member):
                    self._connect(member)
            self._forget_those_long_gone(now)
            self._changed.notify_all()
        self._driver.wake()  # who waits for a peer looks again

    def _connect(self, member: Member) -> None:
        self._away_since.pop(member.name, None)
        self._strangers_since.pop(member.name, None)
        is_new = member.name not in self._links
        link = self._link(member.name)
        # If something was refused, it may have been of this one.
        link.listed(member.incarnation, has_missed=is_new and self._has_refused)
        self._held_since.pop(member.name, None)
        for head, frames in link.release():
            try:
                self._handle_from(link, head, frames)
            except MalformedMessage as error:  # more than may wait here
                log.warning("malformed_message", error=str(error))
        self._unreached.pop(member.name, None)
        self._try_to_connect(member, link)

    def _try_to_connect(self, member: Member, link: Link) -> None:
        try:
            self._driver.connect(member.name, member.address)
        except Exception as error:
            # Whatever a driver says to an address that is none of its own, or the system to one
            # that wants more than there is: the others must not suffer from it.
            self._cannot_reach(link, error)
            return
        log.debug("peer_here", peer=member.name, address=member.address)
        self._drop_too_large(link)
        self._send_kept(link)
        if link.is_here:
            self._unreached.pop(member.name, None)

    def _cannot_reach(self, link: Link, error: Exception) -> None:
        """For now: it is tried again."""
        link.gone()
        before = self._unreached.get(link.name)
        wait_s = RETRY_S if before is None else min(2 * before.wait_s, MAX_RETRY_S)
        self._unreached[link.name] = _Retry(time.monotonic() + wait_s, wait_s)
        level = log.warning if before is None else log.debug
        level("cannot_connect", peer=link.name, error=str(error))

    def _send(self, link: Link, packet: Packet) -> None:
        """If the system has no room for it, all that is kept goes out over the next connection."""
        if not link.is_here:
            return
        try:
            self._driver.send(link.name, packet)
        except MessagingError:
            raise
        except Exception as error:  # as in _try_to_connect()
            self._cannot_reach(link, error)

    def _on_lost(self, error: Exception) -> None:
        failure = error if isinstance(error, MessagingError) else MessagingError(str(error))
        with self.lock:
            self._failure = self._failure or failure
            self._changed.notify_all()
        self._driver.wake()

    def _forget_those_long_gone(self, now: float) -> None:
        """Names are often made up for one process, and a group may live for months."""
        self._forget_at = now + FORGET_EVERY_S
        for names, most in ((self._away_since, MAX_AWAY), (self._strangers_since, MAX_STRANGERS)):
            for name, since in list(names.items()):
                link = self._links[name]
                if now - since > FORGET_S or (link.is_settled and len(names) > most):
                    self._forget(link, names)

    def _forget(self, link: Link, names: dict[str, float]) -> None:
        """names: that it is one of."""
        if link.num_kept:
            log.warning("peer_forgotten", peer=link.name, lost=link.num_kept)
        link.forget()
        if link.has_untaken:
            return  # if it is back before that is taken, it sends it again
        del names[link.name], self._links[link.name]
        self._held_since.pop(link.name, None)
        self._owed.pop(link.name, None)
        self.sessions.forget(link.name)

    def _link(self, peer: str) -> Link:
        link = self._links.get(peer)
        if link is None:
            own = self._roster[self.name].incarnation
            link = self._links[peer] = Link(self.name, own, peer, self._outbox, self._waiting)
            if peer not in self._roster:
                self._strangers_since[peer] = time.monotonic()
        return link

    def _drop_too_large(self, link: Link) -> None:
        """The peer may be another process now, which takes less at once than the one for which this
        was kept: what follows must not wait for what never comes."""

        def is_taken(frames: Frames) -> bool:
            try:
                self._driver.check(link.name, frames)
            except BodyError as error:
                self.num_too_large += 1
                log.error("message_dropped", peer=link.name, error=str(error))
                return False
            return True

        link.keep_only(is_taken)

    def _send_kept(self, link: Link) -> None:
        for packet in link.connected():
            self._send(link, packet)

    # --- out ---

    def post(self, message: Message, kind: Kind, frames: Frames, deadline: float) -> None:
        """On its way, or kept for a peer that is away. The frames, which are those of the message,
        must not change any more.

        Waits for room; raises OutboxFull if there is none by the deadline, BodyError for more than
        the driver carries, SessionError, UnknownPeer, Closed and MembershipLost.
        """
        peer = message.destination
        size = num_bytes(frames)
        why_not: str | None = None

        def try_to_post() -> bool | None:
            if peer == self.name or peer not in self._links:
                raise UnknownPeer(
                    f"{peer!r} is this peer itself"
                    if peer == self.name
                    else f"nobody called {peer!r} has been in the group"
                )
            link = self._links[peer]
            self._driver.check(peer, frames)
            nonlocal why_not
            if why_not := link.why_no_room(size):
                return None
            if isinstance(message, SessionMessage):
                self.sessions.send(message)  # before anything can answer it
            packet = link.send(kind, frames)
            if packet is not None:
                self._send(link, packet)
            if not link.owes_ack:
                self._owed.pop(peer, None)  # it went with it
            return True

        if self.wait_for(try_to_post, deadline, sends=True) is None:
            raise OutboxFull(str(why_not))

    def has_room(self, message: Message, size_bytes: int) -> bool:
        """post() would not wait. Call it under `lock`."""
        link = self._links.get(message.destination)
        return link is None or link.why_no_room(size_bytes) is None

    def take(self, delivery: Delivery) -> None:
        """The application has this message. Call it under `lock`. Twice does no harm."""
        link = self._links.get(delivery.peer)
        if link is None:
            return  # its peer has been forgotten
        before, self._is_halfway = self._is_halfway, True
        packet = link.take(delivery)
        if packet is not None:
            self._send(link, packet)
            self._owed.pop(link.name, None)
        else:
            self._owe(link)
        if self._waiting.behind and not self._waiting.fills(0.5, self._outbox.bounds):
            behind = [link for link in self._waiting.behind.values() if link.is_behind]
            # It may be full again before they are asked; and each has a bound of its own.
            self._waiting.behind = {link.name: link for link in behind}
            for link in behind:
                if link.owes_ack:
                    self._owe(link)
        self._is_halfway = before

    def has_left(self, peer: str) -> bool:
        """Whether a peer has said that it leaves the group, and no other process has its name yet.
        Call it under `lock`."""
        link = self._links.get(peer)
        return link is not None and link.has_left

    # --- in ---

    def wake(self) -> None:
        """Let those who wait look again. Safe in a signal handler."""
        self._driver.wake()

    def wait_for(
        self, attempt: Callable[[], T | None], deadline: float, *, sends: bool = False
    ) -> T | None:
        """What `attempt` gives as soon as it gives something; None if it does not by the deadline,
        on time.monotonic(). It is called under `lock`, after all that has come. After what it gives
        nothing is called any more but what lets go of the lock.

        sends: except that what is due goes out after it, since an ack may go with what it sends.

        Raises Closed and MembershipLost.
        """
        with self.lock:
            is_last = False
            while True:
                if self._failure is not None:
                    raise self._failure
                self._catch_up(is_all=not sends)
                self._is_halfway = True
                try:
                    result = attempt()
                    if sends:
                        self._do_what_is_due()
                except MessagingError:  # it is refused, and has done nothing
                    self._is_halfway = False
                    raise
                self._is_halfway = False
                if result is not None or is_last:
                    return result
                left_s = deadline - time.monotonic()
                is_last = left_s <= 0
                self._receive(max(0.0, left_s))

    def _catch_up(self, *, is_all: bool = True) -> None:
        """With what has come; if that is to be all, with what is due. If an interrupt had come in
        the middle of something, with what may be lost too."""
        is_unsure = self._is_in_driver and not self._is_receiving
        if self._is_halfway or is_unsure:
            self._make_sure()
            if is_unsure:
                self._is_in_driver = False
        self._is_halfway = True
        if not self._is_receiving:
            self._handle_all()
        if is_all:
            self._do_what_is_due()  # now: who takes one after the other may never wait
        self._is_halfway = False

    def _receive(self, timeout_s: float) -> None:
        """Returns when something has come, or is due, or when it was woken."""
        if self._is_receiving:
            self._num_waiting += 1
            try:
                self._changed.wait(min(timeout_s, LONGEST_S))
            finally:
                self._num_waiting -= 1
            return
        try:
            if not self._come:
                self._from_driver(self._until_something_is_due(timeout_s))
        finally:  # an interrupt too: another one is to receive now
            if self._num_waiting:
                self._changed.notify_all()

    def _handle_all(self) -> None:
        """What has come already; or some of it, if there is no end."""
        for _ in range(BATCH):
            event = self._come.popleft() if self._come else self._driver.receive(0.0)
            if event is None:
                break
            self._handle(event)

    def _make_sure(self) -> None:
        """What had come, or was to go out, may be lost: each peer is told where we are, and asked
        where it is. If this is interrupted too, it is done again."""
        if self._handed is not None:
            entry = self.inbox.last_added()
            if entry is None or entry.delivery is not self._handed:
                self._hand(self._handed)
            elif isinstance(entry.message, SessionMessage):
                self.sessions.received(entry.message)  # it may have been, or not
            self._handed = None
        for link in self._links.values():
            packet = link.where()
            if packet is not None:
                self._send(link, packet)
            if link.owes_ack:
                self._owe(link)

    def _from_driver(self, timeout_s: float) -> None:
        """As receive() of the driver, without the lock. What it gives has come."""
        self._is_receiving = self._is_in_driver = True
        try:
            self.lock.release()
            event = self._driver.receive(min(timeout_s, LONGEST_S))
            if event is not None:
                self._come.append(event)  # before we wait for the lock, which may be interrupted
            self._is_in_driver = False
        finally:
            try:
                self.lock.acquire()
            except BaseException:  # an interrupt while we waited for it, or just when we had it
                with suppress(RuntimeError):  # it is not ours
                    self.lock.release()
                self.lock.acquire()  # our caller will let go of it all the same
                raise
            finally:
                self._is_receiving = False  # not before: the next would be in the driver with us

    def _handle(self, event: DriverEvent) -> None:
        if isinstance(event, Lost):
            link = self._links.get(event.peer)
            if link is not None and link.is_here:
                self._send_kept(link)
            return
        try:
            self._handle_packet(event)
        except MalformedMessage as error:
            log.warning("malformed_message", error=str(error))

    def _handle_packet(self, event: Arrived) -> None:
        head = read_head(event.frames[0]) if event.frames else None
        if head is None or head.name == self.name:
            raise MalformedMessage("a packet of nobody")
        if head.to != self.name:
            return  # for one that was at our address before us
        if head.name not in self._links and len(self._strangers_since) >= MAX_STRANGERS:
            self._has_refused = True
            raise MalformedMessage(f"{head.name!r} is not in the group")
        self._handle_from(self._link(head.name), head, event.frames[1:])

    def _handle_from(self, link: Link, head: Head, frames: Frames) -> None:
        """Raises MalformedMessage as Link.received() does."""
        self._handed = delivery = link.received(head, frames)
        if link.is_holding and link.name not in self._held_since:
            self._held_since[link.name] = time.monotonic()
            log.info("held_until_known", peer=link.name, incarnation=head.incarnation)
        for packet in link.again(head):
            self._send(link, packet)
        if delivery is None:
            if link.owes_ack:
                self._owe(link)
            return
        self._hand(delivery)
        self._handed = None

    def _hand(self, delivery: Delivery) -> None:
        """To whom it is for. It counts as heard: it is not sent again."""
        try:
            message = decode(delivery.frames, delivery.peer, self.name)
            if delivery.kind == COLLECTIVE:
                self._hand_to_collectives(message, delivery)
                return
            entry = self.inbox.add(message, delivery)
            if isinstance(message, SessionMessage) and not self.sessions.received(message):
                log.warning(
                    "out_of_order",
                    peer=message.source,
                    session=message.session_id,
                    stage=str(message.session_stage),
                )
                self.inbox.pop(entry)
                self.take(delivery)
        except Exception as error:
            # Whatever it leads to: it comes from outside, and must end nothing here.
            why = str(error) if isinstance(error, MalformedMessage) else repr(error)
            log.warning("malformed_message", peer=delivery.peer, error=why[:MAX_WHY])
            self.take(delivery)  # it would only come again

    def _hand_to_collectives(self, message: Message, delivery: Delivery) -> None:
        if self._on_collective is None:
            self._unheard.append((message, delivery))
            return
        try:
            self._on_collective(message, delivery)
        except Exception as error:  # as in _hand()
            log.warning("malformed_message", peer=delivery.peer, error=repr(error)[:MAX_WHY])
            self.take(delivery)

    def hear_collectives(self, handler: Handler) -> None:
        """It is given the messages of collective operations, under `lock`; those that have come
        too. One for which it raises something is dropped, with a line in the log; one that was
        being handled when an interrupt came is given once more."""
        with self.lock:
            self._on_collective = handler
            unheard, self._unheard = self._unheard, []
            for message, delivery in unheard:
                self._hand_to_collectives(message, delivery)

    def _owe(self, link: Link) -> None:
        if not self._owed:
            self._owed_since = time.monotonic()
            if self._is_receiving:
                self._driver.wake()  # that thread may not have been about to look so soon
        self._owed[link.name] = link

    def _until_something_is_due(self, timeout_s: float) -> float:
        """At most timeout_s."""
        if self._owed:
            timeout_s = min(timeout_s, ACK_DELAY_S)
        if self._unreached:
            next_at = min(retry.at for retry in self._unreached.values())
            timeout_s = min(timeout_s, max(0.0, next_at - time.monotonic()))
        return timeout_s

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._unreached:
            self._reach_those_who_are_due(now)
        if self._owed and now - self._owed_since >= ACK_DELAY_S:
            self._send_acks()
        if (self._away_since or self._strangers_since) and now >= self._forget_at:
            self._forget_those_long_gone(now)
        if self._held_since:
            self._drop_long_held(now)

    def _drop_long_held(self, now: float) -> None:
        for name, since in list(self._held_since.items()):
            if now - since > HOLD_S:
                del self._held_since[name]
                log.warning("held_too_long", peer=name, after_s=HOLD_S)
                self._links[name].drop_held()

    def _reach_those_who_are_due(self, now: float) -> None:
        for name, retry in list(self._unreached.items()):
            if retry.at <= now:
                self._try_to_connect(self._roster[name], self._links[name])

    def _resend(self) -> None:
        """Send kept messages again where a line has broken or a peer asks for them; in a thread.

        Acks go out only with messages to the same peer: a task of another peer that the program
        works at goes to the next process if this one dies.
        """
        with suppress(MessagingError):
            while not self._has_ended.wait(RESEND_S):
                with self.lock:
                    if self._failure is not None:
                        return
                    if self._outbox.num_messages and not self._is_receiving:
                        self._catch_up(is_all=False)
                        self._reach_those_who_are_due(time.monotonic())
                        self._changed.notify_all()

    def _send_acks(self) -> None:
        owed, self._owed = self._owed, {}
        for link in owed.values():
            packet = link.ack()
            if packet is not None:
                self._send(link, packet)

    # --- the end ---

    def close(self, linger_s: float, *, has_failed: bool = False) -> None:
        """Sends what waits for at most linger_s, and leaves. May be called again.

        Before that it waits, for HEARD_S at most, until the connected peers say that they have
        received what was sent to them: a peer whose roster does not list this process yet only
        holds its messages, and would never receive them if it left now.

        has_failed: the program may not have done the tasks that it has taken. No acks go out, so
            that these tasks go to the process that comes back under this name.
        """
        try:
            if linger_s > 0 and not has_failed:
                with suppress(MessagingError):  # it is closed, or no member any more
                    self._wait_until_heard(time.monotonic() + min(linger_s, HEARD_S))
        finally:  # an interrupt too
            self._end(linger_s, has_failed=has_failed)

    def _wait_until_heard(self, deadline: float) -> None:
        def unheard() -> list[Link]:
            return [link for link in self._links.values() if link.is_here and link.has_unheard]

        with self.lock:
            for link in unheard() if self._failure is None else ():
                packet = link.where()
                if packet is not None:
                    self._send(link, packet)
        self.wait_for(lambda: None if unheard() else True, deadline)

    def _end(self, linger_s: float, *, has_failed: bool) -> None:
        with self.lock:
            if isinstance(self._failure, Closed):
                return
            if not has_failed:
                self._send_acks()
                for link in self._links.values():
                    packet = link.leaving()
                    if packet is not None:
                        self._send(link, packet)
            for link in self._links.values():
                if link.num_kept and not link.is_here:
                    log.warning("not_delivered", peer=link.name, num_messages=link.num_kept)
            self._failure = Closed(f"{self.name!r} has been closed")
            self._has_ended.set()
            self._changed.notify_all()
        self._driver.wake()
        try:
            self._driver.close(linger_s)
        finally:
            with suppress(MessagingError):  # it expires by itself
                self._membership.leave()


def _place(member: Member | None) -> tuple[int, str] | None:
    """A process, and where it is."""
    return None if member is None else (member.incarnation, member.address)
