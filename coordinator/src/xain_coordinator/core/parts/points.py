"""The metric points of a session: one series of the coordinator and one of participants, with the
wire's numbers for states, one of late updates, and one of evaluations."""

from collections.abc import Mapping
from dataclasses import replace

from xain_coordinator.core.parts.evaluation import spreads, together
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.vocabulary.values import (
    Evaluation,
    ParticipantState,
    Phase,
    Point,
    Rules,
)

# The values of the wire's enum State, which are fixed for ever.
STATE_NUMBERS: Mapping[Phase | ParticipantState, int] = {
    Phase.STANDBY: 0,
    Phase.COLLECTING: 1,
    Phase.AGGREGATING: 1,
    Phase.FINISHED: 2,
    ParticipantState.READY: 3,
    ParticipantState.TRAINING: 4,
    ParticipantState.FINISHED: 2,
}


def coordinator_point(phase: Phase, round_: int, connected: int, selected: int) -> Point:
    """Metric point of the session: its phase, round, connected and selected participants."""
    state = STATE_NUMBERS[phase]
    fields = {"state": state, "round": round_, "connected": connected, "selected": selected}
    # XAIN's name of the last one: dashboards made for XAIN ask for it.
    return Point("coordinator", {**fields, "number_of_selected_participants": selected})


def published_point(point: Point, round_: Round, rules: Rules, at: float) -> Point:
    """Metric point of the coordinator at the publication of a model, with its number, and with the
    duration and updates of its round.

    Its times are session time, in which the coordinator's absence does not count; the round that it
    names is the one that comes next.
    """
    fields: dict[str, int | float | str] = {
        **point.fields,
        "model": round_.number + 1,
        "round_seconds": at - round_.opened_at,
        "num_updates": len(round_.updates),
        "update_bytes": sum(u.weights.ref.size_bytes for u in round_.updates.values()),
    }
    if round_.closed_at is not None:
        fields["aggregation_seconds"] = at - round_.closed_at
    if rules.carries_over:
        staleness = [round_.number - round_.trained_by(p) for p in round_.updates]
        fields["max_staleness"] = max(staleness)
    return replace(point, fields=fields)


def participant_point(participant_id: str, state: ParticipantState, round_: int) -> Point:
    """Metric point of the state that a participant reports."""
    fields = {"state": STATE_NUMBERS[state], "round": round_}
    return Point("participant", fields, {"id": participant_id})


def departure_point(participant_id: str) -> Point:
    """Last metric point of a participant that is no member any more: its lease ran out, it was
    removed, revoked or outvoted."""
    fields = {"state": STATE_NUMBERS[ParticipantState.FINISHED]}
    return Point("participant", fields, {"id": participant_id})


def late_point(participant_id: str, round_: int) -> Point:
    """Metric point of an update that came after its round."""
    return Point("late_update", {"round": round_}, {"id": participant_id})


def evaluation_point(round_: Round) -> tuple[Point, ...]:
    """Metric point of the participants' evaluation of the round's model: figures over all rows and
    averages over sites, and spreads over sites as NAME_min, NAME_max and NAME_std; none without
    evaluations."""
    evaluations = tuple(round_.evaluations.values())
    mean = together(evaluations)
    if mean is None:
        return ()
    fields: dict[str, int | float | str] = {}
    for name, spread in spreads(evaluations).items():
        fields |= {
            f"{name}_min": spread.min,
            f"{name}_max": spread.max,
            f"{name}_std": spread.std,
        }
    return (_evaluation_point(round_.number, mean, "participants", fields),)


def own_evaluation_point(number: int, evaluation: Evaluation | None) -> tuple[Point, ...]:
    """Metric point of model `number` on the coordinator's own data, if it could be measured."""
    if evaluation is None:
        return ()
    measured = together([evaluation])
    if measured is None:
        return ()
    return (_evaluation_point(number, measured, "coordinator", {}),)


def _evaluation_point(
    number: int, evaluation: Evaluation, source: str, fields: Mapping[str, int | float | str]
) -> Point:
    """Metric point of an evaluation of model `number`, with limits and baselines of its figures.
    source: "participants" or "coordinator". fields: further ones."""
    limits = {
        f"{name}_{end}": value
        for name, figure in evaluation.figures.items()
        for end, value in (
            ("low", figure.low),
            ("high", figure.high),
            ("baseline", figure.baseline),
        )
        if value is not None
    }
    # A metric of one of these two names would make a whole number of the field, or the other way.
    whole = {"round": number, "num_samples": evaluation.num_samples}
    values = {**limits, **fields, **evaluation.metrics, **whole}
    return Point("evaluation", values, {"source": source})
