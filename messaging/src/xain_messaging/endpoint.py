"""One peer among its peers: what comes, what goes, and who is there.

One I/O thread runs the driver and does what is due: it handles packets, sends acks and batches, and
looks for messages that a connection has lost. The program's threads talk to it through queues: the
inbox, and the messages that the links keep. A message to a link on which nothing is under way goes
out on the program's thread, which saves a change of threads; a message behind others waits for the
I/O thread, which sends all that wait in one packet.

An interrupt comes in the program's main thread only. That thread changes links in post() and take()
alone, in an order that leaves a gap for the receiver to ask for.
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
from xain_messaging.ports import Discovery, Driver, Member, Membership, Roster
from xain_messaging.sessions import Sessions
from xain_messaging.waits import LONGEST_S

log = get_logger(__name__)

T = TypeVar("T")

# An ack that nothing carries waits for so long for something that might.
ACK_DELAY_S = 0.01
# How long packets are held of a process that the discovery has not listed yet.
HOLD_S = 60.0
# How long nothing may be heard of sent messages before their receiver is asked where it is; each
# time twice as long.
PROBE_S = 0.5
MAX_PROBE_S = 30.0
# How long a proxy that closes waits until its peers say that they have received its messages.
HEARD_S = 1.0
# How long messages are kept for a peer that is away.
FORGET_S = 3600.0
# Between two looks for those whose time is over.
FORGET_EVERY_S = 60.0
# Between two attempts to connect to a peer; each time twice as long.
RETRY_S = 0.1
MAX_RETRY_S = 10.0
# How long close() waits for the I/O thread.
END_S = 5.0
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


@dataclass(slots=True)
class _Probe:
    """Probe of a peer that has not acknowledged all. so_far: its latest acknowledgement."""

    so_far: tuple[int, int]
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
        self.lock = threading.RLock()
        self._driver = driver
        self._outbox = Outbox(bounds)
        self._waiting = Untaken()
        self._waiters: list[threading.Lock] = []  # each of a thread in wait_for()
        self._is_polling = False  # the I/O thread is in the driver, or about to be
        self._roster: Roster = MappingProxyType({})
        self._links: dict[str, Link] = {}
        self._unsent: dict[str, Link] = {}  # with messages that the I/O thread sends
        self._received: deque[Delivery] = deque()  # messages that the program may be working at
        self._owed: dict[str, Link] = {}  # acks
        self._owed_since = 0.0
        self._probes: dict[str, _Probe] = {}
        self._probe_at = 0.0
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
        driver.serve(self._on_packet, self._on_broken)
        self._io = threading.Thread(target=self._run, name="messages-io", daemon=True)
        try:
            self._io.start()
        except BaseException:  # no thread, or an interrupt
            self._end(0.0, has_failed=True)
            raise

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
            self._notify()
            self._wake_io()  # there may be somebody to be connected to again

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
            self._notify()
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
        for others in (self._held_since, self._owed, self._unsent, self._probes):
            others.pop(link.name, None)
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
        self._unsent.pop(link.name, None)
        for packet in link.connected():
            self._send(link, packet)

    # --- out ---

    def post(self, message: Message, kind: Kind, frames: Frames, deadline: float) -> None:
        """As try_to_post(), but wait for room. Raises OutboxFull if there is none by the
        deadline."""
        why_not: str | None = None

        def attempt() -> bool | None:
            nonlocal why_not
            why_not = self.try_to_post(message, kind, frames)
            return True if why_not is None else None

        if self.wait_for(attempt, deadline, is_working=True) is None:
            raise OutboxFull(str(why_not))

    def try_to_post(self, message: Message, kind: Kind, frames: Frames) -> str | None:
        """Send a message, or keep it for a peer that is away. The frames, which are those of the
        message, must not change any more. Returns why there is no room; None if the message is on
        its way.

        Raises BodyError for more than the driver carries, SessionError, UnknownPeer, Closed and
        MembershipLost.
        """
        peer, size = message.destination, num_bytes(frames)
        with self.lock:
            if self._failure is not None:
                raise self._failure
            link = self._links.get(peer)
            if link is None or peer == self.name:
                raise UnknownPeer(
                    f"{peer!r} is this peer itself"
                    if peer == self.name
                    else f"nobody called {peer!r} has been in the group"
                )
            self._driver.check(peer, frames)
            if why_not := link.why_no_room(size):
                return why_not
            if isinstance(message, SessionMessage):
                self.sessions.send(message)  # before anything can answer it
            if self._received:
                self._take_received(peer)  # whoever answers has done what it answers
            is_behind = link.is_sending
            link.keep(kind, frames, size)
            if is_behind:
                self._unsent[peer] = link
                self._wake_io()
            else:
                self._send_batches(link)
            if link.owes_ack:  # it is away, or others go first
                self._owe(link)
            return None

    def _send_batches(self, link: Link) -> None:
        while (packet := link.next_packet()) is not None:
            self._send(link, packet)
        if not link.owes_ack:  # it went with it
            self._owed.pop(link.name, None)

    def has_room(self, message: Message, size_bytes: int) -> bool:
        """post() would not wait. Call it under `lock`."""
        link = self._links.get(message.destination)
        return link is None or link.why_no_room(size_bytes) is None

    def received(self, delivery: Delivery) -> None:
        """The program gets this message, and may work at it: it is taken when the program next
        waits, or answers. Call it under `lock`."""
        self._received.append(delivery)

    def _take_received(self, peer: str | None = None) -> None:
        """Take what the program has done; or only what is of a peer that is sent to now, whose ack
        goes with that."""
        if peer is None:
            while self._received:
                self.take(self._received[0])  # before it is off the list: an interrupt may come
                self._received.popleft()
            return
        others = []
        for delivery in self._received:
            if delivery.peer != peer:
                others.append(delivery)
            elif (packet := self._links[peer].take(delivery)) is not None:
                self._send(self._links[peer], packet)
        self._received = deque(others)

    def take(self, delivery: Delivery) -> None:
        """The application has this message. Call it under `lock`. Twice does no harm."""
        link = self._links.get(delivery.peer)
        if link is None:
            return  # its peer has been forgotten
        packet = link.take(delivery)
        if packet is not None:
            self._owed.pop(link.name, None)
            self._send(link, packet)
        elif link.owes_ack:
            self._owe(link)
        if self._waiting.behind:
            self._ask_next()

    def _ask_next(self) -> None:
        """Ask one of the peers whose messages found no room, if there is room now. One at a time:
        all together might send more than that again."""
        behind = self._waiting.behind
        while behind and not self._waiting.fills(0.5, self._outbox.bounds):
            name, link = next(iter(behind.items()))
            del behind[name]
            # Otherwise it has been asked, is away, or has a bound of its own to wait for.
            if link.is_behind and (packet := link.ack()) is not None:
                self._send(link, packet)
                return

    def has_left(self, peer: str) -> bool:
        """Whether a peer has said that it leaves the group, and no other process has its name yet.
        Call it under `lock`."""
        link = self._links.get(peer)
        return link is not None and link.has_left

    # --- in ---

    def wake(self) -> None:
        """Let the threads in wait_for() look again. Safe in a signal handler."""
        with self.lock:
            self._notify()

    def wait_for(
        self, attempt: Callable[[], T | None], deadline: float, *, is_working: bool = False
    ) -> T | None:
        """What `attempt` gives as soon as it gives something; None if it does not by the deadline,
        on time.monotonic(). It is called under `lock`.

        is_working: the program may still work at what it has received last, which is not
            acknowledged yet therefore.
        Raises Closed and MembershipLost.
        """
        while True:
            with self.lock:
                if self._failure is not None:
                    raise self._failure
                if self._received and not is_working:
                    self._take_received()
                result = attempt()
                if result is not None:
                    return result
                if self._received and not is_working:
                    self._take_received()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                waiter = threading.Lock()
                waiter.acquire()
                self._waiters.append(waiter)
            if not waiter.acquire(timeout=min(left_s, LONGEST_S)):
                with self.lock, suppress(ValueError):  # it has been notified meanwhile
                    self._waiters.remove(waiter)

    def _notify(self) -> None:
        """Let the threads in wait_for() look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()

    def _on_packet(self, frames: Frames) -> None:
        with self.lock:
            if self._failure is not None:
                return
            try:
                self._handle_packet(frames)
            except MalformedMessage as error:
                log.warning("malformed_message", error=str(error))
            # The I/O thread tells the others when it has done all else, see _run().
            if self._waiters and threading.current_thread() is not self._io:
                self._notify()

    def _on_broken(self, peer: str) -> None:
        with self.lock:
            link = self._links.get(peer)
            if self._failure is None and link is not None and link.is_here:
                self._send_kept(link)

    def _handle_packet(self, frames: Frames) -> None:
        head = read_head(frames[0]) if frames else None
        if head is None or head.name == self.name:
            raise MalformedMessage("a packet of nobody")
        if head.to != self.name:
            return  # for one that was at our address before us
        if head.name not in self._links and len(self._strangers_since) >= MAX_STRANGERS:
            self._has_refused = True
            raise MalformedMessage(f"{head.name!r} is not in the group")
        self._handle_from(self._link(head.name), head, frames[1:])

    def _handle_from(self, link: Link, head: Head, frames: Frames) -> None:
        """Raises MalformedMessage as Link.received() does."""
        for delivery in link.received(head, frames):
            self._hand(delivery)
        if link.is_holding and link.name not in self._held_since:
            self._held_since[link.name] = time.monotonic()
            log.info("held_until_known", peer=link.name, incarnation=head.incarnation)
        for packet in link.again(head):
            self._send(link, packet)
        if link.owes_ack:
            self._owe(link)

    def _hand(self, delivery: Delivery) -> None:
        """Hand over a message that counts as heard: it is not sent again."""
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
        too. One for which it raises something is dropped, with a line in the log."""
        with self.lock:
            self._on_collective = handler
            unheard, self._unheard = self._unheard, []
            for message, delivery in unheard:
                self._hand_to_collectives(message, delivery)

    def _owe(self, link: Link) -> None:
        """An ack, in a moment."""
        if not self._owed:
            self._owed_since = time.monotonic()
            self._wake_io()
        self._owed[link.name] = link

    # --- the I/O thread ---

    def _wake_io(self) -> None:
        if self._is_polling and threading.current_thread() is not self._io:
            self._is_polling = False
            self._driver.wake()

    def _run(self) -> None:
        try:
            while True:
                with self.lock:
                    if self._failure is not None:
                        return
                    wait_s = self._do_what_is_due(time.monotonic())
                    self._is_polling = True
                    # Last: a thread that is woken waits until Python's lock is free, in the driver.
                    waiters, self._waiters = self._waiters, []
                for waiter in waiters:
                    waiter.release()
                self._driver.run(wait_s)
        except Exception as error:  # a defect: the program must not wait for what never comes
            log.exception("messaging_failed", peer=self.name)
            self._on_lost(MessagingError(f"the I/O thread has failed: {error!r}"))

    def _do_what_is_due(self, now: float) -> float:
        """Returns for how long nothing will be."""
        self._is_polling = False
        while self._unsent:
            _, link = self._unsent.popitem()
            self._send_batches(link)
        if self._unreached:
            self._reach_those_who_are_due(now)
        if self._owed and now - self._owed_since >= ACK_DELAY_S:
            self._send_acks()
        if now >= self._probe_at:
            self._probe_at = now + PROBE_S
            self._probe(now)
            self._ask_next()
        if (self._away_since or self._strangers_since) and now >= self._forget_at:
            self._forget_those_long_gone(now)
        if self._held_since:
            self._drop_long_held(now)
        wait_s = self._probe_at - now
        if self._owed:
            wait_s = min(wait_s, self._owed_since + ACK_DELAY_S - now)
        if self._unreached:
            wait_s = min(wait_s, min(retry.at for retry in self._unreached.values()) - now)
        return max(0.0, wait_s)

    def _probe(self, now: float) -> None:
        """Ask peers where they are that have not heard what was sent, and say nothing new."""
        before, self._probes = self._probes, {}
        if not self._outbox.num_messages:
            return
        for name, link in self._links.items():
            if not (link.is_here and link.has_unheard):
                continue
            probe = before.get(name)
            if probe is None or probe.so_far != link.so_far:
                probe = _Probe(link.so_far, now + PROBE_S, PROBE_S)
            elif probe.at <= now:
                probe.wait_s = min(2 * probe.wait_s, MAX_PROBE_S)
                probe.at = now + probe.wait_s
                packet = link.where()
                if packet is not None:
                    self._send(link, packet)
            self._probes[name] = probe

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
                self._take_received()
                self._send_acks()
            for link in self._links.values():
                self._send_batches(link)
                packet = None if has_failed else link.leaving()
                if packet is not None:
                    self._send(link, packet)
                if link.num_kept and not link.is_here:
                    log.warning("not_delivered", peer=link.name, num_messages=link.num_kept)
            self._failure = Closed(f"{self.name!r} has been closed")
            self._notify()
        self._driver.wake()
        if self._io.is_alive() and threading.current_thread() is not self._io:
            self._io.join(END_S)
        try:
            self._driver.close(linger_s)
        finally:
            with suppress(MessagingError):  # it expires by itself
                self._membership.leave()


def _place(member: Member | None) -> tuple[int, str] | None:
    """A process, and where it is."""
    return None if member is None else (member.incarnation, member.address)
