"""The data of one range at one server: replica, log and the latest entries."""

from collections import deque
from collections.abc import Iterator

from xain_parameters.messages import Declare, Entry, Message, Push, Whole
from xain_parameters.node.ports import RangeLog
from xain_parameters.replica import Replica
from xain_parameters.specs import RangeView, TableSpec, encoded

# The latest entries are kept to bring servers up to date that lack only these: after a failover, a
# broken connection, a restart. A server that lacks more is filled by tiles.
MAX_TAIL_ENTRIES = 256
MAX_TAIL_BYTES = 16 << 20


def num_bytes(message: Message) -> int:
    keys, values = message.keys, message.values
    return (0 if keys is None else keys.nbytes) + (0 if values is None else values.nbytes)


def declaration(range_: int, spec: bytes) -> Message:
    """The record of a table of a range in a log. spec: of specs.decode_table."""
    return Message(Declare(range_, 0, spec))


def tiles_of(replica: Replica) -> Iterator[Message]:
    for tile, keys, body in replica.tiles():
        yield Message(tile, keys, body)


class Tail:
    """The latest entries of a range, in order and without a gap."""

    def __init__(self, sequence: int, made_in: int) -> None:
        self._before = (sequence, made_in)  # the entry before the first
        self._entries: deque[Message] = deque()
        self._num_bytes = 0

    def append(self, message: Message) -> None:
        self._entries.append(message)
        self._num_bytes += num_bytes(message)
        while len(self._entries) > MAX_TAIL_ENTRIES or self._num_bytes > MAX_TAIL_BYTES:
            first = self._entries.popleft()
            assert isinstance(first.head, Entry)
            self._before = (first.head.sequence, first.head.epoch)
            self._num_bytes -= num_bytes(first)

    def restart(self, sequence: int, made_in: int) -> None:
        """Forget all entries; the next one follows on the entry (sequence, made_in)."""
        self._before = (sequence, made_in)
        self._entries.clear()
        self._num_bytes = 0

    def after(self, sequence: int, made_in: int | None) -> list[Message] | None:
        """The entries that a server lacks whose last one is (sequence, made_in); None if they are
        not here, or the server has others.

        made_in: None for a server that has had all of its entries from here.
        """
        number, epoch = self._before
        if number == sequence and made_in in (None, epoch):
            return list(self._entries)
        for index, message in enumerate(self._entries):
            assert isinstance(message.head, Entry)
            if message.head.sequence == sequence:
                is_same = made_in in (None, message.head.epoch)
                return list(self._entries)[index + 1 :] if is_same else None
        return None


class Copy:
    """A whole replica and what belongs to it.

    made_in: the epoch in which the last entry was made, 0 before the first.
    synced: the last entry that this server keeps as durably as the group promises.
    is_alone: no other server has the range, so entries are not kept in the tail to bring one up to
        date: their memory takes the next ones, while it is still in the processor's cache.
    segment: the first of the log that has this copy; earlier ones have another, whose entries count
        for nothing here. 0: the log was read.
    is_broken: applying an entry raised, so the replica may have a part of it. The server ends.
    """

    def __init__(
        self,
        range_: RangeView,
        generation: int,
        replica: Replica,
        made_in: int,
        log: RangeLog | None,
        segment: int = 0,
    ) -> None:
        self._range = range_
        self._generation = generation
        self.replica = replica
        self.made_in = made_in
        self.log = log
        self.synced = -1 if segment else replica.sequence  # the disk has nothing of a new segment
        self._segment = segment
        self.tail = Tail(replica.sequence, made_in)
        self._is_alone = False
        self.is_broken = False
        self._moving: Iterator[Message] | None = None  # tiles that go to a new segment of the log

    @property
    def tables(self) -> tuple[bytes, ...]:
        return tuple(encoded(table) for table in self.replica.tables)

    @property
    def is_alone(self) -> bool:
        return self._is_alone

    @is_alone.setter
    def is_alone(self, is_alone: bool) -> None:
        if self._is_alone and not is_alone:
            self.tail.restart(self.replica.sequence, self.made_in)
        self._is_alone = is_alone

    def declare(self, table: TableSpec) -> Message | None:
        """Declare a table, and log it. Returns its record; None: it is known, or was refused."""
        if not self.replica.declare(table):
            return None
        message = declaration(self._range.number, encoded(table))
        if self.log is not None:
            self.log.append(message)
        return message

    def advance(self, message: Message) -> None:
        """Take the next entry into replica, log and tail."""
        entry = message.head
        assert isinstance(entry, Entry)
        try:
            self.replica.apply(entry, message.keys, message.values)
        except BaseException:  # the entry may have been applied in part
            self.is_broken = True
            raise
        if self.log is not None:  # a replay must be able to apply what the log has
            self.log.append(message)
        self.made_in = entry.epoch
        if not self._is_alone:
            self.tail.append(message)
        if self.log is None:
            self.synced = entry.sequence
        elif self._moving is None and self.log.wants_new_segment():
            self.begin_segment()

    def advanced(self, worker: str, push: Push) -> None:
        """Record a push whose rows were updated, where no other server and no log needs it."""
        replica = self.replica
        replica.pushed(worker, push)
        self.made_in = replica.epoch
        self.synced = replica.sequence

    def advance_synced(self, segment: int, sequence: int) -> None:
        """Record that a segment of the log has all entries up to `sequence` on disk."""
        if segment >= self._segment:
            self.synced = max(self.synced, sequence)

    # --- a new segment of the log, which begins with the state as tiles ---

    def begin_segment(self) -> int:
        """Begin a new segment of the log with the whole replica. Returns its number."""
        assert self.log is not None
        number = self.log.begin(self._range, self._generation)
        for spec in self.tables:
            self.log.append_next(declaration(self._range.number, spec))
        self._moving = tiles_of(self.replica)
        self.continue_segment()
        return number

    def continue_segment(self) -> None:
        """Write the next tile. Called whenever the disk has taken what was written before, so that
        the entries between find room."""
        if self._moving is None:
            return
        assert self.log is not None
        tile = next(self._moving, None)
        if tile is not None:
            self.log.append_next(tile)
        else:
            self._moving = None
            sequence = self.replica.sequence
            self.log.finish(Message(Whole(self._range.number, 0, sequence, self.made_in)))

    def write_segment(self) -> None:
        """Write a whole new segment at once, for a replica that is empty or loaded."""
        if self.log is None:
            return
        self.synced = -1
        self._segment = self.begin_segment()
        while self._moving is not None:
            self.continue_segment()

    def abandon_segment(self) -> None:
        """Give up a new segment that is not whole."""
        self._moving = None
        if self.log is not None:
            self.log.abandon()

    def end(self) -> None:
        if self.log is not None:
            self.log.drop()
