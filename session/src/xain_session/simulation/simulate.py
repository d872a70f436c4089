"""Many participants at once: xain.simulate(main, participants=100, workers=2)."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from math import ceil
from pathlib import Path
from typing import Any

from numpy import floating
from numpy.typing import NDArray

from xain.result import SessionError
from xain_session.deployments import Embedded
from xain_session.record import Result
from xain_session.session import Session
from xain_session.simulation.simulated import simulated
from xain_session.simulation.worker import Main

Arrays = Mapping[str, NDArray[floating[Any]]]


def simulate(
    main: Main,
    participants: int,
    workers: int = 2,
    *,
    rounds: int = 10,
    fraction: float = 1.0,
    epochs: int = 1,
    train: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    seed: int = 0,
    evaluates: bool = False,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
    backend: str = "local",
    address: str | None = None,
    resources: Mapping[str, float] | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    insecure: bool = False,
) -> Result[Arrays]:
    """Run a script's main(site) as many participants, against a coordinator in this process: the
    short form of xain.session(participants=xain.simulated(main, ...)) with a loop that only runs
    its rounds.

    main, workers, evaluates, backend, address, resources, state_dir, insecure: see simulated().
    fraction: of the participants that train a round.
    rounds, epochs, seed: of the session. train: settings in round.config.
    settings: other settings of the coordinator by dotted key, such as "aggregation.rule".
    folder: of the coordinator's data, which stays; by default a temporary one.
    progress: whether to print a line for each round to standard error.
    In a script, call it from `if __name__ == "__main__":`, as workers import the script anew.
    Raises ValueError for numbers that make no sense, SessionError if main() fails, for a wrong
    setting, and if nothing can be started; KeyboardInterrupt after everything has been stopped.
    """
    if participants < 1 or not 0 < fraction <= 1:
        raise ValueError(
            f"participants is {participants} and fraction {fraction}; at least one participant "
            "trains, and at most all do"
        )
    spec = simulated(
        main,
        participants,
        backend=backend,
        workers=workers,
        evaluates=evaluates,
        address=address,
        resources=resources,
        state_dir=state_dir,
        insecure=insecure,
    )
    given: dict[str, object] = {
        "rounds.rounds": rounds,
        "rounds.epochs": epochs,
        "rounds.seed": seed,
        "rounds.fraction_participants": fraction,
        "rounds.min_participants": max(1, ceil(round(fraction * participants, 6))),
        **spec.settings,
        "server.port": 0,
        "train": dict(train or {}),
        **(settings or {}),
    }
    try:
        with ExitStack() as stack:
            if folder is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="xain-simulation-"))
            deployment = Embedded(Path(folder), given, None, participants=spec, always_new=True)
            session: Session[Arrays] = Session(deployment, progress=progress, is_scripted=False)
            with session:
                return session.result
    except SessionError as failed:
        failed.args = (str(failed).replace("data_dir=FOLDER", "folder=FOLDER"),)
        raise
