"""xain.session() and xain.connect()."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Protocol,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    overload,
)

import numpy as np
from numpy.typing import NDArray

from xain.result import SessionError
from xain_foundation.commands import split_host_port
from xain_session.deployments import Elsewhere, Embedded, Participants
from xain_session.given import settings_of
from xain_session.round import plain
from xain_session.session import Resume, Session
from xain_session.trackers import Tracker

if TYPE_CHECKING:
    from xain.weights import Declared

DATA_DIR: Final = "xain-data"


Array: TypeAlias = NDArray[np.floating[Any]]
T = TypeVar("T", covariant=True)


class Module(Protocol[T]):
    """A model of PyTorch, or another one with named tensors."""

    def state_dict(self) -> Mapping[str, T]: ...


class Options(TypedDict, total=False):
    """Arguments of session() that are given by name."""

    rounds: int
    min_participants: int
    fraction: float
    epochs: int
    rule: object
    controller: object
    pacing: object
    metric: str
    train: Mapping[str, object] | None
    scaffold: bool
    settings: Mapping[str, object] | None
    seed: int
    participants: Participants | None
    trackers: Sequence[Tracker]
    data_dir: str | os.PathLike[str]
    address: str | None
    tls: str | os.PathLike[str] | None
    resume: Resume
    linger_s: float
    progress: bool


class Driving(TypedDict, total=False):
    """Arguments of connect() that are given by name."""

    tls: str | os.PathLike[str] | None
    rule: str | None
    trackers: Sequence[Tracker]
    data_dir: str | os.PathLike[str]
    progress: bool


@overload
def session(
    model: Module[T] | Mapping[str, T] | Callable[[], Module[T] | Mapping[str, T]],
    **options: Unpack[Options],
) -> Session[Mapping[str, T]]: ...


@overload
def session(model: Array | Callable[[], Array], **options: Unpack[Options]) -> Session[Array]: ...


@overload
def session(
    model: str | os.PathLike[str] | None = None, **options: Unpack[Options]
) -> Session[Mapping[str, Array]]: ...


def session(
    model: object = None,
    *,
    rounds: int = 10,
    min_participants: int = 1,
    fraction: float = 1.0,
    epochs: int = 1,
    rule: object = "weighted_average",
    controller: object = "random",
    pacing: object = None,
    metric: str = "",
    train: Mapping[str, object] | None = None,
    scaffold: bool = False,
    settings: Mapping[str, object] | None = None,
    seed: int = 0,
    participants: Participants | None = None,
    trackers: Sequence[Tracker] = (),
    data_dir: str | os.PathLike[str] = DATA_DIR,
    address: str | None = None,
    tls: str | os.PathLike[str] | None = None,
    resume: Resume = "same",
    linger_s: float = 2.0,
    progress: bool = True,
) -> Session[Any]:
    """Run a coordinator in this process, and drive its session round by round:

        with xain.session(model, rounds=20, min_participants=2) as session:
            for round in session:
                round.configure(lr=0.1 * 0.95**round.number)
                record = round.run()
                record.evaluate(accuracy=test(model, record.weights))
        session.export("model.safetensors")

    What the script decides is in the coordinator's journal. Killed at any line and started again,
    it goes on in the same round: what was configured and evaluated stays, the rest of the body runs
    again. When the `with` has come to its end, the next start begins another session.

    model: what the session begins with: a torch module, its state, arrays by name, a flat vector, a
        function that returns one of them, the path or URL of a file of export(), or "SESSION/best"
        (or a number, or last) of this folder; None: the sites make it.
    rounds, epochs, seed: of the session; epochs: of a round at a site.
    min_participants: sites that a round needs. fraction: of those connected that take part.
    rule, controller, pacing: how updates become a model, who takes part, and when a round is over:
        a name, or an object of the script's own; rule also as a function of (updates, weights).
        Their code belongs to the session: after a change it goes on with resume="changed" alone.
    metric: of the evaluations, by which the best model is chosen and patience counts.
    train: settings of all rounds, in round.config at the sites.
    scaffold: whether the model gets a control variate, for sites with xain.rounds(scaffold=True).
        Where the sites make the model, or it is an earlier one, it has one if it was made with one.
    settings: other settings of the coordinator by dotted key, such as {"rounds.deadline_s": 600}.
    participants: simulated ones, see xain.simulated().
    trackers: objects that are told of each round, such as xain.TensorBoard("runs").
    data_dir: folder of journal and models. address: HOST:PORT for the sites; by default port 50051
        of this machine alone, and any free port with simulated participants.
    tls: a folder of certificates, which an address beyond this machine needs.
    linger_s: how long the coordinator answers after the last site has left.
    progress: whether to print a line for each round to standard error.
    Raises SessionError with one sentence for what cannot be done, here and at the `with`.
    """
    from xain.weights import declare

    first: Declared | str | None = None
    if isinstance(model, str | os.PathLike):
        first = os.fspath(model)
    elif model is not None:
        first = replace(declare(model), has_control=scaffold)
    if scaffold and (first is None or isinstance(first, str) or not first.layout):
        raise SessionError(
            "scaffold=True needs a model with named tensors: xain.session(model, scaffold=True); "
            "without one the sites alone say it, and an earlier model has its control variate"
        )
    folder = Path(data_dir).absolute()  # wherever the script goes
    given: dict[str, Any] = {
        "rounds.scripted": True,
        "rounds.rounds": rounds,
        "rounds.epochs": epochs,
        "rounds.seed": seed,
        "rounds.min_participants": min_participants,
        "rounds.fraction_participants": fraction,
        **({"evaluate.metric": metric} if metric else {}),
        **({"tls.folder": os.fspath(tls)} if tls is not None else {}),
    }
    if resume not in get_args(Resume):
        raise SessionError(f'resume is {resume!r}; it must be "same" or "changed"')
    may_change = resume == "changed"
    for what, one in (("rule", rule), ("controller", controller), ("pacing", pacing)):
        if one is not None:
            given |= settings_of(what, one, may_change=may_change)
    if train:
        given["train"] = plain(train, " of train")
    if participants is not None and tls is not None:
        raise SessionError(
            "simulated participants have no certificates: a session with them takes no tls"
        )
    if participants is not None:
        given |= {"server.port": 0, **participants.settings}
    if address is not None:
        host, port = split_host_port(address)
        given["server.host"] = host
        if port is not None:
            given["server.port"] = int(port) if port.isdecimal() else port
    given |= settings or {}
    deployment = Embedded(
        folder,
        given,
        first,
        participants=participants,
        linger_s=linger_s,
        may_change=may_change,
    )
    declared = None if isinstance(first, str) else first
    return Session(deployment, declared, trackers=trackers, progress=progress)


@overload
def connect(
    address: str,
    model: Module[T] | Mapping[str, T] | Callable[[], Module[T] | Mapping[str, T]],
    **options: Unpack[Driving],
) -> Session[Mapping[str, T]]: ...


@overload
def connect(
    address: str, model: Array | Callable[[], Array], **options: Unpack[Driving]
) -> Session[Array]: ...


@overload
def connect(
    address: str, model: None = None, **options: Unpack[Driving]
) -> Session[Mapping[str, Array]]: ...


def connect(
    address: str,
    model: object = None,
    *,
    tls: str | os.PathLike[str] | None = None,
    rule: str | None = None,
    trackers: Sequence[Tracker] = (),
    data_dir: str | os.PathLike[str] = DATA_DIR,
    progress: bool = True,
) -> Session[Any]:
    """Drive the session of a coordinator that runs elsewhere with `rounds.scripted = true`, as an
    operator: the same loop as in xain.session().

    address: HOST:PORT, or the path of the Unix socket beside its journal, journal.sock.
    tls: a folder with the operator's certificate, which HOST:PORT needs.
    model: whose tensors record.weights are like; the session's first model is its coordinator's.
    trackers: as for xain.session(). data_dir: folder of their files, which say which round each
        has taken; without trackers there is none. Scripts of two sessions take two.
    Raises SessionError.
    """
    from xain.weights import declare

    if rule is not None:
        raise SessionError(
            "xain.connect() takes no rule: it is a setting of that coordinator, "
            "aggregation.rule, and an object of this script cannot be sent to it"
        )
    declared = None if model is None else declare(model)
    deployment = Elsewhere(address, tls, Path(data_dir).absolute())
    return Session(deployment, declared, trackers=trackers, progress=progress)
