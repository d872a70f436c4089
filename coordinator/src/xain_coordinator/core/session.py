"""The session: one training job from its opening to its one terminal state.

    begin(opened)           -> the session that its first event describes
    evolve(session, event)  -> the session after it

What becomes of a session is decided in decider.py, and only by events; the same events always give
the same session.

A session waits in STANDBY until enough participants have gathered, asks for the initial model, and
opens round 0. An open round is COLLECTING: the selected train and hand in. When all that it wants
has come in (pacing.py), the round closes and is AGGREGATING: nothing more is taken in. The model
that comes back is published; the next round opens at once if enough are connected, else the session
waits in STANDBY. After the last round it is FINISHED, for ever.

If the last model is to be evaluated, one more round opens before that, with the number of that
model. Those who can evaluate are selected, and it closes when all of them have answered or left and
the coordinator's own evaluation is there, or at its deadline; nothing is aggregated.

While a round is open, participants may go. One whose update was accepted has done its part: the
update counts, whatever becomes of its sender. One that still owed an update leaves the selection,
and somebody from the pool takes its place. If too few are connected the round is paused: STANDBY,
with number, selection and accepted updates kept, until enough are back.

Whoever is not eligible, for its tags, is connected and nothing else: it is never selected, and
where participants are counted it is not. Whoever has had too many updates refused in a row is left
out for some rounds: others are selected instead, as long as there are enough.

With the rule "assemble" the selected train as one process group. When it breaks the round starts
again with those who are there: see attempts.py.

An accepted update that is found damaged in the store no longer counts: its round collects updates
again, and asks the sender for the same update. A sender that has left is replaced.

Nothing waits for ever. At its deadline a round closes with what it has. If that is too little it is
overdue: everybody else is selected too, and the update that makes enough closes it. A wait for
participants, for the updates of an overdue round, or for a model that is longer than the idle
timeout ends the session, with its cause.

In SSP and ASP the next round opens while some still train an earlier one. They are carried over:
what they are told, and what they hand in, is of the round that they train.

XAIN's participants see COLLECTING and AGGREGATING as ROUND, and only if they are selected.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from xain_coordinator.core import attempts, descent
from xain_coordinator.core import events as e
from xain_coordinator.core.descent import NOT_BEGUN, Descent
from xain_coordinator.core.evaluation import (
    MAX_BACKLOG,
    Best,
    better,
    is_out_of_patience,
    mean_evaluation,
    mean_metrics,
)
from xain_coordinator.core.keys import place_of, update_key
from xain_coordinator.core.membership import (
    MAX_CONTENDERS,
    Contender,
    Heard,
    Member,
    Refusals,
    Turn,
)
from xain_coordinator.core.pacing import carried_over, is_carried_over, noted_every_s
from xain_coordinator.core.profiles import fitted
from xain_coordinator.core.replacing import replace
from xain_coordinator.core.values import (
    Base,
    DataProfile,
    Evaluation,
    GlobalModel,
    Lineage,
    Names,
    Phase,
    Round,
    Rules,
    Task,
    Update,
)
from xain_coordinator.core.versioned import excluding, including, including_all

# The machine: the phase that an event leads to. Any other pair is a broken invariant, and
# events that are not named here change no phase. The docs draw this table.
TRANSITIONS: Mapping[tuple[Phase, type[e.Event]], Phase] = {
    (Phase.STANDBY, e.RoundOpened): Phase.COLLECTING,
    (Phase.COLLECTING, e.RoundPaused): Phase.STANDBY,
    (Phase.STANDBY, e.RoundResumed): Phase.COLLECTING,
    (Phase.COLLECTING, e.RoundClosed): Phase.AGGREGATING,
    (Phase.STANDBY, e.RoundClosed): Phase.AGGREGATING,  # while the round is paused
    (Phase.AGGREGATING, e.UpdateDamaged): Phase.COLLECTING,
    (Phase.COLLECTING, e.UpdateDamaged): Phase.COLLECTING,
    (Phase.STANDBY, e.UpdateDamaged): Phase.STANDBY,
    (Phase.AGGREGATING, e.ModelPublished): Phase.STANDBY,
    (Phase.STANDBY, e.SessionFinished): Phase.FINISHED,
    (Phase.COLLECTING, e.SessionFinished): Phase.FINISHED,
    (Phase.AGGREGATING, e.SessionFinished): Phase.FINISHED,
}

# Participants that have left and whose refused updates are remembered, so that a participant cannot
# clear its record by leaving and coming back.
MAX_DEPARTED = 1000


@dataclass(frozen=True)  # without slots: see replacing.py
class EvaluationProgress:
    """Results of the evaluations, and those that are still owed.

    best: of the models that were evaluated.
    owed: models that the coordinator is to measure on its own data; the first is being measured.
    last_round: the one in which the last model was evaluated, when it is over.
    ended_because: why a completed session has made fewer models than its rules say; "" otherwise.
    descent: with the rule "gradient", how the loss in training has fallen.
    """

    best: Best | None = None
    owed: tuple[GlobalModel, ...] = ()
    last_round: Round | None = None
    ended_because: str = ""
    descent: Descent = NOT_BEGUN


@dataclass(frozen=True)  # without slots: see replacing.py
class Session:
    """The state, as folded from its events.

    round: the open one, or the next to open; after the end, the last one. While the last model is
        evaluated: the last one that was trained.
    lineage: where the first model comes from, if it was not made for this session.
    epoch_base: epochs trained before this round, also by the sessions that this one extends.
    fit_requested: by somebody; see waits_for_request.
    requested: the profiles that the initial model is being made from.
    refused, trouble: the profiles that no model could be made from, and why; "" if all is well.
    open_round, last_round: the last one is kept to recognise updates that are sent again.
    carried: between two rounds, participants that still train an earlier round, with its number.
    bases: start of the training of earlier rounds that are still trained, by round.
    counted: in SSP and ASP, where models may follow each other faster than an answer travels, the
        latest update of each participant, and the round that it was trained for.
    unselected: the eligible members that are neither in the open round nor, between two rounds,
        carried; kept, since every change may ask whether there are any. Empty after the end.
    left_out: the eligible members that are left out; kept for the same reason.
    num_draws: selections made in the open round.
    num_eligible: of the members.
    num_turns: selections of single participants so far. turns: the last one of each member.
    refusals: faults of participants, also of those that have left, while they matter.
    since: when the phase was reached, or, in the first one, when enough had gathered.
    noted_at: the session time in the journal's latest record of time.
    evaluation: progress and results of evaluations.
    heard, lease_floor: soft state, not part of the session's identity.
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
    refused: tuple[DataProfile, ...] | None = None
    trouble: str = ""
    model: GlobalModel | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    upload_names: Mapping[str, str] = field(default_factory=dict)
    open_round: Round | None = None
    last_round: Round | None = None
    carried: Mapping[str, int] = field(default_factory=dict)
    bases: Mapping[int, Base] = field(default_factory=dict)
    counted: Mapping[str, tuple[int, Update]] = field(default_factory=dict)
    unselected: Mapping[str, None] = field(default_factory=dict)
    left_out: Mapping[str, None] = field(default_factory=dict)
    num_draws: int = 0
    num_eligible: int = 0
    num_turns: int = 0
    turns: Mapping[str, Turn] = field(default_factory=dict)
    refusals: Mapping[str, Refusals] = field(default_factory=dict)
    since: float = 0.0
    noted_at: float = 0.0
    cause: str = ""
    evaluation: EvaluationProgress = EvaluationProgress()
    heard: Mapping[str, Heard] = field(default_factory=dict, compare=False)
    lease_floor: float = field(default=0.0, compare=False)

    @property
    def pool(self) -> tuple[str, ...]:
        """Participants that may be selected now and are not left out."""
        return tuple(p for p in self.available if p not in self.left_out)

    @property
    def available(self) -> tuple[str, ...]:
        """Participants that may be selected, left out or not, at this moment."""
        failed: Mapping[str, None] = {} if self.open_round is None else self.open_round.failed
        available = tuple(p for p in self.unselected if p not in failed)
        if self.is_untrained:
            available = tuple(p for p in available if self.members[p].can_initialise)
        return available

    @property
    def is_untrained(self) -> bool:
        """The model is the empty one: participants are asked for initial weights."""
        return self.model is not None and self.model.is_empty

    @property
    def lacks_initialisers(self) -> bool:
        """Initial weights are to be made, and enough participants are connected, but too few of
        them can make some."""
        if not self.is_untrained or self.num_eligible < self.rules.num_required:
            return False
        able = (m.is_eligible and m.can_initialise for m in self.members.values())
        # An open round goes on with one. Only an average needs as many as any other round.
        if self.open_round is not None or self.rules.initial == "first":
            return not any(able)
        return sum(able) < self.rules.num_required

    @property
    def reserve(self) -> tuple[str, ...]:
        """Participants that would be in the pool if they were not left out."""
        return tuple(p for p in self.available if p in self.left_out)

    def is_left_out(self, participant_id: str) -> bool:
        """Whether others are selected before the participant, because of its faults."""
        return self.left_out_until(participant_id) is not None

    def left_out_until(self, participant_id: str) -> int | None:
        """The round from which the participant is selected again; None if it is not left out."""
        known = self.refusals.get(participant_id)
        if known is None or known.left_out_until <= self.round:
            return None
        return known.left_out_until

    @property
    def drafted(self) -> frozenset[str]:
        """Participants that are left out, but owe an update of the open round, because others were
        too few."""
        round_ = self.open_round
        if round_ is None:
            return frozenset()
        return frozenset(p for p in self.left_out if round_.owes(p))

    def in_a_row(self, participant_id: str) -> int:
        """Refused updates, failures and missed deadlines of a participant since its last accepted
        update, or since it was left out."""
        return self.refusals.get(participant_id, Refusals()).in_a_row

    def is_member(self, participant_id: str, instance_id: str = "") -> bool:
        """Whether this process of the participant is connected. instance_id: "" if it has none."""
        member = self.members.get(participant_id)
        return member is not None and member.is_instance(instance_id)

    def conflict(self, participant_id: str) -> Contender | None:
        """The latest second process with this id that asked to join while the first one was alive;
        None if there is none."""
        sign = self.heard.get(participant_id)
        if sign is None or not sign.contenders:
            return None
        second = [one for one in sign.contenders.values() if one.is_second(sign.at, self.rules)]
        return max(second, key=lambda one: one.last_at, default=None)

    def owes_update(self, participant_id: str) -> bool:
        """Whether the participant trains and its update is not in yet."""
        if self.open_round is None:
            return participant_id in self.carried
        return self.open_round.owes(participant_id)

    def trained_by(self, participant_id: str) -> int:
        """The round that this participant trains, or would train."""
        if self.open_round is not None:
            return self.open_round.trained_by(participant_id)
        if self.phase is Phase.FINISHED and self.last_round is not None:
            return self.last_round.carried.get(participant_id, self.round)
        return self.carried.get(participant_id, self.round)

    @property
    def earlier_rounds(self) -> frozenset[int]:
        """The rounds before this one that somebody may still hand in for, or has handed in for."""
        carried = self.carried if self.open_round is None else self.open_round.carried
        return frozenset(carried.values())

    def round_meant(self, participant_id: str, *, has_upload: bool) -> int:
        """The round that a XAIN client means, which names none: the one that it trains. Without an
        upload for that round, it means the last one, if that closed without its update."""
        last = self.last_round
        if not has_upload and last is not None and last.owes(participant_id):
            return last.trained_by(participant_id)
        return self.trained_by(participant_id)

    def evaluates_last(self, round_: int) -> bool:
        """The round of this number evaluates the last model, now or before the end."""
        known = self.evaluation.last_round or self.open_round
        return known is not None and known.is_evaluation and known.number == round_

    def evaluated(self, participant_id: str, round_: int) -> Evaluation | None:
        """The answer of the participant in the round that evaluates the last model."""
        known = self.evaluation.last_round or self.open_round
        if known is None or not self.evaluates_last(round_):
            return None
        return known.evaluations.get(participant_id)

    def accepted(self, participant_id: str, round_: int) -> Update | None:
        """The update of this round that was accepted from the participant, if that was in the open
        round or the one before, or was its latest."""
        for known in (self.open_round, self.last_round):
            if known is not None and known.trained_by(participant_id) == round_:
                update = known.updates.get(participant_id)
                if update is not None:
                    return update
        number, update = self.counted.get(participant_id, (-1, None))
        return update if number == round_ else None

    @property
    def is_buffered(self) -> bool:
        """Models are made as updates come, without waiting for those who are late. Not the first:
        without it nothing can be trained."""
        is_synchronous = self.rules.consistency == "bsp"
        return not is_synchronous and self.model is not None and not self.is_untrained

    @property
    def waits_for_request(self) -> bool:
        """Nothing starts before somebody has requested the fit."""
        is_open = self.phase is not Phase.FINISHED
        return is_open and self.rules.start == "request" and not self.fit_requested

    @property
    def gives_up_at(self) -> float | None:
        """Time at which the session ends if nothing changes; None if another event comes before."""
        idle_s = self.rules.idle_timeout_s
        began: float | None = self.since
        overdue_at = None
        if self.open_round is not None:
            overdue_at = self.open_round.overdue_at
        if self.phase is Phase.COLLECTING or overdue_at is not None:
            # Also while it is paused: whoever comes back must not make it end earlier.
            began = overdue_at
        if self.phase is Phase.AGGREGATING:
            began = self.since
        if idle_s is None or began is None or self.phase is Phase.FINISHED:
            return None
        if self.waits_for_request:
            return None
        return began + idle_s

    @property
    def stops_early(self) -> bool:
        """The models have not become better for as long as the session is patient, or the loss in
        training falls no more."""
        has_converged = bool(self.evaluation.descent.ended_because)
        return has_converged or is_out_of_patience(self.evaluation.best, self.rules)

    @property
    def num_trained(self) -> int:
        """Rounds of training that are over, of `rules.rounds`."""
        return 0 if self.model is None else max(0, self.model.round - self.rules.num_initial)

    @property
    def is_trained(self) -> bool:
        """The last model has been published."""
        if self.model is None:
            return False
        return self.model.round >= self.rules.num_rounds or self.stops_early

    @property
    def evaluators(self) -> tuple[str, ...]:
        """The participants that can measure the last model; none if evaluation is off."""
        if self.rules.evaluate_every == 0:
            return ()
        return tuple(p for p, m in self.members.items() if m.is_eligible and m.can_evaluate)

    @property
    def owing_last_evaluation(self) -> bool:
        """The coordinator is to measure the last model, and has not."""
        return bool(_owing_evaluation(self).evaluation.owed)

    @property
    def opened(self) -> Round:
        """The open round, where there must be one."""
        assert self.open_round is not None, "no round is open"
        return self.open_round

    @property
    def base(self) -> Base:
        """Start of the training of the open round."""
        assert self.model is not None, "a round is open without a model"
        round_ = self.opened
        return Base(self.model, round_.epochs, self.epoch_base, round_.opened_at)

    def model_of(self, round_: int) -> GlobalModel | None:
        """The model that the updates of a round are trained from; None if there is none yet."""
        base = self.bases.get(round_)
        model = self.model if base is None else base.model
        return None if model is None or model.is_empty or model.round != round_ else model

    def epochs_of(self, round_: int) -> int:
        """Epochs that the updates of a round are trained for."""
        base = self.bases.get(round_)
        return self.rules.epochs if base is None else base.epochs

    def is_carried_over(self, participant_id: str) -> bool:
        """The participant trains while a model is made, and its update goes into the next one."""
        is_being_made = self.phase is Phase.AGGREGATING and self.is_buffered
        if not is_being_made or self.round + 1 == self.rules.num_rounds:  # no model comes after it
            return False
        return is_carried_over(self.opened, self.rules, participant_id)

    def eligible_profiles(self) -> Iterator[tuple[str, DataProfile]]:
        """Names and profiles of the eligible members that sent one, in the order in which they
        joined."""
        for participant_id, member in self.members.items():
            if member.profile is not None and member.is_eligible:
                yield participant_id, member.profile

    def profiles_of(self, participants: Iterable[str]) -> tuple[DataProfile, ...]:
        """Profiles of members, as the initial model is made from them."""
        known = (self.members[participant_id].profile for participant_id in participants)
        return fitted((one for one in known if one is not None), self.rules.schema)

    @property
    def starts_at(self) -> float:
        """Time at which it starts with those who are there: start timeout after the first arrival;
        N would rather start than see the session end."""
        # In the order in which they came.
        arrived = next(m.joined_at for m in self.members.values() if m.is_eligible)
        deadline = arrived + self.rules.start_timeout_s
        return deadline if self.gives_up_at is None else min(deadline, self.gives_up_at)

    @property
    def note_at(self) -> float | None:
        """Time at which session time is to be recorded; None if nothing waits for it."""
        every_s = noted_every_s(self.rules, self.open_round)
        if every_s is None or self.phase is Phase.FINISHED or self.waits_for_request:
            return None
        return self.noted_at + every_s


