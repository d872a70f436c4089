"""SSP and ASP: rounds that do not wait for all, and what is promised in them as well."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.core.bench import Bench, make_rules

from xain_coordinator.core.machine.questions import AssignmentFor, MayUpload
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import Aggregate
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


def ssp_round(*names: str, staleness: int = 1, **rules: Any) -> Bench:
    return buffered_round(*names, consistency="ssp", staleness=staleness, **rules)


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


def test_every_buffer_size_updates_make_a_model() -> None:
    """A slower participant goes on with the round that it trains."""
    bench = buffered_round("a", "b", "c", "d", buffer_size=2)
    bench.end("b")
    assert bench.session.round == 0
    bench.end("c")
    assert bench.happened(e.RoundClosed)[-1].cause == "complete"
    assert staleness(bench) == {"b": 0, "c": 0}
    assert bench.session.round == 1
    assert trains(bench) == {"a": 0, "d": 0, "b": 1, "c": 1}


def test_carried_over_participant_hears_of_its_own_round() -> None:
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
    bench.refuses(MayUpload("b", 2, "x"), errors.StaleRound)
    bench.refuses_end(errors.StaleRound, "b", round_=2)
    bench.refuses_end(errors.StaleRound, "b", round_=1)
    bench.answers = False
    bench.end("b", "b@0", round_=0)
    assert bench.happened(e.UpdateAccepted)[-1].round == 2
    assert bench.happened(e.UpdateAccepted)[-1].staleness == 2
    assert bench.heartbeat("b") == r.Advertisement(Phase.AGGREGATING, 0, True)
    assert staleness(bench) == {"b": 2}


def test_an_update_is_never_refused_for_its_age() -> None:
    """In ASP a participant may be as slow as it likes."""
    bench = buffered_round("a", "b")
    for i in range(40):
        bench.end("a", f"a@{i}")
        bench.pass_time(DEADLINE_S / 4)
    assert bench.heartbeat("b").round == 0
    assert bench.start("b").model.round == 0
    bench.end("b", round_=0)
    assert staleness(bench) == {"b": 40}


def test_a_deadline_makes_no_update_late_in_asp() -> None:
    """A deadline closes the round for waiting participants; training ones go on with their work."""
    bench = buffered_round("a", "b", "c", buffer_size=2)
    bench.end("a")
    bench.pass_time(DEADLINE_S)
    assert bench.happened(e.RoundClosed)[-1].cause == "deadline"
    assert trains(bench) == {"b": 0, "c": 0, "a": 1}
    bench.end("b", round_=0)
    bench.end("c", round_=0)
    assert staleness(bench) == {"b": 1, "c": 1}


def test_fewer_than_a_buffer_may_be_all_there_are() -> None:
    """When all have answered nothing is waited for."""
    bench = buffered_round("a", "b", "c", buffer_size=3)
    bench.end("a")
    bench.end("b")
    assert bench.session.round == 0
    bench.leave("c")
    assert staleness(bench) == {"a": 0, "b": 0}


def test_the_carried_are_among_the_fraction() -> None:
    """No more train at a time than the fraction says, whatever they train."""
    bench = buffered_round("a", "b", "c", "d", "e", "f", fraction="0.5")
    assert trains(bench) == {"a": 0, "b": 0, "c": 0}
    bench.end("c")
    # The controller "ordered" draws the first by name of the free ones.
    assert trains(bench) == {"a": 0, "b": 0, "c": 1}
    bench.join("g", "h")
    bench.end("a")
    assert trains(bench) == {"b": 0, "c": 1, "a": 2, "d": 2}


def test_participant_that_trains_longer_than_the_deadline_is_replaced() -> None:
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


def test_the_first_model_is_made_of_all() -> None:
    """Round 0 of XAIN initialises: without its model nobody has anything to train, and nobody could
    be carried over from it."""
    bench = buffered_round("a", "b", "c", initial="empty")
    bench.end("a")
    bench.end("b")
    assert bench.session.round == 0
    bench.end("c")
    assert staleness(bench) == {"a": 0, "b": 0, "c": 0}
    assert trains(bench) == {"a": 1, "b": 1, "c": 1}
    bench.end("a")
    assert trains(bench) == {"b": 1, "c": 1, "a": 2}, "from then on nobody is waited for"


def test_participant_late_for_the_first_model_is_not_carried_over() -> None:
    """Initial weights are trained from no model, so that the next round has no use for them."""
    bench = buffered_round("a", "b", initial="empty")
    bench.end("a")
    bench.pass_time(DEADLINE_S)
    assert trains(bench) == {"a": 1, "b": 1}
    bench.refuses_end(errors.StaleRound, "b", round_=0)


# --- while a model is made, and while too few are here ------------------------------------------


def test_while_a_model_is_made_the_slow_keep_their_results() -> None:
    """NOT_IN_ROUND tells them to come again; ROUND_CLOSED would tell them to throw it away."""
    bench = buffered_round("a", "b")
    bench.answers = False
    bench.end("a")
    assert bench.phase is Phase.AGGREGATING
    assert bench.heartbeat("b") == r.Advertisement(Phase.AGGREGATING, 0, False)
    for round_ in (0, None):
        refused = bench.refuses(c.EndTrainingRound("b", round_, 1, None), errors.NotInRound)
        assert "keep the result of round 0" in str(refused)
    assert bench.begin_upload("b", round_=0).key == "0/b.", "it need not wait with that"
    bench.refuses(MayUpload("b", 1, "x"), errors.StaleRound)
    bench.refuses(MayUpload("a", 0, "x"), errors.RoundAlreadyClosed)
    bench.refuses(AssignmentFor("a"), errors.RoundAlreadyClosed)
    bench.refuses_end(errors.StaleRound, "b", round_=1)
    bench.refuses_end(errors.RoundAlreadyClosed, "a", "other", round_=0)
    bench.answer()
    bench.end("b", round_=0)
    assert bench.happened(e.UpdateAccepted)[-1].staleness == 1


def test_work_is_assigned_while_a_model_is_made() -> None:
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


def test_participants_do_not_go_on_while_the_last_model_is_made() -> None:
    bench = buffered_round("a", "b", rounds=1)
    bench.answers = False
    bench.end("a")
    assert bench.phase is Phase.AGGREGATING
    bench.refuses(AssignmentFor("b"), errors.RoundAlreadyClosed)
    bench.refuses_end(errors.RoundAlreadyClosed, "b")


def test_the_last_model_is_the_end_for_the_slow() -> None:
    """After the last round their results have no use."""
    bench = buffered_round("a", "b", rounds=1)
    bench.end("a")
    assert bench.phase is Phase.FINISHED
    bench.refuses_end(errors.RoundAlreadyClosed, "b", round_=0)
    assert (bench.session.buffered.carried, bench.session.buffered.bases) == ({}, {})


def test_between_two_rounds_the_slow_go_on() -> None:
    """Too few are connected for the next round: participants that train an earlier one still do."""
    bench = buffered_round("a", "b", "c", min_participants=2, buffer_size=2)
    bench.answers = False
    bench.end("a")
    bench.end("b")
    bench.leave("a", "b")
    bench.answer()
    assert (bench.phase, bench.session.round) == (Phase.STANDBY, 1)
    assert bench.heartbeat("c") == r.Advertisement(Phase.STANDBY, 0, False)
    bench.refuses_end(errors.NotInRound, "c", round_=0)
    bench.answers = True
    bench.join("d")
    assert trains(bench) == {"c": 0, "d": 1}
    bench.end("c", round_=0)
    bench.end("d")
    assert staleness(bench) == {"c": 1, "d": 0}


# --- leaving and coming back ----------------------------------------------------------------------


def test_participant_that_returns_trains_the_newest_round() -> None:
    """The round that it trained before is forgotten, and its update of that round is late."""
    bench = buffered_round("a", "b")
    bench.end("a")
    assert trains(bench) == {"b": 0, "a": 1}
    bench.leave("b")
    bench.join("b")
    assert trains(bench) == {"a": 1, "b": 1}
    bench.refuses_end(errors.StaleRound, "b", round_=0)
    bench.end("b", round_=1)
    assert staleness(bench) == {"b": 0}


# --- bounded staleness ----------------------------------------------------------------------------


def test_in_ssp_the_fast_wait_for_the_slow() -> None:
    """No participant trains more than `staleness` rounds ahead of one that still trains."""
    bench = ssp_round("a", "b", "c")
    bench.end("a", "a@0")
    assert trains(bench) == {"b": 0, "c": 0, "a": 1}
    bench.end("a", "a@1")
    assert trains(bench) == {"b": 0, "c": 0}, "round 2 would be two ahead of them"
    assert bench.heartbeat("a") == r.Advertisement(Phase.COLLECTING, 1, True)
    bench.end("b", "b@0", round_=0)
    assert bench.session.round == 1
    bench.end("c", "c@0", round_=0)
    assert staleness(bench) == {"a": 0, "b": 1, "c": 1}
    assert trains(bench) == {"a": 2, "b": 2, "c": 2}


def test_at_the_deadline_the_slowest_are_left_behind() -> None:
    """Participants within the staleness go on; the others are late from the closing on."""
    bench = ssp_round("a", "b", "c")
    bench.end("a", "a@0")
    bench.end("b", "b@0", round_=0)
    assert trains(bench) == {"c": 0, "a": 1}
    bench.end("a", "a@1")
    assert trains(bench) == {"c": 0}
    bench.join("d")
    bench.leave("b")
    assert trains(bench) == {"c": 0}
    bench.answers = False
    bench.pass_time(DEADLINE_S)
    assert bench.happened(e.RoundClosed)[-1].cause == "deadline"
    bench.refuses_end(errors.RoundAlreadyClosed, "c", round_=0)
    bench.answer()
    assert bench.session.round == 2
    assert trains(bench) == {"a": 2, "c": 2, "d": 2}
    bench.refuses_end(errors.StaleRound, "c", round_=0)
    assert bench.start("c").model.round == 2


# --- exactly once ---------------------------------------------------------------------------------


def test_an_update_counts_once_however_often_it_is_sent() -> None:
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
    bench.refuses_end(errors.StaleRound, "b", "other", round_=0)
    bench.answers = True
    for number in (1, 3, 4):
        bench.end("a", f"a@{number}", round_=number)
    assert bench.end("b", "b@0", round_=0).events == ()
    bench.refuses_end(errors.StaleRound, "b", "other", round_=0)
    bench.end("b", "b@2", round_=2)
    bench.end("a", "a@5", round_=5)
    bench.end("a", "a@7", round_=7)
    bench.refuses_end(errors.StaleRound, "b", "b@0", round_=0)
    assert bench.end("b", "b@2", round_=2).events == ()
    bench.restart()
    assert bench.end("b", "b@2", round_=2).events == ()
    made = [
        (u.participant_id, u.weights.ref.digest) for one in bench.aggregates for u in one.updates
    ]
    assert [digest for _, digest in made] == [
        "a@0", "b@0", "a@1", "a@3", "a@4", "b@2", "a@5", "a@7",
    ]  # fmt: skip


def test_resends_of_members_are_known() -> None:
    """The memory of resends is bounded by the members, not by all former ones."""
    bench = buffered_round("a", "b")
    bench.end("b", "b@0")
    bench.leave("b")
    for number in (0, 2):
        bench.end("a", f"a@{number}", round_=number)
    assert set(bench.session.buffered.counted) == {"a"}
    bench.join("b")
    bench.refuses_end(errors.StaleRound, "b", "b@0", round_=0)


def test_a_resend_is_known_after_the_end() -> None:
    """XAIN's clients mean the round that they have trained."""
    bench = buffered_round("a", "b", rounds=2)
    bench.end("a", "a@0")
    bench.end("b", "b@0", round_=None)
    assert bench.phase is Phase.FINISHED
    for round_ in (0, None):
        assert bench.end("b", "b@0", round_=round_).events == ()
    bench.refuses_end(errors.RoundAlreadyClosed, "b", "other", round_=None)
    assert bench.heartbeat("b").round == 1, "the last round, whatever it has trained"


