"""Rounds of the rule "assemble": attempts, their slices, and rounds that start again."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tests.unit.core.bench import (
    DEADLINE_S,
    IDLE_S,
    LEASE_S,
    PROFILE,
    TIMED,
    Bench,
    make_rules,
    replay,
    stored,
)

from support.refusals import refused_as
from xain_coordinator.core.machine.decider import next_deadline
from xain_coordinator.core.parts.attempts import MAX_ATTEMPTS
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.effects import Aggregate
from xain_coordinator.core.vocabulary.keys import model_key, update_key
from xain_coordinator.core.vocabulary.values import (
    GlobalModel,
    Layout,
    Phase,
    ProcessGroup,
    Rules,
    WeightsRef,
)
from xain_workloads.model import TensorSpec, size_of

LAYOUT = tuple(TensorSpec(name, (2,), "float32") for name in "pqrs")


def rules(stages: int = 2, **given: Any) -> Rules:
    made = make_rules(**{**TIMED, **given})
    return replace(made, aggregation="assemble", aggregation_options={"stages": stages})


class Group(Bench):
    """A bench whose participants train one model of four tensors together."""

    def __init__(self, *names: str, stages: int = 2, **given: Any) -> None:
        given = {"start_participants": len(names), **given}
        super().__init__(rules(stages, **given), answers=False)
        self.enter(*names)

    def enter(self, *names: str, port: int = 1) -> None:
        for name in names:
            self.send(c.Rendezvous(name, PROFILE, group_address=f"{name}:{port}"))
        self._work()

    def _work(self) -> None:
        while self.owed:
            effect = self.owed.pop(0)
            number = effect.round + 1 if isinstance(effect, Aggregate) else 0
            ref = WeightsRef(model_key(number), 128, str(number))
            model = GlobalModel(number, ref, "float32", (8,), LAYOUT)
            done = c.AggregationDone if number else c.InitialisationDone
            self.send(done(model))

    def group(self, name: str) -> ProcessGroup:
        group = self.start(name).process_group
        assert group is not None
        return group

    def hand_in(
        self, name: str, tensors: str, attempt: int | None = None, first_bad: int | None = None
    ) -> None:
        owned: Layout = tuple(spec for spec in LAYOUT if spec.name in tensors)
        number = self.session.round
        key, shape = update_key(number, name), (size_of(owned),)
        weights = stored(key, f"{name}{attempt}", shape=shape, first_bad=first_bad)
        opened = self.session.open_round
        self.send(
            c.EndTrainingRound(
                name,
                number,
                1,
                weights,
                layout=owned,
                attempt=opened.attempt if attempt is None else attempt,
            )
        )
        self._work()

    def hand_in_as_cut(self, name: str, tensors: str) -> None:
        """Hand in a slice; the server reports one that does not fit as a broken group."""
        attempt = self.attempt
        try:
            self.hand_in(name, tensors)
        except errors.Refusal as refusal:
            if refusal.code != "SLICE_MISMATCH":
                raise
            number = self.session.round
            self.send(c.NoteGroupBroken(name, number, attempt, str(refusal)))

    def report(self, name: str) -> None:
        opened = self.session.open_round
        self.send(c.NoteGroupBroken(name, opened.number, opened.attempt, "connection reset"))

    @property
    def attempt(self) -> int:
        return self.session.open_round.attempt


def test_selection_in_its_order_gives_the_ranks_and_rank_0_the_address():
    bench = Group("a", "b", "c", stages=3)
    groups = [bench.group(name) for name in bench.selected]
    address = f"{bench.selected[0]}:1"
    assert groups == [ProcessGroup(1, rank, 3, address) for rank in range(3)]
    assert bench.heartbeat("a").attempt == 1


def test_round_closes_when_all_slices_are_in():
    bench = Group("a", "b", rounds=2)
    bench.hand_in(bench.selected[0], "p")
    assert bench.session.round == 0
    bench.hand_in(bench.selected[1], "qrs")
    assert bench.session.round == 1
    assert len(bench.aggregates[0].updates) == 2
    assert bench.aggregates[0].rule == "assemble"


def test_no_more_participants_are_selected_than_the_model_has_layers():
    assert len(Group(*"abcdef", stages=0).selected) == len(LAYOUT)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_at_most_one_participant_is_selected_for_each_stage(stages):
    assert len(Group("a", "b", "c", "d", "e", stages=stages).selected) == stages


@pytest.fixture
def bench() -> Group:
    return Group("a", "b")


@pytest.mark.parametrize(
    ("second", "why"), [("qs", "where the model has 'r'"), ("", "does not say which tensors")]
)
def test_slice_that_is_no_part_of_the_model_is_refused(second, why, bench):
    bench.hand_in("a", "p")
    with pytest.raises(errors.InvalidUpdate, match=why):
        bench.hand_in("b", second)


@pytest.mark.parametrize(
    ("first", "second", "why"), [("pq", "qrs", "overlaps"), ("p", "rs", "6 of the 8 elements")]
)
def test_gaps_and_overlaps_of_slices_break_the_attempt_without_a_fault(first, second, why):
    bench = Group("a", "b", refused_limit=1)
    bench.hand_in("a", first)
    with refused_as("SLICE_MISMATCH", match=why):
        bench.hand_in("b", second)
    bench.hand_in_as_cut("b", second)
    assert bench.attempt == 2
    assert set(bench.selected) == {"a", "b"}
    assert not bench.session.selection.faults
    assert why in bench.happened(e.RoundRestarted)[0].reason


@pytest.mark.parametrize("tensors", ["p", "pqrs"])
def test_member_with_a_wrong_slice_never_trains_without_the_others(tensors):
    """The slices of the other members are cut rightly, and arrive after the wrong slice."""
    bench = Group("a", "b", "c", stages=3, refused_limit=2)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert set(bench.selected) == {"a", "b", "c"}
        for name, own in {"a": tensors, "b": "r", "c": "s"}.items():
            if bench.phase is Phase.COLLECTING and bench.attempt == attempt:
                bench.hand_in_as_cut(name, own)
    assert bench.phase is Phase.FINISHED
    assert not bench.happened(e.ModelPublished)
    assert not bench.session.selection.faults
    assert ("overlaps" if tensors == "pqrs" else "6 of the 8") in bench.session.cause


@pytest.mark.parametrize("index", [0, 2])
def test_slice_that_is_not_finite_is_refused_with_the_name_of_its_tensor(index, bench):
    with pytest.raises(errors.InvalidUpdate, match="s.0." if index else "r.0."):
        bench.hand_in("b", "rs", first_bad=index)


def test_round_starts_again_at_once_when_a_member_leaves():
    bench = Group("a", "b", "c", stages=3)
    bench.leave("b")
    assert bench.attempt == 2
    assert bench.notified
    assert set(bench.selected) == {"a", "c"}
    assert bench.group("a").world_size == 2
    [restarted] = bench.happened(e.RoundRestarted)
    assert (restarted.attempt, restarted.reason) == (2, "b: it has left")


def test_member_that_has_died_is_in_the_attempts_until_the_end_of_its_lease(bench):
    bench.report("a")
    assert bench.attempt == 2
    assert set(bench.selected) == {"a", "b"}
    bench.expire("b")
    assert (bench.attempt, bench.selected) == (3, ("a",))


def test_slices_of_an_attempt_that_is_over_are_dropped(bench):
    bench.hand_in("a", "pq")
    bench.leave("b")
    assert (bench.attempt, bench.selected) == (2, ("a",))
    assert not bench.heartbeat("a").update_accepted
    with refused_as("STALE_ATTEMPT"):
        bench.hand_in("a", "pq", attempt=1)
    bench.hand_in("a", "pqrs")
    assert bench.session.round == 1


def test_accepted_slice_outlives_its_sender(bench):
    bench.hand_in("a", "pq")
    bench.leave("a")
    bench.hand_in("b", "rs")
    assert bench.session.round == 1
    assert not bench.happened(e.RoundRestarted)


def test_participant_that_joins_waits_for_the_next_attempt():
    bench = Group("a", "b", stages=3)
    bench.enter("c")
    assert bench.selected == ("a", "b")
    bench.report("a")
    assert set(bench.selected) == {"a", "b", "c"}


def test_failure_of_a_members_own_code_ends_the_attempt_and_counts_against_it():
    bench = Group("a", "b", "c", stages=3)
    bench.send(c.NoteFailure("a", 0, "TypeError"))
    assert set(bench.selected) == {"b", "c"}
    assert bench.session.selection.faults_of("a").in_a_row == 1
    assert bench.session.selection.faults_of("b").in_a_row == 0


def test_process_that_replaces_a_killed_one_ends_the_attempt(bench):
    bench.enter("a", port=2)
    assert bench.attempt == 2
    assert bench.group("b").address == f"{bench.selected[0]}:{2 if bench.selected[0] == 'a' else 1}"


def test_refused_and_damaged_slices_end_the_attempt(bench):
    bench.send(c.NoteRefusedUpdate("a", 0, "not finite"))
    assert bench.attempt == 2
    bench.hand_in("a", "pq")
    key = bench.session.open_round.updates["a"].weights.ref.key
    bench.send(c.NoteDamagedUpdates({key: "other bytes"}))
    assert bench.attempt == 3
    assert bench.session.opened.damaged == {"a": key}, "the object is not taken once more"
    assert not bench.heartbeat("a").update_damaged


def test_round_starts_again_at_its_deadline():
    bench = Group("a", "b", refused_limit=0)
    bench.hand_in("a", "pq")
    bench.pass_time(DEADLINE_S)
    assert bench.attempt == 2
    assert bench.happened(e.RoundRestarted)[0].missed == ("b",)
    bench.pass_time(DEADLINE_S)
    assert bench.attempt == 3


def test_attempt_may_take_longer_than_the_idle_timeout():
    bench = Group("a", "b", rounds=2, deadline_s=10 * IDLE_S)
    bench.report("a")
    bench.pass_time(5 * IDLE_S)
    assert (bench.phase, bench.attempt) == (Phase.COLLECTING, 2)
    bench.report("b")
    bench.pass_time(9 * IDLE_S)
    assert (bench.phase, bench.attempt) == (Phase.COLLECTING, 3)
    bench.hand_in("a", "pq")
    bench.hand_in("b", "rs")
    assert bench.session.round == 1


def test_session_finishes_when_too_many_attempts_at_a_round_break():
    bench = Group("a", "b", rounds=2)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert (bench.phase, bench.attempt) == (Phase.COLLECTING, attempt)
        bench.report("a" if attempt == 2 else "b")
        assert replay(bench.journal) == bench.session
    assert bench.phase is Phase.FINISHED
    for part in ("round 0", "after 10 attempts", "was b in 9 of them", "b: connection reset"):
        assert part in bench.session.cause
    assert len(bench.journal) < 4 * MAX_ATTEMPTS


def test_session_finishes_when_all_attempts_at_a_round_pass_their_deadline():
    bench = Group("a", "b", refused_limit=0)
    bench.pass_time(MAX_ATTEMPTS * DEADLINE_S)
    assert bench.phase is Phase.FINISHED
    assert bench.session.cause.endswith("its deadline has passed")


def test_late_reports_and_those_of_unregistered_clients_change_nothing():
    bench = Group("a", "b", "c")
    before = bench.session
    unregistered = next(p for p in "abc" if p not in bench.selected)
    bench.report(unregistered)
    bench.send(c.NoteGroupBroken("a", 0, 7, "late"))
    bench.send(c.NoteGroupBroken("a", 1, 1, "early"))
    assert bench.session == before
    bench.refuses(c.NoteGroupBroken("x", 0, 1), errors.NotAMember)


@pytest.mark.parametrize("name", ["a", "new"])
def test_participant_without_process_groups_is_refused(name, bench):
    bench.refuses(c.Rendezvous(name, PROFILE), errors.ProfileMismatch)


@pytest.mark.parametrize("name", ["a", "new"])
@pytest.mark.parametrize(
    "address",
    [
        f"{'h' * 1_000_000}:1",
        "host",
        ":1",
        "host:",
        "host:0",
        "host:65536",
        "host:²",
        "ho\nst:1",
        "two hosts:1",
    ],
)
def test_address_that_is_not_a_host_and_a_port_is_refused(name, address, bench):
    bench.refuses(c.Rendezvous(name, PROFILE, group_address=address), "INVALID_REQUEST")


@pytest.mark.parametrize("address", ["[::1]:65535", "10.0.0.7:1", "site-a.example.org:29500"])
def test_address_with_a_host_and_a_port_is_accepted(address, bench):
    bench.send(c.Rendezvous("new", PROFILE, group_address=address))
    assert bench.session.members["new"].group_address == address


def test_process_of_another_script_keeps_its_address_for_process_groups():
    """Before the first weights are there a member joins again when its process can make them."""
    bench = Bench(rules(initial="first", min_participants=2))
    for name in ("a", "b"):
        bench.send(c.Rendezvous(name, PROFILE, group_address=f"{name}:1"))
    assert bench.session.is_untrained
    bench.send(c.Rendezvous("a", PROFILE, can_initialise=False, group_address="a:2"))
    assert bench.session.members["a"].group_address == "a:2"


def test_broken_attempt_waits_for_participants_before_it_starts_again():
    bench = Group("a", "b", min_participants=2)
    bench.leave("b")
    assert (bench.phase, bench.attempt) == (Phase.STANDBY, 1)
    bench.pass_time(DEADLINE_S + 1)
    assert bench.phase is Phase.STANDBY, "its deadline does not make the driver spin"
    bench.enter("b")
    assert (bench.phase, bench.attempt) == (Phase.COLLECTING, 2)


BREAKING = (
    *("leave", "join", "report", "expire", "time"),
    *("deadline", "failure", "refusal", "wrong cut", "damage"),
)


@pytest.mark.parametrize("seed", range(20))
def test_session_completes_after_losses_and_restarts_at_any_point(seed):
    """Members leave, expire, fail, report and come back, slices are refused, damaged and cut
    wrongly, deadlines pass, and the coordinator dies. The journal always folds to the same session,
    and once all is quiet the session completes."""
    chance, names = Random(seed), "abcd"
    bench = Group(*names, stages=chance.randint(1, 4), rounds=3)
    for _ in range(60):
        if bench.phase is Phase.FINISHED:
            break
        name = chance.choice(names)
        number, opened = bench.session.round, bench.session.open_round
        owes = bench.session.owes_update(name) and bench.phase is Phase.COLLECTING
        what = chance.choice(["hand in", "restart", *BREAKING])
        if opened is not None and opened.attempt > MAX_ATTEMPTS - 6 and what in BREAKING:
            continue  # the rest of the attempts is for what has begun, and for the end
        match what:
            case "leave" if name in bench.session.members:
                bench.leave(name)
            case "join":
                bench.enter(name, port=chance.randint(1, 2))
            case "report" if owes:
                bench.report(name)
            case "expire":
                bench.expire(name)
            case "restart":
                bench.restart()
            case "hand in" if owes:
                _hand_in_share(bench, name)
            case "time":
                bench.pass_time(chance.choice([1.0, LEASE_S]))
            case "deadline" if owes:
                bench.pass_time(DEADLINE_S)
            case "failure" if owes:
                bench.send(c.NoteFailure(name, number, "TypeError"))
            case "refusal" if owes:
                bench.send(c.NoteRefusedUpdate(name, number, "not finite"))
            case "wrong cut" if owes:
                bench.hand_in_as_cut(name, chance.choice(["p", "rs", "pqrs"]))
            case "damage" if opened is not None and name in opened.updates:
                key = opened.updates[name].weights.ref.key
                bench.send(c.NoteDamagedUpdates({key: "other bytes"}))
        assert replay(bench.journal) == bench.session
        due = next_deadline(bench.session)
        assert bench.phase is Phase.FINISHED or due is None or due >= bench.now
    for _ in range(20):
        if bench.phase is Phase.FINISHED:
            break
        bench.enter(*names)
        for name in bench.outstanding:
            if bench.session.open_round.broken:
                bench.report(name)
            else:
                _hand_in_share(bench, name)
    assert bench.session.cause == "completed"


def _hand_in_share(bench: Group, name: str) -> None:
    """The tensors of the participant's stage, with an even cut."""
    opened = bench.session.open_round
    if not opened.broken:
        group = bench.group(name)
        size, rank = group.world_size, group.rank
        cut = [len(LAYOUT) * stage // size for stage in range(size + 1)]
        bench.hand_in_as_cut(name, "pqrs"[cut[rank] : cut[rank + 1]])
