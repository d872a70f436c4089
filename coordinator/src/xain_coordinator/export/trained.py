"""The global models of a session, with what was measured of each.

They come from the files of a stopped coordinator, or from one that runs.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Self

import grpc

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts import profiles
from xain_coordinator.core.view.history import History
from xain_coordinator.core.view.records import RoundRecord
from xain_coordinator.core.vocabulary.values import (
    DataProfile,
    Evaluation,
    GlobalModel,
    Task,
    WeightsRef,
)
from xain_coordinator.inspection.client import fetch, open_channel
from xain_coordinator.journal.restore import open_stopped, restore_session
from xain_coordinator.ports import StoreError
from xain_coordinator.server.calls.translate import layout_of
from xain_coordinator.stores.integrity import parse_vector, read_weights
from xain_coordinator.stores.journalled import store_of_session
from xain_coordinator.stores.opening import open_store
from xain_foundation.net.grpc_calls import details_of
from xain_wire.fl import coordinator_pb2 as pb
from xain_wire.fl.coordinator_pb2_grpc import CoordinatorStub
from xain_workloads.errors import NoModel
from xain_workloads.exported.lineage import Measured, about, choose, thresholds_of
from xain_workloads.measures.thresholds import Threshold, with_threshold
from xain_workloads.model import Model

DOWNLOAD_S = 600.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A global model and what is known of it.

    num_updates, num_samples, metrics: of the round that trained it; 0 and empty for the initial
        model. evaluation: at the participants, the mean weighted by samples.
    coordinator_evaluation: on the coordinator's own data.
    """

    model: GlobalModel
    num_updates: int
    num_samples: int
    metrics: Mapping[str, float]
    evaluation: Evaluation | None
    coordinator_evaluation: Evaluation | None


class Trained:
    """Global models of one session, with their metrics.

    entries: by number, oldest first. last, best: numbers of models; best is None if no model was
    evaluated. removed: numbers of the models that [storage] keep_models has removed. profiles: of
    data that fit the models. thresholds: by number, of the models that have one.
    """

    def __init__(
        self,
        session_id: str,
        models: Iterable[GlobalModel],
        rounds: Iterable[RoundRecord],
        best: int | None,
        read: Callable[[WeightsRef], bytes],
        removed: Iterable[int] = (),
        profiles: Iterable[DataProfile] = (),
        thresholds: Mapping[int, Threshold] | None = None,
    ) -> None:
        """read: the bytes of a stored object. Raises NoModel if there is no model yet."""
        records = {record.round: record for record in rounds}
        trained = {number: one for number, one in records.items() if one.task is Task.TRAIN}
        self.session_id = session_id
        self.entries = {
            model.round: _entry(model, trained.get(model.round - 1), records.get(model.round))
            for model in models
            if not model.is_empty
        }
        if not self.entries:
            raise NoModel(f"session {session_id} has no model yet")
        self.last = max(self.entries)
        self.best = best
        self.removed = frozenset(removed)
        self.profiles = tuple(profiles)
        self.thresholds = dict(thresholds or {})
        self._read = read

    @classmethod
    def of(cls, session: Session, history: History, read: Callable[[WeightsRef], bytes]) -> Self:
        """The models of a session by its history. Raises NoModel if there is no model yet."""
        best = session.evaluation.winner
        return cls(
            session.session_id,
            history.models.values(),
            history.rounds,
            None if best is None else best.round,
            read,
            history.removed,
            session.requested or (),
            session.evaluation.thresholds(session.rules),
        )

    def choose(self, which: str) -> Entry:
        """The model that "last", "best" or a number names. Raises NoModel."""
        return self.entries[choose(which, self.entries, self.best, self.removed)]

    def load(self, model: GlobalModel) -> Model:
        """The weights of a model, with its threshold in the metadata if it has one. Raises
        NoModel."""
        try:
            vector = parse_vector(self._read(model.ref), model.ref)
        except StoreError as error:
            raise NoModel(f"model {model.round} cannot be read: {error}") from None
        except grpc.RpcError as error:
            raise NoModel(f"model {model.round} cannot be fetched: {details_of(error)}") from None
        loaded = Model(vector, model.layout, dict(model.metadata))
        return with_threshold(loaded, self.thresholds.get(model.round))

    def described(self, entry: Entry) -> dict[str, Any]:
        """The lineage and metrics of a model, its columns and classes, as a JSON object."""
        model = entry.model
        return about(
            "xain-coordinator",
            session_id=self.session_id,
            number=model.round,
            digest=model.ref.digest,
            metadata=model.metadata,
            is_best=model.round == self.best,
            is_last=model.round == self.last,
            num_updates=entry.num_updates,
            num_samples=entry.num_samples,
            metrics=entry.metrics,
            evaluation=_measured_by(entry.evaluation),
            coordinator_evaluation=_measured_by(entry.coordinator_evaluation),
            profile=profiles.described(
                self.profiles, json.loads(model.metadata.get("classes", "[]"))
            ),
            threshold=self.thresholds.get(model.round),
        )


