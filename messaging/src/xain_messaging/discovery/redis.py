"""Finding each other in a Redis.

Of a group, below "xain:{GROUP}:":

    names           a set: who is, or was lately, a member
    member:NAME     JSON of the member, with a time to live, which its heartbeats renew
    incarnation     the last that was given
    ranks           a hash: what each name had last, by "ROLE/NAME"
    incarnations    a hash: what each name had last
    waiting:NAME    a hash: until when (ms by the clock of the Redis) "NAME/INCARNATION" waits at
                    that barrier, and the number of its call, "MS/CALL"
    opened:NAME     a hash: the number of the call for which it opened last, by "NAME/INCARNATION"
    changes         a channel: something is different now

All that changes them is a script, and so one step. What nobody renews expires by itself.

Redis tells nobody that a process has died before its time to live is over, and neither does the
name become free before.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import redis

from xain_foundation.logger import get_logger
from xain_messaging.discovery.registry import LEASE_S, MAX_FORMER, SETTLE_S, WORD_S
from xain_messaging.discovery.remote import (
    CALL_TIMEOUT_S,
    RETRY_S,
    RemoteMembership,
    left_s,
)
from xain_messaging.errors import DiscoveryUnavailable, MembershipLost, NameTaken
from xain_messaging.ports import Member, Roster

log = get_logger(__name__)

FORGET_S: Final = 24 * 3600  # barriers, ranks and numbers of groups that nobody is in
# Who is at a barrier is there for so much longer than it waits, where nobody hears that it gave up.
LINGER_S: Final = 1.0
GATHER_S: Final = 0.02  # when many come at once, each looks at many at once

# The keys that a script touches all have the group in braces, so that a cluster has them together.
# Incarnations are text: a number of Lua does not hold all that fit into 64 bits.
_JOIN: Final = """
local function is_below(one, other)
  return #one < #other or #one == #other and one < other
end
local prefix, name, role, address = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local lease_ms, former = tonumber(ARGV[4]), ARGV[5]
former = former ~= '' and cjson.decode(former) or nil
local ranks, incarnations = prefix .. 'ranks', prefix .. 'incarnations'
local taken, is_first = {}, true
for _, other in ipairs(redis.call('SMEMBERS', prefix .. 'names')) do
  local text = redis.call('GET', prefix .. 'member:' .. other)
  if not text then
    redis.call('SREM', prefix .. 'names', other)
  elseif other ~= name then
    is_first = false
    local member = cjson.decode(text)
    if member.role == role then taken[member.rank] = true end
  end
end
local found = redis.call('GET', prefix .. 'member:' .. name)
if found and not former then
  local member = cjson.decode(found)
  return {'taken', member.address, redis.call('PTTL', prefix .. 'member:' .. name)}
end
local incarnation
local given = redis.call('GET', prefix .. 'incarnation') or '0'
if former then
  -- Peers that have heard of a later process of this name do not listen to this one any more.
  incarnation = former.incarnation
  local last = found and cjson.decode(found).incarnation
  last = last or redis.call('HGET', incarnations, name) or '0'
  if is_below(incarnation, last) then return {'lost'} end
  if is_below(given, former.heard) then given = former.heard end
  if is_below(given, incarnation) then given = incarnation end
else
  -- The time of day, so that it goes on above what a Redis that has lost it all gave before; and
  -- above what those who came back to it have told, for its clock may have been set back.
  local now = redis.call('TIME')
  incarnation = string.format('%.0f', tonumber(now[1]) * 1000000 + tonumber(now[2]))
  if not is_below(given, incarnation) then
    incarnation = string.format('%.0f', tonumber(given) + 1)
  end
  given = incarnation
end
redis.call('SET', prefix .. 'incarnation', given, 'EX', ARGV[6])
if redis.call('HLEN', incarnations) >= tonumber(ARGV[7]) then redis.call('DEL', incarnations) end
redis.call('HSET', incarnations, name, incarnation)
redis.call('EXPIRE', incarnations, ARGV[6])
local field = role .. '/' .. name
local rank = former and former.rank
if not former then
  -- With nobody there the ranks begin anew; so many are of names that nobody has twice.
  if is_first or redis.call('HLEN', ranks) >= tonumber(ARGV[7]) then redis.call('DEL', ranks) end
  rank = tonumber(redis.call('HGET', ranks, field))
end
if not rank or taken[rank] then
  rank = 0
  while taken[rank] do rank = rank + 1 end
end
redis.call('HSET', ranks, field, rank)
redis.call('EXPIRE', ranks, ARGV[6])
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

