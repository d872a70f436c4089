"""Updates on their way in: they go to disk as they come, or are brought from where their sender has
put them.

An object is visible only when it is whole and measured, and every attempt has a key of its own. So
an accepted one is never touched again, not even by a request that everybody gave up and that
reaches a store far away in the end. An upload that goes on after it broke off is still the same
attempt: it is committed once, or never. The last look at the session and the commit happen under
one lock per participant, the same lock that EndTrainingRound holds.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, ParamSpec, Protocol

import xxhash

from xain_coordinator.admission import (
    BaseModel,
    Distance,
    Inspector,
    check_announced_size,
    measure,
)
from xain_coordinator.bundles import Bundles
from xain_coordinator.core.commands import BeginUpload
from xain_coordinator.core.errors import (
    InvalidUpdate,
    NotAMember,
    TooLarge,
    Unavailable,
    UploadMissing,
)
from xain_coordinator.core.keys import (
    attempt_key,
    incoming_key,
    piece_of,
    place_of,
    round_of,
    update_key,
)
from xain_coordinator.core.replies import AlreadyUploaded, UploadTo
from xain_coordinator.core.values import GlobalModel, Phase, StoredWeights, WeightsRef
from xain_coordinator.driver import Driver
from xain_coordinator.ports import (
    DirectAccess,
    KeyNotFound,
    StoreError,
    WeightsStore,
    WrongSize,
)
from xain_coordinator.server.flushes import Flushes
from xain_coordinator.server.places import Places
from xain_coordinator.server.reception import Announced, Decoder, Reception
from xain_coordinator.server.streams import NUM_BATCHES, NUM_SLOW_BATCHES, Intake, Read
from xain_coordinator.threads import run_to_end, wait_to_end
from xain_coordinator.turns import Turn
from xain_proto.fl.coordinator_pb2 import Encoding, PutWeightsRequest
from xain_proto.np import ENCODING_BITS

P = ParamSpec("P")

# What came of broken uploads is kept of so many participants. Each is a file as large as what came,
# open, and some KiB of memory.
MAX_BROKEN = 64

# Copies within the store, and their measuring, at a time: more would only share the same line.
NUM_ADOPTIONS = 4


class Bucket(Protocol):
    """Where participants put updates under names of their own, as XAIN's do."""

    def fetch(self, round_: int, name: str, target: str) -> None:
        """Bring an update to the key `target` of the session's store. Raises KeyNotFound,
        InvalidUpdate, TooLarge and StoreUnavailable."""


@dataclass(slots=True)
class _Adoption:
    """A copy of what a participant has put into the store itself, being made and measured.

    It belongs to nobody's call: a caller that loses its patience finds it done, or joins it, when
    it comes again.
    """

    digest: str
    task: asyncio.Task[StoredWeights | None]


@dataclass(frozen=True, slots=True)
class Received:
    """An update that is there. encoding: how it has travelled this time."""

    ref: WeightsRef
    encoding: "Encoding.ValueType"


