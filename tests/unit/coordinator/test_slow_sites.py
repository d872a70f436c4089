"""Asynchronous rounds over sites of one class each, one of them slow: core and engine together."""

import heapq
import io

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from tests.unit.core.bench import Bench, make_rules

from xain_coordinator.aggregation.engine import aggregate
from xain_coordinator.core.vocabulary import commands as c
from xain_coordinator.core.vocabulary.effects import InitialiseModel
from xain_coordinator.core.vocabulary.keys import model_key, update_key
from xain_coordinator.core.vocabulary.values import DataProfile, StoredWeights, WeightsRef
from xain_coordinator.driver.effects import store_model
from xain_coordinator.stores.memory import MemoryStore
from xain_workloads.model import Model

Array = NDArray[np.float64]

CLASSES = 4
MODELS = 100
SLOW_S, FAST_S = 6.0, 1.0  # of a training; the last site is the slow one


class Federation:
    """A session whose sites train softmax regression, each on the digits of one class."""

    def __init__(self, **rules: object) -> None:
        features, classes = load_digits(return_X_y=True)
        known = classes < CLASSES
        scaled = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-9)
        self.features = np.c_[scaled, np.ones(len(scaled))][known]
        self.classes = classes[known]
        self.store = MemoryStore()
        self.bench = Bench(make_rules(rounds=MODELS, start_participants=CLASSES, **rules))  # type: ignore[arg-type]
        self.bench.answers = False
        for site in range(CLASSES):
            profile = DataProfile(int((self.classes == site).sum()), 65, ("0", "1", "2", "3"))
            self.bench.join(f"site-{site}", profile=profile)
        self._make()

    def run(self) -> list[float]:
        """Train to the end. Returns the recall of each class by the last model."""
        began: dict[str, int] = {}
        due: list[tuple[float, str]] = []
        now = 0.0
        while self.bench.session.num_trained < MODELS:
            for name in self.bench.outstanding:
                number = self.bench.session.trained_by(name)
                if began.get(name) != number:
                    began[name] = number
                    seconds = SLOW_S if name == f"site-{CLASSES - 1}" else FAST_S
                    heapq.heappush(due, (now + seconds, name))
            now, name = heapq.heappop(due)
            self._hand_in(name, began[name])
            self._make()
        weights = self._vector(self.bench.session.num_trained).reshape(-1, CLASSES)
        predicted = np.argmax(self.features @ weights, axis=1)
        return [float(np.mean(predicted[self.classes == k] == k)) for k in range(CLASSES)]

    def _vector(self, number: int) -> Array:
        with self.store.open(model_key(number)) as reader:
            vector: Array = np.load(io.BytesIO(reader.read(0, reader.size)))
        return vector

    def _hand_in(self, name: str, number: int) -> None:
        site = int(name[-1])
        rows = self.features[self.classes == site]
        weights = self._vector(number).reshape(-1, CLASSES).copy()
        chance = np.random.default_rng((number, site))
        for _ in range(4):
            batch = rows[chance.choice(len(rows), 32)]
            scores = batch @ weights
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            shares[:, site] -= 1
            weights -= 0.05 * batch.T @ shares / len(batch)
        file = io.BytesIO()
        np.save(file, weights.ravel())
        data, key = file.getvalue(), f"{update_key(number, name)}.1"
        upload = self.store.upload(key)
        upload.write(data)
        upload.commit(overwrite=False)
        ref = WeightsRef(key, len(data), xxhash.xxh3_128(data).hexdigest())
        stored = StoredWeights(ref, "float64", (65 * CLASSES,))
        self.bench.send(c.EndTrainingRound(name, number, len(rows), stored))

    def _make(self) -> None:
        while self.bench.owed:
            effect = self.bench.owed.pop(0)
            if isinstance(effect, InitialiseModel):
                model = store_model(self.store, 0, Model(np.zeros(65 * CLASSES), ()))
                self.bench.send(c.InitialisationDone(model))
            else:
                self.bench.send(c.AggregationDone(aggregate(self.store, effect)))


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"consistency": "ssp", "staleness": 3, "buffer_size": 2},
        {"consistency": "asp", "staleness": None, "buffer_size": 2},
    ],
    ids=["bsp", "ssp", "asp"],
)
def test_class_of_a_slow_site_is_not_forgotten(rules: dict[str, object]) -> None:
    """Fast sites bring six updates in the time of one of the slow site, which alone knows a class.
    Where weights fall with staleness, the recall of that class is 0.75 in ASP."""
    recall = Federation(**rules).run()
    assert min(recall) > 0.85, recall
