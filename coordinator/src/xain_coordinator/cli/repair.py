"""`xain-coordinator repair`: read the data of a stopped coordinator, report what is damaged, and
drop a damaged update."""

import sys
from contextlib import ExitStack, closing

import typer

from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.machine.decider import decide
from xain_coordinator.core.vocabulary.commands import NoteDamagedUpdates
from xain_coordinator.core.vocabulary.events import SoftEvent
from xain_coordinator.core.vocabulary.values import Update, WeightsRef
from xain_coordinator.extensions.plugins import PluginFailed
from xain_coordinator.extensions.strategies import strategy_of_session
from xain_coordinator.journal.restore import restore
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import (
    JournalError,
    Record,
    Snapshot,
    StoreError,
    WeightsStore,
)
from xain_coordinator.stores.integrity import why_damaged
from xain_coordinator.stores.journalled import store_of_session
from xain_coordinator.stores.opening import open_store
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.logs import logs
from xain_foundation.settings.hints import hint

EXIT_SOUND = 0
EXIT_DAMAGED = 1
EXIT_NOT_CHECKED = 2


def repair(config: CoordinatorConfig, drop_update: str | None = None) -> int:
    """Print a line for the journal, each model, and each accepted update of the open round.

    drop_update: the participant whose damaged update is to be dropped.
    Returns the exit status: EXIT_DAMAGED if anything is damaged, dropped updates aside.
    """
    logs.configure("warning", console=sys.stderr.isatty(), third_party=False)
    try:
        return _repair(config, drop_update)
    except (JournalError, StoreError, PluginFailed, CommandFailed, OSError) as error:
        if isinstance(error, JournalError) and error.why == "damaged":
            _print("damaged", str(error))
            return EXIT_DAMAGED
        typer.echo(f"xain-coordinator repair: {error}", err=True)
        return EXIT_NOT_CHECKED


def _repair(config: CoordinatorConfig, drop_update: str | None) -> int:
    """Check the journal and the objects of its latest session, and drop an update. Returns the exit
    status. Raises the errors that repair() prints."""
    path = config.journal.path
    if not path.exists():
        raise CommandFailed(f"there is no journal at {path}")
    with ExitStack() as stack:
        journal = stack.enter_context(closing(SqliteJournal(path)))
        num_sessions, num_records = journal.check()
        _print("ok", f"journal {path}: {num_records} records, sessions: {num_sessions}")
        restored = restore(journal)
        if restored is None:
            return EXIT_SOUND
        last, _ = restored
        opened = stack.enter_context(closing(open_store(config.storage)))
        store = store_of_session(opened, journal, last.session.session_id)
        if not _is_of_session(store, last):
            session_id, location = last.session.session_id, config.storage.location
            raise CommandFailed(
                f"nothing of session {session_id} is in {location}, and nothing was checked: "
                + hint("xain-coordinator", "--config FILE")
                + ", the one that the coordinator has"
            )
        damaged = _look(store, last)
        if drop_update is None:
            return EXIT_DAMAGED if damaged else EXIT_SOUND
        update = _update_of(last, drop_update, damaged)
        _drop(journal, last, update, damaged.pop(update.weights.ref.key))
        return EXIT_DAMAGED if damaged else EXIT_SOUND


def _is_of_session(store: WeightsStore, last: Snapshot) -> bool:
    """Whether the store may be the session's: it has an object, or the session has no model yet. In
    another store every model would be reported as damaged."""
    return not last.history.models or any(True for _ in store.keys(""))


def objects_of(last: Snapshot) -> dict[str, tuple[str, WeightsRef]]:
    """Objects that a session goes on from, or shows: all models, the state of the optimiser, and
    the open round's accepted updates. Returns what each is, and its reference, by key."""
    refs: dict[str, tuple[str, WeightsRef]] = {}
    for model in last.history.models.values():
        refs[model.ref.key] = ("model", model.ref)
    if last.session.model is not None:
        for name, ref in last.session.model.state.items():
            refs[ref.key] = (f"optimiser's {name}", ref)
    round_ = last.session.open_round
    for update in round_.updates.values() if round_ is not None else ():
        ref = update.weights.ref
        refs[ref.key] = (f"update of {update.participant_id}", ref)
    return refs


def _look(store: WeightsStore, last: Snapshot) -> dict[str, str]:
    """Read the session's objects and print a line for each. Returns why some are damaged, by
    key."""
    damaged = {}
    for what, ref in objects_of(last).values():
        why = why_damaged(store, ref)
        _print("damaged" if why else "ok", f"{what}: {why or ref.key}")
        if why:
            damaged[ref.key] = why
    return damaged


def _update_of(last: Snapshot, participant_id: str, damaged: dict[str, str]) -> Update:
    """The damaged update of a participant. Raises CommandFailed if there is none."""
    round_ = last.session.open_round
    update = None if round_ is None else round_.updates.get(participant_id)
    if update is None:
        raise CommandFailed(f"the open round has no accepted update of {participant_id!r}")
    if update.weights.ref.key not in damaged:
        raise CommandFailed(f"the update of {participant_id!r} is not damaged; nothing was dropped")
    return update


def _drop(journal: SqliteJournal, last: Snapshot, update: Update, why: str) -> None:
    """Record that an update is dropped, as a running coordinator would. The next start goes on from
    there."""
    strategy = strategy_of_session(last.session.rules)
    reason = f"dropped by an operator: {why}"
    command = NoteDamagedUpdates({update.weights.ref.key: reason})
    decision = decide(last.session, command, last.at, strategy)
    events = [event for event in decision.events if not isinstance(event, SoftEvent)]
    journal.append([Record(last.at, event) for event in events])
    _print("dropped", f"update of {update.participant_id} in round {last.session.round}")


def _print(outcome: str, what: str) -> None:
    """Print a line of the report."""
    typer.echo(f"{outcome:8} {what}")
