"""One test for each defect of XAIN's state machine that the core can show.

Two are not here, because they belong to what stands around the core: X8, the monitor thread that
died on a changed dictionary (there is no thread in the core), and X14, signals and ports.
"""

from itertools import permutations

from tests.unit.core.bench import (
    PROFILE,
    Bench,
    answer_to,
    make_rules,
    opened_round,
    replay,
)

from xain_coordinator.core import commands as c
from xain_coordinator.core import errors
from xain_coordinator.core import events as e
from xain_coordinator.core import replies as r
from xain_coordinator.core.decider import next_deadline, resume
from xain_coordinator.core.pacing import exact_fraction, num_required, num_wanted
from xain_coordinator.core.selection import Candidate, Uniform, select
from xain_coordinator.core.values import Phase


def test_x01_an_update_in_standby_starts_nothing() -> None:
    """XAIN took an EndTrainingRound in STANDBY, found that all of nobody had submitted, published
    the scalar 0.0 as model 1 and moved on. Now it is refused and nothing moves."""
    bench = Bench(make_rules(min_participants=2))
    bench.join("a")
    bench.refuses_end(errors.NotInRound, "a")
    assert (bench.phase, bench.session.round) == (Phase.STANDBY, 0)
    assert bench.owed == bench.aggregates == []


def test_x02_the_unselected_do_not_submit() -> None:
    """XAIN stored the update of an unselected participant and counted it if that one was selected
    later in the same round. Now it is refused, and a later selection begins with nothing."""
    bench = opened_round("a", "b")
    bench.join("c")
    bench.refuses_end(errors.NotSelected, "c", "too early")
    bench.leave("b")
    assert bench.selected == ("a", "c")
    bench.join("d")
    assert bench.outstanding == ("a", "c")
    bench.end("a", "of a")
    bench.end("c", "of c")
    assert [u.weights.ref.digest for u in bench.aggregates[0].updates] == ["of a", "of c"]


def test_x03_finished_stays_finished() -> None:
    """XAIN went back to STANDBY when participants left after the end, took a new one in, and wrote
    the final model a second time. Now nothing after the end changes anything."""
    bench = opened_round("a", "b", rules=make_rules(rounds=1, min_participants=2))
    bench.end_all()
    final, journal = bench.session.model, list(bench.journal)
    bench.leave("a")
    bench.tick(at=1000.0)
    bench.join("c")
    bench.refuses_end(errors.RoundAlreadyClosed, "c", "late")
    bench.refuses_end(errors.RoundAlreadyClosed, "a", "late")
    assert bench.phase is Phase.FINISHED
    assert bench.session.model == final
    assert bench.journal == journal


def test_x04_too_few_updates_are_no_round() -> None:
    """With two wanted, XAIN finished the round on the update of one when the other died. Now the
    round waits, keeps what it has, and is completed by whoever comes."""
    bench = opened_round("a", "b")
    bench.expire("b")
    bench.refuses_end(errors.NotInRound, "a")
    assert bench.phase is Phase.STANDBY
    bench.join("c")
    bench.end("a")
    assert bench.aggregates == []
    bench.end("c")
    assert [u.participant_id for u in bench.aggregates[0].updates] == ["a", "c"]


def test_x04_an_update_before_the_loss_does_not_make_a_round_either() -> None:
    """The same with the update first: one of two is kept and is not enough."""
    bench = opened_round("a", "b")
    bench.end("a")
    bench.expire("b")
    assert bench.phase is Phase.STANDBY
    assert bench.aggregates == []
    bench.join("c")
    bench.end("c")
    assert [u.participant_id for u in bench.aggregates[0].updates] == ["a", "c"]


def test_x05_a_departure_closes_a_complete_round() -> None:
    """When the last who owed an update died, XAIN's round was complete and nobody noticed until
    another EndTrainingRound came, which could be never. Now the departure itself closes it."""
    bench = opened_round("a", "b", rules=make_rules(start_participants=2), answers=False)
    bench.end("a")
    bench.expire("b")
    assert bench.phase is Phase.AGGREGATING
    assert len(bench.owed) == 1


