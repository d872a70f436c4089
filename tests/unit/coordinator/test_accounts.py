"""Contributors of each round, reasons of the other participants, and warnings of a session."""

from tests.unit.core.bench import make_rules

from unit.coordinator.test_history import accepted, model
from xain_coordinator.core.view.accounts import MANY_ROUNDS, MAX_WARNINGS
from xain_coordinator.core.view.history import History
from xain_coordinator.core.view.records import MAX_NAMES_OF_A_ROUND, MAX_REASON, MAX_REASONS
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import DataProfile, Rules, Task


def session(*sites: tuple[str, int], rules: Rules | None = None) -> History:
    """Sites with their numbers of samples have joined."""
    history = History(rules=rules or make_rules(max_lost_share=0.2))
    for name, samples in sites:
        history.apply(e.ParticipantJoined(name, DataProfile(samples, 4), 0.0))
    return history


def run_round(
    history: History,
    number: int,
    selected: tuple[str, ...],
    counted: tuple[str, ...],
    *between: e.DurableEvent,
    cause: str = "deadline",
    task: Task = Task.TRAIN,
) -> None:
    history.apply(e.RoundOpened(number, selected, 1, float(number), task=task))
    for event in between:
        history.apply(event)
    for name in counted:
        history.apply(accepted(number, name, 10))
    # The cause is one of the literals.
    history.apply(e.RoundClosed(number, float(number), cause))  # type: ignore[arg-type]
    history.apply(e.ModelPublished(number, model(number + 1), float(number)))


def test_record_of_a_round_has_a_reason_for_each_that_did_not_count():
    names = ("ok", "left", "expired", "replaced", "failed", "refused", "damaged", "slow", "back")
    history = session(*((name, 10) for name in names))
    run_round(
        history,
        0,
        names,
        ("ok", "back"),
        e.ParticipantLeft("left", "left"),
        e.ParticipantLeft("expired", "expired"),
        e.ParticipantLeftOut("replaced", 2),
        e.TrainingFailed("failed", 0, "TypeError", "no columns"),
        e.ParticipantLeft("failed", "left"),
        e.UpdateRefused("refused", 0, "not finite"),
        e.ParticipantLeft("refused", "expired"),
        accepted(0, "damaged", 5),
        e.UpdateDamaged("damaged", 0, 5, "a bit", 0.0),
        e.ParticipantLeft("back", "expired"),
        e.ParticipantsSelected(0, ("back",)),
    )
    (record,) = history.rounds
    assert record.selected == names
    assert record.contributors == ("ok", "back")
    assert record.missing == {
        "left": "left",
        "expired": "expired",
        "replaced": "replaced",
        "failed": "failed: TypeError: no columns",
        "refused": "refused: not finite",
        "damaged": "damaged",
        "slow": "deadline passed",
    }
    assert sum(record.num_missing.values()) == 7
    assert history.accounts.by_name["failed"].failure == "round 0: failed: TypeError: no columns"
    assert history.accounts.by_name["refused"].failure == "round 0: refused: not finite"


def test_round_that_is_complete_without_a_participant_did_not_wait_for_it():
    history = session(("a", 10), ("b", 10))
    run_round(history, 0, ("a", "b"), ("a",), cause="complete")
    assert history.rounds[-1].missing == {"b": "not waited for"}
    assert history.lost_share() == 0.0


def test_reasons_have_a_bound():
    names = tuple(f"p{i}" for i in range(50))
    failures = [e.TrainingFailed(name, 0, "E" * 80, "m" * 400) for name in names]
    history = session()
    run_round(history, 0, names, (), *failures)
    missing = list(history.rounds[-1].missing.values())
    assert max(map(len, missing)) == MAX_REASON
    assert missing[MAX_REASONS:] == ["failed"] * (50 - MAX_REASONS)
    many = tuple(f"p{i}" for i in range(MAX_NAMES_OF_A_ROUND + 1))
    run_round(history, 1, many, ())
    assert history.rounds[-1].missing == {}
    assert history.rounds[-1].num_missing == {"deadline passed": len(many)}


def test_session_warns_of_a_site_that_does_not_count_for_three_rounds():
    history = session(("a", 10), ("b", 1))
    for number in range(MANY_ROUNDS):
        assert history.warnings(is_over=False) == []
        assert history.accounts.begun == []
        run_round(history, number, ("a", "b"), ("a",))
    assert history.accounts.begun == ["b"]
    assert history.warnings(is_over=False) == ["b has not counted for 3 rounds: deadline passed."]
    run_round(history, 3, ("a", "b"), ("a",))
    assert history.accounts.begun == [], "once an episode"
    run_round(history, 4, ("a", "b"), ("a", "b"))
    assert history.warnings(is_over=False) == []


