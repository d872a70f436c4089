"""Refused identities in the audit log: at most one line a minute and host, and some in all."""

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from xain_foundation.names import shortened

EVERY_S: Final = 60.0
# Lines of all hosts together: an attacker who owns a network has as many addresses as it likes.
MAX_LINES: Final = 60
_ADDRESS: Final = re.compile(r"ipv[46]:(?P<host>\[.*\]|[^:]*)(:\d*)?")


def host_of(peer: str) -> str:
    """The host of a peer as gRPC names it: a port tells no two callers apart."""
    found = _ADDRESS.fullmatch(unquote(peer))
    return shortened(peer if found is None else found["host"].strip("[]"))


@dataclass(frozen=True, slots=True)
class Told:
    """num: refusals of the host since its last line. num_others: of hosts that had no line,
    because there were too many of them."""

    num: int
    num_others: int


class Refusals:
    """Counts refusals by host. Not thread-safe."""

    def __init__(self) -> None:
        self._hosts: OrderedDict[str, tuple[float, int]] = OrderedDict()  # last line, num since
        self._num_others = 0

    def count(self, host: str, now: float) -> Told | None:
        """Count a refusal. Returns the figures of a line that is due now, or None. now: of a
        monotonic clock."""
        # The hosts of the last minute alone, oldest line first.
        while self._hosts:
            told_at, num = next(iter(self._hosts.values()))
            if now - told_at < EVERY_S:
                break
            first, _ = self._hosts.popitem(last=False)
            if first == host:
                return self._tell(host, now, num + 1)
            self._num_others += num
        if host in self._hosts:
            told_at, num = self._hosts[host]
            self._hosts[host] = (told_at, num + 1)
            return None
        if len(self._hosts) >= MAX_LINES:
            self._num_others += 1
            return None
        return self._tell(host, now, 1)

    def _tell(self, host: str, now: float, num: int) -> Told:
        """Begin a new minute of a host, and return the figures of its line."""
        self._hosts[host] = (now, 0)
        others, self._num_others = self._num_others, 0
        return Told(num, others)
