"""Finding each other in a Redis.

Of a group, below "xain:{GROUP}:":

    names           a set: who is, or was lately, a member
    member:NAME     JSON of the member, with a time to live, which its heartbeats renew
    incarnation     the last that was given
    barrier:NAME    how often it has opened;   waiting:NAME   a set: who waits at it
    changes         a channel: something is different now

All that changes them is a script, and so one step. What nobody renews expires by itself.

Redis tells nobody that a process has died before its time to live is over, and neither does the
name become free before.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, Final

import redis
import structlog

from xain_messaging.discovery.registry import LEASE_S
from xain_messaging.errors import (
    Closed,
    DiscoveryUnavailable,
    MembershipLost,
    MessagingError,
    NameTaken,
    TimedOut,
)
from xain_messaging.ports import Member, Roster

log = structlog.get_logger(__name__)

TIMEOUT_S: Final = 5.0
RETRY_S: Final = 0.25
FORGET_S: Final = 24 * 3600  # barriers and numbers of groups that nobody is in

# The keys that a script touches all have the group in braces, so that a cluster has them together.
_JOIN: Final = """
local prefix, name, role, address = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local lease_ms, former = tonumber(ARGV[4]), ARGV[5]
former = former ~= '' and cjson.decode(former) or nil
local taken = {}
for _, other in ipairs(redis.call('SMEMBERS', prefix .. 'names')) do
  local text = redis.call('GET', prefix .. 'member:' .. other)
  if not text then
    redis.call('SREM', prefix .. 'names', other)
  elseif other ~= name then
    local member = cjson.decode(text)
    if member.role == role then taken[member.rank] = true end
  end
end
local found = redis.call('GET', prefix .. 'member:' .. name)
if found then
  local member = cjson.decode(found)
  if former and former.incarnation ~= member.incarnation then return {'lost'} end
  if not former then
    return {'taken', member.address, redis.call('PTTL', prefix .. 'member:' .. name)}
  end
end
local incarnation
if former then
  incarnation = former.incarnation  -- text: a number of Lua does not hold all that fit into 64 bits
else
  -- The time of day, so that it goes on above what a Redis that has lost it all gave before.
  local now = redis.call('TIME')
  incarnation = tonumber(now[1]) * 1000000 + tonumber(now[2])
  local last = tonumber(redis.call('GET', prefix .. 'incarnation') or '0')
  if incarnation <= last then incarnation = last + 1 end
  incarnation = string.format('%.0f', incarnation)
  redis.call('SET', prefix .. 'incarnation', incarnation, 'EX', ARGV[6])
end
local rank = former and former.rank or 0
if not former or taken[rank] then
  rank = 0
  while taken[rank] do rank = rank + 1 end
end
local member = cjson.encode({
  name = name, role = role, rank = rank, address = address, incarnation = incarnation})
redis.call('SET', prefix .. 'member:' .. name, member, 'PX', lease_ms)
redis.call('SADD', prefix .. 'names', name)
redis.call('PUBLISH', prefix .. 'changes', name)
return {'ok', member}
"""

_RENEW: Final = """
local key = KEYS[1] .. 'member:' .. ARGV[1]
local text = redis.call('GET', key)
if not text or cjson.decode(text).incarnation ~= ARGV[2] then return 0 end
return redis.call('PEXPIRE', key, ARGV[3])
"""

_LEAVE: Final = """
local key = KEYS[1] .. 'member:' .. ARGV[1]
local text = redis.call('GET', key)
if text and cjson.decode(text).incarnation == ARGV[2] then
  redis.call('DEL', key)
  redis.call('SREM', KEYS[1] .. 'names', ARGV[1])
  redis.call('PUBLISH', KEYS[1] .. 'changes', ARGV[1])
end
return 1
"""

_ROSTER: Final = """
local found = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1] .. 'names')) do
  local text = redis.call('GET', KEYS[1] .. 'member:' .. name)
  if text then table.insert(found, text) else redis.call('SREM', KEYS[1] .. 'names', name) end