def open_session(
    session_id: str, rules: Rules, now: float, lineage: Lineage | None = None
) -> tuple[Session, e.SessionOpened]:
    """A new session and the event that begins its journal."""
    opened = e.SessionOpened(session_id, rules, now, lineage)
    return begin(opened), opened


def begin(opened: e.SessionOpened) -> Session:
    """The session that its first event describes."""
    return Session(
        opened.session_id,
        opened.rules,
        opened.lineage,
        epoch_base=0 if opened.lineage is None else opened.lineage.num_epochs,
        since=opened.at,
        noted_at=opened.at,
        lease_floor=opened.at,
    )


def evolve(session: Session, event: e.Event) -> Session:
    """The session after an event. Never refuses: what is in the journal has happened."""
    match event:  # what happens most often comes first
        case e.ParticipantHeard(participant_id, state, round_, at, transfer):
            sign = session.heard.get(participant_id)
            recent = sign.recent_contenders(at) if sign is not None and sign.contenders else {}
            heard = Heard(at, state, round_, recent, transfer)
            return replace(session, heard=including(session.heard, participant_id, heard))
        case e.UpdateAccepted(_, update, staleness, metrics, evaluation, at):
            session = _well_again(session, update.participant_id)
            collecting = _with_update(session.opened, update, at)
            if session.rules.aggregation == descent.RULE:
                collecting = _with_loss(collecting, update.participant_id, metrics)
            if evaluation is not None and staleness == 0:  # else it is of an earlier model
                collecting = _with_evaluation(collecting, update.participant_id, evaluation)
            return replace(session, open_round=collecting)
        case e.Restarted(at):
            return replace(session, lease_floor=at)
        case e.InstanceRefused():
            return _with_contender(session, event)
        case e.ParticipantJoined(
            participant_id, profile, at, tags, can_evaluate, instance_id, can_initialise, address
        ):
            is_eligible = session.rules.is_eligible(tags)
            if session.model is not None and profile is not None:
                profile = _without_statistics(profile)
            profile = _sharing_columns(session, profile)
            member = Member(
                participant_id,
                profile,
                at,
                tags,
                is_eligible,
                can_evaluate,
                instance_id,
                can_initialise,
                address,
            )
            # A participant that handed in, left and came back is still one of the selected.
            opened = session.open_round
            is_selected = opened is not None and participant_id in opened.selected
            unselected, left_out = session.unselected, session.left_out
            if is_eligible and not is_selected:
                unselected = including(unselected, participant_id, None)
            if is_eligible and session.is_left_out(participant_id):
                left_out = including(left_out, participant_id, None)
            if opened is not None and participant_id in opened.failed:
                # Another process, which may have been mended.
                opened = replace(opened, failed=excluding(opened.failed, participant_id))
            return replace(
                session,
                open_round=opened,
                members=including(session.members, participant_id, member),
                # Its own name goes before one that somebody else has chosen.
                upload_names=excluding(session.upload_names, participant_id),
                num_eligible=session.num_eligible + is_eligible,
                turns=including(session.turns, participant_id, Turn(session.num_turns)),
                unselected=unselected,
                left_out=left_out,
            )
        case e.GroupAddressChanged(participant_id, address):
            member = dataclasses.replace(session.members[participant_id], group_address=address)
            session = replace(session, members=including(session.members, participant_id, member))
            return _with_broken(session, participant_id, "its process is another one")
        case e.ParticipantLeft(participant_id):
            return _without(session, participant_id)
        case e.HeartbeatChanged(time_s, timeout_s):
            rules = dataclasses.replace(
                session.rules, heartbeat_time_s=time_s, heartbeat_timeout_s=timeout_s
            )
            return replace(session, rules=rules)
        case e.TimePassed(at):
            return replace(session, noted_at=at)
        case e.FitRequested(at):
            return replace(session, fit_requested=True, since=at)
        case e.ParticipantsGathered(at):
            # The wait for participants is over. That for a model begins, at its full length.
            return replace(session, gathered=True, since=session.since if at is None else at)
        case e.ModelRequested(profiles, participants):
            return replace(session, requested=profiles or session.profiles_of(participants))
        case e.InitialisationRefused(reason):
            return replace(session, requested=None, refused=session.requested, trouble=reason)
        case e.ModelInitialised(model, at):
            since = session.since if at is None else at
            session = _forget_statistics(session)
            session = replace(session, model=model, refused=None, trouble="", since=since)
            return _owing_evaluation(session)
        case e.RoundOpened(number, selected, epochs, at, wanted, task):
            is_evaluation = task is Task.EVALUATE
            if is_evaluation:
                # Updates that are still being trained come too late for any model.
                session = _owing_evaluation(replace(session, carried={}, bases={}))
            opened = Round(
                number,
                selected,
                target=len(selected),
                epochs=epochs,
                opened_at=at,
                num_wanted=len(selected) if wanted is None else wanted,
                carried=session.carried,
                task=task,
                attempt=int(_is_attempted(session, task)),
            )
            session = _moved(session, event, at)
            session = _take_turns(session, number, selected[len(session.carried) :])
            return replace(session, open_round=opened, carried={}, num_draws=1)
        case e.EvaluationAccepted(_, participant_id, evaluation):
            collecting = _with_evaluation(session.opened, participant_id, evaluation)
            return replace(session, open_round=collecting)
        case e.ModelEvaluated(number, evaluation):
            return _evaluated(session, number, evaluation)
        case e.ParticipantsSelected(number, more):
            grown = session.opened
            grown = replace(grown, selected=Names.of(grown.selected).including(more))
            session = _take_turns(session, number, more)
            return replace(session, open_round=grown, num_draws=session.num_draws + 1)
        case e.RoundPaused(_, at):
            return _moved(session, event, at)
        case e.RoundResumed():
            return _moved(session, event)
        case e.RoundOverdue(_, at, missed):
            session = _having_missed(session, missed)
            # Participants that failed are asked once more, since nobody else may be there.
            overdue = replace(session.opened, overdue_at=at, failed={})
            return replace(session, open_round=overdue)
        case e.UploadNameBound(participant_id, name):
            names = including(session.upload_names, name, participant_id)
            return replace(session, upload_names=names)
        case e.UpdateRefused(participant_id):
            session = _with_broken(session, participant_id, "its update was refused")
            return _with_fault(session, participant_id, num_refused=1)
        case e.GroupBroken(participant_id, reason=reason):
            return _with_broken(session, participant_id, reason)
        case e.RoundRestarted():
            return _restarted(session, event)
        case e.TrainingFailed(participant_id):
            return _with_failed(session, participant_id)
        case e.ParticipantReturned(participant_id):
            opened = session.opened
            opened = replace(opened, failed=excluding(opened.failed, participant_id))
            return replace(session, open_round=opened)
        case e.UpdateDamaged():
            return _without_update(session, event)
        case e.ParticipantLeftOut(participant_id, until):
            known = session.refusals.get(participant_id, Refusals())
            known = Refusals(known.num, left_out_until=until)
            session = replace(session, refusals=including(session.refusals, participant_id, known))
            if until > session.round:
                left_out = including(session.left_out, participant_id, None)
                session = replace(session, left_out=left_out)
            return _released(session, participant_id)
        case e.RoundClosed(_, at, missed=missed):
            session = _having_missed(session, missed)
            closed = replace(session.opened, closed_at=at, learning_rate=_learning_rate(session))
            return replace(_moved(session, event, at), open_round=closed)
        case e.ModelPublished(at=at):
            return _after_publication(_moved(session, event, at), event.published(session.model))
        case e.SessionFinished(cause, at, ended_because):
            # open_round moves to last_round so that resends are still recognised.
            ended = session.open_round
            progress = replace(session.evaluation, owed=(), ended_because=ended_because)
            if ended is not None and ended.is_evaluation:
                best = _compared(session, ended).evaluation.best
                progress = replace(progress, best=best, last_round=ended)
                ended = None
            session = _moved(session, event, at)
            return replace(
                session,
                cause=cause,
                evaluation=progress,
                open_round=None,
                last_round=ended or session.last_round,
                carried={},
                unselected={},
                bases={},
            )
        case e.SessionOpened():
            raise AssertionError("a session is opened once, by `begin`")


