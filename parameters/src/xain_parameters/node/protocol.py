"""A server node without I/O: messages and views in, messages out.

The process around it (see server.py) calls it from several threads; the simulator calls it on a
virtual clock. Requests of one range are handled one at a time, under the lock of the range; pulls
read without it.
"""

import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from xain_parameters.cut import Abandoned, Cut
from xain_parameters.errors import Invalid
from xain_parameters.keys import Keys
from xain_parameters.messages import (
    NO_KEYS,
    Begin,
    Body,
    Declare,
    Done,
    Entry,
    Have,
    Mark,
    Message,
    Probe,
    Pull,
    Push,
    Refused,
    Rows,
    Section,
    Several,
    Tile,
    Whole,
    parts_of,
)
from xain_parameters.node.backup import Backup
from xain_parameters.node.copy import Copy, num_bytes
from xain_parameters.node.ports import Host, Source
from xain_parameters.node.primary import Primary
from xain_parameters.node.together import RangeRows, Together
from xain_parameters.replica import Replica
from xain_parameters.specs import RangeView, View, job_of, openings
from xain_parameters.tables.joined import RowsOfPart
from xain_parameters.tables.part import Array, Piece
from xain_parameters.transport.sections import Sections

# Requests that wait for a newer view than this server has; more are refused as "busy".
MAX_WAITING = 1024
MAX_WAITING_BYTES = 256 << 20
# Probes of primaries that have a newer view: one for each range is kept.
MAX_EARLY_PROBES = 1 << 16
# Small requests whose rows are kept, and the most bytes of their values. Larger values are sent as
# they lie in the ranges, without a copy.
MAX_TOGETHER = 64
MAX_JOINT_BYTES = 64 << 10

Request = Pull | Push | Several | Mark


class _Refusal(Exception):
    """A request that is refused; see messages.Refused."""

    def __init__(self, why: str, text: str = "") -> None:
        super().__init__(why, text)
        self.why = why
        self.text = text


class _Saving:
    """The part of a range of a checkpoint, while it is read.

    clocks: the clock that each worker began after its mark.
    """

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.clocks: dict[str, int] = {}
        self.pieces = cut.pieces()
        self.is_last = False  # the pieces are those after the last mark


@dataclass(slots=True, eq=False)
class _Hosted:
    """A range at this server.

    role None: its data are being loaded, or are lost.
    version: of the view that it has taken; tables of a later one are not declared here yet.
    """

    view: RangeView
    generation: int
    version: tuple[int, int] = (0, 0)
    lock: threading.RLock = field(default_factory=threading.RLock)
    role: Primary | Backup | None = None
    copy: Copy | None = None  # before the first role
    saving: _Saving | None = None


