"""Update rules: what a push does to the rows of a table.

A rule is a frozen dataclass of numbers. `update` changes a block of rows in place: the same inputs
give the same bits on every machine, since only operations that IEEE 754 rounds exactly are used
(add, multiply, divide, square root). A package adds a rule by an entry point in the group
`xain.parameter_updates`: docs/extending.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from xain_parameters.errors import Invalid
from xain_parameters.specs import Plugin

GROUP = "xain.parameter_updates"

Array = NDArray[Any]
# The kinds of state beside the values: as "values", (num_rows, dim) of the table's dtype; a
# "count", (num_rows,) uint32. All state of a new row is zero.
Kind = Literal["values", "count"]


@runtime_checkable
class Rule(Protocol):
    """An update rule.

    name: the rule's name in Plugin.name. state: kinds of the arrays that the rule keeps beside the
        values.
    """

    name: ClassVar[str]
    state: ClassVar[Mapping[str, Kind]]

    def update(self, fields: Mapping[str, Array], pushed: Array) -> None:
        """Apply pushed, (num_rows, dim), to a block of rows, in place.

        fields: "values" (num_rows, dim) and the arrays of `state`. A row must not depend on the
        others of the block. Values are changed by one operation and after all else, since other
        threads read them meanwhile. pushed must not be changed.
        """


@dataclass(frozen=True, slots=True)
class Add:
    """w += v, the default."""

    name: ClassVar[str] = "add"
    state: ClassVar[Mapping[str, Kind]] = {}

    def update(self, fields: Mapping[str, Array], pushed: Array) -> None:
        values = fields["values"]
        values += pushed


@dataclass(frozen=True, slots=True)
class Assign:
    """w = v."""

    name: ClassVar[str] = "assign"
    state: ClassVar[Mapping[str, Kind]] = {}

    def update(self, fields: Mapping[str, Array], pushed: Array) -> None:
        fields["values"][...] = pushed


@dataclass(frozen=True, slots=True)
class SGD:
    """w -= learning_rate g."""

    learning_rate: float
    name: ClassVar[str] = "sgd"
    state: ClassVar[Mapping[str, Kind]] = {}

    def __post_init__(self) -> None:
        _check_positive(self, "learning_rate")

    def update(self, fields: Mapping[str, Array], pushed: Array) -> None:
        values = fields["values"]
        values -= pushed * self.learning_rate


@dataclass(frozen=True, slots=True)
class Momentum:
    """velocity = momentum velocity + g; w -= learning_rate velocity.

    Source: Polyak 1964, in the form of Sutskever et al. 2013.
    """

    learning_rate: float
    momentum: float = 0.9
    name: ClassVar[str] = "momentum"
    state: ClassVar[Mapping[str, Kind]] = {"velocity": "values"}

    def __post_init__(self) -> None:
        _check_positive(self, "learning_rate")
        _check_fraction(self, "momentum")

    def update(self, fields: Mapping[str, Array], pushed: Array) -> None:
        values, velocity = fields["values"], fields["velocity"]
        velocity *= self.momentum
        velocity += pushed
        values -= velocity * self.learning_rate


@dataclass(frozen=True, slots=True)
class Adagrad:
    """squares += g²; w -= learning_rate g / (√squares + epsilon).

    Source: Duchi, Hazan and Singer 2011, the diagonal form.
    """

    learning_rate: float
    epsilon: float = 1e-7
    name: ClassVar[str] = "adagrad"
    state: ClassVar[Mapping[str, Kind]] = {"squares": "values"}

    def __post_init__(self) -> None:
        _check_positive(self, "learning_rate", "epsilon")

    def update(self, fields: Mapping[str, Array], pushed: Array) -> None:
        values, squares = fields["values"], fields["squares"]
        squares += pushed * pushed
        scale = np.sqrt(squares)
        scale += self.epsilon
        step = pushed * self.learning_rate
        step /= scale
        values -= step


@dataclass(frozen=True, slots=True)
class Adam:
    """Source: Kingma and Ba 2015, Algorithm 1. Each row counts its own steps t, so that a row that
    is rarely pushed has the bias correction of its own pushes."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    name: ClassVar[str] = "adam"
    state: ClassVar[Mapping[str, Kind]] = {"mean": "values", "squares": "values", "steps": "count"}

    def __post_init__(self) -> None:
        _check_positive(self, "learning_rate", "epsilon")
        _check_fraction(self, "beta1", "beta2")
        for beta in (self.beta1, self.beta2):
            if beta > MAX_BETA:
                raise Invalid(f"adam: beta {beta} is above {MAX_BETA}")

    def update(self, fields: Mapping[str, Array], pushed: Array) -> None:
        values, mean, squares = fields["values"], fields["mean"], fields["squares"]
        steps = fields["steps"]  # t
        steps += np.uint32(1)
        mean *= self.beta1
        mean += pushed * (1 - self.beta1)
        squares *= self.beta2
        squares += pushed * pushed * (1 - self.beta2)
        root = np.sqrt(_correction(steps, self.beta2))  # √(1 - β₂ᵗ)
        rate = self.learning_rate * root / _correction(steps, self.beta1)
        dtype = values.dtype
        scale = np.sqrt(squares)
        scale += (self.epsilon * root).astype(dtype)[:, None]
        step = mean * rate.astype(dtype)[:, None]
        step /= scale
        values -= step


