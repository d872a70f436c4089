"""Finding each other in a Redis.

Of a group there are, below "xain:{GROUP}:":

    state       JSON of the group's registry, see registry.State
    changes     a channel: something is different now

Every member decides by the same registry as a Membership service does, under WATCH: when another
member has changed the state meanwhile, it decides again. Times are by the clock of the Redis.

Redis tells nobody that a process has died before its lease is over, and neither does the name
become free before.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
import redis

from xain_foundation.logs.logger import get_logger
from xain_foundation.net.backoff import Backoff
from xain_foundation.settings.fields import is_loopback
from xain_membership.errors import DiscoveryUnavailable
from xain_membership.ports import Member
from xain_membership.registry import LEASE_S, SETTLE_S, WORD_S, Registry, State
from xain_membership.remote import (
    CALL_TIMEOUT_S,
    RETRY_S,
    Joining,
    RemoteDiscovery,
    RemoteMembership,
    left_s,
)

log = get_logger(__name__)

T = TypeVar("T")

FORGET_S: Final = 24 * 3600  # the state of groups that nobody is in
# A member is at a barrier for so much longer than it waits, where no word comes that it gave up.
LINGER_S: Final = 1.0
GATHER_S: Final = 0.02  # when many members come at once, each looks at many at once
# Seconds until a member decides again, when another one has changed the state meanwhile.
AGAIN_S: Final = 0.002
MAX_AGAIN_S: Final = 0.1
MAX_BARRIERS: Final = 1 << 30  # a member at a barrier holds no call

_STATE: Final = msgspec.json.Decoder(State)


class RedisDiscovery(RemoteDiscovery):
    """See ports.Discovery.

    url: "redis://[:PASSWORD@]HOST:PORT/DB", "rediss://" for TLS, "unix://PATH".
    lease_s: the time to live of an entry.
    settle_s: how long newcomers wait after the start of the Redis, which may have lost all, for the
        members to come back to it.
    insecure: also "redis://" on another machine, in the clear.
    Raises ValueError for such a URL without it.
    """

    def __init__(
        self,
        url: str,
        lease_s: float = LEASE_S,
        settle_s: float = SETTLE_S,
        *,
        insecure: bool = False,
    ) -> None:
        host = urlsplit(url).hostname or "localhost"
        if url.startswith("redis://") and not (insecure or is_loopback(host)):
            raise ValueError(
                f"the Redis at {host} would be asked in the clear, where whoever reads the network "
                "sees its password and may change who is in a group: write rediss:// for TLS, or "
                "pass RedisDiscovery(URL, insecure=True) in a network that you trust"
            )
        self._url = url
        self._lease_s = lease_s
        self._settle_s = settle_s

    def _membership(self, joining: Joining) -> "RedisMembership":
        return RedisMembership(self._url, self._lease_s, self._settle_s, joining)


class RedisMembership(RemoteMembership):
    """See ports.Membership."""

    def __init__(self, url: str, lease_s: float, settle_s: float, joining: Joining) -> None:
        super().__init__(joining)
        self._url = url
        self._client = self._new_client(CALL_TIMEOUT_S)
        self._key = f"xain:{{{joining.group}}}:state"
        self._channel = f"xain:{{{joining.group}}}:changes"
        self._lease_s = lease_s
        self._settle_s = settle_s
        self._settled_at = 0.0
        self._changed = threading.Condition()

    def _new_client(self, timeout_s: float) -> redis.Redis:
        """Make a client of the Redis. timeout_s: of each of its calls."""
        return redis.Redis.from_url(
            self._url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
        )

    @contextmanager
    def _client_for(self, timeout_s: float) -> Iterator[redis.Redis]:
        """Lend a client; for less than the usual time of a call a new one with that time."""
        if timeout_s >= CALL_TIMEOUT_S:
            yield self._client
        else:
            with self._new_client(timeout_s) as client:
                yield client

    def _decide(
        self, change: Callable[[Registry, float], T], timeout_s: float = CALL_TIMEOUT_S
    ) -> T:
        """Change the state of the group. change: called with its registry and the time, perhaps
        several times; returns what is returned here.

        Raises DiscoveryUnavailable, also when others have been faster for all that time.
        """
        deadline = time.monotonic() + min(timeout_s, CALL_TIMEOUT_S)
        backoff = Backoff(AGAIN_S, MAX_AGAIN_S, self._chance)
        try:
            with self._client_for(timeout_s) as client, client.pipeline() as pipe:
                while True:
                    try:
                        return self._try_to_decide(pipe, change)
                    except redis.WatchError:
                        wait_s = backoff.next_s()
                        if time.monotonic() + wait_s >= deadline:
                            raise DiscoveryUnavailable(
                                f"others change the group {self._group!r} all the time"
                            ) from None
                        time.sleep(wait_s)  # others write their changes meanwhile
        except redis.RedisError as error:  # also one that may not write for now
            raise DiscoveryUnavailable(f"the Redis does not do it: {error}") from None
        except (OSError, ValueError, AttributeError) as error:
            # A connection that leave() closes under a call may raise any of these.
            if not self._has_ended.is_set():
                raise
            raise DiscoveryUnavailable(f"the connection has been closed: {error}") from None

    def _try_to_decide(self, pipe: Any, change: Callable[[Registry, float], T]) -> T:
        """Change the state at Redis by the registry's rules, if nobody else does meanwhile, and
        tell who has to look. Raises WatchError if somebody does."""
        pipe.watch(self._key)
        before: bytes | None = pipe.get(self._key)
        seconds, microseconds = pipe.time()
        now = seconds + microseconds / 1e6
        changes: list[str] = []

        def new_incarnation() -> int:
            # The time of day, so that it goes on above what a Redis that has lost all gave before;
            # and above what members that came back have told, for its clock may have been set back.
            state = registry.state
            state.last_incarnation = max(state.last_incarnation + 1, round(1e6 * now))
            return state.last_incarnation

        registry = Registry(
            0.0,
            new_incarnation,
            changes.append,
            self._lease_s,
            on_barrier=changes.append,
            max_barriers=MAX_BARRIERS,
        )
        if before is not None:
            registry.state = _STATE.decode(before)
        registry.expire(now)
        result = change(registry, now)
        after = msgspec.json.encode(registry.state)
        if after != before:
            pipe.multi()
            pipe.set(self._key, after, ex=FORGET_S)
            if changes:
                pipe.publish(self._channel, b"")
            pipe.execute()
        else:
            pipe.unwatch()
        return result

    def _begin(self, deadline: float) -> None:
        self._read_members(left_s(deadline))
        self._start(self._keep)

    def _ask_to_join(self, timeout_s: float) -> Member:
        """Join at the Redis once, as the former member if there was one. Returns the member."""
        deadline = time.monotonic() + timeout_s
        if self._member is None:
            self._check_open(timeout_s)

        def join(registry: Registry, now: float) -> Member:
            state = registry.state
            if self._member is not None:
                told = max(self._heard, self._member.incarnation)
                state.last_incarnation = max(state.last_incarnation, told)
            own = self._joining_as
            return registry.join(own.group, own.role, own.name, own.address, now, self._member)

        return self._decide(join, left_s(deadline))

    def _check_open(self, timeout_s: float) -> None:
        """Refuse to join a Redis that has run for less than settle_s: members may come back."""
        try:
            with self._client_for(timeout_s) as client:
                up_s = int(client.info("server")["uptime_in_seconds"])
        except redis.ResponseError:
            return  # it tells not everybody; so nobody is held up
        except redis.RedisError as error:
            raise DiscoveryUnavailable(f"the Redis does not answer: {error}") from None
        if up_s < self._settle_s:
            raise DiscoveryUnavailable(
                f"the Redis has run for {up_s} s, and members of before may be coming back; "
                f"newcomers are let in after {self._settle_s:g} s"
            )

    def _keep(self) -> None:
        """Renew the lease and read the members until the end: when told of a change, and now and
        then, since nobody tells that an entry has expired."""
        interval_s = self._lease_s / 4
        renewed_at = time.monotonic()
        listener: Any = None
        try:
            while not self._has_ended.is_set():
                try:
                    if listener is None:
                        listener = self._client.pubsub(  # type: ignore[no-untyped-call]  # redis has no types for it
                            ignore_subscribe_messages=True
                        )
                        listener.subscribe(self._channel)
                    if listener.get_message(timeout=self._chance.uniform(0.8, 1.0) * interval_s):
                        self._has_ended.wait(GATHER_S)
                        while listener.get_message():
                            pass  # one look is for all
                    if self._has_ended.is_set():
                        break
                    if time.monotonic() - renewed_at >= interval_s / 2:
                        self._renew()
                        renewed_at = time.monotonic()
                    self._read_members()
                except (DiscoveryUnavailable, redis.RedisError) as error:
                    # The peers go on without it. Who they are is asked when it is back; it may have
                    # forgotten all, and hear of them one by one.
                    log.debug("discovery_away", error=str(error))
                    self._settled_at = time.monotonic() + RETRY_S + self._lease_s
                    self._listed.clear()
                    _close(listener)
                    listener = None
                    self._has_ended.wait(RETRY_S)
        finally:
            _close(listener)

    def _come_back(self) -> None:
        super()._come_back()
        self._settled_at = time.monotonic() + self._lease_s
        self._listed.clear()

    def _renew(self) -> None:
        """Renew the lease, or join again if the group does not know this member."""

        def renew(registry: Registry, now: float) -> bool:
            self._forget_opened(registry)
            return registry.renew(*self._who, now)

        if not self._decide(renew):
            self._come_back()

    def _forget_opened(self, registry: Registry) -> None:
        with self._calling:
            calls = set(self._calls.values())
        registry.forget_opened(*self._who, calls)

    def _read_members(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Read the members, and tell of changes. Joins again if this member is not listed."""
        roster = self._decide(lambda registry, now: registry.roster(self._group), timeout_s)
        if self._name not in roster:
            self._come_back()
            roster = {**roster, self._name: self.member}
        with self._changed:
            self._changed.notify_all()
        self._tell(roster, is_settling=time.monotonic() < self._settled_at)

    def _wait_at(self, barrier: str, num_members: int, deadline: float, call: int) -> bool:
        """Wait at a barrier until it opens, while Redis is away too; False, and no longer there, at
        the deadline. Raises Closed."""
        where = (self._group, barrier, self._name)
        # The rest of the time is for the word that we have given up.
        give_up_at = deadline - min(WORD_S, 0.1 * (deadline - time.monotonic()))

        def arrive(registry: Registry, now: float) -> bool:
            if not registry.is_member(*self._who):
                return False  # we are on our way back
            self._forget_opened(registry)
            until = now + left_s(deadline) + LINGER_S
            return registry.arrive(*where, num_members, call, now, until)

        while True:
            with suppress(DiscoveryUnavailable):
                if self._decide(arrive, left_s(give_up_at)):
                    return True
            self._check_waits(barrier, call)
            wait_s = give_up_at - time.monotonic()
            if wait_s <= 0:
                with suppress(DiscoveryUnavailable):
                    return self._decide(
                        lambda registry, now: registry.give_up(*where, call), left_s(deadline)
                    )
                return False
            with self._changed:
                self._changed.wait(min(wait_s, RETRY_S))
            self._check_waits(barrier, call)

    def _end(self, timeout_s: float) -> None:
        """Leave the group at the Redis, wake calls at barriers, and close the client."""
        with self._changed:
            self._changed.notify_all()  # calls that wait at a barrier
        if self._member is not None:

            def leave(registry: Registry, now: float) -> None:
                registry.forget_opened(*self._who, ())
                registry.leave(*self._who)

            with suppress(DiscoveryUnavailable):  # it expires by itself
                self._decide(leave, timeout_s)
        self._client.close()  # nobody waits any more for what does not answer

    def leave_by(self, deadline: float) -> None:
        super().leave_by(deadline)
        self._client.close()  # what a thread has opened meanwhile


def _close(listener: Any) -> None:
    if listener is not None:
        with suppress(redis.RedisError):
            listener.close()
