"""Controllers, and who is selected when."""

import random
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.core.bench import Bench, answer_to, make_rules, opened_round

from xain_coordinator.core.machine.strategy import Strategy
from xain_coordinator.core.rules import selection
from xain_coordinator.core.rules.pacing import WantedUpdates
from xain_coordinator.core.rules.selection import (
    CONTROLLERS,
    Candidate,
    PluginFailed,
    Weighted,
    builtin_controller,
)
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import DataProfile, Phase

NAMES = [f"p{i}" for i in range(30)]


def select(
    controller: str, names: Sequence[str], k: int, *, seed: int = 0, round_: int = 0, draw: int = 0
) -> tuple[str, ...]:
    """A choice of one of the core's controllers among participants without a profile."""
    candidates = [Candidate(name) for name in names]
    return choose(builtin_controller(controller, {}), candidates, k, seed, round_, draw)


def choose(
    controller: Any,
    candidates: Sequence[Candidate],
    k: int,
    seed: int = 0,
    round_: int = 0,
    draw: int = 0,
) -> tuple[str, ...]:
    return selection.select(controller, candidates, k, seed=seed, round_=round_, draw=draw)


@settings(derandomize=True, deadline=None)
@given(
    controller=st.sampled_from(sorted(CONTROLLERS)),
    candidates=st.lists(st.sampled_from(NAMES), unique=True),
    k=st.integers(1, 30),
    seed=st.integers(0, 9),
)
def test_a_selection_is_distinct_candidates(controller, candidates, k, seed):
    """Each candidate is chosen at most once, and k of them or as many as there are."""
    chosen = select(controller, candidates, k, seed=seed, round_=0, draw=0)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(candidates)
    wanted = len(candidates) if controller == "all" else min(k, len(candidates))
    assert len(chosen) == wanted


@settings(derandomize=True, deadline=None)
@given(order=st.permutations(NAMES[:8]), controller=st.sampled_from(sorted(CONTROLLERS)))
def test_the_draw_does_not_depend_on_the_order_of_joining(order, controller):
    """The order of arrival must not decide who trains."""
    assert select(controller, order, 3, seed=1, round_=2, draw=0) == select(
        controller, NAMES[:8], 3, seed=1, round_=2, draw=0
    )


def test_random_depends_on_seed_round_and_draw_and_on_nothing_else():

    def drawn(seed, round_, draw):
        return select("random", NAMES, 10, seed=seed, round_=round_, draw=draw)

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    assert len({drawn(1, 2, 3), drawn(4, 2, 3), drawn(1, 4, 3), drawn(1, 2, 4)}) == 4


def test_random_leaves_the_global_generator_alone():
    """Chance is the session's own: neither read from the process nor disturbing it."""
    random.seed(5)
    expected = Random(5).random()
    select("random", NAMES, 10, seed=1, round_=0, draw=0)
    assert random.random() == expected


def test_random_gives_all_a_chance():
    """Over many rounds each of six is drawn about as often as the others (expected 150 of 300)."""
    counts = dict.fromkeys(NAMES[:6], 0)
    for round_ in range(300):
        for name in select("random", NAMES[:6], 3, seed=11, round_=round_, draw=0):
            counts[name] += 1
    assert all(110 < count < 190 for count in counts.values()), counts


def test_an_unknown_controller_is_an_error():
    with pytest.raises(PluginFailed, match="fortune"):
        select("fortune", NAMES, 1)


# --- round robin ---


def test_round_robin_takes_the_longest_waiting():
    """No participant trains twice before all have trained once, and so on for ever."""
    bench = Bench(
        make_rules(
            rounds=5,
            min_participants=2,
            fraction="2/5",
            start_participants=5,
            controller="round_robin",
        )
    )
    bench.join("c", "a", "e", "b", "d")
    selections = []
    while bench.phase is not Phase.FINISHED:
        selections.append(bench.selected)
        bench.end_all()
    assert selections == [("a", "b"), ("c", "d"), ("e", "a"), ("b", "c"), ("d", "e")]


def test_returning_participant_waits_behind_the_connected():
    rules = make_rules(rounds=9, fraction="0.25", start_participants=3, controller="round_robin")
    bench = Bench(rules)
    bench.join("a", "b", "c")
    assert bench.selected == ("a",)
    bench.end_all()
    bench.leave("a")
    bench.join("a", "0")
    selections = []
    for _ in range(4):
        selections += bench.selected
        bench.end_all()
    assert selections == ["b", "c", "0", "a"]


def test_round_robin_chooses_the_replacement():
    bench = Bench(
        make_rules(rounds=3, fraction="0.3", start_participants=3, controller="round_robin")
    )
    bench.join("a", "b", "c")
    bench.leave("a")
    assert bench.selected == ("b",)
    bench.end_all()
    assert bench.selected == ("c",)


# --- by samples ---


def having(samples: dict[str, int | None]) -> list[Candidate]:
    return [
        Candidate(name, None if n is None else DataProfile(n, 4)) for name, n in samples.items()
    ]


def test_weighted_draws_in_proportion_to_the_samples():
    """1 of 10, 3 of 10, 6 of 10: over 3,000 draws of one, within five standard deviations."""
    candidates = having({"a": 10, "b": 30, "c": 60})
    counts = dict.fromkeys("abc", 0)
    for round_ in range(3000):
        (name,) = choose(Weighted(), candidates, 1, round_=round_)
        counts[name] += 1
    for name, share in {"a": 0.1, "b": 0.3, "c": 0.6}.items():
        deviation = (3000 * share * (1 - share)) ** 0.5
        assert abs(counts[name] - 3000 * share) < 5 * deviation, counts


