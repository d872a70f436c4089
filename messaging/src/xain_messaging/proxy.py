"""A peer's own end: to talk to its peers.

    with Proxy("training", "master", {"worker": 3}, discovery="127.0.0.1:50051") as proxy:
        for reply in proxy.scatter("sum", SessionType.TASK, [(name, part) for ...]):
            total += reply.body

Every time that is given is in seconds and for the whole call, however many messages it waits for;
without one it is the proxy's own `timeout_s`, and `math.inf` waits without end. What waits for many
gives those that have come, and says who is missing. Nothing here ends the process.

A proxy may be used from several threads. If several receive, each message goes to one of them; the
answers that a thread awaits, in send() or receive_by_id(), go to no other. What receive() and
events() return is for one thread, and so is a group. close() ends the iteration of receive() and
events(), and gives Closed to all others who wait.
"""

import atexit
import math
import os
import sys
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec

from xain_foundation.names import why_not
from xain_membership.errors import Closed
from xain_membership.ports import Discovery, Roster
from xain_messaging.collectives import Collectives, Group
from xain_messaging.discovery import open_discovery
from xain_messaging.drivers import open_driver
from xain_messaging.endpoint import Endpoint
from xain_messaging.errors import OutboxFull, PeersMissing
from xain_messaging.format.codec import Parts, num_bytes, parts, snapshot
from xain_messaging.format.messages import (
    SAME,
    Body,
    Message,
    SessionMessage,
    SessionType,
)
from xain_messaging.inbox import Awaited
from xain_messaging.links import DEFAULT_BOUNDS, MESSAGE, Bounds, Delivery
from xain_messaging.ports import Driver

T = TypeVar("T")

TIMEOUT_S = 60.0
JOIN_TIMEOUT_S = 60.0
MINIMAL_PEERS_TIMEOUT_S = 300.0
LINGER_S = 5.0
MAX_REMEMBERED = 65_536  # sessions that were begun here: of whom an answer is awaited
MARO_REDIS = ("localhost", 6379)  # by default
# Arguments that a Proxy of MARO has and ours has not.
_OF_MARO: Final = frozenset(
    {
        "component_type",
        "component_name",
        "driver_type",
        "driver_parameters",
        "redis_address",
        "initial_redis_connect_retry_interval",
        "max_redis_connect_retries",
        "initial_peer_discovery_retry_interval",
        "max_peer_discovery_retries",
        "enable_rejoin",
        "peers_catch_lifetime",
        "enable_message_cache_for_rejoin",
        "max_length_for_message_cache",
        "timeout_for_minimal_peer_number",
        "is_remove_failed_container",
        "max_rejoin_times",
    }
)


@dataclass(frozen=True, slots=True)
class PeersChanged:
    """A peer has joined or left. peers: see Proxy.peers."""

    peers: Mapping[str, Sequence[str]]


class Peers(dict[str, list[str]]):
    """Names of peers by role. A role that no peer has is an empty list."""

    def __missing__(self, role: str) -> list[str]:
        return []


class Replies(list[Message]):
    """The answers that have come, in their order. missing: peers that have not answered."""

    def __init__(self, messages: Iterable[Message] = (), missing: Sequence[str] = ()) -> None:
        super().__init__(messages)
        self.missing = tuple(missing)

    def complete(self) -> Self:
        """The answers, if no peer is missing. Raises PeersMissing with the names of the peers."""
        if self.missing:
            names = ", ".join(sorted(set(self.missing)))
            raise PeersMissing(f"no answer in time from {names}", self.missing)
        return self


