"""Answers to commands: the events and the reply that a command alone leads to, the first step of
`decide`."""

import dataclasses
from collections.abc import Iterator, Mapping

from xain_coordinator.core.machine.admission import Answer, rendezvous
from xain_coordinator.core.machine.needed import models_in_use
from xain_coordinator.core.machine.questions import require_member, require_selected
from xain_coordinator.core.machine.scripted import (
    SCRIPT_ENDED,
    evaluation_of,
    require_configurable,
    require_measurable,
    require_scripted,
)
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.machine.updates import check_update, require_uncounted
from xain_coordinator.core.parts.membership import (
    check_name,
)
from xain_coordinator.core.parts.points import departure_point, participant_point
from xain_coordinator.core.rules.pacing import Pacing, num_needed
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.values import (
    Evaluation,
    GlobalModel,
    ParticipantState,
    Phase,
    Task,
    Update,
)
from xain_foundation.names import brief, printable
from xain_wire.metadata import COMPLETED

# Participants that came after the end, which wait for the next session and are no members.
MAX_NEWCOMERS = 1000
CANCELLED = "cancelled by a request"  # cause of the end
FINISHED_BY_OPERATOR = "finished by an operator"
SCRIPT_FAILED = "the script failed: "  # how the cause begins
MAX_REASON = 500  # characters of a refusal that are written down
# The settings that let a participant in stand at the end of the reason.
MAX_WHY_NOT_ADMITTED = 2000
MAX_KIND = 80  # of the type of an exception
MAX_TRACEBACK = 2000
# Refusals in a row that are written down where there is no limit to them.
MAX_NOTED = 20

TRAINING_FAILED = "training failed at "  # how the cause begins of a fit that ended for it


def answer(session: Session, command: c.Command, now: float, pacing: Pacing) -> Answer:
    """The events of a command, its reply, and metric points to record. Nothing is changed: the
    caller folds the events. pacing: says how often session time is to be recorded. Raises a
    Refusal."""
    match command:
        case c.Heartbeat():
            return _heartbeat(session, command, now)
        case c.Rendezvous():
            return rendezvous(session, command, now)
        case c.EndTrainingRound():
            return _end_training_round(session, command, now)
        case c.NoteRefusedParticipant(participant_id, reason):
            return _note_not_admitted(session, participant_id, reason, now), r.Done(), ()
        case c.NoteRefusedUpdate():
            return _note_refused(session, command), r.Done(), ()
        case c.NoteFailure():
            return _note_failure(session, command, now), r.Done(), ()
        case c.NoteGroupBroken():
            return _note_group_broken(session, command), r.Done(), ()
        case c.NoteDamagedUpdates(reasons):
            return tuple(_damaged(session, reasons, now)), r.Done(), ()
        case c.RequestFit():
            if not session.waits_for_request:
                raise errors.Refusal(errors.Reason.ALREADY_FITTING, _why_not_waiting(session))
            return (e.FitRequested(now),), r.Done(), ()
        case c.CancelFit():
            if session.phase is Phase.FINISHED or session.waits_for_request:
                raise errors.Refusal(
                    errors.Reason.NOT_FITTING, f"session {session.session_id} is not fitting"
                )
            return (e.SessionFinished(CANCELLED, now),), r.Done(), ()
        case c.RemoveParticipant(participant_id):
            removed = _removal(session, participant_id)
            is_gone = participant_id in session.members and bool(removed)
            return removed, r.Done(), (departure_point(participant_id),) if is_gone else ()
        case c.NoteRevoked(participant_id):
            if session.phase is Phase.FINISHED or participant_id not in session.members:
                return (), r.Done(), ()
            left = e.ParticipantLeft(participant_id, "revoked")
            return (left,), r.Done(), (departure_point(participant_id),)
        case c.FinishSession(reason):
            return (_finished_by_operator(session, reason, now),), r.Done(), ()
        case c.ConfigureRound(round_, config):
            is_new = require_configurable(session, command)
            return ((e.RoundConfigured(round_, config, now),) if is_new else ()), r.Done(), ()
        case c.RecordEvaluation(model):
            evaluation = evaluation_of(command)
            is_new = require_measurable(session, command, evaluation)
            return ((e.ScriptEvaluated(model, evaluation, now),) if is_new else ()), r.Done(), ()
        case c.EndScript():
            return _end_of_script(session, command, now), r.Done(), ()
        case c.Tick(late_s):
            expired = tuple(_expired(session, now - late_s))
            points = tuple(departure_point(left.participant_id) for left in expired)
            note_at = session.note_at(pacing)
            noted = (e.TimePassed(now),) if note_at is not None and note_at <= now else ()
            return (*noted, *expired), r.Done(), points
        case c.InitialisationDone(model, findings):
            _require_waiting_for_model(session)
            return (e.ModelInitialised(model, now, findings),), r.Done(), ()
        case c.InitialisationFailed(reason, findings):
            _require_waiting_for_model(session)
            return (e.InitialisationRefused(reason, findings),), r.Done(), ()
        case c.AggregationDone(model):
            return _aggregation_done(session, model, now), r.Done(), ()
        case c.EvaluationDone(round_, evaluation, reason):
            owed = session.evaluation.owed
            if not owed or owed[0].round != round_:
                raise errors.StaleModel(f"the evaluation of model {round_} is not waited for")
            return (
                (e.ModelEvaluated(round_, evaluation, now, brief(reason, MAX_REASON)),),
                r.Done(),
                (),
            )
        case c.CentralDone(central):
            if session.phase is Phase.FINISHED or session.central_due is None:
                raise errors.StaleModel("the central model is not waited for")
            return (e.CentralMeasured(central, now),), r.Done(), ()
        case c.RemoveModels(rounds):
            unused = tuple(sorted({*rounds} - models_in_use(session)))
            return ((e.ModelsRemoved(unused),) if unused else ()), r.Done(), ()
        case c.EffectFailed(cause):
            if session.phase is Phase.FINISHED:
                return (), r.Done(), ()
            return (e.SessionFinished(cause, now),), r.Done(), ()


