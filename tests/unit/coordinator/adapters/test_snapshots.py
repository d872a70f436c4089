"""Sessions and their history as bytes."""

import contextlib
import hashlib
import json
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.core.bench import LEASE_S, PROFILE, Bench, make_rules, stored

from xain_coordinator.core.machine.evolve import begin, evolve
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.errors import Refusal
from xain_coordinator.core.vocabulary.keys import update_key
from xain_coordinator.core.vocabulary.values import DataProfile, Evaluation, Phase
from xain_coordinator.journal.codec import decode, decode_record, encode
from xain_coordinator.journal.snapshots import (
    FOLD,
    encode_snapshot,
    snapshot_version,
    usable_snapshot,
)
from xain_coordinator.ports import JournalError, Snapshot

FORMAT_1 = Path(__file__).with_name("format_1.sql")
NAMES = st.sampled_from("abcdef")


def fold(events: list[e.DurableEvent], onto: Snapshot | None = None) -> Snapshot:
    """The snapshot after these events, one a second."""
    if onto is None:
        assert isinstance(events[0], e.SessionOpened)
        history = History(rules=events[0].rules)
        onto, events = Snapshot(1, 0.0, begin(events[0]), history), events[1:]
    session, history = onto.session, onto.history.copy()
    for event in events:
        session = evolve(session, event)
        history.apply(event)
    number = onto.num_records + len(events)
    return Snapshot(number, float(number), session, history)


def again(snapshot: Snapshot) -> Snapshot:
    """The snapshot as a later process reads it."""
    read = usable_snapshot(*encode_snapshot(snapshot), snapshot.num_records)
    assert read is not None
    return read


def recorded() -> list[e.DurableEvent]:
    """A whole session, as an earlier version wrote it."""
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(FORMAT_1.read_text(encoding="utf-8"))
        rows = db.execute("SELECT at, type, body FROM record ORDER BY seq")
        return [decode_record(row).event for row in rows]


@pytest.mark.parametrize(
    "rules",
    [
        make_rules(rounds=3, min_participants=2, fraction="2/3", controller="random"),
        make_rules(rounds=3, min_participants=2, fraction="0.5", initial="empty"),
        make_rules(rounds=3, quorum=("participant:update:60%", "a:update:1", "OR"), deadline_s=1.0),
        make_rules(rounds=9, min_participants=2, consistency="ssp", staleness=3, buffer_size=2),
    ],
    ids=["workload", "empty", "quorum", "ssp"],
)
@settings(deadline=None, max_examples=25)
@given(
    steps=st.lists(
        st.tuples(st.just("join"), NAMES)
        | st.tuples(st.sampled_from(["end", "end", "end", "leave", "named", "expire"]), NAMES),
        min_size=10,
        max_size=40,
    )
)
def test_snapshot_at_any_point_and_the_rest_give_the_same(rules, steps):
    """A snapshot and the events after it give the session and the history of all events, to the
    order of the participants and the type of a number."""
    bench = Bench(rules)
    for action, name in [("join", "a"), ("join", "b"), ("join", "c"), *steps]:
        bench.now += 0.1
        with contextlib.suppress(Refusal):
            match action:
                case "join":
                    bench.join(name)
                case "end":
                    bench.end(name, f"{name}@{bench.session.round}")
                case "named":
                    bench.end(name, f"{name}@{bench.session.round}", upload_name=f"upload-{name}")
                case "leave":
                    bench.leave(name)
                case "expire":
                    bench.pass_time(LEASE_S, name)
    whole = fold(bench.journal)
    assert whole.session == bench.session
    for number in range(1, len(bench.journal) + 1):
        read = again(fold(bench.journal[:number]))
        assert read.num_records == number
        assert fold(bench.journal[number:], read) == whole
    read = again(whole)
    assert repr(read.history) == repr(whole.history)
    members = replace(whole.session.members, heard={}, lease_floor=0.0)
    hard = replace(whole.session, members=members)
    assert repr(read.session) == repr(hard)


