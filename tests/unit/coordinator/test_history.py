"""The history that operators see, and its bounds."""

import tracemalloc
from dataclasses import replace

import pytest

from xain_coordinator.core.view.accounts import MAX_DEPARTED
from xain_coordinator.core.view.history import MAX_SITE_METRICS, MAX_UNWRITTEN, History
from xain_coordinator.core.view.records import MAX_NAMES_OF_A_ROUND, RoundRecord, SiteRecord
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import (
    Evaluation,
    GlobalModel,
    StoredWeights,
    Task,
    Update,
    WeightsRef,
)
from xain_workloads.model import TensorSpec

LAYOUT = (TensorSpec("weights", (2, 3), "float32"),)


def fold(*events: e.DurableEvent) -> History:
    history = History()
    for event in events:
        history.apply(event)
    return history


def model(round_: int) -> GlobalModel:
    ref = WeightsRef(f"{round_}/global", 152, f"digest {round_}")
    return GlobalModel(round_, ref, "float32", (6,), LAYOUT, {"workload": "sgd"})


def joined(participant_id: str) -> e.ParticipantJoined:
    return e.ParticipantJoined(participant_id, None, 0.0)


def accepted(round_: int, participant_id: str, num_samples: int = 1) -> e.UpdateAccepted:
    ref = WeightsRef(f"{round_}/{participant_id}", 152, "d")
    update = Update(participant_id, StoredWeights(ref, "float32", (6,)), num_samples)
    return e.UpdateAccepted(round_, update)


def test_restarted_round_has_all_that_were_selected_and_no_slice_of_before():
    history = fold(
        e.RoundOpened(1, ("a", "b"), 5, 10.0),
        accepted(1, "a"),
        e.RoundRestarted(1, 2, ("a", "c"), 12.0, missed=("b",)),
        accepted(1, "c"),
    )
    record = history.rounds[-1]
    assert (record.selected, record.contributors) == (("a", "b", "c"), ("c",))
    assert dict(record.missing) == {"b": "deadline passed"}


def test_a_round_as_it_was():
    """A round's record has its selection, its contributors and its duration."""
    history = fold(
        e.RoundOpened(0, ("a", "b"), 5, 10.0),
        accepted(0, "b", 7),
        accepted(0, "a", 3),
        e.RoundClosed(0),
        e.ModelPublished(0, model(1), 14.5),
    )
    (record,) = history.rounds
    assert record == RoundRecord(0, ("a", "b"), 10.0, ("b", "a"), 10, 4.5, lost=(0, 10))
    assert history.models == {"1/global": model(1)}
    assert history.accounts.contributions() == {"a": 1, "b": 1}


def test_names_are_kept_where_they_are_few():
    """Large rounds keep only numbers: a thousand participants over a thousand rounds would be two
    million names, which no person reads."""
    history = History()
    half = MAX_NAMES_OF_A_ROUND // 2
    for number, size in enumerate((half, half + 1)):
        names = tuple(f"p{i}" for i in range(size))
        history.apply(e.RoundOpened(number, names, 5, 0.0))
        for name in names:
            history.apply(accepted(number, name))
        running = history.rounds[-1]
        assert (running.selected, running.contributors) == (names, names)
        assert (running.num_selected, running.num_contributors) == (size, size)
        history.apply(e.ModelPublished(number, model(number + 1), 1.0))
        over = history.rounds[-1]
        assert (over.num_selected, over.num_contributors) == (size, size)
        assert over.num_samples == size
    few, many = history.rounds
    assert (len(few.selected), len(few.contributors)) == (half, half)
    assert (many.selected, many.contributors) == ((), ())
    history.apply(e.ParticipantLeft("p1", "left"))
    assert history.rounds[-1] == many


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_round_is_the_same_whenever_it_is_looked_at(every):
    """A round's record is written when it is asked for."""
    events = [
        joined("a"),
        e.RoundOpened(0, ("a", "b", "c"), 5, 0.0),
        accepted(0, "b"),
        e.ParticipantLeft("a", "expired"),
        e.ParticipantsSelected(0, ("d", "e")),
        e.ParticipantLeftOut("d", 4),
        joined("a"),
        e.ParticipantsSelected(0, ("a",)),
        accepted(0, "a"),
        e.ParticipantLeft("b", "left"),
        e.ModelPublished(0, model(1), 4.5),
        e.ParticipantLeft("c", "left"),
        e.RoundOpened(1, ("a", "e"), 5, 5.0),
        e.ParticipantLeft("e", "left"),
    ]
    asked, unasked = History(), History()
    for number, event in enumerate(events):
        asked.apply(event)
        if number % every == 0:
            asked.copy()
        unasked.apply(event)
    assert asked == unasked
    first, second = unasked.rounds
    assert (first.selected, first.contributors) == (("a", "b", "c", "d", "e"), ("b", "a"))
    assert first.missing == {"d": "replaced"}, "there was no close here, to tell of c and e"
    assert (second.selected, second.contributors) == (("a", "e"), ())
    assert second.missing == {"e": "left"}