@dataclass(frozen=True, slots=True)
class FTRL:
    """FTRL-proximal: logistic regression with many weights that are exactly zero.

    Source: McMahan et al. 2013, Algorithm 1. learning_rate: α. The weight of a row is a function of
    its state as soon as it is pushed, so a table under FTRL begins with zeros.
    """

    learning_rate: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    name: ClassVar[str] = "ftrl"
    state: ClassVar[Mapping[str, Kind]] = {"z": "values", "n": "values"}

    def __post_init__(self) -> None:
        _check_positive(self, "learning_rate")
        for option in ("beta", "l1", "l2"):
            if not 0 <= getattr(self, option) < np.inf:
                raise Invalid(f"ftrl: {option} must not be negative: {getattr(self, option)}")
        if self.beta == self.l2 == 0:
            raise Invalid("ftrl: beta and l2 must not both be zero")

    def update(self, fields: Mapping[str, Array], pushed: Array) -> None:
        values, z, n = fields["values"], fields["z"], fields["n"]
        before = np.sqrt(n)
        n += pushed * pushed
        after = np.sqrt(n)
        sigma = after - before
        sigma /= self.learning_rate
        sigma *= values
        z += pushed
        z -= sigma
        after += self.beta
        after /= self.learning_rate
        after += self.l2
        # -(z - sign(z) l1), and 0 where |z| <= l1
        step = np.clip(z, -self.l1, self.l1)
        step -= z
        np.divide(step, after, out=values)


MAX_BETA = 0.99999
RULES: Mapping[str, type[Rule]] = {
    rule.name: rule for rule in (Add, Assign, SGD, Momentum, Adagrad, Adam, FTRL)
}


def made(declared: Plugin) -> Rule:
    """The rule that a table declares. Raises Invalid if there is none of that name, or if it does
    not take these options."""
    kind: Any = RULES.get(declared.name)
    if kind is None and declared.name in _installed():
        try:
            kind = _installed()[declared.name].load()
        except Exception as error:  # another's code runs here, and may raise anything
            raise Invalid(f"update rule {declared.name}: cannot be imported: {error}") from error
    if kind is None:
        names = ", ".join(sorted({*RULES, *_installed()}))
        raise Invalid(f"no update rule {declared.name!r}; there are {names}")
    rule = declared.made(kind, "update rule")
    if not isinstance(rule, Rule):
        raise Invalid(f"update rule {declared.name}: the plug-in has no name, state and update")
    return rule


@cache
def _installed() -> Mapping[str, EntryPoint]:
    """Plug-ins by name; none is imported before a table declares it."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _correction(steps: NDArray[np.uint32], beta: float) -> NDArray[np.float64]:
    """1 - betaᵗ for each t of steps, (num_rows,)."""
    table = _corrections(beta)
    correction: NDArray[np.float64] = table.take(steps, mode="clip")
    return correction


@cache
def _corrections(beta: float) -> NDArray[np.float64]:
    """1 - betaᵗ for t = 0, 1, ... until it is 1: products, since powers differ between machines."""
    length = 2 if beta == 0 else int(-40 / np.log(beta)) + 2
    factors = np.full(length, beta)
    factors[0] = 1.0
    table: NDArray[np.float64] = 1.0 - np.multiply.accumulate(factors)
    table[-1] = 1.0
    return table


def _check_positive(rule: Rule, *options: str) -> None:
    for option in options:
        if not 0 < getattr(rule, option) < np.inf:
            raise Invalid(f"{rule.name}: {option} must be positive: {getattr(rule, option)}")


def _check_fraction(rule: Rule, *options: str) -> None:
    for option in options:
        if not 0 <= getattr(rule, option) < 1:
            raise Invalid(
                f"{rule.name}: {option} must be from 0 to below 1: {getattr(rule, option)}"
            )
