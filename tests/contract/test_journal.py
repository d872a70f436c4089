"""The contract of every Journal."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import pytest

from support.memory_journal import MemoryJournal
from xain_coordinator.core.machine.evolve import begin, evolve
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary.events import (
    DurableEvent,
    ParticipantJoined,
    RoundClosed,
    RoundOpened,
    SessionOpened,
)
from xain_coordinator.core.vocabulary.values import DataProfile, Rules
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import Journal, JournalError, Record, Snapshot

RULES = Rules(
    rounds=3,
    epochs=1,
    min_participants=2,
    fraction_participants=Fraction(2, 3),
    num_required=3,
    max_participants=10,
    start_participants=3,
    start_timeout_s=0.1 + 0.2,
    controller="random",
    aggregation="weighted-average",
    seed=2**64 - 1,
    heartbeat_time_s=10.0,
    heartbeat_timeout_s=5.0,
    initial="workload",
)

FACTORIES: dict[str, Callable[[Path], Journal]] = {
    "memory": lambda _: MemoryJournal(),
    "sqlite": lambda folder: SqliteJournal(folder / "new" / "folder" / "journal.sqlite"),
}


@pytest.fixture(params=FACTORIES)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    journal = FACTORIES[request.param](tmp_path)
    yield journal
    journal.close()


def opened(session_id: str = "one") -> Record:
    return Record(0.0, SessionOpened(session_id, RULES, 0.0))


def closed(number: int) -> Record:
    return Record(float(number), RoundClosed(number))


def test_a_new_journal_is_empty(journal):
    assert list(journal.load()) == []


def test_records_come_back_in_order_and_exactly(journal):
    """Times too, to the last bit."""
    records = [
        opened(),
        Record(0.1 + 0.2, ParticipantJoined("ipv4:127.0.0.1:6087", None, 0.1 + 0.2)),
        Record(1e-300, ParticipantJoined("Zoë", DataProfile(5, 3, ("no", "yes")), 1 / 3)),
        Record(1e300, RoundOpened(0, ("Zoë", "ipv4:127.0.0.1:6087"), 1, 2.0**53 + 2)),
    ]
    journal.append(records[:1])
    journal.append(records[1:])
    journal.append([])
    assert list(journal.load()) == records


def test_only_the_latest_session_is_loaded(journal):
    journal.append([opened("one"), closed(0)])
    journal.append([opened("two")])
    journal.append([closed(1)])
    assert list(journal.load()) == [opened("two"), closed(1)]


def test_a_session_may_begin_within_an_append(journal):
    journal.append([opened("one"), closed(0), opened("two"), closed(1)])
    journal.append([closed(2)])
    assert list(journal.load()) == [opened("two"), closed(1), closed(2)]


def test_records_before_a_session_are_refused(journal):
    with pytest.raises(JournalError, match="begins with a SessionOpened, not a RoundClosed"):
        journal.append([closed(0), opened()])
    assert list(journal.load()) == []


class Unknown:
    """No event."""


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(Record(1.0, cast(DurableEvent, Unknown())), id="unknown"),
        pytest.param(Record(1.0, RoundClosed(cast(Any, "x"))), id="wrong-type"),
        pytest.param(Record(1.0, RoundClosed(cast(Any, None))), id="null"),
        pytest.param(Record(1.0, ParticipantJoined("\ud800", None, 1.0)), id="not-unicode"),
        pytest.param(Record(1.0, ParticipantJoined("a", None, float("nan"))), id="nan"),
        pytest.param(Record(float("nan"), RoundClosed(1)), id="at-nan"),
        pytest.param(Record(float("inf"), RoundClosed(1)), id="at-inf"),
    ],
)
def test_all_or_nothing(journal, bad):
    """One record that cannot be stored, and none of its company is; the next append is whole."""
    journal.append([opened()])
    with pytest.raises(JournalError) as caught:
        journal.append([closed(0), opened("two"), bad, closed(1)])
    assert "\n" not in str(caught.value)
    assert list(journal.load()) == [opened()]
    journal.append([closed(2)])
    assert list(journal.load()) == [opened(), closed(2)]


def test_loaded_records_do_not_change(journal):
    """load() gives the records of the moment of its call, even if they are read later."""
    journal.append([opened("one")])
    records = journal.load()
    journal.append([closed(0), opened("two")])
    assert list(records) == [opened("one")]


def test_records_after_a_number_are_read(journal):
    """A start reads what came after its snapshot, and no more."""
    records = [opened(), closed(0), closed(1), closed(2)]
    journal.append(records)
    for number in range(5):
        assert list(journal.load(number)) == records[number:]


def session_of(name: str) -> Session:
    return begin(SessionOpened(name, RULES, 0.0))


def snapshot_of(num_records: int, name: str = "one") -> Snapshot:
    """Which, is told by its time and its participant."""
    joined = ParticipantJoined(f"p{num_records}", DataProfile(5, 3, ("no", "yes")), 1 / 3)
    session = evolve(session_of(name), joined)
    return Snapshot(num_records, float(num_records), session, History())


def test_a_session_without_a_snapshot(journal):
    assert journal.snapshot() is None
    journal.append([opened()])
    assert journal.snapshot() is None


def test_the_last_snapshot_comes_back_and_the_records_stay(journal):
    """A snapshot is a cache: a reader that does not trust it still has all records."""
    records = [opened(), closed(0), closed(1)]
    journal.append(records)
    for number in (1, 3, 2):
        journal.save(snapshot_of(number))
        assert journal.snapshot() == snapshot_of(number)
        assert list(journal.load()) == records
    journal.append([closed(2)])
    assert journal.snapshot() == snapshot_of(2)
    assert list(journal.load(2)) == [closed(1), closed(2)]


def test_a_snapshot_is_of_its_session_only(journal):
    journal.append([opened("one"), closed(0)])
    journal.save(snapshot_of(2))
    journal.append([opened("two")])
    assert journal.snapshot() is None
    journal.save(snapshot_of(1, "two"))
    assert journal.snapshot() == snapshot_of(1, "two")


def test_a_snapshot_ahead_of_the_records_is_refused(journal):
    """The records are what was acknowledged. Those that come next would be taken for others."""
    journal.append([opened(), closed(0)])
    with pytest.raises(JournalError, match=r"3 records .*has 2"):
        journal.save(snapshot_of(3))
    assert journal.snapshot() is None


def test_a_snapshot_that_cannot_be_saved_leaves_the_one_before(journal):
    journal.append([opened(), closed(0)])
    journal.save(snapshot_of(1))
    with pytest.raises(JournalError, match="a snapshot cannot be written"):
        journal.save(replace(snapshot_of(2), at=float("nan")))
    assert journal.snapshot() == snapshot_of(1)
    journal.append([closed(1)])
    assert list(journal.load()) == [opened(), closed(0), closed(1)]


def test_a_closed_journal(journal):
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="closed"):
        journal.append([opened()])
    with pytest.raises(JournalError, match="closed"):
        journal.load()
    with pytest.raises(JournalError, match="closed"):
        journal.snapshot()
    with pytest.raises(JournalError, match="closed"):
        journal.save(snapshot_of(1))


def test_records_of_a_session_are_read_by_its_id(journal):
    """Objects of an earlier session are kept only where the journal keeps it."""
    assert journal.session_ids() == []
    assert journal.records_of("one") is None
    journal.append([opened("one"), closed(1), closed(2)])
    assert journal.session_ids() == ["one"]
    journal.append([opened("two"), closed(3)])
    assert journal.session_ids()[-1] == "two"
    for session_id, records in (("one", [1, 2]), ("two", [3])):
        if session_id in journal.session_ids():
            found = journal.records_of(session_id)
            assert found is not None
            assert list(found) == [opened(session_id), *map(closed, records)]
    after = journal.records_of("two", 1)
    assert after is not None
    assert list(after) == [closed(3)]
    assert journal.records_of("none") is None


def test_objects_are_written_with_their_records(journal):
    """Objects are read back, listed by prefix and removed by key."""
    journal.append([opened()])
    journal.append([closed(0)], {"3/a.1/journal": b"a", "3/b%.1/journal": b"b"})
    journal.append([closed(1)], {"30/a.2/journal": b"c", "3/\U0001f600/journal": b""})
    assert journal.read_object("3/a.1/journal") == b"a"
    assert journal.read_object("3/b_.1/journal") is None
    assert sorted(journal.object_keys("3/")) == [
        "3/a.1/journal",
        "3/b%.1/journal",
        "3/\U0001f600/journal",
    ]
    assert len(journal.object_keys()) == 4
    journal.delete_objects(["3/a.1/journal", "3/nothing"])
    assert journal.read_object("3/a.1/journal") is None
    assert len(journal.object_keys("3/")) == 2
    assert [record.event for record in journal.load(1)] == [RoundClosed(0), RoundClosed(1)]


def test_prepared_group_is_there_once_it_is_committed(journal):
    """A group may be committed in any thread, together with its objects; an append after it waits
    for nothing else."""
    journal.append([opened()])
    commit = journal.prepare([closed(0)], {"0/a.1/journal": b"a"})
    with ThreadPoolExecutor(1) as thread:
        thread.submit(commit).result()
    assert list(journal.load(1)) == [closed(0)]
    assert journal.read_object("0/a.1/journal") == journal.recent_object("0/a.1/journal") == b"a"
    journal.append([closed(1)])
    assert list(journal.load(2)) == [closed(1)]


def test_objects_of_a_failed_append_are_not_there(journal):
    """A record that cannot be written takes its update with it."""
    with pytest.raises(JournalError):
        journal.append([closed(0)], {"0/a.1/journal": b"a"})
    journal.append([opened()])
    assert journal.read_object("0/a.1/journal") is None
    assert journal.object_keys() == []


def test_a_new_session_has_no_objects(journal):
    journal.append([opened("one")], {"0/a.1/journal": b"a"})
    journal.append([opened("two")])
    assert journal.read_object("0/a.1/journal") is None
    assert journal.object_keys() == []