class Proxy:
    """Joins the group and waits for the peers that it expects.

    group_name: those in other groups do not exist for it.
    role: its own type of peer, which conditional events and broadcasts go by.
    expected_peers: how many of each role are awaited before the construction is over.
    name: its own, unique in the group; by default that in the certificate of the driver, or its
        role and some letters. Who comes back under a name gets what was kept for it.
    discovery: an instance; or "HOST:PORT" of a coordinator; or "redis://HOST:PORT".
    driver: an instance, which is closed with the proxy; or "grpc" or "zmq".
    minimal_peers: of each role, or of each of `expected_peers` alike. Who asks or tells while there
        are fewer waits for them, up to minimal_peers_timeout_s, or its own timeout if it has given
        one. Replies do not wait.
    bounds: of what is kept for one peer until it has taken it, be it here or away, and for all
        together. Who sends more waits for room.
    Raises NameTaken, DiscoveryUnavailable, and PeersMissing if not all have come in time; TypeError
    for arguments of MARO's Proxy, with the same call as it is here.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> Self:  # __init__ says what these are
        if theirs := _OF_MARO & options.keys():
            raise TypeError(_from_maro(sorted(theirs), arguments, options))
        return super().__new__(cls)

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
        # Peers that were asked, by session, once for each answer. The endpoint's lock guards it.
        self._asked: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        self._is_stopped = False
        self._last: int | None = None  # of the inbox, that receive() gives after stop()
        self._enough: Roster | None = None  # with which the minimal peers were here
        deadline = time.monotonic() + join_timeout_s
        # First what can fail and holds nothing: a driver has a port.
        found = open_discovery(discovery) if isinstance(discovery, str) else discovery
        opened = open_driver(driver) if isinstance(driver, str) else driver
        name = name or getattr(opened, "own_name", None)
        self.endpoint = Endpoint(
            opened,
            found,
            group_name,
            role,
            name or f"{role}-{uuid.uuid4().hex[:8]}",
            join_timeout_s=join_timeout_s,
            bounds=bounds,
        )
        self._process_id = os.getpid()
        atexit.register(self._close_at_exit)
        try:
            self._collectives = Collectives(self.endpoint)
            self.endpoint.start(self._collectives.registry.on_message)
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
        """Wait for peers. Returns the roles that are incomplete at the deadline."""

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
        """The number of others of each role."""
        roster = self.endpoint.roster.values()
        return Counter(member.role for member in roster if member.name != self.name)

    def _require_peers(self, timeout_s: float | None) -> None:
        """Wait for `minimal_peers`. Raises PeersMissing."""
        roster = self.endpoint.roster
        waited_s = self._minimal_timeout_s if timeout_s is None else timeout_s
        waited_s = min(waited_s, self._minimal_timeout_s)
        if missing := self._wait_for_peers(self._minimal, time.monotonic() + waited_s):
            raise PeersMissing(
                f"waited {waited_s:g} s for the least that there must be: {', '.join(missing)}",
                missing,
            )
        self._enough = roster

    # --- to receive ---

    def receive(self, timeout_s: float | None = None) -> Iterator[Message]:
        """Yield messages as they come, those that came while something else was awaited first. Ends
        when timeout_s are over, by default never, after stop(), which is for good, or when another
        thread closes the proxy, as the end of the program does."""
        deadline = self._deadline(math.inf if timeout_s is None else timeout_s)
        return self._until_closed(self._messages(deadline))

    def _messages(self, deadline: float) -> Iterator[Message]:
        while (message := self._next(deadline)) is not None:
            yield message
            del message  # the next may be long in coming

    def _until_closed(self, iterator: Iterator[T]) -> Iterator[T]:
        """Yield items until close() ends that; one that begins after close() raises Closed."""
        self.endpoint.wait_for(lambda: True, math.inf)
        with suppress(Closed):
            yield from iterator

    def receive_once(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None if there is none in time, or after stop()."""
        return self._next(self._deadline(timeout_s))

    def _next(self, deadline: float) -> Message | None:
        """Take the next message. None: none has come in time, or stop() has ended it."""
        endpoint, inbox = self.endpoint, self.endpoint.inbox

        def take() -> tuple[Message | None] | None:
            if self._is_stopped and self._last is None:
                self._last = inbox.newest
            entry = inbox.oldest(self._last)
            if entry is None:
                return None if self._last is None else (None,)
            self._take(entry)
            return (entry.message,)

        taken = endpoint.wait_for(take, deadline)
        return None if taken is None else taken[0]

    def events(self, timeout_s: float | None = None) -> Iterator[Message | PeersChanged]:
        """Messages as receive() gives them, and the peers whenever one has come or gone since the
        last event, or, for the first, since this call."""
        deadline = self._deadline(math.inf if timeout_s is None else timeout_s)
        return self._until_closed(self._events(deadline, self.endpoint.roster))

    def _events(self, deadline: float, seen: Roster) -> Iterator[Message | PeersChanged]:
        """Yield messages, and PeersChanged when the roster is not `seen` any more."""
        endpoint = self.endpoint

        def has_come() -> bool | None:
            has_message = self._is_stopped or endpoint.inbox.oldest(self._last) is not None
            return True if has_message or endpoint.roster is not seen else None

        while endpoint.wait_for(has_come, deadline):
            if endpoint.roster is not seen:
                seen = endpoint.roster
                yield PeersChanged(self.peers)
            elif (message := self._next(time.monotonic())) is not None:
                yield message
                del message  # the next may be long in coming
            elif self._is_stopped:
                return

    def _take(self, entry: Delivery) -> None:
        """Remove a message from the inbox, under the endpoint's lock, for a call to return it."""
        message = entry.message
        self.endpoint.received(entry)
        asked = self._asked.get(message.session_id)
        if asked is not None and message.is_final and message.source in asked:
            at = asked.index(message.source)
            if len(asked) > 1:
                self._asked[message.session_id] = asked[:at] + asked[at + 1 :]
            else:
                del self._asked[message.session_id]
        self.endpoint.inbox.pop(entry)

    def receive_by_id(
        self, targets: str | Sequence[str], timeout_s: float | None = None
    ) -> Replies:
        """Wait for the answers in these sessions, as isend(), iscatter() and ibroadcast() return
        them: one for each time that a session is named. An ack is not an answer to a task; it is
        taken, and the answer awaited. All else stays for the other calls."""
        sessions: dict[str, int] = {}
        for session_id in (targets,) if isinstance(targets, str) else targets:
            sessions[session_id] = sessions.get(session_id, 0) + 1
        return self._await(Awaited(sessions), (), self._deadline(timeout_s))

    def _await(self, awaited: Awaited, messages: Iterable[Message], deadline: float) -> Replies:
        """Send messages; return the answers that have come by the deadline, also those in the
        sessions of `awaited`. `missing` names the peers without an answer."""
        try:
            self.endpoint.inbox.reserve(awaited)
            unsent: list[Message] = []
            if messages:
                self._post(messages, deadline, awaited=awaited, unsent=unsent)
            self.endpoint.wait_for(partial(self._have_answered, awaited), deadline)
            missing = [message.destination for message in unsent]
            if awaited.sessions:
                missing = [*self._missing(awaited.sessions), *missing]
            replies = Replies([entry.message for entry in awaited.entries], missing)
            self._release(awaited)
            return replies
        except BaseException:  # an interrupted wait too: what has come is for the other calls
            self._release(awaited, awaited.entries)
            raise

    def _release(self, awaited: Awaited, put_back: Sequence[Delivery] = ()) -> None:
        """Let a call await no more; put back what it does not return, and wake others."""
        with self.endpoint.lock:
            if put_back:
                self.endpoint.put_back(put_back)
            if self.endpoint.inbox.release(awaited) or put_back:
                self.endpoint.wake()  # other calls may want it

    def _have_answered(self, awaited: Awaited) -> bool | None:
        """Take the answers that have come. Returns None while more may come."""
        wanted = awaited.sessions
        for entry in self.endpoint.inbox.new_answers(awaited):
            message = entry.message
            if message.session_id not in wanted:
                continue  # one more answer than was awaited
            if not message.is_final:
                self._take(entry)  # an ack
                continue
            awaited.entries.append(entry)
            self._take(entry)
            wanted[message.session_id] -= 1
            if not wanted[message.session_id]:
                del wanted[message.session_id]
        left = self.endpoint.left
        return None if wanted and not (left and self._have_left(left, wanted)) else True

    def _missing(self, wanted: Mapping[str, int]) -> list[str]:
        """Return the names of the peers that have not answered, of so many in each session."""
        missing: list[str] = []
        with self.endpoint.lock:
            for session_id, number in wanted.items():
                names = self._asked.get(session_id, (f"session {session_id}",) * number)
                missing += names[:number]
        return missing

    def _have_left(self, left: set[str], wanted: Iterable[str]) -> bool:
        """Whether no answer in these sessions comes any more: all peers that were asked left."""
        asked = [self._asked.get(session_id) for session_id in wanted]
        return all(names and left.issuperset(names) for names in asked)

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
        """Send a message, and go on. Returns the session to await an answer in. For a peer that is
        away it is kept.

        timeout_s: for room, see `bounds`. Those of several for whom there is room do not wait for
            the others; OutboxFull says who has been sent to.
        Raises InvalidMessage, PeersMissing and OutboxFull.
        """
        return self._post([message], self._begin(timeout_s))

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
        """Send to each peer its own body, and go on. Returns a session for each."""
        messages = self._each(tag, session_type, destination_body_list)
        return self._post(messages, self._begin(timeout_s))

    def broadcast(
        self,
        role: str,
        tag: str,
        session_type: SessionType,
        body: Body = None,
        timeout_s: float | None = None,
    ) -> Replies:
        """Send the same to all peers of a role that are here, and wait for all answers. Raises
        PeersMissing if nobody of the role is here."""
        return self._ask(self._all(role, tag, session_type, body), timeout_s)

    def ibroadcast(
        self,
        role: str,
        tag: str,
        session_type: SessionType,
        body: Body = None,
        timeout_s: float | None = None,
    ) -> list[str]:
        """Send the same to all peers of a role that are here, and go on. Returns their one session,
        once for each. Raises PeersMissing if nobody of the role is here."""
        messages = self._all(role, tag, session_type, body)
        return self._post(messages, self._begin(timeout_s))

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
        only that it has come. Waits for nobody but for room. Raises InvalidMessage if it has had
        that answer."""
        answer = message.reply(tag, body, ack=ack_reply)
        return self._post([answer], self._deadline(timeout_s), asks=False)

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
        return self._post([forwarded], self._deadline(timeout_s))

    def _each(
        self, tag: str, session_type: SessionType, destinations: Iterable[tuple[str, Body]]
    ) -> Iterator[SessionMessage]:
        for destination, body in destinations:
            yield SessionMessage(tag, self.name, destination, body, session_type)

    def _all(
        self, role: str, tag: str, session_type: SessionType, body: Body
    ) -> Iterator[SessionMessage]:
        """Yield a message for each peer of a role, looked up when the first one is sent."""
        names = self.peers[role]
        if not names:
            raise PeersMissing(f"nobody of the role {role!r} is here", [role])
        first = SessionMessage(tag, self.name, names[0], body, session_type)
        for name in names:
            yield msgspec.structs.replace(first, destination=name)

    def _ask(self, messages: Iterable[Message], timeout_s: float | None) -> Replies:
        deadline = self._begin(timeout_s)
        return self._await(Awaited(seen=self.endpoint.inbox.newest), messages, deadline)

    def _begin(self, timeout_s: float | None) -> float:
        """Wait for the minimal peers. Returns the deadline, on time.monotonic()."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        if not self._minimal or self.endpoint.roster is self._enough:
            return deadline
        self._require_peers(timeout_s)
        # Without a time of its own for the call, the wait for peers has its own.
        return self._deadline(None) if timeout_s is None else deadline

    def _post(
        self,
        messages: Iterable[Message],
        deadline: float,
        *,
        asks: bool = True,
        awaited: Awaited | None = None,
        unsent: list[Message] | None = None,
    ) -> list[str]:
        """Send the messages for which there is room, in their order, then the others as there is
        room for them. If a message fails, those before it for which there was room are on their
        way. Returns the sessions of the messages.

        asks: answers are awaited; awaited: by this call alone.
        unsent: gets the messages for which there was no room. Without it, OutboxFull is raised.
        """
        sessions: list[str] = []
        posted: list[Message] = []
        waiting: list[tuple[Message, Parts]] = []
        frames: Parts = ()
        copied: Parts = ()
        encoded: str | None = None
        why_not: str | None = None
        for message in messages:
            if message.source != self.endpoint.name:
                raise ValueError(f"{self.name!r} cannot send as {message.source!r}")
            if message.message_id != encoded:  # those of one broadcast are one message
                encoded = message.message_id
                frames = parts(message)
                copied = snapshot(frames) if len(frames) > 1 else frames
            posted.append(message)
            sessions.append(message.session_id)
            if waiting and any(other.destination == message.destination for other, _ in waiting):
                reason = why_not
            else:
                reason = self._post_now(message, copied, asks, awaited)
            if reason is not None:
                why_not = reason
                waiting.append((message, frames))  # not the copy: there may be many
        if not waiting:
            return sessions
        del frames, copied

        def next_with_room() -> int | None:
            seen = set()
            for i, (message, frames) in enumerate(waiting):
                if message.destination not in seen:
                    if self.endpoint.has_room(message.destination, num_bytes(frames)):
                        return i
                    seen.add(message.destination)
            return None

        while waiting and (i := self.endpoint.wait_for(next_with_room, deadline)) is not None:
            message, frames = waiting[i]
            if self._post_now(message, snapshot(frames), asks, awaited) is None:
                del waiting[i]
        left = [message for message, _ in waiting]
        if left and unsent is None:
            sent = [(m.destination, m.session_id) for m in posted if m not in left]
            raise OutboxFull(why_not or "", sent)
        if unsent is not None:
            unsent += left
        return sessions

    def _post_now(
        self, message: Message, frames: Parts, asks: bool, awaited: Awaited | None
    ) -> str | None:
        """Send a message if there is room. Returns why there is none, or None."""
        with self.endpoint.lock:
            why_not = self.endpoint.try_to_post(message, MESSAGE, frames)
            if why_not is None and asks:
                self._remember(message)
                if awaited is not None:
                    number = awaited.sessions.get(message.session_id, 0)
                    awaited.sessions[message.session_id] = number + 1
            return why_not

    def _remember(self, message: Message) -> None:
        """Note that an answer is awaited, so that its peer can be named if it does not come."""
        asked, session_id = self._asked, message.session_id
        others = asked.get(session_id)
        asked[session_id] = (*others, message.destination) if others else (message.destination,)
        if len(asked) > MAX_REMEMBERED:
            asked.popitem(last=False)

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    # --- all together ---

    def group(self, name: str, members: Sequence[str] | None = None) -> Group:
        """Make a group of peers for collective operations, this peer among them.

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


def _from_maro(theirs: Sequence[str], arguments: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return a line with the call that stands for one of MARO's Proxy."""
    given = dict(zip(("group_name", "component_type", "expected_peers"), arguments, strict=False))
    given |= options
    host, port = given.get("redis_address", MARO_REDIS)
    names = ("group_name", "component_type")
    call = [repr(given.get(name, "...")) for name in names]
    call.append(repr(dict(given.get("expected_peers") or {})))
    if given.get("component_name"):
        call.append(f"name={given['component_name']!r}")
    call += [f'discovery="redis://{host}:{port}/0"', 'driver="zmq"']
    return (
        f"{', '.join(theirs)}: MARO's; the same here is Proxy({', '.join(call)}); see "
        "docs/from-maro.md"
    )
