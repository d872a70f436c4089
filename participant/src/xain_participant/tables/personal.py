"""The tensors of a model that stay at a participant: `[model] personal` of the coordinator.

A participant trains from its own values of these tensors, and keeps what training makes of them.
Its update has the values of the global model in their place, so that no aggregation changes them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_participant.keep.versions import Versions
from xain_participant.sdk.participant import Assignment
from xain_workloads.model import Layout, is_personal, personal_patterns


class PersonalTensors:
    """The personal tensors of one participant.

    folder: its state directory; None keeps the tensors in memory.
    """

    def __init__(self, folder: Path | None = None, participant_id: str = "") -> None:
        self._versions = Versions(folder, "personal", participant_id)
        self._layout: Layout = ()
        self._patterns: tuple[str, ...] = ()
        self._session_id = ""
        self._round = -1

    def on_model(self, layout: Layout, metadata: Mapping[str, str]) -> None:
        """Learn which tensors are personal. Raises ValueError if the metadata are wrong."""
        self._layout = layout
        self._patterns = personal_patterns(metadata)

    def on_round(self, assignment: Assignment) -> None:
        """Learn which round is trained or evaluated."""
        self._session_id, self._round = assignment.session_id, assignment.round

    @property
    def are_kept(self) -> bool:
        """Whether there are values of the participant's own that the round begins with."""
        return self._versions.load(self._session_id, self._round) is not None

    def with_own(self, weights: NDArray[Any]) -> NDArray[Any]:
        """Copy the global model with the participant's own values of the personal tensors, as its
        last round has left them; without such values the same model. weights: (d,), left as it
        is."""
        kept = self._versions.load(self._session_id, self._round) if self._patterns else None
        if kept is None:
            return weights
        own, whole, start = np.frombuffer(kept, weights.dtype), weights.copy(), 0
        for piece in self._pieces():
            size = piece.stop - piece.start
            whole[piece] = own[start : start + size]
            start += size
        return whole

    def keep_own(self, trained: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]:
        """Keep the participant's own values of a trained model. Returns the update, in which the
        personal tensors have the values of the global model.

        trained: (d,), left as it is. weights: (d,), the global model that the round started from.
        """
        if not self._patterns:
            return trained
        own = b"".join(trained[piece].tobytes() for piece in self._pieces())
        self._versions.save(self._session_id, self._round, own)
        update = trained.copy()
        for piece in self._pieces():
            update[piece] = weights[piece]
        return update

    def _pieces(self) -> Iterator[slice]:
        """Slices of the vector that hold the personal tensors."""
        start = 0
        for spec in self._layout:
            if is_personal(spec.name, self._patterns):
                yield slice(start, start + spec.size)
            start += spec.size
