"""Controllers: who trains next.

A controller is a pure function of the candidates, how many are wanted, and a generator seeded by
(session seed, round, draw), so the same session always selects the same participants. What it
answered is written into the event; a replay never asks again.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

Controller = Callable[[Sequence[str], int, Random], Sequence[str]]


def select_all(candidates: Sequence[str], k: int, chance: Random) -> Sequence[str]:
    """Everybody, whatever the fraction says."""
    return tuple(candidates)


def select_ordered(candidates: Sequence[str], k: int, chance: Random) -> Sequence[str]:
    """The first k by name: always the same ones."""
    return tuple(sorted(candidates)[:k])


def select_random(candidates: Sequence[str], k: int, chance: Random) -> Sequence[str]:
    """k of them, each subset equally likely."""
    # Sorted first: the draw must depend on who is here, not on who came first.
    return tuple(chance.sample(sorted(candidates), min(k, len(candidates))))


CONTROLLERS: Mapping[str, Controller] = {
    "all": select_all,
    "ordered": select_ordered,
    "random": select_random,
}


def select(
    controller: str, candidates: Sequence[str], k: int, *, seed: int, round_: int, draw: int
) -> tuple[str, ...]:
    """Let the named controller choose up to k of the candidates.

    draw: counts the selections within a round, so that a replacement is a fresh draw.
    """
    chance = Random(f"{seed}:{round_}:{draw}")
    return tuple(CONTROLLERS[controller](candidates, k, chance))
