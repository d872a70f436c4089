"""Messages between workers and servers, and between servers.

A message is a small typed head and up to two arrays, its body: keys (uint64, C order) and values
(rows of the table's dtype, C order). On the wire, little-endian:

    u32 length of the head | u32 num_keys | u64 bytes of the values | head | keys | values

The head is a msgpack array of the fields below, led by the number of its type. num_keys is 0 where
there are no keys: a dense request names rows by `start` and `stop`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from xain_parameters.keys import Keys

VERSION = 4
MAX_HEAD_BYTES = 64 << 10
MAX_BODY_BYTES = 4 << 30
MAX_TEXT_BYTES = 60 << 10  # the text of a Command or of its answer, in UTF-8


class Head(msgspec.Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of all heads."""


# --- at the beginning of a connection, from the side that connects ---


class Hello(Head, frozen=True, array_like=True, tag=1):
    """role: "worker" or "server". The answer is Done with request 0, or Refused."""

    version: int
    role: str
    name: str
    incarnation: int


# --- requests of workers to the primary of a range ---


class Pull(Head, frozen=True, array_like=True, tag=2):
    """Ask for rows; answered by Rows or Refused.

    view: (generation, number) that the worker acts on; a server with an older one fetches it first.
    opened: all pushes of clocks below count by now; the server applies what it still holds back.
    Keys are in the body, of one range, in any order, without duplicates; or rows [start, stop) of a
    dense array, counted in the whole array.
    """

    request: int
    view: tuple[int, int]
    range: int
    table: int
    opened: int
    start: int = 0
    stop: int = 0


class Push(Head, frozen=True, array_like=True, tag=3):
    """Apply values to rows; answered by Done when it is as durable as the group promises.

    clock, part: with the worker's name and the table they name the push. The same one again changes
        nothing. clock -1: outside of clocks; then `incarnation` of the worker tells its processes
        apart, and all parts below `settled` have been answered.
    is_held: do not apply it before clock + 1 is opened, and then in the order of the workers' names
        (bulk synchronous). Otherwise it is applied on arrival.
    Keys, unique and ascending, are in the body; or rows [start, stop) as in Pull.
    """

    request: int
    view: tuple[int, int]
    range: int
    table: int
    opened: int
    clock: int
    part: int
    is_held: bool
    incarnation: int = 0
    settled: int = 0
    cut: int = 0  # the worker has passed the mark of this checkpoint
    start: int = 0
    stop: int = 0


class Mark(Head, frozen=True, array_like=True, tag=4):
    """The worker has passed the mark of a checkpoint: what it pushes from now on is not in it. Sent
    to every range; answered by Done."""

    request: int
    view: tuple[int, int]
    range: int
    opened: int
    cut: int
    clock: int


class Section(msgspec.Struct, frozen=True, array_like=True):
    """The range, rows and sizes of one section of a Several: num_keys and num_bytes are its part of
    the body."""

    range: int
    start: int
    stop: int
    num_keys: int
    num_bytes: int


class Several(Head, frozen=True, array_like=True, tag=6):
    """The same request for several ranges of one primary, in one message.

    each: the request; its own number, range, start and stop are ignored.
    The body is the keys of all sections in their order, then the values of all. One answer follows
    when all ranges have answered: Done, Rows with the values of all in their order, or the Refused
    of one range; other ranges may have done what was asked.
    """

    request: int
    each: Pull | Push
    sections: tuple[Section, ...]

    def part(self, number: int) -> Pull | Push:
        """Return the request for one section; its `request` is the number of the section."""
        section = self.sections[number]
        return msgspec.structs.replace(
            self.each,
            request=number,
            range=section.range,
            start=section.start,
            stop=section.stop,
        )


class Command(Head, frozen=True, array_like=True, tag=5):
    """A user's own request, as ps-lite's SimpleApp has: an integer and a text. Answered by Said.

    number: with the sender's name and incarnation it names the request, which is done once.
    """

    request: int
    head: int
    text: str
    number: int = 0


# --- answers ---


class Rows(Head, frozen=True, array_like=True, tag=16):
    """The values of a Pull, in the order of its keys."""

    request: int


class Done(Head, frozen=True, array_like=True, tag=17):
    request: int


class Refused(Head, frozen=True, array_like=True, tag=18):
    """why: "invalid": an error of the caller, `text` says which. "moved": this server is not the
    primary of the range, or the range is none any more; get the newest view, at least `view`, and
    ask again. "busy": ask again in a moment. "rolled back": the request is of an older generation.
    "evicted": the sender is no member."""

    request: int
    why: str
    text: str
    view: tuple[int, int] = (0, 0)


class Said(Head, frozen=True, array_like=True, tag=19):
    request: int
    text: str


# --- between the servers of a range ---