def _with_contender(session: Session, refused: e.InstanceRefused) -> Session:
    participant_id = refused.participant_id
    member = session.members[participant_id]
    sign = session.heard.get(participant_id, Heard(max(member.joined_at, session.lease_floor)))
    contenders = dict(sign.contenders)
    before = contenders.pop(refused.instance_id, None)
    first_at = refused.at if before is None else before.first_at
    contenders[refused.instance_id] = Contender(first_at, refused.at, refused.origin)
    for forgotten in list(contenders)[:-MAX_CONTENDERS]:
        del contenders[forgotten]
    heard = Heard(sign.at, sign.state, sign.round, contenders, sign.transfer)
    return replace(session, heard=including(session.heard, participant_id, heard))


def _moved(session: Session, event: e.Event, at: float | None = None) -> Session:
    """The session in the phase that an event leads to. at: session time of the event."""
    phase = TRANSITIONS.get((session.phase, type(event)))
    assert phase is not None, f"{type(event).__name__} cannot happen while {session.phase}"
    if phase is session.phase:
        return session
    return replace(session, phase=phase, since=session.since if at is None else at)


def _with_fault(session: Session, participant_id: str, *, num_refused: int = 0) -> Session:
    """Count a refused update, a failure or a missed deadline, unless that has led to something."""
    if session.is_left_out(participant_id):
        return session
    known = session.refusals.get(participant_id, Refusals())
    known = Refusals(
        known.num + num_refused, known.in_a_row + 1, known.left_out_until, session.round
    )
    return replace(session, refusals=including(session.refusals, participant_id, known))


