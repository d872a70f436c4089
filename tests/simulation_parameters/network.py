"""Connections between processes: ordered and reliable until they break, as TCP's are."""

import itertools
from collections.abc import Callable
from typing import Protocol

from simulation_parameters.clock import Clock, Process
from xain_parameters.messages import Message
from xain_parameters.node.ports import Source

LATENCY_S = (0.0002, 0.003)
SLOW_S = 0.3  # now and then
BROKEN_S = (0.0, 0.4)  # until a side hears of it
TIMEOUT_S = 1.0  # of a connection over a partition


class Node(Protocol):
    """A process that sends and receives."""

    process: Process

    def received(self, source: Source, message: Message) -> None: ...
    def broke(self, peer: str, connection: int) -> None: ...


class Connection:
    """A connection from `ends[0]`, which made it, to `ends[1]`."""

    def __init__(self, network: "Network", number: int, ends: tuple[Node, Node]) -> None:
        self._network = network
        self.number = number
        self.ends = ends
        self.is_broken = False
        self._is_stuck = False  # nothing arrives any more, and it breaks soon
        self._arrives = [0.0, 0.0]

    def send(self, sender: Node, message: Message) -> None:
        """Lost if it is broken, even if neither side knows."""
        if self.is_broken or self._is_stuck:
            return
        network = self._network
        clock, to = network.clock, 1 - self.ends.index(sender)
        if network.breaks():
            self.break_()
            return
        # Later by more than the clock rounds, so that messages stay in order.
        at = max(self._arrives[to] + 1e-6, clock.now + network.latency(self.ends))
        if at - clock.now > TIMEOUT_S:
            self._is_stuck = True
            clock.after(TIMEOUT_S, None, self.break_)
            return
        self._arrives[to] = at
        clock.after(at - clock.now, None, lambda: self._deliver(to, message))

    def _deliver(self, to: int, message: Message) -> None:
        receiver, sender = self.ends[to], self.ends[1 - to]
        # What was on its way when the connection broke is lost.
        if self.is_broken or not receiver.process.is_alive:
            return
        source = Source(sender.process.name, self.number, sender.process.incarnation)
        receiver.received(source, message)

    def break_(self) -> None:
        if self.is_broken:
            return
        self.is_broken = True
        clock = self._network.clock
        for index, end in enumerate(self.ends):
            peer = self.ends[1 - index].process.name
            step = self._telling(end, peer)
            clock.after(clock.between(*BROKEN_S), end.process, step)

    def _telling(self, end: Node, peer: str) -> Callable[[], None]:
        return lambda: end.broke(peer, self.number)


class Network:
    """loss: the share of messages that break their connection."""

    def __init__(self, clock: Clock, loss: float) -> None:
        self.clock = clock
        self.loss = loss
        self.nodes: dict[str, Node] = {}  # the present process of each name
        self._connections: list[Connection] = []
        self._numbers = itertools.count(1)
        self._cut_off: dict[frozenset[str], float] = {}  # pairs, until when

    def breaks(self) -> bool:
        return self.loss > 0 and self.clock.chance.random() < self.loss

    def connect(self, sender: Node, to: str) -> Connection | None:
        """A new connection; None: the node is gone, or cannot be reached."""
        node = self.nodes.get(to)
        if node is None or not node.process.is_alive:
            return None
        if self.delay(sender.process.name, to) > 0:
            return None
        connection = Connection(self, next(self._numbers), (sender, node))
        self._connections = [each for each in self._connections if not each.is_broken]
        self._connections.append(connection)
        return connection

    def find(self, number: int) -> Connection:
        return next(each for each in self._connections if each.number == number)

    def latency(self, ends: tuple[Node, Node]) -> float:
        chance = self.clock.chance
        latency = self.clock.between(*LATENCY_S)
        if chance.random() < 0.01:
            latency += chance.random() * SLOW_S
        return latency + self.delay(ends[0].process.name, ends[1].process.name)

    def delay(self, one: str, other: str) -> float:
        """Seconds until the two can reach each other."""
        return max(0.0, self._cut_off.get(frozenset((one, other)), 0.0) - self.clock.now)

    def partition(self, one: str, other: str, seconds: float) -> None:
        pair = frozenset((one, other))
        self._cut_off[pair] = max(self._cut_off.get(pair, 0.0), self.clock.now + seconds)

    def break_all(self, name: str) -> None:
        """The connections of a process, when it dies or by a fault."""
        for connection in self._connections:
            if name in (end.process.name for end in connection.ends):
                connection.break_()
