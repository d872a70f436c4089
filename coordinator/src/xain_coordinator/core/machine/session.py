"""The session: one training job from its opening to its one terminal state.

A session is made of its members (membership.py), the open round (round.py), the state of selection
(selection_state.py), the work that outlasts its round (buffered.py) and the progress of evaluations
(evaluation.py). Session answers what is asked of them together. Events change a session
(evolve.py), and what becomes of it is decided in decider.py.

What the phases mean, when a round is paused, overdue or restarted, and who is left out, is told in
docs/state-machine.md. Participants see COLLECTING and AGGREGATING as ROUND, and only if they are
selected.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil

from xain_coordinator.core.parts.buffered import BufferedWork
from xain_coordinator.core.parts.control import Counted
from xain_coordinator.core.parts.evaluation import EvaluationProgress, is_out_of_patience
from xain_coordinator.core.parts.membership import Members
from xain_coordinator.core.parts.profiles import fitted
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.parts.selection_state import SelectionState
from xain_coordinator.core.rules.pacing import Pacing, noted_every_s
from xain_coordinator.core.vocabulary.script import ScriptState
from xain_coordinator.core.vocabulary.values import (
    Base,
    DataProfile,
    Evaluation,
    Finding,
    GlobalModel,
    Lineage,
    Phase,
    Plan,
    Rules,
    Task,
    Update,
)
from xain_workloads.comparing.gains import Budget


@dataclass(frozen=True)  # without slots: see replacing.py
class Session:
    """State of a session, as folded from its events.

    round: the open one, or the next to open; after the end, the last one. While the last model is
        evaluated: the last one that was trained.
    lineage: where the first model comes from, if it was not made for this session.
    opened_unix_s: wall-clock time of the opening, for people; 0 if it is not known.
    epoch_base: epochs trained before this round, also by the sessions that this one extends.
    fit_requested: whether a fit was requested; see waits_for_request.
    requested: the profiles that the initial model is being made from. requested_of: names of the
        participants whose profiles they are; empty for profiles that come from elsewhere.
    findings: of the checks of the data that the last attempt at the initial model was made from.
    plan: rounds of the training, decided when the first round opens; None before that, and for
        scripts whose rounds are set.
    refused, trouble: the profiles that no model could be made from, and why; "" if all is well.
    script: what the script of a session with `rules.scripted` has decided last.
    removed: participants that an operator has removed, for good.
    declared: samples of the first update of each participant that has no profile, as a script.
    open_round, last_round: the last one is kept to recognise updates that are sent again.
    counted: of a model with a control variate, the sites whose variates it is the mean of.
    since: when the phase was reached, or, in the first one, when enough had gathered.
    noted_at: the session time in the journal's latest record of time.
    """

    session_id: str
    rules: Rules
    lineage: Lineage | None = None
    phase: Phase = Phase.STANDBY
    round: int = 0
    epoch_base: int = 0
    fit_requested: bool = False
    gathered: bool = False
    requested: tuple[DataProfile, ...] | None = None
    requested_of: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    refused: tuple[DataProfile, ...] | None = None
    trouble: str = ""
    plan: Plan | None = None
    model: GlobalModel | None = None
    members: Members = field(default_factory=Members)
    removed: frozenset[str] = frozenset()
    declared: Mapping[str, int] = field(default_factory=dict)
    open_round: Round | None = None
    last_round: Round | None = None
    selection: SelectionState = field(default_factory=SelectionState)
    buffered: BufferedWork = field(default_factory=BufferedWork)
    counted: Mapping[str, Counted] = field(default_factory=dict)
    since: float = 0.0
    noted_at: float = 0.0
    cause: str = ""
    evaluation: EvaluationProgress = field(default_factory=EvaluationProgress)
    opened_unix_s: int = 0
    script: ScriptState = field(default_factory=ScriptState)

    def samples_of(self, participant_id: str) -> int | None:
        """Samples that a member has said to have, in its profile or with its first update; None if
        it has not yet."""
        member = self.members.get(participant_id)
        if member is not None and member.profile is not None:
            return int(member.profile.num_samples)
        return self.declared.get(participant_id)

    @property
    def pool(self) -> tuple[str, ...]:
        """Participants that may be selected now and are not left out."""
        return tuple(p for p in self.available if p not in self.selection.left_out)

    @property
    def available(self) -> tuple[str, ...]:
        """Participants that may be selected now, left out or not: they train nothing, have not
        failed in this round, can make initial weights if those are missing, and are chosen if a
        script chooses."""
        failed: Mapping[str, None] = {} if self.open_round is None else self.open_round.failed
        available = tuple(p for p in self.selection.unselected if p not in failed)
        if self.is_untrained:
            available = tuple(p for p in available if self.members[p].can_initialise)
        return self.chosen_of(available)

    @property
    def short_cause(self) -> str:
        """Why the session ended, as its participants are told: without the traceback of a script,
        whose values are its own."""
        return self.cause.partition("\n")[0]

    @property
    def chosen(self) -> tuple[str, ...]:
        """Participants that the script has chosen by name for the open round or the next one. Empty
        if any may be selected, and in a round that is overdue: it asks others, too."""
        round_ = self.open_round
        if round_ is not None and (round_.task is Task.EVALUATE or round_.overdue_at is not None):
            return ()
        return self.script.config_of(self.round).selected

    def chosen_of(self, participants: Iterable[str]) -> tuple[str, ...]:
        """Keep the participants that the script has chosen by name; all if it has chosen none."""
        chosen = frozenset(self.chosen)
        return tuple(p for p in participants if p in chosen) if chosen else tuple(participants)

    @property
    def chosen_away(self) -> tuple[str, ...]:
        """Participants that the script has chosen by name, and that cannot answer: they are not
        connected, or their code has failed in this round."""
        chosen, round_ = self.chosen, self.open_round
        if round_ is None:
            return tuple(p for p in chosen if p not in self.members)
        away = (p for p in chosen if p not in self.members or p in round_.failed)
        return tuple(p for p in away if p not in round_.answers)

    @property
    def lacks_chosen(self) -> bool:
        """Whether the next round waits for participants that the script has chosen by name, though
        enough others are connected."""
        is_between = self.open_round is None and bool(self.chosen)
        return is_between and len(self.available) < self.rules.min_participants

    @property
    def is_untrained(self) -> bool:
        """Whether the model is empty, so that participants are asked for initial weights."""
        return self.model is not None and self.model.is_empty

    @property
    def lacks_initialisers(self) -> bool:
        """Whether the session waits for participants that can make initial weights, though enough
        are connected."""
        if not self.is_untrained or self.members.num_eligible < self.rules.num_required:
            return False
        able = (self.members[p].can_initialise for p in self.members.eligible)
        # An open round goes on with one. Only an average needs as many as any other round.
        if self.open_round is not None or self.rules.initial == "first":
            return not any(able)
        return sum(able) < self.rules.num_required

    @property
    def reserve(self) -> tuple[str, ...]:
        """Participants that would be in the pool if they were not left out."""
        return tuple(p for p in self.available if p in self.selection.left_out)

    def is_left_out(self, participant_id: str) -> bool:
        """Whether others are selected before the participant, because of its faults."""
        return self.selection.is_left_out(participant_id, self.round)

    @property
    def drafted(self) -> frozenset[str]:
        """Participants that are left out, but owe an update of the open round, because others were
        too few."""
        round_, left_out = self.open_round, self.selection.left_out
        if round_ is None or not left_out:
            return frozenset()
        return frozenset(p for p in left_out if round_.owes(p))

    def owes_update(self, participant_id: str) -> bool:
        """Whether the participant trains and its update is not in yet."""
        if self.open_round is None:
            return participant_id in self.buffered.carried
        return self.open_round.owes(participant_id)

    def trained_by(self, participant_id: str) -> int:
        """The round that this participant trains, or would train."""
        if (round_ := self.open_round) is not None:
            return round_.carried.get(participant_id, round_.number)
        if self.phase is Phase.FINISHED and self.last_round is not None:
            return self.last_round.carried.get(participant_id, self.round)
        return self.buffered.carried.get(participant_id, self.round)

    @property
    def earlier_rounds(self) -> frozenset[int]:
        """Earlier rounds for which a participant may still hand in an update, or has done so."""
        carried = self.buffered.carried if self.open_round is None else self.open_round.carried
        return frozenset(carried.values())

    def round_of_call(self, participant_id: str, *, has_upload: bool) -> int:
        """The round of an update whose call names none: the one that the participant trains. If it
        has uploaded nothing for that round, the last one, if that closed without its update."""
        last = self.last_round
        if not has_upload and last is not None and last.owes(participant_id):
            return last.trained_by(participant_id)
        return self.trained_by(participant_id)

    def evaluates_last(self, round_: int) -> bool:
        """Whether the round of this number evaluates the last model."""
        known = self.evaluation.last_round or self.open_round
        return known is not None and known.task is Task.EVALUATE and known.number == round_

    def evaluated(self, participant_id: str, round_: int) -> Evaluation | None:
        """The participant's evaluation in the round that evaluates the last model; None without
        one."""
        known = self.evaluation.last_round or self.open_round
        if known is None or not self.evaluates_last(round_):
            return None
        return known.evaluations.get(participant_id)

    def accepted(self, participant_id: str, round_: int) -> Update | None:
        """The update of this round that was accepted from the participant, if that was in the open
        round or the one before, or was its latest."""
        for known in (self.open_round, self.last_round):
            if known is not None and known.carried.get(participant_id, known.number) == round_:
                update = known.updates.get(participant_id)
                if update is not None:
                    return update
        number, update = self.buffered.counted.get(participant_id, (-1, None))
        return update if number == round_ else None

    @property
    def waits_for_request(self) -> bool:
        """Whether the session waits for the request of a fit."""
        is_open = self.phase is not Phase.FINISHED
        return is_open and self.rules.start == "request" and not self.fit_requested

    @property
    def waits_for_script(self) -> bool:
        """Whether the session waits for its script to configure the next round, or to come to its
        end."""
        if not self.rules.scripted or self.model is None:
            return False
        if self.phase is not Phase.STANDBY or self.open_round is not None or not self.gathered:
            return False
        if self.is_trained:
            return not self.script.is_over
        return not self.model.is_empty and self.script.round != self.round

    @property
    def gives_up_at(self) -> float | None:
        """Session time at which rounds.idle_timeout_s ends the session if nothing changes; None
        without it, in a round before its deadline, and while a request or a script is awaited."""
        idle_s = self.rules.idle_timeout_s
        began: float | None = self.since
        overdue_at = None
        if self.open_round is not None:
            overdue_at = self.open_round.overdue_at
        if self.phase is Phase.COLLECTING or overdue_at is not None:
            # The same while it is paused: a returning participant must not make it end earlier.
            began = overdue_at
        if self.phase is Phase.AGGREGATING:
            began = self.since
        if idle_s is None or began is None or self.phase is Phase.FINISHED:
            return None
        if self.waits_for_request or self.waits_for_script:
            return None
        return began + idle_s

    @property
    def num_trained(self) -> int:
        """Number of training rounds that are over, of `rules.rounds`."""
        return 0 if self.model is None else max(0, self.model.round - self.rules.num_initial)

    @property
    def is_trained(self) -> bool:
        """Whether the last model is published: that of the last round, one that its rule calls the
        last, one after which the loss falls no more or no model was better for evaluate_patience
        passes, or one with which the script came to its end."""
        if self.model is None or self.model.round >= self.rules.num_rounds:
            return self.model is not None
        if self.evaluation.descent.ended_because or self.model.ended_because:
            return True
        is_over = self.script.is_over and self.num_trained > 0
        return is_over or self.is_out_of_patience

    @property
    def is_out_of_patience(self) -> bool:
        """Whether no model was better for evaluate_patience passes."""
        if self.model is None:
            return False
        steps = self.model.steps_per_pass if self.plan is None else self.plan.rounds_per_pass
        return is_out_of_patience(self.evaluation.best, self.rules, steps)

    @property
    def untrained(self) -> int | None:
        """Number of the model that nobody has trained, which never counts as the best one; None if
        the first model of this session was trained before."""
        return None if self.lineage is not None else self.rules.num_initial

    @property
    def steps(self) -> int:
        """Rounds that a whole model takes; 1 unless the workload divides a step or a pass among
        rounds. Only whole models are compared."""
        if self.plan is not None:
            return self.plan.steps
        before = 1 if self.model is None else self.model.steps_per_pass
        return max(before, self.rules.stride.levels)

    def passes_of(self, epochs: int) -> float:
        """Passes over all rows that rounds with so many epochs come to."""
        share = 1.0 if self.plan is None else self.plan.num_counted / self.plan.num_sites
        return epochs * share / self.steps

    @property
    def num_passes(self) -> int:
        """Passes that are over, of `rules.passes`; 0 where rounds are counted."""
        if self.plan is None:
            return 0
        return self.num_trained * self.plan.passes // self.plan.rounds

    def evaluates(self, number: int) -> bool:
        """Whether the global model of this number is evaluated, even if it is not the last."""
        return self.rules.evaluates(number, self.steps)

    @property
    def evaluators(self) -> tuple[str, ...]:
        """The eligible participants that can measure the last model; none if evaluation is off."""
        if self.rules.evaluate_every == 0:
            return ()
        return tuple(p for p in self.members.eligible if self.members[p].can_evaluate)

    @property
    def evaluation_due(self) -> EvaluationProgress:
        """The progress of evaluations once the coordinator owes that of the present model, if that
        is to be evaluated."""
        return self.evaluation.owing(self.model, self.rules, self.steps, is_last=self.is_trained)

    @property
    def local_budget(self) -> Budget | None:
        """Budget of the local models: the passes of the session, in half the time that the
        evaluation of the last model may take; None if there are none."""
        rules = self.rules
        if not rules.evaluate_local or self.model is None or not self.epoch_base:
            return None
        passes = max(1, ceil(self.passes_of(self.epoch_base)))
        return Budget(passes, rules.evaluate_deadline_s / 2, rules.preprocessing)

    @property
    def central_due(self) -> Budget | None:
        """Budget of the central model, which the coordinator owes at the end, after its own
        evaluations; None if it owes none."""
        is_measured = self.rules.evaluate_data and self.rules.evaluate_every > 0
        if not is_measured or self.evaluation.central is not None:
            return None
        return self.local_budget

    @property
    def opened(self) -> Round:
        """The open round, which must exist."""
        assert self.open_round is not None, "no round is open"
        return self.open_round

    @property
    def base(self) -> Base:
        """The model, epochs and opening time from which participants train in the open round."""
        assert self.model is not None, "a round is open without a model"
        round_ = self.opened
        return Base(self.model, round_.epochs, self.epoch_base, round_.opened_at)

    def model_of(self, round_: int) -> GlobalModel | None:
        """The model that the updates of a round are trained from; None if it is empty or not made
        yet, or the round is neither the present one nor still trained."""
        base = self.buffered.bases.get(round_)
        model = self.model if base is None else base.model
        return None if model is None or model.is_empty or model.round != round_ else model

    def epochs_of(self, round_: int) -> int:
        """Epochs that the updates of a round are trained for."""
        base = self.buffered.bases.get(round_)
        if base is None and self.open_round is not None and self.open_round.number == round_:
            return self.open_round.epochs
        return self.rules.epochs if base is None else base.epochs

    def outlasts_round(self, participant_id: str) -> bool:
        """Whether the participant owes an update that may count in the round after the open one.
        Initial weights count in no other round than their own."""
        limit, round_ = self.rules.staleness, self.opened
        if self.is_untrained or not round_.owes(participant_id):
            return False
        return limit is None or round_.trained_by(participant_id) >= round_.number + 1 - limit

    def is_carried_over(self, participant_id: str) -> bool:
        """Whether the participant goes on training while a model is made; its update counts for the
        next one."""
        if self.phase is not Phase.AGGREGATING or self.round + 1 == self.rules.num_rounds:
            return False  # no model is being made, or none comes after it
        return self.outlasts_round(participant_id)

    def eligible_profiles(self) -> Iterator[tuple[str, DataProfile]]:
        """Names and profiles of the eligible members that sent one, in the order in which they
        joined."""
        for participant_id, member in self.members.items():
            if member.profile is not None and member.is_eligible:
                yield participant_id, member.profile

    def findings_of(self, participant_id: str) -> tuple[Finding, ...]:
        """Findings in the data of a participant, and in those of all together."""
        return tuple(one for one in self.findings if one.site in ("", participant_id))

    def profiles_of(self, participants: Iterable[str]) -> tuple[DataProfile, ...]:
        """Profiles of members, as the initial model is made from them."""
        known = (self.members[participant_id].profile for participant_id in participants)
        return fitted((one for one in known if one is not None), self.rules.schema)

    @property
    def starts_at(self) -> float:
        """Session time at which training starts with the connected participants: start_timeout_s
        after the first eligible one joined or, if later, the fit was requested, but not after
        gives_up_at."""
        # Members are in the order in which they joined.
        began = next(m.joined_at for m in self.members.values() if m.is_eligible)
        if self.fit_requested:
            began = max(began, self.since)  # nothing else has moved it before they have gathered
        deadline = began + self.rules.start_timeout_s
        return deadline if self.gives_up_at is None else min(deadline, self.gives_up_at)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the expected participants that are not connected; after the end, of those that
        were not connected then."""
        return tuple(n for n in self.rules.expected_participants if n not in self.members)

    def note_at(self, pacing: Pacing) -> float | None:
        """Session time at which the passing of time is next recorded as an event; None if nothing
        needs it."""
        if self.phase is Phase.FINISHED or self.waits_for_request or self.waits_for_script:
            return None  # a request or a script is awaited without a limit
        every_s = noted_every_s(self.rules, pacing, self.open_round)
        return None if every_s is None else self.noted_at + every_s