def test_x06_the_last_updates_close_a_round_once() -> None:
    """Two last EndTrainingRounds at the same time made XAIN aggregate twice and skip a round. Here
    commands come one after the other; whatever their order, and sent twice, one aggregation."""
    for order in permutations(["a", "b", "c"]):
        bench = opened_round("a", "b", "c", answers=False)
        for name in order:
            bench.end(name, f"of {name}", round_=0)
            bench.end(name, f"of {name}", round_=0)
        for name in order:
            bench.end(name, f"of {name}", round_=0)
        (aggregate,) = bench.aggregates
        bench.answer()
        bench.refuses(answer_to(aggregate), errors.StaleModel)
        assert bench.session.round == 1
        assert bench.session.epoch_base == 5


def test_x07_more_than_needed_start_a_round_too() -> None:
    """XAIN waited for exactly N; N + 1 who came together left it in STANDBY for ever. Now N is a
    lower bound, and the upper one is max_participants."""
    bench = Bench(make_rules(min_participants=2, max_participants=4), answers=False)
    bench.join("a", "b", "c")
    bench.answer()
    assert bench.phase is Phase.COLLECTING
    assert len(bench.selected) == 3
    assert isinstance(bench.join("d"), r.Accepted)
    assert isinstance(bench.join("e"), r.Later)


def test_x07_whoever_is_in_is_not_sent_away() -> None:
    """XAIN answered LATER to participants it had already accepted."""
    bench = Bench(make_rules(min_participants=2, max_participants=2))
    bench.join("a", "b")
    assert isinstance(bench.join("a"), r.Accepted)


def test_x08_many_may_expire_at_once() -> None:
    """XAIN's monitor died of a dictionary that changed while it looked. Now expiry is one command
    on an immutable session, and the others are not touched."""
    bench = Bench(make_rules(min_participants=100, max_participants=200))
    bench.join(*(f"p{i}" for i in range(50)))
    bench.join("q", at=1.0)
    bench.tick(at=15.0)
    assert bench.connected == ("q",)
    assert next_deadline(bench.session) == 16.0