def _with_failed(session: Session, participant_id: str) -> Session:
    """Release a participant whose own code failed, and do not select it again in this round."""
    session = _with_broken(session, participant_id, "its training failed")
    session = _released(_with_fault(session, participant_id), participant_id)
    round_ = session.open_round
    if round_ is None:
        return session
    failed = including(round_.failed, participant_id, None)
    return replace(session, open_round=replace(round_, failed=failed))


def _is_attempted(session: Session, task: Task) -> bool:
    """Whether a round of this task is trained in process groups."""
    is_trained = task is Task.TRAIN and not session.is_untrained
    return session.rules.aggregation == attempts.RULE and is_trained


def _with_broken(session: Session, participant_id: str, reason: str) -> Session:
    """Record why a member that still owes its slice has stopped training in the open attempt."""
    round_ = session.open_round
    if round_ is None or not round_.attempt or not round_.owes(participant_id):
        return session
    if participant_id in round_.broken:
        return session
    broken = including(round_.broken, participant_id, reason)
    return replace(session, open_round=replace(round_, broken=broken))


def _restarted(session: Session, event: e.RoundRestarted) -> Session:
    """Begin the open round once more, without the slices that came in."""
    session = _having_missed(session, event.missed)
    before = session.opened
    opened = replace(
        before,
        selected=Names.of(event.selected),
        target=len(event.selected),
        num_wanted=len(event.selected),
        updates={},
        places={},
        evaluations={},
        failed={p: None for p in before.failed if p not in event.selected},
        attempt=event.attempt,
        broken={},
        reopened_at=event.at,
        stopped_first=attempts.with_first(before),
    )
    unselected = {p: None for p, member in session.members.items() if member.is_eligible}
    session = replace(session, unselected=unselected)
    session = _take_turns(session, event.round, event.selected)
    return replace(session, open_round=opened, num_draws=session.num_draws + 1)


