"""Decisions of a session: the events that a command causes, and the session's next deadline.

    decide(session, command, now, strategy)
                                   -> what happened, what to answer, what to do; or raises a Refusal
    ask(session, question)         -> an answer that changes nothing (questions.py)
    resume(session)                -> the effects still owed after a restart
    next_deadline(session)         -> when to send the next Tick

A command is answered in two steps. First what it does by itself (answers.py); then whatever must
follow from the state that is now reached (steps.py, until nothing follows). So it never matters
whose message, or whose departure, made a round complete.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from xain_coordinator.core.machine.answers import answer
from xain_coordinator.core.machine.evolve import evolve, fold
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.machine.steps import next_step
from xain_coordinator.core.machine.strategy import Strategy, builtin_strategy
from xain_coordinator.core.parts.points import (
    coordinator_point,
    evaluation_point,
    own_evaluation_point,
    published_point,
)
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.rules.pacing import closing_time, has_enough, round_deadline
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary import events as e
from xain_coordinator.core.vocabulary import replies as r
from xain_coordinator.core.vocabulary.effects import (
    Aggregate,
    Effect,
    EvaluateModel,
    FitCentral,
    InitialiseModel,
    Notify,
    RecordMetrics,
)
from xain_coordinator.core.vocabulary.keys import model_key
from xain_coordinator.core.vocabulary.values import GlobalModel, Phase, Rules, Task


@dataclass(frozen=True, slots=True)
class Decision:
    """events in order; durable ones are to be committed before the reply goes out and the effects
    run. session: what they lead to."""

    events: tuple[e.Event, ...]
    reply: r.Reply
    effects: tuple[Effect, ...]
    session: Session


def decide(
    session: Session, command: c.Command, now: float, strategy: Strategy | None = None
) -> Decision:
    """Decide a command at session time `now`, in seconds.

    strategy: made from the session's rules; by default of the parts of the core that they name.
    Raises a Refusal if it is not carried out, and PluginFailed; then nothing has changed.
    """
    strategy = strategy or builtin_strategy(session.rules)
    before = session
    events, reply, points = answer(session, command, now, strategy.pacing)
    if events and isinstance(events[-1], e.SessionFinished):
        events = (*events[:-1], _with_not_admitted(events[-1], session))
    session = fold(session, events)
    # Soft events change nothing that anything could follow from; heartbeats are many, so skip it.
    if e.SOFT_EVENTS.issuperset(map(type, events)) and not isinstance(command, c.Tick):
        effects = (RecordMetrics(points),) if points else ()
        return Decision(events, reply, effects, session)
    happened = list(events)
    while (event := next_step(session, now, strategy)) is not None:
        event = _with_not_admitted(event, session)
        session = evolve(session, event)
        happened.append(event)
    kinds = set(map(type, happened))
    due: list[Effect] = []
    if kinds & {e.ModelRequested, e.RoundClosed}:
        due += _owed_work(session)
    if session.evaluation.owed[:1] != before.evaluation.owed[:1]:
        due += _owed_evaluation(session)
    is_due = session.rules.evaluate_data  # else no central model is ever owed
    if is_due and (central := _owed_central(session)) != _owed_central(before):
        due += central
    state = _state(session)
    point = coordinator_point(*state) if state != _state(before) else None
    for event in happened:
        if isinstance(event, e.ModelPublished):
            last = session.last_round
            assert last is not None, "a model was published without a round"
            point = published_point(coordinator_point(*state), last, session.rules, event.at)
            points = (*points, *evaluation_point(last))
        elif isinstance(event, e.ModelEvaluated | e.ScriptEvaluated):
            points = (*points, *own_evaluation_point(event.round, event.evaluation))
        elif isinstance(event, e.SessionFinished) and session.evaluation.last_round is not None:
            points = (*points, *evaluation_point(session.evaluation.last_round))
    if point is not None:
        points = (*points, point)
    if points:
        due.append(RecordMetrics(points))
    if kinds & _CHANGES_WHAT_IS_TOLD or (session.waits_for_script and not before.waits_for_script):
        due.append(Notify())
    return Decision(tuple(happened), reply, tuple(due), session)


def _with_not_admitted(event: e.Event, session: Session) -> e.Event:
    """Add the participants that were never let in to a SessionFinished; return other events
    unchanged."""
    if not isinstance(event, e.SessionFinished):
        return event
    return replace(event, not_admitted=dict(session.members.not_admitted))


def _state(session: Session) -> tuple[Phase, int, int, int]:
    """State of a session as its points tell it: phase, round, members, and those selected."""
    selected = session.open_round.selected if session.open_round is not None else ()
    return session.phase, session.round, len(session.members.by_name), len(selected)


# After these, what a participant or a script is told may differ from what it was told before.
_CHANGES_WHAT_IS_TOLD: frozenset[type[e.Event]] = frozenset(
    (
        e.ParticipantLeft,
        e.ParticipantLeftOut,
        e.TrainingFailed,
        e.RoundRestarted,
        e.UpdateDamaged,
        e.RoundOpened,
        e.ParticipantsSelected,
        e.RoundPaused,
        e.RoundResumed,
        e.ModelPublished,
        e.RoundConfigured,
        e.ScriptEvaluated,
        e.ScriptEnded,
        e.SessionFinished,
    )
)


def resume(session: Session) -> tuple[Effect, ...]:
    """Effects that the session waits for. After a restart they are owed again: the process that ran
    them has died, and running them twice gives the same bytes."""
    return (*_owed_work(session), *_owed_evaluation(session), *_owed_central(session))


def _owed_evaluation(session: Session) -> tuple[EvaluateModel, ...]:
    """The evaluation that the coordinator owes: one at a time, in the order of the models."""
    return tuple(EvaluateModel(model) for model in session.evaluation.owed[:1])


def _owed_central(session: Session) -> tuple[FitCentral, ...]:
    """The effect that trains the central model, which is compared with the best model, or the last
    one if none is best. Empty until all own evaluations of the last round are done, or if none is
    owed."""
    round_, budget, best = session.open_round, session.central_due, session.evaluation.winner
    is_evaluation = round_ is not None and round_.task is Task.EVALUATE
    if not is_evaluation or session.evaluation.owed or budget is None or session.model is None:
        return ()
    return (FitCentral(session.model.round if best is None else best.round, budget),)


def _owed_work(session: Session) -> tuple[Aggregate | InitialiseModel, ...]:
    """The effect without which the session cannot continue, the aggregation of a closed round or
    the making of the initial model; empty if it owes none."""
    if session.phase is Phase.AGGREGATING:
        assert session.model is not None, "a round was closed without a model"
        return (_aggregation(session.rules, session.opened, session.model),)
    if session.phase is Phase.STANDBY and session.requested is not None and session.model is None:
        names = session.requested_of
        return (InitialiseModel(session.rules.initial, session.requested, names=names),)
    return ()


def effect_that_made(session: Session, models: Mapping[str, GlobalModel]) -> Effect | None:
    """The effect that made the session's model. Running it again gives the same bytes.

    models: all published models, by key. Returns None if the session began with the model, or no
    longer has the updates that it was made of.
    """
    model, last = session.model, session.last_round
    if model is None or (model.round == 0 and session.lineage is not None):
        return None
    if model.round == 0:
        return InitialiseModel(session.rules.initial, session.requested or (), model.metadata)
    base = models.get(model_key(model.round - 1))
    if base is None or last is None or last.number != base.round:
        return None
    return _aggregation(session.rules, last, base)


def _aggregation(rules: Rules, round_: Round, base: GlobalModel) -> Aggregate:
    """The effect that makes a model from the updates of a round. base: the model that it started
    from. Initial weights are averaged as equals, or taken over if one participant made them."""
    # Sorted by name: a participant that came back has another place in the selection, and a sum of
    # floats depends on its order.
    names = sorted(round_.updates)
    updates = tuple(round_.updates[p] for p in names)
    staleness = tuple(round_.number - round_.trained_by(p) for p in names)
    if base.is_empty:
        # Initialisations weigh the same: nothing has been learnt from samples yet.
        updates = tuple(replace(update, num_samples=0) for update in updates)
        layouts = {update.layout for update in updates}
        base = replace(base, layout=layouts.pop() if len(layouts) == 1 else ())
    if round_.task is Task.INITIALISE:
        return Aggregate(round_.number, "identity", updates, base)
    return Aggregate(
        round_.number,
        rules.aggregation,
        updates,
        base,
        staleness,
        options=rules.aggregation_options,
        optimizer=rules.optimizer,
        optimizer_options=rules.optimizer_options,
        learning_rate=round_.learning_rate,
        total_samples=round_.total_samples,
        control_share=round_.control_share,
    )


def next_deadline(session: Session, strategy: Strategy | None = None) -> float | None:
    """Session time at which a Tick is due; None if nothing will happen by itself."""
    due = (next_expiry(session), next_wait(session, strategy))
    return min((at for at in due if at is not None), default=None)


def next_expiry(session: Session) -> float | None:
    """Time at which the first lease runs out if no participant calls; None if there is none."""
    if session.phase is Phase.FINISHED:
        return None
    leases = session.members.expiries(session.rules.lease_s)
    return min((expires_at for _, expires_at in leases), default=None)


def next_wait(session: Session, strategy: Strategy | None = None) -> float | None:
    """Session time at which the session must next act by itself, apart from leases: start of
    training, recording of time, end of a round, idle timeout; None if nothing is due. strategy: as
    in decide()."""
    if session.phase is Phase.FINISHED:
        return None
    due: list[float] = []
    is_awaited = not session.gathered and not session.waits_for_request
    if is_awaited and session.members.num_eligible >= session.rules.num_required:
        due.append(session.starts_at)
    strategy = strategy or builtin_strategy(session.rules)
    note_at = session.note_at(strategy.pacing)
    waits = (session.gives_up_at, note_at, due_of_round(session, strategy))
    due += [at for at in waits if at is not None]
    return min(due, default=None)


def due_of_round(session: Session, strategy: Strategy) -> float | None:
    """Time at which the open round closes by its pacing rule or is at its deadline; None if
    it waits for updates alone."""
    round_ = session.open_round
    if round_ is None or session.phase is Phase.AGGREGATING:
        return None
    # While it is paused, it can be closed, but no update could be late.
    is_enough = has_enough(round_, session.rules)
    if session.phase is Phase.STANDBY and (round_.attempt or not is_enough):
        return None
    deadline = round_deadline(round_, session.rules)
    if round_.task is Task.EVALUATE or round_.attempt or not is_enough:
        return deadline
    due = (closing_time(round_, strategy.pacing_of_round(session)), deadline)
    return min((at for at in due if at is not None), default=None)
