"""The result of training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xain_participant.sdk.encoded import Encoded
from xain_participant.sdk.participant import Evaluation
from xain_workloads.model import Layout


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one round, ready to be sent as often as needed.

    session_id: empty if the coordinator named none. vector: (d,), contiguous.
    metrics_json: what was measured, as it travels. metrics: the newest value of each name, for
    observers. encoded: a shorter form of the vector, which decodes to exactly its values.
    layout: of initial weights, or of the slice that was trained in a process group.
    attempt: of that process group; 0 without one.
    evaluation: of the model that the round started from.
    An evaluation round has no weights: its vector is empty.
    A result that was read back from the disk has neither metrics nor encoded.
    """

    session_id: str
    round: int
    vector: NDArray[np.floating[Any]]
    num_samples: int
    metrics_json: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    encoded: Encoded | None = None
    layout: Layout = ()
    evaluation: Evaluation | None = None
    attempt: int = 0

    @property
    def is_evaluation(self) -> bool:
        """Whether the round was evaluated and not trained."""
        return self.vector.size == 0 and self.evaluation is not None

    @property
    def is_training(self) -> bool:
        """Whether samples were trained on; not for initial weights and evaluations."""
        return self.num_samples > 0
