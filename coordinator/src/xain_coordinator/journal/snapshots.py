"""Encode the fold of a session's records as bytes, and decode it exactly.

A snapshot is used only by the version of the program that wrote it: another one may fold the same
records to something else, and the records are still there to be folded.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from itertools import groupby
from typing import Any, TypeVar

from pydantic import TypeAdapter

from xain_coordinator.core.machine.session import Session
from xain_coordinator.core.parts.buffered import BufferedWork
from xain_coordinator.core.parts.evaluation import EvaluationProgress
from xain_coordinator.core.parts.membership import Members
from xain_coordinator.core.parts.round import Round
from xain_coordinator.core.parts.selection_state import SelectionState
from xain_coordinator.core.view.accounts import Account
from xain_coordinator.core.view.history import History
from xain_coordinator.core.view.records import RoundRecord
from xain_coordinator.core.view.session_warnings import Warned
from xain_coordinator.core.vocabulary.values import Base, Evaluation, GlobalModel, WeightsRef
from xain_coordinator.journal.codec import make_adapter, reason
from xain_coordinator.ports import JournalError, Snapshot
from xain_foundation.logs.logger import get_logger

_T = TypeVar(
    "_T", bound=Session | Members | Round | SelectionState | BufferedWork | EvaluationProgress
)
_PARTS = (Members, Round, SelectionState, BufferedWork, EvaluationProgress)  # of a session

log = get_logger(__name__)

# To be raised with every change after which the same events give another session or history, or are
# written in another way; between releases too. A test knows what they give now.
FOLD = 52

# Names repeat so much that more effort saves little. The checksum comes with it: SQLite has none.
_COMPRESSION = 1


@dataclass(frozen=True, slots=True)
class _Series:
    """Models that differ in round, reference and state only. first: in full; a layout can be
    long."""

    first: GlobalModel
    others: tuple[tuple[int, WeightsRef, Mapping[str, WeightsRef]], ...]


@dataclass(frozen=True, slots=True)
class _Base:
    """Start of the training of a round. key: of its model, as in _Body."""

    round: int
    key: str
    epochs: int
    epoch_base: int
    opened_at: float


@dataclass(frozen=True, slots=True)
class _Body:
    """session: without its models, which are among the published ones. model, owed: their keys."""

    num_records: int
    at: float
    session: Session
    rounds: tuple[RoundRecord, ...]
    models: tuple[_Series, ...]
    model: str | None
    owed: tuple[str, ...]
    bases: tuple[_Base, ...]
    accounts: dict[str, Account]
    evaluated: tuple[int, Evaluation] | None
    removed: tuple[int, ...]
    warned: dict[str, Warned]


@cache
def _adapter() -> TypeAdapter[Any]:
    """Adapter between a snapshot and JSON; it takes a moment to make."""
    return make_adapter(_Body)  # takes a moment, which a start without a snapshot need not wait


@cache
def snapshot_version() -> str:
    """Version of the snapshots that this program writes and reads."""
    return f"{version('xain-coordinator')}/{FOLD}"


def encode_snapshot(snapshot: Snapshot) -> tuple[str, bytes]:
    """(version, bytes) of a snapshot. Raises JournalError if decoding them would not give it back:
    a session that goes on from something else would be another one."""
    history, session = snapshot.history, snapshot.session
    without_models = replace(
        session,
        model=None,
        evaluation=replace(session.evaluation, owed=()),
        buffered=replace(session.buffered, bases={}),
        members=replace(session.members, heard={}, unlike={}, lease_floor=0.0),
    )
    body = _Body(
        num_records=snapshot.num_records,
        at=snapshot.at,
        session=_plain(without_models),
        rounds=tuple(history.rounds),
        models=tuple(_series(history)),
        model=None if session.model is None else session.model.ref.key,
        owed=tuple(model.ref.key for model in session.evaluation.owed),
        bases=tuple(
            _Base(round_, base.model.ref.key, base.epochs, base.epoch_base, base.opened_at)
            for round_, base in session.buffered.bases.items()
        ),
        accounts=history.accounts.by_name,
        evaluated=history.evaluated,
        removed=tuple(sorted(history.removed)),
        warned=history.warned.by_kind,
    )
    try:
        text: bytes = _adapter().dump_json((body,), warnings="error")
        again = _decode(text)
    except ValueError as error:
        raise JournalError(f"a snapshot cannot be written: {reason(error)}") from error
    if again != snapshot:
        raise JournalError("a snapshot cannot be written: it would not be read as it is")
    return snapshot_version(), zlib.compress(text, _COMPRESSION)


def require_covered(snapshot: Snapshot, num_records: int) -> None:
    """Check that a snapshot covers no more records than its session has: later records would be
    taken for those. Raises JournalError."""
    if snapshot.num_records > num_records:
        raise JournalError(
            f"a snapshot of {snapshot.num_records} records cannot be written: "
            f"the session has {num_records}"
        )


def usable_snapshot(written_by: str, data: bytes, num_records: int) -> Snapshot | None:
    """Decode a stored snapshot; None, with a line in the log, if this version cannot use it.
    num_records: how many the session has."""
    if written_by != snapshot_version():
        _ignore(f"it was written by version {written_by}, this is {snapshot_version()}")
        return None
    try:
        snapshot = _decode(zlib.decompress(data))
    except (ValueError, zlib.error) as error:
        _ignore(f"it is damaged: {reason(error)}")
        return None
    if snapshot.num_records > num_records:
        _ignore(f"it covers {snapshot.num_records} records, and there are {num_records}")
        return None
    return snapshot


def _ignore(why: str) -> None:
    """Log that a snapshot is not used, and why."""
    log.warning("snapshot_ignored", reason=why, hint="every record of the session is read")


def _plain(value: _T) -> _T:
    """A session, or a part of it, whose mappings are all dicts: others cannot be written."""
    plain: dict[str, Any] = {}
    for name, part in vars(value).items():
        if isinstance(part, _PARTS):
            plain[name] = _plain(part)
        elif isinstance(part, Mapping):
            plain[name] = dict(part.items())
    return replace(value, **plain)


def _series(history: History) -> Iterator[_Series]:
    """Published models, in order, as series of those that are alike."""

    def kind(model: GlobalModel) -> tuple[object, ...]:
        """Parts that all models of a series have in common."""
        return model.dtype, model.shape, model.layout, model.metadata

    for _, (first, *others) in groupby(history.models.values(), kind):
        yield _Series(first, tuple((model.round, model.ref, model.state) for model in others))


def _decode(text: bytes) -> Snapshot:
    """Decode the bytes of a snapshot. Raises ValueError."""
    body: _Body
    (body,) = _adapter().validate_json(text)
    models: dict[str, GlobalModel] = {}
    for series in body.models:
        models[series.first.ref.key] = series.first
        for round_, ref, state in series.others:
            models[ref.key] = replace(series.first, round=round_, ref=ref, state=state)
    history = History(
        rounds=body.rounds,
        models=models,
        accounts=body.accounts,
        rules=body.session.rules,
        evaluated=body.evaluated,
        removed=body.removed,
        warned=body.warned,
    )
    try:
        bases = {
            base.round: Base(models[base.key], base.epochs, base.epoch_base, base.opened_at)
            for base in body.bases
        }
        model = None if body.model is None else models[body.model]
        owed = tuple(models[key] for key in body.owed)
    except KeyError as error:
        raise ValueError(f"the session has model {error}, which was not published") from None
    evaluation = replace(body.session.evaluation, owed=owed)
    buffered = replace(body.session.buffered, bases=bases)
    session = replace(body.session, model=model, evaluation=evaluation, buffered=buffered)
    return Snapshot(body.num_records, body.at, session, history)
