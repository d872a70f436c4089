"""Training of the demo: its data, as every participant splits it, and its accuracy."""

from dataclasses import dataclass

import grpc
import numpy as np

from xain_coordinator.server.translate import layout_of
from xain_foundation.fields import proxy_options
from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl import coordinator_pb2_grpc, inspection_pb2_grpc
from xain_proto.fl import inspection_pb2 as inspection
from xain_proto.np import proto_to_ndarray
from xain_proto.np.ndarray_pb2 import NDArray
from xain_workloads.data import Dataset, load
from xain_workloads.model import Model
from xain_workloads.partition import Partition, split_train_test
from xain_workloads.workload import create, evaluate, fit_centralised, predict

SOURCE = "digits"
SCALE = 1 / 16  # the pixels are 0 to 16
TEST_FRACTION = 0.2
TIMEOUT_S = 5.0
SLACK = 20
MAX_LIMIT = 1000  # that of Inspection


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The data of each participant, and the rows that nobody trains on.

    trains: by participant; test: all that they set aside.
    """

    trains: tuple[Dataset, ...]
    test: Dataset

    @property
    def train(self) -> Dataset:
        """All training rows together, for the centralised baseline."""
        return _joined(self.trains)


def split(num_parts: int, alpha: float, seed: int) -> Split:
    """Split the data set as each participant does by itself."""
    data = load(SOURCE, scale=SCALE)
    pairs = [
        split_train_test(
            Partition("dirichlet", num_parts, index, alpha, seed).apply(data), TEST_FRACTION, seed
        )
        for index in range(num_parts)
    ]
    return Split(tuple(train for train, _ in pairs), _joined([test for _, test in pairs]))


def participant_settings(
    index: int, num_parts: int, alpha: float, seed: int
) -> dict[str, dict[str, object]]:
    """The configuration under which a participant makes the same split."""
    return {
        "participant": {"id": f"site-{index}"},
        "data": {"source": SOURCE, "scale": SCALE, "test_fraction": TEST_FRACTION},
        "partition": {
            "kind": "dirichlet",
            "num_parts": num_parts,
            "index": index,
            "alpha": alpha,
            "seed": seed,
        },
        "training": {"seed": seed},
        "logging": {"level": "info"},
    }


def centralised_accuracy(data: Split, epochs: int, eta0: float, seed: int) -> float:
    """Test accuracy of the same model trained on all rows in one place."""
    workload = create("sgd", {"eta0": eta0})
    model = fit_centralised(workload, data.train, epochs=epochs, seed=seed)
    return evaluate(model, data.test)["accuracy"]


def accuracy_on(model: Model, test: Dataset) -> float:
    """Accuracy of the model on the test rows.

    The model knows the classes of those who were there at the beginning; it gets the rows of all
    other classes wrong, which are tested too.
    """
    return float(np.mean(predict(model, test) == test.target))


class Observer:
    """Reads status and models of a running coordinator over gRPC, as any client can.

    rounds: all so far, by number.
    accuracies: test accuracy of each global model so far, by number.
    """

    def __init__(self, port: int, test: Dataset) -> None:
        address = f"127.0.0.1:{port}"
        self._channel = grpc.insecure_channel(address, options=proxy_options(address))
        self._coordinator = coordinator_pb2_grpc.CoordinatorStub(self._channel)
        self._inspection = inspection_pb2_grpc.InspectionStub(self._channel)
        self._test = test
        self.rounds: dict[int, inspection.RoundStatus] = {}
        self.accuracies: dict[int, float] = {}
        self._next_round = self._next_model = 0  # the first ones of which not all is known

    def look(self) -> inspection.GetStatusResponse:
        """Fetch new rounds and models. Raises grpc.RpcError while the coordinator is away."""
        status = self._status()
        self._take_in_rounds(status.round)
        self._take_in_models(status.round)
        return status

    def final_accuracy(self) -> float:
        """Accuracy of the latest model."""
        return self.accuracies[max(self.accuracies)]

    def _status(self) -> inspection.GetStatusResponse:
        return self._inspection.GetStatus(inspection.GetStatusRequest(), timeout=TIMEOUT_S)

    def _take_in_rounds(self, current: int) -> None:
        request = inspection.ListRoundsRequest(limit=_limit(current - self._next_round))
        for round_ in self._inspection.ListRounds(request, timeout=TIMEOUT_S).rounds:
            self.rounds[round_.round] = round_
        while (known := self.rounds.get(self._next_round)) and known.phase == "published":
            self._next_round += 1

    def _take_in_models(self, current: int) -> None:
        request = inspection.ListModelsRequest(limit=_limit(current - self._next_model))
        for model in self._inspection.ListModels(request, timeout=TIMEOUT_S).models:
            if model.round not in self.accuracies:
                self.accuracies[model.round] = self._evaluate(model)
        while self._next_model in self.accuracies:
            self._next_model += 1

    def _evaluate(self, status: inspection.ModelStatus) -> float:
        request = pb.GetWeightsRequest(key=status.ref.key)
        call = self._coordinator.GetWeights(request, timeout=TIMEOUT_S)
        vector = proto_to_ndarray(NDArray(ndarray=b"".join(message.data for message in call)))
        model = Model(vector, layout_of(status.layout), dict(status.metadata))
        return accuracy_on(model, self._test)

    def close(self) -> None:
        self._channel.close()


def _limit(num_behind: int) -> int:
    """Number of latest rounds to ask for. More may have come since they were counted."""
    return min(max(num_behind, 0) + SLACK, MAX_LIMIT)


def _joined(parts: "list[Dataset] | tuple[Dataset, ...]") -> Dataset:
    return Dataset(
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.target for part in parts]),
        parts[0].feature_names,
    )