def test_events_that_wait_for_the_record_of_their_round_are_bounded():
    names = tuple(f"p{number}" for number in range(MAX_UNWRITTEN + 1))
    history = fold(e.RoundOpened(0, names, 5, 0.0))
    for name in names:
        history.apply(accepted(0, name))
        assert len(history._unwritten) < MAX_UNWRITTEN
    assert history.rounds[-1].num_contributors == len(names)


def test_a_copy_stays_as_it_is():
    """A copy is read in another thread while the session goes on."""
    history = fold(
        joined("a"),
        e.ModelInitialised(model(0)),
        e.RoundOpened(0, ("a", "b"), 5, 0.0),
        accepted(0, "b"),
        e.ParticipantLeft("b", "left"),
    )
    copy = history.copy()
    assert copy == history
    for event in (accepted(0, "a"), e.ModelPublished(0, model(1), 1.0), joined("b")):
        history.apply(event)
    for number in range(History.max_rounds):
        history.apply(e.RoundOpened(number, (), 5, 0.0))
    assert [record.contributors for record in copy.rounds] == [("b",)]
    assert list(copy.models) == ["0/global"]
    assert copy.accounts.contributions() == {"b": 1}
    assert copy.accounts.by_name["b"].away == "left"
    assert copy.rounds.maxlen == History.max_rounds


class Short(History):
    max_rounds = 50
    max_detailed = 20


def test_every_model_can_be_asked_for_and_the_latest_rounds_only():
    """Models are objects in the store, so they stay known by key; rounds are for looking at. Older
    ones of these have numbers and means, the latest have names."""
    history = Short()
    for number in range(55):
        history.apply(e.RoundOpened(number, ("a", "b"), 5, 0.0))
        update = accepted(number, "a").update
        history.apply(e.UpdateAccepted(number, update, metrics={"loss": 0.5}))
        history.apply(e.RoundClosed(number, 0.5))
        history.apply(e.ModelPublished(number, model(number + 1), 1.0))
    assert [record.round for record in history.rounds] == list(range(5, 55))
    *old, first = list(history.rounds)[:31]
    for record in old:
        assert (record.selected, record.contributors, record.missing, record.sites) == (
            (),
            (),
            {},
            {},
        )
        assert (record.num_selected, record.num_contributors) == (2, 1)
        assert (record.num_missing, record.metrics) == ({"not waited for": 1}, {"loss": 0.5})
    assert (first.selected, first.contributors) == (("a", "b"), ("a",))
    assert set(first.sites) == {"a"}
    assert history.models["1/global"].ref == model(1).ref
    assert len(history.models) == 55


def test_the_departed_are_forgotten_in_the_end():
    """Names that come once and go must not fill the memory; who is here keeps its count."""
    history = fold(joined("stays"), e.RoundOpened(0, (), 5, 0.0), accepted(0, "stays"))
    for number in range(MAX_DEPARTED + 3):
        name = f"p{number}"
        for event in (joined(name), accepted(0, name), e.ParticipantLeft(name, "left")):
            history.apply(event)
        # A participant that never contributed displaces no other.
        history.apply(e.ParticipantLeft(f"idle {number}", "left"))
    assert len(history.accounts.contributions()) == MAX_DEPARTED + 1
    assert history.accounts.by_name["stays"].num_counted == 1
    assert "p2" not in history.accounts.by_name
    assert history.accounts.by_name[f"p{MAX_DEPARTED + 2}"].num_counted == 1


def test_participant_that_comes_back_keeps_its_account():
    """A participant that was away for a moment has its count, however many leave after it."""
    history = fold(
        joined("a"),
        e.RoundOpened(0, (), 5, 0.0),
        accepted(0, "a"),
        e.ParticipantLeft("a", "expired"),
        joined("a"),
    )
    for number in range(MAX_DEPARTED + 1):
        history.apply(accepted(0, f"p{number}"))
        history.apply(e.ParticipantLeft(f"p{number}", "left"))
    assert history.accounts.by_name["a"].num_counted == 1


# --- what was measured ---


def measured(
    round_: int, participant_id: str, accuracy: float, *, staleness: int = 0, num_evaluated: int = 1
) -> e.UpdateAccepted:
    return replace(
        accepted(round_, participant_id, 2),
        staleness=staleness,
        metrics={"loss": 1 - accuracy},
        evaluation=Evaluation(num_evaluated, {"accuracy": accuracy}),
    )


def test_round_keeps_metrics_of_sites_their_means_and_their_spread():
    history = fold(
        e.RoundOpened(0, ("a", "b"), 1, 0.0),
        measured(0, "a", 0.5, num_evaluated=3),
        measured(0, "b", 0.9, num_evaluated=1),
        e.ModelPublished(0, model(1), 1.0),
    )
    (record,) = history.rounds
    assert record.sites["a"] == SiteRecord(2, {"loss": 0.5}, Evaluation(3, {"accuracy": 0.5}))
    assert record.evaluation == Evaluation(4, {"accuracy": pytest.approx(0.6)})
    assert record.metrics == {"loss": pytest.approx(0.3)}
    spread = record.spread["accuracy"]
    assert (spread.min, spread.max, spread.std) == (0.5, 0.9, pytest.approx(0.2))


