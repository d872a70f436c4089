"""Which updates are taken, which are refused, and what sending again does."""

import pytest
from tests.unit.core.bench import make_rules, opened_round

from xain_coordinator.core.machine.questions import MayUpload
from xain_coordinator.core.machine.updates import check_update
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary.values import (
    GlobalModel,
    Point,
    StoredWeights,
    Update,
    WeightsRef,
)
from xain_workloads.model import TensorSpec

# --- who, when ---


@pytest.mark.parametrize("sent", [-1, 0, 2, 99])
def test_an_update_for_another_round_is_refused(sent):
    bench = opened_round("a", "b")
    bench.end_all()
    assert bench.session.round == 1
    bench.refuses_end("STALE_ROUND", "a", "new", round_=sent)
    refusal = bench.refuses(MayUpload("a", sent, "new"), "STALE_ROUND")
    assert f"round {sent}" in str(refusal)
    assert "round 1" in str(refusal)
    bench.end("a", "new", round_=1)


# --- what ---


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
def test_value_that_is_not_finite_is_named_by_its_array(index, where):
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


def test_an_upload_that_is_not_there_is_refused():
    """The store holds nothing, or other bytes; after the upload it is taken."""
    bench = opened_round("a", "b")
    bench.refuses(c.EndTrainingRound("a", 0, 1, None), "UPLOAD_MISSING")
    bench.end("a")


def test_metrics_of_an_update_are_recorded_once():
    bench = opened_round("a", "b")
    loss = Point("participant", {"loss": 0.5}, {"id": "a"})
    bench.refuses_end(errors.InvalidUpdate, "a", num_samples=-1, metrics=(loss,))
    bench.end("a", metrics=(loss,))
    bench.end("a", metrics=(loss,))
    assert bench.points.count(loss) == 1


# --- again ---


def test_a_refusal_tells_what_was_wrong_with_the_numbers():
    bench = opened_round("a", "b")
    with pytest.raises(errors.InvalidUpdate, match=r"\(4,\).*\(3,\)"):
        bench.end("a", shape=(4,))
    with pytest.raises(errors.InvalidUpdate, match=r"float64.*float32"):
        bench.end("a", dtype="float64")
    with pytest.raises(errors.InvalidUpdate, match="index 2"):
        bench.end("a", first_bad=2)
    with pytest.raises(errors.InvalidUpdate, match="-5"):
        bench.end("a", num_samples=-5)
