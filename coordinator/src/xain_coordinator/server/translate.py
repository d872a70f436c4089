"""The core's values as messages."""

from collections.abc import Mapping
from typing import cast

from xain_coordinator.core.points import STATE_NUMBERS
from xain_coordinator.core.values import (
    Evaluation,
    GlobalModel,
    Layout,
    ParticipantState,
    Phase,
    Task,
    WeightsRef,
)
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl import inspection_pb2 as inspection


def wire_state(state: Phase | ParticipantState) -> pb.State.ValueType:
    """Participants see collecting and aggregating both as ROUND."""
    return cast(pb.State.ValueType, STATE_NUMBERS[state])


_TASKS: Mapping[Task, pb.Task.ValueType] = {
    Task.TRAIN: pb.TRAIN,
    Task.EVALUATE: pb.EVALUATE,
    Task.INITIALISE: pb.INITIALISE,
}


def wire_task(task: Task) -> pb.Task.ValueType:
    return _TASKS[task]


def evaluation_message(evaluation: Evaluation | None) -> pb.Evaluation | None:
    if evaluation is None:
        return None
    return pb.Evaluation(num_samples=evaluation.num_samples, metrics=evaluation.metrics)


def ref_message(ref: WeightsRef, data: bytes = b"", url: str = "") -> pb.WeightsRef:
    """data: the object itself, if it is to travel inside. url: where it can be fetched directly."""
    return pb.WeightsRef(
        key=ref.key, size_bytes=ref.size_bytes, digest=bytes.fromhex(ref.digest), data=data, url=url
    )


def layout_message(layout: Layout) -> list[pb.Tensor]:
    return [pb.Tensor(name=spec.name, shape=spec.shape, dtype=spec.dtype) for spec in layout]


def model_message(model: GlobalModel) -> inspection.ModelStatus:
    return inspection.ModelStatus(
        round=model.round,
        ref=ref_message(model.ref),
        dtype=model.dtype,
        shape=model.shape,
        layout=layout_message(model.layout),
        metadata=dict(model.metadata),
    )
