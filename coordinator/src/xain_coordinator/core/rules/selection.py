"""Controllers: the selection of participants for the next round.

A controller is a pure function of the candidates, how many are wanted, and a generator seeded by
(session seed, round, draw), so the same session always selects the same participants. What it
answered is written into the event; a replay never asks again.

The core knows those in CONTROLLERS. Others come from outside, made from the session's rules, and
are handed to `decide`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from random import Random
from typing import Protocol

from xain_coordinator.core.vocabulary.values import DataProfile, Option


@dataclass(frozen=True, slots=True)
class Candidate:
    """A participant that may be selected.

    last_selected: the last round that it was selected for since it came; None before the first.
    waits_since: how many selections of single participants the session had made when this one was
        selected last, or when it came. The smaller, the longer it has waited.
    """

    participant_id: str
    profile: DataProfile | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    last_selected: int | None = None
    waits_since: int = 0


class Controller(Protocol):
    """Rule that selects the participants of a round."""

    def select(self, candidates: Sequence[Candidate], k: int, chance: Random) -> Sequence[str]:
        """Select k of the candidates, or all if they are fewer; more than k may be returned.

        candidates: in the order of their names.
        chance: the only source of chance there is; the same every time the same draw is made.
        """
        ...


class PluginFailed(ValueError):
    """A plug-in, such as a controller or a rule, is missing, cannot be used, or fails."""


class All:
    """Select all participants, whatever the fraction."""

    def select(self, candidates: Sequence[Candidate], k: int, chance: Random) -> Sequence[str]:
        return _names(candidates)


class Ordered:
    """Select the first k participants by name: always the same."""

    def select(self, candidates: Sequence[Candidate], k: int, chance: Random) -> Sequence[str]:
        return _names(candidates[:k])


class Uniform:
    """Select k participants, each subset with equal probability."""

    def select(self, candidates: Sequence[Candidate], k: int, chance: Random) -> Sequence[str]:
        return chance.sample(_names(candidates), min(k, len(candidates)))


class RoundRobin:
    """Select the participants that have waited longest.

    A participant that joins, or joins again, waits behind the members.
    """

    def select(self, candidates: Sequence[Candidate], k: int, chance: Random) -> Sequence[str]:
        # Stable: of candidates that have waited equally long, the first by name.
        return _names(sorted(candidates, key=lambda one: one.waits_since)[:k])


@dataclass(frozen=True, slots=True)
class Weighted:
    """Select k participants without replacement, each draw in proportion to the samples of the data
    profiles. A participant without samples is drawn only if the others are too few.

    default_samples: of candidates without a profile.
    Raises ValueError if that is negative.
    Source: Efraimidis & Spirakis 2006, Weighted random sampling with a reservoir, algorithm A: each
    gets the key u^(1/w) with u uniform in (0, 1), and the k largest keys are the sample.
    """

    default_samples: int = 1

    def __post_init__(self) -> None:
        if self.default_samples < 0:
            raise ValueError(f"default_samples must not be negative, got {self.default_samples}")

    def select(self, candidates: Sequence[Candidate], k: int, chance: Random) -> Sequence[str]:
        """Draw k of the candidates at random without replacement, weighted by their samples: those
        with the k largest random keys."""

        def key(candidate: Candidate) -> tuple[bool, float]:
            """The key by which candidates are sorted, the largest first; it takes one random
            number."""
            u = 1.0 - chance.random()  # in (0, 1]
            profile = candidate.profile
            weight = self.default_samples if profile is None else profile.num_samples
            # The logarithm of the key, which is as large in the same order: u^(1/w) itself is 1 for
            # many samples. Those without any come last, in an order that is chance as well.
            return (True, log(u) / weight) if weight > 0 else (False, u)

        keys = {candidate.participant_id: key(candidate) for candidate in candidates}
        return sorted(keys, key=keys.__getitem__, reverse=True)[:k]


# Each is made with its options as keyword arguments, and raises ValueError if one is wrong.
CONTROLLERS: Mapping[str, type[Controller]] = {
    "all": All,
    "ordered": Ordered,
    "random": Uniform,
    "round_robin": RoundRobin,
    "weighted": Weighted,
}


def builtin_controller(name: str, options: Mapping[str, Option]) -> Controller:
    """The controller of the core of this name, made with the options. Raises PluginFailed if
    there is none."""
    make: Callable[..., Controller] | None = CONTROLLERS.get(name)
    if make is None:
        raise PluginFailed(f"no controller of the core is called {name!r}")
    return make(**options)


def select(
    controller: Controller,
    candidates: Sequence[Candidate],
    k: int,
    *,
    seed: int,
    round_: int,
    draw: int,
) -> tuple[str, ...]:
    """Let the controller choose k of the candidates, or all if they are fewer.

    draw: counts the selections within a round, so that a replacement is a fresh draw.
    Raises PluginFailed if it fails, or chooses too few, one twice, or one that is no candidate.
    """
    # Sorted by name: the draw must depend on the members, not on the order in which they joined.
    candidates = sorted(candidates, key=lambda one: one.participant_id)
    chance = Random(f"{seed}:{round_}:{draw}")
    name = type(controller).__name__
    try:
        chosen = tuple(controller.select(candidates, k, chance))
    except Exception as error:
        # A plug-in's code may raise anything; the message must name it.
        raise PluginFailed(
            f"the controller {name} has failed in round {round_}: {type(error).__name__}: {error}"
        ) from error
    known = set(_names(candidates))
    distinct = set(chosen) if all(isinstance(one, str) for one in chosen) else set()
    if not distinct <= known or len(distinct) != len(chosen):
        raise PluginFailed(
            f"the controller {name} has selected, for round {round_}, somebody twice or somebody "
            f"who is no candidate: {_shown(chosen)}"
        )
    if len(chosen) < min(k, len(candidates)):
        # The round would wait for updates that no participant owes.
        raise PluginFailed(
            f"the controller {name} has selected {len(chosen)} participants for round {round_}; "
            f"{k} of {len(candidates)} candidates are wanted"
        )
    return chosen


def _names(candidates: Sequence[Candidate]) -> list[str]:
    return [candidate.participant_id for candidate in candidates]


def _shown(chosen: Sequence[object]) -> str:
    """The first of the names that a controller has answered, as text of bounded length."""
    return ", ".join(repr(one)[:40] for one in chosen[:5]) + (", ..." if len(chosen) > 5 else "")