def _having_missed(session: Session, missed: Iterable[str]) -> Session:
    for participant_id in missed:
        session = _with_fault(session, participant_id)
    return session


def _with_update(round_: Round, update: Update, at: float | None) -> Round:
    if round_.first_update_at is None and at is not None:
        round_ = replace(round_, first_update_at=at)
    participant_id = update.participant_id
    assert participant_id in round_.selected, "an update from outside the selection"
    assert participant_id not in round_.updates, "an update counted twice"
    updates = including(round_.updates, participant_id, update)
    place = place_of(update.weights.ref.key)
    if place == update_key(round_.trained_by(participant_id), participant_id):
        return replace(round_, updates=updates)
    places = including(round_.places, place, participant_id)
    return replace(round_, updates=updates, places=places)


def _with_loss(round_: Round, participant_id: str, metrics: Mapping[str, float]) -> Round:
    loss = next((metrics[name] for name in descent.LOSSES if name in metrics), None)
    if loss is None:
        return round_
    return replace(round_, losses=including(round_.losses, participant_id, loss))


def _learning_rate(session: Session) -> float | None:
    """The rate of the step that the open round makes; None if it makes none."""
    rules, model = session.rules, session.model
    if rules.aggregation != descent.RULE or model is None or model.is_empty:
        return None
    # An epoch is a step, and the steps of the sessions that this one extends count, too.
    step, known = session.epoch_base, session.evaluation.descent
    return descent.learning_rate(rules.aggregation_options, step, known)


