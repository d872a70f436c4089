"""A backup or learner of a range: it takes the entries and tiles of the primary."""

from xain_parameters.messages import Begin, Declare, Entry, Have, Message, Probe, Tile, Whole
from xain_parameters.node.copy import Copy, declaration
from xain_parameters.node.ports import Host, RangeLog, Source
from xain_parameters.replica import Replica
from xain_parameters.specs import RangeView, TableSpec, decode_table, encoded


class Backup:
    """The backup's or learner's side of one range in one epoch.

    What this server had before is kept until a new copy is whole: the old primary may have
    acknowledged it, and until then the new one acknowledges nothing.
    """

    def __init__(
        self,
        copy: Copy | None,
        range_: RangeView,
        generation: int,
        host: Host,
        log: RangeLog | None,
    ) -> None:
        self.copy = copy
        if copy is not None:
            copy.is_alone = False
        self._range = range_
        self._generation = generation
        self._host = host
        self._log = log
        self._source: Source | None = None
        self._probe = 0
        self._is_begun = False
        self._filling: Replica | None = None
        self._fill = 0  # its number
        self._segment = 0  # the segment of the log that tiles and entries go to
        self._num_tiles = 0

    def probed(self, source: Source, probe: Probe) -> None:
        """Note a probe of the primary, which ends the stream before it, and answer it."""
        if probe.probe <= self._probe:
            return
        self._source, self._probe = source, probe.probe
        self._is_begun = False
        if self.copy is not None and self._filling is None:
            self.copy.abandon_segment()
        self._send_have()

    def take(self, source: Source, message: Message) -> None:
        """Take a message of the stream. Others than the last probe's are ignored."""
        if source != self._source:
            return
        match message.head:
            case Begin() as begin:
                self._begin(begin)
            case _ if not self._is_begun:
                return  # a message of the stream before the last probe
            case Declare(spec=spec):
                self._declare(decode_table(spec))
            case Entry():
                self._take_entry(message)
            case Tile() as tile:
                self._take_tile(message, tile)
            case Whole() as whole:
                self._take_whole(whole)
        self._send_have()

    def synced(self) -> None:
        if self._source is not None:
            self._send_have()

    def _begin(self, begin: Begin) -> None:
        """Begin a stream: go on with what there is, or with an empty replica to be filled."""
        self._is_begun = True
        self._probe = begin.probe
        if begin.fill == (0 if self._filling is None else self._fill):
            return
        assert begin.fill, "a server that lacks tiles is filled"
        if self.copy is not None:
            self.copy.abandon_segment()
        self._fill, self._num_tiles = begin.fill, 0
        self._filling = Replica(self._range, (), self._generation, is_whole=False)
        if self._log is not None:
            self._segment = self._log.begin(self._range, self._generation)

    def _declare(self, table: TableSpec) -> None:
        if self._filling is None:
            assert self.copy is not None
            self.copy.declare(table)
        else:
            if self._filling.declare(table) and self._log is not None:
                message = declaration(self._range.number, encoded(table))
                self._log.append_next(message)

    def _take_entry(self, message: Message) -> None:
        entry = message.head
        assert isinstance(entry, Entry)
        if self._filling is not None:
            self._filling.apply(entry, message.keys, message.values)
            if self._log is not None:
                self._log.append_next(message)
            return
        assert self.copy is not None
        assert entry.sequence == self.copy.replica.sequence + 1, (entry, self.copy.made_in)
        self.copy.advance(message)

    def _take_tile(self, message: Message, tile: Tile) -> None:
        assert self._filling is not None
        self._num_tiles += 1
        self._filling.take(tile, message.keys, message.values)
        if self._log is not None:
            self._log.append_next(message)

    def _take_whole(self, whole: Whole) -> None:
        """Make the replica that was filled the copy of the range."""
        assert self._filling is not None
        assert self._filling.is_whole
        assert self._filling.sequence == whole.sequence
        copy = Copy(
            self._range,
            self._generation,
            self._filling,
            whole.made_in,
            self._log,
            self._segment,
        )
        if self._log is not None:
            self._log.finish(Message(whole))
        self.copy, self._filling = copy, None

    def _send_have(self) -> None:
        assert self._source is not None
        copy = self.copy
        filling = self._filling
        if filling is not None or copy is None:
            sequence, made_in = -1, 0
            received = -1 if filling is None else filling.sequence
        else:
            sequence, made_in, received = copy.synced, copy.made_in, copy.replica.sequence
        have = Have(
            self._range.number,
            self._range.epoch,
            self._probe,
            sequence,
            made_in,
            is_whole=copy is not None and filling is None,
            received=received,
            fill=0 if filling is None else self._fill,
            tiles=self._num_tiles,
        )
        self._host.emit(self._source, Message(have))
