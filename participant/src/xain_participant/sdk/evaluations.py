"""Evaluations as messages and as the state directory keeps them."""

from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from xain_participant.sdk.participant import Evaluation
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.comparing.gains import LocalModel
from xain_workloads.comparing.importance import Importance
from xain_workloads.measures.tallies import Tallies


def evaluation_message(evaluation: Evaluation) -> pb.Evaluation:
    """Convert an evaluation to its message."""
    message = pb.Evaluation(
        num_samples=evaluation.num_samples,
        metrics=evaluation.metrics,
        withheld=evaluation.withheld,
    )
    if evaluation.tallies is not None:
        message.tallies.CopyFrom(pb.Tallies(**evaluation.tallies.wire_fields))
    if (local := evaluation.local) is not None:
        differences = [pb.LocalDifference(**asdict(one)) for one in local.differences]
        message.local.CopyFrom(
            pb.LocalModel(passes=local.passes, why_not=local.why_not, differences=differences)
        )
        if local.tallies is not None:
            message.local.tallies.CopyFrom(pb.Tallies(**local.tallies.wire_fields))
    for one in evaluation.importances:
        message.importances.add(
            round=one.round,
            loss=one.loss,
            repeats=one.repeats,
            columns=one.columns,
            totals=one.totals,
            squares=one.squares,
        )
    return message


def to_json(evaluation: Evaluation) -> list[Any]:
    """Convert an evaluation to a JSON list. Earlier versions wrote the first items of it."""
    tallies = evaluation.tallies
    kept = None if tallies is None else asdict(tallies)
    local = None if evaluation.local is None else asdict(evaluation.local)
    importances = [asdict(one) for one in evaluation.importances]
    plain = evaluation.num_samples, dict(evaluation.metrics)
    return [*plain, kept, evaluation.withheld, local, importances]


def from_json(kept: list[Any]) -> Evaluation:
    """Read an evaluation that to_json() of this or an earlier version has written."""
    later: list[Any] = [None, False, None, []]
    num_samples, metrics, tallies, withheld, local, importances = [*kept, *later[len(kept) - 2 :]]
    if tallies is not None:
        tallies = TypeAdapter(Tallies).validate_python(tallies)
    if local is not None:
        local = TypeAdapter(LocalModel).validate_python(local)
    measured = TypeAdapter(tuple[Importance, ...]).validate_python(importances)
    return Evaluation(num_samples, metrics, tallies, withheld, local, measured)
