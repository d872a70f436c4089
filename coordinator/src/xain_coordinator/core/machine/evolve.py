"""Changes of a session by its events.

    begin(opened)           -> the session that its first event describes
    evolve(session, event)  -> the session after it

The same events always give the same session. Nothing is refused here: what is in the journal has
happened. Whether something may happen is decided before, in answers.py and steps.py.

A session is in one of four phases, and TRANSITIONS below is the whole of what leads from one to
another.

STANDBY: no updates are taken in. A session begins here, and waits until enough participants are
connected, a fit is requested, the first model is made from their profiles, or its script has
configured the next round. It comes back here after each round, mostly for no time at all: where
the next round can open, the decision that published the model opens it. A round whose participants
have become too few waits here as well: it is paused, keeps the updates that it has, and is the
same round when it is resumed.

COLLECTING: a round is open, and the selected participants train. An UpdateAccepted changes the
round and no phase; so do those who join, leave, fail or are selected in another's place. A round
that has its updates, or its deadline with enough of them, is closed. So may be a paused one, since
what it has makes a model.

AGGREGATING: the round is closed, and its model is made of the updates that it has. This phase ends
with the model's publication, or with the discovery that one of the updates is damaged in the
store. Then the round takes updates again, without that one.

FINISHED: the session is over, for good and for a cause. It is reached from each of the others,
since training may be completed, cancelled, given up or failed at any moment. The last model may be
evaluated before: that is a round, too, in COLLECTING, whose task is EVALUATE and whose answers are
measurements. It closes with the session itself, and nothing is aggregated.

An event that names a participant changes the session's parts by the methods of those parts: its
members (membership.py), the open round (round.py), the state of selection (selection_state.py),
the work that outlasts its round (buffered.py) and the progress of evaluations (evaluation.py). The
parts are never changed where they are: each method gives a new one.

Two kinds of events exist. Durable ones are in the journal, and a session that is folded from it
has seen all of them. Soft ones, such as signs of life, are not: they may be lost with the process,
and nothing that must outlast it may depend on them. A restart is such an event, too: it gives each
member a whole lease again.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts import attempts, control, descent
from xain_coordinator.core.parts.evaluation import EvaluationProgress
from xain_coordinator.core.parts.membership import Member, Members, without_statistics
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.layered import including
from xain_coordinator.core.vocabulary.replacing import replace
from xain_coordinator.core.vocabulary.values import (
    Evaluation,
    GlobalModel,
    Lineage,
    Phase,
    Rules,
    Task,
)
from xain_workloads.model import CONTROL_LOST

REMOVED = "an operator has removed it"

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


def open_session(
    session_id: str, rules: Rules, now: float, lineage: Lineage | None = None, unix_s: int = 0
) -> tuple[Session, e.SessionOpened]:
    """A new session and the event that begins its journal."""
    opened = e.SessionOpened(session_id, rules, now, lineage, unix_s)
    return begin(opened), opened


def begin(opened: e.SessionOpened) -> Session:
    """The session that its first event describes."""
    return Session(
        opened.session_id,
        opened.rules,
        opened.lineage,
        opened_unix_s=opened.unix_s,
        epoch_base=0 if opened.lineage is None else opened.lineage.num_epochs,
        since=opened.at,
        noted_at=opened.at,
        members=Members(lease_floor=opened.at),
    )


def fold(session: Session, events: Iterable[e.Event]) -> Session:
    """The session after events, folded one by one; the given session is not changed."""
    for event in events:
        session = evolve(session, event)
    return session


def evolve(session: Session, event: e.Event) -> Session:
    """The session after an event; the one before is not changed. Nothing is refused: an event that
    cannot happen in this phase is a broken invariant."""
    members, selection = session.members, session.selection
    match event:  # what happens most often comes first
        case e.ParticipantHeard(participant_id, state, round_, at, transfer):
            members = members.with_heard(participant_id, at, state, round_, transfer)
            return replace(session, members=members)
        case e.UpdateAccepted():
            return _with_update(session, event)
        case e.Restarted(at):
            return replace(session, members=replace(members, lease_floor=at))
        case e.InstanceRefused(participant_id, instance_id, origin, at):
            members = members.with_contender(participant_id, instance_id, origin, at)
            return replace(session, members=members)
        case e.NotAdmitted(participant_id, reason):
            return replace(session, members=members.with_not_admitted(participant_id, reason))
        case e.WaitsAsUnlike(participant_id, profile, reason, at):
            members = members.with_not_admitted(participant_id, reason)
            return replace(session, members=members.with_unlike(participant_id, profile, at))
        case e.ParticipantJoined():
            return _with_member(session, event)
        case e.GroupAddressChanged(participant_id, address):
            members = members.with_address(participant_id, address)
            session = replace(session, members=members)
            return _with_broken(session, participant_id, "its process is another one")
        case e.ParticipantLeft(participant_id):
            return _without_member(session, participant_id)
        case e.ParticipantRemoved(participant_id):
            members = members.with_not_admitted(participant_id, REMOVED)
            return replace(session, members=members, removed=session.removed | {participant_id})
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
            requested = profiles or session.profiles_of(participants)
            return replace(session, requested=requested, requested_of=participants)
        case e.InitialisationRefused(reason, findings):
            return replace(
                session,
                requested=None,
                refused=session.requested,
                trouble=reason,
                findings=findings,
            )
        case e.ModelInitialised(model, at, findings):
            session = replace(session, findings=findings)
            return _with_first_model(session, model, at)
        case e.TrainingPlanned(plan):
            rules = dataclasses.replace(session.rules, rounds=plan.rounds, epochs=plan.epochs)
            return replace(session, rules=rules, plan=plan)
        case e.RoundOpened():
            return _with_round(session, event)
        case e.EvaluationAccepted(_, participant_id, evaluation):
            evaluated = session.opened.with_evaluation(participant_id, evaluation)
            return replace(session, open_round=evaluated)
        case e.ModelEvaluated(number, evaluation):
            progress = session.evaluation.evaluated(
                number, evaluation, session.rules, session.untrained
            )
            return replace(session, evaluation=progress)
        case e.RoundConfigured(number, config, at):
            # The wait for the script is over. That for participants begins, at its full length.
            return replace(session, script=session.script.configured(number, config), since=at)
        case e.ScriptEvaluated(number, evaluation):
            return _with_script_evaluation(session, number, evaluation)
        case e.ScriptEnded(at):
            return replace(session, script=session.script.ended(), since=at)
        case e.CentralMeasured(central):
            return replace(session, evaluation=replace(session.evaluation, central=central))
        case e.ModelsRemoved():
            return session  # it uses none of them
        case e.ParticipantsSelected(number, more):
            selection = selection.with_selected(number, more)
            selection = replace(selection, num_draws=selection.num_draws + 1)
            grown = session.opened.with_selected(more)
            return replace(session, open_round=grown, selection=selection)
        case e.RoundPaused(_, at):
            return _moved(session, event, at)
        case e.RoundResumed():
            return _moved(session, event)
        case e.RoundOverdue(_, at, missed):
            # Participants that failed are asked once more, since there may be no others.
            overdue = replace(session.opened, overdue_at=at, failed={})
            selection = selection.with_missed(missed, session.round)
            return replace(session, open_round=overdue, selection=selection)
        case e.UpdateRefused(participant_id):
            session = _with_broken(session, participant_id, "its update was refused")
            selection = selection.with_fault(participant_id, session.round, num_refused=1)
            return replace(session, selection=selection)
        case e.GroupBroken(participant_id, reason=reason):
            return _with_broken(session, participant_id, reason)
        case e.RoundRestarted():
            return _restarted(session, event)
        case e.TrainingFailed(participant_id):
            return _with_failed(session, participant_id)
        case e.ParticipantReturned(participant_id):
            return replace(session, open_round=session.opened.without_failed(participant_id))
        case e.UpdateDamaged():
            return _without_update(session, event)
        case e.ParticipantLeftOut(participant_id, until):
            selection = selection.with_left_out(participant_id, until, session.round)
            return _released(replace(session, selection=selection), participant_id)
        case e.RoundClosed(_, at, missed=missed):
            selection = selection.with_missed(missed, session.round)
            closed = replace(
                session.opened,
                closed_at=at,
                learning_rate=_learning_rate(session),
                total_samples=_total_samples(session),
                control_share=control.share_of(session.opened, session.counted)
                if control.has_control(session.model)
                else None,
            )
            session = _moved(session, event, at)
            return replace(session, open_round=closed, selection=selection)
        case e.ModelPublished(at=at):
            return _after_publication(_moved(session, event, at), event.published(session.model))
        case e.SessionFinished():
            return _finished(session, event)
        case e.SessionOpened():
            raise AssertionError("a session is opened once, by `begin`")


def _moved(session: Session, event: e.Event, at: float | None = None) -> Session:
    """The session in the phase that an event leads to. at: session time of the event."""
    phase = TRANSITIONS.get((session.phase, type(event)))
    assert phase is not None, f"{type(event).__name__} cannot happen while {session.phase}"
    if phase is session.phase:
        return session
    return replace(session, phase=phase, since=session.since if at is None else at)


# --- members --------------------------------------------------------------------------------------


def _with_member(session: Session, joined: e.ParticipantJoined) -> Session:
    """The session with a participant that has joined. It may be selected from now on, unless it is
    in the open round already."""
    participant_id, profile = joined.participant_id, joined.profile
    if profile is not None:
        profile = profile if session.model is None else without_statistics(profile)
        profile = session.members.sharing_columns(profile)
    member = Member(
        participant_id,
        profile,
        joined.at,
        joined.tags,
        session.rules.is_eligible(participant_id, joined.tags),
        joined.can_evaluate,
        joined.instance_id,
        joined.can_initialise,
        joined.group_address,
    )
    opened = session.open_round
    # A participant that handed in, left and came back is still one of the selected.
    is_selected = opened is not None and participant_id in opened.selected
    selection = session.selection.with_member(
        participant_id, session.round, is_eligible=member.is_eligible, is_selected=is_selected
    )
    if opened is not None and participant_id in opened.failed:
        opened = opened.without_failed(participant_id)
    members = session.members.with_member(member)
    return replace(session, open_round=opened, members=members, selection=selection)


def _without_member(session: Session, participant_id: str) -> Session:
    """Remove a participant and release the update that it still owed."""
    session = _released(session, participant_id)
    members = session.members.without_member(participant_id)
    selection = session.selection.without_member(participant_id, session.round, members)
    return replace(session, members=members, selection=selection)


def _released(session: Session, participant_id: str) -> Session:
    """Take a participant that owes an update out of the selection of the open round, and out of the
    work that is carried over; another may be selected in its stead. An accepted update stays."""
    if not session.owes_update(participant_id):
        return session
    round_ = session.open_round
    if round_ is not None:
        round_ = round_.with_broken(participant_id, "it has left")
        round_ = round_.without_selected(participant_id)
    return replace(
        session,
        open_round=round_,
        buffered=session.buffered.without(participant_id),
        selection=session.selection.with_unselected(participant_id),
    )


def _with_failed(session: Session, participant_id: str) -> Session:
    """Release a participant whose own code failed, and do not select it again in this round."""
    session = _with_broken(session, participant_id, "its training failed")
    selection = session.selection.with_fault(participant_id, session.round)
    session = _released(replace(session, selection=selection), participant_id)
    if session.open_round is None:
        return session
    return replace(session, open_round=session.open_round.with_failed(participant_id))


# --- the open round -------------------------------------------------------------------------------


def _with_round(session: Session, opened: e.RoundOpened) -> Session:
    """Open a round with the participants of the event, of which the first are those that are
    carried over. A round that evaluates the last model drops all training that is under way."""
    number, selected, task = opened.round, opened.selected, opened.task
    if task is Task.EVALUATE:
        # Updates that are still being trained come too late for any model.
        buffered = replace(session.buffered, carried={}, bases={})
        session = replace(session, buffered=buffered, evaluation=session.evaluation_due)
    carried = session.buffered.carried
    is_attempted = task is Task.TRAIN and not session.is_untrained
    num_chosen = 0 if task is Task.EVALUATE else len(session.chosen)
    round_ = Round(
        number,
        selected,
        target=num_chosen or len(selected),
        epochs=opened.epochs,
        opened_at=opened.at,
        num_wanted=len(selected) if opened.num_wanted is None else opened.num_wanted,
        carried=carried,
        task=task,
        attempt=int(is_attempted and session.rules.aggregation == attempts.RULE),
    )
    selection = session.selection.with_selected(number, selected[len(carried) :])
    return replace(
        _moved(session, opened, opened.at),
        open_round=round_,
        buffered=replace(session.buffered, carried={}),
        selection=replace(selection, num_draws=1),
    )


def _with_update(session: Session, accepted: e.UpdateAccepted) -> Session:
    """Count an update in the open round, with the loss and the evaluation that came with it. The
    faults in a row of its sender are cleared."""
    update, evaluation = accepted.update, accepted.evaluation
    participant_id = update.participant_id
    assert session.open_round is not None, "an update outside a round"
    round_ = session.open_round.with_update(update, accepted.at)
    if session.rules.aggregation == descent.RULE:
        round_ = round_.with_loss(participant_id, accepted.metrics)
    if accepted.metrics.get(CONTROL_LOST):
        round_ = replace(round_, lost_control=True)
    if evaluation is not None and accepted.staleness == 0:  # else it is of an earlier model
        round_ = round_.with_evaluation(participant_id, evaluation)
    selection = session.selection.with_good_update(participant_id)
    declared = session.declared
    # Initial weights are of no samples.
    says = update.num_samples > 0 and not session.is_untrained
    if says and session.samples_of(participant_id) is None:
        declared = including(declared, participant_id, update.num_samples)
    return replace(session, open_round=round_, selection=selection, declared=declared)


def _without_update(session: Session, damaged: e.UpdateDamaged) -> Session:
    """Take a damaged update out of the open round, which collects updates again. If its sender is
    no eligible member any more, the sender leaves the selection."""
    participant_id = damaged.participant_id
    round_ = session.opened.without_update(participant_id, damaged.at)
    session = replace(_moved(session, damaged, damaged.at), open_round=round_)
    member = session.members.get(participant_id)
    if member is not None and member.is_eligible:
        return session
    session = _released(session, participant_id)
    return replace(session, selection=session.selection.without_unselected(participant_id))


def _with_broken(session: Session, participant_id: str, reason: str) -> Session:
    """Record why a member has stopped training in the open attempt, if there is one."""
    if session.open_round is None:
        return session
    return replace(session, open_round=session.open_round.with_broken(participant_id, reason))


def _restarted(session: Session, event: e.RoundRestarted) -> Session:
    """Begin the next attempt at the open round, with the event's participants and without the
    slices that came in; note the deadlines that were missed."""
    selection = session.selection.with_missed(event.missed, session.round)
    selection = replace(selection, unselected=dict.fromkeys(session.members.eligible))
    selection = selection.with_selected(event.round, event.selected)
    selection = replace(selection, num_draws=selection.num_draws + 1)
    round_ = session.opened.restarted(event.selected, event.attempt, event.at)
    return replace(session, open_round=round_, selection=selection)


def _learning_rate(session: Session) -> float | None:
    """The rate of the step that the open round makes; None if it makes none."""
    rules, model = session.rules, session.model
    if rules.aggregation != descent.RULE or model is None or model.is_empty:
        return None
    # An epoch is a step, and the steps of the sessions that this one extends count, too.
    step, known = session.epoch_base, session.evaluation.descent
    return descent.learning_rate(rules.aggregation_options, step, known)


def _total_samples(session: Session) -> int:
    """Samples of all sites that train in asynchronous modes; 0 in others, and for initial weights.

    A site has those of its latest update, or of its data profile, or as many as the others. Where
    no site has any, the updates weigh the same, as in other modes.
    """
    if not session.rules.carries_over or session.is_untrained:
        return 0
    round_, known = session.opened, []
    for participant_id in round_.selected:
        update, member = round_.updates.get(participant_id), session.members.get(participant_id)
        _, latest = session.buffered.counted.get(participant_id, (-1, None))
        if (latest := update or latest) is not None:
            known.append(latest.num_samples)
        elif member is not None and member.profile is not None:
            known.append(member.profile.num_samples)
    if not any(known):
        return 0
    return sum(known) + (len(round_.selected) - len(known)) * sum(known) // len(known)


# --- models, and the end --------------------------------------------------------------------------


def _with_first_model(session: Session, model: GlobalModel, at: float | None) -> Session:
    """The session with its initial model. The preprocessing is fitted then, so the statistics of
    all profiles are dropped; an earlier refusal of profiles is forgotten."""
    requested = session.requested
    if requested is not None:
        requested = tuple(map(without_statistics, requested))
    session = replace(
        session,
        requested=requested,
        members=session.members.without_statistics(),
        model=model,
        refused=None,
        trouble="",
        since=session.since if at is None else at,
    )
    return replace(session, evaluation=session.evaluation_due)


def _after_publication(session: Session, model: GlobalModel) -> Session:
    """The session once a model is published: the open round becomes the last one, participants that
    may go on are carried over, and the model is evaluated if it is to be."""
    round_, rules, buffered = session.opened, session.rules, session.buffered
    if rules.carries_over and not session.is_untrained:
        outlasting = filter(session.outlasts_round, round_.outstanding)
        carried = {p: round_.trained_by(p) for p in outlasting}
        buffered = buffered.after_round(round_, session.base, carried, session.members)
    counted = session.counted
    if control.has_control(session.model):
        counted = control.counted_after(round_, counted, session.members)
    # The round number stays at the last round when there is none after it.
    number = min(model.round, rules.num_rounds - 1)
    unselected = (p for p in session.members.eligible if p not in buffered.carried)
    session = replace(
        session,
        round=number,
        epoch_base=session.epoch_base + round_.epochs,
        model=model,
        open_round=None,
        last_round=round_,
        buffered=buffered,
        counted=counted,
        selection=session.selection.after_round(number, unselected),
        evaluation=_compared(session, round_).descended(round_, rules),
    )
    return replace(session, evaluation=session.evaluation_due)


def _with_script_evaluation(session: Session, number: int, evaluation: Evaluation) -> Session:
    """Compare a model by the evaluation of the script. With its first one the models that sites
    have measured are compared no more: the rows are others."""
    progress = session.evaluation
    if session.script.model < 0:
        progress = replace(progress, best=None)
    script = session.script.evaluated(number, evaluation.metrics, evaluation.num_samples)
    progress = progress.measured(number, evaluation, session.rules, session.untrained)
    return replace(session, script=script, evaluation=progress)


def _compared(session: Session, round_: Round) -> EvaluationProgress:
    """The progress after a round's model is compared by the evaluations of its sites; unchanged if
    a script has measured models itself."""
    if session.script.model >= 0:
        return session.evaluation
    return session.evaluation.compared(round_, session.rules, session.untrained)


def _finished(session: Session, event: e.SessionFinished) -> Session:
    """The session after its end, which nothing changes any more. The open round becomes the last
    one, so that updates that are sent again are still recognised."""
    # open_round moves to last_round so that updates that are sent again are still recognised.
    ended, progress = session.open_round, session.evaluation
    if ended is not None and ended.task is Task.EVALUATE:
        progress = _compared(session, ended)
        progress = replace(progress, last_round=ended)
        ended = None
    return replace(
        _moved(session, event, event.at),
        members=replace(session.members, not_admitted=event.not_admitted),
        cause=event.cause,
        evaluation=replace(progress, owed=(), ended_because=event.ended_because),
        open_round=None,
        last_round=ended or session.last_round,
        buffered=replace(session.buffered, carried={}, bases={}),
        selection=replace(session.selection, unselected={}),
    )
