"""One peer among its peers: what comes, what goes, and which peers are there.

One I/O thread runs the driver and does what is due: it handles packets, sends acks and batches, and
looks for lost messages. A message to a peer that has taken all others goes out on the program's
thread, which saves a change of threads. A message behind others waits for more of them, which all
go out in one packet: as soon as they fill one, or the program waits for something; at the latest
the I/O thread sends them, delay_s after the first.

A program that waits runs the driver itself, which saves another change of threads: after the I/O
thread has brought it something, the I/O thread leaves the driver to the program for poll_s. A
program that works for longer than that, or waits for longer in vain, gives the driver back.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from xain_foundation.logs.logger import get_logger
from xain_foundation.names import why_not
from xain_foundation.net.backoff import Backoff
from xain_foundation.net.errors import MessagingError
from xain_foundation.waits import LONGEST_S
from xain_membership.errors import Closed
from xain_membership.ports import Discovery, Member, Membership, Roster
from xain_messaging.errors import InvalidMessage, MalformedMessage, OutboxFull
from xain_messaging.format.codec import Frames, Parts, decode, num_bytes
from xain_messaging.format.messages import Message, SessionMessage
from xain_messaging.inbox import Inbox
from xain_messaging.links import (
    COLLECTIVE,
    MESSAGE,
    Bounds,
    Delivery,
    Kind,
    Link,
    Packet,
    Totals,
    read_head,
    require_sender,
)
from xain_messaging.ports import Driver
from xain_messaging.sessions import Sessions

log = get_logger(__name__)

T = TypeVar("T")

# How long a proxy that closes waits until its peers say that they have received its messages.
HEARD_S = 1.0
# Names that are not in the group yet, and that have sent something which is to be asked for.
MAX_UNKNOWN_PEERS = 1024
# Characters in the log of why a message could not be handled.
MAX_WHY = 500

Handler = Callable[[Message, Delivery], None]


@dataclass(slots=True)
class _Probe:
    """Probe of a peer that has not acknowledged all. so_far: its latest acknowledgement."""

    so_far: tuple[int, int]
    at: float
    backoff: Backoff


class Endpoint:
    """Joins on construction; see Discovery.join for what that raises. start() comes next. close()
    closes the driver too."""

    # An ack that no message carries waits for so long, and so does a message behind others that are
    # not taken, unless the program waits for something meanwhile.
    delay_s = 0.01
    # How long the I/O thread leaves the driver to a program that does not wait, and how long a
    # program that waits runs the driver in vain.
    poll_s = 0.01
    end_s = 5.0  # how long close() waits for the I/O thread, beyond the time to linger
    forget_s = 3600.0  # how long messages are kept for a peer that is away
    # After so long without a word of sent messages their receiver is asked what has come; each time
    # after twice as long.
    probe_s = 0.5
    max_probe_s = 30.0
    # Peers that have left. Beyond it the first to leave are forgotten sooner, unless something is
    # kept for them, or waits here.
    max_away = 4096

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
        self.lock = threading.RLock()
        self.roster: Roster = MappingProxyType({})  # all who are in the group now, with us
        self._on_collective: Handler = lambda message, delivery: None
        self._driver = driver
        self._totals = Totals(bounds)
        self._waiters: list[threading.Lock] = []  # each of a thread in wait_for()
        self._is_polling = False  # the I/O thread is in the driver, or about to be
        self._is_woken = False  # and will come out
        self._poller = 0  # the thread of the program that is in the driver
        self._poll_until = 0.0  # the driver is left to the program
        self._resume = threading.Event()  # the I/O thread is to run the driver again
        self._num_packets = 0
        self._linger_s = 0.0  # of close()
        self._links: dict[str, Link] = {}
        self._unsent: dict[str, Link] = {}  # with messages that travel at _send_at, or sooner
        self._received: list[Delivery] = []  # messages that the program may be working at
        self._owed: dict[str, Link] = {}  # acks
        self._owed_since = 0.0
        self._send_at = 0.0  # those of _unsent
        self._has_posted = False  # some of them since the I/O thread has looked
        self._due_at = 0.0  # what the I/O thread does next, when it is polling
        self._probes: dict[str, _Probe] = {}
        self._probe_at = 0.0
        self._away_since: dict[str, float] = {}  # on time.monotonic(), the oldest first
        self._unreached: set[str] = set()  # members to connect to again
        self._unknown_peers: set[str] = set()
        self._failure: MessagingError | None = None
        try:
            self.membership: Membership = discovery.join(
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
        self._io = threading.Thread(target=self._run, name="messages-io", daemon=True)

    def start(self, on_collective: Handler) -> None:
        """Begin to receive.

        on_collective: gets the messages of collective operations, under `lock`. A message for which
            it raises something is dropped, with a line in the log.
        """
        self._on_collective = on_collective
        self._driver.serve(self._on_packet, self._on_broken)
        self._io.start()

    # --- who is there ---

    @property
    def member(self) -> Member:
        """The entry of this peer in the group."""
        return self.membership.member

    def _on_change(self, roster: Roster) -> None:
        """Connect to new members, and mark the links of former members as away."""
        with self.lock:
            if self._failure is not None:
                return  # the driver is being closed
            before, self.roster = self.roster, MappingProxyType(dict(roster))
            now = time.monotonic()
            for name in before.keys() - roster.keys() - {self.name}:
                self._driver.disconnect(name)
                self._unreached.discard(name)
                self._links[name].gone()
                self._away_since[name] = now
                log.info("peer_away", peer=name, kept=self._links[name].num_kept)
            for name, member in roster.items():
                if name != self.name and _process(before.get(name)) != _process(member):
                    self._connect(member)
            self._forget_those_long_gone(now)
            self._notify()

    def _connect(self, member: Member) -> None:
        """Make the link to a member, or tell it of a new process, and open a connection."""
        self._away_since.pop(member.name, None)
        link = self._links.get(member.name)
        if link is None:
            own = self.roster[self.name].incarnation
            link = self._links[member.name] = Link(self.name, own, member.name, self._totals)
        link.listed(member.incarnation)
        if member.name in self._unknown_peers:
            self._unknown_peers.discard(member.name)
            link.missed()
        self._try_to_connect(member, link)

    def _try_to_connect(self, member: Member, link: Link) -> None:
        """Open a connection to a member and send kept messages. Failures are tried again."""
        try:
            self._driver.connect(member.name, member.address)
        except Exception as error:
            # A driver may refuse a malformed address, and the system one connection too many: the
            # other peers must not suffer from it.
            self._cannot_reach(link, error)
            return
        log.debug("peer_here", peer=member.name, address=member.address)
        self._send_kept(link)
        if link.is_here:
            self._unreached.discard(member.name)

    def _cannot_reach(self, link: Link, error: Exception) -> None:
        """Mark a peer as away; the I/O thread tries again to connect to it."""
        link.gone()
        level = log.debug if link.name in self._unreached else log.warning
        self._unreached.add(link.name)
        level("cannot_connect", peer=link.name, error=str(error))

    def _send(self, link: Link, packet: Packet | None) -> None:
        """Send a packet. If the system cannot, kept messages go out over the next connection."""
        if packet is None or not link.is_here:
            return
        try:
            self._driver.send(link.name, packet)
        except MessagingError:
            raise
        except Exception as error:  # as in _try_to_connect()
            self._cannot_reach(link, error)

    def _on_lost(self, error: Exception) -> None:
        """Fail all calls from now on: this process is no member any more."""
        failure = error if isinstance(error, MessagingError) else MessagingError(str(error))
        with self.lock:
            self._failure = self._failure or failure
            self._notify()
        self._resume.set()
        self._driver.wake()

    def _forget_those_long_gone(self, now: float) -> None:
        """Forget peers that are away for long, or one too many: names are often made up for one
        process, and a group may live for months."""
        for name, since in list(self._away_since.items()):
            link = self._links[name]
            is_one_too_many = len(self._away_since) > self.max_away and not link.num_kept
            if now - since <= self.forget_s and not is_one_too_many:
                continue
            if link.num_kept:
                log.warning("peer_forgotten", peer=name, lost=link.num_kept)
            link.forget()
            if link.has_untaken:
                continue  # if it is back before that is taken, it sends it again
            del self._away_since[name], self._links[name]
            self._totals.left.discard(name)
            for others in (self._owed, self._unsent, self._probes, self._totals.behind):
                others.pop(name, None)
            self.sessions.forget(name)

    def _send_kept(self, link: Link) -> None:
        """Send all kept messages to a peer over its new connection."""
        self._unsent.pop(link.name, None)
        for packet in link.connected():
            self._send(link, packet)
        if link.owes_ack:
            self._owe(link)

    # --- out ---

    def post(self, message: Message, kind: Kind, frames: Parts, deadline: float) -> None:
        """Send a message as try_to_post() does, but wait for room. Raises OutboxFull if there is
        none by the deadline."""
        refusal: str | None = None

        def attempt() -> bool | None:
            nonlocal refusal
            refusal = self.try_to_post(message, kind, frames)
            return True if refusal is None else None

        if self.wait_for(attempt, deadline, is_working=True) is None:
            raise OutboxFull(str(refusal))

    def try_to_post(self, message: Message, kind: Kind, frames: Parts) -> str | None:
        """Send a message, or keep it for a peer that is away. The frames, which are those of the
        message, must not change any more. Returns why there is no room; None if the message is on
        its way. Call it under `lock`.

        Raises InvalidMessage, Closed and MembershipLost.
        """
        peer, size = message.destination, num_bytes(frames)
        if self._failure is not None:
            raise self._failure
        link = self._links.get(peer)
        if link is None:
            raise InvalidMessage(
                f"{peer!r} is this peer itself"
                if peer == self.name
                else f"nobody called {peer!r} has been in the group"
            )
        if (refusal := link.why_no_room(size)) is not None:
            return refusal
        if isinstance(message, SessionMessage):
            self.sessions.send(message)  # before anything can answer it
        if self._received:
            self._take_those_of(link)  # an answer says that its task is done
        if link.keep(kind, frames, size):
            self._send_batches(link)
        else:
            if not self._unsent:
                self._send_at = time.monotonic() + self.delay_s
            self._unsent[peer] = link
            self._has_posted = True
            if self._due_at > self._send_at:
                self._wake_io()
            if link.owes_ack:  # other messages go first
                self._owe(link)
        return None

    def _send_batches(self, link: Link) -> None:
        while link.unsent:
            self._send(link, link.next_packet())
        if self._unsent:
            self._unsent.pop(link.name, None)
        if link.owes_ack:  # the peer is away
            self._owe(link)
        elif self._owed:  # it went with the messages
            self._owed.pop(link.name, None)

    def has_room(self, peer: str, size_bytes: int) -> bool:
        """Whether post() would not wait. Call it under `lock`."""
        link = self._links.get(peer)
        return link is None or link.why_no_room(size_bytes) is None

    def received(self, delivery: Delivery) -> None:
        """The program gets this message, and may work at it: it is taken when the program next
        waits, or answers. Call it under `lock`."""
        self._received.append(delivery)

    def put_back(self, entries: Sequence[Delivery]) -> None:
        """Undo received(): put messages that the program has not got back into the inbox, not
        acknowledged if they are not yet. Call it under `lock`."""
        self._received = [delivery for delivery in self._received if delivery not in entries]
        self.inbox.put_back(entries)

    def _take_received(self) -> None:
        """Count the messages that the program has received as done; acks follow."""
        for delivery in self._received:
            self.take(delivery)
        self._received.clear()

    def _take_those_of(self, link: Link) -> None:
        """Take what came from a peer that is sent to now: the ack goes with that."""
        received, self._received = self._received, []
        for delivery in received:
            if delivery.peer == link.name:
                link.take(delivery)
            else:
                self._received.append(delivery)
        if self._totals.behind:
            self._ask_next()

    def take(self, delivery: Delivery) -> None:
        """Note under `lock` that the program has a message, and send the ack now or soon."""
        link = self._links.get(delivery.peer)
        if link is None:  # its peer has been forgotten
            delivery.is_taken = True
            return
        if link.take(delivery):
            self._owed.pop(link.name, None)
            self._send(link, link.ack())
        elif link.name not in self._owed:
            self._owe(link)
        if self._totals.behind:
            self._ask_next()

    def _ask_next(self) -> None:
        """Ask one of the peers whose messages found no room, if there is room now. One at a time:
        all together might send more than that again."""
        behind = self._totals.behind
        while behind and not self._totals.fills(0.5):
            link = behind.pop(next(iter(behind)))
            if link.is_here:
                self._send(link, link.ack())
                return

    @property
    def left(self) -> set[str]:
        """The peers that have said that they leave the group, and whose names no other process has
        yet. To be used under `lock`."""
        return self._totals.left

    # --- in ---

    def wake(self) -> None:
        """Let the threads in wait_for() look again. Safe in a signal handler."""
        with self.lock:
            self._notify()

    def wait_for(
        self, attempt: Callable[[], T | None], deadline: float, *, is_working: bool = False
    ) -> T | None:
        """Return what `attempt` gives as soon as it gives something; None if it does not by the
        deadline, on time.monotonic(). It is called under `lock`.

        is_working: the program may still work at what it has received last, which is not
            acknowledged yet therefore.
        Raises Closed and MembershipLost.
        """
        has_polled = False
        while True:
            me = 0
            try:
                with self.lock:
                    if self._failure is not None:
                        raise self._failure
                    if self._received and not is_working:
                        self._take_received()
                    if self._unsent:
                        self._send_unsent()
                    result = attempt()
                    if result is not None:
                        if has_polled and self._waiters:
                            self._notify()  # another thread may poll
                        return result
                    now = time.monotonic()
                    left_s = deadline - now
                    can_poll = now < self._poll_until and not (self._poller or self._is_polling)
                    if left_s <= 0 and (has_polled or not can_poll):
                        return None
                    if can_poll:
                        before = self._num_packets
                        me = self._poller = threading.get_ident()
                    else:
                        waiter = threading.Lock()
                        waiter.acquire()
                        self._waiters.append(waiter)
                if me:
                    self._driver.run(max(0.0, min(left_s, self.poll_s)))
            finally:
                if me:
                    self._poller = 0
            if me:
                has_polled = True
                if self._num_packets > before or left_s < self.poll_s:
                    self._poll_until = time.monotonic() + self.poll_s
                else:  # nothing has come for poll_s: the I/O thread goes on
                    self._poll_until = 0.0
                    self._resume.set()
            elif not waiter.acquire(timeout=min(left_s, LONGEST_S)):
                with self.lock, suppress(ValueError):  # it has been notified meanwhile
                    self._waiters.remove(waiter)

    def _notify(self) -> None:
        """Let the threads in wait_for() look again."""
        waiters, self._waiters = self._waiters, []  # first: a signal handler may wake them too
        _wake_all(waiters)
        if self._poller and self._poller != threading.get_ident():
            self._driver.wake()

    def _on_packet(self, frames: Frames, sender: str | None = None, /) -> None:
        """Handle a packet, and wake waiting calls. Raises NoIdentity."""
        if sender is not None:
            require_sender(frames, sender)
        with self.lock:
            self._num_packets += 1
            if frames and self._failure is None:
                self._handle_packet(frames)
            # The I/O thread tells the others when it has done all else, see _run().
            if self._waiters and threading.get_ident() != self._io.ident:
                self._notify()

    def _on_broken(self, peer: str) -> None:
        """Send kept messages again, over the new connection to a peer."""
        with self.lock:
            link = self._links.get(peer)
            if self._failure is None and link is not None and link.is_here:
                self._send_kept(link)

    def _handle_packet(self, frames: Frames) -> None:
        """Hand over the messages of a packet, and answer what its sender asks."""
        try:
            head = read_head(frames[0])
            link = self._links.get(head.name)
            if head.to != self.name:
                return  # of a process that was at this address before
            if link is not None:
                for delivery in link.received(head, frames[1:]):
                    self._hand_over(delivery)
                if head.kind != MESSAGE:
                    for packet in link.answer_to(head):
                        self._send(link, packet)
                if link.owes_ack:
                    self._owe(link)
            elif len(self._unknown_peers) < MAX_UNKNOWN_PEERS and not why_not(head.name):
                # The peer is asked for the packet when the roster lists it.
                self._unknown_peers.add(head.name)
        except MalformedMessage as error:
            log.warning("malformed_message", error=str(error))

    def _hand_over(self, delivery: Delivery) -> None:
        """Decode a message and hand it to the inbox or the collectives. It counts as heard, and is
        not sent again, even if it is dropped."""
        try:
            message = delivery.message = decode(delivery.frames, delivery.peer, self.name)
            if delivery.kind == COLLECTIVE:
                self._on_collective(message, delivery)
            elif not isinstance(message, SessionMessage):
                self.inbox.add(delivery)
            elif self.sessions.is_due(message):
                self.inbox.add(delivery)
                self.sessions.received(message)
            else:
                stage = str(message.session_stage)
                log.warning(
                    "out_of_order", peer=delivery.peer, session=message.session_id, stage=stage
                )
                self.take(delivery)
            delivery.frames = ()  # the message has its own memory, or the same
        except Exception as error:
            # Whatever it leads to: it comes from outside, and must end nothing here.
            why = str(error) if isinstance(error, MalformedMessage) else repr(error)
            log.warning("malformed_message", peer=delivery.peer, error=why[:MAX_WHY])
            self.take(delivery)  # it would only come again

    def _owe(self, link: Link) -> None:
        """Note that a peer is owed an ack, which is sent in a moment."""
        if not self._owed:
            self._owed_since = time.monotonic()
            self._wake_io()
        self._owed[link.name] = link

    # --- the I/O thread ---

    def _wake_io(self) -> None:
        if self._is_polling and not self._is_woken and threading.get_ident() != self._io.ident:
            self._is_woken = True
            self._driver.wake()

    def _run(self) -> None:
        """Do what is due and move packets, in a thread, until the endpoint is closed or fails."""
        num_packets = 0
        try:
            while True:
                with self.lock:
                    if self._failure is not None:
                        break
                    self._resume.clear()
                    now = time.monotonic()
                    wait_s = self._do_what_is_due(now)
                    waiters: list[threading.Lock] = []
                    if self._num_packets > num_packets:
                        waiters, self._waiters = self._waiters, []
                        num_packets = self._num_packets
                    if waiters and self._driver.is_polled:
                        self._poll_until = now + self.poll_s
                    polls = self._is_polling = not self._poller and now >= self._poll_until
                # Last: a thread that is woken waits until Python's lock is free, in the driver.
                _wake_all(waiters)
                if polls:
                    self._driver.run(wait_s)
                else:
                    self._resume.wait(min(wait_s, self.poll_s))
            if isinstance(self._failure, Closed):
                self._driver.close(self._linger_s)
        except Exception as error:  # a defect: the program must not wait for what never comes
            log.exception("messaging_failed", peer=self.name)
            self._on_lost(MessagingError(f"the I/O thread has failed: {error!r}"))

    def _do_what_is_due(self, now: float) -> float:
        """Send due messages, acks and probes. Returns the seconds until more is due."""
        self._is_polling = self._is_woken = False
        if now >= self._send_at:
            self._send_unsent()
        if self._owed and now - self._owed_since >= self.delay_s:
            self._send_acks()
        if now >= self._probe_at:
            self._probe_at = now + self.probe_s
            for name in list(self._unreached):
                self._try_to_connect(self.roster[name], self._links[name])
            self._probe(now)
            self._ask_next()
            self._forget_those_long_gone(now)
        wait_s = self._probe_at - now
        if self._owed:
            wait_s = min(wait_s, self._owed_since + self.delay_s - now)
        if self._unsent:
            wait_s = min(wait_s, self._send_at - now)
        elif self._has_posted:  # there will soon be more: the program need not wake this thread
            wait_s = min(wait_s, self.delay_s)
        self._has_posted = False
        self._due_at = now + wait_s
        return max(0.0, wait_s)

    def _send_unsent(self) -> None:
        for link in list(self._unsent.values()):
            self._send_batches(link)

    def _probe(self, now: float) -> None:
        """Ask silent peers that have not heard all messages what has come; and now and then those
        that have not taken it, since the ack may have been lost."""
        before, self._probes = self._probes, {}
        if not self._totals.num_kept:
            return
        for name, link in self._links.items():
            if not (link.is_here and link.num_kept):
                continue
            probe = before.get(name)
            if probe is None or probe.so_far != link.so_far:
                first_s = self.probe_s if link.has_unheard else self.max_probe_s
                backoff = Backoff(first_s, self.max_probe_s)
                probe = _Probe(link.so_far, now + backoff.next_s(), backoff)
            elif probe.at <= now:
                probe.at = now + probe.backoff.next_s()
                self._send(link, link.where())
            self._probes[name] = probe

    def _send_acks(self) -> None:
        owed, self._owed = self._owed, {}
        for link in owed.values():
            self._send(link, link.ack())

    # --- the end ---

    def close(self, linger_s: float, *, has_failed: bool = False) -> None:
        """Send what waits for at most linger_s, and leave. May be called again.

        Before that it waits, for HEARD_S at most, until the connected peers say that they have
        received what was sent to them: a peer whose roster does not list this process yet drops its
        messages, and asks for them later.

        has_failed: the program may not have done the tasks that it has taken. No acks go out, so
            that these tasks go to the process that comes back under this name.
        """
        try:
            if linger_s > 0 and not has_failed and self._poller != threading.get_ident():
                with suppress(MessagingError):  # it is closed, or no member any more
                    self._wait_until_heard(time.monotonic() + min(linger_s, HEARD_S))
        finally:  # an interrupt of the wait too
            self._end(linger_s, has_failed=has_failed)

    def _wait_until_heard(self, deadline: float) -> None:
        def unheard() -> list[Link]:
            return [link for link in self._links.values() if link.is_here and link.has_unheard]

        with self.lock:
            self._send_unsent()
            for link in unheard() if self._failure is None else ():
                self._send(link, link.where())
        self.wait_for(lambda: None if unheard() else True, deadline)

    def _end(self, linger_s: float, *, has_failed: bool) -> None:
        """Send the last packets, fail all calls with Closed, and leave the group."""
        try:
            with self.lock:
                if not isinstance(self._failure, Closed):
                    self._send_last(has_failed=has_failed)
        finally:
            self._linger_s = linger_s
            self._failure = Closed(f"{self.name!r} has been closed")
            try:
                self.wake()
                self._resume.set()
                self._driver.wake()
                if not self._io.is_alive():
                    self._driver.close(linger_s)
                elif self._poller != threading.get_ident():  # this may be in a signal handler
                    self._io.join(min(linger_s, LONGEST_S) + self.end_s)
            finally:
                with suppress(MessagingError):  # it expires by itself
                    self.membership.leave()

    def _send_last(self, *, has_failed: bool) -> None:
        """Send acks and all messages, and say that this peer leaves."""
        for name in self._totals.left:
            self._driver.disconnect(name)  # packets would linger for a process that has ended
            self._links[name].gone()
        if not has_failed:
            self._take_received()
            self._send_acks()
        for link in self._links.values():
            self._send_batches(link)
            self._send(link, None if has_failed else link.leaving())
            if link.num_kept and not link.is_here:
                log.warning("not_delivered", peer=link.name, num_messages=link.num_kept)


def _wake_all(waiters: Sequence[threading.Lock]) -> None:
    for waiter in waiters:
        waiter.release()


def _process(member: Member | None) -> tuple[int, str] | None:
    """A process, and where it is."""
    return None if member is None else (member.incarnation, member.address)
