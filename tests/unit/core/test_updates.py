"""Which updates are taken, which are refused, and what sending again does."""

from collections.abc import Callable

import pytest
from tests.unit.core.bench import Bench, make_rules, opened_round

from xain_coordinator.core.machine.questions import AssignmentFor, MayUpload
from xain_coordinator.core.machine.updates import check_update
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.values import (
    GlobalModel,
    Phase,
    Point,
    StoredWeights,
    Update,
    WeightsRef,
)
from xain_workloads.model import TensorSpec


def test_an_update_is_taken_with_all_that_belongs_to_it() -> None:
    bench = opened_round("a", "b")
    decision = bench.end("a", "of a", num_samples=12)
    assert decision.reply == r.Done()
    (accepted,) = bench.happened(e.UpdateAccepted)
    assert accepted.round == 0
    assert accepted.update.participant_id == "a"
    assert accepted.update.num_samples == 12
    assert accepted.update.weights.ref.digest == "of a"
    assert accepted.update.weights.ref.key == "0/a"


# --- who, when ---


def test_outside_a_round_nothing_is_taken() -> None:
    bench = Bench(make_rules(min_participants=2))
    bench.join("a")
    bench.refuses(AssignmentFor("a"), errors.NotInRound)
    bench.refuses(MayUpload("a", 0, "good"), errors.NotInRound)
    bench.refuses_end(errors.NotInRound, "a")
    bench.refuses_end(errors.NotInRound, "a", round_=0)


def test_the_unselected_hand_in_nothing() -> None:
    bench = opened_round("a", "b")
    bench.join("c")
    bench.refuses(AssignmentFor("c"), errors.NotSelected)
    bench.refuses(MayUpload("c", 0, "good"), errors.NotSelected)
    bench.refuses_end(errors.NotSelected, "c")
    bench.refuses_end(errors.NotSelected, "c", round_=0)


@pytest.mark.parametrize("sent", [-1, 0, 2, 99])
def test_an_update_for_another_round_is_refused(sent: int) -> None:
    """The message names both rounds."""
    bench = opened_round("a", "b")
    bench.end_all()
    assert bench.session.round == 1
    bench.refuses_end(errors.StaleRound, "a", "new", round_=sent)
    refusal = bench.refuses(MayUpload("a", sent, "new"), errors.StaleRound)
    assert f"round {sent}" in str(refusal)
    assert "round 1" in str(refusal)
    bench.end("a", "new", round_=1)


# --- what ---

BAD_UPDATES = [
    pytest.param({"num_samples": -1}, id="negative samples"),
    pytest.param({"shape": (4,)}, id="too long"),
    pytest.param({"shape": (2,)}, id="too short"),
    pytest.param({"shape": (0,)}, id="empty"),
    pytest.param({"shape": ()}, id="scalar"),
    pytest.param({"shape": (3, 1)}, id="matrix"),
    pytest.param({"dtype": "float64"}, id="other dtype"),
    pytest.param({"dtype": "int64"}, id="integers"),
    pytest.param({"dtype": "object"}, id="objects"),
    pytest.param({"first_bad": 0}, id="not finite at first"),
    pytest.param({"first_bad": 2}, id="not finite at last"),
]


@pytest.mark.parametrize("wrong", BAD_UPDATES)
def test_unusable_update_is_refused_and_may_be_replaced(wrong: dict[str, object]) -> None:
    """The refusal changes nothing, and the sender's good update is taken afterwards."""
    bench = opened_round("a", "b")
    session, journal = bench.session, list(bench.journal)
    bench.refuses_end(errors.InvalidUpdate, "a", **wrong)
    assert bench.session == session
    assert bench.journal == journal
    bench.end("a")
    bench.end("b")
    assert [update.participant_id for update in bench.aggregates[0].updates] == ["a", "b"]


