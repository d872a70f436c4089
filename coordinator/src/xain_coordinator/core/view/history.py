"""The history of a session, for operators: a second fold of the same events.

The history is bounded: it has the numbers and means of the latest 10,000 rounds, with the names of
participants in the latest 1,000 where these are few, and the accounts of the participants that are
connected and of the latest ones that have left.
It has the reference of every model, since any model may be asked for; parts that models have in
common are in memory once.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from xain_coordinator.core.parts.evaluation import together
from xain_coordinator.core.view.accounts import Account, Accounts
from xain_coordinator.core.view.records import ABSENT, MAX_NAMES_OF_A_ROUND, RoundRecord, SiteRecord
from xain_coordinator.core.view.session_warnings import SessionWarnings, Warned
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.keys import model_key
from xain_coordinator.core.vocabulary.values import Evaluation, GlobalModel, Importance, Rules, Task
from xain_workloads.measures.tallies import add

# [rounds] max_lost_share bounds the share of the samples that so many rounds lose together.
MANY_SITES = 3  # with two, one of them brings half or more
SHARE_ROUNDS = 3

# Events that the record of a round may lack until it is asked for: all its names are copied
# when they are written into it, which with each update would take longer than all the rest.
MAX_UNWRITTEN = 1000

# Metrics of single sites that are kept, of all rounds together. Where there are more, the oldest
# rounds lose those of their sites, and keep means and spreads.
MAX_SITE_METRICS = 100_000

# Rounds among which the latest evaluation is looked for.
MAX_UNEVALUATED = 100

# Rounds that are over and keep the sums of their sites' tallies, to which a late one is added.
TALLIED_ROUNDS = 8


class History:
    """Fold with `apply`, in the order of the journal.

    models: by key, oldest first, without those that [storage] keep_models has removed; these are
    the models of the rounds in `removed`. evaluated: the coordinator's own evaluation of a model
    whose round has not opened yet, with the model's number. accounts: how often each participant
    counted. warned: what went wrong, by kind.
    rules: of the session; None where nothing is known of them.
    max_lost_share, max_share: the present settings.
    """

    max_rounds = 10_000
    max_detailed = 1000

    def __init__(
        self,
        rounds: Iterable[RoundRecord] = (),
        models: Mapping[str, GlobalModel] | None = None,
        evaluated: tuple[int, Evaluation] | None = None,
        accounts: Mapping[str, Account] | None = None,
        rules: Rules | None = None,
        removed: Iterable[int] = (),
        warned: Mapping[str, Warned] | None = None,
    ) -> None:
        self._rounds = deque(rounds, maxlen=self.max_rounds)
        self._unwritten: list[e.Event] = []  # of the round that runs
        self.models = dict(models or {})
        self.removed = set(removed)
        self.evaluated = evaluated
        self.accounts = Accounts(rules, accounts)
        self.warned = SessionWarnings(warned)
        self._rules = rules
        self.max_lost_share = 1.0 if rules is None else rules.max_lost_share
        self.max_share = 1.0 if rules is None else rules.max_share
        self._num_site_metrics = sum(record.num_site_metrics for record in self._rounds)

    @property
    def rounds(self) -> deque[RoundRecord]:
        """Records of the rounds, oldest first. The last round may still be open."""
        self._write()
        return self._rounds

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return self._content() == other._content()

    def __repr__(self) -> str:
        return f"History{self._content()!r}"

    def _content(self) -> tuple[Any, ...]:
        """Content by which two histories are compared."""
        return (
            self.rounds,
            self.models,
            self.evaluated,
            self.accounts.by_name,
            self.removed,
            self.warned.by_kind,
        )

    def apply(self, event: e.Event) -> None:
        """Change the history by an event; one of the open round is written into its record
        later."""
        self.accounts.apply(event)
        self.warned.apply(event)
        match event:
            case e.UpdateAccepted(number, update, staleness, _, evaluation):
                self._note(event)
                if self._is_training:
                    self.accounts.note_counted(update.participant_id, 1)
                if staleness and evaluation is not None:
                    self._add_late(number - staleness, update.participant_id, evaluation)
            case e.UpdateDamaged(participant_id):
                self._note(event)
                if self._is_training:
                    self.accounts.note_counted(participant_id, -1)
            case e.RoundRestarted(number, _, selected):
                for participant_id in self.rounds[-1].contributors:
                    self.accounts.note_counted(participant_id, -1)
                self._note(event)
                self.accounts.note_selected(number, selected)
            case e.ParticipantsSelected(number, selected):
                self._note(event)
                if self._is_training:
                    self.accounts.note_selected(number, selected)
            case (
                e.EvaluationAccepted()
                | e.UpdateRefused()
                | e.TrainingFailed()
                | e.GroupBroken()
                | e.ParticipantLeft()
                | e.ParticipantLeftOut()
                | e.RoundOverdue()
                | e.RoundClosed()
            ):
                self._note(event)
            case e.RoundOpened(number, selected, _, at, task=task, absent=absent):
                missing = dict.fromkeys(absent, ABSENT)
                record = RoundRecord(number, selected, at, task=task, missing=missing)
                if self.evaluated is not None and self.evaluated[0] == number:
                    record = replace(record, coordinator_evaluation=self.evaluated[1])
                self.evaluated = None
                if len(self.rounds) >= self.max_detailed:
                    old = self._rounds[-self.max_detailed]
                    self._num_site_metrics -= old.num_site_metrics
                    self._rounds[-self.max_detailed] = old.without_names()
                self._rounds.append(record)
                if self._is_training:
                    self.accounts.note_selected(number, selected)
            case e.ModelEvaluated(number, evaluation) if evaluation is not None:
                self._add_own(number, evaluation)
            case e.ScriptEvaluated(number, evaluation):
                self._add_own(number, evaluation)
            case e.ModelInitialised(model):
                self._keep(model)
            case e.ModelPublished(at=at):
                self._end_round(at)
                self._keep(event.published(self._latest_model))
            case e.ModelsRemoved(rounds):
                for round_ in rounds:
                    self.models.pop(model_key(round_), None)
                self.removed.update(rounds)
            case e.SessionFinished(_, at):
                self._note(event)
                if self.rounds and self._rounds[-1].task is Task.EVALUATE:
                    self._end_round(at)
            case _:
                pass

    @property
    def _is_training(self) -> bool:
        """Whether the latest round trains. Taking part in another round does not count, also where
        all the selected make initial weights, whose average is the first model."""
        if not self._rounds or self._rounds[-1].task is not Task.TRAIN:
            return False
        base = self.models.get(model_key(self._rounds[-1].round))
        return base is None or not base.is_empty

    def copy(self) -> "History":
        """A copy of the history for a reader in another thread."""
        rounds, models, evaluated, accounts, removed, warned = self._content()
        return History(rounds, models, evaluated, accounts, self._rules, removed, warned)

    def lost_share(self, *, before_last: bool = False) -> float:
        """Share of the samples that the latest SHARE_ROUNDS rounds that are over have lost.
        before_last: without the last round, as it was before that."""
        over = (one for one in reversed(self.rounds) if one.seconds is not None)
        latest = islice(over, before_last, SHARE_ROUNDS + before_last)
        lost = [one.lost for one in latest]
        could = sum(num_samples for _, num_samples in lost)
        return sum(num_lost for num_lost, _ in lost) / could if could else 0.0

    def largest_share(self, *, before_last: bool = False) -> tuple[str, float, int]:
        """Site that has brought the most samples of the latest round of training that is over and
        had MANY_SITES or more, its share of them, and the round; ("", 0.0, -1) without one.

        before_last: without the last round, as it was before that.
        """
        over = (one for one in reversed(self.rounds) if one.seconds is not None)
        for record in islice(over, before_last, SHARE_ROUNDS + before_last):
            if record.task is not Task.TRAIN or record.num_contributors < MANY_SITES:
                continue
            known = self.accounts.by_name
            # The names of many are not kept. Numbers are those of their latest updates.
            names = record.contributors or tuple(known)
            brought = {name: known[name].num_samples or 0 for name in names if name in known}
            if any(brought.values()):
                most = max(brought, key=lambda name: (brought[name], name))
                return most, brought[most] / sum(brought.values()), record.round
        return "", 0.0, -1

    def importance(self, best: int | None) -> tuple[Importance, RoundRecord] | None:
        """The importance of the columns of the best model, of this number, over the rows of all
        sites, or else of the last one, and the record of the round that has measured it; None
        without any."""
        record = next(reversed(self.rounds), None)
        # While the round is open sites have what they sent, and no figures.
        if record is None or record.tallies is None or record.evaluation is None:
            return None
        known = {one.round: one for one in record.evaluation.importances}
        found = known.get(record.round if best is None else best, known.get(record.round))
        return None if found is None else (found, record)

    @property
    def not_in_figures(self) -> list[str]:
        """Sites whose held-out rows are not in the figures of the latest round that has figures, if
        that is among the latest MAX_UNEVALUATED, although they have measured its model."""
        for record in islice(reversed(self.rounds), MAX_UNEVALUATED):
            if record.evaluation is not None and record.evaluation.figures:
                known = {name: one.evaluation for name, one in record.sites.items()}
                return sorted(n for n, one in known.items() if one and one.has_averages_only)
        return []

    @property
    def withheld(self) -> list[str]:
        """Sites that have too few held-out rows to tell of them, in the latest round with an
        evaluation of any site, if that is among the latest MAX_UNEVALUATED."""
        for record in islice(reversed(self.rounds), MAX_UNEVALUATED):
            known = {name: one.evaluation for name, one in record.sites.items() if one.evaluation}
            if known:
                return sorted(name for name, one in known.items() if one.withheld)
        return []

    def warnings(self, *, is_over: bool) -> list[str]:
        """Warnings for an operator, one sentence each. is_over: whether the session is over."""
        found = list(self.accounts.warnings(is_over=is_over))
        share = self.lost_share()
        if share > self.max_lost_share:
            found.append(
                f"{share:.0%} of the samples were lost in the latest rounds; "
                f"rounds.max_lost_share is {self.max_lost_share:.0%}."
            )
        site, share, number = self.largest_share()
        if share > self.max_share:
            found.append(
                f"{site} has brought {share:.0%} of the samples of round {number}; "
                f"rounds.max_share is {self.max_share:.0%}."
            )
        return [*found, *self.warned.sentences()]

    def _note(self, event: e.Event) -> None:
        """Keep an event of the open round until its record is asked for."""
        self._unwritten.append(event)
        if len(self._unwritten) == MAX_UNWRITTEN:
            self._write()

    def _write(self) -> None:
        """Write the events that were kept into the record of the open round; without one they are
        dropped."""
        if self._unwritten:
            if self._rounds and self._rounds[-1].seconds is None:
                self._rounds.append(self._rounds.pop().after(self._unwritten))
            self._unwritten = []

    def _end_round(self, at: float) -> None:
        """Close the record of the latest round, count it in the accounts, and drop details of old
        rounds that are above the bounds. at: session time."""
        is_training, record = self._is_training, self.rounds.pop()
        if is_training:
            lost = self.accounts.count_round(
                record.round, record.selected, record.contributors, record.missing
            )
            record = replace(record, lost=lost)
        record = record.published(at)
        self._rounds.append(record)
        if len(self._rounds) > TALLIED_ROUNDS:
            old = self._rounds[-1 - TALLIED_ROUNDS]
            if old.tallies is not None:
                self._rounds[-1 - TALLIED_ROUNDS] = replace(old, tallies=None)
        self._num_site_metrics += record.num_site_metrics
        for index in range(max(0, len(self._rounds) - self.max_detailed), len(self._rounds)):
            if self._num_site_metrics <= MAX_SITE_METRICS:
                return
            old = self._rounds[index]
            self._num_site_metrics -= old.num_site_metrics
            self._rounds[index] = replace(old, sites={})

    def _add_own(self, number: int, evaluation: Evaluation) -> None:
        """Keep an evaluation of model `number` by the coordinator or a script: in the record of the
        round that starts from the model, or in `evaluated` until that round opens."""
        evaluation = together([evaluation]) or evaluation
        index = self._index_of(number)
        if index is None:
            if not self._rounds or number > self._rounds[-1].round:
                self.evaluated = (number, evaluation)
            return
        self._rounds[index] = replace(self._rounds[index], coordinator_evaluation=evaluation)

    def _add_late(self, number: int, participant_id: str, evaluation: Evaluation) -> None:
        """Keep an evaluation that came with an update of a later round with the round whose model
        was measured, if that still has its sites."""
        index = self._index_of(number)
        if index is None:
            return
        record = self._rounds[index]
        known = record.sites.get(participant_id, SiteRecord())
        has_lost_sites = not record.sites and bool(record.metrics or record.evaluation)
        if has_lost_sites or known.evaluation or len(record.sites) == MAX_NAMES_OF_A_ROUND:
            return
        tallies = record.tallies
        if tallies is None and record.evaluation is not None and record.evaluation.figures:
            return  # the sums that it would be added to are gone
        if evaluation.tallies is not None:
            tallies = add(one for one in (tallies, evaluation.tallies) if one is not None)
            evaluation = together([evaluation]) or evaluation
        site = replace(known, evaluation=evaluation)
        sites = {**record.sites, participant_id: site}
        self._rounds[index] = replace(record, sites=sites, tallies=tallies).summarised()
        self._num_site_metrics += site.num_metrics - known.num_metrics

    def _index_of(self, number: int) -> int | None:
        """Index of the record of a round; None if there is none, or not any more."""
        latest = reversed(range(len(self._rounds)))
        return next((index for index in latest if self._rounds[index].round == number), None)

    @property
    def _latest_model(self) -> GlobalModel | None:
        """The model that was published last, without those that were removed; None without one."""
        return next(reversed(self.models.values()), None)

    def _keep(self, model: GlobalModel) -> None:
        """Keep a model by its key. Parts that it has in common with the one before are in memory
        once."""
        # Each event that is read back from a journal brings its own copy of what never changes.
        before = self._latest_model
        if before is not None:
            model = replace(
                model,
                dtype=before.dtype if before.dtype == model.dtype else model.dtype,
                shape=before.shape if before.shape == model.shape else model.shape,
                layout=before.layout if before.layout == model.layout else model.layout,
                metadata=before.metadata if before.metadata == model.metadata else model.metadata,
            )
        self.models[model.ref.key] = model
