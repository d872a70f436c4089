"""What the demo knows of the training: its data, as everyone splits it, and its accuracy."""

from dataclasses import dataclass

import grpc
import numpy as np

from xain_proto.fl import coordinator_pb2 as pb
from xain_proto.fl import coordinator_pb2_grpc, inspection_pb2_grpc
from xain_proto.fl import inspection_pb2 as inspection
from xain_proto.np import proto_to_ndarray
from xain_proto.np.ndarray_pb2 import NDArray
from xain_workloads.data import Dataset, load
from xain_workloads.model import Model, TensorSpec
from xain_workloads.partition import Partition, split_train_test
from xain_workloads.workload import create, fit_centralised, from_metadata

SOURCE = "digits"
SCALE = 1 / 16  # the pixels are 0 to 16
TEST_FRACTION = 0.2
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The data of each participant, and the rows that nobody trains on.

    trains: by participant; test: all that they set aside.
    """

    trains: tuple[Dataset, ...]
    test: Dataset

    @property
    def train(self) -> Dataset:
        """All training rows in one place: what federated training does without."""
        return _joined(self.trains)


def split(num_parts: int, alpha: float, seed: int) -> Split:
    """What the participants do with the data set, each for itself, done here for all of them."""
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
    return workload.evaluate(model, data.test)["accuracy"]


class Observer:
    """Looks at a running coordinator from outside, over the wire, as anyone could."""

    def __init__(self, port: int, test: Dataset) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._coordinator = coordinator_pb2_grpc.CoordinatorStub(self._channel)
        self._inspection = inspection_pb2_grpc.InspectionStub(self._channel)
        self._test = test
        self._accuracies: dict[int, float] = {}

    def status(self) -> inspection.GetStatusResponse:
        """Raises grpc.RpcError while the coordinator is away, as all methods do."""
        return self._inspection.GetStatus(inspection.GetStatusRequest(), timeout=TIMEOUT_S)

    def rounds(self) -> list[inspection.RoundStatus]:
        request = inspection.ListRoundsRequest(limit=10_000)
        return list(self._inspection.ListRounds(request, timeout=TIMEOUT_S).rounds)

    def accuracies(self) -> dict[int, float]:
        """Test accuracy of each global model so far, by its number."""
        request = inspection.ListModelsRequest(limit=10_000)
        for model in self._inspection.ListModels(request, timeout=TIMEOUT_S).models:
            if model.round not in self._accuracies:
                self._accuracies[model.round] = self._evaluate(model)
        return dict(self._accuracies)

    def _evaluate(self, status: inspection.ModelStatus) -> float:
        request = pb.GetWeightsRequest(key=status.ref.key)
        call = self._coordinator.GetWeights(request, timeout=TIMEOUT_S)
        vector = proto_to_ndarray(NDArray(ndarray=b"".join(message.data for message in call)))
        layout = tuple(
            TensorSpec(tensor.name, tuple(tensor.shape), tensor.dtype) for tensor in status.layout
        )
        model = Model(vector, layout, dict(status.metadata))
        return from_metadata(model.metadata).evaluate(model, self._test)["accuracy"]

    def close(self) -> None:
        self._channel.close()


def _joined(parts: "list[Dataset] | tuple[Dataset, ...]") -> Dataset:
    return Dataset(
        np.concatenate([part.features for part in parts]),
        np.concatenate([part.target for part in parts]),
        parts[0].feature_names,
    )
