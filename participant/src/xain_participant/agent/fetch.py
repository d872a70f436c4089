"""Take a model home to a site: fetch it from the coordinator, and write it to a file."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import grpc

from xain_foundation.net import channels
from xain_foundation.net.grpc_calls import details_of
from xain_foundation.settings.hints import hint
from xain_participant.agent.work import layout_of
from xain_participant.sdk.identity import new_instance_id
from xain_participant.sdk.participant import Assignment
from xain_participant.tables.advice import advised
from xain_participant.tables.personal import PersonalTensors
from xain_participant.wire.client import CoordinatorClient, Refused, open_channel
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl import inspection_pb2 as inspection
from xain_wire.fl.inspection_pb2_grpc import InspectionStub
from xain_workloads.errors import NoModel
from xain_workloads.exported import formats, lineage
from xain_workloads.measures.thresholds import with_threshold
from xain_workloads.model import Model, personal_patterns
from xain_workloads.tables.preprocessing import at_site, preprocessing_of
from xain_workloads.tables.reading.dialect import Dialect
from xain_workloads.tables.table import Table

if TYPE_CHECKING:
    from xain_foundation.security.tls import Certificates

CALL_S = 20.0
_PAGE = 1000  # models or rounds; as many as a coordinator gives in one answer


def fetch(
    address: str,
    which: str,
    to: Path,
    *,
    participant_id: str,
    dialect: Dialect,
    rows: Callable[[], Table] | None = None,
    state_dir: Path | None = None,
    tls: "Certificates | None" = None,
) -> str:
    """Write a global model of the coordinator at "host:port" to a file; see formats.

    which: "last", "best", or the number of a model. The session may have ended.
    dialect: of this site, which the file keeps, so that `predict` reads what training has read.
    rows: loads the site's rows of training, for a model that each site scales by its own.
    state_dir: of this participant, for tensors of the model that stay here. tls: its certificates.
    Returns a line for the user. Raises NoModel, DataError and OSError.
    """
    channel = open_channel(address, credentials=None if tls is None else tls.of_channel())
    try:
        stub = InspectionStub(channel)
        status = stub.GetStatus(inspection.GetStatusRequest(), timeout=CALL_S)
        pages = list(_pages(stub, "ListModels"))
        rounds = {r.round: r for page in _pages(stub, "ListRounds") for r in page.rounds}
    except grpc.RpcError as error:
        why = advised(channels.find_cause(address, tls=tls)) or details_of(error)
        raise NoModel(
            f"no coordinator can be asked for models at {address}: {why}; is it elsewhere? Then "
            + hint("xain-participant", "--coordinator HOST:PORT")
        ) from None
    finally:
        channel.close()
    models = {m.round: m for page in pages for m in page.models if list(m.shape) != [0]}
    if not models:
        raise NoModel(f"the coordinator at {address} has no model yet; ask again after a round")
    best = status.best_round if status.HasField("best_round") else None
    found = models[lineage.choose(which, models, best, pages[0].removed)]
    own = PersonalTensors(state_dir, participant_id)
    threshold = lineage.thresholds_of(status).get(found.round)
    downloaded = _download(address, found, status.session_id, own, participant_id, tls)
    model = with_threshold(downloaded, threshold)
    stay = ", ".join(personal_patterns(model.metadata))
    if stay and state_dir is None:
        raise NoModel(
            f"tensors of this model, {stay}, stay at each site, and without those of this one it is"
            " not whole; " + hint("xain-participant", "--state-dir FOLDER")
        )
    if stay and found.round and not own.are_kept:
        raise NoModel(
            f"the tensors of model {found.round} that stay at this site, {stay}, are not in"
            f" {state_dir}, which has those of the latest rounds that this site has trained; take"
            " the last model, or " + hint("xain-participant", "--state-dir FOLDER")
        )
    preprocessing = preprocessing_of(model.metadata)
    if preprocessing is not None and preprocessing.is_per_site:
        if rows is None:
            raise NoModel(
                'with scaling = "site" the model scales numbers by the rows of this site; '
                + hint("xain-participant", "--data FILE")
                + ", or the --config of its training"
            )
        model = replace(model, metadata=at_site(model.metadata, rows()))
    trained_by = rounds.get(found.round - 1, inspection.RoundStatus())
    if trained_by.task != pb.TRAIN:
        trained_by = inspection.RoundStatus()
    measured_by = rounds.get(found.round, inspection.RoundStatus())
    about = lineage.about(
        "xain-participant",
        session_id=status.session_id,
        number=found.round,
        digest=found.ref.digest.hex(),
        metadata=model.metadata,
        is_best=found.round == best,
        is_last=found.round == max(models),
        num_updates=trained_by.num_contributors,
        num_samples=trained_by.num_samples,
        metrics=trained_by.metrics,
        evaluation=_evaluation_of(measured_by, "evaluation"),
        coordinator_evaluation=_evaluation_of(measured_by, "coordinator_evaluation"),
        threshold=threshold,
    )
    formats.write(to, model, {**about, "dialect": dialect.to_json()})
    told = f"model {found.round} of session {status.session_id} is in {to}"
    if to.suffix == ".onnx" or "workload" not in model.metadata:
        return told  # other programs predict with it
    use = hint("xain-participant", f"xain-participant predict --model {to} --data FILE")
    return f"{told}; to use it, {use}"


def _pages(stub: InspectionStub, method: str) -> Iterator[Any]:
    """Answers to ListModels or ListRounds, from the first page to the last."""
    request: Any = getattr(inspection, f"{method}Request")(page_size=_PAGE)
    while True:
        page = getattr(stub, method)(request, timeout=CALL_S)
        yield page
        request.page_token = page.next_page_token
        if not page.next_page_token:
            return


def _evaluation_of(
    record: inspection.RoundStatus, name: Literal["evaluation", "coordinator_evaluation"]
) -> lineage.Measured | None:
    """Figures of one of a round's two evaluations; None if the round has none."""
    return lineage.Measured.of(getattr(record, name)) if record.HasField(name) else None


def _download(
    address: str,
    found: inspection.ModelStatus,
    session_id: str,
    own: PersonalTensors,
    participant_id: str,
    tls: "Certificates | None",
) -> Model:
    """Download a model, with this participant's own tensors in it. Raises NoModel."""
    layout, metadata = layout_of(found.layout), dict(found.metadata)
    own.on_model(layout, metadata)
    own.on_round(Assignment(session_id, found.round))
    instance = new_instance_id()  # a name that has shown one is not served without
    with CoordinatorClient(address, participant_id, instance_id=instance, tls=tls) as client:
        try:
            return Model(own.with_own(client.get_weights(found.ref)), layout, metadata)
        except Refused as refused:
            raise NoModel(f"model {found.round} cannot be fetched: {refused}") from None