def _descended(session: Session, round_: Round) -> Session:
    """Take the mean loss at the model that the round's step has left."""
    if round_.learning_rate is None:
        return session
    sites = ((round_.updates[p].num_samples, {"loss": v}) for p, v in round_.losses.items())
    loss = mean_metrics(sites).get("loss")
    known = session.evaluation
    after = descent.after_step(session.rules.aggregation_options, known.descent, loss)
    return replace(session, evaluation=replace(known, descent=after))


def _with_evaluation(round_: Round, participant_id: str, evaluation: Evaluation) -> Round:
    evaluations = including(round_.evaluations, participant_id, evaluation)
    return replace(round_, evaluations=evaluations)


def _compared(session: Session, round_: Round) -> Session:
    """Compare the model of a round with the best one, by what participants have measured. The
    coordinator's own evaluations take the place of theirs where it has data."""
    if session.rules.evaluate_data or not round_.evaluations:
        return session
    known = session.evaluation
    mean = mean_evaluation(round_.evaluations.values())
    best = better(known.best, session.rules, round_.number, mean)
    return replace(session, evaluation=replace(known, best=best))


def _evaluated(session: Session, number: int, evaluation: Evaluation | None) -> Session:
    """The coordinator has measured the first of the models that it owes, or could not."""
    known = session.evaluation
    best = better(known.best, session.rules, number, evaluation)
    return replace(session, evaluation=replace(known, best=best, owed=known.owed[1:]))