class ServerNode:
    """name: of this server, in views."""

    def __init__(self, name: str, host: Host) -> None:
        self._name = name
        self._host = host
        self._lock = threading.RLock()  # guards views, and requests that wait for a view
        self._views: dict[int, View] = {}  # by the number of the job
        self._last_job = -1  # the highest number that has been heard of
        self._hosted: dict[int, _Hosted] = {}
        self._roles = object()  # another one whenever a range gets another role, or leaves
        # Joined ranges, by table, sections and keys of small requests.
        self._together: dict[tuple[int, tuple[Section, ...], bytes], Together] = {}
        self._recovered: dict[tuple[int, int], Copy] = {}  # by generation and range
        self._waiting: list[tuple[Source, Message]] = []
        self._num_waiting_bytes = 0
        self._early: dict[int, tuple[Source, Probe]] = {}
        self._leased_until = 0.0

    def read_cut(self, number: int, cut: int) -> Piece | str | dict[str, int]:
        """The next piece of a range's part of a checkpoint; "wait": marks of workers are missing;
        at the end the clock that each worker began after its mark. Raises Abandoned."""
        hosted = self._hosted.get(number)
        if hosted is None:
            raise Abandoned(cut)
        with hosted.lock:
            saving, view = hosted.saving, self._views.get(job_of(number))
            is_due = view is not None and view.cut is not None and view.cut.number == cut
            if saving is None or saving.cut.number != cut or not is_due:
                raise Abandoned(cut)
            assert view is not None
            assert view.cut is not None
            piece = next(saving.pieces, None)
            if piece is not None:
                return piece
            if saving.is_last:
                hosted.saving = None
                if isinstance(hosted.role, Primary):
                    hosted.role.copy.replica.end_cut(cut)
                return saving.clocks
            if {*view.cut.workers} - saving.cut.marked - {*view.ended}:
                return "wait"
            saving.pieces, saving.is_last = saving.cut.finish(), True
            return next(saving.pieces, "wait")

    def view_of(self, number: int) -> RangeView | None:
        """The newest view of a range at this server; None: the range is not here."""
        hosted = self._hosted.get(number)
        return None if hosted is None else hosted.view

    def replica_of(self, number: int) -> Replica | None:
        """The whole replica of a range of this server, if there is one."""
        hosted = self._hosted.get(number)
        copy = None if hosted is None else self._copy(hosted)
        return None if copy is None else copy.replica

    def row_bytes(self, number: int, table: int) -> int:
        """Bytes of a row of a table; 0: the table has no rows here. Safe for any thread."""
        replica = self.replica_of(number)
        return 0 if replica is None else replica.row_bytes(table)

    @property
    def num_bytes(self) -> Counter[int]:
        """Memory of the rows of all replicas here, by job. Safe for any thread."""
        counts: Counter[int] = Counter()
        for number, hosted in list(self._hosted.items()):
            copy = self._copy(hosted)
            if copy is not None:
                counts[job_of(number)] += copy.replica.num_bytes
        return counts

    def version(self, job: int = 0) -> tuple[int, int]:
        view = self._views.get(job)
        return (0, 0) if view is None else view.version

    # --- from the log, before the first view ---

    def recovered(self, range_: RangeView, generation: int, replica: Replica, made_in: int) -> None:
        """Take a range that the log had. RangeView: number and positions count."""
        log = self._host.open_log(range_.number)
        self._recovered[generation, range_.number] = Copy(range_, generation, replica, made_in, log)

    # --- from the scheduler ---

    def renew(self, until: float) -> None:
        """The scheduler takes this server for alive until then, and names no other primary. Waits
        for no range: a long operation on one must not end the lease of all."""
        self._leased_until = until

    def take_view(self, view: View, now: float) -> None:
        """Apply a newer view of a job: take and leave ranges, then handle what waited for it."""
        with self._lock:
            before = self._views.get(view.job)
            if before is not None and view.version <= before.version:
                return
            hosted = [number for number in self._hosted if job_of(number) == view.job]
            if before is None or view.generation > before.generation:
                for number in hosted:
                    self._leave(number, view)
                hosted = []
            self._views[view.job] = view
            mine = {
                each.number: each
                for each in view.ranges
                if self._name in each.servers or self._name in each.learners
            }
            for number in [each for each in hosted if each not in mine]:
                self._leave(number, view)
            for range_ in mine.values():
                self._take_range(range_, view, now)
            self._forget_recovered(view)
            self._report_returned(view)
            waiting, self._waiting = self._waiting, []
            self._num_waiting_bytes = 0
        for source, message in waiting:
            self.handle(source, message, now)

    def keep_jobs(self, jobs: Collection[int]) -> None:
        """Drop what is here of other jobs, which were removed. All views of these have come."""
        with self._lock:
            for number in [each for each in self._hosted if job_of(each) not in jobs]:
                self._leave(number, replace(self._views[job_of(number)], ranges=()))
            for key in [each for each in self._recovered if job_of(each[1]) not in jobs]:
                self._recovered.pop(key).end()
            self._views = {job: view for job, view in self._views.items() if job in jobs}
            self._last_job = max(self._last_job, *jobs)

    def loaded(self, number: int, generation: int, replica: Replica, now: float) -> None:
        """Begin to serve a range with a replica that was loaded from a checkpoint."""
        # The lock of the node comes before that of the range, as in take_view().
        with self._lock:
            hosted = self._hosted.get(number)
            if hosted is None or hosted.generation != generation or hosted.role is not None:
                return
            with hosted.lock:
                self._start(hosted, replica, now)
                # Views may have come while the checkpoint was read.
                self._take_tables_and_cut(hosted, self._views[job_of(number)])

    # --- from the disk ---

    def synced(self, number: int, segment: int, sequence: int, now: float) -> None:
        """Note which entries of a range the log has on disk, and answer durable requests."""
        hosted = self._hosted.get(number)
        if hosted is None:
            return
        with hosted.lock:
            copy = self._copy(hosted)
            if copy is not None:
                copy.advance_synced(segment, sequence)
                copy.continue_segment()
            match hosted.role:
                case Primary() as primary:
                    primary.settle(is_leased=now < self._leased_until)
                case Backup() as backup:
                    backup.synced()

    # --- from the network ---

    def lost(self, server: str) -> None:
        """Note a broken connection to a server, which is asked again at the next tick."""
        for hosted in list(self._hosted.values()):
            with hosted.lock:
                if isinstance(hosted.role, Primary):
                    hosted.role.lost(server)

    def tick(self, now: float) -> None:
        """Probe servers whose connection broke, and settle requests. Called every 50 ms or so."""
        for hosted in list(self._hosted.values()):
            with hosted.lock:
                if isinstance(hosted.role, Primary):
                    hosted.role.probe()
                    hosted.role.settle(is_leased=now < self._leased_until)

    def handle(self, source: Source, message: Message, now: float) -> None:
        """Handle a message of a worker or server by the role of its range."""
        match message.head:
            case Pull() | Push() | Several() | Mark() as request:
                self._handle_request(source, request, message, now)
            case Entry() | Tile() | Begin() | Declare() | Whole() as head:
                hosted = self._hosted.get(head.range)
                if hosted is not None:
                    with hosted.lock:
                        if isinstance(hosted.role, Backup):
                            hosted.role.take(source, message)
            case Have() as have:
                hosted = self._hosted.get(have.range)
                if hosted is not None:
                    with hosted.lock:
                        if isinstance(hosted.role, Primary):
                            hosted.role.had(source.name, have)
                            hosted.role.settle(is_leased=now < self._leased_until)
            case Probe() as probe:
                self._handle_probe(source, probe)

    # --- requests of workers ---

    def _handle_request(
        self, source: Source, request: Request, message: Message, now: float
    ) -> None:
        """Answer a push or pull, or let it wait for the view that it was made with. A refusal goes
        to its sender, and changes nothing."""
        each = request.each if isinstance(request, Several) else request
        job = job_of(request.sections[0].range if isinstance(request, Several) else request.range)
        try:
            view = self._views.get(job)
            if view is None and job <= self._last_job:
                raise _Refusal("moved", "the job was removed")
            if view is None or each.view > view.version:
                self._wait(source, each, job, message)
                return
            if each.view[0] < view.generation:
                raise _Refusal("rolled back")
            # A worker that has ended its loop over clocks may still pull, and push outside of them.
            if source.name in view.ended and not isinstance(each, Pull) and each.clock >= 0:
                raise _Refusal(
                    "evicted",
                    f"the worker {source.name!r} has left its loop over clocks, or was taken for "
                    "dead",
                )
            together = None
            if isinstance(request, Several) and now < self._leased_until:
                together = self._together_of(request, message.keys)
            if isinstance(each, Pull):
                rows = None if together is None else together.pull(each)
                if rows is not None:
                    self._host.emit(source, Message(Rows(request.request), None, rows))
                else:
                    self._pull(source, request, each, message.keys, now)
                return
            if together is not None:
                assert isinstance(each, Push)
                is_current = partial(self._is_current, together)
                if together.push(source.name, each, message.values, is_current):
                    self._host.emit(source, Message(Done(request.request)))
                    return
            if not isinstance(request, Several):
                assert not isinstance(request, Pull)  # it was one above
                hosted = self._ready(request.range, job, each.view, now)
                if self._change(source, hosted, request, message, now):
                    self._host.emit(source, Message(Done(request.request)))
                return
        except _Refusal as refusal:
            self._refuse(source, request.request, job, refusal)
            return
        self._change_several(source, request, job, message, now)

    def _together_of(self, several: Several, keys: Keys | None) -> Together | None:
        """The rows of a small request; None: its ranges have to be entered one after the other."""
        each = several.each
        name = each.table, several.sections, b"" if keys is None else keys.tobytes()
        together = self._together.get(name)
        if together is not None and self._is_current(together) and each.view <= together.version:
            return together
        roles, job = self._roles, job_of(several.sections[0].range)
        ranges: list[RangeRows] = []
        versions = []
        last_range = -1
        key = stop = 0
        for section in several.sections:
            hosted = self._hosted.get(section.range)
            role = None if hosted is None else hosted.role
            if hosted is None or not isinstance(role, Primary) or role.copy.synced < 0:
                return None
            versions.append(hosted.version)
            first_key, key = key, key + section.num_keys
            some = None if keys is None or section.stop > section.start else keys[first_key:key]
            known = role.copy.replica.known_rows(each.table, some, section.start, section.stop)
            if known is None or section.range <= last_range or job_of(section.range) != job:
                return None
            last_range = section.range
            begin, stop = stop, stop + (section.stop - section.start if some is None else len(some))
            row_bytes = known[0].row_bytes
            if section.num_bytes != (stop - begin) * row_bytes and isinstance(each, Push):
                return None
            if stop * row_bytes > MAX_JOINT_BYTES:
                return None
            ranges.append(RangeRows(hosted.lock, role.copy, RowsOfPart(*known, begin, stop)))
        if min(versions) < each.view:
            return None
        together = Together(ranges, min(versions), roles)
        if len(self._together) >= MAX_TOGETHER:
            self._together.clear()  # nothing tells which of them come again
        if self._is_current(together):
            self._together[name] = together
        return together

    def _is_current(self, together: Together) -> bool:
        return together.made_in is self._roles

    def _change_roles(self) -> None:
        """Forget joined ranges: one has got another role, or left. Called under the lock of the
        range, before the change and after it: a request may see half of it."""
        self._roles = object()
        self._together.clear()  # they would keep the memory of the range

    def _change_several(
        self, source: Source, request: Several, job: int, message: Message, now: float
    ) -> None:
        """Take a push to several ranges; one answer follows when all of them have answered."""
        together = Sections(partial(self._host.emit, source), request)
        to = source._replace(connection=together)
        num_done = 0
        for part in parts_of(message):
            head = part.head
            assert isinstance(head, Push)
            try:
                hosted = self._ready(head.range, job, head.view, now)
                num_done += self._change(to, hosted, head, part, now)
            except _Refusal as refusal:
                self._refuse(to, head.request, job, refusal)
        together.done(num_done)

    def _ready(self, range_: int, job: int, version: tuple[int, int], now: float) -> _Hosted:
        """Return a range that this server serves, or refuse. version: of the view asked for."""
        hosted = self._hosted.get(range_)
        if hosted is None or hosted.view.servers[:1] != (self._name,) or job_of(range_) != job:
            raise _Refusal("moved")
        primary = hosted.role
        # A range is not used before its begin is on disk: losing it would roll back the others.
        is_ready = isinstance(primary, Primary) and primary.copy.synced >= 0
        if now >= self._leased_until or not is_ready or version > hosted.version:
            raise _Refusal("busy")
        return hosted

    def _pull(
        self, source: Source, request: Request, pull: Pull, keys: Keys | None, now: float
    ) -> None:
        """Answer a pull of one range, or of several."""
        if not isinstance(request, Several):
            hosted = self._ready(pull.range, job_of(pull.range), pull.view, now)
            rows = self._rows(hosted, pull, keys, pull.start, pull.stop, now)
            self._host.emit(source, Message(Rows(request.request), None, rows))
            return
        job, at = job_of(request.sections[0].range), 0
        bodies: list[Body] = []
        for section in request.sections:
            begin, at = at, at + section.num_keys
            some = None if keys is None else keys[begin:at]
            hosted = self._ready(section.range, job, pull.view, now)
            bodies.append((None, self._rows(hosted, pull, some, section.start, section.stop, now)))
        self._host.emit(source, Message(Rows(request.request), bodies=bodies))

    def _rows(
        self, hosted: _Hosted, pull: Pull, keys: Keys | None, start: int, stop: int, now: float
    ) -> Array:
        """Return the rows of a pull in one range, after opening the clocks that it needs."""
        copy = self._copy(hosted)
        if copy is None:  # the range has left this server since _ready()
            raise _Refusal("moved")
        if pull.opened > copy.replica.opened:
            with hosted.lock:
                primary = hosted.role
                if not isinstance(primary, Primary):
                    raise _Refusal("moved")
                if primary.is_busy:
                    raise _Refusal("busy")
                self._open(hosted, primary, pull.opened)
                primary.settle(is_leased=now < self._leased_until)
        try:
            return copy.replica.rows_of(pull.table, keys, start, stop)
        except Invalid as error:
            raise _Refusal("invalid", str(error)) from None

    def _change(
        self, source: Source, hosted: _Hosted, request: Push | Mark, message: Message, now: float
    ) -> bool:
        """Take a push or mark. Returns whether it is durable; otherwise it is answered later."""
        with hosted.lock:
            primary = hosted.role
            if not isinstance(primary, Primary):
                raise _Refusal("moved")
            replica = primary.copy.replica
            opens = request.opened > replica.opened
            if primary.copy.is_broken or (opens and primary.is_busy):
                raise _Refusal("busy")
            if opens:
                self._open(hosted, primary, request.opened)
            keys = NO_KEYS if message.keys is None else message.keys
            try:
                if isinstance(request, Push):
                    entry = replica.prepare(source.name, request, keys, message.values)
                else:
                    entry = replica.mark(source.name, request)
            except Invalid as error:
                raise _Refusal("invalid", str(error)) from None
            # A repeated push changes nothing, is answered when the first one is durable, and is not
            # refused: a message for several ranges is repeated for a busy one.
            if entry is not None:
                if primary.is_busy:
                    raise _Refusal("busy")
                if isinstance(request, Push) and is_late(replica, request):
                    raise _Refusal("evicted", "others have gone on without this worker")
                primary.commit(Message(entry, message.keys, message.values))
            if request.cut:
                self._follow_cut(hosted, primary)
                saving = hosted.saving
                if saving is not None and saving.cut.number == request.cut and request.clock >= 0:
                    saving.clocks.setdefault(source.name, request.clock)
            is_leased = now < self._leased_until
            if primary.is_settled and is_leased:
                return True
            primary.promise(source, request.request)
            primary.settle(is_leased=is_leased)
            return False

    def _open(self, hosted: _Hosted, primary: Primary, clock: int) -> None:
        """Commit the entries that apply held pushes of clocks below `clock`."""
        replica = primary.copy.replica
        view = self._views[job_of(hosted.view.number)]
        for each, ended in openings(view, replica.opened, clock):
            entry = replica.open(each, ended)
            if entry is not None:
                primary.commit(Message(entry))

    def _follow_cut(self, hosted: _Hosted, primary: Primary) -> None:
        """Begin to write the checkpoint that the view and the marks say; give up others."""
        view, replica = self._views[job_of(hosted.view.number)], primary.copy.replica
        number = 0 if view.cut is None else view.cut.number
        for other in [each for each in replica.cuts if each != number]:
            replica.end_cut(other)
        if view.cut is not None and not {*view.cut.workers} - {*view.ended}:
            entry = replica.cut(number)
            if entry is not None:
                primary.commit(Message(entry))
        cut = replica.cuts.get(number)
        if cut is not None and (hosted.saving is None or hosted.saving.cut is not cut):
            hosted.saving = _Saving(cut)
            self._host.save(hosted.view.number, view)

    def _wait(self, source: Source, each: Pull | Push | Mark, job: int, message: Message) -> None:
        """Keep a request until its view comes, or refuse it as busy if too many wait."""
        with self._lock:
            is_full = (
                len(self._waiting) >= MAX_WAITING or self._num_waiting_bytes >= MAX_WAITING_BYTES
            )
            # The view may have come in between.
            if is_full or each.view <= self.version(job):
                raise _Refusal("busy")
            self._waiting.append((source, message))
            self._num_waiting_bytes += num_bytes(message)

    def _refuse(self, source: Source, number: int, job: int, refusal: "_Refusal") -> None:
        """number: of the request."""
        refused = Refused(number, refusal.why, refusal.text, self.version(job))
        self._host.emit(source, Message(refused))

    # --- ranges of this server ---

    def _take_range(self, range_: RangeView, view: View, now: float) -> None:
        """Begin a range of a view that is new here, or its next epoch."""
        hosted = self._hosted.get(range_.number)
        if hosted is None:
            hosted = self._hosted[range_.number] = _Hosted(range_, view.generation)
            hosted.copy = self._recovered.pop((view.generation, range_.number), None)
            with hosted.lock:
                if hosted.copy is None and self._name in range_.servers:
                    self._begin_range(hosted, view, now)
                else:
                    self._take_role(hosted, now)
        elif range_.epoch > hosted.view.epoch:
            with hosted.lock:
                self._change_roles()
                hosted.view = range_
                # While the checkpoint is being read there is nothing to serve; see loaded().
                if hosted.role is not None:
                    self._take_role(hosted, now)
        with hosted.lock:
            self._take_tables_and_cut(hosted, view)

    def _take_tables_and_cut(self, hosted: _Hosted, view: View) -> None:
        """Declare the tables of a view, and follow its checkpoint."""
        if isinstance(hosted.role, Primary):
            for table in view.tables:
                hosted.role.declare(table)
            self._follow_cut(hosted, hosted.role)
        hosted.version = view.version

    def _begin_range(self, hosted: _Hosted, view: View, now: float) -> None:
        """Begin with the checkpoint, or empty. A server that a range names, and that was not its
        learner before, is the first one in this generation: see the scheduler's placement."""
        if view.rolled_back_to is not None:
            self._host.load(hosted.view, view)
        else:
            replica = Replica(hosted.view, view.tables, view.generation)
            self._start(hosted, replica, now)

    def _start(self, hosted: _Hosted, replica: Replica, now: float) -> None:
        """Make a replica the copy of a range, write it to the log, and begin the role."""
        log = self._host.open_log(hosted.view.number)
        hosted.copy = Copy(hosted.view, hosted.generation, replica, 0, log)
        hosted.copy.write_segment()
        self._take_role(hosted, now)

    def _take_role(self, hosted: _Hosted, now: float) -> None:
        """Become the primary of a range or a backup or learner, as its view says."""
        self._change_roles()
        range_ = hosted.view
        before = hosted.role
        copy = self._copy(hosted)
        if copy is not None:
            copy.abandon_segment()
        is_primary = range_.servers[:1] == (self._name,)
        if is_primary:
            assert copy is not None, f"primary of {range_} without its data"
            primary = Primary(copy, range_, self._host)
            if isinstance(before, Primary):
                primary.take_over(before)
            hosted.role = primary
            primary.probe()
            primary.settle(is_leased=now < self._leased_until)
        else:
            if isinstance(before, Primary):
                before.end(self.version(job_of(range_.number)))
            log = copy.log if copy is not None else self._host.open_log(range_.number)
            hosted.role = Backup(copy, range_, hosted.generation, self._host, log)
            source, probe = self._early.pop(range_.number, (None, None))
            if source is not None and probe is not None:
                self._handle_probe(source, probe)
        if hosted.role is not None:
            hosted.copy = None
        self._change_roles()

    def _leave(self, number: int, view: View) -> None:
        """Drop a range that this server has no more; keep its data if no server has it."""
        hosted = self._hosted.pop(number)
        with hosted.lock:
            self._change_roles()
            if isinstance(hosted.role, Primary):
                hosted.role.end(view.version)
            copy = self._copy(hosted)
            hosted.role = None
            self._change_roles()
        log = self._host.open_log(number)
        if copy is None and log is not None:
            log.drop()
        # A range without a server waits for the one that has it; see _report_returned().
        now = next((each for each in view.ranges if each.number == number), None)
        if copy is None:
            return
        copy.abandon_segment()
        if hosted.generation == view.generation and now is not None and not now.servers:
            self._recovered[hosted.generation, number] = copy
        else:
            copy.end()

    def _report_returned(self, view: View) -> None:
        """Tell which of the ranges without a server are here. Told with each view, since a server
        whose lease was over has them still, and gets them back."""
        epochs = {each.number: each.epoch for each in view.ranges if not each.servers}
        here = {number for _, number in self._recovered}
        has = {number: epoch for number, epoch in epochs.items() if number in here}
        lacks = {number: epoch for number, epoch in epochs.items() if number not in here}
        if epochs:
            self._host.report_returned(view.generation, has, lacks)

    def _forget_recovered(self, view: View) -> None:
        """Drop data of ranges of the job that others have, and of earlier generations."""
        waiting = {each.number for each in view.ranges if not each.servers}
        for generation, number in list(self._recovered):
            is_over = generation != view.generation or number not in waiting
            if job_of(number) == view.job and is_over:
                self._recovered.pop((generation, number)).end()

    @staticmethod
    def _copy(hosted: _Hosted) -> Copy | None:
        role = hosted.role  # another thread may end it meanwhile
        return hosted.copy if role is None else role.copy

    # --- probes ---

    def _handle_probe(self, source: Source, probe: Probe) -> None:
        """Answer a probe of a primary, or keep it until its epoch has come here."""
        with self._lock:
            hosted = self._hosted.get(probe.range)
            if hosted is None or hosted.view.epoch < probe.epoch or hosted.role is None:
                known = self._early.get(probe.range)
                if known is None:
                    is_newer = len(self._early) < MAX_EARLY_PROBES
                else:
                    # The probe of an earlier primary may come later.
                    before = known[1]
                    is_newer = (probe.epoch, probe.probe) > (before.epoch, before.probe)
                if is_newer:
                    self._early[probe.range] = (source, probe)
                return
        with hosted.lock:
            if isinstance(hosted.role, Backup) and hosted.view.epoch == probe.epoch:
                hosted.role.probed(source, probe)


def is_late(replica: Replica, push: Push) -> bool:
    """Tell whether workers have already seen the state after the clock of a push. The worker of the
    push was taken for dead meanwhile, and may have come back.

    After a power cut of the scheduler's machine the last ticks may be missing from its journal, and
    a worker that is started again then gets a clock that is closed here.
    """
    return 0 <= push.clock < replica.opened
