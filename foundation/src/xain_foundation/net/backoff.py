"""Back-off: waits between tries, each twice as long as the one before."""

from random import Random


class Backoff:
    """Lengths of the waits, from first_s up to longest_s.

    chance: draws each wait between 0 and its length, so that many clients do not come back at once
        (full jitter: Brooker 2015, "Exponential Backoff And Jitter", AWS Architecture Blog). None:
        the waits have their full length.
    """

    def __init__(self, first_s: float, longest_s: float, chance: Random | None = None) -> None:
        self.longest_s = longest_s
        self._first_s = first_s
        self._chance = chance
        self._num_waits = 0

    @property
    def has_failed(self) -> bool:
        """Whether there was a wait since reset()."""
        return self._num_waits > 0

    def next_s(self) -> float:
        """Return the next wait in seconds, doubled up to longest_s; with `chance`, any up to it."""
        length_s = min(self.longest_s, self._first_s * 2.0 ** min(self._num_waits, 64))
        self._num_waits += 1
        return length_s if self._chance is None else self._chance.uniform(0.0, length_s)

    def reset(self) -> None:
        """Begin anew, after a try that worked."""
        self._num_waits = 0