def test_another_update_for_the_same_round_is_refused() -> None:
    bench = buffered_round("a", "b", "c", buffer_size=2)
    bench.end("a", "a@0")
    bench.end("c", "c@0")
    bench.end("b", "b@0", round_=0)
    bench.refuses_end(errors.DuplicateUpdate, "b", "other", round_=0)
    bench.refuses(MayUpload("b", 0, "other"), errors.DuplicateUpdate)
    bench.refuses_end(errors.StaleRound, "b", "other", round_=1)
    bench.end("b", "b@0", round_=0)
    assert len(bench.happened(e.UpdateAccepted)) == 3


def test_xains_clients_mean_the_round_that_they_train() -> None:
    """XAIN's clients name no round. Their update is taken for the round that they were told of, and
    a resend is recognised."""
    bench = buffered_round("a", "b", "c", buffer_size=2)
    bench.end("a", "a@0")
    bench.end("c", "c@0")
    bench.end("b", "b@0", upload_name="uuid-b", round_=None)
    assert bench.happened(e.UpdateAccepted)[-1].staleness == 1
    assert bench.happened(e.UpdateAccepted)[-1].update.weights.ref.key == "0/uuid-b"
    assert bench.end("b", "b@0", upload_name="uuid-b", round_=None).events == ()
    bench.refuses_end(errors.DuplicateUpdate, "b", "other", upload_name="uuid-b", round_=None)
    bench.end("a", "a@1", round_=None)
    assert staleness(bench) == {"a": 0, "b": 1}