def _removal(session: Session, participant_id: str) -> tuple[e.Event, ...]:
    """The events of an operator's removal of a participant, which may be no member; none if it was
    removed before. Raises a Refusal after the end of the session, and INVALID_NAME."""
    _require_unfinished(session)
    check_name(participant_id)
    if participant_id in session.removed:
        return ()
    removed = e.ParticipantRemoved(participant_id)
    if participant_id not in session.members:
        return (removed,)
    return e.ParticipantLeft(participant_id, "removed"), removed


def _finished_by_operator(session: Session, reason: str, now: float) -> e.SessionFinished:
    """The event by which an operator ends the session: completed if a model was trained, else with
    the reason as its cause. Raises a Refusal, NOT_FITTING, after the end."""
    _require_unfinished(session)
    said = brief(printable(reason), MAX_REASON)
    because = f"{FINISHED_BY_OPERATOR}: {said}" if said else FINISHED_BY_OPERATOR
    if session.num_trained:
        return e.SessionFinished(COMPLETED, now, because)
    return e.SessionFinished(f"{because}, before a model was trained", now)


def _end_of_script(session: Session, command: c.EndScript, now: float) -> tuple[e.Event, ...]:
    """The events of a script's end: a failure, an end before any model and one in an open round end
    the session; between two rounds the last model is still evaluated. None if it has ended
    before."""
    require_scripted(session, command.session_id)
    if session.phase is Phase.FINISHED:
        return ()
    if command.failure:
        return (e.SessionFinished(f"{SCRIPT_FAILED}{command.failure[:MAX_TRACEBACK]}", now),)
    if session.script.is_over:
        return ()
    ended = e.ScriptEnded(now)
    if not session.num_trained:
        return ended, e.SessionFinished(f"{SCRIPT_ENDED} before a model was trained", now)
    if session.open_round is not None:
        return ended, e.SessionFinished(COMPLETED, now, f"{SCRIPT_ENDED} in round {session.round}")
    return (ended,)


