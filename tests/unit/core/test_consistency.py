"""SSP and ASP: rounds that do not wait for all, and what is promised in them as well."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.core.bench import Bench, make_rules

from xain_coordinator.core.machine.questions import AssignmentFor, MayUpload
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.values import Phase

DEADLINE_S = 100.0
IDLE_S = 400.0


def buffered_round(*names: str, **rules: Any) -> Bench:
    """Round 0 is open, all of these train it. By default ASP, and each update makes a model."""
    standard = {
        "rounds": 50,
        "start_participants": len(names),
        "deadline_s": DEADLINE_S,
        "idle_timeout_s": IDLE_S,
        "consistency": "asp",
        "staleness": None,
        "buffer_size": 1,
    }
    bench = Bench(make_rules(**{**standard, **rules}))
    bench.join(*names)
    assert bench.phase is Phase.COLLECTING
    return bench


def trains(bench: Bench) -> dict[str, int]:
    """The participants that owe an update of the open round, with the round of each."""
    return {name: bench.session.trained_by(name) for name in bench.outstanding}


def staleness(bench: Bench) -> dict[str, int]:
    """The staleness of each update of the newest model, by participant."""
    made = bench.aggregates[-1]
    names = [update.participant_id for update in made.updates]
    assert names == sorted(names), "the order that makes a sum of floats the same again"
    return dict(zip(names, made.staleness, strict=True))


# --- who trains what ------------------------------------------------------------------------------


def test_carried_over_participant_hears_of_its_own_round():
    """Advertisement, assignment and upload are of the round that the participant trains, with the
    model, epochs and epoch base of that round."""
    bench = buffered_round("a", "b", epochs=5)
    bench.end("a", "a@0")
    bench.end("a", "a@1")
    assert bench.session.round == 2
    assert bench.heartbeat("b") == r.Advertisement(Phase.COLLECTING, 0, False)
    assert bench.heartbeat("a") == r.Advertisement(Phase.COLLECTING, 2, False)
    old, new = bench.start("b"), bench.start("a")
    assert (old.round, old.epochs, old.epoch_base, old.model.round) == (0, 5, 0, 0)
    assert (new.round, new.epochs, new.epoch_base, new.model.round) == (2, 5, 10, 2)
    assert bench.begin_upload("b", round_=0).key == "0/b."
    bench.refuses(MayUpload("b", 2, "x"), "STALE_ROUND")
    bench.refuses_end("STALE_ROUND", "b", round_=2)
    bench.refuses_end("STALE_ROUND", "b", round_=1)
    bench.answers = False
    bench.end("b", "b@0", round_=0)
    assert bench.happened(e.UpdateAccepted)[-1].round == 2
    assert bench.happened(e.UpdateAccepted)[-1].staleness == 2
    assert bench.heartbeat("b") == r.Advertisement(Phase.AGGREGATING, 0, True)
    assert staleness(bench) == {"b": 2}


def test_participant_that_trains_longer_than_the_deadline_is_replaced():
    """Otherwise a few stuck participants would be the whole selection, and each round would last to
    its deadline. Their late updates are still taken."""
    bench = buffered_round("a", "b", "c", "d", "e", "f", fraction="0.5")
    bench.pass_time(DEADLINE_S - 1)
    bench.end("c")
    assert trains(bench) == {"a": 0, "b": 0, "c": 1}
    bench.pass_time(1)
    bench.end("c")
    assert trains(bench) == {"a": 0, "b": 0, "c": 2, "d": 2, "e": 2}
    bench.end("a", round_=0)
    assert staleness(bench) == {"a": 2}


# --- while a model is made, and while too few are here ------------------------------------------


def test_while_a_model_is_made_the_slow_keep_their_results():
    """NOT_IN_ROUND tells them to come again; ROUND_CLOSED would tell them to throw it away."""
    bench = buffered_round("a", "b")
    bench.answers = False
    bench.end("a")
    assert bench.phase is Phase.AGGREGATING
    assert bench.heartbeat("b") == r.Advertisement(Phase.AGGREGATING, 0, False)
    for round_ in (0, None):
        refused = bench.refuses(c.EndTrainingRound("b", round_, 1, None), "NOT_IN_ROUND")
        assert "keep the result of round 0" in str(refused)
    assert bench.begin_upload("b", round_=0).key == "0/b.", "it need not wait with that"
    bench.refuses(MayUpload("b", 1, "x"), "STALE_ROUND")
    bench.refuses(MayUpload("a", 0, "x"), "ROUND_CLOSED")
    bench.refuses(AssignmentFor("a"), "ROUND_CLOSED")
    bench.refuses_end("STALE_ROUND", "b", round_=1)
    bench.refuses_end("ROUND_CLOSED", "a", "other", round_=0)
    bench.answer()
    bench.end("b", round_=0)
    assert bench.happened(e.UpdateAccepted)[-1].staleness == 1


def test_work_is_assigned_while_a_model_is_made():
    """With small buffers a model is nearly always being made. A participant that was refused its
    work then would back off, and miss the moments in which none is."""
    bench = buffered_round("a", "b", "c")
    for digest in "xyz":  # b and c are told of round 0 and have not asked for their work yet
        bench.answers = False
        bench.end("a", digest)
        assert bench.phase is Phase.AGGREGATING
        work = bench.start("b")
        assert (work.round, work.model.round, work.update_accepted) == (0, 0, False)
        bench.answer()
    assert bench.start("b") == work
    bench.answers = True
    bench.end("b")
    assert staleness(bench) == {"b": 3}


# --- exactly once ---------------------------------------------------------------------------------


def test_an_update_counts_once_however_often_it_is_sent():
    """(participant, round trained) is counted in one model. Sent again it is answered as before, as
    long as it is the latest of its sender, however many models have been made meanwhile."""
    bench = buffered_round("a", "b")
    bench.end("a", "a@0")
    bench.answers = False
    bench.end("b", "b@0", round_=0)
    for _ in range(2):  # while the model is made, and in the round after
        assert bench.end("b", "b@0", round_=0).events == ()
        assert bench.begin_upload("b", "b@0", round_=0) == r.AlreadyUploaded(
            bench.aggregates[-1].updates[0].weights
        )
        bench.answer()
    bench.refuses_end("STALE_ROUND", "b", "other", round_=0)
    bench.answers = True
    for number in (1, 3, 4):
        bench.end("a", f"a@{number}", round_=number)
    assert bench.end("b", "b@0", round_=0).events == ()
    bench.refuses_end("STALE_ROUND", "b", "other", round_=0)
    bench.end("b", "b@2", round_=2)
    bench.end("a", "a@5", round_=5)
    bench.end("a", "a@7", round_=7)
    bench.refuses_end("STALE_ROUND", "b", "b@0", round_=0)
    assert bench.end("b", "b@2", round_=2).events == ()
    bench.restart()
    assert bench.end("b", "b@2", round_=2).events == ()
    made = [
        (u.participant_id, u.weights.ref.digest) for one in bench.aggregates for u in one.updates
    ]
    assert [digest for _, digest in made] == [
        "a@0", "b@0", "a@1", "a@3", "a@4", "b@2", "a@5", "a@7",
    ]  # fmt: skip


def test_resends_of_members_are_known():
    """The memory of resends is bounded by the members, not by all former ones."""
    bench = buffered_round("a", "b")
    bench.end("b", "b@0")
    bench.leave("b")
    for number in (0, 2):
        bench.end("a", f"a@{number}", round_=number)
    assert set(bench.session.buffered.counted) == {"a"}
    bench.join("b")
    bench.refuses_end("STALE_ROUND", "b", "b@0", round_=0)


def test_another_update_for_the_same_round_is_refused():
    bench = buffered_round("a", "b", "c", buffer_size=2)
    bench.end("a", "a@0")
    bench.end("c", "c@0")
    bench.end("b", "b@0", round_=0)
    bench.refuses_end("DUPLICATE_UPDATE", "b", "other", round_=0)
    bench.refuses(MayUpload("b", 0, "other"), "DUPLICATE_UPDATE")
    bench.refuses_end("STALE_ROUND", "b", "other", round_=1)
    bench.end("b", "b@0", round_=0)
    assert len(bench.happened(e.UpdateAccepted)) == 3


def test_xains_clients_mean_the_round_that_they_train():
    """XAIN's clients name no round. Their update is taken for the round that they were told of, and
    a resend is recognised."""
    bench = buffered_round("a", "b", "c", buffer_size=2)
    bench.end("a", "a@0")
    bench.end("c", "c@0")
    bench.end("b", "b@0", upload_name="uuid-b", round_=None)
    assert bench.happened(e.UpdateAccepted)[-1].staleness == 1
    assert bench.happened(e.UpdateAccepted)[-1].update.weights.ref.key == "0/uuid-b"
    assert bench.end("b", "b@0", upload_name="uuid-b", round_=None).events == ()
    bench.refuses_end("DUPLICATE_UPDATE", "b", "other", upload_name="uuid-b", round_=None)
    bench.end("a", "a@1", round_=None)
    assert staleness(bench) == {"a": 0, "b": 1}


@pytest.mark.parametrize("rules", [{}, {"consistency": "ssp", "staleness": 3}])
def test_an_upload_counts_once_however_many_models_follow(rules):
    """The upload is known as long as its round is still trained by others, and after a restart."""
    bench = buffered_round("a", "b", "c", buffer_size=1, **rules)
    bench.end("a", upload_name="uuid-a")
    bench.end("a", "a@1", upload_name="uuid-a")
    bench.end("a", "a@2", upload_name="uuid-a")
    assert trains(bench) == {"b": 0, "c": 0, "a": 3}
    bench.restart()
    bench.refuses_end("UPLOAD_NAME_TAKEN", "c", upload_name="uuid-a", round_=0)
    bench.end("c", upload_name="uuid-c", round_=0)
    bench.end("b", upload_name="uuid-b", round_=0)
    assert not bench.session.buffered.named.get(0)


# --- restarts -------------------------------------------------------------------------------------


def script() -> list[Callable[[Bench], object]]:
    """A session whose participants are carried over, late, gone and back, and resend updates."""
    return [
        lambda b: b.end("a", "a@0", num_samples=3),
        lambda b: b.end("b", "b@0"),
        lambda b: b.answer(),
        lambda b: b.heartbeat("c"),
        lambda b: b.end("a", "a@1"),
        lambda b: b.end("c", "c@0", round_=0, num_samples=2),
        lambda b: b.end("c", "c@0", round_=0, num_samples=2),
        lambda b: b.answer(),
        lambda b: b.leave("b"),
        lambda b: b.join("b"),
        lambda b: b.end("d", "d@0", round_=0),
        lambda b: b.end("b", "b@2", round_=2),
        lambda b: b.answer(),
        lambda b: b.end("a", "a@2", round_=2),
        lambda b: b.pass_time(DEADLINE_S),
        lambda b: b.answer(),
        lambda b: b.end("a", "a@4", round_=4),
        lambda b: b.end("b", "b@3", round_=3),
        lambda b: b.answer(),
    ]


@pytest.mark.parametrize("consistency", ["asp", "ssp"])
def test_a_restart_keeps_all_of_it(consistency):
    """After a restart at any instant all train what they trained, and the models are made of
    the same updates with the same staleness."""

    def run(restart_before):
        limit = None if consistency == "asp" else 3
        bench = buffered_round(
            *"abcd", rounds=9, buffer_size=2, consistency=consistency, staleness=limit
        )
        bench.answers = False
        for number, step in enumerate(script()):
            if number == restart_before:
                bench.restart()
            step(bench)
        return bench, bench.aggregates

    undisturbed, made = run(None)
    assert len(made) == 5
    assert max(max(one.staleness) for one in made) == 2
    for number in range(len(script())):
        bench, again = run(number)
        assert [one for i, one in enumerate(again) if one not in again[:i]] == made
        assert bench.session == undisturbed.session


# --- metrics --------------------------------------------------------------------------------------


def test_the_largest_staleness_of_a_round_is_measured():
    """Where there can be one."""
    bench = buffered_round("a", "b", buffer_size=2)
    bench.end("a", "a@0")
    bench.join("c", "d")
    bench.pass_time(DEADLINE_S)
    bench.end("c")
    bench.end("b", round_=0)
    points = [point.fields for point in bench.points if "round_seconds" in point.fields]
    assert [fields["max_staleness"] for fields in points] == [0, 1]
    bench = buffered_round("a", consistency="bsp", staleness=0)
    bench.end("a")
    (fields,) = [point.fields for point in bench.points if "round_seconds" in point.fields]
    assert "max_staleness" not in fields


def test_round_knows_the_samples_of_all_sites_that_train():
    """A site counts with its latest update, before the first one with its data profile; not in
    BSP, where a model is made of the updates alone."""
    bench = buffered_round("a", "b", "c")
    bench.end("a", num_samples=30)
    assert bench.aggregates[-1].total_samples == 30 + 10 + 10
    bench.end("b", num_samples=50)
    assert bench.aggregates[-1].total_samples == 30 + 50 + 10
    usual = Bench(make_rules(min_participants=1))
    usual.join("a")
    usual.end("a", num_samples=30)
    assert usual.aggregates[-1].total_samples == 0