@pytest.mark.parametrize(
    ("index", "where"),
    [
        (0, "index 0, which is kernel[0, 0]"),
        (5, "index 5, which is kernel[1, 2]"),
        (6, "index 6, which is scale[]"),
        (8, "index 8, which is bias[1]"),
        (9, "index 9;"),
    ],
)
def test_value_that_is_not_finite_is_named_by_its_array(index: int, where: str) -> None:
    """People know their arrays, not the positions in a flat vector."""
    layout = tuple(
        TensorSpec(name, shape, "float32")
        for name, shape in (("kernel", (2, 3)), ("scale", ()), ("bias", (2,)))
    )
    ref = WeightsRef("0/global", 164, "0" * 32)
    model = GlobalModel(0, ref, "float32", (10,), layout)
    round_ = Round(0, ("a",), 1, 1, 0.0, 1)
    update = Update("a", StoredWeights(ref, "float32", (10,), index), 1)
    with pytest.raises(errors.InvalidUpdate) as caught:
        check_update(model, round_, update, make_rules())
    assert where in str(caught.value)


def test_no_samples_are_a_number_of_samples() -> None:
    """An empty partition hands in too; its weight is 0."""
    bench = opened_round("a", "b")
    bench.end("a", num_samples=0)
    bench.end("b", num_samples=5)
    assert [update.num_samples for update in bench.aggregates[0].updates] == [0, 5]


def test_an_upload_that_is_not_there_is_refused() -> None:
    """The store holds nothing, or other bytes; after the upload it is taken."""
    bench = opened_round("a", "b")
    bench.refuses(c.EndTrainingRound("a", 0, 1, None), errors.UploadMissing)
    bench.end("a")


def test_the_first_update_fixes_shape_and_dtype_of_an_initialisation() -> None:
    bench = opened_round("a", "b", "c", rules=make_rules(min_participants=3, initial="empty"))
    bench.end("b", shape=(7,), dtype="float64")
    bench.refuses_end(errors.InvalidUpdate, "a", shape=(8,), dtype="float64")
    bench.refuses_end(errors.InvalidUpdate, "a", shape=(7,), dtype="float32")
    bench.leave("b")
    bench.join("d")
    bench.refuses_end(errors.InvalidUpdate, "a", shape=(8,), dtype="float64")
    bench.end("a", shape=(7,), dtype="float64")


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (0,)},
        {"shape": ()},
        {"shape": (3, 2)},
        {"dtype": "int64"},
        {"dtype": "object"},
        {"dtype": "complex64"},
        {"first_bad": 1},
        {"num_samples": -1},
    ],
)
def test_the_first_weights_of_all_must_be_weights(wrong: dict[str, object]) -> None:
    """A refused first update fixes nothing."""
    bench = opened_round("a", "b", rules=make_rules(min_participants=2, initial="empty"))
    bench.refuses_end(errors.InvalidUpdate, "a", **wrong)
    bench.end("b", shape=(9,), dtype="float16")


def test_metrics_of_an_update_are_recorded_once() -> None:
    bench = opened_round("a", "b")
    loss = Point("participant", {"loss": 0.5}, {"id": "a"})
    bench.refuses_end(errors.InvalidUpdate, "a", num_samples=-1, metrics=(loss,))
    bench.end("a", metrics=(loss,))
    bench.end("a", metrics=(loss,))
    assert bench.points.count(loss) == 1


# --- again ---


def resend_changes_nothing(bench: Bench) -> None:
    """The same update by a is answered as before."""
    session, journal = bench.session, list(bench.journal)
    decision = bench.end("a", "of a", round_=0, num_samples=3)
    assert decision.reply == r.Done()
    assert decision.effects == ()
    assert bench.session == session
    assert bench.journal == journal


def first_sent(*, rounds: int = 3) -> Bench:
    """a and b are selected; a has handed in."""
    bench = opened_round("a", "b", rules=make_rules(rounds=rounds, min_participants=2))
    bench.end("a", "of a", num_samples=3)
    return bench


def between_rounds(bench: Bench) -> None:
    bench.answers = False
    bench.end("b")
    bench.leave("b")
    bench.answer()


def aggregated(bench: Bench) -> None:
    bench.answers = False
    bench.end("b")