def _owing_evaluation(session: Session) -> Session:
    """Let the coordinator evaluate the present model, if it is to be evaluated. The last model does
    not wait for earlier ones."""
    model, rules, known = session.model, session.rules, session.evaluation
    if not rules.evaluate_data or rules.evaluate_every == 0 or model is None or model.is_empty:
        return session
    is_evaluated = known.best is not None and known.best.latest_round == model.round
    is_last = session.is_trained
    if is_evaluated or not (is_last or rules.evaluates(model.round)):
        return session
    first, waiting = known.owed[:1], known.owed[1:]
    kept = () if is_last else waiting[1 - MAX_BACKLOG :]
    owed = first if model in first else (*first, *kept, model)
    return replace(session, evaluation=replace(known, owed=owed))


def _without_update(session: Session, event: e.UpdateDamaged) -> Session:
    """Take a damaged update out of the open round, and let the round collect updates again."""
    round_, participant_id = session.opened, event.participant_id
    key = round_.updates[participant_id].weights.ref.key
    session = _moved(session, event, event.at)
    is_first = round_.reopened_at is None
    round_ = replace(
        round_,
        updates=excluding(round_.updates, participant_id),
        evaluations=excluding(round_.evaluations, participant_id),
        losses=excluding(round_.losses, participant_id),
        places=excluding(round_.places, place_of(key)),
        damaged=including(round_.damaged, participant_id, key),
        closed_at=None,
        reopened_at=event.at if is_first else round_.reopened_at,
        overdue_at=None if is_first else round_.overdue_at,
    )
    session = replace(session, open_round=round_)
    session = _with_broken(session, participant_id, "its slice is damaged in the store")
    member = session.members.get(participant_id)
    if member is not None and member.is_eligible:
        return session
    session = _released(session, participant_id)
    return replace(session, unselected=excluding(session.unselected, participant_id))


def _sharing_columns(session: Session, profile: DataProfile | None) -> DataProfile | None:
    """The profile, sharing equal columns with the first member's profile to save memory."""
    first = next(iter(session.members.values()), None)
    if profile is None or first is None or first.profile is None:
        return profile
    if not profile.columns or profile.columns != first.profile.columns:
        return profile
    return dataclasses.replace(profile, columns=first.profile.columns)


