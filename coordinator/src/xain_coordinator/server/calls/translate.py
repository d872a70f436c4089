"""Translation between the core's values and messages."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast
from urllib.parse import unquote

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts.evaluation import checked, together
from xain_coordinator.core.parts.points import STATE_NUMBERS
from xain_coordinator.core.view.history import History
from xain_coordinator.core.vocabulary.errors import InvalidUpdate, ProfileMismatch
from xain_coordinator.core.vocabulary.values import (
    CentralModel,
    DataProfile,
    Division,
    Evaluation,
    Figure,
    GlobalModel,
    Importance,
    Layout,
    LocalModel,
    ParticipantState,
    Phase,
    ProcessGroup,
    Task,
    Transfer,
    WeightsRef,
)
from xain_foundation.names import brief
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_workloads.comparing.gains import Difference
from xain_workloads.comparing.importance import MAX_MODELS
from xain_workloads.measures.figures import LOSSES
from xain_workloads.measures.tallies import MAX_BYTES, Tallies, Target
from xain_workloads.measures.thresholds import Threshold
from xain_workloads.model import TensorSpec
from xain_workloads.tables.preprocessing import features_of_columns
from xain_workloads.tables.profile import MAX_CLASSES
from xain_workloads.tables.schema import MAX_COLUMNS, Column, ColumnType
from xain_workloads.workload import from_metadata, metrics_of

MAX_WHY_NOT = 200  # characters of the reason why there is no local model
SUMMARISED = 5  # most important columns, for a line of text


def wire_state(state: Phase | ParticipantState) -> pb.State.ValueType:
    """The wire's state of a phase: participants see COLLECTING and AGGREGATING both as ROUND."""
    return cast(pb.State.ValueType, STATE_NUMBERS[state])


def wire_task(task: Task) -> pb.Task.ValueType:
    return pb.Task.Value(task.name)


def division_of(request: pb.RendezvousRequest) -> Division | None:
    """The division by which the profile of a rendezvous was made; None: without a study."""
    if not request.HasField("division"):
        return None
    of = request.division
    return Division(of.folds, of.fold, of.seed, of.measures)


def division_message(division: Division | None) -> pb.Division:
    """Message of a division; of none: one of 0 folds."""
    if division is None:
        return pb.Division()
    return pb.Division(
        folds=division.folds, fold=division.fold, seed=division.seed, measures=division.measures
    )


def evaluation_message(
    evaluation: Evaluation | None, *, of_sites: bool = False
) -> pb.Evaluation | None:
    """Message of an evaluation. of_sites: whether it is that of several sites together."""
    if evaluation is None:
        return None
    averages = [name for name in evaluation.metrics if name not in evaluation.figures]
    return pb.Evaluation(
        num_samples=evaluation.num_samples,
        metrics=evaluation.metrics,
        withheld=evaluation.withheld,
        figures={name: _figure(one) for name, one in evaluation.figures.items()},
        averages=averages if of_sites else (),
        local=_local_message(evaluation.local),
    )


def _local_message(local: LocalModel | None) -> pb.LocalModel | None:
    """Message of a local model for operators, with its figures and without its tallies."""
    if local is None:
        return None
    return pb.LocalModel(
        passes=local.passes,
        why_not=local.why_not,
        figures={name: _figure(one) for name, one in local.figures.items()},
        num_samples=local.num_samples,
        differences=[
            pb.LocalDifference(
                round=one.round,
                total=one.total,
                squares=one.squares,
                num_samples=one.num_samples,
            )
            for one in local.differences
        ],
    )


def local_of(evaluation: pb.Evaluation) -> LocalModel | None:
    """The local model in an evaluation, unchecked; None without one. Raises ValueError for wrong
    tallies."""
    if not evaluation.HasField("local"):
        return None
    message = evaluation.local
    tallies = None
    if message.HasField("tallies"):
        of = pb.Evaluation(num_samples=evaluation.num_samples, tallies=message.tallies)
        tallies = tallies_of(of)
    differences = tuple(Difference(d.round, d.total, d.squares) for d in message.differences)
    why_not = brief(message.why_not, MAX_WHY_NOT)
    return LocalModel(tallies, message.passes, why_not, differences)


def importances_of(evaluation: pb.Evaluation) -> tuple[Importance, ...]:
    """The importances in an evaluation, unchecked, MAX_MODELS + 1 of them at most."""
    return tuple(
        Importance(
            one.round,
            one.loss,
            one.repeats,
            tuple(one.columns),
            tuple(one.totals),
            tuple(one.squares),
        )
        for one in evaluation.importances[: MAX_MODELS + 1]
    )


