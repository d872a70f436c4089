"""`xain-coordinator backup` and `restore`: a copy of all that a coordinator goes on from.

    DIR/journal.sqlite  the journal
    DIR/weights         the objects that it names, as the embedded store keeps them, whatever store
                        they come from

The journal is copied first, and the objects that this copy names afterwards. An object is durable
before the journal names it, and never changes, so that each of them is there by then, however long
the copying takes; and the coordinator removes none meanwhile. The other way round, the journal
could name objects that came after theirs were copied. The journal gets its name last: a folder
without it is no whole backup.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Timer
from typing import Any

import grpc
import typer

from xain_coordinator.aggregation.publishing import copy_object
from xain_coordinator.cli.repair import (
    EXIT_DAMAGED,
    EXIT_NOT_CHECKED,
    EXIT_SOUND,
    objects_of,
    repair,
)
from xain_coordinator.config.coordinator import CoordinatorConfig
from xain_coordinator.core.vocabulary.values import WeightsRef
from xain_coordinator.extensions.plugins import PluginFailed
from xain_coordinator.journal.restore import restore_session
from xain_coordinator.journal.sqlite import SqliteJournal
from xain_coordinator.ports import (
    JournalError,
    StoreError,
    StoreUnavailable,
    WeightsStore,
)
from xain_coordinator.server.operators_socket import socket_of
from xain_coordinator.stores.files import FileStore
from xain_coordinator.stores.integrity import why_damaged
from xain_coordinator.stores.opening import open_store
from xain_coordinator.stores.prefixed import PrefixedStore
from xain_foundation.durable import make_directory, sync_directory
from xain_foundation.exit_statuses import CommandFailed
from xain_foundation.logs import logs
from xain_foundation.net.channels import open_channel
from xain_foundation.net.grpc_calls import Cancellable, details_of
from xain_wire.fl.access_pb2 import CopyJournalRequest
from xain_wire.fl.access_pb2_grpc import ControlStub

JOURNAL, WEIGHTS = "journal.sqlite", "weights"
# The copy of a journal is made in little more time than it takes to read it.
COPY_S = 600.0


def back_up(config: CoordinatorConfig, folder: Path) -> int:
    """Make a backup in a new folder. Returns the exit status: EXIT_DAMAGED if an object is missing
    or damaged; all others are copied then."""
    return _run("backup", lambda: _back_up(config, folder))


def restore(config: CoordinatorConfig, folder: Path) -> int:
    """Put a backup where a configuration has its journal and weights, and check it. Returns the
    exit status of `repair`; EXIT_DAMAGED also if the backup lacks an object of an earlier
    session."""

    def put_back() -> int:
        lost = _restore(config, folder)
        # `repair` looks at the latest session only.
        return repair(config) or (EXIT_DAMAGED if lost else EXIT_SOUND)

    return _run("restore", put_back)


def _run(command: str, work: Callable[[], int]) -> int:
    """Do a command's work and return its exit status; an error is printed, and its status is
    EXIT_NOT_CHECKED."""
    logs.configure("warning", console=sys.stderr.isatty(), third_party=False)
    try:
        return work()
    except (JournalError, StoreError, PluginFailed, CommandFailed, OSError) as error:
        typer.echo(f"xain-coordinator {command}: {error}", err=True)
        return EXIT_NOT_CHECKED


def _back_up(config: CoordinatorConfig, folder: Path) -> int:
    """Copy the journal, which is renamed last, and the objects that it names. Returns the exit
    status. Raises CommandFailed and the errors of stores and journal."""
    if not config.journal.path.exists():
        raise CommandFailed(f"there is no journal at {config.journal.path}")
    if folder.exists() and any(folder.iterdir()):
        raise CommandFailed(f"{folder} is not empty; name a new folder")
    make_directory(folder)
    partial = folder / f"{JOURNAL}.partial"
    with ExitStack() as stack:
        stack.enter_context(_journal_copied(config.journal.path, partial))
        source = stack.enter_context(closing(open_store(config.storage)))
        target = stack.enter_context(closing(FileStore(folder / WEIGHTS)))
        journal = stack.enter_context(closing(SqliteJournal(partial)))
        num_copied, lost = _copy_named(journal, source, target)
    partial.rename(folder / JOURNAL)
    sync_directory(folder)
    typer.echo(f"{folder} has the journal and {num_copied} objects")
    return EXIT_DAMAGED if lost else EXIT_SOUND


def _copy_named(
    journal: SqliteJournal, source: WeightsStore, target: WeightsStore
) -> tuple[int, int]:
    """Copy the objects that a journal names, unless the target has them, as a bucket does that
    outlived its journal. Print a line for each that the source has not, or not sound.

    Returns how many objects the target has, and how many it lacks. Raises StoreUnavailable.
    """
    num_copied = lost = 0
    for session_id, ref in _named_by(journal):
        held, wanted = PrefixedStore(source, session_id), PrefixedStore(target, session_id)
        try:
            if why_damaged(wanted, ref):
                wanted.delete(ref.key)
                copy_object(held, ref, wanted, ref.key)
        except StoreUnavailable:
            raise
        except StoreError as error:
            typer.echo(f"lost     {session_id}/{ref.key}: {error}")
            lost += 1
        else:
            num_copied += 1
    return num_copied, lost


def _named_by(journal: SqliteJournal) -> Iterator[tuple[str, WeightsRef]]:
    """Objects of all sessions that lie in the weights store, with their sessions."""
    held = set(journal.object_keys())  # of the latest session, in the journal itself
    latest = journal.session_ids()[-1:]
    for session_id in journal.session_ids():
        records = journal.records_of(session_id)
        assert records is not None, "the journal has just named it"
        for key, (_, ref) in objects_of(restore_session(records)).items():
            if not (session_id in latest and key in held):
                yield session_id, ref


@contextlib.contextmanager
def _journal_copied(path: Path, target: Path) -> Iterator[None]:
    """Copy a journal, of a coordinator that runs or of one that does not. Until the end of the
    block none of its objects is removed. Raises JournalError and CommandFailed."""
    operators_socket = open_channel(f"unix:{socket_of(path)}")
    with operators_socket, ExitStack() as until_end:
        call = ControlStub(operators_socket).CopyJournal(CopyJournalRequest())
        until_end.callback(Cancellable(call).cancel)
        giving_up = Timer(COPY_S, call.cancel)
        giving_up.start()
        try:
            copy = next(call).path
        except grpc.RpcError as error:
            copy = _unless_refused(error, path)
        except StopIteration:
            raise CommandFailed("the coordinator has ended meanwhile; try again") from None
        finally:
            giving_up.cancel()
        if copy:
            _copy_file(Path(copy), target)
            yield
            return
    # The coordinator does not run: the lock of its journal is free, and taken so that nobody starts
    # it meanwhile.
    with closing(_unused(path)) as journal:
        journal.copy_to(target)
        yield


def _unless_refused(error: Any, path: Path) -> str:
    """Check that a call failed because no process listens. Returns "", for no copy. error: of the
    call, a grpc.RpcError. Raises CommandFailed if a coordinator has answered, or hangs."""
    if error.code() is grpc.StatusCode.CANCELLED:
        raise CommandFailed(
            f"the coordinator has made no copy of {path} in {COPY_S:g} s: it hangs, or another "
            "backup is under way; try again"
        ) from None
    is_answer = "grpc-status-details-bin" in dict(error.trailing_metadata() or ())
    if is_answer or error.code() is not grpc.StatusCode.UNAVAILABLE:
        raise CommandFailed(details_of(error)) from None
    return ""


def _unused(path: Path) -> SqliteJournal:
    """The journal of a coordinator that does not run. Raises JournalError and CommandFailed."""
    try:
        return SqliteJournal(path)
    except JournalError as error:
        if error.why != "in use":
            raise
        raise CommandFailed(
            f"the journal {path} is in use, and nobody answers at {socket_of(path)}: a coordinator "
            "that starts or stops makes no copy; try again when it serves or has ended"
        ) from None


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file and sync the copy."""
    shutil.copyfile(source, target)
    with target.open("rb") as copied:
        os.fsync(copied.fileno())


def _restore(config: CoordinatorConfig, folder: Path) -> int:
    """Copy the journal and the objects of a backup to where a configuration has them. Returns how
    many objects the backup lacks."""
    path = config.journal.path
    if not (folder / JOURNAL).exists():
        raise CommandFailed(f"{folder} has no {JOURNAL}: it is no whole backup")
    if path.exists():
        raise CommandFailed(f"there is a journal at {path} already; move its folder away first")
    make_directory(path.absolute().parent)
    partial = path.with_name(f"{path.name}.partial")
    _copy_file(folder / JOURNAL, partial)
    with ExitStack() as stack:
        source = stack.enter_context(closing(FileStore(folder / WEIGHTS)))
        target = stack.enter_context(closing(open_store(config.storage)))
        journal = stack.enter_context(closing(SqliteJournal(partial)))
        _, lost = _copy_named(journal, source, target)
    partial.rename(path)
    sync_directory(path.absolute().parent)
    return lost