def _require_unfinished(session: Session) -> None:
    """Refuse a command after the end of the session. Raises a Refusal, NOT_FITTING."""
    if session.phase is Phase.FINISHED:
        raise errors.Refusal(
            errors.Reason.NOT_FITTING, f"session {session.session_id} is finished already"
        )


def _why_not_waiting(session: Session) -> str:
    """Why a request to fit is refused by a session that does not wait for one."""
    name = f"session {session.session_id}"
    if session.phase is Phase.FINISHED:
        return f"{name} is finished; a fit opens a new session"
    if session.rules.start != "request":
        return f"{name} starts by itself as soon as enough participants are connected"
    return f"{name} is fitting; wait until it is finished"


def _require_waiting_for_model(session: Session) -> None:
    """Check that the session has asked for an initial model and has none yet. Raises StaleModel."""
    waits = session.phase is Phase.STANDBY and session.requested is not None
    if not waits or session.model is not None:
        raise errors.StaleModel("the initial model is not asked for, or is there already")


def _note_not_admitted(
    session: Session, participant_id: str, reason: str, now: float
) -> tuple[e.Event, ...]:
    """The event that notes a refused participant; none for a member. A session of a study ends,
    too, if all its sites were refused."""
    if session.phase is Phase.FINISHED or participant_id in session.members:
        return ()
    noted = e.NotAdmitted(participant_id, brief(reason, MAX_WHY_NOT_ADMITTED))
    refused = {*session.members.not_admitted, participant_id}
    if session.rules.sites and refused.issuperset(session.rules.sites):
        return noted, e.SessionFinished(brief(f"{participant_id}: {reason}", MAX_REASON), now)
    return (noted,)


def _heartbeat(session: Session, command: c.Heartbeat, now: float) -> Answer:
    """Answer a heartbeat: it renews the lease of a member, or ends its membership if it says that
    it leaves. After the end the participant is told of it. Raises NotAMember."""
    participant_id = command.participant_id
    if session.phase is Phase.FINISHED:
        return _answer_after_the_end(session, command, now)
    require_member(session, participant_id)
    if command.state is ParticipantState.FINISHED:
        left = e.ParticipantLeft(participant_id, "left")
        reply = r.Advertisement(Phase.STANDBY, session.round, False)
        return (left,), reply, (participant_point(participant_id, command.state, command.round),)
    state, transfer = command.state, command.transfer
    heard = e.ParticipantHeard(participant_id, state, command.round, now, transfer)
    point = participant_point(participant_id, state, command.round)
    return (heard,), r.Heard(), (point,)


def _answer_after_the_end(session: Session, command: c.Heartbeat, now: float) -> Answer:
    """Answer a heartbeat after the end of the session. Where another session may follow, each
    sender is noted as heard, with a bound on newcomers; else a member is noted once as finished."""
    participant_id, finished = command.participant_id, ParticipantState.FINISHED
    reply = r.Heard()
    known = session.members.heard.get(participant_id)
    if session.rules.stays:  # the participant may stay for the next session
        is_counted = participant_id in session.members or known is not None
        if not is_counted and len(session.members.heard) >= len(session.members) + MAX_NEWCOMERS:
            return (), reply, ()
        return (e.ParticipantHeard(participant_id, command.state, command.round, now),), reply, ()
    if participant_id not in session.members:
        return (), reply, ()
    if known is not None and known.state is finished:
        return (), reply, ()
    heard = e.ParticipantHeard(participant_id, finished, command.round, now)
    return (heard,), reply, (participant_point(participant_id, finished, session.round),)