def _without(session: Session, participant_id: str) -> Session:
    """Remove a participant and release the update that it still owed."""
    member = session.members.get(participant_id)
    is_eligible = member is not None and member.is_eligible
    session = _released(session, participant_id)
    names = session.upload_names
    for name in [name for name, owner in names.items() if owner == participant_id]:
        names = excluding(names, name)
    session = replace(
        session,
        members=excluding(session.members, participant_id),
        heard=excluding(session.heard, participant_id),
        upload_names=names,
        num_eligible=session.num_eligible - is_eligible,
        turns=excluding(session.turns, participant_id),
        unselected=excluding(session.unselected, participant_id),
        left_out=excluding(session.left_out, participant_id),
    )
    return _with_departed(session, participant_id)


def _released(session: Session, participant_id: str) -> Session:
    """Take a participant that owes an update out of the selection. An accepted update stays."""
    if not session.owes_update(participant_id):
        return session
    session = _with_broken(session, participant_id, "it has left")
    round_ = session.open_round
    if round_ is not None:
        selected = Names.of(round_.selected).excluding(participant_id)
        carried = excluding(round_.carried, participant_id)
        round_ = replace(round_, selected=selected, carried=carried)
    return replace(
        session,
        open_round=round_,
        carried=excluding(session.carried, participant_id),
        unselected=including(session.unselected, participant_id, None),
    )


def _with_departed(session: Session, participant_id: str) -> Session:
    """Keep the faults of a participant that has left, of at most MAX_DEPARTED participants."""
    known = session.refusals.get(participant_id)
    if known is None:
        return session
    if not known.in_a_row and not session.is_left_out(participant_id):
        return replace(session, refusals=excluding(session.refusals, participant_id))
    refusals = including(session.refusals, participant_id, known)  # as the latest of them
    if len(refusals) > MAX_DEPARTED:
        departed = [p for p in refusals if p not in session.members]
        for forgotten in departed[: max(0, len(departed) - MAX_DEPARTED)]:
            refusals = excluding(refusals, forgotten)
    return replace(session, refusals=refusals)


def _take_turns(session: Session, number: int, selected: Sequence[str]) -> Session:
    """Note that participants are selected for a round, in this order."""
    first = session.num_turns + 1
    turns = {p: Turn(at, number) for at, p in enumerate(selected, first)}
    num_turns = session.num_turns + len(selected)
    return replace(
        session,
        num_turns=num_turns,
        turns=including_all(session.turns, turns),
        unselected={p: None for p in session.unselected if p not in turns},
    )


def _well_again(session: Session, participant_id: str) -> Session:
    """Clear the faults in a row of a participant after a good update, and select it again."""
    known = session.refusals.get(participant_id)
    if known is None or known == Refusals(known.num):
        return session
    return replace(
        session,
        refusals=including(session.refusals, participant_id, Refusals(known.num)),
        left_out=excluding(session.left_out, participant_id),
    )


def _without_statistics(profile: DataProfile) -> DataProfile:
    return dataclasses.replace(profile, statistics="") if profile.statistics else profile


def _forget_statistics(session: Session) -> Session:
    """Drop all statistics: the preprocessing is fitted, and a model that has to be made again is
    made with it."""
    if session.requested is not None:
        session = replace(session, requested=tuple(map(_without_statistics, session.requested)))
    members = dict(session.members)
    if not any(member.profile and member.profile.statistics for member in members.values()):
        return session
    for name, member in members.items():
        if member.profile is not None:
            members[name] = dataclasses.replace(member, profile=_without_statistics(member.profile))
    return replace(session, members=including_all(session.members, members))


def _after_publication(session: Session, model: GlobalModel) -> Session:
    round_ = session.opened
    carried = carried_over(round_, session.rules) if session.is_buffered else {}
    known = {**session.bases, round_.number: session.base}
    # XAIN's round number stays at the last round when there is none after it.
    number = min(model.round, session.rules.num_rounds - 1)
    counted = session.counted
    if session.is_buffered:
        new = {p: (round_.trained_by(p), update) for p, update in round_.updates.items()}
        counted = {p: latest for p, latest in {**counted, **new}.items() if p in session.members}
    session = _descended(_compared(session, round_), round_)
    session = replace(
        session,
        round=number,
        epoch_base=session.epoch_base + round_.epochs,
        model=model,
        open_round=None,
        last_round=round_,
        carried=carried,
        unselected={
            p: None for p, m in session.members.items() if m.is_eligible and p not in carried
        },
        left_out={p: None for p in session.left_out if session.refusals[p].left_out_until > number},
        bases={trained: known[trained] for trained in sorted(set(carried.values()))},
        counted=counted,
        num_draws=0,
    )
    return _owing_evaluation(session)


def fold(session: Session, events: Iterable[e.Event]) -> Session:
    """evolve over many events."""
    for event in events:
        session = evolve(session, event)
    return session
