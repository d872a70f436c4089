"""Gain of each site as text: global and local models on held-out rows."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from xain_coordinator.server.inspection_client import clean
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.inspection_pb2 import GetStatusResponse, RoundStatus
from xain_workloads.exported.lineage import figures_of
from xain_workloads.figures import LOSSES, Figure
from xain_workloads.gains import (
    COMPARED,
    Difference,
    Gain,
    LocalModel,
    compared,
    difference_of,
    direction,
    gain_of,
)

_MAX_NAMES = 3  # of sites in a line
BETTER, EQUAL, WORSE = READINGS = (
    "model of all sites is better",
    "no difference that can be told",
    "its own model is better",
)


@dataclass(frozen=True, slots=True)
class Compared:
    """A local model, and the global one on the same rows.

    gain: None if the figures of the global model are not known here. difference: by how much it is
    better; None if it is not known. of_all: figures of the global model. num_compared: rows that
    the difference is of.
    """

    local: LocalModel
    gain: Gain | None
    difference: Figure | None
    of_all: Mapping[str, Figure]
    num_compared: int = 0

    @property
    def rows_of_difference(self) -> str:
        """The rows of the difference, if they are not all: sites may lack it."""
        if self.difference is None or self.num_compared == self.local.num_samples:
            return ""
        return f"on {self.num_compared:,} of {self.local.num_samples:,} rows"

    @property
    def reading(self) -> str:
        """One of READINGS, or why there is no local model; empty if nothing can be said."""
        if self.local.why_not:
            return self.local.why_not
        if self.gain is not None:
            return BETTER if self.gain.is_gain else WORSE if self.gain.is_loss else EQUAL
        if self.difference is None:
            return ""
        return (EQUAL, BETTER, WORSE)[direction(self.difference)]


@dataclass(frozen=True, slots=True)
class Gains:
    """number: of the global model. metric: by which models are compared; "" without figures.
    together: all rows, each with the local model of its site; None if no site has one. sites: by
    name."""

    number: int
    metric: str
    together: Compared | None
    sites: Mapping[str, Compared]


def gains(status: GetStatusResponse, rounds: Iterable[RoundStatus]) -> Gains | None:
    """The local models beside the best model, or, if none is the best, beside the last one; None if
    there are no local models."""
    known = {one.round: one for one in rounds}
    with_local = [one for one in known.values() if _has_local(one)]
    if not with_local:
        return None
    record = with_local[-1]
    number = status.best_round if status.HasField("best_round") else record.round
    measured = known.get(number, RoundStatus())
    of_sites = {site.participant_id: site.evaluation for site in measured.sites}
    weighs = status.weighs_classes
    sites = {
        site.participant_id: _compared(
            site.evaluation, of_sites.get(site.participant_id, pb.Evaluation()), number, weighs
        )
        for site in record.sites
        if site.evaluation.HasField("local")
    }
    together = None
    if record.evaluation.local.figures:
        together = _compared(record.evaluation, measured.evaluation, number, weighs)
    every = (*sites.values(), *(() if together is None else (together,)))
    names = {name for one in every for name in one.local.figures}
    metric = next((name for name in compared(weighs_classes=weighs) if name in names), "")
    return Gains(number, metric, together, sites)


def _has_local(one: RoundStatus) -> bool:
    of = (one.evaluation, *(site.evaluation for site in one.sites))
    return any(each.HasField("local") for each in of)


def _compared(
    evaluation: pb.Evaluation, measured: pb.Evaluation, number: int, weighs_classes: bool
) -> Compared:
    """evaluation: with the local model. measured: of the global model of this number."""
    message = evaluation.local
    local = LocalModel(
        passes=message.passes,
        why_not=message.why_not,
        differences=tuple(
            Difference(d.round, d.total, d.squares, d.num_samples) for d in message.differences
        ),
        figures=figures_of(message.figures),
        num_samples=message.num_samples,
    )
    sums = next((one for one in local.differences if one.round == number), None)
    difference = None if sums is None else difference_of(sums, local.num_samples)
    # Sites without a local model are in the figures of all rows alone.
    is_of_same_rows = measured.num_samples == local.num_samples
    of_all = figures_of(measured.figures) if is_of_same_rows else {}
    gain = gain_of(of_all, local, number, weighs_classes=weighs_classes)
    num_compared = 0 if sums is None else sums.num_samples or local.num_samples
    return Compared(local, gain, difference, of_all, num_compared)


def sentence(found: Gains) -> str:
    """The gain of all rows together, and how many sites gain; a line of a status."""
    told = []
    if found.together is not None and found.together.difference is not None:
        line = _difference(found.metric, found.together.difference, found.number)
        told.append(f"{line} {found.together.rows_of_difference}".rstrip())
    counted = Counter(one.reading for one in found.sites.values())
    at = [
        f"{what} at {counted[reading]} of {len(found.sites)} sites"
        for reading, what in ((BETTER, "better"), (WORSE, "worse"), (EQUAL, EQUAL))
        if counted[reading]
    ]
    told += [", ".join(at)] if at else []
    if lost := sorted(name for name, one in found.sites.items() if one.reading == WORSE):
        others = " and others" if len(lost) > _MAX_NAMES else ""
        told.append(
            f"its own model is better at {', '.join(map(clean, lost[:_MAX_NAMES]))}{others}"
        )
    without = sorted(name for name, one in found.sites.items() if one.local.why_not)
    told += [f"{clean(n)}: {clean(found.sites[n].local.why_not)}" for n in without[:_MAX_NAMES]]
    return "; ".join(told)


def _difference(name: str, difference: Figure, number: int) -> str:
    """Difference in a metric between the global model and the local ones."""
    signs = -1 if difference.value < 0 else 1
    limits = [end for end in (difference.low, difference.high) if end is not None]
    interval = " to ".join(f"{end:.3g}" for end in sorted(signs * end for end in limits))
    is_less = (signs > 0) == (name in LOSSES)
    return (
        f"{COMPARED[name]} {signs * difference.value:.3g}{f' ({interval})' if interval else ''} "
        f"{'less' if is_less else 'more'} with model {number} than with local models"
    )
