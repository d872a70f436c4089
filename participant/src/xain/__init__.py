"""Federated training for a script of one's own.

    import xain

    for round in xain.rounds(model):
        model.load_state_dict(round.weights)
        loss = train(model, loader, epochs=round.config.epochs)
        round.submit(model.state_dict(), samples=len(data), metrics={"loss": loss})

The names below are imported when they are first used, so that `import xain` costs next to nothing.
"""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xain.loop import Rounds, SessionError, rounds
    from xain.round import Config, Round
    from xain.simulation import Simulation, SimulationError, Site, simulate
    from xain.weights import LayoutMismatch, trainable

__all__ = [
    "Config",
    "LayoutMismatch",
    "Round",
    "Rounds",
    "SessionError",
    "Simulation",
    "SimulationError",
    "Site",
    "rounds",
    "simulate",
    "trainable",
]

# A script's data loader forks processes, which never use gRPC. gRPC would print a line for each of
# them. gRPC reads the variable when it is imported, which is later than now.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

_MODULES = {
    "Config": "xain.round",
    "LayoutMismatch": "xain.weights",
    "Round": "xain.round",
    "Rounds": "xain.loop",
    "SessionError": "xain.loop",
    "Simulation": "xain.simulation",
    "SimulationError": "xain.simulation",
    "Site": "xain.simulation",
    "rounds": "xain.loop",
    "simulate": "xain.simulation",
    "trainable": "xain.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'xain' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
