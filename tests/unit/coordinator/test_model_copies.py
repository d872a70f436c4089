"""Which small models are copied from the journal to the store, and when."""

from tests.unit.core.bench import make_rules

from support.memory_journal import MemoryJournal
from xain_coordinator.core.machine.evolve import open_session
from xain_coordinator.core.vocabulary.events import HeartbeatChanged
from xain_coordinator.ports import Record
from xain_coordinator.stores.journalled import JournalledStore
from xain_coordinator.stores.memory import MemoryStore
from xain_coordinator.upkeep.model_copies import MAX_WAITING, ModelCopies


class Copying:
    """A session with models in its journal, and the copies of them."""

    def __init__(self) -> None:
        self.store, self.journal = MemoryStore(), MemoryJournal()
        _, opened = open_session("s", make_rules(), 0.0)
        self.journal.append([Record(0.0, opened)])
        self.part = JournalledStore(self.store, self.journal)
        self.copies = ModelCopies(self.part)

    def make(self, *rounds: int) -> None:
        models = {f"{number}/global": b"x" for number in rounds}
        for key in models:
            self.part.add_model(key)
        self.journal.append([Record(0.0, HeartbeatChanged(1.0, 5.0))], models)

    @property
    def copied(self) -> list[str]:
        return sorted(self.store.keys())


def test_models_between_two_copies_wait_until_a_second_without_a_round():
    """The newest model is copied each time. The others are when no newer one has come since."""
    session = Copying()
    session.make(1, 2, 3)
    session.copies.copy_due()
    assert session.copied == ["3/global"]
    session.make(4, 5)
    session.copies.copy_due()
    assert session.copied == ["3/global", "5/global"]
    assert not session.copies.is_copied("4/global")
    session.copies.copy_due()
    assert session.copied == [f"{number}/global" for number in range(1, 6)]
    assert session.part.models == []


def test_many_models_are_copied_however_fast_the_rounds_are():
    session = Copying()
    session.make(*range(1, MAX_WAITING))
    session.copies.copy_due()
    assert session.copied == [f"{MAX_WAITING - 1}/global"]
    session.make(MAX_WAITING, MAX_WAITING + 1)
    session.copies.copy_due()
    assert len(session.copied) == MAX_WAITING + 1


def test_model_that_is_removed_before_it_was_copied_is_copied_no_more():
    """Rounds are faster than copies here, and only the latest models are kept."""
    session = Copying()
    session.make(1, 2, 3)
    session.copies.copy_due()
    session.part.delete("1/global", "3/global")
    assert session.part.models == ["2/global"]
    session.copies.copy()
    assert session.copied == ["2/global"]
    assert list(session.part.keys("")) == ["2/global"]
