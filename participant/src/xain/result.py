"""The model that a session has made, asked of its coordinator."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from numpy.typing import NDArray

from xain_foundation.net.channels import find_cause
from xain_participant.agent.work import layout_of
from xain_participant.sdk.identity import new_instance_id
from xain_participant.tables.advice import advised
from xain_participant.wire.client import CoordinatorClient, Refused, open_channel, refused_by
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_wire.fl.inspection_pb2_grpc import InspectionStub
from xain_workloads.model import Layout, Model
from xain_workloads.scaffold import without_control

if TYPE_CHECKING:
    from xain_foundation.security.tls import Certificates

ASK_S = 30.0


class SessionError(RuntimeError):
    """The session has ended without a result, or the coordinator refuses this participant; at the
    server, the session or simulation cannot be begun or gone on with, or the script decides
    something else than before. The text is one sentence for the one who wrote the script."""


@dataclass(frozen=True, slots=True)
class Result:
    """The last global model of a session.

    weights: as round.weights: for load_state_dict(), or a flat vector.
    metrics: means over the participants, weighted by samples: of the training that made the model,
        and, in their place where they have the same names, of its evaluation.
    round: number of the model: of rounds that have made it.
    """

    weights: Any
    metrics: Mapping[str, float]
    round: int


@dataclass(frozen=True, slots=True)
class LastModel:
    """The last global model as the coordinator has it. vector: (d,)."""

    session_id: str
    round: int
    vector: NDArray[Any]
    layout: Layout
    metadata: Mapping[str, str]
    metrics: Mapping[str, float]


def fetch_last_model(
    target: str, participant_id: str, tls: "Certificates | None" = None
) -> LastModel:
    """Ask the coordinator at a target for its last model. Raises SessionError."""
    try:
        credentials = None if tls is None else tls.of_channel()
        with open_channel(target, credentials=credentials) as channel:
            stub = InspectionStub(channel)
            status = stub.GetStatus(inspection.GetStatusRequest(), timeout=ASK_S)
            models = stub.ListModels(inspection.ListModelsRequest(limit=1), timeout=ASK_S).models
            # The round that trained the model, and that which only measured it.
            rounds = stub.ListRounds(inspection.ListRoundsRequest(limit=2), timeout=ASK_S).rounds
        if not models:
            raise SessionError(f"the coordinator at {target} has no model")
        (model,) = models
        instance = new_instance_id()  # a name that has shown one is not served without
        with CoordinatorClient(target, participant_id, instance_id=instance, tls=tls) as client:
            vector = client.get_weights(model.ref)
    except grpc.RpcError as error:
        why = advised(find_cause(target, tls=tls)) or refused_by(error)
        raise SessionError(f"the coordinator at {target} cannot be asked: {why}") from None
    except Refused as refused:
        raise SessionError(f"the last model cannot be fetched from {target}: {refused}") from None
    metrics: dict[str, float] = {}
    for one in rounds:
        if one.round == model.round - 1 and one.task == pb.TRAIN:
            metrics |= one.metrics
        elif one.round == model.round:
            metrics |= one.evaluation.metrics
    last = without_control(Model(vector, layout_of(model.layout), dict(model.metadata)))
    return LastModel(
        status.session_id, model.round, last.vector, last.layout, last.metadata, metrics
    )
