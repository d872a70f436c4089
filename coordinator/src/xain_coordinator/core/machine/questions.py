"""Questions to a session, and what participants may do in it now.

    ask(session, question) -> the answer; or raises a Refusal

An answer changes nothing, so a question leaves no event and no effect.
"""

from dataclasses import dataclass

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts.attempts import RULE as ASSEMBLE
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary import errors
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.keys import attempt_key, journalled_key, update_key
from xain_coordinator.core.vocabulary.script import NOTHING
from xain_coordinator.core.vocabulary.values import Phase, ProcessGroup, Task


@dataclass(frozen=True, slots=True)
class MayUpload:
    """Question of a participant whether it may upload an update of this digest for this round.

    attempt: for its key, as in attempt_key(). is_inside: the update comes inside its call, and is
        to lie in the journal.
    """

    participant_id: str
    round: int
    digest: str
    attempt: str = ""
    is_inside: bool = False


@dataclass(frozen=True, slots=True)
class AssignmentFor:
    """Question of a selected participant for its assignment."""

    participant_id: str


Question = MayUpload | AssignmentFor


def ask(session: Session, question: Question) -> r.Reply:
    """Answer MayUpload with a Ticket or AlreadyUploaded, and AssignmentFor with an Assignment. The
    session is not changed. Raises a Refusal."""
    match question:
        case MayUpload():
            return _may_upload(session, question)
        case AssignmentFor(participant_id):
            return _assignment(session, participant_id)


def advertise(session: Session, participant_id: str) -> r.Advertisement:
    """The message of a heartbeat to a participant: phase, round, whether its answer is in, whether
    its update is damaged and wanted again, a warning, the attempt. The phase is STANDBY if it is
    not selected; after the end FINISHED, with the last round."""
    phase = session.phase
    round_ = session.open_round
    selected = round_ is not None and participant_id in round_.selected
    if phase in (Phase.COLLECTING, Phase.AGGREGATING) and not selected:
        phase = Phase.STANDBY
    done = round_ is not None and participant_id in round_.answers
    is_damaged = selected and not done and round_ is not None and participant_id in round_.damaged
    attempt = round_.attempt if selected and round_ is not None else 0
    # After the end all participants see the last round, whichever they have trained.
    finished = phase is Phase.FINISHED
    number = session.round if finished else session.trained_by(participant_id)
    warning = _warning(session, participant_id)
    # A damaged slice is not sent again: the round restarts without it.
    return r.Advertisement(phase, number, done, is_damaged and not attempt, warning, attempt)


def _warning(session: Session, participant_id: str) -> str:
    """The sentence that tells a participant what is wrong with it: a second process with its name,
    or a session that no script makes initial weights for; "" if nothing is."""
    if (second := session.members.conflict(participant_id, session.rules)) is not None:
        return (
            f"a second process, at {second.origin}, wants to join as {participant_id}; give each "
            "process a participant id of its own"
        )
    if session.model is not None and session.model.is_empty and session.lacks_initialisers:
        return (
            "the session waits for initial weights, which no script has declared: call "
            "xain.rounds(model) in one of them"
        )
    return ""


def _assignment(session: Session, participant_id: str) -> r.Assignment:
    """The work of a selected participant: in the open round, or in the earlier one that it still
    trains. Raises a Refusal if it is not selected."""
    # A participant that goes on while a model is made does not wait for that model.
    is_carried_over = session.is_carried_over(participant_id)
    round_ = require_selected(session, participant_id, may_be_closed=is_carried_over)
    number = round_.trained_by(participant_id)
    base = session.buffered.bases[number] if number != round_.number else session.base
    is_evaluated = session.evaluates(number)
    counted = session.counted.get(participant_id)
    is_configured = round_.task is Task.TRAIN and not base.model.is_empty
    config = session.script.config_of(number) if is_configured else NOTHING
    return r.Assignment(
        round=number,
        epochs=config.epochs_of(participant_id, base.epochs),
        epoch_base=base.epoch_base,
        model=base.model,
        update_accepted=participant_id in round_.answers,
        train_config=session.rules.train_config,
        script_config=config.of(participant_id),
        task=Task.INITIALISE if base.model.is_empty else round_.task,
        evaluate=round_.task is Task.EVALUATE or (is_evaluated and not base.model.is_empty),
        process_group=_process_group(session, round_, participant_id) if round_.attempt else None,
        local=session.local_budget if round_.task is Task.EVALUATE else None,
        counted_round=-1 if counted is None else counted.round,
        importance_limit_s=_importance_limit_s(session) if round_.task is Task.EVALUATE else 0.0,
        best_round=_best_round(session) if round_.task is Task.EVALUATE else -1,
    )