def test_x09_as_many_are_selected_as_were_asked_for() -> None:
    """XAIN worked the number out in floats and selected 8 of 25 where 7 were wanted, and waited for
    99 connected where 91 are enough. Now it is exact for every pair."""
    for pool in range(1, 120):
        names = [f"p{i}" for i in range(pool)]
        for k in range(1, pool + 1):
            fraction = exact_fraction(f"{k}/{pool}")
            assert num_wanted(pool, fraction) == k
            assert num_required(k, fraction) <= pool
        candidates = [Candidate(name) for name in names]
        chosen = select(Uniform(), candidates, (pool + 1) // 2, seed=0, round_=0, draw=1)
        assert len(chosen) == (pool + 1) // 2
    assert num_required(10, exact_fraction(0.1)) == 91


def test_x09_replacements_fill_the_selection_exactly() -> None:
    """25 in the pool, 7 to be replaced: 7 are, with every controller."""
    for controller in ("all", "ordered", "random"):
        rules = make_rules(min_participants=7, controller=controller)
        bench = Bench(rules)
        bench.join(*(f"a{i}" for i in range(7)))
        bench.join(*(f"b{i:02}" for i in range(25)))
        bench.leave(*(f"a{i}" for i in range(7)))
        assert len(bench.selected) == 7
        assert all(name.startswith("b") for name in bench.selected)


def test_x10_sessions_share_nothing() -> None:
    """XAIN's default controller was one object for all coordinators of a process, and was changed
    by each. Two sessions side by side decide as each would alone."""

    def run(bench: Bench) -> list[tuple[str, ...]]:
        bench.join(*(f"p{i}" for i in range(9)))
        seen = [bench.selected]
        bench.end_all()
        return [*seen, bench.selected]

    wide = make_rules(min_participants=3, fraction="0.5", controller="random", start_participants=9)
    narrow = make_rules(
        min_participants=1, fraction="0.2", controller="random", start_participants=9
    )
    alone = run(Bench(wide))
    one, other = Bench(wide), Bench(narrow)
    run(other)
    assert run(one) == alone
    assert not one.session.members.keys() - {f"p{i}" for i in range(9)}


def test_x11_a_late_update_is_not_taken_for_another_round() -> None:
    """XAIN's messages carried no round, so an update for round 0 was looked up in round 1. Now the
    round is said and checked."""
    bench = opened_round("a", "b", "c", rules=make_rules(min_participants=2, start_participants=3))
    bench.end("b")
    bench.end("c")
    bench.leave("a")
    assert bench.session.round == 1
    bench.join("a")
    bench.leave("b")
    assert "a" in bench.selected
    bench.refuses_end(errors.StaleRound, "a", "for round 0", round_=0)
    bench.end("a", "for round 1", round_=1)
    assert bench.happened(e.UpdateAccepted)[-1].round == 1


def test_x12_nobody_submits_what_another_uploaded() -> None:
    """XAIN read whatever key the sender named: another's weights, or the global model. Now a name
    is its participant's own, or bound to it by its first use."""
    bench = opened_round("a", "b", "c")
    bench.end("a", upload_name="uuid of a")
    for name in ("uuid of a", "a", "c"):
        bench.refuses_end(errors.UploadNameTaken, "b", upload_name=name)
    for name in ("global", "../0/global", "", "0/a"):
        bench.refuses_end(errors.InvalidName, "b", upload_name=name)
    bench.end("b", upload_name="uuid of b")


def test_x12_a_reconnect_is_the_same_participant() -> None:
    """XAIN knew participants by their address and took a reconnect for somebody new. The core knows
    them by a name: whoever comes again under it goes on where it was."""
    bench = opened_round("a", "b")
    bench.end("a")
    bench.join("a")
    assert bench.connected == ("a", "b")
    assert bench.heartbeat("a") == r.Advertisement(Phase.COLLECTING, 0, True)


def test_x13_a_bad_update_harms_only_its_sender_and_can_be_mended() -> None:
    """XAIN took -1 samples and divided by zero, and stored a wrong shape before it failed on it, so
    that the sender could not even try again. Now both are refused before anything is kept."""
    bench = opened_round("a", "b")
    bench.end("b", num_samples=1)
    bench.refuses_end(errors.InvalidUpdate, "a", num_samples=-1)
    bench.refuses_end(errors.InvalidUpdate, "a", shape=(2, 2))
    bench.refuses_end(errors.InvalidUpdate, "a", first_bad=0)
    assert bench.outstanding == ("a",)
    bench.end("a", num_samples=1)
    assert len(bench.aggregates) == 1


def test_x15_a_restart_loses_nothing() -> None:
    """XAIN kept everything in memory. Here, wherever the coordinator dies, what was committed folds
    to the session that was, with the same work owed, and ends in the same final model."""

    def script(bench: Bench) -> list[c.Command]:
        return [c.Rendezvous(name, PROFILE) for name in ("a", "b", "c")]

    def run(*, restarts: bool) -> Bench:
        bench = Bench(make_rules(rounds=3, min_participants=3, controller="random"), answers=False)

        def die() -> None:
            if restarts:
                bench.restart()

        for command in script(bench):
            bench.send(command)
            die()
        while bench.phase is not Phase.FINISHED:
            if bench.owed:
                bench.send(answer_to(bench.owed.pop(0)))
            else:
                name = bench.outstanding[0]
                bench.end(name, f"{name}@{bench.session.round}")
            die()
        return bench

    undisturbed, disturbed = run(restarts=False), run(restarts=True)
    assert disturbed.session == undisturbed.session
    assert disturbed.journal == undisturbed.journal
    assert disturbed.aggregates == undisturbed.aggregates
    assert replay(disturbed.journal) == disturbed.session
    assert resume(disturbed.session) == ()
