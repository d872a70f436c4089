"""Controllers, and who is selected when."""

import random
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.core.bench import Bench, make_rules, opened_round

from xain_coordinator.core import events as e
from xain_coordinator.core.selection import CONTROLLERS, select
from xain_coordinator.core.values import Phase

NAMES = [f"p{i}" for i in range(30)]


@settings(derandomize=True, deadline=None)
@given(
    controller=st.sampled_from(sorted(CONTROLLERS)),
    candidates=st.lists(st.sampled_from(NAMES), unique=True),
    k=st.integers(1, 30),
    seed=st.integers(0, 9),
)
def test_a_selection_is_distinct_candidates(
    controller: str, candidates: list[str], k: int, seed: int
) -> None:
    """Nobody twice, nobody from elsewhere, k of them or as many as there are."""
    chosen = select(controller, candidates, k, seed=seed, round_=0, draw=0)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(candidates)
    wanted = len(candidates) if controller == "all" else min(k, len(candidates))
    assert len(chosen) == wanted


@settings(derandomize=True, deadline=None)
@given(order=st.permutations(NAMES[:8]), controller=st.sampled_from(["ordered", "random"]))
def test_the_draw_depends_on_who_is_here_not_on_who_came_first(
    order: list[str], controller: str
) -> None:
    """The order of arrival must not decide who trains."""
    assert select(controller, order, 3, seed=1, round_=2, draw=0) == select(
        controller, NAMES[:8], 3, seed=1, round_=2, draw=0
    )


def test_ordered_takes_the_first_by_name() -> None:
    assert select("ordered", ["c", "a", "b"], 2, seed=0, round_=0, draw=0) == ("a", "b")


def test_all_takes_everybody() -> None:
    assert select("all", ["c", "a", "b"], 1, seed=0, round_=0, draw=0) == ("c", "a", "b")


def test_random_depends_on_seed_round_and_draw_and_on_nothing_else() -> None:
    """The same three give the same selection; each of them alone gives another chance."""

    def drawn(seed: int, round_: int, draw: int) -> tuple[str, ...]:
        return select("random", NAMES, 10, seed=seed, round_=round_, draw=draw)

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    assert len({drawn(1, 2, 3), drawn(4, 2, 3), drawn(1, 4, 3), drawn(1, 2, 4)}) == 4


def test_random_leaves_the_global_generator_alone() -> None:
    """Chance is the session's own: neither read from the process nor disturbing it."""
    random.seed(5)
    expected = Random(5).random()
    select("random", NAMES, 10, seed=1, round_=0, draw=0)
    assert random.random() == expected


def test_random_gives_everybody_a_chance() -> None:
    """Over many rounds each of six is drawn about as often as the others (expected 150 of 300)."""
    counts = dict.fromkeys(NAMES[:6], 0)
    for round_ in range(300):
        for name in select("random", NAMES[:6], 3, seed=11, round_=round_, draw=0):
            counts[name] += 1
    assert all(110 < count < 190 for count in counts.values()), counts


def test_an_unknown_controller_is_an_error() -> None:
    with pytest.raises(KeyError):
        select("fortune", NAMES, 1, seed=0, round_=0, draw=0)


def test_k_of_all_connected_are_selected() -> None:
    """A round selects ceil(fraction · connected), from everybody connected at its opening."""
    bench = Bench(make_rules(min_participants=2, fraction="0.3", start_participants=11))
    bench.join(*NAMES[:11])
    assert len(bench.selected) == 4  # ceil(3.3)


def test_whoever_joins_a_full_round_waits_for_the_next() -> None:
    """The selection of an open round does not grow beyond its target."""
    bench = opened_round("b", "c")
    bench.join("a")
    assert bench.selected == ("b", "c")
    bench.end_all()
    assert bench.selected == ("a", "b", "c")


def test_a_replacement_is_added_behind_the_others() -> None:
    """The order of aggregation is that of selection, so nobody's place moves."""
    bench = opened_round("b", "c", "d")
    bench.join("a")
    bench.leave("c")
    assert bench.selected == ("b", "d", "a")
    assert bench.happened(e.ParticipantsSelected) == [e.ParticipantsSelected(0, ("a",))]
    assert bench.notified, "the replacement must hear of its round"


def test_nobody_replaces_a_participant_that_has_done_its_part() -> None:
    """An accepted update fills the place of its sender, wherever the sender is."""
    bench = opened_round("a", "b", "c", rules=make_rules(min_participants=2))
    assert bench.selected == ("a", "b")
    bench.end("a")
    bench.leave("a")
    assert bench.selected == ("a", "b")
    assert bench.happened(e.ParticipantsSelected) == []


def test_a_replacement_is_a_fresh_draw() -> None:
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


def test_all_replaces_one_by_one() -> None:
    """The controller "all" selects everybody when a round opens; a replacement stays one."""
    bench = opened_round("a", "b", rules=make_rules(min_participants=2, controller="all"))
    bench.join("c", "d", "e")
    bench.leave("a")
    assert len(bench.selected) == 2
    assert set(bench.selected) <= {"b", "c", "d", "e"}
    bench.end_all()
    assert set(bench.selected) == {"b", "c", "d", "e"}, "a new round selects everybody"


def test_a_place_without_a_replacement_is_filled_by_whoever_comes() -> None:
    """Below its target a round takes the next who joins."""
    bench = opened_round("a", "b", "c", rules=make_rules(min_participants=1, start_participants=3))
    bench.leave("b")
    assert bench.phase is Phase.COLLECTING
    assert bench.selected == ("a", "c")
    bench.join("z")
    assert bench.selected == ("a", "c", "z")


def test_whoever_left_and_comes_back_takes_a_free_place() -> None:
    """A short absence costs a place only if somebody else has taken it."""
    bench = opened_round("a", "b", rules=make_rules(min_participants=1, start_participants=2))
    bench.leave("b")
    bench.join("b")
    assert bench.selected == ("a", "b")