@pytest.mark.parametrize(
    ("reach", "phase", "rounds"),
    [
        (lambda bench: None, Phase.COLLECTING, 3),
        (lambda bench: bench.leave("b"), Phase.STANDBY, 3),
        (aggregated, Phase.AGGREGATING, 3),
        (lambda bench: bench.end("b"), Phase.COLLECTING, 3),
        (lambda bench: (bench.end("b"), bench.end("a", "next", round_=1)), Phase.COLLECTING, 3),
        (between_rounds, Phase.STANDBY, 3),
        (lambda bench: bench.end("b"), Phase.FINISHED, 1),
        (lambda bench: bench.send(c.EffectFailed("the disk is gone")), Phase.FINISHED, 3),
        (lambda bench: bench.expire("a"), Phase.STANDBY, 3),
        (lambda bench: (bench.expire("a"), bench.join("a")), Phase.COLLECTING, 3),
        (lambda bench: bench.restart(), Phase.COLLECTING, 3),
    ],
)
def test_a_resend_gets_the_first_answer(
    reach: Callable[[Bench], object], phase: Phase, rounds: int
) -> None:
    """In every state that follows; also to a sender that has not joined again."""
    bench = first_sent(rounds=rounds)
    reach(bench)
    assert bench.phase is phase
    resend_changes_nothing(bench)


def test_a_different_second_update_is_refused() -> None:
    """Other weights, or other samples with the same weights; before and after a good resend."""
    bench = first_sent()
    bench.refuses_end(errors.DuplicateUpdate, "a", "other", num_samples=3)
    bench.refuses_end(errors.DuplicateUpdate, "a", "of a", num_samples=4)
    resend_changes_nothing(bench)
    bench.refuses(MayUpload("a", 0, "other"), errors.DuplicateUpdate)
    bench.refuses(c.EndTrainingRound("a", 0, 3, None), errors.DuplicateUpdate)
    bench.end("b", "of b")
    assert [u.weights.ref.digest for u in bench.aggregates[0].updates] == ["of a", "of b"]


def test_the_same_bytes_in_the_next_round_are_another_update() -> None:
    """Training may change nothing; that is still this round's work."""
    bench = first_sent()
    bench.end("b")
    bench.end("a", "of a", round_=1, num_samples=3)
    assert bench.outstanding == ("b",)


def test_two_may_hand_in_the_same_bytes() -> None:
    """A digest tells a resend from a change, not one participant from another."""
    bench = first_sent()
    bench.end("b", "of a", num_samples=3)
    assert len(bench.aggregates[0].updates) == 2


def test_accepted_object_need_not_be_uploaded_again() -> None:
    """The reply is the same in the open round, after it, and after the sender has left."""
    bench = first_sent()
    answer = bench.begin_upload("a", "of a", round_=0)
    assert isinstance(answer, r.AlreadyUploaded)
    assert answer.weights.ref.key == "0/a"
    bench.end("b")
    assert bench.begin_upload("a", "of a", round_=0) == answer
    bench.leave("a")
    assert bench.begin_upload("a", "of a", round_=0) == answer


def test_beginning_an_upload_changes_nothing() -> None:
    bench = opened_round("a", "b")
    session = bench.session
    assert bench.begin_upload("a", "one").key == "0/a."
    assert bench.begin_upload("a", "two").key == "0/a."
    assert bench.session == session


def test_a_refusal_tells_what_was_wrong_with_the_numbers() -> None:
    """A message names the thing, the value and the limit."""
    bench = opened_round("a", "b")
    with pytest.raises(errors.InvalidUpdate, match=r"\(4,\).*\(3,\)"):
        bench.end("a", shape=(4,))
    with pytest.raises(errors.InvalidUpdate, match=r"float64.*float32"):
        bench.end("a", dtype="float64")
    with pytest.raises(errors.InvalidUpdate, match="index 2"):
        bench.end("a", first_bad=2)
    with pytest.raises(errors.InvalidUpdate, match="-5"):
        bench.end("a", num_samples=-5)