def _measured_by(evaluation: Evaluation | None) -> Measured | None:
    """Figures of an evaluation; None without one."""
    if evaluation is None:
        return None
    return Measured(evaluation.num_samples, evaluation.metrics, evaluation.figures)


def _entry(
    model: GlobalModel, trained_by: RoundRecord | None, measured_by: RoundRecord | None
) -> Entry:
    """A model with what is known of it. trained_by: record of the round that made it. measured_by:
    of the round that began with it."""
    return Entry(
        model,
        trained_by.num_contributors if trained_by else 0,
        trained_by.num_samples if trained_by else 0,
        trained_by.metrics if trained_by else {},
        measured_by.evaluation if measured_by else None,
        measured_by.coordinator_evaluation if measured_by else None,
    )


@contextmanager
def open_files(config: CoordinatorConfig, session_id: str = "") -> Iterator[Trained]:
    """The models of a session of a stopped coordinator, by default of the latest one. Raises
    NoModel, JournalError and StoreError."""
    with (
        open_stopped(config.journal.path) as (journal, last),
        closing(open_store(config.storage)) as opened,
    ):
        if session_id:
            records = journal.records_of(session_id)
            if records is None:
                raise NoModel(f"there is no session {session_id} in {config.journal.path}")
            last = restore_session(records)
        store = store_of_session(opened, journal, last.session.session_id)
        yield Trained.of(last.session, last.history, lambda ref: read_weights(store, ref.key))


@contextmanager
def ask(address: str) -> Iterator[Trained]:
    """The models of the coordinator that runs at "host:port", whose weights are fetched when they
    are asked for. Raises NoModel and NoStatus."""
    snapshot = fetch(address, everything=True)
    status = snapshot.status
    with open_channel(address) as channel:
        stub = CoordinatorStub(channel)

        def read(ref: WeightsRef) -> bytes:
            stream = stub.GetWeights(pb.GetWeightsRequest(key=ref.key), timeout=DOWNLOAD_S)
            return b"".join(message.data for message in stream)

        yield Trained(
            status.session_id,
            map(_model, snapshot.models.models),
            map(_record, snapshot.rounds.rounds),
            status.best_round if status.HasField("best_round") else None,
            read,
            snapshot.models.removed,
            map(_profile, snapshot.participants.participants),
            thresholds_of(status),
        )


def _model(message: Any) -> GlobalModel:
    """A model of a coordinator's answer, without its weights."""
    ref = WeightsRef(message.ref.key, message.ref.size_bytes, message.ref.digest.hex())
    layout, metadata = layout_of(message.layout), dict(message.metadata)
    shape = tuple(message.shape)
    return GlobalModel(message.round, ref, message.dtype, shape, layout, metadata)


def _profile(participant: Any) -> DataProfile:
    """The data profile of a participant in a coordinator's answer."""
    profile = participant.profile
    return DataProfile(
        profile.num_samples,
        profile.num_features,
        tuple(profile.classes),
        target=profile.target,
        task=profile.task,
    )


def _record(message: Any) -> RoundRecord:
    """The part of a round's record that is listed with models."""
    return RoundRecord(
        message.round,
        (),
        message.opened_seconds,
        num_samples=message.num_samples,
        counts=(message.num_selected, message.num_contributors),
        task=Task(pb.Task.Name(message.task).lower()),
        metrics=dict(message.metrics),
        evaluation=_evaluation(message, "evaluation"),
        coordinator_evaluation=_evaluation(message, "coordinator_evaluation"),
    )


def _evaluation(message: Any, name: str) -> Evaluation | None:
    """The evaluation of this name in a message; None if it has none."""
    found = getattr(message, name)
    if not message.HasField(name):
        return None
    measured = Measured.of(found)
    return Evaluation(measured.num_samples, measured.metrics, figures=measured.figures)
