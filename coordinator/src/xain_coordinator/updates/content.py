"""Checks of bytes and sums that an update holds against the model of its round."""

import numpy as np

from xain_coordinator.core.vocabulary.errors import InvalidUpdate
from xain_coordinator.core.vocabulary.values import BYTES, GlobalModel, StoredWeights
from xain_coordinator.ports import WeightsStore
from xain_coordinator.stores.integrity import read_vector, read_weights
from xain_coordinator.updates.announced import check_announced_size
from xain_wire.np import parse_npy_header
from xain_wire.np.codec import MAX_HEADER_BYTES
from xain_workloads.ensembles import bagging_options, ensembles, held, stacking
from xain_workloads.errors import InvalidContent
from xain_workloads.linear import newton
from xain_workloads.trees import histograms, trees
from xain_workloads.trees.boosting_options import HISTOGRAM, options_of_model


class ContentCheck:
    """Reads stored updates of models of bytes, and sums, and refuses those that fit no model.

    One thread at a time. The state of the last model is kept, so that a model is read once for all
    updates of its round.
    """

    def __init__(self, store: WeightsStore) -> None:
        self._store = store
        self._growing: tuple[str, histograms.Growing] | None = None
        self._due: tuple[str, stacking.Shape | None] | None = None

    def check(
        self, model: GlobalModel, weights: StoredWeights, max_iterations: int, array: bytes = b""
    ) -> None:
        """Check the content of an update: estimators, names of those that stay at the participant,
        sums of a linear model of votes, a booster or histograms by the model's mode, or sums of
        Newton's method. Blocks.

        max_iterations: boosting rounds that a booster may add; a round of estimators is one.
        array: the bytes of an update that is not stored yet.
        Raises InvalidUpdate, TOO_LARGE, and StoreError.
        """
        check_announced_size(model, weights.ref.size_bytes)  # before it is in memory
        if not array:
            array = read_weights(self._store, weights.ref.key)
        data = _elements(array)
        try:
            if model.dtype != BYTES:
                if weights.shape == model.shape:  # else it is refused as any other vector
                    newton.check_sums(np.frombuffer(data, "<f8"), model.layout)
            elif ensembles.KEY in model.metadata:
                options = bagging_options.options_of_model(model.metadata)
                num_features = ensembles.num_features_of(model.metadata)
                if options.is_stacked and (shape := self._stacked(model)) is not None:
                    stacking.unpack_sums(data, shape)
                elif options.publish:
                    ensembles.check_update(data, options, num_features, epochs=max_iterations)
                else:
                    held.check_holding(data, options.estimators * max_iterations)
            elif options_of_model(model.metadata).mode == HISTOGRAM:
                histograms.parse_sums(data, self._state_of(model))
            else:
                kind = trees.BoosterKind.from_metadata(model.metadata)
                trees.parse_update(data, kind, max_iterations)
        except InvalidContent as error:
            raise InvalidUpdate(str(error)) from None

    def _stacked(self, model: GlobalModel) -> stacking.Shape | None:
        """The linear model that the round trains; None if the round fits estimators."""
        if self._due is None or self._due[0] != model.ref.digest:
            vector = read_vector(self._store, model.ref)
            due = stacking.Stack.parse(vector.tobytes()).due(model.metadata)
            self._due = model.ref.digest, due
        return self._due[1]

    def _state_of(self, model: GlobalModel) -> histograms.Growing:
        """How far the trees of a model are; read from the store once for each model. Blocks."""
        if self._growing is None or self._growing[0] != model.ref.digest:
            # A damaged model must not make good updates look bad.
            vector = read_vector(self._store, model.ref)
            state = histograms.growing(vector.tobytes(), model.metadata)
            self._growing = model.ref.digest, state
        return self._growing[1]


def _elements(data: bytes) -> bytes:
    """The bytes of a stored array without its header; it was measured before."""
    header = parse_npy_header(data[:MAX_HEADER_BYTES])
    assert header is not None, "the array was measured before"
    return data[header.data_offset :]
