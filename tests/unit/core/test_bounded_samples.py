"""Declared samples of participants with certificates: at most what they have said to have."""

import dataclasses

from tests.unit.core.bench import PROFILE, Bench, make_rules, replay, stored

from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary.keys import update_key
from xain_coordinator.core.vocabulary.replies import Done


def update(bench: Bench, name: str, num_samples: int) -> c.EndTrainingRound:
    number = bench.session.round
    weights = stored(update_key(number, name))
    return c.EndTrainingRound(name, number, num_samples, weights, is_bounded=True)


def test_samples_are_at_most_those_of_the_profile():
    bench = Bench(make_rules(rounds=3))
    bench.join("a")
    above = update(bench, "a", PROFILE.num_samples + 1)
    told = bench.refuses(above, errors.InvalidUpdate)
    assert "declares 11 samples" in str(told)
    assert bench.send(update(bench, "a", PROFILE.num_samples)).reply == Done()


def test_without_a_profile_the_first_declared_samples_are_the_limit():
    """Fewer later on change nothing, initial weights are of none, and others have their own."""
    bench = Bench(make_rules(rounds=5, initial="empty", min_participants=2))
    for name in ("a", "b"):
        bench.send(c.Rendezvous(name))
    for samples in (0, 20, 5, 20):
        bench.send(update(bench, "a", samples))
        bench.send(update(bench, "b", 2 * samples))
    bench.refuses(update(bench, "a", 21), errors.InvalidUpdate)
    assert bench.session.declared == {"a": 20, "b": 40}
    assert replay(bench.journal) == bench.session


def test_open_coordinator_takes_any_number():
    bench = Bench(make_rules(rounds=3))
    bench.join("a")
    open_one = dataclasses.replace(update(bench, "a", 2 * 10**9), is_bounded=False)
    assert bench.send(open_one).reply == Done()