def test_evaluations_are_kept():
    """Best model, metrics of sites, and what is still to be evaluated, at every point."""
    bench = Bench(make_rules(rounds=3, min_participants=2, evaluate_data=True))
    for name in ("a", "b"):
        bench.send(c.Rendezvous(name, PROFILE, {}, True))
    for number in range(3):
        for name, accuracy in (("a", 0.1 + number / 3), ("b", 1 / 3)):
            weights = stored(update_key(number, name), f"{name}@{number}")
            evaluation = Evaluation(7, {"accuracy": accuracy})
            bench.send(
                c.EndTrainingRound(
                    name, number, 3, weights, (), {"loss": 0.1}, evaluation=evaluation
                )
            )
    bench.send(c.EvaluationDone(0, Evaluation(9, {"accuracy": 0.1 + 0.2})))
    bench.send(c.EndTrainingRound("a", 3, 0, None, evaluation=Evaluation(1, {"loss": 1e-9})))
    bench.send(c.EvaluationDone(3, Evaluation(9, {"accuracy": 0.7})))
    bench.leave("b")
    assert bench.session.phase is Phase.FINISHED
    for number in range(1, len(bench.journal) + 1):
        part = [decode(*encode(event)) for event in bench.journal[:number]]
        folded = fold(part)
        read = again(folded)
        assert (read.session, read.history) == (folded.session, folded.history)
        assert repr(read.history) == repr(folded.history)


def test_common_parts_of_models_are_written_once():
    """The parts are in memory once: a layout may be long, and a week has many models."""
    events = recorded()
    published = next(event for event in events if isinstance(event, e.ModelPublished))
    layout = tuple(replace(published.model.layout[0], name=f"layer {i}") for i in range(1000))
    history = History()
    for number in range(100):
        history.apply(e.RoundOpened(number, ("a",), 1, 0.0))
        ref = replace(published.model.ref, key=f"{number + 1}/global")
        model = replace(published.model, round=number + 1, ref=ref, layout=layout)
        history.apply(e.ModelPublished(number, model, 1.0))
    snapshot = Snapshot(1, 0.0, begin(events[0]), history)
    _, data = encode_snapshot(snapshot)
    assert zlib.decompress(data).count(b"layer 999") == 1
    read = again(snapshot)
    assert read.history == history
    first, *others = read.history.models.values()
    assert all(model.layout is first.layout for model in others)


def test_snapshot_that_cannot_be_read_back_is_not_written():
    """A snapshot that changes on its way would resume another session."""
    good = fold(recorded())
    for bad in (
        replace(good, at=float("nan")),
        replace(good, session=replace(good.session, round="0")),
        replace(good, session=replace(good.session, requested=[DataProfile(1, 2)])),
        replace(good, session=replace(good.session, cause="\ud800")),
    ):
        with pytest.raises(JournalError, match="a snapshot cannot be written") as caught:
            encode_snapshot(bad)
        assert "\n" not in str(caught.value)


def test_snapshot_of_another_version_is_ignored():
    """Another one may fold the same events to something else, and may not say so in any field."""
    snapshot = fold(recorded())
    version, data = encode_snapshot(snapshot)
    assert version == snapshot_version()
    assert usable_snapshot(version, data, snapshot.num_records) == snapshot
    assert usable_snapshot(f"{version}1", data, snapshot.num_records) is None
    assert usable_snapshot("", data, snapshot.num_records) is None


def test_snapshot_beyond_the_records_is_ignored():
    """The records say what was acknowledged."""
    snapshot = fold(recorded())
    encoded = encode_snapshot(snapshot)
    assert usable_snapshot(*encoded, snapshot.num_records + 5) == snapshot
    assert usable_snapshot(*encoded, snapshot.num_records - 1) is None


def test_a_damaged_snapshot_is_ignored():
    """Every byte of it may be wrong, or it may end anywhere."""
    snapshot = fold(recorded())
    version, data = encode_snapshot(snapshot)
    for offset in range(len(data)):
        assert usable_snapshot(version, data[:offset], snapshot.num_records) is None
        wrong = bytearray(data)
        wrong[offset] ^= 0x10
        read = usable_snapshot(version, bytes(wrong), snapshot.num_records)
        assert read is None or read == snapshot  # not all of the header matters
    text = zlib.decompress(data)
    for bad in (b"", b"[]", b"[{}]", text[:-2] + b',"more":1}]', text.replace(b'"at":', b'"ta":')):
        assert usable_snapshot(version, zlib.compress(bad), snapshot.num_records) is None


def test_the_same_events_lead_to_the_same():
    """A program that folds them to something else, or writes it in another way, must not use the
    snapshots of this one. If this fails on purpose: raise FOLD, and write down the new digest."""
    _, data = encode_snapshot(fold(recorded()))
    (body,) = json.loads(zlib.decompress(data))
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]
    assert (FOLD, digest) == (52, "ba75253722af4831")
