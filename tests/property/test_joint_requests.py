"""Small requests for several ranges, taken at once where that is possible: the same answers and the
same bits as where each range is entered alone."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from support.node_host import Host
from support.parameter_state import everything, state_of, table
from xain_parameters.cut import Abandoned
from xain_parameters.keys import even, owners
from xain_parameters.messages import Mark, Message, Pull, Push, Refused, Section, Several
from xain_parameters.node.ports import Source
from xain_parameters.node.protocol import ServerNode
from xain_parameters.specs import CutView, RangeView, View
from xain_parameters.tables.initialisers import Uniform
from xain_parameters.tables.rules import Adam, Momentum
from xain_parameters.tables.sparse import OpenPart

NUM_RANGES = 3
BOUND = 12
TABLES = (
    table(1, bound=BOUND, dim=2, is_dense=True, update=Adam(0.1)),
    table(2, bound=BOUND, dim=1, update=Momentum(0.5), init=Uniform(0.5, seed=3)),
    table(3, dim=3, update=Adam(0.1), init=Uniform(0.5, seed=4)),
    table(4),
)
WORKERS = ("v", "w")
BIG = 1 << 59  # keys of tables without a bound are spread over all 64 bits
RANGES = tuple(
    RangeView(number, range_.start, range_.stop - 1, 1, ("b",))
    for number, range_ in enumerate(even(NUM_RANGES), 1)
)


@pytest.fixture(autouse=True, scope="module")
def _small_sizes():
    """Tables that grow after a few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenPart, "first_rows", 2)
        yield


class Server:
    """The server "b". is_joint: False: it enters each range of a request alone."""

    def __init__(self, *, is_joint):
        self.host = Host()
        self.node = ServerNode("b", self.host)
        if not is_joint:
            self.node._together_of = lambda several, keys: None
        self.node.renew(1e9)

    def ask(self, worker, incarnation, message):
        """The answers that come at once: of each its kind, and its text or values as bytes."""
        self.host.sent.clear()
        self.node.handle(Source(worker, 1, incarnation), message, 0.0)
        return [_told(answer) for answer in self.host.sent]

    def cut(self, number):
        """The parts of a checkpoint, as far as they can be read now."""
        found = []
        for range_ in RANGES:
            try:
                while not isinstance(
                    piece := self.node.read_cut(range_.number, number), str | dict
                ):
                    keys = None if piece.keys is None else piece.keys.tolist()
                    found.append((piece.name, piece.meta, keys, piece.body.tobytes()))
                found.append(piece)
            except Abandoned:
                found.append(None)
        return found

    def state(self):
        replicas = [self.node.replica_of(each.number) for each in RANGES]
        return [each and (everything(each), state_of(each)) for each in replicas]


def _told(answer):
    head = answer.head
    if isinstance(head, Refused):
        return head.why, head.text
    bodies = [values for _, values in answer.bodies] or [answer.values]
    values = b"".join(each.tobytes() for each in bodies if each is not None)
    return type(head).__name__, values


def request(each, spec, numbers, values=None):
    """A request for rows by number, ascending: those of a range go with one section."""
    keys = np.array(numbers, np.uint64)
    if spec.bound is None:
        keys *= np.uint64(BIG)
        owner = owners(keys, [range_.range for range_ in RANGES])
    else:
        lows = [range_.range.indices(BOUND)[0] for range_ in RANGES]
        owner = np.searchsorted(lows, keys.astype(np.int64), side="right") - 1
    order = np.argsort(owner, kind="stable")
    sections = []
    for index in np.unique(owner).tolist():
        some = keys[order][owner[order] == index]
        size = 0 if values is None else len(some) * spec.row_bytes
        if spec.is_dense:
            first = int(some[0])
            sections.append(Section(index + 1, first, first + len(some), 0, size))
        else:
            sections.append(Section(index + 1, 0, 0, len(some), size))
    return Message(
        Several(7, each, tuple(sections)),
        None if spec.is_dense else keys[order],
        None if values is None else values[order].reshape(-1).view(np.uint8),
    )


def rows_of(spec, chance):
    """Numbers of rows: a block of a dense array, or one of a few lists, so that they come again."""
    if spec.is_dense:
        low, high = sorted(chance.sample(range(BOUND + 1), 2))
        return [*range(low, high)]
    return chance.choice(([*range(BOUND)], [1, 4, 7, 10], [1, 4, 7, 10], [0, 5, 6, 9], [2, 3]))