def test_an_upload_counts_once_also_when_it_is_stale() -> None:
    """In the open round, and in the one before; under the same name in a later round lies another
    upload."""
    bench = buffered_round("a", "b", "c", "d", buffer_size=2)
    bench.end("a", upload_name="uuid-a")
    bench.end("b")
    assert trains(bench) == {"c": 0, "d": 0, "a": 1, "b": 1}
    bench.leave("a")
    bench.refuses_end(errors.UploadTaken, "c", upload_name="uuid-a", round_=0)
    bench.end("c", upload_name="uuid-c", round_=0)
    bench.leave("c")
    bench.refuses_end(errors.UploadTaken, "d", upload_name="uuid-c", round_=0)
    bench.end("b", upload_name="uuid-c", round_=1)


@pytest.mark.parametrize("rules", [{}, {"consistency": "ssp", "staleness": 3}])
def test_an_upload_counts_once_however_many_models_follow(rules: dict[str, Any]) -> None:
    """The upload is known as long as its round is still trained by others, and after a restart."""
    bench = buffered_round("a", "b", "c", buffer_size=1, **rules)
    bench.end("a", upload_name="uuid-a")
    bench.end("a", "a@1", upload_name="uuid-a")
    bench.end("a", "a@2", upload_name="uuid-a")
    assert trains(bench) == {"b": 0, "c": 0, "a": 3}
    bench.restart()
    bench.refuses_end(errors.UploadTaken, "c", upload_name="uuid-a", round_=0)
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
def test_a_restart_keeps_all_of_it(consistency: str) -> None:
    """After a restart at any instant all train what they trained, and the models are made of
    the same updates with the same staleness."""

    def run(restart_before: int | None) -> tuple[Bench, list[Aggregate]]:
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


def test_the_largest_staleness_of_a_round_is_measured() -> None:
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


def test_round_knows_the_samples_of_all_sites_that_train() -> None:
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
