"""Evaluations as messages and as the state directory keeps them."""

from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from xain_participant.participant import Evaluation
from xain_wire.fl import coordinator_pb2 as pb
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
    return message


def to_json(evaluation: Evaluation) -> list[Any]:
    """An evaluation as a JSON list. An earlier version wrote the first two of its items."""
    tallies = evaluation.tallies
    kept = None if tallies is None else asdict(tallies)
    return [evaluation.num_samples, dict(evaluation.metrics), kept, evaluation.withheld]


def from_json(kept: list[Any]) -> Evaluation:
    """The evaluation that to_json() was given."""
    num_samples, metrics, tallies, withheld = [*kept, None, False][:4]
    if tallies is not None:
        tallies = TypeAdapter(Tallies).validate_python(tallies)
    return Evaluation(num_samples, metrics, tallies, withheld)
