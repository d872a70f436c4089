"""The participant's own control variate, with the remedy "scaffold".

It goes on from the version of the round in which its update counted last, as the coordinator says:
a version of a later round belongs to an update that never counted.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from xain_foundation.logs.logger import get_logger
from xain_participant.keep.versions import Versions
from xain_participant.sdk.participant import Assignment
from xain_workloads.model import Model
from xain_workloads.scaffold import Variates


class KeptVariates:
    """The control variates of one participant.

    folder: its state directory; None keeps them in memory.
    """

    def __init__(self, folder: Path | None = None, participant_id: str = "") -> None:
        self._versions = Versions(folder, "control", participant_id)
        self._log = get_logger(__name__).bind(participant=participant_id)
        self._assignment = Assignment("", -1)
        self.is_lost = False

    def close(self) -> None:
        """End writing, so that another process may use the folder."""
        self._versions.close()

    def on_round(self, assignment: Assignment) -> None:
        """Learn which round is trained, and which one counted last."""
        self._assignment = assignment
        self.is_lost = False

    def begin(self, model: Model) -> Variates:
        """The control variates with which a model is trained, which has the server's. Sets is_lost,
        if the participant has not its own any more."""
        session_id, counted = self._assignment.session_id, self._assignment.counted_round
        kept = self._versions.of_round(session_id, counted) if counted >= 0 else None
        self.is_lost = counted >= 0 and kept is None
        if self.is_lost:
            self._log.warning(
                "control_variate_lost",
                round=self._assignment.round,
                counted_round=counted,
                hint="all sites begin anew; a state directory keeps it over a restart",
            )
        own = None if kept is None else np.frombuffer(kept, np.float64)
        return Variates.of(model, own)

    def keep(self, own: NDArray[np.float64]) -> None:
        """Keep the control variate that the round leaves."""
        assigned = self._assignment
        self._versions.save(
            assigned.session_id, assigned.round, own.tobytes(), begun_with=assigned.counted_round
        )