def test_weighted_draws_the_second_in_proportion_to_the_rest():
    """Without replacement: the pair {a, b} of weights 1, 1, 2 has the probability 2 · 1/4 · 1/3."""
    candidates = having({"a": 1, "b": 1, "c": 2})
    pairs = [set(choose(Weighted(), candidates, 2, round_=r)) for r in range(3000)]
    num_expected = 3000 / 6
    deviation = (3000 * 1 / 6 * 5 / 6) ** 0.5
    assert abs(pairs.count({"a", "b"}) - num_expected) < 5 * deviation


def test_participant_without_samples_is_drawn_only_if_there_are_no_others():
    candidates = having({"a": 0, "b": 5, "c": 0, "d": 5})
    for round_ in range(50):
        chosen = choose(Weighted(), candidates, 3, round_=round_)
        assert {"b", "d"} < set(chosen)
    last = {choose(Weighted(), candidates, 3, round_=r)[2] for r in range(50)}
    assert last == {"a", "c"}, "which of them is chance too"


def test_participant_without_a_profile_has_default_samples():
    candidates = having({"a": None, "b": 1})

    def times(controller):
        return sum(choose(controller, candidates, 1, round_=r) == ("a",) for r in range(400))

    assert times(Weighted(default_samples=0)) == 0
    assert 140 < times(Weighted()) < 260
    assert times(Weighted(default_samples=1000)) > 390


def test_millions_of_samples_are_told_apart():
    """u^(1/w) itself would be 1 for all of them."""
    candidates = having({"a": 2**62, "b": 2**60})
    counts = [choose(Weighted(), candidates, 1, round_=r)[0] for r in range(500)]
    assert 340 < counts.count("a") < 460  # 4 of 5


def test_negative_default_samples_are_refused():
    with pytest.raises(ValueError, match="-1"):
        Weighted(default_samples=-1)


# --- controllers of others ---


class Says:
    """A controller that answers as it is told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def select(self, candidates: Sequence[Candidate], k: int, chance: Random) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (["a", "a"], "twice"),
        (["a", "z"], "no candidate: 'a', 'z'"),
        (["a", 7], "no candidate"),
        (["a"], "1 participants .* 2 of 3"),
        ([], "0 participants"),
        (None, "TypeError"),
        (ZeroDivisionError("by none"), "ZeroDivisionError: by none"),
    ],
)
def test_a_controller_that_answers_nonsense_is_named(answer, why):
    """A selection of no participants, or of unknown ones, would stop the session."""
    with pytest.raises(PluginFailed, match=f"Says.*{why}"):
        choose(Says(answer), having({"a": 1, "b": 1, "c": 1}), 2)


def test_controller_sees_the_facts_of_each_candidate():
    """Profile, tags, the round it was selected for last, and how long it has waited."""
    seen = []

    class Looks:
        def select(self, candidates: Sequence[Candidate], k: int, chance: Random) -> Any:
            if list(candidates) not in seen:  # the bench asks twice
                seen.append(list(candidates))
            return [candidate.participant_id for candidate in candidates[:k]]

    bench = Bench(make_rules(rounds=3, fraction="0.5", start_participants=2))
    bench.strategy = Strategy(Looks(), WantedUpdates())
    profile = DataProfile(12, 4)
    bench.join("b", profile=profile, tags={"site": "north"})
    bench.join("a", profile=profile)
    bench.end_all()
    assert seen == [
        [Candidate("a", profile), Candidate("b", profile, {"site": "north"})],
        [Candidate("a", profile, {}, 0, 1), Candidate("b", profile, {"site": "north"})],
    ]


def test_a_controller_that_fails_changes_nothing():
    """When it has been mended, what was asked can be asked again."""
    bench = Bench(make_rules(min_participants=2), answers=False)
    bench.join("a", "b")
    (work,) = bench.owed
    before = bench.session
    bench.strategy = Strategy(Says([]), WantedUpdates())
    with pytest.raises(PluginFailed):
        bench.send(answer_to(work))
    assert bench.session == before
    bench.strategy = None
    bench.send(answer_to(work))
    assert bench.selected == ("a", "b")


# --- who is selected when ---


def test_a_replacement_is_added_behind_the_others():
    """The order of aggregation is that of selection, so no participant moves."""
    bench = opened_round("b", "c", "d")
    bench.join("a")
    bench.leave("c")
    assert bench.selected == ("b", "d", "a")
    assert bench.happened(e.ParticipantsSelected) == [e.ParticipantsSelected(0, ("a",))]
    assert bench.notified, "the replacement must hear of its round"


def test_a_replacement_is_a_fresh_draw():
    """Every selection within a round has its own number, which begins at 0 in each round."""
    rules = make_rules(min_participants=2, controller="random", start_participants=2)
    bench = Bench(rules)
    bench.join("a", "b")
    bench.join(*NAMES)
    first = bench.session.pool
    bench.leave("a")
    expected = select("random", first, 1, seed=rules.seed, round_=0, draw=1)
    assert bench.selected == ("b", *expected) or bench.selected == (*expected, "b")
    pool = bench.session.pool
    bench.leave("b")
    assert bench.selected[-1:] == select("random", pool, 1, seed=rules.seed, round_=0, draw=2)
    everybody = bench.connected
    bench.end_all()
    assert bench.selected == select(
        "random", everybody, len(bench.selected), seed=rules.seed, round_=1, draw=0
    )