def test_damaged_update_takes_its_metrics_with_it():
    history = fold(
        e.RoundOpened(0, ("a", "b"), 1, 0.0),
        measured(0, "a", 0.5),
        measured(0, "b", 0.9),
        e.UpdateDamaged("a", 0, 2, "gone", 1.0),
    )
    assert set(history.rounds[-1].sites) == {"b"}
    assert history.rounds[-1].evaluation == Evaluation(1, {"accuracy": 0.9})


def test_evaluation_with_a_late_update_is_that_of_the_model_it_was_trained_from():
    history = fold(
        e.RoundOpened(0, ("a", "b"), 1, 0.0),
        measured(0, "a", 0.5),
        e.ModelPublished(0, model(1), 1.0),
        e.RoundOpened(1, ("b", "a"), 1, 1.0),
        measured(1, "b", 0.9, staleness=1),
        e.ModelPublished(1, model(2), 2.0),
    )
    first, second = history.rounds
    assert first.evaluation == Evaluation(2, {"accuracy": 0.7})
    assert first.metrics == {"loss": 0.5}
    assert second.evaluation is None
    assert second.metrics == {"loss": pytest.approx(0.1)}


def test_metrics_of_single_sites_are_bounded():
    metrics = dict.fromkeys(map(str, range(MAX_SITE_METRICS // 3 - 1)), 0.5)
    history = History()
    for number in range(5):
        history.apply(e.RoundOpened(number, ("a",), 1, 0.0))
        history.apply(replace(measured(number, "a", 0.5), metrics=metrics))
        history.apply(e.ModelPublished(number, model(number + 1), 1.0))
    assert [bool(record.sites) for record in history.rounds] == [False, False, True, True, True]
    assert all(record.evaluation is not None for record in history.rounds)


def test_coordinators_evaluation_is_kept_with_the_round_of_its_model():
    """The evaluation may come before that round opens, while it runs, or when it is over."""
    before, during, after = (Evaluation(9, {"accuracy": a}) for a in (0.1, 0.2, 0.3))
    history = fold(
        e.ModelInitialised(model(0)),
        e.ModelEvaluated(0, before, 0.0),
        e.RoundOpened(0, ("a",), 1, 0.0),
        accepted(0, "a"),
        e.ModelPublished(0, model(1), 1.0),
        e.RoundOpened(1, ("a",), 1, 1.0),
        e.ModelEvaluated(1, during, 1.0),
        accepted(1, "a"),
        e.ModelPublished(1, model(2), 2.0),
        e.RoundOpened(2, ("a",), 1, 2.0),
        accepted(2, "a"),
        e.ModelPublished(2, model(3), 3.0),
        e.ModelEvaluated(2, after, 3.0),
        e.ModelEvaluated(9, None, 3.0, "no such file"),
    )
    assert [record.coordinator_evaluation for record in history.rounds] == [before, during, after]
    assert history.evaluated is None


def test_evaluation_of_the_last_model_is_a_round_of_its_own():
    history = fold(
        e.RoundOpened(2, ("a", "b", "c"), 0, 5.0, 3, Task.EVALUATE),
        e.EvaluationAccepted(2, "a", Evaluation(1, {"accuracy": 0.5})),
        e.EvaluationAccepted(2, "b", Evaluation(0, {})),
        e.ParticipantLeft("c", "left"),
        e.SessionFinished("completed", 9.0),
    )
    (record,) = history.rounds
    assert (record.task, record.selected, record.contributors) == (
        Task.EVALUATE,
        ("a", "b", "c"),
        ("a", "b"),
    )
    assert record.missing == {"c": "left"}
    assert record.seconds == 4.0
    assert record.evaluation == Evaluation(1, {"accuracy": 0.5})
    assert set(record.sites) == {"a"}
    assert not history.accounts.contributions()


def test_memory_of_the_records_does_not_grow_with_the_rounds():
    """Sites with metrics and reasons in every round. Only the reference of each model stays."""

    history = Short()

    def add(rounds):
        for number in rounds:
            names = tuple(f"site {number % 7} {i}" for i in range(20))
            history.apply(e.RoundOpened(number, names, 5, 0.0))
            for name in names[:15]:
                metrics = {f"metric {i}": float(number) for i in range(10)}
                update = accepted(number, name).update
                history.apply(e.UpdateAccepted(number, update, metrics=metrics))
            for name in names[15:]:
                history.apply(e.UpdateRefused(name, number, f"{name} sent what is wrong " * 20))
            history.apply(e.ModelPublished(number, model(number + 1), 1.0))
        traced, _ = tracemalloc.get_traced_memory()
        return traced

    tracemalloc.start()
    try:
        kept = add(range(60))
        added = add(range(60, 120)) - kept
    finally:
        tracemalloc.stop()
    assert added < 60 * 2000  # bytes; the record of a round takes ten times as much