def _end_training_round(session: Session, command: c.EndTrainingRound, now: float) -> Answer:
    """The events of an update that a participant hands in, or of an evaluation in an EVALUATE
    round. The same one again gets the first reply and no event, also when the round is closed.
    Raises a Refusal, such as InvalidUpdate, if it cannot count."""
    participant_id = command.participant_id
    known = session.accepted(participant_id, command.round)
    # Before anything else: an acknowledged sender may ask for its answer again, even when the
    # round has closed meanwhile or its lease has run out.
    if known is not None and command.weights is not None:
        digest = command.weights.ref.digest
        if (known.weights.ref.digest, known.num_samples) == (digest, command.num_samples):
            return (), r.Done(), ()
    evaluation = command.evaluation or Evaluation(0, {})
    if (answer := session.evaluated(participant_id, command.round)) is not None:
        # A local model that was trained anew after a kill may have had less time, and importances.
        first, again = (
            dataclasses.replace(one, local=None, importances=()) for one in (answer, evaluation)
        )
        if first != again:
            raise errors.duplicate_update(participant_id, command.round)
        return (), r.Done(), ()
    round_ = require_selected(session, participant_id, command.round)
    number = command.round  # that it trains
    if round_.task is Task.EVALUATE:
        evaluated = e.EvaluationAccepted(number, participant_id, evaluation)
        return (evaluated,), r.Done(), command.metrics
    if round_.attempt != command.attempt and round_.attempt:
        raise errors.LateUpdate(
            errors.Reason.STALE_ATTEMPT,
            f"the slice is of attempt {command.attempt} at round {number}, and attempt "
            f"{round_.attempt} goes on; drop it",
        )
    if known is not None:
        raise errors.duplicate_update(participant_id, number)
    if command.weights is None:
        raise errors.Refusal(
            errors.Reason.UPLOAD_MISSING,
            f"there is no such upload for round {number}; upload it first",
        )
    require_uncounted(session, participant_id, command.weights.ref.key)
    model = _model(session)
    # A trained model keeps its layout, whatever an update says. A slice needs one of its own.
    layout = command.layout if model.is_empty or round_.attempt else ()
    update = Update(participant_id, command.weights, command.num_samples, layout)
    limit = session.samples_of(participant_id) if command.is_bounded else None
    if limit is not None and command.num_samples > limit:
        raise errors.InvalidUpdate(
            f"the update declares {command.num_samples} samples, and {participant_id} has said "
            f"that it has {limit}"
        )
    check_update(model, round_, update, session.rules)
    is_measured = command.evaluation is not None and not model.is_empty
    accepted = e.UpdateAccepted(
        round_.number,
        update,
        staleness=round_.number - number,
        metrics=command.training,
        evaluation=command.evaluation if is_measured and session.evaluates(number) else None,
        at=now,
    )
    return (accepted,), r.Done(), command.metrics


def _note_refused(session: Session, command: c.NoteRefusedUpdate) -> tuple[e.Event, ...]:
    """The events of a refused update: the refusal, and that the participant is left out if this
    fault is one too many. None unless it owes an update of that round and is not left out
    already."""
    participant_id = command.participant_id
    if not _is_owed(session, participant_id, command.round):
        return ()  # it came too late, which is no fault
    if session.is_left_out(participant_id):
        return ()
    num_noted = session.selection.faults_of(participant_id).in_a_row
    if session.rules.refused_limit == 0 and num_noted >= MAX_NOTED:
        return ()
    refused = e.UpdateRefused(participant_id, command.round, brief(command.reason, MAX_REASON))
    return refused, *_left_out(session, participant_id)


def _note_failure(session: Session, command: c.NoteFailure, now: float) -> tuple[e.Event, ...]:
    """The events of a failed training, which counts as a fault like a refused update; none if the
    participant owes no update of that round. It is selected again in this round only if it joins
    again.
    A fit that was requested ends when too few others are left, and so does a session of a study:
    their participants stay for the next. Raises NotAMember."""
    participant_id = command.participant_id
    require_member(session, participant_id)
    if not _is_owed(session, participant_id, command.round):
        return ()
    failed = e.TrainingFailed(
        participant_id,
        command.round,
        printable(command.kind)[:MAX_KIND],
        brief(printable(command.message), MAX_REASON),
        command.traceback[:MAX_TRACEBACK],
    )
    if session.rules.stays and _leaves_too_few(session, participant_id):
        why = f"{TRAINING_FAILED}{participant_id}: {failed.message or failed.kind}"
        return failed, e.SessionFinished(why, now)
    return failed, *_left_out(session, participant_id)


