"""Sessions of a study: who takes part, on which rows, and when a session ends."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.bench import PROFILE, Bench, make_rules
from tests.unit.core.test_evaluation import evaluate, hand_in

from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.errors import ProfileMismatch
from xain_coordinator.core.vocabulary.values import Division, ParticipantState, Phase, Step, Task

FOLD = Division(5, 2, 7)


def bench_of(*sites: str, division: Division | None = None, **rules: Any) -> Bench:
    """A session of a study with these sites."""
    step = Step("x", "train", "fold 1", sites=sites, division=division)
    number = len(sites) or 1
    return Bench(make_rules(min_participants=number, step=step, **{"rounds": 1, **rules}))


def join(bench: Bench, name: str, division: Division | None = None, **known: Any) -> r.Reply:
    told = {"can_evaluate": True, "can_divide": True, "division": division, **known}
    return bench.send(c.Rendezvous(name, **{"profile": PROFILE, **told})).reply


def test_rows_are_divided_before_a_participant_joins():
    """The profile of all rows would tell the model of those that are kept aside."""
    bench = bench_of("a", "b", division=FOLD)
    assert join(bench, "a") == r.Divide(FOLD)
    assert join(bench, "a", Division(5, 1, 7)) == r.Divide(FOLD)
    assert not bench.session.members
    assert isinstance(join(bench, "a", FOLD), r.Accepted)
    assert join(bench, "a") == r.Divide(FOLD), "a process that was started again"


def test_participant_that_cannot_divide_its_rows_is_refused():
    bench = bench_of("a", "b", division=FOLD)
    with pytest.raises(ProfileMismatch, match="does not divide: it is of an earlier version"):
        bench.send(c.Rendezvous("a", PROFILE))


def test_rows_are_whole_again_after_a_study():
    assert join(Bench(make_rules()), "a", FOLD) == r.Divide(None)


def test_site_that_is_left_out_is_connected_and_nothing_of_it_is_in_the_session():
    """Not even its classes, which no other site need have."""
    bench = bench_of("a", "b")
    join(bench, "c", profile=replace(PROFILE, classes=("no", "other")))
    join(bench, "b")
    join(bench, "a")
    assert [*bench.session.members] == ["c", "b", "a"]
    assert bench.session.requested_of == ("a", "b")
    assert sorted(bench.session.opened.selected) == ["a", "b"]
    for name in ("a", "b"):
        hand_in(bench, name)
    assert bench.session.opened.task is Task.EVALUATE
    assert sorted(bench.session.opened.selected) == ["a", "b"]


def test_site_that_stays_away_is_waited_for_until_the_deadline():
    bench = bench_of("a", "b", evaluate_deadline_s=50.0)
    for name in ("a", "b"):
        join(bench, name)
    for name in ("a", "b"):
        hand_in(bench, name)
    bench.send(c.Heartbeat("b", ParticipantState.FINISHED))
    evaluate(bench, "a", 0.5)
    assert bench.phase is Phase.COLLECTING
    bench.send(c.Tick(), at=bench.now + 50.0)
    assert bench.phase is Phase.FINISHED


def test_failed_training_ends_the_session_and_not_the_study():
    bench = bench_of("a", "b")
    for name in ("a", "b"):
        join(bench, name)
    bench.send(c.NoteFailure("a", 0, "Diverged", "it is not finite"))
    assert bench.phase is Phase.FINISHED
    assert "it is not finite" in bench.session.cause


def test_session_ends_if_all_its_sites_are_refused():
    bench = bench_of("a")
    bench.send(c.NoteRefusedParticipant("b", "label 'x' is unknown"))
    assert bench.phase is Phase.STANDBY
    bench.send(c.NoteRefusedParticipant("a", "label 'x' is unknown"))
    assert bench.session.cause == "a: label 'x' is unknown"
    assert bench.happened(e.SessionFinished)
