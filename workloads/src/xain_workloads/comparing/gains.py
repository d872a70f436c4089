"""The gain of a site from taking part: the global model beside a local one, on the same rows.

A local model is what the site would have without the others; see local.py. Both are measured on
the same rows, so that the interval of their difference is that of a mean of paired differences,
which is much narrower than the intervals of the two figures.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum, inf

from xain_workloads.measures.figures import LOSSES, OF_WEIGHED_CLASSES, Figure, mean_figure
from xain_workloads.measures.tallies import Tallies, are_sums

# Figures by which two models are compared, in words.
COMPARED = {
    "log_loss": "log loss",
    "mse": "mean squared error",
    "accuracy": "accuracy",
    "auc": "AUC",
    "balanced_accuracy": "balanced accuracy",
}
MAX_DIFFERENCES = 2  # the last model and the best one before it


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a local model.

    passes: over the rows, as the session has made; iterations of boosted trees. limit_s: seconds.
    preprocessing: JSON of PreprocessingOptions, those of the session; "": the defaults.
    """

    passes: int
    limit_s: float
    preprocessing: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """Sums over held-out rows of the loss of the local model less that of a global model; see
    row_losses().

    round: number of that model. squares: of the squares of the rows' differences.
    num_samples: rows that the sums are of; 0 as a site sends it: all that the local model is
        measured on.
    """

    round: int
    total: float
    squares: float
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model of a site's own rows alone, measured on its held-out rows; or those of several sites.

    tallies: as the site sends them; None without a model, for the reason in `why_not`.
    passes: that were made. differences: to global models.
    figures, num_samples: that follow from tallies, and the rows that they are of; empty and 0 as
        the site sends it.
    """

    tallies: Tallies | None = None
    passes: int = 0
    why_not: str = ""
    differences: tuple[Difference, ...] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    num_samples: int = 0


def compared(*, weighs_classes: bool) -> tuple[str, ...]:
    """Figures by which two models are compared: the first that both have."""
    return OF_WEIGHED_CLASSES if weighs_classes else (*LOSSES, "accuracy")


def added(sites: Iterable[tuple[int, Iterable[Difference]]]) -> tuple[Difference, ...]:
    """The differences of all sites together, by model. sites: (held-out rows, differences); a site
    lacks those to a model that it could not fetch, or that its rows have no figure of."""
    by_round: dict[int, list[tuple[int, Difference]]] = {}
    for num_samples, differences in sites:
        for one in differences:
            by_round.setdefault(one.round, []).append((num_samples, one))
    return tuple(
        Difference(
            number,
            fsum(d.total for _, d in known),
            fsum(d.squares for _, d in known),
            sum(num_samples for num_samples, _ in known),
        )
        for number, known in sorted(by_round.items())
    )


def check(local: LocalModel) -> None:
    """Raise ValueError unless the differences from the network can be those of one site."""
    if len(local.differences) > MAX_DIFFERENCES:
        raise ValueError(f"the local model has {len(local.differences)} differences")
    for one in local.differences:
        if one.round < 0 or not are_sums([one.total], [one.squares]):
            raise ValueError(f"a difference of the local model is {one}")


@dataclass(frozen=True, slots=True)
class Gain:
    """One figure of the global and of the local model on the same rows.

    metric: of COMPARED. difference: by how much the global model is better, with its 95 % interval;
    None if it is not known.
    """

    metric: str
    of_all: Figure
    local: Figure
    difference: Figure | None = None

    @property
    def is_gain(self) -> bool:
        """Whether the global model is the better one beyond chance."""
        return self._direction > 0

    @property
    def is_loss(self) -> bool:
        """Whether the local model is the better one beyond chance."""
        return self._direction < 0

    @property
    def _direction(self) -> int:
        """1 if the global model is better beyond chance, -1 if the local one is, else 0: by the
        interval of the difference, or, without one, by intervals that do not overlap."""
        if self.difference is not None:
            return direction(self.difference)
        less, more = sorted((self.of_all, self.local), key=lambda one: one.value)
        if less.high is None or more.low is None or less.high >= more.low:
            return 0
        better = less if self.metric in LOSSES else more
        return 1 if better is self.of_all else -1

    def __str__(self) -> str:
        of_all, local = text_of(self.of_all), text_of(self.local)
        text = f"{COMPARED[self.metric]} {of_all} with the model of all sites, {local} with its own"
        if self.difference is not None:
            text += f", a difference of {text_of(self.difference)}"
        return text

    @property
    def sentence(self) -> str:
        """The comparison in plain words, for the site."""
        if self.is_loss:
            what = "A model of this site's rows alone is better here than that of all sites"
        elif self.is_gain:
            what = "The model of all sites is better here than one of this site's rows alone"
        else:
            what = (
                "On these rows the model of all sites and one of this site's rows alone are equally"
                " good, as far as can be told"
            )
        return f"{what}: {self}"


def gain_of(
    of_all: Mapping[str, Figure], local: LocalModel, number: int, *, weighs_classes: bool = False
) -> Gain | None:
    """The comparison of two models; None if they have no figure of compared() in common.

    of_all: figures of the global model of this number, on the same rows. local: with figures.
    """
    for name in compared(weighs_classes=weighs_classes):
        if name in of_all and name in local.figures:
            known = (one for one in local.differences if one.round == number)
            difference = next(known, None)
            return Gain(
                name,
                of_all[name],
                local.figures[name],
                None if difference is None else difference_of(difference, local.num_samples),
            )
    return None


def difference_of(sums: Difference, num_samples: int) -> Figure:
    """The mean difference, with its 95 % interval. num_samples: rows, if the sums have none."""
    return mean_figure(sums.total, sums.squares, sums.num_samples or num_samples, least=-inf)


def direction(difference: Figure) -> int:
    """1 or -1 if the interval of a difference lies above or below 0, else 0."""
    low, high = difference.low, difference.high
    if low is None or high is None:
        return 0
    return int(low > 0) - int(high < 0)


def text_of(figure: Figure) -> str:
    """A figure with its interval."""
    if figure.low is None or figure.high is None:
        return f"{figure.value:.3g}"
    return f"{figure.value:.3g} ({figure.low:.3g} to {figure.high:.3g})"