@dataclass(slots=True)
class Uploads:
    """Of one session.

    max_update_bytes: larger uploads are refused before a byte is written.
    access: how participants reach the store themselves; None if they cannot.
    bucket: where those who say no more than a name have put their update; None: in the store.
    max_update_norm: L2 norm that the difference to the model may have; None: any.
    encoding: how large updates are wanted.
    receiving: who is uploading at the moment.
    """

    driver: Driver
    store: WeightsStore
    max_update_bytes: int
    access: DirectAccess | None = None
    bucket: Bucket | None = None
    max_update_norm: float | None = None
    encoding: "Encoding.ValueType" = Encoding.PLAIN
    receiving: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    _locks: dict[str, tuple[asyncio.Lock, int]] = field(default_factory=dict)
    # The latest of each place, which is "{round}/{name}", of rounds that may be handed in for.
    _measured: dict[str, StoredWeights] = field(default_factory=dict)
    _measured_round: int = -1
    _adoptions: dict[str, _Adoption] = field(default_factory=dict)
    _adopting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_ADOPTIONS))
    _bundles: Bundles = field(init=False)
    _places: Places = field(default_factory=lambda: Places(NUM_BATCHES, NUM_SLOW_BATCHES))
    _flushes: Flushes = field(default_factory=Flushes)
    # What came of the uploads that broke off, by participant, the latest at the end.
    _broken: dict[str, Reception] = field(default_factory=dict)
    # What is being read again of what a predecessor has received, by participant. It belongs to
    # nobody's call, as an adoption does not.
    _picking_up: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._bundles = Bundles(self.store)

    @asynccontextmanager
    async def exclusive(self, *names: str) -> AsyncIterator[None]:
        """One at a time per name, which is a participant's or its upload's: what is accepted under
        a name must not be written by another call that began before.

        Several are taken in one order, so that nobody waits in a circle.
        """
        async with AsyncExitStack() as stack:
            for name in sorted(set(names)):
                await stack.enter_async_context(self._one(name))
            yield

    @asynccontextmanager
    async def _one(self, name: str) -> AsyncIterator[None]:
        """The lock goes away with its last user."""
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[name]
            if users == 1:
                del self._locks[name]
            else:
                self._locks[name] = (lock, users - 1)

    async def receive(
        self, participant_id: str, read: Read, turn: Turn, *, is_small: bool = False
    ) -> Received:
        """Take one upload. Returns when it is durable.

        A participant has one upload at a time: a new one ends the one before, whose sender has
        lost its connection or its patience. read, turn, is_small: see Intake.
        Raises TooLarge, InvalidUpdate, Unavailable, and whatever BeginUpload refuses.
        """
        session = self.driver.session
        # A stranger takes no place in memory, not even until its header is there. After the end the
        # answer is the same for all, and nobody is held up any more.
        if session.phase is not Phase.FINISHED and participant_id not in session.members:
            raise NotAMember(participant_id)
        intake = partial(Intake, self._places, read, turn, self._flushes, is_small=is_small)
        task = asyncio.ensure_future(self._receive(participant_id, intake))
        earlier = self.receiving.get(participant_id)
        self.receiving[participant_id] = task
        if earlier is not None:
            earlier.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise  # it was our own caller who went away
            raise Unavailable("a newer upload of the same participant has replaced it") from None
        finally:
            if self.receiving.get(participant_id) is task:
                del self.receiving[participant_id]

    async def _receive(self, participant_id: str, begin: Callable[[], Intake]) -> Received:
        # Before anything of this one is in memory: gigabytes may have to be read.
        await self._until_picked_up(participant_id)
        intake = begin()
        try:
            header = await intake.header()
            return Received(await self._take_in(participant_id, header, intake), header.encoding)
        finally:
            intake.close()

    async def _take_in(
        self, participant_id: str, header: PutWeightsRequest.Header, intake: Intake
    ) -> WeightsRef:
        announced = Announced(header.round, header.size_bytes, header.digest.hex())
        place = await self._begin(participant_id, announced)
        if isinstance(place, WeightsRef):
            return place
        if self._holds(place, announced.digest):
            return self._measured[place].ref
        reception = await self._reception(participant_id, place, announced, header.offset)
        is_broken = False  # what is wrong with the update is wrong the next time; a line is not
        try:
            self._decode(reception, header.encoding)
            await intake.into(reception)
            if not reception.is_whole:
                raise Unavailable(
                    f"the upload ended after {reception.offset} of {header.size_bytes} bytes; "
                    "FindUpload says where it can go on"
                )
            # Once it is whole, a line that breaks does not throw it away.
            return await wait_to_end(
                asyncio.ensure_future(self._commit(participant_id, place, reception))
            )
        except (asyncio.CancelledError, Unavailable):
            is_broken = True
            raise
        finally:
            if is_broken and reception.is_open and reception.offset:
                await self._keep_broken(participant_id, reception)
            elif reception.is_open:
                await run_to_end(reception.abort)

    async def _commit(self, participant_id: str, place: str, reception: Reception) -> WeightsRef:
        """Make what is whole durable, and the one that its sender hands in."""
        announced = reception.announced
        async with self.exclusive(participant_id):
            # Much may have happened meanwhile; this is the last look before the commit.
            latest = await self._begin(participant_id, announced)
            if isinstance(latest, WeightsRef):
                return latest
            if self._holds(place, announced.digest):
                return self._measured[place].ref
            measured = await run_to_end(reception.complete)
            self._keep(place, measured)
            # Another attempt at the same update. What is kept of another one may have begun later.
            kept = self._broken.get(participant_id)
            if kept is not None and kept.announced == announced:
                await self._drop_broken(participant_id)
        return measured.ref

    def encoding_for(self, model: GlobalModel) -> "Encoding.ValueType":
        """How updates of this model are wanted."""
        return self.encoding if _has_differences(model) else Encoding.PLAIN

    # --- uploads that go on ---

    async def find_unfinished(self, participant_id: str, announced: Announced) -> int:
        """How much of an upload that broke off is there to be gone on with: bytes of the object.
        All of them if nothing is missing; what comes next is then answered from its header.

        An upload of the participant that still seems to be under way ends: whoever asks has lost
        its connection. Raises as `receive` does.
        """
        place = await self._begin(participant_id, announced)
        if isinstance(place, WeightsRef):
            return announced.size_bytes
        earlier = self.receiving.get(participant_id)
        if earlier is not None and not self._holds(place, announced.digest):
            earlier.cancel()
            await asyncio.wait([earlier])
        if self._holds(place, announced.digest):
            return announced.size_bytes
        if participant_id not in self._broken:
            await self._picked_up(participant_id, place, announced)
        kept = self._broken.get(participant_id)
        return kept.offset if kept is not None and kept.announced == announced else 0

    async def _picked_up(self, participant_id: str, place: str, announced: Announced) -> None:
        """What our predecessor has received of it is among the broken ones. Raises StoreError."""
        picking_up = self._picking_up.get(participant_id)
        if picking_up is None:
            picking_up = asyncio.ensure_future(self._pick_up(participant_id, place, announced))
            self._picking_up[participant_id] = picking_up

            def forget(ended: asyncio.Task[None]) -> None:
                del self._picking_up[participant_id]
                if not ended.cancelled():
                    ended.exception()  # all who asked may have gone

            picking_up.add_done_callback(forget)
        await asyncio.shield(picking_up)

    async def _pick_up(self, participant_id: str, place: str, announced: Announced) -> None:
        reception = self._new_reception(participant_id, place, announced)
        try:
            if await run_to_end(reception.pick_up):
                await self._keep_broken(participant_id, reception)
        except InvalidUpdate:
            pass  # it is not ours to blame on the sender: a disk may have lost it
        finally:
            if self._broken.get(participant_id) is not reception:
                await run_to_end(reception.abort)

    async def _until_picked_up(self, participant_id: str) -> None:
        """Wait for what is being read again for this participant."""
        picking_up = self._picking_up.get(participant_id)
        if picking_up is not None:
            await asyncio.wait([picking_up])

    async def _reception(
        self, participant_id: str, place: str, announced: Announced, offset: int
    ) -> Reception:
        """A new one, or the one that is to go on at this offset. Raises UploadMissing."""
        await self._until_picked_up(participant_id)
        kept = self._broken.get(participant_id)
        if offset:
            if kept is None or kept.announced != announced or kept.offset != offset:
                raise UploadMissing(
                    f"there is no upload that could go on at byte {offset}; begin again at 0"
                )
            return self._broken.pop(participant_id)
        await self._drop_broken(participant_id)
        return self._new_reception(participant_id, place, announced)

    def _new_reception(self, participant_id: str, place: str, announced: Announced) -> Reception:
        label = self._label(participant_id, announced)
        inspector = self._inspector(announced.round)
        return Reception(self.store, _attempt_at(place), announced, inspector, label)

    def _decode(self, reception: Reception, encoding: "Encoding.ValueType") -> None:
        """Raises InvalidUpdate."""
        if encoding == Encoding.PLAIN:
            return
        bits = ENCODING_BITS.get(encoding)
        if bits is None:
            raise InvalidUpdate(f"no encoding of updates has the number {encoding}")
        model = self._model_of(reception.announced.round)
        if model is None or not _has_differences(model):
            raise InvalidUpdate(
                "only updates of a float32 model that there is can be encoded; send it as it is"
            )
        decoder = Decoder(bits, BaseModel(self.store, model))
        if reception.header is not None:
            decoder.go_on(reception.header, reception.offset)
        elif reception.offset:
            raise InvalidUpdate(f"no tile of the update begins at its byte {reception.offset}")
        reception.decoder = decoder

    async def _keep_broken(self, participant_id: str, reception: Reception) -> None:
        """The latest of each participant, and of all no more than MAX_BROKEN."""
        reception.pause()
        # Before anything is waited for: whoever is cancelled here has kept it all the same.
        replaced = self._broken.pop(participant_id, None)
        self._broken[participant_id] = reception
        if replaced is not None:
            await run_to_end(replaced.abort)
        for other in self._unwanted():
            await self._drop_broken(other)
        while len(self._broken) > MAX_BROKEN:
            await self._drop_broken(next(iter(self._broken)))

    def _unwanted(self) -> list[str]:
        """Participants that have left, and those whose broken upload is of a round that is over."""
        members = self.driver.session.members
        places = {p: update_key(r.announced.round, p) for p, r in self._broken.items()}
        wanted = self._wanted(places.values())
        return [p for p, place in places.items() if p not in members or place not in wanted]

    async def _drop_broken(self, participant_id: str) -> None:
        reception = self._broken.pop(participant_id, None)
        if reception is not None:
            await run_to_end(reception.abort)

    def _label(self, participant_id: str, announced: Announced) -> str:
        """The same for whoever goes on with this upload in this session."""
        what = (self.driver.session.session_id, participant_id, *astuple(announced))
        return xxhash.xxh3_128(repr(what).encode()).hexdigest()

    async def close(self) -> None:
        """Let go of the uploads that have broken off. The next process goes on with them, where the
        store can. Nothing is received any more."""
        for receiving in list(self.receiving.values()):
            receiving.cancel()  # its call may have ended, and what came of it not be kept yet
        if ending := [*self.receiving.values(), *self._picking_up.values()]:
            await asyncio.wait(ending)
        for participant_id in self._unwanted():
            await self._drop_broken(participant_id)
        while self._broken:
            _, reception = self._broken.popitem()
            await run_to_end(reception.suspend)

    # --- updates that come in another way ---

    async def take(self, participant_id: str, round_: int, data: bytes, digest: str) -> None:
        """Store an update that came inside its reference. The caller holds `exclusive`.

        Raises as `receive` does.
        """
        place = await self._begin(participant_id, Announced(round_, len(data), digest))
        if isinstance(place, WeightsRef) or self._holds(place, digest):
            return
        distance = self._distance(round_)
        # Without a distance there is nothing to read, and a small object costs less than a thread.
        if distance is None:
            measured = _inspect(data, place, digest, distance)
        else:
            measured = await run_to_end(_inspect, data, place, digest, distance)
        key = await self._bundles.put(place, data)
        self._keep(place, replace(measured, ref=replace(measured.ref, key=key)))

    async def adopt(self, participant_id: str, round_: int, size_bytes: int, digest: str) -> None:
        """Bring to its place what a participant has put into the store itself, checked against what
        it says that it put. The caller holds `exclusive`.

        What counts is a copy: the participant can write to its own key until its URL expires.
        Raises as `receive` does; does nothing if nothing is there.
        """
        place = await self._begin(participant_id, Announced(round_, size_bytes, digest))
        if isinstance(place, WeightsRef) or self._holds(place, digest) or self.access is None:
            return
        adoption = self._adoptions.get(place)
        if adoption is not None and adoption.digest != digest:
            await asyncio.wait([adoption.task])  # it is of another update; one at a time
            self._forget(place, adoption)
            adoption = None
        if adoption is None:
            wanted = self._wanted(self._adoptions)
            for other, old in list(self._adoptions.items()):
                if other not in wanted and old.task.done():
                    self._forget(other, old)
            source = incoming_key(round_, participant_id)
            work = self._adopt(self.access, source, place, size_bytes, digest)
            adoption = _Adoption(digest, asyncio.ensure_future(work))
            self._adoptions[place] = adoption
        await asyncio.wait([adoption.task])
        del self._adoptions[place]
        measured = adoption.task.result()
        if measured is not None:
            self._keep(place, measured)

    async def _adopt(
        self, access: DirectAccess, source: str, place: str, size_bytes: int, digest: str
    ) -> StoredWeights | None:
        key = _attempt_at(place)
        async with self._adopting:
            try:
                await run_to_end(access.copy, source, key, size_bytes)
            except KeyNotFound:
                return None
            except WrongSize as error:
                self._discard(source)
                raise InvalidUpdate(
                    f"the upload has {error.size} bytes, {size_bytes} were announced"
                ) from None
            try:
                distance = self._distance(round_of(place))
                measured = await run_to_end(measure, self.store, key, size_bytes, distance)
                if measured.ref.digest != digest:
                    raise _wrong_digest()
            except InvalidUpdate:
                self._discard(key)
                raise
        return measured

    def _forget(self, place: str, adoption: _Adoption) -> None:
        """An adoption that has ended and that nobody came back for."""
        del self._adoptions[place]
        if not adoption.task.cancelled() and adoption.task.exception() is None:
            measured = adoption.task.result()
            if measured is not None:
                self._discard(measured.ref.key)

    async def named(self, participant_id: str, round_: int, name: str) -> StoredWeights | None:
        """What a participant has put under a name of its own without saying more, as XAIN's do;
        None if there is nothing. The caller holds `exclusive`.

        Raises InvalidUpdate, TooLarge, StoreUnavailable, and what BeginUpload refuses: no stranger
        makes us read a file.
        """
        place = update_key(round_, name)
        accepted = self.driver.session.accepted(participant_id, round_)
        if accepted is not None:
            # Without a digest there is no telling it from another one, but by its place.
            is_meant = place_of(accepted.weights.ref.key) == place
            return accepted.weights if is_meant else None
        if self.bucket is None and place in self._measured:
            return self._measured[place]
        await self.driver.submit(BeginUpload(participant_id, round_, digest="", upload_name=name))
        try:
            if self.bucket is None:
                return await run_to_end(self._measure, place, self._distance(round_))
            key = _attempt_at(place)
            await run_to_end(self.bucket.fetch, round_, name, key)
            distance = self._distance(round_)
            measured = await run_to_end(measure, self.store, key, None, distance)
        except KeyNotFound:
            return None
        self._keep(place, measured)
        return measured

    async def find(
        self, participant_id: str, round_: int, key: str, digest: str
    ) -> StoredWeights | None:
        """The update of this digest that the participant has uploaded for this round; None if there
        is none. The caller holds `exclusive`.

        key: where it lies, as `receive` has told. Raises as `named` does.
        """
        accepted = self.driver.session.accepted(participant_id, round_)
        if accepted is not None:
            return accepted.weights if accepted.weights.ref.digest == digest else None
        place = update_key(round_, participant_id)
        measured = self._measured.get(place)
        if measured is None and place_of(key) == place and piece_of(key) is None:
            # It was uploaded to our predecessor. What is in a bundle comes again with every call.
            await self.driver.submit(BeginUpload(participant_id, round_, digest))
            with contextlib.suppress(KeyNotFound):
                measured = await run_to_end(self._measure, key, self._distance(round_))
        return measured if measured is not None and measured.ref.digest == digest else None

    def _measure(self, key: str, distance: Distance | None) -> StoredWeights:
        measured = measure(self.store, key, None, distance)
        # Whoever wrote it may have died before it was durable, and it is about to count.
        self.store.settle(key)
        return measured

    def _model_of(self, round_: int) -> GlobalModel | None:
        """What the updates of a round are trained from; None if there is no model yet."""
        session = self.driver.session
        base = session.bases.get(round_)
        model = session.model if base is None else base.model
        return None if model is None or model.is_empty or model.round != round_ else model

    def _distance(self, round_: int) -> Distance | None:
        """How far an update of this round may be from its model; None if anywhere."""
        model = self._model_of(round_)
        if self.max_update_norm is None or model is None:
            return None
        return Distance(BaseModel(self.store, model), self.max_update_norm)

    def _inspector(self, round_: int) -> Inspector:
        return Inspector(self._distance(round_))

    async def _begin(self, participant_id: str, announced: Announced) -> str | WeightsRef:
        """Where to write, or the reference if this very update has been accepted."""
        size_bytes = announced.size_bytes
        if size_bytes > self.max_update_bytes:
            raise TooLarge(
                f"an upload of {size_bytes} bytes; at most {self.max_update_bytes} are taken"
            )
        begun = await self.driver.submit(
            BeginUpload(participant_id, announced.round, announced.digest, size_bytes)
        )
        if isinstance(begun, AlreadyUploaded):
            return begun.ref
        model = self._model_of(announced.round)
        if model is not None:
            check_announced_size(model, size_bytes)
        assert isinstance(begun, UploadTo)
        return begun.key

    def _holds(self, place: str, digest: str) -> bool:
        """This very update was brought there before, by a call whose answer got lost."""
        known = self._measured.get(place)
        return known is not None and known.ref.digest == digest

    def _keep(self, place: str, measured: StoredWeights) -> None:
        """From now on this is what its sender hands in; what it uploaded before has no use."""
        if self.driver.session.round != self._measured_round:
            if self._measured_round >= 0:
                self._in_background(self.store.sweep)  # what a predecessor has left of a round
            self._measured_round = self.driver.session.round
            wanted = self._wanted(self._measured)
            self._measured = {p: m for p, m in self._measured.items() if p in wanted}
            for participant_id in self._unwanted():
                self._in_background(self._broken.pop(participant_id).abort)
        replaced = self._measured.get(place)
        self._measured[place] = measured
        if replaced is not None and replaced.ref.key != measured.ref.key:
            unused = self._bundles.discard(replaced.ref.key)
            if unused is not None:
                self._discard(unused)

    def _wanted(self, places: Iterable[str]) -> set[str]:
        """Those of rounds that somebody may still hand in for."""
        newest, earlier = self.driver.session.round, self.driver.session.earlier_rounds
        return {p for p in places if round_of(p) >= newest or round_of(p) in earlier}

    def discard_incoming(self, participant_id: str, round_: int) -> None:
        """Remove what was adopted from where its sender had put it."""
        self._discard(incoming_key(round_, participant_id))

    def _discard(self, key: str) -> None:
        """Remove an object some time. What stays is of no harm."""

        self._in_background(self.store.delete, key)

    def _in_background(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """It is of no harm if it fails."""

        def attempt() -> None:
            with contextlib.suppress(StoreError):
                work(*args, **kwargs)

        with contextlib.suppress(RuntimeError):  # the process is ending
            asyncio.get_running_loop().run_in_executor(None, attempt)


def _has_differences(model: GlobalModel) -> bool:
    """Whether the differences of its updates to it have an encoding."""
    return model.dtype == "float32" and not model.is_empty


def _attempt_at(place: str) -> str:
    return attempt_key(place, uuid.uuid4().hex)


def _inspect(data: bytes, place: str, digest: str, distance: Distance | None) -> StoredWeights:
    """Measure what came whole and is to lie there. Raises InvalidUpdate, and the store's errors."""
    inspector = Inspector(distance)
    try:
        inspector.feed(data)
        if inspector.digest != digest:
            raise _wrong_digest()
        return inspector.result(place)
    finally:
        inspector.close()


def _wrong_digest() -> InvalidUpdate:
    return InvalidUpdate("the upload's digest is not the one announced; send it again")