class Entry(Head, frozen=True, array_like=True, tag=32):
    """A step of a range, in the order of `sequence` (1, 2, ...) the same at all its servers, in its
    log and in a replay. Applying the same entries gives the same bits.

    kind: "push": as Push says, by `worker`. "open": all held pushes of clocks below `clock` are
        applied, in the order (clock, worker, table, part); those of a worker in `ended` count below
        its number of clocks only. "mark": as Mark says. "cut": the state before this entry is
        the checkpoint `cut`.
    The body is that of the push.
    """

    range: int
    epoch: int
    sequence: int
    kind: str
    clock: int = 0
    worker: str = ""
    incarnation: int = 0
    table: int = 0
    part: int = 0
    settled: int = 0
    is_held: bool = False
    cut: int = 0
    start: int = 0
    stop: int = 0
    ended: dict[str, int] = {}


class Tile(Head, frozen=True, array_like=True, tag=33):
    """A piece of the state of a range, for a learner.

    The learner takes tiles and entries in the order that they come in. A tile replaces its
    rows, and has in it what the entries before it did to them. `is_last` makes the learner a whole
    copy at `sequence`. name: what it is a piece of, see tables. The body is keys and bytes.
    """

    range: int
    epoch: int
    sequence: int
    name: str
    meta: bytes
    is_last: bool


class Probe(Head, frozen=True, array_like=True, tag=34):
    """The primary asks a backup or learner what it has, at the beginning of an epoch and of each
    connection. The answer is Have with the same `probe`. The backup takes entries and tiles only
    from the connection of the last probe, so a deposed primary is not heard.

    probe: higher with each probe of a server.
    """

    range: int
    epoch: int
    probe: int


class Have(Head, frozen=True, array_like=True, tag=35):
    """A backup or learner has all entries up to `sequence`, as durably as it keeps them.

    made_in: the epoch in which the entry `sequence` was made. One primary makes the entries of an
        epoch, so equal (made_in, sequence) mean equal states.
    is_whole: False: a learner that still lacks tiles.
    received: the last entry that has come, durable or not.
    fill: the number of the unfinished fill, see Begin; 0: none. tiles: how many of it have come.
    """

    range: int
    epoch: int
    probe: int
    sequence: int
    made_in: int
    is_whole: bool
    received: int
    fill: int
    tiles: int


class Begin(Head, frozen=True, array_like=True, tag=36):
    """The primary begins a stream of entries for a backup or learner, or goes on with one after the
    connection broke. A Declare for each table follows.

    probe: of each Have from here on.
    fill: 0: entries alone. Otherwise tiles come too, and what the receiver has is of no use, except
        for what has come of the fill of this number.
    """

    range: int
    epoch: int
    probe: int
    fill: int


class Declare(Head, frozen=True, array_like=True, tag=37):
    """A table that entries behind this message may change. spec: of specs.decode_table."""

    range: int
    epoch: int
    spec: bytes


class Whole(Head, frozen=True, array_like=True, tag=38):
    """The receiver has got everything by now: it is a whole copy at `sequence`, an entry that was
    made in the epoch `made_in`."""

    range: int
    epoch: int
    sequence: int
    made_in: int


Values: TypeAlias = NDArray[Any]


@dataclass(slots=True, eq=False)
class Message:
    """A head and its body.

    values: any C-contiguous array; its receiver knows dtype and shape from the table, and gets
        bytes as (n,) uint8.
    bodies: in place of keys and values, those of several arrays: all keys, then all values.
    several: the request for several ranges that this message is a section of; `head.request` is the
        number of the section then. A large Several is received by sections, a small one whole.
    """

    head: Head
    keys: Keys | None = None
    values: Values | None = None
    bodies: "Sequence[Body]" = ()
    several: Several | None = None


Body: TypeAlias = tuple[Keys | None, Values | None]


def parts_of(message: Message) -> Iterator[Message]:
    """Yield the sections of a Several that was received whole, each as a message."""
    several = message.head
    assert isinstance(several, Several)
    keys, values = message.keys, message.values
    key = at = 0
    for number, section in enumerate(several.sections):
        first_key, key = key, key + section.num_keys
        first, at = at, at + section.num_bytes
        yield Message(
            several.part(number),
            None if keys is None or not section.num_keys else keys[first_key:key],
            None if values is None or not section.num_bytes else values[first:at],
            several=several,
        )


AnyHead = (
    Hello
    | Pull
    | Push
    | Mark
    | Several
    | Command
    | Rows
    | Done
    | Refused
    | Said
    | Entry
    | Tile
    | Probe
    | Have
    | Begin
    | Declare
    | Whole
)
encode_head: Callable[[Head], bytes] = msgspec.msgpack.Encoder().encode
decode_head: Callable[[bytes | memoryview], AnyHead] = msgspec.msgpack.Decoder(AnyHead).decode

NO_KEYS: Keys = np.empty(0, np.uint64)
