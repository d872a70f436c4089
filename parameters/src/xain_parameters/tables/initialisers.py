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
    scale: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.scale < np.inf:
            raise Invalid(f"{self.name}: scale must not be negative: {self.scale}")
        if isinstance(self.seed, float) or not 0 <= self.seed < 1 << 64:
            raise Invalid(f"{self.name}: seed must be a number from 0 to 2**64 - 1: {self.seed}")

    @abstractmethod
    def _values(self, bits: NDArray[np.uint64]) -> Floats:
        """Values of scale 1 from 64 random bits each."""

    def rows(self, keys: Keys, dim: int, dtype: np.dtype[Any]) -> Array:
        out = np.empty((len(keys), dim), dtype)
        size = max(1, BLOCK_VALUES // dim)
        for start in range(0, len(keys), size):
            values = self._values(random_bits(self.seed, keys[start : start + size], dim))
            values *= self.scale
            out[start : start + size] = values
        return out


@dataclass(frozen=True)
class Uniform(_Random):
    """Uniform in [-scale, scale)."""

    name: ClassVar[str] = "uniform"

    def _values(self, bits: NDArray[np.uint64]) -> Floats:
        values = (bits >> np.uint64(11)).astype(np.float64)
        values *= 2.0**-52
        values -= 1.0
        return values


@dataclass(frozen=True)
class Normal(_Random):
    """Normal with mean 0 and standard deviation scale, by inversion."""

    name: ClassVar[str] = "normal"

    def _values(self, bits: NDArray[np.uint64]) -> Floats:
        p = (bits >> np.uint64(12)).astype(np.float64)
        p += 0.5
        p *= 2.0**-52  # in (0, 1), without the ends
        return normal_quantile(p)


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


def normal_quantile(p: Floats) -> Floats:
    """The inverse of the normal distribution function, for p in (0, 1) that is a multiple of 2⁻⁵³.

    Source: Wichura 1988, algorithm AS 241 (PPND16); relative accuracy 1e-16.
    """
    q = p - 0.5
    r = 0.180625 - q * q
    out = _polynomial(r, _A)
    out /= _polynomial(r, _B)
    out *= q
    tail = np.flatnonzero(r < 0)
    if len(tail):
        outer = np.ravel(p)[tail]
        side = np.minimum(outer, 1.0 - outer)
        root = np.sqrt(-_log(side))
        near = root - 1.6
        far = root - 5.0
        size = np.where(
            root <= 5.0,
            _polynomial(near, _C) / _polynomial(near, _D),
            _polynomial(far, _E) / _polynomial(far, _F),
        )
        out.reshape(-1)[tail] = np.where(outer < 0.5, -size, size)
    return out


def _log(x: Floats) -> Floats:
    """The natural logarithm of positive numbers, from exactly rounded operations only."""
    fraction, exponent = np.frexp(x)
    is_low = fraction < 0.7071067811865476
    fraction = np.where(is_low, fraction * 2.0, fraction)
    power = exponent - is_low
    s = (fraction - 1.0) / (fraction + 1.0)
    series = _polynomial(s * s, [1.0 / (2 * k + 1) for k in range(12)])
    log: Floats = 2.0 * s * series + power * 0.6931471805599453
    return log


def _polynomial(x: Floats, coefficients: list[float]) -> Floats:
    """coefficients: of x⁰, x¹, ..."""
    out = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        out *= x
        out += coefficient
    return out


# fmt: off
_A = [3.3871328727963666080e+0, 1.3314166789178437745e+2, 1.9715909503065514427e+3,
      1.3731693765509461125e+4, 4.5921953931549871457e+4, 6.7265770927008700853e+4,
      3.3430575583588128105e+4, 2.5090809287301226727e+3]
_B = [1.0, 4.2313330701600911252e+1, 6.8718700749205790830e+2, 5.3941960214247511077e+3,
      2.1213794301586595867e+4, 3.9307895800092710610e+4, 2.8729085735721942674e+4,
      5.2264952788528545610e+3]
_C = [1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
      3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
      2.27238449892691845833e-2, 7.74545014278341407640e-4]
_D = [1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
      1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4,
      1.05075007164441684324e-9]
_E = [6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
      2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
      2.71155556874348757815e-5, 2.01033439929228813265e-7]
_F = [1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
      7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7,
      2.04426310338993978564e-15]
# fmt: on
