"""First values of rows. They depend on (seed, key) only, so that a row is the same wherever and
whenever it is made, whichever ranges the table is cut into.

Random values come from a counter, not from a stream: number `column` of a row is SplitMix64's
output number `column` after the state mixed(key xor mixed(seed)) (Steele, Lea and Flood 2014). All
arithmetic after it is rounded exactly by IEEE 754 (no log, sin or pow of the machine's library), so
that it gives the same bits on every machine.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from xain_parameters.errors import Invalid
from xain_parameters.keys import Keys, mixed
from xain_parameters.specs import Plugin

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's step
LANES = np.uint64(0x0000FFFF0000FFFF)
BLOCK_VALUES = 1 << 14  # computed at once, so that temporary arrays stay in the processor's cache

Array = NDArray[Any]
Floats = NDArray[np.float64]


class Initialiser(ABC):
    """name: as in Plugin.name."""

    name: ClassVar[str]

    @property
    def is_zero(self) -> bool:
        """Whether all rows begin as zeros."""
        return False

    @abstractmethod
    def rows(self, keys: Keys, dim: int, dtype: np.dtype[Any]) -> Array:
        """The first values of the rows of keys, (n, dim)."""


@dataclass(frozen=True)
class Constant(Initialiser):
    value: float
    name: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        if not np.isfinite(self.value):
            raise Invalid(f"constant: the value must be finite: {self.value}")

    @property
    def is_zero(self) -> bool:
        return self.value == 0

    def rows(self, keys: Keys, dim: int, dtype: np.dtype[Any]) -> Array:
        return np.full((len(keys), dim), self.value, dtype)


@dataclass(frozen=True)
class Zeros(Initialiser):
    name: ClassVar[str] = "zeros"

    @property
    def is_zero(self) -> bool:
        return True

    def rows(self, keys: Keys, dim: int, dtype: np.dtype[Any]) -> Array:
        return np.zeros((len(keys), dim), dtype)


@dataclass(frozen=True)
class _Random(Initialiser):
    """num_words: of 64 random bits, for each value."""

    num_words: ClassVar[int]
    scale: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.scale < np.inf:
            raise Invalid(f"{self.name}: scale must not be negative: {self.scale}")
        if isinstance(self.seed, float) or not 0 <= self.seed < 1 << 64:
            raise Invalid(f"{self.name}: seed must be a number from 0 to 2**64 - 1: {self.seed}")

    @abstractmethod
    def _unit_values(self, bits: NDArray[np.uint64], dim: int) -> Floats:
        """Values of scale 1, (n, dim), from random bits, (n, num_words * dim)."""

    def rows(self, keys: Keys, dim: int, dtype: np.dtype[Any]) -> Array:
        out = np.empty((len(keys), dim), dtype)
        size = max(1, BLOCK_VALUES // (self.num_words * dim))
        for start in range(0, len(keys), size):
            bits = random_bits(self.seed, keys[start : start + size], self.num_words * dim)
            values = self._unit_values(bits, dim)
            values *= self.scale
            out[start : start + size] = values
        return out


@dataclass(frozen=True)
class Uniform(_Random):
    """Uniform in [-scale, scale)."""

    name: ClassVar[str] = "uniform"
    num_words: ClassVar[int] = 1

    def _unit_values(self, bits: NDArray[np.uint64], dim: int) -> Floats:
        values = (bits >> np.uint64(11)).astype(np.float64)
        values *= 2.0**-52
        values -= 1.0
        return values


@dataclass(frozen=True)
class Normal(_Random):
    """Normal with mean 0 and standard deviation scale, as the sum of twelve uniform values, whose
    variances add up to 1. So no value is more than 6 deviations from the mean.

    Source: Irwin 1927 and Hall 1927, the distribution of the sum.
    """

    name: ClassVar[str] = "normal"
    num_words: ClassVar[int] = 3  # four uniform values of 16 bits each

    def _unit_values(self, bits: NDArray[np.uint64], dim: int) -> Floats:
        # Two sums in each word, of 32 bits.
        bits = (bits & LANES) + ((bits >> np.uint64(16)) & LANES)
        sums = bits[:, :dim] + bits[:, dim : 2 * dim] + bits[:, 2 * dim :]
        values = ((sums >> np.uint64(32)) + (sums & np.uint64(0xFFFFFFFF))).astype(np.float64)
        values += 6.0
        values *= 2.0**-16
        values -= 6.0
        return values


INITIALISERS: dict[str, type[Initialiser]] = {
    each.name: each for each in (Zeros, Constant, Uniform, Normal)
}


def made(declared: Plugin) -> Initialiser:
    """The initialiser that a table declares. Raises Invalid if there is none such."""
    kind: Any = INITIALISERS.get(declared.name)
    if kind is None:
        names = ", ".join(sorted(INITIALISERS))
        raise Invalid(f"no initialiser {declared.name!r}; there are {names}")
    initialiser: Initialiser = declared.made(kind, "initialiser")
    return initialiser


def random_bits(seed: int, keys: Keys, dim: int) -> NDArray[np.uint64]:
    """64 random bits for each column of each row, (n, dim)."""
    start = mixed(np.array([seed], np.uint64))
    states = mixed(keys ^ start)
    columns = np.arange(1, dim + 1, dtype=np.uint64) * GAMMA
    return mixed(states[:, None] + columns)