# Returns whether it is open for this call. Only members count; so who is none, but on its way back,
# has to come again. Nor do those count whose time is over: who gave up may not have been heard.
_ARRIVE: Final = """
local waiting, opened = KEYS[1] .. 'waiting:' .. ARGV[1], KEYS[1] .. 'opened:' .. ARGV[1]
local who, call, forget_s = ARGV[2], ARGV[3], ARGV[6]
if redis.call('HGET', opened, who) == call then return 1 end
local function is_here(who)
  local name, incarnation = string.match(who, '^(.*)/(%d+)$')
  local text = redis.call('GET', KEYS[1] .. 'member:' .. name)
  return text and cjson.decode(text).incarnation == incarnation
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
redis.call('HSET', waiting, who, string.format('%.0f/%s', now + tonumber(ARGV[5]), call))
redis.call('EXPIRE', waiting, forget_s)
local all, calls, last = redis.call('HGETALL', waiting), {}, 0
for i = 1, #all, 2 do
  local until_ms, its_call = string.match(all[i + 1], '^(%d+)/(%d+)$')
  if its_call and is_here(all[i]) and tonumber(until_ms) >= now then
    table.insert(calls, all[i])
    table.insert(calls, its_call)
    last = math.max(last, tonumber(until_ms))
  else
    redis.call('HDEL', waiting, all[i])  -- if it has gone, who has its name has not come for it
  end
end
if #calls < 2 * tonumber(ARGV[4]) then return 0 end
for i = 1, #calls, 2 do redis.call('HSET', opened, calls[i], calls[i + 1]) end
if redis.call('HLEN', opened) > #calls / 2 + tonumber(ARGV[7]) then
  for _, one in ipairs(redis.call('HKEYS', opened)) do
    if not is_here(one) then redis.call('HDEL', opened, one) end
  end
end
if redis.call('PTTL', opened) < last - now then  -- as long as one of them may ask again
  redis.call('PEXPIRE', opened, string.format('%.0f', last - now))
end
redis.call('DEL', waiting)
redis.call('PUBLISH', KEYS[1] .. 'changes', '')
return 1
"""

# Returns whether it has opened for this call before: then it was counted, and others have gone on.
_GIVE_UP: Final = """
if redis.call('HGET', KEYS[1] .. 'opened:' .. ARGV[1], ARGV[2]) == ARGV[3] then return 1 end
redis.call('HDEL', KEYS[1] .. 'waiting:' .. ARGV[1], ARGV[2])
return 0
"""


class RedisDiscovery:
    """See ports.Discovery.

    url: "redis://[:PASSWORD@]HOST:PORT/DB", "rediss://" for TLS, "unix://PATH".
    lease_s: the time to live of an entry.
    settle_s: how long newcomers wait after the start of the Redis, which may have lost all, for the
        members to come back to it.
    """

    def __init__(self, url: str, lease_s: float = LEASE_S, settle_s: float = SETTLE_S) -> None:
        self._url = url
        self._lease_s = lease_s
        self._settle_s = settle_s

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
        deadline = time.monotonic() + timeout_s
        membership = RedisMembership(
            self._url,
            group,
            role,
            name,
            address,
            self._lease_s,
            self._settle_s,
            on_change,
            on_lost,
        )
        try:
            membership.join(deadline)
        except BaseException:  # whatever it is, an interrupt too: no thread stays behind
            membership.leave_by(deadline)
            raise
        return membership


