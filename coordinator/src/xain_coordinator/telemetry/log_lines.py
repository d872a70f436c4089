"""Log lines of events, written once the events are durable."""

import logging
from collections.abc import Sequence
from itertools import islice

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts.evaluation import together
from xain_coordinator.core.view.accounts import MAX_WARNINGS
from xain_coordinator.core.view.history import History
from xain_coordinator.core.view.records import MAX_NAMES_OF_A_ROUND, RoundRecord
from xain_coordinator.core.view.view import MAX_ABSENT, planned
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary.values import Evaluation, Task
from xain_coordinator.ports import Record
from xain_foundation.logs.logger import get_logger

log = get_logger(__name__)

# More updates that are committed together share one line of the log. A person reads the names of a
# few. Eight lines of one commit took a twentieth of the coordinator's processor time in
# benchmarks/round_overhead.py.
MAX_UPDATE_LINES = 4


def log_many_updates(records: Sequence[Record]) -> bool:
    """Write one line for the updates of a commit if they are too many for a line each, which only
    debug has. Returns whether the line was written."""
    accepted = [r.event for r in records if isinstance(r.event, e.UpdateAccepted)]
    if len(accepted) <= MAX_UPDATE_LINES or logging.getLogger(__name__).isEnabledFor(logging.DEBUG):
        return False
    for number in dict.fromkeys(event.round for event in accepted):
        names = [event.update.participant_id for event in accepted if event.round == number]
        log.info("updates_accepted", round=number, num_updates=len(names), **_named(names))
    return True


def log_event(before: Session, session: Session, event: e.DurableEvent, history: History) -> None:
    """Write the line of an event. history: after the event."""
    fields: dict[str, object] = {"round": session.round}
    match event:
        case e.ParticipantJoined(participant_id, tags=tags):
            fields |= {"connected": len(session.members), "required": session.rules.num_required}
            if tags:
                fields |= {
                    "tags": dict(tags),
                    "eligible": session.members[participant_id].is_eligible,
                }
            log.info("participant_joined", participant=participant_id, **fields)
        case e.ParticipantLeft(participant_id, cause):
            log.info("participant_left", participant=participant_id, cause=cause, **fields)
        case e.FitRequested():
            log.info("fit_requested", connected=len(session.members), **fields)
        case e.ParticipantsGathered() if missing := session.missing:
            fields |= {"connected": len(session.members), **_named(missing)}
            log.warning("participants_missing", **fields)
        case e.TrainingPlanned(plan):
            fields |= {"passes": plan.passes, "rounds": plan.rounds, "epochs": plan.epochs}
            log.info("training_planned", plan=planned(session), **fields)
        case e.RoundOpened(number, selected, task=task):
            fields = {"num_participants": len(selected), "task": task.value, **_named(selected)}
            log.info("round_opened", round=number, **fields)
        case e.ParticipantsSelected(number, selected):
            log.info("participants_selected", round=number, **_named(selected))
        case e.RoundPaused(number):
            paused: dict[str, object] = {"connected": len(session.members)}
            if gave_up := history.accounts.failures_of_departed():
                paused["left_after_failure"] = dict(islice(gave_up.items(), MAX_ABSENT))
            log.warning("round_paused", round=number, **paused)
        case e.RoundResumed(number):
            log.info("round_resumed", round=number, connected=len(session.members))
        case e.UpdateAccepted(number, update, staleness):
            fields = {"participant": update.participant_id, "num_samples": update.num_samples}
            if staleness:
                fields["staleness"] = staleness
            log.info("update_accepted", round=number, **fields)
        case e.UpdateRefused(participant_id, number, reason):
            in_a_row = before.selection.faults_of(participant_id).in_a_row + 1
            fields = {"participant": participant_id, "reason": reason, "in_a_row": in_a_row}
            log.warning("update_refused", round=number, **fields)
        case e.TrainingFailed(participant_id, number, kind, message, trace):
            fields = {"reason": f"{kind}: {message}" if message else kind}
            if trace:  # the line that failed first, and all on one line
                fields["traceback"] = " < ".join(reversed(trace.splitlines()))
            log.warning("training_failed", round=number, participant=participant_id, **fields)
        case e.GroupBroken(participant_id, number, attempt, reason):
            fields = {"attempt": attempt, "participant": participant_id, "reason": reason}
            log.warning("group_broken", round=number, **fields)
        case e.RoundRestarted(number, attempt, selected, _, reason):
            fields = {"attempt": attempt, "reason": reason, **_named(selected)}
            log.warning("round_restarted", round=number, **fields)
        case e.UpdateDamaged(participant_id, number, reason=reason):
            log.warning("update_damaged", round=number, participant=participant_id, reason=reason)
        case e.ParticipantLeftOut(participant_id, until):
            log.warning("participant_left_out", participant=participant_id, until=until, **fields)
        case e.RoundOverdue(number):
            log.warning("round_overdue", round=number, **_awaited(before))
        case e.RoundClosed(number, _, "deadline"):
            log.warning("round_closed_at_deadline", round=number, **_awaited(before))
        case e.ModelPublished(number, model):
            record = history.rounds[-1]
            _log_evaluation(record)
            _log_no_better(before, session)
            log.info("model_published", round=number, key=model.ref.key)
            _log_losses(history, number)
            _log_expected(session, record)
        case e.EvaluationAccepted(number, participant_id, evaluation):
            fields = {"participant": participant_id, "num_samples": evaluation.num_samples}
            log.info("evaluation_accepted", round=number, **fields)
        case e.ModelEvaluated(number, evaluation):
            measured = None if evaluation is None else together([evaluation])
            if measured is not None:
                _log_measured(number, "coordinator", measured)
            _log_no_better(before, session)
        case e.RoundConfigured(number, config):
            # The settings themselves may have a megabyte.
            log.info("round_configured", round=number, **_named(config.selected))
        case e.ScriptEvaluated(number, evaluation):
            if (measured := together([evaluation])) is not None:
                _log_measured(number, "coordinator", measured)
        case e.ScriptEnded():
            log.info("script_ended", **fields)
        case e.SessionFinished(cause, _, ended_because, not_admitted):
            if ended_because:
                fields["ended_because"] = ended_because
            if history.rounds and history.rounds[-1].task is Task.EVALUATE:
                _log_evaluation(history.rounds[-1])
            if session.evaluation.no_better:
                reason = session.evaluation.no_better
                log.warning("no_better_than_baseline", round=session.round, reason=reason)
            log.info("session_finished", cause=cause, **fields)
            _log_account(history, session.round)
            if not_admitted:
                log.warning(
                    "participants_not_let_in", round=session.round, reasons=dict(not_admitted)
                )
        case _:
            log.debug(type(event).__name__, **fields)


