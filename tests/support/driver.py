"""A driver on a journal that the test holds up, lets go and breaks. Nothing here takes time."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial

import pytest

from support.clock import HeldClock
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.machine.questions import Question
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import Aggregate, Effect
from xain_coordinator.core.vocabulary.errors import Unavailable
from xain_coordinator.core.vocabulary.values import GlobalModel, Rules, StoredWeights, WeightsRef
from xain_coordinator.driver.driver import Driver
from xain_coordinator.ports import JournalError, Record, Snapshot

RULES = CoordinatorConfig.model_validate(
    {"rounds": {"min_participants": 2, "max_participants": 4, "initial_weights": "average"}}
).rules()
MODEL = GlobalModel(0, WeightsRef("0/global", 128, "0" * 32), "float32", (0,))


class HeldJournal:
    """A Journal whose appends, once held, wait until they are let go or told to fail. Its snapshots
    do so on their own, and none is loaded."""

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self.groups: list[list[str]] = []  # the kinds of the events of each append
        self.num_closed = 0
        self._records = list(records)
        self._loop = asyncio.get_running_loop()
        self._begun = asyncio.Event()
        self._held = False
        self._go = threading.Semaphore(0)
        self._error: Exception | None = None
        self.saved: list[Snapshot] = []
        self.save_error: Exception | None = None
        self.may_save = threading.Event()
        self.may_save.set()
        self._begun_saving = asyncio.Event()

    def load(self, after: int = 0) -> Sequence[Record]:
        return self._records[after:]

    def snapshot(self) -> Snapshot | None:
        return None

    def save(self, snapshot: Snapshot) -> None:
        self.saved.append(snapshot)
        self._loop.call_soon_threadsafe(self._begun_saving.set)
        assert self.may_save.wait(timeout=60), "the test never let it go"
        if self.save_error is not None:
            raise self.save_error

    def append(self, records: Sequence[Record], objects: Mapping[str, bytes] | None = None) -> None:
        if self._held:
            self._loop.call_soon_threadsafe(self._begun.set)
            assert self._go.acquire(timeout=60), "the test never let it go"
        if self._error is not None:
            raise self._error
        self._records += records
        self.groups.append([type(record.event).__name__ for record in records])

    def prepare(
        self, records: Sequence[Record], objects: Mapping[str, bytes] | None = None
    ) -> Callable[[], None]:
        return partial(self.append, records, objects)

    def close(self) -> None:
        self.num_closed += 1

    def hold(self) -> None:
        self._held = True

    async def writing(self) -> None:
        """An append is under way."""
        await self._begun.wait()
        self._begun.clear()

    async def saving(self) -> None:
        """A snapshot is being written, or has been."""
        await self._begun_saving.wait()

    def let_go(self) -> None:
        """One append succeeds."""
        self._go.release()

    def fail(self) -> None:
        self._error = JournalError("no room left")
        self._go.release()


class Recorder:
    """A worker that only notes what it is to do."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []

    def make_at_once(self, effect: Aggregate, objects: Mapping[str, bytes]) -> None:
        """Leave it to `perform`."""

    def perform(self, effect: Effect) -> None:
        self.effects.append(effect)


class Bench:
    """A started driver, what it stands on, and the calls to it."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.journal = HeldJournal()
        self.clock = HeldClock()
        self.worker = Recorder()
        self.driver = Driver.open(self.journal, lambda _: self.clock, rules, lambda: "s")
        self.driver.start(self.worker)

    async def join(self, *names: str) -> None:
        for name in names:
            await self.driver.submit(c.Rendezvous(name))

    async def opening(self) -> asyncio.Task[r.Reply]:
        """Round 0 is opened for a and b, and its opening is being written."""
        await self.join("a", "b")
        self.journal.hold()
        task = await self.submit(c.InitialisationDone(MODEL))
        await self.journal.writing()
        return task

    async def submit(self, sent: c.Command | Question) -> asyncio.Task[r.Reply]:
        """A caller, on its way: the command is decided, or the question is answered."""
        driver = self.driver
        call = driver.ask(sent) if isinstance(sent, Question) else driver.submit(sent)
        task = asyncio.create_task(call)
        await settled()
        return task


async def settled() -> None:
    """Let all tasks go on that can."""
    for _ in range(20):
        await asyncio.sleep(0)  # one iteration of the event loop; no time passes


async def fails(call: Coroutine[object, object, object] | asyncio.Task[r.Reply]) -> None:
    with pytest.raises(Unavailable):
        await call


def model(round_: int) -> GlobalModel:
    return GlobalModel(round_, WeightsRef(f"{round_}/global", 140, "0" * 32), "float32", (3,))


def update(participant_id: str, round_: int, number: int = 0) -> c.EndTrainingRound:
    ref = WeightsRef(f"{round_}/{participant_id}", 140, f"digest {number}")
    weights = StoredWeights(ref, "float32", (3,))
    return c.EndTrainingRound(participant_id, round_, 5, weights)


async def begin(driver: Driver) -> None:
    """Round 0 is open for a and b."""
    for command in (c.Rendezvous("a"), c.Rendezvous("b"), c.InitialisationDone(MODEL)):
        await driver.submit(command)


async def play(driver: Driver, rounds: range) -> None:
    for round_ in rounds:
        for participant_id in ("a", "b"):
            await driver.submit(update(participant_id, round_))
        await driver.submit(c.AggregationDone(model(round_ + 1)))
