"""A peer's own end: to talk to its peers.

    with Proxy("training", "master", {"worker": 3}, discovery="127.0.0.1:50051") as proxy:
        for reply in proxy.scatter("sum", SessionType.TASK, [(name, part) for ...]):
            total += reply.body

Every time that is given is in seconds and for the whole call, however many messages it waits for;
without one it is the proxy's own `timeout_s`, and `math.inf` waits without end. What waits for many
gives those that have come, and says who is missing. Nothing here ends the process.

A proxy may be used from several threads. If several receive, each message goes to one of them; the
answers that a thread awaits, in send() or receive_by_id(), go to no other. What receive() and
events() return is for one thread, and so is a group; close() gives Closed to all who wait.
"""

import atexit
import math
import os
import sys
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec

from xain_foundation.names import why_not
from xain_messaging.codec import Frame, encode, num_bytes, snapshot
from xain_messaging.collectives import Collectives, Group
from xain_messaging.discovery import open_discovery
from xain_messaging.drivers import open_driver
from xain_messaging.endpoint import Endpoint
from xain_messaging.errors import OutboxFull, PeersMissing, TooFewPeers
from xain_messaging.inbox import Awaited, Entry
from xain_messaging.links import DEFAULT_BOUNDS, MESSAGE, Bounds
from xain_messaging.messages import (
    SAME,
    Body,
    Message,
    SessionMessage,
    SessionType,
)
from xain_messaging.ports import Discovery, Driver, Roster

TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 60.0
MINIMAL_PEERS_TIMEOUT_S = 300.0
LINGER_S = 5.0
MAX_REMEMBERED = 65_536  # sessions that were begun here: of whom an answer is awaited


@dataclass(frozen=True, slots=True)
class PeersChanged:
    """Somebody has come or gone. peers: see Proxy.peers."""

    peers: Mapping[str, Sequence[str]]


class Peers(dict[str, list[str]]):
    """Names by role. A role that nobody has is an empty list."""

    def __missing__(self, role: str) -> list[str]:
        return []


class Replies(list[Message]):
    """The answers that have come, in their order. missing: the names of those whose have not."""

    def __init__(self, messages: Iterable[Message] = (), missing: Sequence[str] = ()) -> None:
        super().__init__(messages)
        self.missing = tuple(missing)

    def complete(self) -> Self:
        """These, if nobody is missing. Raises PeersMissing with their names."""
        if self.missing:
            names = ", ".join(sorted(set(self.missing)))
            raise PeersMissing(f"no answer in time from {names}", self.missing)
        return self


@dataclass(slots=True)
class _Posted:
    """sessions: of all that was to be sent, in its order. sent: names and sessions of what is on
    its way. unsent: that for which there was no room, and why_not."""

    sessions: list[str] = field(default_factory=list)
    sent: list[tuple[str, str]] = field(default_factory=list)
    unsent: list[Message] = field(default_factory=list)
    why_not: str = ""