def _leaves_too_few(session: Session, participant_id: str) -> bool:
    """Whether the open round cannot be closed any more without this participant."""
    round_ = session.open_round
    if round_ is None or round_.task is Task.EVALUATE:
        return False
    able = session.chosen_of(session.members.eligible)
    others = {*able, *round_.updates} - {participant_id, *round_.failed}
    return len(others) < num_needed(round_, session.rules)


def _note_group_broken(session: Session, command: c.NoteGroupBroken) -> tuple[e.Event, ...]:
    """The event that breaks the open attempt; none if the report is of another attempt, is a second
    one, or comes from a participant that owes nothing. Raises NotAMember."""
    participant_id = command.participant_id
    require_member(session, participant_id)
    round_ = session.open_round
    if round_ is None or not round_.attempt or round_.attempt != command.attempt:
        return ()
    if participant_id in round_.broken or not _is_owed(session, participant_id, command.round):
        return ()
    reason = brief(printable(command.reason), MAX_REASON)
    return (e.GroupBroken(participant_id, command.round, command.attempt, reason),)


def _is_owed(session: Session, participant_id: str, round_: int) -> bool:
    """Whether the participant owes an update, and owes it for this round."""
    if session.phase is Phase.FINISHED or not session.owes_update(participant_id):
        return False
    return session.trained_by(participant_id) == round_


def _left_out(session: Session, participant_id: str) -> tuple[e.Event, ...]:
    """The event that leaves a participant out of the next rounds, if one more fault in a row
    reaches refused_limit; else none."""
    limit = session.rules.refused_limit
    num_before = session.selection.faults_of(participant_id).in_a_row
    if limit == 0 or session.is_left_out(participant_id) or num_before + 1 < limit:
        return ()
    until = session.round + session.rules.refused_rounds + 1
    return (e.ParticipantLeftOut(participant_id, until),)


def _damaged(session: Session, reasons: Mapping[str, str], now: float) -> Iterator[e.UpdateDamaged]:
    """Yield an event for each damaged update that still counts in the open round.

    reasons: by key of the object. An update that was read some time ago may have been replaced
    since then, under
    another key.
    """
    round_ = session.open_round
    if round_ is None:
        return
    for participant_id, update in round_.updates.items():
        reason = reasons.get(update.weights.ref.key)
        if reason is not None:
            yield e.UpdateDamaged(
                participant_id, round_.number, update.num_samples, brief(reason, MAX_REASON), now
            )


def _model(session: Session) -> GlobalModel:
    """The session's model, which must exist."""
    assert session.model is not None, "a round is open without a model"
    return session.model


def _expired(session: Session, now: float) -> Iterator[e.ParticipantLeft]:
    """Yield the departure of each member whose lease has run out at `now`; nothing after the
    end."""
    if session.phase is Phase.FINISHED:
        return
    for participant_id, expires_at in session.members.expiries(session.rules.lease_s):
        if expires_at <= now:
            yield e.ParticipantLeft(participant_id, "expired")


def _aggregation_done(session: Session, model: GlobalModel, now: float) -> tuple[e.Event, ...]:
    """The publication of a model that was made from the round that is being aggregated. Raises
    StaleModel for a model of another round."""
    if session.phase is not Phase.AGGREGATING or model.round != session.round + 1:
        raise errors.StaleModel(
            f"model {model.round} is not the one that round {session.round} "
            f"({session.phase}) waits for"
        )
    return (e.ModelPublished.after(_model(session), model, now),)