end
return found
"""

# Returns the number of the opening that is awaited. Only who is alive counts.
_ARRIVE: Final = """
local waiting, count = KEYS[1] .. 'waiting:' .. ARGV[1], KEYS[1] .. 'barrier:' .. ARGV[1]
redis.call('SADD', waiting, ARGV[2])
redis.call('EXPIRE', waiting, ARGV[4])
for _, name in ipairs(redis.call('SMEMBERS', waiting)) do
  if redis.call('EXISTS', KEYS[1] .. 'member:' .. name) == 0 then
    redis.call('SREM', waiting, name)
  end
end
local opened = tonumber(redis.call('GET', count) or '0')
if redis.call('SCARD', waiting) >= tonumber(ARGV[3]) then
  redis.call('SET', count, opened + 1, 'EX', ARGV[4])
  redis.call('DEL', waiting)
  redis.call('PUBLISH', KEYS[1] .. 'changes', '')
end
return opened + 1
"""


class RedisDiscovery:
    """See ports.Discovery.

    url: "redis://[:PASSWORD@]HOST:PORT/DB", "rediss://" for TLS, "unix://PATH".
    lease_s: the time to live of an entry.
    """

    def __init__(self, url: str, lease_s: float = LEASE_S) -> None:
        self._url = url
        self._lease_s = lease_s

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
    ) -> "RedisMembership":
        client: redis.Redis = redis.Redis.from_url(
            self._url,
            decode_responses=True,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
        )
        membership = RedisMembership(
            client, group, role, name, address, self._lease_s, on_change, on_lost
        )
        try:
            membership.join(time.monotonic() + timeout_s)
        except BaseException:  # whatever it is, an interrupt too: no thread stays behind
            membership.leave()
            raise
        return membership


class RedisMembership:
    """See ports.Membership."""

    def __init__(
        self,
        client: redis.Redis,
        group: str,
        role: str,
        name: str,
        address: str,
        lease_s: float,
        on_change: Callable[[Roster], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._client = client
        self._prefix = f"xain:{{{group}}}:"
        self._role = role
        self._name = name
        self._address = address
        self._lease_s = lease_s
        self._on_change = on_change
        self._on_lost = on_lost
        self._chance = Random()
        self._member: Member | None = None
        self._roster: Roster = {}
        self._has_ended = threading.Event()
        self._joining = threading.Lock()  # so that nobody comes back who has left
        self._settled_at = 0.0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._scripts = {
            text: client.register_script(text) for text in (_JOIN, _RENEW, _LEAVE, _ROSTER, _ARRIVE)
        }

    @property
    def member(self) -> Member:
        assert self._member is not None, "join() comes first"
        return self._member

    def _run(self, script: str, *arguments: Any) -> Any:
        try:
            return self._scripts[script](keys=[self._prefix], args=list(arguments))
        except redis.RedisError as error:  # also one that may not write for now
            raise DiscoveryUnavailable(f"the Redis does not do it: {error}") from None

    def join(self, deadline: float) -> None:
        """Raises NameTaken and DiscoveryUnavailable at the deadline."""
        while True:
            try:
                self._ask_to_join()
                self._look()
                break
            except (NameTaken, DiscoveryUnavailable):
                if time.monotonic() + RETRY_S > deadline:
                    raise
                time.sleep(RETRY_S)
        self._thread = threading.Thread(target=self._keep, name="membership", daemon=True)
        self._thread.start()

    def _ask_to_join(self) -> None:
        former = ""
        if self._member is not None:
            former = json.dumps(
                {"rank": self._member.rank, "incarnation": str(self._member.incarnation)}
            )
        lease_ms = round(1000 * self._lease_s)
        answer = self._run(_JOIN, self._name, self._role, self._address, lease_ms, former, FORGET_S)
        match answer:
            case ["ok", text]:
                self._member = _member(text)
            case ["lost"]:
                raise MembershipLost(
                    f"{self._name!r} was taken for dead, and another process has its name"
                )
            case ["taken", address, left_ms]:
                raise NameTaken(
                    f"there is a {self._name!r} already, at {address}; it is heard of within "
                    f"{left_ms / 1000:.1f} s, or gone"
                )

    def _keep(self) -> None:
        """Heartbeats, and looks at who is there: when told of a change, and now and then, since
        nobody tells that an entry has expired."""
        interval_s = self._lease_s / 4
        renewed_at = time.monotonic()
        listener: Any = None
        while not self._has_ended.is_set():
            try:
                if listener is None:
                    listener = self._client.pubsub(  # type: ignore[no-untyped-call]  # redis has no types for it
                        ignore_subscribe_messages=True
                    )
                    listener.subscribe(f"{self._prefix}changes")
                listener.get_message(timeout=self._chance.uniform(0.8, 1.0) * interval_s)
                if self._has_ended.is_set():
                    break
                if time.monotonic() - renewed_at >= interval_s / 2:
                    self._renew()
                    renewed_at = time.monotonic()
                self._look()
            except (DiscoveryUnavailable, redis.RedisError) as error:
                # The peers go on without it. Who they are is asked when it is back; it may have
                # forgotten all, and hear of them one by one.
                log.debug("discovery_away", error=str(error))
                self._settled_at = time.monotonic() + RETRY_S + self._lease_s
                if listener is not None:
                    with suppress(redis.RedisError):
                        listener.close()
                    listener = None
                self._has_ended.wait(RETRY_S)
            except MembershipLost as lost:
                self._lose(lost)
            except Exception as error:  # a defect, ours or of who is told: nobody goes on unnoticed
                log.exception("membership_failed", peer=self._name)
                self._lose(MembershipLost(f"the thread that keeps it has failed: {error!r}"))
        if listener is not None:
            with suppress(redis.RedisError):
                listener.close()

    def _lose(self, error: MembershipLost) -> None:
        """Once, and not if we have left."""
        with self._joining:
            has_ended = self._has_ended.is_set()
            self._has_ended.set()
        if not has_ended:
            self._on_lost(error)

    def _renew(self) -> None:
        incarnation = str(self.member.incarnation)
        if not self._run(_RENEW, self._name, incarnation, round(1000 * self._lease_s)):
            self._come_back()

    def _come_back(self) -> None:
        """As who we were: we have expired, or the Redis has lost it."""
        with self._joining:
            if not self._has_ended.is_set():
                self._ask_to_join()
                self._settled_at = time.monotonic() + self._lease_s

    def _look(self) -> None:
        members = [_member(text) for text in self._run(_ROSTER)]
        roster = {member.name: member for member in members}
        if self._name not in roster:
            self._come_back()
            roster[self._name] = self.member
        if time.monotonic() < self._settled_at:
            # Who is not listed may be on its way back as well.
            roster = {**self._roster, **roster}
        with self._changed:
            self._changed.notify_all()
        if roster != self._roster:
            self._roster = roster
            self._on_change(roster)

    def barrier(self, name: str, num_members: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        awaited: int | None = None
        while True:
            if self._has_ended.is_set():
                raise Closed("this member has left")
            with suppress(DiscoveryUnavailable):
                if awaited is None:
                    awaited = self._run(_ARRIVE, name, self._name, num_members, FORGET_S)
                if self._opened(name) >= awaited:
                    return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                with suppress(MessagingError, redis.RedisError):
                    self._client.srem(f"{self._prefix}waiting:{name}", self._name)
                raise TimedOut(f"waited {timeout_s:g} s at the barrier {name!r}")
            with self._changed:
                self._changed.wait(min(left_s, RETRY_S))

    def _opened(self, name: str) -> int:
        try:
            return int(self._client.get(f"{self._prefix}barrier:{name}") or 0)
        except redis.RedisError as error:
            raise DiscoveryUnavailable(f"the Redis does not do it: {error}") from None

    def leave(self) -> None:
        if self._has_ended.is_set() and self._thread is None:
            return
        with self._joining:
            self._has_ended.set()
        if self._member is not None:
            with suppress(DiscoveryUnavailable):  # it expires by itself
                self._run(_LEAVE, self._name, str(self._member.incarnation))
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(TIMEOUT_S)
        self._client.close()


def _member(text: str) -> Member:
    found = json.loads(text)
    return Member(
        found["name"],
        found["role"],
        int(found["rank"]),
        found["address"],
        int(found["incarnation"]),
    )