class Proxy:
    """Joins the group and waits for the peers that it expects.

    group_name: those in other groups do not exist for it.
    role: its own type of peer, which conditional events and broadcasts go by.
    expected_peers: how many of each role are awaited before the construction is over.
    name: its own, unique in the group; by default its role and some letters. Who comes back under a
        name gets what was kept for it.
    discovery: an instance; or "HOST:PORT" of a coordinator; or "redis://HOST:PORT".
    driver: an instance, which is closed with the proxy; or "grpc" or "zmq".
    minimal_peers: of each role, or of each of `expected_peers` alike. Who asks or tells while there
        are fewer waits for them, up to minimal_peers_timeout_s, or its own timeout if it has given
        one. Replies do not wait.
    bounds: of what is kept for one peer until it has taken it, be it here or away, and for all
        together. Who sends more waits for room.
    Raises NameTaken, DiscoveryUnavailable, and PeersMissing if not all have come in time.
    """

    def __init__(
        self,
        group_name: str,
        role: str,
        expected_peers: Mapping[str, int] | None = None,
        *,
        name: str | None = None,
        discovery: Discovery | str,
        driver: Driver | str = "grpc",
        minimal_peers: int | Mapping[str, int] = 1,
        minimal_peers_timeout_s: float = MINIMAL_PEERS_TIMEOUT_S,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        timeout_s: float = TIMEOUT_S,
        bounds: Bounds | None = None,
    ) -> None:
        for what, text in (("group", group_name), ("role", role), ("name", name or role)):
            reason = why_not(text)
            if reason is None and (text == "*" or (what == "role" and ":" in text)):
                reason = "conditional events could not tell it from their own signs"
            if reason is not None:
                raise ValueError(f"{text!r} cannot be a {what}: {reason}")
        expected = dict(expected_peers or {})
        bounds = bounds or DEFAULT_BOUNDS
        self.group_name = group_name
        self.timeout_s = timeout_s
        self._minimal = (
            dict(minimal_peers)
            if isinstance(minimal_peers, Mapping)
            else dict.fromkeys(expected, minimal_peers)
        )
        self._minimal_timeout_s = minimal_peers_timeout_s
        # By session: of whom so many answers are awaited. Under the endpoint's lock.
        self._asked: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._is_stopped = False
        self._last: int | None = None  # of the inbox, that receive() gives after stop()
        self._counted: tuple[Roster | None, Counter[str]] = (None, Counter())
        deadline = time.monotonic() + join_timeout_s
        # First what can fail and holds nothing: a driver has a port.
        found = open_discovery(discovery) if isinstance(discovery, str) else discovery
        self.endpoint = Endpoint(
            open_driver(driver) if isinstance(driver, str) else driver,
            found,
            group_name,
            role,
            name or f"{role}-{uuid.uuid4().hex[:8]}",
            join_timeout_s=join_timeout_s,
            bounds=bounds,
        )
        self._process_id = os.getpid()
        atexit.register(self._close_at_exit)
        self._collectives = Collectives(self.endpoint)
        try:
            if missing := self._wait_for_peers(expected, deadline):
                raise PeersMissing(f"waited {join_timeout_s:g} s for {', '.join(missing)}", missing)
        except BaseException:  # whatever it is, an interrupt too: nobody is to wait for us
            self.close(0.0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(has_failed=error is not None and not isinstance(error, SystemExit))

    def close(self, linger_s: float = LINGER_S) -> None:
        """Send what is on its way, for at most so long; then leave the group. May be called again.

        The call waits first, a second at most, until the peers that are here say that they have
        heard what was sent to them. What is kept for a peer that is away is lost, with a line in
        the log (`not_delivered`). At the end of a program all proxies are closed so.

        After an exception that leaves the `with` block, or that nobody catches, it does not wait,
        and does not say what has been taken: see Endpoint.close().
        """
        self._close(linger_s)

    def _close(self, linger_s: float = LINGER_S, *, has_failed: bool = False) -> None:
        self.endpoint.close(linger_s, has_failed=has_failed)
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        if os.getpid() == self._process_id:  # a fork must not leave in the name of its parent
            self._close(has_failed=hasattr(sys, "last_value"))  # Python has shown an exception

    # --- who is there ---

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def role(self) -> str:
        return self.endpoint.role

    @property
    def rank(self) -> int:
        """Among those of its role, from 0 on."""
        return self.endpoint.member.rank

    @property
    def peers(self) -> Peers:
        """The names of all others who are here now, by role, in the order of their ranks. A role
        that nobody has is an empty list."""
        found = Peers()
        for member in sorted(self.endpoint.roster.values(), key=lambda m: (m.role, m.rank)):
            if member.name != self.name:
                found.setdefault(member.role, []).append(member.name)
        return found

    def barrier(self, name: str, num_members: int, timeout_s: float | None = None) -> None:
        """Wait until so many members of the group, this one among them, wait at the barrier of this
        name. Who has given up is not counted. Two threads are one member: see ports.Membership for
        what becomes of the first.

        Raises TimedOut, ValueError for a name or number that no barrier has, and Closed if this is
        no member any more, by close() or against its will.
        """
        waited_s = self.timeout_s if timeout_s is None else timeout_s
        self.endpoint.membership.barrier(name, num_members, waited_s)

    def _wait_for_peers(self, wanted: Mapping[str, int], deadline: float) -> list[str]:
        """Who is still missing at the deadline."""

        def missing() -> list[str]:
            here = self._num_here()
            return [
                f"{role} ({here[role]} of {number} are here)"
                for role, number in wanted.items()
                if here[role] < number
            ]

        if not missing():
            return []
        is_met = self.endpoint.wait_for(lambda: None if missing() else True, deadline)
        return [] if is_met else missing()

    def _num_here(self) -> Counter[str]:
        """Of each role, without ourselves. Asked for each message that begins something."""
        roster = self.endpoint.roster
        if roster is not self._counted[0]:
            others = (member.role for member in roster.values() if member.name != self.name)
            self._counted = (roster, Counter(others))
        return self._counted[1]

    def _require_peers(self, timeout_s: float | None) -> None:
        """As many as there must be, for somebody to begin something."""
        if not self._minimal:
            return
        waited_s = self._minimal_timeout_s if timeout_s is None else timeout_s
        waited_s = min(waited_s, self._minimal_timeout_s)
        if missing := self._wait_for_peers(self._minimal, time.monotonic() + waited_s):
            raise TooFewPeers(
                f"waited {waited_s:g} s for the least that there must be: {', '.join(missing)}",
                missing,
            )

    # --- to receive ---

    def receive(self, timeout_s: float | None = None) -> Iterator[Message]:
        """Messages as they come, those that came while something else was awaited first. Ends when
        timeout_s are over, by default never, or after stop(), which is for good."""
        return self._events(_deadline_of(timeout_s), None)

    def receive_once(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None if there is none in time, or after stop()."""
        for message in self.receive(self.timeout_s if timeout_s is None else timeout_s):
            return message
        return None

    def events(self, timeout_s: float | None = None) -> Iterator[Message | PeersChanged]:
        """As receive(), and the peers whenever one has come or gone since the last event, or, for
        the first, since this call."""
        return self._events(_deadline_of(timeout_s), self.endpoint.roster)

    def _events(self, deadline: float, seen: Roster | None) -> Iterator[Any]:
        """seen: of the peers; None if nobody wants to know of them."""
        endpoint = self.endpoint
        popped: list[Entry] = []

        def take() -> tuple[Message | PeersChanged | None] | None:
            nonlocal seen, popped
            if seen is not None and endpoint.roster is not seen:
                seen = endpoint.roster
                return (PeersChanged(self.peers),)
            if self._is_stopped and self._last is None:
                self._last = endpoint.inbox.newest
            entry = endpoint.inbox.oldest(self._last)
            if entry is None:
                return None if self._last is None else (None,)
            popped = [entry]
            self._take(entry)
            return (entry.message,)

        while True:
            try:
                taken = endpoint.wait_for(take, deadline)
            except BaseException:  # an interrupt: the message is for the next call
                with endpoint.lock:
                    endpoint.inbox.put_back(popped)
                raise
            if taken is None or taken[0] is None:
                return
            popped = []
            yield taken[0]
            del taken  # the next may be long in coming

    def _take(self, entry: Entry) -> None:
        """Remove a message from the inbox, for a call that returns it. Call it under the endpoint's
        lock; put it back if the call is interrupted."""
        message = entry.message
        self.endpoint.received(entry.delivery)
        asked = self._asked.get(message.session_id)
        is_answer = message.is_final if isinstance(message, SessionMessage) else True
        if asked is not None and is_answer and message.source in asked:
            asked[message.source] -= 1
            if not asked[message.source]:
                del asked[message.source]
            if not asked:
                del self._asked[message.session_id]
        self.endpoint.inbox.pop(entry)

    def receive_by_id(
        self, targets: str | Sequence[str], timeout_s: float | None = None
    ) -> Replies:
        """The answers in these sessions, as isend(), iscatter() and ibroadcast() return them: one
        for each time that a session is named. An ack is not an answer to a task; it is taken, and
        the answer awaited. All else stays for the other calls."""
        sessions = [targets] if isinstance(targets, str) else list(targets)
        deadline = self._deadline(timeout_s)
        awaited = Awaited(set(sessions))
        try:
            self._reserve(awaited)
            return self._answers(sessions, deadline, awaited)
        finally:
            self._release(awaited)

    def _reserve(self, awaited: Awaited) -> None:
        with self.endpoint.lock:
            self.endpoint.inbox.reserve(awaited)

    def _release(self, awaited: Awaited) -> None:
        with self.endpoint.lock:
            if self.endpoint.inbox.release(awaited):
                self.endpoint.wake()  # other calls may want it

    def _answers(self, sessions: Sequence[str], deadline: float, awaited: Awaited) -> Replies:
        """See receive_by_id(). If this is interrupted, _release() puts back what has come."""
        wanted: dict[str, int] = {}  # how many answers in each session
        for session_id in sessions:
            wanted[session_id] = wanted.get(session_id, 0) + 1

        def take() -> bool | None:
            for session_id in list(wanted):
                while wanted[session_id] and (entry := self.endpoint.inbox.answer(session_id)):
                    message = entry.message
                    if isinstance(message, SessionMessage) and not message.is_final:
                        self._take(entry)  # an ack
                        continue
                    # The message has its own memory; the frames may go.
                    awaited.entries[entry.number] = entry.without_frames()
                    self._take(entry)
                    wanted[session_id] -= 1
                if not wanted[session_id]:
                    del wanted[session_id]
            return None if any(map(self._may_be_answered, wanted)) else True

        self.endpoint.wait_for(take, deadline)
        missing = []
        with self.endpoint.lock:
            for session_id, number in wanted.items():
                asked = self._asked.get(session_id, {})
                names = [name for name, num_awaited in asked.items() for _ in range(num_awaited)]
                missing += (names or [f"session {session_id}"] * number)[:number]
        replies = Replies([entry.message for entry in awaited.entries.values()], missing)
        awaited.entries = {}
        return replies

    def _may_be_answered(self, session_id: str) -> bool:
        """Whether an answer may still come: not when all peers that were asked have left."""
        asked = self._asked.get(session_id)
        return not asked or not all(map(self.endpoint.has_left, asked))

    # --- to send ---

    def ask(self, name: str, tag: str, body: Body = None, timeout_s: float | None = None) -> Body:
        """Send a task to one peer, and return the body of its answer.

        Raises PeersMissing if no answer has come in time, or if the peer leaves before it answers,
        and what isend() raises.
        """
        task = SessionMessage(tag, self.name, name, body)
        (reply,) = self.send(task, timeout_s).complete()
        return reply.body

    def send(self, message: Message, timeout_s: float | None = None) -> Replies:
        """Send, and wait for the answer: one reply, or none and who is missing; so is one for whom
        there was no room in time."""
        return self._ask([message], timeout_s)

    def isend(self, message: Message, timeout_s: float | None = None) -> list[str]:
        """Send, and go on. Returns the session to await an answer in. For a peer that is away it is
        kept.

        timeout_s: for room, see `bounds`. Those of several for whom there is room do not wait for
            the others; OutboxFull says who has been sent to.
        Raises BodyError, SessionError, UnknownPeer, OutboxFull and TooFewPeers.
        """
        return self._begin([message], timeout_s)

    def scatter(
        self,
        tag: str,
        session_type: SessionType,
        destination_body_list: Iterable[tuple[str, Body]],
        timeout_s: float | None = None,
        *,
        only_here: bool = False,
    ) -> Replies:
        """Send to each peer its own body, and wait for all answers.

        A peer that leaves before it answers is `missing` at once, and not when the time is over.
        only_here: a peer that is not in the group now gets nothing, and is `missing`.
        """
        pairs = list(destination_body_list)
        away: list[str] = []
        if only_here:
            roster = self.endpoint.roster
            away = [name for name, _ in pairs if name not in roster]
            pairs = [(name, body) for name, body in pairs if name in roster]
        replies = self._ask(self._each(tag, session_type, pairs), timeout_s)
        return Replies(replies, (*replies.missing, *away))

    def iscatter(
        self,
        tag: str,
        session_type: SessionType,
        destination_body_list: Iterable[tuple[str, Body]],
        timeout_s: float | None = None,
    ) -> list[str]:
        """To each its own body, and go on. Returns a session for each."""
        return self._begin(self._each(tag, session_type, destination_body_list), timeout_s)

    def broadcast(
        self,
        role: str,
        tag: str,
        session_type: SessionType,
        body: Body = None,
        timeout_s: float | None = None,
    ) -> Replies:
        """The same to all of a role who are here, and wait for all answers. Raises PeersMissing if
        nobody of the role is here."""
        return self._ask(self._all(role, tag, session_type, body), timeout_s)

    def ibroadcast(
        self,
        role: str,
        tag: str,
        session_type: SessionType,
        body: Body = None,
        timeout_s: float | None = None,
    ) -> list[str]:
        """The same to all of a role who are here, and go on. Returns their one session, once for
        each. Raises PeersMissing if nobody of the role is here."""
        return self._begin(self._all(role, tag, session_type, body), timeout_s)

    def reply(
        self,
        message: Message,
        tag: Any = SAME,
        body: Body = SAME,
        *,
        ack_reply: bool = False,
        timeout_s: float | None = None,
    ) -> list[str]:
        """Answer a message that has come: with the last stage of its session, or, with ack_reply,
        only that it has come. Waits for nobody but for room. Raises SessionError if it has had that
        answer."""
        if isinstance(message, SessionMessage):
            answer: Message = message.reply(tag, body, ack=ack_reply)
        else:
            answer = message.reply(tag, body)
        return self._post_all([answer], self._deadline(timeout_s), asks=False)

    def forward(
        self,
        message: Message,
        destination: str,
        tag: Any = SAME,
        body: Body = SAME,
        timeout_s: float | None = None,
    ) -> list[str]:
        """Pass on a message that has come. Its answer comes here, in the same session."""
        forwarded = message.forward(destination, tag, body)
        return self._post_all([forwarded], self._deadline(timeout_s))

    def _each(
        self, tag: str, session_type: SessionType, destinations: Iterable[tuple[str, Body]]
    ) -> Iterator[SessionMessage]:
        for destination, body in destinations:
            yield SessionMessage(tag, self.name, destination, body, session_type)

    def _all(
        self, role: str, tag: str, session_type: SessionType, body: Body
    ) -> Iterator[SessionMessage]:
        """Who they are is asked when the first is sent."""
        names = self.peers[role]
        if not names:
            raise PeersMissing(f"nobody of the role {role!r} is here", [role])
        first = SessionMessage(tag, self.name, names[0], body, session_type)
        for name in names:
            yield msgspec.structs.replace(first, destination=name)

    def _ask(self, messages: Iterable[Message], timeout_s: float | None) -> Replies:
        begun_at = time.monotonic()
        self._require_peers(timeout_s)
        # Without a time of its own, the wait for peers has its own.
        deadline = self._deadline(timeout_s, None if timeout_s is None else begun_at)
        awaited = Awaited()
        try:
            self._reserve(awaited)
            posted = self._post(messages, deadline, awaited=awaited)
            sent = list(posted.sessions)
            for message in posted.unsent:
                sent.remove(message.session_id)
            found = self._answers(sent, deadline, awaited)
            return Replies(found, [*found.missing, *(m.destination for m in posted.unsent)])
        finally:
            self._release(awaited)

    def _begin(self, messages: Iterable[Message], timeout_s: float | None) -> list[str]:
        begun_at = time.monotonic()
        self._require_peers(timeout_s)
        deadline = self._deadline(timeout_s, None if timeout_s is None else begun_at)
        return self._post_all(messages, deadline)

    def _post_all(
        self, messages: Iterable[Message], deadline: float, *, asks: bool = True
    ) -> list[str]:
        """As _post(). Returns their sessions; raises OutboxFull if one has not gone out."""
        posted = self._post(messages, deadline, asks=asks)
        if posted.unsent:
            raise OutboxFull(posted.why_not, posted.sent)
        return posted.sessions

    def _post(
        self,
        messages: Iterable[Message],
        deadline: float,
        *,
        asks: bool = True,
        awaited: Awaited | None = None,
    ) -> "_Posted":
        """First those for whom there is room, in their order, then the others, as there is. If one
        fails, those before it for whom there was room are on their way.

        asks: answers are awaited; awaited: by this call alone.
        """
        posted = _Posted()
        waiting: list[tuple[Message, list[Frame]]] = []
        frames: list[Frame] = []
        copied: list[Frame] = []
        encoded = None
        for message in messages:
            if message.source != self.name:
                raise ValueError(f"{self.name!r} cannot send as {message.source!r}")
            if message.message_id != encoded:  # those of one broadcast are one message
                encoded = message.message_id
                frames = encode(message)
                copied = snapshot(frames)
            posted.sessions.append(message.session_id)
            if awaited is not None:
                with self.endpoint.lock:
                    awaited.sessions.add(message.session_id)
            is_behind = any(other.destination == message.destination for other, _ in waiting)
            if is_behind or not self._post_now(message, copied, posted, asks):
                waiting.append((message, frames))  # not the copy: there may be many
        del frames, copied

        def next_with_room() -> int | None:
            seen = set()
            for i, (message, frames) in enumerate(waiting):
                if message.destination not in seen:
                    if self.endpoint.has_room(message, num_bytes(frames)):
                        return i
                    seen.add(message.destination)
            return None

        while waiting and (i := self.endpoint.wait_for(next_with_room, deadline)) is not None:
            message, frames = waiting[i]
            if self._post_now(message, snapshot(frames), posted, asks):
                del waiting[i]
        posted.unsent = [message for message, _ in waiting]
        return posted

    def _post_now(
        self, message: Message, frames: list[Frame], posted: "_Posted", asks: bool
    ) -> bool:
        """Whether there is room."""
        with self.endpoint.lock:
            why_not = self.endpoint.try_to_post(message, MESSAGE, frames)
            if why_not is not None:
                posted.why_not = why_not
                return False
            if asks:
                self._remember(message)
        posted.sent.append((message.destination, message.session_id))
        return True

    def _remember(self, message: Message) -> None:
        """Of whom an answer is awaited, to name those of whom none has come."""
        asked = self._asked.setdefault(message.session_id, {})
        asked[message.destination] = asked.get(message.destination, 0) + 1
        if len(self._asked) > MAX_REMEMBERED:
            self._asked.popitem(last=False)

    def _deadline(self, timeout_s: float | None, begun_at: float | None = None) -> float:
        began_at = time.monotonic() if begun_at is None else begun_at
        return began_at + (self.timeout_s if timeout_s is None else timeout_s)

    # --- all together ---

    def group(self, name: str, members: Sequence[str] | None = None) -> Group:
        """Those who do collective operations together, this peer among them.

        members: their names, in the order of their ranks, the same at all of them; by default all
            of the role `name` who are here now, and this peer has to be one.
        Raises PeersMissing if one of them is not here.
        """
        if members is None:
            roster = self.endpoint.roster.values()
            there = sorted((member.rank, member.name) for member in roster if member.role == name)
            members = [member for _, member in there]
        return self._collectives.group(name, members, self.timeout_s)

    # --- to stop ---

    def stop(self) -> None:
        """Let receive() end, and receive_once() return None, when all that has come by now is
        taken, though more comes. For good: nothing that comes later is received, by a later call
        either. Answers can be awaited still, as in send(). Safe in a signal handler."""
        self._is_stopped = True
        self.endpoint.wake()


def _deadline_of(timeout_s: float | None) -> float:
    """On time.monotonic(); without a time of its own there is none."""
    return time.monotonic() + (math.inf if timeout_s is None else timeout_s)
