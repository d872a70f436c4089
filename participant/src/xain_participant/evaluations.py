"""Evaluations as messages and as the state directory keeps them."""

from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from xain_participant.participant import Evaluation
from xain_wire.fl import coordinator_pb2 as pb
from xain_workloads.gains import LocalModel
from xain_workloads.tallies import Tallies


def evaluation_message(evaluation: Evaluation) -> pb.Evaluation:
    """The message of an evaluation."""
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
    return message


def to_json(evaluation: Evaluation) -> list[Any]:
    """An evaluation as a JSON list. Earlier versions wrote the first items of it."""
    tallies = evaluation.tallies
    kept = None if tallies is None else asdict(tallies)
    local = None if evaluation.local is None else asdict(evaluation.local)
    return [evaluation.num_samples, dict(evaluation.metrics), kept, evaluation.withheld, local]


def from_json(kept: list[Any]) -> Evaluation:
    """The evaluation that to_json() was given."""
    num_samples, metrics, tallies, withheld, local = [*kept, None, False, None][:5]
    if tallies is not None:
        tallies = TypeAdapter(Tallies).validate_python(tallies)
    if local is not None:
        local = TypeAdapter(LocalModel).validate_python(local)
    return Evaluation(num_samples, metrics, tallies, withheld, local)