def log_lacking(before: Session, session: Session) -> None:
    """Write a line when a session begins to wait for a participant that can make the initial
    weights."""
    if session.lacks_initialisers and not before.lacks_initialisers:
        log.warning(
            "no_initial_weights",
            round=session.round,
            connected=session.members.num_eligible,
            hint="call xain.rounds(model) in a script",
        )


def _log_losses(history: History, round_: int) -> None:
    """Log what is new with a round: participants not counted, lost samples, a dominant site."""
    begun = history.accounts.begun
    for participant_id in begun[:MAX_WARNINGS]:
        account = history.accounts.by_name[participant_id]
        fields = {"rounds": account.missed, "reason": account.reason}
        log.warning("participant_not_counted", round=round_, participant=participant_id, **fields)
    if len(begun) > MAX_WARNINGS:
        log.warning("participants_not_counted", round=round_, **_named(begun))
    limit, share = history.max_lost_share, history.lost_share()
    if share > limit >= history.lost_share(before_last=True):
        log.warning("samples_lost", round=round_, share=round(share, 3), max_lost_share=limit)
    limit, (site, share, number) = history.max_share, history.largest_share()
    if share > limit and number == round_ and site != _dominant(history, limit):
        log.warning(
            "large_share", round=round_, participant=site, share=round(share, 3), max_share=limit
        )


def _dominant(history: History, limit: float) -> str:
    """Site that had more than its share before the last round; "" if none had."""
    site, share, _ = history.largest_share(before_last=True)
    return site if share > limit else ""


def _log_expected(session: Session, record: RoundRecord) -> None:
    """Write how long the training may take, once its first round is over."""
    seconds = record.seconds
    if session.plan is None or session.num_trained != 1 or seconds is None:
        return
    most = round(seconds * (session.rules.rounds - 1), 1)
    log.info("training_expected", round=session.round, rounds=session.rules.rounds, most_s=most)


def _log_account(history: History, round_: int) -> None:
    """Line at the end: rounds that each participant counted in, and participants without one."""
    counts = history.accounts.contributions()
    shown = dict(sorted(counts.items(), key=lambda one: (one[1], one[0]))[:MAX_NAMES_OF_A_ROUND])
    never = history.accounts.never_counted()
    log.info("participation", round=round_, rounds_contributed=shown)
    if never:
        log.warning("participants_never_counted", round=round_, **_named(never))
    for text in history.warned.sentences():
        log.warning("session_warning", round=round_, reason=text)


def _log_evaluation(record: RoundRecord) -> None:
    """Write the participants' mean metrics of the model that a round began with."""
    if record.evaluation is not None:
        _log_measured(record.round, "participants", record.evaluation)


def _awaited(session: Session) -> dict[str, object]:
    """Field with the participants whose updates the open round still awaits; empty without a
    round."""
    round_ = session.open_round
    return _named(round_.outstanding) if round_ is not None else {}


def _named(participants: Sequence[str]) -> dict[str, object]:
    """Names for a line that a person can read: the first of thousands, and their number."""
    fields: dict[str, object] = {"participant": list(participants[:MAX_NAMES_OF_A_ROUND])}
    if len(participants) > MAX_NAMES_OF_A_ROUND:
        fields["num_participants"] = len(participants)
    return fields


def _log_no_better(before: Session, session: Session) -> None:
    """Write a warning when a model is no better than the best constant prediction, and the model
    before it was."""
    told = session.evaluation.no_better
    if told and not before.evaluation.no_better:
        log.warning("no_better_than_baseline", round=session.round, reason=told)


def _log_measured(round_: int, by: str, evaluation: Evaluation) -> None:
    """Write what a model has scored: figures over all rows, and averages over sites."""
    figures = {name: round(one.value, 6) for name, one in evaluation.figures.items()}
    averages = {name: value for name, value in evaluation.metrics.items() if name not in figures}
    fields = {
        name: values for name, values in (("metrics", figures), ("averages", averages)) if values
    }
    log.info("model_evaluated", round=round_, by=by, **fields)