def test_session_warns_of_sites_that_are_left_out_expired_or_not_eligible():
    rules = make_rules(tags={"site": ("north",)}, max_lost_share=1.0)
    history = History(rules=rules)
    north = {"site": "north"}
    for name, tags in (("a", north), ("out", north), ("gone", north), ("bye", north), ("odd", {})):
        history.apply(e.ParticipantJoined(name, None, 0.0, tags))
    everybody = ("a", "out", "gone", "bye")
    run_round(history, 0, everybody, everybody)
    history.apply(e.ParticipantLeftOut("out", 9))
    history.apply(e.ParticipantLeft("gone", "expired"))
    history.apply(e.ParticipantLeft("bye", "left"))
    for number in range(1, 4):
        run_round(history, number, ("a",), ("a",))
    assert history.warnings(is_over=False) == [
        "odd has not counted for 4 rounds: not eligible.",
        "gone has not counted for 3 rounds: expired.",
        "out has not counted for 3 rounds: left out until round 9.",
    ]


def test_asynchronous_session_does_not_blame_sites_that_train_for_longer():
    history = session(("a", 10), ("b", 10), rules=make_rules(consistency="asp", staleness=None))
    for number in range(9):
        run_round(history, number, ("a", "b"), ("a",), cause="complete")
    assert history.warnings(is_over=False) == []


def test_session_warns_of_lost_samples_beyond_the_stated_share():
    history = session(("a", 90), ("b", 30))
    run_round(history, 0, ("a", "b"), ("a", "b"))
    history.apply(e.ParticipantJoined("a", DataProfile(90, 4), 0.0))
    history.apply(e.ParticipantJoined("b", DataProfile(30, 4), 0.0))
    run_round(history, 1, ("a", "b"), (), e.ParticipantLeft("b", "expired"))
    assert history.rounds[-1].lost == (120, 120)
    (warning,) = history.warnings(is_over=False)
    assert "samples were lost" in warning
    assert "rounds.max_lost_share is 20%" in warning
    assert history.lost_share() > 0.2 >= history.lost_share(before_last=True)


def test_session_warns_of_a_site_that_brings_most_samples():
    """The warning is for three sites or more: of two, one brings half or more."""
    history = session(rules=make_rules(max_share=0.5))
    two = ("a", "b")
    run_round(history, 0, two, (), accepted(0, "a", 2 * 10**9), accepted(0, "b", 5))
    assert history.warnings(is_over=False) == []
    three = ("a", "b", "c")
    brought = [
        accepted(1, name, samples) for name, samples in zip(three, (60, 20, 20), strict=True)
    ]
    run_round(history, 1, three, (), *brought)
    (warning,) = history.warnings(is_over=False)
    assert warning == "a has brought 60% of the samples of round 1; rounds.max_share is 50%."
    run_round(history, 2, three, three)
    assert history.warnings(is_over=False) == []


def test_finished_session_names_sites_that_never_counted():
    history = session(("a", 10), ("b", 10))
    run_round(history, 0, ("a", "b"), ("a",), e.TrainingFailed("b", 0, "ValueError"))
    assert history.accounts.never_counted() == ["b"]
    expected = "b has never counted; it was selected for 1 round: failed: ValueError."
    assert expected in history.warnings(is_over=True)


def test_warnings_have_a_bound():
    names = tuple(f"p{i}" for i in range(3 * MAX_WARNINGS))
    history = session(rules=make_rules(max_lost_share=1.0))
    for number in range(MANY_ROUNDS):
        run_round(history, number, names, ())
    assert len(history.warnings(is_over=False)) == MAX_WARNINGS + 1


def test_initial_weights_count_as_no_round_of_their_maker():
    """The round of initial weights is no round that another participant has missed."""
    history = session(("a", 10), ("b", 10), ("c", 10))
    run_round(
        history, 0, ("a", "b"), ("b",), e.TrainingFailed("a", 0, "TypeError"), task=Task.INITIALISE
    )
    assert not history.accounts.contributions()
    assert [account.num_selected for account in history.accounts.by_name.values()] == [0, 0, 0]
    assert history.rounds[-1].lost == (0, 0)
    assert history.accounts.by_name["a"].failure == "round 0: failed: TypeError"
    for number in (1, 2, 3):
        run_round(history, number, ("a", "b", "c"), ("a", "c"))
    assert history.accounts.contributions() == {"a": 3, "c": 3}
    assert next(iter(history.warnings(is_over=True))).startswith("b has never counted")