def drawn_step(chance, opened):
    """A step of a case. opened: clocks below are open."""
    kind = chance.choices(("push", "pull", "mark", "view", "cut"), (12, 7, 2, 1, 1))[0]
    worker = chance.randrange(len(WORKERS))
    if kind == "view":
        return kind, chance.choice(("cut", "cut", "no cut", "backup", "moved", "back", "back"))
    if kind == "mark":
        return kind, worker
    if kind == "cut":
        return (kind,)
    spec = chance.choice(TABLES)
    numbers = rows_of(spec, chance)
    if kind == "pull":
        return kind, worker, spec, numbers, opened + (chance.random() < 0.1)
    clock = chance.choice((-1, -1, opened, opened, opened + 1, opened - 1))
    return (
        kind,
        worker,
        spec,
        numbers,
        opened,
        max(-1, clock),
        chance.randint(1, 20),  # part
        clock >= 0 and chance.random() < 0.3,  # whether it is held
        chance.choices((1, 2, 3), (9, 9, 1))[0],  # incarnation
        chance.choice((1.0, -0.25, 3.0)) if chance.random() < 0.95 else np.inf,
    )


class Case:
    """Both servers, and the view that they have."""

    def __init__(self):
        self.servers = [Server(is_joint=True), Server(is_joint=False)]
        self.number = 0
        self.cut = 0
        self.age = 0  # of the view that requests are made under: so many others have come since
        self.marked = dict.fromkeys(WORKERS, 0)  # the checkpoint whose mark each has passed
        self.view = View(1, 0, TABLES, RANGES, {"b": "y", "c": "z"})
        self.see()
        for spec in TABLES[1:]:  # most rows are there
            self.step("push", 0, spec, [*range(BOUND - 1)], 0, -1, 0, False, 1, 1.0)

    @property
    def version(self):
        return self.view.generation, max(1, self.number - self.age)

    def see(self, **changes):
        self.number += 1
        self.view = replace(self.view, number=self.number, **changes)
        for server in self.servers:
            server.node.take_view(self.view, 0.0)

    def change(self, what):
        second = self.view.ranges[1]
        epoch = second.epoch + 1
        match what:
            case "cut":
                if self.view.cut is None:
                    self.cut += 1
                    self.see(cut=CutView(self.cut, WORKERS))
            case "no cut":
                self.see(cut=None)
            case "backup" if second.servers == ("b",):
                self.see_second(replace(second, servers=("b", "c"), epoch=epoch))
            case "moved" if second.servers[0] == "b":
                self.see_second(replace(second, servers=("c", "b"), epoch=epoch))
            case "back":
                self.see_second(replace(second, servers=("b",), epoch=epoch))

    def see_second(self, second):
        self.see(ranges=(self.view.ranges[0], second, self.view.ranges[2]))

    def ask(self, worker, incarnation, message):
        answers = [server.ask(WORKERS[worker], incarnation, message) for server in self.servers]
        assert answers[0] == answers[1]

    def step(self, kind, *given):
        match kind:
            case "view":
                self.change(*given)
            case "cut":
                cuts = [server.cut(self.cut) for server in self.servers]
                assert cuts[0] == cuts[1]
            case "mark":
                [worker] = given
                self.marked[WORKERS[worker]] = self.cut
                for range_ in RANGES if self.cut else ():
                    mark = Mark(7, self.version, range_.number, 0, self.cut, 0)
                    self.ask(worker, 1, Message(mark))
            case "pull":
                worker, spec, numbers, opened = given
                pull = Pull(0, self.version, 0, spec.number, opened)
                self.ask(worker, 1, request(pull, spec, numbers))
            case "push":
                worker, spec, numbers, opened, clock, part, is_held, incarnation, value = given
                push = Push(
                    0,
                    self.version,
                    0,
                    spec.number,
                    opened,
                    clock,
                    part,
                    is_held,
                    incarnation if clock < 0 else 0,
                    max(0, part - 2),
                    self.marked[WORKERS[worker]],
                )
                values = np.full((len(numbers), spec.dim), value, spec.dtype)
                values[0] *= 2
                self.ask(worker, incarnation, request(push, spec, numbers, values))


@settings(max_examples=40)
@given(st.integers(0, 1 << 32))
def test_requests_taken_at_once_are_those_entered_by_range(seed):
    """Known, held and late pushes, marks, checkpoints, backups and ranges that move: wherever
    something is to be done for one range alone, it is."""
    chance = Random(seed)
    case = Case()
    for number in range(120):
        case.age = chance.choice((0, 0, 1, 2))
        case.step(*drawn_step(chance, opened=number // 30))
        assert case.servers[0].state() == case.servers[1].state()