class RedisMembership(RemoteMembership):
    """See ports.Membership."""

    def __init__(
        self,
        url: str,
        group: str,
        role: str,
        name: str,
        address: str,
        lease_s: float,
        settle_s: float,
        on_change: Callable[[Roster], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        super().__init__(group, name, on_change, on_lost)
        self._url = url
        self._client = self._new_client(CALL_TIMEOUT_S)
        self._prefix = f"xain:{{{group}}}:"
        self._role = role
        self._address = address
        self._lease_s = lease_s
        self._settle_s = settle_s
        self._settled_at = 0.0
        self._changed = threading.Condition()
        self._scripts = {
            text: self._client.register_script(text)
            for text in (_JOIN, _RENEW, _LEAVE, _ROSTER, _ARRIVE, _GIVE_UP)
        }

    def _new_client(self, timeout_s: float) -> redis.Redis:
        """timeout_s: of each of its calls."""
        return redis.Redis.from_url(
            self._url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
        )

    @contextmanager
    def _client_for(self, timeout_s: float) -> Iterator[redis.Redis]:
        """The time belongs to a connection; so who has less of it has one of its own."""
        if timeout_s >= CALL_TIMEOUT_S:
            yield self._client
        else:
            with self._new_client(timeout_s) as client:
                yield client

    def _call(self, script: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            with self._client_for(timeout_s) as client:
                return self._scripts[script]([self._prefix], arguments, client)
        except redis.RedisError as error:  # also one that may not write for now
            raise DiscoveryUnavailable(f"the Redis does not do it: {error}") from None
        except Exception:  # whatever comes of a connection that leave() closes under a call
            if not self._has_ended.is_set():
                raise
            raise DiscoveryUnavailable("the connection to the Redis has been closed") from None

    def _begin(self, deadline: float) -> None:
        self._look(left_s(deadline))
        self._start(self._keep)

    def _ask_to_join(self, timeout_s: float) -> Member:
        deadline = time.monotonic() + timeout_s
        former = ""
        if self._member is None:
            self._check_open(timeout_s)
        else:
            former = json.dumps(
                {
                    "rank": self._member.rank,
                    "incarnation": str(self._member.incarnation),
                    "heard": str(self._heard),
                }
            )
        who = (self._name, self._role, self._address)
        lease_ms = round(1000 * self._lease_s)
        answer = self._call(
            _JOIN, *who, lease_ms, former, FORGET_S, MAX_FORMER, timeout_s=left_s(deadline)
        )
        match answer:
            case ["ok", text]:
                return _member(text)
            case ["lost"]:
                raise MembershipLost(
                    f"{self._name!r} was taken for dead, and another process has come for its name"
                )
        _, address, left_ms = answer
        raise NameTaken(
            f"there is a {self._name!r} already, at {address}; it is heard of within "
            f"{left_ms / 1000:.1f} s, or gone"
        )

    def _check_open(self, timeout_s: float) -> None:
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
        """Heartbeats, and looks at who is there: when told of a change, and now and then, since
        nobody tells that an entry has expired."""
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
                        listener.subscribe(f"{self._prefix}changes")
                    if listener.get_message(timeout=self._chance.uniform(0.8, 1.0) * interval_s):
                        self._has_ended.wait(GATHER_S)
                        while listener.get_message():
                            pass  # one look is for all
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
                    self._listed.clear()
                    _close(listener)
                    listener = None
                    self._has_ended.wait(RETRY_S)
        finally:
            _close(listener)

    def _renew(self) -> None:
        incarnation = str(self.member.incarnation)
        if not self._call(_RENEW, self._name, incarnation, round(1000 * self._lease_s)):
            self._come_back()

    def _come_back(self) -> None:
        super()._come_back()
        self._settled_at = time.monotonic() + self._lease_s
        self._listed.clear()

    def _look(self, timeout_s: float = CALL_TIMEOUT_S) -> None:
        members = [_member(text) for text in self._call(_ROSTER, timeout_s=timeout_s)]
        roster = {member.name: member for member in members}
        if self._name not in roster:
            self._come_back()
            roster[self._name] = self.member
        with self._changed:
            self._changed.notify_all()
        self._tell(roster, is_settling=time.monotonic() < self._settled_at)

    def _wait_at(self, barrier: str, num_members: int, deadline: float, call: int) -> bool:
        who = f"{self._name}/{self.member.incarnation}"
        # The rest of the time is for the word that we have given up.
        give_up_at = deadline - min(WORD_S, 0.1 * (deadline - time.monotonic()))
        while True:
            with suppress(DiscoveryUnavailable):
                if self._call(
                    _ARRIVE,
                    barrier,
                    who,
                    call,
                    num_members,
                    round(1000 * (left_s(deadline) + LINGER_S)),
                    FORGET_S,
                    MAX_FORMER,
                    timeout_s=left_s(give_up_at),
                ):
                    return True
            self._check_waits(barrier, call)
            wait_s = give_up_at - time.monotonic()
            if wait_s <= 0:
                with suppress(DiscoveryUnavailable):
                    return bool(
                        self._call(_GIVE_UP, barrier, who, call, timeout_s=left_s(deadline))
                    )
                return False
            with self._changed:
                self._changed.wait(min(wait_s, RETRY_S))
            self._check_waits(barrier, call)

    def _end(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.notify_all()  # who waits at a barrier
        if self._member is not None:
            with suppress(DiscoveryUnavailable):  # it expires by itself
                self._call(_LEAVE, self._name, str(self._member.incarnation), timeout_s=timeout_s)
        self._client.close()  # nobody waits any more for what does not answer

    def leave_by(self, deadline: float) -> None:
        super().leave_by(deadline)
        self._client.close()  # what a thread has opened meanwhile


def _close(listener: Any) -> None:
    if listener is not None:
        with suppress(redis.RedisError):
            listener.close()


def _member(text: str) -> Member:
    found = json.loads(text)
    return Member(
        found["name"],
        found["role"],
        int(found["rank"]),
        found["address"],
        int(found["incarnation"]),
    )
