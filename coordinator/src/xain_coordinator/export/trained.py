"""The global models of a session, with what was measured of each.

They come from the files of a stopped coordinator, or from one that runs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any

import grpc
import numpy as np
import xxhash

from xain_coordinator.admission import chunks
from xain_coordinator.app import open_store
from xain_coordinator.bundles import open_weights
from xain_coordinator.config import CoordinatorConfig
from xain_coordinator.core.values import Evaluation, Layout
from xain_coordinator.history import History
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import JournalError, StoreError, WeightsStore
from xain_coordinator.restore import restore
from xain_coordinator.status_view import NoStatus, fetch
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_messaging.process.fields import proxy_options
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl.coordinator_pb2_grpc import CoordinatorStub
from xain_workloads.model import Model, TensorSpec

DOWNLOAD_S = 600.0


class NoModel(Exception):
    """There is no such model, or it cannot be read. The message is one line for the operator."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A global model and what is known of it.

    round: its number; it was made by round `round` - 1.
    digest: xxh3-128 of the stored object, in hex.
    num_updates, num_samples: of the round that made it; 0 for the initial model.
    metrics: of the training that led to it. evaluation: at the participants, the mean weighted by
        samples. coordinator_evaluation: on the coordinator's own data.
    """

    round: int
    key: str
    digest: str
    layout: Layout
    metadata: Mapping[str, str]
    num_updates: int = 0
    num_samples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    coordinator_evaluation: Evaluation | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """The models of one session.

    entries: by number, oldest first. best: number of the best model by `metric`, None if none was
    evaluated.
    read: the stored object of a model; raises NoModel.
    """

    session_id: str
    entries: Mapping[int, Entry]
    best: int | None
    metric: str
    read: Callable[[Entry], bytes]

    @property
    def last(self) -> int:
        """Number of the latest model."""
        return max(self.entries)

    def choose(self, which: str) -> Entry:
        """The model that "last", "best" or a number names. Raises NoModel."""
        if which == "best" and self.best is None:
            raise NoModel(
                "no model was evaluated, so there is no best one; take the last, or see [evaluate]"
            )
        known = {"last": self.last, "best": self.best}
        number = known.get(which)
        if number is None and which.isascii() and which.isdigit():
            number = int(which)
        if number is None or number not in self.entries:
            numbers = f"{min(self.entries)} to {self.last}"
            raise NoModel(f"there is no model {which!r}: take last, best, or a number, {numbers}")
        return self.entries[number]

    def load(self, entry: Entry) -> Model:
        """The weights of a model. Raises NoModel."""
        data = self.read(entry)
        if xxhash.xxh3_128_hexdigest(data) != entry.digest:
            raise NoModel(f"model {entry.round} is damaged: its bytes have another digest")
        vector = np.load(BytesIO(data), allow_pickle=False)
        return Model(vector, entry.layout, dict(entry.metadata))


@contextmanager
def open_files(config: CoordinatorConfig) -> Iterator[Trained]:
    """The models of the latest session of a stopped coordinator. Raises NoModel."""
    path = config.journal.path
    if config.storage.kind == "memory" or not path.exists():
        raise NoModel(f"there is no journal at {path}; name its folder with --data-dir")
    with ExitStack() as stack:
        try:
            journal = stack.enter_context(closing(SqliteJournal(path)))
            restored = restore(journal)
            if restored is None:
                raise NoModel(f"there is no session in {path}")
            opened = open_store(config)
        except (JournalError, StoreError) as error:
            raise NoModel(f"{error}; a coordinator that runs is asked with --address") from None
        stack.callback(opened.close)
        session, history = restored[0].session, restored[0].history
        store = PrefixedStore(opened.store, session.session_id)
        best = session.evaluation.best
        yield _usable(
            Trained(
                session.session_id,
                _entries(history),
                None if best is None else best.round,
                "" if best is None else best.metric,
                lambda entry: _from_store(store, entry),
            )
        )


def _usable(trained: Trained) -> Trained:
    if not trained.entries:
        raise NoModel(f"session {trained.session_id} has no model yet")
    return trained


def _entries(history: History) -> dict[int, Entry]:
    records = {record.round: record for record in history.rounds}
    entries = {}
    for model in history.models.values():
        if model.is_empty:
            continue
        made_by, measured = records.get(model.round - 1), records.get(model.round)
        entry = Entry(
            model.round,
            model.ref.key,
            model.ref.digest,
            model.layout,
            model.metadata,
            evaluation=measured.evaluation if measured else None,
            coordinator_evaluation=measured.coordinator_evaluation if measured else None,
        )
        if made_by is not None:
            entry = _made_by(entry, made_by.num_contributors, made_by.num_samples, made_by.metrics)
        entries[model.round] = entry
    return dict(sorted(entries.items()))


def _made_by(
    entry: Entry, num_updates: int, num_samples: int, metrics: Mapping[str, float]
) -> Entry:
    return replace(entry, num_updates=num_updates, num_samples=num_samples, metrics=dict(metrics))


def _from_store(store: WeightsStore, entry: Entry) -> bytes:
    try:
        with open_weights(store, entry.key) as reader:
            return b"".join(chunks(reader))
    except StoreError as error:
        raise NoModel(f"model {entry.round} cannot be read: {error}") from None


@contextmanager
def ask(address: str) -> Iterator[Trained]:
    """The models of the coordinator that runs at "host:port". Raises NoModel."""
    try:
        snapshot = fetch(address, everything=True)
    except NoStatus as error:
        raise NoModel(str(error)) from None
    rounds = {one.round: one for one in snapshot.rounds.rounds}
    entries = {}
    for model in snapshot.models.models:
        if list(model.shape) == [0]:
            continue
        entry = Entry(
            model.round,
            model.ref.key,
            model.ref.digest.hex(),
            tuple(TensorSpec(t.name, tuple(t.shape), t.dtype, _kind(t.kind)) for t in model.layout),
            dict(model.metadata),
            evaluation=_evaluation(rounds.get(model.round), "evaluation"),
            coordinator_evaluation=_evaluation(rounds.get(model.round), "coordinator_evaluation"),
        )
        made_by = rounds.get(model.round - 1)
        if made_by is not None and made_by.task != pb.EVALUATE:
            metrics = dict(made_by.metrics)
            entry = _made_by(entry, made_by.num_contributors, made_by.num_samples, metrics)
        entries[model.round] = entry
    status = snapshot.status
    options = [("grpc.max_receive_message_length", -1), *proxy_options(address)]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = CoordinatorStub(channel)
        yield _usable(
            Trained(
                status.session_id,
                entries,
                status.best_round if status.HasField("best_round") else None,
                status.metric,
                lambda entry: _download(stub, entry),
            )
        )


def _kind(text: str) -> Any:
    return text or "weight"


def _evaluation(round_: Any, name: str) -> Evaluation | None:
    if round_ is None or not round_.HasField(name):
        return None
    message = getattr(round_, name)
    return Evaluation(message.num_samples, dict(message.metrics))


def _download(stub: CoordinatorStub, entry: Entry) -> bytes:
    try:
        stream = stub.GetWeights(pb.GetWeightsRequest(key=entry.key), timeout=DOWNLOAD_S)
        return b"".join(message.data for message in stream)
    except grpc.RpcError as error:
        raise NoModel(f"model {entry.round} cannot be fetched: {error.details()}") from None
