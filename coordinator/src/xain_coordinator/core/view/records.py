"""The record of a round, for operators: who was selected, who counted and why others did not, and
what was measured."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xain_coordinator.core.parts.evaluation import (
    Spread,
    combined,
    mean_metrics,
    pooled,
    spreads,
    together,
)
from xain_coordinator.core.view.accounts import NOT_WAITED_FOR, failure_reason
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import Evaluation, Tallies, Task
from xain_foundation.names import brief
from xain_workloads.comparing.importance import SHOWN

# Selected and contributors together, of a round that is over. Its names are for a person to read;
# those of a thousand rounds of a thousand participants would fill the memory, and every snapshot.
MAX_NAMES_OF_A_ROUND = 200

# Reasons of damaged updates that are kept for each round.
MAX_DAMAGED = 20

# Why selected participants did not count: reasons that are kept in full for each round that is
# over, and their characters. Of the others their kind is kept.
MAX_REASONS = 20
MAX_REASON = 240

# Reasons that a later one may replace.
_DEADLINE = "deadline passed"
_OPEN = ("", NOT_WAITED_FOR, _DEADLINE)
ABSENT = "not connected"
_GONE = (ABSENT, "left", "expired", "revoked", "removed", "replaced")


@dataclass(frozen=True, slots=True)
class SiteRecord:
    """Measurements of one participant in a round.

    num_samples: of training, as metrics. evaluation: of the round's model.
    """

    num_samples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Evaluation | None = None

    @property
    def num_metrics(self) -> int:
        """Numbers that the measurements take up, those of figures and importances among them."""
        if self.evaluation is None:
            return len(self.metrics)
        # A figure has its limits and its baseline.
        local = self.evaluation.local
        derived = len(self.evaluation.metrics) + 3 * len(self.evaluation.figures)
        derived += 0 if local is None else 4 * len(local.figures)
        derived += 2 * sum(len(one.columns) for one in self.evaluation.importances)
        return len(self.metrics) + derived


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """The record of a round.

    selected: all that were selected, also those that left or were replaced. missing: why a
        participant that was selected, or chosen by the script, did not count, by participant;
        complete when the round is over.
    selected, contributors, missing: empty when the round is over and they were many. Then `counts`
        has the numbers of the first two, and `num_missing` that of the last, by kind of reason.
    lost: samples of those that were missing, and of all that could have counted.
    damaged: why accepted updates were dropped, by participant; the first MAX_DAMAGED.
    seconds: from opening to publication, None while it runs.
    sites: measurements by participant; empty when the round is over and they were many, or the
        round is long ago.
    metrics: of training, the mean over sites, weighted by samples.
    evaluation: of model `round`, see evaluation.together(); averages alone while the round runs.
    spread: over sites.
    tallies: of all sites, while an evaluation may still come late.
    coordinator_evaluation: of the same model, on the coordinator's own data.
    """

    round: int
    selected: tuple[str, ...]
    opened_at: float
    contributors: tuple[str, ...] = ()
    num_samples: int = 0
    seconds: float | None = None
    counts: tuple[int, int] | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)
    task: Task = Task.TRAIN
    sites: Mapping[str, SiteRecord] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    spread: Mapping[str, Spread] = field(default_factory=dict)
    coordinator_evaluation: Evaluation | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    num_missing: Mapping[str, int] = field(default_factory=dict)
    lost: tuple[int, int] = (0, 0)
    tallies: Tallies | None = None

    @property
    def num_selected(self) -> int:
        return len(self.selected) if self.counts is None else self.counts[0]

    @property
    def num_contributors(self) -> int:
        return len(self.contributors) if self.counts is None else self.counts[1]

    def after(self, events: Iterable[e.Event]) -> "RoundRecord":
        """The record of the round after these events."""
        selected, contributors = dict.fromkeys(self.selected), dict.fromkeys(self.contributors)
        num_samples, damaged = self.num_samples, dict(self.damaged)
        sites, missing = dict(self.sites), dict(self.missing)

        def miss(participant_id: str, reason: str, *, over: Collection[str] = ("",)) -> None:
            """Note why a selected participant does not count, over one of these reasons."""
            owes = participant_id in selected and participant_id not in contributors
            if owes and missing.get(participant_id, "") in over:
                missing[participant_id] = reason

        for event in events:
            match event:
                case e.UpdateAccepted(_, update, staleness, metrics, evaluation):
                    contributors[update.participant_id] = None
                    missing.pop(update.participant_id, None)
                    num_samples += update.num_samples
                    of_this = None if staleness else evaluation
                    if metrics or of_this is not None:
                        site = SiteRecord(update.num_samples, metrics, of_this)
                        sites[update.participant_id] = site
                case e.EvaluationAccepted(_, participant_id, evaluation):
                    contributors[participant_id] = None
                    missing.pop(participant_id, None)
                    if evaluation.num_samples or evaluation.withheld:
                        sites[participant_id] = SiteRecord(evaluation=evaluation)
                case e.UpdateDamaged(participant_id, _, lost, reason):
                    del contributors[participant_id]
                    sites.pop(participant_id, None)
                    num_samples -= lost
                    if len(damaged) < MAX_DAMAGED:
                        damaged[participant_id] = reason
                    missing[participant_id] = "damaged"
                case e.UpdateRefused(participant_id, _, reason):
                    missing[participant_id] = f"refused: {reason}"
                case e.TrainingFailed(participant_id):
                    missing[participant_id] = failure_reason(event)
                case e.GroupBroken(participant_id, reason=reason):
                    miss(participant_id, f"group broke: {reason}", over=_OPEN)
                case e.RoundRestarted(selected=more, missed=missed):
                    for participant_id in missed:
                        miss(participant_id, _DEADLINE)
                    for participant_id in contributors:
                        missing[participant_id] = "replaced"  # unless its stage is trained again
                    selected |= dict.fromkeys(more)
                    for participant_id in more:
                        missing.pop(participant_id, None)
                    contributors, sites, num_samples = {}, {}, 0
                case e.ParticipantsSelected(_, more):
                    selected |= dict.fromkeys(more)
                    for participant_id in more:
                        if missing.get(participant_id) in _GONE:
                            del missing[participant_id]  # it is back
                case e.ParticipantLeft(participant_id, cause):
                    miss(participant_id, cause, over=_OPEN)
                case e.ParticipantLeftOut(participant_id):
                    miss(participant_id, "replaced")
                case e.RoundOverdue(missed=missed):
                    for participant_id in missed:
                        miss(participant_id, _DEADLINE)
                case e.RoundClosed(cause=cause):
                    for participant_id in selected:
                        if cause == "deadline":
                            miss(participant_id, _DEADLINE, over=_OPEN)
                        else:
                            miss(participant_id, NOT_WAITED_FOR)
                case e.SessionFinished():
                    for participant_id in selected:
                        miss(participant_id, "the session ended")
        return replace(
            self,
            selected=tuple(selected),
            contributors=tuple(contributors),
            num_samples=num_samples,
            damaged=damaged,
            sites=sites,
            missing=missing,
        ).summarised()

    def summarised(self) -> "RoundRecord":
        """The record with means and spreads over its sites, and with figures if it has tallies."""
        sites = self.sites.values()
        evaluations = [one.evaluation for one in sites if one.evaluation is not None]
        return replace(
            self,
            metrics=mean_metrics((one.num_samples, one.metrics) for one in sites),
            evaluation=combined(evaluations, self.tallies),
            spread=spreads(evaluations),
        )

    def with_figures(self) -> "RoundRecord":
        """The record with the figures of all sites together and of each, instead of each site's
        tallies; unchanged if no site has sent any."""
        tallies = pooled(one.evaluation for one in self.sites.values() if one.evaluation)
        if tallies is None:
            return self
        record = replace(self, tallies=tallies).summarised()
        if len(self.sites) > MAX_NAMES_OF_A_ROUND:
            return record  # which will drop them
        whole = () if record.evaluation is None else record.evaluation.importances
        shown = {one.round: list(one.figures)[:SHOWN] for one in whole}
        sites = {
            name: site
            if site.evaluation is None or site.evaluation.tallies is None
            else replace(site, evaluation=_without_tallies(site.evaluation, shown))
            for name, site in self.sites.items()
        }
        return replace(record, sites=sites)

    def published(self, at: float) -> "RoundRecord":
        """The record of a round that is over, shortened to be kept."""
        num_missing = Counter(reason.partition(":")[0] for reason in self.missing.values())
        missing = {
            name: brief(reason, MAX_REASON) if index < MAX_REASONS else reason.partition(":")[0]
            for index, (name, reason) in enumerate(self.missing.items())
        }
        over = replace(
            self.with_figures(),
            seconds=at - self.opened_at,
            missing=missing,
            num_missing=dict(num_missing),
        )
        return over if self.names_are_few else over.without_names()

    @property
    def names_are_few(self) -> bool:
        """Whether the round has so few names of participants that they are kept when it is over."""
        # Sites that a script has chosen may be missing without having been selected.
        num_names = max(self.num_selected, len(self.missing)) + self.num_contributors
        return num_names <= MAX_NAMES_OF_A_ROUND

    def without_names(self) -> "RoundRecord":
        """The record with numbers and means only."""
        counts = self.num_selected, self.num_contributors
        return replace(
            self, selected=(), contributors=(), missing={}, damaged={}, counts=counts, sites={}
        )

    @property
    def num_site_metrics(self) -> int:
        return sum(site.num_metrics for site in self.sites.values())


def _without_tallies(
    evaluation: Evaluation, shown: Mapping[int, Sequence[int]]
) -> Evaluation | None:
    """The evaluation of one site with the figures that follow from its tallies, without these; None
    if it measured nothing. shown: columns whose importances are kept, by the number of the
    model."""
    derived = together([evaluation])
    if derived is None:
        return None
    kept = tuple(one.of(shown.get(one.round, ())) for one in derived.importances)
    return replace(derived, importances=kept)