def importance_message(
    session: Session, history: History, *, is_whole: bool
) -> inspection.ColumnImportances | None:
    """Message of the importance of the columns of the best model, or of the last; None if the sites
    have measured none.

    is_whole: all columns, and the importances at single sites, instead of the first SUMMARISED.
    """
    winner, model = session.evaluation.winner, session.model
    found = history.importance(None if winner is None else winner.round)
    if found is None or model is None:
        return None
    importance, record = found
    names = list(features_of_columns(model.metadata))
    assert record.evaluation is not None, "it has the importance"
    known = record.evaluation.figures
    metric = next((name for name in LOSSES if name in known), "error")
    sites = {
        name: one
        for name, site in record.sites.items()
        if site.evaluation is not None
        for one in site.evaluation.importances
        if one.round == importance.round
    }
    at_sites = {name: one.figures for name, one in sites.items() if is_whole}
    rows = dict(zip(importance.columns, importance.rows, strict=True))
    columns = [
        inspection.ColumnImportance(
            column=names[at],
            difference=_figure(difference),
            num_samples=rows[at],
            sites={name: _figure(of[at]) for name, of in at_sites.items() if at in of},
        )
        for at, difference in importance.figures.items()
        if at < len(names)
    ]
    return inspection.ColumnImportances(
        round=importance.round,
        metric=metric,
        weighs_classes=session.rules.weighs_classes,
        loss=importance.loss / importance.num_samples,
        num_samples=importance.num_samples,
        num_held_out=record.evaluation.num_samples,
        repeats=importance.repeats,
        num_columns=len(names),
        columns=columns if is_whole else columns[:SUMMARISED],
        sites={name: one.num_samples for name, one in sites.items() if is_whole},
    )


def tallies_message(tallies: Tallies) -> pb.Evaluation | None:
    """Message of an evaluation with its tallies, and the figures that follow from them."""
    message = evaluation_message(together([Evaluation(tallies.num_rows, {}, tallies)]))
    if message is not None:
        message.tallies.CopyFrom(pb.Tallies(**tallies.wire_fields))
    return message


def central_message(central: CentralModel | None) -> inspection.CentralModel | None:
    """Message of the central model, with the figures that follow from its tallies."""
    if central is None:
        return None
    evaluation = together([central.evaluation]) or central.evaluation
    return inspection.CentralModel(
        round=central.round, evaluation=evaluation_message(evaluation), file=central.file
    )


def threshold_message(
    number: int, threshold: Threshold, class_name: str
) -> inspection.ModelThreshold:
    """Message of the threshold of a model. class_name: of the second class."""
    return inspection.ModelThreshold(
        round=number,
        value=threshold.value,
        criterion=threshold.criterion,
        resolution=threshold.resolution,
        class_name=class_name,
        figures={name: _figure(one) for name, one in threshold.figures.items()},
    )


def _figure(figure: Figure) -> pb.Figure:
    """Message of a figure."""
    return pb.Figure(
        value=figure.value,
        low=figure.low,
        high=figure.high,
        baseline=figure.baseline,
        bound=figure.bound,
    )


def tallies_of(evaluation: pb.Evaluation) -> Tallies | None:
    """The tallies in an evaluation, unchecked; None without any. Raises ValueError if they are too
    long."""
    if not evaluation.HasField("tallies"):
        return None
    message = evaluation.tallies
    if message.ByteSize() > MAX_BYTES:
        raise ValueError(f"tallies have {message.ByteSize()} bytes; at most {MAX_BYTES} are taken")
    if len(message.target) not in (0, 6):
        raise ValueError(f"tallies have {len(message.target)} moments of the target, not 6")
    return Tallies(
        num_rows=evaluation.num_samples,
        num_classes=message.num_classes,
        right=message.right,
        confusion=tuple(message.confusion),
        counts=tuple(message.counts),
        level=message.level,
        scores=tuple(tuple(one.counts) for one in message.scores),
        sums={name: message.sums[name] for name in sorted(message.sums)},
        target=Target(*message.target) if message.target else None,
    )


def transfer_of(request: pb.HeartbeatRequest) -> Transfer | None:
    """Progress of a transfer as a heartbeat claims it; None if it claims none."""
    transfer = request.transfer
    known = transfer.direction in (pb.Transfer.UPLOAD, pb.Transfer.DOWNLOAD)
    if not request.HasField("transfer") or not known:
        return None
    return Transfer(transfer.direction == pb.Transfer.UPLOAD, min(transfer.percent, 100))


