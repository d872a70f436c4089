"""Federated training for a script of one's own.

    import xain

    for round in xain.rounds(model):
        model.load_state_dict(round.weights)
        loss = train(model, loader, epochs=round.config.epochs)
        round.submit(model.state_dict(), samples=len(data), metrics={"loss": loss})

The names below are imported when they are first used, so that `import xain` costs next to nothing.
"""

import os
from typing import TYPE_CHECKING

from xain_foundation.on_use import loaded_on_use

if TYPE_CHECKING:
    from xain.loop import Rounds, rounds
    from xain.result import Result, SessionError
    from xain.round import Config, Round
    from xain.weights import LayoutMismatch, trainable
    from xain_session.given import Rule
    from xain_session.opening import connect, session
    from xain_session.record import Record
    from xain_session.session import Session
    from xain_session.simulation.simulate import simulate
    from xain_session.simulation.simulated import Simulated, simulated
    from xain_session.simulation.worker import Site
    from xain_session.trackers import MLflow, TensorBoard, WeightsAndBiases
    from xain_workloads.tables.partition import partition

__all__ = [
    "Config",
    "LayoutMismatch",
    "MLflow",
    "Record",
    "Result",
    "Round",
    "Rounds",
    "Rule",
    "Session",
    "SessionError",
    "Simulated",
    "Site",
    "TensorBoard",
    "WeightsAndBiases",
    "connect",
    "partition",
    "rounds",
    "session",
    "simulate",
    "simulated",
    "trainable",
]

# A script's data loader forks processes, which never use gRPC. gRPC would print a line for each of
# them. gRPC reads the variable when it is imported, which is later than now.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

__getattr__, __dir__ = loaded_on_use(
    __name__,
    {
        "loop": "Rounds rounds",
        "result": "Result SessionError",
        "round": "Config Round",
        "weights": "LayoutMismatch trainable",
        "xain_session.given": "Rule",
        "xain_session.opening": "connect session",
        "xain_session.record": "Record",
        "xain_session.session": "Session",
        "xain_session.trackers": "MLflow TensorBoard WeightsAndBiases",
        "xain_session.simulation.simulated": "Simulated simulated",
        "xain_session.simulation.simulate": "simulate",
        "xain_session.simulation.worker": "Site",
        "xain_workloads.tables.partition": "partition",
    },
)
