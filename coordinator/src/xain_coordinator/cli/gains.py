"""Gain of each site as text and CSV: global, local and central models on held-out rows."""

import csv
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xain_coordinator.inspection.client import clean
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.inspection_pb2 import GetStatusResponse, RoundStatus
from xain_workloads.comparing.gains import (
    COMPARED,
    Difference,
    Gain,
    LocalModel,
    compared,
    difference_of,
    direction,
    gain_of,
    text_of,
)
from xain_workloads.exported.lineage import figures_of
from xain_workloads.measures.figures import LOSSES, Figure

_MAX_NAMES = 3  # of sites in a line
BETTER, EQUAL, WORSE = READINGS = (
    "model of all sites is better",
    "no difference that can be told",
    "its own model is better",
)
# The site whose rows a line is of, as the CSV has it.
ALL, SITE, COORDINATOR = "all sites", "site", "coordinator"
COLUMNS = (
    *("rows of", "site", "rows", "passes", "model", "metric"),
    *(f"{of}{end}" for of in ("global", "own", "difference") for end in ("", " low", " high")),
    "reading",
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
        """Text on the rows that the difference is of; "" if it is of all rows."""
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
    name. central: the central model, on the coordinator's rows; None if there is none. file: that
    has it; "" if none has."""

    number: int
    metric: str
    together: Compared | None
    sites: Mapping[str, Compared]
    central: Compared | None = None
    file: str = ""

    @property
    def lines(self) -> Iterator[tuple[str, str, Compared]]:
        """The kind of rows (ALL, SITE or COORDINATOR), the name of a site, and what is compared."""
        if self.together is not None:
            yield ALL, "", self.together
        for name, one in sorted(self.sites.items()):
            yield SITE, name, one
        if self.central is not None:
            yield COORDINATOR, "", self.central


def gains(status: GetStatusResponse, rounds: Iterable[RoundStatus]) -> Gains | None:
    """The local models and the central one beside the best model, or, if none is the best, beside
    the last one; None if there are none."""
    known = {one.round: one for one in rounds}
    with_local = [one for one in known.values() if _has_local(one)]
    has_central = status.HasField("central")
    if not with_local and not has_central:
        return None
    record = with_local[-1] if with_local else RoundStatus(round=status.central.round)
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
    central = None
    if has_central:
        of_own = status.central.evaluation
        central = _compared(of_own, of_own, number, weighs)
    every = (*sites.values(), *(one for one in (together, central) if one is not None))
    names = {name for one in every for name in one.local.figures}
    metric = next((name for name in compared(weighs_classes=weighs) if name in names), "")
    return Gains(number, metric, together, sites, central, status.central.file)


def _has_local(one: RoundStatus) -> bool:
    """Whether a round's record has a local model, of all sites together or of one."""
    of = (one.evaluation, *(site.evaluation for site in one.sites))
    return any(each.HasField("local") for each in of)


def _compared(
    evaluation: pb.Evaluation, measured: pb.Evaluation, number: int, weighs_classes: bool
) -> Compared:
    """A local model beside the global one. evaluation: with the local model. measured: that of the
    global model of this number."""
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


def show(found: Gains, console: Console) -> None:
    """Print a line for all sites, each site and the coordinator, for people."""
    metric = COMPARED.get(found.metric, "")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("rows of", "rows", f"{metric}, model {found.number}", "its own alone"):
        is_text = heading == "rows of"
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    table.add_column("difference", justify="right")
    table.add_column("what it says", overflow="fold")
    for rows, site, one in found.lines:
        figures = (one.of_all.get(found.metric), one.local.figures.get(found.metric))
        cells = ("" if figure is None else text_of(figure) for figure in (*figures, one.difference))
        name = Text(clean(site) or rows)
        table.add_row(name, f"{one.local.num_samples:,}", *cells, clean(one.reading))
    console.print(table)
    if command := measured_at_sites(found):
        console.print(Text(f"the central model at the sites: {command}"), soft_wrap=True)


def to_csv(found: Gains) -> str:
    """A line for each figure of all sites together, of each site and of the coordinator. The metric
    that is compared comes first, and has the difference."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for rows, site, one in found.lines:
        known = {name for name in (*one.of_all, *one.local.figures) if name != found.metric}
        for name in (found.metric, *sorted(known)):
            is_compared = name == found.metric
            pair = one.of_all.get(name), one.local.figures.get(name)
            shown = (*pair, one.difference if is_compared else None)
            cells = [
                cell
                for figure in shown
                for cell in (
                    ("", "", "") if figure is None else (figure.value, figure.low, figure.high)
                )
            ]
            reading = one.reading if is_compared else ""
            about = one.local.num_samples, one.local.passes, found.number
            writer.writerow([rows, site, *about, name, *cells, reading])
    return text.getvalue()


def central_sentence(found: Gains) -> str:
    """The central model beside the global one; a line of a status. Empty without one."""
    central = found.central
    if central is None:
        return ""
    rows = f"{central.local.num_samples:,} held-out rows of the coordinator"
    if central.difference is None:
        why = clean(central.local.why_not) or "too few rows of a class"
        return f"not compared with model {found.number}: {why}"
    than = "with the central model"
    told = f"{_difference(found.metric, central.difference, found.number, than)} on {rows}"
    return f"{told}; {clean(found.file)}" if found.file else told


def measured_at_sites(found: Gains) -> str:
    """The command that measures the central model at the sites; empty without its file."""
    if not found.file:
        return ""
    sites = max(1, len(found.sites))
    file = shlex.quote(clean(found.file))
    return f"xain-coordinator evaluate --model {file} --min-participants {sites}"


def _difference(name: str, difference: Figure, number: int, than: str = "with local models") -> str:
    """A difference as text: how much less or more of a metric the global model has than others."""
    signs = -1 if difference.value < 0 else 1
    limits = [end for end in (difference.low, difference.high) if end is not None]
    interval = " to ".join(f"{end:.3g}" for end in sorted(signs * end for end in limits))
    is_less = (signs > 0) == (name in LOSSES)
    return (
        f"{COMPARED[name]} {signs * difference.value:.3g}{f' ({interval})' if interval else ''} "
        f"{'less' if is_less else 'more'} with model {number} than {than}"
    )