def transfer_message(transfer: Transfer | None) -> pb.Transfer | None:
    """Message of a transfer; None without one."""
    if transfer is None:
        return None
    direction = pb.Transfer.UPLOAD if transfer.is_upload else pb.Transfer.DOWNLOAD
    return pb.Transfer(direction=direction, percent=transfer.percent)


def ref_message(ref: WeightsRef, data: bytes = b"", url: str = "") -> pb.WeightsRef:
    """Message of a reference. data: the object, if it is to travel inside. url: where it can be
    fetched directly."""
    return pb.WeightsRef(
        key=ref.key, size_bytes=ref.size_bytes, digest=bytes.fromhex(ref.digest), data=data, url=url
    )


def layout_message(layout: Layout) -> list[pb.Tensor]:
    """Message of a layout. The kind "weight" is left out: an absent kind means it."""
    return [
        pb.Tensor(
            name=spec.name,
            shape=spec.shape,
            dtype=spec.dtype,
            kind="" if spec.kind == "weight" else spec.kind,
        )
        for spec in layout
    ]


def layout_of(tensors: Iterable[pb.Tensor]) -> Layout:
    """The layout that a participant declares. Raises InvalidUpdate for an unknown kind of
    tensor."""
    layout: list[TensorSpec] = []
    for tensor in tensors:
        if tensor.kind not in ("", "weight", "statistic", "control"):
            raise InvalidUpdate(
                f"tensor {tensor.name!r} is of kind {tensor.kind!r}; "
                'it must be "weight", "statistic" or "control"'
            )
        kind: Any = tensor.kind or "weight"
        layout.append(TensorSpec(tensor.name, tuple(tensor.shape), tensor.dtype, kind))
    return tuple(layout)


def process_group_message(group: ProcessGroup | None) -> pb.ProcessGroup | None:
    """Message of a process group; None without one."""
    if group is None:
        return None
    return pb.ProcessGroup(
        attempt=group.attempt,
        rank=group.rank,
        world_size=group.world_size,
        address=group.address,
    )


def group_address(address: str, peer: str) -> str:
    """HOST:PORT of a participant, with the host that it calls from if it names none. peer: as gRPC
    names it, such as "ipv4:10.0.0.7:41232" or "ipv6:%5B::1%5D:41232"."""
    if not address.startswith(":"):
        return address
    host = unquote(peer).partition(":")[2].rpartition(":")[0]
    return f"{host or 'localhost'}{address}"


def model_message(model: GlobalModel) -> inspection.ModelStatus:
    """Message of a model, without its weights."""
    return inspection.ModelStatus(
        round=model.round,
        ref=ref_message(model.ref),
        dtype=model.dtype,
        shape=model.shape,
        layout=layout_message(model.layout),
        metadata=dict(model.metadata),
    )


def evaluation_of(message: pb.Evaluation, session: Session, round_: int) -> Evaluation:
    """The evaluation that a participant sends in a round. Raises ValueError if it is invalid."""
    model, is_last = session.model, session.evaluates_last(round_)
    return checked(
        message.num_samples,
        message.metrics,
        tallies_of(message),
        withheld=message.withheld,
        num_classes=None if model is None else num_classes_of(model.metadata),
        has_probabilities=model is not None and gives_probabilities(model.metadata),
        local=local_of(message) if is_last else None,
        importances=importances_of(message) if is_last else (),
    )


def num_classes_of(metadata: Mapping[str, str]) -> int | None:
    """Number of classes in a model's metadata, 0 for a regression; None if unknown, as of a
    script's."""
    try:
        classes = json.loads(metadata.get("classes", "null"))
    except ValueError:  # a script may write something else there
        return None
    return len(classes) if isinstance(classes, list) else None


def gives_probabilities(metadata: Mapping[str, str]) -> bool:
    """Whether the workload in a model's metadata gives probabilities; False for a script's."""
    try:
        return "log_loss" in metrics_of(from_metadata(metadata))
    except ValueError:
        return False


def profile_of(message: pb.DataProfile) -> DataProfile:
    """The data profile in a message.

    Raises ProfileMismatch for more columns or classes than data may have: a request has room for
    many empty ones, and each takes the event loop longer than to parse it.
    """
    if len(message.columns) > MAX_COLUMNS or len(message.classes) > MAX_CLASSES:
        raise ProfileMismatch(
            f"the data have {len(message.columns)} columns and {len(message.classes)} classes; at "
            f"most {MAX_COLUMNS} columns and {MAX_CLASSES} classes are taken"
        )
    return DataProfile(
        message.num_samples,
        message.num_features,
        tuple(message.classes),
        # The core looks at the types.
        tuple(Column(c.name, cast(ColumnType, c.type), c.unit) for c in message.columns),
        message.target,
        message.task,
        message.statistics,
    )