def _importance_limit_s(session: Session) -> float:
    """Seconds for the importance of columns: a tenth of those that the evaluation of the last model
    may take, since that of a table takes a few."""
    return session.rules.evaluate_deadline_s / 10 if session.rules.evaluate_importance else 0.0


def _best_round(session: Session) -> int:
    """Number of the best model, if sites measure it beside the last one; -1 if they do not, or it
    is the last one."""
    rules, best = session.rules, session.evaluation.winner
    is_measured = rules.evaluate_local or rules.evaluate_importance
    if best is None or session.model is None or not is_measured:
        return -1
    return -1 if best.round == session.model.round else best.round


def _process_group(session: Session, round_: Round, participant_id: str) -> ProcessGroup:
    """The attempt, the participant's rank, the group's size and the address of its first member. In
    a broken attempt the address is empty, so that the participant reports the break as well."""
    first = session.members.get(round_.selected[0])
    address = "" if round_.broken or first is None else first.group_address
    rank = round_.selected.index(participant_id)
    return ProcessGroup(round_.attempt, rank, len(round_.selected), address)


def _may_upload(session: Session, question: MayUpload) -> r.Reply:
    """Answer whether an update may be uploaded: AlreadyUploaded if the same bytes are accepted,
    else a Ticket. Raises a Refusal of a second, different update, of weights for a round that takes
    evaluations, and of all that require_selected refuses."""
    known = session.accepted(question.participant_id, question.round)
    if known is not None and known.weights.ref.digest == question.digest:
        return r.AlreadyUploaded(known.weights)
    # A model that is being made does not hold up what will go into the next one.
    is_carried_over = session.is_carried_over(question.participant_id)
    round_ = require_selected(
        session, question.participant_id, question.round, may_be_closed=is_carried_over
    )
    if round_.task is Task.EVALUATE:
        raise errors.LateUpdate(
            errors.Reason.ROUND_CLOSED, f"round {round_.number} takes evaluations, and no weights"
        )
    if known is not None:
        # The accepted object must not be overwritten: it is what will be aggregated.
        raise errors.duplicate_update(question.participant_id, question.round)
    model = session.model_of(question.round)
    make_key = journalled_key if question.is_inside else attempt_key
    return r.Ticket(
        make_key(update_key(question.round, question.participant_id), question.attempt),
        model,
        session.epochs_of(question.round),
        model is not None and session.rules.aggregation == ASSEMBLE,
    )


def is_late(session: Session, participant_id: str, round_: int) -> bool:
    """Whether an update that was refused with LateUpdate was once awaited: its sender is a member,
    and its round is no future one."""
    return participant_id in session.members and round_ <= session.trained_by(participant_id)


def require_member(session: Session, participant_id: str) -> None:
    """Refuse a participant that is no member. Raises NotAMember."""
    if participant_id not in session.members:
        raise errors.NotAMember(participant_id)


def require_selected(
    session: Session, participant_id: str, sent: int | None = None, *, may_be_closed: bool = False
) -> Round:
    """The open round, if the participant is selected for it and trains round `sent`; None: any
    round. may_be_closed: also while a model is being made of it.
    Raises NotAMember, STALE_ROUND, NOT_IN_ROUND, ROUND_CLOSED or NOT_SELECTED."""
    # After the end the sender need not be a member: the answer is the same for all.
    if session.phase is Phase.FINISHED:
        raise errors.LateUpdate(
            errors.Reason.ROUND_CLOSED, f"the session is finished: {session.short_cause}"
        )
    require_member(session, participant_id)
    trains = session.trained_by(participant_id)
    if sent is not None and sent != trains:
        raise errors.LateUpdate(
            errors.Reason.STALE_ROUND,
            f"the update is for round {sent}, but its sender is to train round {trains}; drop it",
        )
    if session.phase is Phase.AGGREGATING and not may_be_closed:
        if session.is_carried_over(participant_id):
            raise errors.Refusal(
                errors.Reason.NOT_IN_ROUND,
                f"a model is being made; keep the result of round {trains}",
                waits=True,
            )
        raise errors.LateUpdate(
            errors.Reason.ROUND_CLOSED, f"round {session.round} is closed and being aggregated"
        )
    if session.phase is Phase.STANDBY or session.open_round is None:
        raise errors.Refusal(
            errors.Reason.NOT_IN_ROUND,
            f"no round is open: {session.members.num_eligible} participants are connected, "
            f"{session.rules.num_required} are needed; wait for a heartbeat that says ROUND",
        )
    if participant_id not in session.open_round.selected:
        raise errors.Refusal(
            errors.Reason.NOT_SELECTED,
            f"{participant_id} is not selected for round {session.round}; "
            "wait for a heartbeat that says ROUND",
        )
    return session.open_round
